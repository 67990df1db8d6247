"""Whole blocks copied between storages, or inside of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from vattn.cache.layout import CacheGeometry, kv_cache_dtype, shape_of_storage
from vattn.errors import CacheError
from vattn.quantization.formats import dtype_name

if TYPE_CHECKING:
    from vattn.cache.allocation import KVCacheAllocation

BlockMapping: TypeAlias = Tensor | Sequence[tuple[int, int]]

_NO_PAIRS = torch.empty((0, 2), dtype=torch.int64, device="cpu")


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
        axis = _block_axis(storage)
        shape, dtype = shape_of_storage(storage, geometry, storage.shape[axis]), kv_cache_dtype(geometry)
        if tuple(storage.shape) != shape or storage.dtype != dtype:
            raise CacheError(
                f"{name} storage {tuple(storage.shape)} of {dtype_name(storage.dtype)}",
                f"{shape} of {dtype_name(dtype)}",
                "pass the spec that the storage was allocated for",
            )
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
    if not isinstance(storages, Sequence) or not all(isinstance(cache, Tensor) for cache in storages):
        raise CacheError(
            f"kv_caches of type {type(kv_caches).__name__}",
            "a list of storages, or what allocate_kv_cache returned",
            "pass cache.kv_caches",
        )
    distinct = list({(cache.device, cache.data_ptr(), cache.shape): cache for cache in storages}.values())
    num_blocks = min((cache.shape[_block_axis(cache)] for cache in distinct), default=0)
    pairs = _check_mapping(block_mapping, num_blocks, num_blocks)
    for cache in distinct:
        _copy_pairs(cache, cache, pairs)


def _block_axis(storage: Tensor) -> int:
    """Return the block dimension: plain storages are `[2, blocks, ...]`, those in bytes `[blocks, bytes]`."""
    if not isinstance(storage, Tensor) or storage.dim() not in (2, 5):
        raise CacheError(
            f"a storage of shape {tuple(getattr(storage, 'shape', ()))} and type {type(storage).__name__}",
            "2 or 5 dimensions, as vattn.kv_cache_shape makes them",
            "pass the raw storage, not a view of its keys or values",
        )
    return 0 if storage.dim() == 2 else 1


def _check_mapping(mapping: BlockMapping, num_sources: int, num_destinations: int) -> Tensor:
    """Return the mapping on the CPU, checked."""
    if not isinstance(mapping, Tensor):
        mapping = _as_tensor(mapping)
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


def _as_tensor(pairs: Sequence[tuple[int, int]]) -> Tensor:
    try:
        return torch.tensor([tuple(pair) for pair in pairs], device="cpu") if len(pairs) else _NO_PAIRS
    except (TypeError, ValueError) as error:
        raise CacheError(
            f"block_mapping {pairs!r}", "pairs (source block, destination block)", "pass [(3, 7)]"
        ) from error


def _copy_pairs(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    axis = _block_axis(source)
    blocks = source.index_select(axis, pairs[:, 0].to(source.device)).to(destination.device)
    destination.index_copy_(axis, pairs[:, 1].to(destination.device), blocks)
