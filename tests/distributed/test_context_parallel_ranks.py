"""Context parallelism over real process groups: gloo, two and four processes on one machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed import context_parallel_ranks as ranks

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this build of torch has no gloo", allow_module_level=True)

LAST = "a_rank_that_does_not_come_is_told"
"""A rank that others waited for in vain comes late to everything that follows."""
OF_FOUR = ["attention_equals_one_rank", "combine_is_its_reference", "latent_attention_equals_one_rank"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, str]]]:
    """Run all cases on two ranks and some on four, once."""
    names = [name for name in ranks.CASES if name != LAST] + [LAST]
    folders: list[Path] = [tmp_path_factory.mktemp(f"ranks{world}") for world in (2, 4)]
    return {2: ranks.run_all(2, folders[0], names), 4: ranks.run_all(4, folders[1], OF_FOUR)}


@pytest.mark.parametrize(
    ("world", "name"), [*((2, name) for name in ranks.CASES), *((4, name) for name in OF_FOUR)], ids=lambda x: str(x)
)
def test_every_rank_passes(found: dict[int, list[dict[str, str]]], world: int, name: str) -> None:
    for rank, results in enumerate(found[world]):
        assert results.get(name, "not reached") == "passed", f"rank {rank} of {world}: {results.get(name)}"


@pytest.mark.long
def test_inductor_on_every_rank(tmp_path: Path) -> None:
    for rank, results in enumerate(ranks.run_all(2, tmp_path, list(ranks.SLOW_CASES), timeout=600)):
        assert results == dict.fromkeys(ranks.SLOW_CASES, "passed"), f"rank {rank}: {results}"
