"""Device code of the fast decode path for Hopper: attention over chunks of a paged cache, and their reduction.

One CTA works on a chunk of one request and a few KV heads. Its warps are the batch dimension of every `tl.dot`, so a
warp owns a head and the loop exchanges nothing between warps. A tile is 16 tokens of one block: one tensor-map box
brings the keys of all heads of the CTA, another the values, whatever the cache's layout.

Scores are `Q K^T` with the query rows padded to 16. Rows 0 to 7 are kept, and the output is accumulated transposed,
`O^T += V^T P^T`: the layout in which the scores come out of the tensor cores is the one in which `P^T` goes back in, so
no value moves between threads. Groups of more than 8 query heads per KV head keep both halves.

An FP8 cache is read as int16, two columns at a time. `unpack_pairs` turns the pairs into fp16 within a thread; the
columns come out in a permuted order, which the query load and the output store follow.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.kernels.hopper.columns import padded_columns
from vattn.kernels.hopper.schedule import FIELDS
from vattn.kernels.triton.common.codec import INTERPRETED, cast, decode
from vattn.kernels.triton.common.epilogue import (
    absolute_maximum,
    group_codes,
    group_scales,
    load_scale,
    quantise_dynamic,
    store_group_row,
    store_rows,
)
from vattn.kernels.triton.common.mask import LN2, LOG2E

TILE_TOKENS = tl.constexpr(16)
QUERY_ROWS = tl.constexpr(8)
KEEP = tl.constexpr("evict_last")
"""Eviction policy of what every layer of a step reads: it stays in the L2 cache while weights stream through that."""

NATIVE_FP8 = tl.constexpr(not INTERPRETED.value)
"""Whether the hardware converts FP8: everywhere but in the interpreter."""

# The running maximum starts here instead of at -inf, so that the difference of two maxima is never NaN.
LOWEST_MAXIMUM = tl.constexpr(-1.0e30)

# FP16 queries against an FP8 cache are scaled down by this power of two: |q| up to 2**20 stays finite.
FP16_QUERY_SHRINK = tl.constexpr(0.0625)

UNPACK_KEYS = tl.constexpr(
    """
    {
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }
    """
)
"""PTX of `unpack_pairs` for keys, here and in Gluon: two pairs of codes, of columns next to each other, as fp16."""

UNPACK_VALUES = tl.constexpr(
    """
    {
    .reg .b32 sorted;
    .reg .b16 even, odd;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {even, odd}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
    }
    """
)
"""The same for values. A register holds a pair of columns of each of two tokens; its bytes are sorted by column."""


@triton.jit
def unpack_pairs(pairs, OF_KEYS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Turn int16 pairs of e4m3 codes `[..., W]` into two fp16 tensors `[..., W]` that hold all `2 W` columns.

    The first holds the even columns and the second the odd ones. With ASSEMBLY and OF_KEYS, column j of the first is
    column `4 (j // 2) + j % 2` and of the second that plus 2.
    """
    CODE: tl.constexpr = UNPACK_KEYS if OF_KEYS else UNPACK_VALUES
    if ASSEMBLY:
        return tl.inline_asm_elementwise(CODE, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    else:
        return decode_low_byte(pairs), decode_low_byte(pairs >> 8)


@triton.jit
def decode_low_byte(pairs):
    """Return the e4m3 value of the low byte of each int16, as fp16."""
    return decode((pairs & 0xFF).to(tl.uint8), "fp8_e4m3", tl.float16, False)


@triton.jit
def unpack_query(codes):
    """Convert e4m3 codes to fp16.

    Impure inline assembly hides the conversion from the compiler: it gives dot operands that come from 8-bit loads a
    layout in which ldmatrix cannot read the keys, which are multiplied in 16 bits.
    """
    return tl.inline_asm_elementwise(UNPACK_KEYS, "=r,=r,r", [codes], dtype=tl.float16, is_pure=False, pack=4)


@triton.jit
def load_query(
    query, rows, columns, row_mask, step, LOAD: tl.constexpr, SHRINK: tl.constexpr, NATIVE: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Load query rows `[heads, 16, columns]` as the dtype of the dot; padded rows are zero.

    LOAD: `query_load` of the config. Unless it is "plain", rows are rounded to e4m3 under the scales `step` `[heads]`.
    """
    loaded = tl.load(query + rows + columns[None, None, :], mask=row_mask, other=0.0)
    if LOAD != "plain":
        codes = quantise_dynamic(loaded.to(tl.float32), step[:, None, None], LOAD)
        loaded = decode(codes, "fp8_e4m3", tl.float16, NATIVE)
    elif NATIVE and loaded.dtype == tl.float8e4nv:
        loaded = unpack_query(loaded.to(tl.uint8, bitcast=True))
    if SHRINK:
        return (loaded.to(tl.float32) * FP16_QUERY_SHRINK).to(DTYPE)
    else:
        return loaded.to(DTYPE)


@triton.jit
def split_rows(scores, HEADS: tl.constexpr):
    """Split scores `[heads, 16, 16]` into rows 0 to 7 and rows 8 to 15, each `[heads, 8, 16]`, within each thread."""
    halves = scores.reshape(HEADS, 2, QUERY_ROWS, TILE_TOKENS).permute(0, 2, 3, 1)
    return halves.split()


@triton.jit
def tile_scores(
    keys, query_a, query_b, factor, soft_cap, visible, HEADS: tl.constexpr, FP8: tl.constexpr, ASSEMBLY: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Return the scores of one tile in units of log2 e, rows 0 to 7 and rows 8 to 15; hidden keys are -inf."""
    if FP8:
        keys_a, keys_b = unpack_pairs(keys, True, ASSEMBLY)
        scores = tl.dot(query_a, keys_a.permute(0, 2, 1))
        scores = tl.dot(query_b, keys_b.permute(0, 2, 1), scores)
    else:
        scores = tl.dot(query_a, keys.permute(0, 2, 1))
    low, high = split_rows(scores, HEADS)
    return (
        finish_scores(low, factor, soft_cap, visible, SOFT_CAP),
        finish_scores(high, factor, soft_cap, visible, SOFT_CAP),
    )


@triton.jit
def finish_scores(scores, factor, soft_cap, visible, SOFT_CAP: tl.constexpr):
    scores = scores * factor
    if SOFT_CAP:
        # factor makes this score / cap * 2 log2(e); tanh(x) = 1 - 2 / (exp(2x) + 1)
        scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    return tl.where(visible[None, None, :], scores, float("-inf"))


@triton.jit
def multiply_values(
    values, low, high, low_a, low_b, high_a, high_b, GROUP: tl.constexpr, FP8: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """Return the accumulators plus `V^T P^T`; the high rows' too for groups of more than 8."""
    if FP8:
        values_a, values_b = unpack_pairs(values, False, ASSEMBLY)
        values_a = values_a.permute(0, 2, 1)
        values_b = values_b.permute(0, 2, 1)
        low_a = tl.dot(values_a, low, low_a)
        low_b = tl.dot(values_b, low, low_b)
        if GROUP > 8:
            high_a = tl.dot(values_a, high, high_a)
            high_b = tl.dot(values_b, high, high_b)
    else:
        values_a = values.permute(0, 2, 1)
        low_a = tl.dot(values_a, low, low_a)
        if GROUP > 8:
            high_a = tl.dot(values_a, high, high_a)
    return low_a, low_b, high_a, high_b


@triton.jit
def add_values(
    low, high, values, first_token, begin, end, visible, low_a, low_b, high_a, high_b, GROUP: tl.constexpr,
    FP8: tl.constexpr, ASSEMBLY: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Add `V^T P^T` of one tile to the transposed accumulators `[heads, W, 8]`. Values of hidden tokens count as zero.

    Zeroing them costs a trip through shared memory, so tiles without hidden tokens take another branch.
    """
    low = low.to(DTYPE).permute(0, 2, 1)
    high = high.to(DTYPE).permute(0, 2, 1)
    if (first_token < begin) | (first_token + TILE_TOKENS > end):
        kept = tl.where(visible[None, :, None], values, 0)
        low_a, low_b, high_a, high_b = multiply_values(
            kept, low, high, low_a, low_b, high_a, high_b, GROUP, FP8, ASSEMBLY
        )
    else:
        low_a, low_b, high_a, high_b = multiply_values(
            values, low, high, low_a, low_b, high_a, high_b, GROUP, FP8, ASSEMBLY
        )
    return low_a, low_b, high_a, high_b


@triton.jit
def take_scores(maximum, total, acc_a, acc_b, scores, FP8: tl.constexpr):
    """Take a tile's scores into the online softmax of eight query rows; return their weights first.

    `total` `[heads, 8, 16]` keeps one partial sum per column of the tile; it is added up once, after the loop.
    """
    new_maximum = tl.maximum(maximum, tl.max(scores, 2))
    decay = tl.exp2(maximum - new_maximum)
    weights = tl.exp2(scores - new_maximum[:, :, None])
    total = total * decay[:, :, None] + weights
    acc_a = acc_a * decay[:, None, :]
    if FP8:
        acc_b = acc_b * decay[:, None, :]
    return weights, new_maximum, total, acc_a, acc_b


@triton.jit
def visible_end(page, num_blocks, end):
    """Return where visible keys end inside a tile of this block: 0, before every token, for a block id out of range."""
    return tl.where((page >= 0) & (page < num_blocks), end, 0)


@triton.jit
def take_sinks(maximum, total, sinks, head, mask, is_padding):
    """Take the sinks of heads into maxima and totals; return these, and by how much sums shrink."""
    decay = tl.full(maximum.shape, 1.0, tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=mask, other=0.0).to(tl.float32) * LOG2E
        sink = tl.where(is_padding, float("-inf"), sink)
        with_sink = tl.maximum(maximum, sink)
        decay = tl.exp2(maximum - with_sink)
        total = total * decay + tl.exp2(sink - with_sink)
        maximum = with_sink
    return maximum, total, decay


@triton.jit
def finish_rows(
    maximum, total, acc_a, acc_b, row, slot, is_padding, head0, value_factor, sinks, scale, output, block_scale, lse,
    partial_output, partial_stats, output_stride, scale_stride, group_stride, FIRST: tl.constexpr, HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr, FP8: tl.constexpr, MODEL: tl.constexpr, OUTPUT: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Write query rows FIRST to FIRST + 7 of each head: the result, or a partial one when the request is split."""
    kv_head = head0 + tl.arange(0, HEADS)
    in_group = FIRST + tl.arange(0, QUERY_ROWS)
    head = kv_head[:, None] * GROUP + in_group[None, :]
    mask = (kv_head < NUM_KV_HEADS)[:, None] & (in_group < GROUP)[None, :]
    STEP: tl.constexpr = 2 if FP8 else 1
    column = STEP * tl.arange(0, WIDTH)[None, :, None]
    columns = head[:, None, :] * HEAD_SIZE + column
    column_mask = mask[:, None, :]
    if HEAD_SIZE < STEP * WIDTH:
        column_mask = column_mask & (column < HEAD_SIZE)
    total = tl.sum(total, 2)
    if slot >= 0:
        stats = partial_stats + (slot.to(tl.int64) * NUM_HEADS + head) * 2
        tl.store(stats, maximum, mask=mask)
        tl.store(stats + 1, total, mask=mask)
        partial = partial_output + slot.to(tl.int64) * (NUM_HEADS * HEAD_SIZE)
        store_columns(partial + columns, acc_a, acc_b, column_mask, None, FP8, MODEL, "partial")
    else:
        maximum, total, decay = take_sinks(maximum, total, sinks, head, mask, is_padding)
        norm = decay * value_factor[:, None] / tl.where(total == 0.0, 1.0, total)
        acc_a = acc_a * norm[:, None, :]
        if FP8:
            acc_b = acc_b * norm[:, None, :]
        start = output + row.to(tl.int64) * output_stride
        if GROUPS[0] > 0:
            scales = block_scale + row.to(tl.int64) * scale_stride
            store_groups(
                start, scales, acc_a, acc_b, head, mask, scale, group_stride, HEADS, HEAD_SIZE, WIDTH, FP8, MODEL,
                GROUPS,
            )  # fmt: skip
        else:
            store_columns(start + columns, acc_a, acc_b, column_mask, scale, FP8, MODEL, OUTPUT)
        if lse is not None:
            log = LN2 * (maximum + tl.log2(total))
            tl.store(lse + row.to(tl.int64) * NUM_HEADS + head, log, mask=mask)


@triton.jit
def store_columns(pointers, even, odd, mask, scale, FP8: tl.constexpr, MODEL: tl.constexpr, OUTPUT: tl.constexpr):
    """Store transposed results `[heads, W, 8]`: all columns, or the even and the odd ones of an FP8 cache's values.

    `mask` `[heads, W or 1, 8]`.
    """
    store_rows(pointers, even, mask, scale, MODEL, OUTPUT)
    if FP8:
        store_rows(pointers + 1, odd, mask, scale, MODEL, OUTPUT)


@triton.jit
def store_groups(
    output, scales, even, odd, head, mask, scale, group_stride, HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr, FP8: tl.constexpr, MODEL: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Quantise results as `store_columns` gets them with one scale per group; store codes and scales."""
    STEP: tl.constexpr = 2 if FP8 else 1
    PER_GROUP: tl.constexpr = GROUPS[0] // STEP
    COUNT: tl.constexpr = WIDTH // PER_GROUP
    SHAPE: tl.constexpr = [HEADS, COUNT, PER_GROUP, QUERY_ROWS]
    first = tl.reshape(cast(even, MODEL).to(tl.float32), SHAPE)
    second = first
    largest = absolute_maximum(first, 2)
    if FP8:
        second = tl.reshape(cast(odd, MODEL).to(tl.float32), SHAPE)
        other = absolute_maximum(second, 2)
        nan = (largest != largest) | (other != other)
        largest = tl.where(nan, float("nan"), tl.maximum(largest, other))
    stored, step = group_scales(largest, scale, GROUPS, NATIVE_FP8)
    group = head[:, None, :] * COUNT + tl.arange(0, COUNT)[None, :, None]
    tl.store(scales + group.to(tl.int64) * group_stride, stored, mask=mask[:, None, :])
    step = tl.expand_dims(step, 2)
    codes = tl.reshape(group_codes(first, step, GROUPS, NATIVE_FP8), [HEADS, WIDTH, QUERY_ROWS])
    if FP8:
        others = tl.reshape(group_codes(second, step, GROUPS, NATIVE_FP8), [HEADS, WIDTH, QUERY_ROWS])
    if GROUPS[1]:
        if FP8:
            pairs = (codes | (others << 4)).to(tl.uint8)
        else:
            nibbles = tl.reshape(codes, [HEADS, WIDTH // 2, 2, QUERY_ROWS])
            pairs = tl.sum(nibbles << (4 * tl.arange(0, 2))[None, None, :, None], axis=2).to(tl.uint8)
        byte = tl.arange(0, HEAD_SIZE // 2)
        tl.store(output + head[:, None, :] * (HEAD_SIZE // 2) + byte[None, :, None], pairs, mask=mask[:, None, :])
    else:
        columns = head[:, None, :] * HEAD_SIZE + STEP * tl.arange(0, WIDTH)[None, :, None]
        tl.store(output + columns, codes, mask=mask[:, None, :])
        if FP8:
            tl.store(output + columns + 1, others, mask=mask[:, None, :])


@triton.jit
def operand_columns(WIDTH: tl.constexpr, FP8: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return the query columns at `[WIDTH]` of its two operands; with an FP8 cache each operand holds half."""
    column = tl.arange(0, WIDTH)
    if FP8 and ASSEMBLY:
        column_a = 4 * (column // 2) + column % 2
        column_b = column_a + 2
    elif FP8:
        column_a = 2 * column
        column_b = column_a + 1
    else:
        column_a = column
        column_b = column
    return column_a, column_b


@triton.jit
def scale_factors(
    q_scale, k_scale, v_scale, score_scale, kv_head, kv_head_mask, HEADS: tl.constexpr, QUERY_SCALE: tl.constexpr,
    KV_SCALE: tl.constexpr,
):  # fmt: skip
    """Return scales of queries, factors of scores and scales of values, fp32 `[HEADS]`; kinds as in `decode_kernel`."""
    value_factor = tl.full([HEADS], 1.0, tl.float32)
    query_step = tl.full([HEADS], 1.0, tl.float32)
    if QUERY_SCALE == 1:
        query_step *= tl.load(q_scale, eviction_policy=KEEP)
    if QUERY_SCALE == 2:
        query_step *= tl.load(q_scale + kv_head, mask=kv_head_mask, other=1.0, eviction_policy=KEEP)
    score_factor = query_step * score_scale
    if KV_SCALE == 1:
        score_factor *= tl.load(k_scale, eviction_policy=KEEP)
        value_factor *= tl.load(v_scale, eviction_policy=KEEP)
    if KV_SCALE == 2:
        score_factor *= tl.load(k_scale + kv_head, mask=kv_head_mask, other=1.0, eviction_policy=KEEP)
        value_factor *= tl.load(v_scale + kv_head, mask=kv_head_mask, other=1.0, eviction_policy=KEEP)
    return query_step, score_factor, value_factor


@triton.jit
def load_item(schedule, cta, item, ctas, POLICY: tl.constexpr = KEEP):
    """Return request, first row, rows, seq_len, first tile, end tile and slot of an item; next CTA and item (-1: none).

    A grid smaller than the schedule was made for takes on the items of the CTAs that it lacks.
    """
    record = schedule + (item + 1) * FIELDS
    request = tl.load(record, eviction_policy=POLICY)
    first_row = tl.load(record + 1, eviction_policy=POLICY)
    active = tl.load(schedule, eviction_policy=POLICY)
    has_work = cta < active
    # Without work the record is garbage; the loads do not wait for each other.
    num_rows = tl.where(has_work, tl.load(record + 2, eviction_policy=POLICY), 0)
    seq_len = tl.load(record + 3, eviction_policy=POLICY)
    item_begin = tl.load(record + 4, eviction_policy=POLICY)
    item_end = tl.load(record + 5, eviction_policy=POLICY)
    slot = tl.load(record + 6, eviction_policy=POLICY)
    item = tl.where(has_work, tl.load(record + 7, eviction_policy=POLICY), -1)
    cta = tl.where(item < 0, cta + ctas, cta)
    item = tl.where((item < 0) & (cta < active), cta, item)
    return request, first_row, num_rows, seq_len, item_begin, item_end, slot, cta, item


@triton.jit(do_not_specialize=["scale_stride", "group_stride"])
def decode_kernel(
    query, key_boxes, value_boxes, block_table, schedule, output, block_scale, lse, partial_output, partial_stats,
    q_scale, k_scale, v_scale, sinks, output_scale, query_stride, query_head_stride, output_stride, scale_stride,
    group_stride, table_stride, table_width, num_blocks, score_scale, soft_cap,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, FP8: tl.constexpr, ASSEMBLY: tl.constexpr,
    QUERY_SCALE: tl.constexpr, QUERY_LOAD: tl.constexpr, KV_SCALE: tl.constexpr, SOFT_CAP: tl.constexpr,
    MODEL: tl.constexpr, DTYPE: tl.constexpr, OUTPUT: tl.constexpr, GROUPS: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attend the rows of the schedule's items; grid: items at a time x groups of HEADS KV heads, the groups fastest.

    An item is a range of tiles of one request. A request of one row may be split over items, whose partial results go
    to `partial_*`; a request of several rows is one item, which walks through the rows one after the other.
    QUERY_SCALE and KV_SCALE: 0 none, 1 one value, 2 one value per KV head. WINDOW 0: none. OVERLAP: launched while the
    kernel before may still run, so wait for it first, or at the end if it is "end".
    """
    tl.extra.cuda.gdc_launch_dependents()
    if OVERLAP and OVERLAP != "end":
        tl.extra.cuda.gdc_wait()
    HEAD_GROUPS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    WIDTH: tl.constexpr = padded_columns(HEAD_SIZE) // 2 if FP8 else padded_columns(HEAD_SIZE)
    TILES_PER_BLOCK: tl.constexpr = BLOCK_SIZE // TILE_TOKENS
    head0 = (tl.program_id(0) % HEAD_GROUPS) * HEADS
    kv_head = head0 + tl.arange(0, HEADS)
    kv_head_mask = kv_head < NUM_KV_HEADS
    in_group = tl.arange(0, 2 * QUERY_ROWS)
    query_mask = kv_head_mask[:, None, None] & (in_group < GROUP)[None, :, None]
    column_a, column_b = operand_columns(WIDTH, FP8, ASSEMBLY)
    query_mask_a = query_mask
    query_mask_b = query_mask
    if HEAD_SIZE < padded_columns(HEAD_SIZE):
        query_mask_a = query_mask & (column_a < HEAD_SIZE)[None, None, :]
        query_mask_b = query_mask & (column_b < HEAD_SIZE)[None, None, :]
    query_step, score_factor, value_factor = scale_factors(
        q_scale, k_scale, v_scale, score_scale, kv_head, kv_head_mask, HEADS, QUERY_SCALE, KV_SCALE
    )
    factor = score_factor[:, None, None]
    scale = load_scale(output_scale)

    cta = tl.program_id(0) // HEAD_GROUPS
    item = cta
    while item >= 0:
        request, first_row, num_rows, seq_len, item_begin, item_end, slot, cta, item = load_item(
            schedule, cta, item, tl.num_programs(0) // HEAD_GROUPS
        )
        table = block_table + request.to(tl.int64) * table_stride
        for row_of_request in range(0, num_rows):
            row = first_row + row_of_request
            end = seq_len - num_rows + 1 + row_of_request
            begin = tl.maximum(end - WINDOW, 0) if WINDOW else 0
            first_tile = tl.maximum(item_begin, begin // TILE_TOKENS)
            last_tile = tl.minimum(item_end, (end + TILE_TOKENS - 1) // TILE_TOKENS)
            last_tile = tl.minimum(last_tile, table_width * TILES_PER_BLOCK)
            page = tl.load(
                table + first_tile // TILES_PER_BLOCK, mask=first_tile < last_tile, other=-1, eviction_policy=KEEP
            )
            query_head = kv_head[:, None, None] * GROUP + in_group[None, :, None]
            rows = row.to(tl.int64) * query_stride + query_head * query_head_stride
            query_a = load_query(query, rows, column_a, query_mask_a, query_step, QUERY_LOAD, FP8, ASSEMBLY, DTYPE)
            query_b = query_a
            if FP8:
                query_b = load_query(query, rows, column_b, query_mask_b, query_step, QUERY_LOAD, FP8, ASSEMBLY, DTYPE)

            low_maximum = tl.full([HEADS, QUERY_ROWS], LOWEST_MAXIMUM, tl.float32)
            low_total = tl.zeros([HEADS, QUERY_ROWS, TILE_TOKENS], tl.float32)
            low_a = tl.zeros([HEADS, WIDTH, QUERY_ROWS], tl.float32)
            low_b = low_a
            high_maximum = low_maximum
            high_total = low_total
            high_a = low_a
            high_b = low_a
            for tile in tl.range(first_tile, last_tile, num_stages=STAGES):
                next_page = tl.load(
                    table + tl.minimum(tile + 1, last_tile - 1) // TILES_PER_BLOCK, eviction_policy=KEEP
                )
                token0 = tile * TILE_TOKENS
                inside = (tile % TILES_PER_BLOCK) * TILE_TOKENS
                keys = key_boxes.load([page, head0, inside, 0]).reshape(HEADS, TILE_TOKENS, WIDTH)
                values = value_boxes.load([page, head0, inside, 0]).reshape(HEADS, TILE_TOKENS, WIDTH)
                tile_end = visible_end(page, num_blocks, end)
                page = next_page
                token = token0 + tl.arange(0, TILE_TOKENS)
                visible = (token >= begin) & (token < tile_end)
                low, high = tile_scores(
                    keys, query_a, query_b, factor, soft_cap, visible, HEADS, FP8, ASSEMBLY, SOFT_CAP
                )
                low, low_maximum, low_total, low_a, low_b = take_scores(low_maximum, low_total, low_a, low_b, low, FP8)
                if GROUP > 8:
                    high, high_maximum, high_total, high_a, high_b = take_scores(
                        high_maximum, high_total, high_a, high_b, high, FP8
                    )
                low_a, low_b, high_a, high_b = add_values(
                    low, high, values, token0, begin, tile_end, visible, low_a, low_b, high_a, high_b, GROUP, FP8,
                    ASSEMBLY, DTYPE,
                )  # fmt: skip
            finish_rows(
                low_maximum, low_total, low_a, low_b, row, slot, request < 0, head0, value_factor, sinks, scale,
                output, block_scale, lse, partial_output, partial_stats, output_stride, scale_stride, group_stride, 0,
                HEADS, NUM_HEADS, NUM_KV_HEADS, GROUP, HEAD_SIZE, WIDTH, FP8, MODEL, OUTPUT, GROUPS,
            )  # fmt: skip
            if GROUP > 8:
                finish_rows(
                    high_maximum, high_total, high_a, high_b, row, slot, request < 0, head0, value_factor, sinks,
                    scale, output, block_scale, lse, partial_output, partial_stats, output_stride, scale_stride,
                    group_stride, 8, HEADS, NUM_HEADS, NUM_KV_HEADS, GROUP, HEAD_SIZE, WIDTH, FP8, MODEL, OUTPUT,
                    GROUPS,
                )  # fmt: skip
    if OVERLAP == "end":
        # The next kernel relies on both kernels having ended when this one has.
        tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize=["scale_stride", "group_stride", "max_items", "num_tokens"])
def reduce_kernel(
    schedule, sinks, v_scale, output_scale, output, block_scale, lse, partial_output, partial_stats, output_stride,
    scale_stride, group_stride, max_items, num_tokens, TOKENS: tl.constexpr, NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
    KV_SCALE: tl.constexpr, MODEL: tl.constexpr, OUTPUT: tl.constexpr, GROUPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of split requests; programs walk over (split row, head, COLUMNS of the head).

    Partial results are of TOKENS rows each. If these are several, rows of padding are written here as well.
    OVERLAP: the main kernel may have been launched before the kernel ahead of it had ended, and so may this one.
    """
    tl.extra.cuda.gdc_launch_dependents()
    if OVERLAP:
        # What that kernel wrote (a schedule, scales) is there once the main kernel is done, and not before.
        tl.extra.cuda.gdc_wait()
    num_splits = tl.load(schedule + 1, eviction_policy=KEEP)
    PARTS: tl.constexpr = padded_columns(HEAD_SIZE) // COLUMNS
    splits = schedule + (max_items + 1) * FIELDS
    split_rows = num_splits * TOKENS
    num_rows = split_rows
    first_padding = 0
    if TOKENS > 1:
        first_padding = tl.load(schedule + 2, eviction_policy=KEEP)
        num_rows += tl.maximum(num_tokens - first_padding, 0) + tl.load(schedule + 3, eviction_policy=KEEP)
    for work in range(tl.program_id(0), num_rows * (NUM_HEADS * PARTS), tl.num_programs(0)):
        column = (work % PARTS) * COLUMNS + tl.arange(0, COLUMNS)
        head = (work // PARTS) % NUM_HEADS
        index = work // (PARTS * NUM_HEADS)
        is_padding = index >= split_rows
        record = splits + tl.where(is_padding, 0, index // TOKENS) * FIELDS
        first_slot = tl.load(record + 1, eviction_policy=KEEP)
        end_slot = first_slot + tl.where(is_padding, 0, tl.load(record + 2, eviction_policy=KEEP))
        # Past the rows of a request its last one is written again.
        token = tl.minimum(index % TOKENS, tl.load(record + 3, eviction_policy=KEEP) - 1)
        # Rows before the first request follow the last row.
        unused = first_padding + index - split_rows
        unused = tl.where(unused < num_tokens, unused, unused - num_tokens)
        row = tl.where(is_padding, unused, tl.load(record, eviction_policy=KEEP) + token)
        factor = 1.0
        if KV_SCALE == 1:
            factor = tl.load(v_scale, eviction_policy=KEEP)
        if KV_SCALE == 2:
            factor = tl.load(v_scale + head // (NUM_HEADS // NUM_KV_HEADS), eviction_policy=KEEP)
        sink = float("-inf")
        if sinks is not None:
            sink = tl.where(is_padding, float("-inf"), tl.load(sinks + head).to(tl.float32) * LOG2E)
        # A load that waited too would end the kernel later: the scale comes from memory, partial results from L2.
        scale = load_scale(output_scale)
        # Without overlap all this is older than the main kernel, and only what follows has to wait for that.
        tl.extra.cuda.gdc_wait()
        maximum = tl.maximum(sink, LOWEST_MAXIMUM)
        total = tl.exp2(sink - maximum)
        acc = tl.zeros([COLUMNS], tl.float32)
        for start in tl.range(first_slot, end_slot, SPLITS):
            slot = start + tl.arange(0, SPLITS)
            present = slot < end_slot
            partial = (slot.to(tl.int64) * TOKENS + token) * NUM_HEADS + head
            part_maximum = tl.load(partial_stats + partial * 2, mask=present, other=LOWEST_MAXIMUM)
            part_total = tl.load(partial_stats + partial * 2 + 1, mask=present, other=0.0)
            part_mask = present[:, None]
            if HEAD_SIZE < PARTS * COLUMNS:
                part_mask = part_mask & (column < HEAD_SIZE)[None, :]
            part = tl.load(partial_output + partial[:, None] * HEAD_SIZE + column[None, :], mask=part_mask, other=0.0)
            new_maximum = tl.maximum(maximum, tl.max(part_maximum, 0))
            weight = tl.exp2(part_maximum - new_maximum)
            decay = tl.exp2(maximum - new_maximum)
            total = total * decay + tl.sum(part_total * weight, 0)
            acc = acc * decay + tl.sum(part * weight[:, None], 0)
            maximum = new_maximum
        norm = factor / tl.where(total == 0.0, 1.0, total)
        start = output + row.to(tl.int64) * output_stride
        if GROUPS[0] > 0:
            first = head * HEAD_SIZE + (work % PARTS) * COLUMNS
            scales = block_scale + row.to(tl.int64) * scale_stride + (first // GROUPS[0]).to(tl.int64) * group_stride
            codes = start + (first // 2 if GROUPS[1] else first)
            store_group_row(codes, scales, acc * norm, scale, group_stride, COLUMNS, MODEL, GROUPS, NATIVE_FP8)
        else:
            pointers = start + head * HEAD_SIZE + column
            store_rows(pointers, acc * norm, column < HEAD_SIZE, scale, MODEL, OUTPUT)
        if lse is not None:
            if work % PARTS == 0:
                tl.store(lse + row.to(tl.int64) * NUM_HEADS + head, LN2 * (maximum + tl.log2(total)))
    # Also without work: a grid that ends early would let the next kernel start before the main one has ended.
    tl.extra.cuda.gdc_wait()
