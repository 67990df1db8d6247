"""Ask for the weights of the next product while small kernels leave memory idle, on a branch of a captured graph.

Between two products of a decode step stand kernels that read next to nothing. A branch that begins when the first
product ends, and for which nothing waits, brings the first bytes of the second one's weights into the L2 cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vattn.ops import hopper, variants
from vattn.ops.installed import has_triton

MOST_ROWS = 64
"""Rows of the input of products whose time is that of reading weights."""

AHEAD_BYTES = 16 << 20
"""Of weights, asked for at once: what memory delivers while the small kernels run, and less than the cache holds."""


def reader(device: torch.device) -> ReadAhead | None:
    """Return what reads ahead in graphs captured on a device, `None` where nothing does."""
    wanted = variants.current().weights_ahead == "branch" and has_triton() and hopper.is_hopper(device)
    return ReadAhead(device) if wanted else None


class ReadAhead:
    """Learns the order of the products of a step, then puts a branch behind each of them into a captured graph."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.weights: list[Tensor] = []
        self._place = -1
        self._forked = False

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Note the weights of the products of a step, in a run before the capture."""
        self.weights, self._place = [], -1
        with _using(self):
            yield

    @contextlib.contextmanager
    def branching(self) -> Iterator[None]:
        """Branch off behind the products of a step that is captured; the branches join at its end."""
        captured = torch.cuda.current_stream(self.stream.device)
        while self.stream == captured:  # streams come from a pool
            self.stream = torch.cuda.Stream(self.stream.device)
        self._place, self._forked = 0, False
        with _using(self):
            yield
        if self._forked:
            captured.wait_stream(self.stream)

    def passed(self, weight: Tensor, rows: int) -> None:
        """Take note of a product that has been launched."""
        from vattn.ops.triton.read_ahead import ask_for

        if self._place < 0:
            if not self.weights:
                # A kernel that a capture launches must be loaded before.
                ask_for(weight, 0, min(AHEAD_BYTES, weight.nbytes))
            self.weights.append(weight)
            return
        place, self._place = self._place, self._place + 1
        if not (place < len(self.weights) and self.weights[place].data_ptr() == weight.data_ptr()):
            return
        wanted = parts(self.weights, place, rows)
        if not wanted:
            return
        self.stream.wait_stream(torch.cuda.current_stream(weight.device))
        self._forked = True
        with torch.cuda.stream(self.stream):
            for tensor, start, size in wanted:
                ask_for(tensor, start, size)


def parts(weights: Sequence[Tensor], place: int, rows: int) -> list[tuple[Tensor, int, int]]:
    """Return what is asked for behind a product: weights, and the first of their bytes and how many."""
    if rows > MOST_ROWS or place + 1 >= len(weights):
        return []
    after = weights[place + 1]
    return [(after, 0, min(AHEAD_BYTES, after.nbytes))]


_current: ReadAhead | None = None


@contextlib.contextmanager
def _using(ahead: ReadAhead) -> Iterator[None]:
    global _current
    _current = ahead
    try:
        yield
    finally:
        _current = None


def passed(weight: Tensor, rows: int) -> None:
    """Tell whoever reads ahead, if anybody does, that a product has been launched."""
    if _current is not None:
        _current.passed(weight, rows)
