"""Put a DeepSeek-like model of transformers on `MLAAttention`: one latent row a token in the cache, for all heads.

Such a model caches the latents and expands keys and values of every head after its cache, in `expand_kv`. Here they
stay as they are: the layer attends in the latent space.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from vattn.calibration.fp8_saving import own_config
from vattn.config.arguments import check_switches
from vattn.config.attention import CacheConfig
from vattn.errors import UnsupportedRequestError
from vattn.integrations.transformers.attention_interface import NAME, attend, no_mask
from vattn.integrations.transformers.attention_notes import AttentionCall
from vattn.integrations.transformers.available import ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
from vattn.integrations.transformers.checkpoint_scales import remove_cache_hooks
from vattn.integrations.transformers.checks import check_model, check_quant_config
from vattn.integrations.transformers.enabling import disable
from vattn.integrations.transformers.model_layers import install, plain_cache, stores_plainly
from vattn.integrations.transformers.observe import observe, set_attention
from vattn.integrations.transformers.packed_model import PackedCache, PackedModel
from vattn.integrations.transformers.prove import Proof
from vattn.integrations.transformers.rope_frequencies import fix_frequencies
from vattn.layers import MLAAttention, QuantConfig
from vattn.metadata import forward_context as context

LATENT = "vattn_latent"
"""Name of the attention and mask functions among those of transformers."""

_NEEDED = (
    "kv_b_proj",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "scaling",
    "num_heads",
    "expand_kv",
)
"""What makes a module a latent attention that keeps its latents to the end."""


@torch.inference_mode(False)
def enable_latent_attention(
    model: Any,
    *,
    cache_config: CacheConfig | None = None,
    quant_config: QuantConfig | None = None,
    attn_backend: str | None = None,
    num_blocks: int | None = None,
    memory: int | str | None = None,
    prove: bool = True,
) -> PackedModel:
    """Put the latent attention of a transformers model on vattn, in place; `disable` takes it off again.

    Args:
        model: a causal language model of transformers in eval mode, such as DeepSeek-V2, DeepSeek-V3 and Kimi-K2.
        cache_config, quant_config, attn_backend: of every `vattn.MLAAttention`.
        num_blocks, memory: allocate the paged cache too; see `vattn.allocate_kv_cache`. Neither: allocate it later.
        prove: as in `enable`.

    Returns:
        The model as a function of packed tokens.

    Raises:
        ConfigError: a model without its head, that is on vattn already, in training mode or without values; quantised
            outputs.
        UnsupportedRequestError: no latent attention, tokens that meet outside of it (an indexer of sparse attention,
            linear attention), frequencies of RoPE that go by lengths, or a transformers that expands latents before its
            cache.
            After these, and what `vattn.MLAAttention` and `vattn.allocate_kv_cache` raise, the model is as after
            `disable`.

    Example:
        >>> import torch, transformers, vattn
        >>> from vattn.integrations.transformers.mla import enable_latent_attention
        >>> config = transformers.DeepseekV3Config(
        ...     vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, first_k_dense_replace=2,
        ...     num_attention_heads=2, num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
        ...     qk_rope_head_dim=8, v_head_dim=8)
        >>> packed = enable_latent_attention(transformers.DeepseekV3ForCausalLM(config).eval(), num_blocks=8)
        >>> builder = vattn.AttentionMetadataBuilder(4, 16, max_seq_len=64, layers=packed)
        >>> step = builder.build(query_lens=[3, 2], seq_lens=[3, 2], block_tables=[[1], [2]])
        >>> with torch.no_grad(), vattn.forward_context(step):
        ...     packed(torch.arange(5), step.positions).shape
        torch.Size([5, 64])
    """
    check_model(model, "enable_latent_attention")
    check_switches(prove=prove)
    check_quant_config(quant_config)
    own_config(model)
    frequencies = fix_frequencies(model, None)
    model.__dict__["_vattn_before"] = model.config._attn_implementation, remove_cache_hooks(model), frequencies
    try:
        # A model that `enable` would refuse too is refused here by its reason.
        seen = observe(model, PackedCache())
        modules = _latent_modules(model)
        _check_calls(seen.calls, modules)
        layers = {n: _layer(module, n, cache_config, quant_config, attn_backend) for n, module in modules.items()}
        for name, layer in layers.items():
            layer.resolve_config(model.dtype, modules[name].kv_b_proj.weight.device)
        proof = Proof(model, modules, first_position=seen.first_position) if prove else None
        for module in modules.values():
            module.expand_kv = types.MethodType(_expand_kv, module)
        ALL_ATTENTION_FUNCTIONS.register(LATENT, attend_latents)
        ALL_MASK_ATTENTION_FUNCTIONS.register(LATENT, no_mask)
        set_attention(model, LATENT)
        packed = PackedModel(model, first_position=seen.first_position, takes_embeddings=seen.takes_embeddings)
        if proof is not None:
            plain, backend = plain_cache(cache_config), attn_backend if stores_plainly(cache_config) else None
            install(modules, {n: _layer(module, n, plain, None, backend) for n, module in modules.items()})
            proof.check(packed, plain.block_size)
        install(modules, layers)
        if num_blocks is not None or memory is not None:
            packed.allocate(num_blocks=num_blocks, memory=memory)
    except BaseException:
        disable(model)
        raise
    return packed


def _layer(
    module: Any, name: str, cache_config: CacheConfig | None, quant_config: QuantConfig | None, attn_backend: str | None
) -> MLAAttention:
    return MLAAttention(
        module.num_heads,
        float(module.scaling),
        module.qk_nope_head_dim,
        module.qk_rope_head_dim,
        module.v_head_dim,
        module.q_lora_rank,
        module.kv_lora_rank,
        module.kv_b_proj,
        cache_config,
        quant_config,
        prefix=name,
        attn_backend=attn_backend,
    )


def _latent_modules(model: Any) -> dict[str, Any]:
    """Return the latent attention modules by name, or refuse the model."""
    found = {name: module for name, module in model.named_modules() if hasattr(module, "kv_b_proj")}
    if not found:
        raise UnsupportedRequestError(
            f"{type(model).__name__} without latent attention",
            "a DeepSeek-like model",
            "use vattn.integrations.transformers.enable",
        )
    for name, module in found.items():
        missing = [attribute for attribute in _NEEDED if not hasattr(module, attribute)]
        if missing:
            raise UnsupportedRequestError(
                f"{type(module).__name__} {name!r} has no {', '.join(missing)}",
                "latent attention that expands keys and values after its cache",
                "use a newer transformers, or vattn.integrations.transformers.enable, which caches expanded heads",
            )
    return found


def _check_calls(calls: dict[str, AttentionCall], modules: dict[str, Any]) -> None:
    """Refuse a model with more than plain causal latent attention.

    Raises:
        UnsupportedRequestError: attention elsewhere, or with a window, a soft cap, sinks, slopes or another scale.
    """
    for name, call in calls.items():
        odd = [part for part in ("window", "soft_cap", "sinks", "alibi_slopes") if getattr(call, part) is not None]
        if name not in modules or odd or call.scale != float(modules[name].scaling):
            what = "no latent attention" if name not in modules else ", ".join(odd) or f"scale {call.scale}"
            raise UnsupportedRequestError(
                f"{type(call.module).__name__} {name!r} with {what}",
                "causal latent attention in every layer",
                "use vattn.integrations.transformers.enable, which caches expanded heads",
            )


def _expand_kv(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Return latents and rotated keys as they are while the module is on vattn."""
    if self.config._attn_implementation != LATENT:
        return type(self).expand_kv(self, kv_nope, k_rot)
    return kv_nope, k_rot


def attend_latents(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """Run the layer of a module; transformers' attention interface.

    Args:
        module: the attention module.
        query: `[1, heads, T, P + R]`, of the step's tokens.
        key, value: `[1, 1, T, L]` and `[1, 1, T, R]`: latents and rotated keys.
        attention_mask: `None`; the layer knows its mask.
        **options: what the model passes; dropout and another scale than the module's are refused.

    Returns:
        `[1, T, heads, V]`, and no weights.
    """
    layer: Any = module._modules.get(NAME)
    if layer is None or context.current_step() is None or query.shape[0] != 1 or attention_mask is not None:
        return attend(module, query, key, value, attention_mask, **options)  # which says what is wrong
    if options.get("scaling", layer.scale) != layer.scale or options.get("dropout", 0.0):
        raise UnsupportedRequestError(
            f"scaling={options.get('scaling')!r} and dropout={options.get('dropout')!r} in layer {layer.prefix!r}",
            f"{layer.scale!r} and none, as the layer was made",
            "call disable(model) and enable_latent_attention(model) again after changing the model",
        )
    rows = query[0].transpose(0, 1)
    out = layer(rows, key[0, 0], value[0, 0])
    return out.view(1, rows.shape[0], layer.num_heads, layer.v_head_dim), None
