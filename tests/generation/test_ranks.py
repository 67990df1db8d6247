"""Steps of several ranks with a mock leader, for cases that are slow in several processes."""

from __future__ import annotations

from typing import Any

import pytest

import vattn
from vattn.errors import RankError
from vattn.generation.model_steps import Graphs, StepInputs
from vattn.generation.ranks import RankSteps


class Interrupted:
    """The leader of a rank that the user interrupts as it sends or waits."""

    world_size = 2

    def __init__(self, rank: int) -> None:
        self.rank, self.reported = rank, list[BaseException]()

    def check(self) -> None:
        pass

    def watch(self, stuck: Any) -> None:
        pass

    def send(self, message: bytes) -> None:
        raise KeyboardInterrupt

    def receive(self) -> bytes:
        raise KeyboardInterrupt

    def report(self, error: BaseException) -> None:
        self.reported.append(error)

    def end(self) -> None:
        pass


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupted_rank_reports_to_the_others(rank: int) -> None:
    """They wait for it in the middle of a step, so no further step may run."""
    leader: Any = Interrupted(rank)
    steps = RankSteps(lambda *inputs: inputs[0], vattn.AttentionMetadataBuilder(4, 64, 64), Graphs(), leader)
    with pytest.raises(KeyboardInterrupt):
        steps.follow() if rank else steps.run(StepInputs(), None)
    assert [type(error) for error in leader.reported] == [KeyboardInterrupt]


def test_tokens_of_a_step_in_which_a_rank_failed_are_not_read() -> None:
    """Aborted collectives return, with anything in their outputs."""
    leader: Any = Interrupted(0)
    steps = RankSteps(lambda *inputs: inputs[0], vattn.AttentionMetadataBuilder(4, 64, 64), Graphs(), leader)
    assert steps.read(lambda: 3) == 3

    def fail() -> None:
        raise RankError("rank 1 failed", "ranks that work", "start again")

    leader.check = fail
    with pytest.raises(RankError, match="rank 1 failed"):
        steps.read(lambda: 3)
