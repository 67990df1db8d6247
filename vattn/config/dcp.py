"""Decode context parallelism: which rank holds which token of a request.

Token i is on rank `i // interleave % world_size`. A rank keeps its tokens in order, so the local index of
a token counts the tokens of that rank before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from vattn.config.encoding import check

Number = TypeVar("Number", int, Tensor)
"""A host integer, or a tensor of any integer dtype."""

MAX_PERIOD = 1 << 30
"""Largest period of a shard: positions are int32."""


@dataclass(frozen=True)
class DCPShard:
    """One rank's share of the tokens of every request.

    Attributes:
        rank: this rank, from 0 to `world_size - 1`.
        world_size: ranks that share the cache.
        interleave: consecutive tokens on one rank.

    Example:
        >>> shard = DCPShard(rank=1, world_size=2, interleave=2)
        >>> [shard.position(index) for index in range(4)], shard.count(7)
        ([2, 3, 6, 7], 3)
    """

    rank: int
    world_size: int
    interleave: int = 1

    @property
    def period(self) -> int:
        """Tokens after which the assignment to ranks repeats."""
        return self.world_size * self.interleave

    def count(self, length: Number) -> Number:
        """Return how many of the first `length` tokens of a request are on this rank; 0 if `length` is below 1."""
        first = self.rank * self.interleave
        if isinstance(length, Tensor):
            length = length.clamp(min=0)
            return length // self.period * self.interleave + (length % self.period - first).clamp(0, self.interleave)
        length = max(0, length)
        rest = min(max(length % self.period - first, 0), self.interleave)
        return length // self.period * self.interleave + rest

    def position(self, index: Number) -> Number:
        """Return the position in its request of the token with a local index on this rank."""
        return index // self.interleave * self.period + self.rank * self.interleave + index % self.interleave

    def owns(self, position: Number) -> bool | Tensor:
        """Return whether the token at a position is on this rank."""
        return position // self.interleave % self.world_size == self.rank

    def local_indices(self, positions: Tensor) -> Tensor:
        """Return the local indices of tokens at some positions, -1 for other ranks' tokens and positions < 0."""
        return torch.where((positions >= 0) & self.owns(positions), self.count(positions), -1)

    def of_rank(self, rank: int) -> DCPShard:
        """Return the shard of another rank."""
        return DCPShard(rank, self.world_size, self.interleave)


def check_shard(config: Any) -> None:
    """Check `context_rank`, `context_world` and `context_interleave` of a config."""
    rank, world, interleave = config.context_rank, config.context_world, config.context_interleave
    check(
        world >= 1 and 0 <= rank < world,
        f"context_rank={rank} with context_world={world}",
        "a rank from 0 to context_world - 1",
        "take both from the process group",
    )
    check(
        interleave >= 1 and world * interleave <= MAX_PERIOD,
        f"context_interleave={interleave} with context_world={world}",
        f"an int from 1 on, times the ranks at most {MAX_PERIOD}",
        "use 1, or the block size",
    )
    check(
        config.context_parallel or (rank, world, interleave) == (0, 1, 1),
        f"context_rank={rank}, context_world={world}, context_interleave={interleave} with context_parallel=False",
        "0, 1 and 1",
        "set context_parallel=True",
    )


def shard_of(config: Any) -> DCPShard | None:
    """Return the shard of a config, `None` without context parallelism."""
    if not config.context_parallel:
        return None
    return DCPShard(config.context_rank, config.context_world, config.context_interleave)


@lru_cache(maxsize=4096)
def without_dcp(config: Any) -> Any:
    """Return an `AttentionConfig` or `MLAConfig` for a cache that holds all tokens."""
    return config.replace(context_parallel=False, context_rank=0, context_world=1, context_interleave=1)
