"""Which step of its builder some metadata describes, and whether a later one has been written over it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vattn.cache.layout import num_blocks_of
from vattn.config.mla import MLAConfig
from vattn.errors import MetadataError

if TYPE_CHECKING:
    from vattn.metadata.bound_layers import BoundLayer


class BuiltStep:
    """One step among those that a builder wrote into the same tensors; copies and parts of its metadata hold it too.

    Compiled code reads `rewritten` alone, which is `None` in every step that may run: the numbers recompile nothing.

    Attributes:
        number: which step of its builder, from 1.
        rewritten: what errors call a step over which another one was written; `None` for the newest. No numbers:
            Dynamo would take those for sizes that vary, and could not print them.
    """

    __slots__ = ("_steps", "number", "rewritten")

    def __init__(self, steps: BuiltSteps, number: int) -> None:
        self._steps, self.number = steps, number
        self.rewritten: str | None = None

    def check_cache(self, layer: Any) -> None:
        """Refuse a layer that was bound to another cache since the builder was made.

        Raises:
            CacheError: other blocks, or another request.
            MetadataError: the builder is for more blocks than a layer has that it does not know: kernels see no keys
                behind the end of a cache.
        """
        bound, most = self._steps.bound.get(id(layer)), self._steps.num_blocks
        if bound is not None and bound.layer() is layer:
            bound.check(layer)
        elif most is not None:
            _check_blocks(layer, most)

    def check_caches(self) -> None:
        """Refuse the step if any layer of its builder was bound to another cache; see `check_cache`."""
        self._steps.check_caches()

    def follow(self) -> BuiltStep:
        """Return the step that is about to be written over the newest one of the same builder."""
        return self._steps.begin()


class BuiltSteps:
    """The steps of one builder, of which its tensors hold the newest alone, and the layers that it builds for.

    Attributes:
        bound: the layers and their caches, by the layers' identities.
        num_blocks: how many blocks of a cache the builder is for, `None` if it does not know.
    """

    __slots__ = ("_newest", "bound", "num_blocks")

    def __init__(self, bound: Iterable[BoundLayer] = (), num_blocks: int | None = None) -> None:
        self.num_blocks = num_blocks
        self.bound = {id(each.layer()): each for each in bound}
        self._newest = BuiltStep(self, 0)

    def check_caches(self) -> None:
        """Refuse layers that were bound to another cache since.

        Raises:
            CacheError: other blocks, or another request.
        """
        for bound in self.bound.values():
            layer = bound.layer()
            if layer is not None:
                bound.check(layer)

    def begin(self) -> BuiltStep:
        """Return the step that is about to be written; the one before is rewritten from now on."""
        before, number = self._newest, self._newest.number + 1
        before.rewritten = f"step {before.number} of a builder, over which its step {number} has been written"
        self._newest = BuiltStep(self, number)
        return self._newest


def _check_blocks(layer: Any, most: int) -> None:
    """Refuse a layer whose cache has fewer blocks than a builder is for; one without a cache says so when it runs."""
    config, cache = getattr(layer, "config", None), getattr(layer, "kv_cache", None)
    # The blocks of encoder states are counted apart.
    if config is None or not isinstance(cache, Tensor) or getattr(config, "attn_type", "") == "encoder_decoder":
        return
    own = cache.shape[0] if isinstance(config, MLAConfig) else num_blocks_of(cache, config)
    if own < most:
        raise MetadataError(
            f"metadata of a builder for {most} blocks in layer {layer.prefix!r}, whose cache has {own}",
            f"a builder for at most {own} blocks",
            "build the step with a builder of this layer, AttentionMetadataBuilder(..., layers=model)",
        )
