"""Write results in the output format, in all kernels.

Results are rounded to the model dtype first, then quantised in fp32. ARITHMETIC is `output_arithmetic` of the config.
With "divide" and "multiply" every division is IEEE's, so codes equal those of `vattn.quantization.codecs` bit for bit;
the approximate ones divide as Inductor's generated CUDA code does: `/` is `div.full`, and a divisor known at compile
time becomes a multiplication by its reciprocal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.kernels.triton.common.codec import (
    INTERPRETED,
    cast,
    decode,
    divide_by_steps,
    encode_e2m1,
    encode_e4m3,
    encode_native,
)

EVERY_NAN = tl.constexpr(tl.PropagateNan.ALL)
MIN_ABSMAX = tl.constexpr(1e-10)
"""`vattn.quantization.codecs.MIN_ABSMAX`; a test compares them."""


@triton.jit
def load_scale(output_scale):
    """Return a given scale, loaded early; 1 without one."""
    if output_scale is None:
        return 1.0
    else:
        return tl.load(output_scale)


@triton.jit
def store_rows(pointer, x, mask, scale, MODEL: tl.constexpr, OUTPUT: tl.constexpr):
    """Store fp32 results as they are ("partial"), in the model dtype ("none") or as static FP8 under a loaded scale.

    OUTPUT is then "fp8_divide", "fp8_approximate_divide", or "fp8_multiply" with the reciprocal of the scale.
    """
    if OUTPUT == "partial":
        tl.store(pointer, x, mask=mask)
    elif OUTPUT == "none":
        tl.store(pointer, cast(x, MODEL), mask=mask)
    else:
        rounded = cast(x, MODEL).to(tl.float32)
        if OUTPUT == "fp8_multiply":
            quotient = rounded * scale
        else:
            quotient = divide(rounded, scale, OUTPUT == "fp8_approximate_divide")
        tl.store(pointer, encode_e4m3(quotient), mask=mask)


@triton.jit
def divide(x, divisor, APPROXIMATE: tl.constexpr):
    """Return fp32 quotients."""
    if APPROXIMATE:
        return x / (tl.zeros_like(x) + divisor)
    else:
        return tl.div_rn(x, tl.zeros_like(x) + divisor)


@triton.jit
def divide_by_constant(x, DIVISOR: tl.constexpr, APPROXIMATE: tl.constexpr):
    """Return fp32 quotients by a number."""
    if APPROXIMATE:
        return x * (1.0 / DIVISOR)
    else:
        return tl.div_rn(x, tl.zeros_like(x) + DIVISOR)


@triton.jit
def encode_output(x, NATIVE_FP8: tl.constexpr):
    """Return fp32 values as e4m3 bytes; both lowerings give the same but for the kind of NaN."""
    if NATIVE_FP8:
        return encode_native(x, "fp8_e4m3")
    else:
        return encode_e4m3(x)


@triton.jit
def quantise_static(x, scale, ARITHMETIC: tl.constexpr, NATIVE_FP8: tl.constexpr = False):
    """Return e4m3 bytes of x under a given scale, the reciprocal if ARITHMETIC multiplies."""
    if ARITHMETIC == "multiply" or ARITHMETIC == "approximate_multiply":
        return encode_output(x * scale, NATIVE_FP8)
    else:
        return encode_output(divide(x, scale, ARITHMETIC == "approximate_divide"), NATIVE_FP8)


@triton.jit
def scaled(x, scale, ARITHMETIC: tl.constexpr):
    """Return what is rounded to codes of x under a computed scale; "factor": it is a factor."""
    if ARITHMETIC == "multiply" or ARITHMETIC == "approximate_multiply":
        one = tl.zeros_like(scale) + 1.0
        return x * divide(one, scale, ARITHMETIC == "approximate_multiply")
    elif ARITHMETIC == "factor":
        return x * scale
    else:
        return divide(x, scale, ARITHMETIC == "approximate_divide")


@triton.jit
def quantise_dynamic(x, scale, ARITHMETIC: tl.constexpr, NATIVE_FP8: tl.constexpr = False):
    """Return e4m3 bytes of x under a computed scale."""
    return encode_output(scaled(x, scale, ARITHMETIC), NATIVE_FP8)


@triton.jit
def encode_int8(x):
    """Return fp32 values as int8: saturating, nearest even, NaN as 0."""
    limited = tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -128.0), 127.0)
    # 1.5 * 2**23 has a unit in the last place of 1, so the adder rounds.
    return ((limited + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)


@triton.jit
def larger(a, b):
    """Return the larger of two numbers, NaN if one is."""
    return tl.maximum(a, b, propagate_nan=EVERY_NAN)


@triton.jit
def absolute_maximum(x, AXIS: tl.constexpr = -1):
    """Return the largest magnitude along an axis, NaN if there is one."""
    if INTERPRETED:
        # The interpreter reduces by `tl.max` in one step, by other functions value by value.
        largest = tl.max(tl.abs(x), axis=AXIS)
        has_nan = tl.max((x != x).to(tl.int32), axis=AXIS) > 0
        return tl.where(has_nan, float("nan"), largest)
    else:
        return tl.reduce(tl.abs(x), AXIS, larger)


@triton.jit
def dynamic_scale(
    absmax, SCALES: tl.constexpr, MIN_SCALE: tl.constexpr, ARITHMETIC: tl.constexpr, LIMIT: tl.constexpr = 448.0
):
    """Return the scale of a row or group with this absolute maximum; a negative MIN_SCALE means the default.

    SCALES: "plain", "zero_replaced" (MIN_SCALE replaces zero alone), "power_of_two" (MIN_SCALE, then rounded up), or
    "floored_power_of_two" (rounded up, then MIN_SCALE).
    """
    APPROXIMATE: tl.constexpr = ARITHMETIC == "approximate_divide" or ARITHMETIC == "approximate_multiply"
    if MIN_SCALE >= 0.0:
        scale = divide_by_constant(absmax, LIMIT, APPROXIMATE)
        if SCALES == "zero_replaced":
            scale = tl.where(scale == 0.0, MIN_SCALE, scale)
        elif SCALES != "floored_power_of_two":
            scale = tl.where(scale < MIN_SCALE, MIN_SCALE, scale)
    else:
        scale = divide_by_constant(tl.where(absmax < MIN_ABSMAX, MIN_ABSMAX, absmax), LIMIT, APPROXIMATE)
    if SCALES == "power_of_two" or SCALES == "floored_power_of_two":
        # Adding the mantissa mask carries into the exponent exactly when some mantissa bit is set.
        bits = (scale.to(tl.uint32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = tl.where(scale == scale, bits.to(tl.float32, bitcast=True), scale)
    if SCALES == "floored_power_of_two":
        scale = tl.where(scale < MIN_SCALE, MIN_SCALE, scale)
    return scale


@triton.jit
def mx_scales(absmax, CEIL: tl.constexpr, APPROXIMATE: tl.constexpr):
    """Return the e8m0 bytes of groups with these maxima, and factors (CEIL) or divisors, as `codecs._mx_scales`."""
    if CEIL:
        scale = divide_by_constant(absmax, 448.0, APPROXIMATE)
        bits = scale.to(tl.int32, bitcast=True)
        exponent = tl.where(bits <= 0x400000, 0, tl.minimum((bits + 0x7FFFFF) >> 23, 254))
        # Beside 2**-127, which is subnormal, powers are made by their exponents.
        power = tl.where(exponent == 254, 0x400000, (254 - exponent) << 23).to(tl.float32, bitcast=True)
        step = tl.where(scale == scale, tl.where(exponent == 0, 1.0, power), scale)
    else:
        exponent = tl.maximum((absmax.to(tl.int32, bitcast=True) >> 23) - 8, 0)
        exponent = tl.where(absmax == absmax, exponent, 255)
        step = (tl.maximum(exponent, 1) << 23).to(tl.float32, bitcast=True)
    return tl.where(absmax == absmax, exponent, 255).to(tl.uint8), step


@triton.jit
def factor_scales(absmax, KIND: tl.constexpr, LEAST: tl.constexpr, APPROXIMATE: tl.constexpr, LIMIT: tl.constexpr):
    """Return the stored scales of groups with these maxima, and the factors of their values; KIND: `OUTPUT_FACTORS`."""
    largest = tl.where(absmax < LEAST, LEAST, absmax)
    one = tl.zeros_like(largest) + 1.0
    if KIND == "factor" or KIND == "factor_inverse":
        factor = divide(one, largest, APPROXIMATE) * LIMIT
    else:
        factor = divide(one * LIMIT, largest, APPROXIMATE)
    if KIND == "factor_inverse" or KIND == "quotient_inverse":
        return divide(one, factor, APPROXIMATE), factor
    else:
        return divide_by_constant(largest, LIMIT, APPROXIMATE), factor


@triton.jit
def computed_scales(
    absmax, SCALES: tl.constexpr, MIN_SCALE: tl.constexpr, ARITHMETIC: tl.constexpr, APPROXIMATE: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """Return the stored scales of rows or groups with these absolute maxima, and `scale` of `scaled`.

    SCALES: that of `dynamic_scale`, "mx_ceil", "mx_floor", or a name of `OUTPUT_FACTORS`.
    """
    if SCALES == "mx_ceil" or SCALES == "mx_floor":
        return mx_scales(absmax, SCALES == "mx_ceil", APPROXIMATE)
    elif SCALES == "factor" or SCALES == "factor_inverse" or SCALES == "quotient" or SCALES == "quotient_inverse":
        return factor_scales(absmax, SCALES, MIN_SCALE, APPROXIMATE, LIMIT)
    else:
        scale = dynamic_scale(absmax, SCALES, MIN_SCALE, ARITHMETIC, LIMIT)
        return scale, scale


@triton.jit
def nvfp4_scales(absmax, scale, APPROXIMATE: tl.constexpr, NATIVE_FP8: tl.constexpr = False):
    """Return the e4m3 bytes of the block scales of groups with these maxima, and the divisors of their values."""
    per_block = divide(divide_by_constant(absmax, 6.0, APPROXIMATE), scale, APPROXIMATE)
    block_scale = encode_output(per_block, NATIVE_FP8)
    step = decode(block_scale, "fp8_e4m3", tl.float32, NATIVE_FP8) * scale
    return block_scale, tl.where(step == 0.0, float("inf"), step)


@triton.jit
def quotients(x, step):
    """Return IEEE's fp32 quotients, but for some that codes round to zero or to their limit, without branches.

    As `divide_by_steps`, for steps of any size: see `vattn.kernels.hopper.epilogue.quotients`.
    """
    size = tl.abs(step)
    factor = tl.where(size < 8.6736174e-19, 1.8446744e19, tl.where(size > 1.1529215e18, 5.421011e-20, 1.0))
    step = step * factor
    reciprocal = tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)
    x = x * factor
    product = x * reciprocal
    corrected = tl.fma(tl.fma(-product, tl.zeros_like(x) + step, x), tl.zeros_like(x) + reciprocal, product)
    largeness = tl.abs(product)
    return tl.where((largeness < 1.0995116e12) & (largeness > 9.094947e-13), corrected, product)


@triton.jit
def round_e2m1(x):
    """Return fp32 values as e2m1 codes 0 to 15 in int32, as `encode_e2m1`, in half as many instructions.

    Adds a power of two with the spacing of the codes as its unit in the last place, so that the adder rounds.
    """
    magnitude = tl.minimum(tl.abs(x), 6.0)
    binade = tl.maximum(magnitude.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
    magic = binade + (22 << 23)
    rounded = (magnitude + magic.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    sign = (x.to(tl.uint32, bitcast=True) >> 31).to(tl.int32)
    return (rounded - magic + (binade >> 22) - 254) | (sign << 3)


@triton.jit
def nvfp4_codes(x, step, APPROXIMATE: tl.constexpr, MANY: tl.constexpr = False):
    """Return e2m1 codes in int32; `step` broadcasts. MANY: optimise for throughput, not latency."""
    if MANY and not APPROXIMATE:
        ratio = divide_by_steps(x, step)
    else:
        ratio = divide(x, step, APPROXIMATE)
    if MANY:
        codes = round_e2m1(ratio)
    else:
        codes = encode_e2m1(ratio)
    return tl.where(ratio == ratio, codes, 7)


@triton.jit
def quantise_nvfp4(x, scale, ARITHMETIC: tl.constexpr, NATIVE_FP8: tl.constexpr = False):
    """Return e2m1 codes (int32) of groups `[groups, 16]` and the e4m3 bytes of their block scales."""
    APPROXIMATE: tl.constexpr = ARITHMETIC == "approximate_divide"
    block_scale, step = nvfp4_scales(absolute_maximum(x), scale, APPROXIMATE, NATIVE_FP8)
    return nvfp4_codes(x, step[:, None], APPROXIMATE, NATIVE_FP8), block_scale


@triton.jit
def group_scales(absmax, scale, GROUPS: tl.constexpr, NATIVE_FP8: tl.constexpr = False):
    """Return the stored scales of groups with these maxima, and the divisors of their values."""
    if GROUPS[1]:
        stored, step = nvfp4_scales(absmax, scale, GROUPS[4] == "approximate_divide", NATIVE_FP8)
        return stored, step
    else:
        # Triton 3.6 does not take a tuple element as a constexpr argument.
        SCALES: tl.constexpr = GROUPS[2]
        LEAST: tl.constexpr = GROUPS[3]
        ARITHMETIC: tl.constexpr = GROUPS[4]
        made = dynamic_scale(absmax, SCALES, LEAST, ARITHMETIC)
        return made, made


@triton.jit
def group_codes(x, step, GROUPS: tl.constexpr, NATIVE_FP8: tl.constexpr = False):
    """Return codes of values under the second result of `group_scales`: e4m3 bytes, or e2m1 in int32."""
    if GROUPS[1] and GROUPS[4] == "corrected":
        ratio = quotients(x, step)
        return tl.where(ratio == ratio, round_e2m1(ratio), 7)
    elif GROUPS[1]:
        return nvfp4_codes(x, step, GROUPS[4] == "approximate_divide")
    elif GROUPS[4] == "corrected":
        return encode_output(quotients(x, step), NATIVE_FP8)
    else:
        ARITHMETIC: tl.constexpr = GROUPS[4]
        return quantise_dynamic(x, step, ARITHMETIC, NATIVE_FP8)


@triton.jit
def store_group_row(
    output, scales, x, scale, stride_group, COLUMNS: tl.constexpr, MODEL: tl.constexpr, GROUPS: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    """Quantise and store fp32 columns `[COLUMNS]` of whole groups, and their scales."""
    SIZE: tl.constexpr = GROUPS[0]
    COUNT: tl.constexpr = COLUMNS // SIZE
    groups = tl.reshape(cast(x, MODEL).to(tl.float32), [COUNT, SIZE])
    stored, step = group_scales(absolute_maximum(groups), scale, GROUPS, NATIVE_FP8)
    codes = tl.reshape(group_codes(groups, step[:, None], GROUPS, NATIVE_FP8), [COLUMNS])
    if GROUPS[1]:
        pairs = tl.reshape(codes, [COLUMNS // 2, 2]) << (4 * tl.arange(0, 2))[None, :]
        tl.store(output + tl.arange(0, COLUMNS // 2), tl.sum(pairs, axis=1).to(tl.uint8))
    else:
        tl.store(output + tl.arange(0, COLUMNS), codes)
    tl.store(scales + tl.arange(0, COUNT) * stride_group, stored)


@triton.jit
def swizzled_offset(row, column, COLUMNS: tl.constexpr):
    """Return the offset of a block scale in 128 x 4 tiles; COLUMNS is the padded number of columns."""
    tile = (row // 128) * (COLUMNS // 4) + column // 4
    return tile.to(tl.int64) * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
