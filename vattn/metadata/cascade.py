"""A prefix that every request of a step has in the same blocks: attended once for all rows instead of once a request.

Layers attend in two parts. All rows of the step see the prefix as if they were one request's, and each request's rows
see what follows it; `merge_attn_states` weighs the two results. The prefix is then read once a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.config.arguments import integer
from vattn.errors import MetadataError
from vattn.metadata.step import Step


def read_shared_prefix(step: Step, length: int, block_size: int) -> int:
    """Refuse a prefix that the requests of a step do not share, or that rows of the step would have to be masked in.

    Args:
        length: tokens of the prefix; 0: none, in a step that replays a graph which has one.

    Returns:
        The length as an int; 0 in a step of more tokens than the prefix has. Layers attend the prefix as one request
        with all rows of the step, and attention hides every key from rows before the first position of their request.

    Raises:
        MetadataError: such a prefix.
    """
    tokens = integer(length)
    if tokens is None or tokens < 0 or tokens % block_size:
        raise MetadataError(
            f"shared_prefix_len={length!r}",
            f"whole blocks of {block_size} tokens, or 0",
            "round it down to a multiple of the block size",
        )
    given = {"mm_ranges": step.mm_ranges, "num_logits": step.num_logits}
    for name, value in given.items():
        if value is not None:
            raise MetadataError(f"shared_prefix_len with {name}", "one of the two in a step", f"leave out {name}")
    if step.packed:
        raise MetadataError("shared_prefix_len without block tables", "a step of layers with a cache", "leave it out")
    cached = step.seq_lens - step.query_lens
    short = (cached < tokens) | (step.seq_lens == 0)
    if bool(short.any()):
        row = int(short.nonzero()[0])
        raise MetadataError(
            f"request {row}: {int(cached[row])} cached tokens in a step with shared_prefix_len={tokens}",
            "requests that have the whole prefix cached",
            "shorten the prefix, or build the request into another step",
        )
    blocks = step.table[:, : tokens // block_size]
    other = (blocks != blocks[:1]).any(1)
    if bool(other.any()):
        row = int(other.nonzero()[0])
        raise MetadataError(
            f"request {row}: its first {tokens // block_size} blocks differ from those of request 0",
            "the same blocks for the prefix in every request",
            "shorten the prefix to what all of them share",
        )
    return tokens if step.num_tokens <= tokens else 0


def write_shared_prefix(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    prefix_lens: Tensor,
    prefix_start_loc: Tensor,
    suffix_lens: Tensor,
    suffix_block_table: Tensor,
) -> None:
    """Fill what the two parts of a step read, on the device and without a sync.

    Args:
        query_start_loc, seq_lens, block_table: int32 `[B + 1]`, `[B]` and `[B, W]` of the step.
        prefix_lens: int32 `[2]`, the prefix's length and 0.
        prefix_start_loc: int32 `[3]`, written: all rows as one request's, and a request without rows.
        suffix_lens, suffix_block_table: int32 `[B]` and `[B, W]`, written: lengths and blocks after the prefix. The
            last column is repeated at the end, where no length reaches.

    Example:
        >>> import torch
        >>> rows, lens, start = torch.tensor([0, 1, 3]).int(), torch.tensor([6, 8]).int(), torch.zeros(3).int()
        >>> table, suffix, blocks = torch.tensor([[9, 5, 1], [9, 7, 2]]).int(), lens.clone(), torch.zeros(2, 3).int()
        >>> write_shared_prefix(rows, lens, table, 4, torch.tensor([4, 0]).int(), start, suffix, blocks)
        >>> start.tolist(), suffix.tolist(), blocks.tolist()
        ([0, 3, 3], [2, 4], [[5, 1, 1], [7, 2, 2]])
    """
    prefix_start_loc[:1].zero_()
    prefix_start_loc[1:].copy_(query_start_loc[-1:].expand(2))
    suffix_lens.copy_(torch.where(seq_lens > 0, seq_lens - prefix_lens[:1], 0))
    width = block_table.shape[1]
    columns = torch.arange(width, device=block_table.device) + prefix_lens[:1] // block_size
    suffix_block_table.copy_(block_table.index_select(1, columns.clamp(max=width - 1)))
