"""What is asked for behind which product, with streams that only keep what happens on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from vattn.ops import read_ahead
from vattn.ops.linear import LinearArgs, linear
from vattn.ops.triton import read_ahead as kernels


class Stream:
    """A stream: what it waited for and launched."""

    current: Stream

    def __init__(self, device: object = None) -> None:
        self.done: list[object] = []

    device = torch.device("cpu")

    def wait_stream(self, other: Stream) -> None:
        self.done.append(other)


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Streams instead of torch's; returns the current one."""
    Stream.current = Stream()

    @contextlib.contextmanager
    def stream(other: Stream) -> Iterator[None]:
        before, Stream.current = Stream.current, other
        yield
        Stream.current = before

    def ask_for(tensor: torch.Tensor, start: int, size: int) -> None:
        Stream.current.done.append((tensor.data_ptr(), start, size))

    for name, value in (("Stream", Stream), ("stream", stream), ("current_stream", lambda device: Stream.current)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(kernels, "ask_for", ask_for)
    return Stream.current


def product(weight: torch.Tensor, rows: int = 2) -> None:
    linear(LinearArgs(torch.zeros(rows, weight.shape[1]), weight, None, None, "float32"))


def test_the_next_weights_are_asked_for_beside(main: Stream) -> None:
    weights = [torch.zeros(size, 8) for size in (3, 5, 7)]
    ahead = read_ahead.ReadAhead(torch.device("cpu"))
    for _ in range(2):
        with ahead.learning():
            for weight in weights:
                product(weight)
    assert len(main.done) == 2, "the kernel is loaded by every run before"
    main.done.clear()
    with ahead.branching():
        for weight in weights:
            product(weight)
        assert not main.done, "nothing waits for a branch"
    assert main.done == [ahead.stream]
    asked = [(weight.data_ptr(), 0, weight.nbytes) for weight in weights[1:]]
    assert ahead.stream.done == [main, asked[0], main, asked[1]]
    product(weights[0])
    assert ahead.stream.done == [main, asked[0], main, asked[1]], "nobody reads ahead outside"


def test_what_is_left_alone(main: Stream) -> None:
    """Other products than those of the run before, long inputs, and a stream that captures itself."""
    weights = [torch.zeros(size, 8) for size in (3, 5)]
    ahead = read_ahead.ReadAhead(torch.device("cpu"))
    with ahead.learning():
        for weight in weights:
            product(weight, 65)
    main.done.clear()
    own = ahead.stream
    with ahead.branching():
        for weight in weights:
            product(weight, 65)
        product(weights[0], 2)
    with ahead.branching():
        for weight in weights[::-1]:
            product(weight)
    assert not main.done and not own.done, "nothing to join"
    ahead.stream = main
    with ahead.branching():
        product(weights[0])
    assert ahead.stream is not main and main.done == [ahead.stream]
