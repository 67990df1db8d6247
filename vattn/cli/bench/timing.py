"""Time functions on a GPU by CUDA-graph replays over rotated inputs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

REPLAYS = 7
"""Rounds of replays; the median counts."""

TARGET_MS = 10.0
"""Work of one graph, at least."""

LEAD_CYCLES = 400_000
"""Clock cycles, about 0.2 ms, that the GPU is kept busy before what is timed. Launching a graph takes the host tens of
us, which would otherwise be in its time, and in that of every call the more, the fewer a graph holds."""


class Timer:
    """Calls captured in one CUDA graph, one set of inputs after the other.

    Args:
        calls: the same work over different inputs; together they should exceed the L2 cache several times.
        target_ms: work of the graph, at least.

    Attributes:
        microseconds: of one call, one value per replay.
    """

    def __init__(self, calls: Sequence[Callable[[], object]], target_ms: float = TARGET_MS) -> None:
        for call in calls:
            call()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(8 * LEAD_CYCLES)  # A call by itself takes the host longer than the GPU.
        start.record()
        calls[0]()
        end.record()
        torch.cuda.synchronize()
        self.count = max(len(calls), min(50, int(target_ms / max(start.elapsed_time(end), 1e-3)) + 1))
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.graph(self.graph, stream=stream):
            for i in range(self.count):
                calls[i % len(calls)]()
        # The graph reads and writes their tensors: without a reference, the capture would free them.
        self._calls = list(calls)
        self.microseconds: list[float] = []

    def replay(self) -> None:
        """Replay once and note the time of one call."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(LEAD_CYCLES)
        start.record()
        self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        self.microseconds.append(start.elapsed_time(end) * 1e3 / self.count)


def interleave(timers: Mapping[str, Timer | WallTimer], replays: int = REPLAYS) -> dict[str, float]:
    """Replay the timers in turn, so that clocks and heat treat them alike; return each one's median in us."""
    for _ in range(replays):
        for timer in timers.values():
            timer.replay()
    return {name: statistics.median(timer.microseconds) for name, timer in timers.items()}


class WallTimer:
    """The same for a CPU: calls one after the other by the clock."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self.calls = list(calls)
        self.microseconds: list[float] = []

    def replay(self) -> None:
        """Run every call once and note the mean time of one."""
        start = time.perf_counter()
        for call in self.calls:
            call()
        self.microseconds.append((time.perf_counter() - start) * 1e6 / len(self.calls))
