"""`HybridBlockTable`: the blocks of one request in every group of a hybrid cache."""

from __future__ import annotations

from collections.abc import Sequence

from vattn.cache.allocation import KVCacheAllocation
from vattn.cache.block_pool import BlockPool
from vattn.cache.groups import KVCacheGroup
from vattn.errors import BlockError, CacheError, OutOfBlocksError


class HybridBlockTable:
    """The blocks of one request, one row for each group, all from one pool.

    Blocks that no later query can read, since a window or chunk has left them, go back to the pool; their entries
    become 0, the null block.

    Args:
        pool: where blocks come from: `BlockPool(cache.num_blocks, reserved=cache.reserved_blocks)`.
        cache: what `vattn.allocate_kv_cache(model, ..., hybrid=True)` returned.

    Attributes:
        rows: block ids of each group without encoder states, in the order of `GroupedMetadataBuilder.build`.
        encoder_blocks: ids of the encoder states, for `cross_block_tables`; empty without.
        num_tokens: tokens that the request has written, or is about to write.

    Raises:
        CacheError: a cache without groups.

    Example:
        >>> import torch, vattn
        >>> model = torch.nn.ModuleList(
        ...     vattn.Attention(2, 16, 0.25, per_layer_sliding_window=window) for window in (None, 24)
        ... )
        >>> cache = vattn.allocate_kv_cache(model, num_blocks=16, dtype=torch.float32, hybrid=True)
        >>> table = vattn.HybridBlockTable(vattn.BlockPool(cache.num_blocks), cache)
        >>> table.append(60), table.append(1)
        ([], [])
        >>> table.rows
        [[1, 2, 3, 4], [0, 0, 7, 8]]
    """

    def __init__(self, pool: BlockPool, cache: KVCacheAllocation) -> None:
        if not isinstance(pool, BlockPool) or not getattr(cache, "groups", None):
            raise CacheError(
                f"a pool of type {type(pool).__name__} and a cache of type {type(cache).__name__}, without groups",
                "a BlockPool and a cache that has groups",
                "allocate_kv_cache(..., hybrid=True)",
            )
        self.pool, self.cache = pool, cache
        self._own: list[KVCacheGroup] = [group for group in cache.groups if group.kind != "cross"]
        self._has_encoder = len(self._own) < len(cache.groups)
        self.rows: list[list[int]] = [[] for _ in self._own]
        self.encoder_blocks: list[int] = []
        self.num_tokens = 0

    def append(self, num_tokens: int) -> list[tuple[int, int]]:
        """Make room for more tokens in every group, after freeing what their queries cannot read.

        Returns:
            `(source, destination)` pairs for `vattn.copy_blocks` before the tokens are written: partly filled last
            blocks that a fork shares.

        Raises:
            OutOfBlocksError: the pool has too few free blocks; nothing has changed.
        """
        if num_tokens < 0:
            raise BlockError(f"{num_tokens} tokens to append", "0 or more", "use free() to give blocks back")
        if not num_tokens:
            return []
        size, total = self.cache.block_size, self.num_tokens + num_tokens
        outside = [self._outside(group, row) for group, row in zip(self._own, self.rows, strict=True)]
        last = self.num_tokens // size if self.num_tokens % size else None
        shared = [last is not None and self.pool.references(row[last]) > 1 for row in self.rows]
        needed = [-(-total // size) - len(row) + copy for row, copy in zip(self.rows, shared, strict=True)]
        dead = [row[place] for row, places in zip(self.rows, outside, strict=True) for place in places]
        gained = sum(self.pool.references(block) == 1 for block in dead)
        if sum(needed) > self.pool.num_free + gained:
            raise OutOfBlocksError(
                f"{sum(needed)} blocks were requested in {len(self._own)} groups, {self.pool.num_free} are free and "
                f"{gained} would become free",
                "no more than these",
                "free finished requests, preempt one, or allocate a larger KV cache",
            )
        self.pool.free(dead)
        copies = []
        for row, places, count, copy in zip(self.rows, outside, needed, shared, strict=True):
            for place in places:
                row[place] = 0
            fresh = self.pool.allocate(count)
            if copy and last is not None:
                copies.append((row[last], fresh[0]))
                self.pool.free([row[last]])
                row[last] = fresh.pop(0)
            row += fresh
        self.num_tokens = total
        return copies

    def _outside(self, group: KVCacheGroup, row: Sequence[int]) -> list[int]:
        """Return the places of the blocks that no query from the next position on can read."""
        first = min(group.spec.first_block(self.num_tokens), len(row))
        start = first
        while start and row[start - 1]:
            start -= 1
        return list(range(start, first))

    def append_encoder(self, num_states: int) -> None:
        """Take blocks for a request's encoder states, once.

        Raises:
            CacheError: the model has no cross attention, or the request its blocks already.
            OutOfBlocksError: the pool has too few free blocks; nothing has changed.
        """
        if not self._has_encoder or self.encoder_blocks:
            what = "blocks already" if self.encoder_blocks else "no group for them"
            raise CacheError(f"{num_states} encoder states, and {what}", "encoder states once", "make a new table")
        self.encoder_blocks = self.pool.allocate(-(-num_states // self.cache.block_size))

    def fork(self) -> HybridBlockTable:
        """Return a second request with the same tokens in the same blocks."""
        branch = HybridBlockTable(self.pool, self.cache)
        for row in self.rows:
            self.pool.fork(block for block in row if block)
        branch.rows = [list(row) for row in self.rows]
        branch.encoder_blocks = self.pool.fork(self.encoder_blocks)
        branch.num_tokens = self.num_tokens
        return branch

    def free(self) -> None:
        """Give all blocks back; the table is empty afterwards."""
        self.pool.free([block for row in self.rows for block in row if block] + self.encoder_blocks)
        self.rows, self.encoder_blocks, self.num_tokens = [[] for _ in self._own], [], 0
