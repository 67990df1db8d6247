"""How the fast decode path for packed KV formats makes codes of three bits into fp16; see `codes`.

Codes of three bits do not end where bytes do, and boxes are as wide as the next power of two; what lies beyond the row
is harmless. There are six results. For keys a thread has words of 32 bits and the words after them, and looks up the
codes that begin in a word, which are 11, 11 and 10 in turn; int16 without assembly, with 6, 5 and 5. `begun_column`
tells which columns those are; where there is none, queries are zero. Values are linear in their bits: parts of codes
that lie in two int16 are two rows of the sums, which `join_short_columns` adds up.

Of 128 columns and 16 tokens a lane has 8 registers, a quarter of which lie beyond the row. Instructions of one:
centroids 27, integers 9.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.kernels.hopper.decode.triton_kernel import TILE_TOKENS
from vattn.kernels.hopper.decode_packed.codes import INTEGER_UNIT, centroid_tables
from vattn.kernels.triton.cache.packed_rows import level
from vattn.quantization.packed.turboquant import CENTROIDS


def _short_codebook_ptx() -> str:
    lines = [".reg .b32 zero, begin, next, place, rest, moved, l, h;"]
    lines += centroid_tables(CENTROIDS[3])
    lines += [
        "mov.b32 begin, $6;",
        "mov.b32 next, $7;",
        "shf.r.wrap.b32 place, begin, next, $8;",
        "add.u32 rest, $8, 24;",
        "shf.r.wrap.b32 rest, begin, next, rest;",
        # Eight codes get four bits each: halves move apart, then quarters, then codes. `(x & m) | (y & ~m)` is 0xE4.
        "shl.b32 moved, place, 4;",
        "lop3.b32 place, place, moved, 0x00000FFF, 0xE4;",
        "shl.b32 moved, place, 2;",
        "lop3.b32 place, place, moved, 0x003F003F, 0xE4;",
        "shl.b32 moved, place, 1;",
        "lop3.b32 place, place, moved, 0x07070707, 0xE4;",
        "and.b32 place, place, 0x77777777;",
        # The other three.
        "shl.b32 moved, rest, 2;",
        "lop3.b32 rest, rest, moved, 0x0000003F, 0xE4;",
        "shl.b32 moved, rest, 1;",
        "lop3.b32 rest, rest, moved, 0x00000707, 0xE4;",
        "and.b32 rest, rest, 0x00000777;",
    ]
    for first, source in ((0, "place"), (2, "place"), (4, "rest")):
        lines += ["shr.u32 place, place, 16;"] if first == 2 else []
        lines += [
            f"prmt.b32 l, low_a, low_b, {source};",
            f"prmt.b32 h, high_a, high_b, {source};",
            f"prmt.b32 ${first}, l, h, 0x5140;",
            f"prmt.b32 ${first + 1}, l, h, 0x7362;",
        ]
    return "{\n" + "\n".join(lines) + "\n}"


UNPACK_SHORT_CODEBOOK = tl.constexpr(_short_codebook_ptx())
"""PTX: centroids of the codes of three bits that begin in a word, two columns next to each other in each result."""

UNPACK_SHORT = tl.constexpr(
    """
    {
    .reg .b32 codes, second, last, part;
    mov.b32 codes, $6;
    shr.u32 second, $7, 1;
    mad.lo.s32 last, second, 0xFFDFFFE0, 0x00380038;
    mad.lo.s32 part, second, 0x00020002, 0x00010001;
    shl.b32 second, $7, 2;
    shr.u32 second, 15, second;
    shr.u32 second, codes, second;
    and.b32 $5, second, part;
    shr.u32 codes, codes, $7;
    and.b32 $0, codes, 0x00070007;
    and.b32 $1, codes, 0x00380038;
    and.b32 $2, codes, 0x01C001C0;
    shr.u32 codes, codes, 9;
    and.b32 $3, codes, 0x00070007;
    and.b32 $4, codes, last;
    }
    """
)
"""PTX: the integers that `short_parts` lists, of an int16 of each of two tokens. What is made of $7 alone is made once,
ahead of the loop: 15 >> 4 first is by how much the int16 is shifted for its last part, and `last` is 0x00180018 or
0x00380038."""


@triton.constexpr_function
def is_short(count):
    """Return whether codes are of three bits, of which an int16 begins five or six."""
    return count == 5


@triton.constexpr_function
def row_width(head_size, count):
    """Return how many int16 of a row a box holds."""
    return head_size // 4 if is_short(count) else head_size // count


@triton.constexpr_function
def key_unit(assembly):
    """Return the bits of a unit of keys of three bits."""
    return 32 if assembly else 16


@triton.jit
def load_following(
    codes, page, num_blocks, inside, kv_head, UNIT: tl.constexpr, WIDTH: tl.constexpr, STRIDES: tl.constexpr
):
    """Return the int16 of a tile's codes a unit of UNIT bits further on, `[heads, 16, WIDTH]`, and more than there are.

    Those are of the next row or of the scales after the last. Boxes cannot begin between multiples of 16 bytes. STRIDES
    of block, token and head are in bytes. Some or other for a bad block id.
    """
    token = (inside + tl.arange(0, TILE_TOKENS))[None, :, None]
    block = tl.where((page >= 0) & (page < num_blocks), page, 0).to(tl.int64) * (STRIDES[0] // 2)
    row = token * (STRIDES[1] // 2) + kv_head[:, None, None] * (STRIDES[2] // 2)
    begin = codes.to(tl.pointer_type(tl.int16), bitcast=True) + block
    return tl.load(begin + row + (UNIT // 16 + tl.arange(0, WIDTH))[None, None, :])


@triton.jit
def first_bits(nothing, length, UNIT: tl.constexpr):
    """Return for each of 32 int16 where in its unit of UNIT bits the first code of three bits begins, int32 `[32]`.

    They come out of a load for the reason that `scale_selectors` gives.
    """
    unit = tl.arange(0, 32) // (UNIT // 16)
    # Units begin 0, 2 and 1 bits before a code, or 0, 1 and 2.
    first = (unit * 2) % 3 if UNIT == 16 else unit % 3
    return tl.load(nothing + tl.arange(0, 32), mask=tl.arange(0, 32) < -length, other=first)


@triton.jit
def begun_column(place, j: tl.constexpr, UNIT: tl.constexpr):
    """Return which column the codes of three bits are of that result j holds at int16 number `place`, -1 for none."""
    unit = place // (UNIT // 16)
    number = j if UNIT == 16 else 2 * j + place % 2
    column = (UNIT * unit + 2) // 3 + number
    return tl.where((column < (UNIT * unit + UNIT + 2) // 3) & (place < 24), column, -1)


@triton.jit
def short_level(codes, following, first, j: tl.constexpr):
    """Return the centroid of the j-th code of three bits that begins in an int16, fp16."""
    both = (codes.to(tl.int32) & 0xFFFF) | ((following.to(tl.int32) & 0xFFFF) << 16)
    return level((both >> (first + 3 * j)) & 7, 3).to(tl.float16)


@triton.jit
def short_part(codes, first, SHIFT: tl.constexpr, MASK: tl.constexpr, LESS: tl.constexpr):
    """Return bits of int16 codes as a subnormal number of fp16; LESS of them where the first code begins at bit 2."""
    mask = tl.where(first == 2, MASK - LESS, MASK)
    return (((codes.to(tl.int32) & 0xFFFF) >> (first + SHIFT)) & mask).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def last_part(codes, first):
    """Return the last of `short_parts`."""
    word = codes.to(tl.int32) & 0xFFFF
    part = tl.where(first == 0, word >> 15, tl.where(first == 2, word & 3, word & 1))
    return part.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def short_centroids(codes, following, first, ASSEMBLY: tl.constexpr):
    """Make int16 into six fp16 tensors of the centroids of their codes of three bits, as `begun_column` tells.

    following: the int16 a unit further on. first: as `first_bits` says, of the last axis.
    """
    first = tl.broadcast_to(first[None, None, :], codes.shape)
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            UNPACK_SHORT_CODEBOOK, "=r,=r,=r,=r,=r,=r,r,r,r,r", [codes, following, first],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return (
            short_level(codes, following, first, 0), short_level(codes, following, first, 1),
            short_level(codes, following, first, 2), short_level(codes, following, first, 3),
            short_level(codes, following, first, 4), short_level(codes, following, first, 5),
        )  # fmt: skip


@triton.jit
def short_parts(codes, first, ASSEMBLY: tl.constexpr):
    """Make int16 into six fp16 tensors of their integers of three bits, times 1, 8, 64, 1, 8 and 1, and 2^-24.

    Five codes, of which the fifth lacks its highest bit where the first begins at bit 2. Then what is left: the lowest
    bit of a code, the upper two of one, the highest of one, where the first begins at bit 0, 2 and 1.
    """
    first = tl.broadcast_to(first[None, None, :], codes.shape)
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            UNPACK_SHORT, "=r,=r,=r,=r,=r,=r,r,r,r", [codes, first],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return (
            short_part(codes, first, 0, 0x007, 0), short_part(codes, first, 0, 0x038, 0),
            short_part(codes, first, 0, 0x1C0, 0), short_part(codes, first, 9, 0x007, 0),
            short_part(codes, first, 9, 0x038, 0x20), last_part(codes, first),
        )  # fmt: skip


@triton.jit
def query_of(query, HEADS: tl.constexpr, j: tl.constexpr, UNIT: tl.constexpr):
    """Return the columns of fp16 rows `[heads * 16, D]` that result j of `short_centroids` meets: `[heads, 16, 32]`."""
    column = tl.broadcast_to(begun_column(tl.arange(0, 32), j, UNIT)[None, :], [HEADS * 16, 32])
    found = tl.gather(query, tl.maximum(column, 0), 1)
    return tl.reshape(tl.where(column >= 0, found, 0.0), [HEADS, 16, 32])


@triton.jit
def split_short_query(query, HEADS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Split fp16 rows `[heads * 16, D]` as `short_centroids` splits keys: six times `[heads, 16, 32]`."""
    UNIT: tl.constexpr = key_unit(ASSEMBLY)
    return (
        query_of(query, HEADS, 0, UNIT), query_of(query, HEADS, 1, UNIT), query_of(query, HEADS, 2, UNIT),
        query_of(query, HEADS, 3, UNIT), query_of(query, HEADS, 4, UNIT), query_of(query, HEADS, 5, UNIT),
    )  # fmt: skip


@triton.jit
def join_short_columns(a, b, c, d, e, f, HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Put transposed sums `[heads, 32, 8]` of `short_parts` together as rows `[heads * 8, D]`."""
    column = tl.arange(0, HEAD_SIZE)
    # Of 16 columns in three int16, the sixth and the eleventh begin as the last parts of one and end as those of the
    # next, the eleventh's beginning being a fifth part.
    inside = column % 16
    half = 3 * (column // 16) + (inside >= 6).to(tl.int32) + (inside >= 11).to(tl.int32)
    j = inside - tl.where(inside >= 11, 11, tl.where(inside >= 6, 6, 0))
    missing = tl.where(inside == 5, 2.0, tl.where(inside == 10, 4.0, 0.0))
    rows = rows_of(a, half, HEADS, HEAD_SIZE)
    rows = tl.where((j == 1)[None, :], rows_of(b, half, HEADS, HEAD_SIZE) * 0.125, rows)
    rows = tl.where((j == 2)[None, :], rows_of(c, half, HEADS, HEAD_SIZE) * 0.015625, rows)
    rows = tl.where((j == 3)[None, :], rows_of(d, half, HEADS, HEAD_SIZE), rows)
    rows = tl.where((j == 4)[None, :], rows_of(e, half, HEADS, HEAD_SIZE) * 0.125, rows)
    rows = tl.where((j == 5)[None, :], rows_of(f, half, HEADS, HEAD_SIZE), rows)
    rows += rows_of(f, half + 1, HEADS, HEAD_SIZE) * missing[None, :]
    return rows * INTEGER_UNIT


@triton.jit
def rows_of(part, place, HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Return for transposed sums `[heads, 32, 8]` those at `place`, `[D]`, as rows `[heads * 8, D]`."""
    rows = tl.reshape(tl.permute(part, (0, 2, 1)), [HEADS * 8, 32])
    return tl.gather(rows, tl.broadcast_to(place[None, :], [HEADS * 8, HEAD_SIZE]), 1)
