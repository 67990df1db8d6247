"""Finds projections that a model calls one after the other with one input: they may be one product."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from vattn.calibration.quantise_linears import SHARED_INPUT


def groups(model: nn.Module) -> dict[tuple[str, tuple[str, ...]], list[nn.Module]]:
    """Return the projections of a model that may share their input, by the name of their module and their own."""
    found = {}
    for name, module in model.named_modules():
        for names in SHARED_INPUT:
            parts = [module._modules.get(part) for part in names]
            if all(part is not None for part in parts):
                found[name, names] = parts
    return found  # type: ignore[return-value]


class SharedInputs:
    """Notes how a model calls the projections of its groups.

    Attributes:
        apart: groups called in another way than all at once with one input, and how.
    """

    def __init__(self) -> None:
        self.apart: dict[tuple[str, tuple[str, ...]], str] = {}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Note the calls of what runs inside the block."""
        handles = []
        watched = {key: _Calls(len(parts)) for key, parts in groups(model).items()}
        try:
            for key, parts in groups(model).items():
                for index, part in enumerate(parts):
                    handles.append(part.register_forward_pre_hook(watched[key].hook(index), with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.apart = {key: text for key, calls in watched.items() if (text := calls.verdict())}


class _Calls:
    """The calls of one group."""

    def __init__(self, size: int) -> None:
        self.size, self.next, self.called, self.alike = size, 0, False, True
        self.input: tuple[Tensor, int] | None = None

    def hook(self, index: int) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.called = True
            x = args[0] if len(args) == 1 and not kwargs else None
            if index == 0 and isinstance(x, Tensor):
                self.alike &= self.next == 0
                # What has been written to in between is another input.
                self.input = x, x._version
            elif self.input is None or x is not self.input[0] or x._version != self.input[1] or index != self.next:
                self.alike = False
            self.next = (index + 1) % self.size
            if not self.next:
                self.input = None

        return note

    def verdict(self) -> str:
        """Return why the group cannot be one product, "" if it can."""
        self.input = None
        if not self.called:
            return "a trial run of the model does not call them"
        return "" if self.alike and not self.next else "the model does not call all of them with one input"
