"""A kernel that lets the next one start at once, and writes what that one reads much later."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _copy_late(first, first_target, first_size, second, second_target, second_size, BLOCK: tl.constexpr):
    tl.extra.cuda.gdc_launch_dependents()
    for _ in range(200):
        tl.inline_asm_elementwise(
            "nanosleep.u32 1000; mov.u32 $0, 0;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
        )
    for start in range(0, first_size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(first_target + place, tl.load(first + place, mask=place < first_size), mask=place < first_size)
    for start in range(0, second_size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(second_target + place, tl.load(second + place, mask=place < second_size), mask=place < second_size)


def copy_late(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> None:
    """Copy two contiguous tensors, each (source, target), some hundred microseconds after the next kernel may start."""
    sizes = [source.numel() for source, _ in (first, second)]
    _copy_late[(1,)](*first, sizes[0], *second, sizes[1], BLOCK=1024)
