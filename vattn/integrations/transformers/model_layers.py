"""The layers of vattn that a model of transformers gets, with their scales; and how modules get them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from vattn.calibration.calibrate import Calibration
from vattn.config.attention import CacheConfig
from vattn.errors import ConfigError, ScaleError
from vattn.integrations.transformers.attention_interface import NAME, ModelAttention, ModelEncoderAttention
from vattn.integrations.transformers.attention_notes import AttentionCall
from vattn.layers import QuantConfig
from vattn.layers.weight_parts import heads_of_rank
from vattn.quantization.formats import KV_FORMATS, resolve_kv_cache_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

L = TypeVar("L", bound=ModelAttention | ModelEncoderAttention)


def install(modules: Mapping[str, nn.Module], layers: Mapping[str, nn.Module]) -> None:
    """Give every attention module its layer, on its device, in place of the one that it has."""
    for name, module in modules.items():
        module._modules.pop(NAME, None)
        module.add_module(NAME, layers[name].to(next(module.parameters()).device))


def stores_plainly(config: CacheConfig | None) -> bool:
    """Return whether a cache holds keys and values in the model's dtype."""
    return config is None or config.cache_dtype == "auto"


def plain_cache(config: CacheConfig | None) -> CacheConfig:
    """Return the cache for a proof: blocks as they are configured, keys and values in the model's dtype."""
    return CacheConfig() if config is None else CacheConfig(config.block_size, kv_cache_layout=config.kv_cache_layout)


def find_heads(found: Calibration, calls: dict[str, AttentionCall], group: ProcessGroup | None) -> dict[str, slice]:
    """Return which KV heads of a calibration a rank has, by layer: all of them for a model on one device.

    Raises:
        ScaleError: a layer has another number of heads than it had, as in another model with the same layer names.
    """
    own: dict[str, slice] = {}
    for name, call in calls.items():
        seen = found.layers.get(name)
        if seen is None:
            continue
        heads = len(seen["query"]), len(seen["key"])
        of_rank = heads_of_rank(heads[1], call.num_kv_heads, group)
        if of_rank is None or heads_of_rank(heads[0], call.num_heads, group) is None:
            raise ScaleError(
                f"a calibration in which layer {name!r} has {heads[0]} query and {heads[1]} KV heads",
                f"{call.num_heads} and {call.num_kv_heads}, as the model has" + (" on this rank" if group else ""),
                "calibrate this model",
            )
        own[name] = of_rank
    return own


def scales_of_rank(
    scales: Callable[[str], QuantConfig | None], heads: dict[str, slice]
) -> Callable[[str], QuantConfig | None]:
    """Return what gives a layer the scales of this rank's KV heads."""

    def of(name: str) -> QuantConfig | None:
        config = scales(name)
        if config is None or not isinstance(config.k_scale, torch.Tensor) or config.k_scale.numel() == 1:
            return config
        assert isinstance(config.v_scale, torch.Tensor)
        return replace(config, k_scale=config.k_scale[heads[name]], v_scale=config.v_scale[heads[name]])

    return of


def scales_of(
    calibration: Calibration | None,
    quant_config: QuantConfig | None,
    cache_config: CacheConfig | None,
    per_head: bool,
    query_format: str,
) -> Callable[[str], QuantConfig | None]:
    """Return what gives a layer its scales."""
    if calibration is None:
        if per_head:
            raise ConfigError("scales_per_head without calibration", "both", "give QuantConfig scales per head itself")
        if query_format != "none":
            raise ConfigError("query_format without calibration", "both", "QuantConfig(query_format=..., q_scale=...)")
        return lambda name: quant_config
    if quant_config is not None:
        raise ConfigError("quant_config and calibration", "one of them", "drop one of them")
    dtype = "auto" if cache_config is None else cache_config.cache_dtype
    if dtype == "auto" or not KV_FORMATS[resolve_kv_cache_dtype(dtype, torch.bfloat16)].quantised:
        raise ConfigError(
            f"calibration with cache_dtype={dtype!r}", "formats with given scales, such as fp8", "drop it"
        )
    return lambda name: calibration.quant_config(name, cache_dtype=dtype, per_head=per_head, query_format=query_format)


def one_of_each(calls: Mapping[str, AttentionCall], layers: Mapping[str, ModelAttention]) -> list[ModelAttention]:
    """Return a layer of each kind that kernels are compiled for, which a backend may divide further."""
    kinds = {
        (call.num_heads, call.num_kv_heads, call.head_size, call.head_size_v, call.window): layers[name]
        for name, call in calls.items()
    }
    return list(kinds.values())


def make_layer(
    kind: Callable[..., L], call: AttentionCall, name: str, attn_backend: str | None, batch_invariant: bool, **own: Any
) -> L:
    """Return the layer for a module, as the model calls it; `own` are options of its kind."""
    layer = kind(
        call.num_heads,
        call.head_size,
        call.scale,
        call.num_kv_heads,
        alibi_slopes=call.alibi_slopes,
        logits_soft_cap=call.soft_cap,
        per_layer_sliding_window=call.window,
        prefix=name,
        attn_backend=attn_backend,
        head_size_v=call.head_size_v,
        sinks=call.sinks,
        batch_invariant=batch_invariant,
        **own,
    )
    layer._expected = call.expected_options()
    return layer
