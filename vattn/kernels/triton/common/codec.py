"""Decode and encode stored values in Triton kernels, as `vattn.quantization.codecs` specifies.

Kernels take FP8 as bytes. e4m3 has two lowerings: the plain one shifts bits and runs everywhere, also in the
interpreter; the native one is the hardware's conversion (CUDA sm_89 and newer). Encoded bytes are equal on all targets.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
"""Whether this process runs kernels in Triton's interpreter, which cannot multiply bf16 matrices."""


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """Return x rounded to the nearest DTYPE; the interpreter's own cast to bf16 truncates."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        x = x.to(tl.float32)
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, rounded, bits).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def _e4m3_to_float16(raw):
    # Read as fp16 the bits are 2^-8 of the value (exponent bias 7 against 15), subnormals included.
    sign_and_rest = ((raw & 0x80).to(tl.uint16) << 8) | ((raw & 0x7F).to(tl.uint16) << 7)
    small = sign_and_rest.to(tl.float16, bitcast=True)
    return tl.where((raw & 0x7F) == 0x7F, float("nan"), small * 256.0).to(tl.float16)


@triton.jit
def _e5m2_to_float16(raw):
    return (raw.to(tl.uint16) << 8).to(tl.float16, bitcast=True)


@triton.jit
def decode(raw, FORMAT: tl.constexpr, TARGET: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Return stored elements (bytes for FP8) as TARGET, without their scale."""
    if FORMAT == "fp8_e4m3":
        if NATIVE_FP8:
            value = raw.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            value = _e4m3_to_float16(raw)
    elif FORMAT == "fp8_e5m2":
        value = _e5m2_to_float16(raw)
    else:
        value = raw
    return value.to(TARGET)


@triton.jit
def _encode_bits(
    x, MAX: tl.constexpr, SHIFT: tl.constexpr, BIAS: tl.constexpr, TINY: tl.constexpr, MAGIC: tl.constexpr
):
    """Round fp32 to the nearest even FP8 code: SHIFT mantissa bits dropped; below TINY the codes are equally spaced."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = tl.minimum(tl.abs(x), MAX)
    m_bits = magnitude.to(tl.uint32, bitcast=True)
    half = (1 << (SHIFT - 1)) - 1
    normal = ((m_bits + half + ((m_bits >> SHIFT) & 1)) >> SHIFT) - (BIAS << (23 - SHIFT))
    # The unit in the last place of MAGIC is the spacing of the subnormals, so adding MAGIC lets the adder round.
    magic = tl.full(x.shape, MAGIC, tl.float32)
    subnormal = (magnitude + magic).to(tl.uint32, bitcast=True) - magic.to(tl.uint32, bitcast=True)
    code = tl.where(magnitude < TINY, subnormal, normal)
    code = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def encode_e4m3(x):
    """Return fp32 values as e4m3 bytes: saturating, nearest even, NaN stays NaN."""
    return _encode_bits(x, 448.0, 20, 120, 0.015625, 16384.0)


@triton.jit
def encode_e5m2(x):
    """Return fp32 values as e5m2 bytes: saturating, nearest even, NaN stays NaN."""
    return _encode_bits(x, 57344.0, 21, 112, 0.00006103515625, 128.0)


@triton.jit
def encode_e2m1(x):
    """Return fp32 values as e2m1 codes 0 to 15 in int32: saturating, nearest even."""
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    sign = (x.to(tl.uint32, bitcast=True) >> 31).to(tl.int32)
    return code | (sign << 3)


@triton.jit
def encode(x, FORMAT: tl.constexpr, STORED: tl.constexpr):
    """Encode values that are divided by their scale already."""
    if FORMAT == "fp8_e4m3":
        return encode_e4m3(x.to(tl.float32))
    elif FORMAT == "fp8_e5m2":
        return encode_e5m2(x.to(tl.float32))
    else:
        return cast(x, STORED)


@triton.jit
def divide_by_steps(x, step):
    """Return IEEE's fp32 quotients, but for the last places of those beyond the range of FP8; `step` broadcasts.

    A product with the reciprocal is within two units in the last place of the quotient; the exact remainder of an FMA
    corrects it to the nearest. For steps so small or large that this would leave fp32's range it divides.
    """
    reciprocal = tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)
    product = x * reciprocal
    corrected = tl.fma(tl.fma(-product, tl.zeros_like(x) + step, x), tl.zeros_like(x) + reciprocal, product)
    # Above 2^40 the code is the largest or NaN; below 2^-40 it is zero, and the correction could lose its sign.
    largeness = tl.abs(product)
    quotient = tl.where((largeness < 1.0995116e12) & (largeness > 9.094947e-13), corrected, product)
    size = tl.abs(step)
    usual = tl.min((size > 8.6736174e-19).to(tl.int32) & (size < 1.1529215e18).to(tl.int32))
    if usual == 0:
        quotient = tl.div_rn(x, tl.zeros_like(x) + step)
    return quotient


@triton.jit
def encode_quotient(x, scale, FORMAT: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Return fp32 x over a scale that broadcasts over it as FP8 bytes: saturating, nearest even, NaN stays NaN.

    Both lowerings give the same bytes but for the kind of NaN.
    """
    if NATIVE_FP8:
        return encode_native(divide_by_steps(x, scale), FORMAT)
    else:
        return encode(tl.div_rn(x, tl.zeros_like(x) + scale), FORMAT, tl.uint8)


@triton.jit
def encode_native(x, FORMAT: tl.constexpr):
    """Return fp32 values as FP8 bytes by the hardware's conversion, which saturates and rounds to nearest even."""
    if FORMAT == "fp8_e4m3":
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)


@triton.jit
def dot(a, b, acc):
    """Return a @ b + acc in fp32; fp32 operands are multiplied in IEEE fp32."""
    if INTERPRETED and a.dtype == tl.bfloat16:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif a.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)
