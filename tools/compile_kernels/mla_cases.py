"""Latent attention's cases of `tools.compile_kernels.triton`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vattn.cache.mla_layout import mla_cache_dtype, mla_cache_shape
from vattn.config.mla import MLAConfig
from vattn.config.rope import ROPE_STYLES, RopeConfig
from vattn.kernels.hopper.mla import split_requests as mla_cut
from vattn.kernels.triton.common.tiles import Limits
from vattn.kernels.triton.mla import epilogue as mla_epilogue
from vattn.kernels.triton.mla import indexer as mla_indexer
from vattn.kernels.triton.mla import launch as mla_launch
from vattn.kernels.triton.mla import plan_layout as mla_plan
from vattn.kernels.triton.mla import prefill as mla_prefill
from vattn.kernels.triton.mla import projection as mla_project
from vattn.kernels.triton.mla import rope_update as mla_rope
from vattn.ops.arguments_mla import MLAAttentionArgs, MLACacheUpdateArgs
from vattn.ops.reference.mla_chunks import elements_per_token
from vattn.ops.reference.mla_indexer import SCALE_BYTES, IndexerSelectArgs, IndexerUpdateArgs
from vattn.ops.reference.mla_rope import MLARopeUpdateArgs
from vattn.quantization.formats import MODEL_DTYPES, OUTPUT_FORMATS
from vattn.quantization.mla_formats import MLA_FORMATS

KERNELS = (
    (mla_launch, "mla_attention_kernel"),
    (mla_launch, "mla_merge_kernel"),
    (mla_launch, "mla_query_kernel"),
    (mla_cut, "mla_cut_kernel"),
    (mla_launch, "mla_update_kernel"),
    (mla_project, "mla_project_kernel"),
    (mla_prefill, "mla_complete_kernel"),
    (mla_plan, "mla_line_kernel"),
    (mla_prefill, "mla_expand_kernel"),
    (mla_prefill, "mla_prefill_kernel"),
    (mla_epilogue, "finish_kernel"),
    (mla_rope, "mla_rope_update_kernel"),
    (mla_indexer, "mla_indexer_update_kernel"),
    (mla_indexer, "mla_indexer_score_kernel"),
    (mla_indexer, "mla_indexer_choose_kernel"),
)
"""Modules that launch kernels, and their names."""

CACHES = (("auto", "none"), ("fp8_e4m3", "tensor"), ("fp8_ds_mla", "none"), ("nvfp4_ds_mla", "none"))
OUTPUTS = ("none", "fp8_static", "fp8_per_token", "fp8_group64", "nvfp4", "nvfp4_swizzled")
GEOMETRIES = {
    "16x512+64": (16, 512, 64),
    "128x512+64": (128, 512, 64),
    "5x40+12": (5, 40, 12),
    "40x256+32": (40, 256, 32),
}
STEPS = {"decode": (2, 2), "mixed": (300, 8)}


def mla_launches(record: Callable[..., Iterator[Any]], target: str, limits: Limits) -> Iterator[Any]:
    """Yield what `record` makes of the launches for a target."""
    for dtype, (cache, scale), geometry in itertools.product(MODEL_DTYPES, CACHES, GEOMETRIES):
        heads, latent, rope = GEOMETRIES[geometry]
        stored = dtype if cache == "auto" else cache
        if latent % MLA_FORMATS[stored].latent_multiple:
            continue
        config = MLAConfig(heads, 128, rope, 128, latent, 0.07, dtype, stored, 16, scale, lse=True)
        yield from record(f"{dtype}/{cache} {geometry}", target, partial(_update, config, limits))
        for style in ROPE_STYLES if geometry in ("16x512+64", "5x40+12") else ():
            turned = partial(_turn, config, RopeConfig(rope, style, "rms", 1e-6), limits)
            yield from record(f"{dtype}/{cache} {geometry} {style}", target, turned)
        if stored == "fp8_e4m3" and dtype == "bfloat16":
            asked = config.replace(query_format="fp8_e4m3")
            yield from record(f"{dtype}/{cache} {geometry} query", target, partial(_quantise, asked, limits))
        for (step, counts), sparse in itertools.product(STEPS.items(), (False, True)):
            asked = config.replace(sparse=sparse)
            name = f"{dtype}/{cache} {geometry} {step}{' sparse' if sparse else ''}"
            yield from record(name, target, partial(_attend, asked, counts, limits))
        if geometry in ("16x512+64", "40x256+32"):
            yield from record(f"{dtype}/{cache} {geometry} prompts", target, partial(_prompts, config, 2, limits))
    for dtype, output, geometry in itertools.product(MODEL_DTYPES, OUTPUTS, ("16x512+64", "128x512+64")):
        heads, latent, rope = GEOMETRIES[geometry]
        config = MLAConfig(heads, 128, rope, 128, latent, 0.07, dtype, dtype, 64, output_format=output)
        for tokens in (2, 200):
            name = f"{dtype} {output} {geometry} {tokens} tokens"
            yield from record(name, target, partial(_project, config, tokens, limits))
        if geometry == "16x512+64":
            yield from record(f"{dtype} {output} {geometry}", target, partial(_prompts, config, 1000, limits))
    for dtype, (heads, columns) in itertools.product(MODEL_DTYPES, ((64, 128), (5, 24))):
        yield from record(f"{dtype} {heads}x{columns}", target, partial(_index, dtype, heads, columns, limits))
    listed = MLAConfig(16, 128, 64, 128, 512, 0.07, "bfloat16", "bfloat16", 64, lse=True, sparse=True)
    yield from record("bfloat16 16x512+64 listed", target, partial(_prompts, listed, 2, limits))
    for longest, cache, scale in ((0, "bfloat16", "none"), (42, "bfloat16", "none"), (42, "fp8_e4m3", "tensor")):
        # What Hopper's kernel leaves.
        rest = listed.replace(sparse=False, kv_cache_dtype=cache, kv_scale=scale)
        attend = partial(_attend, rest, (200, 9), limits, longest, 4)
        yield from record(f"bfloat16/{cache} rest of at most {longest}", target, attend)
    for most in (1, 2, 4, 8):
        yield from record(f"parts of {most} rows", target, partial(_cut, most))
    small = MLAConfig(3, 96, 64, 64, 256, 0.07, "bfloat16", "bfloat16", 16, lse=True)
    yield from record("bfloat16 96+64/64", target, partial(_prompts, small, 2, limits))


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _cache(config: MLAConfig) -> Tensor:
    return _meta(*mla_cache_shape(config, 64), dtype=mla_cache_dtype(config))


def _update(config: MLAConfig, limits: Limits) -> None:
    dtype, scale = MODEL_DTYPES[config.dtype], None if config.kv_scale == "none" else _meta(1)
    rows = _meta(64, config.kv_lora_rank, dtype=dtype), _meta(64, config.qk_rope_head_dim, dtype=dtype)
    slots = _meta(64, dtype=torch.int64)
    mla_launch.update_cache(MLACacheUpdateArgs(*rows, _cache(config), slots, scale, ""), config, limits)


def _quantise(config: MLAConfig, limits: Limits) -> None:
    """Launch what turns queries into codes, and the attention of codes."""
    none: dict[str, Any] = dict.fromkeys(MLAAttentionArgs._fields)
    dtype, heads = MODEL_DTYPES[config.dtype], config.num_heads
    latent, rope = (_meta(8, heads, n, dtype=dtype) for n in (config.kv_lora_rank, config.qk_rope_head_dim))
    args = MLAAttentionArgs(**{
        **none, "kv_cache": _cache(config), "query_start_loc": _meta(5, dtype=torch.int32),
        "seq_lens": _meta(4, dtype=torch.int32), "block_table": _meta(4, 256, dtype=torch.int32), "q_scale": _meta(1),
        "k_scale": _meta(1), "plan": [],
    })  # fmt: skip
    codes = mla_launch.quantise_query(latent, rope, args, config, limits)
    mla_launch.attend_latents(codes, args, config, limits)


def _attend(config: MLAConfig, counts: tuple[int, int], limits: Limits, longest: int = 0, shortest: int = 0) -> None:
    tokens, reqs = counts
    none: dict[str, Any] = dict.fromkeys(MLAAttentionArgs._fields)
    args = MLAAttentionArgs(**{
        **none, "kv_cache": _cache(config), "query_start_loc": _meta(reqs + 1, dtype=torch.int32),
        "seq_lens": _meta(reqs, dtype=torch.int32), "block_table": _meta(reqs, 256, dtype=torch.int32),
        "lse": _meta(tokens, config.num_heads), "k_scale": None if config.kv_scale == "none" else _meta(1),
        "topk_indices": _meta(tokens, 2048, dtype=torch.int32) if config.sparse else None, "plan": [],
    })  # fmt: skip
    absorbed = _meta(tokens, config.num_heads, config.head_size, dtype=MODEL_DTYPES[config.dtype])
    mla_launch.attend_latents(absorbed, args, config, limits, longest, shortest=shortest)


def _cut(most: int) -> None:
    starts, lengths, parts = _meta(65, dtype=torch.int32), _meta(64, dtype=torch.int32), _meta(577, dtype=torch.int32)
    mla_cut.cut_requests(starts, lengths, mla_cut.Parts(parts, parts[:576], parts[:576]), most)


def _outputs(config: MLAConfig, tokens: int) -> dict[str, Any]:
    fmt, query = OUTPUT_FORMATS[config.output_format], _meta(tokens, config.num_heads, 1)
    out, scales = fmt.allocate(query, config.v_head_dim, MODEL_DTYPES[config.dtype])
    return {
        "output": out, "output_block_scale": scales, "output_scale": _meta(1) if fmt.static_scale else None,
        "query_start_loc": _meta(3, dtype=torch.int32), "seq_lens": _meta(2, dtype=torch.int32),
    }  # fmt: skip


def _project(config: MLAConfig, tokens: int, limits: Limits) -> None:
    none: dict[str, Any] = dict.fromkeys(MLAAttentionArgs._fields)
    args, dtype = MLAAttentionArgs(**{**none, **_outputs(config, tokens)}), MODEL_DTYPES[config.dtype]
    latent = _meta(tokens, config.num_heads, config.kv_lora_rank, dtype=dtype)
    weight = _meta(config.num_heads, config.v_head_dim, config.kv_lora_rank, dtype=dtype).transpose(1, 2)
    mla_project.project_output(latent, weight, args, config, limits)


def _prompts(config: MLAConfig, blocks: int, limits: Limits) -> None:
    """Launch both halves of a step with prompts; a workspace of `blocks` times 64 tokens makes a few chunks, or one."""
    none: dict[str, Any] = dict.fromkeys(MLAAttentionArgs._fields)
    dtype, tokens = MODEL_DTYPES[config.dtype], 300
    room = 64 * blocks * elements_per_token(config)
    args = MLAAttentionArgs(**{
        **none, **_outputs(config, tokens), "query": _meta(tokens, config.num_heads, config.qk_head_dim, dtype=dtype),
        "kv_cache": _cache(config), "block_table": _meta(2, 4, dtype=torch.int32),
        "lse": _meta(tokens, config.num_heads) if config.lse else None,
        "k_scale": None if config.kv_scale == "none" else _meta(1), "workspace": _meta(room, dtype=dtype), "plan": [],
        "topk_indices": _meta(tokens, 2048, dtype=torch.int32) if config.sparse else None,
    })  # fmt: skip
    wide = config.qk_nope_head_dim + config.v_head_dim
    weight = _meta(config.num_heads, wide, config.kv_lora_rank, dtype=dtype)
    mla_launch.attend_mixed(args, weight, config, limits)


def _turn(config: MLAConfig, rope: RopeConfig, limits: Limits) -> None:
    dtype, columns = MODEL_DTYPES[config.dtype], config.qk_rope_head_dim
    rows = _meta(64, config.kv_lora_rank, dtype=dtype), _meta(64, columns, dtype=dtype)
    table, slots = _meta(4096, columns // 2), _meta(64, dtype=torch.int64)
    weight, scale = _meta(config.kv_lora_rank, dtype=dtype), None if config.kv_scale == "none" else _meta(1)
    args = MLARopeUpdateArgs(*rows, table, table, slots, _cache(config), slots, weight, scale, rope.encode(), "")
    mla_rope.update_turned(args, rope, config, limits)


def _index(dtype: str, heads: int, columns: int, limits: Limits) -> None:
    cache = _meta(64, 64, columns + SCALE_BYTES, dtype=torch.uint8)
    key, slots = _meta(64, columns, dtype=MODEL_DTYPES[dtype]), _meta(64, dtype=torch.int64)
    mla_indexer.mla_indexer_update(IndexerUpdateArgs(key, cache, slots), limits)
    query, weights = _meta(64, heads, columns, dtype=torch.float8_e4m3fn), _meta(64, heads)
    starts, lengths, table, listed = (_meta(*shape, dtype=torch.int32) for shape in ((5,), (4,), (4, 1024), (64, 2048)))
    mla_indexer.mla_indexer_select(IndexerSelectArgs(query, weights, cache, starts, lengths, table, listed), limits)
