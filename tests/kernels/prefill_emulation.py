"""Run the Python of the Hopper prefill kernel on a CPU, in fp32: each partition a thread, layouts mean nothing.

For a cache of the model dtype and heads of 64; see `late_emulation`.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from tests.kernels.gluon_emulation import PATIENCE, Barrier, Pointer
from tests.kernels.late_emulation import NUMBER, LateProgram, Room, Values, nothing, values
from vattn.kernels.hopper import epilogue
from vattn.kernels.hopper.prefill import kernel, load, merge, parts, ping_pong, softmax, store, tile_queue

MODULES = (epilogue, softmax, tile_queue, parts, load, ping_pong, store, merge, kernel)
"""In the order of their imports. What copies, waits or is assembly is replaced in `Program`."""


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


class Program(LateProgram):
    """One program of a grid; `seed`: of who is late, and by how much."""

    def __init__(self, index: int, programs: int, seed: int) -> None:
        super().__init__(index, programs, seed, late=0.05)
        turns = {name: Turn(self) for name in ping_pong.BARRIERS.value}
        names: dict[str, Any] = {}
        for module in MODULES:
            for name, value in vars(module).items():
                if isinstance(value, tl.constexpr):
                    names[name] = value.value
                elif hasattr(value, "fn"):
                    names[name] = types.FunctionType(value.fn.__code__, names, name, value.fn.__defaults__)
        names |= self.names | {
            "load_box": self._copy, "read_word": lambda cell, warps: values(int(cell.values.reshape(-1)[0])),
            "as_words": lambda memory, count: memory,
            "as_boxes": lambda memory, boxes, count: Room(memory.values.reshape(count, -1, memory.values.shape[-1])),
            "as_tiles": lambda memory, dtype, count, shape, layout: Room(memory.values[None]),
            "ping_pong_wait": lambda barrier: turns[barrier].change(-1),
            "ping_pong_signal": lambda barrier: turns[barrier].change(1),
            "let_next_kernel_start": nothing, "wait_for_previous_kernel": nothing, "cap_scores": _cap,
        }  # fmt: skip
        self.names = names

    def _copy(self, boxes: Boxes, start: list[Any], barrier: Barrier, target: Room) -> None:
        found = boxes.box(start).reshape(target.values.shape)
        self.fill(target, found, barrier, 2 * found.numel())


def _cap(scores: Tensor, scale: Any, soft_cap: bool) -> Values:
    return values(-1.0 / (1.0 + torch.exp2(scores * scale))) if soft_cap else values(scores)


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
