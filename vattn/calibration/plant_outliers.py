"""`plant_outliers`: weights of the same function with outlier channels, to judge cache formats by."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def plant_outliers(
    tensors: Mapping[str, Tensor], head_size: int, *, key_exponent: int, value_exponent: int, channels: int = 2
) -> dict[str, Tensor]:
    """Return weights of the same function in which a few key and value channels of every KV head are far larger.

    Key channels grow by `2**key_exponent`, both of each pair that RoPE rotates, and their query channels shrink by as
    much; value channels grow by `2**value_exponent` and the columns of `o_proj` that read them shrink. Powers of two
    change no digit: in fp32 and bf16 the logits stay equal to the last bit as long as nothing is quantised.

    Args:
        tensors: of a Llama-style model, under the names of transformers.
        head_size: width of keys and values.
        key_exponent, value_exponent: powers of two.
        channels: pairs of key channels, and value channels, per KV head; other ones in each layer.

    Raises:
        KeyError: the name of a weight that a layer does not have.
    """
    planted = dict(tensors)
    layers = {int(name.split(".")[2]) for name in tensors if name.startswith("model.layers.")}
    for i in layers or {0}:
        names = {part: f"model.layers.{i}.self_attn.{part}_proj.weight" for part in "qkvo"}
        key, value = torch.ones(head_size), torch.ones(head_size)
        for spot in ((7 * i + 11 * n) % (head_size // 2) for n in range(channels)):
            key[[spot, spot + head_size // 2]] = 2.0**key_exponent
            value[spot] = 2.0**value_exponent
        num_heads, num_kv_heads = (tensors[names[part]].shape[0] // head_size for part in "qk")
        factors = {
            "k": key.repeat(num_kv_heads)[:, None],
            "q": 1 / key.repeat(num_heads)[:, None],
            "v": value.repeat(num_kv_heads)[:, None],
            "o": 1 / value.repeat(num_heads),
        }
        for part, factor in factors.items():
            weight = tensors[names[part]]
            planted[names[part]] = weight * factor.to(weight.dtype)
    return planted
