"""Requests of uneven numbers of rows as more requests of a few rows each, which see what their rows saw before.

Row i of a request sits at `seq_len - query_len + i`, so that the rows of a part are a request whose length ends with
them. Parts of one program's rows each leave no request to a program that attends all of its rows one after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.mla_config import MLAConfig
from vattn.ops.mla_arguments import MLAAttentionArgs
from vattn.ops.triton.mla_kernels import find_request

_COLUMNS = 1024


@triton.jit(
    do_not_specialize=["num_parts", "num_reqs", "width", "stride_table"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table"],
)
def mla_cut_kernel(
    query_start_loc, seq_lens, block_table, starts_out, lengths_out, table_out, num_parts, num_reqs, width,
    stride_table, MOST: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the first row of one part, its keys and the used part of its table. Grid: parts.

    A request has room for one part more than it may fill; parts without rows have no keys either.
    """
    part = tl.program_id(0)
    request = find_request(query_start_loc, num_reqs, part, 1, MOST)
    is_real = request < num_reqs
    start = tl.load(query_start_loc + request)
    end = tl.load(query_start_loc + request + 1, mask=is_real, other=0)
    end = tl.where(is_real, end, start)
    first = tl.minimum(start + (part - start // MOST - request) * MOST, end)
    behind = tl.minimum(first + MOST, end)
    length = tl.load(seq_lens + request, mask=is_real, other=0) - (end - behind)
    length = tl.where(behind > first, tl.maximum(length, 0), 0)
    tl.store(starts_out + part, first)
    tl.store(lengths_out + part, length)
    if part == num_parts - 1:
        tl.store(starts_out + num_parts, tl.load(query_start_loc + num_reqs))
    used = tl.minimum((length + BLOCK_SIZE - 1) // BLOCK_SIZE, width)
    source = block_table + request.to(tl.int64) * stride_table
    target = table_out + part.to(tl.int64) * width
    for column in range(0, used, BLOCK):
        place = column + tl.arange(0, BLOCK)
        tl.store(target + place, tl.load(source + place, mask=place < used, other=0), mask=place < used)


def cut_requests(args: MLAAttentionArgs, config: MLAConfig, most: int) -> MLAAttentionArgs:
    """Return a step whose requests have at most `most` rows each, over the same rows and the same cache."""
    tokens, reqs, width = args.query.shape[0], args.seq_lens.shape[0], args.block_table.shape[1]
    parts = tokens // most + reqs
    starts, lengths = (args.seq_lens.new_empty(size) for size in (parts + 1, parts))
    table = args.block_table.new_empty((parts, width))
    block = min(_COLUMNS, triton.next_power_of_2(width))
    mla_cut_kernel[(parts,)](
        args.query_start_loc, args.seq_lens, args.block_table, starts, lengths, table, parts, reqs, width,
        args.block_table.stride(0), MOST=most, BLOCK_SIZE=config.block_size, BLOCK=block,
        num_warps=1 if block <= 256 else 4, enable_fp_fusion=True,
    )  # fmt: skip
    return args._replace(query_start_loc=starts, seq_lens=lengths, block_table=table, plan=[])
