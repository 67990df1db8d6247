"""Checks of a step's host tensors: lengths, block tables, slots, trees."""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.errors import MetadataError

_INT32_END = 1 << 31


def check_seq_lens(query_lens: Tensor, seq_lens: Tensor) -> None:
    """Raise MetadataError for a negative length or a sequence shorter than its query. Host int64 `[B]` each."""
    for name, lengths in (("query_lens", query_lens), ("seq_lens", seq_lens)):
        if bool((lengths < 0).any()):
            row = int((lengths < 0).nonzero()[0])
            raise MetadataError(f"{name}[{row}]={int(lengths[row])}", "lengths >= 0", "check the scheduler's counts")
    short = seq_lens < query_lens
    if bool(short.any()):
        row = int(short.nonzero()[0])
        raise MetadataError(
            f"request {row}: seq_len {int(seq_lens[row])} is shorter than its query_len {int(query_lens[row])}",
            "seq_len >= query_len, since it counts the new tokens too",
            "pass cached plus new tokens as seq_len",
        )


def most_blocks(num_blocks: int | None) -> int:
    """Return how many block ids there are: those of the cache, if its size is known, as far as int32 tables reach."""
    return _INT32_END if num_blocks is None else min(num_blocks, _INT32_END)


def check_block_table(table: Tensor, seq_lens: Tensor, block_size: int, num_blocks: int | None) -> None:
    """Raise MetadataError for a host table that is too narrow for a length or has a used entry out of range."""
    needed = (seq_lens + (block_size - 1)) // block_size
    if bool((needed > table.shape[1]).any()):
        row = int(needed.argmax())
        raise too_narrow(row, int(seq_lens[row]), int(needed[row]), block_size, table.shape[1])
    check_ids(table, needed, num_blocks)


def check_ids(table: Tensor, needed: Tensor, num_blocks: int | None) -> None:
    """Raise MetadataError for a block id out of range among the first `needed` (int64 `[B]`) ones of each request."""
    most = most_blocks(num_blocks)
    if table.numel():
        # Most tables are right everywhere, also past the last blocks, and one pass shows it.
        lowest, highest = table.aminmax()
        # As ints: compared with an int32 tensor, a bound beyond int32 wraps.
        if int(lowest) >= 0 and int(highest) < most:
            return
    used, table = torch.arange(table.shape[1], device="cpu") < needed.unsqueeze(1), table.long()
    wrong = used & ((table < 0) | (table >= most))
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise MetadataError(
            f"request {row}: entry {column} of the block table is block {int(table[row, column])}",
            f"block ids from 0 to {most - 1}",
            "check the block allocator, or pass the cache's real num_blocks",
        )


def too_narrow(row: int, seq_len: int, needed: int, block_size: int, width: int, ranks: int = 1) -> MetadataError:
    """Return the error of a request whose row of the block table, over so many ranks, has too few blocks."""
    length = f"{seq_len} over {ranks} ranks" if ranks > 1 else f"{seq_len}"
    return MetadataError(
        f"request {row}: seq_len {length} needs {needed} blocks of {block_size} tokens, its block table has {width}",
        f"at least {needed} blocks",
        "allocate the missing blocks before building the step",
    )


def check_slots(slots: Tensor, block_size: int, num_blocks: int | None, name: str = "slot_mapping") -> None:
    """Raise MetadataError for a host slot outside the cache (below -1, or past the end) or given twice."""
    if not slots.numel():
        return
    written = slots.sort().values
    lowest, end = int(written[0]), None if num_blocks is None else num_blocks * block_size
    if lowest < -1 or (end is not None and int(written[-1]) >= end):
        row = int(((slots < -1) if end is None else (slots < -1) | (slots >= end)).nonzero()[0])
        raise MetadataError(
            f"{name}[{row}]={int(slots[row])}",
            "-1 or a slot >= 0" if end is None else f"-1 to {end - 1}",
            "use block * block_size + offset, and -1 for tokens that are not stored",
        )
    twice = written[1:] == written[:-1]
    if lowest < 0:
        twice &= written[1:] >= 0
    if bool(twice.any()):
        raise MetadataError(
            f"slot {int(written[1:][twice][0])} is given to two tokens",
            "slots that differ",
            "copy a shared block before writing to it, and check the block tables for a block given twice",
        )


def check_tree_ids(tree_id: Tensor, trees: int) -> None:
    """Raise MetadataError for a host tree id that names no tree."""
    wrong = (tree_id < -1) | (tree_id >= trees)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise MetadataError(
            f"tree_id[{row}]={int(tree_id[row])} with {trees} trees",
            "-1 (none)" if trees == 0 else f"-1 (none) or 0 to {trees - 1}",
            "give tree_bias one matrix per tree",
        )
