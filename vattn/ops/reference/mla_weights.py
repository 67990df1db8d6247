"""`kv_b_weight` as keys and values of a latent: views, and e4m3 weights in another dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.config.mla import MLAConfig

WEIGHT_BLOCK = 128
"""Rows and columns of a weight that share one scale in `fp8_block128`."""


def weight_scale_shape(config: MLAConfig) -> tuple[int, ...] | None:
    """Return the shape of `kv_b_scale`; `None`: there is none."""
    if config.weight_format == "none":
        return None
    if config.weight_format == "fp8_tensor":
        return (1,)
    rows = config.num_heads * (config.qk_nope_head_dim + config.v_head_dim)
    return -(-rows // WEIGHT_BLOCK), -(-config.kv_lora_rank // WEIGHT_BLOCK)


def dequantise_blocks(weight: Tensor, scale: Tensor, rows: int, columns: int) -> Tensor:
    """Return fp32 `weight` `[O, I]` times scales of its blocks of `rows` x `columns`, `[ceil(O / rows), ...]`."""
    by_row = scale.float().repeat_interleave(rows, 0)[: weight.shape[0]]
    return weight.float() * by_row.repeat_interleave(columns, 1)[:, : weight.shape[1]]


def weight_values(kv_b_weight: Tensor, kv_b_scale: Tensor | None, config: MLAConfig, dtype: torch.dtype) -> Tensor:
    """Return `kv_b_weight` `[N, P + V, L]` in `dtype`, dequantised; itself where it has that dtype."""
    if kv_b_scale is None:
        return kv_b_weight.to(dtype)
    if config.weight_format == "fp8_tensor":
        return (kv_b_weight.float() * kv_b_scale.view(1)).to(dtype)
    flat = dequantise_blocks(kv_b_weight.flatten(0, 1), kv_b_scale, WEIGHT_BLOCK, WEIGHT_BLOCK)
    return flat.view(kv_b_weight.shape).to(dtype)


def key_and_value_weights(weight: Tensor, config: MLAConfig) -> tuple[Tensor, Tensor]:
    """Return views W_UK_T `[N, P, L]` and W_UV `[N, L, V]` of `[N, P + V, L]`."""
    return weight[:, : config.qk_nope_head_dim], weight[:, config.qk_nope_head_dim :].transpose(1, 2)
