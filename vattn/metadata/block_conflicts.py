"""Whose the blocks are that a step writes into: each belongs to one place of one request's block table.

Two requests may read the same blocks. Where one of them writes, the other one's keys would change behind its back. Host
work over the step's own numbers; what stands behind a request's last block, or before what its layers can still read,
is nobody's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vattn.errors import MetadataError

_MOST_COUNTS = 1 << 24
"""Where a cache's size is not known, ids below this are counted in a table."""


@dataclass(frozen=True)
class Reach:
    """How far back the queries of some layers can see: all tokens, a window, or chunks.

    Attributes:
        window: tokens visible to the left, the own one included; `None`: all, unless there are chunks.
        chunk_size, chunk_lookback: tokens per chunk, and chunks before the own one that are visible too.
    """

    window: int | None = None
    chunk_size: int | None = None
    chunk_lookback: int = 0

    @staticmethod
    def of(config: Any) -> Reach:
        """Return the reach of a layer's config; rows of multimodal ranges may ignore a window."""
        window = getattr(config, "sliding_window", None)
        if window is None or config.mm_prefix == "full" or config.context_parallel:
            return Reach()
        chunk_size = config.chunk_size
        return Reach(window) if chunk_size is None else Reach(None, chunk_size, config.chunk_lookback)

    def first_blocks(self, contexts: Tensor, block_size: int) -> Tensor:
        """Return the first block, int64 `[B]`, that queries behind `contexts` cached tokens can read."""
        if self.chunk_size is not None:
            chunks = (contexts // self.chunk_size - self.chunk_lookback).clamp(min=0)
            return chunks * self.chunk_size // block_size
        if self.window is not None:
            return (contexts - (self.window - 1)).clamp(min=0) // block_size
        return torch.zeros_like(contexts)


def first_blocks(reaches: Iterable[Reach], contexts: Tensor, block_size: int) -> Tensor:
    """Return the first block, int64 `[B]`, that any of the layers that share a table can read.

    Without layers nothing is known, and all blocks count.

    Example:
        >>> import torch
        >>> first_blocks([Reach(window=24), Reach(window=40)], torch.tensor([10, 100]), 16)
        tensor([0, 3])
    """
    found = [reach.first_blocks(contexts, block_size) for reach in reaches]
    return torch.stack(found).amin(0) if found else torch.zeros_like(contexts)


@dataclass(frozen=True)
class Writing:
    """What one step writes, and the tables that its requests read. All on the host.

    Attributes:
        table: int64 `[B, W]`.
        places: int64 `[N]`, of every token that is stored: the entry of the flat table that its position falls on.
        slots: int64 `[N]`, where it is stored.
        used: bool `[B, W]`, which entries are read.
        contexts: int64 `[B]`, tokens of each row before the step; -1: not those of its own cache alone.
        block_size: tokens per block.
        names: what errors call each row; default `"request i"`.
        groups: int64 `[B]`, of layers whose table a row is; default: one of all.
    """

    table: Tensor
    places: Tensor
    slots: Tensor
    used: Tensor
    contexts: Tensor
    block_size: int
    names: Sequence[str] = ()
    groups: Tensor | None = None

    def name(self, row: int) -> str:
        """Return what errors call a row."""
        return self.names[row] if self.names else f"request {row}"


class WrittenBlocks:
    """Tell whether the blocks that a step writes into are each one entry of its tables.

    Nearly every step is right, and one pass over its table tells. Where that finds something, a closer look tells
    entries that nobody reads from those that matter.

    Args:
        num_blocks: of the cache; `None`: not known.
        reaches: of the layers that share the table.
    """

    def __init__(self, num_blocks: int | None, reaches: Iterable[Reach] = ()) -> None:
        self._num_blocks, self._reaches = num_blocks, tuple(reaches)
        self._resize(num_blocks or 0)

    def _resize(self, size: int) -> None:
        # Made in inference mode, they could not be written outside of it. Counts of tokens, which floats below 2**24
        # hold exactly, and sum fastest.
        with torch.inference_mode(False):
            self._counts = torch.zeros(size, dtype=torch.float32, device="cpu")

    def sound(self, table: Tensor, slots: Tensor, block_size: int, longest: int) -> bool:
        """Return whether all ids are in range and each block that a slot lies in stands in the table once.

        Entries that nobody reads count too, so that a step for which this is false may be right all the same.

        Args:
            table: int64 `[B, W]`.
            slots: int64 `[N]`, of the tokens that are stored; where the table says.
            longest: most tokens of one request.
        """
        stored, width = slots.shape[0], table.shape[1]
        if not stored:
            return False
        if table.numel() >= _SMALL and 2 * (used := -(-longest // block_size)) <= width:
            table = table[:, :used]  # Most of it no request reaches.
        try:
            return self._stand_once(table, slots // block_size)
        except IndexError:
            self._counts.zero_()
            return False

    def _stand_once(self, table: Tensor, blocks: Tensor) -> bool:
        """Return whether each block, one for every token, stands in the table once; IndexError for ids out of range."""
        if self._num_blocks is None:
            size = 1 + int(table.max())
            if size > _MOST_COUNTS:
                return False
            if size > self._counts.shape[0]:
                self._resize(size)
        # Were a block of n tokens in two entries, it would count for 2 n.
        self._counts.index_add_(0, blocks, torch.ones_like(blocks, dtype=torch.float32))
        found = float(self._counts.index_select(0, table.reshape(-1)).sum())
        self._counts.index_fill_(0, blocks, 0)
        if found != blocks.shape[0]:
            self._counts.zero_()  # should an interruption have left counts, which only ever add to what is found
            return False
        return True

    def used(self, width: int, needed: Tensor, contexts: Tensor, block_size: int) -> Tensor:
        """Return bool `[B, width]`: which entries are read, of requests that have `needed` blocks each.

        Args:
            contexts: int64 `[B]`, tokens before the first query that reads.
        """
        columns = torch.arange(width, device="cpu")
        first = first_blocks(self._reaches, contexts, block_size)
        return (columns >= first.unsqueeze(1)) & (columns < needed.unsqueeze(1))

    def refuse(
        self, table: Tensor, places: Tensor, slots: Tensor, needed: Tensor, contexts: Tensor, block_size: int
    ) -> None:
        """Raise MetadataError for a block that is written, and that another entry is read from or written through.

        Args:
            table: int64 `[B, W]`, with ids in range where it is read.
            places, slots: int64 `[N]`, of the tokens that are stored.
            needed, contexts: int64 `[B]`, blocks that each request has, and its tokens before the step; `contexts` -1
                where other ranks hold some of them.
        """
        if slots.numel():
            used, blocks = self.used(table.shape[1], needed, contexts, block_size), slots // block_size
            as_told = torch.equal(table.reshape(-1)[places], blocks)
            if as_told and self._stand_once(torch.where(used, table, 0), blocks):
                return
            refuse_shared(Writing(table, places, slots, used, contexts, block_size))


_SMALL = 4096
"""A table with fewer entries is looked through as it came."""


def refuse_shared(writing: Writing) -> None:
    """Raise MetadataError for a block that is written, and that another entry is read from or written through."""
    table, used, size, width = writing.table, writing.used, writing.block_size, writing.table.shape[1]
    ids, at, counts = (writing.slots // size).unique(return_inverse=True, return_counts=True)
    entries = (torch.isin(table, ids) & used).view(-1).nonzero().squeeze(1)
    flat, places = table.reshape(-1), _stored_places(writing)
    # Each block's places, the first and the last one.
    first, owners = (
        torch.empty_like(ids).scatter_reduce_(0, at, places, how, include_self=False) for how in ("amin", "amax")
    )
    block = torch.searchsorted(ids, flat[entries])
    owner = owners[block]
    row, column = entries // width, entries % width
    writer, position = _row_of(owner, writing), owner % width
    others = entries != owner
    # What several requests store where none of them has an entry nobody reads, unless it is found below.
    for index in ((first != owners) & (first < table.numel())).nonzero()[:1].squeeze(1).tolist():
        raise _shared(writing, int(ids[index]), int(owners[index]), int(first[index]), True)
    # Who reads a block that another request fills in this very step gets what stands there from then on, for layers
    # store keys before they read them: a prefix that is found while it is stored. Then whoever reads it begins behind a
    # whole block. What was begun before and is read from its middle on belongs to two requests that went apart.
    whole = counts == size
    ended = torch.zeros_like(whole).index_fill_(0, at[writing.slots % size == size - 1], True)
    begins = writing.contexts[row]
    found = whole[block] | (ended[block] & (begins % size == 0) & (begins >= (column + 1) * size))
    as_prefix = (row != writer) & (column == position) & (owner < table.numel()) & found
    if writing.groups is not None:
        as_prefix &= writing.groups[row] == writing.groups[writer]

    def refusal(index: int) -> MetadataError:
        return _shared(writing, int(ids[block[index]]), int(owner[index]), int(entries[index]), False)

    for index in (others & ~as_prefix).nonzero()[:1].squeeze(1).tolist():
        raise refusal(index)
    # Their tables have to be the same up to the last block that they share.
    shared = others.nonzero().squeeze(1)
    pairs, of = (row[shared] * table.shape[0] + writer[shared]).unique(return_inverse=True)
    last = torch.empty_like(pairs).scatter_reduce_(0, of, shared, "amax", include_self=False)
    before = torch.arange(width) < column[last].unsqueeze(1)
    apart = ((table[writer[last]] != table[row[last]]) & used[row[last]] & before).any(1)
    for index in last[apart][:1].tolist():
        raise refusal(index)


def _stored_places(writing: Writing) -> Tensor:
    """Return the flat entry through which each token is stored, int64 `[N]`.

    A token whose slot was given may be stored elsewhere in its request: there, its own block is where it stands. Where
    its request has no such block, it is behind all entries, one place for each row.
    """
    flat, width = writing.table.reshape(-1), writing.table.shape[1]
    places, blocks = writing.places.clone(), writing.slots // writing.block_size
    for token in (flat[places] != blocks).nonzero().squeeze(1).tolist():
        row = int(places[token]) // width
        own = (writing.table[row] == blocks[token]) & writing.used[row]
        places[token] = row * width + int(own.int().argmax()) if bool(own.any()) else flat.shape[0] + row
    return places


def _row_of(places: Tensor, writing: Writing) -> Tensor:
    """Return whose places these are, as `_stored_places` has them."""
    end = writing.table.numel()
    return torch.where(places < end, places // max(writing.table.shape[1], 1), places - end)


def _shared(writing: Writing, block: int, owner: int, other: int, both_write: bool) -> MetadataError:
    """Return the error of a block that is stored through one place and read, or stored, through another."""
    width = writing.table.shape[1]
    mine, theirs = _row_of(torch.tensor([owner, other]), writing).tolist()
    if mine == theirs:
        first, second = sorted((owner % width, other % width))
        return MetadataError(
            f"{writing.name(mine)}: this step writes into block {block}, which stands twice in its block table, as "
            f"entries {first} and {second}",
            f"another block for every {writing.block_size} tokens of a request",
            "check the block allocator; write 0 where blocks behind a window were freed",
        )
    if both_write:
        asked = f"{writing.name(mine)} and {writing.name(theirs)} both write into block {block} in this step"
    else:
        asked = (
            f"{writing.name(mine)} writes in this step into block {block}, which {writing.name(theirs)} reads as "
            f"entry {other % width} of its block table"
        )
    return MetadataError(
        asked,
        "blocks that requests share are read alone, or filled by the one that stores their prefix",
        "copy a shared block before writing to it, as BlockTable.append says; check the block allocator",
    )


class BlocksInUse:
    """The blocks of a built step and of those behind it, so that a new one can be told from them.

    Args:
        blocks: ids, on the host.
        num_blocks: of the cache; `None`: not known.
    """

    def __init__(self, blocks: Tensor, num_blocks: int | None) -> None:
        self._far: set[int] = set()
        lowest, highest = (0, 0) if not blocks.numel() else map(int, blocks.aminmax())
        size = min(highest + 1, _MOST_COUNTS) if num_blocks is None else num_blocks
        blocks = blocks.reshape(-1)
        if lowest < 0 or highest >= size:  # Entries that nobody reads may hold anything.
            self._far.update(blocks[blocks >= size].tolist() if num_blocks is None else ())
            blocks = blocks[(blocks >= 0) & (blocks < size)]
        self._marks = bytearray(max(size, 1))
        counts = torch.bincount(blocks, minlength=len(self._marks))
        torch.frombuffer(self._marks, dtype=torch.uint8).copy_(counts > 0)

    def find(self, ids: Sequence[int]) -> int | None:
        """Return one of some ids that is in use; `None` if none is."""
        marks, end = self._marks, len(self._marks)
        return next((block for block in ids if (marks[block] if block < end else block in self._far)), None)

    def add(self, ids: Sequence[int]) -> None:
        """Note blocks that are used from now on."""
        marks, end = self._marks, len(self._marks)
        for block in ids:
            if block < end:
                marks[block] = 1
            else:
                self._far.add(block)
