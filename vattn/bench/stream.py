"""Read memory once and do next to nothing with it: the ceiling of everything that a cache limits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, ROUNDS = 4096, 16
READ = BLOCK * ROUNDS
"""int32 values of one program."""


@triton.jit
def read_kernel(values, output, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """XOR `ROUNDS` blocks. Grid: parts of `BLOCK * ROUNDS` values."""
    program = tl.program_id(0)
    column = program.to(tl.int64) * (BLOCK * ROUNDS) + tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int32)
    for part in tl.static_range(ROUNDS):
        found ^= tl.load(values + column + part * BLOCK)
    tl.store(output + program, tl.sum(found, 0))


def read_all(values: Tensor, output: Tensor | None = None) -> Tensor:
    """Read int32 values, a multiple of `READ`; returns one number per part, which nobody needs."""
    programs = values.numel() // READ
    if output is None:
        output = torch.empty(programs, dtype=torch.int32, device=values.device)
    read_kernel[(programs,)](values, output, BLOCK=BLOCK, ROUNDS=ROUNDS, num_warps=8)
    return output
