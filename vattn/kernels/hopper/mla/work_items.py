"""What the latent decode kernels of Hopper share: work items, loads of cached rows, and garbage that must not count.

A tile is 64 cached rows of 512 + 64 columns of 16 bits, or of 256 + 32 pairs of codes. In shared memory its latents are
panels of 64 columns, its rotated keys are one. Blocks of fewer than 64 tokens come as boxes of [block, 64].
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from vattn.kernels.hopper.compat import HAS_REINTERPRET, block_barrier, load_box
from vattn.kernels.hopper.schedule import FIELDS
from vattn.kernels.triton.common.mask import LN2

TILE = tl.constexpr(64)
"""Cached rows of one tile."""

LATENT = tl.constexpr(512)
ROPE = tl.constexpr(64)


@gluon.jit
def shaped(memory, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return shared memory in another shape, byte for byte."""
    if HAS_REINTERPRET:
        return memory.reinterpret(memory.dtype, SHAPE, LAYOUT)
    else:
        return memory._reinterpret(memory.dtype, SHAPE, LAYOUT)


@gluon.jit
def panels(memory, FIRST: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return some panels of `[ROWS, columns]` as `[ROWS, 64 * COUNT]`."""
    PANELS: gl.constexpr = memory.shape[1] // 64
    flat = shaped(memory, [PANELS * ROWS, 64], LAYOUT).slice(FIRST * ROWS, COUNT * ROWS, dim=0)
    return shaped(flat, [ROWS, 64 * COUNT], LAYOUT)


@gluon.jit
def first_item(schedule, cta, FULL: gl.constexpr = False):
    """Return the first item of a CTA, -1 for none; in FULL schedules every CTA has one."""
    if FULL:
        return cta
    else:
        return gl.where(cta < gl.load(schedule), cta, -1)


@gluon.jit
def load_request(query_start_loc, seq_lens, schedule, request, item, FULL: gl.constexpr):
    """Return the first token of an item's request, its rows and its length."""
    if FULL:
        record = schedule + (1 + item) * FIELDS
        return gl.load(record + 5), gl.load(record + 6), gl.load(record + 7)
    else:
        start = gl.load(query_start_loc + request)
        length = gl.load(query_start_loc + request + 1) - start
        return start, length, gl.maximum(gl.load(seq_lens + request), 0)


@gluon.jit
def open_item(
    work, item, HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPLIT_QUERY: gl.constexpr, FULL: gl.constexpr = False
):
    """Return of an item: first row, rows, length, keys, first and end tile, slot, next item, its table, last block.

    `work`: query_start_loc, seq_lens, block_table, schedule, tokens of the query, blocks of the cache, stride and width
    of the table. `keys`: those that the cache has of the request. FULL: see `vattn.kernels.hopper.mla.schedule`.
    Requests of more than SPLIT_QUERY tokens are not split, whatever the schedule says.
    """
    query_start_loc, seq_lens, block_table, schedule, num_tokens, _, table_stride, table_width = work
    record = schedule + (1 + item) * FIELDS
    request = gl.load(record)
    first, last, slot, following = gl.load(record + 1), gl.load(record + 2), gl.load(record + 3), gl.load(record + 4)
    start, length, seq_len = load_request(query_start_loc, seq_lens, schedule, request, item, FULL)
    # A plan that was made for more rows keeps inside of those that there are.
    start = gl.minimum(start, num_tokens)
    length = gl.minimum(length, num_tokens - start)
    keys = gl.minimum(seq_len, table_width * BLOCK_SIZE)
    end_tile = (keys + TILE - 1) // TILE
    is_long = length > SPLIT_QUERY
    first = gl.where(is_long, 0, first)
    last = gl.where(is_long, end_tile, gl.minimum(last, end_tile))
    row0, rows = start * HEADS, gl.maximum(length, 0) * HEADS
    table = block_table + request.to(gl.int64) * table_stride
    last_block = gl.maximum((keys + BLOCK_SIZE - 1) // BLOCK_SIZE - 1, 0)
    return row0, rows, seq_len, keys, first, last, slot, following, table, last_block


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """Return the stage after one, and the phase of its barriers."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def load_queries(
    query_boxes, query_rope_boxes, row0, group, queries, query_ropes, ready, free, phase, ROWS: gl.constexpr,
    ROPES_FIRST: gl.constexpr,
):  # fmt: skip
    """Load a group of ROWS rows of queries once their room is free."""
    mbarrier.wait(free.index(0), phase)
    mbarrier.expect(ready.index(0), ROWS * (LATENT + ROPE) * 2)
    if ROPES_FIRST:
        load_box(query_rope_boxes, [row0 + group * ROWS, LATENT], ready.index(0), query_ropes)
        load_box(query_boxes, [row0 + group * ROWS, 0], ready.index(0), queries)
    else:
        load_box(query_boxes, [row0 + group * ROWS, 0], ready.index(0), queries)
        load_box(query_rope_boxes, [row0 + group * ROWS, LATENT], ready.index(0), query_ropes)


@gluon.jit
def load_blocks(
    boxes, rope_boxes, tile, num_blocks, blocks, ready, latents, ropes,
    FIRST: gl.constexpr, COUNT: gl.constexpr, WITH_ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Start loading some panels of a tile. Blocks that are none come as zeros: beyond the cache the hardware fills.

    The rotated keys of a row follow its latents. BLOCK_ROWS: rows of the map from one block to the next.
    """
    if BLOCK_SIZE >= TILE:
        PER_BLOCK: gl.constexpr = BLOCK_SIZE // TILE
        row = block_row(blocks[0], num_blocks, BLOCK_ROWS) + tile % PER_BLOCK * TILE
        if COUNT * 64 == latents.shape[1]:
            load_box(boxes, [row, 0], ready, latents)
        elif COUNT > 0:
            load_box(boxes, [row, FIRST * 64], ready, panels(latents, FIRST, COUNT, TILE, LAYOUT))
        if WITH_ROPE:
            load_box(rope_boxes, [row, latents.shape[1]], ready, ropes)
    else:
        for place in gl.static_range(TILE // BLOCK_SIZE):
            load_small(boxes, rope_boxes, blocks[place], num_blocks, ready, latents, ropes, place, FIRST, COUNT,
                       WITH_ROPE, BLOCK_SIZE, BLOCK_ROWS, LAYOUT)  # fmt: skip


@gluon.jit
def block_row(block, num_blocks, BLOCK_ROWS: gl.constexpr):
    """Return the first row of a block, or a row past the cache for an id out of range."""
    known = (block >= 0) & (block < num_blocks)
    return gl.where(known, block, num_blocks) * BLOCK_ROWS


@gluon.jit
def load_small(
    boxes, rope_boxes, block, num_blocks, ready, latents, ropes, PLACE: gl.constexpr, FIRST: gl.constexpr,
    COUNT: gl.constexpr, WITH_ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_ROWS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    row = block_row(block, num_blocks, BLOCK_ROWS)
    WIDTH: gl.constexpr = latents.shape[1]
    flat = shaped(latents, [WIDTH // 64 * TILE, 64], LAYOUT)
    for panel in gl.static_range(FIRST, FIRST + COUNT):
        target = flat.slice(panel * TILE + PLACE * BLOCK_SIZE, BLOCK_SIZE, dim=0)
        load_box(boxes, [row, panel * 64], ready, target)
    if WITH_ROPE:
        load_box(rope_boxes, [row, WIDTH], ready, ropes.slice(PLACE * BLOCK_SIZE, BLOCK_SIZE, dim=0))


@gluon.jit
def block_ids(table, tile, last_block, BLOCK_SIZE: gl.constexpr):
    """Return the ids of up to four blocks of a tile, the last block's where there are fewer."""
    if BLOCK_SIZE >= TILE:
        PER_BLOCK: gl.constexpr = BLOCK_SIZE // TILE
        p0 = gl.load(table + gl.minimum(tile // PER_BLOCK, last_block))
        p1 = p0
        p2 = p0
        p3 = p0
    else:
        PARTS: gl.constexpr = TILE // BLOCK_SIZE
        p0 = gl.load(table + gl.minimum(tile * PARTS, last_block))
        p1 = gl.load(table + gl.minimum(tile * PARTS + 1, last_block))
        p2 = p0
        p3 = p0
        if PARTS > 2:
            p2 = gl.load(table + gl.minimum(tile * PARTS + 2, last_block))
            p3 = gl.load(table + gl.minimum(tile * PARTS + 3, last_block))
    return p0, p1, p2, p3


@gluon.jit
def produce(
    query_boxes, query_rope_boxes, boxes, rope_boxes, work, queries, query_ropes, latents, ropes, query_ready,
    query_free, ready, free, HEADS: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, SPLIT_QUERY: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load the queries of each group of rows, unless they are `None`, then its tiles.

    Args:
        latents, ropes: `[STAGES, TILE, *]`, of values or of pairs of codes.
    """
    COUNT: gl.constexpr = latents.shape[2] // 64
    BYTES: gl.constexpr = TILE * (latents.shape[2] + ropes.shape[2]) * 2
    _, _, _, schedule, _, num_blocks, _, _ = work
    stage = 0
    phase = 1
    query_phase = 1
    item = first_item(schedule, gl.program_id(0) // GROUPS, True)
    while item >= 0:
        row0, rows, _, _, first, last, _, item, table, last_block = open_item(
            work, item, HEADS, BLOCK_SIZE, SPLIT_QUERY, True
        )
        for group in range(gl.program_id(0) % GROUPS, (rows + ROWS - 1) // ROWS, GROUPS):
            # On their way while the queries' copies are started.
            blocks = block_ids(table, first, last_block, BLOCK_SIZE)
            if queries is not None:
                load_queries(
                    query_boxes, query_rope_boxes, row0, group, queries, query_ropes, query_ready, query_free,
                    query_phase, ROWS, False,
                )  # fmt: skip
                query_phase ^= 1
            for tile in range(first, last):
                # The next tile's block ids, read before the loads of this one.
                following = block_ids(table, tile + 1, last_block, BLOCK_SIZE)
                mbarrier.wait(free.index(stage), phase)
                mbarrier.expect(ready.index(stage), BYTES)
                load_blocks(
                    boxes, rope_boxes, tile, num_blocks, blocks, ready.index(stage), latents.index(stage),
                    ropes.index(stage), 0, COUNT, True, BLOCK_SIZE, BLOCK_ROWS, LAYOUT,
                )  # fmt: skip
                blocks = following
                stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def clear_rows(latents, begin, FIRST: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """Zero the rows of a tile from `begin` on, in some panels: unwritten rows may be NaN, and NaN times 0 is NaN."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, TILE, layout=gl.SliceLayout(1, ROWS))[:, None]
    zero = gl.zeros([TILE, 64], latents.dtype, ROWS)
    PANELS: gl.constexpr = latents.shape[1] // 64
    flat = shaped(latents, [PANELS * TILE, 64], LAYOUT)
    for panel in gl.static_range(FIRST, FIRST + COUNT):
        part = flat.slice(panel * TILE, TILE, dim=0)
        part.store(gl.where(row < begin, part.load(ROWS), zero))
    fence_async_shared()
    block_barrier()


@gluon.jit
def keys_seen(row, rows, seq_len, keys, HEADS: gl.constexpr):
    """Return the keys that rows of a request see."""
    return gl.minimum(seq_len - rows // HEADS + 1 + row // HEADS, keys)


@gluon.jit
def weigh(scores, maximum):
    """Return weights of scores `[TILE, ROWS]`, the new maximum of each column, and what earlier weights shrink by."""
    new_maximum = gl.maximum(maximum, gl.max(scores, 0))
    decay = gl.exp2(maximum - new_maximum)[None, :]
    return gl.exp2(scores - new_maximum[None, :]), new_maximum, decay


@gluon.jit
def store_stats(stats, place, maximum, total, mask):
    """Write maximum and sum of rows of a split."""
    gl.store(stats + place * 2, maximum, mask=mask)
    gl.store(stats + place * 2 + 1, total, mask=mask)


@gluon.jit
def store_lse(lse, place, maximum, total, seen, mask):
    """Write the LSE of rows, -inf for those that saw nothing; `maximum` in base 2."""
    log = gl.where(seen, (maximum + gl.log2(total)) * LN2, float("-inf"))
    gl.store(lse + place, log, mask=mask)


@gluon.jit
def clear_padding(output, lse, schedule, num_tokens, HEADS: gl.constexpr, LANES: gl.constexpr):
    """Write zeros and -inf to rows of no request, each program its share. LANES: a layout of 512 columns."""
    column = gl.arange(0, LATENT, layout=LANES)
    zero = gl.zeros([LATENT], output.dtype.element_ty, LANES)
    first = gl.minimum(gl.load(schedule + 2), num_tokens) * HEADS + gl.program_id(0)
    rows = num_tokens * HEADS
    # Rows before the first request follow the last row.
    for row in range(first, rows + gl.minimum(gl.load(schedule + 3), num_tokens) * HEADS, gl.num_programs(0)):
        place = gl.zeros([LATENT], gl.int64, LANES) + gl.where(row < rows, row, row - rows)
        gl.store(output + place * LATENT + column, zero)
        if lse is not None:
            gl.store(lse + place, zero.to(gl.float32) + float("-inf"), mask=column == 0)
