"""Run the Python of the Hopper prefill kernel on a CPU, in fp32: each partition a thread, layouts mean nothing.

For a cache of the model dtype and heads of 64. Copies arrive late, products are computed when they are waited for, from
what shared memory holds then, and rooms that a copy may write are NaN from its start: whoever comes too early or too
late finds it out. Whoever waits for longer than some seconds fails: that is a deadlock on a GPU.
"""

from __future__ import annotations

import random
import threading
import time
import types
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from tests.kernels.gluon_emulation import PATIENCE, Barrier, LateBarrier, Memory, Partition, Pointer, run_in_threads
from vattn.kernels.hopper import epilogue
from vattn.kernels.hopper.prefill import kernel, load, merge, parts, ping_pong, softmax, store, tile_queue

MODULES = (epilogue, softmax, tile_queue, parts, load, ping_pong, store, merge, kernel)
"""In the order of their imports. What copies, waits or is assembly is replaced in `Program`."""

NUMBER = types.SimpleNamespace(primitive_bitwidth=16)
"""Every dtype of the kernel that is stored or multiplied."""


class Values(Tensor):
    """A tensor of the kernel, with a `type` that has a layout."""

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


class Turn:
    """A named barrier of two warpgroups, one of which only arrives."""

    def __init__(self, program: Program) -> None:
        self.program, self.count = program, 0

    def change(self, by: int) -> None:
        with self.program.changed:
            ready = self.program.changed.wait_for(lambda: self.program.failed or self.count + by >= 0, PATIENCE)
            assert ready and not self.program.failed, "a deadlock"
            self.count += by
            self.program.changed.notify_all()


class Product:
    """A product that is on its way; nothing but waiting for it gives a tensor."""

    def __init__(self, left: Any, right: Room, start: Any) -> None:
        self.left, self.right, self.start = left, right, start

    def finish(self) -> Values:
        start = self.start.finish() if isinstance(self.start, Product) else self.start
        left = self.left.values if isinstance(self.left, Memory) else self.left
        # Rounded once: a product in fp32 would round a row by its place among the others.
        return values((start + left.double() @ self.right.values.double()).float())


class Boxes:
    """A tensor map: queries `[T, H, D]`, or keys or values `[blocks, heads, tokens, D]`. Boxes are zero beyond it."""

    dtype, layout = NUMBER, None

    def __init__(self, tensor: Tensor, box: list[int]) -> None:
        self.tensor, self.block_shape = tensor, box

    def box(self, start: list[Any]) -> Tensor:
        """Return a box; of queries of one head, whose map has columns of all heads, rows and a column tell it."""
        if len(start) < self.tensor.ndim:
            start = [start[0], start[1] // self.tensor.shape[-1], 0]
        found = torch.zeros(self.block_shape, dtype=torch.float32)
        places = [torch.arange(size) + int(first) for first, size in zip(start, self.block_shape, strict=True)]
        inside = [(at >= 0) & (at < size) for at, size in zip(places, self.tensor.shape, strict=True)]
        taken = torch.meshgrid(*(torch.where(ok)[0] for ok in inside), indexing="ij")
        found[taken] = self.tensor[tuple(at[ok] for at, ok in zip(places, taken, strict=True))].float()
        return found


class Program:
    """One program of a grid; `names` are what the kernel's functions see. `seed`: of who is late, and by how much."""

    def __init__(self, index: int, programs: int, seed: int) -> None:
        self.changed, self.failed, self.random = threading.Condition(), False, random.Random(seed)
        turns = {name: Turn(self) for name in ping_pong.BARRIERS.value}
        whole, real = torch.int64, torch.float32

        def nothing(*args: Any, **kwargs: Any) -> Any:
            return types.SimpleNamespace(parent=None)

        def both(function: Any) -> Any:
            return lambda *given: values(function(*map(torch.as_tensor, given)))

        gl = types.SimpleNamespace(
            program_id=lambda axis: index, num_programs=lambda axis: programs, static_range=range, int8=NUMBER,
            int16=NUMBER, int32=whole, int64=whole, float32=real, float16=NUMBER, bfloat16=NUMBER, float8e4nv=NUMBER,
            minimum=both(torch.minimum), maximum=both(torch.maximum), exp2=both(torch.exp2), log2=both(torch.log2),
            where=both(torch.where), zeros_like=torch.zeros_like, fma=_fused,
            sum=lambda x, axis: values(x.sum(axis)), max=lambda x, axis: values(x.amax(axis)),
            arange=lambda low, high, layout: values(torch.arange(low, high)),
            zeros=lambda shape, dtype, layout: values(torch.zeros(shape, dtype=dtype)),
            full=lambda shape, value, dtype, layout: values(torch.full(shape, value, dtype=dtype)),
            convert_layout=lambda x, layout: x, load=_load, store=_store, atomic_add=self._atomic_add,
            allocate_shared_memory=lambda dtype, shape, layout: Room(torch.full(shape, torch.nan, dtype=real)),
            warp_specialize=self._run, NVMMADistributedLayout=nothing, DotOperandLayout=nothing,
            BlockedLayout=nothing, SliceLayout=nothing, SwizzledSharedLayout=nothing, NVMMASharedLayout=nothing,
        )  # fmt: skip
        names: dict[str, Any] = {}
        for module in MODULES:
            for name, value in vars(module).items():
                if isinstance(value, tl.constexpr):
                    names[name] = value.value
                elif hasattr(value, "fn"):
                    names[name] = types.FunctionType(value.fn.__code__, names, name, value.fn.__defaults__)
        names |= {
            "gl": gl, "range": range, "float": float, "new_barriers": self._barriers, "load_box": self._copy,
            "mbarrier": types.SimpleNamespace(
                expect=lambda barrier, size: barrier.change(1, size), wait=lambda barrier, phase: barrier.wait(phase),
                arrive=lambda barrier, count: barrier.change(count, 0),
            ),
            "read_word": lambda cell, warps: values(int(cell.values.reshape(-1)[0])),
            "as_words": lambda memory, count: memory,
            "as_boxes": lambda memory, boxes, count: Room(memory.values.reshape(count, -1, memory.values.shape[-1])),
            "as_tiles": lambda memory, dtype, count, shape, layout: Room(memory.values[None]),
            "ping_pong_wait": lambda barrier: turns[barrier].change(-1),
            "ping_pong_signal": lambda barrier: turns[barrier].change(1),
            "warpgroup_mma": _multiply, "warpgroup_mma_wait": self._finish, "fence_async_shared": nothing,
            "block_barrier": nothing, "let_next_kernel_start": nothing, "wait_for_previous_kernel": nothing,
            "cap_scores": _cap,
        }  # fmt: skip
        self.names = names

    def pause(self) -> None:
        """Be late, now and then."""
        late = self.random.random()
        if late < 0.05:
            time.sleep(late / 50)

    def _barriers(self, count: int, arrivals: int) -> Any:
        made = [LateBarrier(self, arrivals) for _ in range(count)]
        return types.SimpleNamespace(index=lambda place: made[int(place)])

    def _copy(self, boxes: Boxes, start: list[Any], barrier: Barrier, target: Room) -> None:
        """Fill a room later, and count its bytes then."""
        target.values.fill_(torch.nan)
        found = boxes.box(start).reshape(target.values.shape)

        def arrive() -> None:
            target.values.copy_(found)
            barrier.change(0, -2 * found.numel())

        threading.Timer(self.random.random() / 1000, arrive).start()

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


def _multiply(left: Any, right: Room, acc: Any, use_acc: bool = True, is_async: bool = True) -> Product:
    assert not isinstance(left, Product)
    return Product(left, right, acc if use_acc else torch.zeros(()))


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Values:
    return values((a.double() * b.double() + c.double()).float())


def _cap(scores: Tensor, scale: Any, soft_cap: bool) -> Values:
    return values(-1.0 / (1.0 + torch.exp2(scores * scale))) if soft_cap else values(scores)


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


class Kernel:
    """A kernel of this folder's Python, in the place of the compiled one that a launcher subscribes."""

    def __init__(self, name: str, most_programs: int = 3) -> None:
        self.name, self.most_programs = name, most_programs

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **given: self._launch(min(grid[0], self.most_programs), given)

    def _launch(self, programs: int, given: dict[str, Any]) -> None:
        shape = given["SHAPE"] = given["SHAPE"]._replace(MAP="any")
        for name, value in given.items():
            if isinstance(value, Tensor):
                given[name] = Pointer(value)
            elif name == "query_boxes":
                given[name] = Boxes(value.base, [64 // shape.PACK, shape.PACK, 64])
            elif name in ("key_boxes", "value_boxes"):
                given[name] = Boxes(value.base.transpose(1, 2), [1, 1, shape.BOX, 64])
        for index in range(programs):
            function = Program(index, programs, index).names[self.name]
            code = function.__code__
            function(**{name: given[name] for name in code.co_varnames[: code.co_argcount]})
