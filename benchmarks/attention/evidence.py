"""Say what bounds a cell: bytes moved and tensor cores used by vattn's kernels, beside the ceilings of the same run.

    python -m benchmarks.attention.evidence --cells "llama3-8b/decode 32x1k/bf16;llama3-8b/decode 32x1k/fp8"

Each cell is timed in CUDA graphs, a decode step beside a kernel that streams the same blocks, and torch's profiler says
which kernels a step launches and how long each runs. Where Nsight Compute is installed and may read the counters, bytes
of memory and tensor-core cycles are the hardware's; otherwise they are counted from the shapes, and the output says so.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import shutil
import subprocess
from typing import Any

import torch

from benchmarks.harness import Call, add_row, machine, parser_of, run_module, time_in_turn
from vattn.cli.bench import attention, ceilings, peers
from vattn.cli.bench.cell import Cell
from vattn.cli.bench.shapes import LAYERS, WORKS

CELLS = "llama3-8b/decode 32x1k/bf16;llama3-8b/decode 32x1k/fp8"
METRICS = {
    "dram__bytes_read.sum": "bytes_read",
    "dram__bytes_write.sum": "bytes_written",
    "gpu__time_duration.sum": "ns",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": "tensor_pipe_percent",
    "sm__inst_issued.avg.pct_of_peak_sustained_active": "issue_percent",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
}
"""Nsight Compute's counters and what they are called here."""

MARK = "measured step"


def steps_of(name: str) -> tuple[Cell, list[Call], list[Call]]:
    """Return the cell of a name, vattn's calls on rotated inputs and a streaming kernel's, if there is one for it."""
    layer, work, cache = name.split("/")
    settings = attention.Settings()
    cells = attention.rotations(LAYERS[layer], WORKS[work], cache, settings)
    calls = [peers.backend_peer("TRITON_ATTN").make(cell) for cell in cells]
    try:
        stream: list[Call] = [peers.STREAM.make(cell) for cell in cells]
    except peers.NotThisCellError:
        stream = []
    return cells[0], calls, stream


def kernels_of(calls: list[Call]) -> dict[str, dict[str, float]]:
    """Return microseconds and launches a step by kernel, from torch's profiler; they include gaps of no kernel."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for call in calls:
            call()
        torch.cuda.synchronize()
    found = {}
    for event in profiler.key_averages():
        if event.self_device_time_total > 0:
            us, launches = event.self_device_time_total / len(calls), event.count / len(calls)
            found[event.key[:80]] = {"us": round(us, 3), "launches": round(launches, 2)}
    return found


def counters_of(name: str) -> dict[str, Any]:
    """Return the hardware's counters by kernel of one step, or why there are none."""
    program = shutil.which("ncu")
    if program is None:
        return {"missing": "ncu is not installed"}
    profiler = [
        program, "--csv", "--metrics", ",".join(METRICS), "--nvtx", "--nvtx-include", f"{MARK}/",
        "--target-processes", "all",
    ]  # fmt: skip
    try:
        done = run_module("benchmarks.attention.evidence", ["--one", name], profiler, capture_output=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"missing": repr(error)[:200]}
    return parse_counters(done.stdout) or {"missing": (done.stdout + done.stderr)[-300:]}


def parse_counters(text: str) -> dict[str, dict[str, float]]:
    """Return counters by kernel from Nsight Compute's table; what stands before it is skipped."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    found: dict[str, dict[str, float]] = {}
    if start is None:
        return found
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        metric = METRICS.get(row.get("Metric Name", ""))
        if metric:
            value = float(row["Metric Value"].replace(",", "")) * _UNITS.get(row.get("Metric Unit", ""), 1.0)
            kernel = found.setdefault(row["Kernel Name"][:80], {})
            kernel[metric] = kernel.get(metric, 0.0) + value
    return found


_UNITS = {
    "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6, "second": 1e9,
}  # fmt: skip
"""Factors to bytes and nanoseconds."""


def counted(cell: Cell, us: float, stream_us: float | None, found: dict[str, Any]) -> dict[str, Any]:
    """Return rates by the bytes and operations of the shapes, and their shares of the ceilings."""
    rates: dict[str, Any] = {
        "tb_s": round(cell.bytes / us / 1e6, 3), "tflops": round(cell.flops / us / 1e6, 2),
        "of_streaming": None if stream_us is None else round(stream_us / us, 4),
    }  # fmt: skip
    for rate, ceiling in (("tb_s", "hbm_tb_s"), ("tflops", "bf16_tflops")):
        if isinstance(found.get(ceiling), float):
            rates[f"{rate}_of_ceiling"] = round(rates[rate] / found[ceiling], 4)
    return rates


def evidence(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Time and profile one cell."""
    cell, calls, stream = steps_of(name)
    error = cell.error(calls[0]())  # type: ignore[arg-type]
    times, _ = time_in_turn({"vattn": calls} | ({"stream": stream} if stream else {}))
    us, stream_us = times["vattn"], times.get("stream")
    row: dict[str, Any] = {
        "cell": name, "error": error, "us": round(us, 2), "stream_us": stream_us,
        "bytes": cell.bytes, "flops": cell.flops, "counted": counted(cell, us, stream_us, found),
        "kernels": kernels_of(calls),
    }  # fmt: skip
    del calls, stream
    torch.cuda.empty_cache()
    return row | {"counters": counters_of(name)}


def run_one(name: str) -> None:
    """Run one marked step, for Nsight Compute."""
    _, calls, _ = steps_of(name)
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_push(MARK)
    calls[0]()
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_pop()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cells", default=CELLS, help="names of cells, by semicolons")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_one(options.one)
        return
    found = ceilings.measure()
    result = {"ceilings": found, **machine()}
    for name in options.cells.split(";"):
        row = evidence(name.strip(), found)
        add_row(result, row, options.json, json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
