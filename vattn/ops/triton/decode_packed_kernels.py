"""Device code of the fast decode path for packed KV formats on Hopper; see `decode_fast_kernels` for how it is cut.

Codes are read as int16, two or four of them at a time, and unpacked to fp16 within a thread: the j-th result of n holds
the columns `n * c + j`. Queries are split, and results put together, accordingly.

Scales of a token stay out of the products. Keys' multiply scores. Values' move into the weights, whose range fp16
could not hold: with `u = score + log2(scale)` and its running maximum m, weights are `exp2(u - m)`, at most 1, and the
denominator adds `exp2(u - m) / scale`, which is `exp2(score - m)`. Codes of four bits are multiplied as `code - 8`;
what that and zero points leave out is the same for all columns of a row and is added to the sums at the end.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from vattn.kv_formats.turboquant import CENTROIDS
from vattn.ops.triton.decode_fast_kernels import (
    FP16_QUERY_SHRINK,
    ITEM_FIELDS,
    LOWEST_MAXIMUM,
    QUERY_ROWS,
    TILE_TOKENS,
    decode_low_byte,
    finish_scores,
    split_rows,
    visible_end,
)
from vattn.ops.triton.epilogue import load_scale, store_rows
from vattn.ops.triton.mask import LN2, LOG2E
from vattn.ops.triton.packed import level
from vattn.ops.triton.rotation import rotate_back, rotate_query

LEAST_STEP = tl.constexpr(2.0**-25)
"""Below every fp16 step but zero, whose codes are zeros."""

UNPACK_FP8 = tl.constexpr(
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
"""PTX: the e4m3 codes of even and of odd columns as fp16."""

UNPACK_INT8 = tl.constexpr(
    """
    {
    .reg .b32 raised, even, odd, bias;
    xor.b32 raised, $2, 0x80808080;
    prmt.b32 even, raised, 0x64646464, 0x4240;
    prmt.b32 odd, raised, 0x64646464, 0x4341;
    mov.b32 bias, 0x64806480;
    sub.rn.f16x2 $0, even, bias;
    sub.rn.f16x2 $1, odd, bias;
    }
    """
)
"""PTX: int8 codes, raised by 128 into the low byte of 1024 as fp16, less 1152."""


def _four(body: str) -> str:
    return "{\n.reg .b32 x, bias;\nmov.b32 bias, 0x64086408;\n" + body + "}"


UNPACK_INT4 = tl.constexpr(
    _four(
        "".join(
            f"shr.u32 x, $4, {4 * j};\nlop3.b32 x, x, 0x000F000F, 0x64006400, 0xEA;\nsub.rn.f16x2 ${j}, x, bias;\n"
            for j in range(4)
        )
    )
)
"""PTX: codes of four bits less 8: put into the low bits of 1024 as fp16, less 1032."""


def _codebook_ptx() -> str:
    halves = [struct.unpack("<H", struct.pack("<e", value))[0] for value in CENTROIDS[4][8:]]
    low, high = ([(half >> shift) & 255 for half in halves] for shift in (0, 8))
    tables = [
        sum(byte << (8 * place) for place, byte in enumerate(table[first : first + 4]))
        for table in (low, high)
        for first in (0, 4)
    ]
    names = ("low_a", "low_b", "high_a", "high_b")
    lines = [".reg .b32 " + ", ".join((*names, "upper", "place", "l", "h", "a", "b", "c", "d", "sign")) + ";"]
    lines += [f"mov.b32 {name}, {value:#010x};" for name, value in zip(names, tables, strict=True)]
    lines += [
        # The upper half of the codes counts places up from 0, the lower half down from 7.
        "and.b32 upper, $4, 0x88888888;",
        "shr.u32 place, upper, 3;",
        "sub.u32 upper, upper, place;",
        "and.b32 place, $4, 0x77777777;",
        "xor.b32 place, place, upper;",
        "xor.b32 place, place, 0x77777777;",
    ]
    for first, second in (("a", "b"), ("c", "d")):
        lines += [
            "prmt.b32 l, low_a, low_b, place;",
            "prmt.b32 h, high_a, high_b, place;",
            f"prmt.b32 {first}, l, h, 0x5140;",
            f"prmt.b32 {second}, l, h, 0x7362;",
        ]
        lines += ["shr.u32 place, place, 16;"] if first == "a" else []
    for j, (x, y) in enumerate((("a", "c"), ("a", "c"), ("b", "d"), ("b", "d"))):
        lines += [
            f"prmt.b32 l, {x}, {y}, {'0x7632' if j % 2 else '0x5410'};",
            f"shl.b32 sign, $4, {12 - 4 * j};",
            # l | (~sign & 0x80008000)
            f"lop3.b32 ${j}, l, sign, 0x80008000, 0xF2;",
        ]
    return "{\n" + "\n".join(lines) + "\n}"


UNPACK_CODEBOOK = tl.constexpr(_codebook_ptx())
"""PTX: centroids of codes of four bits: bytes of the upper half looked up by place, and a sign."""


@triton.jit
def nibble(pairs, j: tl.constexpr):
    """Return the j-th code of four bits of each int16."""
    return (pairs >> (4 * j)).to(tl.int32) & 15


@triton.jit
def unpack_bytes(pairs, CODEC: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Turn int16 pairs of codes of eight bits into fp16 tensors of the even and of the odd columns."""
    if ASSEMBLY:
        if CODEC == "int8":
            return tl.inline_asm_elementwise(
                UNPACK_INT8, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
            )
        else:
            return tl.inline_asm_elementwise(
                UNPACK_FP8, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
            )
    elif CODEC == "int8":
        return (pairs & 0xFF).to(tl.int8).to(tl.float16), (pairs >> 8).to(tl.float16)
    else:
        return decode_low_byte(pairs), decode_low_byte(pairs >> 8)


@triton.jit
def unpack_nibbles(quads, CODEC: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Turn int16 quadruples of codes of four bits into four fp16 tensors of every fourth column."""
    if ASSEMBLY:
        if CODEC == "codebook":
            return tl.inline_asm_elementwise(
                UNPACK_CODEBOOK, "=r,=r,=r,=r,r", [quads],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                UNPACK_INT4, "=r,=r,=r,=r,r", [quads],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
    elif CODEC == "codebook":
        return (
            level(nibble(quads, 0), 4).to(tl.float16), level(nibble(quads, 1), 4).to(tl.float16),
            level(nibble(quads, 2), 4).to(tl.float16), level(nibble(quads, 3), 4).to(tl.float16),
        )  # fmt: skip
    else:
        return (
            (nibble(quads, 0) - 8).to(tl.float16), (nibble(quads, 1) - 8).to(tl.float16),
            (nibble(quads, 2) - 8).to(tl.float16), (nibble(quads, 3) - 8).to(tl.float16),
        )  # fmt: skip


@triton.jit
def split_query(query, HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, COUNT: tl.constexpr):
    """Return every COUNT-th column of rows `[heads * 16, D]`, as `[heads, 16, D / COUNT]`, COUNT (2 or 4) times."""
    if COUNT == 2:
        even, odd = tl.split(tl.reshape(query, [HEADS, 16, HEAD_SIZE // 2, 2]))
        return even, odd, even, odd
    else:
        # Columns 4 c + 2 i + k.
        k0, k1 = tl.split(tl.reshape(query, [HEADS, 16, HEAD_SIZE // 4, 2, 2]))
        a, c = tl.split(k0)
        b, d = tl.split(k1)
        return a, b, c, d


@triton.jit
def join_columns(a, b, c, d, HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, COUNT: tl.constexpr):
    """Put transposed sums `[heads, D / COUNT, 8]` of every COUNT-th column together as rows `[heads * 8, D]`."""
    if COUNT == 2:
        rows = tl.permute(tl.join(a, b), (0, 2, 1, 3))
    else:
        rows = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 2, 1, 3, 4))
    return tl.reshape(rows, [HEADS * 8, HEAD_SIZE])


@triton.jit
def load_tokens(scales, page, num_blocks, inside, first, begin, end, kv_head, known, offset: tl.constexpr,
                other: tl.constexpr, STRIDES: tl.constexpr):  # fmt: skip
    """Return one number of every token of a tile, fp32 `[heads, 16]`; `other` for hidden tokens."""
    token = tl.arange(0, TILE_TOKENS)
    seen = (first + token >= begin) & (first + token < visible_end(page, num_blocks, end))
    place = scales + page.to(tl.int64) * STRIDES[0] + offset
    place = place + (inside + token)[None, :] * STRIDES[1] + kv_head[:, None] * STRIDES[2]
    return tl.load(place, mask=known[:, None] & seen[None, :], other=other).to(tl.float32)


@triton.jit
def key_scores(
    keys, a, b, c, d, query_sum, scale, CODEC: tl.constexpr, COUNT: tl.constexpr, SHIFT: tl.constexpr,
    HEADS: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Return scores `[heads, 8, 16]` of one tile in units of the query."""
    if COUNT == 2:
        k0, k1 = unpack_bytes(keys, CODEC, ASSEMBLY)
        scores = tl.dot(a, k0.permute(0, 2, 1))
        scores = tl.dot(b, k1.permute(0, 2, 1), scores)
    else:
        k0, k1, k2, k3 = unpack_nibbles(keys, CODEC, ASSEMBLY)
        scores = tl.dot(a, k0.permute(0, 2, 1))
        scores = tl.dot(b, k1.permute(0, 2, 1), scores)
        scores = tl.dot(c, k2.permute(0, 2, 1), scores)
        scores = tl.dot(d, k3.permute(0, 2, 1), scores)
    low, _ = split_rows(scores, HEADS)
    if CODEC == "int4":
        bits = scale.to(tl.int32, bitcast=True)
        missing = ((bits & 15) - 8).to(tl.float32)
        step = (bits & -16).to(tl.float32, bitcast=True) * (2.0**-SHIFT)
        low = (low - query_sum[:, :, None] * missing[:, None, :]) * step[:, None, :]
    elif CODEC != "e4m3":
        low = low * (scale * (2.0**-SHIFT))[:, None, :]
    return low


@triton.jit
def add_weighted(
    values, weights, a, b, c, d, hidden, visible, CODEC: tl.constexpr, COUNT: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """Return the transposed sums plus `V^T P^T` of one tile."""
    weights = weights.to(tl.float16).permute(0, 2, 1)
    if COUNT == 2:
        v0, v1 = unpack_bytes(values, CODEC, ASSEMBLY)
        a = tl.dot(v0.permute(0, 2, 1), weights, a)
        b = tl.dot(v1.permute(0, 2, 1), weights, b)
    else:
        v0, v1, v2, v3 = unpack_nibbles(values, CODEC, ASSEMBLY)
        a = tl.dot(v0.permute(0, 2, 1), weights, a)
        b = tl.dot(v1.permute(0, 2, 1), weights, b)
        c = tl.dot(v2.permute(0, 2, 1), weights, c)
        d = tl.dot(v3.permute(0, 2, 1), weights, d)
    return a, b, c, d


@triton.jit
def add_values(
    values, weights, a, b, c, d, first, begin, end, visible, CODEC: tl.constexpr, COUNT: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Add one tile to the transposed sums. Only e4m3 has codes that are NaN: those of hidden tokens count as zero."""
    if CODEC == "fp8":
        if (first < begin) | (first + TILE_TOKENS > end):
            kept = tl.where(visible[None, :, None], values, 0)
            a, b, c, d = add_weighted(kept, weights, a, b, c, d, True, visible, CODEC, COUNT, ASSEMBLY)
        else:
            a, b, c, d = add_weighted(values, weights, a, b, c, d, False, visible, CODEC, COUNT, ASSEMBLY)
    else:
        a, b, c, d = add_weighted(values, weights, a, b, c, d, False, visible, CODEC, COUNT, ASSEMBLY)
    return a, b, c, d


@triton.jit
def finish_item(
    maximum, total, same, x, row, slot, is_padding, head0, sinks, scale, output, lse, partial_output, partial_stats,
    output_stride, HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr, VALUE_FACTOR: tl.constexpr, VALUE_BLOCK: tl.constexpr, VALUE_FLIP: tl.constexpr,
    MODEL: tl.constexpr, OUTPUT: tl.constexpr,
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
    x = x + tl.reshape(tl.sum(same, 2), [ROWS])[:, None]
    if VALUE_BLOCK > 1:
        x = rotate_back(x, VALUE_FACTOR, VALUE_BLOCK, VALUE_FLIP)
    columns = head[:, None] * HEAD_SIZE + tl.arange(0, HEAD_SIZE)[None, :]
    if slot >= 0:
        stats = partial_stats + (slot.to(tl.int64) * NUM_HEADS + head) * 2
        tl.store(stats, maximum, mask=mask)
        tl.store(stats + 1, total, mask=mask)
        tl.store(partial_output + slot.to(tl.int64) * (NUM_HEADS * HEAD_SIZE) + columns, x, mask=mask[:, None])
    else:
        decay = tl.full(maximum.shape, 1.0, tl.float32)
        if sinks is not None:
            sink = tl.load(sinks + head, mask=mask, other=0.0).to(tl.float32) * LOG2E
            sink = tl.where(is_padding, float("-inf"), sink)
            with_sink = tl.maximum(maximum, sink)
            decay = tl.exp2(maximum - with_sink)
            total = total * decay + tl.exp2(sink - with_sink)
            maximum = with_sink
        x = x * (decay / tl.where(total == 0.0, 1.0, total))[:, None]
        store_rows(output + row.to(tl.int64) * output_stride + columns, x, mask[:, None], scale, MODEL, OUTPUT)
        if lse is not None:
            log = LN2 * (maximum + tl.log2(total))
            tl.store(lse + row.to(tl.int64) * NUM_HEADS + head, log, mask=mask)


@triton.jit
def decode_packed_kernel(
    query, key_boxes, value_boxes, key_scales, value_scales, block_table, schedule, output, lse, partial_output,
    partial_stats, sinks, output_scale, query_stride, query_head_stride, output_stride, table_stride, table_width,
    num_blocks, score_scale, soft_cap, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, ASSEMBLY: tl.constexpr,
    SOFT_CAP: tl.constexpr, MODEL: tl.constexpr, OUTPUT: tl.constexpr, STAGES: tl.constexpr,
    KEY_CODEC: tl.constexpr, KEY_COUNT: tl.constexpr, KEY_FACTOR: tl.constexpr, KEY_BLOCK: tl.constexpr,
    KEY_FLIP: tl.constexpr, KEY_SHIFT: tl.constexpr, KEY_STRIDES: tl.constexpr, VALUE_CODEC: tl.constexpr,
    VALUE_COUNT: tl.constexpr, VALUE_FACTOR: tl.constexpr, VALUE_BLOCK: tl.constexpr, VALUE_FLIP: tl.constexpr,
    VALUE_SHIFT: tl.constexpr, VALUE_STRIDES: tl.constexpr,
):  # fmt: skip
    """Attend the rows of the schedule's items as `decode_fast_kernels.decode_kernel` does, on a packed cache.

    COUNT: codes of an int16. FACTOR, BLOCK, FLIP, SHIFT: the rotation. STRIDES: of scales, by block, token and head.
    """
    tl.extra.cuda.gdc_launch_dependents()
    HEAD_GROUPS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    KEY_WIDTH: tl.constexpr = HEAD_SIZE // KEY_COUNT
    VALUE_WIDTH: tl.constexpr = HEAD_SIZE // VALUE_COUNT
    TILES_PER_BLOCK: tl.constexpr = BLOCK_SIZE // TILE_TOKENS
    head0 = (tl.program_id(0) % HEAD_GROUPS) * HEADS
    kv_head = head0 + tl.arange(0, HEADS)
    known = kv_head < NUM_KV_HEADS
    index = tl.arange(0, HEADS * 16)
    query_head = (head0 + index // 16) * GROUP + index % 16
    query_mask = (head0 + index // 16 < NUM_KV_HEADS) & (index % 16 < GROUP)
    column = tl.arange(0, HEAD_SIZE)
    scale = load_scale(output_scale)

    cta = tl.program_id(0) // HEAD_GROUPS
    item = cta
    while item >= 0:
        record = schedule + (item + 1) * ITEM_FIELDS
        request = tl.load(record)
        first_row = tl.load(record + 1)
        active = tl.load(schedule)
        has_work = cta < active
        # Without work the record is garbage; the loads do not wait for each other.
        num_rows = tl.where(has_work, tl.load(record + 2), 0)
        seq_len = tl.load(record + 3)
        item_begin = tl.load(record + 4)
        item_end = tl.load(record + 5)
        slot = tl.load(record + 6)
        item = tl.where(has_work, tl.load(record + 7), -1)
        # A grid smaller than the schedule was made for takes on the items of the CTAs that it lacks.
        cta = tl.where(item < 0, cta + tl.num_programs(0) // HEAD_GROUPS, cta)
        item = tl.where((item < 0) & (cta < active), cta, item)
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
            wide = wide.to(tl.float32) * FP16_QUERY_SHRINK
            if KEY_BLOCK > 1:
                wide = rotate_query(wide, KEY_FACTOR, KEY_BLOCK, KEY_FLIP)
            turned = wide.to(tl.float16)
            query_sum = tl.zeros([HEADS, QUERY_ROWS], tl.float32)
            if KEY_CODEC == "int4":
                sums = tl.reshape(tl.sum(turned.to(tl.float32), 1), [HEADS, 2, QUERY_ROWS])
                query_sum, _ = tl.split(tl.permute(sums, (0, 2, 1)))
            q0, q1, q2, q3 = split_query(turned, HEADS, HEAD_SIZE, KEY_COUNT)

            maximum = tl.full([HEADS, QUERY_ROWS], LOWEST_MAXIMUM, tl.float32)
            total = tl.zeros([HEADS, QUERY_ROWS, TILE_TOKENS], tl.float32)
            same = tl.zeros([HEADS, QUERY_ROWS, TILE_TOKENS], tl.float32)
            a = tl.zeros([HEADS, VALUE_WIDTH, QUERY_ROWS], tl.float32)
            b = a
            c = a
            d = a
            first = (first_tile % TILES_PER_BLOCK) * TILE_TOKENS
            key_scale = tl.full([HEADS, TILE_TOKENS], 1.0, tl.float32)
            least = key_scale
            if KEY_CODEC != "e4m3":
                key_scale = load_tokens(key_scales, page, num_blocks, first, first_tile * TILE_TOKENS, begin, end,
                                        kv_head, known, 0, 1.0, KEY_STRIDES)  # fmt: skip
            value_scale = load_tokens(value_scales, page, num_blocks, first, first_tile * TILE_TOKENS, begin, end,
                                      kv_head, known, 0, 1.0, VALUE_STRIDES)  # fmt: skip
            if VALUE_CODEC == "uniform":
                least = load_tokens(value_scales, page, num_blocks, first, first_tile * TILE_TOKENS, begin, end,
                                    kv_head, known, 1, 0.0, VALUE_STRIDES)  # fmt: skip
            for tile in tl.range(first_tile, last_tile, num_stages=STAGES):
                next_page = tl.load(table + tl.minimum(tile + 1, last_tile - 1) // TILES_PER_BLOCK)
                token0 = tile * TILE_TOKENS
                inside = (tile % TILES_PER_BLOCK) * TILE_TOKENS
                keys = key_boxes.load([page, head0, inside, 0]).reshape(HEADS, TILE_TOKENS, KEY_WIDTH)
                values = value_boxes.load([page, head0, inside, 0]).reshape(HEADS, TILE_TOKENS, VALUE_WIDTH)
                tile_end = visible_end(page, num_blocks, end)
                page = next_page
                token = token0 + tl.arange(0, TILE_TOKENS)
                visible = (token >= begin) & (token < tile_end)
                scores = key_scores(
                    keys, q0, q1, q2, q3, query_sum, key_scale, KEY_CODEC, KEY_COUNT, KEY_SHIFT, HEADS, ASSEMBLY
                )
                scores = finish_scores(scores, score_scale, soft_cap, visible, SOFT_CAP)
                step = value_scale
                if VALUE_CODEC == "int4":
                    bits = value_scale.to(tl.int32, bitcast=True)
                    step = (bits & -16).to(tl.float32, bitcast=True) * (2.0**-VALUE_SHIFT)
                if VALUE_CODEC == "uniform":
                    step = tl.where(step < LEAST_STEP, LEAST_STEP, step)
                raised = scores + tl.log2(step)[:, None, :]
                new_maximum = tl.maximum(maximum, tl.max(raised, 2))
                decay = tl.exp2(maximum - new_maximum)
                weights = tl.exp2(raised - new_maximum[:, :, None])
                plain = weights * (1.0 / step)[:, None, :]
                total = total * decay[:, :, None] + plain
                if VALUE_CODEC == "int4":
                    same = same * decay[:, :, None] + weights * (8 - (bits & 15)).to(tl.float32)[:, None, :]
                if VALUE_CODEC == "uniform":
                    same = same * decay[:, :, None] + (weights * 8.0 + plain * least[:, None, :])
                maximum = new_maximum
                a = a * decay[:, None, :]
                b = b * decay[:, None, :]
                if VALUE_COUNT == 4:
                    c = c * decay[:, None, :]
                    d = d * decay[:, None, :]
                a, b, c, d = add_values(
                    values, weights, a, b, c, d, token0, begin, tile_end, visible, VALUE_CODEC, VALUE_COUNT, ASSEMBLY
                )
                # Scales of the next tile are under way while it is waited for.
                ahead = token0 + TILE_TOKENS
                after = ((tile + 1) % TILES_PER_BLOCK) * TILE_TOKENS
                if KEY_CODEC != "e4m3":
                    key_scale = load_tokens(key_scales, page, num_blocks, after, ahead, begin, end, kv_head, known, 0,
                                            1.0, KEY_STRIDES)  # fmt: skip
                value_scale = load_tokens(value_scales, page, num_blocks, after, ahead, begin, end, kv_head, known, 0,
                                          1.0, VALUE_STRIDES)  # fmt: skip
                if VALUE_CODEC == "uniform":
                    least = load_tokens(value_scales, page, num_blocks, after, ahead, begin, end, kv_head, known, 1,
                                        0.0, VALUE_STRIDES)  # fmt: skip
            x = join_columns(a, b, c, d, HEADS, HEAD_SIZE, VALUE_COUNT)
            finish_item(
                maximum, total, same, x, row, slot, request < 0, head0, sinks, scale, output, lse, partial_output,
                partial_stats, output_stride, HEADS, NUM_HEADS, NUM_KV_HEADS, GROUP, HEAD_SIZE, VALUE_FACTOR,
                VALUE_BLOCK, VALUE_FLIP, MODEL, OUTPUT,
            )  # fmt: skip
