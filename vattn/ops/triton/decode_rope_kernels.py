"""Device code of decode steps that turn queries and keys themselves: the fast decode path's kernel behind its own RoPE.

`rope_decode_kernel` is `decode_kernel` with three differences:

- A query comes as the projection left it, and is normalised, turned, quantised and rounded as it is loaded.
- Keys and values of the step's tokens come likewise. One program writes each into its slot; nothing of this launch
  reads them there. Programs work while others write, so a tile of the cache that a slot of the step lies in is kept out
  of the loop, and attended after it with the rows in question put in their places, made once more from the projection.
  Which tiles these are is told by comparing slots and not by positions: whoever's the token is, and wherever its slot
  lies, every program sees it as if all had been written before. Rows that no slot of the step lies in are read.
- What is compared is one vector of slots, so that steps of few tokens alone go this way.

Everything is elementwise in the columns of a head: one that turns reads its partner beside itself. Norm aside, whose
sum of squares may be added up in another order, the bits are those of `rope_update_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.ops.triton.cache_update import slot_start, stored
from vattn.ops.triton.codec import cast, decode
from vattn.ops.triton.decode_fast_kernels import (
    FP16_QUERY_SHRINK,
    KEEP,
    LOWEST_MAXIMUM,
    QUERY_ROWS,
    TILE_TOKENS,
    add_values,
    finish_rows,
    load_item,
    operand_columns,
    scale_factors,
    take_scores,
    tile_scores,
    visible_end,
)
from vattn.ops.triton.epilogue import load_scale
from vattn.ops.triton.rope_cache_update import query_codes


@triton.jit
def factors_of(table, row, stride_n, stride_c, angle, there):
    """Return what columns `[W]` are multiplied by, fp32 `[1, 1, W]`; NaN where there is nothing."""
    start = table + row * stride_n
    factor = tl.load(start + angle * stride_c, mask=there, other=float("nan"), eviction_policy=KEEP)
    return factor.to(tl.float32)[None, None, :]


@triton.jit
def table_row(positions, token, num_rows):
    """Return which row of the tables is a token's, and whether they have it."""
    row = tl.zeros([], tl.int64) + token
    known = row >= 0
    if positions is not None:
        row = tl.load(positions + row, eviction_policy=KEEP).to(tl.int64)
        row = tl.where(row < 0, row + num_rows, row)
        known = (row >= 0) & (row < num_rows)
    return row, known


@triton.jit
def norm_factor(rows, inside, eps, SHAPE: tl.constexpr, NORM: tl.constexpr):
    """Return the reciprocal root mean squares of heads at pointers `[H, R, 1]`, fp32 of that shape."""
    if NORM == "none":
        return tl.full(inside.shape, 1.0, tl.float32)
    else:
        x = tl.load(rows + tl.arange(0, SHAPE[0])[None, None, :], mask=inside, other=0.0).to(tl.float32)
        return tl.rsqrt(tl.sum(x * x, axis=2) / SHAPE[0] + eps)[:, :, None]


@triton.jit
def normed(rows, inside, weight, factor, column, NORM: tl.constexpr):
    """Return fp32 columns `[W]` of heads at pointers `[H, R, 1]`, as `[H, R, W]`, behind their norm."""
    x = tl.load(rows + column[None, None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM != "none":
        x = x * factor
        if weight is not None:
            ONE: tl.constexpr = 1.0 if NORM == "rms_one_plus" else 0.0
            x = x * (tl.load(weight + column).to(tl.float32)[None, None, :] + ONE)
    return x


@triton.jit
def turned(
    rows, inside, weight, factor, column, cos, sin, row, known, stride_cn, stride_cc, stride_sn, stride_sc,
    SHAPE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Return fp32 columns `[W]` of heads at pointers `[H, R, 1]`, as `[H, R, W]`, behind norm and rotation.

    SHAPE: head size, pairs, full tables, interleaved pairs.
    """
    HALF: tl.constexpr = SHAPE[1]
    turns = column < 2 * HALF
    if SHAPE[3]:
        is_first = column % 2 == 0
        partner = column ^ 1
        angle = column if SHAPE[2] else column // 2
    else:
        is_first = column < HALF
        partner = tl.where(is_first, column + HALF, column - HALF)
        angle = column if SHAPE[2] else tl.minimum(column, partner)
    partner = tl.where(turns, partner, column)
    there = column < tl.where(known, 2 * HALF, 0)
    cosine = factors_of(cos, row, stride_cn, stride_cc, angle, there)
    sine = factors_of(sin, row, stride_sn, stride_sc, angle, there)
    x = normed(rows, inside, weight, factor, column, NORM)
    product = normed(rows, inside, weight, factor, partner, NORM) * sine
    # As `rope_update_kernel`: it says which of the two products is rounded.
    result = tl.fma(x, tl.zeros_like(x) + cosine, tl.where(is_first[None, None, :], -product, product))
    return tl.where(turns[None, None, :], result, x)


@triton.jit
def turned_query(
    query, row, row_of_table, known, kv_head, kv_head_mask, weight, q_factor, cos, sin, column_a, column_b, stride_t,
    stride_h, stride_cn, stride_cc, stride_sn, stride_sc, eps,
    GROUP: tl.constexpr, ROWS: tl.constexpr, PER_HEAD: tl.constexpr, SHAPE: tl.constexpr, NORM: tl.constexpr,
    MODEL: tl.constexpr, ROUND: tl.constexpr, ARITHMETIC: tl.constexpr, NATIVE: tl.constexpr, FP8: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Return a token's queries `[heads, 16, W]` of columns a and b as the dtype of the dot; rows repeat every ROWS."""
    in_group = tl.arange(0, ROWS)
    inside = kv_head_mask[:, None, None] & (in_group < GROUP)[None, :, None]
    head = kv_head[:, None, None] * GROUP + in_group[None, :, None]
    rows = query + row.to(tl.int64) * stride_t + head * stride_h
    scale = tl.full([1, 1, 1], 1.0, tl.float32)
    if ARITHMETIC != "none":
        if PER_HEAD:
            scale = tl.load(q_factor + kv_head, mask=kv_head_mask, other=1.0, eviction_policy=KEEP)[:, None, None]
        else:
            scale = tl.load(q_factor + tl.zeros([1, 1, 1], tl.int32), eviction_policy=KEEP)
    factor = norm_factor(rows, inside, eps, SHAPE, NORM)
    a = turned(
        rows, inside, weight, factor, column_a, cos, sin, row_of_table, known, stride_cn, stride_cc, stride_sn,
        stride_sc, SHAPE, NORM,
    )  # fmt: skip
    a = query_operand(a, scale, MODEL, ROUND, ARITHMETIC, NATIVE, FP8, DTYPE)
    b = a
    if FP8:
        b = turned(
            rows, inside, weight, factor, column_b, cos, sin, row_of_table, known, stride_cn, stride_cc, stride_sn,
            stride_sc, SHAPE, NORM,
        )  # fmt: skip
        b = query_operand(b, scale, MODEL, ROUND, ARITHMETIC, NATIVE, FP8, DTYPE)
    return a, b


@triton.jit
def query_operand(
    x, scale, MODEL: tl.constexpr, ROUND: tl.constexpr, ARITHMETIC: tl.constexpr, NATIVE: tl.constexpr,
    FP8: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Round fp32 queries `[heads, ROWS, W]` as they would be stored; return 16 rows of them as the dtype of the dot."""
    ROWS: tl.constexpr = x.shape[1]
    x = query_codes(x, scale, MODEL, ROUND, ARITHMETIC, NATIVE)
    if ARITHMETIC != "none":
        x = decode(x, "fp8_e4m3", tl.float16, NATIVE)
    if FP8:
        x = x.to(tl.float32) * FP16_QUERY_SHRINK
    x = x.to(DTYPE)
    # What stands in rows beyond a group is computed and not stored.
    repeated = tl.broadcast_to(x[:, None, :, :], [x.shape[0], 2 * QUERY_ROWS // ROWS, ROWS, x.shape[2]])
    return repeated.reshape(x.shape[0], 2 * QUERY_ROWS, x.shape[2])


@triton.jit
def as_pairs(even, odd):
    """Return bytes of even and of odd columns as the int16 pairs in which an FP8 cache is read."""
    return (even.to(tl.int32) | (odd.to(tl.int32) << 8)).to(tl.int16)


@triton.jit
def new_keys(
    key, token, row_of_table, known, kv_head, kv_head_mask, weight, scale, cos, sin, stride_t, stride_h, stride_cn,
    stride_cc, stride_sn, stride_sc, eps, SHAPE: tl.constexpr, NORM: tl.constexpr, MODEL: tl.constexpr,
    FP8: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Return a token's keys `[heads, 1, W]` as the cache holds them, columns of FP8 in pairs."""
    inside = kv_head_mask[:, None, None]
    rows = key + (tl.zeros([], tl.int64) + token) * stride_t + kv_head[:, None, None] * stride_h
    factor = norm_factor(rows, inside, eps, SHAPE, NORM)
    if FP8:
        column = 2 * tl.arange(0, SHAPE[0] // 2)
        even = turned(
            rows, inside, weight, factor, column, cos, sin, row_of_table, known, stride_cn, stride_cc, stride_sn,
            stride_sc, SHAPE, NORM,
        )  # fmt: skip
        odd = turned(
            rows, inside, weight, factor, column + 1, cos, sin, row_of_table, known, stride_cn, stride_cc, stride_sn,
            stride_sc, SHAPE, NORM,
        )  # fmt: skip
        return as_pairs(
            stored(cast(even, MODEL), scale, "fp8_e4m3", tl.uint8, NATIVE),
            stored(cast(odd, MODEL), scale, "fp8_e4m3", tl.uint8, NATIVE),
        )
    else:
        column = tl.arange(0, SHAPE[0])
        x = turned(
            rows, inside, weight, factor, column, cos, sin, row_of_table, known, stride_cn, stride_cc, stride_sn,
            stride_sc, SHAPE, NORM,
        )  # fmt: skip
        return cast(x, MODEL)


@triton.jit
def new_values(
    value, token, kv_head, kv_head_mask, scale, stride_t, stride_h, HEAD_SIZE: tl.constexpr, FP8: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Return a token's values `[heads, 1, W]` as the cache holds them, columns of FP8 in pairs."""
    inside = kv_head_mask[:, None, None]
    rows = value + (tl.zeros([], tl.int64) + token) * stride_t + kv_head[:, None, None] * stride_h
    if FP8:
        column = 2 * tl.arange(0, HEAD_SIZE // 2)[None, None, :]
        even = tl.load(rows + column, mask=inside, other=0.0)
        odd = tl.load(rows + column + 1, mask=inside, other=0.0)
        return as_pairs(
            stored(even, scale, "fp8_e4m3", tl.uint8, NATIVE), stored(odd, scale, "fp8_e4m3", tl.uint8, NATIVE)
        )
    else:
        return tl.load(rows + tl.arange(0, HEAD_SIZE)[None, None, :], mask=inside, other=0.0)


@triton.jit
def cache_scale(scale, kv_head, kv_head_mask, KIND: tl.constexpr):
    """Return the scales of keys or values of heads, `[heads, 1, 1]`; KIND as KV_SCALE of the kernel."""
    found = tl.full([1, 1, 1], 1.0, tl.float32)
    if KIND == 1:
        found = tl.load(scale + tl.zeros([1, 1, 1], tl.int32), eviction_policy=KEEP)
    if KIND == 2:
        found = tl.load(scale + kv_head, mask=kv_head_mask, other=1.0, eviction_policy=KEEP)[:, None, None]
    return found


@triton.jit
def place_of(page, tile, num_blocks, TILES_PER_BLOCK: tl.constexpr):
    """Return which tile of the whole cache a tile of a request is; -2 for a block id out of range."""
    return tl.where((page >= 0) & (page < num_blocks), page * TILES_PER_BLOCK + tile % TILES_PER_BLOCK, -2)


@triton.jit
def load_tile(
    cache, place, kv_head, kv_head_mask, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, STRIDES: tl.constexpr
):
    """Return a tile of the cache `[heads, 16, W]`, the one of that place among all; zeros if there is none."""
    TILES: tl.constexpr = BLOCK_SIZE // TILE_TOKENS
    block = tl.maximum(place, 0).to(tl.int64) // TILES
    row = (tl.maximum(place, 0) % TILES) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    start = cache + block * STRIDES[0] + kv_head[:, None, None] * STRIDES[2] + (row * STRIDES[1])[None, :, None]
    head_limit = tl.where(place >= 0, 1, 0)
    there = (tl.where(kv_head_mask, 0, 1) < head_limit)[:, None, None]
    return tl.load(start + tl.arange(0, WIDTH)[None, None, :], mask=there, other=0)


@triton.jit
def write_rows(
    key, value, cos, sin, positions, slot_mapping, weight, key_cache, value_cache, key_scale, value_scale, token,
    kv_head, kv_head_mask, num_slots, num_rows, key_stride, key_head_stride, value_stride, value_head_stride,
    stride_cn, stride_cc, stride_sn, stride_sc, eps,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr,
    SHAPE: tl.constexpr, NORM: tl.constexpr, MODEL: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Write a token's keys and values of some heads into its slot."""
    slot = tl.load(slot_mapping + token).to(tl.int64)
    row, known = table_row(positions, token, num_rows)
    keys = new_keys(
        key, token, row, known, kv_head, kv_head_mask, weight, key_scale, cos, sin, key_stride, key_head_stride,
        stride_cn, stride_cc, stride_sn, stride_sc, eps, SHAPE, NORM, MODEL, FP8, NATIVE,
    )  # fmt: skip
    values = new_values(
        value, token, kv_head, kv_head_mask, value_scale, value_stride, value_head_stride, SHAPE[0], FP8, NATIVE
    )
    writes = (kv_head < tl.where((slot >= 0) & (slot < num_slots), NUM_KV_HEADS, 0))[:, None, None]
    head = kv_head[:, None, None]
    column = tl.arange(0, SHAPE[0] // 2 if FP8 else SHAPE[0])[None, None, :]
    start = key_cache + slot_start(slot, num_slots, BLOCK_SIZE, K_STRIDES)
    tl.store(start + head * K_STRIDES[2] + column, keys, mask=writes)
    start = value_cache + slot_start(slot, num_slots, BLOCK_SIZE, V_STRIDES)
    tl.store(start + head * V_STRIDES[2] + column, values, mask=writes)


@triton.jit
def take_tile(
    keys, values, query_a, query_b, factor, soft_cap, token0, begin, end, maximum, total, acc_a, acc_b,
    HEADS: tl.constexpr, GROUP: tl.constexpr, FP8: tl.constexpr, ASSEMBLY: tl.constexpr, SOFT_CAP: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Take a tile of the cache into the running maxima, sums and accumulators of eight query rows."""
    token = token0 + tl.arange(0, TILE_TOKENS)
    visible = (token >= begin) & (token < end)
    low, high = tile_scores(keys, query_a, query_b, factor, soft_cap, visible, HEADS, FP8, ASSEMBLY, SOFT_CAP)
    low, maximum, total, acc_a, acc_b = take_scores(maximum, total, acc_a, acc_b, low, FP8)
    # Rows 8 to 15 repeat the others.
    acc_a, acc_b, _, _ = add_values(
        low, high, values, token0, begin, end, visible, acc_a, acc_b, acc_a, acc_b, GROUP, FP8, ASSEMBLY, DTYPE
    )
    return maximum, total, acc_a, acc_b


@triton.jit(do_not_specialize=["scale_stride", "group_stride", "num_blocks", "num_tokens", "num_rows", "eps"])
def rope_decode_kernel(
    query, key, value, cos, sin, positions, slot_mapping, q_weight, k_weight, q_factor, key_cache, value_cache,
    key_boxes, value_boxes, block_table, schedule, output, block_scale, lse, partial_output, partial_stats,
    q_scale, k_scale, v_scale, sinks, output_scale, query_stride, query_head_stride, key_stride, key_head_stride,
    value_stride, value_head_stride, stride_cn, stride_cc, stride_sn, stride_sc, output_stride, scale_stride,
    group_stride, table_stride, table_width, num_blocks, num_tokens, num_rows, eps, score_scale, soft_cap,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr, WINDOW: tl.constexpr,
    FP8: tl.constexpr, ASSEMBLY: tl.constexpr, QUERY_SCALE: tl.constexpr, KV_SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr, MODEL: tl.constexpr, DTYPE: tl.constexpr, OUTPUT: tl.constexpr, GROUPS: tl.constexpr,
    STAGES: tl.constexpr, OVERLAP: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, SHAPE: tl.constexpr,
    NORM: tl.constexpr, ROUND: tl.constexpr, ARITHMETIC: tl.constexpr,
):  # fmt: skip
    """Turn and attend the rows of the schedule's items, and write the step's keys and values; grid as `decode_kernel`.

    SLOTS: at least the tokens of the step. ROWS: query heads of a KV head, at most 8, rounded up to a power of two.
    What comes behind is as in `rope_update_kernel`, SHAPE as in `turned`.
    """
    tl.extra.cuda.gdc_launch_dependents()
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    HEAD_GROUPS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    WIDTH: tl.constexpr = HEAD_SIZE // 2 if FP8 else HEAD_SIZE
    TILES_PER_BLOCK: tl.constexpr = BLOCK_SIZE // TILE_TOKENS
    head0 = (tl.program_id(0) % HEAD_GROUPS) * HEADS
    kv_head = head0 + tl.arange(0, HEADS)
    kv_head_mask = kv_head < NUM_KV_HEADS
    column_a, column_b = operand_columns(WIDTH, FP8, ASSEMBLY)
    cta = tl.program_id(0) // HEAD_GROUPS
    ctas = tl.num_programs(0) // HEAD_GROUPS

    key_scale = cache_scale(k_scale, kv_head, kv_head_mask, KV_SCALE)
    value_scale = cache_scale(v_scale, kv_head, kv_head_mask, KV_SCALE)
    # From the last program down: the first ones have items, the last ones often none.
    for written in range(ctas - 1 - cta, num_tokens, ctas):
        write_rows(
            key, value, cos, sin, positions, slot_mapping, k_weight, key_cache, value_cache, key_scale, value_scale,
            written, kv_head, kv_head_mask, num_blocks.to(tl.int64) * BLOCK_SIZE, num_rows, key_stride,
            key_head_stride, value_stride, value_head_stride, stride_cn, stride_cc, stride_sn, stride_sc, eps,
            NUM_KV_HEADS, BLOCK_SIZE, K_STRIDES, V_STRIDES, SHAPE, NORM, MODEL, FP8, ASSEMBLY,
        )  # fmt: skip

    _, score_factor, value_factor = scale_factors(
        q_scale, k_scale, v_scale, score_scale, kv_head, kv_head_mask, HEADS, QUERY_SCALE, KV_SCALE
    )
    factor = score_factor[:, None, None]
    scale = load_scale(output_scale)

    index = tl.arange(0, SLOTS)
    slots = tl.load(slot_mapping + index, mask=index < num_tokens, other=-1, eviction_policy=KEEP)
    in_cache = (slots >= 0) & (slots < num_blocks.to(tl.int64) * BLOCK_SIZE)
    places = tl.where(in_cache, slots // TILE_TOKENS, -1).to(tl.int32)
    # One number tells a token and its row in its tile, the token first.
    tokens = index * TILE_TOKENS + (slots % TILE_TOKENS).to(tl.int32)

    item = cta
    while item >= 0:
        request, first_row, rows_of_item, seq_len, item_begin, item_end, slot_of_item, cta, item = load_item(
            schedule, cta, item, ctas
        )
        table = block_table + request.to(tl.int64) * table_stride
        for row_of_request in range(0, rows_of_item):
            row = first_row + row_of_request
            end = seq_len - rows_of_item + 1 + row_of_request
            begin = tl.maximum(end - WINDOW, 0) if WINDOW else 0
            first_tile = tl.maximum(item_begin, begin // TILE_TOKENS)
            last_tile = tl.minimum(item_end, (end + TILE_TOKENS - 1) // TILE_TOKENS)
            last_tile = tl.minimum(last_tile, table_width * TILES_PER_BLOCK)
            has_tiles = first_tile < last_tile
            page = tl.load(table + first_tile // TILES_PER_BLOCK, mask=has_tiles, other=-1, eviction_policy=KEEP)
            # The newest token is in the last tile as a rule: then that one does not go through the loop.
            newest = last_tile - 1
            last_page = tl.load(table + newest // TILES_PER_BLOCK, mask=has_tiles, other=-1, eviction_policy=KEEP)
            last_place = place_of(last_page, newest, num_blocks, TILES_PER_BLOCK)
            is_new = tl.max((places == last_place).to(tl.int32), 0)
            loop_end = last_tile - is_new
            first_new = tl.where(is_new > 0, newest, last_tile)
            end_new = tl.where(is_new > 0, last_tile, 0)
            row_of_table, known = table_row(positions, row, num_rows)
            query_a, query_b = turned_query(
                query, row, row_of_table, known, kv_head, kv_head_mask, q_weight, q_factor, cos, sin, column_a,
                column_b, query_stride, query_head_stride, stride_cn, stride_cc, stride_sn, stride_sc, eps, GROUP,
                ROWS, QUERY_SCALE == 2, SHAPE, NORM, MODEL, ROUND, ARITHMETIC, ASSEMBLY, FP8, DTYPE,
            )  # fmt: skip

            maximum = tl.full([HEADS, QUERY_ROWS], LOWEST_MAXIMUM, tl.float32)
            total = tl.zeros([HEADS, QUERY_ROWS, TILE_TOKENS], tl.float32)
            acc_a = tl.zeros([HEADS, WIDTH, QUERY_ROWS], tl.float32)
            acc_b = acc_a
            for tile in tl.range(first_tile, loop_end, num_stages=STAGES):
                next_page = tl.load(table + tl.minimum(tile + 1, loop_end - 1) // TILES_PER_BLOCK, eviction_policy=KEEP)
                inside = (tile % TILES_PER_BLOCK) * TILE_TOKENS
                keys = key_boxes.load([page, head0, inside, 0]).reshape(HEADS, TILE_TOKENS, WIDTH)
                values = value_boxes.load([page, head0, inside, 0]).reshape(HEADS, TILE_TOKENS, WIDTH)
                place = place_of(page, tile, num_blocks, TILES_PER_BLOCK)
                later = tl.max((places == place).to(tl.int32), 0) > 0
                first_new = tl.where(later, tl.minimum(first_new, tile), first_new)
                end_new = tl.where(later, tl.maximum(end_new, tile + 1), end_new)
                tile_end = tl.where(later, 0, visible_end(page, num_blocks, end))
                page = next_page
                maximum, total, acc_a, acc_b = take_tile(
                    keys, values, query_a, query_b, factor, soft_cap, tile * TILE_TOKENS, begin, tile_end, maximum,
                    total, acc_a, acc_b, HEADS, GROUP, FP8, ASSEMBLY, SOFT_CAP, DTYPE,
                )  # fmt: skip
            for tile in tl.range(first_new, end_new, num_stages=1):
                new_page = tl.load(table + tile // TILES_PER_BLOCK, eviction_policy=KEEP)
                place = place_of(new_page, tile, num_blocks, TILES_PER_BLOCK)
                # Plain loads, all under way at once with those of the new rows.
                keys = load_tile(key_cache, place, kv_head, kv_head_mask, BLOCK_SIZE, WIDTH, K_STRIDES)
                values = load_tile(value_cache, place, kv_head, kv_head_mask, BLOCK_SIZE, WIDTH, V_STRIDES)
                found = tl.max(tl.where(places == place, tokens, -1), 0)
                # Between two such tiles there may be others, which the loop has taken.
                tile_end = tl.where(found >= 0, visible_end(new_page, num_blocks, end), 0)
                while found >= 0:
                    new = found // TILE_TOKENS
                    here = (tl.arange(0, TILE_TOKENS) == found % TILE_TOKENS)[None, :, None]
                    new_row, new_known = table_row(positions, new, num_rows)
                    new_key = new_keys(
                        key, new, new_row, new_known, kv_head, kv_head_mask, k_weight, key_scale, cos, sin,
                        key_stride, key_head_stride, stride_cn, stride_cc, stride_sn, stride_sc, eps, SHAPE, NORM,
                        MODEL, FP8, ASSEMBLY,
                    )  # fmt: skip
                    new_value = new_values(
                        value, new, kv_head, kv_head_mask, value_scale, value_stride, value_head_stride, HEAD_SIZE,
                        FP8, ASSEMBLY,
                    )  # fmt: skip
                    keys = tl.where(here, new_key, keys)
                    values = tl.where(here, new_value, values)
                    found = tl.max(tl.where((places == place) & (index < new), tokens, -1), 0)
                maximum, total, acc_a, acc_b = take_tile(
                    keys, values, query_a, query_b, factor, soft_cap, tile * TILE_TOKENS, begin, tile_end, maximum,
                    total, acc_a, acc_b, HEADS, GROUP, FP8, ASSEMBLY, SOFT_CAP, DTYPE,
                )  # fmt: skip
            finish_rows(
                maximum, total, acc_a, acc_b, row, slot_of_item, request < 0, head0, value_factor, sinks, scale,
                output, block_scale, lse, partial_output, partial_stats, output_stride, scale_stride, group_stride, 0,
                HEADS, NUM_HEADS, NUM_KV_HEADS, GROUP, HEAD_SIZE, WIDTH, FP8, MODEL, OUTPUT, GROUPS,
            )  # fmt: skip
