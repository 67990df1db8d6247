"""Copy whole blocks between storages, and tokens from slot to slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from vattn.cache.allocation import KVCacheAllocation
from vattn.cache.bindings import check_format
from vattn.cache.layout import CacheGeometry, kv_cache_dtype, op_views, packed_views, shape_of_storage
from vattn.cache.specs import MLAAttentionSpec
from vattn.config.attention import AttentionConfig
from vattn.config.typed import is_plain, typed_on_error
from vattn.errors import CacheError, CacheNotBoundError, ConfigError, DeviceError, ShapeError, UnsupportedRequestError
from vattn.quantization.formats import dtype_name

BlockMapping: TypeAlias = Tensor | Sequence[tuple[int, int]]


@typed_on_error
def swap_blocks(source: Tensor, destination: Tensor, block_mapping: BlockMapping, geometry: CacheGeometry) -> None:
    """Copy whole blocks, keys and values, from one storage to another, on the same device or not.

    All sources are read before any destination is written, so both may be the same storage.

    Args:
        source, destination: raw storages of the same geometry; their numbers of blocks may differ.
        block_mapping: pairs `(source block, destination block)`, or int64 `[n, 2]`; a GPU tensor costs a sync.
        geometry: the layer's `KVCacheSpec` or `AttentionConfig`.

    Raises:
        CacheError: an id out of range, a destination named twice, or a storage of another geometry; nothing is copied.
    """
    for name, storage in (("source", source), ("destination", destination)):
        blocks = storage.shape[_block_axis(storage)]
        if isinstance(geometry, MLAAttentionSpec):
            shape, dtype = geometry.storage_shape(blocks), geometry.storage_dtype
        else:
            shape, dtype = shape_of_storage(storage, geometry, blocks), kv_cache_dtype(geometry)
        if tuple(storage.shape) != shape or storage.dtype != dtype:
            raise CacheError(
                f"{name} storage {tuple(storage.shape)} of {dtype_name(storage.dtype)}",
                f"{shape} of {dtype_name(dtype)}",
                "pass the spec that the storage was allocated for",
            )
        check_format(storage, geometry)
    if source.dim() == 2 and source.shape[1] != destination.shape[1]:
        raise CacheError(
            f"blocks of {source.shape[1]} and {destination.shape[1]} bytes, padding included",
            "storages with the same padding",
            "allocate both for the same spec",
        )
    pairs = _check_mapping(
        block_mapping, source.shape[_block_axis(source)], destination.shape[_block_axis(destination)]
    )
    _copy_pairs(source, destination, pairs)


@typed_on_error
def copy_blocks(
    kv_caches: Sequence[Tensor] | Mapping[str, Tensor] | KVCacheAllocation, block_mapping: BlockMapping
) -> None:
    """Copy whole blocks, keys and values, inside every layer's storage: what copy on write needs.

    All sources are read before any destination is written. A storage that several layers share is copied once.

    Args:
        kv_caches: the storages, by layer or in any order, or what `allocate_kv_cache` returned.
        block_mapping: pairs `(source block, destination block)`, or int64 `[n, 2]`; a GPU tensor costs a sync.

    Raises:
        CacheError: an id out of range or a destination named twice; nothing is copied, in no layer.
    """
    storages: Any = getattr(kv_caches, "kv_caches", kv_caches)
    if isinstance(storages, Mapping):
        storages = list(storages.values())
    distinct = list({(cache.device, cache.data_ptr(), cache.shape): cache for cache in storages}.values())
    num_blocks = min((cache.shape[_block_axis(cache)] for cache in distinct), default=0)
    pairs = _check_mapping(block_mapping, num_blocks, num_blocks)
    for cache in distinct:
        _copy_pairs(cache, cache, pairs)


def _block_axis(storage: Tensor) -> int:
    """Return the block dimension: plain storages are `[2, blocks, ...]`, those in bytes and latents `[blocks, ...]`."""
    if not is_plain(storage) or storage.dim() not in (2, 3, 5) or storage.is_meta:
        raise CacheError(
            f"a storage of shape {tuple(getattr(storage, 'shape', ()))} and type {type(storage).__name__}",
            "what allocate_kv_cache makes: 5 dimensions, 2 in bytes, 3 of latents, and values",
            "pass the raw storage, not a view of its keys or values",
        )
    return 1 if storage.dim() == 5 else 0


def _check_mapping(mapping: BlockMapping, num_sources: int, num_destinations: int) -> Tensor:
    """Return the mapping on the CPU, checked."""
    if not isinstance(mapping, Tensor):
        try:
            rows = [tuple(pair) for pair in mapping]
            mapping = torch.tensor(rows or [(0, 0)], device="cpu")[: len(rows)]
        except (TypeError, ValueError) as error:
            raise CacheError(
                f"block_mapping {mapping!r}", "pairs (source block, destination block)", "pass [(3, 7)]"
            ) from error
    if mapping.dtype != torch.int64 or mapping.dim() != 2 or mapping.shape[1] != 2:
        raise CacheError(
            f"block_mapping of shape {tuple(mapping.shape)} and {dtype_name(mapping.dtype)}",
            "int64 [n, 2], rows (source block, destination block)",
            "torch.tensor([(3, 7)])",
        )
    if mapping.device.type == "meta":
        raise CacheError(
            "block_mapping on meta", "pairs with numbers in them", "make it outside of torch.device('meta')"
        )
    pairs = mapping.cpu()
    for column, name, limit in ((0, "source", num_sources), (1, "destination", num_destinations)):
        ids = pairs[:, column]
        wrong = ids[(ids < 0) | (ids >= limit)].tolist()
        if wrong:
            raise CacheError(f"{name} block(s) {wrong} in block_mapping", f"0 to {limit - 1}", "check the block tables")
    twice = [block for block, count in Counter(pairs[:, 1].tolist()).items() if count > 1]
    if twice:
        raise CacheError(
            f"destination block(s) {twice} named twice in block_mapping", "each once", "drop one of the rows"
        )
    return pairs


def _copy_pairs(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    axis = _block_axis(source)
    blocks = source.index_select(axis, pairs[:, 0].to(source.device)).to(destination.device)
    destination.index_copy_(axis, pairs[:, 1].to(destination.device), blocks)


@typed_on_error
def move_slots(layers: nn.Module | Iterable[nn.Module], source: Tensor, target: Tensor) -> None:
    """Copy the keys and values of some tokens to other slots, in every layer's cache.

    Use it after verifying a tree of drafts: the accepted nodes have other nodes between them, and the next step expects
    them one after the other.

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
        if slots.dtype != torch.int64 or slots.dim() != 1 or slots.shape != source.shape:
            raise ShapeError(
                f"{name} is {slots.dtype} {tuple(slots.shape)}", f"int64 [{source.numel()}]", "pass one slot per token"
            )
    for cache, _, _ in caches:
        if {source.device, target.device} != {cache.device}:
            raise DeviceError(
                f"slots on {source.device} and {target.device} for a cache on {cache.device}",
                "one device",
                "move the slots there",
            )
    if source.numel():
        for key_cache, value_cache, config in caches:
            _move(_stored(key_cache, value_cache, config), config.block_size, source, target)


def _bound_caches(layers: nn.Module | Iterable[nn.Module]) -> list[tuple[Tensor, Tensor | None, AttentionConfig]]:
    found: dict[tuple[int, ...], tuple[Tensor, Tensor | None, AttentionConfig]] = {}
    groups: list[object] = []
    modules: Iterable[Any] = layers.modules() if isinstance(layers, nn.Module) else layers
    for layer in modules:
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
            keys, values = layer.cache_views() if hasattr(layer, "cache_views") else op_views(cache, config)
            found.setdefault((keys.data_ptr(), *keys.shape), (keys, values, config))
    if len(groups) > 1:
        raise ConfigError(
            f"layers of {len(groups)} groups of a hybrid cache, or block sizes",
            "layers that share one block table",
            "call move_slots once per group, with the slots of its table",
        )
    return list(found.values())


def _move(stored: list[Tensor], size: int, source: Tensor, target: Tensor) -> None:
    for rows in stored:
        slots = rows.shape[0] * size
        valid = (source >= 0) & (source < slots) & (target >= 0) & (target < slots)
        # What is dropped repeats the first valid copy; without one, slot 0 gets its own content.
        first = valid.to(torch.uint8).argmax()
        index = torch.where(valid, torch.arange(len(valid), device=valid.device), first)
        any_valid = valid.any()
        from_slot = torch.where(any_valid, source[index], 0)
        to_slot = torch.where(any_valid, target[index], 0)
        rows[to_slot // size, to_slot % size] = rows[from_slot // size, from_slot % size]


def _stored(key_cache: Tensor, value_cache: Tensor | None, config: AttentionConfig) -> list[Tensor]:
    """Return views `[num_blocks, block_size, ...]` that cover all bytes of every token."""
    if value_cache is None:
        return [part for rows in packed_views(key_cache, config) for part in rows if part is not None]
    # FP8 is copied as bytes.
    return [part.view(torch.uint8) if part.itemsize == 1 else part for part in (key_cache, value_cache)]
