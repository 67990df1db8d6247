"""Latent attention beside FlashMLA, FlashInfer and FlashAttention-3: every cell's kernels in turn, by graph replays.

    python -m benchmarks.mla.attention --peers FOLDER --json out.json

The folder is searched for `flashmla.so`, `flashmla_ext.so` and `fa3.so`; FlashInfer is used where it is installed. A
cell has a process of its own, most wanted first: what a peer breaks there stays there. A row a cell is printed and
written: microseconds, ratios to vattn (above 1: vattn is faster), and whether the bar is met. `--device cpu` runs tiny
sizes without peers, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import add_row, machine, parser_of, run_module, time_in_turn
from benchmarks.mla.cells import NARROW, TINY, Cell, Inputs, fa3_prefill, load_peers

_FP8 = {"kv_cache_dtype": "fp8_e4m3"}
_CODES = {**_FP8, "query_format": "fp8_e4m3"}

CELLS: tuple[Cell, ...] = (
    Cell("decode", 16, 64, 8192, bar=1.02),
    Cell("decode", 128, 128, 4096, bar=0.95),
    Cell("prefill", 16, 1, 8192, tokens=8192, bar=0.97),
    Cell("decode", 16, 1, 8192, bar=2.0),
    Cell("decode", 128, 32, 4096, bar=1.02),
    Cell("op", 16, 128, 4096, changes={"output_format": "fp8_static"}, against={"output_format": "none"}, bar=1 / 1.03),
    Cell("op", 16, 128, 4096, changes={"output_format": "fp8_group128"}, against={}, bar=1 / 1.03),
    Cell("op", 16, 128, 4096, changes={"output_format": "nvfp4"}, against={}, bar=1 / 1.03),
    Cell("op", 16, 128, 4096, changes={"output_format": "fp8_per_token"}, against={}, bar=1 / 1.03),
    Cell("decode", 16, 64, 8192, changes=_FP8, bar=1.6),
    Cell("decode", 16, 128, 4096, changes=_FP8, bar=1.6),
    Cell("sparse", 128, 8, 65536, changes={"sparse": True}, bar=1 / 1.3),
    Cell("decode", 16, 8, 8192, bar=1.08),
    Cell("decode", 16, 128, 4096, bar=1.03),
    Cell("decode", 128, 1, 8192, bar=1.3),
    Cell("decode", 128, 8, 8192, bar=0.98),
    Cell("decode", 32, 64, 4096, bar=1.0),
    Cell("decode", 64, 32, 4096, bar=1.0),
    Cell("decode", 16, 32, 4096, tokens=2, bar=1.0),
    Cell("decode", 16, 32, 4096, tokens=4, bar=1.0),
    Cell("decode", 128, 16, 4096, tokens=2, bar=1.0),
    Cell("decode", 16, 64, -4096, bar=1.0),
    Cell("decode", 128, 32, -4096, bar=1.0),
    Cell("op", 16, 4, 8192, tokens=512),
    Cell("op", 16, 1, 8192, tokens=8192, changes={"output_format": "fp8_static"}, against={}, bar=1 / 1.03),
    Cell("op", 16, 64, 8192, changes={"kv_cache_dtype": "fp8_ds_mla"}, against={}),
    Cell("ways", 16, 1, 8192, tokens=8192),
    Cell("ways", 16, 4, 4096, tokens=1024),
    Cell("ways", 16, 64, 8192, changes=_FP8),
    Cell("ways", 8, 8, 8192, changes=_FP8),
    Cell("ways", 16, 1, 8192, changes=_FP8),
    Cell("ways", 128, 32, 4096, changes=_FP8),
    Cell("ways", 32, 64, -4096, changes=_FP8),
    Cell("decode", 16, 64, 8192, changes=_CODES),
    Cell("decode", 16, 128, 4096, changes=_CODES),
    Cell("op", 16, 1, 8192, tokens=8192),
    *(
        Cell("prefill", 16, 1, 8192, tokens=8192, changes={"output_format": name}, against={}, bar=1 / 1.03)
        for name in ("fp8_static", "fp8_group128", "nvfp4")
    ),
    Cell("prefill", 16, 1, 8192, tokens=8192, sizes=NARROW),
    Cell("ways", 16, 1, 8192, tokens=8192, sizes=NARROW),
    Cell("sparse", 128, 8, 65536, changes={"sparse": True, **_FP8}),
    Cell("sparse", 16, 8, 65536, changes={"sparse": True, **_FP8}),
    Cell("decode", 32, 8, 8192, bar=1.0),
    Cell("decode", 64, 8, 8192, bar=1.0),
    Cell("decode", 128, 16, 4096, tokens=4, bar=1.0),
    Cell("decode", 16, 128, -8192, bar=1.0),
    *(Cell("ways", 16, 1, 8192, tokens=8192, changes={"output_format": name}) for name in ("nvfp4", "fp8_group128")),
)
"""Most wanted first. An empty `against` of a changed cell is the layer without the changes."""


def steps_of(inputs: Inputs, peers: Path, check: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what is timed by name, vattn first, and notes: errors, and what was left out."""
    cell, notes, steps = inputs.cell, {}, {}
    if cell.kind == "decode" and cell.changes and inputs.device == "cuda":
        for name, changes in (("vattn", cell.changes), ("plain", cell.against)):
            steps[name], query = inputs.decode(**changes)
            if check:
                notes[f"error of {name}"] = round(inputs.error(query, steps[name](), **changes), 5)
        return steps, notes
    if cell.kind == "decode" and inputs.device == "cuda":
        own, query = inputs.decode()
        found, missing = load_peers(peers)
        makers: dict[str, Callable[[], Any]] = {"vattn": lambda: own}
        makers |= {name: lambda make=make: make(inputs, query) for name, make in found.items()}
        for name, make in makers.items():
            try:
                steps[name] = make()
                if check:
                    notes[f"error of {name}"] = round(inputs.error(query, steps[name]()), 5)
                else:
                    steps[name]()
                torch.cuda.synchronize()
            except Exception as error:  # A peer that cannot run a cell is left out of it.
                steps.pop(name, None)
                missing[name] = str(error)[:200]
        return steps, {**notes, **({"left out": missing} if missing else {})}
    alone = cell.kind == "prefill" and inputs.device == "cuda"
    # Row tiles are listed before, as a step's plan has them.
    make = partial(inputs.prefill, planned=True) if alone else inputs.op
    steps["vattn"] = make(**cell.changes)
    if cell.kind == "ways":
        steps = {"vattn": inputs.op(**cell.changes), "plain": inputs.on_any_gpu(**cell.changes)}
    elif cell.kind == "sparse":
        if inputs.device == "cuda":
            steps = {"vattn": inputs.op(**cell.changes), "plain": inputs.on_any_gpu(**cell.changes)}
        # Dense attention over as many keys as are listed.
        short = Cell("op", cell.heads, cell.batch, min(2048, abs(cell.length)), cell.tokens)
        steps["dense"] = Inputs(short, inputs.sizes, inputs.device).op()
    elif cell.changes:
        steps["plain"] = make(**cell.against)
    elif inputs.device == "cuda" and cell.tokens == abs(cell.length):
        _, missing = load_peers(peers)
        if "fa3.so" in missing:
            notes["left out"] = missing
        else:
            steps["fa3 without expanding"] = fa3_prefill(inputs)
    return steps, notes


def run_cell(number: int, device: str, peers: Path, check: bool) -> dict[str, Any]:
    """Time one cell and return its row."""
    cell, sizes = CELLS[number], CELLS[number].sizes
    if device == "cpu":
        sizes, length = TINY, (-40 if CELLS[number].length < 0 else 40)
        cell = Cell(cell.kind, 2, 2, length, min(cell.tokens, 40), None, cell.against, cell.changes)
    inputs = Inputs(cell, sizes, device)
    with torch.no_grad():
        steps, notes = steps_of(inputs, peers, check)
        times, failed = time_in_turn({name: [step] for name, step in steps.items()}, device)
    notes |= {f"not timed: {name}": problem for name, problem in failed.items()}
    own = times.get("vattn")
    row: dict[str, Any] = {"cell": number, "name": cell.name, "us": {name: round(t, 2) for name, t in times.items()}}
    if own is not None and len(times) > 1:
        # Of several peers the fastest counts.
        ratio = min(t for name, t in times.items() if name != "vattn") / own
        if cell.kind == "sparse":
            ratio = times["dense"] / own
        row["ratio"] = round(ratio, 3)
        if cell.bar is not None:
            row |= {"bar": round(cell.bar, 3), "met": ratio >= cell.bar}
    if own is not None and cell.kind == "decode":
        row["TB/s"] = round(inputs.cached_bytes / own / 1e6, 2)
    return {**row, **notes}


def run_apart(number: int, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Time one cell in a process of its own."""
    given = ["--inline", "--only", str(number), "--device", options.device]
    given += ["--peers", str(options.peers), *["--check"] * options.check]
    try:
        done = run_module("benchmarks.mla.attention", given, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"cell": number, "name": CELLS[number].name, "failed": f"not done after {seconds:.0f} s"}
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not rows:
        return {"cell": number, "name": CELLS[number].name, "failed": done.stderr.strip()[-400:] or "no output"}
    return dict(rows[-1])


def main(arguments: list[str] | None = None) -> int:
    """Run the cells; return 1 if any failed."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--peers", type=Path, default=Path("."), help="folder with peers' libraries")
    parser.add_argument("--check", action="store_true", help="compare decodes with fp32 first")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cells")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no cell after so long")
    parser.add_argument("--inline", action="store_true", help="all cells in this process")
    options = parser.parse_args(arguments)
    until, result = time.monotonic() + options.seconds, machine(options.device)
    for number in range(len(CELLS)) if options.only is None else options.only:
        left = until - time.monotonic()
        if left <= 0:
            print(f"cells from {number} on were not begun", file=sys.stderr)
            break
        if options.inline:
            row = run_cell(number, options.device, options.peers, options.check)
        else:
            row = run_apart(number, options, min(120.0, left + 5))
        add_row(result, row, options.json)
    return int(any("failed" in row for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
