"""Steps of prompts over a sharded cache: how the keys of all ranks are gathered for the step's requests.

Keys of a prompt are few compared with the products that they are in. So ranks gather them for prompts, latents or the
keys and values of their own heads, and each one attends its own heads only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from vattn.config.dcp import DCPShard
from vattn.metadata.step import Step, most_held

if TYPE_CHECKING:
    from vattn.metadata.attention_metadata import AttentionMetadata

KEYS_PER_ROW = 64
"""Keys are gathered for up to so many per row of the step. So many latents have about as many bytes as the queries and
outputs of 128 heads."""


class WholeKeys(NamedTuple):
    """Indices of a gather; the names are those of `AttentionMetadata`, which has them on the device."""

    whole_blocks: Tensor
    whole_rows: Tensor
    whole_table: Tensor


def whole_keys_of(metadata: AttentionMetadata) -> WholeKeys | None:
    """Return the indices that a step has; `None` for none."""
    blocks, rows, table = metadata.whole_blocks, metadata.whole_rows, metadata.whole_table
    return None if blocks is None or rows is None or table is None else WholeKeys(blocks, rows, table)


def gathers_keys(step: Step) -> bool:
    """Return whether ranks gather the keys of a step; equal on all of them."""
    return step.max_query_len > 1 and int(step.seq_lens.sum()) <= KEYS_PER_ROW * step.num_tokens


def find_whole_keys(step: Step, shard: DCPShard, block_size: int, num_reqs: int, device: torch.device) -> WholeKeys:
    """Return which blocks each rank sends, the rows of those of all ranks in the order of tokens, and their table.

    Args:
        num_reqs: padded.
    """
    lengths = step.seq_lens
    # The first rank holds the most; blocks have the same ids on all.
    sent = (torch.as_tensor(most_held(shard, lengths)) + block_size - 1) // block_size
    made = (lengths + block_size - 1) // block_size
    columns = torch.arange(step.table.shape[1], device="cpu")
    blocks = step.table[columns < sent[:, None]]
    request = torch.repeat_interleave(torch.arange(lengths.shape[0], device="cpu"), made * block_size)
    first_made, first_sent = ((count.cumsum(0) - count) * block_size for count in (made, sent))
    token = torch.arange(request.shape[0], device="cpu") - first_made[request]
    local = token // shard.period * shard.interleave + token % shard.interleave
    rank = token // shard.interleave % shard.world_size
    rows = rank * (blocks.shape[0] * block_size) + first_sent[request] + local
    # Rows behind the last token are not read; any row will do.
    rows = torch.where(token < lengths[request], rows, 0)
    # Two columns at least: one would compile a graph of its own.
    width = max(2, int(made.max()))
    table = torch.zeros(num_reqs, width, dtype=torch.int32, device="cpu")
    wide = torch.arange(width, device="cpu")
    ids = (first_made // block_size)[:, None] + wide
    table[: lengths.shape[0]] = torch.where(wide < made[:, None], ids, 0).int()
    return WholeKeys(*(_to(each, device) for each in (blocks, rows, table)))


def _to(host: Tensor, device: torch.device) -> Tensor:
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
