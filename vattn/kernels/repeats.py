"""Launches of an op's call, noted once and made again for calls whose tensors differ in their addresses alone.

What a launcher decides depends on shapes, strides, dtypes and alignment. Deciding it again takes longer than a launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class _Noting(threading.local):
    notes: Notes | None = None


noting = _Noting()
"""What notes the launches of this thread's call, if any."""


def repeat(known: dict[Any, Any], args: Sequence[Any], run: Callable[[], None]) -> None:
    """Run an op's call; from the second one on by launching its kernels alone, where that is all it does.

    Args:
        known: what was noted of calls that have the shapes, strides, dtypes, devices and config of this one.
        args: all arguments of the call.
    """
    tensors = [x for arg in args for x in (arg if type(arg) is list else (arg,)) if isinstance(x, Tensor)]
    starts = [tensor.data_ptr() for tensor in tensors]
    # Triton compiles for addresses that 16 divides. Where two are equal, a noted one stands for both.
    places = [start & 15 for start in starts] if any(start & 15 for start in starts) else 0
    twins = [starts.index(start) for start in starts] if len(set(starts)) < len(starts) else 0
    key = torch.cuda.current_device(), str(places), str(twins)
    if key not in known:
        with Notes() as notes:
            run()
        known[key] = notes.calls(tensors, starts)
        return
    calls = known[key]
    if calls is None:
        run()
        return
    sizes, launches = calls
    rooms = [torch.empty(size, dtype=torch.uint8, device=tensors[0].device) for size in sizes]
    bases = [*tensors, *rooms]
    starts += [room.data_ptr() for room in rooms]
    for launch, template, addresses, maps in launches:
        values = template.copy()
        for place, source, offset in addresses:
            values[place] = starts[source] + offset
        for place, source, kind, fields in maps:
            values[place] = boxes = object.__new__(kind)
            vars(boxes).update(fields, base=bases[source])
        launch(*values)


def once(kernel: Any) -> Any:
    """Return a kernel that is about to be launched unnoted: the call is not repeated."""
    if noting.notes is not None:
        noting.notes.complete = False
    return kernel


class Notes(TorchDispatchMode):
    """What a call does: its launches as functions that make them again with arguments by position, and its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.complete, self.rooms, self.launches = True, list[Tensor](), list[tuple[Any, list[Any]]]()

    def __enter__(self) -> Notes:
        noting.notes = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        noting.notes = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default):
            self.rooms.append(result)
        elif not func.is_view:
            self.complete = False
        return result

    def calls(self, tensors: list[Tensor], starts: list[int]) -> tuple[list[int], list[Any]] | None:
        """Return the sizes of allocations, and the launches with the sources of their addresses.

        `None`: the call launched nothing, did other work too, or it is not known whose memory a kernel got.
        """
        if not self.complete or not self.launches:
            return None
        owned = [*tensors, *self.rooms]
        starts = [*starts, *(room.data_ptr() for room in self.rooms)]
        storages = [tensor.untyped_storage().data_ptr() for tensor in owned]
        found = []
        for launch, values in self.launches:
            addresses, maps = [], []
            for place, value in enumerate(values):
                tensor = getattr(value, "base", value)
                if not isinstance(tensor, Tensor):
                    continue
                start, storage = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
                if start in starts:
                    source = starts.index(start)
                elif storages.count(storage) == 1 and tensor is value:
                    source = storages.index(storage)
                else:
                    return None
                if tensor is value:
                    addresses.append((place, source, start - starts[source]))
                else:
                    maps.append((place, source, type(value), {**vars(value), "base": None}))
                values[place] = None
            found.append((launch, values, addresses, maps))
        return [room.untyped_storage().nbytes() for room in self.rooms], found
