"""The absorbed form in torch: queries into the latent space, and results out of it."""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.formats import MODEL_DTYPES
from vattn.mla_config import MLAConfig
from vattn.ops.mla_arguments import MLAAttentionArgs
from vattn.ops.mla_weights import key_and_value_weights, weight_values
from vattn.quantization import quant_fp8_static


def absorb(query: Tensor, w_uk: Tensor, config: MLAConfig) -> Tensor:
    """Return queries in the latent space, `[T, N, L + R]` in the model dtype."""
    absorbed = query.new_empty((query.shape[0], config.num_heads, config.head_size))
    nope = query[..., : config.qk_nope_head_dim].transpose(0, 1)
    torch.bmm(nope, w_uk, out=absorbed[..., : config.kv_lora_rank].transpose(0, 1))
    absorbed[..., config.kv_lora_rank :] = query[..., config.qk_nope_head_dim :]
    return absorbed


def quantised_query(absorbed: Tensor, q_scale: Tensor, config: MLAConfig) -> Tensor:
    """Return e4m3 codes of absorbed queries `[..., L + R]` of any dtype, rounded to the model dtype first."""
    rounded = absorbed.to(MODEL_DTYPES[config.dtype])
    return quant_fp8_static(rounded.flatten(0, -2), q_scale).view(absorbed.shape)


def weights_of(args: MLAAttentionArgs, config: MLAConfig) -> tuple[Tensor, Tensor]:
    """Return W_UK_T `[N, P, L]` and W_UV `[N, L, V]` in the model dtype."""
    weight = weight_values(args.kv_b_weight, args.kv_b_scale, config, MODEL_DTYPES[config.dtype])
    return key_and_value_weights(weight, config)


def project_values(latent: Tensor, w_uv: Tensor, output: Tensor) -> None:
    """Write the values of results `[T, N, L]` to `output` `[T, N, V]` of the same dtype."""
    torch.bmm(latent.transpose(0, 1), w_uv, out=output.transpose(0, 1))
