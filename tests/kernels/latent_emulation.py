"""Run the Python of the latent decode kernel with scores in turns on a CPU: each warpgroup a thread, layouts ignored.

See `late_emulation`.
"""

from __future__ import annotations

import math
import types
from typing import Any

import torch
from torch import Tensor

from tests.kernels.gluon_emulation import Barrier
from tests.kernels.late_emulation import LateProgram, Room, nothing
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


class LatentProgram(LateProgram):
    """One program of the grid.

    Args:
        cache, queries: `[blocks, block_size, 576]` and `[T * heads, 576]`, fp32.
        output, partial: `[rows, 512]`, written in whole boxes.
        seed: of who is late, and by how much.
    """

    def __init__(
        self, index: int, programs: int, cache: Tensor, queries: Tensor, output: Tensor, partial: Tensor, seed: int
    ) -> None:
        super().__init__(index, programs, seed, late=0.1)
        self.cache, self.queries, self.output, self.partial = cache, queries, output, partial
        names = self.names
        names |= {
            "load_queries": self._load_queries, "load_blocks": self._load_blocks, "send_half": self._send_half,
            "clear_rows": _clear_rows,
            "panels": lambda room, first, count, rows, layout: room.slice(64 * first, 64 * count, 1),
            "shrink": lambda acc, sums, decay, layout: (acc * decay[:, None], sums * decay[:, None]),
            "stage_of": lambda tile, stage: stage, "take_over": nothing, "clear_padding": nothing,
            "TILE": 64, "ROWS": 64, "LATENT": 512, "ROPE": 64, "FIELDS": 8,
            "HIDDEN": rows_64.HIDDEN.value, "LN2": math.log(2),
        }  # fmt: skip
        for module, functions in FUNCTIONS.items():
            for name in functions:
                function = getattr(module, name).fn
                names[name] = types.FunctionType(function.__code__, names, name, function.__defaults__)
        self.kernel = names["mla_decode_64_kernel"]

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
        self.fill(queries, found[:, :512], ready.index(0), rows * 512 * 2)
        self.fill(ropes, found[:, 512:], ready.index(0), rows * 64 * 2)

    def _load_blocks(
        self, boxes: Any, rope_boxes: Any, tile: int, num_blocks: int, blocks: Any, ready: Barrier, latents: Room,
        ropes: Room, first: int, count: int, with_rope: bool, block_size: int, block_rows: int, layout: Any,
    ) -> None:  # fmt: skip
        rows = torch.zeros(64, 576)
        for row in range(64):
            block = int(blocks[row // block_size if block_size < 64 else 0])
            if 0 <= block < num_blocks:
                rows[row] = self.cache[block, (int(tile) * 64 + row) % block_size]
        self.fill(latents.slice(64 * first, 64 * count, 1), rows[:, 64 * first :][:, : 64 * count], ready, 8192 * count)
        if with_rope:
            self.fill(ropes, rows[:, 512:], ready, 8192)

    def _send_half(
        self, acc: Tensor, norm: Tensor, output: Any, partial: Any, room: Room, group: int, row0: Any, slot: Any,
        first: int, partial_rows: int, layout: Any,
    ) -> None:  # fmt: skip
        room.slice(first, 256, 1).values.fill_(torch.nan)
        target, row = (self.partial, int(slot) * partial_rows) if slot >= 0 else (self.output, int(row0))
        row += group * 64
        target[row : row + 64, first : first + 256] = acc if slot >= 0 else acc * norm[:, None]
        self.pause()


def _clear_rows(latents: Room, begin: Any, first: int, count: int, layout: Any) -> None:
    latents.slice(64 * first, 64 * count, 1).values[max(int(begin), 0) :] = 0
