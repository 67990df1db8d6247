"""Refuse wrong tensors of the latent attention ops before anything is written."""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.cache.layout import mla_cache_dtype, shape_of_mla_storage
from vattn.config.mla import MLAConfig
from vattn.errors import ScaleError, StrideError
from vattn.ops.arguments_mla import MLAAttentionArgs, MLACacheUpdateArgs
from vattn.ops.checks import check_lengths, check_outputs, check_schedules
from vattn.ops.index_dtypes import INDEX_DTYPES
from vattn.ops.reference.mla_absorb import weight_scale_shape
from vattn.ops.tensor_checks import (
    OncePerSignature,
    check_optional,
    check_rows,
    check_scale,
    check_tensor,
    is_given,
    refuse,
)
from vattn.quantization.formats import MODEL_DTYPES
from vattn.quantization.mla_formats import MLA_FORMATS


@OncePerSignature
def check_mla_kv_cache_update(args: MLACacheUpdateArgs) -> None:
    """Check the arguments of `vattn::mla_kv_cache_update`.

    Raises:
        ShapeError, DtypeError, DeviceError, StrideError, ScaleError: by kind of mistake.
    """
    config, device = MLAConfig.parse(args.config), args.kv_c.device
    dtypes, tokens = (MODEL_DTYPES[config.dtype],), args.kv_c.shape[0] if args.kv_c.ndim else 0
    check_rows("kv_c", args.kv_c, (tokens, config.kv_lora_rank), dtypes, device)
    check_rows("k_pe", args.k_pe, (tokens, config.qk_rope_head_dim), dtypes, device)
    check_tensor("slot_mapping", args.slot_mapping, (tokens,), INDEX_DTYPES, device, "[T], one slot per row of kv_c")
    _check_kv_cache(args, config, device)
    check_scale("k_scale", args.k_scale, config.kv_scale, 1, device)


@OncePerSignature
def check_mla_attention(args: MLAAttentionArgs) -> None:
    """Check the arguments of `vattn::mla_attention`.

    Raises:
        ShapeError, DtypeError, DeviceError, StrideError, ScaleError, ConfigError: by kind of mistake.
    """
    config, device = MLAConfig.parse(args.config), args.query.device
    dtypes, tokens = (MODEL_DTYPES[config.dtype],), args.query.shape[0] if args.query.ndim else 0
    shape = (tokens, config.num_heads, config.qk_head_dim)
    meaning = "[T, num_heads, qk_nope_head_dim + qk_rope_head_dim]"
    check_rows("query", args.query, shape, dtypes, device, meaning)
    num_reqs = check_lengths(args, device)
    check_optional("local_seq_lens", args.local_seq_lens, config.context_parallel, (num_reqs,), (torch.int32,), device)
    _check_kv_cache(args, config, device)
    _check_weight(args, config, device)
    check_scale("q_scale", args.q_scale, "none" if config.query_format == "none" else "tensor", 1, device)
    check_scale("k_scale", args.k_scale, config.kv_scale, 1, device)
    check_outputs(args, config, tokens, config.v_head_dim, device)
    if is_given(args.topk_indices, "topk_indices", config.sparse):
        columns = args.topk_indices.shape[1] if args.topk_indices.ndim == 2 else 0
        check_rows("topk_indices", args.topk_indices, (tokens, max(1, columns)), (torch.int32,), device)
    check_schedules(args.plan, device)
    if args.workspace is not None:
        check_tensor("workspace", args.workspace, tuple(args.workspace.shape), dtypes, device)


def _check_weight(args: MLAAttentionArgs, config: MLAConfig, device: torch.device) -> None:
    dtype = MODEL_DTYPES[config.dtype] if config.weight_format == "none" else torch.float8_e4m3fn
    shape = (config.num_heads, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank)
    check_tensor("kv_b_weight", args.kv_b_weight, shape, (dtype,), device)
    scale_shape, scale = weight_scale_shape(config), args.kv_b_scale
    if is_given(scale, "kv_b_scale", scale_shape is not None, ScaleError):
        assert scale_shape is not None
        check_tensor("kv_b_scale", scale, scale_shape, (torch.float32,), device)


def _check_kv_cache(args: MLACacheUpdateArgs | MLAAttentionArgs, config: MLAConfig, device: torch.device) -> None:
    blocks = max(1, args.kv_cache.shape[0]) if args.kv_cache.ndim else 1
    shape = shape_of_mla_storage(args.kv_cache, config, blocks)
    meaning = "mla_cache_shape(config, num_blocks) with num_blocks >= 1"
    refuse("kv_cache", args.kv_cache, shape, (mla_cache_dtype(config),), device, meaning)
    check_latent_strides("kv_cache", args.kv_cache, config)


def check_latent_strides(name: str, kv_cache: Tensor, config: MLAConfig) -> None:
    """Refuse a storage of `mla_cache_shape` in which rows of a block lie apart; its blocks may.

    Raises:
        StrideError: they do, blocks overlap, or scales in rows of a packed format start at no multiple of their size.
    """
    inside, alignment = kv_cache[0].numel(), MLA_FORMATS[config.kv_cache_dtype].alignment
    gap = kv_cache.stride(0) - inside if kv_cache.shape[0] > 1 else 0
    starts = kv_cache.storage_offset() | (inside + gap if gap else 0)
    if not kv_cache[0].is_contiguous() or gap < 0 or starts % alignment:
        raise StrideError(
            f"{name} has strides {kv_cache.stride()} and starts at element {kv_cache.storage_offset()} of its memory",
            f"blocks of {inside} adjacent elements that do not overlap"
            + (f" and start at multiples of {alignment} bytes" if alignment > 1 else ""),
            f"pass {name} as a view of blocks that lie apart, such as pool[:, layer]",
        )
