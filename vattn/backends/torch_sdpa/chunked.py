"""Splits the query rows of a request into chunks, so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vattn.config.attention import AttentionConfig
from vattn.config.dcp import DCPShard
from vattn.ops.arguments import AttentionArgs, VarlenAttentionArgs

Args = AttentionArgs | VarlenAttentionArgs

_SCORES_PER_CHUNK = 1 << 22
"""Scores of a chunk (16 MiB in fp32)."""

_MASK_PER_CHUNK = 1 << 22
"""Mask entries of one `scaled_dot_product_attention` call."""


@dataclass(frozen=True)
class Request:
    """What the host knows of one request.

    Attributes:
        index: row of the block table.
        first_row: first row of the packed query.
        query_len, seq_len: new tokens, and keys in all.
        context_len: position of query row 0; negative when some rows lie before the sequence.
        num_keys: keys that can be read: `seq_len`, limited to what the block table or the packed keys hold.
        causal: causal or bidirectional.
        held: how many of its keys can be read on this rank, under context parallelism.
    """

    index: int
    first_row: int
    query_len: int
    seq_len: int
    context_len: int
    num_keys: int
    causal: bool
    held: int = 0

    @property
    def rows(self) -> slice:
        """Its rows of the packed query."""
        return slice(self.first_row, self.first_row + self.query_len)


@dataclass(frozen=True)
class Chunk:
    """Query rows `[first_row, end_row)` of a request, and the keys `[first_key, end_key)` that they can see at most.

    Keys are counted as they are held: under context parallelism `shard` gives their positions.
    """

    first_row: int
    end_row: int
    first_key: int
    end_key: int
    shard: DCPShard | None

    def rows_and_keys(self, request: Request, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the positions of the rows `[rows, 1]` and of the keys `[1, keys]`."""
        start = request.context_len
        q = torch.arange(start + self.first_row, start + self.end_row, device=device)
        k = torch.arange(self.first_key, self.end_key, device=device)
        return q[:, None], (k if self.shard is None else self.shard.position(k))[None, :]


def chunks(request: Request, config: AttentionConfig, plain: bool) -> Iterator[Chunk]:
    """Split a request's query rows so that mask or scores stay bounded; rows before position 0 are left out."""
    if request.num_keys == 0:
        return
    budget = _MASK_PER_CHUNK if plain else _SCORES_PER_CHUNK // config.num_heads
    step, shard = max(1, budget // request.num_keys), config.dcp_shard
    for first in range(max(0, -request.context_len), request.query_len, step):
        end = min(first + step, request.query_len)
        first_key, end_key = _key_range(request, request.context_len + first, request.context_len + end, config)
        if shard is not None:
            first_key, end_key = shard.count(first_key), min(shard.count(end_key), request.held)
        if first_key < end_key:
            yield Chunk(first, end, first_key, end_key, shard)


def _key_range(request: Request, first: int, end: int, config: AttentionConfig) -> tuple[int, int]:
    """Return bounds of the keys that query positions `[first, end)` can see."""
    window, chunk, lookback = config.sliding_window, config.chunk_size, config.chunk_lookback
    low, high = 0, _last_key(request, config)
    if config.mm_prefix != "none":
        return low, high
    if chunk is not None and lookback is not None:
        low = (first // chunk - lookback) * chunk
        high = ((end - 1) // chunk + lookback + 1) * chunk
    elif window is not None:
        low, high = first - window + 1, end - 1 + window
    if request.causal:
        high = min(high, end)
    return max(0, low), min(high, _last_key(request, config))


def _last_key(request: Request, config: AttentionConfig) -> int:
    """Return the position after the last key that a row of a request can see."""
    return min(request.num_keys, max(0, request.context_len)) if config.context_only else request.num_keys
