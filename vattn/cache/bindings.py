"""Tell that a layer was bound to another KV cache since something was made for its cache.

One count of all bindings in the process: where it has not moved, no layer needs to be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

from torch import Tensor

from vattn.cache.layout import num_blocks_of
from vattn.config.mla import MLAConfig

_epoch = 0
_claims: dict[int, int] = {}
"""By the address of a storage: the epoch in which it was taken last."""


def count_binding() -> None:
    """Begin a new epoch: a layer has got or lost a cache, or a cache has another user."""
    global _epoch
    _epoch += 1


def take_cache(storage: Tensor) -> None:
    """Note that the caller writes to blocks of its choice from now on, so that no earlier user may go on."""
    count_binding()
    _claims[storage.data_ptr()] = _epoch


class CacheBindings:
    """The caches that some layers have, to be compared later. Keeps no layer alive; a copy of it knows no layers.

    Args:
        layers: the layers.
        describe: returns what must stay the same: `cache_kind`, `cache_address` or `cache_claim`.
    """

    def __init__(self, layers: Iterable[Any], describe: Callable[[Any], object]) -> None:
        self._before = [(ref(layer), describe(layer)) for layer in layers]
        self._describe, self._epoch = describe, _epoch

    def changed(self) -> Any | None:
        """Return the first layer with another cache, `None` if all have theirs."""
        epoch = _epoch
        if self._epoch == epoch:
            return None
        for found, before in self._before:
            layer = found()
            if layer is not None and self._describe(layer) != before:
                return layer
        self._epoch = epoch
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return CacheBindings, ((), self._describe)


def cache_kind(layer: Any) -> object:
    """Return what metadata depends on: the request with its backend, and the number of blocks."""
    return layer.config, cached_blocks(layer)


def cache_address(layer: Any) -> int | None:
    """Return where the cache is, which CUDA graphs hold; `None` without one."""
    cache = getattr(layer, "kv_cache", None)
    return None if cache is None else cache.data_ptr()


def cache_claim(layer: Any) -> object:
    """Return where the cache is, and which of its users is the newest."""
    address = cache_address(layer)
    return address, _claims.get(address or 0)


def cached_blocks(layer: Any) -> int | None:
    """Return how many blocks the cache of a layer has, `None` without a cache."""
    cache, config = getattr(layer, "kv_cache", None), getattr(layer, "config", None)
    if not isinstance(cache, Tensor) or config is None:
        return None
    keys = cache if isinstance(config, MLAConfig) else getattr(layer, "key_cache", None)
    return num_blocks_of(cache, config) if keys is None else keys.shape[0]
