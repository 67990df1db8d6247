"""What Hopper's kernels see of the hardware on a CPU: copies and warps that are late, products that are waited for.

Copies arrive late, products are computed when they are waited for, from what shared memory holds then, and rooms that a
copy may write are NaN from its start: whoever comes too early or too late finds it out. Whoever waits for longer than
some seconds fails: that is a deadlock on a GPU.
"""

from __future__ import annotations

import random
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.kernels.gluon_emulation import PATIENCE, Barrier, Memory, Partition, Pointer, run_in_threads

NUMBER = types.SimpleNamespace(primitive_bitwidth=16)
"""Every dtype of a kernel that is stored or multiplied."""


class Values(Tensor):
    """A tensor of a kernel, with a `type` that has a layout."""

    type = types.SimpleNamespace(layout=None)  # type: ignore[assignment]

    def to(self, dtype: Any) -> Values:  # type: ignore[override]
        return super().to(dtype) if isinstance(dtype, torch.dtype) else self


def values(of: Any) -> Values:
    return torch.as_tensor(of).as_subclass(Values)


class Room(Memory):
    """Shared memory of rows."""

    dtype = NUMBER

    def index(self, place: Any) -> Room:
        return Room(self.values[int(place)])

    def permute(self, order: tuple[int, ...]) -> Room:
        return Room(self.values.permute(order))

    def slice(self, first: int, count: int, dim: int) -> Room:
        return Room(self.values.narrow(dim, first, count))

    def load(self, layout: object) -> Values:
        return values(self.values.clone())


class LateBarrier(Barrier):
    """A barrier at which whoever waits may be late, and gives up when another thread has failed."""

    def __init__(self, program: LateProgram, arrivals: int) -> None:
        super().__init__(program.changed, arrivals)
        self.program = program

    def wait(self, parity: int) -> None:
        self.program.pause()
        with self.changed:
            passed = self.changed.wait_for(lambda: self.program.failed or self.phases % 2 != int(parity), PATIENCE)
            assert passed and not self.program.failed, "a deadlock"


class Product:
    """A product that is on its way; nothing but waiting for it gives a tensor."""

    def __init__(self, left: Any, right: Room, start: Any) -> None:
        self.left, self.right, self.start = left, right, start

    def finish(self) -> Values:
        start = self.start.finish() if isinstance(self.start, Product) else self.start
        left = self.left.values if isinstance(self.left, Memory) else self.left
        # Rounded once: a product in fp32 would round a row by its place among the others.
        return values((start + left.double() @ self.right.values.double()).float())


class LateProgram:
    """One program of a grid.

    Args:
        seed: of who is late, and by how much.
        late: how often a group of warps is.

    Attributes:
        names: what the kernel's functions see; they come on top.
    """

    def __init__(self, index: int, programs: int, seed: int, late: float) -> None:
        self.changed, self.failed, self.random, self.late = threading.Condition(), False, random.Random(seed), late

        def both(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return lambda *given: values(function(*map(torch.as_tensor, given)))

        whole, real = torch.int64, torch.float32
        layouts = ("NVMMADistributed", "DotOperand", "Blocked", "Slice", "SwizzledShared", "NVMMAShared")
        gl = types.SimpleNamespace(
            program_id=lambda axis: index, num_programs=lambda axis: programs, static_range=range, int8=NUMBER,
            int16=NUMBER, int32=whole, int64=whole, float32=real, float16=NUMBER, bfloat16=NUMBER, float8e4nv=NUMBER,
            minimum=both(torch.minimum), maximum=both(torch.maximum), exp2=both(torch.exp2), log2=both(torch.log2),
            where=both(torch.where), zeros_like=torch.zeros_like, fma=_fused,
            sum=lambda x, axis: values(x.sum(axis)), max=lambda x, axis: values(x.amax(axis)),
            min=lambda x, axis: values(x.amin(axis)),
            arange=lambda low, high, layout: values(torch.arange(low, high)),
            zeros=lambda shape, dtype, layout: values(torch.zeros(shape, dtype=dtype)),
            full=lambda shape, value, dtype, layout: values(torch.full(shape, value, dtype=dtype)),
            convert_layout=lambda x, layout: x, load=_load, store=_store, atomic_add=self._atomic_add,
            allocate_shared_memory=lambda dtype, shape, layout: Room(torch.full(shape, torch.nan, dtype=real)),
            warp_specialize=self._run, **{f"{name}Layout": nothing for name in layouts},
        )  # fmt: skip
        self.names: dict[str, Any] = {
            "gl": gl, "range": range, "float": float, "new_barriers": self._barriers,
            "mbarrier": types.SimpleNamespace(
                expect=lambda barrier, size: barrier.change(1, int(size)),
                arrive=lambda barrier, count: barrier.change(count, 0), wait=lambda barrier, phase: barrier.wait(phase),
            ),
            "warpgroup_mma": _multiply, "warpgroup_mma_wait": self._finish, "fence_async_shared": nothing,
            "block_barrier": nothing,
        }  # fmt: skip

    def pause(self) -> None:
        """Be late, now and then."""
        late = self.random.random()
        if late < self.late:
            time.sleep(late / 50)

    def fill(self, target: Room, found: Tensor, barrier: Barrier, size: int) -> None:
        """Fill a room later, and count its bytes then."""
        target.values.fill_(torch.nan)

        def arrive() -> None:
            target.values.copy_(found)
            barrier.change(0, -size)

        threading.Timer(self.random.random() / 1000, arrive).start()

    def _barriers(self, count: int, arrivals: int) -> Any:
        made = [LateBarrier(self, arrivals) for _ in range(count)]
        return types.SimpleNamespace(index=lambda place: made[int(place)])

    def _finish(self, num_outstanding: int, deps: tuple[Any, ...]) -> Any:
        assert num_outstanding == 0
        self.pause()
        found = tuple(each.finish() if isinstance(each, Product) else each for each in deps)
        return found if len(found) > 1 else found[0]

    def _atomic_add(self, pointer: Pointer, value: int, sem: str) -> Values:
        with self.changed:
            old = pointer.tensor.view(-1)[0].clone()
            pointer.tensor.view(-1)[0] += value
        return values(old.long())

    def _run(self, partitions: list[Partition], *sizes: list[int]) -> None:
        run_in_threads(partitions, self._give_up)

    def _give_up(self) -> None:
        with self.changed:
            self.failed = True
            self.changed.notify_all()


def nothing(*args: Any, **kwargs: Any) -> Any:
    return types.SimpleNamespace(parent=None)


def _multiply(left: Any, right: Room, acc: Any, use_acc: bool = True, is_async: bool = True) -> Product:
    assert not isinstance(left, Product)
    return Product(left, right, acc if use_acc else torch.zeros(()))


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Values:
    return values((a.double() * b.double() + c.double()).float())


def _load(pointer: Pointer, mask: Any = None, other: float = 0) -> Values:
    offset = torch.as_tensor(pointer.offset)
    found = pointer.tensor.reshape(-1)
    kept = torch.ones_like(offset, dtype=torch.bool) if mask is None else mask
    offset, kept = torch.broadcast_tensors(offset, kept)
    result = torch.full(offset.shape, other, dtype=torch.float32 if found.is_floating_point() else torch.int64)
    result[kept] = found[offset[kept].long()].to(result.dtype)
    return values(result)


def _store(pointer: Pointer, stored: Tensor, mask: Any = None) -> None:
    places, mask = pointer.places(torch.ones(stored.shape, dtype=torch.bool) if mask is None else mask)
    pointer.tensor.view(-1)[places] = stored.expand(mask.shape)[mask].to(pointer.tensor.dtype)
