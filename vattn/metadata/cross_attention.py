"""The encoder's side of a step: read what the host knows, and lay out slots on the device.

A request's encoder runs once. Its states are the keys and values of cross attention: written in that step, read by
every later one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.errors import MetadataError
from vattn.metadata.checks import check_ids
from vattn.metadata.inputs import Lengths, Tables, check_count, over_capacity, read_flags, read_integers, read_table
from vattn.metadata.step import CrossStep, Limits


def read_cross_step(
    limits: Limits,
    num_reqs: int,
    encoder_lens: Lengths | None,
    new_encoder: Lengths | None,
    cross_block_tables: Tables | None,
) -> CrossStep:
    """Check the encoder's side of a step of `num_reqs` requests.

    Raises:
        MetadataError: values that contradict each other, the decoder's side, the capacity or the cache.
    """
    if encoder_lens is None or cross_block_tables is None:
        given = {"encoder_lens": encoder_lens, "cross_block_tables": cross_block_tables, "new_encoder": new_encoder}
        raise MetadataError(
            f"{', '.join(name for name, value in given.items() if value is not None)} alone",
            "encoder_lens and cross_block_tables together, new_encoder with them or not at all",
            "pass both in every step of a model with cross attention",
        )
    if not limits.encoder_len:
        raise MetadataError(
            "encoder_lens for a builder with max_encoder_len=0",
            "a builder made for encoder states",
            "make the builder with max_encoder_len=",
        )
    lengths = read_integers("encoder_lens", encoder_lens)
    check_count("encoder_lens", lengths.shape[0], num_reqs)
    if bool((lengths < 0).any()):
        row = int((lengths < 0).nonzero()[0])
        raise MetadataError(f"encoder_lens[{row}]={int(lengths[row])}", "lengths >= 0", "pass 0 for no encoder input")
    longest = max(lengths.tolist(), default=0)
    if longest > limits.encoder_len:
        raise over_capacity("encoder states in one request", longest, limits.encoder_len, "max_encoder_len")
    needed = (lengths + (limits.block_size - 1)) // limits.block_size
    table = read_table("cross_block_tables", cross_block_tables, lengths, needed, limits.block_size)
    check_ids(table, needed, limits.num_blocks)
    new = torch.zeros(num_reqs, dtype=torch.bool, device="cpu")
    if new_encoder is not None:
        new = read_flags("new_encoder", new_encoder, num_reqs)
    num_rows = int(lengths[new].sum())
    if num_rows > limits.encoder_tokens:
        raise over_capacity("new encoder states", num_rows, limits.encoder_tokens, "max_encoder_tokens")
    if num_rows:
        _check_written_once(table[new], needed[new])
        _check_readers(table, lengths, needed, new)
    return CrossStep(lengths, new, table, num_rows)


def _check_written_once(table: Tensor, needed: Tensor) -> None:
    used = torch.arange(table.shape[1], device="cpu") < needed.unsqueeze(1)
    blocks = table[used].sort().values
    twice = blocks[1:][blocks[1:] == blocks[:-1]]
    if twice.numel():
        raise MetadataError(
            f"block {int(twice[0])} is given twice to encoder states that this step writes",
            "blocks of their own",
            "mark a request that reads another one's states as not new",
        )


def _check_readers(table: Tensor, lengths: Tensor, needed: Tensor, new: Tensor) -> None:
    """Refuse states that this step writes where another request has states of its own.

    A request that is not new may read a new one's states from their beginning on: layers store before they read.
    """
    used = torch.arange(table.shape[1], device="cpu") < needed.unsqueeze(1)
    written = table[used & new.unsqueeze(1)]
    shared = torch.isin(table, written) & used & ~new.unsqueeze(1)
    for row in shared.any(1).nonzero().squeeze(1).tolist():
        count, block = int(needed[row]), int(table[row][shared[row]][0])
        same = (table[:, :count] == table[row, :count]).all(1) & new & (lengths >= lengths[row])
        if not bool(same.any()):
            writer = int(((table == block) & used & new.unsqueeze(1)).any(1).nonzero()[0])
            raise MetadataError(
                f"request {writer} writes encoder states in this step into block {block}, which holds those of request "
                f"{row}",
                "blocks of their own, or all states of one request read by another from the first on",
                "check the block allocator, or pass both requests the same cross_block_tables and encoder_lens",
            )


def write_cross_slots(encoder_start_loc: Tensor, table: Tensor, block_size: int, slots: Tensor) -> None:
    """Fill the slots of the encoder states that a step writes, on the device and without a sync.

    The rows are the states of the requests that ran their encoder, one request after the other.

    Args:
        encoder_start_loc: int32 `[B + 1]`, where each request's states start among those rows.
        table: int32 `[B, W]`, block ids of each request's states; entries past the last may hold garbage.
        block_size: tokens per block.
        slots: int64 `[E]`, written: `block * block_size + offset`, -1 for rows after the last state.

    Example:
        >>> import torch
        >>> slots = torch.empty(5, dtype=torch.int64)
        >>> table = torch.tensor([[3, 5], [7, 0], [1, 9]], dtype=torch.int32)
        >>> write_cross_slots(torch.tensor([0, 1, 1, 4]).int(), table, 8, slots)
        >>> slots.tolist()
        [24, 8, 9, 10, -1]
    """
    request, offset, real = packed_rows(encoder_start_loc.diff(), slots.shape[0])
    column = (offset // block_size).clamp(0, max(0, table.shape[1] - 1))
    places = table[request, column].long() * block_size + offset % block_size
    slots.copy_(torch.where(real, places, -1))


def packed_rows(lengths: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the request of every row of packed requests, on the device and without a sync.

    Args:
        lengths: integers `[B]`, rows of each request.

    Returns:
        int64 `[num_rows]` request and offset in it, and bool `[num_rows]`: false for rows after the last request,
        where request and offset are valid indices without meaning.
    """
    ends = lengths.long().cumsum(0)
    row = torch.arange(num_rows, device=lengths.device)
    request = torch.searchsorted(ends, row, right=True).clamp(max=lengths.shape[0] - 1)
    offset = row - ends[request] + lengths[request]
    return request, offset, row < ends[-1]
