"""How Hopper's kernel of expanded latent attention quantises its rows with IEEE's quotients and no branch a value.

A product with the reciprocal is within two units of the quotient's last place; its remainder, which FMA gives exactly,
corrects it, as in `vattn.kernels.triton.common.codec.encode_quotient`. FP8 is made where a row lies in four lanes,
before codes are sorted for the store: a thread makes the scales of two rows then, not of eight, and half as many bytes
move.

NVFP4 rows go through shared memory in the model dtype, half of a head's columns at a time, and a loop quantises 32 of
them in each turn. A row tile's results are quantised once in many microseconds: one straight stretch of instructions
for all of a thread's values would come from afar every time, while a loop's stay near.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vattn.kernels.hopper.compat import as_tiles, block_barrier
from vattn.kernels.hopper.epilogue import (
    MIN_ABSMAX,
    encode_e4m3,
    group_codes,
    group_maximum,
    group_scales,
    reciprocal_of,
)
from vattn.kernels.hopper.prefill.load import GROUP_ROWS

LEAST_DIVISOR = gl.constexpr(2.0**-50)
MOST_DIVISOR = gl.constexpr(2.0**50)
"""Given scales between these, and NVFP4's steps under them, leave fp32's range in no step of a corrected quotient."""


@gluon.jit
def rounded(x, MODEL: gl.constexpr):
    """Return fp32 values rounded to the model dtype, as fp32. By default ptxas converts one value at a time."""
    if MODEL == gl.bfloat16:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2
        )
    return pairs.to(gl.float32)


LIMITED_QUOTIENT = gl.constexpr(
    "{ .reg .f32 p, e; mul.rn.f32 p, $1, $3; min.xorsign.abs.f32 p, p, 0f53800000; neg.f32 e, $1; "
    "fma.rn.f32 e, p, $2, e; neg.f32 e, e; fma.rn.f32 $0, e, $3, p; }"
)
"""Of $1 by $2, whose reciprocal is $3. Negation is a subtraction from zero in Gluon, which loses the sign of zeros."""


@gluon.jit
def limited_quotients(x, divisor, reciprocal):
    """Return what codes of IEEE's fp32 quotients are made of; divisors above 0 and reciprocals broadcast.

    Products beyond 2^40 are clamped there before the correction, which makes them as large or infinite again: none
    becomes NaN. Zeros keep their sign, since the remainder is subtracted. Reciprocals may be two units off. A divisor
    and reciprocal of 0 represent an infinite divisor.
    """
    x, by = gl.broadcast(x, divisor)
    x, times = gl.broadcast(x, reciprocal)
    return gl.inline_asm_elementwise(
        LIMITED_QUOTIENT, "=f,f,f,f", [x, by, times], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def fp8_scales(largest, OUTPUT_GROUPS: gl.constexpr):
    """Return what `group_scales` returns for FP8 by IEEE's quotients, without a branch a value."""
    if OUTPUT_GROUPS[3] < 0.0:
        largest = gl.where(largest < MIN_ABSMAX, MIN_ABSMAX, largest)
    zero = gl.zeros_like(largest)
    product = largest * (1.0 / 448.0)
    corrected = gl.fma(gl.fma(-product, zero + 448.0, largest), zero + (1.0 / 448.0), product)
    made = gl.where(largest < float("inf"), corrected, product)
    if OUTPUT_GROUPS[3] >= 0.0:
        if OUTPUT_GROUPS[2] == "zero_replaced":
            made = gl.where(made == 0.0, OUTPUT_GROUPS[3], made)
        elif OUTPUT_GROUPS[2] != "floored_power_of_two":
            made = gl.where(made < OUTPUT_GROUPS[3], OUTPUT_GROUPS[3], made)
    if OUTPUT_GROUPS[2] == "power_of_two" or OUTPUT_GROUPS[2] == "floored_power_of_two":
        bits = (made.to(gl.uint32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        made = gl.where(made == made, bits.to(gl.float32, bitcast=True), made)
    if OUTPUT_GROUPS[2] == "floored_power_of_two":
        made = gl.where(made < OUTPUT_GROUPS[3], OUTPUT_GROUPS[3], made)
    return made


@gluon.jit
def store_fp8(
    output, scales, scale, inverse, scale_stride, group_stride, result, first_row, rows, head,
    GROUP_INDEX: gl.constexpr, HEADS: gl.constexpr, VALUES: gl.constexpr, MODEL: gl.constexpr,
    OUTPUT_GROUPS: gl.constexpr, ZEROS: gl.constexpr,
):  # fmt: skip
    """Quantise a warpgroup's rows to FP8, in whole groups or under the given scale.

    inverse: 1 / scale.
    ZEROS: all results are zeros; the assembler of CUDA 12.8 would lose half of a conversion of four equal values.
    """
    values = rounded(result, MODEL)
    if OUTPUT_GROUPS[0] > 0:
        COUNT: gl.constexpr = VALUES // OUTPUT_GROUPS[0]
        groups = values.reshape([GROUP_ROWS, COUNT, OUTPUT_GROUPS[0]])
        largest = group_maximum(groups)
        step = fp8_scales(largest, OUTPUT_GROUPS)
        PLACE: gl.constexpr = largest.type.layout
        row = GROUP_INDEX * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, PLACE))[:, None]
        group = head * COUNT + gl.arange(0, COUNT, layout=gl.SliceLayout(0, PLACE))[None, :]
        place = (first_row + row).to(gl.int64) * scale_stride + group.to(gl.int64) * group_stride
        gl.store(scales + place, step, mask=(row < rows) & (group >= 0))
        if ZEROS:
            WHOLE: gl.constexpr = values.type.layout
            codes = gl.zeros([GROUP_ROWS, VALUES], gl.uint8, WHOLE)
        else:
            divisor = gl.where(step == float("inf"), 0.0, step)
            ratio = limited_quotients(groups, divisor.expand_dims(2), reciprocal_of(step).expand_dims(2))
            codes = encode_e4m3(ratio).reshape([GROUP_ROWS, VALUES])
    else:
        if (scale > LEAST_DIVISOR) & (scale < MOST_DIVISOR):
            ratio = limited_quotients(values, scale, inverse)
        else:
            ratio = gl.div_rn(values, gl.zeros_like(values) + scale)
        codes = encode_e4m3(ratio)
    THREADS: gl.constexpr = VALUES // 16
    HELD: gl.constexpr = gl.BlockedLayout([1, 16], [32 // THREADS, THREADS], [4, 1], [1, 0])
    codes = gl.convert_layout(codes, HELD)
    row = GROUP_INDEX * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, HELD))[:, None]
    column = gl.arange(0, VALUES, layout=gl.SliceLayout(0, HELD))[None, :]
    target = (first_row + row).to(gl.int64) * (HEADS * VALUES) + head * VALUES + column
    gl.store(output + target, codes, mask=(row < rows) & (column >= 0))


NUMBER = gl.constexpr(
    "{ .reg .f32 p, q, e, a, b, c; .reg .b32 s; mul.rn.f32 p, $1, $3; neg.f32 e, $1; fma.rn.f32 e, p, $2, e; "
    "neg.f32 e, e; fma.rn.f32 q, e, $3, p; abs.f32 q, q; fma.rn.f32 a, q, 0f40000000, 0f4B400000; "
    "add.rn.f32 b, q, 0f4B400002; fma.rn.f32 c, q, 0f3F000000, 0f4B400004; min.f32 a, a, b; min.f32 a, a, c; "
    "min.f32 a, a, 0f4B400007; mov.b32 s, p; shr.u32 s, s, 28; mov.b32 $0, a; lop3.b32 $0, $0, s, 7, 0xE4; }"
)
"""The e2m1 code of a corrected product of $1 and $3, the reciprocal of $2: saturating, nearest even, NaN as 6.

As a function of the magnitude, codes lie on the lowest of three lines and the largest code. Beside 1.5 * 2^23 the adder
rounds to whole numbers; what it adds is even, so that ties go to even codes. A product may be infinite: its correction
is NaN then, of which the last minimum makes the largest code. The sign is the product's."""


@gluon.jit
def numbers_of(x, divisor, reciprocal):
    """Return e2m1 codes of IEEE's fp32 quotients; divisors and reciprocals as for `limited_quotients`."""
    x, by = gl.broadcast(x, divisor)
    x, times = gl.broadcast(x, reciprocal)
    return gl.inline_asm_elementwise(NUMBER, "=r,f,f,f", [x, by, times], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def fp4_of(values, scale, OUTPUT_GROUPS: gl.constexpr):
    """Return NVFP4 codes of groups `[rows, groups, 16]` in int32, and the bytes of their block scales.

    A sixth of a maximum is a corrected product too. Of maxima so small that it is inexact the block scale is zero.
    """
    largest = group_maximum(values)
    if (scale > LEAST_DIVISOR) & (scale < MOST_DIVISOR):
        sixth = largest * (1.0 / 6.0)
        zero = gl.zeros_like(largest)
        corrected = gl.fma(gl.fma(-sixth, zero + 6.0, largest), zero + (1.0 / 6.0), sixth)
        sixth = gl.where(largest < float("inf"), corrected, sixth)
        stored = encode_e4m3(limited_quotients(sixth, scale, 1.0 / scale))
        step = stored.to(gl.float8e4nv, bitcast=True).to(gl.float32) * scale
        reciprocal = gl.where(step == 0.0, 0.0, 1.0 / step)
        codes = numbers_of(values, step.expand_dims(2), reciprocal.expand_dims(2))
    else:
        stored, step = group_scales(largest, scale, OUTPUT_GROUPS)
        codes = group_codes(values, step.expand_dims(2), OUTPUT_GROUPS)
    return codes, stored


PART_ROWS = gl.constexpr(32)
PART_COLUMNS = gl.constexpr(64)


@gluon.jit
def store_part(
    output, scales, scale, scale_stride, group_stride, values, first_token, known_rows, first_column,
    STRIDE: gl.constexpr, OUTPUT_GROUPS: gl.constexpr, SCALE_COLUMNS: gl.constexpr,
):  # fmt: skip
    """Quantise rows `[32, 64]`; SCALE_COLUMNS of swizzled scales, or 0: rows of scales."""
    COUNT: gl.constexpr = PART_COLUMNS // 16
    codes, stored = fp4_of(values.reshape([PART_ROWS, COUNT, 16]), scale, OUTPUT_GROUPS)
    PLACE: gl.constexpr = stored.type.layout
    row = gl.arange(0, PART_ROWS, layout=gl.SliceLayout(1, PLACE))[:, None]
    group = first_column // 16 + gl.arange(0, COUNT, layout=gl.SliceLayout(0, PLACE))[None, :]
    token = (first_token + row).to(gl.int64)
    if SCALE_COLUMNS:
        tile = (token // 128) * (SCALE_COLUMNS // 4) + group // 4
        place = tile * 512 + token % 32 * 16 + token % 128 // 32 * 4 + group % 4
    else:
        place = token * scale_stride + group.to(gl.int64) * group_stride
    gl.store(scales + place, stored, mask=(row < known_rows) & (group >= 0))
    codes = codes.reshape([PART_ROWS, PART_COLUMNS // 2, 2])
    PAIR: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, codes.type.layout))
    pairs = gl.sum(codes << (4 * gl.arange(0, 2, layout=PAIR))[None, None, :], 2).to(gl.uint8)
    CODES: gl.constexpr = pairs.type.layout
    row = gl.arange(0, PART_ROWS, layout=gl.SliceLayout(1, CODES))[:, None]
    byte = first_column // 2 + gl.arange(0, PART_COLUMNS // 2, layout=gl.SliceLayout(0, CODES))[None, :]
    target = (first_token + row).to(gl.int64) * (STRIDE // 2) + byte
    gl.store(output + target, pairs, mask=(row < known_rows) & (byte >= 0))


@gluon.jit
def store_half(
    output, scales, scale, scale_stride, group_stride, room, half, first_row, rows, first_column,
    GROUP_INDEX: gl.constexpr, STRIDE: gl.constexpr, MODEL: gl.constexpr, OUTPUT_GROUPS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
):  # fmt: skip
    """Quantise 64 columns of a warpgroup's rows."""
    PANEL: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # A group of 16 is one thread's.
    HELD: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    block_barrier()
    room.store(half.to(MODEL))
    block_barrier()
    parts = as_tiles(room, MODEL, GROUP_ROWS // PART_ROWS, [PART_ROWS, PART_COLUMNS], PANEL)
    left = gl.minimum(rows - GROUP_INDEX * GROUP_ROWS, GROUP_ROWS)
    for part in range((left + PART_ROWS - 1) // PART_ROWS):
        values = parts.index(part).load(HELD).to(gl.float32)
        first_token = first_row + GROUP_INDEX * GROUP_ROWS + part * PART_ROWS
        known_rows = left - part * PART_ROWS
        store_part(
            output, scales, scale, scale_stride, group_stride, values, first_token, known_rows, first_column, STRIDE,
            OUTPUT_GROUPS, SCALE_COLUMNS,
        )  # fmt: skip


@gluon.jit
def store_parts(
    output, scales, scale, scale_stride, group_stride, room, result, first_row, rows, head,
    GROUP_INDEX: gl.constexpr, HEADS: gl.constexpr, VALUES: gl.constexpr, MODEL: gl.constexpr,
    OUTPUT_GROUPS: gl.constexpr, SCALE_COLUMNS: gl.constexpr,
):  # fmt: skip
    """Quantise a warpgroup's rows by way of `room` `[64, 64]` in shared memory."""
    STRIDE: gl.constexpr = HEADS * VALUES
    if VALUES == 128:
        low, high = result.reshape(GROUP_ROWS, 2, PART_COLUMNS).permute(0, 2, 1).split()
        store_half(
            output, scales, scale, scale_stride, group_stride, room, low, first_row, rows, head * VALUES, GROUP_INDEX,
            STRIDE, MODEL, OUTPUT_GROUPS, SCALE_COLUMNS,
        )  # fmt: skip
        store_half(
            output, scales, scale, scale_stride, group_stride, room, high, first_row, rows,
            head * VALUES + PART_COLUMNS, GROUP_INDEX, STRIDE, MODEL, OUTPUT_GROUPS, SCALE_COLUMNS,
        )  # fmt: skip
    else:
        store_half(
            output, scales, scale, scale_stride, group_stride, room, result, first_row, rows, head * VALUES,
            GROUP_INDEX, STRIDE, MODEL, OUTPUT_GROUPS, SCALE_COLUMNS,
        )  # fmt: skip
