"""Advance a batch of decodes by one token, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.ops.arguments import AdvanceArgs

_BLOCK = 128


@triton.jit(do_not_specialize=["num_reqs", "num_queries", "width", "stride_table"])
def advance_step_kernel(
    input_tokens, input_positions, positions, sampled, seq_lens, context_lens, query_start_loc, seq_start_loc,
    slot_mapping, block_table, num_reqs, num_queries, width, stride_table, block_size,
    FROM_PREFILLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `vattn.backends.advance_step.advance_on_host`. Grid: blocks of requests and the offset after the
    last."""
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = request < num_reqs
    length = tl.load(seq_lens + request, mask=inside, other=0)
    moves = inside & (request < num_queries) & (length > 0)
    column = length // block_size
    block = tl.load(
        block_table + request.to(tl.int64) * stride_table + column, mask=moves & (column < width), other=-1
    ).to(tl.int64)
    slot = tl.where(block < 0, -1, block * block_size + length % block_size)
    token = tl.load(sampled + request, mask=moves, other=0)
    tl.store(input_tokens + request, token.to(input_tokens.dtype.element_ty), mask=moves)
    tl.store(input_positions + request, length.to(input_positions.dtype.element_ty), mask=moves)
    tl.store(positions + request, length.to(positions.dtype.element_ty), mask=moves)
    tl.store(slot_mapping + request, slot, mask=moves)
    tl.store(context_lens + request, length, mask=moves)
    tl.store(seq_lens + request, length + 1, mask=moves)
    offset = request <= num_reqs
    start = tl.load(seq_start_loc + request, mask=offset, other=0)
    if FROM_PREFILLS:
        rows = tl.minimum(request, num_queries)
        tl.store(query_start_loc + request, rows, mask=offset)
    else:
        rows = tl.load(query_start_loc + request, mask=offset, other=0)
    tl.store(seq_start_loc + request, start + rows, mask=offset)


def advance(args: AdvanceArgs) -> None:
    """Launch the kernel on the device of the tensors."""
    num_reqs = args.seq_lens.shape[0]
    advance_step_kernel[(-(-(num_reqs + 1) // _BLOCK),)](
        args.input_tokens, args.input_positions, args.positions, args.sampled, args.seq_lens, args.context_lens,
        args.query_start_loc, args.seq_start_loc, args.slot_mapping, args.block_table, num_reqs, args.num_queries,
        args.block_table.shape[1], args.block_table.stride(0), args.block_size,
        FROM_PREFILLS=args.from_prefills, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
