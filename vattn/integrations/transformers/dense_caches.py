"""Reads keys and values `[B, heads, L, D]`, as transformers' caches hold them, as a paged cache without a copy.

Blocks of the view begin at every token and overlap, so a request may begin at any token of its row. `pack_step` makes
the tensors of a step. They travel in one tensor, which takes the place of the attention mask: they are made once in a
forward and are an input of compiled code. Of a step of one query row over keys that are all written, `view_decode`
makes a view of each row's first key: its kernel needs no more.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK = 16
"""Tokens of a block, where it fits: what the fast kernels take."""

ALIGNED = 4
"""Numbers of the packed tensor that each part begins at a multiple of: 16 bytes, as kernels like them."""

LONG_QUERY = 64
"""Query rows of a request from which whole blocks save more time than a copy of the keys with room after them takes."""


class DenseStep(NamedTuple):
    """One step over dense keys.

    Attributes:
        query_start_loc: int32 `[B + 1]`.
        seq_lens: int32 `[B]`, keys from a request's first.
        block_table: int32 `[B, W]`, tokens of the row at which blocks begin.
        block_size: 1 or `BLOCK`.
        windowed: whether the step is of layers with a window.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    block_size: int
    windowed: bool


def pack_step(
    batch_size: int,
    query_len: int,
    num_keys: int,
    end: int | Tensor,
    start: Tensor | None,
    window: int | None,
    whole_blocks: bool,
    device: torch.device | str,
) -> Tensor:
    """Return the tensors of a step as one int32 tensor `[1, 1, 1 or 2, N]`: two rows of it for layers with a window.

    Args:
        num_keys: L of the keys.
        end: keys of a row that are written, those of the step included.
        start: int `[B, 1]`, the first key of each row that is no padding; `None`: 0 in every row.
        whole_blocks: for one query row a request, whether `BLOCK` keys follow the first visible one in each row.
    """
    first: int | Tensor = 0 if start is None else start
    decodes = query_len == 1
    if decodes and window is not None:
        oldest = end - window
        if isinstance(first, int) and isinstance(oldest, int):
            first = max(first, oldest)
        else:
            first = torch.clamp(torch.as_tensor(oldest, device=device), min=first)
    lengths = (end - first) + torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
    blocks_of_many = query_len >= LONG_QUERY or (decodes and whole_blocks)
    if blocks_of_many:
        column = torch.arange(-(-num_keys // BLOCK), device=device)
        tokens = column * BLOCK
        if decodes:
            # A single row sees its keys in any order: the last block, which may be partly filled, is read at the first
            # keys, where whole blocks follow, and the others end with the last key.
            last = (lengths - 1) // BLOCK
            tokens = torch.where(column == last, 0, tokens + (lengths - 1) % BLOCK + 1)
    else:
        tokens = torch.arange(num_keys, device=device)
    table = (tokens + first).expand(batch_size, -1)
    starts = torch.arange(0, (batch_size + 1) * query_len, query_len, device=device)
    parts = [part.reshape(-1).to(torch.int32) for part in (starts, lengths, table)]
    packed = torch.cat([torch.nn.functional.pad(part, (0, -part.shape[0] % ALIGNED)) for part in parts])
    return packed.view(1, 1, 1 if window is None else 2, -1)


def view_decode(
    batch_size: int, num_keys: int, start: Tensor | None, window: int | None, whole_blocks: bool, device: Any
) -> Tensor:
    """Return int32 `[B, 2 to 4, 1 or 2, L]` of each row's first visible key, a view of `[B]` or of one number.

    Its second size says whether rows have padding, and whether whole blocks follow it; its third one whether layers
    have a window. Takes the arguments of `pack_step`.
    """
    first = _zero(str(device)) if start is None else start.to(torch.int32)
    padding = 2 if start is None else 3 if whole_blocks else 4
    return first.view(-1, 1, 1, 1).expand(batch_size, padding, 1 if window is None else 2, num_keys)


def is_decode(mask: Tensor) -> bool:
    """Return whether `view_decode` made a tensor of four dimensions, rather than `pack_step`."""
    return mask.shape[1] > 1


def pack_decode(first: Tensor, window: int | None) -> Tensor:
    """Return what `pack_step` makes of a step that `view_decode` made."""
    batch_size, padding, _, num_keys = first.shape
    start = None if padding == 2 else first[:, 0, 0, :1].long()
    whole_blocks = padding < 4 and num_keys >= BLOCK and (window is None or window >= BLOCK)
    return pack_step(batch_size, 1, num_keys, num_keys, start, window, whole_blocks, first.device)


@lru_cache(maxsize=64)
def _zero(device: str) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=torch.int32, device=device)


def unpack_step(packed: Tensor, batch_size: int, num_keys: int) -> DenseStep | None:
    """Return the step that `pack_step` packed, `None` if it is of another number of requests or keys."""
    flat, lengths, rows = packed.view(-1), _aligned(batch_size + 1), packed.shape[2]
    begin = lengths + _aligned(batch_size)
    for width, block_size in ((-(-num_keys // BLOCK), BLOCK), (num_keys, 1)):
        end = begin + batch_size * width
        if num_keys >= block_size and begin + _aligned(end - begin) == rows * packed.shape[3]:
            table = flat[begin:end].view(batch_size, width)
            return DenseStep(flat[: batch_size + 1], flat[lengths : lengths + batch_size], table, block_size, rows == 2)
    return None


def _aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


def as_blocks(rows: Tensor, block_size: int) -> tuple[Tensor, int]:
    """Return keys or values as `[blocks, block_size, heads, D]` of blocks that begin at each token, and their pitch.

    The pitch is the number of blocks from a row of the batch to the next.
    """
    by_row, by_head, by_token, by_column = rows.stride()
    batch_size, heads, num_keys, width = rows.shape
    if by_column != 1 or by_token == 0 or (batch_size > 1 and by_row % by_token):
        rows = rows.contiguous()
        by_row, by_head, by_token, _ = rows.stride()
    pitch = by_row // by_token if batch_size > 1 else 0
    blocks = (batch_size - 1) * pitch + num_keys - block_size + 1
    return rows.as_strided((blocks, block_size, heads, width), (by_token, by_token, by_head, 1)), pitch


def with_room(rows: Tensor) -> Tensor:
    """Return a copy of keys or values with room, which holds anything, for one more block after each row's keys."""
    batch_size, heads, num_keys, width = rows.shape
    copied = rows.new_empty(batch_size, heads, num_keys + BLOCK, width)
    copied[:, :, :num_keys].copy_(rows)
    return copied
