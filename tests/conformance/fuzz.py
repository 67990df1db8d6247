"""Run random requests on one backend: each is refused by name or equals the reference.

As a command it runs the one request that a failure printed:

    python -m tests.conformance.fuzz --device cpu --lens 1:9,3:5 --padding 3:2 --table fit --seed 7 'vattn1 ...'
"""

from __future__ import annotations

import argparse
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from tests.conformance.compare import compare_cache_update, refusal, run_and_compare
from tests.conformance.requests import PAIRS, SMALL, Request, Size, draw_request, simpler
from vattn.config.attention import AttentionConfig
from vattn.config.features import requested_features
from vattn.quantization.formats import KV_FORMATS


def fuzz_seed() -> int:
    """Return the seed of this run, `VATTN_FUZZ_SEED`."""
    return int(os.environ.get("VATTN_FUZZ_SEED", "1"))


def fuzz_examples(default: int) -> int:
    """Return how many examples to run, `VATTN_FUZZ_EXAMPLES` or the default."""
    return int(os.environ.get("VATTN_FUZZ_EXAMPLES", str(default)))


def check_request(request: Request, device: str) -> bool:
    """Run a request's attention and a cache update of the same config; return whether the backend accepted.

    Raises:
        Mismatch: a result differs from the reference, or a refusal does not give its reasons.
    """
    config = request.config
    rows = config.block_size * config.num_kv_heads
    if rows and KV_FORMATS[config.kv_cache_dtype].block_problems(rows, config.head_size, config.head_size_v):
        # There is no such cache to make a batch with.
        assert refusal(config, device), "accepted, though blocks cannot hold the format"
        return False
    accepted = run_and_compare(request.batch(device))
    if request.config.block_size and accepted:
        compare_cache_update(request.cache_update(device), request.config)
    return accepted


def failure_of(run: Callable[[], object]) -> str | None:
    """Return what went wrong, `None` if nothing did."""
    try:
        run()
    except (Exception, pytest.fail.Exception) as error:  # a fuzz finds errors of any class
        return f"{type(error).__name__}: {error}"
    return None


def shrink(request: Request, device: str, attempts: int) -> Request:
    """Return a simpler request that fails too, after at most so many runs."""
    for candidate in simpler(request):
        if attempts <= 0:
            break
        attempts -= 1
        if not refusal(candidate.config, device) and failure_of(lambda: check_request(candidate, device)):  # noqa: B023
            return shrink(candidate, device, attempts)
    return request


def run_fuzz(
    backend: str,
    device: str,
    examples: int,
    size: Size = SMALL,
    pairs: Sequence[tuple[str, ...]] = PAIRS,
    attempts: int = 40,
    part: int = 0,
    accepts: Callable[[AttentionConfig], bool] | None = None,
) -> Counter[str]:
    """Run random requests; each of the pairs of features is required by one of every `len(pairs)` of them.

    Every part draws requests of its own; `accepts` as in `draw_request`.

    Returns:
        How many were run (`"requests"`) and accepted (`"accepted"`), and how many accepted ones had each pair `"a+b"`.

    Raises:
        AssertionError: a request failed; the text has the command that repeats it.
    """
    counts: Counter[str] = Counter()
    rng = random.Random(f"{fuzz_seed()} {backend} {part}")
    required = list(pairs)
    rng.shuffle(required)
    for example in range(examples):
        request = draw_request(rng, backend, required[example % len(required)], size, accepts)
        problem = failure_of(lambda: count(request, check_request(request, device), counts))  # noqa: B023
        if problem:
            small = shrink(request, device, attempts)
            problem = failure_of(lambda: check_request(small, device)) or problem  # noqa: B023
            raise AssertionError(f"{problem}\nrepeat with: {small.line(device)}\nfound as:    {request.line(device)}")
    return counts


def count(request: Request, accepted: bool, counts: Counter[str]) -> None:
    """Add one request and, if it was accepted, its pairs of features to the counts."""
    counts["requests"] += 1
    counts["accepted"] += accepted
    asked = requested_features(request.config)
    if accepted:
        counts.update(f"{a}+{b}" for a, b in PAIRS if a in asked and b in asked)


def main() -> None:
    """Run the request that the command line describes."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.fuzz")
    parser.add_argument("config")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lens", required=True, help="query:sequence lengths, by commas")
    parser.add_argument("--padding", default="0:0", help="padding tokens:requests")
    parser.add_argument("--table", default="fit", choices=("fit", "narrow", "broken"))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    lens = tuple((int(q), int(s)) for q, s in (pair.split(":") for pair in given.lens.split(",")))
    tokens, reqs = map(int, given.padding.split(":"))
    request = Request(AttentionConfig.parse(given.config), lens, (tokens, reqs), given.table, given.seed)
    print("accepted and equal" if check_request(request, given.device) else "refused by name")


if __name__ == "__main__":
    main()
