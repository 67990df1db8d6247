"""Launches of latent attention: the kernels of every GPU, and Hopper's decode, sparse and prompt kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tools.compile_kernels.launches import TARGETS, Launch, integers, meta, record
from vattn.cache.layout import mla_cache_dtype, mla_cache_shape
from vattn.config.mla import MLAConfig
from vattn.config.rope import ROPE_STYLES, RopeConfig
from vattn.kernels import mla_route
from vattn.kernels.hopper.mla import launch as hopper_launch
from vattn.kernels.hopper.mla import prefill_launch, schedule, sparse_launch
from vattn.kernels.triton.common.tiles import Limits
from vattn.kernels.triton.mla import indexer, launch, projection, rope_update
from vattn.ops.arguments_mla import MLAAttentionArgs, MLACacheUpdateArgs
from vattn.ops.reference.mla_absorb import elements_per_token
from vattn.ops.reference.mla_indexer import SCALE_BYTES, IndexerSelectArgs, IndexerUpdateArgs
from vattn.ops.reference.mla_rope import MLARopeUpdateArgs
from vattn.quantization.formats import MODEL_DTYPES, OUTPUT_FORMATS
from vattn.quantization.mla_formats import MLA_FORMATS

HOPPER_SPILLS = 512
"""Bytes of a thread's registers that may go to memory: Triton 3.9 keeps more there than 3.6, outside of the loops."""

CACHES = (("auto", "none"), ("fp8_e4m3", "tensor"), ("fp8_ds_mla", "none"), ("nvfp4_ds_mla", "none"))
OUTPUTS = ("none", "fp8_static", "fp8_per_token", "fp8_group64", "nvfp4", "nvfp4_swizzled")
GEOMETRIES = {f"{n}x{latent}+{rope}": (n, latent, rope) for n, latent, rope in (
    (16, 512, 64), (128, 512, 64), (5, 40, 12), (40, 256, 32),
)}  # fmt: skip
STEPS = {"decode": (2, 2), "mixed": (300, 8)}
BASE = MLAConfig(16, 128, 64, 128, 512, 0.07, "bfloat16", "bfloat16", 64, lse=True)
CODES = BASE.replace(kv_cache_dtype="fp8_e4m3", kv_scale="tensor")


def all_launches() -> Iterator[Launch]:
    """Yield every case."""
    for target, limits in TARGETS.items():
        for name, call in _on_any_gpu(limits):
            yield from record(name, target, call)
    for name, call in _on_hopper():
        yield from record(name, "sm_90", call, HOPPER_SPILLS, drops_limit=True)


def arguments(config: MLAConfig, tokens: int, reqs: int, table_width: int = 64, blocks: int = 64) -> MLAAttentionArgs:
    """Return the arguments of `vattn::mla_attention`, without a weight."""
    dtype = MODEL_DTYPES[config.dtype]
    query, fmt = meta(tokens, config.num_heads, config.qk_head_dim, dtype=dtype), OUTPUT_FORMATS[config.output_format]
    output, scales = fmt.allocate(query, config.v_head_dim, dtype)
    given: dict[str, Any] = dict.fromkeys(MLAAttentionArgs._fields)
    return MLAAttentionArgs(**{
        **given, "query": query, "kv_cache": meta(*mla_cache_shape(config, blocks), dtype=mla_cache_dtype(config)),
        "query_start_loc": integers(reqs + 1), "seq_lens": integers(reqs), "block_table": integers(reqs, table_width),
        "output": output, "output_block_scale": scales, "output_scale": meta(1) if fmt.static_scale else None,
        "lse": meta(tokens, config.num_heads) if config.lse else None,
        "q_scale": None if config.query_format == "none" else meta(1),
        "k_scale": None if config.kv_scale == "none" else meta(1),
        "topk_indices": integers(tokens, 2048) if config.sparse else None, "plan": [],
    })  # fmt: skip


def _absorbed(config: MLAConfig, tokens: int) -> Tensor:
    dtype = MODEL_DTYPES[config.dtype] if config.query_format == "none" else torch.float8_e4m3fn
    return meta(tokens, config.num_heads, config.head_size, dtype=dtype)


def _on_any_gpu(limits: Limits) -> Iterator[tuple[str, Any]]:
    """Yield the cases of the kernels in kernels/triton, and of the small ones that Hopper's launches share."""
    for dtype, (cache, scale), geometry in itertools.product(MODEL_DTYPES, CACHES, GEOMETRIES):
        (heads, latent, rope), stored = GEOMETRIES[geometry], dtype if cache == "auto" else cache
        if latent % MLA_FORMATS[stored].latent_multiple:
            continue
        config, name = (
            MLAConfig(heads, 128, rope, 128, latent, 0.07, dtype, stored, 16, scale, lse=True),
            f"{dtype}/{cache} {geometry}",
        )
        yield name, partial(_update, config, limits)
        for style in ROPE_STYLES if geometry in ("16x512+64", "5x40+12") else ():
            yield f"{name} {style}", partial(_rotate, config, RopeConfig(rope, style, "rms", 1e-6), limits)
        if stored == "fp8_e4m3" and dtype == "bfloat16":
            yield f"{name} query", partial(_quantise, config.replace(query_format="fp8_e4m3"), limits)
        for (step, counts), sparse in itertools.product(STEPS.items(), (False, True)):
            layer = config.replace(sparse=sparse)
            yield f"{name} {step}{' sparse' if sparse else ''}", partial(_attend, layer, *counts, limits)
        if geometry in ("16x512+64", "40x256+32"):
            yield f"{name} prompts", partial(_prompts, config, 2, limits)
    for dtype, output, geometry in itertools.product(MODEL_DTYPES, OUTPUTS, ("16x512+64", "128x512+64")):
        heads, latent, rope = GEOMETRIES[geometry]
        config = MLAConfig(heads, 128, rope, 128, latent, 0.07, dtype, dtype, 64, output_format=output)
        for tokens in (2, 200):
            yield f"{dtype} {output} {geometry} {tokens} tokens", partial(_project, config, tokens, limits)
        if heads == 16:
            yield f"{dtype} {output} {geometry}", partial(_prompts, config, 1000, limits)
    for dtype, (heads, columns) in itertools.product(MODEL_DTYPES, ((64, 128), (5, 24))):
        yield f"{dtype} {heads}x{columns}", partial(_index, dtype, heads, columns, limits)
    yield "bfloat16 16x512+64 listed", partial(_prompts, BASE.replace(sparse=True), 2, limits)
    for longest, layer in ((0, BASE), (42, BASE), (42, CODES)):
        # The rows that Hopper's kernel leaves.
        name = f"{layer.kv_cache_dtype} rest of at most {longest}"
        yield name, partial(_attend, layer, 200, 9, limits, longest, 4)
    for most in (1, 2, 4, 8):
        parts = schedule.Parts(integers(577), integers(576), integers(576))
        split = partial(schedule.cut_requests, integers(65), integers(64), parts, most)
        yield f"parts of {most} rows", split
    small = MLAConfig(3, 96, 64, 64, 256, 0.07, "bfloat16", "bfloat16", 16, lse=True)
    yield "bfloat16 96+64/64", partial(_prompts, small, 2, limits)


def _update(config: MLAConfig, limits: Limits) -> None:
    dtype, scale = MODEL_DTYPES[config.dtype], None if config.kv_scale == "none" else meta(1)
    rows = meta(64, config.kv_lora_rank, dtype=dtype), meta(64, config.qk_rope_head_dim, dtype=dtype)
    cache, slots = arguments(config, 1, 1).kv_cache, meta(64, dtype=torch.int64)
    launch.update_cache(MLACacheUpdateArgs(*rows, cache, slots, scale, ""), config, limits)


def _rotate(config: MLAConfig, rope: RopeConfig, limits: Limits) -> None:
    dtype, columns = MODEL_DTYPES[config.dtype], config.qk_rope_head_dim
    rows = meta(64, config.kv_lora_rank, dtype=dtype), meta(64, columns, dtype=dtype)
    table, slots, cache = meta(4096, columns // 2), meta(64, dtype=torch.int64), arguments(config, 1, 1).kv_cache
    weight, scale = meta(config.kv_lora_rank, dtype=dtype), None if config.kv_scale == "none" else meta(1)
    args = MLARopeUpdateArgs(*rows, table, table, slots, cache, slots, weight, scale, rope.encode(), "")
    rope_update.rope_update(args, rope, config, limits)


def _quantise(config: MLAConfig, limits: Limits) -> None:
    """Launch what makes codes of queries, and the attention of codes."""
    args, dtype, heads = arguments(config, 8, 4, 256)._replace(lse=None), MODEL_DTYPES[config.dtype], config.num_heads
    latent, rope = (meta(8, heads, n, dtype=dtype) for n in (config.kv_lora_rank, config.qk_rope_head_dim))
    codes = launch.quantise_query(latent, rope, args, config, limits)
    launch.attend_latents(codes, args, config, limits)


def _attend(config: MLAConfig, tokens: int, reqs: int, limits: Limits, longest: int = 0, shortest: int = 0) -> None:
    args = arguments(config, tokens, reqs, 256)
    launch.attend_latents(_absorbed(config, tokens), args, config, limits, longest, shortest=shortest)


def _project(config: MLAConfig, tokens: int, limits: Limits) -> None:
    dtype, heads, latent = MODEL_DTYPES[config.dtype], config.num_heads, config.kv_lora_rank
    weight = meta(heads, config.v_head_dim, latent, dtype=dtype).transpose(1, 2)
    args = arguments(config, tokens, 2)
    projection.project_output(meta(tokens, heads, latent, dtype=dtype), weight, args, config, limits)


def _prompts(config: MLAConfig, blocks: int, limits: Limits) -> None:
    """Launch both halves of a step with prompts; a workspace of `blocks` times 64 tokens makes a few chunks, or one."""
    dtype, wide = MODEL_DTYPES[config.dtype], config.qk_nope_head_dim + config.v_head_dim
    room = meta(64 * blocks * elements_per_token(config), dtype=dtype)
    args = arguments(config, 300, 2, 4)._replace(workspace=room)
    weight = meta(config.num_heads, wide, config.kv_lora_rank, dtype=dtype)
    mla_route.attend_mixed(args, weight, config, limits)


def _index(dtype: str, heads: int, columns: int, limits: Limits) -> None:
    cache = meta(64, 64, columns + SCALE_BYTES, dtype=torch.uint8)
    key, slots = meta(64, columns, dtype=MODEL_DTYPES[dtype]), meta(64, dtype=torch.int64)
    indexer.mla_indexer_update(IndexerUpdateArgs(key, cache, slots), limits)
    query, weights = meta(64, heads, columns, dtype=torch.float8_e4m3fn), meta(64, heads)
    starts, lengths, table, listed = integers(5), integers(4), integers(4, 1024), integers(64, 2048)
    indexer.mla_indexer_select(IndexerSelectArgs(query, weights, cache, starts, lengths, table, listed), limits)


def decodes() -> Iterator[tuple[MLAConfig, int]]:
    """Yield layers and rows of a request that between them reach every branch of Hopper's decode kernels."""
    for heads, rows in ((16, 1), (32, 1), (128, 1), (16, 4)):
        yield BASE.replace(num_heads=heads), rows
        yield BASE.replace(num_heads=heads, block_size=16, lse=False), rows
    yield BASE.replace(block_size=128), 1
    yield BASE.replace(block_size=2048), 1
    yield CODES.replace(block_size=192), 1
    yield BASE, 40  # A step of different lengths.
    for heads, block_size in ((16, 64), (8, 16)):
        layer = CODES.replace(num_heads=heads, block_size=block_size, lse=heads == 16)
        yield layer, 1
        yield layer.replace(query_format="fp8_e4m3"), 1
    yield BASE.replace(num_heads=64, block_size=32, dtype="float16", kv_cache_dtype="float16"), 1


def expanded() -> Iterator[MLAConfig]:
    """Yield layers that between them reach every branch of Hopper's kernel of expanded prompts."""
    half: dict[str, Any] = {"dtype": "float16", "kv_cache_dtype": "float16"}
    yield BASE
    yield BASE.replace(num_heads=3, block_size=16, lse=False, **half)
    yield BASE.replace(block_size=384, output_format="fp8_static")
    yield BASE.replace(
        output_format="fp8_group64", output_arithmetic="divide", output_min_scale=1e-4, output_floor="zero"
    )
    yield BASE.replace(output_format="nvfp4", lse=False)
    yield BASE.replace(output_format="nvfp4_swizzled")
    narrow = BASE.replace(qk_nope_head_dim=64, v_head_dim=64)
    yield narrow
    yield narrow.replace(output_format="nvfp4", block_size=16)
    yield narrow.replace(output_format="fp8_group64")
    # Quantised by corrected products.
    divided, narrow = (layer.replace(output_arithmetic="divide") for layer in (BASE, narrow))
    yield divided.replace(output_format="fp8_static")
    yield divided.replace(output_format="fp8_group128", lse=False)
    yield divided.replace(output_format="nvfp4", lse=False)
    yield divided.replace(output_format="nvfp4_swizzled", **half)
    yield narrow.replace(output_format="fp8_group64", **half)
    yield narrow.replace(output_format="nvfp4")


def sparse() -> Iterator[MLAConfig]:
    """Yield sparse layers that between them reach every branch of the kernels that gather."""
    wide = {"num_heads": 128, "sparse": True}
    yield BASE.replace(**wide)
    yield CODES.replace(**wide)
    yield CODES.replace(sparse=True, query_format="fp8_e4m3", lse=False)


def _on_hopper() -> Iterator[tuple[str, Any]]:
    for config, rows in decodes():
        # As many rows of each request, and with one row: a row more.
        for tokens in (4 * rows, 5) if rows == 1 else (4 * rows,):
            args = arguments(config, tokens, 4)
            call = partial(hopper_launch.attend_latents, _absorbed(config, tokens), args, config)
            yield f"{tokens} tokens {config.encode()}", call
    for config in sparse():
        args = arguments(config, 4, 2)
        yield f"sparse {config.encode()}", partial(sparse_launch.attend_latents, _absorbed(config, 4), args, config)
    for config in expanded():
        dtype, line = MODEL_DTYPES[config.dtype], 1024
        width = config.num_heads * (config.qk_nope_head_dim + config.v_head_dim)
        rooms = meta(line * width, dtype=dtype), meta(line * config.qk_rope_head_dim, dtype=dtype)
        args = arguments(config, 700, 4)
        call = partial(prefill_launch.attend_expanded, args, config, integers(5), *rooms, None, 42, TARGETS["sm_90"])
        yield f"prompts {config.encode()}", call
