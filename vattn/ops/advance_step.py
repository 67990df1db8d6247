"""One token on: what follows a decode step whose tokens were sampled on the device.

Tokens, positions, lengths, offsets and slots move in place, so that several steps fit into one CUDA graph with nothing
read by the host between them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vattn.ops.installed import has_triton


class AdvanceArgs(NamedTuple):
    """The tensors of a batch of decodes, one row a request; all but two are mutated.

    R requests, padding included; a request of length 0 is padding and stays as it is. The tensors of the tokens and
    `slot_mapping` may have fewer rows, at least `num_queries`.
    """

    input_tokens: Tensor
    """int32 or int64 `[R]`; becomes `sampled`."""
    input_positions: Tensor
    """int32 or int64 `[R]`; becomes the length before."""
    positions: Tensor
    """int64 `[R]`: the same for the metadata; may be the same memory."""
    sampled: Tensor
    """int32 or int64, at least `num_queries`; read."""
    seq_lens: Tensor
    """int32 `[R]`; one more."""
    context_lens: Tensor
    """int32 `[R]`; the length before."""
    query_start_loc: Tensor
    """int32 `[R + 1]`; changes with `from_prefills` alone, to one row a request."""
    seq_start_loc: Tensor
    """int32 `[R + 1]`; grows by one for every request in front."""
    slot_mapping: Tensor
    """int64 `[R]`; where the new token goes: -1 where the table has no block for it."""
    block_table: Tensor
    """int32 `[R, W]`; read. A negative entry is no block."""
    block_size: int
    num_queries: int
    """Requests that may move; later ones are padding."""
    from_prefills: bool = False
    """The step before had prefills: rows and offsets were theirs."""


def advance(args: AdvanceArgs) -> None:
    """Move a batch one token on: one kernel on a GPU, without a sync."""
    if args.seq_lens.is_cuda and has_triton():
        from vattn.ops.triton.advance_step import advance as launch

        launch(args)
    else:
        advance_on_host(args)


def advance_on_host(args: AdvanceArgs) -> None:
    """Do in torch operators what the kernel does; no sync on a GPU either."""
    num_reqs, width = args.block_table.shape
    request = torch.arange(num_reqs + 1, dtype=torch.int32, device=args.seq_lens.device)
    length = args.seq_lens.clone()
    moves = (request[:-1] < args.num_queries) & (length > 0)
    column = (length // args.block_size).long()
    block = args.block_table.gather(1, column.clamp(max=width - 1).unsqueeze(1)).squeeze(1).long()
    slot = torch.where((block < 0) | (column >= width), -1, block * args.block_size + length % args.block_size)
    sampled = args.sampled[: args.num_queries]
    changes = (
        (args.input_tokens, torch.nn.functional.pad(sampled, (0, num_reqs - sampled.shape[0]))),
        (args.input_positions, length),
        (args.positions, length),
        (args.slot_mapping, slot),
        (args.context_lens, length),
        (args.seq_lens, length + 1),
    )
    for target, value in changes:
        rows = target.shape[0]
        target.copy_(torch.where(moves[:rows], value[:rows].to(target.dtype), target))
    if args.from_prefills:
        args.query_start_loc.copy_(request.clamp(max=args.num_queries))
    args.seq_start_loc.add_(args.query_start_loc)
