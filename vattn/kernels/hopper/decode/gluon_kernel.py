"""The fast decode path's main kernel in Gluon: a producer warp, and consumer warps of their own tile and KV head.

It shares the schedule, partial results and numbers of `vattn.kernels.hopper.decode.triton_kernel.decode_kernel`. The
differences: one warp loads and runs ahead over the ends of rows and items; a stage holds SLOTS tiles, and consumer warp
(slot, head) works on one tile of one head; the slots are merged through shared memory at the end of a row. So one CTA
streams as fast as several, and a batch needs fewer splits or none.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from vattn.kernels.hopper.columns import padded_columns
from vattn.kernels.hopper.compat import let_next_kernel_start, load_box, wait_for_previous_kernel
from vattn.kernels.hopper.decode.products import (
    keep_rows,
    keep_visible,
    load_query,
    multiply_values,
    take_scores,
    tile_scores,
)
from vattn.kernels.hopper.decode.triton_kernel import KEEP, LOWEST_MAXIMUM, TILE_TOKENS
from vattn.kernels.hopper.epilogue import load_scale, store_groups, store_result
from vattn.kernels.hopper.schedule import FIELDS
from vattn.kernels.triton.common.mask import LN2, LOG2E, MAX_SEQ_LEN, clamp


@gluon.jit
def load_item(schedule, cta, item, ctas):
    """Return request, first row, rows, seq_len, first tile, end tile and slot of an item; next CTA and item (-1: none).

    A grid smaller than the schedule was made for takes on the items of the CTAs that it lacks.
    """
    record = schedule + (item + 1) * FIELDS
    active = gl.load(schedule, eviction_policy=KEEP)
    rows = gl.where(cta < active, gl.load(record + 2, eviction_policy=KEEP), 0)
    next_item = gl.where(cta < active, gl.load(record + 7, eviction_policy=KEEP), -1)
    next_cta = gl.where(next_item < 0, cta + ctas, cta)
    next_item = gl.where((next_item < 0) & (next_cta < active), next_cta, next_item)
    request = gl.load(record, eviction_policy=KEEP)
    first_row = gl.load(record + 1, eviction_policy=KEEP)
    seq_len = gl.load(record + 3, eviction_policy=KEEP)
    first_tile = gl.load(record + 4, eviction_policy=KEEP)
    end_tile = gl.load(record + 5, eviction_policy=KEEP)
    slot = gl.load(record + 6, eviction_policy=KEEP)
    return request, first_row, rows, seq_len, first_tile, end_tile, slot, next_cta, next_item


@gluon.jit
def load_request(query_start_loc, seq_lens, cta, ctas, end_tile):
    """Return what `load_item` does where CTA c has the whole of request c, and row c of the padding if there is one.

    Offsets and lengths may hold any value.
    """
    is_padding = cta >= ctas
    request = gl.where(is_padding, cta - ctas, cta)
    # There are as many rows as requests.
    first_row = clamp(gl.load(query_start_loc + request, eviction_policy=KEEP), ctas)
    num_rows = clamp(gl.load(query_start_loc + request + 1, eviction_policy=KEEP), ctas) - first_row
    seq_len = clamp(gl.load(seq_lens + request, eviction_policy=KEEP), MAX_SEQ_LEN)
    padding_row = clamp(gl.load(query_start_loc + ctas, eviction_policy=KEEP), ctas) + request
    leading = clamp(gl.load(query_start_loc, eviction_policy=KEEP), ctas)
    next_item = gl.where((cta < ctas) & (padding_row < ctas + leading), cta + ctas, -1)
    # Rows before the first request follow the last row.
    padding_row = gl.where(padding_row < ctas, padding_row, padding_row - ctas)
    none = request * 0
    return (
        gl.where(is_padding, -1, request), gl.where(is_padding, padding_row, first_row),
        gl.where(is_padding, 1, num_rows), gl.where(is_padding, 0, seq_len), none, none + end_tile, none - 1,
        next_item, next_item,
    )  # fmt: skip


@gluon.jit
def row_tiles(
    row_of_request, num_rows, seq_len, item_begin, item_end, table_tiles, TOKENS: gl.constexpr, WINDOW: gl.constexpr
):
    """Return visible keys [begin, end) and tiles [first, last) of up to TOKENS rows."""
    end = seq_len - num_rows + gl.minimum(row_of_request + TOKENS, num_rows)
    begin = gl.maximum(seq_len - num_rows + 1 + row_of_request - WINDOW, 0) if WINDOW else 0
    first = gl.maximum(item_begin, begin // TILE_TOKENS)
    last = gl.minimum(gl.minimum(item_end, (end + TILE_TOKENS - 1) // TILE_TOKENS), table_tiles)
    return begin, end, first, last


@gluon.jit
def prefetch_row(row, width):
    """Ask for the first 256 block ids of a request, 32 bytes a thread."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l", [row + gl.minimum(8 * lane, gl.maximum(width - 1, 0))],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_tile(key_boxes, value_boxes, page, head0, inside, key_ready, value_ready, keys, values, SLOT: gl.constexpr):
    load_box(key_boxes, [page, head0, inside, 0], key_ready, keys.slice(SLOT, 1, dim=0))
    load_box(value_boxes, [page, head0, inside, 0], value_ready, values.slice(SLOT, 1, dim=0))


@gluon.jit
def produce(
    key_boxes, value_boxes, block_table, schedule, query_start_loc, seq_lens, table_stride, table_width, keys, values,
    key_ready, value_ready, released, HEAD_GROUPS: gl.constexpr, HEADS: gl.constexpr, WIDTH: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, TOKENS: gl.constexpr, WINDOW: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """Fill the ring of stages with the tiles of this CTA's items, SLOTS tiles a stage."""
    PER_BLOCK: gl.constexpr = BLOCK_SIZE // TILE_TOKENS
    STAGE_BYTES: gl.constexpr = SLOTS * HEADS * TILE_TOKENS * WIDTH * 2
    if OVERLAP and OVERLAP != "end":
        wait_for_previous_kernel()
    head0 = (gl.program_id(0) % HEAD_GROUPS) * HEADS
    stage = 0
    phase = 1
    cta = gl.program_id(0) // HEAD_GROUPS
    ctas = gl.num_programs(0) // HEAD_GROUPS
    item = cta
    while item >= 0:
        if schedule is not None:
            request, _, num_rows, seq_len, item_begin, item_end, _, cta, item = load_item(schedule, cta, item, ctas)
        else:
            if item < ctas:
                # Its length and its block ids come to the multiprocessor side by side.
                prefetch_row(block_table + item.to(gl.int64) * table_stride, table_width)
            request, _, num_rows, seq_len, item_begin, item_end, _, cta, item = load_request(
                query_start_loc, seq_lens, cta, ctas, table_width * PER_BLOCK
            )
        table = block_table + request.to(gl.int64) * table_stride
        for row_of_request in range(0, num_rows, TOKENS):
            _, _, first, last = row_tiles(
                row_of_request, num_rows, seq_len, item_begin, item_end, table_width * PER_BLOCK, TOKENS, WINDOW
            )
            has_keys = first < last
            p0 = gl.load(table + first // PER_BLOCK, mask=has_keys, other=0, eviction_policy=KEEP)
            p1 = p0
            p2 = p0
            p3 = p0
            if SLOTS >= 2:
                p1 = gl.load(
                    table + gl.minimum(first + 1, last - 1) // PER_BLOCK, mask=has_keys, other=0, eviction_policy=KEEP
                )
            if SLOTS >= 4:
                p2 = gl.load(
                    table + gl.minimum(first + 2, last - 1) // PER_BLOCK, mask=has_keys, other=0, eviction_policy=KEEP
                )
                p3 = gl.load(
                    table + gl.minimum(first + 3, last - 1) // PER_BLOCK, mask=has_keys, other=0, eviction_policy=KEEP
                )
            for tile in range(first, last, SLOTS):
                # The next stage's block ids, read before the loads of this one, which the compiler does not reorder.
                next_tile = tile + SLOTS
                n0 = gl.load(table + gl.minimum(next_tile, last - 1) // PER_BLOCK, eviction_policy=KEEP)
                n1 = n0
                n2 = n0
                n3 = n0
                if SLOTS >= 2:
                    n1 = gl.load(table + gl.minimum(next_tile + 1, last - 1) // PER_BLOCK, eviction_policy=KEEP)
                if SLOTS >= 4:
                    n2 = gl.load(table + gl.minimum(next_tile + 2, last - 1) // PER_BLOCK, eviction_policy=KEEP)
                    n3 = gl.load(table + gl.minimum(next_tile + 3, last - 1) // PER_BLOCK, eviction_policy=KEEP)
                mbarrier.wait(released.index(stage), phase)
                mbarrier.expect(key_ready.index(stage), STAGE_BYTES)
                mbarrier.expect(value_ready.index(stage), STAGE_BYTES)
                kr = key_ready.index(stage)
                vr = value_ready.index(stage)
                ks = keys.index(stage)
                vs = values.index(stage)
                load_tile(key_boxes, value_boxes, p0, head0, tile % PER_BLOCK * TILE_TOKENS, kr, vr, ks, vs, 0)
                if SLOTS >= 2:
                    inside = (tile + 1) % PER_BLOCK * TILE_TOKENS
                    load_tile(key_boxes, value_boxes, p1, head0, inside, kr, vr, ks, vs, 1)
                if SLOTS >= 4:
                    inside = (tile + 2) % PER_BLOCK * TILE_TOKENS
                    load_tile(key_boxes, value_boxes, p2, head0, inside, kr, vr, ks, vs, 2)
                    inside = (tile + 3) % PER_BLOCK * TILE_TOKENS
                    load_tile(key_boxes, value_boxes, p3, head0, inside, kr, vr, ks, vs, 3)
                p0 = n0
                p1 = n1
                p2 = n2
                p3 = n3
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1


@gluon.jit
def consume(
    query, block_table, schedule, query_start_loc, seq_lens, output, block_scale, lse, partial_output, partial_stats,
    q_scale, k_scale, v_scale, sinks, output_scale, query_stride, query_head_stride, output_stride, scale_stride,
    group_stride, table_stride, table_width, num_blocks, score_scale, soft_cap, keys, values, key_ready, value_ready,
    released, maxima, sums, accs,
    NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, HEADS: gl.constexpr, HEAD_SIZE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr, WINDOW: gl.constexpr,
    FP8: gl.constexpr, QUERY_SCALE: gl.constexpr, QUERY_LOAD: gl.constexpr,
    KV_SCALE: gl.constexpr, SOFT_CAP: gl.constexpr, MODEL: gl.constexpr, DTYPE: gl.constexpr,
    OUTPUT: gl.constexpr, GROUPS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Attend the rows of this CTA's items."""
    HEAD_GROUPS: gl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    GROUP: gl.constexpr = NUM_HEADS // NUM_KV_HEADS
    COLUMNS: gl.constexpr = padded_columns(HEAD_SIZE)
    WIDTH: gl.constexpr = COLUMNS // 2 if FP8 else COLUMNS
    PER_BLOCK: gl.constexpr = BLOCK_SIZE // TILE_TOKENS
    BATCH: gl.constexpr = SLOTS * HEADS
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[NUM_WARPS, 1, 1], instr_shape=[1, 16, 8]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=2)
    # A thread holds every slot of its elements, so that merging the slots stays inside it.
    MERGE: gl.constexpr = gl.BlockedLayout(
        [SLOTS, 1, 1, 4], [1, 1, 128 // ROWS, ROWS // 4], [1, HEADS, SLOTS, 1], [3, 2, 1, 0]
    )
    MERGED: gl.constexpr = gl.SliceLayout(0, MERGE)
    MERGED_ROWS: gl.constexpr = gl.SliceLayout(1, MERGED)
    if OVERLAP and OVERLAP != "end":
        wait_for_previous_kernel()
    head0 = (gl.program_id(0) % HEAD_GROUPS) * HEADS

    batch_q = gl.arange(0, BATCH, layout=gl.SliceLayout(1, gl.SliceLayout(2, LEFT)))[:, None, None]
    row_q = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, LEFT)))[None, :, None]
    pair_q = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, LEFT)))[None, None, :]
    head_q = head0 + batch_q % HEADS
    # Rows are (token, head of the group).
    token_q = row_q // GROUP
    mask_q = (row_q < TOKENS * GROUP) & (head_q < NUM_KV_HEADS) & (pair_q < WIDTH)
    batch_s = gl.arange(0, BATCH, layout=gl.SliceLayout(1, gl.SliceLayout(2, MMA)))[:, None, None]
    slot_s = batch_s // HEADS
    full = gl.zeros([BATCH, 16, TILE_TOKENS], gl.int32, MMA)
    token_s = gl.arange(0, TILE_TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(1, MMA)))[None, None, :]
    low_token = keep_rows(full + slot_s * TILE_TOKENS + token_s, BATCH, ROWS)
    row_s = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA)))[None, :, None]
    later = keep_rows(full + gl.minimum(row_s // GROUP, TOKENS - 1), BATCH, ROWS)
    if ROWS == 8:
        batch_v = gl.arange(0, BATCH, layout=gl.SliceLayout(1, gl.SliceLayout(2, LEFT)))[:, None, None]
        token_v = gl.arange(0, TILE_TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(1, LEFT)))[None, None, :]
    else:
        batch_v = gl.arange(0, BATCH, layout=gl.SliceLayout(1, gl.SliceLayout(2, RIGHT)))[:, None, None]
        token_v = gl.arange(0, TILE_TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(2, RIGHT)))[None, :, None]
    slot_v = batch_v // HEADS
    head_m = head0 + gl.arange(0, HEADS, layout=gl.SliceLayout(1, MERGED_ROWS))[:, None]
    row_m = gl.arange(0, ROWS, layout=gl.SliceLayout(0, MERGED_ROWS))[None, :]
    token_m = row_m // GROUP
    pair_m = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(2, MERGED)))[None, :, None]
    STEP: gl.constexpr = 2 if FP8 else 1
    column_m = STEP * pair_m
    head_of_row = head_m * GROUP + row_m % GROUP

    query_step = gl.zeros([BATCH, 1, 1], gl.float32, LEFT) + 1.0
    if QUERY_LOAD != "plain" and QUERY_SCALE == 1:
        query_step = query_step * gl.load(q_scale, eviction_policy=KEEP)
    if QUERY_LOAD != "plain" and QUERY_SCALE == 2:
        query_step = query_step * gl.load(q_scale + head_q, mask=head_q < NUM_KV_HEADS, other=1.0, eviction_policy=KEEP)
    factor = gl.zeros([BATCH, 1, 1], gl.float32, MMA) + score_scale
    value_factor = gl.zeros([HEADS, ROWS], gl.float32, MERGED_ROWS) + 1.0
    head_f = head0 + batch_s % HEADS
    if QUERY_SCALE == 1:
        factor = factor * gl.load(q_scale, eviction_policy=KEEP)
    if QUERY_SCALE == 2:
        factor = factor * gl.load(q_scale + head_f, mask=head_f < NUM_KV_HEADS, other=1.0, eviction_policy=KEEP)
    if KV_SCALE == 1:
        factor = factor * gl.load(k_scale, eviction_policy=KEEP)
        value_factor = value_factor * gl.load(v_scale, eviction_policy=KEEP)
    if KV_SCALE == 2:
        factor = factor * gl.load(k_scale + head_f, mask=head_f < NUM_KV_HEADS, other=1.0, eviction_policy=KEEP)
        is_head = (head_m < NUM_KV_HEADS) & (row_m < ROWS)
        value_factor = value_factor * gl.load(
            v_scale + head_m + 0 * row_m, mask=is_head, other=1.0, eviction_policy=KEEP
        )

    factor = keep_rows(full.to(gl.float32) + factor, BATCH, ROWS)
    given_scale = load_scale(output_scale)

    stage = 0
    phase = 0
    cta = gl.program_id(0) // HEAD_GROUPS
    ctas = gl.num_programs(0) // HEAD_GROUPS
    item = cta
    while item >= 0:
        if schedule is not None:
            request, first_row, num_rows, seq_len, item_begin, item_end, slot, cta, item = load_item(
                schedule, cta, item, ctas
            )
        else:
            request, first_row, num_rows, seq_len, item_begin, item_end, slot, cta, item = load_request(
                query_start_loc, seq_lens, cta, ctas, table_width * PER_BLOCK
            )
        table = block_table + request.to(gl.int64) * table_stride
        for row_of_request in range(0, num_rows, TOKENS):
            row = first_row + row_of_request
            rows_left = num_rows - row_of_request
            begin, end, first, last = row_tiles(
                row_of_request, num_rows, seq_len, item_begin, item_end, table_width * PER_BLOCK, TOKENS, WINDOW
            )
            end = gl.minimum(end, last * TILE_TOKENS)
            # Where the keys of every row end; the window counts from there.
            row_end = later + (seq_len - rows_left + 1)
            query_rows = (row + token_q).to(gl.int64) * query_stride
            query_rows = query_rows + (head_q * GROUP + row_q % GROUP) * query_head_stride
            present = mask_q & (token_q < rows_left)
            if FP8:
                column = pair_q // 2 * 4 + pair_q % 2
                # Heads of FP8 are multiples of 16 columns.
                if HEAD_SIZE < COLUMNS:
                    present = present & (column < HEAD_SIZE)
                query_a = load_query(query, query_rows, column, present, query_step, QUERY_LOAD, FP8, DTYPE)
                query_b = load_query(query, query_rows, column + 2, present, query_step, QUERY_LOAD, FP8, DTYPE)
            else:
                if HEAD_SIZE < COLUMNS:
                    present = present & (pair_q < HEAD_SIZE)
                query_a = load_query(query, query_rows, pair_q, present, query_step, QUERY_LOAD, FP8, DTYPE)
                query_b = query_a
            if ROWS == 8:
                acc_a = gl.zeros([BATCH, WIDTH, ROWS], gl.float32, MMA)
            else:
                acc_a = gl.zeros([BATCH, ROWS, WIDTH], gl.float32, MMA)
            acc_b = acc_a
            total = keep_rows(gl.zeros([BATCH, 16, TILE_TOKENS], gl.float32, MMA), BATCH, ROWS)
            maximum = gl.max(total, 2) + LOWEST_MAXIMUM
            last_page = gl.maximum(last - 1, 0) // PER_BLOCK
            has_keys = first < last
            page = gl.load(
                table + gl.minimum((first + slot_s) // PER_BLOCK, last_page),
                mask=(slot_s >= 0) & has_keys,
                other=-1,
                eviction_policy=KEEP,
            )
            for tile in range(first, last, SLOTS):
                next_page = gl.load(
                    table + gl.minimum((tile + SLOTS + slot_s) // PER_BLOCK, last_page), eviction_policy=KEEP
                )
                tile_end = gl.where((page >= 0) & (page < num_blocks), end, 0)
                low_end = keep_rows(full + tile_end, BATCH, ROWS)
                if TOKENS > 1:
                    low_end = gl.minimum(low_end, row_end)
                page = next_page
                mbarrier.wait(key_ready.index(stage), phase)
                key = keys.index(stage).reshape([BATCH, TILE_TOKENS, WIDTH]).permute((0, 2, 1)).load(RIGHT)
                low = tile_scores(query_a, query_b, key, factor, soft_cap, BATCH, ROWS, FP8, SOFT_CAP, MMA)
                token = low_token + tile * TILE_TOKENS
                visible = (token >= begin) & (token < low_end)
                if TOKENS > 1 and WINDOW:
                    visible = visible & (token >= row_end - WINDOW)
                low = gl.where(visible, low, float("-inf"))
                right, maximum, total, acc_a, acc_b = take_scores(
                    low, maximum, total, acc_a, acc_b, ROWS, FP8, DTYPE, MMA, LEFT, RIGHT
                )
                mbarrier.wait(value_ready.index(stage), phase)
                value_tile = values.index(stage).reshape([BATCH, TILE_TOKENS, WIDTH])
                if ROWS == 8:
                    value = value_tile.permute((0, 2, 1)).load(LEFT)
                else:
                    value = value_tile.load(RIGHT)
                mbarrier.arrive(released.index(stage), count=1)
                if (tile * TILE_TOKENS < begin) | ((tile + SLOTS) * TILE_TOKENS > end):
                    # Values of hidden tokens may be NaN.
                    kept = keep_visible(value, (tile + slot_v) * TILE_TOKENS + token_v, begin, end)
                    acc_a, acc_b = multiply_values(kept, right, acc_a, acc_b, FP8, ROWS)
                else:
                    acc_a, acc_b = multiply_values(value, right, acc_a, acc_b, FP8, ROWS)
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1

            if ROWS == 16:
                acc_a = acc_a.permute((0, 2, 1))
                acc_b = acc_b.permute((0, 2, 1))
            maxima.store(maximum.reshape([SLOTS, HEADS, ROWS]))
            sums.store(gl.sum(total, 2).reshape([SLOTS, HEADS, ROWS]))
            accs.store(acc_a.reshape([SLOTS, HEADS, WIDTH, ROWS]))
            slot_maximum = maxima.load(gl.SliceLayout(2, MERGE))
            merged_maximum = gl.max(slot_maximum, 0)
            weight = gl.exp2(slot_maximum - merged_maximum.expand_dims(0))
            row_total = gl.convert_layout(gl.sum(weight * sums.load(gl.SliceLayout(2, MERGE)), 0), MERGED_ROWS)
            row_maximum = gl.convert_layout(merged_maximum, MERGED_ROWS)
            weight = weight.expand_dims(2)
            result_a = gl.sum(accs.load(MERGE) * weight, 0)
            result_b = result_a
            if FP8:
                accs.store(acc_b.reshape([SLOTS, HEADS, WIDTH, ROWS]))
                result_b = gl.sum(accs.load(MERGE) * weight, 0)
            mask_m = (head_m < NUM_KV_HEADS) & (row_m < TOKENS * GROUP) & (token_m < rows_left)
            mask = mask_m.expand_dims(1) & (column_m < HEAD_SIZE)
            if partial_output is not None and slot >= 0:
                place = (slot.to(gl.int64) * TOKENS + token_m) * NUM_HEADS + head_of_row
                stats = partial_stats + place * 2
                gl.store(stats, row_maximum, mask=mask_m)
                gl.store(stats + 1, row_total, mask=mask_m)
                partial = partial_output + place.expand_dims(1) * HEAD_SIZE + column_m
                gl.store(partial, result_a, mask=mask)
                if FP8:
                    gl.store(partial + 1, result_b, mask=mask)
            else:
                norm = value_factor
                if sinks is not None:
                    sink = gl.load(sinks + head_of_row, mask=mask_m, other=0.0).to(gl.float32) * LOG2E
                    sink = gl.where(request < 0, float("-inf"), sink)
                    with_sink = gl.maximum(row_maximum, sink)
                    decay_m = gl.exp2(row_maximum - with_sink)
                    row_total = row_total * decay_m + gl.exp2(sink - with_sink)
                    norm = norm * decay_m
                    row_maximum = with_sink
                norm = (norm / gl.where(row_total == 0.0, 1.0, row_total)).expand_dims(1)
                if GROUPS[0] > 0:
                    start = output + row.to(gl.int64) * output_stride
                    scales = block_scale + row.to(gl.int64) * scale_stride
                    store_groups(
                        start, scales, result_a * norm, result_b * norm, head0, given_scale, group_stride, HEADS,
                        NUM_KV_HEADS, GROUP, HEAD_SIZE, WIDTH, FP8, MODEL, GROUPS,
                    )  # fmt: skip
                else:
                    starts = (row + token_m).to(gl.int64) * output_stride + head_of_row * HEAD_SIZE
                    start = output + starts.expand_dims(1) + column_m
                    store_result(start, result_a * norm, mask, given_scale, MODEL, OUTPUT)
                    if FP8:
                        store_result(start + 1, result_b * norm, mask, given_scale, MODEL, OUTPUT)
                if lse is not None:
                    log = LN2 * (row_maximum + gl.log2(row_total))
                    gl.store(lse + (row + token_m).to(gl.int64) * NUM_HEADS + head_of_row, log, mask=mask_m)


@gluon.jit(do_not_specialize=["scale_stride", "group_stride"])
def decode_kernel(
    query, key_boxes, value_boxes, block_table, schedule, query_start_loc, seq_lens, output, block_scale, lse,
    partial_output, partial_stats, q_scale, k_scale, v_scale, sinks, output_scale, query_stride, query_head_stride,
    output_stride, scale_stride, group_stride, table_stride, table_width, num_blocks, score_scale, soft_cap,
    NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, HEADS: gl.constexpr, HEAD_SIZE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, TOKENS: gl.constexpr, WINDOW: gl.constexpr, FP8: gl.constexpr,
    QUERY_SCALE: gl.constexpr, QUERY_LOAD: gl.constexpr, KV_SCALE: gl.constexpr, SOFT_CAP: gl.constexpr,
    MODEL: gl.constexpr, DTYPE: gl.constexpr, OUTPUT: gl.constexpr, GROUPS: gl.constexpr, SLOTS: gl.constexpr,
    STAGES: gl.constexpr, OVERLAP: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Attend the rows of the schedule's items; grid and arguments as the Triton kernel's.

    Without a schedule and room for partial results it attends as many rows as requests, by their starts and lengths,
    a CTA a request and HEADS heads; grid: requests x groups of heads. Otherwise it is given no starts and no lengths.

    SLOTS tiles of HEADS heads make a stage, `num_warps` is their product. TOKENS rows of a request are attended at a
    time, at most 16 with their group of heads. OVERLAP: launched while the kernel before may still run, so wait for it
    first, or at the end if it is "end".
    """
    ROWS: gl.constexpr = 8 if TOKENS * (NUM_HEADS // NUM_KV_HEADS) <= 8 else 16
    HEAD_GROUPS: gl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    COLUMNS: gl.constexpr = padded_columns(HEAD_SIZE)
    WIDTH: gl.constexpr = COLUMNS // 2 if FP8 else COLUMNS
    let_next_kernel_start()
    keys = gl.allocate_shared_memory(key_boxes.dtype, [STAGES, SLOTS, HEADS, TILE_TOKENS, WIDTH], key_boxes.layout)
    values = gl.allocate_shared_memory(
        value_boxes.dtype, [STAGES, SLOTS, HEADS, TILE_TOKENS, WIDTH], value_boxes.layout
    )
    in_order: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    maxima = gl.allocate_shared_memory(gl.float32, [SLOTS, HEADS, ROWS], in_order)
    sums = gl.allocate_shared_memory(gl.float32, [SLOTS, HEADS, ROWS], in_order)
    accs = gl.allocate_shared_memory(
        gl.float32, [SLOTS, HEADS, WIDTH, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    )
    key_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    released = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(key_ready.index(i), count=1)
        mbarrier.init(value_ready.index(i), count=1)
        mbarrier.init(released.index(i), count=1)
    gl.warp_specialize(
        [
            (consume, (
                query, block_table, schedule, query_start_loc, seq_lens, output, block_scale, lse, partial_output,
                partial_stats, q_scale, k_scale, v_scale, sinks, output_scale, query_stride, query_head_stride,
                output_stride, scale_stride, group_stride, table_stride, table_width, num_blocks, score_scale, soft_cap,
                keys, values, key_ready, value_ready, released, maxima, sums, accs, NUM_HEADS, NUM_KV_HEADS, HEADS,
                HEAD_SIZE, BLOCK_SIZE, TOKENS, ROWS, WINDOW, FP8, QUERY_SCALE, QUERY_LOAD, KV_SCALE, SOFT_CAP, MODEL,
                DTYPE, OUTPUT, GROUPS, SLOTS, STAGES, OVERLAP, num_warps,
            )),
            (produce, (
                key_boxes, value_boxes, block_table, schedule, query_start_loc, seq_lens, table_stride, table_width,
                keys, values, key_ready, value_ready, released, HEAD_GROUPS, HEADS, WIDTH, BLOCK_SIZE, TOKENS, WINDOW,
                SLOTS, STAGES, OVERLAP,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
    if OVERLAP == "end":
        # The next kernel relies on both kernels having ended when this one has.
        wait_for_previous_kernel()
