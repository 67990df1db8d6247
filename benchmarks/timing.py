"""Time functions on a GPU by CUDA-graph replays over rotated inputs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

REPLAYS = 7
TARGET_MS = 10.0


class Timer:
    """Calls captured in one CUDA graph, one set of inputs after the other.

    Args:
        calls: the same work over different inputs; together they should exceed the L2 cache several times.
    """

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        for call in calls:
            call()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        calls[0]()
        end.record()
        torch.cuda.synchronize()
        self.count = max(len(calls), min(50, int(TARGET_MS / max(start.elapsed_time(end), 1e-3)) + 1))
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.graph(self.graph, stream=stream):
            for i in range(self.count):
                calls[i % len(calls)]()
        self.microseconds: list[float] = []

    def replay(self) -> None:
        """Replay once and note the time of one call."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        self.microseconds.append(start.elapsed_time(end) * 1e3 / self.count)


def interleave(timers: dict[str, Timer]) -> dict[str, float]:
    """Replay the timers in turn, so that clocks and heat treat them alike; return each one's median in us."""
    for _ in range(REPLAYS):
        for timer in timers.values():
            timer.replay()
    return {name: statistics.median(timer.microseconds) for name, timer in timers.items()}
