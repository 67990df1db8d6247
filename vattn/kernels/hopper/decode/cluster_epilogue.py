"""What a CTA of decode in clusters makes of a head's result: codes and scales of groups, in as few steps as may be.

One warp holds a whole group, or all groups of NVFP4 that it has, a thread two or four columns side by side. What one
step waits for the step before is all that this costs, so lanes exchange their maxima at once, and while the head's norm
is computed: rounding keeps order, so that the largest rounded result is the rounded product of the largest with it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vattn.kernels.hopper.epilogue import group_codes, group_scales
from vattn.kernels.hopper.fp4 import fp4_code, fp4_scale, inverse_of, is_usual, quick_reciprocal

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


@gluon.jit
def rounded_pair(a, b, MODEL: gl.constexpr):
    """Return two fp32 tensors rounded to the model dtype, as fp32: one conversion for both."""
    CODE: gl.constexpr = ROUND_TO_BF16 if MODEL == gl.bfloat16 else ROUND_TO_FP16
    return gl.inline_asm_elementwise(CODE, "=f,=f,f,f", [a, b], dtype=(gl.float32, gl.float32), is_pure=True, pack=1)


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
def byte_of(low, high, step, inverse, GROUPS: gl.constexpr, USUAL: gl.constexpr):
    """Return the codes of 4 bits of two columns side by side."""
    if USUAL:
        low, low_sign = fp4_code(low, step, inverse, GROUPS[4] == "approximate_divide")
        high, high_sign = fp4_code(high, step, inverse, GROUPS[4] == "approximate_divide")
        return (low + high * 16 | (low_sign >> 28) & 8 | (high_sign >> 24) & 128).to(gl.uint8)
    else:
        low, high = group_codes(low, step, GROUPS), group_codes(high, step, GROUPS)
        return (low | (high << 4)).to(gl.uint8)


@gluon.jit
def store_fp4(output, x0, x1, x2, x3, step, inverse, VECTOR: gl.constexpr, GROUPS: gl.constexpr, USUAL: gl.constexpr):
    """Store the codes of 4 bits of columns side by side, two a byte; USUAL: by products with `inverse`."""
    codes = byte_of(x0, x1, step, inverse, GROUPS, USUAL)
    if VECTOR == 4:
        codes = gl.join(codes, byte_of(x2, x3, step, inverse, GROUPS, USUAL)).reshape([2 * x0.shape[0]])
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
    output, scales, x0, x1, x2, x3, norm, head, scale, group_stride, HEAD_SIZE: gl.constexpr, VECTOR: gl.constexpr,
    LANES: gl.constexpr, MODEL: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Quantise a head's results, products of `norm` and VECTOR columns side by side, with one scale per group."""
    COUNT: gl.constexpr = HEAD_SIZE // GROUPS[0]
    PER_GROUP: gl.constexpr = GROUPS[0] // VECTOR
    lane = gl.arange(0, HEAD_SIZE // VECTOR, layout=LANES)
    bits = gl.maximum(magnitude(x0), magnitude(x1))
    if VECTOR == 4:
        bits = gl.maximum(bits, gl.maximum(magnitude(x2), magnitude(x3)))
    largest = over_lanes(bits, PER_GROUP).to(gl.float32, bitcast=True)
    largest = largest * gl.abs(norm)
    largest, _ = rounded_pair(largest, largest, MODEL)
    x0, x1 = rounded_pair(x0 * norm, x1 * norm, MODEL)
    if VECTOR == 4:
        x2, x3 = rounded_pair(x2 * norm, x3 * norm, MODEL)
    place = scales + (head * COUNT + lane // PER_GROUP).to(gl.int64) * group_stride
    is_first = lane % PER_GROUP == 0
    if GROUPS[1]:
        start = output + head * (HEAD_SIZE // 2)
        inverse_scale = quick_reciprocal(scale, GROUPS[4] == "approximate_divide")
        if is_usual(inverse_scale):
            stored, step = fp4_scale(largest, scale, inverse_scale, GROUPS[4] == "approximate_divide")
            inverse = inverse_of(step, GROUPS[4] == "approximate_divide")
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
