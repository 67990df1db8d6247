"""Prefill attention over a paged 16-bit cache for Hopper (sm_90), in Gluon. Not verified on a GPU yet, and not in use.

One persistent CTA per multiprocessor: a producer warp that loads by bulk tensor copies, and two consumer warpgroups of
64 query rows each that share every key and value tile. Row tiles come from a schedule made on the device
(`vattn.ops.gluon.prefill_plan`), longest first; the producer takes the next one from a counter in device memory and
passes it on through shared memory.

Inside a row tile the key tiles run from the diagonal backwards. A warpgroup leaves its second product in flight while
it asks for the next first one; the two warpgroups cover each other and take turns by named barriers.

Nothing that no row may see is read, or it cannot matter:

- a box of keys and values (a block, or a part of a large one) past the end of a request or before every window is
  asked for at block -1, where the hardware fills zeros without reading;
- the last, partly filled box of a request is loaded shifted: its rows end with the last token, and what the shift
  brings in front is zero (or, in a large block, earlier tokens). Keys and values shift alike, so only the mask knows;
- a block id out of range becomes block -1 too, and a word per tile tells the consumers to hide its keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from vattn.ops.gluon.compat import as_boxes, as_words, block_barrier, load_box
from vattn.ops.gluon.decode import store_result

GROUP_ROWS = gl.constexpr(64)
"""Query rows of a consumer warpgroup."""

TILE_ROWS = gl.constexpr(128)
TILE_KEYS = gl.constexpr(128)
PANEL = gl.constexpr(64)
"""Columns of a swizzled panel in shared memory: 128 bytes."""

RECORD = gl.constexpr(8)
"""Words of a row of the schedule: request, first row, rows, position of the first, seq_len, first and end key tile."""

LOWEST = gl.constexpr(-1.0e30)
"""Where running maxima start: finite, so that differences are never NaN."""

HIDDEN = gl.constexpr(0x7FFFFFFF)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def read_word(cell, NUM_WARPS: gl.constexpr):
    """Load a scalar from shared memory `[1]`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    return gl.max(cell.load(layout), 0)


@gluon.jit
def take_turn(barrier: gl.constexpr):
    """Wait until the other warpgroup has let this one go."""
    x = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        "bar.sync " + barrier + ", 256; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def give_turn(barrier: gl.constexpr):
    """Let the other warpgroup go."""
    x = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        "bar.arrive " + barrier + ", 256; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def find_blocks(
    table, blocks, key_tile, seq_len, left, table_width, num_blocks, BOX: gl.constexpr, BOXES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Write the block id of every box of a tile, -1 where nothing is to be read.

    Returns:
        A bit for each box that is needed but whose block id is out of range.
    """
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    box = gl.arange(0, BOXES, layout=lanes)
    token = key_tile * TILE_KEYS + box * BOX
    column = token // BLOCK_SIZE
    block = gl.load(table + gl.minimum(column, table_width - 1))
    needed = (token < seq_len) & (token + BOX > left)
    exists = (block >= 0) & (block < num_blocks) & (column < table_width)
    blocks.store(gl.where(needed & exists, block, -1))
    return gl.sum(gl.where(exists, 0, needed.to(gl.int32) << box), 0)


@gluon.jit
def load_tile(
    boxes, memory, ready, blocks, key_tile, head, seq_len, BOX: gl.constexpr, BOXES: gl.constexpr,
    KV_HEADS: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr, HND: gl.constexpr,
):  # fmt: skip
    """Load the boxes of one tile of keys or values."""
    PANELS: gl.constexpr = D // PANEL
    parts = as_boxes(memory, boxes, PANELS * BOXES)
    ids = as_words(blocks, BOXES)
    for box in range(BOXES):
        block = read_word(ids.index(box), 1)
        token = key_tile * TILE_KEYS + box * BOX
        row = token % BLOCK_SIZE + gl.minimum(seq_len - token - BOX, 0)
        for panel in gl.static_range(PANELS):
            part = parts.index(panel * BOXES + box)
            if HND:
                load_box(boxes, [block * KV_HEADS + head, row, panel * PANEL], ready, part)
            else:
                load_box(boxes, [block, row, head * D + panel * PANEL], ready, part)


@gluon.jit
def announce(schedule, messages, message_full, message_empty, item, turn, HEADS: gl.constexpr, TOGETHER: gl.constexpr):
    """Pass the next row tile on: its record of the schedule, the head in the last word; no rows if there is none."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    num_tiles = gl.load(schedule)
    slot = turn % 2
    at = gl.minimum(item, num_tiles * HEADS - 1)
    of_group = num_tiles * TOGETHER
    rest = at % of_group
    head = at // of_group * TOGETHER + rest % TOGETHER
    word = gl.arange(0, RECORD, layout=lanes)
    record = gl.load(schedule + (1 + rest // TOGETHER) * RECORD + word)
    record = gl.where(word == 7, head, record)
    record = gl.where((word == 2) & (item >= num_tiles * HEADS), 0, record)
    mbarrier.wait(message_empty.index(slot), ((turn // 2) & 1) ^ 1)
    messages.index(slot).store(record)
    mbarrier.arrive(message_full.index(slot), count=1)


@gluon.jit
def produce(
    query_boxes, key_boxes, value_boxes, schedule, block_table, table_stride, table_width, num_blocks,
    query_head_stride, queries, keys, values, words, messages, blocks, query_full, query_empty, key_full, key_empty,
    value_full, value_empty, message_full, message_empty, HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
    KV_GROUP: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr, HND: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Take row tiles from the counter, announce them, and load their queries, keys and values."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    BOX: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < TILE_KEYS else TILE_KEYS
    BOXES: gl.constexpr = TILE_KEYS // BOX
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    item = gl.program_id(0)
    turn = 0
    used = 0
    step = 0
    rows = 1
    while rows > 0:
        announce(schedule, messages, message_full, message_empty, item, turn, HEADS, KV_GROUP * GROUP)
        fields = as_words(messages.index(turn % 2), RECORD)
        rows = read_word(fields.index(2), 1)
        turn += 1
        first = read_word(fields.index(5), 1)
        end = read_word(fields.index(6), 1)
        if rows > 0:
            item = gl.atomic_add(schedule + 1, 1, sem="relaxed") + gl.num_programs(0)
            if first < end:
                first_row = read_word(fields.index(1), 1)
                seq_len = read_word(fields.index(4), 1)
                head = read_word(fields.index(7), 1)
                for group in gl.static_range(2):
                    mbarrier.wait(query_empty.index(group), (used & 1) ^ 1)
                    mbarrier.expect(query_full.index(group), GROUP_ROWS * D * 2)
                    load_box(
                        query_boxes, [first_row + group * GROUP_ROWS, head * query_head_stride],
                        query_full.index(group), queries.index(group),
                    )  # fmt: skip
                used += 1
                table = block_table + read_word(fields.index(0), 1).to(gl.int64) * table_stride
                kv_head = head // GROUP
                left = 0
                if WINDOW:
                    left = read_word(fields.index(3), 1) - WINDOW + 1
                for back in range(end - first):
                    key_tile = end - 1 - back
                    stage = step % STAGES
                    phase = (step // STAGES) & 1
                    missing = find_blocks(
                        table, blocks, key_tile, seq_len, left, table_width, num_blocks, BOX, BOXES, BLOCK_SIZE
                    )
                    mbarrier.wait(key_empty.index(stage), phase ^ 1)
                    words.index(stage).store(gl.zeros([1], gl.int32, lanes) + missing)
                    mbarrier.expect(key_full.index(stage), TILE_KEYS * D * 2)
                    load_tile(
                        key_boxes, keys.index(stage), key_full.index(stage), blocks, key_tile, kv_head, seq_len, BOX,
                        BOXES, KV_HEADS, D, BLOCK_SIZE, HND,
                    )  # fmt: skip
                    mbarrier.wait(value_empty.index(stage), phase ^ 1)
                    mbarrier.expect(value_full.index(stage), TILE_KEYS * D * 2)
                    load_tile(
                        value_boxes, values.index(stage), value_full.index(stage), blocks, key_tile, kv_head, seq_len,
                        BOX, BOXES, KV_HEADS, D, BLOCK_SIZE, HND,
                    )  # fmt: skip
                    step += 1


@gluon.jit
def hide(
    scores, position, key_tile, seq_len, missing, WINDOW: gl.constexpr, BLOCK_SIZE: gl.constexpr, LAYOUT: gl.constexpr
):
    """Return scores with everything invisible at -inf: the future, the window, missing blocks, the last box's shift."""
    BOX: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < TILE_KEYS else TILE_KEYS
    row = position + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, TILE_KEYS, layout=gl.SliceLayout(0, LAYOUT))
    token = key_tile * TILE_KEYS + column
    partial = seq_len % BOX
    shift = gl.where(partial == 0, 0, BOX - partial)
    tail = seq_len - partial
    shifted = gl.where(token < tail + shift, HIDDEN, token - shift)
    token = gl.where(token < tail, token, shifted)
    token = gl.where(((missing >> (column // BOX)) & 1) == 0, token, HIDDEN)
    visible = token[None, :] <= row[:, None]
    if WINDOW:
        visible = visible & (token[None, :] > row[:, None] - WINDOW)
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def cap_scores(scores, scale, soft_cap, SOFT_CAP: gl.constexpr):
    """Return capped scores in base-2 units; scores as they are without a cap."""
    if SOFT_CAP:
        return soft_cap * (1.0 - 2.0 / (gl.exp2(scores * scale) + 1.0))
    else:
        return scores


@gluon.jit
def weights_of(scores, maximum, scale, SOFT_CAP: gl.constexpr):
    """Return the unnormalised weights of scores."""
    if SOFT_CAP:
        return gl.exp2(scores - maximum[:, None])
    else:
        return gl.exp2(scores * scale - (maximum * scale)[:, None])


@gluon.jit
def decay_of(old, new, scale, SOFT_CAP: gl.constexpr):
    """Return what earlier weights shrink by. The difference comes first: its rounding must not be scaled."""
    if SOFT_CAP:
        return gl.exp2(old - new)
    else:
        return gl.exp2((old - new) * scale)


@gluon.jit
def store_rows(
    output, lse, output_scale, result, log_sum, first_row, rows, head, GROUP_INDEX: gl.constexpr, HEADS: gl.constexpr,
    D: gl.constexpr, MODEL: gl.constexpr, OUTPUT: gl.constexpr,
):  # fmt: skip
    """Store this warpgroup's rows of a tile, and their logs if asked for."""
    THREADS: gl.constexpr = D // 8
    coalesced: gl.constexpr = gl.BlockedLayout([1, 8], [32 // THREADS, THREADS], [4, 1], [1, 0])
    rounded = gl.convert_layout(result.to(MODEL), coalesced)
    row = GROUP_INDEX * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, coalesced))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, coalesced))
    offsets = (first_row + row)[:, None].to(gl.int64) * (HEADS * D) + head * D + column[None, :]
    mask = (row[:, None] < rows) & (column[None, :] >= 0)
    if OUTPUT == "none":
        gl.store(output + offsets, rounded, mask=mask)
    else:
        store_result(output + offsets, rounded.to(gl.float32), mask, output_scale, MODEL, OUTPUT)
    if lse is not None:
        log_row = GROUP_INDEX * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=log_sum.type.layout)
        gl.store(lse + (first_row + log_row).to(gl.int64) * HEADS + head, log_sum, mask=log_row < rows)


@gluon.jit
def receive(messages, message_full, message_empty, turn):
    """Return the next row tile: rows (0: no more), first row, position, seq_len, first and end key tile, head."""
    slot = turn % 2
    fields = as_words(messages.index(slot), RECORD)
    mbarrier.wait(message_full.index(slot), (turn // 2) & 1)
    first_row = read_word(fields.index(1), 4)
    rows = read_word(fields.index(2), 4)
    position = read_word(fields.index(3), 4)
    seq_len = read_word(fields.index(4), 4)
    first = read_word(fields.index(5), 4)
    end = read_word(fields.index(6), 4)
    head = read_word(fields.index(7), 4)
    mbarrier.arrive(message_empty.index(slot), count=1)
    return rows, first_row, position, seq_len, first, end, head


@gluon.jit
def start_rows(
    query, keys, values, key_empty, value_full, phase, position, key_tile, seq_len, missing, special, scale, soft_cap,
    MINE: gl.constexpr, OTHER: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, SOFT_CAP: gl.constexpr, MODEL: gl.constexpr,
):  # fmt: skip
    """Attend the first key tile of a row tile, or the lower half of its keys where the upper one is all future.

    Returns:
        Maxima, sums of each thread's own columns (they meet at the end of the row tile), and the result in flight.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    WHOLE: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_KEYS, 16]
    )
    RESULT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=RESULT, k_width=2)
    no_scores = gl.zeros([GROUP_ROWS, KEYS], gl.float32, SCORES)
    take_turn(MINE)
    raw = warpgroup_mma(query, keys.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    give_turn(OTHER)
    raw = warpgroup_mma_wait(num_outstanding=0, deps=(raw,))
    mbarrier.arrive(key_empty, count=1)
    scores = cap_scores(raw, scale, soft_cap, SOFT_CAP)
    row = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, SCORES)) + (position - key_tile * TILE_KEYS)
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
    if KEYS == TILE_KEYS:
        if special:
            scores = hide(scores, position, key_tile, seq_len, missing, WINDOW, BLOCK_SIZE, SCORES)
        else:
            scores = gl.where(row[:, None] >= column[None, :], scores, float("-inf"))
    else:
        scores = gl.where(row[:, None] >= column[None, :], scores, float("-inf"))
    maximum = gl.maximum(gl.max(scores, 1), LOWEST)
    weights = weights_of(scores, maximum, scale, SOFT_CAP)
    whole = gl.sum(gl.zeros([GROUP_ROWS, TILE_KEYS], gl.float32, WHOLE).reshape(GROUP_ROWS, TILE_KEYS // 8, 8), 1)
    sums = gl.convert_layout(gl.sum(weights.reshape(GROUP_ROWS, KEYS // 8, 8), 1), whole.type.layout)
    left = gl.convert_layout(weights.to(MODEL), LEFT)
    mbarrier.wait(value_full, phase)
    no_result = gl.zeros([GROUP_ROWS, D], gl.float32, RESULT)
    acc = warpgroup_mma(left, values, no_result, use_acc=False, is_async=True)
    return gl.convert_layout(maximum, gl.SliceLayout(1, WHOLE)), sums, acc


@gluon.jit
def consume(
    output, lse, sinks, output_scale, scale, soft_cap, queries, keys, values, words, messages, query_full, query_empty,
    key_full, key_empty, value_full, value_empty, message_full, message_empty, GROUP_INDEX: gl.constexpr,
    HEADS: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr, WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr,
    STAGES: gl.constexpr, MODEL: gl.constexpr, OUTPUT: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Attend this warpgroup's rows of every row tile that the producer announces."""
    N: gl.constexpr = TILE_KEYS
    BOX: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < N else N
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=RESULT, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    RESULT_ROW: gl.constexpr = gl.SliceLayout(1, RESULT)
    MINE: gl.constexpr = "8" if GROUP_INDEX == 0 else "9"
    OTHER: gl.constexpr = "9" if GROUP_INDEX == 0 else "8"
    query = queries.index(GROUP_INDEX)
    step = 0
    used = 0
    turn = 0
    if GROUP_INDEX == 1:
        give_turn("8")
    rows, first_row, tile_position, seq_len, first, end, head = receive(messages, message_full, message_empty, turn)
    while rows > 0:
        if first < end:
            position = tile_position + GROUP_INDEX * GROUP_ROWS
            own_end = gl.minimum(end, (gl.maximum(position + GROUP_ROWS, 0) + N - 1) // N)
            own_end = gl.where(rows > GROUP_INDEX * GROUP_ROWS, own_end, 0)
            # One tile at least, even if every row is hidden in it.
            own_end = gl.maximum(own_end, first + 1)
            for _ in range(end - own_end):
                mbarrier.wait(key_full.index(step % STAGES), (step // STAGES) & 1)
                take_turn(MINE)
                give_turn(OTHER)
                mbarrier.arrive(key_empty.index(step % STAGES), count=1)
                mbarrier.wait(value_full.index(step % STAGES), (step // STAGES) & 1)
                mbarrier.arrive(value_empty.index(step % STAGES), count=1)
                step += 1
            # Key tiles from `whole_from` on reach past the first row; those before `window_to` reach out of a window.
            whole_from = gl.maximum(position + 1, 0) // N
            window_to = 0
            if WINDOW:
                window_to = gl.maximum(position + (GROUP_ROWS - 1) - WINDOW + N, 0) // N

            mbarrier.wait(query_full.index(GROUP_INDEX), used & 1)
            stage = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(key_full.index(stage), phase)
            missing = read_word(words.index(stage), 4)
            no_scores = gl.zeros([GROUP_ROWS, N], gl.float32, SCORES)
            key_tile0 = own_end - 1
            reaches_tail = (seq_len % BOX != 0) & (own_end * N > seq_len)
            special = reaches_tail | (missing != 0) | (key_tile0 < window_to)
            key0 = keys.index(stage)
            value0 = values.index(stage)
            if HALVES and GROUP_INDEX == 0:
                if (special == 0) & (position == key_tile0 * N):
                    maximum, sums, acc = start_rows(
                        query, key0.slice(0, N // 2, dim=0), value0.slice(0, N // 2, dim=0), key_empty.index(stage),
                        value_full.index(stage), phase, position, key_tile0, seq_len, missing, special, scale, soft_cap,
                        MINE, OTHER, N // 2, D, WINDOW, BLOCK_SIZE, SOFT_CAP, MODEL,
                    )  # fmt: skip
                else:
                    maximum, sums, acc = start_rows(
                        query, key0, value0, key_empty.index(stage), value_full.index(stage), phase, position,
                        key_tile0, seq_len, missing, special, scale, soft_cap, MINE, OTHER, N, D, WINDOW, BLOCK_SIZE,
                        SOFT_CAP, MODEL,
                    )  # fmt: skip
            else:
                maximum, sums, acc = start_rows(
                    query, key0, value0, key_empty.index(stage), value_full.index(stage), phase, position, key_tile0,
                    seq_len, missing, special, scale, soft_cap, MINE, OTHER, N, D, WINDOW, BLOCK_SIZE, SOFT_CAP, MODEL,
                )  # fmt: skip
            for back in range(1, own_end - first):
                next_step = step + 1
                next_stage = next_step % STAGES
                next_phase = (next_step // STAGES) & 1
                mbarrier.wait(key_full.index(next_stage), next_phase)
                missing = read_word(words.index(next_stage), 4)
                take_turn(MINE)
                raw = warpgroup_mma(
                    query, keys.index(next_stage).permute((1, 0)), no_scores, use_acc=False, is_async=True
                )
                give_turn(OTHER)
                raw, acc = warpgroup_mma_wait(num_outstanding=0, deps=(raw, acc))
                mbarrier.arrive(value_empty.index(step % STAGES), count=1)
                mbarrier.arrive(key_empty.index(next_stage), count=1)
                scores = cap_scores(raw, scale, soft_cap, SOFT_CAP)
                key_tile = own_end - 1 - back
                if (key_tile >= whole_from) | (key_tile < window_to) | (missing != 0):
                    scores = hide(scores, position, key_tile, seq_len, missing, WINDOW, BLOCK_SIZE, SCORES)
                new_maximum = gl.maximum(maximum, gl.max(scores, 1))
                decay = decay_of(maximum, new_maximum, scale, SOFT_CAP)
                weights = weights_of(scores, new_maximum, scale, SOFT_CAP)
                maximum = new_maximum
                acc = acc * gl.convert_layout(decay, RESULT_ROW)[:, None]
                left = gl.convert_layout(weights.to(MODEL), LEFT)
                mbarrier.wait(value_full.index(next_stage), next_phase)
                acc = warpgroup_mma(left, values.index(next_stage), acc, is_async=True)
                new_sums = gl.sum(weights.reshape(GROUP_ROWS, N // 8, 8), 1)
                sums = sums * gl.convert_layout(decay, gl.SliceLayout(1, sums.type.layout))[:, None] + new_sums
                step += 1
            mbarrier.arrive(query_empty.index(GROUP_INDEX), count=1)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(value_empty.index(step % STAGES), count=1)
            step += 1
            used += 1

            total = gl.convert_layout(gl.sum(sums, 1), ROW)
            if SOFT_CAP:
                log_maximum = maximum
            else:
                log_maximum = maximum * scale
            norm = gl.where(total > 0.0, 1.0 / total, 0.0)
            if sinks is not None:
                sink = gl.load(sinks + head).to(gl.float32) * LOG2E
                with_sink = gl.maximum(log_maximum, sink)
                shrink = gl.exp2(log_maximum - with_sink)
                total = total * shrink + gl.exp2(sink - with_sink)
                norm = shrink / total
                log_maximum = with_sink
            log_sum = LN2 * (log_maximum + gl.log2(total))
            result = acc * gl.convert_layout(norm, RESULT_ROW)[:, None]
            store_rows(
                output, lse, output_scale, result, log_sum, first_row, rows, head, GROUP_INDEX, HEADS, D, MODEL, OUTPUT
            )
        else:
            empty = gl.full([GROUP_ROWS], float("-inf"), gl.float32, ROW)
            if sinks is not None:
                if seq_len >= 0:
                    empty = gl.zeros([GROUP_ROWS], gl.float32, ROW) + gl.load(sinks + head).to(gl.float32)
            nothing = gl.zeros([GROUP_ROWS, D], gl.float32, RESULT)
            store_rows(
                output, lse, output_scale, nothing, empty, first_row, rows, head, GROUP_INDEX, HEADS, D, MODEL, OUTPUT
            )
        turn += 1
        rows, first_row, tile_position, seq_len, first, end, head = receive(messages, message_full, message_empty, turn)
    if GROUP_INDEX == 0:
        take_turn("8")


@gluon.jit
def new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return COUNT barriers, each complete after ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def prefill_kernel(
    query_boxes, key_boxes, value_boxes, output, lse, sinks, output_scale, schedule, block_table, table_stride,
    table_width, num_blocks, query_head_stride, scale, soft_cap, HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
    KV_GROUP: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr, HND: gl.constexpr, WINDOW: gl.constexpr,
    SOFT_CAP: gl.constexpr, STAGES: gl.constexpr, MODEL: gl.constexpr, OUTPUT: gl.constexpr, HALVES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Attend every row of the schedule; see the module's description."""
    panels: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(MODEL, [2, GROUP_ROWS, D], panels)
    keys = gl.allocate_shared_memory(MODEL, [STAGES, TILE_KEYS, D], panels)
    values = gl.allocate_shared_memory(MODEL, [STAGES, TILE_KEYS, D], panels)
    words = gl.allocate_shared_memory(gl.int32, [STAGES, 1], plain)
    messages = gl.allocate_shared_memory(gl.int32, [2, RECORD], plain)
    boxes_of_tile: gl.constexpr = TILE_KEYS // BLOCK_SIZE if BLOCK_SIZE < TILE_KEYS else 1
    blocks = gl.allocate_shared_memory(gl.int32, [boxes_of_tile], plain)
    query_full = new_barriers(2, 1)
    query_empty = new_barriers(2, 1)
    key_full = new_barriers(STAGES, 1)
    key_empty = new_barriers(STAGES, 2)
    value_full = new_barriers(STAGES, 1)
    value_empty = new_barriers(STAGES, 2)
    message_full = new_barriers(2, 1)
    message_empty = new_barriers(2, 2)
    fence_async_shared()
    block_barrier()
    gl.warp_specialize(
        [
            (consume, (
                output, lse, sinks, output_scale, scale, soft_cap, queries, keys, values, words, messages, query_full,
                query_empty, key_full, key_empty, value_full, value_empty, message_full, message_empty, 0, HEADS, D,
                BLOCK_SIZE, WINDOW, SOFT_CAP, STAGES, MODEL, OUTPUT, HALVES,
            )),
            (consume, (
                output, lse, sinks, output_scale, scale, soft_cap, queries, keys, values, words, messages, query_full,
                query_empty, key_full, key_empty, value_full, value_empty, message_full, message_empty, 1, HEADS, D,
                BLOCK_SIZE, WINDOW, SOFT_CAP, STAGES, MODEL, OUTPUT, HALVES,
            )),
            (produce, (
                query_boxes, key_boxes, value_boxes, schedule, block_table, table_stride, table_width, num_blocks,
                query_head_stride, queries, keys, values, words, messages, blocks, query_full, query_empty, key_full,
                key_empty, value_full, value_empty, message_full, message_empty, HEADS, KV_HEADS, KV_GROUP, D,
                BLOCK_SIZE, HND, WINDOW, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
