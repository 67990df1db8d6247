"""Replaced forwards for modules without an exchangeable attention in transformers: Bloom, MPT and Falcon.

Each repeats what the module does around attention (one projection, heads, ALiBi, the way out) and calls an attention
function between, with the arguments that other modules call it with. Weights stay where they are.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Attend = Callable[..., tuple[Tensor, Any]]


def _bloom(
    module: Any,
    attend: Attend,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Any,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    out, _ = attend(module, query, key, value, attention_mask, scaling=module.inv_norm_factor)
    return module.dense(out.flatten(2)) + residual, None


def _mpt(
    module: Any, attend: Attend, hidden_states: Tensor, position_bias: Any, past_key_values: Any = None,
    attention_mask: Any = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    qkv = module.Wqkv(hidden_states)
    if module.clip_qkv:
        qkv = qkv.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    heads = qkv.view(*qkv.shape[:2], 3, module.n_heads, module.head_dim)
    query, key, value = (t.transpose(1, 2) for t in heads.unbind(2))
    out, _ = attend(module, query, key, value, attention_mask, scaling=module.softmax_scale)
    return module.out_proj(out.flatten(2)), None


def _falcon(
    module: Any, attend: Attend, hidden_states: Tensor, alibi: Any, attention_mask: Any, position_ids: Any = None,
    layer_past: Any = None, use_cache: bool = False, output_attentions: bool = False, position_embeddings: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    qkv = module.query_key_value(hidden_states)
    if module.new_decoder_architecture:
        # Groups of queries with their key and value, which are not spread over the heads here.
        groups = qkv.view(*qkv.shape[:2], module.num_kv_heads, -1, module.head_dim)
        query, key, value = groups[:, :, :, :-2].flatten(2, 3), groups[:, :, :, -2], groups[:, :, :, -1]
    else:
        query, key, value = module._split_heads(qkv)
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    if position_embeddings is not None and not module.config.alibi:
        rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
        query, key = rotate(query, key, *position_embeddings)
    out, _ = attend(module, query, key, value, attention_mask, scaling=module.inv_norm_factor)
    return module.dense(out.flatten(2)), None


def _bloom_slopes(module: Any) -> Tensor:
    make = sys.modules[type(module).__module__].build_alibi_tensor
    return make(torch.ones(1, 2), module.num_heads, torch.float32).view(-1, 2)[:, 1]


def _falcon_slopes(module: Any) -> Tensor | None:
    """Falcon scales the bias with the scores, and rounds slopes to bf16."""
    return _bloom_slopes(module) * module.inv_norm_factor if module.config.alibi else None


def _mpt_slopes(module: Any, largest: float) -> Tensor:
    make = sys.modules[type(module).__module__].build_mpt_alibi_tensor
    return -make(module.n_heads, 2, largest).view(-1, 2)[:, 0].float()


FORWARDS: dict[str, Callable[..., Any]] = {"BloomAttention": _bloom, "MptAttention": _mpt, "FalconAttention": _falcon}


def replaced_modules(model: nn.Module) -> list[nn.Module]:
    """Return the attention modules of a model that get another forward; empty for most models."""
    return [module for module in model.modules() if type(module).__name__ in FORWARDS]


def replace_forwards(model: nn.Module, attend: Attend) -> None:
    """Give every such module a forward that calls `attend` as transformers' attention interface does."""
    for module in replaced_modules(model):
        module.forward = functools.partial(FORWARDS[type(module).__name__], module, attend)


def restore_forwards(model: nn.Module) -> None:
    """Give every such module its own forward back."""
    for module in replaced_modules(model):
        module.__dict__.pop("forward", None)


def alibi_slopes(module: nn.Module, config: Any) -> Tensor | None:
    """Return fp32 `[heads]` slopes of such a module, `None` if it has no ALiBi."""
    name = type(module).__name__
    if name == "BloomAttention":
        return _bloom_slopes(module)
    if name == "FalconAttention":
        return _falcon_slopes(module)
    return _mpt_slopes(module, config.attn_config.alibi_bias_max) if name == "MptAttention" else None
