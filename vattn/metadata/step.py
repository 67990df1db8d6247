"""One step on the host, before it is staged: `Limits` of a builder, `Step`, `CrossStep`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from vattn.config.dcp import DCPShard, Number


@dataclass(frozen=True)
class Limits:
    """A builder's capacity and what it knows about the cache."""

    num_reqs: int
    num_tokens: int
    seq_len: int
    block_size: int
    num_blocks: int | None
    mm_ranges: int
    trees: int
    tree_size: int
    encoder_len: int = 0
    encoder_tokens: int = 0
    reserved_blocks: int = 0
    """Blocks from block 1 on that hold sinks."""
    tables: int = 1
    """Block tables of a step, one for each group of layers."""
    dcp_shard: DCPShard | None = None
    """The share of each request's tokens that this rank's cache holds; `None`: all."""

    @property
    def table_width(self) -> int:
        """Columns of the block table, the same on every rank."""
        return -(-most_held(self.dcp_shard, self.seq_len) // self.block_size)


@dataclass
class Step:
    """One step's host values, checked: int64 CPU tensors, without padding."""

    query_lens: Tensor
    seq_lens: Tensor
    table: Tensor
    slots: Tensor
    positions: Tensor
    causal: bool | Tensor
    tree_bias: Tensor | None
    tree_id: Tensor | None
    mm_ranges: Tensor | None
    packed: bool = False
    """Without a cache: no table, no slots."""
    cross: CrossStep | None = None
    num_logits: Tensor | None = None
    """How many of its last tokens each request keeps for its logits; `None`: all."""
    shared_prefix_len: int | None = None
    """Tokens of the prefix that all requests share; `None`: layers do not attend it apart."""
    held: Tensor | None = None
    """How many of its tokens this rank holds, under context parallelism."""
    state_slots: Tensor | None = None
    """Where each request has its state in layers that keep one."""
    given_places: bool = False
    """Whether slots or positions were given, instead of following from lengths and table."""
    num_tokens: int = 0
    max_query_len: int = 0
    max_seq_len: int = 0
    others: Sequence[Step] = ()
    """The same step in the tables of further groups."""


def most_held(shard: DCPShard | None, length: Number) -> Number:
    """Return how many of a request's tokens the first rank holds; no other holds more."""
    return length if shard is None else shard.of_rank(0).count(length)


@dataclass(frozen=True)
class CrossStep:
    """One step's encoder lengths, checked: int64 CPU tensors, without padding.

    Attributes:
        lengths: encoder states of each request, cached or new.
        new: bool, the requests that ran their encoder in this step.
        table: block ids of each request's states.
        num_rows: encoder states that this step writes.
    """

    lengths: Tensor
    new: Tensor
    table: Tensor
    num_rows: int
