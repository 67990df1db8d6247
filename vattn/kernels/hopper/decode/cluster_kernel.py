"""Decode of few requests in one kernel: the CTAs of a cluster share a request's KV head and merge among themselves.

CTA r of a cluster attends groups r, r + CLUSTER, ... of SLOTS tiles, one tile per warp. The position of its first keys
follows from its rank, so there is no schedule to read: lengths, block ids and rows are loaded side by side, then keys,
values and the query. Every thread copies its own 16 bytes; hidden tokens are filled with zeros.

A CTA merges its warps, then sends each query head's partial result to the shared memory of the CTA that finishes that
head. Two barriers of the cluster guard this. No CTA sends before the first: the shared memory of a
CTA that has not begun is not its own yet. The second says that all parts have arrived; after it a CTA touches its own
shared memory alone, so any may end. The copies of a thread and all else here go by the same proxy and need no fence.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from vattn.kernels.hopper.compat import (
    as_tiles,
    block_barrier,
    copy_rows,
    let_next_kernel_start,
    wait_for_previous_kernel,
)
from vattn.kernels.hopper.decode.cluster_epilogue import side_by_side, store_columns
from vattn.kernels.hopper.decode.cluster_exchange import (
    arrive_at_cluster_barrier,
    open_inbox,
    receive,
    send,
    wait_at_cluster_barrier,
    wait_for_parts,
)
from vattn.kernels.hopper.decode.products import keep_rows, load_query, multiply_values, take_scores, tile_scores
from vattn.kernels.hopper.decode.triton_kernel import LOWEST_MAXIMUM, TILE_TOKENS
from vattn.kernels.hopper.epilogue import QUERY_ROWS, load_scale, store_result
from vattn.kernels.triton.common.mask import LN2, LOG2E, MAX_SEQ_LEN, clamp


@gluon.jit
def request_of(query_start_loc, row, num_reqs):
    """Return the request that a row belongs to and where that one's rows end; its end is `row` for a row of padding.

    There are at most four requests, and as many rows. The loads do not wait for each other. Offsets may hold any value.
    """
    first_start = gl.load(query_start_loc)
    first_end = gl.load(query_start_loc + 1)
    second_end = gl.load(query_start_loc + gl.minimum(num_reqs, 2))
    third_end = gl.load(query_start_loc + gl.minimum(num_reqs, 3))
    fourth_end = gl.load(query_start_loc + gl.minimum(num_reqs, 4))
    end = gl.where(row < third_end, third_end, gl.where(row < fourth_end, fourth_end, row))
    end = gl.where(row < first_end, first_end, gl.where(row < second_end, second_end, end))
    request = gl.where(row < first_end, 0, gl.where(row < second_end, 1, gl.where(row < third_end, 2, 3)))
    end = gl.where(row < first_start, row, gl.minimum(end, num_reqs))
    return gl.minimum(request, num_reqs - 1), end


@gluon.jit
def page_of(table, tile, table_tiles, PER_BLOCK: gl.constexpr):
    """Return the block ids of tiles, -1 past the table."""
    return gl.load(table + tile // PER_BLOCK, mask=tile < table_tiles, other=-1)


@gluon.jit
def first_pages(
    table, stripe, slot_c, slot_s, table_tiles, STRIPE: gl.constexpr, STAGES: gl.constexpr, PER_BLOCK: gl.constexpr
):
    """Return block ids: of the first STAGES steps, up to four; of the last; and again of the first."""
    p0 = page_of(table, stripe + slot_c, table_tiles, PER_BLOCK)
    p1 = page_of(table, stripe + STRIPE + slot_c, table_tiles, PER_BLOCK)
    p2 = page_of(table, stripe + 2 * STRIPE + slot_c, table_tiles, PER_BLOCK)
    p3 = p2
    last = p2
    if STAGES > 3:
        p3 = page_of(table, stripe + 3 * STRIPE + slot_c, table_tiles, PER_BLOCK)
        last = page_of(table, stripe + (STAGES - 1) * STRIPE + slot_c, table_tiles, PER_BLOCK)
    return p0, p1, p2, p3, last, page_of(table, stripe + slot_s, table_tiles, PER_BLOCK)


@gluon.jit
def copy_step(
    keys, values, key_cache, value_cache, page, tile, begin, end, num_blocks, place, token, column, block_stride,
    token_stride, stage, PER_BLOCK: gl.constexpr,
):  # fmt: skip
    """Start copying the tiles of a step into a stage; hidden tokens, and blocks out of range, come as zeros.

    Args:
        page, tile: of every slot `[SLOTS]`.
        place: of every value inside of a tile; token, column: its own there.
    """
    is_block = (page >= 0) & (page < num_blocks)
    block = gl.where(is_block, page, 0).to(gl.int64) * block_stride
    start = (block + tile % PER_BLOCK * TILE_TOKENS * token_stride)[:, None, None]
    position = (tile * TILE_TOKENS)[:, None, None] + token
    exists = is_block[:, None, None] & (position >= begin) & (position < end) & (column >= 0)
    copy_rows(keys.index(stage), (key_cache + start) + place, mask=exists)
    copy_rows(values.index(stage), (value_cache + start) + place, mask=exists)


@gluon.jit(do_not_specialize=["num_reqs", "scale_stride", "group_stride"])
def decode_cluster_kernel(
    query, key_cache, value_cache, block_table, query_start_loc, seq_lens, output, block_scale, lse, q_scale, k_scale,
    v_scale, sinks, output_scale, query_stride, query_head_stride, output_stride, scale_stride, group_stride,
    block_stride, token_stride, head_stride, table_stride, table_width, num_blocks, num_reqs, score_scale, soft_cap,
    NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, HEAD_SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    WINDOW: gl.constexpr, FP8: gl.constexpr, QUERY_SCALE: gl.constexpr, KV_SCALE: gl.constexpr,
    SOFT_CAP: gl.constexpr, MODEL: gl.constexpr, DTYPE: gl.constexpr, OUTPUT: gl.constexpr, GROUPS: gl.constexpr,
    CLUSTER: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attend as many rows as requests; grid: rows x KV heads x CLUSTER, launched in clusters of CLUSTER.

    SLOTS is the number of warps. Strides of the cache are in its elements, int16 pairs of columns where it is FP8.
    Launched while the kernel before may still run, it waits for that first.
    """
    let_next_kernel_start()
    GROUP: gl.constexpr = NUM_HEADS // NUM_KV_HEADS
    WIDTH: gl.constexpr = HEAD_SIZE // 2 if FP8 else HEAD_SIZE
    PER_BLOCK: gl.constexpr = BLOCK_SIZE // TILE_TOKENS
    STRIPE: gl.constexpr = CLUSTER * SLOTS
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // WIDTH, WIDTH // 8], [SLOTS, 1, 1], [2, 1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[SLOTS, 1, 1], instr_shape=[1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=2)
    # A thread holds every slot of its elements, so that merging the slots stays inside it.
    MERGE: gl.constexpr = gl.BlockedLayout([SLOTS, 1, 4], [1, 16, 2], [1, SLOTS, 1], [2, 1, 0])
    MERGED: gl.constexpr = gl.SliceLayout(0, MERGE)
    MERGED_ROWS: gl.constexpr = gl.SliceLayout(0, MERGED)
    # Columns of a thread at the end: a warp has a whole group, or 64 columns.
    VECTOR: gl.constexpr = 4 if HEAD_SIZE == 128 and (GROUPS[0] == 128 or GROUPS[1]) else 2
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [SLOTS], [0])
    SWIZZLE: gl.constexpr = gl.SwizzledSharedLayout(8, 1 if WIDTH >= 64 else 2, 8 if WIDTH >= 64 else 4, [2, 1, 0])
    IN_ORDER: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PARTS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])

    inbox = open_inbox()
    rank = gl.program_id(0) % CLUSTER
    kv_head = gl.program_id(0) // CLUSTER % NUM_KV_HEADS
    row = gl.program_id(0) // (CLUSTER * NUM_KV_HEADS)
    arrive_at_cluster_barrier()
    wait_for_previous_kernel()
    keys = gl.allocate_shared_memory(key_cache.dtype.element_ty, [STAGES, SLOTS, TILE_TOKENS, WIDTH], SWIZZLE)
    values = gl.allocate_shared_memory(key_cache.dtype.element_ty, [STAGES, SLOTS, TILE_TOKENS, WIDTH], SWIZZLE)
    maxima = gl.allocate_shared_memory(gl.float32, [SLOTS, QUERY_ROWS], IN_ORDER)
    sums = gl.allocate_shared_memory(gl.float32, [SLOTS, QUERY_ROWS], IN_ORDER)

    slot_c = gl.arange(0, SLOTS, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPY)))
    token_c = gl.arange(0, TILE_TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(2, COPY)))[None, :, None]
    column_c = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, None, :]
    place_c = token_c * token_stride + (kv_head * head_stride + column_c)
    batch_q = gl.arange(0, SLOTS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LEFT)))[:, None, None]
    row_q = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, LEFT)))[None, :, None]
    pair_q = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, LEFT)))[None, None, :]
    mask_q = (batch_q >= 0) & (row_q < GROUP) & (pair_q >= 0)
    slot_s = gl.arange(0, SLOTS, layout=gl.SliceLayout(1, gl.SliceLayout(2, MMA)))
    token_s = gl.arange(0, TILE_TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(1, MMA)))[None, None, :]
    full = gl.zeros([SLOTS, 16, TILE_TOKENS], gl.int32, MMA)
    low_token = keep_rows(full + slot_s[:, None, None] * TILE_TOKENS + token_s, SLOTS, QUERY_ROWS)
    row_m = gl.arange(0, QUERY_ROWS, layout=MERGED_ROWS)[None, :]
    pair_m = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, MERGED))[:, None]

    table_tiles = table_width * PER_BLOCK
    # As a rule row r belongs to request r. Its length and blocks are on their way before that is known, and without a
    # window where its first keys lie does not depend on the length.
    table = block_table + row.to(gl.int64) * table_stride
    seq_len = clamp(gl.load(seq_lens + row), MAX_SEQ_LEN)
    stripe = rank * SLOTS
    p0, p1, p2, p3, page_c, page_s = first_pages(table, stripe, slot_c, slot_s, table_tiles, STRIPE, STAGES, PER_BLOCK)
    request, end_row = request_of(query_start_loc, row, num_reqs)
    factor = score_scale
    value_factor = 1.0
    if QUERY_SCALE == 1:
        factor *= gl.load(q_scale)
    if QUERY_SCALE == 2:
        factor *= gl.load(q_scale + kv_head)
    if KV_SCALE == 1:
        factor *= gl.load(k_scale)
        value_factor *= gl.load(v_scale)
    if KV_SCALE == 2:
        factor *= gl.load(k_scale + kv_head)
        value_factor *= gl.load(v_scale + kv_head)
    given_scale = load_scale(output_scale)
    head = kv_head * GROUP + rank
    sink = float("-inf")
    if sinks is not None:
        sink = gl.load(sinks + gl.minimum(head, NUM_HEADS - 1)).to(gl.float32) * LOG2E

    if request != row:
        table = block_table + request.to(gl.int64) * table_stride
        seq_len = clamp(gl.load(seq_lens + request), MAX_SEQ_LEN)
    is_padding = end_row <= row
    end = gl.where(is_padding, 0, seq_len - (end_row - 1 - row))
    if sinks is not None:
        sink = gl.where(is_padding, float("-inf"), sink)
    begin = 0
    if WINDOW:
        begin = gl.maximum(end - WINDOW, 0)
        stripe += begin // TILE_TOKENS
    if WINDOW or request != row:
        p0, p1, p2, p3, page_c, page_s = first_pages(
            table, stripe, slot_c, slot_s, table_tiles, STRIPE, STAGES, PER_BLOCK
        )
    last = gl.minimum((gl.maximum(end, 0) + TILE_TOKENS - 1) // TILE_TOKENS, table_tiles)
    steps = (gl.maximum(last - stripe, 0) + STRIPE - 1) // STRIPE
    for step in gl.static_range(STAGES - 1):
        page = p0
        if step == 1:
            page = p1
        if step == 2:
            page = p2
        if step == 3:
            page = p3
        if step < steps:
            copy_step(
                keys, values, key_cache, value_cache, page, stripe + step * STRIPE + slot_c, begin, end, num_blocks,
                place_c, token_c, column_c, block_stride, token_stride, step, PER_BLOCK,
            )  # fmt: skip
        async_copy.commit_group()
    query_rows = row.to(gl.int64) * query_stride + (kv_head * GROUP + row_q).to(gl.int64) * query_head_stride
    if FP8:
        column_q = pair_q // 2 * 4 + pair_q % 2
        query_a = load_query(query, query_rows, column_q, mask_q, 1.0, "plain", FP8, DTYPE)
        query_b = load_query(query, query_rows, column_q + 2, mask_q, 1.0, "plain", FP8, DTYPE)
    else:
        query_a = load_query(query, query_rows, pair_q, mask_q, 1.0, "plain", FP8, DTYPE)
        query_b = query_a
    acc_a = gl.zeros([SLOTS, WIDTH, QUERY_ROWS], gl.float32, MMA)
    acc_b = acc_a
    total = keep_rows(gl.zeros([SLOTS, 16, TILE_TOKENS], gl.float32, MMA), SLOTS, QUERY_ROWS)
    maximum = gl.max(total, 2) + LOWEST_MAXIMUM
    stage = 0
    free_stage = STAGES - 1
    for step in range(0, steps):
        # This step's copies have come, and every warp is done with the stage that is filled next.
        async_copy.wait_group(STAGES - 2)
        block_barrier()
        if step + STAGES - 1 < steps:
            copy_step(
                keys, values, key_cache, value_cache, page_c, stripe + (step + STAGES - 1) * STRIPE + slot_c,
                begin, end, num_blocks, place_c, token_c, column_c, block_stride, token_stride, free_stage,
                PER_BLOCK,
            )  # fmt: skip
        async_copy.commit_group()
        page_c = page_of(table, stripe + (step + STAGES) * STRIPE + slot_c, table_tiles, PER_BLOCK)
        shown_end = gl.where((page_s >= 0) & (page_s < num_blocks), end, 0)[:, None, None]
        token = low_token + (stripe + step * STRIPE) * TILE_TOKENS
        visible = (token >= begin) & (token < keep_rows(full + shown_end, SLOTS, QUERY_ROWS))
        page_s = page_of(table, stripe + (step + 1) * STRIPE + slot_s, table_tiles, PER_BLOCK)

        key = keys.index(stage).permute((0, 2, 1)).load(RIGHT)
        low = tile_scores(query_a, query_b, key, factor, soft_cap, SLOTS, QUERY_ROWS, FP8, SOFT_CAP, MMA)
        low = gl.where(visible, low, float("-inf"))
        right, maximum, total, acc_a, acc_b = take_scores(
            low, maximum, total, acc_a, acc_b, QUERY_ROWS, FP8, DTYPE, MMA, LEFT, RIGHT
        )
        value = values.index(stage).permute((0, 2, 1)).load(LEFT)
        acc_a, acc_b = multiply_values(value, right, acc_a, acc_b, FP8, QUERY_ROWS)
        free_stage = stage
        stage = stage + 1 if stage + 1 < STAGES else 0

    # The stages are free once no copy is under way and every warp has read its last tile.
    async_copy.wait_group(0)
    block_barrier()
    parts_a = as_tiles(keys, gl.float32, STAGES, [SLOTS, WIDTH, QUERY_ROWS], PARTS).index(0)
    parts_b = as_tiles(values, gl.float32, STAGES, [SLOTS, WIDTH, QUERY_ROWS], PARTS).index(0)
    maxima.store(maximum)
    sums.store(gl.sum(total, 2))
    parts_a.store(acc_a)
    if FP8:
        parts_b.store(acc_b)
    block_barrier()
    slot_maximum = maxima.load(gl.SliceLayout(1, MERGE))
    merged_maximum = gl.max(slot_maximum, 0)
    weight = gl.exp2(slot_maximum - merged_maximum.expand_dims(0))
    merged_total = gl.sum(weight * sums.load(gl.SliceLayout(1, MERGE)), 0)
    weight = weight.expand_dims(1)
    result_a = gl.sum(parts_a.load(MERGE) * weight, 0)
    is_head = (row_m < GROUP) & (pair_m >= 0)
    owner = row_m + 0 * pair_m
    place = inbox + rank * (HEAD_SIZE * 4) + (8 if FP8 else 4) * (pair_m + 0 * row_m)
    stats = inbox + CLUSTER * HEAD_SIZE * 4 + rank * 4 + 0 * owner
    wide_maximum = gl.convert_layout(merged_maximum, MERGED_ROWS).expand_dims(0) + gl.zeros_like(result_a)
    wide_total = gl.convert_layout(merged_total, MERGED_ROWS).expand_dims(0) + gl.zeros_like(result_a)
    wait_at_cluster_barrier()
    send(wide_maximum, stats, owner, is_head & (pair_m == 0))
    send(wide_total, stats + CLUSTER * 4, owner, is_head & (pair_m == 0))
    send(result_a, place, owner, is_head)
    if FP8:
        result_b = gl.sum(parts_b.load(MERGE) * weight, 0)
        send(result_b, place + 4, owner, is_head)
    arrive_at_cluster_barrier()
    inbox = wait_for_parts(inbox)
    if rank < GROUP:
        x0, x1, x2, x3, norm, row_maximum, row_total = receive(
            inbox, sink, value_factor, CLUSTER, HEAD_SIZE, VECTOR, LANES
        )
        if lse is not None:
            lane = gl.arange(0, HEAD_SIZE // VECTOR, layout=LANES)
            log = LN2 * (row_maximum + gl.log2(row_total))
            gl.store(lse + row.to(gl.int64) * NUM_HEADS + head + lane, log, mask=lane == 0)
        start = output + row.to(gl.int64) * output_stride
        if GROUPS[0] > 0:
            scales = block_scale + row.to(gl.int64) * scale_stride
            store_columns(
                start, scales, x0, x1, x2, x3, norm, head, given_scale, group_stride, HEAD_SIZE, VECTOR, LANES, MODEL,
                GROUPS,
            )  # fmt: skip
        else:
            x = side_by_side(x0 * norm, x1 * norm, x2 * norm, x3 * norm, VECTOR)
            column = gl.arange(0, HEAD_SIZE, layout=x.type.layout)
            store_result(start + head * HEAD_SIZE + column, x, column >= 0, given_scale, MODEL, OUTPUT)
