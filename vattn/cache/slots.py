"""Tokens moved from slot to slot inside of KV caches."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from vattn.cache.stored_rows import stored_views
from vattn.config.attention import AttentionConfig
from vattn.errors import CacheNotBoundError, ConfigError, DeviceError, ShapeError, UnsupportedRequestError


def move_slots(layers: nn.Module | Iterable[nn.Module], source: Tensor, target: Tensor) -> None:
    """Copy the keys and values of some tokens to other slots, in every layer's cache.

    What verifying a tree of drafts needs: the accepted nodes lie behind the root in the tree's order, with others
    between them, and the next step expects them one behind the other.

    Args:
        layers: a model or layers with bound caches; a cache that several share is written once.
        source, target: int64 `[N]`, slots `block * block_size + offset`. Where either is out of range, -1 included,
            nothing is copied. All sources are read before any target is written; of equal targets any may win.

    Raises:
        CacheNotBoundError: a layer without a cache.
        UnsupportedRequestError: a cache of latents.
        ShapeError, DeviceError, ConfigError: slots of another shape, device or dtype, no layer, or layers with block
            tables of their own; nothing is copied.

    Bytes are copied, so scales and formats do not matter. It does not wait for the device, and a CUDA graph may capture
    it.

    Example:
        >>> import torch, vattn
        >>> layer = vattn.Attention(num_heads=1, head_size=8, scale=1.0)
        >>> cache = vattn.allocate_kv_cache(layer, num_blocks=4, dtype=torch.float32).kv_caches[0]
        >>> cache[:, 1, 6] = 7.0
        >>> vattn.move_slots(layer, source=torch.tensor([22]), target=torch.tensor([17]))
        >>> float(cache[0, 1, 1].mean())
        7.0
    """
    caches = _bound_caches(layers) if isinstance(layers, Iterable | nn.Module) else []
    if not caches:
        raise ConfigError(f"layers={layers!r:.60} without an attention layer", "a model or layers", "pass the model")
    for name, slots in (("source", source), ("target", target)):
        if not isinstance(slots, Tensor):
            raise ShapeError(f"{name} is {slots!r:.60}", "an int64 tensor of slots", "torch.tensor(slots)")
        if slots.dtype != torch.int64 or slots.dim() != 1 or slots.shape != source.shape:
            raise ShapeError(
                f"{name} is {slots.dtype} {tuple(slots.shape)}", f"int64 [{source.numel()}]", "pass one slot per token"
            )
    for cache, _ in caches:
        if {source.device, target.device} != {cache.device}:
            raise DeviceError(
                f"slots on {source.device} and {target.device} for a cache on {cache.device}",
                "one device",
                "move the slots there",
            )
    if source.numel():
        for cache, config in caches:
            _move(cache, config, source, target)


def _bound_caches(layers: nn.Module | Iterable[nn.Module]) -> list[tuple[Tensor, AttentionConfig]]:
    found: dict[tuple[int, ...], tuple[Tensor, AttentionConfig]] = {}
    groups: list[object] = []
    for layer in layers.modules() if isinstance(layers, nn.Module) else layers:
        if not hasattr(layer, "bind_kv_cache"):
            continue
        cache, config = layer.kv_cache, layer.config
        if config is not None and not isinstance(config, AttentionConfig):
            raise UnsupportedRequestError(
                f"move_slots with a cache of {type(config).__name__}",
                "caches of keys and values",
                "recompute the tokens",
            )
        if not isinstance(cache, Tensor) or config is None:
            raise CacheNotBoundError(
                f"layer {getattr(layer, 'prefix', '')!r} has no KV cache",
                "layers with a bound cache",
                "call vattn.allocate_kv_cache(model, num_blocks=...)",
            )
        group = (getattr(layer, "kv_cache_group", None), config.block_size)
        if config.attn_type == "decoder" and group not in groups:
            groups.append(group)
        if config.attn_type == "decoder":
            found.setdefault((cache.data_ptr(), *cache.shape), (cache, config))
    if len(groups) > 1:
        raise ConfigError(
            f"layers of {len(groups)} groups of a hybrid cache, or block sizes",
            "layers that share one block table",
            "call move_slots once per group, with the slots of its table",
        )
    return list(found.values())


def _move(cache: Tensor, config: AttentionConfig, source: Tensor, target: Tensor) -> None:
    size = config.block_size
    for rows in _stored(cache, config):
        slots = rows.shape[0] * size
        valid = (source >= 0) & (source < slots) & (target >= 0) & (target < slots)
        # What is dropped repeats the first valid copy; without one, slot 0 gets its own content.
        first = valid.to(torch.uint8).argmax()
        index = torch.where(valid, torch.arange(len(valid), device=valid.device), first)
        any_valid = valid.any()
        came = torch.where(any_valid, source[index], 0)
        goes = torch.where(any_valid, target[index], 0)
        rows[goes // size, goes % size] = rows[came // size, came % size]


def _stored(cache: Tensor, config: AttentionConfig) -> list[Tensor]:
    """Return views `[num_blocks, block_size, ...]` that cover all bytes of every token."""
    if config.head_pairs == "none":
        return [part for rows in stored_views(cache, config) for part in rows if part is not None]
    # Pairs of heads lie in an ordinary cache, of which a config names one half. FP8 as bytes.
    return [part.view(torch.uint8) if part.element_size() == 1 else part for part in cache.unbind(0)]
