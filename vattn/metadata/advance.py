"""Advance a step of decodes: each of the same requests gets one token more, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vattn.errors import MetadataError
from vattn.metadata.attention_metadata import AttentionMetadata, BuiltStep
from vattn.metadata.block_conflicts import BlockConflicts, used_entries
from vattn.metadata.checks import most_blocks
from vattn.metadata.inputs import over_capacity, read_integers
from vattn.metadata.staging import StepBuffers
from vattn.metadata.step import Limits, Step


class DecodeRun:
    """Consecutive decode steps over the same requests, from a step that was built.

    Which requests begin a block is known for all steps ahead, so that none passes over all lengths on the host.

    Args:
        limits: of the builder.
        first: the step that was built; what its caller passed is not read any more.
        table: int32 `[B, W]` on the host, the block table of that step; nothing else writes to it.
        conflicts: knows what the layers read.

    Raises:
        MetadataError: requests without exactly one new token, or anything besides lengths and block tables.
    """

    def __init__(self, limits: Limits, first: Step, table: Tensor, conflicts: BlockConflicts) -> None:
        _check_decodes(first)
        self._limits, size = limits, limits.block_size
        self._table, self._reaches, table_width = table, conflicts.reaches, table.shape[1]
        self._in_use: set[int] | None = None
        self._ids: list[int] = []
        self._begun: list[Tensor] = []
        self._lengths, self._slots = first.seq_lens, first.slots
        self._query_lens = first.query_lens
        self._longest, self._count = first.max_seq_len, 0
        filled = first.seq_lens % size
        entries = torch.arange(len(filled), device="cpu") * table_width + (first.seq_lens + (size - 1)) // size
        # By the tokens in their last block: the requests, and the table entries of their next blocks.
        order, counts = filled.argsort(stable=True), torch.bincount(filled, minlength=size).tolist()
        self._begin = list(zip(order.split(counts), entries[order].split(counts), strict=True))

    def next(self, new_blocks: Any) -> Step:
        """Return the next step; nothing has changed.

        Args:
            new_blocks: ids of the blocks that begin with its tokens, in the order of their requests.

        Returns:
            A step whose `table` is int64 `[2, K]`: flat places of the new entries in the block table, and their blocks.

        Raises:
            MetadataError: a request longer than the capacity, or other blocks than those that are needed.
        """
        size = self._limits.block_size
        if self._longest + 1 > self._limits.seq_len:
            raise over_capacity("positions in one request", self._longest + 1, self._limits.seq_len, "max_seq_len")
        rows, entries = self._begin[-self._count % size]
        self._ids = ids = _read_blocks(new_blocks, rows.shape[0], self._limits)
        slots = self._slots + 1
        if ids:
            self._refuse_used(ids)
            blocks = torch.tensor(ids, device="cpu")
            # The slots stay distinct: these are the first ones of new blocks, and the others go on in their blocks.
            slots.index_copy_(0, rows, blocks * size)
            entries = torch.stack((entries + self._count // size, blocks))
        else:
            entries = rows.new_empty(2, 0)
        lengths = self._lengths + 1
        return Step(self._query_lens, lengths, entries, slots, self._lengths, True, None, None, None)

    def commit(self, step: Step) -> None:
        """Make a step that `next` returned the last one."""
        self._lengths, self._slots = step.seq_lens, step.slots
        self._longest += 1
        self._count += 1
        if self._ids:
            assert self._in_use is not None
            self._in_use.update(self._ids)
            self._begun.append(step.table)

    def _refuse_used(self, ids: list[int]) -> None:
        """Refuse a new block that some request of the step reads already."""
        if self._in_use is None:
            # Unused entries are among these, so a block found here is looked up again below.
            columns = -(-self._longest // self._limits.block_size)
            self._in_use = set(self._table[:, :columns].reshape(-1).tolist())
        if self._in_use.isdisjoint(ids):
            return
        table, size = self._table.long(), self._limits.block_size
        for places, blocks in self._begun:
            table.view(-1).index_copy_(0, places, blocks)
        used = used_entries(self._reaches, table.shape[1], -(-self._lengths // size), self._lengths, size)
        self._in_use = set(table[used].tolist())
        for block in self._in_use.intersection(ids):
            row, column = ((table == block) & used).nonzero()[0].tolist()
            raise MetadataError(
                f"new block {block}, which is entry {column} of the block table of request {row}",
                "blocks that no request of the step has",
                "check the block allocator",
            )


def advanced(metadata: AttentionMetadata, built: BuiltStep) -> AttentionMetadata:
    """Return a step's metadata as that of its next step, `built`: the same tensors, other numbers."""
    after: AttentionMetadata = object.__new__(type(metadata))
    after.__dict__.update(metadata.__dict__)
    after._built = built
    after.max_seq_len += 1
    after.max_position = after.max_seq_len - 1
    # Every request now has one new token after cached ones.
    after.num_prefills = after.num_prefill_tokens = 0
    after.num_decodes = after.num_decode_tokens = after.num_reqs
    return after


def write_advance(step: Step, staging: StepBuffers, to: StepBuffers) -> None:
    """Write what a step adds into a staging set, and enqueue its copies where that is not the buffers themselves.

    Nothing waits for the device. Padding, and what requests keep, is not touched.
    """
    count, new = step.seq_lens.shape[0], step.table.numel()
    pieces = [
        (staging.seq_lens[:count], to.seq_lens[:count], step.seq_lens),
        (staging.slot_mapping[:count], to.slot_mapping[:count], step.slots),
        (staging.positions[:count], to.positions[:count], step.positions),
    ]
    if new:
        pieces += [(staging.entries[:new], to.entries[:new], step.table.view(-1))]
    for staged, target, values in pieces:
        staged.copy_(values)
        if staging is not to:
            target.copy_(staged, non_blocking=True)
    if new:
        places, blocks = to.entries[:new].view(2, -1)
        to.block_table.view(-1).index_copy_(0, places, blocks.int())


def _check_decodes(step: Step) -> None:
    extras = {
        "no cache": step.packed,
        "causal=": step.causal is not True,
        "tree_bias=": step.tree_bias is not None,
        "mm_ranges=": step.mm_ranges is not None,
        "new_encoder=": step.cross is not None and step.cross.num_rows > 0,
        "num_logits=": step.num_logits is not None,
        "shared_prefix_len=": step.shared_prefix_len is not None,
        "context_parallel=": step.held is not None,
        "positions= or slot_mapping=": step.given_places,
    }
    found = [name for name, has in extras.items() if has]
    if found or not step.query_lens.numel() or bool((step.query_lens != 1).any()):
        what = found[0] if found else f"query_lens {step.query_lens.tolist()!r:.40}"
        raise MetadataError(
            f"advance() after a step with {what}",
            "steps of one new token for each request, given by lengths and block tables only, and encoder states of "
            "earlier steps",
            "call build() for this step",
        )


def _read_blocks(blocks: Any, count: int, limits: Limits) -> list[int]:
    """Return the ids of new blocks, or refuse what the cache does not have."""
    if isinstance(blocks, Tensor) or hasattr(blocks, "__array__"):
        blocks = read_integers("new_blocks", blocks).tolist()
    if isinstance(blocks, (str, bytes)) or not isinstance(blocks, Sequence):
        raise MetadataError(
            f"new_blocks={blocks!r:.60}", "a list of block ids, or 1-D host integers", "pass [] where no block begins"
        )
    if len(blocks) != count:
        raise MetadataError(
            f"{len(blocks)} new blocks, and {count} requests with a new token that begins a block",
            "one block for each of them, in the order of the requests",
            "take a block where a request's length is a multiple of the block size",
        )
    if not count:
        return []
    ids = list(blocks)
    if set(map(type, ids)) != {int}:
        ids = read_integers("new_blocks", ids).tolist()
    end = most_blocks(limits.num_blocks)
    if min(ids) < 0 or max(ids) >= end:
        raise MetadataError(f"new blocks {blocks!r:.80}", f"block ids from 0 to {end - 1}", "check the block allocator")
    if limits.reserved_blocks and any(1 <= block <= limits.reserved_blocks for block in ids):
        raise MetadataError(
            f"new blocks {blocks!r:.80}, of which one holds sinks",
            f"blocks from {limits.reserved_blocks + 1} on",
            f"make the pool with BlockPool(num_blocks, reserved={limits.reserved_blocks + 1})",
        )
    if len(set(ids)) != len(ids):
        raise MetadataError(
            f"new blocks {blocks!r:.80}, of which one is given twice", "blocks that differ", "check the block allocator"
        )
    return ids
