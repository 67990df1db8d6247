"""Ask for bytes of a tensor before they are needed: into the L2 cache, without waiting for them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096
"""Bytes that a thread asks for."""

THREADS = 32


@triton.jit(do_not_specialize=["size"])
def read_ahead_kernel(bytes, size, CHUNK: tl.constexpr, THREADS: tl.constexpr):
    """Ask for `size` bytes, a multiple of CHUNK. Grid: blocks of THREADS chunks."""
    start = (tl.program_id(0) * THREADS + tl.arange(0, THREADS)) * CHUNK
    # A chunk beyond the end is the first one once more: what is there already costs next to nothing.
    address = (bytes + tl.where(start < size, start, 0)).to(tl.int64)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [address, tl.full([THREADS], CHUNK, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rounds"])
def read_kernel(words, found, rounds, WORDS: tl.constexpr):
    """Read WORDS words, `rounds` times. Grid: as many programs as are to read."""
    place = tl.program_id(0) * rounds * WORDS + tl.arange(0, WORDS)
    total = tl.zeros([WORDS], tl.int32)
    for _ in range(rounds):
        total ^= tl.load(words + place, cache_modifier=".cg")
        place += WORDS
    tl.store(found + tl.program_id(0), tl.sum(total))


def ask_for(tensor: Tensor, start: int, size: int) -> None:
    """Ask for bytes of a contiguous tensor, from `start`, a multiple of 16; whole chunks of them."""
    size = size // CHUNK * CHUNK
    given = tensor.view(torch.uint8).view(-1)[start : start + size] if size else tensor.view(torch.uint8).view(-1)
    grid = max(1, triton.cdiv(size, CHUNK * THREADS))
    read_ahead_kernel[(grid,)](bytes=given, size=size, CHUNK=CHUNK, THREADS=THREADS, num_warps=1, enable_fp_fusion=True)
