"""The halves of a step whose decodes come first: its decodes, and its prefills."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torch import Tensor

from vattn.errors import MetadataError

if TYPE_CHECKING:
    from vattn.metadata.attention_metadata import AttentionMetadata

Metadata = TypeVar("Metadata", bound="AttentionMetadata")

_BY_REQUEST = (
    "seq_lens", "block_table", "causal", "tree_id", "mm_ranges", "encoder_seq_lens", "cross_block_table",
    "local_seq_lens", "state_slots",
)  # fmt: skip
_BY_TOKEN = ("slot_mapping", "positions")
_WHOLE_KEYS = ("whole_blocks", "whole_rows", "whole_table")
_SHARED_PREFIX = ("prefix_lens", "prefix_start_loc", "suffix_lens", "suffix_block_table")


class HostLengths(NamedTuple):
    """What a builder knows of a step on the host: int64 tensors, one entry for each real request."""

    query_lens: Tensor
    seq_lens: Tensor
    decode_threshold: int

    @property
    def decodes(self) -> Tensor:
        """Bool, the requests that count as decodes."""
        return is_decode(self.query_lens, self.seq_lens, self.decode_threshold)


def is_decode(query_lens: Any, seq_lens: Any, decode_threshold: int) -> Any:
    """Return whether a request is a decode: few new tokens, and some that were cached before. Takes tensors too."""
    return (query_lens <= decode_threshold) & ((seq_lens > query_lens) | (query_lens == 0))


def half_of(step: Metadata, decodes: bool) -> Metadata | None:
    """Return the decodes or the prefills of a step as views of its tensors; `None` without any."""
    host, half = step._lengths, "decode_metadata" if decodes else "prefill_metadata"
    if host is None:
        raise MetadataError(
            f"{half} of a step without lengths on the host",
            "what build() or advance() of AttentionMetadataBuilder returned",
            "build the step from lengths on the host",
        )
    if not (step.num_decodes if decodes else step.num_prefills):
        return None
    if not (step.num_prefills if decodes else step.num_decodes):
        return step
    first = step.num_decodes
    if not bool(host.decodes[:first].all()):
        raise MetadataError(
            f"{half} of a step with prefills before decodes",
            "steps with all decodes first",
            "order the requests by vattn.token_order(query_lens, seq_lens, first='decode')",
        )
    for name in ("cross_slot_mapping", "logits_indices"):
        if getattr(step, name) is not None:
            raise MetadataError(
                f"{half} of a step with {name}",
                "steps in which no encoder runs and which keep all rows",
                "pass the whole step to the layers",
            )
    requests = slice(0, first) if decodes else slice(first, None)
    rows = slice(0, step.num_decode_tokens) if decodes else slice(step.num_decode_tokens, None)
    starts = (
        step.query_start_loc[: first + 1].data if decodes else step.query_start_loc[first:] - step.num_decode_tokens
    )
    own = HostLengths(host.query_lens[requests], host.seq_lens[requests], host.decode_threshold)
    changed: dict[str, Any] = {name: _part(getattr(step, name), requests) for name in _BY_REQUEST}
    changed |= {name: _part(getattr(step, name), rows) for name in _BY_TOKEN} | dict.fromkeys(
        _SHARED_PREFIX + _WHOLE_KEYS
    )
    without = "prefill" if decodes else "decode"
    changed |= {f"num_{without}s": 0, f"num_{without}_tokens": 0}
    part = replace(
        step,
        **changed,
        query_start_loc=starts,
        plans={},
        num_reqs=len(own.query_lens),
        num_actual_tokens=int(own.query_lens.sum()),
        max_query_len=int(own.query_lens.max()),
        max_seq_len=int(own.seq_lens.max()),
        _lengths=own,
    )
    part.mark_dynamic()
    return part


def _part(value: Any, part: slice) -> Any:
    return value[part].data if isinstance(value, Tensor) else value
