"""NVFP4 of results: block scales, and codes of 4 bits, in as few instructions and steps as may be.

Exact quotients are corrected products without a branch, as the compiler's own division has them between its checks;
approximate ones are products with the hardware's reciprocal, which is what `div.full` computes where the
reciprocal is a normal number. Both hold for given scales between `LEAST_SCALE` and `MOST_SCALE`: no step leaves the
range of fp32.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

RECIPROCAL = gl.constexpr("rcp.approx.ftz.f32 $0, $1;")

LEAST_SCALE = gl.constexpr(2.0**-50)
MOST_SCALE = gl.constexpr(2.0**50)


@gluon.jit
def is_usual(inverse):
    """Return whether a given scale, of which this is the reciprocal, is one that what follows here is for.

    Asking the reciprocal has it computed ahead of the branch, beside what does not depend on it.
    """
    return (gl.abs(inverse) > LEAST_SCALE) & (gl.abs(inverse) < MOST_SCALE)


@gluon.jit
def quick_reciprocal(x, APPROXIMATE: gl.constexpr):
    """Return what a division multiplies by, for x far from the ends of fp32's range."""
    guess = gl.inline_asm_elementwise(RECIPROCAL, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    if APPROXIMATE:
        return guess
    else:
        return gl.fma(guess, gl.fma(-x, guess, 1.0), guess)


@gluon.jit
def fp4_scale(largest, scale, inverse, APPROXIMATE: gl.constexpr):
    """Return the bytes of the block scales of groups with these maxima, and the steps, as `group_scales` for NVFP4.

    `inverse` is the reciprocal of `scale`.

    Exact: quotients so large that the scale saturates, infinite ones among them, and so small that it is a zero, whose
    sign a correction may lose, are products; so is the sixth of a maximum so small that it is inexact.
    """
    zero = gl.zeros_like(largest)
    scale, inverse = zero + scale, zero + inverse
    sixth = largest * (1.0 / 6.0)
    quotient = sixth * inverse
    if not APPROXIMATE:
        size = gl.abs(quotient)
        exact = gl.fma(gl.fma(-sixth, zero + 6.0, largest), zero + (1.0 / 6.0), sixth)
        corrected = exact * inverse
        corrected = gl.fma(gl.fma(-corrected, scale, exact), inverse, corrected)
        quotient = gl.where((size < 1.0995116e12) & (size > 9.094947e-13), corrected, quotient)
    stored = quotient.to(gl.float8e4nv)
    return stored.to(gl.uint8, bitcast=True), stored.to(gl.float32) * scale


@gluon.jit
def inverse_of(step, APPROXIMATE: gl.constexpr):
    """Return what values are multiplied by instead of divided by steps; a step of zero makes them zeros."""
    return gl.where(step == 0.0, 0.0, quick_reciprocal(step, APPROXIMATE))


@gluon.jit
def fp4_code(x, step, inverse, APPROXIMATE: gl.constexpr):
    """Return int32 whose last three bits are the magnitude's code of x / step, and a product that has its sign.

    The code saturates, rounds to nearest even, and is 7 of NaN, of which the minimum is the largest code too: that is
    what correcting an infinite product makes. A correction may lose the sign of a zero. The codes are those of three
    spacings of values, of which the smallest is right: adding 2^23 lets the adder round, and the bits in front of the
    last three are a multiple of 256.
    """
    product = x * inverse
    quotient = product
    if not APPROXIMATE:
        quotient = gl.fma(gl.fma(-product, step, x), inverse, product)
    size = gl.minimum(gl.abs(quotient), 6.0)
    zero = gl.zeros_like(x)
    halves = gl.fma(size, zero + 2.0, zero + 8388608.0)
    whole = size + 8388610.0
    pairs = gl.fma(size, zero + 0.5, zero + 8388612.0)
    return gl.minimum(halves, gl.minimum(whole, pairs)).to(gl.int32, bitcast=True), product.to(gl.int32, bitcast=True)
