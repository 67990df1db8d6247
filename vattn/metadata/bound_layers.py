"""A layer as a builder found it bound to its cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor, nn

from vattn.cache.layout import num_blocks_of
from vattn.config.attention import AttentionConfig
from vattn.config.mla import MLAConfig
from vattn.errors import CacheError


class BoundLayer:
    """A layer, and the cache that it was bound to when a builder was made; it keeps neither alive.

    Attributes:
        layer: returns the layer, `None` if it is gone.
        config: of the layer.
        num_blocks: of its cache, `None` without one.
    """

    def __init__(self, layer: Any, config: AttentionConfig, num_blocks: int | None) -> None:
        self.layer: Callable[[], Any] = _gone if layer is None else ref(layer)
        self.config, self.num_blocks = config, num_blocks

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a builder may be there for copies of its layers, of which it knows nothing.
        return BoundLayer, (None, self.config, self.num_blocks)

    def check(self, layer: Any) -> None:
        """Refuse the layer if it was bound to another cache since, unless that one is as large, for the same request.

        Raises:
            CacheError: other blocks, or another request.
        """
        config = layer.config
        if config is self.config or config is None:
            return  # Binding gives it another one; without any it has no cache by now, and says so when it runs.
        num_blocks = _blocks_of(layer, config)
        if num_blocks != self.num_blocks or config != self.config:
            raise CacheError(
                f"layer {layer.prefix!r} has another cache since the builder was made: {num_blocks} blocks of "
                f"{config.encode()}",
                f"{self.num_blocks} blocks of {self.config.encode()}",
                "make a new builder after allocating caches",
            )
        self.config = config


def _gone() -> None:
    return None


def _blocks_of(layer: nn.Module, config: AttentionConfig) -> int | None:
    cache = getattr(layer, "kv_cache", None)
    if not isinstance(cache, Tensor):
        return None
    return cache.shape[0] if isinstance(config, MLAConfig) else num_blocks_of(cache, config)
