"""The subcommand `bench attention` of `python -m vattn`."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vattn.calibration.result_files import check_output, check_picture
from vattn.cli.doctor import aligned, version_of
from vattn.config.device import BLOCK_SIZES
from vattn.config.files import write_whole
from vattn.errors import ConfigError, DeviceError

if TYPE_CHECKING:
    from vattn.cli.bench.shapes import LayerShape, Work

COMPILED_AT_ONCE = 32
"""Rows, before the first of them is measured."""

PACKAGES = ("torch", "triton", "flashinfer-python", "flash-attn-4", "flash-attn")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the subcommand's arguments."""
    parser.add_argument("what", choices=("attention",), help="what is measured")
    parser.add_argument("--peers", default="all", help="peers by commas, all or none (default: all that are found)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write a page with the table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the results (needs matplotlib)")
    parser.add_argument("--models", default="", help="layers by the beginnings of their names, by commas")
    parser.add_argument("--work", default="", help="kinds of steps by the beginnings of their names, by semicolons")
    parser.add_argument("--cache", choices=("both", "bf16", "fp8"), default="both")
    parser.add_argument(
        "--only",
        default="",
        metavar="ROWS",
        help="rows as MODEL/WORK/CACHE, each the beginning of a name or empty, by semicolons; run in this order",
    )
    parser.add_argument(
        "--random", type=int, metavar="N", help="N random steps of layers of published models instead of named rows"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="of --random (default: 0)")
    parser.add_argument(
        "--resume", action="store_true", help="keep the rows that the file of --json has, and run those that it lacks"
    )
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens per block (default: 16)")
    parser.add_argument("--replays", type=int, default=7, metavar="N", help="interleaved rounds (default: 7)")
    parser.add_argument("--seconds", type=float, metavar="N", help="begin no further cell after so long (default: all)")
    parser.add_argument("--fa3", metavar="PATH", help="a FlashAttention-3 library to load")
    parser.add_argument(
        "--build-peers", action="store_true", help="let FlashInfer compile missing kernels, for minutes"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny cells by the clock")
    parser.add_argument(
        "--list", action="store_true", help="print models, kinds of steps and peers, and measure nothing"
    )
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="show results of an earlier --json")
    parser.set_defaults(defaults=parser.get_default)


def main(options: argparse.Namespace) -> int:
    """Run the subcommand; return 1 where vattn failed in a cell, else 0."""
    from vattn.cli.bench import report

    if options.list:
        _list()
        return 0
    if options.source:
        _refuse_ignored(options)
    for name in ("json", "markdown", "plot"):
        check_output(f"--{name}", getattr(options, name))
    if options.plot:
        check_picture(options.plot, f"--plot {options.plot}", "--plot out.png")
    result = report.read_result(options.source) if options.source else _measure(options)
    report.print_table(result)
    print(*report.summary(result), sep="\n")
    if options.markdown:
        write_whole(options.markdown, report.markdown(result))
    if options.plot:
        from vattn.cli.bench import picture

        picture.plot(result, options.plot)
    return 1 if report.failures(result["rows"]) else 0


def _refuse_ignored(options: argparse.Namespace) -> None:
    """Refuse options that only a measurement reads, given with `--from`."""
    read = ("command", "defaults", "what", "source", "markdown", "plot")
    for name, value in vars(options).items():
        if name not in read and value != options.defaults(name):
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} with --from", "--markdown and --plot", f"leave {option} out")


def _list() -> None:
    from vattn.cli.bench import peers, shapes

    print("models", aligned([[layer.name, str(layer)] for layer in shapes.LAYERS.values()]), sep="\n")
    print("work", aligned([[name] for name in shapes.WORKS]), sep="\n")
    print("peers", aligned([[p.key, p.name, p.problem() or "found"] for p in (*peers.PEERS, *peers.BESIDE)]), sep="\n")


def _names(text: str, separator: str = ",") -> list[str]:
    return [name.strip() for name in text.split(separator) if name.strip()]


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from vattn.cli.bench import attention, ceilings, peers, report, shapes

    cpu = options.device == "cpu"
    if not cpu and not torch.cuda.is_available():
        raise DeviceError(
            "a benchmark on a machine without a usable GPU",
            "a CUDA GPU, or --device cpu, which runs tiny cells to try the command",
            "run `python -m vattn doctor` to see what was found",
        )
    if options.replays < 1:
        raise ConfigError(f"--replays {options.replays}", "1 or more", "leave it out for 7")
    if options.block_size not in BLOCK_SIZES:
        raise ConfigError(f"--block-size {options.block_size}", f"{BLOCK_SIZES}", "leave it out for 16")
    if options.seconds is not None and not options.seconds >= 0:
        raise ConfigError(f"--seconds {options.seconds}", "a number from 0 up", "leave it out to measure everything")
    if options.fa3:
        from vattn.backends.flash_attn.libraries import load_flash_attn

        load_flash_attn(options.fa3)
    if options.resume and options.json is None:
        raise ConfigError("--resume without --json", "--json FILE", "name the file to go on with")
    forbid_builds(options.build_peers or cpu)
    rows = _rows(options)
    # Refused on a CPU too, where no peer runs.
    others = peers.choose_peers(_names(options.peers))
    if options.random is not None:
        others = [peer for peer in others if peer.paged]
    chosen = [peers.ON_CPU] if cpu else [*peers.OWN, peers.STREAM, *others]
    states = {peer.name: peer.problem() or "found" for peer in chosen}
    settings = attention.Settings(options.block_size, options.replays, device=options.device)
    if cpu:
        rows = [(*shapes.tiny(layer, work), cache) for layer, work, cache in rows]
    run: dict[str, Any] = {
        "format": report.FORMAT,
        "command": " ".join(["python -m vattn", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": platform.processor() or "CPU" if cpu else torch.cuda.get_device_name(),
        "capability": [0, 0] if cpu else list(torch.cuda.get_device_capability()),
        "versions": {name: version for name in PACKAGES if (version := version_of(name))},
        "block_size": options.block_size,
        "peers": {name: state if state == "found" else f"missing: {state}" for name, state in states.items()},
        "ceilings": {} if cpu else ceilings.measure(),
        "rows": [],
    }
    result = report.resumed(options.json, run) if options.resume and options.json.exists() else run
    done = {report.name_of(row) for row in result["rows"]}
    left = [row for row in rows if (row[0].name, row[1].name, row[2]) not in done]
    found = [peer for peer in chosen if states[peer.name] == "found"]
    start, count = time.monotonic(), len(rows) - len(left)
    for place, cell in enumerate(left):
        if place % COMPILED_AT_ONCE == 0:
            ahead = [(row, peers.OWN) for row in left[place : place + COMPILED_AT_ONCE]]
            attention.compile_kernels(ahead, settings)
        row = attention.run_cell(*cell, found, settings, run["ceilings"])
        if not cpu:
            torch.cuda.empty_cache()
        result["rows"].append(row)
        count += 1
        print(" | ".join(report.cells_of(row)), file=sys.stderr, flush=True)
        if options.json:
            report.write_result(options.json, result)
        if options.seconds is not None and time.monotonic() - start > options.seconds and count < len(rows):
            print(f"stopped after {options.seconds} s: {count} of {len(rows)} rows", file=sys.stderr)
            break
    return result


def _rows(options: argparse.Namespace) -> list[tuple[LayerShape, Work, str]]:
    """Return what is measured: named rows, or drawn ones."""
    from vattn.cli.bench import random_steps, shapes

    only = _names(options.only, ";")
    names = _names(options.models), _names(options.work, ";")
    if options.random is None:
        if options.seed is not None:
            raise ConfigError(f"--seed {options.seed} without --random", "--random N --seed S", "give both or neither")
        # --only may name rows beyond the default ones.
        cells = shapes.every_cell() if only and not any(names) else shapes.choose_cells(*names)
        return shapes.choose_rows(cells, ("bf16", "fp8") if options.cache == "both" else (options.cache,), only)
    if options.random < 1:
        raise ConfigError(f"--random {options.random}", "1 or more", "leave it out to measure named rows")
    if only or any(names) or options.cache != "both":
        raise ConfigError(
            "--random with --models, --work, --only or --cache", "--random N --seed S", "name rows or draw them"
        )
    return random_steps.draw(options.random, options.seed or 0)


def forbid_builds(allowed: bool) -> None:
    """Keep FlashInfer from compiling during a measurement, unless that is allowed."""
    if not allowed:
        os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")
