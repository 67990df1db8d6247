"""Time vattn's prefill attention beside FlashAttention-3 on one GPU, after checking every result.

    python benchmarks/prefill.py --peers folder-with-fa3.so --json out.json

Each cell runs every kernel in one process, warm, with replays interleaved: such kernels run at the card's power limit,
so that only ratios within a process compare.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import peers
from benchmarks.timing import Timer, interleave
from vattn.config.attention import AttentionConfig
from vattn.ops.arguments import AttentionArgs, PlanArgs

HEADS, KV_HEADS = 32, 8
WARM_SECONDS = 0.3
CELLS: dict[str, list[tuple[int, int]]] = {
    "1 x 8k": [(8192, 8192)],
    "1 x 32k": [(32768, 32768)],
    "16 x 1k": [(1024, 1024)] * 16,
    "4 x 4k": [(4096, 4096)] * 4,
    "mixed 1 to 8k": [
        (n, n) for n in (8192, 1, 77, 3000, 513, 5000, 1024, 250, 2048, 4100, 33, 700, 6001, 128, 1500, 900)
    ],
    "chunk 4 x 512 of 8k": [(512, 8192)] * 4,
    "odd chunks": [(2048, 8229), (1000, 5017), (700, 3001), (511, 7777)],
}


class Cell:
    """Inputs of one prefill step: (query rows, sequence length) per request, blocks scattered over the cache.

    With `fp8` the cache holds e4m3, and `query8` is the query as e4m3; every scale is 1.
    """

    def __init__(
        self, requests: list[tuple[int, int]], head_size: int, block_size: int, fp8: bool = False, seed: int = 0
    ) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        self.requests, self.head_size, self.block_size = requests, head_size, block_size
        rows = sum(q for q, _ in requests)
        per_request = [-(-s // block_size) for _, s in requests]
        shape = (2, sum(per_request), block_size, KV_HEADS, head_size)
        self.query = torch.randn(rows, HEADS, head_size, device="cuda", generator=generator).bfloat16()
        self.cache = torch.randn(shape, device="cuda", generator=generator).bfloat16()
        self.fp8 = fp8
        if fp8:
            self.query8, self.cache = self.query.to(torch.float8_e4m3fn), self.cache.to(torch.float8_e4m3fn)
            self.one = torch.ones(1, device="cuda")
        order = torch.randperm(shape[1], device="cuda", generator=generator).int()
        self.table = torch.zeros(len(requests), max(per_request), dtype=torch.int32, device="cuda")
        for row, blocks in zip(self.table, order.split(per_request), strict=True):
            row[: len(blocks)] = blocks
        self.starts = torch.tensor([0, *[q for q, _ in requests]]).cumsum(0).int().cuda()
        self.seq_lens = torch.tensor([s for _, s in requests], dtype=torch.int32, device="cuda")
        self.scale = head_size**-0.5

    def flops(self, window: int = 0) -> int:
        """Operations of the two products over visible pairs."""
        pairs = 0
        for q, s in self.requests:
            positions = torch.arange(s - q, s) + 1
            pairs += int(positions.clamp(max=window or s).sum())
        return 4 * pairs * HEADS * self.head_size

    def error(self, output: Tensor, queries: Tensor, window: int = 0) -> float:
        """Largest relative L2 error of three (request, head) pairs against fp32 on what is stored."""
        worst = 0.0
        for request, head in ((0, 0), (len(self.requests) // 2, 13), (len(self.requests) - 1, HEADS - 1)):
            q, s = self.requests[request]
            first = int(self.starts[request])
            blocks = self.table[request, : -(-s // self.block_size)].long()
            key, value = (
                part[blocks][:, :, head * KV_HEADS // HEADS].reshape(-1, self.head_size)[:s].float()
                for part in self.cache
            )
            for start in range(0, q, 4096):
                rows = torch.arange(start, min(q, start + 4096), device="cuda")
                query = queries.view(-1, HEADS, self.head_size)[first + rows, head].float()
                far = torch.arange(s, device="cuda")[None, :] - (rows + s - q)[:, None]
                hidden = (far > 0) | ((far <= -window) if window else False)
                weights = (query @ key.T * self.scale).masked_fill_(hidden, float("-inf")).softmax(-1)
                expected = weights @ value
                got = output[first + rows, head].float()
                worst = max(worst, float((got - expected).norm() / expected.norm()))
        return worst


def vattn_step(cell: Cell, window: int, query: Tensor, general: bool = False) -> Callable[[], Tensor]:
    """Return a step of vattn's Hopper prefill kernel, its schedule made once, or of the general one."""
    from vattn.backends import selector
    from vattn.kernels.hopper.prefill import launch as prefill_launch
    from vattn.kernels.triton.attention.launch import paged_attention

    quantised = query.dtype == torch.float8_e4m3fn
    config = AttentionConfig(
        HEADS, KV_HEADS, cell.head_size, cell.head_size, cell.scale, "bfloat16",
        "fp8_e4m3" if cell.fp8 else "bfloat16", block_size=cell.block_size, sliding_window=window or None,
        kv_scale="tensor" if cell.fp8 else "none", query_format="fp8_e4m3" if quantised else "none",
        query_scale="tensor" if quantised else "none",
    )  # fmt: skip
    output = torch.full_like(cell.query, float("nan"))
    one = cell.one if cell.fp8 else None
    backend = selector.get_backend("TRITON_ATTN")
    shape = backend.plan_shape(config, query.shape[0], *cell.table.shape)
    schedule = torch.zeros(shape, dtype=torch.int32, device="cuda")
    backend.plan(PlanArgs(cell.starts, cell.seq_lens, schedule, config.encode()), config)
    args = AttentionArgs(
        query, cell.cache.view(torch.uint8) if cell.fp8 else cell.cache, cell.starts, cell.seq_lens, cell.table,
        output, None, None, None, one if quantised else None, one, one, None, None, None, None, None, None, None,
        [schedule], None, config.encode(),
    )  # fmt: skip

    def step() -> Tensor:
        (paged_attention if general else prefill_launch.prefill)(args, config)
        return output

    return step


def fa3_step(ops: Any, cell: Cell, window: int) -> Callable[[], Tensor]:
    """Return a step of FlashAttention-3, its schedule made once."""
    num_reqs, output = len(cell.requests), torch.empty_like(cell.query)
    max_q, max_k = (max(lengths) for lengths in zip(*cell.requests, strict=True))
    left, right = (window - 1, 0) if window else (-1, -1)
    query = cell.query8 if cell.fp8 else cell.query
    descale = torch.ones(num_reqs, KV_HEADS, device="cuda") if cell.fp8 else None
    schedule = ops.get_scheduler_metadata(
        num_reqs, max_q, max_k, HEADS, KV_HEADS, cell.head_size, cell.head_size, query.dtype, cell.seq_lens,
        cell.starts, None, None, None, None, cell.block_size, 0, True, left, right, False, 1, None, 0,
    )  # fmt: skip

    def step() -> Tensor:
        ops.fwd(
            query, *cell.cache, None, None, None, output, cell.starts, None, None, None, cell.seq_lens, max_q, max_k,
            cell.table, None, None, None, None, None, descale, descale, descale, cell.scale, True, left, right, 0.0,
            True, schedule, 1, None, 0, None, 1, 0, None,
        )  # fmt: skip
        return output

    return step


def run_cell(
    name: str, head_size: int, block_size: int, window: int, fp8: bool, general: bool, fa3: Any
) -> dict[str, Any]:
    """Check and time every kernel on one cell."""
    cell = Cell(CELLS[name], head_size, block_size, fp8, seed=random.randrange(1 << 30))
    query = cell.query8 if fp8 else cell.query
    steps = {"vattn": (vattn_step(cell, window, query), query)}
    if fp8:
        steps["vattn, 16-bit query"] = (vattn_step(cell, window, cell.query), cell.query)
    if general:
        steps["vattn, general kernel"] = (vattn_step(cell, window, cell.query, general=True), cell.query)
    if fa3 is not None:
        steps["FA3"] = (fa3_step(fa3, cell, window), query)
    row: dict[str, Any] = {
        "cell": name, "cache": "fp8" if fp8 else "bf16", "head": head_size, "block": block_size, "window": window,
        "kernels": {},
    }  # fmt: skip
    timers: dict[str, Timer] = {}
    for kernel, (step, queries) in steps.items():
        entry = row["kernels"].setdefault(kernel, {})
        try:
            entry["error"] = cell.error(step(), queries, window)
            timers[kernel] = Timer([step])
        except Exception as error:  # a kernel that fails is reported, the rest goes on
            entry["failed"] = repr(error)[:300]
            print(f"{kernel} failed: {error!r}"[:600], file=sys.stderr)
    end = time.monotonic() + WARM_SECONDS
    while timers and time.monotonic() < end:
        for timer in timers.values():
            timer.graph.replay()
        torch.cuda.synchronize()
    for kernel, microseconds in interleave(timers).items():
        tflops = cell.flops(window) / microseconds / 1e6
        row["kernels"][kernel].update(us=round(microseconds, 1), tflops=round(tflops, 1))
    return row


def describe(row: dict[str, Any]) -> str:
    """Return one line of the table."""
    kernels = row["kernels"]
    parts = [
        f"{name} {entry.get('us', 'failed')} us {entry.get('tflops', 0)} TFLOP/s (error {entry.get('error', -1):.1e});"
        for name, entry in kernels.items()
    ]
    ours, theirs = (kernels.get(name, {}).get("us") for name in ("vattn", "FA3"))
    ratio = f" {theirs / ours:.3f} of FA3" if ours and theirs else ""
    label = f"{row['cell']} {row['cache']} d{row['head']} b{row['block']}" + (
        f" w{row['window']}" if row["window"] else ""
    )
    return f"{label:28s} " + " ".join(parts) + ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with fa3.so")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--cells", default="", help="names, separated by ';'; default: all")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--fp8", action="store_true", help="an FP8 cache; FA3 and vattn with an FP8 query")
    parser.add_argument("--general", action="store_true", help="time vattn's general kernel as well")
    args = parser.parse_args()
    fa3 = peers.load_fa3(args.peers) if args.peers else None
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "rows": [],
    }  # fmt: skip
    for name in [n.strip() for n in args.cells.split(";") if n.strip()] or CELLS:
        row = run_cell(name, args.head_size, args.block_size, args.window, args.fp8, args.general, fa3)
        result["rows"].append(row)
        print(describe(row), flush=True)
        if args.json:
            args.json.write_text(json.dumps(result, indent=1))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
