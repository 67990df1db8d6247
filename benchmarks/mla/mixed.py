"""Latent steps of requests of different lengths, beside the same requests in steps of equal numbers of rows.

`python -m benchmarks.mla.mixed --json FILE` times `vattn::mla_attention`, its plan made before, by graph replays in
turn: "together", one step, and "apart", a call for the requests of each number of rows after the other. Both results
are compared. A row a cell is printed and written: microseconds, and the ratio, above 1 where one
step is faster. `--device cpu` runs tiny sizes by TORCH_MLA.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from benchmarks.harness import run_cells, time_in_turn
from benchmarks.mla.cells import DEEPSEEK, TINY, Cell, Inputs
from vattn.backends.mla.registry import mla_backends
from vattn.ops.arguments import PlanArgs
from vattn.ops.arguments_mla import MLAAttentionArgs

CELLS: dict[str, tuple[int, list[int], int]] = {
    "63 decodes, 512 of a prompt": (16, [1] * 63 + [512], 4096),
    "63 decodes, 512 of a prompt, 128 heads": (128, [1] * 63 + [512], 4096),
    "16 decodes, 2048 of a prompt": (16, [1] * 16 + [2048], 4096),
    "32 decodes, a chunk of 101": (16, [1] * 32 + [101], 4096),
    "48 decodes, 16 of 2 to 5 drafts": (16, [1] * 48 + [2, 3, 4, 5] * 4, 4096),
    "48 decodes, 16 of 2 to 5 drafts, 128 heads": (128, [1] * 48 + [2, 3, 4, 5] * 4, 4096),
    "60 decodes, 4 of 2 drafts": (16, [1] * 60 + [2] * 4, 4096),
    "32 of 1 to 3 drafts, 64 rows": (16, [1, 2, 2, 3] * 8, 4096),
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


def planned(args: MLAAttentionArgs, config: Any) -> MLAAttentionArgs:
    """Return a call with an output of its own, and the plan that a builder would make."""
    backend, requests = mla_backends()[config.backend], args.seq_lens.shape[0]
    args = args._replace(output=torch.empty_like(args.output))
    shape = backend.plan_shape(config, len(args.query), requests, args.block_table.shape[1])
    if not shape:
        return args
    plan = torch.zeros(shape, dtype=torch.int32, device=args.query.device)
    backend.plan(PlanArgs(args.query_start_loc, args.seq_lens, plan, args.config), config)
    return args._replace(plan=[plan])


def apart(args: MLAAttentionArgs, queries: list[int]) -> list[tuple[torch.Tensor, MLAAttentionArgs]]:
    """Return a call for the requests of each number of rows, and which rows of the whole step are theirs."""
    device, found = args.query.device, []
    for count in sorted(set(queries)):
        requests = torch.tensor([i for i, query in enumerate(queries) if query == count], device=device)
        rows = (args.query_start_loc[requests].unsqueeze(1) + torch.arange(count, device=device)).flatten()
        starts = torch.arange(len(requests) + 1, device=device, dtype=torch.int32) * count
        part = args._replace(
            query=args.query[rows], output=args.output[rows], query_start_loc=starts,
            seq_lens=args.seq_lens[requests], block_table=args.block_table[requests],
        )  # fmt: skip
        found.append((rows, part))
    return found


def run_cell(cell: tuple[int, list[int], int], device: str) -> dict[str, Any]:
    """Time one cell and return its row."""
    heads, queries, length = cell
    if device == "cpu":
        heads, queries, length = 2, [min(query, 20) for query in queries[-4:]], 40
    _, args, config = arguments(heads, queries, length, device)
    whole = planned(args, config)
    parts = [(rows, planned(part, config)) for rows, part in apart(args, queries)]

    def attend(*calls: MLAAttentionArgs) -> None:
        for call in calls:
            torch.ops.vattn.mla_attention(*call)

    steps = {"together": lambda: attend(whole), "apart": lambda: attend(*(part for _, part in parts))}
    times, _ = time_in_turn({way: [step] for way, step in steps.items()}, device)
    row: dict[str, Any] = {"us": {way: round(us, 1) for way, us in times.items()}}
    row["ratio"] = round(row["us"]["apart"] / row["us"]["together"], 3)
    expected = torch.empty_like(whole.output)
    for rows, part in parts:
        expected[rows] = part.output
    row["difference"] = round(float((whole.output.float() - expected.float()).norm() / expected.float().norm()), 5)
    return row


def main(arguments: list[str] | None = None) -> int:
    """Run the cells; return 1 if any failed."""
    return run_cells(__doc__, CELLS, run_cell, arguments)


if __name__ == "__main__":
    sys.exit(main())
