"""Load and store rows of packed KV formats in Triton, for each codec of `vattn.quantization.packed`.

A store encodes fp32 rows as the reference does, bit for bit. A load returns fp32 `x [rows, width]` within the range of
fp16 and `factor [rows, 1]`: the rows are `x * factor`, still rotated and without the given scale. `TRITON_CODECS` has
both by the name of the codec; a launcher passes the two of its format to the kernel.

All take PART, a tuple: columns of a row, columns of a tile (a power of two), bits of a code, columns of a rotated block
(1: not rotated), which signs are flipped before the rotation, the rotation's shift, and columns that share a scale.
Columns of a load beyond the row are finite if the row is, but otherwise undefined.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vattn.kernels.triton.common.codec import INTERPRETED, decode, encode_e4m3, encode_quotient
from vattn.kernels.triton.common.epilogue import EVERY_NAN, MIN_ABSMAX, absolute_maximum, larger, nvfp4_codes
from vattn.kernels.triton.common.hadamard import pairwise_sum, rotate
from vattn.kernels.triton.common.tiles import next_power_of_two
from vattn.quantization.formats import PackedPart
from vattn.quantization.packed import turboquant
from vattn.quantization.packed.hadamard import SIGNS, block_width, row_shift


def _squares(bits: int) -> tuple[float, ...]:
    levels = torch.tensor(turboquant.CENTROIDS[bits])[1 << (bits - 1) :]
    return tuple((levels * levels).tolist())


LEVELS_3 = tl.constexpr(turboquant.CENTROIDS[3])
LEVELS_4 = tl.constexpr(turboquant.CENTROIDS[4])
BOUNDARIES_3 = tl.constexpr(turboquant.BOUNDARIES[3])
BOUNDARIES_4 = tl.constexpr(turboquant.BOUNDARIES[4])
SQUARES_3 = tl.constexpr(_squares(3))
SQUARES_4 = tl.constexpr(_squares(4))
"""Squares of the positive levels, levels and squares rounded to fp32."""

MIN_LENGTH = tl.constexpr(turboquant.MIN_LENGTH)
FP16_MAX = tl.constexpr(65504.0)
INFINITY = tl.constexpr(float("inf"))


def part_constants(part: PackedPart, width: int, wide: int = 16) -> tuple[Any, ...]:
    """Return PART for rows of `width` columns in tiles of at least `wide` columns."""
    block = block_width(width, part.rotation)
    flips = SIGNS.get(part.rotation, 0)
    shift = row_shift(width, part.rotation)
    return width, max(wide, next_power_of_two(width)), part.bits, block, flips, shift, part.group_size


@triton.jit
def halves_up(x):
    """Round fp32 to the nearest integer, halves up."""
    return tl.floor(x + 0.5)


FLOOR = tl.constexpr("add.rm.f32 $0, $1, 0f4B400000;")
"""PTX: add 1.5 * 2^23, rounding down: the lowest bits hold the floor."""


@triton.jit
def floor_to_int(x, NATIVE: tl.constexpr):
    """Return the floor of fp32 x as int32; undefined if |x| >= 2^22."""
    if NATIVE:
        raised = tl.inline_asm_elementwise(FLOOR, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        return raised.to(tl.int32, bitcast=True) - 0x4B400000
    else:
        return tl.floor(x).to(tl.int32)


MAGIC = tl.constexpr(0x4B400000)
"""The bits of the number that `FLOOR` adds."""


@triton.jit
def floor_up_to(x, most, NATIVE: tl.constexpr):
    """Return the floor of fp32 x >= 0, at most int32 `most`; bits from 22 on are undefined."""
    if NATIVE:
        # The bits grow with the number, up to infinity.
        raised = tl.inline_asm_elementwise(FLOOR, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        return tl.minimum(raised.to(tl.int32, bitcast=True), most + MAGIC)
    else:
        return tl.minimum(tl.floor(tl.minimum(x, 4194304.0)).to(tl.int32), most)


@triton.jit
def divide_rows(x, divisor, NATIVE: tl.constexpr):
    """Return IEEE's fp32 quotients of rows `[rows, width]` by positive divisors `[rows, 1]`.

    Natively as in `vattn.kernels.triton.common.codec.divide_by_steps`, with one reciprocal per row. For divisors from
    2^-45 to 2^125, as here, no step leaves fp32's range but for quotients far below 1.
    """
    if NATIVE:
        reciprocal = tl.zeros_like(x) + tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
        quotient = x * reciprocal
        return tl.fma(tl.fma(-quotient, tl.zeros_like(x) + divisor, x), reciprocal, quotient)
    else:
        return tl.div_rn(x, tl.zeros_like(x) + divisor)


@triton.jit
def store_codes(codes, values, rows, PART: tl.constexpr):
    """Store int32 codes `[rows, width]` as `pack_codes` of the reference does, where `rows` `[rows, 1]` is true.

    Bits from 22 on of four- and eight-bit codes are ignored.
    """
    COUNT: tl.constexpr = values.shape[0]
    WIDE: tl.constexpr = PART[1]
    if PART[2] == 8:
        column = tl.arange(0, WIDE)[None, :]
        tl.store(codes + column, values.to(tl.uint8), mask=rows & (column < PART[0]))
    elif PART[2] == 4:
        pairs = tl.reshape(values, [COUNT, WIDE // 2, 2]) << (4 * tl.arange(0, 2))[None, None, :]
        column = tl.arange(0, WIDE // 2)[None, :]
        tl.store(codes + column, tl.sum(pairs, axis=2).to(tl.uint8), mask=rows & (column < PART[0] // 2))
    else:
        groups = tl.reshape(values, [COUNT, WIDE // 8, 8]) << (3 * tl.arange(0, 8))[None, None, :]
        word = tl.sum(groups, axis=2)
        column = tl.arange(0, WIDE // 8)[None, :]
        for byte in tl.static_range(0, 3):
            target = codes + 3 * column + byte
            tl.store(target, ((word >> (8 * byte)) & 255).to(tl.uint8), mask=rows & (column < PART[0] // 8))


@triton.jit
def load_codes(codes, rows, PART: tl.constexpr):
    """Return the int32 codes `[rows, width]` of rows; `rows` `[rows, 1]` masks, or is `None`."""
    WIDE: tl.constexpr = PART[1]
    if PART[2] == 8:
        return load_bytes(codes, rows, tl.arange(0, WIDE)[None, :], PART[0], PART[0] == WIDE).to(tl.int32)
    elif PART[2] == 4:
        pairs = load_bytes(codes, rows, tl.arange(0, WIDE // 2)[None, :], PART[0] // 2, PART[0] == WIDE).to(tl.int32)
        return tl.interleave(pairs & 15, pairs >> 4)
    else:
        bit = 3 * tl.arange(0, WIDE)[None, :]
        low = load_bytes(codes, rows, bit // 8, PART[0] * 3 // 8, False).to(tl.int32)
        high = load_bytes(codes, rows, bit // 8 + 1, PART[0] * 3 // 8, False).to(tl.int32)
        return ((low | (high << 8)) >> (bit % 8)) & 7


@triton.jit
def load_bytes(codes, rows, column, COUNT: tl.constexpr, WHOLE: tl.constexpr):
    """Return bytes `[rows, columns]`; zero from column COUNT on; WHOLE: there are none."""
    if rows is None:
        if WHOLE:
            return tl.load(codes + column)
        else:
            return tl.load(codes + column, mask=column < COUNT, other=0)
    else:
        return tl.load(codes + column, mask=rows & (column < COUNT), other=0)


@triton.jit
def load_row_scale(scales, rows):
    """Return the scale of each row, fp32 `[rows, 1]`."""
    if rows is None:
        return tl.load(scales).to(tl.float32)
    else:
        return tl.load(scales, mask=rows, other=0.0).to(tl.float32)


@triton.jit
def lesser(a, b):
    return tl.minimum(a, b, propagate_nan=EVERY_NAN)


@triton.jit
def extremes(x):
    """Return the least and the largest of each row `[rows, 1]`, NaN if there is one."""
    if INTERPRETED:
        # The interpreter reduces by its own functions in one step, by others value by value.
        has_nan = tl.max((x != x).to(tl.int32), axis=1) > 0
        least = tl.where(has_nan, float("nan"), tl.min(x, axis=1))
        return least[:, None], tl.where(has_nan, float("nan"), tl.max(x, axis=1))[:, None]
    else:
        return tl.reduce(x, 1, lesser)[:, None], tl.reduce(x, 1, larger)[:, None]


@triton.jit
def row_scale(x, LARGEST: tl.constexpr):
    """Return the scale of each row `[rows, 1]`; NaN if it is not finite."""
    absmax = absolute_maximum(x)[:, None]
    absmax = tl.where(absmax < MIN_ABSMAX, MIN_ABSMAX, absmax)
    scale = tl.div_rn(absmax, tl.full(absmax.shape, LARGEST, tl.float32))
    return tl.where(scale < INFINITY, scale, float("nan"))


@triton.jit
def store_int8(x, given, codes, scales, rows, PART: tl.constexpr, NATIVE: tl.constexpr):
    scale = row_scale(x, 127.0)
    ratio = divide_rows(x, scale, NATIVE)
    # Halves away from zero are halves up of magnitudes, at most 127 by the choice of the scale.
    magnitude = floor_to_int(tl.abs(ratio) + 0.5, NATIVE)
    sign = x.to(tl.int32, bitcast=True) >> 31
    keep = tl.where(scale == scale, 255, 0)
    store_codes(codes, ((magnitude ^ sign) - sign) & keep, rows, PART)
    tl.store(scales, scale, mask=rows)


@triton.jit
def load_int8(codes, scales, rows, PART: tl.constexpr, NATIVE: tl.constexpr):
    return load_codes(codes, rows, PART).to(tl.int8).to(tl.float32), load_row_scale(scales, rows)


@triton.jit
def store_fp8(x, given, codes, scales, rows, PART: tl.constexpr, NATIVE: tl.constexpr):
    scale = row_scale(x, 448.0)
    known = scale == scale
    stored = encode_quotient(tl.where(known, x, 0.0), tl.where(known, scale, 1.0), "fp8_e4m3", NATIVE)
    store_codes(codes, stored.to(tl.int32), rows, PART)
    tl.store(scales, scale, mask=rows)


@triton.jit
def load_fp8(codes, scales, rows, PART: tl.constexpr, NATIVE: tl.constexpr):
    stored = load_codes(codes, rows, PART).to(tl.uint8)
    return decode(stored, "fp8_e4m3", tl.float32, NATIVE), load_row_scale(scales, rows)


@triton.jit
def store_int4(x, given, codes, scales, rows, PART: tl.constexpr, NATIVE: tl.constexpr):
    BLOCK: tl.constexpr = PART[3]
    FLIP: tl.constexpr = PART[4]
    y = rotate(x, BLOCK, FLIP)
    least, most = extremes(y)
    # Columns beyond the row are zeros, which are in the range anyway.
    low = tl.minimum(least, 0.0)
    high = tl.maximum(most, 0.0)
    known = (least > -INFINITY) & (most < INFINITY)
    reach = tl.maximum(high - low, MIN_ABSMAX)
    bits = tl.div_rn(reach, tl.full(reach.shape, 15.0, tl.float32)).to(tl.int32, bitcast=True) & -16
    step = bits.to(tl.float32, bitcast=True)
    known = known & (step < INFINITY)
    step = tl.where(known, step, 1.0)
    zero_point = halves_up(tl.div_rn(-low, step))
    zero_point = tl.where(known, tl.minimum(tl.maximum(zero_point, 0.0), 15.0), 0.0).to(tl.int32)
    # No code is negative: x and -x, both rounded with halves up, never sum to less than zero.
    values = tl.minimum(floor_to_int(divide_rows(y, step, NATIVE) + 0.5, NATIVE) + zero_point, 15)
    store_codes(codes, values & tl.where(known, 15, 0), rows, PART)
    scale = (bits | zero_point).to(tl.float32, bitcast=True)
    tl.store(scales, tl.where(known, scale, float("nan")), mask=rows)


@triton.jit
def load_int4(codes, scales, rows, PART: tl.constexpr, NATIVE: tl.constexpr):
    bits = load_row_scale(scales, rows).to(tl.int32, bitcast=True)
    step = (bits & -16).to(tl.float32, bitcast=True) * (2.0 ** -PART[5])
    return (load_codes(codes, rows, PART) - (bits & 15)).to(tl.float32), step


@triton.jit
def nvfp4_rows(groups, absmax, given, NATIVE: tl.constexpr):
    """Return the e4m3 bytes of block scales and e2m1 codes in int32 of groups with these maxima."""
    block = tl.div_rn(absmax, tl.full(absmax.shape, 6.0, tl.float32))
    stored = encode_e4m3(tl.div_rn(block, tl.zeros_like(block) + given))
    step = decode(stored, "fp8_e4m3", tl.float32, False) * given
    step = tl.expand_dims(tl.where(step == 0.0, INFINITY, step), 2)
    return stored, nvfp4_codes(groups, step, False, NATIVE)


@triton.jit
def store_groups(values, stored, codes, scales, rows, PART: tl.constexpr):
    """Store codes `[rows, groups, columns]` and a byte of scale for each group."""
    store_codes(codes, tl.reshape(values, [values.shape[0], PART[1]]), rows, PART)
    store_group_scales(stored, scales, rows, PART)


@triton.jit
def store_group_scales(stored, scales, rows, PART: tl.constexpr):
    """Store a byte of scale for each group."""
    column = tl.arange(0, stored.shape[1])[None, :]
    tl.store(scales + column, stored, mask=rows & (column < PART[0] // PART[6]))


@triton.jit
def store_nvfp4(x, given, codes, scales, rows, PART: tl.constexpr, NATIVE: tl.constexpr):
    groups = tl.reshape(x, [x.shape[0], PART[1] // PART[6], PART[6]])
    stored, values = nvfp4_rows(groups, absolute_maximum(groups), given, NATIVE)
    store_groups(values, stored, codes, scales, rows, PART)


@triton.jit
def e2m1_to_float32(code):
    """Return the values of int32 e2m1 codes: read as fp16 the bits are 2^-14 of them, subnormals included."""
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def load_nvfp4(codes, scales, rows, PART: tl.constexpr, NATIVE: tl.constexpr):
    x = e2m1_to_float32(load_codes(codes, rows, PART))
    GROUPS: tl.constexpr = PART[1] // PART[6]
    column = tl.arange(0, GROUPS)[None, :]
    stored = load_bytes(scales, rows, column, PART[0] // PART[6], PART[0] == PART[1])
    scale = tl.expand_dims(decode(stored, "fp8_e4m3", tl.float32, NATIVE), 2)
    COUNT: tl.constexpr = x.shape[0]
    x = tl.reshape(tl.reshape(x, [COUNT, GROUPS, PART[6]]) * scale, [COUNT, PART[1]])
    return x, tl.full([COUNT, 1], 1.0, tl.float32)


@triton.jit
def store_e4m3(x, given, codes, scales, rows, PART: tl.constexpr, NATIVE: tl.constexpr):
    store_codes(codes, encode_e4m3(x).to(tl.int32), rows, PART)


@triton.jit
def load_e4m3(codes, scales, rows, PART: tl.constexpr, NATIVE: tl.constexpr):
    x = decode(load_codes(codes, rows, PART).to(tl.uint8), "fp8_e4m3", tl.float32, NATIVE)
    return x, tl.full([x.shape[0], 1], 1.0, tl.float32)


@triton.jit
def to_fp16(x):
    """Round fp32 to fp16, saturating."""
    return tl.minimum(tl.maximum(x, -FP16_MAX), FP16_MAX).to(tl.float16)


@triton.jit
def level(code, BITS: tl.constexpr):
    """Return the centroids of int32 codes, symmetric about zero: the upper half by selections, then the sign."""
    HALF: tl.constexpr = 1 << (BITS - 1)
    upper = code >= HALF
    place = tl.where(upper, code - HALF, HALF - 1 - code)
    size = tl.zeros_like(code).to(tl.float32)
    for index in tl.static_range(0, HALF):
        if BITS == 4:
            size = tl.where(place == index, LEVELS_4[HALF + index], size)
        else:
            size = tl.where(place == index, LEVELS_3[HALF + index], size)
    return tl.where(upper, size, -size)


@triton.jit
def place_of(magnitude, unit, BITS: tl.constexpr):
    """Return how many boundaries above zero magnitudes reach, as bits of 4, 2 and 1 (three booleans)."""
    if BITS == 4:
        four = magnitude >= unit * BOUNDARIES_4[11]
        two = magnitude >= tl.where(four, unit * BOUNDARIES_4[13], unit * BOUNDARIES_4[9])
        one = magnitude >= tl.where(
            four,
            tl.where(two, unit * BOUNDARIES_4[14], unit * BOUNDARIES_4[12]),
            tl.where(two, unit * BOUNDARIES_4[10], unit * BOUNDARIES_4[8]),
        )
    else:
        four = magnitude < 0.0
        two = magnitude >= unit * BOUNDARIES_3[5]
        one = magnitude >= tl.where(two, unit * BOUNDARIES_3[6], unit * BOUNDARIES_3[4])
    return four, two, one


@triton.jit
def squared_level(four, two, one, BITS: tl.constexpr):
    """Return the squares of the centroids of these indices."""
    if BITS == 4:
        lower = tl.where(two, tl.where(one, SQUARES_4[3], SQUARES_4[2]), tl.where(one, SQUARES_4[1], SQUARES_4[0]))
        upper = tl.where(two, tl.where(one, SQUARES_4[7], SQUARES_4[6]), tl.where(one, SQUARES_4[5], SQUARES_4[4]))
        return tl.where(four, upper, lower)
    else:
        return tl.where(two, tl.where(one, SQUARES_3[3], SQUARES_3[2]), tl.where(one, SQUARES_3[1], SQUARES_3[0]))


@triton.jit
def stored_length(length, squares, PART: tl.constexpr):
    """Return the stored lengths of rows, fp16, by the squares of their centroids; NaN for rows that are not finite."""
    longer = tl.sqrt_rn(pairwise_sum(squares))
    stored = tl.div_rn(length * (PART[0] ** 0.5), longer)
    stored = tl.where((length < INFINITY) & (stored < INFINITY), to_fp16(stored), float("nan"))
    return stored.to(tl.float16)


@triton.jit
def store_codebook(x, given, codes, scales, rows, PART: tl.constexpr, NATIVE: tl.constexpr):
    BITS: tl.constexpr = PART[2]
    BLOCK: tl.constexpr = PART[3]
    HALF: tl.constexpr = 1 << (BITS - 1)
    length = tl.sqrt_rn(pairwise_sum(x * x))
    y = rotate(x, BLOCK, PART[4])
    # If the sum of squares is finite, so are the sums and differences of the rotation.
    known = length < INFINITY
    unit = length + MIN_LENGTH
    # Boundaries are symmetric about zero. A value on one belongs to the level above, for negative numbers the smaller
    # magnitude, so their magnitudes are lowered by one unit in the last place.
    flipped = tl.where(y < 0.0, -1, 0)
    magnitude = (tl.abs(y).to(tl.int32, bitcast=True) + flipped).to(tl.float32, bitcast=True)
    four, two, one = place_of(magnitude, unit, BITS)
    place = tl.where(two, HALF + 2, HALF) + tl.where(one, 1, 0)
    if BITS == 4:
        place += tl.where(four, 4, 0)
    # Codes of negative numbers count down from the middle: invert all bits.
    values = (place ^ flipped) & tl.where(known, 2 * HALF - 1, 0)
    # Rows that are not finite have a length of NaN. Columns of padding do not count.
    squares = squared_level(four, two, one, BITS)
    if PART[0] < PART[1]:
        squares = tl.where(tl.arange(0, PART[1])[None, :] < PART[0], squares, 0.0)
    stored = stored_length(length, squares, PART)
    store_codes(codes, values, rows, PART)
    tl.store(scales, stored, mask=rows)


@triton.jit
def load_codebook(codes, scales, rows, PART: tl.constexpr, NATIVE: tl.constexpr):
    BITS: tl.constexpr = PART[2]
    return level(load_codes(codes, rows, PART), BITS), load_row_scale(scales, rows) * (2.0 ** -PART[5])


@triton.jit
def uniform_rows(x, PART: tl.constexpr):
    """Return the lowest values of rows, fp16 and the same in fp32, their steps in fp16, and which rows are finite."""
    STEPS: tl.constexpr = (1 << PART[2]) - 1
    if PART[0] == PART[1]:
        lowest, highest = extremes(x)
    else:
        # Columns of padding repeat the first one.
        inside = tl.arange(0, PART[1])[None, :] < PART[0]
        first = tl.sum(tl.where(tl.arange(0, PART[1])[None, :] == 0, x, 0.0), axis=1)[:, None]
        lowest, highest = extremes(tl.where(inside, x, first))
    known = (lowest > -INFINITY) & (highest < INFINITY)
    # Adding zero drops the sign of a zero, here and below.
    least = to_fp16(tl.where(known, lowest, 0.0) + 0.0)
    origin = least.to(tl.float32)
    reach = tl.maximum(tl.where(known, highest, 0.0) - origin, 0.0) + 0.0
    step = tl.minimum(tl.div_rn(reach, tl.full(reach.shape, STEPS, tl.float32)), FP16_MAX).to(tl.float16)
    return least, origin, step, known


@triton.jit
def store_uniform_scales(scales, least, step, known, rows):
    """Store steps and lowest values, NaN for rows that are not finite."""
    nan = tl.full(step.shape, float("nan"), tl.float16)
    tl.store(scales, tl.where(known, step, nan), mask=rows)
    tl.store(scales + 1, tl.where(known, least, nan), mask=rows)


@triton.jit
def store_uniform(x, given, codes, scales, rows, PART: tl.constexpr, NATIVE: tl.constexpr):
    STEPS: tl.constexpr = (1 << PART[2]) - 1
    least, origin, step, known = uniform_rows(x, PART)
    # A step of zero has codes of zero.
    is_kept = known & (step > 0.0)
    ratio = tl.maximum(divide_rows(x - origin, tl.where(is_kept, step.to(tl.float32), 1.0), NATIVE), 0.0)
    # The maximum of NaN and a number is the number.
    values = floor_up_to(ratio + 0.5, tl.where(is_kept, STEPS, 0), NATIVE)
    if PART[2] == 3:
        values = values & 7
    store_codes(codes, values, rows, PART)
    store_uniform_scales(scales, least, step, known, rows)


@triton.jit
def load_uniform(codes, scales, rows, PART: tl.constexpr, NATIVE: tl.constexpr):
    step = load_row_scale(scales, rows)
    x = load_codes(codes, rows, PART).to(tl.float32) * step + load_row_scale(scales + 1, rows)
    return x, tl.full(step.shape, 1.0, tl.float32)


class TritonCodec(NamedTuple):
    """Device functions of one codec."""

    load: Any
    store: Any


TRITON_CODECS: dict[str, TritonCodec] = {
    "int8": TritonCodec(load_int8, store_int8),
    "fp8": TritonCodec(load_fp8, store_fp8),
    "int4": TritonCodec(load_int4, store_int4),
    "nvfp4": TritonCodec(load_nvfp4, store_nvfp4),
    "e4m3": TritonCodec(load_e4m3, store_e4m3),
    "codebook": TritonCodec(load_codebook, store_codebook),
    "uniform": TritonCodec(load_uniform, store_uniform),
}
"""By `PackedPart.codec`."""
