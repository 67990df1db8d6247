"""Converts results to the requested output format in Gluon kernels, as `vattn.kernels.triton.common.epilogue` does."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vattn.kernels.hopper.fp4 import fp4_code, fp4_scale, inverse_of, is_usual, quick_reciprocal

QUERY_ROWS = gl.constexpr(8)
"""Query rows of a head in the decode kernel's results."""

MIN_ABSMAX = gl.constexpr(1e-10)
"""`vattn.quantization.codecs.MIN_ABSMAX`; a test compares them."""


EVERY_NAN = gl.constexpr(tl.PropagateNan.ALL)


@gluon.jit
def encode_e4m3(x):
    """Return fp32 values as e4m3 bytes: saturating, nearest even, NaN stays NaN; all this is the conversion's own."""
    return x.to(gl.float8e4nv).to(gl.uint8, bitcast=True)


@gluon.jit
def load_scale(output_scale):
    """Return a given scale; 1 if there is none."""
    if output_scale is None:
        return 1.0
    else:
        return gl.load(output_scale)


@gluon.jit
def encode_e2m1(x):
    """Return fp32 values as e2m1 codes 0 to 15 in int32: saturating, nearest even, NaN as 6.

    Adding a power of two with a unit in the last place equal to the spacing of the codes lets the adder round.
    """
    magnitude = gl.minimum(gl.abs(x), 6.0)
    binade = gl.maximum(magnitude.to(gl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
    magic = binade + (22 << 23)
    rounded = (magnitude + magic.to(gl.float32, bitcast=True)).to(gl.int32, bitcast=True)
    code = rounded - magic + (binade >> 22) - 254
    sign = (x.to(gl.uint32, bitcast=True) >> 31).to(gl.int32)
    return gl.where(x == x, code | (sign << 3), 7)


@gluon.jit
def divide(x, divisor, APPROXIMATE: gl.constexpr):
    """Return fp32 quotients of equal shapes."""
    if APPROXIMATE:
        return x / divisor
    else:
        return gl.div_rn(x, divisor)


@gluon.jit
def divide_by_constant(x, DIVISOR: gl.constexpr, APPROXIMATE: gl.constexpr):
    if APPROXIMATE:
        return x * (1.0 / DIVISOR)
    else:
        return gl.div_rn(x, gl.zeros_like(x) + DIVISOR)


@gluon.jit
def reciprocal_of(x):
    """Return what the compiler's division multiplies by: good for x and reciprocals that are normal numbers."""
    guess = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    better = gl.fma(guess, gl.fma(-x, guess, gl.zeros_like(x) + 1.0), guess)
    # Of zeros and infinities the guess is right, and its correction NaN.
    return gl.where(better == better, better, guess)


@gluon.jit
def quotients(x, step):
    """Return IEEE's fp32 quotients without a branch, but for some that FP8 and FP4 round to zero or to their limit.

    A product with the reciprocal is within two units of the quotient's last place; its remainder, which FMA gives
    exactly, corrects it. `step` broadcasts over x. Both are multiplied by a power of two where one step of that would
    leave fp32's range; x may become inexact where its quotient is nothing. Large and tiny products stay as they are.
    """
    size = gl.abs(step)
    factor = gl.where(size < 8.6736174e-19, 1.8446744e19, gl.where(size > 1.1529215e18, 5.421011e-20, 1.0))
    step = step * factor
    zero = gl.zeros_like(x)
    x = x * (zero + factor)
    step, inverse = zero + step, zero + reciprocal_of(step)
    product = x * inverse
    corrected = gl.fma(gl.fma(-product, step, x), inverse, product)
    largeness = gl.abs(product)
    return gl.where((largeness < 1.0995116e12) & (largeness > 9.094947e-13), corrected, product)


@gluon.jit
def group_scales(absmax, scale, GROUPS: gl.constexpr):
    """See `vattn.kernels.triton.common.epilogue`."""
    APPROXIMATE: gl.constexpr = GROUPS[4] == "approximate_divide" or GROUPS[4] == "approximate_multiply"
    if GROUPS[1]:
        per_block = divide(divide_by_constant(absmax, 6.0, APPROXIMATE), gl.zeros_like(absmax) + scale, APPROXIMATE)
        stored = encode_e4m3(per_block)
        step = stored.to(gl.float8e4nv, bitcast=True).to(gl.float32) * scale
        return stored, gl.where(step == 0.0, float("inf"), step)
    else:
        if GROUPS[3] >= 0.0:
            made = divide_by_constant(absmax, 448.0, APPROXIMATE)
            if GROUPS[2] == "zero_replaced":
                made = gl.where(made == 0.0, GROUPS[3], made)
            elif GROUPS[2] != "floored_power_of_two":
                made = gl.where(made < GROUPS[3], GROUPS[3], made)
        else:
            made = divide_by_constant(gl.where(absmax < MIN_ABSMAX, MIN_ABSMAX, absmax), 448.0, APPROXIMATE)
        if GROUPS[2] == "power_of_two" or GROUPS[2] == "floored_power_of_two":
            bits = (made.to(gl.uint32, bitcast=True) + 0x7FFFFF) & 0x7F800000
            made = gl.where(made == made, bits.to(gl.float32, bitcast=True), made)
        if GROUPS[2] == "floored_power_of_two":
            made = gl.where(made < GROUPS[3], GROUPS[3], made)
        return made, made


@gluon.jit
def group_codes(x, step, GROUPS: gl.constexpr):
    """See `vattn.kernels.triton.common.epilogue`; `step` broadcasts."""
    APPROXIMATE: gl.constexpr = GROUPS[4] == "approximate_divide" or GROUPS[4] == "approximate_multiply"
    if GROUPS[1] and GROUPS[4] == "corrected":
        return encode_e2m1(quotients(x, step))
    elif GROUPS[1]:
        return encode_e2m1(divide(x, gl.zeros_like(x) + step, APPROXIMATE))
    elif GROUPS[4] == "corrected":
        return encode_e4m3(quotients(x, step))
    elif GROUPS[4] == "multiply" or GROUPS[4] == "approximate_multiply":
        return encode_e4m3(x * divide(gl.zeros_like(step) + 1.0, step, APPROXIMATE))
    else:
        return encode_e4m3(divide(x, gl.zeros_like(x) + step, APPROXIMATE))


@gluon.jit
def larger(a, b):
    return gl.maximum(a, b, propagate_nan=EVERY_NAN)


@gluon.jit
def group_maximum(x, AXIS: gl.constexpr = 2):
    """Return the largest magnitudes along the axis of a group's columns, NaN where there is one."""
    return gl.reduce(gl.abs(x), AXIS, larger)


@gluon.jit
def store_row_groups(
    output, scales, x, first_row, row, rows, first_column, scale, scale_stride, group_stride, PACK: gl.constexpr,
    FILLED: gl.constexpr, D: gl.constexpr, STRIDE: gl.constexpr, MODEL: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Quantise results `[R, C]` to FP8 in whole groups; store codes and scales.

    Args:
        first_row, row, rows: row of the output at which a tile starts, rows of the tile that these are, its end.
        first_column: of the flattened row of STRIDE columns.
        PACK: heads of D columns, one after the other, that are rows of the tile here; `rows` counts whole tokens.
        FILLED: heads that there are; what the rest of the PACK rows hold is not stored.
    """
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    COUNT: gl.constexpr = COLUMNS // GROUPS[0]
    values = x.to(MODEL).to(gl.float32).reshape([ROWS, COUNT, GROUPS[0]])
    largest = group_maximum(values)
    stored, step = group_scales(largest, scale, GROUPS)
    PLACE: gl.constexpr = largest.type.layout
    scale_row = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, PLACE))
    group = first_column // GROUPS[0] + gl.arange(0, COUNT, layout=gl.SliceLayout(0, PLACE))
    scale_token = scale_row // PACK
    inside = (scale_token[:, None] < rows) & (group[None, :] >= 0)
    if FILLED < PACK:
        inside = inside & (scale_row % PACK < FILLED)[:, None]
    place = (first_row + scale_token)[:, None].to(gl.int64) * scale_stride + group[None, :].to(gl.int64) * group_stride
    if PACK > 1:
        place += (scale_row % PACK * (D // GROUPS[0]))[:, None].to(gl.int64) * group_stride
    gl.store(scales + place, stored, mask=inside)
    codes = group_codes(values, step.expand_dims(2), GROUPS).reshape([ROWS, COLUMNS])
    CODES: gl.constexpr = codes.type.layout
    code_row = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, CODES))
    column = first_column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, CODES))
    code_token = code_row // PACK
    offsets = (first_row + code_token)[:, None].to(gl.int64) * STRIDE + column[None, :]
    if PACK > 1:
        offsets += (code_row % PACK * D)[:, None]
    mask = (code_token[:, None] < rows) & (column[None, :] >= 0)
    if FILLED < PACK:
        mask = mask & (code_row % PACK < FILLED)[:, None]
    gl.store(output + offsets, codes, mask=mask)


@gluon.jit
def fp4_groups(first, second, largest, scale, BOTH: gl.constexpr, GROUPS: gl.constexpr):
    """Return the bytes of NVFP4's block scales, and codes in int32 of values and, if BOTH, of second ones."""
    APPROXIMATE: gl.constexpr = GROUPS[4] == "approximate_divide"
    inverse_scale = quick_reciprocal(scale, APPROXIMATE)
    others = gl.zeros_like(first).to(gl.int32)
    if is_usual(inverse_scale):
        stored, step = fp4_scale(largest, scale, inverse_scale, APPROXIMATE)
        zero = gl.zeros_like(first)
        inverse = zero + inverse_of(step, APPROXIMATE).expand_dims(2)
        steps = zero + step.expand_dims(2)
        codes, signed = fp4_code(first, steps, inverse, APPROXIMATE)
        codes = (codes & 7) | ((signed >> 28) & 8)
        if BOTH:
            others, signed = fp4_code(second, steps, inverse, APPROXIMATE)
            others = (others & 7) | ((signed >> 28) & 8)
    else:
        stored, step = group_scales(largest, scale, GROUPS)
        codes = group_codes(first, step.expand_dims(2), GROUPS)
        if BOTH:
            others = group_codes(second, step.expand_dims(2), GROUPS)
    return stored, codes, others


@gluon.jit
def store_groups(
    output, scales, even, odd, head0, scale, group_stride, HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr, HEAD_SIZE: gl.constexpr, WIDTH: gl.constexpr, FP8: gl.constexpr, MODEL: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """Quantise merged results `[heads, W, 8]` with one scale per group; store codes and scales."""
    STEP: gl.constexpr = 2 if FP8 else 1
    PER_GROUP: gl.constexpr = GROUPS[0] // STEP
    COUNT: gl.constexpr = WIDTH // PER_GROUP
    first = even.to(MODEL).to(gl.float32).reshape([HEADS, COUNT, PER_GROUP, QUERY_ROWS])
    second = first
    magnitude = gl.abs(first)
    if FP8:
        second = odd.to(MODEL).to(gl.float32).reshape([HEADS, COUNT, PER_GROUP, QUERY_ROWS])
        second = gl.convert_layout(second, first.type.layout)
        magnitude = gl.maximum(magnitude, gl.abs(second), propagate_nan=EVERY_NAN)
    largest = gl.reduce(magnitude, 2, larger)
    if GROUPS[1]:
        stored, codes, others = fp4_groups(first, second, largest, scale, FP8, GROUPS)
    else:
        stored, step = group_scales(largest, scale, GROUPS)
        step = step.expand_dims(2)
        codes = group_codes(first, step, GROUPS)
        others = group_codes(second, step, GROUPS) if FP8 else codes
    PLACE: gl.constexpr = largest.type.layout
    kv_head = head0 + gl.arange(0, HEADS, layout=gl.SliceLayout(1, gl.SliceLayout(2, PLACE)))[:, None, None]
    count = gl.arange(0, COUNT, layout=gl.SliceLayout(0, gl.SliceLayout(2, PLACE)))[None, :, None]
    in_group = gl.arange(0, QUERY_ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, PLACE)))[None, None, :]
    group = (kv_head * GROUP + in_group) * COUNT + count
    mask = (kv_head < NUM_KV_HEADS) & (in_group < GROUP) & (count < COUNT)
    gl.store(scales + group.to(gl.int64) * group_stride, stored, mask=mask)
    if GROUPS[1] and FP8:
        store_heads(output, (codes | (others << 4)).to(gl.uint8), head0, 1, HEADS, NUM_KV_HEADS, GROUP, HEAD_SIZE // 2)
    elif GROUPS[1]:
        nibbles = codes.reshape([HEADS, HEAD_SIZE // 2, 2, QUERY_ROWS])
        ODD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, nibbles.type.layout)))
        pairs = gl.sum(nibbles << (4 * gl.arange(0, 2, layout=ODD))[None, None, :, None], 2)
        store_heads(output, pairs.to(gl.uint8), head0, 1, HEADS, NUM_KV_HEADS, GROUP, HEAD_SIZE // 2)
    else:
        store_heads(output, codes, head0, STEP, HEADS, NUM_KV_HEADS, GROUP, HEAD_SIZE)
        if FP8:
            store_heads(output + 1, others, head0, STEP, HEADS, NUM_KV_HEADS, GROUP, HEAD_SIZE)


@gluon.jit
def store_heads(
    output, codes, head0, STEP: gl.constexpr, HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    BYTES: gl.constexpr,
):  # fmt: skip
    """Store bytes of heads `[heads, ..., 8]`, STEP apart, a head every BYTES."""
    COLUMNS: gl.constexpr = BYTES // STEP
    codes = codes.reshape([HEADS, COLUMNS, QUERY_ROWS])
    PLACE: gl.constexpr = codes.type.layout
    kv_head = head0 + gl.arange(0, HEADS, layout=gl.SliceLayout(1, gl.SliceLayout(2, PLACE)))[:, None, None]
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(2, PLACE)))[None, :, None]
    in_group = gl.arange(0, QUERY_ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, PLACE)))[None, None, :]
    mask = (kv_head < NUM_KV_HEADS) & (in_group < GROUP) & (column < COLUMNS)
    gl.store(output + (kv_head * GROUP + in_group) * BYTES + STEP * column, codes, mask=mask)


@gluon.jit
def store_result(pointers, result, mask, given_scale, MODEL: gl.constexpr, OUTPUT: gl.constexpr):
    """Store results in the model dtype, or rounded to it and then as static FP8; OUTPUT as in
    `vattn.kernels.triton`."""
    rounded = result.to(MODEL)
    if OUTPUT == "none":
        gl.store(pointers, rounded, mask=mask)
    else:
        value = rounded.to(gl.float32)
        scale = gl.zeros_like(value) + given_scale
        if OUTPUT == "fp8_multiply":
            quotient = value * scale
        elif OUTPUT == "fp8_approximate_divide":
            quotient = value / scale
        else:
            quotient = gl.div_rn(value, scale)
        gl.store(pointers, encode_e4m3(quotient), mask=mask)
