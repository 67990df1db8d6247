"""Launch the lightning indexer's kernels: scores of a bounded number of tokens at a time, then their choice."""

from __future__ import annotations

import torch

from vattn.kernels.triton.common.tiles import Limits, next_power_of_two
from vattn.kernels.triton.mla.indexer_kernels import (
    mla_indexer_choose_kernel,
    mla_indexer_score_kernel,
    mla_indexer_update_kernel,
)
from vattn.ops.reference.mla_indexer import SCALE_BYTES, IndexerSelectArgs, IndexerUpdateArgs

SCORE_BYTES = 256 << 20
"""Scores that are held at a time."""

_STRETCH = 1024


def mla_indexer_update(args: IndexerUpdateArgs, limits: Limits | None = None) -> None:
    """Run `vattn::mla_indexer_update`."""
    if not args.slot_mapping.numel():
        return
    limits = limits or Limits.of(args.key.device)
    columns, size = args.key.shape[1], args.index_cache.shape[1]
    mla_indexer_update_kernel[(args.key.shape[0],)](
        args.key, args.index_cache, args.slot_mapping, args.index_cache.shape[0] * size, args.key.stride(0), D=columns,
        D_TILE=next_power_of_two(columns), BLOCK_SIZE=size, NATIVE_FP8=limits.native_fp8, num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip


def mla_indexer_select(args: IndexerSelectArgs, limits: Limits | None = None) -> None:
    """Run `vattn::mla_indexer_select`. Nothing is read on the host."""
    tokens, heads, columns = args.query.shape
    if not tokens:
        return
    limits = limits or Limits.of(args.query.device)
    size, listed = args.index_cache.shape[1], args.topk_indices.shape[1]
    assert args.index_cache.shape[2] == columns + SCALE_BYTES
    most_keys, reqs = args.block_table.shape[1] * size, args.seq_lens.shape[0]
    # Where no row can see more than is listed, there is nothing to score.
    scored = most_keys > listed
    rows = max(1, min(tokens, SCORE_BYTES // (4 * most_keys))) if scored else tokens
    scores = torch.empty((rows, most_keys) if scored else (1, 1), dtype=torch.float32, device=args.query.device)
    for first in range(0, tokens, rows):
        count = min(rows, tokens - first)
        if scored:
            mla_indexer_score_kernel[(-(-most_keys // _STRETCH), count)](
                args.query.view(torch.uint8), args.weights, args.index_cache, args.query_start_loc, args.seq_lens,
                args.block_table, scores, first, reqs, args.index_cache.shape[0], args.block_table.stride(0),
                most_keys, listed, scores.stride(0), H=heads, D=columns, H_TILE=max(16, next_power_of_two(heads)),
                D_TILE=max(32, next_power_of_two(columns)), BLOCK_SIZE=size, STRETCH=_STRETCH,
                BLOCK_N=16 if limits.interpreted else 128, NATIVE_FP8=limits.native_fp8, num_warps=4, num_stages=3,
                enable_fp_fusion=True,
            )  # fmt: skip
        mla_indexer_choose_kernel[(count,)](
            scores, args.query_start_loc, args.seq_lens, args.topk_indices, first, reqs, most_keys, listed,
            scores.stride(0), args.topk_indices.stride(0), BLOCK=64 if limits.interpreted else 2048, num_warps=8,
            enable_fp_fusion=True,
        )  # fmt: skip
