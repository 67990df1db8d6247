"""Refuse wrong tensors of the latent attention ops before anything is written."""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.cache.mla_layout import mla_cache_dtype, shape_of_mla_storage
from vattn.config.mla import MLAConfig
from vattn.errors import (
    ConfigError,
    DeviceError,
    DtypeError,
    ScaleError,
    ShapeError,
    StrideError,
)
from vattn.ops.arguments_mla import MLAAttentionArgs, MLACacheUpdateArgs
from vattn.ops.checks import check_schedules
from vattn.ops.reference.mla_absorb import weight_scale_shape
from vattn.ops.tensor_checks import STEP_FIX
from vattn.quantization.formats import MODEL_DTYPES, OUTPUT_FORMATS, dtype_name

_INT32, _INT64 = torch.int32, torch.int64


def check_mla_kv_cache_update(args: MLACacheUpdateArgs, config: MLAConfig) -> None:
    """Check the arguments of `vattn::mla_kv_cache_update`.

    Raises:
        ShapeError, DtypeError, DeviceError, StrideError, ScaleError: by kind of mistake.
    """
    device, dtype = args.kv_c.device, MODEL_DTYPES[config.dtype]
    tokens = args.kv_c.shape[0] if args.kv_c.ndim else 0
    _expect("kv_c", args.kv_c, (tokens, config.kv_lora_rank), dtype, device, "[T, kv_lora_rank]", rows=True)
    shape = (tokens, config.qk_rope_head_dim)
    _expect("k_pe", args.k_pe, shape, dtype, device, "[T, qk_rope_head_dim]", rows=True)
    _expect("slot_mapping", args.slot_mapping, (tokens,), _INT64, device, "[T], one slot per row of kv_c")
    _expect_cache(args.kv_cache, config, device)
    _expect_scale("k_scale", args.k_scale, config.kv_scale != "none", "kv_scale='tensor'", device)


def check_mla_attention(args: MLAAttentionArgs, config: MLAConfig) -> None:
    """Check the arguments of `vattn::mla_attention`.

    Raises:
        ShapeError, DtypeError, DeviceError, StrideError, ScaleError, ConfigError: by kind of mistake.
    """
    device, dtype = args.query.device, MODEL_DTYPES[config.dtype]
    tokens = args.query.shape[0] if args.query.ndim else 0
    shape = (tokens, config.num_heads, config.qk_head_dim)
    meaning = "[T, num_heads, qk_nope_head_dim + qk_rope_head_dim]"
    _expect("query", args.query, shape, dtype, device, meaning, rows=True)
    if args.seq_lens.ndim != 1 or args.seq_lens.shape[0] < 1:
        raise ShapeError(f"seq_lens has shape {tuple(args.seq_lens.shape)}", "[B] with B >= 1", "pass one per request")
    reqs = args.seq_lens.shape[0]
    _expect("seq_lens", args.seq_lens, (reqs,), _INT32, device, "[B]")
    _expect("query_start_loc", args.query_start_loc, (reqs + 1,), _INT32, device, "[B + 1]")
    width = args.block_table.shape[1] if args.block_table.ndim == 2 else 0
    _expect("block_table", args.block_table, (reqs, max(1, width)), _INT32, device, "[B, W] with W >= 1", rows=True)
    _expect_cache(args.kv_cache, config, device)
    _expect_weight(args, config, device)
    _expect_scale("q_scale", args.q_scale, config.query_format != "none", "query_format='fp8_e4m3'", device)
    _expect_scale("k_scale", args.k_scale, config.kv_scale != "none", "kv_scale='tensor'", device)
    _expect_outputs(args, config, tokens, device)
    if (args.topk_indices is not None) != config.sparse:
        raise ConfigError(
            f"topk_indices {'given' if args.topk_indices is not None else 'missing'} with sparse={config.sparse}",
            "topk_indices with sparse=True, and only with it",
            "pass int32 [T, K], or make the config with sparse=False",
        )
    if args.topk_indices is not None:
        columns = args.topk_indices.shape[1] if args.topk_indices.ndim == 2 else 0
        _expect(
            "topk_indices",
            args.topk_indices,
            (tokens, max(1, columns)),
            _INT32,
            device,
            "[T, K] with K >= 1",
            rows=True,
        )
    if (args.local_seq_lens is not None) != config.context_parallel:
        raise ConfigError(
            f"local_seq_lens {'given' if args.local_seq_lens is not None else 'missing'} with "
            f"context_parallel={config.context_parallel}",
            "local_seq_lens with context_parallel=True, and only with it",
            "pass int32 [B], or None",
        )
    if args.local_seq_lens is not None:
        _expect("local_seq_lens", args.local_seq_lens, (reqs,), _INT32, device, "[B]")
    check_schedules(args.plan, device)
    _check_workspace(args.workspace, dtype, device)


def _check_workspace(workspace: Tensor | None, dtype: torch.dtype, device: torch.device) -> None:
    if workspace is not None:
        _expect("workspace", workspace, tuple(workspace.shape), dtype, device, "any shape")


def _expect_weight(args: MLAAttentionArgs, config: MLAConfig, device: torch.device) -> None:
    dtype = MODEL_DTYPES[config.dtype] if config.weight_format == "none" else torch.float8_e4m3fn
    shape = (config.num_heads, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank)
    meaning = "[num_heads, qk_nope_head_dim + v_head_dim, kv_lora_rank]"
    _expect("kv_b_weight", args.kv_b_weight, shape, dtype, device, meaning)
    scale_shape, scale = weight_scale_shape(config), args.kv_b_scale
    if scale is None or scale_shape is None:
        if (scale is None) != (scale_shape is None):
            raise ScaleError(
                f"kv_b_scale {'missing' if scale is None else 'given'} with weight_format={config.weight_format!r}",
                "scales with e4m3 weights, and only with them",
                "match the weight_format of the config",
            )
        return
    _expect("kv_b_scale", scale, scale_shape, torch.float32, device, "the scales of weight_format")


def _expect_outputs(args: MLAAttentionArgs, config: MLAConfig, tokens: int, device: torch.device) -> None:
    fmt = OUTPUT_FORMATS[config.output_format]
    dtype = fmt.container or MODEL_DTYPES[config.dtype]
    shape: tuple[int, ...] = (tokens, config.num_heads, fmt.output_columns(config.v_head_dim))
    _expect("output", args.output, shape, dtype, device, "[T, num_heads, v_head_dim], or half of it for NVFP4")
    _expect_scale("output_scale", args.output_scale, fmt.static_scale, "an output_format with a static scale", device)
    if (args.lse is not None) != config.lse:
        raise ConfigError(
            f"lse {'given' if args.lse is not None else 'missing'} with lse={config.lse}",
            "lse with lse=True, and only with it",
            "pass fp32 [T, num_heads], or None",
        )
    if args.lse is not None:
        _expect("lse", args.lse, (tokens, config.num_heads), torch.float32, device, "[T, num_heads]")
    scales = args.output_block_scale
    scale_shape = fmt.block_scale_shape(tokens, config.num_heads * config.v_head_dim)
    if scales is None or scale_shape is None or fmt.block_scale_dtype is None:
        if (scales is not None) != (scale_shape is not None):
            raise ConfigError(
                f"output_block_scale {'given' if scales is not None else 'missing'} with "
                f"output_format={config.output_format!r}",
                "scales with formats that compute them, and only with those",
                "allocate it with OutputFormat.allocate",
            )
        return
    meaning = "the output format's block_scale_shape"
    dense = scales.t() if fmt.column_major else scales
    if fmt.column_major:
        scale_shape, meaning = scale_shape[::-1], meaning + ", as the transpose of a contiguous tensor"
    _expect("output_block_scale", dense, scale_shape, fmt.block_scale_dtype, device, meaning)


def _expect_cache(kv_cache: Tensor, config: MLAConfig, device: torch.device) -> None:
    blocks = max(1, kv_cache.shape[0]) if kv_cache.ndim else 1
    shape = shape_of_mla_storage(kv_cache, config, blocks)
    meaning = "mla_cache_shape(config, num_blocks) with num_blocks >= 1"
    _expect("kv_cache", kv_cache, shape, mla_cache_dtype(config), device, meaning)


def _expect_scale(name: str, scale: Tensor | None, wanted: bool, asked_by: str, device: torch.device) -> None:
    if (scale is not None) != wanted:
        raise ScaleError(
            f"{name} was given, but the config has no {asked_by}"
            if scale is not None
            else f"{name} is missing, but the config has {asked_by}",
            "one fp32 value with it, None without",
            f"match {name} and the config",
        )
    if scale is None:
        return
    if scale.shape not in ((), (1,)):
        raise ScaleError(f"{name} has shape {tuple(scale.shape)}", "one value: shape () or (1,)", "pass one value")
    _expect(name, scale, tuple(scale.shape), torch.float32, device, "one value")


def _expect(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    meaning: str,
    rows: bool = False,
) -> None:
    """Refuse another shape, dtype, device or order in memory; with `rows`, the last dimension alone must be dense."""
    dense = tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 or not tensor.numel() if rows and tensor.ndim else False
    if tensor.shape == shape and tensor.dtype == dtype and tensor.device == device:
        if dense or tensor.is_contiguous():
            return
        raise StrideError(
            f"{name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}",
            "a last dimension of stride 1" if rows else "contiguous memory",
            f"allocate {name} so; a copy made on the way would not be written back",
        )
    if tensor.shape != shape:
        raise ShapeError(
            f"{name} has shape {tuple(tensor.shape)}",
            f"{shape} = {meaning}",
            STEP_FIX if name == "slot_mapping" else f"build {name} from the config and the lengths of this call",
        )
    if tensor.dtype != dtype:
        raise DtypeError(
            f"{name} has dtype {dtype_name(tensor.dtype)}", dtype_name(dtype), f"convert {name} or change the config"
        )
    raise DeviceError(f"{name} is on {tensor.device}", f"{device}, as the other tensors", f"move {name} there once")
