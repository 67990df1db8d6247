"""Random requests: every backend refuses by name or equals the reference, and refusing is no way to pass.

`VATTN_FUZZ_SEED` chooses the requests, `VATTN_FUZZ_EXAMPLES` how many; a failure prints the command that repeats it.
The long mode goes on after a failure and counts: `python -m tests.conformance.record --backend NAME --device cpu
--seconds 3600 --most 100000`, with `TRITON_INTERPRET=1` for Triton's interpreter, with `--device cuda` on a GPU.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.conformance.compare import compare_cache_update, run_and_compare
from tests.conformance.fuzz import count, fuzz_examples, fuzz_seed, run_fuzz
from tests.conformance.make_acceptance import accepted_by, load_table
from tests.conformance.mutations import every_kind, mutate
from tests.conformance.requests import (
    _EXCLUSIVE,
    DEVICES,
    PAIRS,
    PLAIN,
    SMALL,
    Request,
    Size,
    config_with,
    draw_request,
)
from tests.support import contents, usable
from vattn.backends import selector
from vattn.backends.base import Backend
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo
from vattn.errors import VattnError

Change = Callable[[Any], tuple[str, Any]]

TABLE = load_table()
BACKENDS = selector.backend_names()

MINIMUM_SHARE = 0.85
"""Of the drawn requests a backend accepts at least this share; the rest are sizes, types and features nobody runs."""

EXAMPLES = {"TORCH_SDPA": 200, "TRITON_ATTN": 12, "TREE_ATTN": 2}
"""Examples of `make test`: a few seconds. The interpreter takes about half a second for each."""

PARTS = 12


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Name of a backend that can be used in this process."""
    return usable(request.param)


def device_kind(device: str) -> str:
    """Return the device's name in the acceptance table."""
    info = DeviceInfo.of(device)
    if info.type != "cuda":
        return "interpreter" if info.triton_interpreter else "cpu"
    known = [name for name, other in DEVICES.items() if other.type == "cuda" and other.capability <= info.capability]
    return known[-1]


def must_accept(backend: str, device: str) -> list[tuple[str, str]]:
    """Return the pairs of features that a backend must accept: what the table lists.

    No table lists a backend that runs what its package can: for it, what the capabilities of the package allow.
    """
    kind = device_kind(device)
    if kind in TABLE[backend]:
        pairs = TABLE[backend][kind]["pairs"]
        return [(first, second) for first, others in pairs.items() for second in others.split()]
    accepts, base = acceptance_test(backend, device), PLAIN.replace(backend=backend)
    sizes = selector.get_backend(backend).capabilities.head_sizes
    if base.head_size not in sizes:
        base = base.replace(head_size=sizes.values[0], head_size_v=sizes.values[0])
    return [pair for pair in PAIRS if accepts(config_with(frozenset(pair), base))]


def acceptance_test(backend: str, device: str) -> Callable[[AttentionConfig], bool]:
    """Return what says whether a backend accepts a config on a device."""
    reasons, info = selector.get_backend(backend).reasons, DeviceInfo.of(device)
    return lambda config: not reasons(config, info)


def search(backend: str, device: str) -> Callable[[AttentionConfig], bool] | None:
    """Return what makes most drawn requests acceptable, for backends that exclude many combinations."""
    return None if device_kind(device) in TABLE[backend] else acceptance_test(backend, device)


@pytest.mark.parametrize("kind", DEVICES)
def test_accepts_what_the_table_lists(backend: str, kind: str) -> None:
    if not TABLE[backend]:
        pytest.skip("runs what its package can, so no table lists it")
    listed, found = TABLE[backend].get(kind, {}), accepted_by(backend, DEVICES[kind])
    for section, lines in found.items():
        for line, names in lines.items():
            before, now = set(listed.get(section, {}).get(line, "").split()), set(names.split())
            assert not before - now, f"{backend} on {kind} refuses {section} {line}: {sorted(before - now)}"
            assert not now - before, (
                f"{backend} on {kind} has learned {section} {line}: {sorted(now - before)}; "
                "run python -m tests.conformance.make_acceptance"
            )


def test_the_table_lists_every_backend() -> None:
    assert list(TABLE) == list(BACKENDS)
    for name in BACKENDS:
        if device_kind("cpu") in TABLE[name]:
            # Where every request must ask for a feature, only pairs with it are accepted.
            required = selector.get_backend(name).capabilities.required_features
            assert len(must_accept(name, "cpu")) > (10 if required else 60)


@pytest.mark.sample(20)
def test_most_drawn_requests_are_accepted_with_every_listed_pair(backend: str, device: str) -> None:
    """Drawing is cheap: this counts many requests without running them."""
    counts: Counter[str] = Counter()
    rng, reasons = random.Random(fuzz_seed()), selector.get_backend(backend).reasons
    info = DeviceInfo.of(device)
    for _ in range(1500):
        request = draw_request(rng, backend, accepts=search(backend, device))
        count(request, not reasons(request.config, info), counts)
    assert counts["accepted"] >= MINIMUM_SHARE * counts["requests"]
    seldom = [
        (a, b, counts[f"{a}+{b}"])
        for a, b in must_accept(backend, device)
        if counts[f"{a}+{b}"] < (4 if TABLE[backend] else 1)
    ]
    assert not seldom, "pairs of features that were accepted fewer than 4 times in 1500"


def check_fuzz(backend: str, device: str, examples: int, size: Size = SMALL, part: int = 0) -> None:
    """Run the fuzz with every listed pair in turn; too few acceptances fail too."""
    pairs = must_accept(backend, device)
    counts = run_fuzz(backend, device, examples, size, pairs, part=part, accepts=search(backend, device))
    print(f"{backend} on {device}, seed {fuzz_seed()}: {counts['accepted']} of {counts['requests']} accepted")
    # Three standard deviations below the share of the long run.
    least = MINIMUM_SHARE * examples - 3 * (examples * MINIMUM_SHARE * (1 - MINIMUM_SHARE)) ** 0.5
    assert counts["accepted"] >= least
    rounds = examples // len(pairs)
    refused = [pair for pair in pairs if counts["+".join(pair)] < rounds / 2]
    assert not refused, f"pairs of features accepted fewer than {rounds / 2} times though {rounds} required them"


def test_refused_or_equal_to_the_reference(backend: str) -> None:
    check_fuzz(backend, "cpu", fuzz_examples(EXAMPLES.get(backend, 30)))


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
def test_refused_or_equal_to_the_reference_on_a_gpu(backend: str, part: int) -> None:
    """`VATTN_FUZZ_EXAMPLES` are shared among the parts; sequences span many blocks and tiles."""
    examples = fuzz_examples(240 if backend == "TORCH_SDPA" else 144)
    check_fuzz(backend, "cuda", max(1, examples // PARTS), Size(seq_len=700, reqs=8, wide_heads=0.3), part)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "examples"), [("TORCH_SDPA", 2000), ("TRITON_ATTN", 60)])
def test_more_are_refused_or_equal_to_the_reference(name: str, examples: int) -> None:
    check_fuzz(usable(name), "cpu", fuzz_examples(examples), part=1)


@pytest.mark.long
def test_thousands_are_refused_or_equal_to_the_reference(backend: str) -> None:
    check_fuzz(backend, "cpu", fuzz_examples({"TORCH_SDPA": 10000}.get(backend, 2000)), Size(seq_len=90, reqs=8))


def check_bad_input(request: Request, device: str, change: Change, cache_update: bool) -> str:
    """Get one argument wrong: the op raises an error of ours and writes nothing, or it is right for what it was given.

    Args:
        change: turns the right arguments into the wrong ones, with words for what it did.

    Returns:
        The name of the error's class, `""` if there was none.
    """
    batch = request.batch(device)
    what, args = change(request.cache_update(device) if cache_update else batch.args)
    before = contents(args)
    failed = None
    try:
        if cache_update:
            compare_cache_update(args, AttentionConfig.parse(args.config))
        else:
            AttentionConfig.parse(args.config)
            batch.args = args
            run_and_compare(batch)
    except VattnError as error:
        failed = error
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}\n{request.line(device)}") from error
    if failed is None:
        return ""
    assert failed.got, what
    assert failed.allowed, f"{what}: {failed}"
    changed = [name for name, old in before.items() if not torch.equal(old, contents(args)[name])]
    assert not changed, f"{what}: {failed}, but {changed} changed\n{request.line(device)}"
    return type(failed).__name__


# The checks come before the backend, so that those which run another's code add nothing.
OWN_CODE = [
    pytest.param(name, marks=[pytest.mark.long] if name in ("TREE_ATTN", "DIFFERENTIAL_FLASH_ATTN") else [])
    for name in BACKENDS
]


@pytest.mark.parametrize("backend", OWN_CODE, indirect=True)
@pytest.mark.parametrize("op", ["attention", "kv_cache_update"])
def test_bad_input_is_refused_and_nothing_is_written(backend: str, op: str, device: str) -> None:
    rng = random.Random(fuzz_seed())
    classes: Counter[str] = Counter()
    cache_update = op == "kv_cache_update"
    examples = 200 if backend == "TORCH_SDPA" else 40
    last = None
    for seed in range(examples):
        request = draw_request(rng, backend, (), Size(seq_len=20, reqs=3, wide_heads=0.0), search(backend, device))
        if selector.get_backend(backend).reasons(request.config, DeviceInfo.of(device)):
            continue
        if cache_update and request.config.block_size == 0:
            continue
        last = request
        change = partial(mutate, rng=random.Random(seed))
        classes[check_bad_input(request, device, change, cache_update)] += 1
    assert last is not None, "no request was accepted"
    # Chance may leave a kind of mistake out: one request gets them all.
    args = last.cache_update(device) if cache_update else last.batch(device).args
    for index in range(len(every_kind(args))):
        classes[check_bad_input(last, device, lambda right, i=index: every_kind(right)[i], cache_update)] += 1
    expected = {"ShapeError", "DtypeError", "StrideError", "DeviceError", "ScaleError", "GradientError", "ConfigError"}
    assert expected <= set(classes), classes


@pytest.mark.parametrize("name", BACKENDS)
def test_a_pair_of_features_is_refused_by_data_alone(name: str) -> None:
    """What runs each of two features and not both has an `Exclusion` that says so; no code decides."""
    made, device = selector.get_backend(name), DEVICES["sm_90"]
    can, base = made.capabilities, PLAIN.replace(backend=name)
    required = frozenset(can.required_features)
    whys = {rule.why for rule in can.exclusions}

    def limits(*features: str) -> list[str]:
        found = Backend.limits(made, config_with(required | set(features), base), device)
        # Of the value width that a feature comes with, and data too.
        return [reason for reason in found if not reason.startswith("head_size")]

    for first, second in PAIRS:
        if any({one, other} in _EXCLUSIVE for one in (first, second) for other in required):
            continue
        alone = {*limits(first), *limits(second)}
        assert set(limits(first, second)) - alone <= whys, (first, second)
