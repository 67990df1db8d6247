"""Offsets of requests, which may hold anything, brought to what kernels can rely on."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def order_offsets(offsets, ordered, count, most, BLOCK: tl.constexpr):
    """Write `count` int32 offsets clamped to [0, most], and none below the one before; one program."""
    highest = tl.zeros([], tl.int32)
    for first in range(0, count, BLOCK):
        index = first + tl.arange(0, BLOCK)
        inside = index < count
        value = tl.load(offsets + index, mask=inside, other=0)
        value = tl.associative_scan(tl.minimum(tl.maximum(value, highest), most), 0, _larger)
        tl.store(ordered + index, value, mask=inside)
        highest = tl.max(value, 0)
    # All threads of the program read what it has written.
    tl.debug_barrier()
