"""Launches of Hopper's decode kernels: every tuning that shapes choose, in every format."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from tools.compile_kernels.launches import HOPPER, Launch, integers, meta, paged_arguments, record
from vattn.config.attention import AttentionConfig
from vattn.kernels.hopper import mixed_launch
from vattn.kernels.hopper.decode import cluster_launch, launch
from vattn.kernels.hopper.decode_packed import launch as packed_launch
from vattn.ops.arguments import AttentionArgs
from vattn.quantization.formats import KV_FORMATS, MODEL_DTYPES, OUTPUT_FORMATS

SPILLS = 120
"""Bytes of a thread's registers that may go to memory: head size 256, wide groups and codes of three bits keep some
outside of the loop."""


def allowed_spills(config: AttentionConfig) -> int:
    """Return how many bytes may spill: in groups of 16, heads of 192 in 16 bits keep a tile outside. No known layer."""
    unmasked = launch.columns_of(config.head_size) == config.head_size
    return SPILLS if unmasked or config.group_size < 16 or config.kv_cache_dtype == "fp8_e4m3" else 7000


def configs() -> Iterator[AttentionConfig]:
    """Yield layers that between them reach every branch of the kernels."""
    base = AttentionConfig(32, 8, 128, 128, 128**-0.5, "bfloat16", "bfloat16", lse=True)
    fp8: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"}
    features: dict[str, Any] = {"sliding_window": 1024, "logits_soft_cap": 30.0, "sinks": True}
    for formats in ({}, fp8, {"dtype": "float16", "kv_cache_dtype": "float16"}):
        layer = base.replace(**formats)
        yield layer
        yield layer.replace(block_size=528)
        yield layer.replace(**features, output_format="fp8_static")
        yield layer.replace(
            output_format="fp8_group64",
            output_arithmetic="approximate_divide",
            output_min_scale=1e-4,
            output_floor="zero",
        )
        yield layer.replace(output_format="nvfp4")
        for load in ("plain", "multiply" if "dtype" in formats else "approximate_divide"):
            yield layer.replace(query_format="fp8_e4m3", query_scale="head", query_load=load)
        yield layer.replace(num_heads=128)
        yield layer.replace(num_heads=8, num_kv_heads=1)
        yield layer.replace(num_heads=64, head_size=64, head_size_v=64, num_kv_heads=1 if formats else 8)
        for size in (48, 80, 112, 192):
            sized = layer.replace(head_size=size, head_size_v=size, output_format="fp8_static")
            yield sized
            yield sized.replace(num_heads=128, output_format="nvfp4")
    wide = base.replace(head_size=256, head_size_v=256)
    yield wide
    yield wide.replace(**fp8, **features, num_heads=16, output_format="fp8_group128")
    yield wide.replace(**fp8, num_heads=16, num_kv_heads=2)
    yield wide.replace(**fp8, num_heads=16, num_kv_heads=1)
    for fmt in KV_FORMATS.values():
        packed = base.replace(kv_cache_dtype=fmt.name, kv_scale="head" if fmt.quantised else "none")
        if fmt.packed and not packed_launch.refusals(packed, HOPPER):
            yield packed
            yield packed.replace(num_heads=64)
            narrow = packed.replace(head_size=64, head_size_v=64)
            size = 128 if packed_launch.refusals(narrow, HOPPER) else 64
            yield packed.replace(**features, head_size=size, head_size_v=size, output_format="fp8_static")


def rows_per_request(config: AttentionConfig) -> list[int]:
    """Return how many rows a request may have in a step."""
    packed = KV_FORMATS[config.kv_cache_dtype].packed
    if packed or not launch.attends_drafts(config) or config.query_load != "plain":
        return [1]
    most = launch.MAX_GROUP_SIZE // config.group_size
    return sorted({1, max(1, min(2, most)), max(1, most)})


def all_launches() -> Iterator[Launch]:
    """Yield every case, some of them equal to the compiler."""
    for config in configs():
        for num_reqs in (4, 32, 64):
            for tokens in rows_per_request(config):
                name = f"{num_reqs} x {tokens} rows, {config.encode()}"
                args = paged_arguments(config, num_reqs * tokens, num_reqs, 8)
                for call, processors in _calls(args, config, tokens):
                    yield from record(
                        name, "sm_90", call, allowed_spills(config), drops_limit=True, processors=processors
                    )


def _calls(args: AttentionArgs, config: AttentionConfig, tokens: int) -> Iterator[tuple[Any, int]]:
    """Yield what launches the kernels of one step, and on how many multiprocessors."""
    num_reqs = args.seq_lens.shape[0]
    if KV_FORMATS[config.kv_cache_dtype].packed:
        yield partial(packed_launch.decode, args, config), 132
        return
    yield partial(launch.decode, args, config), 132
    if tokens == 1:
        yield partial(launch.decode, args, config, launch.choose_tuning(config, num_reqs)), 132
        # As many multiprocessors as requests have pairs of heads, and half as many: requests stay whole.
        yield partial(launch.decode, args, config), max(1, num_reqs * config.num_kv_heads // 2)
        yield partial(launch.decode, args, config), max(1, num_reqs * config.num_kv_heads // 4)
    if num_reqs == launch.FEW_REQUESTS and tokens == 1 and not cluster_launch.refusals(args, config):
        for size in (8, 16):
            yield partial(cluster_launch.decode, args, config, size), 132
    if num_reqs > 4 and tokens == mixed_launch.short_rows(config):
        yield partial(_decode_beside_prompts, args, config), 132


def _decode_beside_prompts(args: AttentionArgs, config: AttentionConfig) -> None:
    """Launch the decode kernel of a step whose prefill kernel may still run."""
    num_reqs, longest = args.seq_lens.shape[0], mixed_launch.short_rows(config)
    tuning, rows, schedule = (
        mixed_launch.tuning_of(config, num_reqs),
        mixed_launch.rows_at_once(config),
        integers(1, 8),
    )
    sizes = launch.sizing(config, num_reqs, tuning, args.query.device, rows, longest=longest)
    launch.plan(args.query_start_loc, args.seq_lens, schedule, config, tuning, rows, longest=longest)
    output = args.output
    grouped = OUTPUT_FORMATS[config.output_format].group_size > 0
    if grouped and not launch.computes_scales(config, num_reqs, tuning, rows):
        output = meta(*args.query.shape, dtype=MODEL_DTYPES[config.dtype])  # Quantised afterwards.
    launch.launch(args, config, schedule, output, tuning, sizes, rows)
