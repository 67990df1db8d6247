"""Which requests own each block of a KV cache: host bookkeeping only, no tensor and no device.

A block has one reference per owner. Forked requests share blocks until one of them writes: copy on write. A full block
can be given a key of its content: other requests find it while it is owned, and afterwards until its room is needed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from vattn.config.arguments import MOST_INT32, integer, read_count
from vattn.config.typed import typed_on_error
from vattn.errors import BlockError, ConfigError, OutOfBlocksError


class BlockPool:
    """Hand out the blocks `reserved .. num_blocks - 1` of a cache and count their owners.

    Not safe to share between threads. Every call that raises leaves the pool as it was.

    Args:
        num_blocks: blocks of the cache, the reserved ones included.
        reserved: first blocks that are never handed out; block 0 is the null block that padding may point to.

    Raises:
        ConfigError: no block is left to hand out.

    Example:
        >>> pool = BlockPool(8)
        >>> prompt = pool.allocate(2)
        >>> branch = pool.fork(prompt)
        >>> pool.writable(branch[-1])
        (3, True)
        >>> pool.num_free
        4

    Blocks that have a key keep their content when their last owner leaves, and are handed out last, the least recently
    used first:

        >>> pool.publish(prompt[0], "key of its tokens")
        True
        >>> pool.free([*prompt, *branch[:-1], 3])
        >>> pool.take(["key of its tokens", "another key"])
        [1]
    """

    def __init__(self, num_blocks: int, *, reserved: int = 1) -> None:
        blocks, kept = integer(num_blocks), integer(reserved)
        if blocks is None or kept is None or kept < 0 or not kept < blocks <= MOST_INT32:
            raise ConfigError(
                f"a pool of {num_blocks!r:.40} blocks with {reserved!r:.40} reserved",
                f"reserved >= 0 and num_blocks from reserved + 1 to {MOST_INT32}",
                "allocate a larger KV cache",
            )
        self.num_blocks, self.reserved = num_blocks, reserved = blocks, kept
        # Popped from the end: low ids first, and the block freed last is the one handed out next.
        self._free = list(range(num_blocks - 1, reserved - 1, -1))
        self._references = [0] * num_blocks
        self._keys: dict[int, str] = {}
        self._published: dict[str, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Blocks without owners that have a key, the least recently used first."""

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, those that are kept for their content included."""
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Blocks without owners whose content can still be taken."""
        return len(self._kept)

    @property
    def num_used(self) -> int:
        """Blocks with at least one owner."""
        return self.num_blocks - self.reserved - self.num_free

    def references(self, block_id: int) -> int:
        """Return how many owners a block has, 0 if it is free.

        Raises:
            BlockError: the pool has no such block, or it is reserved.
        """
        self._check_known(block_id)
        return self._references[block_id]

    def allocate(self, num_blocks: int) -> list[int]:
        """Return that many blocks with one owner each: all of them or none.

        Raises:
            OutOfBlocksError: fewer are free; the text says how many were requested and how many are left.
        """
        num_blocks = read_count("num_blocks", num_blocks, 0, "check the length arithmetic", BlockError)
        if num_blocks > self.num_free:
            raise OutOfBlocksError(
                f"{num_blocks} blocks were requested and {self.num_free} of {self.num_blocks - self.reserved} are left",
                f"up to {self.num_free} blocks now",
                "free finished requests, preempt one, or allocate a larger KV cache",
            )
        taken = [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]
        for block_id in taken:
            self._references[block_id] = 1
        return taken

    @typed_on_error
    def fork(self, block_ids: Iterable[int]) -> list[int]:
        """Add one owner to each block, once per mention, and return the same ids.

        Raises:
            BlockError: a block is unknown or free.
        """
        shared = list(block_ids)
        self._check_owned(shared)
        for block_id in shared:
            self._references[block_id] += 1
        return shared

    @typed_on_error
    def free(self, block_ids: Iterable[int]) -> None:
        """Take one owner from each block, once per mention; blocks without owners can be allocated again.

        Raises:
            BlockError: a block is unknown, free already, or mentioned more often than it has owners; names them all.
        """
        released = list(block_ids)
        self._check_owned(released, once_per_mention=True)
        for block_id in reversed(released):
            self._references[block_id] -= 1
            if self._references[block_id]:
                continue
            if block_id in self._keys:
                self._kept[block_id] = None
            else:
                self._free.append(block_id)

    @typed_on_error
    def publish(self, block_id: int, key: str) -> bool:
        """Name the content of a block that is full and will not change, so that `find` and `take` know it.

        Args:
            key: hash of the content and of all that it depends on (`vattn.kv_transfer.block_keys`). In a cache with
                groups it must tell the groups apart.

        Returns:
            Whether the block has the key now; not if another block has it.

        Raises:
            BlockError: the block is unknown or free, or has another key.
        """
        self._check_owned([block_id])
        if not isinstance(key, str):
            raise BlockError(f"key {key!r:.60}", "a text", "pass a key of vattn.kv_transfer.block_keys")
        if self._keys.get(block_id, key) != key:
            raise BlockError(
                f"block {block_id} has key {self._keys[block_id]!r} and was given {key!r}",
                "one key for a block's content",
                "publish full blocks only, and take writable() blocks before writing",
            )
        if self._published.setdefault(key, block_id) != block_id:
            return False
        self._keys[block_id] = key
        return True

    @typed_on_error
    def find(self, keys: Sequence[str]) -> int:
        """Return how many of the first keys have a block."""
        return next((count for count, key in enumerate(keys) if key not in self._published), len(keys))

    @typed_on_error
    def num_kept_of(self, keys: Sequence[str]) -> int:
        """Return how many of the blocks that `take` would give have no owner: it lowers `num_free` by so many."""
        return sum(self._published[key] in self._kept for key in set(keys[: self.find(keys)]))

    @typed_on_error
    def take(self, keys: Sequence[str]) -> list[int]:
        """Become an owner of the blocks of the first keys, as far as there are some, and return them."""
        found = [self._published[key] for key in keys[: self.find(keys)]]
        for block_id in found:
            self._references[block_id] += 1
            self._kept.pop(block_id, None)
        return found

    @typed_on_error
    def forget(self, block_ids: Iterable[int]) -> None:
        """Drop the keys of owned blocks with wrong content, so that `find` and `take` miss them.

        Raises:
            BlockError: a block is unknown or free.
        """
        wrong = list(block_ids)
        self._check_owned(wrong)
        for block_id in wrong:
            self._forget(block_id)

    def _forget(self, block_id: int) -> None:
        """Drop a block's key."""
        key = self._keys.pop(block_id, None)
        if key is not None:
            del self._published[key]

    def _evict(self) -> int:
        """Return the least recently used of the kept blocks, without its key."""
        block_id, _ = self._kept.popitem(last=False)
        self._forget(block_id)
        return block_id

    @typed_on_error
    def writable(self, block_id: int) -> tuple[int, bool]:
        """Return a block that only its caller owns, and whether the old block's bytes must be copied to it.

        A shared block loses this owner and a new one takes its place in the caller's table. A block that stays loses
        its key, since its content will change.

        Raises:
            BlockError: the block is unknown or free.
            OutOfBlocksError: the block is shared and no other is free.
        """
        self._check_owned([block_id])
        if self._references[block_id] == 1:
            self._forget(block_id)
            return block_id, False
        (copy,) = self.allocate(1)
        self._references[block_id] -= 1
        return copy, True

    def check(self) -> None:
        """Verify that free, kept and owned blocks are disjoint and complete; for tests and for hunting leaks.

        Raises:
            BlockError: the bookkeeping contradicts itself.
        """
        usable = set(range(self.reserved, self.num_blocks))
        owned = {block_id for block_id, count in enumerate(self._references) if count > 0}
        free = {*self._free, *self._kept}
        sound = len(free) == self.num_free and not free & owned and free | owned == usable
        keyed = {block_id: key for key, block_id in self._published.items()}
        if not sound or min(self._references) < 0 or keyed != self._keys or not set(self._kept) <= set(keyed):
            raise BlockError(
                f"pool of {self.num_blocks} blocks: {self.num_free} free, {len(owned)} owned, {len(keyed)} keys",
                f"{len(usable)} in all, none twice",
                "report this as a bug of the pool",
            )

    def __repr__(self) -> str:
        return f"BlockPool({self.num_used} used, {self.num_free} free, {self.reserved} reserved)"

    def _check_known(self, block_id: int) -> None:
        if not (type(block_id) is int and self.reserved <= block_id < self.num_blocks):
            raise BlockError(
                f"block id {block_id!r} is not one that this pool hands out",
                f"{self.reserved} to {self.num_blocks - 1}",
                "pass ids that allocate() returned",
            )

    def _check_owned(self, block_ids: Iterable[int], *, once_per_mention: bool = False) -> None:
        mentions = Counter(block_ids)
        for block_id in mentions:
            self._check_known(block_id)
        wrong = [b for b, count in mentions.items() if self._references[b] < (count if once_per_mention else 1)]
        if wrong:
            problem = "freed more often than it has owners" if once_per_mention else "not allocated"
            listed = ", ".join(f"{b} ({self._references[b]} owners)" for b in sorted(wrong))
            raise BlockError(f"block {problem}: {listed}", "blocks that have an owner", "drop ids once they are freed")


class BlockTable:
    """The blocks of one request, in order, and how many tokens they hold.

    Args:
        pool: where blocks come from.
        block_size: tokens per block, that of the cache.

    Attributes:
        blocks: ids, the row of a block table.
        num_tokens: tokens that the request holds; position p is in `blocks[p // block_size]`.

    Example:
        >>> pool = BlockPool(8)
        >>> prompt = BlockTable(pool, block_size=16)
        >>> prompt.append(20)
        []
        >>> branch = prompt.fork()
        >>> branch.append(1)
        [(2, 3)]
        >>> prompt.blocks, branch.blocks
        ([1, 2], [1, 3])
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool, self.block_size = pool, read_count("block_size", block_size, 1, "pass the block size of the cache")
        self.blocks: list[int] = []
        self.num_tokens = 0

    def append(self, num_tokens: int) -> list[tuple[int, int]]:
        """Make room for more tokens, in blocks that only this request owns.

        Returns:
            `(source, destination)` pairs for `vattn.copy_blocks` before the tokens are written: at most one, the partly
            filled last block if a fork shares it.

        Raises:
            OutOfBlocksError: the pool has too few free blocks; nothing has changed.
        """
        if num_tokens < 0:
            raise BlockError(f"{num_tokens} tokens to append", "0 or more", "use free() to give blocks back")
        if not num_tokens:
            return []
        last = self.num_tokens // self.block_size
        shared = self.num_tokens % self.block_size > 0 and self.pool.references(self.blocks[last]) > 1
        total = self.num_tokens + num_tokens
        needed = -(-total // self.block_size) - len(self.blocks)
        fresh = self.pool.allocate(needed + shared)
        copies = [(self.blocks[last], fresh[0])] if shared else []
        if shared:
            self.pool.free([self.blocks[last]])
            self.blocks[last] = fresh.pop(0)
        self.blocks += fresh
        self.num_tokens = total
        return copies

    def fork(self) -> BlockTable:
        """Return a second request with the same tokens in the same blocks."""
        branch = BlockTable(self.pool, self.block_size)
        branch.blocks, branch.num_tokens = self.pool.fork(self.blocks), self.num_tokens
        return branch

    def free(self) -> None:
        """Give all blocks back; the table is empty afterwards."""
        self.pool.free(self.blocks)
        self.blocks, self.num_tokens = [], 0
