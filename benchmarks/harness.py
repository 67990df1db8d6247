"""What the benchmarks share: their command line, times in turn, and the files that they write."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vattn.cli.bench.attention import warm
from vattn.cli.bench.report import write_result
from vattn.cli.bench.timing import REPLAYS, Timer, WallTimer, interleave

ROOT = Path(__file__).resolve().parents[1]
Call = Callable[[], object]
Calls = Sequence[Call] | Callable[[], Sequence[Call]]


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the script's text, with `--json`."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all numbers")
    return parser


def machine(device: str = "cuda") -> dict[str, Any]:
    """Return where and with what a run is made, and room for its rows."""
    versions, on_gpu = {"torch": torch.__version__}, device == "cuda" and torch.cuda.is_available()
    if on_gpu:
        import triton

        versions["triton"] = triton.__version__
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    return {"date": datetime.date.today().isoformat(), "device": name, "versions": versions, "rows": []}


def versions_of(result: Mapping[str, Any]) -> str:
    """Return the versions of a run in words."""
    return ", ".join(f"{name} {version}" for name, version in result["versions"].items())


def add_row(result: dict[str, Any], row: dict[str, Any], path: Path | None, shown: str | None = None) -> None:
    """Add a row to a result, print it as JSON or as `shown`, and write what there is so far."""
    result["rows"].append(row)
    print(json.dumps(row) if shown is None else shown, flush=True)
    if path:
        write_result(path, result)


def load_example(name: str) -> Any:
    """Import an example by the name of its file; each call makes a module of its own."""
    folder = ROOT / "examples"
    spec = importlib.util.spec_from_file_location(f"example_{name[:2]}", folder / name)
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))  # `demo` lies beside the examples.
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    first, *others = ("| " + " | ".join(map(str, line)) + " |\n" for line in (columns, *rows))
    return first + "|---" * len(columns) + "|\n" + "".join(others)


def timer(calls: Sequence[Call], device: str) -> Timer | WallTimer:
    """Return what times calls on a device: CUDA graphs, or the clock on a CPU."""
    return Timer(calls) if device == "cuda" else WallTimer(calls)


def time_in_turn(
    calls: Mapping[str, Calls], device: str = "cuda", replays: int = REPLAYS, warm_up: bool = False
) -> tuple[dict[str, float], dict[str, str]]:
    """Time kernels one after another; on a CPU each runs once, which shows only that it runs.

    Args:
        calls: of each kernel, one over each set of inputs, or what makes them.
        warm_up: load the GPU first, for kernels that run at the power limit.

    Returns:
        Microseconds by name, medians, and why the others could not be timed.
    """
    timers: dict[str, Timer | WallTimer] = {}
    failed: dict[str, str] = {}
    for name, each in calls.items():
        try:
            timers[name] = timer(each() if callable(each) else each, device)
        except Exception as error:  # What fails is reported, and the rest goes on.
            failed[name] = repr(error)[:300]
            print(f"{name} failed: {error!r}"[:600], file=sys.stderr)
    if warm_up:
        warm(timers)
    return interleave(timers, replays if device == "cuda" else 1), failed


def run_cells(
    text: str | None, cells: Mapping[str, Any], run: Callable[[Any, str], dict[str, Any]], given: list[str] | None
) -> int:
    """Run a script of named cells, whose `run` takes a cell and a device; returns 1 if any failed."""
    parser = parser_of(text)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cells")
    options = parser.parse_args(given)
    result, names = machine(options.device), list(cells)
    for name in names if options.only is None else [names[number] for number in options.only]:
        try:
            row = run(cells[name], options.device)
        except Exception as error:  # The other cells are worth their time.
            row = {"failed": f"{type(error).__name__}: {error}"[:600]}
        add_row(result, {"name": name, **row}, options.json)
        if options.device == "cuda":
            torch.cuda.empty_cache()
    return int(any("failed" in row for row in result["rows"]))


def run_module(name: str, arguments: Sequence[str], **options: Any) -> Any:
    """Run a benchmark in a process of its own; returns what `subprocess.run` does."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-m", name, *arguments], env=env, text=True, **options)
