"""What vLLM requests of an attention layer, as a config of vattn."""

from __future__ import annotations

import torch

from vattn.config.attention import AttentionConfig
from vattn.quantization.formats import KV_FORMATS, dtype_name, resolve_kv_cache_dtype


def config_of(
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    head_size_v: int,
    scale: float,
    dtype: torch.dtype,
    kv_cache_dtype: str,
    device: str,
    *,
    block_size: int = 16,
    layout: str = "HND",
    scale_per_head: bool = False,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi: str = "none",
    sinks: bool = False,
    batch_invariant: bool = False,
) -> AttentionConfig:
    """Return the config of a layer; sizes, names and dtypes are vLLM's.

    Raises:
        ConfigError: the values contradict each other.
    """
    stored = resolve_kv_cache_dtype(kv_cache_dtype, dtype)
    kv_scale = ("head" if scale_per_head else "tensor") if KV_FORMATS[stored].quantised else "none"
    return AttentionConfig(
        num_heads,
        num_kv_heads,
        head_size,
        head_size_v,
        scale,
        dtype_name(dtype),
        stored,
        block_size=block_size,
        kv_cache_layout=layout,
        kv_scale=kv_scale,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap or None,
        alibi=alibi,
        sinks=sinks,
        batch_invariant=batch_invariant,
        # Other backends on a GPU may plan on the host, which vLLM's graphs do not allow.
        backend="TRITON_ATTN" if device == "cuda" else "auto",
    )
