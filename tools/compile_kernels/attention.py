"""Launches of the general kernels: attention, cache updates, what surrounds other libraries, and the encoder kernel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch

from tools.compile_kernels.launches import (
    TARGETS,
    Launch,
    cache_arguments,
    integers,
    meta,
    paged_arguments,
    record,
    shared_arguments,
)
from vattn.config.attention import AttentionConfig
from vattn.config.dcp import DCPShard
from vattn.config.rope import RopeConfig
from vattn.kernels.triton import sample
from vattn.kernels.triton.attention import (
    advance_step,
    dcp_rows,
    dense_decode,
    encoder,
    external_rows,
    launch,
    merge,
    planned_rows,
    round_query,
)
from vattn.kernels.triton.cache import packed_update
from vattn.kernels.triton.cache.rope_update import rope_update
from vattn.kernels.triton.lora import launch_lora
from vattn.ops.arguments import AdvanceArgs, CacheUpdateArgs, MergeArgs, RopeUpdateArgs, VarlenAttentionArgs
from vattn.ops.lora_arguments import LoRAArgs
from vattn.quantization.formats import KV_FORMATS, MODEL_DTYPES, OUTPUT_FACTORS, OUTPUT_FORMATS, QUERY_LOADS

DCP = {"context_parallel": True, "context_rank": 1, "context_world": 4, "context_interleave": 16}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window-sinks-lse": {"sliding_window": 128, "sinks": True, "lse": True},
    "cap-alibi-flags": {"logits_soft_cap": 30.0, "alibi": "linear", "causality": "per_request", "sliding_window": 96},
    "chunk-tree-sqrt": {"sliding_window": 64, "chunk_lookback": 1, "tree_bias": True, "alibi": "sqrt", "sinks": True},
    "ranges": {"mm_prefix": "clamped", "sliding_window": 64, "causality": "bidirectional", "lse": True},
    "context": {"context_only": True, "sliding_window": 96, "lse": True},
    "dcp": {**DCP, "sliding_window": 96, "alibi": "linear", "lse": True},
    "cross": {"attn_type": "encoder_decoder", "causality": "bidirectional", "logits_soft_cap": 30.0},
}
SHAPES: dict[str, dict[str, Any]] = {
    "32x128": {"num_heads": 32, "num_kv_heads": 8, "head_size": 128},
    "8x64": {"num_heads": 8, "num_kv_heads": 8, "head_size": 64, "kv_cache_layout": "HND"},
    "5x72": {"num_heads": 10, "num_kv_heads": 2, "head_size": 72, "block_size": 24},
    "16x192-128": {"num_heads": 16, "num_kv_heads": 1, "head_size": 192, "head_size_v": 128, "block_size": 64},
    "8x256": {"num_heads": 8, "num_kv_heads": 4, "head_size": 256, "block_size": 32},
    "8x512": {"num_heads": 8, "num_kv_heads": 1, "head_size": 512},
    "varlen-4x80": {"num_heads": 4, "num_kv_heads": 4, "head_size": 80, "block_size": 0},
}
STEPS: dict[str, tuple[int, int]] = {
    "decode-split": (2, 2),
    "decode": (256, 256),
    "extend": (64, 16),
    "prefill": (2048, 2),
}
"""Query tokens and requests of a step."""

CACHES = (("auto", "none"), ("fp8_e4m3", "tensor"), ("fp8_e5m2", "head"))
ROPES: dict[str, tuple[RopeConfig, bool]] = {
    "neox": (RopeConfig(64), False),
    "interleaved-full": (RopeConfig(64, "interleaved"), True),
    "partial-norm": (RopeConfig(48, norm="rms", norm_eps=1e-6, round_query=False), True),
    "interleaved-norm": (RopeConfig(24, "interleaved", "rms_one_plus", 1e-6), False),
}
"""Rotations that every head size of `SHAPES` has room for, and whether tables have a factor for every column."""


def all_launches() -> Iterator[Launch]:
    """Yield every case, some of them equal to the compiler."""
    for target in TARGETS:
        yield from _small_kernels(target)
        yield from _adapters(target)
        yield from _dense_decodes(target)
        for name in MODEL_DTYPES:
            yield from _caches(target, name)
            yield from _packed_formats(target, name)
            yield from _rounded_queries(target, name)
            for output, step in itertools.product(OUTPUT_FORMATS, ("decode-split", "prefill")):
                config = _config(name, CACHES[0], "32x128", output_format=output, lse=True, sinks=True)
                yield from _attention(f"{name} {step} {output}", target, config, *STEPS[step])
            for output, arithmetic in zip(
                ("fp8_per_token", "fp8_group64", "int8_per_token"), OUTPUT_FACTORS[1:], strict=True
            ):
                factor = {"output_format": output, "output_arithmetic": f"approximate_{arithmetic}"}
                config = _config(
                    name, CACHES[0], "32x128", **factor, output_floor="maximum", output_min_scale=1e-4, lse=True
                )
                yield from _attention(f"{name} {output} {arithmetic}", target, config, *STEPS["decode-split"])
        for dtype, cache in itertools.product(MODEL_DTYPES, CACHES):
            yield from _formats(target, dtype, cache)
            yield from _long_prefills(target, dtype, cache)
            # fp16 and bf16 differ in little: both meet the most common shape, one of them the others.
            for shape in SHAPES if dtype != "float16" else ("32x128",):
                yield from _features(target, dtype, cache, shape)
        if target.startswith("sm_"):
            yield from _encoders(target)


def _adapters(target: str) -> Iterator[Launch]:
    """Yield products of adapters: of merged and single layers, in decodes and prompts, of small and large ranks."""
    cases = itertools.product(MODEL_DTYPES, ((4096, 1024, 1024), (4096,)), (32, 2048), (16, 64))
    for dtype, sizes, rows, rank in cases:
        x, output = (meta(rows, width, dtype=MODEL_DTYPES[dtype]) for width in (4096, sum(sizes)))
        a = meta(8, len(sizes) * rank, 4096, dtype=MODEL_DTYPES[dtype])
        b = meta(8, sum(sizes), rank, dtype=MODEL_DTYPES[dtype])
        lists = integers(8192), integers(264, 3)
        args = LoRAArgs(x, output, a, b, meta(8, len(sizes)), *lists, list(sizes))
        yield from record(f"{dtype} {sizes} {rows} {rank}", target, partial(launch_lora, args, None, TARGETS[target]))


def _dense_decodes(target: str) -> Iterator[Launch]:
    """Yield single rows over dense keys, of common and wide heads."""
    shapes = (32, 8, 128), (8, 8, 64), (16, 1, 80), (8, 4, 256)
    for dtype, (heads, kv_heads, width) in itertools.product(("float16", "bfloat16"), shapes):
        query, key = (meta(2, *shape, width, dtype=MODEL_DTYPES[dtype]) for shape in ((heads, 1), (kv_heads, 4096)))
        sinks, cap = (meta(heads, dtype=MODEL_DTYPES[dtype]), 30.0) if width == 80 else (None, None)
        call = partial(dense_decode.decode, query, key, key, integers(2), 0.088, None, cap, sinks)
        yield from record(f"{dtype} {heads} {kv_heads} {width}", target, call)


def _config(dtype: str, cache: tuple[str, str], shape: str, **changes: Any) -> AttentionConfig:
    cached, sizes = dtype if cache[0] == "auto" else cache[0], SHAPES[shape]
    values = {"dtype": dtype, "kv_cache_dtype": cached, "kv_scale": cache[1], "head_size_v": sizes["head_size"]}
    return AttentionConfig(**{**values, "scale": 0.088, **sizes, **changes})


def _varlen(config: AttentionConfig, num_tokens: int, num_reqs: int) -> VarlenAttentionArgs:
    dtype = KV_FORMATS[config.kv_cache_dtype].value_dtype
    return VarlenAttentionArgs(
        key=meta(num_tokens, config.num_kv_heads, config.head_size, dtype=dtype),
        value=meta(num_tokens, config.num_kv_heads, config.head_size_v, dtype=dtype),
        kv_start_loc=integers(num_reqs + 1),
        **shared_arguments(config, num_tokens, num_reqs),
    )


def _attention(name: str, target: str, config: AttentionConfig, num_tokens: int, num_reqs: int) -> Iterator[Launch]:
    limits = TARGETS[target]
    if config.block_size == 0:
        args = _varlen(config, num_tokens, num_reqs)
        return record(name, target, lambda: launch.packed_attention(args, config, limits=limits))
    paged = paged_arguments(config, num_tokens, num_reqs, 4096 // config.block_size, 1024)
    return record(name, target, lambda: launch.paged_attention(paged, config, limits=limits))


def _update(name: str, target: str, config: AttentionConfig) -> Iterator[Launch]:
    scale = None if config.kv_scale == "none" else meta(config.num_kv_heads)
    args = CacheUpdateArgs(
        meta(64, config.num_kv_heads, config.head_size, dtype=MODEL_DTYPES[config.dtype]),
        meta(64, config.num_kv_heads, config.head_size_v, dtype=MODEL_DTYPES[config.dtype]),
        *cache_arguments(config, 1024), meta(64, dtype=torch.int64),
        scale, scale, config.encode(),
    )  # fmt: skip
    return record(name, target, lambda: launch.update_kv_cache(args, config, TARGETS[target]))


def _rope(name: str, target: str, config: AttentionConfig, kind: str, next_may_start: bool = False) -> Iterator[Launch]:
    (rope, full), dtype, tokens = ROPES[kind], MODEL_DTYPES[config.dtype], 2 if next_may_start else 64
    heads, size, slots = config.num_heads, config.head_size, meta(tokens, dtype=torch.int64)
    out_dtype = torch.float8_e4m3fn if config.query_format != "none" else dtype
    table = meta(4096, rope.rotary_dim if full else rope.rotary_dim // 2, dtype=dtype if full else torch.float32)
    weight = None if rope.norm == "none" else meta(size, dtype=dtype)
    q_scale, kv_scale = (
        None if scale == "none" else meta(config.num_kv_heads) for scale in (config.query_format, config.kv_scale)
    )
    args = RopeUpdateArgs(
        meta(tokens, heads, size, dtype=dtype), meta(tokens, config.num_kv_heads, size, dtype=dtype),
        meta(tokens, config.num_kv_heads, config.head_size_v, dtype=dtype), table, table, slots,
        meta(tokens, heads, size, dtype=out_dtype),
        *cache_arguments(config, 1024), slots, weight, weight, q_scale, kv_scale,
        kv_scale, rope.encode(), config.encode(),
    )  # fmt: skip
    return record(name, target, partial(rope_update, args, rope, config, TARGETS[target], None, next_may_start))


def _small_kernels(target: str) -> Iterator[Launch]:
    for tokens, from_prefills in itertools.product((torch.int32, torch.int64), (False, True)):
        rows = {name: integers(8) for name in AdvanceArgs._fields[:9]}
        rows.update((name, meta(8, dtype=torch.int64)) for name in ("positions", "slot_mapping"))
        rows.update((name, meta(8, dtype=tokens)) for name in ("input_tokens", "input_positions", "sampled"))
        rows["block_table"] = integers(8, 5)
        step = AdvanceArgs(**rows, block_size=16, num_queries=8, from_prefills=from_prefills)
        yield from record(f"{tokens} {from_prefills}", target, partial(advance_step.advance, step))
    yield from _external_rows(target)
    yield from _planned_rows(target)
    # Shards of few rows and of many, interleaved by one token and by blocks.
    for count, reqs, width, shard in ((2, 2, 5, DCPShard(0, 2, 1)), (300, 200, 2000, DCPShard(3, 4, 16))):
        starts, lengths, table = integers(reqs + 1), integers(reqs), integers(reqs, width)
        call = partial(dcp_rows.write_rows, count, starts, lengths, lengths, table, shard, 16)
        yield from record(f"{count} x {width}", target, call)
    for name, dtype in MODEL_DTYPES.items():
        out, lse = meta(64, 8, 128, dtype=dtype), meta(64, 8)
        merged = MergeArgs(out, lse, out, lse, out, lse)
        yield from record(f"{name} 128", target, partial(merge.merge_attn_states, merged))
    for (name, dtype), all_of_them in itertools.product(MODEL_DTYPES.items(), (False, True)):
        rows, numbers = meta(8, dtype=torch.int64), meta(8, dtype=torch.float64) if all_of_them else None
        call = partial(
            sample.sample, meta(16, 128256, dtype=dtype), rows, meta(8, 1), rows.bool() if all_of_them else None,
            rows if all_of_them else None, numbers, numbers, rows, meta(16, dtype=torch.int64),
            *meta(2, 16, dtype=torch.int64),
        )  # fmt: skip
        yield from record(f"{name} {all_of_them}", target, call)
    for name, dtype in MODEL_DTYPES.items():
        call = partial(sample.normalise, meta(8, 128256, dtype=dtype), meta(8, dtype=torch.int64))
        yield from record(f"{name} 128256", target, call)


def _external_rows(target: str) -> Iterator[Launch]:
    """Yield what surrounds another library's kernel: few requests and many, narrow tables and wide ones."""
    for reqs, width in ((2, 5), (300, 2000)):
        starts, lengths, table, rows = integers(reqs + 1), integers(reqs), integers(reqs, width), integers(reqs)
        for causal in (False, True):
            call = partial(external_rows.write_rows, starts, lengths, rows, rows, starts, causal)
            yield from record(f"{reqs} x {width}", target, call)
        for request in (None, rows):
            call = partial(external_rows.table_of_rows, table, request, lengths, 99, 16)
            yield from record(f"{reqs} x {width}", target, call)
    for dtype, (heads, size) in itertools.product((torch.float16, torch.bfloat16), ((1, 72), (32, 256))):
        found, starts = meta(heads, 64).transpose(0, 1), integers(9)
        for lse in (None, meta(64, heads)):
            call = partial(external_rows.finish_rows, meta(64, heads, size, dtype=dtype), lse, found, starts)
            yield from record(f"{dtype} {heads}x{size}", target, call)


def _planned_rows(target: str) -> Iterator[Launch]:
    """Yield the end of a planned FlashInfer call: with and without logs, scales, sinks and an LSE to write."""
    kind, logs, sinks, lse = integers(64), meta(64, 32), meta(32), meta(64, 32)
    ends = (
        (logs, None, None, None), (logs, meta(1), None, lse), (logs, meta(8), sinks, lse), (None, None, None, None),
    )  # fmt: skip
    for dtype, width in ((torch.float16, 64), (torch.bfloat16, 128), (torch.bfloat16, 256)):
        output = meta(64, 32, width, dtype=dtype)
        for found, scale, sink, log in ends:
            call = partial(planned_rows.finish_planned, output, log, found, kind, scale, sink, 4)
            yield from record(f"{dtype} {width}", target, call)


def _caches(target: str, dtype: str) -> Iterator[Launch]:
    """Yield updates of plain and FP8 caches, without and with RoPE."""
    for cache, shape in itertools.product(CACHES, SHAPES):
        config, label = _config(dtype, cache, shape), f"{dtype}/{cache[0]} {shape}"
        if not config.block_size:
            continue
        yield from _update(label, target, config)
        if cache[0] != "auto":
            config = config.replace(query_format="fp8_e4m3", query_scale=cache[1])
        if dtype == "bfloat16" or shape == "32x128":
            for kind in ROPES:
                yield from _rope(f"{label} {kind}", target, config, kind)
        if target == "sm_90" and shape == "32x128":
            yield from _rope(f"{label} overlapped", target, config, "neox", next_may_start=True)


def _packed_formats(target: str, dtype: str) -> Iterator[Launch]:
    """Yield stores of every packed format, and its loads in every kind of step; features and outputs alternate."""
    features = itertools.cycle(FEATURES)
    shapes: tuple[str, ...] = ("32x128", "8x64", "8x256") if dtype != "float16" else ("32x128",)
    for fmt, shape in itertools.product((fmt for fmt in KV_FORMATS.values() if fmt.packed), shapes):
        config = _config(dtype, (fmt.name, "head" if fmt.quantised else "none"), shape)
        yield from _update(f"{dtype}/{fmt.name} {shape}", target, config)
        with mock.patch.object(
            packed_update, "has_words", lambda *_: False
        ):  # As of a cache that begins inside a word.
            yield from _update(f"{dtype}/{fmt.name} {shape} bytes", target, config)
        for step, counts in STEPS.items():
            feature = next(features)
            label = f"{dtype}/{fmt.name} {shape} {step} {feature}"
            yield from _attention(label, target, config.replace(**FEATURES[feature]), *counts)


def _rounded_queries(target: str, dtype: str) -> Iterator[Launch]:
    for shape, load in itertools.product(("32x128", "varlen-4x80"), QUERY_LOADS[1:]):
        config = _config(dtype, CACHES[0], shape, query_format="fp8_e4m3", query_scale="head", query_load=load)
        call = partial(round_query.round_query, _varlen(config, 64, 2), config)
        yield from record(f"{dtype} {shape} {load}", target, call)


def _formats(target: str, dtype: str, cache: tuple[str, str]) -> Iterator[Launch]:
    static = _config(dtype, cache, "32x128", output_format="fp8_static")
    quantised = static.replace(query_format="fp8_e4m3", query_scale="head")
    load = "divide" if dtype == "bfloat16" else "multiply"
    kinds = {"fp8_static": static, "fp8-query": quantised, f"query-{load}": quantised.replace(query_load=load)}
    for (step, counts), (kind, config) in itertools.product(STEPS.items(), kinds.items()):
        yield from _attention(f"{dtype}/{cache[0]} {step} {kind}", target, config, *counts)


def _long_prefills(target: str, dtype: str, cache: tuple[str, str]) -> Iterator[Launch]:
    for shape, feature in itertools.product(("32x128", "8x64", "varlen"), ("plain", "window-sinks-lse")):
        config = _config(dtype, cache, "32x128" if shape == "varlen" else shape, **FEATURES[feature])
        if shape == "varlen":
            config = config.replace(block_size=0)
        yield from _attention(f"{dtype}/{cache[0]} {shape} long {feature}", target, config, 2048, 2)
    longest = _config(dtype, cache, "32x128", block_size=0)
    yield from _attention(f"{dtype}/{cache[0]} varlen longest", target, longest, 8192, 1)


def _features(target: str, dtype: str, cache: tuple[str, str], shape: str) -> Iterator[Launch]:
    features = FEATURES if shape in ("32x128", "5x72") else ("plain", "window-sinks-lse")
    for (step, counts), feature in itertools.product(STEPS.items(), features):
        config = _config(dtype, cache, shape, **FEATURES[feature])
        yield from _attention(f"{dtype}/{cache[0]} {shape} {step} {feature}", target, config, *counts)


def _encoders(target: str) -> Iterator[Launch]:
    """Yield every head size of the encoder kernel, on views of one projection and in FP8, some with FP8 output."""
    fp8 = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor", "query_format": "fp8_e4m3", "query_scale": "tensor"}
    for size, dtype, formats in itertools.product(encoder.HEAD_SIZES, ("bfloat16", "float16"), ({}, fp8)):
        base = AttentionConfig(16, 8, size, size, size**-0.5, dtype, dtype, block_size=0, causality="bidirectional")
        variants = [("none", "decoder")]
        if size in (72, 128):
            variants += [("fp8_static", "decoder"), ("none", "encoder_decoder")]
        for output, kind in variants:
            config = base.replace(**formats, output_format=output, attn_type=kind)
            args = _varlen(config, 4096, 8)
            if not formats:
                heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
                query, key, value = meta(4096, sum(heads), size, dtype=MODEL_DTYPES[dtype]).split(heads, dim=1)
                args = args._replace(query=query, key=key, value=value)
            call = partial(encoder.attend, args, config, TARGETS[target])
            yield from record(f"{dtype} {size} {len(formats)} {output} {kind}", target, call)
