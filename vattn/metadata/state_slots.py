"""Read where the requests of a step have their states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from vattn.errors import MetadataError
from vattn.metadata.inputs import Lengths, check_count, read_integers
from vattn.metadata.step import Step


def num_state_slots(parts: Iterable[Any]) -> int | None:
    """Return how many requests the state layers among the modules of a model hold; `None` without any."""
    return min((part.num_state_slots for part in parts if hasattr(part, "bind_states")), default=None)


def read_state_slots(step: Step, given: Lengths | None, most: int | None) -> Tensor | None:
    """Return int64 `[B]`, one slot for each request of a step; `None` for models without states.

    Args:
        step: its lengths and slots have been read.
        given: the argument `state_slots` of `build`.
        most: how many requests the layers of the builder hold; `None` for layers without states.

    Raises:
        MetadataError: slots that layers need or have no use for, another number of them, a request without new tokens,
            or a slot that is not one request's alone. Slot 0, for padding, is one only in steps that store nothing.
    """
    if given is None:
        if most is None:
            return None
        raise MetadataError(
            "a step without state_slots for layers that keep a state for each request",
            f"one slot for each request, 1 to {most}",
            "build(..., state_slots=[1, 2, ...]): a request keeps its slot from its first to its last token",
        )
    if most is None:
        raise MetadataError(
            "state_slots for layers without states", "None", "leave state_slots out, or give the builder the model"
        )
    slots = read_integers("state_slots", given)
    check_count("state_slots", slots.shape[0], step.query_lens.shape[0])
    if bool((step.query_lens == 0).any()):
        raise MetadataError(
            f"state_slots with query_lens {step.query_lens.tolist()!r:.60}",
            "requests that each have a new token",
            "leave requests without new tokens out of the step",
        )
    listed, stores = slots.tolist(), bool((step.slots >= 0).any())
    least, highest = min(listed, default=1), max(listed, default=0)
    if least < (1 if stores else 0) or highest > most or (stores and len(set(listed)) < len(listed)):
        raise MetadataError(
            f"state_slots {listed!r:.80}",
            f"slots from 1 to {most}, each of one request",
            "give every request its own slot; enable(model, max_num_reqs=...) decides how many there are",
        )
    return slots
