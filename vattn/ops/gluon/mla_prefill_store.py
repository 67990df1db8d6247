"""How Hopper's kernel of expanded latent attention quantises its rows with IEEE's quotients and no branch a value.

A product with the reciprocal is within two units of the quotient's last place; its remainder, which FMA gives exactly,
corrects it, as in `vattn.ops.triton.codec.encode_quotient`. FP8 is made where a row lies in four lanes, before codes
are sorted for the store: a thread makes the scales of two rows then, not of eight, and half as many bytes move.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vattn.ops.gluon.epilogue import (
    encode_e2m1,
    encode_e4m3,
    group_codes,
    group_maximum,
    group_scales,
    load_scale,
)
from vattn.ops.gluon.prefill_load import GROUP_ROWS

LEAST_DIVISOR = gl.constexpr(2.0**-50)
MOST_DIVISOR = gl.constexpr(2.0**50)
"""Given scales between these, and NVFP4's steps under them, leave fp32's range in no step of a corrected quotient."""


@gluon.jit
def rounded(x, MODEL: gl.constexpr):
    """Return fp32 values rounded to the model dtype, as fp32. Unless told to, ptxas converts one after the other."""
    if MODEL == gl.bfloat16:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2
        )
    return pairs.to(gl.float32)


@gluon.jit
def is_usual(scale):
    """Return whether quotients by a given scale can be corrected products."""
    size = gl.abs(scale)
    return (size > LEAST_DIVISOR) & (size < MOST_DIVISOR)


@gluon.jit
def corrected_quotients(x, divisor, reciprocal):
    """Return IEEE's fp32 quotients; divisors and their reciprocals broadcast.

    Beyond 2^40, infinities included, and below 2^-40 products are left as they are: codes and block scales saturate
    there or are zeros, whose sign a correction may lose.
    """
    product = x * reciprocal
    zero = gl.zeros_like(x)
    corrected = gl.fma(gl.fma(-product, zero + divisor, x), zero + reciprocal, product)
    size = gl.abs(product)
    return gl.where((size < 1.0995116e12) & (size > 9.094947e-13), corrected, product)


@gluon.jit
def store_fp8(
    output, scales, output_scale, scale_stride, group_stride, result, first_row, rows, head, GROUP_INDEX: gl.constexpr,
    HEADS: gl.constexpr, VALUES: gl.constexpr, MODEL: gl.constexpr, OUTPUT_GROUPS: gl.constexpr,
):  # fmt: skip
    """Quantise a warpgroup's rows to FP8, in whole groups or under the given scale."""
    values = rounded(result, MODEL)
    if OUTPUT_GROUPS[0] > 0:
        COUNT: gl.constexpr = VALUES // OUTPUT_GROUPS[0]
        groups = values.reshape([GROUP_ROWS, COUNT, OUTPUT_GROUPS[0]])
        largest = group_maximum(groups)
        stored, step = group_scales(largest, 1.0, OUTPUT_GROUPS)
        PLACE: gl.constexpr = largest.type.layout
        row = GROUP_INDEX * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, PLACE))[:, None]
        group = head * COUNT + gl.arange(0, COUNT, layout=gl.SliceLayout(0, PLACE))[None, :]
        place = (first_row + row).to(gl.int64) * scale_stride + group.to(gl.int64) * group_stride
        gl.store(scales + place, stored, mask=(row < rows) & (group >= 0))
        reciprocal = gl.div_rn(gl.zeros_like(step) + 1.0, step)
        ratio = corrected_quotients(groups, step.expand_dims(2), reciprocal.expand_dims(2))
        codes = encode_e4m3(ratio).reshape([GROUP_ROWS, VALUES])
    else:
        scale = load_scale(output_scale)
        if is_usual(scale):
            ratio = corrected_quotients(values, scale, gl.div_rn(1.0, scale))
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


@gluon.jit
def fp4_scales(largest, scale):
    """Return what `group_scales` returns for NVFP4 under a usual scale.

    A sixth of a maximum is a corrected product too. Of maxima so small that it is inexact the block scale is zero.
    """
    sixth = largest * (1.0 / 6.0)
    zero = gl.zeros_like(largest)
    corrected = gl.fma(gl.fma(-sixth, zero + 6.0, largest), zero + (1.0 / 6.0), sixth)
    sixth = gl.where(largest < float("inf"), corrected, sixth)
    stored = encode_e4m3(corrected_quotients(sixth, scale, gl.div_rn(1.0, scale)))
    step = stored.to(gl.float8e4nv, bitcast=True).to(gl.float32) * scale
    return stored, gl.where(step == 0.0, float("inf"), step)


@gluon.jit
def fp4_of(values, scale, OUTPUT_GROUPS: gl.constexpr):
    """Return NVFP4 codes of groups `[rows, groups, 16]` in int32, and the bytes of their block scales."""
    largest = group_maximum(values)
    if is_usual(scale):
        stored, step = fp4_scales(largest, scale)
        reciprocal = gl.div_rn(gl.zeros_like(step) + 1.0, step)
        codes = encode_e2m1(corrected_quotients(values, step.expand_dims(2), reciprocal.expand_dims(2)))
    else:
        stored, step = group_scales(largest, scale, OUTPUT_GROUPS)
        codes = group_codes(values, step.expand_dims(2), OUTPUT_GROUPS)
    return codes, stored
