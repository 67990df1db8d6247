"""How ranks compare what they ask for before they share a group: through the store that their process group came from.

A store answers where a collective would hang: a rank that asks for something else, or refuses what it was given, is
read like any other, and one that does not come is missed after a timeout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from vattn.errors import RankError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_REFUSED = "refused"

_meetings: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
"""How often the ranks of a group have met: every meeting has a place of its own in the store."""


def refuse(group: ProcessGroup) -> None:
    """Tell the other ranks that this one refuses what it was asked for; waits for nobody."""
    _tell(group, _REFUSED)


def meet(group: ProcessGroup, facts: Mapping[str, object], timeout: float) -> None:
    """Compare facts with every other rank of a group; each must call this, or `refuse`, as often as the others.

    Args:
        facts: values with a faithful `repr`, under the same names on all ranks.
        timeout: seconds to wait for the others.

    Raises:
        RankError: another rank has other facts, refused, or did not come.
    """
    store, place = _tell(group, json.dumps({name: repr(value) for name, value in facts.items()}))
    ranks = range(group.size())
    try:
        store.wait([f"{place}/{rank}" for rank in ranks], timedelta(seconds=timeout))
    except RuntimeError as error:
        raise RankError(
            f"rank {group.rank()} of {group.size()} found no answer of all others about {', '.join(facts)} within "
            f"{timeout:g} s",
            "every rank of the group in ContextParallel.of, as often as the others",
            "look for an error on another rank",
        ) from error
    told = [store.get(f"{place}/{rank}").decode() for rank in ranks]
    refused = [str(rank) for rank in ranks if told[rank] == _REFUSED]
    if refused:
        raise RankError(
            f"rank {', '.join(refused)} refused what it was asked for",
            "options that every rank accepts",
            "its own error says why",
        )
    first, *others = (json.loads(text) for text in told)
    differing = [
        f"{name}={theirs.get(name)} on rank {rank}, {name}={first.get(name)} on rank 0"
        for rank, theirs in enumerate(others, 1)
        for name in facts
        if theirs.get(name) != first.get(name)
    ]
    if differing:
        raise RankError(
            f"ranks disagree: {'; '.join(differing[:8])}",
            "equal options on all ranks of a context-parallel group",
            "call ContextParallel.of with the same arguments on every rank",
        )


def _tell(group: ProcessGroup, text: str) -> tuple[Any, str]:
    """Write what this rank says at its next meeting; return the store and the place."""
    from torch.distributed.distributed_c10d import _get_default_store

    number = _meetings.get(group, 0)
    _meetings[group] = number + 1
    store, place = _get_default_store(), f"vattn/context_parallel/{group.group_name}/{number}"
    store.set(f"{place}/{group.rank()}", text)
    return store, place
