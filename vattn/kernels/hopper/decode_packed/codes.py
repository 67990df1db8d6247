"""How the fast decode path for packed KV formats makes codes into fp16 operands with about two instructions a code.

Codes are read as int16, two of eight bits or four of four bits at a time. A result of `unpack` is made of one code of
each int16, so that no value moves between threads.

Integer codes are not converted: the bits of a code, moved to the lowest of an fp16, are the subnormal number
`code * 2^-24`, which tensor cores multiply exactly. Of four nibbles the second and the fourth stay where they are and
come out 16 times as large; queries and sums make up for that, and for the 2^24, once for all tokens. int8 codes are
raised by 128 to be unsigned, which is a zero point like that of int4 rows. Centroids are looked up by byte permutes,
eight positive levels and a sign.

Instructions of one 32-bit register, of which a lane holds twice as many as there are bits in a code (a head of
128, 16 tokens), keys or values: integers of four bits 5 for 8 codes, int8 3 for 4, e4m3 keys 2 and values 3 for 4,
centroids 16 for 8. e2m1 codes are in `codes_e2m1`, codes of three bits in `codes_3bit`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import triton
import triton.language as tl

from vattn.kernels.hopper.decode.triton_kernel import unpack_pairs
from vattn.kernels.triton.cache.packed_rows import level
from vattn.quantization.packed.turboquant import CENTROIDS

INTEGER_UNIT = tl.constexpr(2.0**24)
"""What integer codes as fp16 must be multiplied by."""

E2M1_UNIT = tl.constexpr(2.0**14)
"""What e2m1 codes as fp16 must be multiplied by."""

UNPACK_INT8 = tl.constexpr(
    """
    {
    .reg .b32 raised;
    xor.b32 raised, $2, 0x80808080;
    and.b32 $0, raised, 0x00FF00FF;
    prmt.b32 $1, raised, 0, 0x4341;
    }
    """
)
"""PTX: int8 codes plus 128 of even and of odd columns."""

UNPACK_NIBBLES = tl.constexpr(
    """
    {
    .reg .b32 low, high;
    mov.b32 low, $4;
    shr.u32 high, low, 8;
    and.b32 $0, low, 0x000F000F;
    and.b32 $1, low, 0x00F000F0;
    and.b32 $2, high, 0x000F000F;
    and.b32 $3, high, 0x00F000F0;
    }
    """
)
"""PTX: codes of four bits, every other one 16 times as large."""


def centroid_tables(levels: Sequence[float]) -> list[str]:
    """Return PTX of the low and high bytes of eight fp16 numbers, in registers that permutes read; it needs `zero`."""
    halves = [struct.unpack("<H", struct.pack("<e", level))[0] for level in levels]
    low, high = ([(half >> shift) & 255 for half in halves] for shift in (0, 8))
    tables = [
        sum(byte << (8 * place) for place, byte in enumerate(table[first : first + 4]))
        for table in (low, high)
        for first in (0, 4)
    ]
    names = ("low_a", "low_b", "high_a", "high_b")
    return [
        f".reg .b32 {', '.join(names)};",
        *(f"mov.b32 {name}, {value:#010x};" for name, value in zip(names, tables, strict=True)),
        # Zero, but nothing that the compiler knows: tables that it takes for constants are copied ahead of every use.
        "mov.u32 zero, %lanemask_lt;",
        "and.b32 zero, zero, 0x80000000;",
        "or.b32 low_a, low_a, zero;",
        "or.b32 high_a, high_a, zero;",
    ]


def _codebook_ptx() -> str:
    # `code ^ code >> 1` is the same in its three lowest bits for a code and its mirror image, `15 - code`.
    positive = {(code ^ code >> 1) & 7: CENTROIDS[4][code] for code in range(8, 16)}
    lines = [".reg .b32 zero, codes, moved, place, l, h, sign;"]
    lines += centroid_tables([positive[place] for place in range(8)])
    lines += [
        "mov.b32 codes, $4;",
        "shr.u32 place, codes, 1;",
        # (codes ^ place) & 0x77777777
        "lop3.b32 place, codes, place, 0x77777777, 0x28;",
        "shl.b32 moved, codes, 4;",
    ]
    # Permutes with bit 3 set repeat a byte's sign: that of the codes in even places, moved up, and in odd ones.
    for first, signs in ((0, "0xD9C8"), (2, "0xFBEA")):
        lines += [
            "prmt.b32 l, low_a, low_b, place;",
            "prmt.b32 h, high_a, high_b, place;",
            f"prmt.b32 sign, moved, codes, {signs};",
            # h | (~sign & 0x80808080)
            "lop3.b32 h, h, sign, 0x80808080, 0xF2;",
            f"prmt.b32 ${first}, l, h, 0x5140;",
            f"prmt.b32 ${first + 1}, l, h, 0x7362;",
        ]
        lines += ["shr.u32 place, place, 16;"] if first == 0 else []
    return "{\n" + "\n".join(lines) + "\n}"


UNPACK_CODEBOOK = tl.constexpr(_codebook_ptx())
"""PTX: centroids of codes of four bits, two columns next to each other in each result."""


@triton.jit
def nibble(quads, j: tl.constexpr):
    """Return the j-th code of four bits of each int16."""
    return (quads >> (4 * j)).to(tl.int32) & 15


@triton.jit
def unpack(codes, CODEC: tl.constexpr, OF_KEYS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Make int16 into four fp16 tensors of their codes; codes of eight bits fill two, which come twice.

    Integers are as the module says. Result j of n holds the columns `n * c + j`. Where `is_paired` says so, it holds
    `2 n * (c // 2) + 2 * j + c % 2`.
    """
    if CODEC == "int8":
        if ASSEMBLY:
            a, b = tl.inline_asm_elementwise(
                UNPACK_INT8, "=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
            )
        else:
            a = ((codes & 0xFF) ^ 0x80).to(tl.float16, bitcast=True)
            b = (((codes >> 8) & 0xFF) ^ 0x80).to(tl.float16, bitcast=True)
        return a, b, a, b
    elif CODEC == "fp8" or CODEC == "e4m3":
        a, b = unpack_pairs(codes, OF_KEYS, ASSEMBLY)
        return a, b, a, b
    elif CODEC == "codebook":
        if ASSEMBLY:
            return tl.inline_asm_elementwise(
                UNPACK_CODEBOOK, "=r,=r,=r,=r,r", [codes],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return (
                level(nibble(codes, 0), 4).to(tl.float16), level(nibble(codes, 1), 4).to(tl.float16),
                level(nibble(codes, 2), 4).to(tl.float16), level(nibble(codes, 3), 4).to(tl.float16),
            )  # fmt: skip
    elif ASSEMBLY:
        return tl.inline_asm_elementwise(
            UNPACK_NIBBLES, "=r,=r,=r,=r,r", [codes],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return (
            (codes & 0x000F).to(tl.float16, bitcast=True), (codes & 0x00F0).to(tl.float16, bitcast=True),
            ((codes >> 8) & 0x000F).to(tl.float16, bitcast=True), ((codes >> 8) & 0x00F0).to(tl.float16, bitcast=True),
        )  # fmt: skip


@triton.constexpr_function
def is_paired(codec, assembly):
    """Return whether results of unpacked keys hold columns in pairs; see `unpack`."""
    return assembly and codec in ("fp8", "e4m3", "codebook")


@triton.constexpr_function
def is_integer(codec):
    """Return whether codes come out of `unpack` as subnormal numbers."""
    return codec in ("int8", "int4", "uniform")


@triton.constexpr_function
def unit_of(codec):
    """Return what operands must be multiplied by to be codes, or codes times scales."""
    return INTEGER_UNIT if is_integer(codec) else E2M1_UNIT if codec == "nvfp4" else 1.0


@triton.jit
def split_query(
    query, HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, COUNT: tl.constexpr, CODEC: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Split fp16 rows `[heads * 16, D]` as `unpack` splits keys: four times `[heads, 16, D / COUNT]`."""
    if is_paired(CODEC, ASSEMBLY):
        query = tl.permute(tl.reshape(query, [HEADS * 16, HEAD_SIZE // (2 * COUNT), COUNT, 2]), (0, 1, 3, 2))
    if COUNT == 2:
        a, b = tl.split(tl.reshape(query, [HEADS, 16, HEAD_SIZE // 2, 2]))
        return a, b, a, b
    else:
        # The last two axes of a part j are j // 2 and j % 2.
        even, odd = tl.split(tl.reshape(query, [HEADS, 16, HEAD_SIZE // 4, 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        if is_integer(CODEC):
            b = b * 0.0625
            d = d * 0.0625
        return a, b, c, d


@triton.jit
def join_columns(a, b, c, d, HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, COUNT: tl.constexpr, CODEC: tl.constexpr):
    """Put transposed sums `[heads, D / COUNT, 8]` of every COUNT-th column together as rows `[heads * 8, D]`."""
    ODD_UNIT: tl.constexpr = unit_of(CODEC) / (16 if is_integer(CODEC) and COUNT == 4 else 1)
    a = a * unit_of(CODEC)
    b = b * ODD_UNIT
    if COUNT == 2:
        rows = tl.permute(tl.join(a, b), (0, 2, 1, 3))
    else:
        c = c * unit_of(CODEC)
        d = d * ODD_UNIT
        rows = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 2, 1, 3, 4))
    return tl.reshape(rows, [HEADS * 8, HEAD_SIZE])
