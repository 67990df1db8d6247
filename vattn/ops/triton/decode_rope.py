"""Decode steps of few tokens in which the fast decode kernel turns queries and keys itself, and writes the cache.

Shapes choose it, as they choose the fast decode path: what `accepts` refuses is done by `rope_kv_cache_update` and
`attention`, one after the other, with the same result.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from vattn.backends.base import DeviceInfo, Sizes
from vattn.config import AttentionConfig
from vattn.formats import OUTPUT_FORMATS
from vattn.ops.arguments import AttentionArgs, RopeUpdateArgs
from vattn.ops.cache_layout import key_value_views
from vattn.ops.triton import decode_fast
from vattn.ops.triton.decode_fast import QUANTISED_CACHES, Sizing, Tuning
from vattn.ops.triton.decode_fast_kernels import QUERY_ROWS
from vattn.ops.triton.decode_rope_kernels import rope_decode_kernel
from vattn.ops.triton.tiles import next_power_of_two
from vattn.rope_config import RopeConfig

HEAD_SIZES = Sizes(values=(64, 128))
MOST_TOKENS = 32
"""Tokens of a step: a program compares every tile with the slots of all of them, a value a thread. Also in the backend,
which says so in reports."""


def refusals(rope: RopeConfig, config: AttentionConfig, device: DeviceInfo) -> list[str]:
    """Return why no step of a layer goes this way, empty if such of up to `MOST_TOKENS` rows do."""
    found = decode_fast.refusals(config, device)
    if config.query_load != "plain":
        found.append(f"query_load {config.query_load} (the query is quantised behind its rotation)")
    # Registers spill beyond these.
    if config.head_size not in HEAD_SIZES:
        found.append(f"head_size {config.head_size} (runs {HEAD_SIZES})")
    if config.group_size > QUERY_ROWS.value:
        found.append(f"{config.group_size} query heads per KV head (runs up to {QUERY_ROWS.value})")
    if OUTPUT_FORMATS[config.output_format].group_size:
        found.append(f"output_format {config.output_format} (runs fp8_static and the model dtype)")
    if rope.norm != "none" and config.kv_cache_dtype in QUANTISED_CACHES:
        found.append(f"a norm ahead of a {config.kv_cache_dtype} cache")
    return found


def accepts(update: RopeUpdateArgs, args: AttentionArgs, rope: RopeConfig, config: AttentionConfig) -> bool:
    """Return whether one kernel turns, writes and attends the rows of this call."""
    num_tokens, num_reqs = update.query.shape[0], args.seq_lens.shape[0]
    if num_tokens != num_reqs or num_tokens > MOST_TOKENS or update.value.dtype != update.key.dtype:
        return False
    return runs(rope, config, update.query.device) and not decode_fast.choose_tuning(config, num_reqs).slots


@lru_cache(maxsize=4096)
def runs(rope: RopeConfig, config: AttentionConfig, device: torch.device) -> bool:
    """Return whether nothing is refused."""
    return not refusals(rope, config, DeviceInfo.of(device))


def decode(
    update: RopeUpdateArgs,
    args: AttentionArgs,
    rope: RopeConfig,
    config: AttentionConfig,
    tuning: Tuning | None = None,
) -> None:
    """Run `vattn::rope_attention` for a step that `accepts` took; `tuning` overrides what the shapes would choose."""
    decode_fast.decode(args, config, tuning, partial(_launch, update, rope))


def _launch(
    update: RopeUpdateArgs,
    rope: RopeConfig,
    args: AttentionArgs,
    config: AttentionConfig,
    tuning: Tuning,
    sizes: Sizing,
    schedule: Tensor,
    partial_output: Tensor,
    partial_stats: Tensor,
    tokens: int,
    common: dict[str, Any],
) -> None:
    key_cache, value_cache = key_value_views(args.kv_cache, config)
    if config.kv_cache_dtype in QUANTISED_CACHES:
        key_cache, value_cache = key_cache.view(torch.int16), value_cache.view(torch.int16)
    rope_decode_kernel[decode_fast.grid_of(config, tuning, sizes)](
        query=update.query, key=update.key, value=update.value, cos=update.cos, sin=update.sin,
        positions=update.positions, slot_mapping=update.slot_mapping, q_weight=update.q_weight,
        k_weight=update.k_weight, q_factor=update.q_scale, key_cache=key_cache, value_cache=value_cache,
        schedule=schedule, partial_output=partial_output, partial_stats=partial_stats,
        query_stride=update.query.stride(0), query_head_stride=update.query.stride(1),
        key_stride=update.key.stride(0), key_head_stride=update.key.stride(1),
        value_stride=update.value.stride(0), value_head_stride=update.value.stride(1),
        stride_cn=update.cos.stride(0), stride_cc=update.cos.stride(1), stride_sn=update.sin.stride(0),
        stride_sc=update.sin.stride(1), num_tokens=update.query.shape[0], num_rows=update.cos.shape[0],
        eps=rope.norm_eps, K_STRIDES=key_cache.stride()[:3], V_STRIDES=value_cache.stride()[:3],
        num_warps=tuning.heads, launch_pdl=bool(tuning.overlap), maxnreg=tuning.max_registers, **common,
        **decode_fast.cache_arguments(args, config, tuning),
        **rope_constants(update, rope, config), **_constants(config, tuning),
    )  # fmt: skip


def _constants(config: AttentionConfig, tuning: Tuning) -> dict[str, Any]:
    """Return what the kernel shares with `decode_kernel` as its constants."""
    constants = decode_fast.decode_constants(config, tuning, 1)
    constants.pop("QUERY_LOAD")
    return constants


def rope_constants(update: RopeUpdateArgs, rope: RopeConfig, config: AttentionConfig) -> dict[str, Any]:
    """Return what the kernel is specialised for beside the constants of `decode_kernel`."""
    full, interleaved = update.cos.shape[1] == rope.rotary_dim, rope.style == "interleaved"
    return {
        "SLOTS": next_power_of_two(max(2, update.query.shape[0])), "ROWS": next_power_of_two(config.group_size),
        "SHAPE": (config.head_size, rope.rotary_dim // 2, full, interleaved), "NORM": rope.norm,
        "ROUND": rope.round_query,
        "ARITHMETIC": "none" if config.query_format == "none" else rope.query_arithmetic,
    }  # fmt: skip
