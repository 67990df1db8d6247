"""Run the Python of the latent decode kernel with scores in turns on a CPU: each warpgroup a thread, layouts ignored.

Copies arrive late, products of matrices are computed when they are waited for, from what shared memory holds then, and
rooms that a copy may write are NaN from its start: whoever comes too early or too late finds it out. Whoever waits for
longer than some seconds fails: that is a deadlock on a GPU.
"""

from __future__ import annotations

import math
import random
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.kernels.gluon_emulation import Barrier, LateBarrier, Memory, Partition, Pointer, run_in_threads
from vattn.kernels.hopper.mla import decode_64, rows_64, work_items

FUNCTIONS: dict[Any, tuple[str, ...]] = {
    decode_64: (
        "load_tile", "load_tiles", "score", "raised", "add_weights", "multiply_sent", "total_of", "close_rows",
        "attend_even", "attend_odd", "mla_decode_64_kernel",
    ),
    work_items: ("first_item", "load_request", "open_item", "block_ids"),
    rows_64: (
        "blocks_known", "hide", "rows_seen", "inverse_of", "store_sums", "may_send", "write_half", "store_half",
    ),
}  # fmt: skip
"""What runs as it is; what copies, converts or writes for the hardware is replaced below."""


class Room(Memory):
    """Shared memory that tells its dtype."""

    dtype = torch.float32

    def index(self, place: int) -> Room:
        return Room(self.values[int(place)])

    def permute(self, order: tuple[int, ...]) -> Room:
        return Room(self.values.permute(order))

    def columns(self, first: int, count: int) -> Room:
        return Room(self.values[:, first : first + count])


class Product:
    """A product that is on its way; nothing but waiting for it gives a tensor."""

    def __init__(self, left: Any, right: Room, start: Any) -> None:
        self.left, self.right, self.start = left, right, start

    def finish(self) -> Tensor:
        start = self.start.finish() if isinstance(self.start, Product) else self.start
        left = self.left.values if isinstance(self.left, Memory) else self.left
        return torch.addmm(start, left, self.right.values)


class LatentProgram:
    """One program of the grid.

    Args:
        cache, queries: `[blocks, block_size, 576]` and `[T * heads, 576]`, fp32.
        output, partial: `[rows, 512]`, written in whole boxes.
        seed: of who is late, and by how much.
    """

    def __init__(
        self, index: int, programs: int, cache: Tensor, queries: Tensor, output: Tensor, partial: Tensor, seed: int
    ) -> None:
        self.cache, self.queries, self.output, self.partial = cache, queries, output, partial
        self.changed, self.failed, self.random = threading.Condition(), False, random.Random(seed)

        def nothing(*args: Any, **kwargs: Any) -> None:
            return None

        def both(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
            return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))

        gl = types.SimpleNamespace(
            program_id=lambda axis: index, num_programs=lambda axis: programs, static_range=range,
            int32=torch.int32, int64=torch.int64, float32=torch.float32,
            minimum=both(torch.minimum), maximum=both(torch.maximum), exp2=torch.exp2, log2=torch.log2,
            where=lambda condition, a, b: torch.where(*map(torch.as_tensor, (condition, a, b))),
            sum=lambda x, axis: x.sum(axis), max=lambda x, axis: x.max(axis).values,
            min=lambda x, axis: x.min(axis).values, arange=lambda low, high, layout: torch.arange(low, high),
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
            convert_layout=lambda x, layout: x, load=_load, store=_store,
            allocate_shared_memory=lambda dtype, shape, layout: Room(torch.full(shape, torch.nan)),
            warp_specialize=self._run, NVMMADistributedLayout=nothing, DotOperandLayout=nothing,
            BlockedLayout=nothing, SliceLayout=nothing, SwizzledSharedLayout=nothing, NVMMASharedLayout=nothing,
        )  # fmt: skip
        mbarrier = types.SimpleNamespace(
            expect=lambda barrier, size: barrier.change(1, int(size)),
            arrive=lambda barrier, count: barrier.change(count, 0), wait=lambda barrier, phase: barrier.wait(phase),
        )  # fmt: skip
        names: dict[str, Any] = {
            "gl": gl, "mbarrier": mbarrier, "new_barriers": self._barriers, "load_queries": self._load_queries,
            "load_blocks": self._load_blocks, "send_half": self._send_half, "clear_rows": _clear_rows,
            "panels": lambda room, first, count, rows, layout: room.columns(64 * first, 64 * count),
            "shrink": lambda acc, sums, decay, layout: (acc * decay[:, None], sums * decay[:, None]),
            "stage_of": lambda tile, stage: stage, "warpgroup_mma": _multiply, "warpgroup_mma_wait": self._finish,
            "fence_async_shared": nothing, "block_barrier": nothing, "take_over": nothing, "clear_padding": nothing,
            "TILE": 64, "ROWS": 64, "LATENT": 512, "ROPE": 64, "FIELDS": 8,
            "HIDDEN": rows_64.HIDDEN.value, "LN2": math.log(2), "float": float, "range": range,
        }  # fmt: skip
        for module, functions in FUNCTIONS.items():
            for name in functions:
                function = getattr(module, name).fn
                names[name] = types.FunctionType(function.__code__, names, name, function.__defaults__)
        self.kernel = names["mla_decode_64_kernel"]

    def pause(self) -> None:
        """Be late, now and then."""
        late = self.random.random()
        if late < 0.1:
            time.sleep(late / 50)

    def _barriers(self, count: int, arrivals: int) -> Any:
        made = [LateBarrier(self, arrivals) for _ in range(count)]
        return types.SimpleNamespace(index=lambda place: made[int(place)])

    def _copy(self, target: Room, values: Tensor, barrier: Barrier, size: int) -> None:
        """Fill a room later, and count its bytes then."""
        target.values.fill_(torch.nan)

        def arrive() -> None:
            time.sleep(self.random.random() / 500)
            target.values.copy_(values)
            barrier.change(0, -size)

        threading.Thread(target=arrive, daemon=True).start()

    def _load_queries(
        self, boxes: Any, rope_boxes: Any, row0: Any, group: int, queries: Room, ropes: Room, ready: Any, free: Any,
        phase: int, rows: int, ropes_first: bool,
    ) -> None:  # fmt: skip
        free.index(0).wait(phase)
        size = rows * 576 * 2
        ready.index(0).change(1, size)
        first, found = int(row0) + group * rows, torch.zeros(rows, 576)
        part = self.queries[first : first + rows]
        found[: len(part)] = part
        self._copy(queries, found[:, :512], ready.index(0), rows * 512 * 2)
        self._copy(ropes, found[:, 512:], ready.index(0), rows * 64 * 2)

    def _load_blocks(
        self, boxes: Any, rope_boxes: Any, tile: int, num_blocks: int, blocks: Any, ready: Barrier, latents: Room,
        ropes: Room, first: int, count: int, with_rope: bool, block_size: int, block_rows: int, layout: Any,
    ) -> None:  # fmt: skip
        rows = torch.zeros(64, 576)
        for row in range(64):
            block = int(blocks[row // block_size if block_size < 64 else 0])
            if 0 <= block < num_blocks:
                rows[row] = self.cache[block, (int(tile) * 64 + row) % block_size]
        self._copy(latents.columns(64 * first, 64 * count), rows[:, 64 * first :][:, : 64 * count], ready, 8192 * count)
        if with_rope:
            self._copy(ropes, rows[:, 512:], ready, 8192)

    def _send_half(
        self, acc: Tensor, norm: Tensor, output: Any, partial: Any, room: Room, group: int, row0: Any, slot: Any,
        first: int, partial_rows: int, layout: Any,
    ) -> None:  # fmt: skip
        room.columns(first, 256).values.fill_(torch.nan)
        target, row = (self.partial, int(slot) * partial_rows) if slot >= 0 else (self.output, int(row0))
        row += group * 64
        target[row : row + 64, first : first + 256] = acc if slot >= 0 else acc * norm[:, None]
        self.pause()

    def _finish(self, num_outstanding: int, deps: tuple[Any, ...]) -> Tensor:
        assert num_outstanding == 0
        self.pause()
        (product,) = deps
        return product.finish() if isinstance(product, Product) else product

    def _run(self, partitions: list[Partition], *sizes: list[int]) -> None:
        run_in_threads(partitions, self._give_up)

    def _give_up(self) -> None:
        with self.changed:
            self.failed = True
            self.changed.notify_all()


def _multiply(left: Any, right: Room, acc: Any, use_acc: bool = True, is_async: bool = True) -> Product:
    assert not isinstance(left, Product)
    return Product(left, right, acc if use_acc else torch.zeros(()))


def _clear_rows(latents: Room, begin: Any, first: int, count: int, layout: Any) -> None:
    latents.columns(64 * first, 64 * count).values[max(int(begin), 0) :] = 0


def _load(pointer: Pointer, mask: Any = None, other: float = 0) -> Tensor:
    offset = torch.as_tensor(pointer.offset)
    if mask is None:
        return pointer.tensor.reshape(-1)[offset.long()].clone()
    offset, mask = torch.broadcast_tensors(offset, mask)
    found = torch.full(offset.shape, other, dtype=pointer.tensor.dtype)
    found[mask] = pointer.tensor.reshape(-1)[offset[mask].long()]
    return found


def _store(pointer: Pointer, values: Tensor, mask: Tensor) -> None:
    places, mask = pointer.places(mask)
    pointer.tensor.view(-1)[places] = values.expand(mask.shape)[mask]
