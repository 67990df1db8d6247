"""`python -m vattn tune`: time the backends on this GPU, kind of layer by kind of layer, for `auto` to choose by.

What it writes is read through the environment variable `VATTN_CHOICE_TABLE` (`vattn.backends.choice_table`).
"""

from __future__ import annotations

import argparse
import datetime
import itertools
from collections.abc import Sequence
from pathlib import Path

import torch

from vattn.backends import choice_table, selector
from vattn.backends.choice_table import ChoiceTable, Kind, Measured
from vattn.calibration.result_files import check_output
from vattn.cli.bench.command import forbid_builds
from vattn.config.device import DeviceInfo
from vattn.config.files import write_whole
from vattn.errors import ConfigError, DeviceError

BACKENDS = ("TRITON_ATTN", "FLASHINFER", "FLASH_ATTN")
"""What is timed, where it is installed; the plain torch backend is no rival."""

STEPS = ("decode 1x8k", "decode 32x1k", "decode 64x4k", "speculative 64x4k, 4", "prefill 1x8k", "chunk 4x512 of 8k")
"""What a layer meets, each counting alike."""

SHAPES: dict[str, tuple[int, int, int, int | None]] = {
    "head 128 group 4": (32, 8, 128, None),
    "head 128 group 8": (64, 8, 128, None),
    "head 64": (64, 8, 64, None),
    "head 256": (16, 8, 256, None),
    "head 128 window": (32, 8, 128, 1024),
    "head 256 window": (16, 8, 256, 1024),
}
"""Heads, KV heads, head size and window of the kinds that are measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the subcommand's arguments."""
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the table goes")
    parser.add_argument("--check", type=Path, metavar="FILE", help="read a table, say what it changes, measure nothing")
    parser.add_argument(
        "--build-peers", action="store_true", help="let FlashInfer compile missing kernels, for minutes"
    )
    parser.add_argument("--shapes", default="", help=f"kinds of layers by semicolons: {'; '.join(SHAPES)}")
    parser.add_argument("--steps", default="", help=f"kinds of steps by semicolons: {'; '.join(STEPS)}")
    parser.add_argument("--cache", choices=("both", "bf16", "fp8"), default="both")
    parser.add_argument("--replays", type=int, default=5, metavar="N", help="interleaved rounds (default: 5)")


def main(options: argparse.Namespace) -> int:
    """Run the subcommand and return 0."""
    if options.check:
        _show(choice_table.read_table(options.check))
        return 0
    if not options.out:
        raise ConfigError("tune without --out", "--out FILE", f"then set {choice_table.VARIABLE}=FILE")
    if not torch.cuda.is_available():
        raise DeviceError(
            "tune on a machine without a usable GPU", "a CUDA GPU", "run `python -m vattn doctor` to see what was found"
        )
    check_output("--out", options.out, replaced=True)
    forbid_builds(options.build_peers)
    caches = ("bf16", "fp8") if options.cache == "both" else (options.cache,)
    shapes = _picked("--shapes", options.shapes, list(SHAPES))
    table = measure(shapes, _picked("--steps", options.steps, list(STEPS)), caches, options.replays)
    write_whole(options.out, table.dump())
    _show(table)
    print(f"written to {options.out}; use it with {choice_table.VARIABLE}={options.out}")
    return 0


def _picked(option: str, text: str, known: list[str]) -> list[str]:
    names = [name.strip() for name in text.split(";") if name.strip()]
    for name in names:
        if name not in known:
            raise ConfigError(f"{option} {name!r}", "; ".join(known), "choose from these")
    return names or known


def measure(
    shapes: Sequence[str], steps: Sequence[str], caches: Sequence[str], replays: int, device_type: str = "cuda"
) -> ChoiceTable:
    """Time the usable backends on every kind; each result is compared with fp32 before it counts.

    Args:
        shapes, steps: names in `SHAPES` and `STEPS`.
        caches: `"bf16"` and `"fp8"`.
        replays: interleaved rounds; the median counts.
        device_type: `"cuda"`, or `"cpu"` for tiny cells; their times mean nothing.
    """
    from vattn.cli.bench.attention import Settings, run_cell
    from vattn.cli.bench.peers import backend_peer
    from vattn.cli.bench.shapes import WORKS, LayerShape, tiny

    device = DeviceInfo.of(device_type)
    peers, versions = [], {"torch": str(torch.__version__)}
    for name in BACKENDS:
        backend = selector.get_backend(name)
        print(f"{name}: {backend.problem() or 'found'}", flush=True)
        if backend.problem() is None:
            peers.append(backend_peer(name))
            if running := backend.running():
                versions.update([running])
    settings = Settings(replays=replays, target_ms=5.0, device=device_type)
    measured, done = [], 0
    for shape, cache in itertools.product(shapes, caches):
        heads, kv_heads, head_size, window = SHAPES[shape]
        layer = LayerShape(shape, heads, kv_heads, head_size, window)
        us: dict[str, dict[str, float]] = {}
        for step in steps:
            done += 1
            cell = (layer, WORKS[step]) if device_type == "cuda" else tiny(layer, WORKS[step])
            row = run_cell(*cell, cache, peers, settings, {})
            what = f"[{done}/{len(shapes) * len(caches) * len(steps)}] {shape}, {cache}, {step}"
            if "failed" in row:
                print(f"{what}: failed: {row['failed']}", flush=True)
                continue
            us[step] = {name: entry["us"] for name, entry in row["kernels"].items() if "us" in entry}
            others = {name: entry for name, entry in row["kernels"].items() if "us" not in entry}
            print(f"{what}: {us[step]} {others or ''}", flush=True)
            if device_type == "cuda":
                torch.cuda.empty_cache()
        stored = "fp8_e4m3" if cache == "fp8" else "bfloat16"
        measured.append(Measured(Kind(head_size, heads // kv_heads, stored, window is not None), us))
    today = datetime.date.today().isoformat()
    return ChoiceTable(device.name, device.capability, today, versions, tuple(measured))


def _show(table: ChoiceTable) -> None:
    """Print the speeds of each kind of layer."""
    print(f"{table.gpu} (sm_{table.capability[0]}{table.capability[1]}), {table.date}")
    for cell in table.cells:
        names = sorted({name for times in cell.us.values() for name in times})
        speeds = {name: cell.speed(name, BACKENDS[0]) for name in names}
        text = ", ".join(f"{name} {speed:.2f}" for name, speed in speeds.items() if speed is not None)
        print(f"  {cell.kind}: speed over {BACKENDS[0]}: {text or 'nothing to compare'}")
