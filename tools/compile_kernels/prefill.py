"""Launches of Hopper's prefill kernel, of NVFP4 rows of other kernels' results, and of linears of few rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import triton

from tools.compile_kernels.launches import HOPPER, Launch, integers, meta, paged_arguments, record
from vattn.config.attention import AttentionConfig
from vattn.kernels.hopper import fp4_rows, mixed_launch
from vattn.kernels.hopper.availability import DTYPES
from vattn.kernels.hopper.linear import small_m
from vattn.kernels.hopper.linear.launch import streamed_linear
from vattn.kernels.hopper.prefill import fixed_launch, launch, split_launch
from vattn.kernels.hopper.prefill.launch import TileConfig
from vattn.ops.linear_arguments import E4M3, LinearArgs
from vattn.quantization.formats import MODEL_DTYPES

SPILLS = 512
"""Bytes of a thread's registers that may go to memory: Triton 3.9 keeps up to a hundred values there where an output
computes scales and the LSE is wanted too; Triton 3.6, with which these kernels were timed, a value at most."""

OWN_LOADS_SPILLS = 1280
"""The same where warpgroups load their queries themselves; Triton 3.6 keeps 512 bytes at most there."""

FIXED_SPILLS = 1536
"""The same where parts of the keys are merged in a CTA: between parts a result is held beside another one."""

WHOLE_SIZES, PADDED_SIZES = (64, 128, 256), (32, 80, 112, 192)
"""Heads that are multiplied as they are, and some that zeros are added to."""

FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"lse": True},
    {"sliding_window": 1024, "sinks": True, "lse": True},
    {"logits_soft_cap": 30.0, "sliding_window": 4096},
    {"output_format": "fp8_static", "sinks": True},
    {
        "output_format": "fp8_group64_pow2_col",
        "output_arithmetic": "multiply",
        "output_min_scale": 1e-4,
        "output_floor": "rounded_scale",
        "lse": True,
    },
    {"output_format": "fp8_group128", "output_arithmetic": "approximate_divide"},
)
CACHES: tuple[dict[str, Any], ...] = (
    {},
    {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor"},
    {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"},
    {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor", "query_format": "fp8_e4m3", "query_scale": "tensor"},
    {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head", "query_format": "fp8_e4m3", "query_scale": "head"},
)


def all_launches() -> Iterator[Launch]:
    """Yield every case."""
    yield from _prompts()
    yield from _between_decode_and_prefill()
    yield from _few_tiles()
    yield from _fixed_parts()
    yield from _narrow_windows()
    yield from _side_by_side()
    yield from _fp4_rows()
    yield from _linears()


def _layer(heads: int, size: int, dtype: str, **changes: Any) -> AttentionConfig:
    return AttentionConfig(heads, 8, size, size, size**-0.5, dtype, **{"kv_cache_dtype": dtype, **changes})


def _prefill(config: AttentionConfig, tiles: TileConfig, early: bool = False, gaps: bool = False) -> Iterator[Launch]:
    if launch.refusals(config, HOPPER):
        return
    args = paged_arguments(config, 160, 2, 48, 6)
    if gaps:
        wide = args.key_cache.new_empty(*args.key_cache.shape[:3], 2 * config.head_size)
        args = args._replace(key_cache=wide[..., : config.head_size], value_cache=wide[..., config.head_size :])
    call = partial(launch.launch, args, config, integers(9, 8), args.output, 132, tiles, early)
    yield from record(f"{tiles} {config.encode()}", "sm_90", call, SPILLS)


def _prompts() -> Iterator[Launch]:
    for dtype, layout, block_size in itertools.product(DTYPES, ("NHD", "HND"), (16, 32, 64, 128, 256, 528, 2048)):
        sizes = WHOLE_SIZES + (PADDED_SIZES if block_size == 16 else ())
        for size, cache, features in itertools.product(sizes, CACHES, FEATURES):
            config = _layer(32, size, dtype, block_size=block_size, kv_cache_layout=layout, **cache, **features)
            for groups in sorted({launch.warpgroups(config, rows) for rows in (64, 8192)}):
                yield from _prefill(config, TileConfig(groups))


def _between_decode_and_prefill() -> Iterator[Launch]:
    """Yield tiles of few rows, of heads packed as rows, and by halves."""
    for size, cache, features in itertools.product(WHOLE_SIZES + PADDED_SIZES, CACHES, FEATURES[::2]):
        for heads in (8, 32, 128) if features in FEATURES[:3] else (32,):
            config = _layer(heads, size, "bfloat16", block_size=16, **cache, **features)
            for groups in (1, 2):
                yield from _prefill(config, TileConfig(groups, launch.packs(config), ahead=True), early=groups == 2)
            if heads == 32:
                uneven = config.replace(num_heads=40)
                yield from _prefill(uneven, TileConfig(1, launch.padded_pack(uneven), ahead=True))
            if config.takes_fp8_query and size == 128:
                yield from _prefill(config, TileConfig(2, halves=True))
            if cache and size == 64 and triton.__version__.startswith("3.6."):
                yield from _prefill(config, TileConfig(3))


def _few_tiles() -> Iterator[Launch]:
    """Yield steps of few row tiles: their schedule, the prefill kernel by parts of the keys, and their reduction."""
    for size, cache, features in itertools.product(WHOLE_SIZES + PADDED_SIZES, CACHES, FEATURES):
        for heads, tokens in ((32, 8), (32, 160), (72, 12), (384, 2)):
            config = _layer(heads, size, "bfloat16", block_size=16, **cache, **features)
            if launch.refusals(config, HOPPER):
                continue
            call = partial(mixed_launch.attend, paged_arguments(config, tokens, 2, 48, 6), config, "split_keys")
            own_loads = 64 % split_launch.choose_tiles(config, tokens, 2).pack
            spills = OWN_LOADS_SPILLS if own_loads else SPILLS
            yield from record(f"few tiles {tokens} {config.encode()}", "sm_90", call, spills)


def _fixed_parts() -> Iterator[Launch]:
    """Yield batch-invariant steps: decodes and chunks, whose row tiles may be split, and prompts."""
    for size, cache, features in itertools.product(WHOLE_SIZES + PADDED_SIZES, CACHES, FEATURES):
        for heads, tokens, requests in ((32, 3, 3), (32, 160, 2), (72, 12, 3), (32, 8192, 1)):
            config = _layer(heads, size, "bfloat16", block_size=16, batch_invariant=True, **cache, **features)
            # Also layers that do not go this way yet.
            if launch.refusals(config.replace(batch_invariant=False), HOPPER):
                continue
            call = partial(fixed_launch.attend, paged_arguments(config, tokens, requests, 48, 6), config)
            yield from record(f"fixed parts {tokens} {config.encode()}", "sm_90", call, FIXED_SPILLS)


def _narrow_windows() -> Iterator[Launch]:
    """Yield what prompts take where row tiles see few keys."""
    for cache, features in itertools.product(CACHES, FEATURES):
        config = _layer(64, 64, "bfloat16", block_size=16, **{**cache, **features, "sliding_window": 128})
        if launch.sees_few_keys(config):
            yield from _prefill(config, launch.choose_tiles(config, 8192, 1, 132))


def _side_by_side() -> Iterator[Launch]:
    """Yield prompts, and steps with few rows, over keys and values side by side."""
    for size, cache in itertools.product(WHOLE_SIZES + PADDED_SIZES, CACHES):
        config = _layer(32, size, "bfloat16", block_size=16, **cache)
        yield from _prefill(config, TileConfig(2), gaps=True)
        yield from _prefill(config, TileConfig(2, launch.packs(config), ahead=True), early=True, gaps=True)


def _fp4_rows() -> Iterator[Launch]:
    """Yield what quantises the rows of other kernels to NVFP4."""
    formats, arithmetics = ("nvfp4", "nvfp4_swizzled"), ("divide", "approximate_divide")
    for dtype, fmt, arithmetic, heads in itertools.product(DTYPES, formats, arithmetics, (3, 32, 128)):
        size = 80 if heads == 3 else 128
        config = AttentionConfig(
            heads, 1, size, size, 0.1, dtype, kv_cache_dtype=dtype, output_format=fmt, output_arithmetic=arithmetic
        )
        values = meta(5, heads, size, dtype=MODEL_DTYPES[dtype])
        call = partial(fp4_rows.finish, paged_arguments(config, 5, 2, 8), config, values)
        yield from record(f"{heads} {config.encode()}", "sm_90", call, SPILLS)


def _linears() -> Iterator[Launch]:
    """Yield products of few rows: by either kernel, of values and of codes, with each kind of scales."""
    for rows, features, dtype in itertools.product((16, 32), (512, small_m.HEAD), DTYPES):
        x, weight = (meta(count, 4096, dtype=MODEL_DTYPES[dtype]) for count in (rows, features))
        call = partial(small_m.small_m_linear, LinearArgs(x, weight, None, None, dtype))
        yield from record(f"{dtype} {rows}", "sm_90", call)
    # Many features, long rows, and one tile whose only chunk is not whole.
    for dtype, (features, columns) in itertools.product(DTYPES, ((6144, 4096), (4096, 14336), (16, 192))):
        x, weight = (meta(count, columns, dtype=MODEL_DTYPES[dtype]) for count in (2, features))
        call = partial(streamed_linear, LinearArgs(x, weight, None, None, dtype))
        yield from record(f"{dtype} {features} x {columns}", "sm_90", call, SPILLS)
    for by_row, by_feature in itertools.product((False, True), repeat=2):
        x, weight = (meta(count, 4096, dtype=torch.uint8).view(E4M3) for count in (2, 6144))
        scales = meta(*((2, 1) if by_row else (1,))), meta(6144 if by_feature else 1)
        call = partial(streamed_linear, LinearArgs(x, weight, *scales, "bfloat16"))
        yield from record(f"e4m3 {by_row} {by_feature}", "sm_90", call, SPILLS)
