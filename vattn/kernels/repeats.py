"""Launches of an op's call, noted once and made again for calls whose tensors differ in their addresses alone.

What a launcher decides depends on shapes, strides, dtypes and alignment. Deciding it again takes longer than a launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class _Noting(threading.local):
    notes: Notes | None = None


noting = _Noting()
"""What notes the launches of this thread's call, if any."""


def tensors_of(args: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among an op's arguments, those of schedules too, in their order."""
    found = [arg for arg in args if isinstance(arg, Tensor)]
    return found + [tensor for arg in args if type(arg) is list for tensor in arg]


def repeat(known: dict[Any, Any], tensors: list[Tensor], run: Callable[[], None]) -> None:
    """Run an op's call; from the second one on by launching its kernels alone, where that is all it does.

    Args:
        known: what was noted of calls that have the shapes, strides, dtypes, devices and config of this one.
        tensors: of the call, in an order that is the same for all of these.
    """
    key = again(known, tensors)
    if key in known:
        run()
    elif key is not None:
        with Notes() as notes:
            run()
        known[key] = notes.calls(tensors)


def again(known: dict[Any, Any], tensors: list[Tensor]) -> Any:
    """Launch again what a call was noted for; return the key in `known` of one that is not noted."""
    starts = [tensor.data_ptr() for tensor in tensors]
    index, bits = tensors[0].get_device(), 0
    for start in starts:
        bits |= start
    # Triton compiles for addresses that 16 divides. Where two are equal, a noted one stands for both.
    places = tuple([start & 15 for start in starts]) if bits & 15 else ()
    twins = tuple([starts.index(start) for start in starts]) if len(set(starts)) < len(starts) else ()
    key = _device(), places, twins
    calls = known.get(key)
    if calls is None:
        return key
    rooms = [make(size, dtype=torch.uint8, device=tensors[0].device) for make, size in calls.rooms]
    starts += [room.data_ptr() for room in rooms]
    stream = _stream(index)
    for launch, template, addresses, maps in calls.launches:
        values = template.copy()
        for place, source, offset in addresses:
            values[place] = starts[source] + offset
        for place, source, kind, fields in maps:
            values[place] = boxes = object.__new__(kind)
            boxes.__dict__.update(fields, base=tensors[source])
        launch(*values, stream=stream)
    return None


def once(kernel: Any) -> Any:
    """Return a kernel that is about to be launched unnoted: the call is not repeated."""
    if noting.notes is not None:
        noting.notes.complete = False
    return kernel


class Calls(NamedTuple):
    """What a call did.

    Attributes:
        rooms: how it allocates memory for its kernels, and bytes.
        launches: functions that launch kernels; arguments by position; where addresses go, and of which tensor or room
            with which offset; where tensor maps go, of which tensor, their class and what else they hold.
    """

    rooms: list[tuple[Callable[..., Tensor], int]]
    launches: list[tuple[Any, list[Any], list[tuple[int, int, int]], list[tuple[int, int, type, dict[str, Any]]]]]


class Notes(TorchDispatchMode):
    """What a call does: its launches as functions that make them again with arguments by position, and its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.complete, self.launches = True, list[tuple[Any, list[Any]]]()
        self.rooms = list[tuple[Callable[..., Tensor], Tensor]]()

    def __enter__(self) -> Notes:
        noting.notes = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        noting.notes = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.rooms.append((_ALLOCATIONS[func], result))
        elif not func.is_view:
            self.complete = False
        return result

    def calls(self, tensors: list[Tensor]) -> Calls | None:
        """Return the launches with the sources of their addresses.

        `None`: the call launched nothing, did other work too, or it is not known whose memory a kernel got.
        """
        if not self.complete or not self.launches:
            return None
        owned = [*tensors, *(room for _, room in self.rooms)]
        starts = [tensor.data_ptr() for tensor in owned]
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
                elif source < len(tensors):
                    maps.append((place, source, type(value), {**vars(value), "base": None}))
                else:
                    return None
                values[place] = None
            found.append((launch, values, addresses, maps))
        return Calls([(make, room.untyped_storage().nbytes()) for make, room in self.rooms], found)


# `torch.cuda.current_device` looks each time whether CUDA has been initialised.
_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

_ALLOCATIONS: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.empty.memory_format: torch.empty,
    torch.ops.aten.empty_like.default: torch.empty,
    torch.ops.aten.zeros.default: torch.zeros,
}
