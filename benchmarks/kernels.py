"""Which kernels a function launches on a GPU, by torch.profiler; kernels inside CUDA graphs are listed too."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Kernel:
    """One kernel, memory copy or fill that ran: its name, its time in us, and when it began."""

    name: str
    us: float
    start: float


def profile_kernels(function: Callable[[], object]) -> list[Kernel]:
    """Return what one call runs on the device, in order."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        function()
        torch.cuda.synchronize()
    events = [event for event in prof.events() if event.device_type == DeviceType.CUDA]
    kernels = [Kernel(e.name, e.time_range.elapsed_us(), e.time_range.start) for e in events]
    return sorted(kernels, key=lambda kernel: kernel.start)


def kernels_of_layer(kernels: Sequence[Kernel], marks: Sequence[str], layers: int) -> list[Kernel]:
    """Return the kernels of a layer: from one whose name holds one of `marks` up to the next such one.

    They are those of a layer in the middle; times are medians over all layers with the same kernels.

    Raises:
        ValueError: there is not one such kernel for each layer.
    """
    places = [index for index, kernel in enumerate(kernels) if any(mark in kernel.name for mark in marks)]
    if len(places) != layers or layers < 2:
        raise ValueError(f"{len(places)} kernels named {' or '.join(marks)} in {layers} layers")
    parts = [kernels[start:end] for start, end in itertools.pairwise(places)]
    middle = parts[(layers - 1) // 2]
    names = [kernel.name for kernel in middle]
    alike = [part for part in parts if [kernel.name for kernel in part] == names]
    medians = [statistics.median(kernel.us for kernel in same) for same in zip(*alike, strict=True)]
    return [replace(kernel, us=us) for kernel, us in zip(middle, medians, strict=True)]


def print_kernels(function: Callable[[], object], most: int | None = None) -> None:
    """Print the kernels that one call runs, by name: their time together, how many they are, the median time."""
    total: dict[str, list[float]] = {}
    for kernel in profile_kernels(function):
        total.setdefault(kernel.name, []).append(kernel.us)
    whole = sum(map(sum, total.values()))
    for name, each in sorted(total.items(), key=lambda item: -sum(item[1]))[:most]:
        share = sum(each) / whole
        print(f"  {sum(each):9.1f} us {share:5.1%} in {len(each):4d} of {statistics.median(each):8.2f}: {name[:110]}")
