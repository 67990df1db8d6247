"""Results that are rescaled only where a row's maximum has grown by much, by warps of Hopper's matrix instructions.

A thread of a warpgroup holds two rows of a result, whose values alternate by pairs. A warp none of whose rows moves
branches around the products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

VALUES = 64
"""Values of a thread that are multiplied together; a thread has as many, or a multiple."""

_PRODUCTS = "".join(f"mul.f32 ${i}, ${i}, ${2 * VALUES + i}; " for i in range(VALUES))
RESCALE = gl.constexpr(
    "{ .reg .pred p; "
    f"setp.neu.f32 p, ${2 * VALUES}, 0f3F800000; setp.neu.or.f32 p, ${2 * VALUES + 2}, 0f3F800000, p; "
    f"vote.sync.any.pred p, p, 0xffffffff; @!p bra SKIP; {_PRODUCTS} SKIP: }}"
)
"""Multiply the values of two rows by their rows' factors unless all of the warp's are 1."""

RESCALE_OPERANDS = gl.constexpr(",".join(["=f"] * VALUES + [str(i) for i in range(VALUES)] + ["f"] * VALUES))


@gluon.jit
def rescale(acc, decay):
    """Return results times the decay of their rows; a warp whose rows all stay skips the products."""
    values, factors = gl.broadcast(acc, decay[:, None])
    return gl.inline_asm_elementwise(
        RESCALE, RESCALE_OPERANDS, [values, factors], dtype=gl.float32, is_pure=True, pack=64
    )
