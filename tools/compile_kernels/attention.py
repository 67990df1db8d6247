"""What `compile_all` compiles: launches recorded from the real launchers, on tensors without storage."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tools.compile_kernels import mla_cases
from vattn.cache.layout import kv_cache_dtype, kv_cache_shape
from vattn.config.attention import AttentionConfig
from vattn.config.dcp import Stripe
from vattn.config.rope import RopeConfig
from vattn.kernels.triton import linear
from vattn.kernels.triton.attention import advance_step, launch, merge, planned_rows, round_query
from vattn.kernels.triton.attention import dcp_rows as striped_rows
from vattn.kernels.triton.attention import external_rows as library_rows
from vattn.kernels.triton.cache import packed_update
from vattn.kernels.triton.cache import rope_update as rope_cache_update
from vattn.kernels.triton.common.tiles import Limits
from vattn.kernels.variants import ALLOWED, using
from vattn.ops.advance_arguments import AdvanceArgs
from vattn.ops.arguments import AttentionArgs, CacheUpdateArgs, MergeArgs, RopeUpdateArgs, VarlenAttentionArgs
from vattn.ops.linear_arguments import LinearArgs
from vattn.quantization.formats import KV_FORMATS, MODEL_DTYPES, OUTPUT_FORMATS, QUERY_LOADS

TARGETS: dict[str, Limits] = {
    "sm_80": Limits(108, 163 << 10, native_fp8=False, warpgroups=False),
    "sm_90": Limits(132, 227 << 10, native_fp8=True, hopper=True),
    "sm_100": Limits(148, 227 << 10, native_fp8=True),
    "gfx942": Limits(304, 64 << 10, native_fp8=False, most_rows=32, warpgroups=False),
}
"""Targets that every kernel of this package declares, with what its launcher needs to know of them."""


@dataclass
class Launch:
    """One recorded kernel launch.

    Attributes:
        name: what a person sees.
        target: name in `TARGETS`.
        kernel: the jitted function.
        arguments: by parameter name.
        options: compile options such as `num_warps`.
    """

    name: str
    target: str
    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


class _Recorder:
    """Stand in for a jitted kernel and keep what it is launched with."""

    def __init__(self, kernel: Any, found: list[tuple[Any, dict[str, Any]]]) -> None:
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def record(*args: Any, **kwargs: Any) -> None:
            self.found.append((self.kernel, {**dict(zip(self.kernel.arg_names, args, strict=False)), **kwargs}))

        return record


def record(name: str, target: str, call: Callable[[], object]) -> Iterator[Launch]:
    """Yield the launches that `call` makes, instead of making them."""
    found: list[tuple[Any, dict[str, Any]]] = []
    with ExitStack() as stack:
        for module, kernel in (
            (launch, "attention_kernel"),
            (launch, "finish_kernel"),
            (launch, "cache_update_kernel"),
            (packed_update, "packed_update_kernel"),
            (merge, "merge_kernel"),
            (rope_cache_update, "rope_update_kernel"),
            (round_query, "round_query_kernel"),
            *mla_cases.KERNELS,
            (advance_step, "advance_step_kernel"),
            (linear, "few_rows_kernel"),
            (library_rows, "rows_kernel"),
            (library_rows, "table_kernel"),
            (library_rows, "finish_rows_kernel"),
            (planned_rows, "planned_rows_kernel"),
            (striped_rows, "striped_rows_kernel"),
        ):
            stack.enter_context(mock.patch.object(module, kernel, _Recorder(getattr(module, kernel), found)))
        call()
    for kernel, given in found:
        arguments = {key: value for key, value in given.items() if key in kernel.arg_names}
        options = {key: value for key, value in given.items() if key not in arguments}
        yield Launch(f"{kernel.__name__} {name}", target, kernel, arguments, options)


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _shared_arguments(config: AttentionConfig, num_tokens: int, num_reqs: int) -> dict[str, Any]:
    """Return what the paged and the packed op have in common."""
    fmt = OUTPUT_FORMATS[config.output_format]
    scale_shape = fmt.block_scale_shape(num_tokens, config.num_heads * config.head_size_v)
    query_dtype = torch.float8_e4m3fn if config.takes_fp8_query else MODEL_DTYPES[config.dtype]
    columns, container = fmt.output_columns(config.head_size_v), fmt.container or MODEL_DTYPES[config.dtype]

    def scale(kind: str) -> Tensor | None:
        return None if kind == "none" else _meta(config.num_kv_heads if kind == "head" else 1)

    return {
        "query": _meta(num_tokens, config.num_heads, config.head_size, dtype=query_dtype),
        "query_start_loc": _meta(num_reqs + 1, dtype=torch.int32),
        "output": _meta(num_tokens, config.num_heads, columns, dtype=container),
        "output_block_scale": (
            None if scale_shape is None else _meta(*scale_shape, dtype=fmt.block_scale_dtype or torch.float32)
        ),
        "lse": _meta(num_tokens, config.num_heads) if config.lse else None,
        "output_scale": _meta(1) if fmt.static_scale else None,
        "q_scale": scale(config.query_scale),
        "k_scale": scale(config.kv_scale),
        "v_scale": scale(config.kv_scale),
        "alibi_slopes": _meta(config.num_heads) if config.alibi != "none" else None,
        "sinks": _meta(config.num_heads) if config.sinks else None,
        "causal_flags": _meta(num_reqs, dtype=torch.int32) if config.causality == "per_request" else None,
        "bias": _meta(2, 5, 5) if config.tree_bias else None,
        "tree_id": _meta(num_reqs, dtype=torch.int32) if config.tree_bias else None,
        "mm_ranges": _meta(num_reqs, 3, 2, dtype=torch.int32) if config.mm_prefix != "none" else None,
        "plan": [],
        "workspace": None,
        "config": config.encode(),
    }


def attention_launches(
    name: str, target: str, config: AttentionConfig, num_tokens: int, num_reqs: int
) -> Iterator[Launch]:
    """Yield the launches of one attention step; packed keys if the config has no block size."""
    shared, limits = _shared_arguments(config, num_tokens, num_reqs), TARGETS[target]
    if config.block_size == 0:
        dtype = KV_FORMATS[config.kv_cache_dtype].value_dtype
        packed = VarlenAttentionArgs(
            key=_meta(num_tokens, config.num_kv_heads, config.head_size, dtype=dtype),
            value=_meta(num_tokens, config.num_kv_heads, config.head_size_v, dtype=dtype),
            kv_start_loc=_meta(num_reqs + 1, dtype=torch.int32),
            **shared,
        )
        return record(name, target, lambda: launch.packed_attention(packed, config, limits=limits))
    paged = AttentionArgs(
        kv_cache=_meta(*kv_cache_shape(config, 1024), dtype=kv_cache_dtype(config)),
        seq_lens=_meta(num_reqs, dtype=torch.int32),
        block_table=_meta(num_reqs, 4096 // config.block_size, dtype=torch.int32),
        local_seq_lens=_meta(num_reqs, dtype=torch.int32) if config.context_parallel else None,
        **shared,
    )
    return record(name, target, lambda: launch.paged_attention(paged, config, limits=limits))


def update_launches(name: str, target: str, config: AttentionConfig) -> Iterator[Launch]:
    """Yield the launch of one cache update."""
    args = CacheUpdateArgs(
        _meta(64, config.num_kv_heads, config.head_size, dtype=MODEL_DTYPES[config.dtype]),
        _meta(64, config.num_kv_heads, config.head_size_v, dtype=MODEL_DTYPES[config.dtype]),
        _meta(*kv_cache_shape(config, 1024), dtype=kv_cache_dtype(config)),
        _meta(64, dtype=torch.int64),
        None if config.kv_scale == "none" else _meta(config.num_kv_heads),
        None if config.kv_scale == "none" else _meta(config.num_kv_heads),
        config.encode(),
    )
    return record(name, target, lambda: launch.update_kv_cache(args, config, TARGETS[target]))


ROPES: dict[str, tuple[RopeConfig, bool]] = {
    "neox": (RopeConfig(64), False),
    "interleaved-full": (RopeConfig(64, "interleaved"), True),
    "partial-norm": (RopeConfig(48, norm="rms", norm_eps=1e-6, round_query=False), True),
    "interleaved-norm": (RopeConfig(24, "interleaved", "rms_one_plus", 1e-6), False),
}
"""Rotations that every head size of `SHAPES` has room for, and whether tables have a factor for every column."""


def rope_launches(
    name: str, target: str, config: AttentionConfig, rope: RopeConfig, full: bool, tokens: int = 64
) -> Iterator[Launch]:
    """Yield the launch of one cache update with RoPE."""
    dtype, heads, size = MODEL_DTYPES[config.dtype], config.num_heads, config.head_size
    out_dtype = torch.float8_e4m3fn if config.query_format != "none" else dtype
    table = _meta(4096, rope.rotary_dim if full else rope.rotary_dim // 2, dtype=dtype if full else torch.float32)
    weight = None if rope.norm == "none" else _meta(size, dtype=dtype)
    kv_scale = None if config.kv_scale == "none" else _meta(config.num_kv_heads)
    args = RopeUpdateArgs(
        _meta(tokens, heads, size, dtype=dtype),
        _meta(tokens, config.num_kv_heads, size, dtype=dtype),
        _meta(tokens, config.num_kv_heads, config.head_size_v, dtype=dtype),
        table,
        table,
        _meta(tokens, dtype=torch.int64),
        _meta(tokens, heads, size, dtype=out_dtype),
        _meta(*kv_cache_shape(config, 1024), dtype=kv_cache_dtype(config)),
        _meta(tokens, dtype=torch.int64),
        weight,
        weight,
        None if config.query_format == "none" else _meta(config.num_kv_heads),
        kv_scale,
        kv_scale,
        rope.encode(),
        config.encode(),
    )
    limits = TARGETS[target]
    return record(name, target, lambda: rope_cache_update.rope_update(args, rope, config, limits))


def merge_launches(name: str, target: str, dtype: torch.dtype, width: int) -> Iterator[Launch]:
    """Yield the launch of one merge."""
    args = MergeArgs(
        _meta(64, 8, width, dtype=dtype), _meta(64, 8), _meta(64, 8, width, dtype=dtype), _meta(64, 8),
        _meta(64, 8, width, dtype=dtype), _meta(64, 8),
    )  # fmt: skip
    return record(name, target, lambda: merge.merge_attn_states(args))


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window-sinks-lse": {"sliding_window": 128, "sinks": True, "lse": True},
    "cap-alibi-flags": {"logits_soft_cap": 30.0, "alibi": "linear", "causality": "per_request", "sliding_window": 96},
    "chunk-tree-sqrt": {"sliding_window": 64, "chunk_lookback": 1, "tree_bias": True, "alibi": "sqrt", "sinks": True},
    "ranges": {"mm_prefix": "clamped", "sliding_window": 64, "causality": "bidirectional", "lse": True},
    "context": {"context_only": True, "sliding_window": 96, "lse": True},
    "stripe": {
        "context_parallel": True,
        "context_rank": 1,
        "context_world": 4,
        "context_interleave": 16,
        "sliding_window": 96,
        "alibi": "linear",
        "lse": True,
    },
    "cross": {"attn_type": "encoder_decoder", "causality": "bidirectional", "logits_soft_cap": 30.0},
}
SHAPES: dict[str, dict[str, Any]] = {
    "32x128": {"num_heads": 32, "num_kv_heads": 8, "head_size": 128},
    "8x64": {"num_heads": 8, "num_kv_heads": 8, "head_size": 64, "kv_cache_layout": "HND"},
    "5x72": {"num_heads": 10, "num_kv_heads": 2, "head_size": 72, "block_size": 24},
    "16x192-128": {"num_heads": 16, "num_kv_heads": 1, "head_size": 192, "head_size_v": 128, "block_size": 64},
    "8x256": {"num_heads": 8, "num_kv_heads": 4, "head_size": 256, "block_size": 32},
    "8x512": {"num_heads": 8, "num_kv_heads": 1, "head_size": 512},
    "packed-4x80": {"num_heads": 4, "num_kv_heads": 4, "head_size": 80, "block_size": 0},
}
STEPS: dict[str, tuple[int, int]] = {
    "decode-split": (2, 2),
    "decode": (256, 256),
    "extend": (64, 16),
    "prefill": (2048, 2),
}
CACHES = (("auto", "none"), ("fp8_e4m3", "tensor"), ("fp8_e5m2", "head"))


def _config(dtype: str, cache: tuple[str, str], shape: dict[str, Any], **changes: Any) -> AttentionConfig:
    values: dict[str, Any] = {
        "dtype": dtype,
        "kv_cache_dtype": dtype if cache[0] == "auto" else cache[0],
        "kv_scale": cache[1],
    }
    values |= {"head_size_v": shape["head_size"], "scale": 0.088, **shape, **changes}
    return AttentionConfig(**values)


def all_launches() -> Iterator[Launch]:
    """Yield every case, some of them equal to the compiler."""
    for target in TARGETS:
        yield from _small_kernels(target)
        yield from mla_cases.mla_launches(record, target, TARGETS[target])
    for target, dtype, cache in itertools.product(TARGETS, MODEL_DTYPES, CACHES):
        yield from _formats(target, dtype, cache)
        yield from _long_prefills(target, dtype, cache)
    for target, dtype, cache, shape in itertools.product(TARGETS, MODEL_DTYPES, CACHES, SHAPES):
        # fp16 and bf16 differ in little: one of them meets every shape, both the most common one.
        if dtype != "float16" or shape == "32x128":
            yield from _features(target, dtype, cache, shape)


def _advances(target: str) -> Iterator[Launch]:
    for tokens, from_prefills in itertools.product((torch.int32, torch.int64), (False, True)):
        rows = {name: _meta(8, dtype=torch.int32) for name in AdvanceArgs._fields[:9]}
        rows.update((name, _meta(8, dtype=torch.int64)) for name in ("positions", "slot_mapping"))
        rows.update((name, _meta(8, dtype=tokens)) for name in ("input_tokens", "input_positions", "sampled"))
        table = _meta(8, 5, dtype=torch.int32)
        args = AdvanceArgs(**rows, block_table=table, block_size=16, num_queries=8, from_prefills=from_prefills)
        yield from record(f"{tokens} {from_prefills}", target, partial(advance_step.advance, args))


def _products(target: str) -> Iterator[Launch]:
    """Every cut, on the target whose GPUs run the kernel."""
    if target != "sm_90":
        return
    for rows, features, dtype in itertools.product((16, 32), (512, linear.HEAD), MODEL_DTYPES):
        if dtype != "float32":
            x, weight = (_meta(count, 4096, dtype=MODEL_DTYPES[dtype]) for count in (rows, features))
            args = LinearArgs(x, weight, None, None, dtype)
            yield from record(f"{dtype} {rows}", target, partial(linear.few_rows_linear, args))


def _library_rows(target: str) -> Iterator[Launch]:
    """What surrounds another library's kernel, for few requests and many, narrow tables and wide ones."""
    for reqs, width in ((2, 5), (300, 2000)):
        starts, lengths = (_meta(reqs + more, dtype=torch.int32) for more in (1, 0))
        table, rows = _meta(reqs, width, dtype=torch.int32), _meta(reqs, dtype=torch.int32)
        calls: list[Callable[[], object]] = [
            partial(library_rows.write_rows, starts, lengths, rows, rows, starts, causal) for causal in (False, True)
        ]
        calls += [partial(library_rows.table_of_rows, table, request, lengths, 99, 16) for request in (None, rows)]
        for call in calls:
            yield from record(f"{reqs} x {width}", target, call)
    for dtype, (heads, head_size) in itertools.product((torch.float16, torch.bfloat16), ((1, 72), (32, 256))):
        found, starts = _meta(heads, 64).transpose(0, 1), _meta(9, dtype=torch.int32)
        for lse in (None, _meta(64, heads)):
            call = partial(library_rows.finish_rows, _meta(64, heads, head_size, dtype=dtype), lse, found, starts)
            yield from record(f"{dtype} {heads}x{head_size}", target, call)


def _planned_rows(target: str) -> Iterator[Launch]:
    """The end of a planned FlashInfer call: with and without logs, scales, sinks and a log-sum-exp to write."""
    kind, logs = _meta(64, dtype=torch.int32), _meta(64, 32)
    sinks, lse = _meta(32), _meta(64, 32)
    ends = (
        (logs, None, None, None),
        (logs, _meta(1), None, lse),
        (logs, _meta(8), sinks, lse),
        (None, None, None, None),
    )
    for dtype, width in ((torch.float16, 64), (torch.bfloat16, 128), (torch.bfloat16, 256)):
        output = _meta(64, 32, width, dtype=dtype)
        for found, scale, sink, log in ends:
            call = partial(planned_rows.finish_planned, output, log, found, kind, scale, sink, 4)
            yield from record(f"{dtype} {width}", target, call)


def _striped_rows(target: str) -> Iterator[Launch]:
    """Rows of striped caches as requests: few and many, interleaved by one token and by blocks."""
    for rows, reqs, width, stripe in ((2, 2, 5, Stripe(0, 2, 1)), (300, 200, 2000, Stripe(3, 4, 16))):
        lengths, starts = (_meta(reqs + more, dtype=torch.int32) for more in (0, 1))
        table = _meta(reqs, width, dtype=torch.int32)
        call = partial(striped_rows.write_rows, rows, starts, lengths, lengths, table, stripe, 16)
        yield from record(f"{rows} x {width}", target, call)


def _small_kernels(target: str) -> Iterator[Launch]:
    yield from _advances(target)
    yield from _products(target)
    yield from _striped_rows(target)
    yield from _library_rows(target)
    yield from _planned_rows(target)
    for name, dtype in MODEL_DTYPES.items():
        yield from merge_launches(f"{name} 128", target, dtype, 128)
        yield from _rounded_queries(target, name)
        yield from _packed_formats(target, name)
        for cache, shape in itertools.product(CACHES, SHAPES):
            config = _config(name, cache, SHAPES[shape])
            if config.block_size:
                yield from update_launches(f"{name}/{cache[0]} {shape}", target, config)
                quantised = cache[0] != "auto"
                asked = {"query_format": "fp8_e4m3", "query_scale": cache[1]} if quantised else {}
                kinds = ROPES if name == "bfloat16" or shape == "32x128" else {}
                for kind, (rope, full) in kinds.items():
                    label = f"{name}/{cache[0]} {shape} {kind}"
                    yield from rope_launches(label, target, config.replace(**asked), rope, full)
                for way in ALLOWED["rope_launch"][1:] if target == "sm_90" and kinds and shape == "32x128" else ():
                    with using(rope_launch=way):
                        few = config.replace(backend="TRITON_ATTN", **asked)
                        yield from rope_launches(f"{name}/{cache[0]} {way}", target, few, *ROPES["neox"], tokens=2)
        for output, step in itertools.product(OUTPUT_FORMATS, ("decode-split", "prefill")):
            config = _config(name, CACHES[0], SHAPES["32x128"], output_format=output, lse=True, sinks=True)
            yield from attention_launches(f"{name} {step} {output}", target, config, *STEPS[step])


def _packed_formats(target: str, dtype: str) -> Iterator[Launch]:
    """Yield stores of every packed format, and its loads in every kind of step; masks and outputs take turns."""
    features = itertools.cycle(FEATURES)
    shapes: tuple[str, ...] = ("32x128", "8x64", "8x256") if dtype != "float16" else ("32x128",)
    for fmt, shape in itertools.product((fmt for fmt in KV_FORMATS.values() if fmt.packed), shapes):
        config = _config(dtype, (fmt.name, "head" if fmt.quantised else "none"), SHAPES[shape])
        for way in ALLOWED["packed_store"]:
            with using(packed_store=way):
                yield from update_launches(f"{dtype}/{fmt.name} {shape} {way}", target, config)
        for step in STEPS:
            feature = next(features)
            asked = config.replace(**FEATURES[feature])
            yield from attention_launches(f"{dtype}/{fmt.name} {shape} {step} {feature}", target, asked, *STEPS[step])


def _rounded_queries(target: str, dtype: str) -> Iterator[Launch]:
    for shape, load in itertools.product(("32x128", "packed-4x80"), QUERY_LOADS[1:]):
        config = _config(dtype, ("auto", "none"), SHAPES[shape])
        config = config.replace(query_format="fp8_e4m3", query_scale="head", query_load=load)
        shared: dict[str, Any] = dict.fromkeys(VarlenAttentionArgs._fields)
        args = VarlenAttentionArgs(**{**shared, **_shared_arguments(config, 64, 2)})
        yield from record(f"{dtype} {shape} {load}", target, partial(round_query.round_query, args, config))


def _formats(target: str, dtype: str, cache: tuple[str, str]) -> Iterator[Launch]:
    for step, counts in STEPS.items():
        static = _config(dtype, cache, SHAPES["32x128"], output_format="fp8_static")
        yield from attention_launches(f"{dtype}/{cache[0]} {step} fp8_static", target, static, *counts)
        quantised = static.replace(query_format="fp8_e4m3", query_scale="head")
        yield from attention_launches(f"{dtype}/{cache[0]} {step} fp8-query", target, quantised, *counts)
        load = "divide" if dtype == "bfloat16" else "multiply"
        rounded = quantised.replace(query_load=load)
        yield from attention_launches(f"{dtype}/{cache[0]} {step} query-{load}", target, rounded, *counts)


def _long_prefills(target: str, dtype: str, cache: tuple[str, str]) -> Iterator[Launch]:
    """Yield the general kernel's long prefills."""
    packed = {**SHAPES["32x128"], "block_size": 0}
    shapes = {"32x128": SHAPES["32x128"], "8x64": SHAPES["8x64"], "packed-32x128": packed}
    for shape, feature in itertools.product(shapes, ("plain", "window-sinks-lse")):
        config = _config(dtype, cache, shapes[shape], **FEATURES[feature])
        yield from attention_launches(f"{dtype}/{cache[0]} {shape} long {feature}", target, config, 2048, 2)
    longest = _config(dtype, cache, packed)
    yield from attention_launches(f"{dtype}/{cache[0]} packed-32x128 longest", target, longest, 8192, 1)


def _features(target: str, dtype: str, cache: tuple[str, str], shape: str) -> Iterator[Launch]:
    features = FEATURES if shape in ("32x128", "5x72") else ("plain", "window-sinks-lse")
    for (step, counts), feature in itertools.product(STEPS.items(), features):
        config = _config(dtype, cache, SHAPES[shape], **FEATURES[feature])
        yield from attention_launches(f"{dtype}/{cache[0]} {shape} {step} {feature}", target, config, *counts)
