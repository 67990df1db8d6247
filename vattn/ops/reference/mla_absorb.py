"""The weights and the absorbed form of latent attention in torch: queries into the latent space, results out of it."""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.config.mla import MLAConfig
from vattn.errors import ShapeError
from vattn.ops.arguments_mla import MLAAttentionArgs
from vattn.quantization.codecs import quant_fp8_static
from vattn.quantization.formats import MODEL_DTYPES

DEFAULT_WORKSPACE_TOKENS = 4096
"""Tokens that `TORCH_MLA` expands at a time where no workspace is given."""

DEFAULT_WORKSPACE_BYTES = 256 << 20
"""Expanded keys and values that `TRITON_MLA` holds at a time where no workspace is given; one block at least."""

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


def absorb(query: Tensor, w_uk: Tensor, config: MLAConfig) -> Tensor:
    """Return queries in the latent space, `[T, N, L + R]` in the model dtype."""
    absorbed = query.new_empty((query.shape[0], config.num_heads, config.head_size))
    take_to_latents(query[..., : config.qk_nope_head_dim], w_uk, absorbed[..., : config.kv_lora_rank])
    absorbed[..., config.kv_lora_rank :] = query[..., config.qk_nope_head_dim :]
    return absorbed


def take_to_latents(nope: Tensor, w_uk: Tensor, out: Tensor) -> None:
    """Write queries `[T, N, P]` by a head's `[P, L]` to `out` `[T, N, L]`; rows do not reach each other's results."""
    if nope.device.type == "cpu" and nope.dtype != torch.float32:
        # With an odd P, bf16 products on AMX multiply zeros by the next row, which may be padding with NaN.
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


def elements_per_token(config: MLAConfig) -> int:
    """Return how many elements of the model dtype one expanded token takes.

    Its row of the cache, and for every head a key of P + R columns and a value of V columns.
    """
    return config.head_size + config.num_heads * (config.qk_head_dim + config.v_head_dim)


def workspace_tokens(workspace: Tensor | None, config: MLAConfig, default: int) -> int:
    """Return how many tokens fit into a workspace at a time, whole blocks of them.

    Raises:
        ShapeError: it is too small for one block.
    """
    if workspace is None:
        tokens = max(default, config.block_size)
    else:
        tokens = workspace.numel() // elements_per_token(config)
    if tokens < config.block_size:
        least = config.block_size * elements_per_token(config)
        raise ShapeError(
            f"workspace of {0 if workspace is None else workspace.numel()} elements",
            f"at least {least}, for one block of {config.block_size} tokens",
            "give a larger workspace, or None",
        )
    return tokens // config.block_size * config.block_size
