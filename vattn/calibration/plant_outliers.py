"""Weights of the same function with outlier channels, for tests of cache formats."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from examples.demo.model import LlamaConfig


def plant_outliers(
    tensors: Mapping[str, Tensor], config: LlamaConfig, *, key_exponent: int, value_exponent: int, channels: int = 2
) -> dict[str, Tensor]:
    """Return weights of the same function in which a few key and value channels of every KV head are far larger.

    Key channels grow by `2**key_exponent` and the query channels that meet them shrink by as much (both of a pair that
    RoPE turns); value channels grow by `2**value_exponent` and the columns of `o_proj` that read them shrink. Powers of
    two change no digit, so in fp32 and bf16 the logits stay equal to the last bit as long as nothing is quantised.

    Args:
        channels: pairs of key channels, and value channels, per KV head; which ones differs from layer to layer.
    """
    planted = dict(tensors)
    group, size = config.num_heads // config.num_kv_heads, config.head_size
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}.self_attn."
        spots = [(7 * i + 11 * n) % (size // 2) for n in range(channels)]
        key, value = torch.ones(size), torch.ones(size)
        for spot in spots:
            key[[spot, spot + size // 2]] = 2.0**key_exponent
            value[spot] = 2.0**value_exponent
        factors = {
            "k_proj": key.repeat(config.num_kv_heads)[:, None],
            "q_proj": 1 / key.repeat(config.num_kv_heads * group)[:, None],
            "v_proj": value.repeat(config.num_kv_heads)[:, None],
            "o_proj": 1 / value.repeat(config.num_kv_heads * group),
        }
        for name, factor in factors.items():
            weight = tensors[f"{prefix}{name}.weight"]
            planted[f"{prefix}{name}.weight"] = weight * factor.to(weight.dtype)
    return planted
