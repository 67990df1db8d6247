"""Advances a batch by one token after a decode step with tokens that were sampled on the device.

Tokens, positions, lengths, offsets and slots move in place, so that several steps fit into one CUDA graph with nothing
read by the host between them.
"""

from __future__ import annotations

import torch

from vattn.config.device import has_triton
from vattn.ops.arguments import AdvanceArgs


def advance(args: AdvanceArgs) -> None:
    """Move a batch one token on: one kernel on a GPU, without a sync."""
    if args.seq_lens.is_cuda and has_triton():
        from vattn.kernels.triton.attention.advance_step import advance as launch

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
