"""Latent attention's cases of `vattn.ops.triton.compile_all`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vattn.formats import MODEL_DTYPES
from vattn.mla_config import MLAConfig
from vattn.ops.mla_arguments import MLAAttentionArgs, MLACacheUpdateArgs
from vattn.ops.mla_cache_layout import mla_cache_dtype, mla_cache_shape
from vattn.ops.triton import mla_launch
from vattn.ops.triton.tiles import Limits

KERNELS = ("mla_attention_kernel", "mla_merge_kernel", "mla_update_kernel")
GEOMETRIES = {
    "16x512+64": (16, 512, 64),
    "128x512+64": (128, 512, 64),
    "5x40+12": (5, 40, 12),
    "40x256+32": (40, 256, 32),
}
STEPS = {"decode": (2, 2), "mixed": (300, 8)}


def mla_launches(record: Callable[..., Iterator[Any]], target: str, limits: Limits) -> Iterator[Any]:
    """Yield what `record` makes of the launches for a target."""
    caches = (("auto", "none"), ("fp8_e4m3", "tensor"))
    for dtype, (cache, scale), geometry in itertools.product(MODEL_DTYPES, caches, GEOMETRIES):
        heads, latent, rope = GEOMETRIES[geometry]
        stored = dtype if cache == "auto" else cache
        config = MLAConfig(heads, 128, rope, 128, latent, 0.07, dtype, stored, 16, scale, lse=True)
        yield from record(f"{dtype}/{cache} {geometry}", target, partial(_update, config, limits))
        for (step, counts), sparse in itertools.product(STEPS.items(), (False, True)):
            asked = config.replace(sparse=sparse)
            name = f"{dtype}/{cache} {geometry} {step}{' sparse' if sparse else ''}"
            yield from record(name, target, partial(_attend, asked, counts, limits))


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _cache(config: MLAConfig) -> Tensor:
    return _meta(*mla_cache_shape(config, 64), dtype=mla_cache_dtype(config))


def _update(config: MLAConfig, limits: Limits) -> None:
    dtype, scale = MODEL_DTYPES[config.dtype], None if config.kv_scale == "none" else _meta(1)
    rows = _meta(64, config.kv_lora_rank, dtype=dtype), _meta(64, config.qk_rope_head_dim, dtype=dtype)
    slots = _meta(64, dtype=torch.int64)
    mla_launch.update_cache(MLACacheUpdateArgs(*rows, _cache(config), slots, scale, ""), config, limits)


def _attend(config: MLAConfig, counts: tuple[int, int], limits: Limits) -> None:
    tokens, reqs = counts
    none: dict[str, Any] = dict.fromkeys(MLAAttentionArgs._fields)
    args = MLAAttentionArgs(**{
        **none, "kv_cache": _cache(config), "query_start_loc": _meta(reqs + 1, dtype=torch.int32),
        "seq_lens": _meta(reqs, dtype=torch.int32), "block_table": _meta(reqs, 256, dtype=torch.int32),
        "lse": _meta(tokens, config.num_heads), "k_scale": None if config.kv_scale == "none" else _meta(1),
        "topk_indices": _meta(tokens, 2048, dtype=torch.int32) if config.sparse else None, "plan": [],
    })  # fmt: skip
    absorbed = _meta(tokens, config.num_heads, config.head_size, dtype=MODEL_DTYPES[config.dtype])
    mla_launch.attend_latents(absorbed, args, config, limits)
