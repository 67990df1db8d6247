"""Results to what the caller asked for, shared by every kernel.

They are rounded to the model dtype first, then quantised in fp32. ARITHMETIC is `output_arithmetic` of the config. With
"divide" and "multiply" every division is IEEE's, so that codes equal those of `vattn.quantization` bit for bit; the
approximate ones divide as code that Inductor generates for CUDA: `/` is `div.full`, and a divisor known at compile time
is multiplied by its reciprocal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.config import AttentionConfig
from vattn.ops.triton.codec import cast, decode, encode_e2m1, encode_e4m3

MIN_ABSMAX = tl.constexpr(1e-10)
"""`vattn.quantization.MIN_ABSMAX`; a test compares them."""


def row_output(config: AttentionConfig) -> str:
    """Return how a kernel that owns whole rows stores them: `OUTPUT` of `store_rows`.

    Formats that compute scales are stored in the model dtype here, for the finishing kernel.
    """
    if config.output_format != "fp8_static":
        return "none"
    arithmetic = config.output_arithmetic
    return "fp8_" + ("multiply" if arithmetic.endswith("multiply") else arithmetic)


@triton.jit
def store_rows(pointer, x, mask, output_scale, MODEL: tl.constexpr, OUTPUT: tl.constexpr):
    """Store fp32 results as they are ("partial"), in the model dtype ("none") or as static FP8.

    OUTPUT is then "fp8_divide", "fp8_approximate_divide", or "fp8_multiply" with the reciprocal of the scale.
    """
    if OUTPUT == "partial":
        tl.store(pointer, x, mask=mask)
    elif OUTPUT == "none":
        tl.store(pointer, cast(x, MODEL), mask=mask)
    else:
        rounded = cast(x, MODEL).to(tl.float32)
        scale = tl.load(output_scale)
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
def quantise_static(x, scale, ARITHMETIC: tl.constexpr):
    """Return e4m3 bytes of x under a given scale, which is the reciprocal already where ARITHMETIC multiplies."""
    if ARITHMETIC == "multiply" or ARITHMETIC == "approximate_multiply":
        return encode_e4m3(x * scale)
    else:
        return encode_e4m3(divide(x, scale, ARITHMETIC == "approximate_divide"))


@triton.jit
def quantise_dynamic(x, scale, ARITHMETIC: tl.constexpr):
    """Return e4m3 bytes of x under a computed scale."""
    if ARITHMETIC == "multiply" or ARITHMETIC == "approximate_multiply":
        one = tl.zeros_like(scale) + 1.0
        return encode_e4m3(x * divide(one, scale, ARITHMETIC == "approximate_multiply"))
    else:
        return encode_e4m3(divide(x, scale, ARITHMETIC == "approximate_divide"))


@triton.jit
def absolute_maximum(x):
    """Return the largest magnitude along the last axis, NaN if there is one."""
    largest = tl.max(tl.abs(x), axis=-1)
    has_nan = tl.max((x != x).to(tl.int32), axis=-1) > 0
    return tl.where(has_nan, float("nan"), largest)


@triton.jit
def dynamic_scale(absmax, POWER_OF_TWO: tl.constexpr, MIN_SCALE: tl.constexpr, ARITHMETIC: tl.constexpr):
    """Return the FP8 scale of a row or group with this absolute maximum; a negative MIN_SCALE means the default."""
    APPROXIMATE: tl.constexpr = ARITHMETIC == "approximate_divide" or ARITHMETIC == "approximate_multiply"
    if MIN_SCALE >= 0.0:
        scale = divide_by_constant(absmax, 448.0, APPROXIMATE)
        scale = tl.where(scale < MIN_SCALE, MIN_SCALE, scale)
    else:
        scale = divide_by_constant(tl.where(absmax < MIN_ABSMAX, MIN_ABSMAX, absmax), 448.0, APPROXIMATE)
    if POWER_OF_TWO:
        # Adding the mantissa mask carries into the exponent exactly when some mantissa bit is set.
        bits = (scale.to(tl.uint32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = tl.where(scale == scale, bits.to(tl.float32, bitcast=True), scale)
    return scale


@triton.jit
def quantise_nvfp4(x, scale, ARITHMETIC: tl.constexpr):
    """Return e2m1 codes (int32) of groups `[groups, 16]` and the e4m3 bytes of their block scales."""
    APPROXIMATE: tl.constexpr = ARITHMETIC == "approximate_divide"
    per_block = divide(divide_by_constant(absolute_maximum(x), 6.0, APPROXIMATE), scale, APPROXIMATE)
    block_scale = encode_e4m3(per_block)
    step = decode(block_scale, "fp8_e4m3", tl.float32, False) * scale
    step = tl.where(step == 0.0, float("inf"), step)
    ratio = divide(x, step[:, None], APPROXIMATE)
    return tl.where(ratio == ratio, encode_e2m1(ratio), 7), block_scale


@triton.jit
def swizzled_offset(row, column, COLUMNS: tl.constexpr):
    """Return where a block scale lies in 128 x 4 tiles, COLUMNS being the padded number of columns."""
    tile = (row // 128) * (COLUMNS // 4) + column // 4
    return tile.to(tl.int64) * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
