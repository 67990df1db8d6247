"""Device code of the fast decode path for packed KV formats on Hopper; see `decode.triton_kernel` for the tiling.

`codes` makes operands of codes. Scales of a token stay out of the products. Scales of keys multiply the scores.
Scales of values move into the weights, which would exceed the range of fp16. So, with `u = score + L(scale)`, where L
is a logarithm read off the bits of a float, never above the true one and less than 0.09 below, and with the running
maximum m of u, the denominator adds `exp2(score - m)` and a value gets that times its scale as its weight, which is
below 2^14.1. What zero points and least values add is the same for all columns of a row and joins the sums at the end.

The budget: an H200 reads about 4.6 TB/s, 20 bytes a clock and multiprocessor, so that a tile of 16 tokens of one head
of 128 arrives every 207 clocks in FP8 and every 107 in four bits. A multiprocessor has 4 issue slots a clock, half as
many for logic and permutes: 830 and 430 instructions of a warp, of which 24 are the products, 32 rescale the sums and
about 100 are the softmax and the loop.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.kernels.hopper.decode.triton_kernel import (
    LOWEST_MAXIMUM,
    QUERY_ROWS,
    TILE_TOKENS,
    load_item,
    split_rows,
    take_sinks,
    visible_end,
)
from vattn.kernels.hopper.decode_packed.codes import (
    INTEGER_UNIT,
    is_integer,
    join_columns,
    split_query,
    unit_of,
    unpack,
)
from vattn.kernels.hopper.decode_packed.codes_3bit import (
    first_bits,
    is_short,
    join_short_columns,
    key_unit,
    load_following,
    row_width,
    short_centroids,
    short_parts,
    split_short_query,
)
from vattn.kernels.hopper.decode_packed.codes_e2m1 import scale_selectors, unpack_e2m1
from vattn.kernels.triton.common.epilogue import load_scale, store_rows
from vattn.kernels.triton.common.hadamard import rotate_back, rotate_query
from vattn.kernels.triton.common.mask import LN2

LEAST_STEP = tl.constexpr(2.0**-25)
"""Below every fp16 step but zero, whose codes are zeros."""

LARGEST_QUERY = tl.constexpr(2.0**14)
"""Query rows are multiplied by a power of two that brings their largest magnitude to this or up to twice as much."""

LOG_OFFSET = tl.constexpr(127.0 + 14.0)
"""Of `L`: the exponent's bias, and the power of two that the largest weights may have."""


@triton.jit
def fit_rows(rows):
    """Bring fp32 rows `[n, D]` into the range of fp16 by powers of two; return them and what undoes that, `[n]`."""
    bits = tl.max(tl.abs(rows), axis=1).to(tl.uint32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 0x01000000), 0x7E000000)
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    rows = rows * inverse[:, None] * LARGEST_QUERY
    return rows.to(tl.float16), bits.to(tl.float32, bitcast=True) * (1.0 / LARGEST_QUERY)


@triton.jit
def low_rows(x, HEADS: tl.constexpr):
    """Return rows 0 to 7 of each head of `[heads * 16]`, as `[heads, 8]`."""
    low, _ = tl.split(tl.permute(tl.reshape(x, [HEADS, 2, QUERY_ROWS]), (0, 2, 1)))
    return low


@triton.jit
def place_words(scales, token, kv_head, STRIDES: tl.constexpr):
    """Return pointers to the words of 32 bits in the first block that hold the scales of a token, or begin to.

    STRIDES of block, token and head are in bytes.
    """
    offset = token * STRIDES[1] + kv_head * STRIDES[2]
    return scales.to(tl.pointer_type(tl.int32), bitcast=True) + offset // 4


@triton.jit
def start_of_block(page, num_blocks, STRIDES: tl.constexpr):
    """Return the offset of a block's scales in words, that of some block or other for a bad id."""
    return tl.where((page >= 0) & (page < num_blocks), page, 0).to(tl.int64) * (STRIDES[0] // 4)


@triton.jit
def load_words(
    key_scales, value_scales, page, num_blocks, inside, kv_head, KEY_STRIDES: tl.constexpr, VALUE_STRIDES: tl.constexpr
):
    """Return the scales of keys and of values of a tile as int32 `[heads, 16]`; some or other for a bad block id.

    One load for both: as many words as there are threads, it becomes one asynchronous copy of each.
    """
    which = tl.arange(0, 2)[None, :, None]
    token = (inside + tl.arange(0, TILE_TOKENS))[None, None, :]
    head = kv_head[:, None, None]
    places = place_words(value_scales, token, head, VALUE_STRIDES) + tl.zeros([1, 2, 1], tl.int32)
    if key_scales is not None:
        places = tl.where(which == 0, place_words(key_scales, token, head, KEY_STRIDES), places)
    # Blocks are as far apart for both.
    both = tl.load(places + start_of_block(page, num_blocks, VALUE_STRIDES))
    return tl.split(tl.permute(both, (0, 2, 1)))


@triton.jit
def load_block_scales(scales, page, num_blocks, inside, kv_head, COUNT: tl.constexpr, STRIDES: tl.constexpr):
    """Return the e4m3 scales of a tile, four in an int32, `[heads, 16, COUNT]`; some or other for a bad block id.

    Keys and values are loaded apart, for the reason that `scale_selectors` gives.
    """
    token = (inside + tl.arange(0, TILE_TOKENS))[None, :, None]
    places = place_words(scales, token, kv_head[:, None, None], STRIDES) + tl.arange(0, COUNT)[None, None, :]
    return tl.load(places + start_of_block(page, num_blocks, STRIDES))


@triton.jit
def low_half(words):
    """Return the lower 16 bits as fp16, in fp32."""
    return words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def given_scale(scale, kv_head, KIND: tl.constexpr):
    """Return the scale that a caller gave for each of `kv_head`, ones without."""
    if KIND == 1:
        return tl.full(kv_head.shape, 1.0, tl.float32) * tl.load(scale)
    elif KIND == 2:
        return tl.load(scale + kv_head)
    else:
        return tl.full(kv_head.shape, 1.0, tl.float32)


@triton.jit
def key_scores(
    keys, following, query, query_sum, row_factor, words, shift, selectors, CODEC: tl.constexpr, COUNT: tl.constexpr,
    HEADS: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Return scores `[heads, 8, 16]` of one tile.

    query: what `split_query` or `split_short_query` returns; `row_factor` undoes all that it carries. words: scales of
    the tile, to be shifted if they are halves of words.
    """
    if CODEC == "nvfp4":
        parts = unpack_e2m1(keys, words, selectors, True, ASSEMBLY)
    elif is_short(COUNT):
        parts = short_centroids(keys, following, selectors, ASSEMBLY)
    else:
        parts = unpack(keys, CODEC, True, ASSEMBLY)
    scores = tl.dot(query[0], parts[0].permute(0, 2, 1))
    scores = tl.dot(query[1], parts[1].permute(0, 2, 1), scores)
    if is_short(COUNT):
        scores = tl.dot(query[4], parts[4].permute(0, 2, 1), scores)
        scores = tl.dot(query[5], parts[5].permute(0, 2, 1), scores)
    if COUNT >= 4:
        scores = tl.dot(query[2], parts[2].permute(0, 2, 1), scores)
        scores = tl.dot(query[3], parts[3].permute(0, 2, 1), scores)
    low, _ = split_rows(scores, HEADS)
    if CODEC == "int8":
        low = low - query_sum[:, :, None] * 128.0
    if CODEC == "int4":
        low = low - query_sum[:, :, None] * (words & 15).to(tl.float32)[:, None, :]
    factor = row_factor[:, :, None]
    if CODEC == "codebook":
        factor = factor * low_half(words >> shift)[:, None, :]
    elif CODEC != "e4m3" and CODEC != "nvfp4":
        # A zero point in the lowest bits of a scale changes it by 2e-6 of itself at most.
        factor = factor * words.to(tl.float32, bitcast=True)[:, None, :]
    return low * factor


@triton.jit
def value_step(words, CODEC: tl.constexpr, HEADS: tl.constexpr):
    """Return what codes of values are multiplied by, fp32 `[heads, 16]`."""
    if CODEC == "uniform":
        step = low_half(words)
        return tl.where(step < LEAST_STEP, LEAST_STEP, step)
    elif CODEC == "nvfp4":
        # The codes have been multiplied by their scales.
        return tl.full([HEADS, TILE_TOKENS], 1.0, tl.float32)
    else:
        return words.to(tl.float32, bitcast=True)


@triton.jit
def logarithm(step):
    """Return what `L` of the module says."""
    return step.to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-23 - LOG_OFFSET


@triton.jit
def add_offset(offset, words, plain, weights, CODEC: tl.constexpr):
    """Add what a tile's values hold beside codes times steps, weighted, to `[heads, 8, 16]`."""
    if CODEC == "uniform":
        offset += plain * low_half(words >> 16)[:, None, :]
    # Otherwise with the weights as they are rounded for the product, so that rounding does not meet a raise.
    if CODEC == "int8":
        offset -= weights.to(tl.float32) * 128.0
    if CODEC == "int4":
        offset -= weights.to(tl.float32) * (words & 15).to(tl.float32)[:, None, :]
    return offset


@triton.jit
def multiply_values(
    values, words, selectors, weights, sums, CODEC: tl.constexpr, COUNT: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """Return the transposed sums plus `V^T P^T` of one tile."""
    a, b, c, d, e, f = sums
    weights = weights.permute(0, 2, 1)
    if CODEC == "nvfp4":
        v0, v1, v2, v3 = unpack_e2m1(values, words, selectors, False, ASSEMBLY)
    elif is_short(COUNT):
        v0, v1, v2, v3, v4, v5 = short_parts(values, selectors, ASSEMBLY)
        e = tl.dot(v4.permute(0, 2, 1), weights, e)
        f = tl.dot(v5.permute(0, 2, 1), weights, f)
    else:
        v0, v1, v2, v3 = unpack(values, CODEC, False, ASSEMBLY)
    a = tl.dot(v0.permute(0, 2, 1), weights, a)
    b = tl.dot(v1.permute(0, 2, 1), weights, b)
    if COUNT >= 4:
        c = tl.dot(v2.permute(0, 2, 1), weights, c)
        d = tl.dot(v3.permute(0, 2, 1), weights, d)
    return a, b, c, d, e, f


@triton.jit
def is_partly_hidden(tile, begin, tile_end):
    """Return whether a row may not see some tokens of a tile."""
    return (tile * TILE_TOKENS < begin) | (tile * TILE_TOKENS + TILE_TOKENS > tile_end)


@triton.jit
def visible_tokens(tile, begin, tile_end):
    """Return which tokens of a tile a row sees, `[16]`."""
    token = tile * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    return (token >= begin) & (token < tile_end)


@triton.jit
def mask_tile(scores, value_words, tile, begin, tile_end, soft_cap, SOFT_CAP: tl.constexpr, VALUE_CODEC: tl.constexpr):
    """Cap scores, hide tokens, and give hidden ones harmless scales: theirs may be NaN. `add_tile` does for nvfp4."""
    if SOFT_CAP:
        # What they are multiplied by makes them score / cap * 2 log2(e): tanh(x) = 1 - 2 / (exp(2x) + 1).
        scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    if is_partly_hidden(tile, begin, tile_end):
        visible = visible_tokens(tile, begin, tile_end)
        scores = tl.where(visible[None, None, :], scores, float("-inf"))
        if VALUE_CODEC != "nvfp4":
            HARMLESS: tl.constexpr = 0x3C00 if VALUE_CODEC == "uniform" else 0x3F800000
            value_words = tl.where(visible[None, :], value_words, HARMLESS)
    return scores, value_words


@triton.jit
def score_tile(
    query, query_sum, row_factor, key_codes, key_boxes, value_boxes, key_scales, value_scales, page, num_blocks, head0,
    kv_head, shift, selectors, tile, begin, tile_end, soft_cap, HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    TILES_PER_BLOCK: tl.constexpr, ASSEMBLY: tl.constexpr, SOFT_CAP: tl.constexpr, KEY_CODEC: tl.constexpr,
    KEY_COUNT: tl.constexpr, KEY_STRIDES: tl.constexpr, VALUE_CODEC: tl.constexpr, VALUE_COUNT: tl.constexpr,
    VALUE_STRIDES: tl.constexpr, CODE_STRIDES: tl.constexpr,
):  # fmt: skip
    """Load a tile; return its scores `[heads, 8, 16]`, its values' steps and scales `[heads, 16]`, and the values."""
    inside = (tile % TILES_PER_BLOCK) * TILE_TOKENS
    KEY_WIDTH: tl.constexpr = row_width(HEAD_SIZE, KEY_COUNT)
    keys = key_boxes.load([page, head0, inside, 0]).reshape(HEADS, TILE_TOKENS, KEY_WIDTH)
    values = value_boxes.load([page, head0, inside, 0]).reshape(HEADS, TILE_TOKENS, row_width(HEAD_SIZE, VALUE_COUNT))
    following = keys
    if is_short(KEY_COUNT):
        UNIT: tl.constexpr = key_unit(ASSEMBLY)
        following = load_following(key_codes, page, num_blocks, inside, kv_head, UNIT, KEY_WIDTH, CODE_STRIDES)
    if KEY_CODEC == "nvfp4":
        key_words = load_block_scales(key_scales, page, num_blocks, inside, kv_head, HEAD_SIZE // 64, KEY_STRIDES)
        value_words = load_block_scales(value_scales, page, num_blocks, inside, kv_head, HEAD_SIZE // 64, VALUE_STRIDES)
    else:
        key_words, value_words = load_words(
            key_scales, value_scales, page, num_blocks, inside, kv_head, KEY_STRIDES, VALUE_STRIDES
        )
    scores = key_scores(
        keys,
        following,
        query,
        query_sum,
        row_factor,
        key_words,
        shift,
        selectors,
        KEY_CODEC,
        KEY_COUNT,
        HEADS,
        ASSEMBLY,
    )
    scores, value_words = mask_tile(scores, value_words, tile, begin, tile_end, soft_cap, SOFT_CAP, VALUE_CODEC)
    return scores, value_step(value_words, VALUE_CODEC, HEADS), value_words, values


@triton.jit
def add_tile(
    scores, step, words, selectors, values, maximum, total, offset, sums, tile, begin, tile_end, CODEC: tl.constexpr,
    COUNT: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Add the weights of one tile to the totals and its weighted values to the transposed sums."""
    plain = tl.exp2(scores - maximum[:, :, None])
    weights = (plain * step[:, None, :]).to(tl.float16)
    total += plain
    offset = add_offset(offset, words, plain, weights, CODEC)
    if CODEC == "fp8" or CODEC == "nvfp4":
        # Codes alone that are NaN, or scales of some columns; those of hidden tokens count as zero.
        if is_partly_hidden(tile, begin, tile_end):
            visible = visible_tokens(tile, begin, tile_end)[None, :, None]
            kept = values
            kept_words = words
            if CODEC == "fp8":
                kept = tl.where(visible, values, 0)
            else:
                kept_words = tl.where(visible, words, 0)
            sums = multiply_values(kept, kept_words, selectors, weights, sums, CODEC, COUNT, ASSEMBLY)
        else:
            sums = multiply_values(values, words, selectors, weights, sums, CODEC, COUNT, ASSEMBLY)
    else:
        sums = multiply_values(values, words, selectors, weights, sums, CODEC, COUNT, ASSEMBLY)
    return total, offset, sums


@triton.jit
def finish_item(
    maximum, total, x, row, slot, is_padding, head0, v_scale, sinks, scale, output, lse, partial_output, partial_stats,
    output_stride, HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr, VALUE_FACTOR: tl.constexpr, VALUE_BLOCK: tl.constexpr, VALUE_FLIP: tl.constexpr,
    MODEL: tl.constexpr, OUTPUT: tl.constexpr, KV_SCALE: tl.constexpr,
):  # fmt: skip
    """Write an item's rows `[heads * 8, D]`: the result, or a partial one when the request is split."""
    ROWS: tl.constexpr = HEADS * 8
    index = tl.arange(0, ROWS)
    kv_head = head0 + index // 8
    in_group = index % 8
    head = kv_head * GROUP + in_group
    mask = (kv_head < NUM_KV_HEADS) & (in_group < GROUP)
    maximum = tl.reshape(maximum, [ROWS])
    total = tl.reshape(tl.sum(total, 2), [ROWS])
    if VALUE_BLOCK > 1:
        x = rotate_back(x, VALUE_FACTOR, VALUE_BLOCK, VALUE_FLIP)
    columns = head[:, None] * HEAD_SIZE + tl.arange(0, HEAD_SIZE)[None, :]
    if slot >= 0:
        stats = partial_stats + (slot.to(tl.int64) * NUM_HEADS + head) * 2
        tl.store(stats, maximum, mask=mask)
        tl.store(stats + 1, total, mask=mask)
        tl.store(partial_output + slot.to(tl.int64) * (NUM_HEADS * HEAD_SIZE) + columns, x, mask=mask[:, None])
    else:
        maximum, total, decay = take_sinks(maximum, total, sinks, head, mask, is_padding)
        factor = decay * given_scale(v_scale, tl.minimum(kv_head, NUM_KV_HEADS - 1), KV_SCALE)
        x = x * (factor / tl.where(total == 0.0, 1.0, total))[:, None]
        # Rotating back gives zeros a sign, which a row of padding must not have.
        x = tl.where(x == 0.0, 0.0, x)
        store_rows(output + row.to(tl.int64) * output_stride + columns, x, mask[:, None], scale, MODEL, OUTPUT)
        if lse is not None:
            log = LN2 * (maximum + tl.log2(total))
            tl.store(lse + row.to(tl.int64) * NUM_HEADS + head, log, mask=mask)


@triton.jit
def decode_packed_kernel(
    query, key_codes, key_boxes, value_boxes, key_scales, value_scales, block_table, schedule, output, lse,
    partial_output, partial_stats, k_scale, v_scale, sinks, output_scale, query_stride, query_head_stride,
    output_stride, table_stride, table_width, num_blocks, score_scale, soft_cap, NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, ASSEMBLY: tl.constexpr, SOFT_CAP: tl.constexpr, MODEL: tl.constexpr, OUTPUT: tl.constexpr,
    STAGES: tl.constexpr, PAIR: tl.constexpr,
    KEY_CODEC: tl.constexpr, KEY_COUNT: tl.constexpr, KEY_FACTOR: tl.constexpr, KEY_BLOCK: tl.constexpr,
    KEY_FLIP: tl.constexpr, KEY_STRIDES: tl.constexpr, VALUE_CODEC: tl.constexpr, VALUE_COUNT: tl.constexpr,
    VALUE_FACTOR: tl.constexpr, VALUE_BLOCK: tl.constexpr, VALUE_FLIP: tl.constexpr, VALUE_STRIDES: tl.constexpr,
    CODE_STRIDES: tl.constexpr, KV_SCALE: tl.constexpr,
):  # fmt: skip
    """Attend the rows of the schedule's items as `decode_fast_kernels.decode_kernel` does, on a packed cache.

    PAIR: two tiles at a time. COUNT: codes of an int16. FACTOR, BLOCK, FLIP: the rotation. STRIDES: of scales, in
    bytes; CODE_STRIDES, of `key_codes`, which are given for codes of three bits alone. KV_SCALE, of `k_scale` and
    `v_scale`: 0 none, 1 one value, 2 one per KV head.
    """
    tl.extra.cuda.gdc_launch_dependents()
    HEAD_GROUPS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    VALUE_WIDTH: tl.constexpr = row_width(HEAD_SIZE, VALUE_COUNT)
    TILES_PER_BLOCK: tl.constexpr = BLOCK_SIZE // TILE_TOKENS
    HAS_OFFSET: tl.constexpr = is_integer(VALUE_CODEC)
    TILES: tl.constexpr = 2 if PAIR else 1
    head0 = (tl.program_id(0) % HEAD_GROUPS) * HEADS
    # Heads that fill up the last CTA read what its last head reads.
    kv_head = tl.minimum(head0 + tl.arange(0, HEADS), NUM_KV_HEADS - 1)
    index = tl.arange(0, HEADS * 16)
    query_head = (head0 + index // 16) * GROUP + index % 16
    query_mask = (head0 + index // 16 < NUM_KV_HEADS) & (index % 16 < GROUP)
    column = tl.arange(0, HEAD_SIZE)
    scale = load_scale(output_scale)
    # Where two tokens' scales share a word.
    shift = 8 * ((tl.arange(0, TILE_TOKENS)[None, :] * KEY_STRIDES[1] + kv_head[:, None] * KEY_STRIDES[2]) & 2)
    selectors = shift
    if KEY_CODEC == "nvfp4":
        selectors = scale_selectors(block_table, table_width)
    if is_short(KEY_COUNT):
        selectors = first_bits(block_table, table_width, key_unit(ASSEMBLY))
    value_selectors = selectors
    if is_short(VALUE_COUNT):
        value_selectors = first_bits(block_table, table_width, 16)
    key_factor = given_scale(k_scale, kv_head, KV_SCALE) * (score_scale * unit_of(KEY_CODEC))

    cta = tl.program_id(0) // HEAD_GROUPS
    item = cta
    while item >= 0:
        request, first_row, num_rows, seq_len, item_begin, item_end, slot, cta, item = load_item(
            schedule, cta, item, tl.num_programs(0) // HEAD_GROUPS, ""
        )
        table = block_table + request.to(tl.int64) * table_stride
        for row_of_request in range(0, num_rows):
            row = first_row + row_of_request
            end = seq_len - num_rows + 1 + row_of_request
            begin = tl.maximum(end - WINDOW, 0) if WINDOW else 0
            first_tile = tl.maximum(item_begin, begin // TILE_TOKENS)
            last_tile = tl.minimum(item_end, (end + TILE_TOKENS - 1) // TILE_TOKENS)
            last_tile = tl.minimum(last_tile, table_width * TILES_PER_BLOCK)
            page = tl.load(table + first_tile // TILES_PER_BLOCK, mask=first_tile < last_tile, other=-1)
            rows = row.to(tl.int64) * query_stride + query_head * query_head_stride
            wide = tl.load(query + rows[:, None] + column[None, :], mask=query_mask[:, None], other=0.0)
            wide = wide.to(tl.float32)
            if KEY_BLOCK > 1:
                wide = rotate_query(wide, KEY_FACTOR, KEY_BLOCK, KEY_FLIP)
            fitted, row_factor = fit_rows(wide)
            row_factor = low_rows(row_factor, HEADS) * key_factor[:, None]
            query_sum = row_factor
            if is_integer(KEY_CODEC):
                query_sum = low_rows(tl.sum(fitted.to(tl.float32), 1), HEADS) * (1.0 / INTEGER_UNIT)
            if is_short(KEY_COUNT):
                parts = split_short_query(fitted, HEADS, ASSEMBLY)
            else:
                parts = split_query(fitted, HEADS, HEAD_SIZE, KEY_COUNT, KEY_CODEC, ASSEMBLY)

            maximum = tl.full([HEADS, QUERY_ROWS], LOWEST_MAXIMUM, tl.float32)
            total = tl.zeros([HEADS, QUERY_ROWS, TILE_TOKENS], tl.float32)
            offset = tl.zeros([HEADS, QUERY_ROWS, TILE_TOKENS], tl.float32)
            a = tl.zeros([HEADS, VALUE_WIDTH, QUERY_ROWS], tl.float32)
            b = a
            c = a
            d = a
            e = a
            f = a
            if PAIR:
                after_first = tl.minimum(first_tile + 1, last_tile - 1) // TILES_PER_BLOCK
                second_page = tl.load(table + after_first, mask=first_tile < last_tile, other=-1)
            for tile in tl.range(first_tile, last_tile, TILES, num_stages=STAGES):
                next_page = tl.load(table + tl.minimum(tile + TILES, last_tile - 1) // TILES_PER_BLOCK)
                tile_end = visible_end(page, num_blocks, end)
                scores, step, words, values = score_tile(
                    parts, query_sum, row_factor, key_codes, key_boxes, value_boxes, key_scales, value_scales, page,
                    num_blocks, head0, kv_head, shift, selectors, tile, begin, tile_end, soft_cap, HEADS, HEAD_SIZE,
                    TILES_PER_BLOCK, ASSEMBLY, SOFT_CAP, KEY_CODEC, KEY_COUNT, KEY_STRIDES, VALUE_CODEC, VALUE_COUNT,
                    VALUE_STRIDES, CODE_STRIDES,
                )  # fmt: skip
                page = next_page
                new_maximum = tl.maximum(maximum, tl.max(scores + logarithm(step)[:, None, :], 2))
                if PAIR:
                    # The second tile shares the rescaling of the sums with the first.
                    next_second = tl.load(table + tl.minimum(tile + 3, last_tile - 1) // TILES_PER_BLOCK)
                    second_end = visible_end(second_page, num_blocks, tl.where(tile + 1 < last_tile, end, 0))
                    second_scores, second_step, second_words, second_values = score_tile(
                        parts, query_sum, row_factor, key_codes, key_boxes, value_boxes, key_scales, value_scales,
                        second_page, num_blocks, head0, kv_head, shift, selectors, tile + 1, begin, second_end,
                        soft_cap, HEADS, HEAD_SIZE, TILES_PER_BLOCK, ASSEMBLY, SOFT_CAP, KEY_CODEC, KEY_COUNT,
                        KEY_STRIDES, VALUE_CODEC, VALUE_COUNT, VALUE_STRIDES, CODE_STRIDES,
                    )  # fmt: skip
                    second_page = next_second
                    raised = second_scores + logarithm(second_step)[:, None, :]
                    new_maximum = tl.maximum(new_maximum, tl.max(raised, 2))
                decay = tl.exp2(maximum - new_maximum)
                maximum = new_maximum
                total = total * decay[:, :, None]
                if HAS_OFFSET:
                    offset = offset * decay[:, :, None]
                a = a * decay[:, None, :]
                b = b * decay[:, None, :]
                if VALUE_COUNT >= 4:
                    c = c * decay[:, None, :]
                    d = d * decay[:, None, :]
                if is_short(VALUE_COUNT):
                    e = e * decay[:, None, :]
                    f = f * decay[:, None, :]
                total, offset, sums = add_tile(
                    scores, step, words, value_selectors, values, maximum, total, offset, (a, b, c, d, e, f), tile,
                    begin, tile_end, VALUE_CODEC, VALUE_COUNT, ASSEMBLY,
                )  # fmt: skip
                if PAIR:
                    total, offset, sums = add_tile(
                        second_scores, second_step, second_words, value_selectors, second_values, maximum, total,
                        offset, sums, tile + 1, begin, second_end, VALUE_CODEC, VALUE_COUNT, ASSEMBLY,
                    )  # fmt: skip
                a, b, c, d, e, f = sums
            if is_short(VALUE_COUNT):
                x = join_short_columns(a, b, c, d, e, f, HEADS, HEAD_SIZE)
            else:
                x = join_columns(a, b, c, d, HEADS, HEAD_SIZE, VALUE_COUNT, VALUE_CODEC)
            if HAS_OFFSET:
                x = x + tl.reshape(tl.sum(offset, 2), [HEADS * 8])[:, None]
            finish_item(
                maximum, total, x, row, slot, request < 0, head0, v_scale, sinks, scale, output, lse, partial_output,
                partial_stats, output_stride, HEADS, NUM_HEADS, NUM_KV_HEADS, GROUP, HEAD_SIZE, VALUE_FACTOR,
                VALUE_BLOCK, VALUE_FLIP, MODEL, OUTPUT, KV_SCALE,
            )  # fmt: skip
