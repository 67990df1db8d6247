"""Hadamard rotations of rows in registers: `vattn.quantization.packed.hadamard`, bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.kernels.triton.common.codec import INTERPRETED


@triton.jit
def butterflies(x, BLOCK: tl.constexpr):
    """Return the unnormalised Hadamard transform of every BLOCK columns of fp32 `[rows, width]`; all powers of two."""
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    for step in tl.static_range(0, 10):
        if (1 << step) < BLOCK:
            pairs = tl.reshape(x, [ROWS, WIDTH >> (step + 1), 2, 1 << step])
            x = tl.reshape(sum_and_difference(pairs), [ROWS, WIDTH])
    return x


@triton.jit
def sum_and_difference(pairs):
    """Return `(a + b, a - b)` of each pair along axis 2 of fp32 `[i, j, 2, k]`."""
    which = tl.arange(0, 2)[None, None, :, None]
    if INTERPRETED:
        # The interpreter is only fast at sums. A sum of two is the same in either order.
        total = tl.sum(pairs, axis=2)
        difference = tl.sum(tl.where(which == 0, pairs, -pairs), axis=2)
        return tl.where(which == 0, tl.expand_dims(total, 2), tl.expand_dims(difference, 2))
    else:
        # One exchange between threads and one FMA; products with 1 or -1 are exact.
        bits = pairs.to(tl.int32, bitcast=True)
        other = (tl.expand_dims(tl.xor_sum(bits, axis=2), 2) ^ bits).to(tl.float32, bitcast=True)
        return tl.fma(tl.zeros_like(pairs) + (1 - 2 * which).to(tl.float32), pairs, other)


@triton.jit
def pairwise_sum(x):
    """Return the sums of rows `[rows, 1]` of fp32 `[rows, width]`: columns 1 apart first, then 2, 4 and so on."""
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    # Keep the sum in every column, so that no step changes the layout.
    for step in tl.static_range(0, 10):
        if (1 << step) < WIDTH:
            pairs = tl.reshape(x, [ROWS, WIDTH >> (step + 1), 2, 1 << step])
            total = tl.expand_dims(tl.sum(pairs, axis=2), 2)
            x = tl.reshape(tl.broadcast_to(total, pairs.shape), [ROWS, WIDTH])
    return tl.max(x, axis=1)[:, None]


@triton.jit
def flip(x, FLIP: tl.constexpr):
    """Multiply fp32 rows `[rows, width]` by the signs `flips` of the reference, FLIP being one of its `SIGNS`."""
    column = tl.arange(0, x.shape[1]).to(tl.uint32)
    if FLIP == 1:
        odd = column & (column >> 1)
        odd ^= odd >> 8
        odd ^= odd >> 4
        odd ^= odd >> 2
        odd = (odd ^ (odd >> 1)) & 1
        # No zero below zero: codebooks go by the sign bit.
        return tl.where(odd[None, :] == 0, x, -x) + 0.0
    else:
        odd = ((column + 1) * 0x9E3779B9) >> 31
        return tl.where(odd[None, :] == 0, x, -x)


@triton.jit
def rotate(x, BLOCK: tl.constexpr, FLIP: tl.constexpr):
    """Return rotated fp32 rows, not scaled. BLOCK 1: no rotation. FLIP 0: no signs."""
    if FLIP:
        x = flip(x, FLIP)
    return butterflies(x, BLOCK)


@triton.jit
def rotate_query(x, FACTOR: tl.constexpr, BLOCK: tl.constexpr, FLIP: tl.constexpr):
    """Return fp32 queries rotated for products with rotated keys."""
    return rotate(x, BLOCK, FLIP) * FACTOR


@triton.jit
def rotate_back(x, FACTOR: tl.constexpr, BLOCK: tl.constexpr, FLIP: tl.constexpr):
    """Rotate fp32 sums of rotated values back."""
    x = butterflies(x, BLOCK) * FACTOR
    if FLIP:
        x = flip(x, FLIP)
    return x
