"""Detect that a layer was bound to another KV cache since something was made for its cache; keep the format of caches.

One count of all bindings in the process: where it has not moved, no layer needs to be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

from torch import Tensor

from vattn.cache.layout import CacheGeometry, num_blocks_of
from vattn.cache.specs import MLAAttentionSpec
from vattn.config.mla import MLAConfig
from vattn.errors import CacheError

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


class _Formats:
    """The formats in which layers were bound to a cache, for as long as its tensor lives."""

    def __init__(self, address: int, cache: Tensor) -> None:
        self.names: set[str] = set()
        self.grouped = False
        self.cache = ref(cache, lambda _: _formats.pop(address) if _formats.get(address) is self else None)


_formats: dict[int, _Formats] = {}
"""By the address of a storage, or of an engine's keys."""


def describe_format(config: CacheGeometry | MLAConfig) -> str:
    """Return in words what two layers must have in common to read the same cache."""
    if isinstance(config, (MLAConfig, MLAAttentionSpec)):
        return f"{config.kv_cache_dtype}, blocks of {config.block_size} latent rows of {config.head_size}"
    # A cache of pairs holds all heads, each as wide as a key.
    pairs = config.head_pairs != "none"
    heads, width_v = config.num_kv_heads * (2 if pairs else 1), config.head_size if pairs else config.head_size_v
    widths = f"{config.head_size}" + (f" and {width_v}" if width_v != config.head_size else "")
    layout = f" {config.kv_cache_layout}" if heads > 1 else ""
    return f"{config.kv_cache_dtype}{layout}, blocks of {config.block_size} tokens, {heads} KV heads of {widths}"


def check_format(cache: Tensor, config: CacheGeometry | MLAConfig) -> None:
    """Refuse a format other than that of a cache; one that no layer was bound to takes any.

    Raises:
        CacheError: another format.
    """
    known, wanted = _formats.get(cache.data_ptr()), describe_format(config)
    if known is not None and known.cache() is not None and not known.grouped and wanted not in known.names:
        raise CacheError(
            f"a KV cache of {' or '.join(sorted(known.names))} used as one of {wanted}",
            "one format for a cache, for as long as a layer or variable holds it",
            "allocate another cache, or drop all layers of this one before its memory is used again",
        )


def note_format(cache: Tensor, config: CacheGeometry | MLAConfig) -> None:
    """Note the format of a cache, after `check_format`."""
    address = cache.data_ptr()
    if not cache.is_meta and cache.numel():
        known = _formats.get(address)
        if known is None or known.cache() is None:
            known = _formats[address] = _Formats(address, cache)
        known.names.add(describe_format(config))


def let_groups_share(cache: Tensor) -> None:
    """Let layers of other groups use a cache in their formats: each block belongs to one group."""
    known = _formats.get(cache.data_ptr())
    if known is not None:
        known.grouped = True


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
