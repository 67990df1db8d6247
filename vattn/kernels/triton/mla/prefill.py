"""Steps with prompts in Triton: long requests expanded chunk by chunk, short ones absorbed, side by side in one step.

A request is short if it has at most `longest_absorbed` tokens. That number comes from the layer alone: the rule holds
whatever else a step holds, and no length is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vattn.config.mla import MLAConfig
from vattn.kernels.triton.attention.launch import TRITON_DTYPES
from vattn.kernels.triton.common.mask import LOG2E
from vattn.kernels.triton.common.tiles import Limits, next_power_of_two
from vattn.kernels.triton.mla.absorb_rule import longest_absorbed, most_aligned
from vattn.kernels.triton.mla.epilogue import epilogue_arguments, epilogue_constants
from vattn.kernels.triton.mla.prefill_kernels import mla_complete_kernel, mla_expand_kernel, mla_prefill_kernel
from vattn.kernels.triton.mla.rows import row_strides
from vattn.ops.arguments_mla import MLAAttentionArgs
from vattn.ops.reference.mla_absorb import DEFAULT_WORKSPACE_BYTES, elements_per_token, workspace_tokens
from vattn.quantization.formats import MODEL_DTYPES


@dataclass(frozen=True)
class Chunks:
    """Chunks of the line of keys: places of a chunk, what requests are aligned to, number of chunks."""

    places: int
    align: int
    count: int


def cut_line(args: MLAAttentionArgs, config: MLAConfig) -> Chunks:
    """Return chunks that fit the workspace, as many as the longest line of these shapes needs.

    Raises:
        ShapeError: the workspace is too small for one block.
    """
    num_tokens, num_reqs = args.query.shape[0], args.seq_lens.shape[0]
    item = MODEL_DTYPES[config.dtype].itemsize
    default = DEFAULT_WORKSPACE_BYTES // (elements_per_token(config) * item)
    room = workspace_tokens(args.workspace, config, default)
    align = min(most_aligned(config), 1 << (room.bit_length() - 1))
    most_keys = -(-args.block_table.shape[1] * config.block_size // align) * align
    # Every long request has more rows than a short one may have.
    prompts = min(num_reqs, num_tokens // (longest_absorbed(config) + 1))
    places = room // align * align
    longest_line = max(1, prompts * most_keys)
    return Chunks(min(places, -(-longest_line // align) * align), align, -(-longest_line // places))


def complete_requests(args: MLAAttentionArgs, config: MLAConfig) -> Tensor | None:
    """Return int32 `[B]`: 0 for long requests of a sparse layer that do not list all they see; `None` elsewhere."""
    listed = args.topk_indices
    if listed is None:
        return None
    complete = torch.ones(args.seq_lens.shape[0], dtype=torch.int32, device=listed.device)
    mla_complete_kernel[(listed.shape[0],)](
        args.query_start_loc, args.seq_lens, listed, complete, args.seq_lens.shape[0],
        args.block_table.shape[1] * config.block_size, listed.stride(0), listed.shape[1],
        LONGEST=longest_absorbed(config), BLOCK=min(1024, next_power_of_two(listed.shape[1])), num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return complete


def attend_prompts(
    args: MLAAttentionArgs,
    weight: Tensor,
    rows: Tensor | None,
    complete: Tensor | None,
    chunks: Chunks,
    line: Tensor,
    config: MLAConfig,
    limits: Limits,
    attend_whole: Callable[[Tensor, Tensor], None] | None = None,
) -> None:
    """Attend long requests, and write rows of padding.

    Args:
        weight: `[N, P + V, L]`, contiguous, in the model dtype.
        rows: `[T, N, V]` in the model dtype that get the results instead of the output.
        complete: what `complete_requests` returned.
        chunks: what `cut_line` returned.
        line: int32 `[B + 1]`, where each request begins on the line of keys, and where the line ends.
        attend_whole: attends a line that is one chunk, given its flat expanded keys and values and its rotated keys,
            instead of the kernel here.
    """
    tokens, heads, values = args.query.shape[0], config.num_heads, config.v_head_dim
    width, rope = heads * (config.qk_nope_head_dim + values), config.qk_rope_head_dim
    elements = chunks.places * (width + rope)
    room = (args.query.new_empty(elements) if args.workspace is None else args.workspace).view(-1)
    carry = carry_stats = None
    if chunks.count > 1:
        carry = args.query.new_empty((tokens, heads, values), dtype=torch.float32)
        carry_stats = args.query.new_empty((tokens, heads, 2), dtype=torch.float32)
    common: dict[str, Any] = {
        "line": line, "seq_lens": args.seq_lens, "block_table": args.block_table,
        "expanded": room[: chunks.places * width], "ropes": room[chunks.places * width : elements],
        "num_reqs": args.seq_lens.shape[0], "num_blocks": args.kv_cache.shape[0],
        "table_stride": args.block_table.stride(0), "table_width": args.block_table.shape[1], "R": rope,
        "R_TILE": max(16, next_power_of_two(rope)), "BLOCK_SIZE": config.block_size,
        "NATIVE_FP8": limits.native_fp8, "enable_fp_fusion": True,
    }  # fmt: skip
    if attend_whole is not None:
        _expand(args, weight.view(width, -1), 0, chunks, common, config, limits)
        attend_whole(common["expanded"], common["ropes"])
        return
    for first in range(0, chunks.count * chunks.places, chunks.places):
        _expand(args, weight.view(width, -1), first, chunks, common, config, limits)
        _attend_chunk(args, complete, first, chunks, common, (carry, carry_stats, rows), config, limits)


def _expand(
    args: MLAAttentionArgs,
    weight: Tensor,
    first: int,
    chunks: Chunks,
    common: dict[str, Any],
    config: MLAConfig,
    limits: Limits,
) -> None:
    exact = config.dtype == "float32"
    columns = max(16, min(next_power_of_two(weight.shape[0]), 32 if exact else 128))
    latent = next_power_of_two(config.kv_lora_rank)
    mla_expand_kernel[(-(-weight.shape[0] // columns), chunks.places // chunks.align)](
        args.kv_cache, weight, k_scale=args.k_scale, first_place=first, L=config.kv_lora_rank,
        L_STEP=max(16, min(latent, 32 if exact else 64)), WIDTH=weight.shape[0], COLUMNS=columns,
        ALIGN=chunks.align, BLOCK_T=max(16, chunks.align), STRIDES=row_strides(config, args.kv_cache.stride(0)),
        FORMAT=config.kv_cache_dtype, MODEL=TRITON_DTYPES[MODEL_DTYPES[config.dtype]],
        num_warps=8 if chunks.align > 64 else 4, num_stages=2 if exact or limits.interpreted else 3, **common,
    )  # fmt: skip


def _attend_chunk(
    args: MLAAttentionArgs,
    complete: Tensor | None,
    first: int,
    chunks: Chunks,
    common: dict[str, Any],
    carried: tuple[Tensor | None, Tensor | None, Tensor | None],
    config: MLAConfig,
    limits: Limits,
) -> None:
    carry, carry_stats, rows = carried
    block_m, block_n, warps, stages = prefill_tiles(config, limits)
    target = epilogue_arguments(args, config, rows)
    grid = (args.query.shape[0] // block_m + args.seq_lens.shape[0] + 2, config.num_heads)
    mla_prefill_kernel[grid](
        args.query, query_start_loc=args.query_start_loc, complete=complete, lse=args.lse, carry=carry,
        carry_stats=carry_stats,
        first_place=first, num_places=chunks.places, num_tokens=args.query.shape[0], stride_qt=args.query.stride(0),
        stride_qh=args.query.stride(1), scale=config.scale * LOG2E.value, N=config.num_heads, P=config.qk_nope_head_dim,
        P_TILE=max(16, next_power_of_two(config.qk_nope_head_dim)),
        V_TILE=max(16, next_power_of_two(config.v_head_dim)), LONGEST=longest_absorbed(config), BLOCK_M=block_m,
        BLOCK_N=block_n, CARRY=carry is not None, num_warps=warps, num_stages=stages,
        **common, **target, **{k: v for k, v in epilogue_constants(config, limits).items() if k != "NATIVE_FP8"},
    )  # fmt: skip


def prefill_tiles(config: MLAConfig, limits: Limits) -> tuple[int, int, int, int]:
    """Return tokens and keys of a tile, warps and stages."""
    if limits.interpreted:
        return 16, 16, 4, 1
    wide = max(next_power_of_two(config.qk_nope_head_dim), next_power_of_two(config.v_head_dim))
    if config.dtype == "float32":
        return 16, 16, 4, 1
    if wide > 128:
        return 64, 32, 8, 2
    stage = 2 * 64 * (2 * wide + max(16, next_power_of_two(config.qk_rope_head_dim)))
    fits = 128 * 2 * 2 * wide + 3 * stage <= limits.shared_bytes
    return (128, 64, 8, 3) if limits.warpgroups and fits else (64, 64, 4, 2)
