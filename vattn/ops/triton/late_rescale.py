"""Results that are rescaled only where a row's maximum has grown by much, by warps of Hopper's matrix instructions.

A thread of a warpgroup holds two rows of a result, whose values alternate by pairs. A warp none of whose rows moves
branches around the products.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROWTH_BITS = tl.constexpr(8.0)
"""By how much a row's maximum may grow, in powers of two, before it moves: its weights are at most 2 to this power
then, which 16-bit weights and fp32 sums hold at their full precision."""

VALUES = 64
"""Values of a thread that are multiplied together; a thread has as many, or a multiple."""

_PRODUCTS = "".join(f"mul.f32 ${i}, ${i}, ${2 * VALUES + i}; " for i in range(VALUES))
RESCALE = tl.constexpr(
    "{ .reg .pred p; "
    f"setp.neu.f32 p, ${2 * VALUES}, 0f3F800000; setp.neu.or.f32 p, ${2 * VALUES + 2}, 0f3F800000, p; "
    f"vote.sync.any.pred p, p, 0xffffffff; @!p bra SKIP; {_PRODUCTS} SKIP: }}"
)
"""Multiply the values of two rows by their rows' factors unless all of the warp's are 1."""

RESCALE_OPERANDS = tl.constexpr(",".join(["=f"] * VALUES + [str(i) for i in range(VALUES)] + ["f"] * VALUES))


@triton.jit
def rescale(acc, decay):
    """Return results `[rows, columns]` times the decay of their rows."""
    factors = tl.broadcast_to(decay[:, None], acc.shape)
    return tl.inline_asm_elementwise(RESCALE, RESCALE_OPERANDS, [acc, factors], dtype=tl.float32, is_pure=True, pack=64)


@triton.jit
def moved_maximum(old, grown):
    """Return the maximum that weights are taken from, in powers of two: the old one until it has grown by much."""
    return tl.where(grown - old > GROWTH_BITS, grown, old)
