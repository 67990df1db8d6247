"""Time what the host does for a step of the generator: the scheduler, metadata, inputs, and what becomes of tokens.

    python -m benchmarks.models.scheduler --json out.json

256 requests of 16 to 4096 tokens, 128 new ones each, on a CPU, with a stub for a model: it returns logits that exist
already. Times are those that the thread computes, in microseconds a step; other work on the machine makes them longer,
since caches are shared. On a GPU the host's work hides behind the step before it, while it is shorter than that.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import vattn
from benchmarks.harness import add_row, machine, parser_of
from vattn.generation import model_runner

VOCABULARY = 64


class Stub(torch.nn.Module):
    """One layer that has a cache, and logits that are there already."""

    def __init__(self, windows: list[int | None], num_tokens: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            vattn.Attention(1, 16, 0.25, per_layer_sliding_window=window, prefix=f"layers.{index}")
            for index, window in enumerate(windows)
        )
        self.vocab_size = VOCABULARY
        self.kv_cache = vattn.allocate_kv_cache(
            self.layers, num_blocks=num_tokens // 16, dtype=torch.bfloat16, hybrid=len(windows) > 1
        )
        self.logits = torch.randn(8192, VOCABULARY)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return a row of logits for each row that is asked for."""
        return self.logits[: rows.shape[0]]


class Parts:
    """Adds up the thread time of some methods, each without what it calls of the others."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Time a method of an object from now on."""
        run: Callable[..., Any] = getattr(owner, method)
        times = self.seconds.setdefault(name, [])

        def timed(*args: Any, **options: Any) -> Any:
            begin = time.thread_time()
            try:
                return run(*args, **options)
            finally:
                times.append(time.thread_time() - begin)

        setattr(owner, method, timed)


def measure(
    requests: int, longest: int, new: int, windows: list[int | None], drafts: int, detail: bool
) -> dict[str, Any]:
    """Run the requests to their end; return microseconds a step."""
    rng = random.Random(1)
    lengths = [rng.randint(16, longest) for _ in range(requests)]
    generator = vattn.Generator(
        Stub(windows, 2 * (sum(lengths) + requests * (new + 16))), max_num_reqs=requests, token_budget=8192,
        max_seq_len=longest + new, compile="none", stop_token_ids=(),
        speculation=vattn.PromptLookup(num_drafts=drafts) if drafts else None,
    )  # fmt: skip
    sampling = vattn.Sampling(new, stop_token_ids=())
    for length in lengths:
        generator.add([rng.randrange(VOCABULARY) for _ in range(length)], sampling)
    parts = Parts()
    if detail:
        for owner, method, name in (
            (generator.scheduler, "schedule", "scheduler"), (generator._blocks, "publish", "blocks by content"),
            (generator._blocks, "rows", "block tables"), (model_runner, "_ids", "token ids"),
            (generator._runner.steps.builder, "build", "metadata"), (generator, "_accept", "tokens taken"),
            (generator._runner.steps.builder, "advance", "metadata of steps behind"),
            (generator.scheduler, "follow", "scheduler, steps behind"),
        ):  # fmt: skip
            parts.watch(owner, method, name)
    prefill, decode = [], []
    while generator.busy:
        chunks = bool(generator.scheduler.waiting) or any(not r.output for r in generator.scheduler.running)
        begin = time.thread_time()
        came = generator.step()
        taken = (time.thread_time() - begin) * 1e6
        if chunks:
            prefill.append(taken)
        elif len(came) >= 0.9 * requests:
            decode.append(taken)
    now = generator.statistics()
    steps = now.steps
    return {
        "requests": requests, "groups": len(windows), "drafts": drafts, "steps": steps,
        "decode_us": statistics.median(decode) if decode else None,
        "decode_least_us": min(decode, default=None),
        "prefill_us": statistics.median(prefill),
        "accepted_per_step": now.accepted_per_step,
        "parts_us": {name: sum(each) / steps * 1e6 for name, each in parts.seconds.items()},
    }  # fmt: skip


def main() -> None:
    """Run the cases and print them."""
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--parts", action="store_true", help="time the parts of a step too, which takes time itself")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = machine("cpu")
    cases: list[tuple[list[int | None], int]] = [([None], 0), ([None, 1024], 0), ([None], 4)]
    for windows, drafts in cases:
        row = measure(args.requests, args.longest, args.new, windows, drafts, args.parts)
        add_row(result, row, args.json)


if __name__ == "__main__":
    main()
