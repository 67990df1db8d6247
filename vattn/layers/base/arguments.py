"""What the arguments of a layer mean: options checked, scales made, a config for every kind of step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vattn.backends import selector
from vattn.cache.layout import kv_cache_dtype, kv_cache_shape, num_blocks_of, shape_of_storage
from vattn.config.attention import AttentionConfig, AttentionType, CacheConfig
from vattn.config.device import BLOCK_SIZES, DeviceInfo
from vattn.errors import CacheError, ConfigError, ScaleError, ShapeError, StrideError, UnsupportedRequestError
from vattn.layers.base.scales import QuantConfig, make_scale
from vattn.ops.checks import check_cache, share_elements
from vattn.quantization.formats import dtype_name

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


_LAYERS = {
    AttentionType.DECODER: "Attention",
    AttentionType.ENCODER_DECODER: "CrossAttention",
    AttentionType.ENCODER: "EncoderOnlyAttention with attn_type='encoder', or vattn.MMEncoderAttention",
    AttentionType.ENCODER_ONLY: "EncoderOnlyAttention",
}
"""Which layer runs which type of attention."""


def check_type(layer: str, attn_type: str | AttentionType, *own: AttentionType) -> None:
    """Refuse attention types that are layers of their own; `own` are those of `layer`."""
    names = [t.value for t in AttentionType]
    if attn_type not in names:
        raise ConfigError(f"attn_type={attn_type!r}", ", ".join(names), "choose one of these names")
    if attn_type not in own:
        kind, allowed = AttentionType(attn_type), " or ".join(repr(each.value) for each in own)
        raise UnsupportedRequestError(f"attn_type={kind.value!r} in {layer}", allowed, f"use vattn.{_LAYERS[kind]}")


def check_configs(layer: str, cache_config: object, quant_config: object, *, exact_prefill: bool) -> None:
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


def alibi_kind(slopes: object, sqrt: bool | None) -> str:
    """Return the config's name of what `alibi_slopes` and `use_alibi_sqrt` mean."""
    if sqrt is not None and not isinstance(sqrt, bool):
        raise ConfigError(f"use_alibi_sqrt={sqrt!r:.60}", "True, False or None", "use_alibi_sqrt=True switches it on")
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


def own_cache_dtype(cache: CacheConfig, names: frozenset[str]) -> str:
    """Return the cache dtype of a layer with some skip names: `"auto"` where the config leaves the layer out."""
    return cache.cache_dtype if names.isdisjoint(cache.kv_cache_dtype_skip_layers) else "auto"


def layer_scales(
    layer: Any, cache_dtype: str, *, quantised: bool, calculate: bool = False, shared: bool = False
) -> dict[str, Tensor | None]:
    """Make the scales that a layer's `quant_config` gives, by the names of their buffers.

    Args:
        cache_dtype: of this layer; one that `kv_cache_dtype_skip_layers` names has no use for given scales.
        quantised: whether keys and values are.
        calculate: whether the layer calculates their scales from its first tokens.
        shared: whether another layer owns the cache. Its scales replace the placeholders when a cache is bound.

    Raises:
        ScaleError: scales that are missing or too many: what is FP8 always has decided scales.
    """
    quant, skipped = layer.quant_config, cache_dtype != layer.cache_config.cache_dtype
    if layer.cache_config.calculate_kv_scales and not quantised and not skipped:
        raise ScaleError(
            f"calculate_kv_scales=True with cache_dtype={cache_dtype!r} in layer {layer.prefix!r}",
            "calculated scales with a quantised cache; packed formats of a scale per token keep their own",
            "set cache_dtype='fp8' or drop calculate_kv_scales",
        )
    sizes: tuple[int, ...] = (1, layer.num_kv_heads)
    scales: dict[str, Tensor | None] = dict.fromkeys(("k_scale", "v_scale", "q_scale", "output_scale"))
    for name in ("k_scale", "v_scale"):
        source = None if skipped else getattr(quant, name)
        reason = None
        if not quantised:
            reason = (
                f"with cache_dtype={cache_dtype!r}",
                "'unit', or scales with a quantised cache",
                "set cache_dtype='fp8' or ",
            )
        elif shared:
            reason = "of a shared KV cache", "the target's scales", ""
        elif calculate:
            reason = "and calculate_kv_scales=True", "one of the two", "drop the calculation, or "
        # Without a scale, values are stored as they are, as under one of 1.
        unit = not quantised and isinstance(source, str) and source == "unit"
        if source is not None and reason is not None and not unit:
            raise ScaleError(
                f"{name} given {reason[0]} in layer {layer.prefix!r}", reason[1], f"{reason[2]}drop the scale"
            )
        if source is None and reason is None:
            one = name == "v_scale" and quant.k_scale is not None
            raise ScaleError(
                f"layer {layer.prefix!r} has cache_dtype={cache_dtype!r} and no {name}",
                "a number, a tensor, 'unit', or CacheConfig(calculate_kv_scales=True)",
                "v_scale='k_scale' if one scale is for both" if one else "QuantConfig('unit', 'unit') if 1.0 is meant",
            )
        if quantised:
            scales[name] = make_scale(name, "unit" if source is None else source, sizes)
    k_scale, v_scale = scales["k_scale"], scales["v_scale"]
    if k_scale is not None and v_scale is not None and k_scale.numel() != v_scale.numel():
        raise ScaleError(
            f"k_scale has {k_scale.numel()} values and v_scale {v_scale.numel()}",
            "the same granularity for both",
            "repeat the single value for every KV head",
        )
    if quant.query_format != "none":
        if quant.q_scale is None and not calculate:
            raise ScaleError(
                f"layer {layer.prefix!r} has an FP8 query and no q_scale",
                "a number, a tensor, 'unit', or CacheConfig(calculate_kv_scales=True) with a quantised cache",
                "QuantConfig(q_scale='unit') if 1.0 is meant",
            )
        scales["q_scale"] = make_scale("q_scale", "unit" if quant.q_scale is None else quant.q_scale, sizes)
    if quant.output_scale is not None:
        scales["output_scale"] = make_scale("output_scale", quant.output_scale, (1,))
    return scales


def check_storage(storage: Tensor, config: AttentionConfig) -> None:
    """Refuse a storage that is not what the config's layout needs."""
    blocks = num_blocks_of(storage, config)
    shape, dtype = shape_of_storage(storage, config, blocks), kv_cache_dtype(config)
    if tuple(storage.shape) != shape or storage.dtype != dtype or not storage.is_contiguous():
        raise CacheError(
            f"KV cache storage {tuple(storage.shape)} of {dtype_name(storage.dtype)}, strides {storage.stride()}",
            f"contiguous {kv_cache_shape(config, max(blocks, 1))} of {dtype_name(dtype)}, any number of blocks",
            "use vattn.allocate_kv_cache(model), or give the layer the CacheConfig that the storage was made for",
        )


def check_views(key_cache: Tensor, value_cache: Tensor, config: AttentionConfig) -> None:
    """Refuse keys and values of an engine that the ops would refuse, or that share elements."""
    if not isinstance(value_cache, Tensor):
        raise CacheError(
            f"a value_cache of type {type(value_cache).__name__}", "a tensor", "pass dtype= and target= by their names"
        )
    _check_order(key_cache, config)
    check_cache(key_cache, value_cache, config, key_cache.device)
    if share_elements(key_cache, value_cache):
        raise StrideError(
            f"keys and values of strides {key_cache.stride()} and {value_cache.stride()} that share elements",
            "memory of their own for both",
            "pass views that do not overlap",
        )


def _check_order(key_cache: Tensor, config: AttentionConfig) -> None:
    """Refuse keys with heads before tokens, or of another block size, and say how to pass or allocate them."""
    if key_cache.dim() != 4 or key_cache.shape[1:3] == (config.block_size, config.num_kv_heads):
        return
    if key_cache.shape[1] == config.num_kv_heads and key_cache.shape[2] in BLOCK_SIZES:
        fix = "pass key_cache.transpose(1, 2) and value_cache.transpose(1, 2)"
    elif key_cache.shape[2] != config.num_kv_heads:
        return
    elif key_cache.shape[1] in BLOCK_SIZES:
        fix = f"give the layer CacheConfig(block_size={key_cache.shape[1]})"
    else:
        fix = f"allocate blocks of {config.block_size} tokens, or of another size in {BLOCK_SIZES}"
    raise ShapeError(
        f"key_cache has shape {tuple(key_cache.shape)}",
        f"[num_blocks, {config.block_size}, {config.num_kv_heads}, {config.head_size}]: blocks, tokens, heads, width",
        fix,
    )


def layout_of(key_cache: Tensor) -> str:
    """Return the layout that the strides of keys `[num_blocks, block_size, num_kv_heads, head_size]` show."""
    return "HND" if key_cache.dim() == 4 and key_cache.stride(2) > key_cache.stride(1) else "NHD"


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
