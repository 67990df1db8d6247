"""Results to what the caller asked for, shared by every kernel.

They are rounded to the model dtype first, then quantised in fp32. Every division is IEEE's, so that codes equal
those of `vattn.quantization` bit for bit. MULTIPLY is its other arithmetic: values times the reciprocal of the scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.ops.triton.codec import cast, decode, encode_e2m1, encode_e4m3

MIN_ABSMAX = tl.constexpr(1e-10)
"""`vattn.quantization.MIN_ABSMAX`; a test compares them."""


@triton.jit
def store_rows(
    pointer, x, mask, output_scale, MODEL: tl.constexpr, OUTPUT: tl.constexpr, MULTIPLY: tl.constexpr = False
):
    """Store fp32 results as they are ("partial"), in the model dtype ("none") or as static FP8 ("fp8_static")."""
    if OUTPUT == "partial":
        tl.store(pointer, x, mask=mask)
    elif OUTPUT == "none":
        tl.store(pointer, cast(x, MODEL), mask=mask)
    else:
        code = quantise_static(cast(x, MODEL).to(tl.float32), tl.load(output_scale), MULTIPLY)
        tl.store(pointer, code, mask=mask)


@triton.jit
def quantise_static(x, scale, MULTIPLY: tl.constexpr):
    """Return e4m3 bytes of x under a given scale, which with MULTIPLY is the reciprocal already."""
    if MULTIPLY:
        return encode_e4m3(x * scale)
    else:
        return encode_e4m3(tl.div_rn(x, tl.zeros_like(x) + scale))


@triton.jit
def quantise_dynamic(x, scale, MULTIPLY: tl.constexpr):
    """Return e4m3 bytes of x under a computed scale."""
    if MULTIPLY:
        return encode_e4m3(x * tl.div_rn(tl.zeros_like(scale) + 1.0, scale))
    else:
        return encode_e4m3(tl.div_rn(x, tl.zeros_like(x) + scale))


@triton.jit
def absolute_maximum(x):
    """Return the largest magnitude along the last axis, NaN if there is one."""
    largest = tl.max(tl.abs(x), axis=-1)
    has_nan = tl.max((x != x).to(tl.int32), axis=-1) > 0
    return tl.where(has_nan, float("nan"), largest)


@triton.jit
def dynamic_scale(absmax, POWER_OF_TWO: tl.constexpr, MIN_SCALE: tl.constexpr):
    """Return the FP8 scale of a row or group with this absolute maximum; a negative MIN_SCALE means the default."""
    if MIN_SCALE >= 0.0:
        scale = tl.div_rn(absmax, tl.zeros_like(absmax) + 448.0)
        scale = tl.where(scale < MIN_SCALE, MIN_SCALE, scale)
    else:
        raised = tl.where(absmax < MIN_ABSMAX, MIN_ABSMAX, absmax)
        scale = tl.div_rn(raised, tl.zeros_like(raised) + 448.0)
    if POWER_OF_TWO:
        # Adding the mantissa mask carries into the exponent exactly when some mantissa bit is set.
        bits = (scale.to(tl.uint32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = tl.where(scale == scale, bits.to(tl.float32, bitcast=True), scale)
    return scale


@triton.jit
def quantise_nvfp4(x, scale):
    """Return e2m1 codes (int32) of groups `[groups, 16]` and the e4m3 bytes of their block scales."""
    absmax = absolute_maximum(x)
    per_block = tl.div_rn(tl.div_rn(absmax, tl.zeros_like(absmax) + 6.0), tl.zeros_like(absmax) + scale)
    block_scale = encode_e4m3(per_block)
    step = decode(block_scale, "fp8_e4m3", tl.float32, False) * scale
    step = tl.where(step == 0.0, float("inf"), step)
    ratio = tl.div_rn(x, tl.zeros_like(x) + step[:, None])
    return tl.where(ratio == ratio, encode_e2m1(ratio), 7), block_scale


@triton.jit
def swizzled_offset(row, column, COLUMNS: tl.constexpr):
    """Return where a block scale lies in 128 x 4 tiles, COLUMNS being the padded number of columns."""
    tile = (row // 128) * (COLUMNS // 4) + column // 4
    return tile.to(tl.int64) * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
