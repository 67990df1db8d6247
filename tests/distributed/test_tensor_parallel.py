"""Models that are sharded over gloo ranks: logits and tokens of one rank, and ranks that differ, fail or end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

pytest.importorskip("transformers")

from tests.distributed import tensor_parallel_ranks
from tests.distributed.processes import run_all

RANKS = tensor_parallel_ranks.__name__
OF_FOUR = ["fewer KV heads than ranks are replicated", "a generator gives the tokens of one rank"]
KILLED, LAST = "a rank is killed", tensor_parallel_ranks.LAST
OF_TWO = [name for name in tensor_parallel_ranks.CASES if name not in (KILLED, LAST, OF_FOUR[0])] + [LAST]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"),
]


@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_passes(world: int, tmp_path: Path) -> None:
    names = OF_TWO if world == 2 else OF_FOUR
    for rank, results in enumerate(run_all(RANKS, world, tmp_path, names)):
        assert results == dict.fromkeys(names, "passed"), f"rank {rank} of {world}: {results}"


def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path) -> None:
    assert run_all(RANKS, 2, tmp_path, [KILLED], timeout=200) == [{KILLED: "passed"}, {}]
