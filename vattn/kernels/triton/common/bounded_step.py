"""Offsets and lengths of a step, which may hold anything, brought to what kernels can rely on before they run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vattn.kernels.replay import unrecorded
from vattn.kernels.triton.common.mask import MAX_SEQ_LEN, clamp
from vattn.kernels.triton.common.offsets import order_offsets


@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens"], do_not_specialize_on_alignment=["query_start_loc", "seq_lens"]
)
def bounded_step_kernel(query_start_loc, seq_lens, starts, lengths, num_reqs, num_tokens, BLOCK: tl.constexpr):
    """See `bounded_step`. Grid: 1."""
    order_offsets(query_start_loc, starts, num_reqs + 1, num_tokens, BLOCK)
    for first in range(0, num_reqs, BLOCK):
        request = first + tl.arange(0, BLOCK)
        length = tl.load(seq_lens + request, mask=request < num_reqs, other=0)
        tl.store(lengths + request, clamp(length, MAX_SEQ_LEN), mask=request < num_reqs)


def bounded_step(
    query_start_loc: Tensor, seq_lens: Tensor, num_tokens: int, room: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return offsets `[B + 1]` in order, among `num_tokens` rows, and lengths `[B]` from 0 to `MAX_SEQ_LEN`.

    room: where they are written.
    """
    starts, lengths = room or (torch.empty_like(query_start_loc), torch.empty_like(seq_lens))
    num_reqs = seq_lens.shape[0]
    block = min(1024, triton.next_power_of_2(num_reqs + 1))
    unrecorded(bounded_step_kernel)[(1,)](
        query_start_loc, seq_lens, starts, lengths, num_reqs, num_tokens, BLOCK=block, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return starts, lengths
