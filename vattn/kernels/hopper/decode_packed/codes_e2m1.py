"""How the fast decode path for packed KV formats makes e2m1 codes fp16 by additions; see `codes`.

Where an fp16 has its sign, its lowest exponent bits and its highest of the mantissa, a code is `code * 2^-14`,
subnormals included. Times their e4m3 scale codes are exact in fp16: multiples of 2^-24 with six digits. A code
that is moved there in one piece has its sign three bits too low: ones that are added to those bits carry it up, and are
cleared again with the rest by one mask. Moving and adding are one multiplication and addition for both halves of a
register, which other units do than logic and permutes; of those half as many are issued a clock as of all instructions.
Two registers share what they need of their scales, which are converted two at a time.

Instructions of one register of eight codes: 15 for keys and 15.5 for values, 7.5 of them logic, permutes and shifts,
beside the conversions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.kernels.hopper.decode_packed.codes import nibble
from vattn.kernels.triton.common.codec import decode


def _unpack_ptx(of_keys: bool) -> str:
    """Return the assembly for two registers: words of their four int16 are $10 to $13, selectors $14 to $17."""
    lines = [
        ".reg .b32 even, odd, scale, pick, other, zero, by512, by32, by2, first, second;",
        ".reg .b16 low, high;",
        # Zero, but nothing that the compiler knows: multiplications that it sees through become shifts.
        "mov.u32 zero, %lanemask_lt;",
        "and.b32 zero, zero, 0x80000000;",
        "or.b32 by512, zero, 512;",
        "or.b32 by32, zero, 32;",
        "or.b32 by2, zero, 2;",
    ]
    if of_keys:
        # All four are of one token, and both of a register of one group.
        lines += [
            "and.b32 pick, $14, 3;",
            "and.b32 other, $16, 3;",
            "shl.b32 other, other, 4;",
            "or.b32 pick, pick, other;",
            "prmt.b32 scale, $10, $10, pick;",
            "mov.b32 {low, high}, scale;",
            "cvt.rn.f16x2.e4m3x2 scale, low;",
            "mov.b32 {low, high}, scale;",
            "mov.b32 first, {low, low};",
            "mov.b32 second, {high, high};",
        ]
    else:
        # Both of a register are of one group, and both registers of the same two tokens.
        lines += [
            "shl.b32 pick, $16, 8;",
            "or.b32 pick, pick, $14;",
            "prmt.b32 scale, $10, $11, pick;",
            "mov.b32 {low, high}, scale;",
            "cvt.rn.f16x2.e4m3x2 first, low;",
            "cvt.rn.f16x2.e4m3x2 second, high;",
        ]
    for place, scale in ((0, "first"), (1, "second")):
        a, b, c, d = (f"${2 * result + place}" for result in range(4))
        lines += [
            f"and.b32 even, ${8 + place}, 0x0F0F0F0F;",
            f"and.b32 odd, ${8 + place}, 0xF0F0F0F0;",
            f"mad.lo.u32 {a}, even, by512, 0x70007000;",
            f"mad.lo.u32 {b}, odd, by32, 0x70007000;",
            f"mad.lo.u32 {c}, even, by2, 0x70007000;",
            "shr.u32 odd, odd, 3;",
            f"add.u32 {d}, odd, 0x70007000;",
        ]
        lines += [f"and.b32 {x}, {x}, 0x8E008E00;" for x in (a, b, c, d)]
        lines += [f"mul.rn.f16x2 {x}, {x}, {scale};" for x in (a, b, c, d)]
    return "{\n" + "\n".join(lines) + "\n}"


UNPACK_KEYS = tl.constexpr(_unpack_ptx(True))
UNPACK_VALUES = tl.constexpr(_unpack_ptx(False))
"""PTX: e2m1 codes of two registers times their scales."""


@triton.jit
def scale_selectors(nothing, length):
    """Return selectors of a permute `[16]`: of two words, the bytes that scale these of 16 int16.

    They come out of a load that reads nothing, `length` not being negative: the compiler lays out operands of products
    where their loads are, unless it meets values of another origin on the way there.
    """
    column = tl.arange(0, 16)
    return tl.load(nothing + column, mask=column < -length, other=(column // 4) * 0x11 + 0x40)


@triton.jit
def unpack_e2m1(codes, words, selectors, OF_KEYS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Make int16 `[heads, tokens, D / 4]` into four fp16 tensors of their e2m1 codes times scales, columns as `unpack`.

    words: the e4m3 scales of a token, one for 16 columns, four in an int32, `[heads, tokens, D / 64]`. Assembly wants
    what operands of products give: four int16 that a thread has in a row are of one token for keys; for values they are
    of two tokens in turn; and the first two are of one group of columns, the others of another.
    """
    SHAPE: tl.constexpr = [codes.shape[0], codes.shape[1], codes.shape[2] // 16, 16]
    word = tl.reshape(tl.broadcast_to(words[:, :, :, None], SHAPE), codes.shape)
    selector = tl.reshape(tl.broadcast_to(selectors[None, None, None, :], SHAPE), codes.shape)
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            UNPACK_KEYS if OF_KEYS else UNPACK_VALUES,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r", [codes, word, selector],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        scale = decode(((word >> (8 * (selector & 3))) & 255).to(tl.uint8), "fp8_e4m3", tl.float16, False)
        return (
            e2m1(nibble(codes, 0)) * scale, e2m1(nibble(codes, 1)) * scale,
            e2m1(nibble(codes, 2)) * scale, e2m1(nibble(codes, 3)) * scale,
        )  # fmt: skip


@triton.jit
def e2m1(code):
    """Return int32 e2m1 codes as fp16, 2^-14 of what they mean."""
    return (((code & 8) << 12) | ((code & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)
