"""Time vattn's decode attention beside other libraries' kernels on one GPU, after checking every result.

    python benchmarks/attention.py --peers folder-with-fa3.so --json out.json

Each cell runs every kernel in one process, replays interleaved, inputs rotated past the L2 cache. A peer that is
missing or fails is reported and left out. `--tune` also times variants of vattn's own kernel.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import peers, streaming
from benchmarks.timing import Timer, interleave
from vattn.config import AttentionConfig
from vattn.ops.arguments import AttentionArgs
from vattn.ops.triton import decode_fast
from vattn.ops.triton.decode_fast import Tuning

HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 32, 8, 128, 16
CELLS = [
    (1, 1024), (1, 8192), (1, 131072), (8, 1024), (8, 8192), (32, 1024), (32, 8192), (64, 4096), (128, 2048),
    (256, 1024), (256, 8192),
]  # fmt: skip
ROTATED_BYTES = 300 << 20
MAX_ROTATIONS = 6


class Cell:
    """Inputs of one decode step: `batch` requests of `length` keys, blocks scattered over the cache."""

    def __init__(self, batch: int, length: int, fp8: bool, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        self.batch, self.length, self.fp8 = batch, length, fp8
        blocks = batch * length // BLOCK
        self.query = torch.randn(batch, HEADS, HEAD_SIZE, device="cuda", dtype=torch.bfloat16, generator=generator)
        shape = (2, blocks, BLOCK, KV_HEADS, HEAD_SIZE)
        self.cache = torch.empty(shape, device="cuda", dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16)
        for part in self.cache.view(2, -1, KV_HEADS * HEAD_SIZE):
            for rows in part.split(1 << 18):
                rows.copy_(torch.randn(rows.shape, device="cuda", dtype=torch.bfloat16, generator=generator))
        self.table = self._table(blocks, generator)
        self.wide_table = self._table(blocks // 4, generator)
        self.seq_lens = torch.full((batch,), length, device="cuda", dtype=torch.int32)
        self.starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
        self.ones = torch.ones(1, device="cuda") if fp8 else None

    def _table(self, blocks: int, generator: torch.Generator) -> Tensor:
        order = torch.randperm(blocks, device="cuda", generator=generator).to(torch.int32)
        return order.view(self.batch, -1).contiguous()

    @property
    def bytes(self) -> int:
        """Bytes of keys and values, read once."""
        return self.cache.numel() * self.cache.itemsize

    def wide_cache(self) -> Tensor:
        """The same memory as blocks of 64 tokens."""
        return self.cache.view(2, -1, 64, KV_HEADS, HEAD_SIZE)

    def expected(self, request: int, wide: bool) -> Tensor:
        """fp32 output `[H, D]` of one request."""
        cache, table = (self.wide_cache(), self.wide_table) if wide else (self.cache, self.table)
        key, value = (
            part[table[request].long()].view(-1, KV_HEADS, HEAD_SIZE).float().repeat_interleave(HEADS // KV_HEADS, 1)
            for part in cache
        )
        scores = torch.einsum("hd,thd->ht", self.query[request].float(), key) * HEAD_SIZE**-0.5
        return torch.einsum("ht,thd->hd", scores.softmax(-1), value)

    def error(self, output: Tensor, wide: bool = False) -> float:
        """Largest relative L2 error of the first and the last request."""
        errors = []
        for request in {0, self.batch - 1}:
            expected = self.expected(request, wide)
            errors.append(float((output[request].float() - expected).norm() / expected.norm()))
        return max(errors)


def config_of(fp8: bool) -> AttentionConfig:
    return AttentionConfig(
        HEADS, KV_HEADS, HEAD_SIZE, HEAD_SIZE, HEAD_SIZE**-0.5, "bfloat16", "fp8_e4m3" if fp8 else "bfloat16",
        block_size=BLOCK, kv_scale="tensor" if fp8 else "none",
    )  # fmt: skip


def vattn_step(cell: Cell, tuning: Tuning | None, workspace: Tensor):  # type: ignore[no-untyped-def]
    """Return a decode step of vattn's fast path; the schedule is made once, as it is shared by all layers of a step."""
    config = config_of(cell.fp8)
    schedule = torch.zeros(
        decode_fast.plan_shape(config, cell.batch, torch.device("cuda:0")), dtype=torch.int32, device="cuda"
    )
    decode_fast.plan(cell.starts, cell.seq_lens, schedule, config, tuning)
    output = torch.full_like(cell.query, float("nan"))
    args = AttentionArgs(
        cell.query, cell.cache.view(torch.uint8) if cell.fp8 else cell.cache, cell.starts, cell.seq_lens, cell.table,
        output, None, None, None, None, cell.ones, cell.ones, None, None, None, None, None, None, None, [schedule],
        workspace, config.encode(),
    )  # fmt: skip

    def step() -> Tensor:
        decode_fast.decode(args, config, tuning)
        return output

    return step


def tunings(fp8: bool) -> list[Tuning]:
    """Variants that `--tune` times."""
    return [Tuning(2, 3, 4), Tuning(4, 3, 2), Tuning(2, 4, 4), Tuning(1, 4, 8), Tuning(8, 3 if fp8 else 2, 1)]


def name_of(tuning: Tuning) -> str:
    return "vattn " + " ".join(f"{k[:1]}{v}" for k, v in asdict(tuning).items() if v is not None)


def steps_of(cells: list[Cell], args: argparse.Namespace, fa3: Any, xqa: Any) -> dict[str, tuple[list, bool | None]]:
    """Return the calls over all rotated inputs by kernel name, and which table each reads (`None`: no check)."""
    first = cells[0]
    scale, longest = HEAD_SIZE**-0.5, first.length
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    steps: dict[str, tuple[list, bool | None]] = {"vattn": ([vattn_step(c, None, workspace) for c in cells], False)}
    for tuning in tunings(first.fp8) if args.tune else []:
        steps[name_of(tuning)] = ([vattn_step(c, tuning, workspace) for c in cells], False)
    if fa3 is not None:
        calls = [peers.fa3_decode(fa3, c.query, *c.cache, c.table, c.seq_lens, scale, longest) for c in cells]
        steps["FA3"] = (calls, False)
    if xqa is not None and first.fp8:
        calls = [
            peers.xqa_decode(xqa, c.query, *c.wide_cache(), c.wide_table, c.seq_lens, scale, longest) for c in cells
        ]
        steps["XQA (blocks of 64)"] = (calls, True)
    stream = [streaming.stream_decode(*c.cache, c.table, c.batch, c.length) for c in cells]
    steps["streaming"] = (stream, None)
    return steps


def run_cell(batch: int, length: int, fp8: bool, args: argparse.Namespace, fa3: Any, xqa: Any) -> dict[str, Any]:
    """Check and time every kernel on one cell."""
    size = batch * length * KV_HEADS * HEAD_SIZE * 2 * (1 if fp8 else 2)
    cells = [Cell(batch, length, fp8, seed) for seed in range(max(1, min(MAX_ROTATIONS, ROTATED_BYTES // size)))]
    row: dict[str, Any] = {"batch": batch, "length": length, "cache": "fp8" if fp8 else "bf16", "kernels": {}}
    timers: dict[str, Timer] = {}
    for name, (calls, wide) in steps_of(cells, args, fa3, xqa).items():
        entry = row["kernels"].setdefault(name, {})
        try:
            result = calls[-1]()
            torch.cuda.synchronize()
            if wide is not None:
                entry["error"] = cells[-1].error(result, wide)
            timers[name] = Timer(calls)
        except Exception as error:  # a peer or a variant that fails is reported, the rest goes on
            entry["failed"] = repr(error)[:300]
            print(f"{name} failed: {error!r}"[:400], file=sys.stderr)
    for name, microseconds in interleave(timers).items():
        row["kernels"][name].update(us=round(microseconds, 2), tb_per_s=round(cells[0].bytes / microseconds / 1e6, 3))
    return row


def describe(row: dict[str, Any]) -> str:
    """Return one line of the table."""
    kernels = row["kernels"]
    parts = [f"{row['cache']:4s} {row['batch']}x{row['length']}:"]
    for name, entry in kernels.items():
        error = f" ({entry['error']:.1e})" if "error" in entry else ""
        parts.append(f"{name} {entry.get('us', 'failed')}{error};")
    return " ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with fa3.so")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--cache", choices=("both", "fp8", "bf16"), default="both")
    parser.add_argument("--cells", default="", help="batch x length, e.g. 1x1024,32x8192; default: all")
    parser.add_argument("--tune", action="store_true", help="time variants of vattn's kernel as well")
    args = parser.parse_args()
    cells = [tuple(map(int, cell.split("x"))) for cell in args.cells.split(",") if cell] or CELLS
    fa3 = peers.load_fa3(args.peers) if args.peers else None
    xqa = peers.load_xqa()
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "rows": [],
    }  # fmt: skip
    for fp8 in (True, False):
        if args.cache not in ("both", "fp8" if fp8 else "bf16"):
            continue
        for batch, length in cells:
            row = run_cell(batch, length, fp8, args, fa3, xqa)
            result["rows"].append(row)
            print(describe(row), flush=True)
            if args.json:
                args.json.write_text(json.dumps(result, indent=1))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
