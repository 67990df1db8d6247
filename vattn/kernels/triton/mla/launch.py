"""Latent attention in Triton: cache updates, queries as codes, and attention of absorbed queries over cached rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vattn.config.mla import MLAConfig
from vattn.kernels.triton.attention.launch import TRITON_DTYPES
from vattn.kernels.triton.common.mask import LOG2E
from vattn.kernels.triton.common.tiles import Limits, next_power_of_two
from vattn.kernels.triton.mla.kernels import mla_attention_kernel, mla_merge_kernel, mla_query_kernel, mla_update_kernel
from vattn.kernels.triton.mla.rows import row_strides
from vattn.ops.arguments_mla import MLAAttentionArgs, MLACacheUpdateArgs
from vattn.quantization.formats import MODEL_DTYPES


def update_cache(args: MLACacheUpdateArgs, config: MLAConfig, limits: Limits | None = None) -> None:
    """Run `vattn::mla_kv_cache_update`."""
    if not args.slot_mapping.numel():
        return
    limits = limits or Limits.of(args.kv_c.device)
    latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
    block_stride, row_stride = row_strides(config, args.kv_cache.stride(0))
    mla_update_kernel[(args.slot_mapping.shape[0],)](
        args.kv_c, args.k_pe, args.kv_cache, args.slot_mapping, args.k_scale,
        args.kv_cache.shape[0] * config.block_size, args.kv_c.stride(0), args.k_pe.stride(0),
        L=latent, R=rope, L_TILE=next_power_of_two(latent), R_TILE=next_power_of_two(rope),
        BLOCK_SIZE=config.block_size, STRIDES=(block_stride, row_stride), FORMAT=config.kv_cache_dtype,
        NATIVE_FP8=limits.native_fp8, num_warps=1 if latent <= 512 else 4, enable_fp_fusion=False,
    )  # fmt: skip


@dataclass(frozen=True)
class MLATiles:
    """Tile config of one launch of the plain kernel: rows and keys of a tile, programs per request, launch options."""

    block_m: int
    block_n: int
    num_splits: int
    num_warps: int
    num_stages: int


def choose_tiles(config: MLAConfig, num_tokens: int, num_reqs: int, most_keys: int, limits: Limits) -> MLATiles:
    """Return tiles from shapes alone. `most_keys`: what a row of the block table holds, or the top-k width."""
    rows = config.num_heads if config.sparse else config.num_heads * -(-num_tokens // num_reqs)
    block_m = min(max(16, next_power_of_two(rows)), 32)
    if config.dtype == "float32":
        block_m = 16
    bytes_per_key = max(2, MODEL_DTYPES[config.dtype].itemsize) * (
        next_power_of_two(config.kv_lora_rank) + max(16, next_power_of_two(config.qk_rope_head_dim))
    )
    # Groups that are decoded stay in registers beside the sums. Codes of half a byte need 32 keys: Triton gives a
    # thread eight keys of a product over them in a row, and with 16 it counts keys twice.
    grouped = config.kv_cache_dtype == "fp8_ds_mla" and block_m > 16
    # Exact products of converted rows spill with more keys.
    converted = config.dtype == "float32" and config.kv_cache_dtype == "fp8_e4m3"
    block_n = 16 if limits.interpreted or grouped or converted else 32
    while block_n > 16 and 2 * block_n * bytes_per_key > limits.shared_bytes // 2:
        block_n //= 2
    programs = _row_blocks(config, block_m, num_tokens, num_reqs)
    busy = max(1, min(programs, num_reqs * -(-rows // block_m)))
    tiles = max(1, -(-most_keys // block_n))
    splits = max(1, min(limits.processors // busy, tiles, 64))
    if limits.interpreted:
        splits = min(splits, 3)
    fits = 2 * block_n * bytes_per_key <= limits.shared_bytes // 2
    stages = 2 if fits and not config.packed and not converted else 1
    # Exact products and converted rows take more registers than four warps have.
    demanding = config.dtype == "float32" or config.kv_cache_dtype not in MODEL_DTYPES
    return MLATiles(block_m, block_n, splits, 8 if demanding or block_m > 16 else 4, stages)


def _row_blocks(config: MLAConfig, block_m: int, num_tokens: int, num_reqs: int) -> int:
    if config.sparse:
        return num_tokens * -(-config.num_heads // block_m)
    return num_tokens * config.num_heads // block_m + num_reqs + 2


def quantise_query(latent: Tensor, rope: Tensor, args: MLAAttentionArgs, config: MLAConfig, limits: Limits) -> Tensor:
    """Return absorbed queries `[T, N, L]` and `[T, N, R]` of the model dtype as e4m3 codes `[T, N, L + R]`."""
    columns, rotated = config.kv_lora_rank, config.qk_rope_head_dim
    output = torch.empty((*latent.shape[:2], columns + rotated), dtype=torch.float8_e4m3fn, device=latent.device)
    mla_query_kernel[(latent.shape[0] * config.num_heads,)](
        latent, rope, output.view(torch.uint8), args.q_scale, latent.stride(0), latent.stride(1), rope.stride(0),
        rope.stride(1), N=config.num_heads, L=columns, R=rotated, L_TILE=next_power_of_two(columns),
        R_TILE=next_power_of_two(rotated), NATIVE_FP8=limits.native_fp8, num_warps=1 if columns <= 512 else 4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return output


def attend_latents(
    absorbed: Tensor,
    args: MLAAttentionArgs,
    config: MLAConfig,
    limits: Limits | None = None,
    longest: int = 0,
    complete: Tensor | None = None,
    shortest: int = 0,
    output: Tensor | None = None,
) -> Tensor:
    """Attend absorbed queries to cached rows; return `[T, N, L]` in the model dtype and write the LSE.

    With `longest`, rows of longer requests and of padding are left out, in sparse layers those of `complete` ones:
    their results and LSE are not to be used. With `shortest`, rows of requests of at most as many rows, and of padding,
    stay in `output` as they are.
    """
    limits = limits or Limits.of(absorbed.device)
    tokens, reqs = absorbed.shape[0], args.seq_lens.shape[0]
    topk = 0 if args.topk_indices is None else args.topk_indices.shape[1]
    most_keys = topk or args.block_table.shape[1] * config.block_size
    by_request = longest if not config.sparse else 0
    attended = by_request * reqs if by_request else tokens
    tiles = choose_tiles(config, attended, reqs, most_keys, limits)
    if output is None:
        shape = (tokens, config.num_heads, config.kv_lora_rank)
        output = absorbed.new_empty(shape, dtype=MODEL_DTYPES[config.dtype])
    codes = absorbed.dtype == torch.float8_e4m3fn
    rows, splits = attended * config.num_heads, tiles.num_splits
    partial = partial_log = None
    if splits > 1:
        partial = absorbed.new_empty((rows, splits, config.kv_lora_rank), dtype=torch.float32)
        partial_log = absorbed.new_empty((rows, splits), dtype=torch.float32)
    sizes: dict[str, Any] = {
        "N": config.num_heads, "L": config.kv_lora_rank, "L_TILE": max(16, next_power_of_two(config.kv_lora_rank)),
    }  # fmt: skip
    model = TRITON_DTYPES[MODEL_DTYPES[config.dtype]]
    blocks = _row_blocks(config, tiles.block_m, tokens, reqs)
    if by_request:
        blocks = reqs * -(-longest * config.num_heads // tiles.block_m)
    mla_attention_kernel[(blocks, splits)](
        absorbed.view(torch.uint8) if codes else absorbed, args.kv_cache, args.query_start_loc, args.seq_lens,
        args.block_table, args.topk_indices, complete, args.q_scale if codes else None, args.k_scale, output, args.lse,
        partial, partial_log, tokens, reqs, args.kv_cache.shape[0], splits, args.block_table.stride(0),
        args.block_table.shape[1],
        0 if args.topk_indices is None else args.topk_indices.stride(0), topk, config.scale * LOG2E.value,
        R=config.qk_rope_head_dim, R_TILE=max(16, next_power_of_two(config.qk_rope_head_dim)),
        BLOCK_SIZE=config.block_size, STRIDES=row_strides(config, args.kv_cache.stride(0)),
        FORMAT=config.kv_cache_dtype, DTYPE=model, MODEL=model, SPARSE=config.sparse, SPLIT=splits > 1, LONGEST=longest,
        SHORTEST=shortest, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, NATIVE_FP8=limits.native_fp8, **sizes,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    if splits > 1:
        mla_merge_kernel[(rows,)](
            partial, partial_log, args.query_start_loc, output, args.lse, reqs, splits, MODEL=model, LONGEST=by_request,
            SHORTEST=shortest, **sizes, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return output
