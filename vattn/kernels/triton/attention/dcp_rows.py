"""Decode context parallelism: make the rows of a step requests over the keys that this rank holds, in one launch.

A causal row without a window sees the tokens of its request up to its own. A rank holds a prefix of its shard of them,
so the row is a decode of that many keys for any kernel.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from vattn.config.dcp import DCPShard, without_dcp
from vattn.config.mla import MLAConfig
from vattn.kernels.replay import unrecorded
from vattn.kernels.triton.common.mask import MAX_SEQ_LEN, clamp, count_held
from vattn.ops.arguments import AttentionArgs
from vattn.ops.arguments_mla import MLAAttentionArgs

Args = TypeVar("Args", AttentionArgs, MLAAttentionArgs)

_COLUMNS = 1024


@triton.jit(
    do_not_specialize=["num_rows", "num_reqs", "width", "stride_table"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "local_seq_lens", "block_table"],
)
def dcp_rows_kernel(
    query_start_loc, seq_lens, local_seq_lens, block_table, starts_out, lengths_out, table_out,
    num_rows, num_reqs, width, stride_table,
    RANK: tl.constexpr, WORLD: tl.constexpr, INTERLEAVE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the offset, the number of keys on this rank and the used part of the table of one row. Grid: rows."""
    row = tl.program_id(0)
    # Find the last request that starts at or before the row, if it has it. Metadata may hold any value.
    low = tl.zeros([], tl.int32)
    high = low + num_reqs
    while high - low > 1:
        middle = (low + high) // 2
        behind = tl.load(query_start_loc + middle) > row
        high = tl.where(behind, middle, high)
        low = tl.where(behind, low, middle)
    start = tl.load(query_start_loc + low)
    end = tl.minimum(tl.load(query_start_loc + low + 1), num_rows)
    seq_len = clamp(tl.load(seq_lens + low), MAX_SEQ_LEN)
    visible = tl.where((row >= start) & (row < end), seq_len - (end - 1 - row), 0)
    held = tl.minimum(count_held(visible, RANK, WORLD, INTERLEAVE), tl.load(local_seq_lens + low))
    held = tl.maximum(held, 0)
    tl.store(lengths_out + row, held)
    tl.store(starts_out + row, row)
    if row == num_rows - 1:
        tl.store(starts_out + num_rows, num_rows)
    used = tl.minimum((held + BLOCK_SIZE - 1) // BLOCK_SIZE, width)
    source = block_table + low.to(tl.int64) * stride_table
    target = table_out + row.to(tl.int64) * width
    for first in range(0, used, BLOCK):
        column = first + tl.arange(0, BLOCK)
        tl.store(target + column, tl.load(source + column, mask=column < used, other=0), mask=column < used)


def write_rows(
    rows: int,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    local_seq_lens: Tensor,
    block_table: Tensor,
    shard: DCPShard,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `query_start_loc` `[rows + 1]`, `seq_lens` `[rows]` and `block_table` of a step's rows as requests."""
    width = block_table.shape[1]
    starts, lengths = (seq_lens.new_empty(size) for size in (rows + 1, rows))
    table = torch.empty((rows, width), dtype=torch.int32, device=block_table.device)
    block = min(_COLUMNS, triton.next_power_of_2(width))
    unrecorded(dcp_rows_kernel)[(rows,)](
        query_start_loc, seq_lens, local_seq_lens, block_table, starts, lengths, table,
        rows, seq_lens.shape[0], width, block_table.stride(0),
        RANK=shard.rank, WORLD=shard.world_size, INTERLEAVE=shard.interleave, BLOCK_SIZE=block_size, BLOCK=block,
        num_warps=1 if block <= 256 else 4, enable_fp_fusion=True,
    )  # fmt: skip
    return starts, lengths, table


def attention_rows(args: Args, config: Any) -> Args:
    """Return arguments that attend a step's rows as decodes; no feature of the config may use positions."""
    assert args.local_seq_lens is not None
    starts, lengths, table = write_rows(
        args.query.shape[0],
        args.query_start_loc,
        args.seq_lens,
        args.local_seq_lens,
        args.block_table,
        config.dcp_shard,
        config.block_size,
    )
    return args._replace(
        query_start_loc=starts,
        seq_lens=lengths,
        block_table=table,
        local_seq_lens=None,
        plan=[],
        config=without_dcp(config).encode(),
    )


def latent_rows(args: MLAAttentionArgs, config: MLAConfig) -> tuple[MLAAttentionArgs, MLAConfig]:
    """Return arguments of `vattn::mla_attention` that attend a step's rows as decodes, and their config."""
    shard, whole = config.dcp_shard, without_dcp(config)
    if args.query.shape[0] == 0 or shard is None:
        return args._replace(local_seq_lens=None), whole
    if args.topk_indices is not None:
        args = args._replace(topk_indices=shard.local_indices(args.topk_indices))
    return attention_rows(args, config), whole
