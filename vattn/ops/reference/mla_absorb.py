"""The absorbed form in torch: queries into the latent space, and results out of it."""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.config.mla import MLAConfig
from vattn.ops.arguments_mla import MLAAttentionArgs
from vattn.ops.reference.mla_weights import key_and_value_weights, weight_values
from vattn.quantization.codecs import quant_fp8_static
from vattn.quantization.formats import MODEL_DTYPES


def absorb(query: Tensor, w_uk: Tensor, config: MLAConfig) -> Tensor:
    """Return queries in the latent space, `[T, N, L + R]` in the model dtype."""
    absorbed = query.new_empty((query.shape[0], config.num_heads, config.head_size))
    take_to_latents(query[..., : config.qk_nope_head_dim], w_uk, absorbed[..., : config.kv_lora_rank])
    absorbed[..., config.kv_lora_rank :] = query[..., config.qk_nope_head_dim :]
    return absorbed


def take_to_latents(nope: Tensor, w_uk: Tensor, out: Tensor) -> None:
    """Write queries `[T, N, P]` by a head's `[P, L]` to `out` `[T, N, L]`; rows do not reach each other's results."""
    if nope.device.type == "cpu" and nope.dtype != torch.float32:
        # With an odd P, products in bf16 on AMX multiply zeros by the row behind, which may be padding that holds NaN.
        out.copy_(torch.bmm(nope.transpose(0, 1).float(), w_uk.float()).transpose(0, 1))
    else:
        torch.bmm(nope.transpose(0, 1), w_uk, out=out.transpose(0, 1))


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
