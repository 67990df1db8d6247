"""Device code of the packed decode path: sums that a warp rescales only where one of their rows has grown.

After some tiles a row's maximum rarely moves, and a product with one changes nothing. A warp has a head's sums.
"""

from __future__ import annotations

import triton
import triton.language as tl


def _rescale_ptx(sums: int, values: int) -> str:
    """Operands: `values` of each of so many sums, which are replaced, and as many factors between zero and one."""
    count = sums * values
    factors = [f"${2 * count + e}" for e in range(values)]
    lines = [".reg .pred moved;", ".reg .b32 all;", f"mov.b32 all, {factors[0]};"]
    # Of numbers that are not above one, only one itself has all of its bits.
    lines += [f"and.b32 all, all, {factor};" for factor in factors[1:]]
    lines += ["setp.ne.u32 moved, all, 0x3F800000;", "vote.sync.any.pred moved, moved, 0xffffffff;"]
    lines += ["@!moved bra.uni KEPT;"]
    lines += [f"mul.rn.f32 ${i}, ${i}, {factors[i % values]};" for i in range(count)]
    return "{\n" + "\n".join([*lines, "KEPT:"]) + "\n}"


def _operands(sums: int, values: int) -> str:
    count = sums * values
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * values)


TWO_16, TWO_8, FOUR_8, FOUR_4 = (tl.constexpr(_rescale_ptx(*cut)) for cut in ((2, 16), (2, 8), (4, 8), (4, 4)))
TWO_16_OPERANDS, TWO_8_OPERANDS, FOUR_8_OPERANDS, FOUR_4_OPERANDS = (
    tl.constexpr(_operands(*cut)) for cut in ((2, 16), (2, 8), (4, 8), (4, 4))
)
"""By the number of sums, and a thread's values of each: heads of 128, and of 64."""


@triton.jit
def rescale_two(a, b, decay):
    """Return transposed sums `[heads, D / 2, 8]` times the decay `[heads, 8]` of their rows."""
    factor = tl.broadcast_to(decay[:, None, :], a.shape)
    if a.shape[1] == 64:
        return tl.inline_asm_elementwise(
            TWO_16, TWO_16_OPERANDS, [a, b, factor], dtype=(tl.float32, tl.float32), is_pure=True, pack=16
        )
    else:
        return tl.inline_asm_elementwise(
            TWO_8, TWO_8_OPERANDS, [a, b, factor], dtype=(tl.float32, tl.float32), is_pure=True, pack=8
        )


@triton.jit
def rescale_four(a, b, c, d, decay):
    """Return transposed sums `[heads, D / 4, 8]` times the decay `[heads, 8]` of their rows."""
    factor = tl.broadcast_to(decay[:, None, :], a.shape)
    if a.shape[1] == 32:
        return tl.inline_asm_elementwise(
            FOUR_8, FOUR_8_OPERANDS, [a, b, c, d, factor],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=8,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            FOUR_4, FOUR_4_OPERANDS, [a, b, c, d, factor],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=4,
        )  # fmt: skip
