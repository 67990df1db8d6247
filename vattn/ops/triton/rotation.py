"""Hadamard rotations of rows in registers: `vattn.kv_formats.rotation`, bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def butterflies(x, BLOCK: tl.constexpr):
    """Return the unnormalised Hadamard transform of every BLOCK columns of fp32 `[rows, width]`; all powers of two."""
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    which = tl.arange(0, 2)[None, None, :, None]
    for step in tl.static_range(0, 10):
        if (1 << step) < BLOCK:
            pairs = tl.reshape(x, [ROWS, WIDTH >> (step + 1), 2, 1 << step])
            # Sums of two are exact in either order, so that any way of reducing gives the same bits.
            total = tl.expand_dims(tl.sum(pairs, axis=2), 2)
            difference = tl.expand_dims(tl.sum(tl.where(which == 0, pairs, -pairs), axis=2), 2)
            x = tl.reshape(tl.where(which == 0, total, difference), [ROWS, WIDTH])
    return x


@triton.jit
def flip(x):
    """Change the signs of the columns of fp32 `[rows, width]` that `flips` of the reference has as -1."""
    column = tl.arange(0, x.shape[1]).to(tl.uint32) + 1
    return tl.where(((column * 0x9E3779B9) >> 31)[None, :] == 0, x, -x)


@triton.jit
def rotate(x, BLOCK: tl.constexpr, FLIP: tl.constexpr):
    """Return fp32 rows in the rotated basis, not scaled. BLOCK 1: no rotation."""
    if FLIP:
        x = flip(x)
    return butterflies(x, BLOCK)


@triton.jit
def rotate_query(x, FACTOR: tl.constexpr, BLOCK: tl.constexpr, FLIP: tl.constexpr):
    """Return fp32 queries turned so that they meet rotated keys."""
    return rotate(x, BLOCK, FLIP) * FACTOR


@triton.jit
def rotate_back(x, FACTOR: tl.constexpr, BLOCK: tl.constexpr, FLIP: tl.constexpr):
    """Return fp32 sums of rotated values in their own basis."""
    x = butterflies(x, BLOCK) * FACTOR
    if FLIP:
        x = flip(x)
    return x
