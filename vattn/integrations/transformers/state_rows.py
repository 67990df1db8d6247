"""Which rows of a step run together in layers that keep a state for each request, and which states they have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vattn.errors import MetadataError
from vattn.metadata.attention_metadata import AttentionMetadata


@dataclass(frozen=True)
class RowGroup:
    """Rows of requests with equally many new tokens.

    Attributes:
        shape: requests, and new tokens of each.
        rows: int64, rows of the step, request by request; `None` for all rows in order.
        read, write: int64 `[requests]`, slots of their states; those that begin read the slot of zeros.
        continues: whether one of the requests may have a state already.
    """

    shape: tuple[int, int]
    rows: Tensor | None
    read: Tensor
    write: Tensor
    continues: bool

    def take(self, hidden_states: Tensor) -> Tensor:
        """Return the rows as a batch, `[requests, tokens, hidden_size]`, of `[1, T, hidden_size]`."""
        rows = hidden_states[0] if self.rows is None else hidden_states[0].index_select(0, self.rows)
        return rows.view(*self.shape, -1)


def row_groups(step: AttentionMetadata, num_tokens: int, num_slots: int) -> tuple[RowGroup, ...]:
    """Return the groups of a step.

    Args:
        step: with `state_slots`.
        num_tokens: rows of the step, padding included.
        num_slots: of the cache of states.

    Raises:
        MetadataError: a step without slots, or with prompts and without lengths on the host.
    """
    if step.state_slots is None:
        raise MetadataError(
            "a step without state_slots for a model that keeps a state for each request",
            "one slot for each request",
            "build(..., state_slots=[1, 2, ...]) of a builder with layers=model",
        )
    slots, zeros = step.state_slots.long(), num_slots + 1
    if step.max_query_len <= 1 and num_tokens == slots.shape[0]:
        # Row i is that of request i. Nothing here reads the host, so that graphs can hold it.
        read = torch.where(step.seq_lens <= 1, zeros, slots)
        return (RowGroup((num_tokens, 1), None, read, slots, True),)
    if step._lengths is None:
        raise MetadataError(
            "a step with prompts and without lengths on the host, for a model that keeps a state for each request",
            "what build() or advance() of AttentionMetadataBuilder returned",
            "build the step from lengths on the host",
        )
    return tuple(_by_length(step, slots, zeros, num_tokens))


def _by_length(step: AttentionMetadata, slots: Tensor, zeros: int, num_tokens: int) -> list[RowGroup]:
    assert step._lengths is not None
    query_lens, seq_lens = step._lengths.query_lens.tolist(), step._lengths.seq_lens.tolist()
    members: dict[tuple[int, bool], list[int]] = {}
    starts, start = [], 0
    for request, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        # A prompt of one token runs with the decodes, from a state of zeros.
        members.setdefault((count, count == 1 or length > count), []).append(request)
        starts.append(start)
        start += count
    begins = torch.tensor([length == count for count, length in zip(query_lens, seq_lens, strict=True)])
    begins = begins.to(slots.device, non_blocking=True)
    groups = []
    for (count, continues), requests in members.items():
        places = [row for request in requests for row in range(starts[request], starts[request] + count)]
        rows = None if places == list(range(num_tokens)) else torch.tensor(places).to(slots.device, non_blocking=True)
        own = torch.tensor(requests).to(slots.device, non_blocking=True)
        write = slots.index_select(0, own)
        read = torch.where(begins.index_select(0, own), zeros, write)
        groups.append(RowGroup((len(requests), count), rows, read, write, continues))
    return groups
