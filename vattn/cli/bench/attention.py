"""`python -m vattn bench attention`: check and time every kernel on every cell, interleaved, against the ceilings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from vattn.cli.bench.cell import Cell
from vattn.cli.bench.peers import BESIDE, STREAM, NotThisCellError, Peer
from vattn.cli.bench.shapes import LayerShape, Work
from vattn.cli.bench.timing import Timer, WallTimer, interleave
from vattn.compilation.compile_ahead import compiling_ahead, is_compiling_ahead, only_compiling

ROTATED_BYTES = 300 << 20
"""Inputs of a kernel together, several times the L2 cache, so that no replay finds its keys there."""

MAX_ROTATIONS = 4
WARM_SECONDS = 0.2
"""Load before a prefill is timed: such kernels run at the power limit."""


@dataclass(frozen=True)
class Settings:
    """How cells are run.

    Attributes:
        block_size: tokens per block.
        replays: rounds of interleaved replays.
        target_ms: work of one captured graph, at least.
        device: `"cuda"`, or `"cpu"` for small cells by the clock.
    """

    block_size: int = 16
    replays: int = 7
    target_ms: float = 10.0
    device: str = "cuda"


def compile_kernels(rows: Iterable[tuple[tuple[LayerShape, Work, str], Sequence[Peer]]], settings: Settings) -> None:
    """Compile vattn's kernels of rows by processes, on machines with a GPU: one by one they take longer than the rest.

    What fails here is reported where the row runs.
    """
    with compiling_ahead(torch.device(settings.device)):
        if not is_compiling_ahead():
            return
        with only_compiling():
            for row, peers in rows:
                for peer in peers:
                    with suppress(Exception):
                        peer.make(Cell(*row, settings.block_size, 0, settings.device, filled=False))()


def run_cell(
    layer: LayerShape, work: Work, cache: str, peers: Sequence[Peer], settings: Settings, ceilings: dict[str, Any]
) -> dict[str, Any]:
    """Check and time every kernel on one cell; failures are reported and do not stop the run.

    Returns:
        `model, work, cache, bytes, flops`, per kernel `us` and `error` or what kept it from running (`skipped`,
        `wrong`, `failed`), and the ratios of `add_ratios`.
    """
    row: dict[str, Any] = {"model": layer.name, "work": work.name, "cache": cache, "kernels": {}}
    try:
        cells = rotations(layer, work, cache, settings)
    except (RuntimeError, ValueError) as error:  # out of memory, for one
        row["failed"] = repr(error)[:300]
        return row
    row["bytes"], row["flops"] = cells[0].bytes, cells[0].flops
    timers: dict[str, Timer | WallTimer] = {}
    kept = []
    for peer in peers:
        entry = row["kernels"].setdefault(peer.name, {})
        calls = _checked(peer, cells, entry)
        if calls is None:
            continue
        kept.append(calls)  # a graph reads what the calls hold
        try:
            timers[peer.name] = WallTimer(calls) if settings.device == "cpu" else Timer(calls, settings.target_ms)
        except Exception as error:  # a kernel that cannot be captured
            entry["failed"] = _short(error)
    if work.rows > 16 * len(work.requests):
        warm(timers)
    for name, microseconds in interleave(timers, settings.replays).items():
        row["kernels"][name]["us"] = round(microseconds, 2)
    add_ratios(row, ceilings)
    return row


def rotations(layer: LayerShape, work: Work, cache: str, settings: Settings) -> list[Cell]:
    """Return as many sets of a cell's inputs as exceed the L2 cache."""
    first = Cell(layer, work, cache, settings.block_size, 0, settings.device)
    count = max(1, min(MAX_ROTATIONS, ROTATED_BYTES // max(1, first.bytes)))
    if settings.device == "cpu":
        count = 1
    others = (Cell(layer, work, cache, settings.block_size, seed, settings.device) for seed in range(1, count))
    return [first, *others]


def _checked(peer: Peer, cells: Sequence[Cell], entry: dict[str, Any]) -> list[Callable[[], object]] | None:
    """Make a kernel's calls and compare one result; notes in `entry` what keeps it from being timed."""
    cell = cells[-1]
    try:
        calls: list[Callable[[], object]] = [peer.make(cell) for cell in cells]
        output = calls[-1]()
        if not peer.attends:
            return calls
        assert isinstance(output, torch.Tensor)
        if output.dim() == 4:
            output = output.transpose(1, 2).flatten(0, 1)
        if cell.device == "cuda":
            torch.cuda.synchronize()
        error = cell.error(output)
    except NotThisCellError as reason:
        entry["skipped"] = str(reason)
        return None
    except Exception as failure:  # a failing peer is reported and does not stop the run
        entry["failed"] = _short(failure)
        return None
    entry["error"] = float(f"{error:.2e}")
    if not error <= peer.limit[cell.fp8]:
        entry["wrong"] = f"relative error {error:.2e}, at most {peer.limit[cell.fp8]:.2e} is right"
        return None
    return calls


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}"[:300]


def warm(timers: dict[str, Timer | WallTimer]) -> None:
    """Replay the graphs for a while, so that the GPU is at its power limit."""
    end = time.monotonic() + WARM_SECONDS
    graphs = [timer.graph for timer in timers.values() if isinstance(timer, Timer)]
    while graphs and time.monotonic() < end:
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()


def add_ratios(row: dict[str, Any], ceilings: dict[str, Any]) -> None:
    """Add what vattn's best kernel reached.

    Adds:
        best_own, best_peer: names of the fastest of vattn's kernels and of the others; contiguous ones count too.
        peer_over_own: time of the best peer over vattn's; above one, vattn is faster.
        stream_over_own: time of reading the same keys by the block table over vattn's.
        tb_s, tflops: rates of `best_own`.
        of_hbm, of_gemm: those rates over the ceilings of the same run.
    """
    beside = {peer.name for peer in (*BESIDE, STREAM)}
    times = {name: entry["us"] for name, entry in row["kernels"].items() if "us" in entry}
    own = {name: us for name, us in times.items() if name.startswith("vattn") and name not in beside}
    others = {name: us for name, us in times.items() if not name.startswith("vattn") and name not in beside}
    if not own:
        return
    row["best_own"] = min(own, key=lambda name: own[name])
    us = own[row["best_own"]]
    row["tb_s"], row["tflops"] = round(row["bytes"] / us / 1e6, 3), round(row["flops"] / us / 1e6, 1)
    if others:
        row["best_peer"] = min(others, key=lambda name: others[name])
        row["peer_over_own"] = round(others[row["best_peer"]] / us, 3)
    if STREAM.name in times:
        row["stream_over_own"] = round(times[STREAM.name] / us, 3)
    gemm = ceilings.get("fp8_tflops" if "FP8 query" in row["best_own"] else "bf16_tflops")
    if isinstance(hbm := ceilings.get("hbm_tb_s"), float):
        row["of_hbm"] = round(row["tb_s"] / hbm, 3)
    if isinstance(gemm, float):
        row["of_gemm"] = round(row["tflops"] / gemm, 3)
