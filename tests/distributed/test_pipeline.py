"""Models in a pipeline of gloo ranks: logits and tokens of one rank, and a rank that is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

pytest.importorskip("transformers")

from tests.distributed import pipeline_ranks
from tests.distributed.processes import run_all

RANKS, KILLED = pipeline_ranks.__name__, "a rank is killed"
OF_TWO = [name for name in pipeline_ranks.CASES if name != KILLED]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"),
]


@pytest.mark.parametrize("world", [2, 4])
def test_every_stage_passes(world: int, tmp_path: Path) -> None:
    names = OF_TWO if world == 2 else OF_TWO[:1]
    for rank, results in enumerate(run_all(RANKS, world, tmp_path, names)):
        assert results == dict.fromkeys(names, "passed"), f"rank {rank} of {world}: {results}"


def test_a_stage_that_is_killed_ends_the_others(tmp_path: Path) -> None:
    assert run_all(RANKS, 2, tmp_path, [KILLED], timeout=200) == [{KILLED: "passed"}, {}]
