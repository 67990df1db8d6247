"""What the arguments of a layer mean: options checked, scales made, a config for every kind of step."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from vattn.backends import selector
from vattn.cache.layout import kv_cache_dtype, kv_cache_shape, num_blocks_of, shape_of_storage
from vattn.config.arguments import refuse_unknown
from vattn.config.attention import AttentionConfig, AttentionType, CacheConfig
from vattn.config.device import DeviceInfo
from vattn.errors import (
    CacheError,
    ConfigError,
    ScaleError,
    ShapeError,
    UnsupportedRequestError,
)
from vattn.layers.base.scales import QuantConfig, ScaleSource, make_scale
from vattn.quantization.formats import dtype_name

EXTRA_OPTIONS: dict[str, Any] = {
    "sinks": None,
    "chunk_lookback": -1,
    "mm_prefix": "none",
    "batch_invariant": False,
    "fast_prefill": False,
    "context_parallel": None,
}
"""Options of `Attention` beyond its named arguments, with what means "off"."""

StepKind = tuple[str, bool, bool]
"""What metadata can change about a layer's config: causality, tree bias given, multimodal ranges given."""

_SHARED_FIELDS = (
    "num_kv_heads",
    "head_size",
    "head_size_v",
    "dtype",
    "kv_cache_dtype",
    "block_size",
    "kv_cache_layout",
    "attn_type",
    "context_parallel",
    "context_rank",
    "context_world",
    "context_interleave",
)
"""What two layers must have in common to read the same cache bytes."""


def named_arguments(layer: type) -> list[str]:
    """Return the names of a layer's arguments, including the layer that it extends."""
    names: dict[str, None] = {}
    for owner in layer.__mro__:
        if "prefix" in names:
            break
        parameters = inspect.signature(owner).parameters.values()
        names.update((p.name, None) for p in parameters if p.kind is not p.VAR_KEYWORD)
    return list(names)


def check_extra(
    layer: str, extra: dict[str, Any], named: Iterable[str], options: Iterable[str] = EXTRA_OPTIONS
) -> dict[str, Any]:
    """Return the extra options with their defaults; refuse any but `options`. `named`: the layer's other arguments."""
    refuse_unknown(layer, set(extra) - set(options), [*named, *options])
    return {**EXTRA_OPTIONS, **extra}


_LAYERS = {
    AttentionType.DECODER: "Attention",
    AttentionType.ENCODER_DECODER: "CrossAttention",
    AttentionType.ENCODER: "MMEncoderAttention",
    AttentionType.ENCODER_ONLY: "EncoderOnlyAttention",
}
"""Which layer runs which type of attention."""


def check_type(layer: str, attn_type: str | AttentionType, own: AttentionType) -> None:
    """Refuse attention types that are layers of their own; `own` is that of `layer`."""
    names = [t.value for t in AttentionType]
    if attn_type not in names:
        raise ConfigError(f"attn_type={attn_type!r}", ", ".join(names), "choose one of these names")
    if attn_type != own:
        kind = AttentionType(attn_type)
        raise UnsupportedRequestError(
            f"attn_type={kind.value!r} in {layer}", repr(own.value), f"use vattn.{_LAYERS[kind]}"
        )


def check_configs(layer: str, cache_config: object, quant_config: object, *, exact_prefill: bool = True) -> None:
    """Refuse what is no configuration of a layer; `None` is the default one.

    Args:
        exact_prefill: whether layers with a cache of this kind may use it.
    """
    for name, config, kind in (
        ("cache_config", cache_config, CacheConfig),
        ("quant_config", quant_config, QuantConfig),
    ):
        if config is not None and not isinstance(config, kind):
            raise ConfigError(
                f"{name} of type {type(config).__name__} in {layer}",
                f"vattn.{kind.__name__} or None",
                f"pass {kind.__name__}(...)",
            )
    if not exact_prefill and isinstance(cache_config, CacheConfig) and cache_config.exact_prefill:
        raise ConfigError(
            f"exact_prefill=True in a layer of class {layer}",
            "exact_prefill in vattn.Attention layers with a cache of their own",
            "give this layer a CacheConfig without it",
        )


def own_tensor(source: Tensor | Sequence[float]) -> Tensor:
    """Return an fp32 copy of what a user gave. Numbers keep their values where modules are made on meta."""
    device = source.device if isinstance(source, Tensor) else "cpu"
    try:
        return torch.as_tensor(source, dtype=torch.float32, device=device).detach().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{source!r:.60} instead of numbers", "a tensor or a list of floats", "correct it") from error


def check_per_head(name: str, tensor: Tensor, heads: int) -> None:
    """Refuse a tensor that is not one value per query head."""
    if tensor.dim() != 1 or tensor.shape[0] != heads:
        raise ShapeError(
            f"{name} has shape {tuple(tensor.shape)}", f"({heads},), one per query head", "check num_heads"
        )


def alibi_kind(slopes: object, sqrt: bool | None) -> str:
    """Return the config's name of what `alibi_slopes` and `use_alibi_sqrt` ask for."""
    if slopes is None:
        if sqrt:
            raise ConfigError("use_alibi_sqrt without alibi_slopes", "slopes with it", "pass alibi_slopes")
        return "none"
    return "sqrt" if sqrt else "linear"


def scale_kind(scale: Tensor | None) -> str:
    """Return the granularity of a scale tensor by the config's name."""
    if scale is None:
        return "none"
    return "tensor" if scale.numel() == 1 else "head"


def kv_scale(
    name: str,
    source: ScaleSource,
    *,
    prefix: str,
    cache_dtype: str,
    quantised: bool,
    calculate: bool,
    shared: bool,
    kv_heads: int,
) -> Tensor | None:
    """Make `k_scale` or `v_scale` from what the user gave, or refuse: an FP8 cache always has decided scales.

    A layer that shares a cache gets its target's scales when it is bound, and a placeholder until then.
    """
    if not quantised:
        if source is None:
            return None
        raise ScaleError(
            f"{name} given with cache_dtype={cache_dtype!r} in layer {prefix!r}",
            "scales with a quantised cache",
            "set cache_dtype='fp8' or drop the scale",
        )
    if shared:
        if source is not None:
            raise ScaleError(
                f"{name} given for layer {prefix!r}, which shares a KV cache", "the target's scales", "drop the scale"
            )
        return make_scale(name, "unit", (1,))
    if calculate:
        if source is not None:
            raise ScaleError(
                f"{name} given and calculate_kv_scales=True", "one of the two", "drop the scale, or the calculation"
            )
        return make_scale(name, "unit", (1,))
    if source is None:
        raise ScaleError(
            f"layer {prefix!r} has cache_dtype={cache_dtype!r} and no {name}",
            "a number, a tensor, 'unit', or CacheConfig(calculate_kv_scales=True)",
            f"QuantConfig({name}='unit') if 1.0 is meant",
        )
    return make_scale(name, source, (1, kv_heads))


def refuse_calculation(prefix: str, cache_dtype: str) -> None:
    """Raise for `calculate_kv_scales` in a layer that stores keys and values without given scales.

    Raises:
        ScaleError: always.
    """
    raise ScaleError(
        f"calculate_kv_scales=True with cache_dtype={cache_dtype!r} in layer {prefix!r}",
        "calculated scales with a quantised cache; packed formats of a scale per token keep their own",
        "set cache_dtype='fp8' or drop calculate_kv_scales",
    )


def query_scale(
    source: ScaleSource, *, prefix: str, query_format: str, calculate: bool, kv_heads: int
) -> Tensor | None:
    """Make `q_scale`, or refuse: an FP8 query always has a decided scale."""
    if query_format == "none":
        return None
    if source is None:
        if not calculate:
            raise ScaleError(
                f"layer {prefix!r} has an FP8 query and no q_scale",
                "a number, a tensor, 'unit', or CacheConfig(calculate_kv_scales=True) with a quantised cache",
                "QuantConfig(q_scale='unit') if 1.0 is meant",
            )
        source = "unit"
    return make_scale("q_scale", source, (1, kv_heads))


def check_storage(storage: Tensor, config: AttentionConfig) -> None:
    """Refuse a storage that is not what the config's layout needs."""
    blocks = num_blocks_of(storage, config)
    shape, dtype = shape_of_storage(storage, config, blocks), kv_cache_dtype(config)
    if tuple(storage.shape) != shape or storage.dtype != dtype or not storage.is_contiguous():
        raise CacheError(
            f"KV cache storage {tuple(storage.shape)} of {dtype_name(storage.dtype)}, strides {storage.stride()}",
            f"contiguous {kv_cache_shape(config, max(blocks, 1))} of {dtype_name(dtype)}, any number of blocks",
            "use vattn.allocate_kv_cache(model, num_blocks=...)",
        )


def check_sharing(prefix: str, config: AttentionConfig, target: AttentionConfig) -> None:
    """Refuse to share a cache between layers that would read its bytes differently, or look further back."""
    for name in _SHARED_FIELDS:
        ours, theirs = getattr(config, name), getattr(target, name)
        if ours != theirs:
            raise CacheError(
                f"KV sharing target of layer {prefix!r} has {name} {theirs}, the layer {ours}",
                "equal values",
                "share the cache of an equal layer",
            )
    chunks = [(each.sliding_window, each.chunk_lookback) for each in (config, target)]
    if target.chunk_lookback is not None and chunks[0] != chunks[1]:
        raise CacheError(
            f"layer {prefix!r} has window and chunk_lookback {chunks[0]}, its KV sharing target {chunks[1]}",
            "equal chunks: what left the target's may be gone from the cache",
            "share the cache of a layer with the same chunks",
        )
    if _reach(config) > _reach(target):
        raise CacheError(
            f"layer {prefix!r} sees {_reach(config)} tokens back, its KV sharing target {_reach(target)}",
            "no more than the target: what left the target's window may be gone from the cache",
            "share the cache of a layer with a window as large",
        )


def _reach(config: AttentionConfig) -> float:
    """Return how many tokens a layer sees to the left, itself included."""
    if config.sliding_window is None or config.mm_prefix == "full":
        return float("inf")
    return config.sliding_window


def step_configs(base: AttentionConfig, device: DeviceInfo) -> tuple[dict[StepKind, str], dict[StepKind, str]]:
    """Encode the config of every kind of step that metadata can ask of a layer.

    Done once at binding, so that compiled code looks up a finished string.

    Returns:
        Encoded configs of what the backend accepts, and reasons for what it refuses.
    """
    accepted: dict[StepKind, str] = {}
    refused: dict[StepKind, str] = {}
    for causality in ("causal", "bidirectional", "per_request"):
        for tree in (False, True):
            for ranges in (False, True):
                kind = (causality, tree, ranges)
                mm_prefix = "none"
                if ranges:
                    mm_prefix = "full" if base.mm_prefix == "none" else base.mm_prefix
                try:
                    config = base.replace(causality=causality, tree_bias=tree, mm_prefix=mm_prefix)
                except ConfigError as error:
                    refused[kind] = str(error)
                    continue
                explanation = selector.explain(config, device)
                if explanation.chosen is None:
                    refused[kind] = explanation.problem()
                else:
                    accepted[kind] = config.encode()
    return accepted, refused
