"""Run a Gluon kernel's own Python on a CPU: its indices, its barriers and its order, in threads; layouts mean nothing.

Only what `vattn.kernels.hopper.linear.kernel` uses is here. Copies land at once, barriers count arrivals
and bytes as the hardware does, and whoever waits longer than a few seconds fails: that is a deadlock on a GPU.
"""

from __future__ import annotations

import math
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Partition = tuple[Callable[..., None], tuple[Any, ...]]
"""What a group of warps runs, and its arguments."""

PATIENCE = 20.0
"""Seconds."""


class Barrier:
    """An mbarrier: a phase ends when all arrivals have come, and all bytes that they announced."""

    def __init__(self, changed: threading.Condition, arrivals: int = 1) -> None:
        self.changed, self.arrivals, self.pending, self.bytes, self.phases = changed, arrivals, arrivals, 0, 0

    def change(self, arrivals: int, announced: int) -> None:
        with self.changed:
            self.pending -= arrivals
            self.bytes += announced
            assert self.pending >= 0, "more arrivals than there are in a phase"
            if not self.pending and not self.bytes:
                self.phases, self.pending = self.phases + 1, self.arrivals
            self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phases % 2 != parity, PATIENCE), "a deadlock"


class Memory:
    """Shared memory, filled with NaN; a view shares it."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def index(self, place: int) -> Memory:
        return Memory(self.values[place])

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Memory(self.values.permute(order))

    def load(self, layout: object) -> Tensor:
        return self.values.clone()

    def store(self, values: Tensor) -> None:
        self.values.copy_(values)


class Pointer:
    """A pointer into a tensor, or many; `dtype.element_ty` is the tensor's dtype."""

    def __init__(self, tensor: Tensor, offset: Any = 0) -> None:
        self.tensor, self.offset = tensor, offset
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + offset)

    def places(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        offsets, mask = torch.broadcast_tensors(torch.as_tensor(self.offset), mask)
        return offsets[mask].long(), mask


class Boxes:
    """A tensor map over `[panels, rows, columns]`; boxes are zero beyond it.

    `kind` is `"weights"` or `"inputs"`.
    """

    dtype, layout = None, None

    def __init__(self, tensor: Tensor, block_shape: list[int], kind: str) -> None:
        self.tensor, self.block_shape, self.kind = tensor, block_shape, kind

    def box(self, start: list[int]) -> Tensor:
        found = torch.zeros(self.block_shape, dtype=torch.float32)
        ends = [
            min(first + size, whole)
            for first, size, whole in zip(start, self.block_shape, self.tensor.shape, strict=True)
        ]
        inside = [slice(first, max(first, end)) for first, end in zip(start, ends, strict=True)]
        part = self.tensor[tuple(inside)].float()
        found[tuple(slice(size) for size in part.shape)] = part
        return found


class Program:
    """One program of a grid: the namespaces that the kernel's functions see.

    Attributes:
        steps: what the program did that others can see, in order: `"weights"` and `"inputs"` for copies, `"waited"`.
    """

    def __init__(
        self, functions: dict[str, Callable[..., None]], program: int, programs: int, panel_bytes: int
    ) -> None:
        self.steps: list[str] = []
        self.panel_bytes = panel_bytes
        self.changed = threading.Condition()
        self.waited = threading.local()
        gl = types.SimpleNamespace(
            program_id=lambda axis: program, num_programs=lambda axis: programs, minimum=min, static_range=range,
            int64=torch.int64, float32=torch.float32,
            NVMMADistributedLayout=self._nothing,
            DotOperandLayout=self._nothing, BlockedLayout=self._nothing, SliceLayout=self._nothing,
            SwizzledSharedLayout=self._nothing, arange=lambda low, high, layout: torch.arange(low, high),
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype), sum=lambda x, axis: x.sum(axis),
            load=self._load, store=self._store, allocate_shared_memory=self._allocate, warp_specialize=self._run,
        )  # fmt: skip
        mbarrier = types.SimpleNamespace(
            init=lambda barrier, count: None, MBarrierLayout=lambda: Barrier,
            expect=lambda barrier, size: self._barrier(barrier).change(1, size),
            arrive=lambda barrier, count: self._barrier(barrier).change(count, 0),
            wait=lambda barrier, phase: self._barrier(barrier).wait(phase),
        )  # fmt: skip
        names: dict[str, Any] = {
            "gl": gl, "mbarrier": mbarrier, "load_box": self._copy, "mma_v2": lambda a, b, c: torch.bmm(a, b) + c,
            "wait_for_previous_kernel": self._wait, "let_next_kernel_start": self._let_next_start,
        }  # fmt: skip
        names |= {name: types.FunctionType(function.__code__, names) for name, function in functions.items()}
        self.names = names

    @staticmethod
    def _nothing(*args: Any, **kwargs: Any) -> None:
        return None

    @staticmethod
    def _barrier(found: Barrier) -> Barrier:
        return found

    def _allocate(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        if layout is Barrier:
            barriers = [Barrier(self.changed) for _ in range(shape[0])]
            return types.SimpleNamespace(index=barriers.__getitem__)
        return Memory(torch.full(shape, torch.nan))

    def _copy(self, boxes: Boxes, start: list[int], barrier: Barrier, target: Memory) -> None:
        assert boxes.kind == "weights" or getattr(self.waited, "done", False), "the input is read before it is there"
        self.steps.append(boxes.kind)
        target.store(boxes.box(start))
        size = self.panel_bytes * math.prod(boxes.block_shape[:-1])
        barrier.change(0, -size)

    def _wait(self) -> None:
        self.waited.done = True
        self.steps.append("waited")

    def _let_next_start(self) -> None:
        assert self.waited.done, "the next kernel starts before those ahead of this one have ended"

    def _load(self, pointer: Pointer, mask: Tensor, other: float) -> Tensor:
        assert getattr(self.waited, "done", False), "a scale is read before it is there"
        places, mask = pointer.places(mask)
        found = torch.full(mask.shape, other)
        found[mask] = pointer.tensor.reshape(-1)[places]
        return found

    def _store(self, pointer: Pointer, values: Tensor, mask: Tensor) -> None:
        assert getattr(self.waited, "done", False), "results are written while their memory may be in use"
        places, mask = pointer.places(mask)
        pointer.tensor.view(-1)[places] = values.expand(mask.shape)[mask]

    def _run(self, partitions: list[Partition], *sizes: list[int]) -> None:
        run_in_threads(partitions)


def run_in_threads(partitions: list[Partition], on_error: Callable[[], None] = lambda: None) -> None:
    """Run each partition of a kernel in a thread, and raise the first error; `on_error` lets the others give up."""
    errors: list[BaseException] = []

    def guarded(function: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            function(*args)
        except BaseException as error:
            errors.append(error)
            on_error()

    threads = [threading.Thread(target=guarded, args=partition, daemon=True) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    if errors:
        raise errors[0]
