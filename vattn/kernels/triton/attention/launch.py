"""Launch the attention and cache kernels; reads shapes only, nothing from the device."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vattn.cache.layout import PackedRows, key_value_views
from vattn.cache.stored_rows import stored_views
from vattn.config.attention import AttentionConfig
from vattn.config.mla import MLAConfig
from vattn.kernels.replay import unrecorded
from vattn.kernels.triton.attention.kernel import attention_kernel
from vattn.kernels.triton.attention.reduce import finish_kernel
from vattn.kernels.triton.cache.packed_rows import TRITON_CODECS, part_constants
from vattn.kernels.triton.cache.packed_update import update_packed
from vattn.kernels.triton.cache.update import cache_update_kernel
from vattn.kernels.triton.common.launching import launch
from vattn.kernels.triton.common.output_constants import row_output, scale_kind
from vattn.kernels.triton.common.tiles import (
    Limits,
    Tiles,
    choose_tiles,
    compute_dtype,
    next_power_of_two,
    padded_widths,
)
from vattn.ops.arguments import AttentionArgs, CacheUpdateArgs, VarlenAttentionArgs
from vattn.ops.arguments_mla import MLAAttentionArgs
from vattn.quantization.formats import KV_FORMATS, MODEL_DTYPES, OUTPUT_FACTORS, OUTPUT_FORMATS, PackedPart
from vattn.quantization.packed import query_factor

TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def as_bytes(tensor: Tensor) -> Tensor:
    """View FP8 tensors as bytes, as kernels take them."""
    return tensor.view(torch.uint8) if tensor.dtype in _FP8 else tensor


def paged_attention(
    args: AttentionArgs, config: AttentionConfig, tiles: Tiles | None = None, limits: Limits | None = None
) -> None:
    """Run `vattn::attention`; `tiles` overrides the choice by shape, `limits` the limits of the device."""
    key_rows, value_rows = (
        PackedRows(as_bytes(rows.codes), rows.scales) for rows in stored_views(args.key_cache, args.value_cache, config)
    )
    key, value = key_rows.codes, value_rows.codes
    sources = {
        "key": key, "value": value, "key_scales": key_rows.scales, "value_scales": value_rows.scales,
        "KEY_SCALE_ROWS": scale_strides(key_rows), "VALUE_SCALE_ROWS": scale_strides(value_rows),
        "seq_lens": args.seq_lens, "block_table": args.block_table, "kv_start_loc": None,
        "local_seq_lens": args.local_seq_lens,
        "num_blocks": key.shape[0], "table_width": args.block_table.shape[1],
        "table_stride": args.block_table.stride(0),
        "K_BLOCK": key.stride(0), "K_ROW": key.stride(1), "K_HEAD": key.stride(2),
        "V_BLOCK": value.stride(0), "V_ROW": value.stride(1), "V_HEAD": value.stride(2),
    }  # fmt: skip
    max_keys = args.block_table.shape[1] * config.block_size
    _attend(args, config, sources, args.seq_lens.shape[0], max_keys, tiles, limits)


def packed_attention(
    args: VarlenAttentionArgs, config: AttentionConfig, tiles: Tiles | None = None, limits: Limits | None = None
) -> None:
    """Run `vattn::varlen_attention`; `tiles` and `limits` as for `paged_attention`."""
    key, value = as_bytes(args.key), as_bytes(args.value)
    sources = {
        "key": key, "value": value, "key_scales": None, "value_scales": None, "KEY_SCALE_ROWS": (0, 0, 0),
        "VALUE_SCALE_ROWS": (0, 0, 0),
        "seq_lens": None, "block_table": None, "kv_start_loc": args.kv_start_loc, "local_seq_lens": None,
        "num_blocks": key.shape[0], "table_width": 0, "table_stride": 0,
        "K_BLOCK": 0, "K_ROW": key.stride(0), "K_HEAD": key.stride(1),
        "V_BLOCK": 0, "V_ROW": value.stride(0), "V_HEAD": value.stride(1),
    }  # fmt: skip
    _attend(args, config, sources, args.kv_start_loc.shape[0] - 1, key.shape[0], tiles, limits)


def _attend(
    args: AttentionArgs | VarlenAttentionArgs,
    config: AttentionConfig,
    sources: dict[str, Any],
    num_reqs: int,
    max_keys: int,
    tiles: Tiles | None,
    limits: Limits | None,
) -> None:
    num_tokens = args.query.shape[0]
    fmt = OUTPUT_FORMATS[config.output_format]
    if num_tokens == 0:
        if fmt.swizzled and args.output_block_scale is not None:
            args.output_block_scale.view(torch.uint8).zero_()
        return
    limits = limits or Limits.of(args.query.device)
    mapped = config.block_size == 0 and all(_can_be_mapped(sources[name]) for name in ("key", "value"))
    tiles = tiles or choose_tiles(config, num_tokens, num_reqs, max_keys, limits, mapped)
    splits, width = tiles.num_splits, config.head_size_v
    target, target_lse, is_final = as_bytes(args.output), args.lse, splits == 1 and not fmt.group_size
    if not is_final:
        target, partial_lse = _scratch(args, config, num_tokens, splits)
        target_lse = partial_lse if splits > 1 else args.lse
    chunks = -(-config.group_size // tiles.group_tile)
    row_stride = config.num_heads * splits
    output_kind = "partial" if splits > 1 else row_output(config)
    grid = (num_tokens // tiles.block_q + num_reqs + 2, config.num_kv_heads * chunks, splits)
    boxes = [_boxes(sources[name], tiles.tile) if tiles.boxes else None for name in ("key", "value")]
    unrecorded(attention_kernel)[grid](
        key_boxes=boxes[0], value_boxes=boxes[1],
        query=as_bytes(args.query), query_start_loc=args.query_start_loc, output=target, lse=target_lse,
        q_scale=args.q_scale, k_scale=args.k_scale, v_scale=args.v_scale, output_scale=args.output_scale,
        alibi_slopes=args.alibi_slopes, sinks=args.sinks, causal_flags=args.causal_flags, bias=args.bias,
        tree_id=args.tree_id, mm_ranges=args.mm_ranges,
        num_tokens=num_tokens, num_reqs=num_reqs, num_trees=0 if args.bias is None else args.bias.shape[0],
        bias_size=0 if args.bias is None else args.bias.shape[1],
        num_ranges=0 if args.mm_ranges is None else args.mm_ranges.shape[1], num_splits=splits,
        stride_qt=args.query.stride(0), stride_qh=args.query.stride(1),
        stride_ot=row_stride * width, stride_oh=splits * width, stride_os=width,
        stride_lt=row_stride, stride_lh=splits,
        scale=config.scale, soft_cap=config.logits_soft_cap or 1.0,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, enable_fp_fusion=True,
        **sources, **attention_constants(config, tiles, limits, output_kind),
    )  # fmt: skip
    if not is_final:
        finish(args, config, target, splits, target_lse, limits)


def _scratch(
    args: AttentionArgs | VarlenAttentionArgs, config: AttentionConfig, num_tokens: int, num_splits: int
) -> tuple[Tensor, Tensor | None]:
    """Return scratch for rows `[T, H, splits, V]` (fp32 if split, else the model dtype) and for their log-sum-exps."""
    dtype = torch.float32 if num_splits > 1 else MODEL_DTYPES[config.dtype]
    rows = num_tokens * config.num_heads * num_splits
    values = rows * config.head_size_v
    need = values * dtype.itemsize + (rows * 4 if num_splits > 1 else 0)
    workspace = args.workspace
    if workspace is None or workspace.numel() * workspace.itemsize < need or workspace.data_ptr() % 16:
        workspace = torch.empty(need, dtype=torch.uint8, device=args.query.device)
    room = workspace.view(-1).view(torch.uint8)
    target = room[: values * dtype.itemsize].view(dtype)
    logs = room[values * dtype.itemsize : need].view(torch.float32) if num_splits > 1 else None
    return target, logs


def _can_be_mapped(rows: Tensor) -> bool:
    """Return whether a tensor map can be made over packed rows `[keys, heads, columns]`."""
    aligned = all(stride * rows.itemsize % 16 == 0 for stride in rows.stride()[:2])
    return aligned and rows.data_ptr() % 16 == 0 and rows.stride(2) == 1 and rows.shape[0] > 0


def _boxes(rows: Tensor, tile: int) -> TensorDescriptor:
    """Return a tensor map over packed rows with boxes of one tile of one head."""
    keys, heads, width = rows.shape
    by_key, by_head, _ = rows.stride()
    return TensorDescriptor(rows, [heads, keys, width], [by_head, by_key, 1], [1, tile, width])


def attention_constants(config: AttentionConfig, tiles: Tiles, limits: Limits, output_kind: str) -> dict[str, Any]:
    """Return what the attention kernel is specialised for, strides of the keys and values aside."""
    fmt = KV_FORMATS[config.kv_cache_dtype]
    block_d, block_v = padded_widths(config)
    return {
        "GROUP": config.group_size, "GROUP_TILE": tiles.group_tile, "BLOCK_M": tiles.block_m, "TILE": tiles.tile,
        "D": config.head_size, "V": config.head_size_v, "BLOCK_SIZE": config.block_size,
        "BLOCK_D": block_d, "BLOCK_V": block_v, "D_STEP": min(block_d, tiles.d_step),
        "Q_FORMAT": config.dtype if config.query_format == "none" else config.query_format,
        "Q_LOAD": config.query_load, "KV_FORMAT": fmt.name, "COMPUTE": TRITON_DTYPES[compute_dtype(config)],
        "NATIVE_FP8": limits.native_fp8, "MODEL": TRITON_DTYPES[MODEL_DTYPES[config.dtype]], "OUTPUT": output_kind,
        "PER_HEAD_Q": config.query_scale == "head", "PER_HEAD_KV": config.kv_scale == "head",
        "CAUSALITY": "cross" if config.attn_type == "encoder_decoder" else config.causality,
        "WINDOW": config.sliding_window or 0, "CHUNK": config.chunk_size or 0,
        "LOOKBACK": config.chunk_lookback or 0, "MM": config.mm_prefix, "SOFT_CAP": config.logits_soft_cap is not None,
        "RANK": config.context_rank, "WORLD": config.context_world, "INTERLEAVE": config.context_interleave,
        "ALIBI": config.alibi, "SPLIT": tiles.num_splits > 1, "FULL_LOOP": tiles.full_loop, "STAGES": tiles.num_stages,
        "MASKED_TILE": tiles.masked_tile or tiles.tile, "FOLDED": tiles.folded,
        "HOISTED": tiles.hoisted, "POSITIVE": tiles.positive, "TOGETHER": tiles.together,
        "SCORES_AHEAD": tiles.scores_ahead,
        "CONTEXT_ONLY": config.context_only, **packed_constants(config),
    }  # fmt: skip


def packed_constants(config: AttentionConfig) -> dict[str, Any]:
    """Return the constexpr arguments for reading rows of a packed format; `LOAD_*` is `None` for other formats."""
    fmt, (wide, wide_v) = KV_FORMATS[config.kv_cache_dtype], padded_widths(config)
    return {
        **_part_constants("KEY", fmt.key, config.head_size, wide),
        **_part_constants("VALUE", fmt.value, config.head_size_v, wide_v),
    }


def _part_constants(name: str, part: PackedPart | None, width: int, wide: int) -> dict[str, Any]:
    if part is None:
        return {f"{name}_PART": (0, 0, 0, 1, False, 0, 0), f"LOAD_{name}": None, f"{name}_FACTOR": 1.0}
    return {
        f"{name}_PART": part_constants(part, width, wide),
        f"LOAD_{name}": TRITON_CODECS[part.codec].load,
        f"{name}_FACTOR": query_factor(width, part.rotation),
    }


def scale_strides(rows: PackedRows) -> tuple[int, ...]:
    """Return the strides of a packed format's scales by block, row and head, in elements; zeros without scales."""
    return (0, 0, 0) if rows.scales is None else tuple(rows.scales.stride()[:3])


def rows_to_write(args: AttentionArgs | VarlenAttentionArgs, config: AttentionConfig, finished: bool) -> Tensor:
    """Return the output if a kernel stores it finished, else room in the model dtype for what another kernel takes."""
    if finished:
        return args.output
    return torch.empty(args.query.shape, dtype=MODEL_DTYPES[config.dtype], device=args.query.device)


def finish(
    args: AttentionArgs | VarlenAttentionArgs | MLAAttentionArgs,
    config: AttentionConfig | MLAConfig,
    source: Tensor,
    num_splits: int = 1,
    source_lse: Tensor | None = None,
    limits: Limits | None = None,
) -> None:
    """Merge splits and quantise rows `[T, H, splits, V]` of the model dtype, or fp32 if split, into the output."""
    fmt = OUTPUT_FORMATS[config.output_format]
    width = config.v_head_dim if isinstance(config, MLAConfig) else config.head_size_v
    num_tokens, columns = args.query.shape[0], config.num_heads * width
    constants = finish_constants(config, width, num_splits > 1, (limits or Limits.of(args.query.device)).native_fp8)
    rows, scale_columns, blocks = num_tokens, 0, 1
    scales, strides = args.output_block_scale, (0, 0)
    if scales is not None:
        strides = (scales.stride(0), scales.stride(1))
        if fmt.swizzled:
            rows, scale_columns = scales.shape
    if fmt.group_size >= 0:
        blocks = -(-max(columns, scale_columns * max(fmt.group_size, 1)) // constants["BLOCK"])
    unrecorded(finish_kernel)[(rows, blocks)](
        source=source, source_lse=source_lse if num_splits > 1 else None,
        output=as_bytes(args.output), output_block_scale=None if scales is None else as_bytes(scales),
        lse=args.lse, output_scale=args.output_scale, sinks=getattr(args, "sinks", None),
        num_tokens=num_tokens, num_splits=num_splits,
        stride_ot=args.output.stride(0), stride_oh=args.output.stride(1), stride_br=strides[0], stride_bg=strides[1],
        stride_lt=config.num_heads, stride_lh=1, SCALE_COLUMNS=scale_columns, num_warps=4,
        enable_fp_fusion=True, **constants,
    )  # fmt: skip


def finish_constants(config: AttentionConfig | MLAConfig, width: int, split: bool, native_fp8: bool) -> dict[str, Any]:
    """Return the constexpr arguments of the finishing kernel but SCALE_COLUMNS; `width`: columns of a head."""
    fmt = OUTPUT_FORMATS[config.output_format]
    named = fmt.static_scale or not fmt.group_size
    kind = fmt.name if named else "token" if fmt.group_size < 0 else "group"
    scales, arithmetic = scale_kind(config), config.output_arithmetic
    if scales in (*OUTPUT_FACTORS, "mx_ceil"):
        arithmetic = "factor"
    columns = next_power_of_two(config.num_heads * width)
    least = -1.0 if config.output_min_scale is None else config.output_min_scale
    return {
        "H": config.num_heads, "V": width, "MODEL": TRITON_DTYPES[MODEL_DTYPES[config.dtype]],
        "ARITHMETIC": arithmetic, "APPROXIMATE": config.output_arithmetic.startswith("approximate"),
        "LIMIT": fmt.limit, "MIN_SCALE": least, "INT8": fmt.container is torch.int8,
        "OUTPUT": kind, "GROUP": fmt.group_size, "SCALES": scales, "SPLIT": split,
        # A whole row in registers if it has one scale.
        "BLOCK": max(16, min(columns, 256 if split else 8192 if fmt.group_size < 0 else 1024)),
        "NATIVE_FP8": native_fp8,
    }  # fmt: skip


def update_kv_cache(args: CacheUpdateArgs, config: AttentionConfig, limits: Limits | None = None) -> None:
    """Run `vattn::kv_cache_update`; `limits` overrides the limits of the device."""
    if KV_FORMATS[config.kv_cache_dtype].packed:
        update_packed(args, config, limits)
        return
    num_tokens = args.key.shape[0]
    if num_tokens == 0:
        return
    limits = limits or Limits.of(args.key.device)
    key_cache, value_cache = (as_bytes(view) for view in key_value_views(args.key_cache, args.value_cache, config))
    widths = next_power_of_two(config.head_size), next_power_of_two(config.head_size_v)
    tile = min(max(1, 1024 // max(widths)), next_power_of_two(config.num_kv_heads))
    arguments = {
        "key": as_bytes(args.key), "value": as_bytes(args.value), "key_cache": key_cache, "value_cache": value_cache,
        "slot_mapping": args.slot_mapping, "k_scale": args.k_scale, "v_scale": args.v_scale,
        "num_slots": key_cache.shape[0] * config.block_size,
        "stride_kt": args.key.stride(0), "stride_kh": args.key.stride(1),
        "stride_vt": args.value.stride(0), "stride_vh": args.value.stride(1),
    }  # fmt: skip
    constants = {
        "NUM_HEADS": config.num_kv_heads, "D": config.head_size, "V": config.head_size_v, "D_TILE": widths[0],
        "V_TILE": widths[1], "BLOCK_SIZE": config.block_size, "K_STRIDES": key_cache.stride()[:3],
        "V_STRIDES": value_cache.stride()[:3], "FORMAT": config.kv_cache_dtype, "PER_HEAD": config.kv_scale == "head",
        "NATIVE_FP8": limits.native_fp8, "TILE": tile, "num_warps": 4, "enable_fp_fusion": True,
    }  # fmt: skip
    launch(cache_update_kernel, (num_tokens, -(-config.num_kv_heads // tile)), arguments, constants)
