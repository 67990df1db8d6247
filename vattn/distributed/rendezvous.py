"""Ranks compare their options before they share a group, through the store of their process group.

A store answers where a collective would hang: a rank that requests something else, or refuses its arguments, answers
like any other, and one that does not answer is missed after a timeout.

One entry of the store says how a rendezvous ended. It is written once: by the last rank to answer, or by the first that
gives up waiting. So all ranks agree on it.
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

_CALL = "ContextParallel.of"

_MET = "met"
"""How a rendezvous ended; otherwise its end names the rank that gave up waiting."""

_next: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
"""Number of the next rendezvous of a group; each has its own keys in the store."""


def refuse(group: ProcessGroup) -> None:
    """Tell the other ranks that this one refuses its arguments; does not wait."""
    # This rank raises its own error, also if the store is out of reach.
    with contextlib.suppress(RankError), reaching_the_store(group):
        _answer(group, _next_key(group), _REFUSED)


def meet(group: ProcessGroup, facts: Mapping[str, object], timeout: float, call: str = _CALL) -> str:
    """Compare facts with every other rank of a group; return the key prefix of the rendezvous, for `confirm`.

    Each rank must call this, or `refuse`, as often as the others. A rendezvous that another rank gave up is skipped.

    Args:
        facts: values with a faithful `repr`, under the same names on all ranks.
        timeout: seconds to wait for the others.
        call: what every rank calls, for errors.

    Raises:
        RankError: another rank has other facts, refused, or did not answer.
    """
    with reaching_the_store(group):
        key = _next_key(group)
        _answer(group, key, json.dumps({name: repr(value) for name, value in facts.items()}))
        answers = _await(group, key, ", ".join(facts), timeout, call)
    refused = [str(rank) for rank, text in enumerate(answers) if text == _REFUSED]
    if refused:
        raise RankError(
            f"rank {', '.join(refused)} refused its arguments",
            "options that every rank accepts",
            "its own error says why",
        )
    first, *others = (json.loads(text) for text in answers)
    differing = [
        f"{name}={theirs.get(name)} on rank {rank}, {name}={first.get(name)} on rank 0"
        for rank, theirs in enumerate(others, 1)
        for name in facts
        if theirs.get(name) != first.get(name)
    ]
    if differing:
        raise RankError(
            f"ranks disagree: {'; '.join(differing[:8])}",
            "equal values on all ranks of the group",
            f"call {call} with the same arguments on every rank",
        )
    return key


def confirm(group: ProcessGroup, key: str, failure: Exception | None, timeout: float) -> None:
    """Tell the ranks of a rendezvous whether this one made its part of the group; return if all did.

    Args:
        key: of the rendezvous.
        failure: why this rank could not; it does not wait then.

    Raises:
        RankError: this rank could not, another could not, or one did not say.
    """
    with reaching_the_store(group):
        _answer(group, f"{key}/made", _MET if failure is None else _REFUSED)
        answers = _await(group, f"{key}/made", "the group of their checks", timeout) if failure is None else []
    if failure is None and _REFUSED not in answers:
        return
    failed = [str(rank) for rank, text in enumerate(answers) if text == _REFUSED] or [str(group.rank())]
    says = "its own error says why" if failure is None else f"torch says: {first_line(failure)}"
    raise RankError(
        f"rank {', '.join(failed)} of {group.size()} could not make the group in which ranks compare their steps",
        "a gloo group of all ranks of the context-parallel group, connected within the timeout",
        f"call {_CALL} on every rank again, with a longer timeout if hosts are slow; {says}",
    ) from failure


def _next_key(group: ProcessGroup) -> str:
    """Return the key prefix of the next rendezvous that has not ended."""
    number = _next.get(group, 0)
    while store_of_ranks().check([_end(f"vattn/meet/{group.group_name}/{number}")]):
        number += 1
    _next[group] = number + 1
    return f"vattn/meet/{group.group_name}/{number}"


def _answer(group: ProcessGroup, key: str, text: str) -> None:
    """Write the answer of this rank; the last one to answer ends the rendezvous."""
    store = store_of_ranks()
    store.set(f"{key}/{group.rank()}", text)
    if store.check([f"{key}/{rank}" for rank in range(group.size())]):
        store.compare_set(_end(key), "", _MET)


def _await(group: ProcessGroup, key: str, about: str, timeout: float, call: str = _CALL) -> list[str]:
    """Return the answers of all ranks; or give up, and end the rendezvous for all of them."""
    store, here, ranks = store_of_ranks(), group.rank(), range(group.size())
    try:
        store.wait([_end(key)], timedelta(seconds=timeout))
    except RuntimeError:
        # The last rank may have answered just now: the first entry counts. A store out of reach raises again.
        store.compare_set(_end(key), "", str(here))
    ended = store.get(_end(key)).decode()
    if ended == _MET:
        return [store.get(f"{key}/{rank}").decode() for rank in ranks]
    silent = [str(rank) for rank in ranks if not store.check([f"{key}/{rank}"])]
    got = f"rank {here} of {len(ranks)} got no answer of all others about {about} within {timeout:g} s"
    if ended != str(here):
        got = f"rank {ended} of {len(ranks)} gave up waiting for the others' answers about {about}"
    raise RankError(
        got + (f": rank {', '.join(silent)} did not answer" if silent else ""),
        f"every rank of the group in {call}, as often as the others",
        f"look for an error on another rank, and call {call} on every rank again",
    )


@contextlib.contextmanager
def reaching_the_store(group: ProcessGroup) -> Iterator[None]:
    """Raise errors of the store as `RankError`."""
    try:
        yield
    except RankError:
        raise
    except RuntimeError as error:
        raise RankError(
            f"rank {group.rank()} of {group.size()} cannot reach the store of its process group: {first_line(error)}",
            "the store that torch.distributed.init_process_group made, as long as ranks use it",
            "look for an error on the rank that serves the store, rank 0 as a rule",
        ) from error


def _end(key: str) -> str:
    return f"{key}/end"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type."""
    return f"{(str(error).splitlines() or [type(error).__name__])[0]:.160}"


def store_of_ranks() -> Any:
    """Return the store of the default process group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
