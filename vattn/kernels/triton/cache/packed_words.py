"""Store packed KV formats by words of eight codes, on GPUs that convert FP8.

The bytes equal those of `packed_rows`, with fewer instructions per element. A thread holds eight adjacent columns of
rows loaded 16 bytes at a time, so no code moves between threads. Words of four-bit codes are stored at once: the cache
must start at a multiple of four bytes.
"""

from __future__ import annotations

import struct
from typing import Any

import triton
import triton.language as tl

from vattn.kernels.triton.cache.packed_rows import (
    BOUNDARIES_3,
    BOUNDARIES_4,
    FLOOR,
    INFINITY,
    MAGIC,
    MIN_LENGTH,
    _squares,
    nvfp4_rows,
    store_group_scales,
    store_uniform_scales,
    stored_length,
    uniform_rows,
)
from vattn.kernels.triton.common.epilogue import absolute_maximum
from vattn.kernels.triton.common.hadamard import pairwise_sum, rotate

COLUMNS = 8
"""Columns of a word."""


def _bits(number: float) -> int:
    return struct.unpack("<I", struct.pack("<f", number))[0]


def _magnitude(e: int) -> list[str]:
    """Return PTX that sets `size` to the magnitude of column e, and `below` to whether it is negative.

    A value on a boundary belongs to the level above, for negative numbers the smaller magnitude: theirs are multiplied
    by `1 - 2^-24`, which gives the next lower number.
    """
    return [
        f"setp.lt.f32 below, ${2 + e}, 0f00000000;",
        f"mov.f32 size, ${2 + e};",
        "@below mul.rn.f32 size, size, 0fBF7FFFFF;",
    ]


def _tree(name: str, kind: str, result: str) -> list[str]:
    """Return PTX that sums eight registers, adjacent ones first."""
    lines = [f"add.{kind} {name}{e}, {name}{e}, {name}{e + 1};" for e in (0, 2, 4, 6)]
    lines += [f"add.{kind} {name}{e}, {name}{e}, {name}{e + 2};" for e in (0, 4)]
    return [*lines, f"add.{kind} {result}, {name}0, {name}4;"]


def _place(e: int, bits: int) -> list[str]:
    """Return PTX that sets nibble e of `code{e}` to the number of boundaries above zero that `size` reaches."""
    bounds = [f"${2 + COLUMNS + place}" for place in range((1 << (bits - 1)) - 1)]
    two, one = 2 << 4 * e, 1 << 4 * e
    if bits == 4:
        lines = [
            f"setp.ge.f32 four, size, {bounds[3]};",
            f"selp.f32 bound, {bounds[5]}, {bounds[1]}, four;",
            "setp.ge.f32 two, size, bound;",
            f"selp.f32 bound, {bounds[6]}, {bounds[4]}, two;",
            f"selp.f32 other, {bounds[2]}, {bounds[0]}, two;",
            "selp.f32 bound, bound, other, four;",
            "setp.ge.f32 one, size, bound;",
            f"selp.b32 code{e}, {4 << 4 * e:#x}, 0, four;",
            f"@two add.u32 code{e}, code{e}, {two:#x};",
        ]
    else:
        lines = [
            f"setp.ge.f32 two, size, {bounds[1]};",
            f"selp.f32 bound, {bounds[2]}, {bounds[0]}, two;",
            "setp.ge.f32 one, size, bound;",
            f"selp.b32 code{e}, {two:#x}, 0, two;",
        ]
    return [*lines, f"@one add.u32 code{e}, code{e}, {one:#x};"]


def _word_ptx(bits: int) -> str:
    """Operands: the word, the sum of squares, eight columns, boundaries from the first place on, tables of bytes."""
    squares = [*map(_bits, _squares(bits)), *[0] * 4]
    tables = 2 + COLUMNS + (1 << (bits - 1)) - 1
    lines = [
        ".reg .pred below, four, two, one;",
        ".reg .f32 size, square<8>, bound, other;",
        ".reg .b32 code<8>, places, upper, even, odd, byte<4>, pair<4>;",
    ]
    for e in range(COLUMNS):
        lines += [*_magnitude(e), *_place(e, bits)]
    lines += [*_tree("code", "u32", "places"), "shr.u32 upper, places, 16;"]
    for half, word in enumerate(("places", "upper")):
        for k in range(4):
            high = sum((squares[4 + n] >> 8 * k & 255) << 8 * n for n in range(4))
            lines += [f"prmt.b32 byte{k}, ${tables + k}, {high:#010x}, {word};"]
        for k in (0, 1):
            lines += [f"prmt.b32 pair{k}, byte{2 * k}, byte{2 * k + 1}, 0x5140;"]
            lines += [f"prmt.b32 pair{2 + k}, byte{2 * k}, byte{2 * k + 1}, 0x7362;"]
        for e in range(4):
            first, order = 2 * (e // 2), "0x7632" if e % 2 else "0x5410"
            lines += [f"prmt.b32 byte{e}, pair{first}, pair{first + 1}, {order};"]
            lines += [f"mov.b32 square{4 * half + e}, byte{e};"]
    lines += _tree("square", "rn.f32", "$1")
    # Bytes of ones for negative columns, two columns apart.
    for name, first in (("even", 2), ("odd", 3)):
        lines += [f"prmt.b32 {name}, ${first}, ${first + 2}, 0x00FB;"]
        lines += [f"prmt.b32 upper, ${first + 4}, ${first + 6}, 0x00FB;"]
        lines += [f"prmt.b32 {name}, {name}, upper, 0x5410;"]
    # Codes of numbers that are not negative have their highest bit set. (mask & even) | (~mask & odd) is 0xCA.
    lines += [
        "lop3.b32 even, 0x0F0F0F0F, even, odd, 0xCA;",
        f"lop3.b32 places, places, even, {0x11111111 << (bits - 1):#010x}, 0x96;",
    ]
    if bits == 3:
        # Nibbles of three bits move together: by twos, by fours, by eights.
        lines += [
            "and.b32 places, places, 0x77777777;",
            "shr.u32 upper, places, 4;",
            "and.b32 upper, upper, 0x07070707;",
            f"mad.lo.s32 places, upper, {-(16 - 8)}, places;",
            "shr.u32 upper, places, 8;",
            "and.b32 upper, upper, 0x003F003F;",
            f"mad.lo.s32 places, upper, {-(256 - 64)}, places;",
            "shr.u32 upper, places, 16;",
            f"mad.lo.s32 places, upper, {-(65536 - 4096)}, places;",
        ]
    return "{\n" + "\n".join([*lines, "mov.b32 $0, places;"]) + "\n}"


WORD_4, WORD_3 = tl.constexpr(_word_ptx(4)), tl.constexpr(_word_ptx(3))
"""PTX: eight codes in the order of their columns, and the sum of the squares of their centroids."""

WORD_4_OPERANDS = tl.constexpr(",".join(["=r", "=f"] + ["f"] * 15 + ["r"] * 4))
WORD_3_OPERANDS = tl.constexpr(",".join(["=r", "=f"] + ["f"] * 11 + ["r"] * 4))


def _int32(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def _tables(bits: int) -> tuple[int, ...]:
    """Return words of the lowest to the highest bytes of the squares of the four smallest positive centroids."""
    squares = [_bits(square) for square in _squares(bits)[:4]]
    words = (sum((square >> 8 * k & 255) << 8 * n for n, square in enumerate(squares)) for k in range(4))
    return tuple(_int32(word) for word in words)


TABLES_3, TABLES_4 = tl.constexpr(_tables(3)), tl.constexpr(_tables(4))


RAISED_3, RAISED_4 = (tl.constexpr(_int32(sum(MAGIC.value << bits * e for e in range(COLUMNS)))) for bits in (3, 4))
"""What eight codes in the lowest bits of `MAGIC` add to their word."""

SCALE = tl.constexpr(
    """
    {
    .reg .b16 code, low, high;
    .reg .b32 both;
    cvt.rn.satfinite.e4m3x2.f32 code, 0f00000000, $2;
    cvt.rn.f16x2.e4m3x2 both, code;
    mov.b32 {low, high}, both;
    cvt.f32.f16 $1, low;
    cvt.u32.u16 $0, code;
    }
    """
)
"""PTX: one number as e4m3, and its value. Triton converts two at a time; ptxas 12.8 loses the second if both are used
as bytes."""


@triton.jit
def columns_of_words(x):
    """Return the eight columns `[rows, words]` of `[rows, 8 * words]`."""
    x = tl.reshape(x, [x.shape[0], x.shape[1] // 8, 2, 2, 2])
    even, odd = tl.split(x)
    even_low, even_high = tl.split(even)
    odd_low, odd_high = tl.split(odd)
    x0, x4 = tl.split(even_low)
    x2, x6 = tl.split(even_high)
    x1, x5 = tl.split(odd_low)
    x3, x7 = tl.split(odd_high)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def join_codes(values, BITS: tl.constexpr):
    """Return int32 `[rows, words]`, the sums of eight codes times powers of two, of int32 `[rows, 8 * words]`."""
    c0, c1, c2, c3, c4, c5, c6, c7 = columns_of_words(values)
    low = (c0 + (c1 << BITS)) + ((c2 << 2 * BITS) + (c3 << 3 * BITS))
    high = (c4 + (c5 << BITS)) + ((c6 << 2 * BITS) + (c7 << 3 * BITS))
    return low + (high << 4 * BITS)


@triton.jit
def store_words(codes, words, rows, PART: tl.constexpr):
    """Store int32 `[rows, words]` of eight codes each, where `rows` `[rows, 1]` is true."""
    column = tl.arange(0, words.shape[1])[None, :]
    inside = rows & (column < PART[0] // 8)
    if PART[2] == 4:
        tl.store(codes.to(tl.pointer_type(tl.int32), bitcast=True) + column, words, mask=inside)
    else:
        for byte in tl.static_range(0, 3):
            tl.store(codes + 3 * column + byte, ((words >> (8 * byte)) & 255).to(tl.uint8), mask=inside)


@triton.jit
def place_words(y, length, BITS: tl.constexpr):
    """Return the codes of rotated rows y in words, and each word's sum of squared centroids.

    If a row's sum of squares is finite, so are the sums and differences of the rotation; other rows have codes of 0.
    """
    x0, x1, x2, x3, x4, x5, x6, x7 = columns_of_words(y)
    # The first column, a sum, may be -0.
    x0 = x0 + 0.0
    # As many columns as y, so that the compiler splits both alike and moves neither.
    unit, _, _, _, _, _, _, _ = columns_of_words(tl.zeros_like(y) + (length + MIN_LENGTH))
    # A zero that the compiler cannot fold: it would copy the tables before every use.
    zero = unit.to(tl.int32, bitcast=True) & -0x80000000
    if BITS == 4:
        words, squares = tl.inline_asm_elementwise(
            WORD_4, WORD_4_OPERANDS,
            [x0, x1, x2, x3, x4, x5, x6, x7, unit * BOUNDARIES_4[8], unit * BOUNDARIES_4[9], unit * BOUNDARIES_4[10],
             unit * BOUNDARIES_4[11], unit * BOUNDARIES_4[12], unit * BOUNDARIES_4[13], unit * BOUNDARIES_4[14],
             zero | TABLES_4[0], zero | TABLES_4[1], zero | TABLES_4[2], zero | TABLES_4[3]],
            dtype=(tl.int32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        words, squares = tl.inline_asm_elementwise(
            WORD_3, WORD_3_OPERANDS,
            [x0, x1, x2, x3, x4, x5, x6, x7, unit * BOUNDARIES_3[4], unit * BOUNDARIES_3[5], unit * BOUNDARIES_3[6],
             zero | TABLES_3[0], zero | TABLES_3[1], zero | TABLES_3[2], zero | TABLES_3[3]],
            dtype=(tl.int32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    return tl.where(unit < INFINITY, words, 0), squares


@triton.jit
def store_codebook(x, given, codes, scales, rows, PART: tl.constexpr, NATIVE: tl.constexpr):
    length = tl.sqrt_rn(pairwise_sum(x * x))
    words, squares = place_words(rotate(x, PART[3], PART[4]), length, PART[2])
    if PART[0] < PART[1]:
        squares = tl.where(tl.arange(0, PART[1] // 8)[None, :] < PART[0] // 8, squares, 0.0)
    stored = stored_length(length, squares, PART)
    store_words(codes, words, rows, PART)
    tl.store(scales, stored, mask=rows)


@triton.jit
def divide(x, divisor):
    """Return IEEE's quotients of fp32 x by a divisor that broadcasts, as `packed_rows.divide_rows` does natively."""
    reciprocal = tl.zeros_like(x) + tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
    quotient = x * reciprocal
    return tl.fma(tl.fma(quotient, tl.zeros_like(x) - divisor, x), reciprocal, quotient)


@triton.jit
def store_uniform(x, given, codes, scales, rows, PART: tl.constexpr, NATIVE: tl.constexpr):
    BITS: tl.constexpr = PART[2]
    STEPS: tl.constexpr = (1 << BITS) - 1
    RAISED: tl.constexpr = RAISED_4 if BITS == 4 else RAISED_3
    least, origin, step, known = uniform_rows(x, PART)
    # A step of zero has codes of zero.
    is_kept = known & (step > 0.0)
    ratio = tl.maximum(divide(x - origin, tl.where(is_kept, step.to(tl.float32), 1.0)), 0.0)
    # The maximum of NaN and a number is the number.
    raised = tl.inline_asm_elementwise(FLOOR, "=f,f", [ratio + 0.5], dtype=tl.float32, is_pure=True, pack=1)
    # The bits grow with the number, up to infinity.
    places = tl.minimum(raised.to(tl.int32, bitcast=True), tl.where(is_kept, STEPS, 0) + MAGIC)
    store_words(codes, join_codes(places, BITS) - RAISED, rows, PART)
    store_uniform_scales(scales, least, step, known, rows)


@triton.jit
def round_magnitude(x):
    """Return e2m1 codes of fp32 numbers that are not negative, as `vattn.kernels.triton.common.epilogue.round_e2m1`."""
    magnitude = tl.minimum(x, 6.0)
    binade = tl.maximum(magnitude.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
    magic = binade + (22 << 23)
    rounded = (magnitude + magic.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    return rounded - magic + (binade >> 22) - 254


@triton.jit
def nvfp4_codes(groups, absmax, given):
    """Return the e4m3 bytes of block scales and e2m1 codes, both in int32.

    For usual given scales, and groups with a scale that fits e4m3.
    """
    SIXTH: tl.constexpr = 1.0 / 6.0
    SIX: tl.constexpr = -6.0
    sixth = absmax * SIXTH
    block = tl.fma(tl.fma(sixth, tl.zeros_like(absmax) + SIX, absmax), tl.zeros_like(absmax) + SIXTH, sixth)
    stored, meant = tl.inline_asm_elementwise(
        SCALE, "=r,=f,f", [divide(block, tl.zeros_like(block) + given)], dtype=(tl.int32, tl.float32), is_pure=True,
        pack=1,
    )  # fmt: skip
    step = meant * given
    reciprocal = tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)
    # With a step of zero all values round to zero.
    reciprocal = tl.expand_dims(tl.where(step == 0.0, 0.0, reciprocal), 2)
    negative = tl.expand_dims(-step, 2)
    magnitude = tl.abs(groups)
    product = magnitude * reciprocal
    ratio = tl.fma(
        tl.fma(product, tl.zeros_like(groups) + negative, magnitude), tl.zeros_like(groups) + reciprocal, product
    )
    return stored, round_magnitude(ratio) | ((groups.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def store_nvfp4(x, given, codes, scales, rows, PART: tl.constexpr, NATIVE: tl.constexpr):
    groups = tl.reshape(x, [x.shape[0], PART[1] // PART[6], PART[6]])
    absmax = absolute_maximum(groups)
    # Outside this range of given scales, steps of a quotient may leave fp32's range; beyond the largest scale, and with
    # NaN, remainders are NaN.
    is_usual = (given > 8.881784e-16) & (given < 1.1258999e15) & (absmax < 2600.0 * given)
    if tl.min(is_usual.to(tl.int32)) != 0:
        stored, values = nvfp4_codes(groups, absmax, given)
    else:
        raw, values = nvfp4_rows(groups, absmax, given, True)
        stored = raw.to(tl.int32)
    store_words(codes, join_codes(tl.reshape(values, [x.shape[0], PART[1]]), 4), rows, PART)
    store_group_scales(stored.to(tl.uint8), scales, rows, PART)


WORD_STORES: dict[str, Any] = {"codebook": store_codebook, "uniform": store_uniform, "nvfp4": store_nvfp4}
"""By the name of the codec."""
