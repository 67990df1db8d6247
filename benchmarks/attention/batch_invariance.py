"""Check that batch-invariant attention gives the same bits in other steps, and time what that costs, on one GPU.

    python -m benchmarks.attention.batch_invariance --json out.json [--seed 1234567 --random 24]

Over picked steps of published layers and drawn ones: the kernels that are free to choose (`free`), the batch-invariant
ones (`fixed`), and the general kernel, which gives the same promise (`general`). All are compared with fp32. Of a few
requests of each step the bits are compared with those of the request alone, of its last rows alone, and of its last row
as a decode.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import add_row, machine, parser_of, time_in_turn
from vattn.backends import selector
from vattn.cli.bench.attention import Settings, rotations
from vattn.cli.bench.cell import Cell
from vattn.cli.bench.published import PUBLISHED
from vattn.cli.bench.random_steps import draw
from vattn.cli.bench.shapes import LayerShape, Work
from vattn.kernels.triton.attention.launch import paged_attention
from vattn.ops.arguments import AttentionArgs

LAYERS = {layer.name: layer for layer in PUBLISHED}
PICKED: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = (
    ("llama3-8b", ((1, 8192),)),
    ("llama3-8b", ((1, 1000),) * 8),
    ("llama3-8b", ((1, 1000),) * 64),
    ("llama3-8b", ((1, 8192),) * 32),
    ("llama3-8b", ((1, 2048),) * 128),
    ("llama3-8b", tuple((1, 300 + 61 * n) for n in range(100))),
    ("llama3-8b", ((1, 65536),)),
    ("llama3-8b", ((8192, 8192),)),
    ("llama3-8b", ((1024, 1024),) * 16),
    ("llama3-8b", ((512, 16384),) * 2),
    ("llama3-8b", ((2048, 2048), *((1, 3000),) * 40)),
)
"""Layers and (new tokens, keys) of requests; each over a bf16 and an FP8 cache."""

ERROR = 1.6e-2
"""Largest relative error: bf16 rounds weights and results."""


def arguments(cell: Cell, invariant: bool) -> AttentionArgs:
    """Return the arguments of a step, with the schedule that a model makes once for all of its layers."""
    config = cell.config("TRITON_ATTN", batch_invariant=invariant, lse=True)
    shape = selector.get_backend("TRITON_ATTN").plan_shape(config, cell.query.shape[0], *cell.table.shape)
    plan = [torch.zeros(shape, dtype=torch.int32, device=cell.device)] if shape else []
    if plan:
        torch.ops.vattn.plan(cell.starts, cell.seq_lens, plan[0], config.encode())
    given = {
        "query": cell.query, "key_cache": cell.kv_cache[0], "value_cache": cell.kv_cache[1],
        "query_start_loc": cell.starts, "seq_lens": cell.seq_lens, "block_table": cell.table,
        "output": torch.full_like(cell.query, float("nan")),
        "lse": torch.full(cell.query.shape[:2], float("nan"), device=cell.device), "k_scale": cell.one,
        "v_scale": cell.one, "sinks": cell.sinks, "plan": plan, "config": config.encode(),
    }  # fmt: skip
    return AttentionArgs(**{name: given.get(name) for name in AttentionArgs._fields})  # type: ignore[arg-type]


def attend(args: AttentionArgs) -> Tensor:
    torch.ops.vattn.attention(*args)
    return args.output


def by_general_kernel(args: AttentionArgs, config: Any) -> Tensor:
    paged_attention(args, config)
    return args.output


def other_bits(cell: Cell, args: AttentionArgs) -> list[str]:
    """Return in which smaller steps rows of some requests come out otherwise than in the whole step."""
    found, count = [], len(cell.work.requests)
    assert args.lse is not None
    for request in sorted({0, count // 2, count - 1}):
        first, end = (int(x) for x in cell.starts[request : request + 2])
        length = int(cell.seq_lens[request])
        for rows, less in {(end - first, 0), (min(37, end - first), 0), (1, 0), (1, (end - first) // 2)}:
            own = slice(end - less - rows, end - less)
            alone = args._replace(
                query=args.query[own], query_start_loc=torch.tensor([0, rows], device=cell.device).int(),
                seq_lens=torch.tensor([length - less], device=cell.device).int(),
                block_table=args.block_table[request : request + 1], output=torch.full_like(args.output[own], 7.0),
                lse=torch.full_like(args.lse[own], 7.0), plan=[],
            )  # fmt: skip
            assert alone.lse is not None
            same = torch.equal(attend(alone).view(torch.int16), args.output[own].view(torch.int16))
            if not same or not torch.equal(alone.lse, args.lse[own]):
                found.append(f"request {request}: {rows} of {end - first} rows, {less} before its end")
    return found


def poison(cell: Cell) -> None:
    """Fill what requests have not filled of their last blocks with NaN."""
    for length, blocks in zip(cell.seq_lens.tolist(), cell.table, strict=True):
        if length % cell.block_size:
            last = cell.kv_cache[:, int(blocks[length // cell.block_size]), length % cell.block_size :]
            last.view(torch.uint8).fill_(0xFF)


def measure(layer: LayerShape, work: Work, cache: str, timed: bool, device: str = "cuda") -> dict[str, Any]:
    """Check and time one step."""
    cells = (
        rotations(layer, work, cache, Settings(device=device)) if timed else [Cell(layer, work, cache, 16, 0, device)]
    )
    for cell in cells:
        poison(cell)
    free, fixed = ([arguments(cell, invariant) for cell in cells] for invariant in (False, True))
    general = [
        args._replace(output=torch.empty_like(args.output), lse=torch.zeros(args.query.shape[:2], device=device))
        for args in fixed
    ]
    config = cells[0].config("TRITON_ATTN", batch_invariant=True, lse=True)
    calls: dict[str, list[Callable[[], Tensor]]] = {
        "free": [partial(attend, args) for args in free],
        "fixed": [partial(attend, args) for args in fixed],
        "general": [partial(by_general_kernel, args, config) for args in general],
    }
    errors = {name: cells[0].error(each[0]()) for name, each in calls.items()}
    row: dict[str, Any] = {"errors": errors, "other_bits": other_bits(cells[0], fixed[0])}
    row["wrong"] = [name for name, error in errors.items() if not error < ERROR]
    if timed:
        row["us"], row["failed"] = time_in_turn(calls, device, warm_up=work.rows > 16 * len(work.requests))
        us = row["us"]
        row["of_free"] = us["free"] / us["fixed"]
        row["of_general"] = us["general"] / us["fixed"]
    return row


def rows_of(count: int, seed: int) -> list[tuple[LayerShape, Work, str]]:
    """Return the picked steps over both caches, then `count` drawn ones."""
    picked = [
        (LAYERS[name], Work(f"{len(requests)} x {requests[0]} to {requests[-1]}", requests), cache)
        for name, requests in PICKED
        for cache in ("bf16", "fp8")
    ]
    return picked + draw(count, seed)


def main() -> None:
    """Check and time every step, and print the geometric means of each kind of step."""
    parser = parser_of(__doc__)
    parser.add_argument("--random", type=int, default=24, help="drawn steps")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="this one of so many parts of the steps")
    parser.add_argument("--check", action="store_true", help="do not time")
    options = parser.parse_args()
    result = machine()
    place, parts = options.part
    for layer, work, cache in rows_of(options.random, options.seed)[place::parts]:
        row = {"model": layer.name, "step": work.name, "cache": cache, "decode": work.rows == len(work.requests)}
        try:
            with torch.no_grad():
                row |= measure(layer, work, cache, not options.check)
        except Exception as error:  # The other steps are worth their time.
            row["error"] = f"{type(error).__name__}: {error}"[:600]
        add_row(result, row, options.json)
        torch.cuda.empty_cache()
    timed = [row for row in result["rows"] if "of_free" in row]
    for kind in ("decode", "other"):
        for cache in ("bf16", "fp8"):
            ratios = [r["of_free"] for r in timed if r["cache"] == cache and r["decode"] == (kind == "decode")]
            if ratios:
                mean = statistics.geometric_mean(ratios)
                print(f"{kind} {cache}: {mean:.3f} of free, worst {min(ratios):.3f}, {len(ratios)} steps")


if __name__ == "__main__":
    main()
