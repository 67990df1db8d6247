"""How ranks compare what they ask for before they share a group: through the store that their process group came from.

A store answers where a collective would hang: a rank that asks for something else, or refuses what it was given, is
read like any other, and one that does not come is missed after a timeout.

Whether a meeting took place is one entry of the store, written once: by the last rank to answer, or by the first that
gives up waiting. So all ranks hold the same of it, and what was said at a meeting that is over is read by nobody later.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from vattn.errors import RankError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_REFUSED = "refused"

_MET = "met"
"""How a meeting ended; else the rank that gave up waiting."""

_meetings: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
"""The first meeting of a group, each with a place of its own in the store, at which this rank has said nothing."""


def refuse(group: ProcessGroup) -> None:
    """Tell the other ranks that this one refuses what it was asked for; waits for nobody."""
    # This rank raises an error of its own, also if the store is out of reach.
    with contextlib.suppress(RankError), _reaching_the_store(group):
        _say(group, _next_place(group), _REFUSED)


def meet(group: ProcessGroup, facts: Mapping[str, object], timeout: float) -> str:
    """Compare facts with every other rank of a group; return where in the store, for `confirm`.

    Each rank must call this, or `refuse`, as often as the others. A meeting that another rank gave up is passed over.

    Args:
        facts: values with a faithful `repr`, under the same names on all ranks.
        timeout: seconds to wait for the others.

    Raises:
        RankError: another rank has other facts, refused, or did not come.
    """
    with _reaching_the_store(group):
        place = _next_place(group)
        _say(group, place, json.dumps({name: repr(value) for name, value in facts.items()}))
        told = _await(group, place, ", ".join(facts), timeout)
    refused = [str(rank) for rank, text in enumerate(told) if text == _REFUSED]
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
    return place


def confirm(group: ProcessGroup, place: str, failure: Exception | None, timeout: float) -> None:
    """Tell the ranks of a meeting whether this one could do what they agreed on, and go on if all could.

    Args:
        failure: why this rank could not; it waits for nobody then.

    Raises:
        RankError: this rank could not, another could not, or one did not say.
    """
    with _reaching_the_store(group):
        _say(group, f"{place}/made", _MET if failure is None else _REFUSED)
        told = _await(group, f"{place}/made", "the group of their checks", timeout) if failure is None else []
    if failure is None and _REFUSED not in told:
        return
    failed = [str(rank) for rank, text in enumerate(told) if text == _REFUSED] or [str(group.rank())]
    says = "its own error says why" if failure is None else f"torch says: {_first_line(failure)}"
    raise RankError(
        f"rank {', '.join(failed)} of {group.size()} could not make the group in which ranks compare their steps",
        "a gloo group of all ranks of the context-parallel group, connected within the timeout",
        f"call ContextParallel.of on every rank again, with a longer timeout if hosts are slow; {says}",
    ) from failure


def _next_place(group: ProcessGroup) -> str:
    """Return the place of the next meeting that is not over."""
    number = _meetings.get(group, 0)
    while _store().check([_end(f"vattn/context_parallel/{group.group_name}/{number}")]):
        number += 1
    _meetings[group] = number + 1
    return f"vattn/context_parallel/{group.group_name}/{number}"


def _say(group: ProcessGroup, place: str, text: str) -> None:
    """Write what this rank says at a meeting; the last one to do so ends it."""
    store = _store()
    store.set(f"{place}/{group.rank()}", text)
    if store.check([f"{place}/{rank}" for rank in range(group.size())]):
        store.compare_set(_end(place), "", _MET)


def _await(group: ProcessGroup, place: str, about: str, timeout: float) -> list[str]:
    """Return what every rank said, once all have; or end the meeting for all of them."""
    store, here, ranks = _store(), group.rank(), range(group.size())
    try:
        store.wait([_end(place)], timedelta(seconds=timeout))
    except RuntimeError:
        # The last rank may have come just now: whichever wrote first is right. A store out of reach raises again.
        store.compare_set(_end(place), "", str(here))
    ended = store.get(_end(place)).decode()
    if ended == _MET:
        return [store.get(f"{place}/{rank}").decode() for rank in ranks]
    silent = [str(rank) for rank in ranks if not store.check([f"{place}/{rank}"])]
    came = f"rank {here} of {len(ranks)} found no answer of all others about {about} within {timeout:g} s"
    if ended != str(here):
        came = f"rank {ended} of {len(ranks)} gave up waiting for the others' answers about {about}"
    raise RankError(
        came + (f": rank {', '.join(silent)} did not come" if silent else ""),
        "every rank of the group in ContextParallel.of, as often as the others",
        "look for an error on another rank, and call ContextParallel.of on every rank again",
    )


@contextlib.contextmanager
def _reaching_the_store(group: ProcessGroup) -> Iterator[None]:
    """Say as a `RankError` what the store raises."""
    try:
        yield
    except RankError:
        raise
    except RuntimeError as error:
        raise RankError(
            f"rank {group.rank()} of {group.size()} cannot reach the store of its process group: {_first_line(error)}",
            "the store that torch.distributed.init_process_group made, as long as ranks meet",
            "look for an error on the rank that serves the store, rank 0 as a rule",
        ) from error


def _end(place: str) -> str:
    return f"{place}/end"


def _first_line(error: Exception) -> str:
    return f"{(str(error).splitlines() or [type(error).__name__])[0]:.160}"


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
