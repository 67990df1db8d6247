"""Record the kernel launches of an op's call, and replay them for calls that differ in nothing but addresses.

What a launcher decides depends on shapes, strides, dtypes and alignment. Deciding it again takes longer than a launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Launch(NamedTuple):
    """One launch of a recording.

    Attributes:
        run: launches the kernel with arguments by position, and `stream`.
        arguments: by position, with `None` for those below.
        pointers: position; index of the tensor or allocation that the pointer is in; offset in bytes.
        tensor_maps: position; index of the tensor that the map is over; its class; its other attributes.
    """

    run: Callable[..., Any]
    arguments: list[Any]
    pointers: list[tuple[int, int, int]]
    tensor_maps: list[tuple[int, int, type, dict[str, Any]]]


class Recording(NamedTuple):
    """What a call did: the function and the bytes of each allocation, then the launches."""

    allocations: list[tuple[Callable[..., Tensor], int]]
    launches: list[Launch]


class _Active(threading.local):
    recorder: Recorder | None = None
    compile_only: bool = False


active = _Active()
"""Of this thread: the recorder of the call that it runs, if any, and whether launches only compile their kernels."""


def tensors_of(args: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among an op's arguments, then those in its lists of schedules."""
    found = [arg for arg in args if isinstance(arg, Tensor)]
    return found + [tensor for arg in args if type(arg) is list for tensor in arg]


def replay_or_run(recordings: dict[Any, Any], tensors: list[Tensor], run: Callable[[], None]) -> None:
    """Replay an op's call; without a recording run it and record it, if launches are all that it does.

    Args:
        recordings: of calls that have the shapes, strides, dtypes, devices and config of this one. `None` stands for a
            call that cannot be replayed.
        tensors: of the call, in an order that is the same for all of these.
    """
    if active.compile_only:
        run()
        return
    key = replay(recordings, tensors)
    if key in recordings:
        run()
    elif key is not None:
        with Recorder() as recorder:
            run()
        recordings[key] = recorder.recording(tensors)


def replay(recordings: dict[Any, Any], tensors: list[Tensor]) -> Any:
    """Replay a call and return `None`; without a recording, return the key that one would have."""
    pointers = [tensor.data_ptr() for tensor in tensors]
    device, bits = tensors[0].get_device(), 0
    for pointer in pointers:
        bits |= pointer
    # Triton specialises kernels on pointers that 16 divides. Recordings cannot tell tensors at one address apart.
    alignments = tuple([pointer & 15 for pointer in pointers]) if bits & 15 else ()
    aliases = tuple([pointers.index(pointer) for pointer in pointers]) if len(set(pointers)) < len(pointers) else ()
    key = _device(), alignments, aliases
    recording = recordings.get(key)
    if recording is None:
        return key
    allocated = [make(size, dtype=torch.uint8, device=tensors[0].device) for make, size in recording.allocations]
    pointers += [memory.data_ptr() for memory in allocated]
    stream = _stream(device)
    for launch, template, places, tensor_maps in recording.launches:
        arguments = template.copy()
        for position, source, offset in places:
            arguments[position] = pointers[source] + offset
        for position, source, kind, fields in tensor_maps:
            arguments[position] = tensor_map = object.__new__(kind)
            tensor_map.__dict__.update(fields, base=tensors[source])
        launch(*arguments, stream=stream)
    return None


def unrecorded(kernel: Any) -> Any:
    """Return a kernel for a launch that is not recorded; the call that makes it is never replayed."""
    if active.compile_only:
        return _CompileOnly(kernel)
    if active.recorder is not None:
        active.recorder.complete = False
    return kernel


class _CompileOnly:
    """A kernel that is compiled for its launches, which do nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return partial(self.kernel.warmup, grid=grid)


class Recorder(TorchDispatchMode):
    """Collects the launches and allocations of a call.

    Attributes:
        launches: functions that repeat a launch, and its arguments by position.
        allocations: functions that allocate, and what they returned.
        complete: whether the call did nothing else.
    """

    def __init__(self) -> None:
        super().__init__()
        self.complete, self.launches = True, list[tuple[Any, list[Any]]]()
        self.allocations = list[tuple[Callable[..., Tensor], Tensor]]()

    def __enter__(self) -> Recorder:
        active.recorder = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        active.recorder = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.allocations.append((_ALLOCATIONS[func], result))
        elif not func.is_view:
            self.complete = False
        return result

    def recording(self, tensors: list[Tensor]) -> Recording | None:
        """Return the recording of a call of these tensors.

        `None`: the call launched nothing, did other work too, or a kernel got memory of unknown origin.
        """
        if not self.complete or not self.launches:
            return None
        memory = [*tensors, *(tensor for _, tensor in self.allocations)]
        launches = []
        for run, arguments in self.launches:
            launch = _launch(run, arguments, memory, len(tensors))
            if launch is None:
                return None
            launches.append(launch)
        return Recording([(make, tensor.untyped_storage().nbytes()) for make, tensor in self.allocations], launches)


def _launch(run: Any, arguments: list[Any], memory: list[Tensor], num_tensors: int) -> Launch | None:
    """Return a launch with the origin of its pointers; `None`: one of them, or of its tensor maps, has none.

    Args:
        memory: the tensors of the call, `num_tensors`, then its allocations.
    """
    starts = [tensor.data_ptr() for tensor in memory]
    storages = [tensor.untyped_storage().data_ptr() for tensor in memory]
    launch = Launch(run, arguments.copy(), [], [])
    for position, value in enumerate(arguments):
        tensor = getattr(value, "base", value)
        if not isinstance(tensor, Tensor):
            continue
        start, storage = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
        launch.arguments[position] = None
        if start in starts:
            source = starts.index(start)
        elif storages.count(storage) == 1 and tensor is value:
            source = storages.index(storage)
        else:
            return None
        if tensor is value:
            launch.pointers.append((position, source, start - starts[source]))
        elif source < num_tensors:
            launch.tensor_maps.append((position, source, type(value), {**vars(value), "base": None}))
        else:
            return None
    return launch


# `torch.cuda.current_device` looks each time whether CUDA has been initialised.
_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

_ALLOCATIONS: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.empty.memory_format: torch.empty,
    torch.ops.aten.empty_like.default: torch.empty,
    torch.ops.aten.zeros.default: torch.zeros,
}
