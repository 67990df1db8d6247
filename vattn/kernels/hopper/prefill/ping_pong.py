"""The ping-pong of consumer warpgroups in the Hopper prefill kernels, and tiles that only others attend."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

BARRIERS = gl.constexpr(("8", "9", "10"))
"""Named barriers of the warpgroups; the compiler uses the first few."""


@gluon.jit
def ping_pong_wait(barrier: gl.constexpr):
    """Wait until the warpgroup before has let this one go."""
    x = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        "bar.sync " + barrier + ", 256; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def ping_pong_signal(barrier: gl.constexpr):
    """Let the next warpgroup go."""
    x = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        "bar.arrive " + barrier + ", 256; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def own_end_of(position, rows, first, end, GROUP_INDEX: gl.constexpr, TOKENS: gl.constexpr, N: gl.constexpr):
    """Return where this warpgroup's key tiles of a row tile end; the others' may go on."""
    own_end = gl.minimum(end, (gl.maximum(position + TOKENS, 0) + N - 1) // N)
    own_end = gl.where(rows > GROUP_INDEX * TOKENS, own_end, 0)
    # One tile at least, even if every row is hidden in it.
    return gl.maximum(own_end, first + 1)


@gluon.jit
def pass_tiles(
    count, step, key_full, key_empty, value_full, value_empty, MINE: gl.constexpr, NEXT: gl.constexpr,
    PING_PONG: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Let key tiles go that only other warpgroups attend; return the step after them."""
    for _ in range(count):
        mbarrier.wait(key_full.index(step % STAGES), (step // STAGES) & 1)
        if PING_PONG:
            ping_pong_wait(MINE)
            ping_pong_signal(NEXT)
        mbarrier.arrive(key_empty.index(step % STAGES), count=1)
        mbarrier.wait(value_full.index(step % STAGES), (step // STAGES) & 1)
        mbarrier.arrive(value_empty.index(step % STAGES), count=1)
        step += 1
    return step
