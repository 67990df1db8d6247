"""Models over two GPUs and NCCL: tokens of one GPU, captured collectives, and ranks that fail or are killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from tests.distributed import nccl_ranks
from tests.distributed.processes import run_all

RANKS = nccl_ranks.__name__
EQUAL = [name for name in nccl_ranks.CASES if name not in (nccl_ranks.RAISES, nccl_ranks.KILLED)]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_nccl_available() or torch.cuda.device_count() < 2,
        reason="needs two GPUs and NCCL",
    ),
]


@pytest.mark.parametrize("name", EQUAL)
def test_ranks_give_the_tokens_of_one_gpu(name: str, tmp_path: Path) -> None:
    for rank, results in enumerate(run_all(RANKS, 2, tmp_path, [name], timeout=120, backend="nccl")):
        assert results == {name: "passed"}, f"rank {rank}: {results}"


def test_a_rank_that_raises_ends_the_other(tmp_path: Path) -> None:
    """Rank 0 waits in a captured collective until its group is aborted."""
    name = nccl_ranks.RAISES
    assert run_all(RANKS, 2, tmp_path, [name], timeout=90, backend="nccl") == [{name: "passed"}] * 2


def test_a_rank_that_is_killed_ends_the_other(tmp_path: Path) -> None:
    name = nccl_ranks.KILLED
    assert run_all(RANKS, 2, tmp_path, [name], timeout=90, backend="nccl") == [{name: "passed"}, {}]
