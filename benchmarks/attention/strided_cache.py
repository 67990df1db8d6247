"""Time attention over an engine's own KV memory beside vattn's contiguous storages, over the same values.

    python -m benchmarks.attention.strided_cache --json out.json

Every result over strided keys is compared with that over contiguous ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import add_row, machine, parser_of, time_in_turn
from vattn.cli.bench.cell import Cell
from vattn.cli.bench.peers import attention_arguments
from vattn.cli.bench.shapes import every_cell
from vattn.ops.arguments import AttentionArgs

CELLS = (
    ("llama3-8b", "decode 1x8k", "bf16"),
    ("llama3-8b", "decode 32x1k", "bf16"),
    ("llama3-8b", "decode 32x1k", "fp8"),
    ("llama3-8b", "decode 32x8k", "fp8"),
    ("gemma3-12b", "decode 32x1k", "bf16"),
    ("llama3-8b", "prefill 1x8k", "bf16"),
    ("llama3-8b", "chunk 4x512 of 8k", "bf16"),
    ("llama3-8b", "mixed 8x512 + 128 decodes of 4k", "fp8"),
)
ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a layer of four": lambda view: view.new_empty(view.shape[0], 4, *view.shape[1:])[:, 1],
    "side by side": lambda view: view.new_empty(*view.shape[:3], 2 * view.shape[3])[..., : view.shape[3]],
}
"""Memory of the size of keys or values: of one layer of several in a block, or of a key and a value of each head."""


def strided(args: AttentionArgs, order: str) -> AttentionArgs:
    """Return a call over the same values in an engine's memory."""
    assert args.value_cache is not None
    key, value = (ORDERS[order](view).copy_(view) for view in (args.key_cache, args.value_cache))
    return args._replace(key_cache=key, value_cache=value)


def run(model: str, work: str, cache: str) -> dict[str, Any]:
    """Check and time one cell over all orders."""
    (layer, step), *_ = [(layer, step) for layer, step in every_cell() if (layer.name, step.name) == (model, work)]
    cells = [Cell(layer, step, cache, 16, seed) for seed in range(2 if "8k" in work else 4)]
    calls = {"contiguous": [attention_arguments(cell, "TRITON_ATTN") for cell in cells]}
    calls |= {order: [strided(args, order) for args in calls["contiguous"]] for order in ORDERS}
    row: dict[str, Any] = {"model": model, "work": work, "cache": cache, "apart": {}}
    for order, args in calls.items():
        torch.ops.vattn.attention(*args[0])
        difference = (args[0].output.float() - calls["contiguous"][0].output.float()).norm()
        row["apart"][order] = float(difference / args[0].output.float().norm())
    ways = {order: [partial(torch.ops.vattn.attention, *one) for one in args] for order, args in calls.items()}
    times, failed = time_in_turn(ways, replays=9)
    return row | {"us": {order: round(us, 2) for order, us in times.items()}, "failed": failed}


def main() -> None:
    """Run every cell and print one line each."""
    options, result = parser_of(__doc__).parse_args(), machine()
    with torch.no_grad():
        for cell in CELLS:
            add_row(result, run(*cell), options.json)


if __name__ == "__main__":
    main()
