"""Latent attention in plain Triton: cache update, absorbed attention over cached rows, and the merge of its splits.

`vattn.ops.reference.mla` says what they compute. A row of a program is one head of one token; the rows of a request lie
one after the other, token by token. Offsets and lengths are those of `bounded_step`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.kernels.triton.attention.kernel import find_rows
from vattn.kernels.triton.attention.reduce import merge_columns
from vattn.kernels.triton.cache.update import slot_start
from vattn.kernels.triton.common.codec import cast, decode, dot, encode_quotient
from vattn.kernels.triton.common.mask import LN2
from vattn.kernels.triton.mla.rows import load_latents, load_ropes, row_offset, store_row


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slot_mapping", "k_scale"])
def mla_update_kernel(
    kv_c, k_pe, cache, slot_mapping, k_scale, num_slots, stride_c, stride_p,
    L: tl.constexpr, R: tl.constexpr, L_TILE: tl.constexpr, R_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    STRIDES: tl.constexpr, FORMAT: tl.constexpr, NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    """Write one token's latent and rotated key. Grid: tokens."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    scale = tl.full((1,), 1.0, tl.float32)
    if k_scale is not None:
        scale = tl.load(k_scale + tl.zeros((1,), tl.int32))
    row = cache + slot_start(slot, num_slots, BLOCK_SIZE, STRIDES)
    column = tl.arange(0, L_TILE)
    latent = tl.load(kv_c + token * stride_c + column, mask=column < L, other=0)
    column = tl.arange(0, R_TILE)
    rope = tl.load(k_pe + token * stride_p + column, mask=column < R, other=0)
    store_row(row, latent, rope, scale, L, R, L_TILE, R_TILE, FORMAT, NATIVE_FP8)


@triton.jit
def request_of_token(query_start_loc, num_reqs, token):
    """Return the request of a token, -1 if it has none. Offsets out of order may give any that claims it, or -1."""
    low = tl.zeros([], tl.int32)
    high = low + num_reqs + 1
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(query_start_loc + middle)
        low = tl.where(first <= token, middle, low)
        high = tl.where(first <= token, high, middle)
    start = tl.load(query_start_loc + low)
    end = tl.load(query_start_loc + tl.minimum(low + 1, num_reqs))
    return tl.where((low < num_reqs) & (start <= token) & (end > token), low, -1)


@triton.jit(
    do_not_specialize=["num_tokens", "num_reqs", "num_splits", "num_blocks", "table_width", "table_stride", "topk"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table", "q_scale", "k_scale"],
)
def mla_attention_kernel(
    query, cache, query_start_loc, seq_lens, block_table, topk_indices, complete, q_scale, k_scale, output, lse,
    partial, partial_log, num_tokens, num_reqs, num_blocks, num_splits, table_stride, table_width, topk_stride, topk,
    scale,
    N: tl.constexpr, L: tl.constexpr, R: tl.constexpr, L_TILE: tl.constexpr, R_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, STRIDES: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr, MODEL: tl.constexpr,
    SPARSE: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NATIVE_FP8: tl.constexpr,
    LONGEST: tl.constexpr, SHORTEST: tl.constexpr,
):  # fmt: skip
    """Attend BLOCK_M rows of one request (SPARSE: heads of one token) to a split of its keys.

    Grid: blocks of rows, splits. `query` is `[T, N, L + R]`, absorbed, with `q_scale` bytes of e4m3; `output` `[T, N,
    L]` in the model dtype; `scale` includes log2(e). SPLIT: results go to `partial` fp32 `[T * N, splits, L]`, and
    base-2 logs of their denominators to `partial_log`; of an empty split the log alone is written. LONGEST, unless 0:
    requests of more tokens and padding are left out (SPARSE: those alone that are `complete`), every request has as
    many blocks as the longest may have, and partial results lie by request. SHORTEST, unless 0: requests of at most as
    many tokens, and padding, are left out.
    """
    COLUMNS: tl.constexpr = L + R
    split = tl.program_id(1)
    if SPARSE:
        BLOCKS: tl.constexpr = (N + BLOCK_M - 1) // BLOCK_M
        token_of_block = tl.program_id(0) // BLOCKS
        request = request_of_token(query_start_loc, num_reqs, token_of_block)
        row0 = token_of_block.to(tl.int64) * N + tl.program_id(0) % BLOCKS * BLOCK_M
        end_row = (token_of_block.to(tl.int64) + 1) * N
        is_real = request >= 0
    elif LONGEST:
        BLOCKS_OF_REQUEST: tl.constexpr = (LONGEST * N + BLOCK_M - 1) // BLOCK_M
        request = tl.program_id(0) // BLOCKS_OF_REQUEST
        is_real = request < num_reqs
    else:
        request, row0, end_row, _ = find_rows(tl.program_id(0), query_start_loc, num_reqs, num_tokens, BLOCK_M, N)
        is_real = request >= 0
    start = tl.load(query_start_loc + request, mask=is_real, other=0)
    end = tl.load(query_start_loc + request + 1, mask=is_real, other=0)
    first_partial = tl.zeros([], tl.int64)
    if SPARSE:
        if complete is not None:
            if tl.load(complete + request, mask=is_real & (end - start > LONGEST), other=0) > 0:
                return
    elif LONGEST:
        if (end - start > LONGEST) | (end - start <= SHORTEST):
            return
        row0 = start.to(tl.int64) * N + tl.program_id(0) % BLOCKS_OF_REQUEST * BLOCK_M
        end_row = end.to(tl.int64) * N
        first_partial = (request.to(tl.int64) * LONGEST - start) * N
    else:
        if SHORTEST:
            if end - start <= SHORTEST:
                return
    if row0 >= end_row:
        return
    row = row0.to(tl.int64) + tl.arange(0, BLOCK_M)
    known = row < end_row
    seq_len = tl.maximum(tl.load(seq_lens + request, mask=is_real, other=0), 0)
    limit = seq_len - (end - 1 - (row // N).to(tl.int32))
    limit = tl.where(known & is_real, limit, 0)
    num_keys = tl.minimum(tl.maximum(tl.max(limit, 0), 0), table_width * BLOCK_SIZE)

    latent_column = tl.arange(0, L_TILE)
    rope_column = tl.arange(0, R_TILE)
    rows = query + row * COLUMNS
    q = tl.load(rows[:, None] + latent_column[None, :], mask=known[:, None] & (latent_column < L)[None, :], other=0.0)
    q_rope = tl.load(
        rows[:, None] + L + rope_column[None, :], mask=known[:, None] & (rope_column < R)[None, :], other=0.0
    )
    factor = scale
    if q_scale is not None:
        q = decode(q, "fp8_e4m3", DTYPE, NATIVE_FP8)
        q_rope = decode(q_rope, "fp8_e4m3", DTYPE, NATIVE_FP8)
        factor = scale * tl.load(q_scale)
    else:
        q = cast(q, DTYPE)
        q_rope = cast(q_rope, DTYPE)
    value_factor = 1.0
    if k_scale is not None:
        value_factor = tl.load(k_scale)
        factor = factor * value_factor
    table = block_table + tl.maximum(request, 0).to(tl.int64) * table_stride

    entries = tl.where(num_keys > 0, topk, 0) if SPARSE else num_keys
    tiles = (entries + BLOCK_N - 1) // BLOCK_N
    per_split = (tiles + num_splits - 1) // num_splits
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, L_TILE], tl.float32)
    for tile in range(split * per_split, tl.minimum((split + 1) * per_split, tiles)):
        position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        if SPARSE:
            listed = topk_indices + tl.program_id(0).to(tl.int64) // BLOCKS * topk_stride + position
            position = tl.load(listed, mask=position < topk, other=-1)
        exists = (position >= 0) & (position < num_keys)
        position = tl.where(exists, position, 0)
        block = tl.load(table + position // BLOCK_SIZE, mask=exists, other=-1)
        exists = exists & (block >= 0) & (block < num_blocks)
        place = row_offset(tl.where(exists, block, 0), position % BLOCK_SIZE, STRIDES)
        key = cache + place
        latent = load_latents(key, exists, 0, L_TILE, L, R, FORMAT, DTYPE, NATIVE_FP8)
        rope = load_ropes(key, exists, R_TILE, L, R, FORMAT, DTYPE, NATIVE_FP8)
        scores = dot(q, tl.trans(latent), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        scores = dot(q_rope, tl.trans(rope), scores) * factor
        visible = exists[None, :] & (position[None, :] < limit[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - m_safe)
        weights = tl.exp2(scores - m_safe[:, None])
        total = total * alpha + tl.sum(weights, 1)
        acc = dot(cast(weights, DTYPE), latent, acc * alpha[:, None])
        m = m_new
    seen = total != 0.0
    acc = acc * tl.where(seen, value_factor / tl.where(seen, total, 1.0), 0.0)[:, None]
    log = tl.where(seen, m + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    inside = known[:, None] & (latent_column < L)[None, :]
    if SPLIT:
        place = (first_partial + row) * num_splits + split
        tl.store(partial_log + place, log, mask=known)
        tl.store(partial + place[:, None] * L + latent_column[None, :], acc, mask=inside & seen[:, None])
    else:
        tl.store(output + row[:, None] * L + latent_column[None, :], cast(acc, MODEL), mask=inside)
        if lse is not None:
            tl.store(lse + row, log * LN2, mask=known)


@triton.jit(do_not_specialize=["num_reqs", "num_splits"], do_not_specialize_on_alignment=["query_start_loc"])
def mla_merge_kernel(
    partial, partial_log, query_start_loc, output, lse, num_reqs, num_splits, N: tl.constexpr, L: tl.constexpr,
    L_TILE: tl.constexpr, MODEL: tl.constexpr, LONGEST: tl.constexpr, SHORTEST: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one row. Grid: rows; with LONGEST as many for every request. See `mla_attention_kernel`."""
    row = tl.program_id(0)
    target = row.to(tl.int64)
    if LONGEST:
        request = row // (LONGEST * N)
        start = tl.load(query_start_loc + request)
        length = tl.load(query_start_loc + request + 1) - start
        if (length > LONGEST) | (length <= SHORTEST) | (row % (LONGEST * N) >= length * N):
            return
        target = start.to(tl.int64) * N + row % (LONGEST * N)
    elif SHORTEST:
        request = request_of_token(query_start_loc, num_reqs, row // N)
        if request < 0:
            return
        if tl.load(query_start_loc + request + 1) - tl.load(query_start_loc + request) <= SHORTEST:
            return
    column = tl.arange(0, L_TILE)
    x, log = merge_columns(partial, partial_log, None, row, column, column < L, num_splits, 1, L)
    tl.store(output + target * L + column, cast(x, MODEL), mask=column < L)
    if lse is not None:
        tl.store(lse + target + column, log * LN2, mask=column == 0)


@triton.jit(do_not_specialize_on_alignment=["q_scale"])
def mla_query_kernel(
    latent, rope, output, q_scale, stride_lt, stride_lh, stride_rt, stride_rh,
    N: tl.constexpr, L: tl.constexpr, R: tl.constexpr, L_TILE: tl.constexpr, R_TILE: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    """Quantise one row of absorbed queries to bytes of e4m3, `[latent | rope]`. Grid: rows.

    `output` is `[T * N, L + R]`, `latent` `[T, N, L]`, `rope` `[T, N, R]`, both in the model dtype.
    """
    row = tl.program_id(0).to(tl.int64)
    token = row // N
    head = row % N
    scale = tl.load(q_scale)
    column = tl.arange(0, L_TILE)
    x = tl.load(latent + token * stride_lt + head * stride_lh + column, mask=column < L, other=0.0)
    codes = encode_quotient(x.to(tl.float32), tl.full([1], 0.0, tl.float32) + scale, "fp8_e4m3", NATIVE_FP8)
    tl.store(output + row * (L + R) + column, codes, mask=column < L)
    column = tl.arange(0, R_TILE)
    x = tl.load(rope + token * stride_rt + head * stride_rh + column, mask=column < R, other=0.0)
    codes = encode_quotient(x.to(tl.float32), tl.full([1], 0.0, tl.float32) + scale, "fp8_e4m3", NATIVE_FP8)
    tl.store(output + row * (L + R) + L + column, codes, mask=column < R)
