"""Expanded latent attention in Triton: keys and values of every head, made of cached rows a chunk at a time.

The keys of all long requests are laid end to end on a line, each request from a multiple of ALIGN on; a chunk is a
stretch of CHUNK places of the line. For every chunk one launch expands its rows into a workspace, and another attends
the rows of the requests that lie in it. Rows with keys in several chunks carry sums, maxima and denominators
from launch to launch in fp32. No length is read on the host: chunks past the end of the line have no work. Offsets and
lengths are those of `bounded_step`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.kernels.triton.attention.kernel import any_invalid_block, find_rows, softmax_step
from vattn.kernels.triton.common.codec import cast, dot
from vattn.kernels.triton.common.mask import LN2
from vattn.kernels.triton.mla.epilogue import store_columns
from vattn.kernels.triton.mla.kernels import request_of_token
from vattn.kernels.triton.mla.rows import load_latents, load_ropes, row_offset

REQUESTS = tl.constexpr(1024)
"""Requests that the line's kernel takes in one step."""


@triton.jit(
    do_not_specialize=["num_reqs", "most_keys"], do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "line"]
)
def mla_line_kernel(
    query_start_loc, seq_lens, complete, line, num_reqs, most_keys, LONGEST: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    """Write where each request begins on the line, and after the last one where the line ends. Grid: 1.

    With `complete` `[B]`, requests that are not complete have no place on it.
    """
    total = tl.zeros([], tl.int32)
    for first in range(0, num_reqs, REQUESTS):
        request = first + tl.arange(0, REQUESTS)
        inside = request < num_reqs
        start = tl.load(query_start_loc + request, mask=inside, other=0)
        end = tl.load(query_start_loc + request + 1, mask=inside, other=0)
        keys = tl.load(seq_lens + request, mask=inside, other=0)
        keys = tl.minimum(tl.maximum(keys, 0), most_keys)
        is_long = end - start > LONGEST
        if complete is not None:
            is_long = is_long & (tl.load(complete + request, mask=inside, other=0) > 0)
        room = tl.where(is_long, (keys + ALIGN - 1) // ALIGN * ALIGN, 0)
        tl.store(line + request, total + tl.cumsum(room, 0) - room, mask=inside)
        total += tl.sum(room, 0)
    tl.store(line + num_reqs, total)


@triton.jit(
    do_not_specialize=["num_reqs", "most_keys", "topk_stride", "topk"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "complete"],
)
def mla_complete_kernel(
    query_start_loc, seq_lens, topk_indices, complete, num_reqs, most_keys, topk_stride, topk, LONGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Clear `complete` of a long request if one of its rows does not list 0, 1, 2, ... up to itself. Grid: tokens."""
    token = tl.program_id(0)
    request = request_of_token(query_start_loc, num_reqs, token)
    if request < 0:
        return
    start = tl.load(query_start_loc + request)
    end = tl.load(query_start_loc + request + 1)
    if end - start <= LONGEST:
        return
    limit = tl.minimum(tl.load(seq_lens + request) - (end - 1 - token), most_keys)
    wrong = (limit > topk).to(tl.int32)
    row = topk_indices + token.to(tl.int64) * topk_stride
    for first in range(0, tl.where(wrong > 0, 0, limit), BLOCK):
        place = first + tl.arange(0, BLOCK)
        listed = tl.load(row + place, mask=place < limit, other=0)
        wrong += tl.sum(((place < limit) & (listed != place)).to(tl.int32), 0)
    if wrong > 0:
        # All programs that find a difference write the same value.
        tl.store(complete + request, 0)


@triton.jit
def request_of_place(line, num_reqs, place):
    """Return the last request that begins at or before a place of the line, which lies before its end."""
    low = tl.zeros([], tl.int32)
    high = low + num_reqs
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(line + middle)
        low = tl.where(first <= place, middle, low)
        high = tl.where(first <= place, high, middle)
    return low


@triton.jit(
    do_not_specialize=["first_place", "num_reqs", "num_blocks", "table_stride", "table_width"],
    do_not_specialize_on_alignment=["line", "seq_lens", "block_table", "k_scale"],
)
def mla_expand_kernel(
    cache, weight, line, seq_lens, block_table, k_scale, expanded, ropes, first_place, num_reqs, num_blocks,
    table_stride, table_width,
    L: tl.constexpr, R: tl.constexpr, R_TILE: tl.constexpr, L_STEP: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, ALIGN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    STRIDES: tl.constexpr, FORMAT: tl.constexpr, MODEL: tl.constexpr, NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    """Write keys and values of ALIGN places of a chunk. Grid: tiles of columns, stretches of ALIGN places.

    `weight` is `[WIDTH, L]`, `expanded` `[CHUNK, WIDTH]`, `ropes` `[CHUNK, R]`. Places without a key are zero.
    """
    place = first_place + tl.program_id(1) * ALIGN
    if place >= tl.load(line + num_reqs):
        return
    request = request_of_place(line, num_reqs, place)
    index = tl.arange(0, BLOCK_T)
    position = place - tl.load(line + request) + index
    keys = tl.minimum(tl.load(seq_lens + request), table_width * BLOCK_SIZE)
    exists = (position < keys) & (index < ALIGN)
    table = block_table + request.to(tl.int64) * table_stride
    block = tl.load(table + position // BLOCK_SIZE, mask=exists, other=-1)
    exists = exists & (block >= 0) & (block < num_blocks)
    row = cache + row_offset(tl.where(exists, block, 0), position % BLOCK_SIZE, STRIDES)
    scale = 1.0
    if k_scale is not None:
        scale = tl.load(k_scale)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, L_STEP)
    acc = tl.zeros([BLOCK_T, COLUMNS], tl.float32)
    for first in range(0, L, L_STEP):
        latent = load_latents(row, exists, first, L_STEP, L, R, FORMAT, MODEL, NATIVE_FP8)
        inner = first + step
        w = tl.load(weight + column[None, :].to(tl.int64) * L + inner[:, None],
                    mask=(column < WIDTH)[None, :] & (inner < L)[:, None], other=0.0)  # fmt: skip
        acc = dot(latent, w, acc)
    target = (tl.program_id(1) * ALIGN + index).to(tl.int64)
    stored = (index < ALIGN)[:, None]
    tl.store(expanded + target[:, None] * WIDTH + column[None, :], cast(acc * scale, MODEL),
             mask=stored & (column < WIDTH)[None, :])  # fmt: skip
    if tl.program_id(0) == 0:
        rope = load_ropes(row, exists, R_TILE, L, R, FORMAT, tl.float32, NATIVE_FP8) * scale
        rope_column = tl.arange(0, R_TILE)
        tl.store(ropes + target[:, None] * R + rope_column[None, :], cast(rope, MODEL),
                 mask=stored & (rope_column < R)[None, :])  # fmt: skip


@triton.jit
def load_part(rows, column, mask, WIDTH: tl.constexpr):
    """Return columns of rows; with `mask=None` all rows are read, and all columns where there are as many as WIDTH."""
    if mask is not None:
        return tl.load(rows[:, None] + column[None, :], mask=mask[:, None] & (column < WIDTH)[None, :], other=0.0)
    elif WIDTH == column.shape[0]:
        return tl.load(rows[:, None] + column[None, :])
    else:
        return tl.load(rows[:, None] + column[None, :], mask=(column < WIDTH)[None, :], other=0.0)


@triton.jit
def score_keys(
    q, q_rope, expanded, ropes, key, mask, P: tl.constexpr, P_TILE: tl.constexpr, R: tl.constexpr,
    R_TILE: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Return products `[rows, keys]` of queries and the keys of some rows of the workspace."""
    place = key.to(tl.int64)
    nope = load_part(expanded + place * ROW, tl.arange(0, P_TILE), mask, P)
    rope = load_part(ropes + place * R, tl.arange(0, R_TILE), mask, R)
    s = dot(q, tl.trans(nope), tl.zeros([q.shape[0], key.shape[0]], tl.float32))
    return dot(q_rope, tl.trans(rope), s)


@triton.jit(
    do_not_specialize=[
        "first_place", "num_places", "num_tokens", "num_reqs", "num_blocks", "table_stride", "table_width", "stride_br",
        "stride_bg",
    ],
    do_not_specialize_on_alignment=[
        "query_start_loc", "line", "seq_lens", "block_table", "output_scale", "output_block_scale",
    ],
)  # fmt: skip
def mla_prefill_kernel(
    query, expanded, ropes, line, query_start_loc, complete, seq_lens, block_table, output, output_block_scale,
    output_scale, lse, carry, carry_stats, first_place, num_places, num_tokens, num_reqs, num_blocks, table_stride,
    table_width, stride_qt, stride_qh, stride_ot, stride_oh, stride_br, stride_bg, scale,
    N: tl.constexpr, P: tl.constexpr, R: tl.constexpr, V: tl.constexpr, P_TILE: tl.constexpr, R_TILE: tl.constexpr,
    V_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, LONGEST: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CARRY: tl.constexpr, MODEL: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    """Attend BLOCK_M tokens of one head to a chunk of keys. Grid: tiles of tokens, heads.

    `query` is `[T, N, P + R]`; keys and values of a head are columns [0, P) and [P, P + V) of its part of a row of
    `expanded` `[CHUNK, N * (P + V)]`, rotated keys `ropes` `[CHUNK, R]`. The first chunk writes rows of padding. CARRY:
    there are several chunks; `carry` fp32 `[T, N, V]` and `carry_stats` `[T, N, 2]` are what one leaves to the next.
    `scale` includes log2(e).
    """
    ROW: tl.constexpr = N * (P + V)
    # Later tiles of a request see more keys: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    request, first, end, index = find_rows(tile, query_start_loc, num_reqs, num_tokens, BLOCK_M)
    is_real = request >= 0
    if first >= end:
        return
    if is_real & (end - (first - index) <= LONGEST):
        return
    if complete is not None:
        if tl.load(complete + request, mask=is_real, other=1) == 0:
            return
    token = first + tl.arange(0, BLOCK_M)
    known = token < end
    seq_len = tl.maximum(tl.load(seq_lens + request, mask=is_real, other=0), 0)
    keys = tl.minimum(seq_len, table_width * BLOCK_SIZE)
    real = token < tl.where(is_real, end, 0)
    limit = tl.where(real, seq_len - (end - 1 - token), 0)
    # Keys that some row of this tile sees, and those that each of them does.
    high = tl.minimum(tl.maximum(tl.max(limit, 0), 0), keys)
    low = tl.minimum(tl.maximum(seq_len - (end - 1 - first), 0), keys)
    origin = tl.load(line + request, mask=is_real, other=0)
    place = tl.where(high > 0, origin, 0)
    last_place = tl.where(high > 0, origin + high - 1, 0)
    end_place = first_place + num_places
    if (last_place < first_place) | (place >= end_place):
        return
    begin = tl.maximum(first_place - origin, 0)
    stop = tl.minimum(high, end_place - origin)
    stop = tl.where(high > 0, stop, 0)
    begin = tl.where(high > 0, begin, 0)

    wide = tl.arange(0, V_TILE)
    row = token.to(tl.int64) * N + head
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V_TILE], tl.float32)
    inside = known[:, None] & (wide < V)[None, :]
    if CARRY:
        if place < first_place:
            m = tl.load(carry_stats + row * 2, mask=known, other=float("-inf"))
            total = tl.load(carry_stats + row * 2 + 1, mask=known, other=0.0)
            acc = tl.load(carry + row[:, None] * V + wide[None, :], mask=inside, other=0.0)
    rows = query + token.to(tl.int64) * stride_qt + head * stride_qh
    q = load_part(rows, tl.arange(0, P_TILE), real, P)
    q_rope = load_part(rows + P, tl.arange(0, R_TILE), real, R)
    keys_of_head = expanded + head * (P + V)
    table = block_table + tl.maximum(request, 0).to(tl.int64) * table_stride
    n = tl.arange(0, BLOCK_N)
    shift = origin - first_place

    # Tiles that every row sees whole, then those that need a mask.
    full_end = tl.maximum(begin + (tl.minimum(low, stop) - begin) // BLOCK_N * BLOCK_N, begin)
    if any_invalid_block(table, begin, full_end, num_blocks, BLOCK_SIZE) > 0:
        full_end = begin
    for at in range(begin, full_end, BLOCK_N):
        key = shift + at + n
        s = score_keys(q, q_rope, keys_of_head, ropes, key, None, P, P_TILE, R, R_TILE, ROW) * scale
        v = load_part(keys_of_head + P + key.to(tl.int64) * ROW, wide, None, V)
        acc, m, total = softmax_step(s, v, acc, m, total)
    for at in range(full_end, stop, BLOCK_N):
        position = at + n
        exists = position < stop
        block = tl.load(table + position // BLOCK_SIZE, mask=exists, other=-1)
        visible = exists & (block >= 0) & (block < num_blocks)
        key = shift + position
        s = score_keys(q, q_rope, keys_of_head, ropes, key, exists, P, P_TILE, R, R_TILE, ROW) * scale
        s = tl.where(visible[None, :] & (position[None, :] < limit[:, None]), s, float("-inf"))
        v = load_part(keys_of_head + P + key.to(tl.int64) * ROW, wide, exists, V)
        acc, m, total = softmax_step(s, v, acc, m, total)

    if CARRY:
        if last_place >= end_place:
            tl.store(carry_stats + row * 2, m, mask=known)
            tl.store(carry_stats + row * 2 + 1, total, mask=known)
            tl.store(carry + row[:, None] * V + wide[None, :], acc, mask=inside)
            return
    seen = total != 0.0
    safe = tl.where(seen, total, 1.0)
    acc = acc * tl.where(seen, 1.0 / safe, 0.0)[:, None]
    if lse is not None:
        tl.store(lse + row, tl.where(seen, (m + tl.log2(safe)) * LN2, float("-inf")), mask=known)
    store_columns(acc, token, known, head, wide, output, output_block_scale, output_scale, stride_ot, stride_oh,
                  stride_br, stride_bg, V, MODEL, KIND, GROUPS, SCALE_COLUMNS, NATIVE_FP8)  # fmt: skip
