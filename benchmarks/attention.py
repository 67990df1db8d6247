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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import peers, streaming
from benchmarks.timing import Timer, interleave
from vattn.config.attention import AttentionConfig
from vattn.kernels.hopper.decode import launch as decode_fast
from vattn.kernels.hopper.decode.launch import Tuning
from vattn.ops.arguments import AttentionArgs

BLOCK = 16
ROTATED_BYTES = 300 << 20
MAX_ROTATIONS = 6


@dataclass(frozen=True)
class Shape:
    """One decode step: a request per length.

    Attributes:
        name: in the table.
        lengths: keys of each request.
        heads, kv_heads, head_size: of the layer.
        window: sliding window, `None` for none.
        tokens: query rows of each request; several in speculative decoding.
    """

    name: str
    lengths: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    window: int | None = None
    tokens: int = 1

    @property
    def keys(self) -> int:
        """Keys that are read."""
        return sum(min(n, self.window or n) for n in self.lengths)


def equal(batch: int, length: int, name: str = "", **dimensions: Any) -> Shape:
    return Shape(f"{batch}x{length}{name}", (length,) * batch, **dimensions)


CELLS = [
    equal(*cell)
    for cell in (
        (1, 1024), (1, 8192), (1, 131072), (8, 1024), (8, 8192), (32, 1024), (32, 8192), (64, 4096), (128, 2048),
        (256, 1024), (256, 8192),
    )
]  # fmt: skip
MORE_CELLS = [
    Shape("64 skewed", (131072, *(512 + 56 * i for i in range(63)))),
    *(equal(64, 2048, f" group {group}", heads=8 * group) for group in (1, 5, 7, 8, 16)),
    equal(64, 4096, " head size 64", heads=64, head_size=64),
    equal(64, 4096, " head size 256", heads=16, kv_heads=4, head_size=256),
    equal(64, 4096, " one KV head", heads=8, kv_heads=1),
    equal(16, 32768, " window 1024", window=1024),
    equal(16, 1024),
    *(equal(64, 4096, f" {tokens} tokens", tokens=tokens) for tokens in (2, 4)),
]


class Cell:
    """Inputs of one decode step, blocks scattered over the cache."""

    def __init__(self, shape: Shape, fp8: bool, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        self.shape, self.fp8, self.batch = shape, fp8, len(shape.lengths)
        counts = [-(-length // 64) * 64 // BLOCK for length in shape.lengths]
        size = (self.batch * shape.tokens, shape.heads, shape.head_size)
        self.query = torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=generator)
        cache = (2, sum(counts), BLOCK, shape.kv_heads, shape.head_size)
        self.cache = torch.empty(cache, device="cuda", dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16)
        for part in self.cache.view(2, -1, shape.kv_heads * shape.head_size):
            for rows in part.split(1 << 18):
                rows.copy_(torch.randn(rows.shape, device="cuda", dtype=torch.bfloat16, generator=generator))
        self.table = self._table(counts, generator)
        self.wide_table = self._table([count // 4 for count in counts], generator)
        self.seq_lens = torch.tensor(shape.lengths, dtype=torch.int32).cuda()
        self.starts = torch.arange(self.batch + 1, device="cuda", dtype=torch.int32) * shape.tokens
        self.ones = torch.ones(1, device="cuda") if fp8 else None

    def _table(self, counts: list[int], generator: torch.Generator) -> Tensor:
        order = torch.randperm(sum(counts), device="cuda", generator=generator).to(torch.int32).split(counts)
        return torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True).contiguous()

    @property
    def bytes(self) -> int:
        """Bytes of keys and values, read once."""
        return 2 * self.shape.keys * self.shape.kv_heads * self.shape.head_size * self.cache.itemsize

    def wide_cache(self) -> Tensor:
        """The same memory as blocks of 64 tokens."""
        return self.cache.view(2, -1, 64, self.shape.kv_heads, self.shape.head_size)

    def expected(self, request: int, token: int, wide: bool) -> Tensor:
        """fp32 output `[H, D]` of one row of one request."""
        shape = self.shape
        length = shape.lengths[request] - shape.tokens + 1 + token
        row = request * shape.tokens + token
        cache, table = (self.wide_cache(), self.wide_table) if wide else (self.cache, self.table)
        blocks = table[request, : -(-length // cache.shape[2])].long()
        first = max(0, length - shape.window) if shape.window else 0
        key, value = (
            part[blocks].view(-1, shape.kv_heads, shape.head_size)[first:length].float()
            .repeat_interleave(shape.heads // shape.kv_heads, 1)
            for part in cache
        )  # fmt: skip
        scores = torch.einsum("hd,thd->ht", self.query[row].float(), key) * shape.head_size**-0.5
        return torch.einsum("ht,thd->hd", scores.softmax(-1), value)

    def error(self, output: Tensor, wide: bool = False) -> float:
        """Largest relative L2 error of the first and the last request."""
        errors = []
        tokens = self.shape.tokens
        for request, token in {(0, 0), (self.batch - 1, tokens - 1)}:
            expected = self.expected(request, token, wide)
            errors.append(float((output[request * tokens + token].float() - expected).norm() / expected.norm()))
        return max(errors)


def config_of(cell: Cell) -> AttentionConfig:
    shape = cell.shape
    return AttentionConfig(
        shape.heads, shape.kv_heads, shape.head_size, shape.head_size, shape.head_size**-0.5, "bfloat16",
        "fp8_e4m3" if cell.fp8 else "bfloat16", block_size=BLOCK, kv_scale="tensor" if cell.fp8 else "none",
        sliding_window=shape.window,
    )  # fmt: skip


def vattn_steps(cell: Cell, tuning: Tuning | None, workspace: Tensor):  # type: ignore[no-untyped-def]
    """Return a decode step of vattn's fast path and the making of its schedule, which all layers of a step share."""
    config, tokens = config_of(cell), cell.shape.tokens
    shape = decode_fast.plan_shape(config, tokens * cell.batch, cell.batch, torch.device("cuda:0"))
    schedule = torch.zeros(shape, dtype=torch.int32, device="cuda")
    output = torch.full_like(cell.query, float("nan"))
    args = AttentionArgs(
        cell.query, cell.cache.view(torch.uint8) if cell.fp8 else cell.cache, cell.starts, cell.seq_lens, cell.table,
        output, None, None, None, None, cell.ones, cell.ones, None, None, None, None, None, None, None,
        [schedule], workspace, config.encode(),
    )  # fmt: skip

    def plan() -> Tensor:
        decode_fast.plan(cell.starts, cell.seq_lens, schedule, config, tuning, tokens)
        return schedule

    def step() -> Tensor:
        decode_fast.decode(args, config, tuning)
        return output

    plan()
    return step, plan


def tunings(fp8: bool) -> list[Tuning]:
    """Variants that `--tune` times."""
    if fp8:
        return [
            Tuning(2, 3, 4), Tuning(2, 4, 4), Tuning(2, 6, 4, overlap=True), Tuning(4, 5, 2, overlap=True),
            Tuning(2, 5, 1, slots=4, overlap=True), Tuning(4, 5, 1, slots=2, overlap=True),
        ]  # fmt: skip
    return [
        Tuning(2, 3, 4), Tuning(2, 3, 4, overlap=True), Tuning(4, 3, 2, overlap=True),
        Tuning(2, 2, 1, slots=4, overlap=True), Tuning(4, 2, 1, slots=2, overlap=True),
    ]  # fmt: skip


def name_of(tuning: Tuning) -> str:
    return "vattn " + " ".join(f"{field} {value}" for field, value in asdict(tuning).items() if value)


def steps_of(cells: list[Cell], args: argparse.Namespace, fa3: Any, xqa: Any) -> dict[str, tuple[list, bool | None]]:
    """Return the calls over all rotated inputs by kernel name, and which table each reads (`None`: no check)."""
    first = cells[0]
    shape, longest = first.shape, max(first.shape.lengths)
    scale = shape.head_size**-0.5
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    own = [vattn_steps(c, None, workspace) for c in cells]
    steps: dict[str, tuple[list, bool | None]] = {"vattn": ([step for step, _ in own], False)}
    steps["vattn schedule"] = ([plan for _, plan in own], None)
    for tuning in tunings(first.fp8) if args.tune else []:
        steps[name_of(tuning)] = ([vattn_steps(c, tuning, workspace)[0] for c in cells], False)
    if fa3 is not None:
        calls = [
            peers.fa3_decode(fa3, c.query, *c.cache, c.table, c.seq_lens, scale, longest, shape.window, shape.tokens)
            for c in cells
        ]
        steps["FA3"] = (calls, False)
    if xqa is not None and first.fp8 and (shape.heads, shape.kv_heads, shape.window, shape.tokens) == (32, 8, None, 1):
        calls = [
            peers.xqa_decode(xqa, c.query, *c.wide_cache(), c.wide_table, c.seq_lens, scale, longest) for c in cells
        ]
        steps["XQA (blocks of 64)"] = (calls, True)
    if len(set(shape.lengths)) == 1 and shape.window is None:
        calls = [streaming.stream_decode(*c.cache, c.table, c.batch, longest) for c in cells]
        steps["streaming"] = (calls, None)
    return steps


def run_cell(shape: Shape, fp8: bool, args: argparse.Namespace, fa3: Any, xqa: Any) -> dict[str, Any]:
    """Check and time every kernel on one cell."""
    size = shape.keys * shape.kv_heads * shape.head_size * 2 * (1 if fp8 else 2)  # what is read, not what is cached
    cells = [Cell(shape, fp8, seed) for seed in range(max(1, min(MAX_ROTATIONS, ROTATED_BYTES // size)))]
    row: dict[str, Any] = {"cell": shape.name, "cache": "fp8" if fp8 else "bf16", "kernels": {}}
    timers: dict[str, Timer] = {}
    kept = steps_of(cells, args, fa3, xqa)
    for name, (calls, wide) in kept.items():
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
        row["kernels"][name]["us"] = round(microseconds, 2)
    own, rivals = row["kernels"]["vattn"].get("us"), [row["kernels"].get(n, {}).get("us") for n in PEERS]
    if own:
        row["tb_per_s"] = round(cells[0].bytes / own / 1e6, 3)
        row["best_peer_over_vattn"] = round(min(us for us in rivals if us) / own, 3) if any(rivals) else None
        stream = row["kernels"].get("streaming", {}).get("us")
        row["streaming_over_vattn"] = round(stream / own, 3) if stream else None
    return row


def describe(row: dict[str, Any]) -> str:
    """Return one line for people."""
    parts = [f"{row['cache']:4s} {row['cell']}: {row.get('best_peer_over_vattn')} {row.get('streaming_over_vattn')};"]
    for name, entry in row["kernels"].items():
        error = f" ({entry['error']:.1e})" if "error" in entry else ""
        parts.append(f"{name} {entry.get('us', 'failed')}{error};")
    return " ".join(parts)


def markdown(result: dict[str, Any]) -> str:
    """Return the results as a table."""
    lines = [
        f"# Decode attention on {result['gpu']}, {result['date']}",
        "",
        f"torch {result['torch']}, triton {result['triton']}; block size {BLOCK} NHD; {HOW}",
        "",
        "| cache | cell | vattn us | TB/s | error | FA3 us | XQA us | stream us | best peer / vattn | stream / vattn |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        kernels = row["kernels"]
        times = [kernels.get(name, {}).get("us", "-") for name in (*PEERS, "streaming")]
        cells = [
            row["cache"], row["cell"], kernels["vattn"].get("us", "-"), row.get("tb_per_s", "-"),
            f"{kernels['vattn'].get('error', float('nan')):.1e}", *times, row.get("best_peer_over_vattn") or "-",
            row.get("streaming_over_vattn") or "-",
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


PEERS = ("FA3", "XQA (blocks of 64)")
HOW = (
    "CUDA-graph replays over rotated inputs, kernels interleaved, median of 7. FA3 takes an FP8 query with an FP8 "
    "cache; XQA reads blocks of 64. Errors are relative L2 against fp32. The schedule, made once a step, is not in the "
    "times."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with fa3.so")
    parser.add_argument("--json", type=Path, help="where to write the results; a table goes beside them as .md")
    parser.add_argument("--cache", choices=("both", "fp8", "bf16"), default="both")
    parser.add_argument("--cells", default="", help="names of cells, comma separated; default: all")
    parser.add_argument("--tune", action="store_true", help="time variants of vattn's kernel as well")
    args = parser.parse_args()
    wanted = [name for name in args.cells.split(",") if name]
    cells = [shape for shape in CELLS + MORE_CELLS if not wanted or shape.name in wanted]
    fa3 = peers.load_fa3(args.peers) if args.peers else None
    xqa = peers.load_xqa()
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "rows": [],
    }  # fmt: skip
    for fp8 in (True, False):
        if args.cache not in ("both", "fp8" if fp8 else "bf16"):
            continue
        for shape in cells:
            row = run_cell(shape, fp8, args, fa3, xqa)
            result["rows"].append(row)
            print(describe(row), flush=True)
            if args.json:
                args.json.write_text(json.dumps(result, indent=1))
                args.json.with_suffix(".md").write_text(markdown(result))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
