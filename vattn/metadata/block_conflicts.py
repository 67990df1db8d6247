"""Refuse steps that write into a block which another entry of their block tables uses.

Requests may share blocks that they only read. Where one of them writes, the keys of the others would change. Entries
after a request's last block, and before the first one that its layers can still read, do not count. Host work only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vattn.errors import MetadataError

_MOST_COUNTS = 1 << 24
"""Without a known cache size, larger block ids are not counted in a table."""

_SMALL = 4096
"""Smaller tables are read whole, unused columns included."""


class Reach(NamedTuple):
    """How far back the queries of some layers can see: all tokens, a window, or chunks.

    Attributes:
        window: tokens visible to the left, the query's own included; `None`: all, unless there are chunks.
        chunk_size, chunk_lookback: tokens per chunk, and visible chunks before the query's own.
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
        return Reach(window) if config.chunk_size is None else Reach(None, config.chunk_size, config.chunk_lookback)

    def first_blocks(self, contexts: Tensor, block_size: int) -> Tensor:
        """Return the first block, int64 `[B]`, that queries after `contexts` cached tokens can read."""
        if self.chunk_size is not None:
            return (contexts // self.chunk_size - self.chunk_lookback).clamp(min=0) * self.chunk_size // block_size
        if self.window is not None:
            return (contexts - (self.window - 1)).clamp(min=0) // block_size
        return torch.zeros_like(contexts)


def used_entries(reaches: Iterable[Reach], width: int, needed: Tensor, contexts: Tensor, block_size: int) -> Tensor:
    """Return bool `[B, width]`: the entries of a block table that any of the layers sharing it can read.

    Args:
        reaches: of those layers; none: nothing is known, and every block of a request counts.
        needed: int64 `[B]`, blocks that each request has.
        contexts: int64 `[B]`, tokens before the first query that reads.

    Example:
        >>> import torch
        >>> used_entries([Reach(window=24), Reach(window=40)], 5, torch.tensor([5]), torch.tensor([70]), 16).tolist()
        [[False, True, True, True, True]]
    """
    first = [reach.first_blocks(contexts, block_size) for reach in reaches]
    columns = torch.arange(width, device="cpu")
    start = torch.stack(first).amin(0) if first else torch.zeros_like(contexts)
    return (columns >= start.unsqueeze(1)) & (columns < needed.unsqueeze(1))


class BlockConflicts:
    """Tell whether each block that a step writes into is one entry of its tables.

    Args:
        num_blocks: of the cache; `None`: not known.
        reaches: of the layers that share the table.
    """

    def __init__(self, num_blocks: int | None, reaches: Iterable[Reach] = ()) -> None:
        self._num_blocks, self.reaches = num_blocks, tuple(reaches)
        self._resize(num_blocks or 0)

    def _resize(self, size: int) -> None:
        # Tensors of inference mode could not be written outside of it. Floats hold counts below 2**24 exactly, and
        # their sum is the fastest.
        with torch.inference_mode(False):
            self._counts = torch.zeros(size, dtype=torch.float32, device="cpu")

    def absent(self, table: Tensor, slots: Tensor, block_size: int, longest: int) -> bool:
        """Return whether all ids are in range and each block with a slot is in the table once; one pass.

        Unused entries count too, so a step for which this is false may be right all the same.

        Args:
            table: int64 `[B, W]`.
            slots: int64 `[N]` of the stored tokens, as the table has them.
            longest: tokens of the longest request.
        """
        if not slots.shape[0]:
            return False
        if table.numel() >= _SMALL and 2 * (used := -(-longest // block_size)) <= table.shape[1]:
            table = table[:, :used]
        try:
            return self._each_once(table, slots // block_size)
        except IndexError:
            self._counts.zero_()
            return False

    def _each_once(self, table: Tensor, blocks: Tensor) -> bool:
        """Return whether each block, one per token, is in the table once; IndexError for ids out of range."""
        if self._num_blocks is None:
            size = 1 + int(table.max())
            if size > _MOST_COUNTS:
                return False
            if size > self._counts.shape[0]:
                self._resize(size)
        # A block of n tokens in two entries would count for 2 n.
        self._counts.index_add_(0, blocks, torch.ones_like(blocks, dtype=torch.float32))
        found = float(self._counts.index_select(0, table.reshape(-1)).sum())
        self._counts.index_fill_(0, blocks, 0)
        return found == blocks.shape[0]

    def refuse(
        self, table: Tensor, places: Tensor, slots: Tensor, needed: Tensor, contexts: Tensor, block_size: int
    ) -> None:
        """Raise MetadataError for a conflict, after `absent` was false; ids are in range where they are used.

        Args:
            table, places, slots, contexts, block_size: as for `refuse_conflicts`.
            needed: int64 `[B]`, blocks that each request has.
        """
        if not slots.numel():
            return
        used, blocks = used_entries(self.reaches, table.shape[1], needed, contexts, block_size), slots // block_size
        if torch.equal(table.reshape(-1)[places], blocks) and self._each_once(torch.where(used, table, 0), blocks):
            return
        refuse_conflicts(table, used, places, slots, contexts, block_size)


def refuse_conflicts(
    table: Tensor,
    used: Tensor,
    places: Tensor,
    slots: Tensor,
    contexts: Tensor,
    block_size: int,
    name: Callable[[int], str] = "request {}".format,
    groups: Tensor | None = None,
) -> None:
    """Raise MetadataError for a block that a step writes and that another used entry names.

    A request may read a block that another one fills in this step, since layers store keys before they read them: as
    part of the same prefix, and if its own tokens begin after that block. Else the two were forked without a copy.

    Args:
        table: int64 `[R, W]`, a row for each request (of each group of layers).
        used: bool `[R, W]`, the entries that are read.
        places: int64 `[N]`, the entry of the flat table that the position of each stored token falls on.
        slots: int64 `[N]`, where the tokens are stored.
        contexts: int64 `[R]`, tokens of each row before the step; -1: other ranks hold some of them.
        name: returns what errors call a row.
        groups: int64 `[R]`, the group of each row; default: one for all.
    """
    rows, width = table.shape
    stride, blocks, of = width + 1, slots // block_size, places // width
    # One more column, for blocks that a request stores to without having them in its table.
    table, used = pad(table, (0, 1), value=-1), pad(used, (0, 1))
    places = places + of
    moved = (table.view(-1)[places] != blocks).nonzero().squeeze(1)
    own = (table[of[moved]] == blocks[moved].unsqueeze(1)) & used[of[moved]]
    places[moved] = of[moved] * stride + torch.where(own.any(1), own.int().argmax(1), width)
    ids, at = torch.cat((table.view(-1), blocks)).unique(return_inverse=True)
    entry, token = at[: table.numel()].view(table.shape), at[table.numel() :]
    owner = torch.full_like(ids, -1).scatter_reduce_(0, token, places, "amax")
    row, column, writer = (
        torch.arange(rows, device="cpu").unsqueeze(1),
        torch.arange(stride, device="cpu"),
        owner[entry],
    )
    others = used & (writer >= 0) & (writer != row * stride + column)
    ended = torch.zeros_like(ids, dtype=torch.bool).index_fill_(0, token[slots % block_size == block_size - 1], True)
    whole = torch.bincount(token, minlength=ids.shape[0]) == block_size
    begins = contexts.unsqueeze(1)
    filled = whole[entry] | (ended[entry] & (begins % block_size == 0) & (begins >= (column + 1) * block_size))
    prefix = filled & (writer // stride != row) & (writer % stride == column)
    prefix.view(-1)[places] = False
    if groups is not None:
        prefix &= groups.unsqueeze(1) == groups[writer // stride]
    # Both tables have to be equal up to the last block that they share.
    shared = others.view(-1).nonzero().squeeze(1)
    pairs, pair = (shared // stride * rows + writer.view(-1)[shared] // stride).unique(return_inverse=True)
    last = torch.zeros_like(pairs).scatter_reduce_(0, pair, shared, "amax")
    reader, before = pairs // rows, column < (last % stride).unsqueeze(1)
    apart = ((table[reader] != table[pairs % rows]) & used[reader] & before).any(1)
    foreign = (owner[token] != places) & (owner[token] % stride < width)
    for wrong in ((others & ~prefix).view(-1).nonzero().squeeze(1), last[apart], places[foreign]):
        for place in wrong[:1].tolist():
            block = int(table.view(-1)[place]) if place % stride < width else int(blocks[foreign][0])
            raise _conflict(block, int(owner[torch.searchsorted(ids, block)]), place, stride, name)


def _conflict(block: int, writer: int, other: int, stride: int, name: Callable[[int], str]) -> MetadataError:
    """Return the error of a block that is stored through one place and used, or stored, through another."""
    first, second = (
        f"{name(place // stride)} "
        + ("(by slot_mapping)" if place % stride == stride - 1 else f"(entry {place % stride} of its block table)")
        for place in (writer, other)
    )
    return MetadataError(
        f"block {block} is written by {first} and used by {second}",
        "requests may share blocks that they only read, or a prefix that one of them stores",
        "copy a shared block before writing to it (BlockTable.append), and put 0 for blocks that a window has left",
    )
