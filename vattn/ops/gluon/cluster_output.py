"""What a CTA of decode in clusters makes of a head's result: codes and scales of groups, in as few steps as may be.

One warp holds a whole group, or all groups of NVFP4 that it has, a thread two or four columns side by side. What one
step waits for the step before is all that this costs, so lanes exchange their maxima at once, and IEEE's quotients are
corrected products without a branch, as the compiler's own division has them between its checks.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vattn.ops.gluon.epilogue import encode_e4m3, group_codes, group_scales

ROUND_TO_BF16 = gl.constexpr(
    """
    {
    .reg .b32 both, low;
    cvt.rn.bf16x2.f32 both, $3, $2;
    shl.b32 low, both, 16;
    and.b32 both, both, 0xffff0000;
    mov.b32 $0, low;
    mov.b32 $1, both;
    }
    """
)
ROUND_TO_FP16 = gl.constexpr(
    """
    {
    .reg .b32 both;
    .reg .b16 low, high;
    cvt.rn.f16x2.f32 both, $3, $2;
    mov.b32 {low, high}, both;
    cvt.f32.f16 $0, low;
    cvt.f32.f16 $1, high;
    }
    """
)
MAXIMUM_OF_FOUR_LANES = gl.constexpr(
    """
    {
    .reg .b32 one, two, three;
    shfl.sync.bfly.b32 one, $1, 1, 31, -1;
    shfl.sync.bfly.b32 two, $1, 2, 31, -1;
    shfl.sync.bfly.b32 three, $1, 3, 31, -1;
    max.u32 one, one, $1;
    max.u32 two, two, three;
    max.u32 $0, one, two;
    }
    """
)
MAXIMUM_WITH_FOURTH_LANE = gl.constexpr(
    """
    {
    .reg .b32 other;
    shfl.sync.bfly.b32 other, $1, 4, 31, -1;
    max.u32 $0, other, $1;
    }
    """
)
MAXIMUM_OF_WARP = gl.constexpr("redux.sync.max.u32 $0, $1, -1;")
RECIPROCAL = gl.constexpr("rcp.approx.ftz.f32 $0, $1;")

LEAST_SCALE = gl.constexpr(2.0**-50)
MOST_SCALE = gl.constexpr(2.0**50)
"""Scales of NVFP4 between which no step of a corrected quotient leaves fp32's range."""


@gluon.jit
def rounded_pair(a, b, MODEL: gl.constexpr):
    """Return two fp32 tensors rounded to the model dtype, as fp32: one conversion for both."""
    if MODEL == gl.bfloat16:
        return gl.inline_asm_elementwise(
            ROUND_TO_BF16, "=f,=f,f,f", [a, b], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            ROUND_TO_FP16, "=f,=f,f,f", [a, b], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
        )


@gluon.jit
def magnitude(x):
    """Return the bits of |x|, which as integers keep their order, NaN above all."""
    return x.to(gl.uint32, bitcast=True) & 0x7FFFFFFF


@gluon.jit
def over_lanes(bits, LANES: gl.constexpr):
    """Return the largest of 4 or 8 neighbouring lanes or of a warp, on each of them."""
    if LANES == 32:
        return gl.inline_asm_elementwise(MAXIMUM_OF_WARP, "=r,r", [bits], dtype=gl.uint32, is_pure=False, pack=1)
    else:
        found = gl.inline_asm_elementwise(MAXIMUM_OF_FOUR_LANES, "=r,r", [bits], dtype=gl.uint32, is_pure=False, pack=1)
        if LANES == 8:
            found = gl.inline_asm_elementwise(
                MAXIMUM_WITH_FOURTH_LANE, "=r,r", [found], dtype=gl.uint32, is_pure=False, pack=1
            )
        return found


@gluon.jit
def reciprocal_of(x):
    """Return what the compiler's division multiplies by, for x far from the ends of fp32's range."""
    guess = gl.inline_asm_elementwise(RECIPROCAL, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    return gl.fma(guess, gl.fma(-x, guess, gl.zeros_like(x) + 1.0), guess)


@gluon.jit
def fp4_scale(largest, scale):
    """Return the bytes of the block scales of groups with these maxima, and the steps, as `group_scales` for NVFP4.

    Quotients so large that the scale saturates, infinite ones among them, and so small that it is a zero, whose sign a
    correction may lose, are products; so is the sixth of a maximum so small that it is inexact.
    """
    zero = gl.zeros_like(largest)
    scale = zero + scale
    inverse = reciprocal_of(scale)
    sixth = largest * (1.0 / 6.0)
    product = sixth * inverse
    exact = gl.fma(gl.fma(-sixth, zero + 6.0, largest), zero + (1.0 / 6.0), sixth)
    quotient = exact * inverse
    quotient = gl.fma(gl.fma(-quotient, scale, exact), inverse, quotient)
    size = gl.abs(product)
    quotient = gl.where((size < 1.0995116e12) & (size > 9.094947e-13), quotient, product)
    stored = encode_e4m3(quotient)
    return stored, stored.to(gl.float8e4nv, bitcast=True).to(gl.float32) * scale


@gluon.jit
def fp4_code(x, step, inverse):
    """Return e2m1 codes of x / step in int32: saturating, nearest even, NaN as 6; the sign in bit 3.

    The sign is the product's, as a correction may lose that of a zero. An infinite product is corrected to NaN, of
    which the minimum is the largest code as well.
    """
    product = x * inverse
    quotient = gl.fma(gl.fma(-product, step, x), inverse, product)
    size = gl.minimum(gl.abs(quotient), 6.0)
    binade = gl.maximum(size.to(gl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
    magic = binade + (22 << 23)
    code = (size + magic.to(gl.float32, bitcast=True)).to(gl.int32, bitcast=True) - magic + (binade >> 22) - 254
    return code | ((product.to(gl.uint32, bitcast=True) >> 28) & 8).to(gl.int32)


@gluon.jit
def byte_of(low, high, step, inverse, GROUPS: gl.constexpr, CORRECTED: gl.constexpr):
    """Return the codes of 4 bits of two columns side by side."""
    if CORRECTED:
        low, high = fp4_code(low, step, inverse), fp4_code(high, step, inverse)
    else:
        low, high = group_codes(low, step, GROUPS), group_codes(high, step, GROUPS)
    return (low | (high << 4)).to(gl.uint8)


@gluon.jit
def store_fp4(
    output, x0, x1, x2, x3, step, inverse, VECTOR: gl.constexpr, GROUPS: gl.constexpr, CORRECTED: gl.constexpr
):
    """Store the codes of 4 bits of columns side by side, two a byte; CORRECTED: by products with `inverse`."""
    codes = byte_of(x0, x1, step, inverse, GROUPS, CORRECTED)
    if VECTOR == 4:
        codes = gl.join(codes, byte_of(x2, x3, step, inverse, GROUPS, CORRECTED)).reshape([2 * x0.shape[0]])
    gl.store(output + gl.arange(0, codes.shape[0], layout=codes.type.layout), codes)


@gluon.jit
def side_by_side(x0, x1, x2, x3, VECTOR: gl.constexpr):
    """Return columns `[2 * threads]` or `[4 * threads]` in order."""
    x = gl.join(x0, x1)
    if VECTOR == 4:
        x = gl.join(gl.join(x0, x2), gl.join(x1, x3))
    return x.reshape([x0.shape[0] * VECTOR])


@gluon.jit
def store_columns(
    output, scales, x0, x1, x2, x3, head, scale, group_stride, HEAD_SIZE: gl.constexpr, VECTOR: gl.constexpr,
    LANES: gl.constexpr, MODEL: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Quantise a head's results, of which a thread holds VECTOR columns side by side, with one scale per group."""
    COUNT: gl.constexpr = HEAD_SIZE // GROUPS[0]
    PER_GROUP: gl.constexpr = GROUPS[0] // VECTOR
    lane = gl.arange(0, HEAD_SIZE // VECTOR, layout=LANES)
    x0, x1 = rounded_pair(x0, x1, MODEL)
    bits = gl.maximum(magnitude(x0), magnitude(x1))
    if VECTOR == 4:
        x2, x3 = rounded_pair(x2, x3, MODEL)
        bits = gl.maximum(bits, gl.maximum(magnitude(x2), magnitude(x3)))
    largest = over_lanes(bits, PER_GROUP).to(gl.float32, bitcast=True)
    place = scales + (head * COUNT + lane // PER_GROUP).to(gl.int64) * group_stride
    is_first = lane % PER_GROUP == 0
    if GROUPS[1]:
        start = output + head * (HEAD_SIZE // 2)
        if (gl.abs(scale) > LEAST_SCALE) & (gl.abs(scale) < MOST_SCALE):
            stored, step = fp4_scale(largest, scale)
            inverse = gl.where(step == 0.0, 0.0, reciprocal_of(step))
            gl.store(place, stored, mask=is_first)
            store_fp4(start, x0, x1, x2, x3, step, inverse, VECTOR, GROUPS, True)
        else:
            stored, step = group_scales(largest, scale, GROUPS)
            gl.store(place, stored, mask=is_first)
            store_fp4(start, x0, x1, x2, x3, step, step, VECTOR, GROUPS, False)
    else:
        stored, step = group_scales(largest, 1.0, GROUPS)
        gl.store(place, stored, mask=is_first)
        steps = side_by_side(step, step, step, step, VECTOR)
        codes = group_codes(side_by_side(x0, x1, x2, x3, VECTOR), steps, GROUPS)
        gl.store(output + head * HEAD_SIZE + gl.arange(0, HEAD_SIZE, layout=codes.type.layout), codes)
