"""Leaders of two ranks in one process, on a store in memory: failures reach ranks that wait in a collective."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from vattn.distributed import leader, rendezvous
from vattn.errors import RankError


class Group:
    """What a leader needs of a group; notes aborts."""

    group_name = "all"

    def __init__(self, rank: int) -> None:
        self._rank, self.aborts = rank, 0

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2

    def abort(self) -> None:
        self.aborts += 1


@pytest.fixture
def leaders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[leader.Leader]]:
    store = dist.HashStore()
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    for module in (leader, rendezvous):
        monkeypatch.setattr(module, "store_of_ranks", lambda: store)
    monkeypatch.setattr(leader, "_GRACE", 1.0)
    monkeypatch.setattr(leader, "_LOOK", timedelta(seconds=0.02))
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda rank: leader.Leader(Group(rank), {}, 20, "test"), range(2)))  # type: ignore[arg-type]
    yield made
    made[0].end()


def wait_for_failure(one: leader.Leader) -> str:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            one.check()
        except RankError as error:
            return str(error)
        time.sleep(0.01)
    raise AssertionError("no failure was seen")


@pytest.mark.parametrize("stuck", [True, False])
def test_a_rank_that_fails_ends_the_collectives_of_the_others(leaders: list[leader.Leader], stuck: bool) -> None:
    """Its own error is what both name; a rank that is between two steps keeps its group."""
    first, second = leaders
    first.watch(lambda: stuck)
    said = str(second.report(ValueError("no memory left")))
    assert said.startswith("rank 1 of 2 failed with ValueError: no memory left.")
    assert wait_for_failure(first) == said
    time.sleep(0.2)
    assert [one._group.aborts for one in leaders] == [int(stuck), 0]  # type: ignore[attr-defined]


def test_a_rank_that_is_gone_is_missed(leaders: list[leader.Leader], monkeypatch: pytest.MonkeyPatch) -> None:
    first = leaders[0]
    first.watch(lambda: True)
    while not leaders[1]._store.check([f"{first._key}/alive/1"]):
        time.sleep(0.01)
    monkeypatch.setattr(leader, "_SILENT", 0.5)
    leaders.pop()
    assert wait_for_failure(first).startswith("rank 1 of 2 ended, or gave no sign of life for 0.5 s")
    time.sleep(0.2)
    assert first._group.aborts == 1  # type: ignore[attr-defined]


def test_nothing_is_missed_after_the_end(leaders: list[leader.Leader], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "_SILENT", 0.1)
    leaders[0].end()
    second = leaders[1]
    assert not second.look()
    time.sleep(0.3)
    second.check()


def test_no_thread_is_left_in_the_store_when_python_ends(leaders: list[leader.Leader]) -> None:
    """One that came back from it then would end the process by an abort."""
    watching = [thread for thread in threading.enumerate() if thread.name == "vattn ranks" and thread.is_alive()]
    assert len(watching) >= 2 and all(each.end_watch.atexit for each in leaders)
    for each in leaders:
        each.end_watch()
    assert sum(thread.is_alive() for thread in watching) == len(watching) - 2
