"""Latent steps of requests of different lengths: each by the kernel for its length, beside how they went before.

`python -m benchmarks.mla_mixed --json FILE` times `vattn::mla_attention`, its plan made before, by graph replays in
turn (`latent_mixed` of `vattn.ops.variants`), and compares both results. One JSON line a cell is printed and appended
to the file: microseconds, and the ratio of the first way to the last, above 1 where the last is faster. `--device cpu`
runs tiny sizes by TORCH_MLA.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.mla_cells import DEEPSEEK, TINY, Cell, Inputs
from benchmarks.rows import write_row
from benchmarks.timing import Timer, interleave
from vattn.backends.mla import mla_backends
from vattn.bench.timing import WallTimer
from vattn.ops import variants
from vattn.ops.arguments import PlanArgs
from vattn.ops.mla_arguments import MLAAttentionArgs

CELLS: dict[str, tuple[int, list[int], int]] = {
    "63 decodes, 512 of a prompt": (16, [1] * 63 + [512], 4096),
    "63 decodes, 512 of a prompt, 128 heads": (128, [1] * 63 + [512], 4096),
    "16 decodes, 2048 of a prompt": (16, [1] * 16 + [2048], 4096),
    "32 decodes, a chunk of 101": (16, [1] * 32 + [101], 4096),
    "48 decodes, 16 of 2 to 5 drafts": (16, [1] * 48 + [2, 3, 4, 5] * 4, 4096),
    "48 decodes, 16 of 2 to 5 drafts, 128 heads": (128, [1] * 48 + [2, 3, 4, 5] * 4, 4096),
}
"""Heads, rows of each request, and keys of each."""


def arguments(heads: int, queries: list[int], length: int, device: str) -> tuple[Inputs, MLAAttentionArgs, Any]:
    """Return inputs, a call of the op without a plan, and its config."""
    cell = Cell("op", heads, len(queries), length)
    inputs = Inputs(cell, DEEPSEEK if device == "cuda" else TINY, device)
    inputs.starts = torch.tensor([0, *queries], device=device).cumsum(0).int()
    config = inputs.config(backend="TRITON_MLA" if device == "cuda" else "TORCH_MLA")
    args = inputs.arguments(config, inputs.cache)
    shape = (sum(queries), *args.query.shape[1:])
    query = torch.randn(shape, generator=inputs.rng, device=device).to(args.query.dtype)
    output = query.new_empty((*shape[:2], config.v_head_dim))
    return inputs, args._replace(query=query, output=output, config=config.encode()), config


def run_cell(name: str, device: str, ways: list[str]) -> dict[str, Any]:
    """Time one cell and return its row."""
    heads, queries, length = CELLS[name]
    if device == "cpu":
        heads, queries, length = 2, [min(query, 20) for query in queries[-4:]], 40
    _, args, config = arguments(heads, queries, length, device)
    backend = mla_backends()[config.backend]
    timers: dict[str, Any] = {}
    results = {}
    for way in ways:
        with variants.using(latent_mixed=way):
            shape = backend.plan_shape(config, len(args.query), len(queries), args.block_table.shape[1])
            own = args._replace(output=torch.empty_like(args.output))
            if shape:
                plan = torch.zeros(shape, dtype=torch.int32, device=device)
                backend.plan(PlanArgs(args.query_start_loc, args.seq_lens, plan, own.config), config)
                own = own._replace(plan=[plan])

            def step(own: MLAAttentionArgs = own) -> None:
                torch.ops.vattn.mla_attention(*own)

            timers[way] = Timer([step]) if device == "cuda" else WallTimer([step])
            step()
            results[way] = own.output.float()
    row: dict[str, Any] = {"name": name, "us": {way: round(t, 1) for way, t in interleave(timers).items()}}
    first, last = ways[0], ways[-1]
    row["ratio"] = round(row["us"][first] / row["us"][last], 3)
    row["difference"] = round(float((results[last] - results[first]).norm() / results[first].norm()), 5)
    return row


def main(given: list[str] | None = None) -> int:
    """Run the cells; return 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path, help="append one line a cell here")
    parser.add_argument("--ways", nargs="+", default=["plain", "fast"], choices=variants.ALLOWED["latent_mixed"])
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cells")
    options = parser.parse_args(given)
    failed = 0
    names = list(CELLS)
    for name in names if options.only is None else [names[number] for number in options.only]:
        try:
            row = run_cell(name, options.device, options.ways)
        except Exception as error:  # The other cells are worth their time.
            failed += 1
            row = {"name": name, "failed": f"{type(error).__name__}: {error}"[:400]}
        write_row(row, options.json)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
