"""The general attention kernel for prefill, decode and mixed steps, over a paged cache or varlen keys.

One program computes a tile of query rows of one KV head; rows are (token, head of the group) pairs. Request b starts at
tile `query_start_loc[b] // BLOCK_Q + b + 1`, so shapes bound the grid and each program finds its request by counting.
Rows of no request are two more, one before the others and one after them, with tiles of zeros; if offsets are out
of order, these are all rows. With splits each program attends a part of the keys and writes a normalised partial;
`reduce.py` merges them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.kernels.triton.common.codec import cast, decode, dot
from vattn.kernels.triton.common.epilogue import load_scale, quantise_dynamic, store_rows
from vattn.kernels.triton.common.hadamard import rotate_back, rotate_query
from vattn.kernels.triton.common.mask import (
    LN2,
    LOG2E,
    MAX_SEQ_LEN,
    clamp,
    count_held,
    full_range,
    key_range,
    modify_scores,
    position_held,
    visible,
)
from vattn.kernels.triton.common.softmax import attend_ahead, softmax_step, softmax_step_apart, softmax_step_of_products

SEARCH = tl.constexpr(256)
"""Requests or block ids that a program reads in one step."""

WRONG = tl.constexpr(1 << 16)
"""What an offset out of order counts; more than SEARCH."""


@triton.jit
def find_rows(tile, query_start_loc, num_reqs, num_tokens, BLOCK_Q: tl.constexpr, N: tl.constexpr = 1):
    """Return a tile's request (-1: none), first row, where the request ends, and the index of the first row in it.

    Offsets may hold any value. N: rows of a token; tiles are of BLOCK_Q of them.
    """
    count = 0
    disorder = 0
    for base in range(0, num_reqs + 1, SEARCH):
        b = base + tl.arange(0, SEARCH)
        inside = b <= num_reqs
        start = clamp(tl.load(query_start_loc + b, mask=inside, other=0), num_tokens) * N
        before = clamp(tl.load(query_start_loc + b - 1, mask=inside & (b > 0), other=0), num_tokens) * N
        begun = inside & (start // BLOCK_Q + b < tile)
        # One sum gives both: fewer than WRONG have begun.
        both = tl.sum(begun.to(tl.int32) + tl.where(inside & (start < before), WRONG, 0))
        count += both & (WRONG - 1)
        disorder |= both & -WRONG
    count = tl.where(disorder != 0, 0, count)
    start = clamp(tl.load(query_start_loc + count - 1, mask=count > 0, other=0), num_tokens) * N
    is_last = (count > num_reqs) | (disorder != 0)
    end = clamp(tl.load(query_start_loc + count, mask=~is_last, other=num_tokens), num_tokens) * N
    first = tl.where(count > 0, tile - (start // BLOCK_Q + count), tile) * BLOCK_Q
    request = tl.where(count <= num_reqs, count - 1, -1)
    return request, start + first, end, first


@triton.jit
def find_keys(kv_start_loc, request, num_keys):
    """Return the first of a request's packed keys and their number. Offsets may hold any value."""
    start = clamp(tl.load(kv_start_loc + request), num_keys)
    end = clamp(tl.load(kv_start_loc + request + 1), num_keys)
    return start, tl.maximum(end - start, 0)


@triton.jit
def load_rows(query, mask, q_step, LOAD: tl.constexpr):
    """Return query rows as stored or, unless LOAD is "plain", as e4m3 bytes under the scale q_step."""
    q = tl.load(query, mask=mask, other=0)
    if LOAD == "plain":
        return q
    else:
        return quantise_dynamic(q.to(tl.float32), tl.zeros([1, 1], tl.float32) + q_step, LOAD)


@triton.jit
def load_query(
    query, mask, q_step, scale, COMPUTE: tl.constexpr, LOAD: tl.constexpr, FORMAT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    """Return query rows as COMPUTE and the factor of their scores, `[rows]`."""
    q = load_rows(query, mask, q_step, LOAD)
    factor = tl.full([q.shape[0]], 1.0, tl.float32) * scale
    if FORMAT == "bfloat16" and COMPUTE == tl.float16:
        # A power of two per row scales bf16 into the range of fp16.
        q = q.to(tl.float32)
        bits = tl.max(tl.abs(q), axis=1).to(tl.uint32, bitcast=True) & 0x7F800000
        bits = tl.minimum(tl.maximum(bits, 0x01000000), 0x7E000000)
        q = q * (0x7F000000 - bits).to(tl.float32, bitcast=True)[:, None]
        factor = factor * bits.to(tl.float32, bitcast=True)
        q = q.to(COMPUTE)
    else:
        q = decode(q, FORMAT, COMPUTE, NATIVE_FP8)
    return q, factor


@triton.jit
def look_up(table, k, low, high, num_blocks, kv_start,
            PAGED: tl.constexpr, BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """Return the block of each key (varlen: its row), -1 for keys that must not be read."""
    inside = (k >= low) & (k < high)
    if PAGED:
        block = tl.load(table + k // BLOCK_SIZE, mask=inside, other=-1)
        return tl.where((block >= 0) & (block < num_blocks), block, -1)
    else:
        return tl.where(inside, kv_start + k, -1)


@triton.jit
def any_invalid_block(table, low, high, num_blocks, BLOCK_SIZE: tl.constexpr):
    """Return how many of the blocks of keys [low, high) have an id outside the cache."""
    bad = 0
    last = tl.cdiv(high, BLOCK_SIZE)
    for base in range(low // BLOCK_SIZE, last, SEARCH):
        column = base + tl.arange(0, SEARCH)
        block = tl.load(table + column, mask=column < last, other=0)
        bad += tl.sum(((block < 0) | (block >= num_blocks)).to(tl.int32))
    return bad


@triton.jit
def load_tile(
    pointer, block, k, columns, mask, BLOCK_SIZE: tl.constexpr, PAGED: tl.constexpr,
    STRIDE_BLOCK: tl.constexpr, STRIDE_ROW: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return stored rows `[keys, columns]`; masked rows are zero (`mask=None`: no mask).

    WHOLE: no column is beyond WIDTH.
    """
    if PAGED:
        row = block.to(tl.int64) * STRIDE_BLOCK + (k % BLOCK_SIZE) * STRIDE_ROW
    else:
        row = block.to(tl.int64) * STRIDE_ROW
    pointers = pointer + row[:, None] + columns[None, :]
    if mask is not None:
        return tl.load(pointers, mask=mask[:, None] & (columns < WIDTH)[None, :], other=0)
    elif not WHOLE:
        return tl.load(pointers, mask=(columns < WIDTH)[None, :], other=0)
    else:
        return tl.load(pointers)


@triton.jit
def load_packed_tile(
    codes, scales, block, k, readable, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, SCALE_ROWS: tl.constexpr,
    PART: tl.constexpr, LOAD: tl.constexpr, NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    """Return fp32 `[keys, columns]` of a packed format and factors `[keys, 1]`; masked rows are zero.

    ROWS, SCALE_ROWS: strides of block and row. LOAD: of `vattn.kernels.triton.cache.packed_rows`.
    """
    place = (block.to(tl.int64) * ROWS[0] + (k % BLOCK_SIZE) * ROWS[1])[:, None]
    scale_rows = scales
    if scales is not None:
        scale_rows = scales + (block.to(tl.int64) * SCALE_ROWS[0] + (k % BLOCK_SIZE) * SCALE_ROWS[1])[:, None]
    mask = readable
    if readable is not None:
        mask = readable[:, None]
    return LOAD(codes + place, scale_rows, mask, PART, NATIVE_FP8)


@triton.jit
def score_tile(
    q, query, query_mask, q_step, key, key_scales, block, k, d, readable, BLOCK_M: tl.constexpr, TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PAGED: tl.constexpr, K_BLOCK: tl.constexpr, K_ROW: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, D_STEP: tl.constexpr, Q_LOAD: tl.constexpr, Q_FORMAT: tl.constexpr,
    KV_FORMAT: tl.constexpr, COMPUTE: tl.constexpr, NATIVE_FP8: tl.constexpr, KEY_SCALE_ROWS: tl.constexpr,
    KEY_PART: tl.constexpr, LOAD_KEY: tl.constexpr,
):  # fmt: skip
    """Return query rows times the keys of one tile, `[rows, keys]`.

    Wide fp32 heads take steps of D_STEP columns, since exact dots hold whole rows in registers; each step
    loads its part of the query again.
    """
    s = tl.zeros([BLOCK_M, TILE], tl.float32)
    if LOAD_KEY is not None:
        # A row's factor may exceed the range of COMPUTE, so it multiplies the fp32 scores.
        k_tile, k_factor = load_packed_tile(key, key_scales, block, k, readable, BLOCK_SIZE, (K_BLOCK, K_ROW),
                                            KEY_SCALE_ROWS, KEY_PART, LOAD_KEY, NATIVE_FP8)  # fmt: skip
        return dot(q, tl.trans(cast(k_tile, COMPUTE)), s) * tl.trans(k_factor)
    elif D_STEP == BLOCK_D:
        k_tile = load_tile(key, block, k, d, readable, BLOCK_SIZE, PAGED, K_BLOCK, K_ROW, D, D == BLOCK_D)
        return dot(q, tl.trans(decode(k_tile, KV_FORMAT, COMPUTE, NATIVE_FP8)), s)
    else:
        for first in tl.static_range(0, D, D_STEP):
            column = first + tl.arange(0, D_STEP)
            part_mask = query_mask[:, None] & (column < D)[None, :]
            part = load_rows(query[:, None] + column[None, :], part_mask, q_step, Q_LOAD)
            k_tile = load_tile(key, block, k, column, readable, BLOCK_SIZE, PAGED, K_BLOCK, K_ROW, D, D % D_STEP == 0)
            k_tile = tl.trans(decode(k_tile, KV_FORMAT, COMPUTE, NATIVE_FP8))
            s = dot(decode(part, Q_FORMAT, COMPUTE, NATIVE_FP8), k_tile, s)
        return s


@triton.jit
def value_tile(
    value, value_scales, block, k, dv, readable, BLOCK_SIZE: tl.constexpr, PAGED: tl.constexpr, V_BLOCK: tl.constexpr,
    V_ROW: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, KV_FORMAT: tl.constexpr, COMPUTE: tl.constexpr,
    NATIVE_FP8: tl.constexpr, VALUE_SCALE_ROWS: tl.constexpr, VALUE_PART: tl.constexpr, LOAD_VALUE: tl.constexpr,
    MODEL: tl.constexpr,
):  # fmt: skip
    """Return the values of one tile `[keys, BLOCK_V]` as COMPUTE, or as MODEL for packed formats, which need its range.

    Masked rows are zero.
    """
    if LOAD_VALUE is not None:
        x, factor = load_packed_tile(value, value_scales, block, k, readable, BLOCK_SIZE, (V_BLOCK, V_ROW),
                                     VALUE_SCALE_ROWS, VALUE_PART, LOAD_VALUE, NATIVE_FP8)  # fmt: skip
        return cast(x * factor, MODEL)
    else:
        v_tile = load_tile(value, block, k, dv, readable, BLOCK_SIZE, PAGED, V_BLOCK, V_ROW, V, V == BLOCK_V)
        return decode(v_tile, KV_FORMAT, COMPUTE, NATIVE_FP8)


@triton.jit(
    do_not_specialize=[
        "num_tokens", "num_reqs", "num_blocks", "table_width", "table_stride", "num_trees", "bias_size", "num_ranges",
        "num_splits",
    ],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table", "kv_start_loc", "local_seq_lens"],
)  # fmt: skip
def attention_kernel(
    query, key, value, key_scales, value_scales, query_start_loc, seq_lens, block_table, kv_start_loc, output, lse,
    q_scale, k_scale, v_scale, output_scale, alibi_slopes, sinks, causal_flags, bias, tree_id, mm_ranges,
    local_seq_lens, key_boxes, value_boxes,
    num_tokens, num_reqs, num_blocks, table_width, table_stride, num_trees, bias_size, num_ranges, num_splits,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_os, stride_lt, stride_lh,
    scale, soft_cap,
    GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, D_STEP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr,
    V_BLOCK: tl.constexpr, V_ROW: tl.constexpr, V_HEAD: tl.constexpr,
    Q_LOAD: tl.constexpr, Q_FORMAT: tl.constexpr, KV_FORMAT: tl.constexpr, COMPUTE: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    MODEL: tl.constexpr, OUTPUT: tl.constexpr,
    PER_HEAD_Q: tl.constexpr, PER_HEAD_KV: tl.constexpr,
    CAUSALITY: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, LOOKBACK: tl.constexpr, MM: tl.constexpr,
    SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, SPLIT: tl.constexpr, FULL_LOOP: tl.constexpr, STAGES: tl.constexpr,
    MASKED_TILE: tl.constexpr, FOLDED: tl.constexpr, HOISTED: tl.constexpr, POSITIVE: tl.constexpr,
    TOGETHER: tl.constexpr, SCORES_AHEAD: tl.constexpr,
    KEY_SCALE_ROWS: tl.constexpr, VALUE_SCALE_ROWS: tl.constexpr, KEY_PART: tl.constexpr, VALUE_PART: tl.constexpr,
    LOAD_KEY: tl.constexpr, LOAD_VALUE: tl.constexpr, KEY_FACTOR: tl.constexpr, VALUE_FACTOR: tl.constexpr,
    RANK: tl.constexpr, WORLD: tl.constexpr, INTERLEAVE: tl.constexpr,
    CONTEXT_ONLY: tl.constexpr,
):  # fmt: skip
    """See `vattn.ops.reference.attention.attention`. Grid: tiles, KV heads x head chunks of a group, splits.

    Without splits `output` gets rows in the model dtype or as static FP8 and `lse` (or `None`) natural logs; with
    splits they get fp32 partials and base-2 logs by split. `local_seq_lens`, unless `None`: local indices of keys on
    rank RANK of WORLD with INTERLEAVE, see `vattn.config.dcp`. `key_boxes` and `value_boxes`, unless `None`: tensor
    maps over varlen keys and values `[heads, keys, columns]`; a box is a tile of a head. POSITIVE: no factor of a score
    is negative. TOGETHER: KV heads, or head chunks, that start their tiles together; divides their number.
    """
    PAGED: tl.constexpr = block_table is not None
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_TILE
    CHUNKS: tl.constexpr = (GROUP + GROUP_TILE - 1) // GROUP_TILE
    # Later tiles of a request see more keys, so they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head_chunk = tl.program_id(1)
    if TOGETHER > 1:
        # Programs start in the order of their ids.
        number = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        of_heads = tl.num_programs(0) * TOGETHER
        tile = tl.num_programs(0) - 1 - number % of_heads // TOGETHER
        head_chunk = number // of_heads * TOGETHER + number % TOGETHER
    kv_head = head_chunk // CHUNKS
    chunk = head_chunk % CHUNKS
    split = tl.program_id(2)

    request, first_row, q_end, first = find_rows(tile, query_start_loc, num_reqs, num_tokens, BLOCK_Q)
    if first_row >= q_end:
        return
    m_index = tl.arange(0, BLOCK_M)
    token = first_row + m_index // GROUP_TILE
    in_group = chunk * GROUP_TILE + m_index % GROUP_TILE
    head = kv_head * GROUP + in_group
    row_valid = (token < q_end) & (m_index < BLOCK_Q * GROUP_TILE) & (in_group < GROUP)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
    out_offsets = token.to(tl.int64) * stride_ot + head * stride_oh + split * stride_os
    lse_offsets = token.to(tl.int64) * stride_lt + head * stride_lh + split
    out_mask = row_valid[:, None] & (dv < V)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if request < 0:
        if SPLIT:
            # No sum has this log: it marks rows of no request, which have no sinks either.
            tl.store(lse + lse_offsets, tl.full([BLOCK_M], float("inf"), tl.float32), mask=row_valid)
        else:
            tl.store(output + out_offsets[:, None] + dv[None, :], acc.to(output.dtype.element_ty), mask=out_mask)
            if lse is not None:
                tl.store(lse + lse_offsets, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=row_valid)
        return

    # Positions, and the range of visible keys.
    kv_start = 0
    if PAGED:
        seq_len = clamp(tl.load(seq_lens + request), MAX_SEQ_LEN)
        table = block_table + request.to(tl.int64) * table_stride
    else:
        # Varlen keys are blocks of one.
        kv_start, seq_len = find_keys(kv_start_loc, request, num_blocks)
        table = block_table
    query_len = q_end - (first_row - first)
    causal = 1
    if CAUSALITY == "per_request":
        causal = tl.load(causal_flags + request)
    context_len = seq_len - query_len
    if CAUSALITY == "cross":
        # Rows have no position among the keys: count them from 0.
        context_len = 0
    q_first = context_len + first
    q_last = tl.minimum(q_first + BLOCK_Q, context_len + query_len) - 1
    q_pos = q_first + m_index // GROUP_TILE
    # Positions are relative to the sequence's end, not to that of the visible keys.
    key_end = tl.maximum(context_len, 0) if CONTEXT_ONLY else seq_len
    low, high = key_range(q_first, q_last, key_end, causal, CAUSALITY, WINDOW, CHUNK, LOOKBACK, MM)
    if local_seq_lens is not None:
        low = count_held(low, RANK, WORLD, INTERLEAVE)
        held = tl.maximum(tl.load(local_seq_lens + request), 0)
        high = tl.minimum(count_held(high, RANK, WORLD, INTERLEAVE), held)
        low = tl.minimum(low, high)
    if PAGED:
        high = tl.minimum(high, table_width * BLOCK_SIZE)

    # Scales and per-row values.
    factor = scale
    q_step = 1.0
    if q_scale is not None:
        q_step = tl.load(q_scale + (kv_head if PER_HEAD_Q else 0))
        factor = factor * q_step
    out_factor = 1.0
    if k_scale is not None:
        factor = factor * tl.load(k_scale + (kv_head if PER_HEAD_KV else 0))
        out_factor = tl.load(v_scale + (kv_head if PER_HEAD_KV else 0))
    q_offsets = token.to(tl.int64) * stride_qt + head * stride_qh
    query += q_offsets
    q, row_factor = load_query(query[:, None] + d[None, :], row_valid[:, None] & (d < D)[None, :], q_step, factor,
                               COMPUTE, Q_LOAD, Q_FORMAT, NATIVE_FP8)  # fmt: skip
    if KEY_PART[3] > 1:
        KEY_BLOCK: tl.constexpr = KEY_PART[3]
        KEY_FLIP: tl.constexpr = KEY_PART[4]
        q = cast(rotate_query(q.to(tl.float32), KEY_FACTOR, KEY_BLOCK, KEY_FLIP), COMPUTE)
    MODIFIED: tl.constexpr = SOFT_CAP or ALIBI != "none" or bias is not None
    if not MODIFIED:
        row_factor = row_factor * LOG2E
    # Unmodified scores are scaled inside the exponent, and block ids are looked up a tile ahead; wide tiles leave the
    # pipeline no room for that.
    PRODUCTS: tl.constexpr = FOLDED and not MODIFIED and D_STEP == BLOCK_D
    BOXES: tl.constexpr = key_boxes is not None
    AHEAD: tl.constexpr = FOLDED and PAGED
    # A warp holds whole rows of such a tile; its threads keep separate sums.
    APART: tl.constexpr = PRODUCTS and HOISTED
    if PRODUCTS and not POSITIVE:
        # The largest product gives the largest score only if no factor is negative. A query that is computed here is
        # passed to products through registers.
        q = tl.where(row_factor[:, None] < 0.0, -q, q)
        row_factor = tl.abs(row_factor)
    slope = 0.0
    if ALIBI != "none":
        slope = tl.load(alibi_slopes + head, mask=row_valid, other=0.0)[:, None]
    tree_bias = bias
    tree_size = 0
    if bias is not None:
        tree = tl.load(tree_id + request)
        in_range = (tree >= 0) & (tree < num_trees)
        tree_size = tl.where(in_range, bias_size, 0)
        tree_bias = bias + tl.where(in_range, tree, 0).to(tl.int64) * bias_size * bias_size
    ranges = mm_ranges
    if MM != "none":
        ranges = mm_ranges + request.to(tl.int64) * num_ranges * 2

    key += kv_head.to(tl.int64) * K_HEAD
    value += kv_head.to(tl.int64) * V_HEAD
    if key_scales is not None:
        key_scales += kv_head.to(tl.int64) * KEY_SCALE_ROWS[2]
    if value_scales is not None:
        value_scales += kv_head.to(tl.int64) * VALUE_SCALE_ROWS[2]
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    n = tl.arange(0, TILE)
    first_tile = low // TILE
    last_tile = tl.cdiv(high, TILE)
    full_begin = last_tile
    full_end = last_tile
    if SPLIT:
        share = tl.cdiv(last_tile - first_tile, num_splits)
        first_tile += split * share
        last_tile = tl.minimum(first_tile + share, last_tile)
        full_begin = last_tile
        full_end = last_tile

    if FULL_LOOP:
        # Tiles that all rows see fully need no mask.
        full_low, full_high = full_range(q_first, q_last, key_end, causal, CAUSALITY, WINDOW, CHUNK, LOOKBACK)
        if local_seq_lens is not None:
            full_low = count_held(full_low, RANK, WORLD, INTERLEAVE)
            full_high = count_held(full_high, RANK, WORLD, INTERLEAVE)
        begin = tl.maximum(tl.cdiv(full_low, TILE), first_tile)
        end = tl.minimum(full_high, high) // TILE
        usable = begin < end
        if PAGED:
            limit = tl.where(usable, end, begin) * TILE
            bad = any_invalid_block(table, begin * TILE, limit, num_blocks, BLOCK_SIZE)
            usable = usable & (bad == 0)
        full_begin = tl.where(usable, begin, last_tile)
        full_end = tl.where(usable, end, last_tile)
        next_block = n
        key_rows = key
        value_rows = value
        if AHEAD:
            any_full = n < (full_end - full_begin) * TILE
            next_block = tl.load(table + (full_begin * TILE + n) // BLOCK_SIZE, mask=any_full, other=0)
        if HOISTED:
            # Tiles are whole blocks: offsets in blocks are the same for all tiles.
            key_rows += (n % BLOCK_SIZE * K_ROW)[:, None] + d[None, :]
            value_rows += (n % BLOCK_SIZE * V_ROW)[:, None] + dv[None, :]
        if SCORES_AHEAD and PRODUCTS:
            acc, m, total = attend_ahead(
                q, row_factor, acc, m, total, key_boxes, value_boxes, kv_head, kv_start, num_blocks, full_begin,
                full_end, TILE, BLOCK_D, BLOCK_V, STAGES,
            )  # fmt: skip
        else:
            if APART:
                total = tl.zeros([BLOCK_M, 8], tl.float32)
            for j in tl.range(full_begin, full_end, num_stages=STAGES):
                k = j * TILE + n
                # These tiles are inside the request and their blocks inside the cache: no mask.
                if HOISTED:
                    block = next_block
                    column = tl.minimum(j + 1, full_end - 1) * (TILE // BLOCK_SIZE) + n // BLOCK_SIZE
                    next_block = tl.load(table + column)
                elif AHEAD:
                    block = next_block
                    next_block = tl.load(table + (tl.minimum(j + 1, full_end - 1) * TILE + n) // BLOCK_SIZE)
                elif not BOXES:
                    block = tl.load(table + k // BLOCK_SIZE) if PAGED else kv_start + k
                if BOXES:
                    k_tile = key_boxes.load([kv_head, kv_start + j * TILE, 0]).reshape([TILE, BLOCK_D])
                    s = dot(q, tl.trans(k_tile), tl.zeros([BLOCK_M, TILE], tl.float32))
                    v_tile = value_boxes.load([kv_head, kv_start + j * TILE, 0]).reshape([TILE, BLOCK_V])
                elif HOISTED:
                    k_tile = tl.load(key_rows + (block.to(tl.int64) * K_BLOCK)[:, None])
                    s = tl.zeros([BLOCK_M, TILE], tl.float32)
                    s = dot(q, tl.trans(decode(k_tile, KV_FORMAT, COMPUTE, NATIVE_FP8)), s)
                    v_tile = tl.load(value_rows + (block.to(tl.int64) * V_BLOCK)[:, None])
                    v_tile = decode(v_tile, KV_FORMAT, COMPUTE, NATIVE_FP8)
                else:
                    s = score_tile(q, query, row_valid, q_step, key, key_scales, block, k, d, None, BLOCK_M, TILE,
                                   BLOCK_SIZE, PAGED, K_BLOCK, K_ROW, D, BLOCK_D, D_STEP, Q_LOAD, Q_FORMAT, KV_FORMAT,
                                   COMPUTE, NATIVE_FP8, KEY_SCALE_ROWS, KEY_PART, LOAD_KEY)  # fmt: skip
                    v_tile = value_tile(value, value_scales, block, k, dv, None, BLOCK_SIZE, PAGED, V_BLOCK, V_ROW, V,
                                        BLOCK_V, KV_FORMAT, COMPUTE, NATIVE_FP8, VALUE_SCALE_ROWS, VALUE_PART,
                                        LOAD_VALUE, MODEL)  # fmt: skip
                if APART:
                    acc, m, total = softmax_step_apart(s, row_factor, v_tile, acc, m, total)
                elif PRODUCTS:
                    acc, m, total = softmax_step_of_products(s, row_factor, v_tile, acc, m, total)
                else:
                    s = s * row_factor[:, None]
                    if MODIFIED:
                        if local_seq_lens is not None:
                            k = position_held(k, RANK, WORLD, INTERLEAVE)
                        s = modify_scores(s, q_pos[:, None], k[None, :], causal, soft_cap, slope, tree_bias, tree_size,
                                          query_len, seq_len, CAUSALITY, SOFT_CAP, ALIBI)  # fmt: skip
                    acc, m, total = softmax_step(s, v_tile, acc, m, total)
            if APART:
                total = tl.sum(total, axis=1)

    # The tiles before and after the full ones in one loop; masks need registers, so these may be narrower.
    RATIO: tl.constexpr = TILE // MASKED_TILE
    if RATIO > 1:
        first_tile *= RATIO
        full_begin *= RATIO
        full_end *= RATIO
        last_tile = tl.minimum(last_tile * RATIO, tl.cdiv(high, MASKED_TILE))
        n = tl.arange(0, MASKED_TILE)
    before = full_begin - first_tile
    gap = full_end - full_begin
    steps = tl.maximum(last_tile - first_tile - gap, 0)
    for j in tl.range(0, steps, num_stages=STAGES):
        k = (first_tile + j + tl.where(j >= before, gap, 0)) * MASKED_TILE + n
        block = look_up(table, k, low, high, num_blocks, kv_start, PAGED, BLOCK_SIZE)
        readable = block >= 0
        position = position_held(k, RANK, WORLD, INTERLEAVE) if local_seq_lens is not None else k
        sees = visible(q_pos[:, None], position[None, :], key_end, causal, ranges, num_ranges,
                       CAUSALITY, WINDOW, CHUNK, LOOKBACK, MM) & readable[None, :]  # fmt: skip
        if MM != "none":
            # Keys between ranges, which no row sees, may hold NaN.
            readable = tl.max((sees & row_valid[:, None]).to(tl.int32), axis=0) > 0
        s = score_tile(q, query, row_valid, q_step, key, key_scales, block, k, d, readable, BLOCK_M, MASKED_TILE,
                       BLOCK_SIZE, PAGED, K_BLOCK, K_ROW, D, BLOCK_D, D_STEP, Q_LOAD, Q_FORMAT, KV_FORMAT, COMPUTE,
                       NATIVE_FP8, KEY_SCALE_ROWS, KEY_PART, LOAD_KEY)  # fmt: skip
        v_tile = value_tile(value, value_scales, block, k, dv, readable, BLOCK_SIZE, PAGED, V_BLOCK, V_ROW, V,
                            BLOCK_V, KV_FORMAT, COMPUTE, NATIVE_FP8, VALUE_SCALE_ROWS, VALUE_PART,
                            LOAD_VALUE, MODEL)  # fmt: skip
        s = s * row_factor[:, None]
        if MODIFIED:
            s = modify_scores(s, q_pos[:, None], position[None, :], causal, soft_cap, slope, tree_bias, tree_size,
                              query_len, seq_len, CAUSALITY, SOFT_CAP, ALIBI)  # fmt: skip
        s = tl.where(sees, s, float("-inf"))
        acc, m, total = softmax_step(s, v_tile, acc, m, total)

    if sinks is not None and not SPLIT:
        sink = tl.load(sinks + head, mask=row_valid, other=0.0).to(tl.float32) * LOG2E
        m_new = tl.maximum(m, sink)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - m_safe)
        total = total * alpha + tl.exp2(sink - m_safe)
        acc = acc * alpha[:, None]
        m = m_new
    # `!=`, not `>`: a NaN sum is not an empty row.
    seen = total != 0.0
    log = tl.where(seen, m + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    acc = acc * tl.where(seen, out_factor / tl.where(seen, total, 1.0), 0.0)[:, None]
    if VALUE_PART[3] > 1:
        # Rotate partial results back, too: the rotation is linear.
        VALUE_BLOCK: tl.constexpr = VALUE_PART[3]
        VALUE_FLIP: tl.constexpr = VALUE_PART[4]
        acc = rotate_back(acc, VALUE_FACTOR, VALUE_BLOCK, VALUE_FLIP)
    if SPLIT:
        tl.store(lse + lse_offsets, log, mask=row_valid)
        out_mask = out_mask & seen[:, None]
    elif lse is not None:
        tl.store(lse + lse_offsets, log * LN2, mask=row_valid)
    scale = load_scale(output_scale)
    store_rows(output + out_offsets[:, None] + dv[None, :], acc, out_mask, scale, MODEL, OUTPUT)
