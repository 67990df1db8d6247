"""Loads of the latent decode kernels where every row names its keys one by one: rows of the cache from anywhere.

Four warps copy 16 bytes a thread, since the bulk copies of Hopper take no list. The table of a request holds the slots
of its keys, -1 for none, which come as zeros.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from vattn.kernels.hopper.compat import copy_rows
from vattn.kernels.hopper.mla.work_items import LATENT, ROPE, TILE, advance, first_item, load_queries, open_item, shaped

THREADS = gl.constexpr(128)
"""Arrivals that complete the barrier of a load: every thread's own."""


@gluon.jit
def slots_of(table, tile, keys, num_slots, row):
    """Return the slots of a tile's rows, -1 for none."""
    place = tile * TILE + row
    slot = gl.load(table + place, mask=place < keys, other=-1)
    return gl.where((slot >= 0) & (slot < num_slots), slot, -1)


@gluon.jit
def gather(
    query_boxes, query_rope_boxes, cache, work, queries, query_ropes, latents, ropes, query_ready, query_free, ready,
    free, HEADS: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, SPLIT_QUERY: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load the queries of each group of rows, then its tiles: rotated keys and both halves of the latents apart.

    Blocks of `work` are slots here.
    """
    _, _, _, schedule, _, num_slots, _, _ = work
    HELD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, TILE, layout=gl.SliceLayout(1, HELD))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, HELD))[None, :]
    stage = 0
    phase = 1
    query_phase = 1
    item = first_item(schedule, gl.program_id(0) // GROUPS)
    while item >= 0:
        row0, rows, _, keys, first, last, _, item, table, _ = open_item(work, item, HEADS, 1, SPLIT_QUERY)
        for group in range(gl.program_id(0) % GROUPS, (rows + ROWS - 1) // ROWS, GROUPS):
            load_queries(
                query_boxes, query_rope_boxes, row0, group, queries, query_ropes, query_ready, query_free, query_phase,
                ROWS, True,
            )  # fmt: skip
            query_phase ^= 1
            slot = slots_of(table, first, keys, num_slots, row)
            for tile in range(first, last):
                # The next tile's slots, read before the loads of this one.
                following = slots_of(table, tile + 1, keys, num_slots, row)
                source = cache + gl.maximum(slot, 0).to(gl.int64)[:, None] * (LATENT + ROPE) + column
                exists = (slot >= 0)[:, None] & (column >= 0)
                slot = following
                mbarrier.wait(free.index(3 * stage), phase)
                copy_rows(ropes.index(stage), source + LATENT, mask=exists)
                async_copy.mbarrier_arrive(ready.index(3 * stage), increment_count=False)
                flat = shaped(latents.index(stage), [8 * TILE, 64], LAYOUT)
                for half in gl.static_range(2):
                    mbarrier.wait(free.index(3 * stage + 1 + half), phase)
                    for panel in gl.static_range(4 * half, 4 * half + 4):
                        copy_rows(flat.slice(panel * TILE, TILE, dim=0), source + panel * 64, mask=exists)
                    async_copy.mbarrier_arrive(ready.index(3 * stage + 1 + half), increment_count=False)
                stage, phase = advance(stage, phase, 2)


@gluon.jit
def gather_codes(
    cache, work, codes, ropes, ready, free, HEADS: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr,
    SPLIT_QUERY: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load the tiles of each group of rows from a cache of codes, `[slots, 288]` pairs of which are int16.

    Blocks of `work` are slots here.
    """
    _, _, _, schedule, _, num_slots, _, _ = work
    HELD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    row = gl.arange(0, TILE, layout=gl.SliceLayout(1, HELD))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, HELD))[None, :]
    rope_row = gl.arange(0, TILE, layout=gl.SliceLayout(1, NARROW))
    rope_column = gl.arange(0, ROPE // 2, layout=gl.SliceLayout(0, NARROW))[None, :]
    PAIRS: gl.constexpr = (LATENT + ROPE) // 2
    stage = 0
    phase = 1
    item = first_item(schedule, gl.program_id(0) // GROUPS)
    while item >= 0:
        _, rows, _, keys, first, last, _, item, table, _ = open_item(work, item, HEADS, 1, SPLIT_QUERY)
        for _group in range(gl.program_id(0) % GROUPS, (rows + ROWS - 1) // ROWS, GROUPS):
            slot = slots_of(table, first, keys, num_slots, row)
            rope_slot = slots_of(table, first, keys, num_slots, rope_row)
            for tile in range(first, last):
                # The next tile's slots, read before the loads of this one.
                following = slots_of(table, tile + 1, keys, num_slots, row)
                rope_following = slots_of(table, tile + 1, keys, num_slots, rope_row)
                source = cache + gl.maximum(slot, 0).to(gl.int64)[:, None] * PAIRS + column
                exists = (slot >= 0)[:, None] & (column >= 0)
                rope_source = cache + gl.maximum(rope_slot, 0).to(gl.int64)[:, None] * PAIRS + LATENT // 2 + rope_column
                rope_exists = (rope_slot >= 0)[:, None] & (rope_column >= 0)
                slot = following
                rope_slot = rope_following
                mbarrier.wait(free.index(stage), phase)
                copy_rows(ropes.index(stage), rope_source, mask=rope_exists)
                flat = shaped(codes.index(stage), [4 * TILE, 64], LAYOUT)
                for panel in gl.static_range(4):
                    copy_rows(flat.slice(panel * TILE, TILE, dim=0), source + panel * 64, mask=exists)
                async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
                stage, phase = advance(stage, phase, STAGES)
