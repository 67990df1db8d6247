"""Sums of few rows by one kernel, each rank of two in turn in Triton's interpreter, after the other's packets came."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from triton import knobs

from benchmarks.models.sum_ranks import FLAGS, launch_sum_ranks

WIDTH, MOST_ROWS, ROWS = 42, 5, 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [0, 1])
def test_sums_with_residual_and_norm(rank: int, dtype: torch.dtype) -> None:
    """Packets of the sum before last lie in the half of the inbox that a sum takes."""
    if not knobs.runtime.interpret:
        pytest.skip("needs Triton's interpreter")
    numbers = torch.Generator().manual_seed(rank)
    boxes = [torch.zeros(2, 2, MOST_ROWS, WIDTH // 2, dtype=torch.int64) for _ in range(2)]
    inbox = SimpleNamespace(
        rank=rank, world_size=2, width=WIDTH, most_rows=MOST_ROWS, counts=torch.zeros(MOST_ROWS, dtype=torch.int32),
        addresses=torch.tensor([box.data_ptr() for box in boxes]), flag=torch.zeros(FLAGS, dtype=torch.int32),
    )  # fmt: skip
    for count in range(1, 4):
        own, other, residual = (torch.randn(ROWS, WIDTH, generator=numbers).to(dtype) for _ in range(3))
        weight = torch.rand(WIDTH, generator=numbers).to(dtype)
        boxes[rank][count % 2, 1 - rank, :ROWS] = (count << 32) | (other.view(torch.int32).long() & 0xFFFFFFFF)
        total, normed = (torch.full((MOST_ROWS, WIDTH), float("nan"), dtype=dtype) for _ in range(2))
        launch_sum_ranks(inbox, own, total[:ROWS], residual, (weight, 1e-5, normed[:ROWS]), looks=1)
        expected = (own.float() + other.float()).to(dtype) + residual
        assert torch.equal(total[:ROWS], expected) and total[ROWS:].isnan().all() and normed[ROWS:].isnan().all()
        wide = expected.double()
        exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
        # Rounded twice to 16 bits, before and after the weight.
        torch.testing.assert_close(normed[:ROWS].double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        sent = boxes[1 - rank][count % 2, rank]
        assert bool((sent[:ROWS] >> 32 == count).all()) and not sent[ROWS:].any()
        assert torch.equal(sent[:ROWS].to(torch.int32).view(dtype), own)
        assert inbox.counts.tolist() == [count] * ROWS + [0] * (MOST_ROWS - ROWS)
