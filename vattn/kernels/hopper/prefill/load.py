"""The producer warp of the Hopper prefill kernel: bulk tensor copies of queries, keys and values into shared memory.

Keys that no row may see are not read, or do not affect the result:

- a box of keys and values (a block, or a part of a large one) past the end of a request or before every window is
  requested at block -1, where the hardware fills zeros without reading;
- the last, partly filled box of a request is loaded shifted: its rows end with the last token, and what the shift
  brings in front is zero (or, in a large block, earlier tokens). Keys and values shift alike, so only the mask knows;
- a block id out of range becomes block -1 too, and a word per tile tells the consumers to hide its keys.

With `PART`, for results that do not depend on the batch, the last box lies at its own place, where its tokens lie when
there are more; `clear_rows` clears values that a request has not got yet.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from vattn.kernels.hopper.compat import as_boxes, as_tiles, as_words, block_barrier, load_box
from vattn.kernels.hopper.prefill.parts import announce_part
from vattn.kernels.hopper.prefill.tile_queue import announce, head_of, read_word

GROUP_ROWS = gl.constexpr(64)
"""Query rows of a consumer warpgroup."""

WORDS = gl.constexpr(8)
"""Key tiles whose words about missing blocks are kept: more than there are stages anywhere."""


CLEARED_ROWS = gl.constexpr(16)
"""Rows that are cleared at a time."""

UNBOUNDED = gl.constexpr(0x7FFFFFFF)
"""The length of a request that no box shifts for."""


@gluon.jit
def find_blocks(
    table, blocks, key_tile, seq_len, left, table_width, num_blocks, BOX: gl.constexpr, BOXES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Write the block id of every box of a tile, -1 where nothing is to be read.

    Returns:
        A bit for each needed box with a block id out of range.
    """
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    box = gl.arange(0, BOXES, layout=lanes)
    token = (key_tile * BOXES + box) * BOX
    column = token // BLOCK_SIZE
    block = gl.load(table + gl.minimum(column, table_width - 1))
    needed = (token < seq_len) & (token + BOX > left)
    exists = (block >= 0) & (block < num_blocks) & (column < table_width)
    blocks.store(gl.where(needed & exists, block, -1))
    return gl.sum(gl.where(exists, 0, needed.to(gl.int32) << box), 0)


@gluon.jit
def load_tile(
    boxes, memory, ready, blocks, key_tile, head, seq_len, BOX: gl.constexpr, BOXES: gl.constexpr,
    KV_HEADS: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr, MAP: gl.constexpr,
):  # fmt: skip
    """Load the boxes of one tile of keys or values, panel by panel."""
    PANEL: gl.constexpr = boxes.block_shape[3 if MAP == "any" else 2]
    PANELS: gl.constexpr = D // PANEL
    parts = as_boxes(memory, boxes, PANELS * BOXES)
    ids = as_words(blocks, BOXES)
    for box in range(BOXES):
        block = read_word(ids.index(box), 1)
        token = (key_tile * BOXES + box) * BOX
        row = token % BLOCK_SIZE + gl.minimum(seq_len - token - BOX, 0)
        for panel in gl.static_range(PANELS):
            part = parts.index(panel * BOXES + box)
            if MAP == "tokens":
                load_box(boxes, [block, row, head * D + panel * PANEL], ready, part)
            elif MAP == "heads":
                load_box(boxes, [block * KV_HEADS + head, row, panel * PANEL], ready, part)
            else:
                load_box(boxes, [block, head, row, panel * PANEL], ready, part)


@gluon.jit
def clear_rows(values, end, KEYS: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr):
    """Clear a tile of values from row `end` on. Warpgroups that share it write the same."""
    BITS: gl.constexpr = values.dtype.primitive_bitwidth
    EACH: gl.constexpr = 128 // BITS
    panels: gl.constexpr = gl.NVMMASharedLayout(128 if D * BITS >= 1024 else D * BITS // 8, BITS, 2)
    layout: gl.constexpr = gl.BlockedLayout([1, EACH], [32 * EACH // D, D // EACH], [WARPS, 1], [1, 0])
    words = as_tiles(values, gl.int16 if BITS == 16 else gl.int8, 1, [KEYS, D], panels).index(0)
    row = gl.arange(0, CLEARED_ROWS, layout=gl.SliceLayout(1, layout))
    for i in gl.static_range(KEYS // CLEARED_ROWS):
        if end < (i + 1) * CLEARED_ROWS:
            part = words.slice(i * CLEARED_ROWS, CLEARED_ROWS, dim=0)
            part.store(gl.where((i * CLEARED_ROWS + row < end)[:, None], part.load(layout), 0))
    fence_async_shared()
    block_barrier()


@gluon.jit
def load_queries(
    query, memory, first_row, rows, head, stride, head_stride, GROUP_INDEX: gl.constexpr, PACK: gl.constexpr,
    SIZE: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Load a warpgroup's queries, PACK heads of each token; after the tile's `rows` tokens the last one is repeated."""
    EACH: gl.constexpr = 128 // query.dtype.element_ty.primitive_bitwidth
    THREADS: gl.constexpr = D // EACH
    layout: gl.constexpr = gl.BlockedLayout([1, EACH], [32 // THREADS, THREADS], [4, 1], [1, 0])
    row = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    token = first_row + gl.minimum(GROUP_INDEX * (GROUP_ROWS // PACK) + row // PACK, rows - 1)
    places = token.to(gl.int64) * stride + (head + row % PACK) * head_stride
    pointers = query + places[:, None] + column[None, :]
    if SIZE < D:
        values = gl.load(pointers, mask=(row[:, None] >= 0) & (column < SIZE)[None, :], other=0.0)
    else:
        values = gl.load(pointers)
    # The products of the previous tile must have read the memory first.
    block_barrier()
    memory.store(values)
    fence_async_shared()
    block_barrier()


@gluon.jit
def produce(arguments, SHAPE: gl.constexpr):
    """Take row tiles from the counter, or in turn, announce them, and load their queries, keys and values."""
    (
        query_boxes, key_boxes, value_boxes, schedule, counter, block_table, table_stride, table_width, num_blocks,
        query_head_stride, queries, keys, values, words, messages, blocks, query_full, query_empty, key_full,
        key_empty, value_full, value_empty, message_full, message_empty,
    ) = arguments  # fmt: skip
    KV_HEADS: gl.constexpr = SHAPE.KV_HEADS
    D: gl.constexpr = SHAPE.D
    PACK: gl.constexpr = SHAPE.PACK
    KEYS: gl.constexpr = SHAPE.KEYS
    BLOCK_SIZE: gl.constexpr = SHAPE.BLOCK_SIZE
    MAP: gl.constexpr = SHAPE.MAP
    WINDOW: gl.constexpr = SHAPE.WINDOW
    GROUPS: gl.constexpr = SHAPE.GROUPS
    KEY_STAGES: gl.constexpr = SHAPE.RAW_STAGES if SHAPE.CACHE == "widened" else SHAPE.STAGES
    VALUE_STAGES: gl.constexpr = SHAPE.STAGES if SHAPE.CACHE == "plain" else SHAPE.RAW_STAGES
    GROUP: gl.constexpr = SHAPE.HEADS // KV_HEADS
    FILLED: gl.constexpr = PACK if PACK <= GROUP else GROUP
    HEADS: gl.constexpr = SHAPE.HEADS // FILLED
    TOGETHER: gl.constexpr = SHAPE.KV_GROUP * GROUP // FILLED
    BOX: gl.constexpr = SHAPE.BOX
    BOXES: gl.constexpr = KEYS // BOX
    QUERY_BYTES: gl.constexpr = GROUP_ROWS * D * query_boxes.dtype.primitive_bitwidth // 8
    TILE_BYTES: gl.constexpr = KEYS * D * key_boxes.dtype.primitive_bitwidth // 8
    LATE: gl.constexpr = SHAPE.LATE
    PART: gl.constexpr = SHAPE.PART
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    item = gl.program_id(0)
    message = 0
    used = 0
    step = 0
    rows = 1
    # Where the next part of this row tile ends, -1 after its last one.
    below = -1
    most_tiles = (table_width * BLOCK_SIZE + KEYS - 1) // KEYS
    while rows > 0:
        if PART:
            fields, rows, below = announce_part(
                schedule, messages, message_full, message_empty, item, message, most_tiles, below, HEADS, TOGETHER,
                SHAPE.SPLIT, PART,
            )  # fmt: skip
        else:
            fields, rows = announce(
                schedule, messages, message_full, message_empty, item, message, most_tiles, HEADS, TOGETHER, SHAPE.SPLIT
            )
        message += 1
        first = read_word(fields.index(5), 1)
        end = read_word(fields.index(6), 1)
        if rows > 0:
            if LATE:
                if first >= end:
                    item = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
            elif below < 0:
                if SHAPE.SPLIT:
                    item += gl.num_programs(0)
                else:
                    item = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
            if first < end:
                first_row = read_word(fields.index(1), 1)
                seq_len = read_word(fields.index(4), 1)
                head = head_of(read_word(fields.index(7), 1), SHAPE.SPLIT or PART > 0) * FILLED
                for group in gl.static_range(0 if GROUP_ROWS % PACK else GROUPS):
                    mbarrier.wait(query_empty.index(group), (used & 1) ^ 1)
                    mbarrier.expect(query_full.index(group), QUERY_BYTES)
                    if PACK == 1 and SHAPE.SIZE == D:
                        place = [first_row + group * GROUP_ROWS, head * query_head_stride]
                        load_box(query_boxes, place, query_full.index(group), queries.index(group))
                    else:
                        rows_of_group = as_boxes(queries.index(group), query_boxes, 1).index(0)
                        place = [first_row + group * (GROUP_ROWS // PACK), head, 0]
                        load_box(query_boxes, place, query_full.index(group), rows_of_group)
                used += 1
                table = block_table + read_word(fields.index(0), 1).to(gl.int64) * table_stride
                kv_head = head // GROUP
                edge = seq_len
                if PART:
                    edge = UNBOUNDED + seq_len * 0
                left = 0
                if WINDOW:
                    left = read_word(fields.index(3), 1) - WINDOW + 1
                for back in range(end - first):
                    key_tile = end - 1 - back
                    if LATE:
                        if (key_tile == first) & (below < 0):
                            item = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
                    stage = step % KEY_STAGES
                    missing = find_blocks(
                        table, blocks, key_tile, seq_len, left, table_width, num_blocks, BOX, BOXES, BLOCK_SIZE
                    )
                    mbarrier.wait(key_empty.index(stage), ((step // KEY_STAGES) & 1) ^ 1)
                    words.index(step % WORDS).store(gl.zeros([1], gl.int32, lanes) + missing)
                    mbarrier.expect(key_full.index(stage), TILE_BYTES)
                    load_tile(
                        key_boxes, keys.index(stage), key_full.index(stage), blocks, key_tile, kv_head, edge, BOX,
                        BOXES, KV_HEADS, D, BLOCK_SIZE, MAP,
                    )  # fmt: skip
                    stage = step % VALUE_STAGES
                    mbarrier.wait(value_empty.index(stage), ((step // VALUE_STAGES) & 1) ^ 1)
                    mbarrier.expect(value_full.index(stage), TILE_BYTES)
                    load_tile(
                        value_boxes, values.index(stage), value_full.index(stage), blocks, key_tile, kv_head, edge,
                        BOX, BOXES, KV_HEADS, D, BLOCK_SIZE, MAP,
                    )  # fmt: skip
                    step += 1
