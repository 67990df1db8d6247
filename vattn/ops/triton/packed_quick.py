"""Stores of packed KV formats for GPUs that convert FP8, with fewer instructions an element than those of `packed`.

The bytes are the same. They are used where `vattn.ops.variants` says so.
"""

from __future__ import annotations

import struct
from typing import Any

import triton
import triton.language as tl

from vattn.ops.triton.codec import decode, encode_native
from vattn.ops.triton.epilogue import absolute_maximum
from vattn.ops.triton.packed import (
    BOUNDARIES_3,
    BOUNDARIES_4,
    INFINITY,
    MIN_LENGTH,
    _squares,
    divide_rows,
    nvfp4_rows,
    store_codes,
    store_groups,
    to_fp16,
)
from vattn.ops.triton.rotation import pairwise_sum, rotate


def _places_ptx() -> str:
    """Of four columns. Boundaries come as those of places 1 to 7, squares out of tables of their bytes."""
    bits = [struct.unpack("<I", struct.pack("<f", square))[0] for square in _squares(4)]
    lines = [".reg .pred below, four, two, one;", ".reg .b32 size, bound, other, mirror, place<4>, byte<4>, pair<4>;"]
    for e in range(4):
        y, bounds = f"${8 + e}", [f"${12 + 4 * place + e}" for place in range(7)]
        lines += [
            f"setp.lt.f32 below, {y}, 0f00000000;",
            f"abs.f32 size, {y};",
            "@below add.s32 size, size, -1;",
            f"setp.ge.f32 four, size, {bounds[3]};",
            f"selp.b32 bound, {bounds[5]}, {bounds[1]}, four;",
            "setp.ge.f32 two, size, bound;",
            f"selp.b32 bound, {bounds[6]}, {bounds[4]}, two;",
            f"selp.b32 other, {bounds[2]}, {bounds[0]}, two;",
            "selp.b32 bound, bound, other, four;",
            "setp.ge.f32 one, size, bound;",
            f"selp.b32 place{e}, 4, 0, four;",
            f"@two add.s32 place{e}, place{e}, 2;",
            f"@one add.s32 place{e}, place{e}, 1;",
            "selp.b32 mirror, 7, 8, below;",
            f"xor.b32 ${e}, place{e}, mirror;",
        ]
    lines += [f"mad.lo.s32 place0, place{e}, {16**e}, place0;" for e in (1, 2, 3)]
    for k in range(4):
        low, high = (sum((bits[first + n] >> 8 * k & 255) << 8 * n for n in range(4)) for first in (0, 4))
        lines += [f"mov.b32 bound, {low:#010x};", f"mov.b32 other, {high:#010x};"]
        lines += [f"prmt.b32 byte{k}, bound, other, place0;"]
    for half in (0, 1):
        lines += [f"prmt.b32 pair{half}, byte{2 * half}, byte{2 * half + 1}, 0x5140;"]
        lines += [f"prmt.b32 pair{2 + half}, byte{2 * half}, byte{2 * half + 1}, 0x7362;"]
    for e in range(4):
        first = 2 * (e // 2)
        lines += [f"prmt.b32 ${4 + e}, pair{first}, pair{first + 1}, {'0x5410' if e % 2 == 0 else '0x7632'};"]
    return "{\n" + "\n".join(lines) + "\n}"


def _place_ptx() -> str:
    """Of one column, in three bits."""
    squares = [f"0f{struct.unpack('<I', struct.pack('<f', square))[0]:08X}" for square in _squares(3)]
    lines = [
        ".reg .pred below, two, one;",
        ".reg .b32 size, bound, other, low, high;",
        "setp.lt.f32 below, $2, 0f00000000;",
        "abs.f32 size, $2;",
        "@below add.s32 size, size, -1;",
        "setp.ge.f32 two, size, $4;",
        "selp.b32 bound, $5, $3, two;",
        "setp.ge.f32 one, size, bound;",
        "selp.b32 other, 6, 4, two;",
        "@one add.s32 other, other, 1;",
        "@below xor.b32 other, other, 7;",
        f"selp.b32 low, {squares[2]}, {squares[0]}, two;",
        f"selp.b32 high, {squares[3]}, {squares[1]}, two;",
        "selp.b32 $1, high, low, one;",
        "mov.b32 $0, other;",
    ]
    return "{\n" + "\n".join(lines) + "\n}"


PLACE_4, PLACE_3 = tl.constexpr(_places_ptx()), tl.constexpr(_place_ptx())
"""PTX: the codes of rotated columns and the squares of their centroids."""

PLACE_4_OPERANDS = tl.constexpr(",".join(["=r"] * 4 + ["=f"] * 4 + ["f"] * 32))


@triton.jit
def places(y, unit, BITS: tl.constexpr):
    """Return codes in int32 and squares of centroids of rows y, as `packed.store_codebook` says."""
    if BITS == 4:
        return tl.inline_asm_elementwise(
            PLACE_4, PLACE_4_OPERANDS,
            [y, unit * BOUNDARIES_4[8], unit * BOUNDARIES_4[9], unit * BOUNDARIES_4[10], unit * BOUNDARIES_4[11],
             unit * BOUNDARIES_4[12], unit * BOUNDARIES_4[13], unit * BOUNDARIES_4[14]],
            dtype=(tl.int32, tl.float32), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            PLACE_3, "=r,=f,f,f,f,f",
            [y, unit * BOUNDARIES_3[4], unit * BOUNDARIES_3[5], unit * BOUNDARIES_3[6]],
            dtype=(tl.int32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def store_codebook(x, given, codes, scales, rows, PART: tl.constexpr, NATIVE: tl.constexpr):
    """`vattn.kv_formats.turboquant.Codebook`."""
    BITS: tl.constexpr = PART[2]
    BLOCK: tl.constexpr = PART[3]
    length = tl.sqrt_rn(pairwise_sum(x * x))
    y = rotate(x, BLOCK, False)
    # Where squares add up to a number, so do the sums and differences of the rotation.
    known = length < INFINITY
    values, squares = places(y, length + MIN_LENGTH, BITS)
    if PART[0] < PART[1]:
        squares = tl.where(tl.arange(0, PART[1])[None, :] < PART[0], squares, 0.0)
    longer = tl.sqrt_rn(pairwise_sum(squares))
    stored = tl.div_rn(length * (PART[0] ** 0.5), longer)
    stored = tl.where(known & (stored < INFINITY), to_fp16(stored), float("nan"))
    store_codes(codes, values & tl.where(known, (1 << BITS) - 1, 0), rows, PART)
    tl.store(scales, stored.to(tl.float16), mask=rows)


@triton.jit
def round_magnitude(x):
    """Return e2m1 codes of fp32 numbers that are not negative, as `vattn.ops.triton.epilogue.round_e2m1`."""
    magnitude = tl.minimum(x, 6.0)
    binade = tl.maximum(magnitude.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
    magic = binade + (22 << 23)
    rounded = (magnitude + magic.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    return rounded - magic + (binade >> 22) - 254


@triton.jit
def quick_nvfp4_codes(groups, absmax, given):
    """Return the e4m3 bytes of block scales and e2m1 codes in int32 of groups with these maxima; usual given scales.

    Quotients are made as `divide_rows` makes them, of magnitudes.
    """
    SIXTH: tl.constexpr = 1.0 / 6.0
    sixth = absmax * SIXTH
    block = tl.fma(tl.fma(-sixth, tl.zeros_like(absmax) + 6.0, absmax), tl.zeros_like(absmax) + SIXTH, sixth)
    block = tl.where(absmax < INFINITY, block, sixth)
    # Large enough for the largest scale, and no more, since a quotient must be finite; NaN stays.
    block = tl.where(block > 1024.0 * given, 1024.0 * given, block)
    stored = encode_native(divide_rows(block, tl.zeros_like(block) + given, True), "fp8_e4m3")
    step = decode(stored, "fp8_e4m3", tl.float32, True) * given
    reciprocal = tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)
    # A step of zero goes with zeros, or what rounds to them.
    reciprocal = tl.expand_dims(tl.where(step == 0.0, 0.0, reciprocal), 2)
    step = tl.expand_dims(step, 2)
    magnitude = tl.abs(groups)
    # Beyond 64 the codes are the largest, and a product that is infinite would make the remainder a NaN.
    product = tl.minimum(magnitude * reciprocal, 64.0)
    ratio = tl.fma(
        tl.fma(-product, tl.zeros_like(groups) + step, magnitude), tl.zeros_like(groups) + reciprocal, product
    )
    codes = round_magnitude(ratio) | ((groups.to(tl.int32, bitcast=True) >> 28) & 8)
    return stored, tl.where(step == step, codes, 7)


@triton.jit
def store_nvfp4(x, given, codes, scales, rows, PART: tl.constexpr, NATIVE: tl.constexpr):
    """`vattn.kv_formats.nvfp4.Nvfp4`."""
    groups = tl.reshape(x, [x.shape[0], PART[1] // PART[6], PART[6]])
    absmax = absolute_maximum(groups)
    # Out of this range of given scales a step of a quotient might leave that of fp32.
    is_usual = (given > 8.881784e-16) & (given < 1.1258999e15)
    if tl.min((tl.zeros_like(absmax) + is_usual.to(tl.float32)).to(tl.int32)) != 0:
        stored, values = quick_nvfp4_codes(groups, absmax, given)
    else:
        stored, values = nvfp4_rows(groups, absmax, given, True)
    store_groups(values, stored, codes, scales, rows, PART)


QUICK_STORES: dict[str, Any] = {"codebook": store_codebook, "nvfp4": store_nvfp4}
"""By the name of the codec."""
