"""Which step of its builder some metadata describes: a builder writes all of its steps into the same tensors."""

from __future__ import annotations

from typing import Any

from vattn.cache.bindings import CacheBindings
from vattn.errors import CacheError, MetadataError


class BuiltStep:
    """One step of a builder; its metadata holds it, and so do copies and parts of that metadata.

    Compiled code reads only `rewritten`, which is `None` in every step that may run, so that no step recompiles.

    Attributes:
        lineage: the steps of the same builder.
        number: which of them this is, from 1.
        rewritten: what errors call a step over which another one was written; `None` for the newest. A text: Dynamo
            would take numbers for sizes that vary, and could not print them.
    """

    __slots__ = ("lineage", "number", "rewritten")

    def __init__(self, lineage: Lineage, number: int) -> None:
        self.lineage, self.number = lineage, number
        self.rewritten: str | None = None


class Lineage:
    """The steps of one builder, of which its tensors hold only the newest, and the caches that they are for.

    Args:
        bindings: the caches that the builder's layers had when it was made.
        num_blocks: blocks of a cache that the builder is for, `None` if it does not know.
    """

    __slots__ = ("_newest", "bindings", "num_blocks")

    def __init__(self, bindings: CacheBindings, num_blocks: int | None) -> None:
        self.bindings, self.num_blocks = bindings, num_blocks
        self._newest = BuiltStep(self, 0)

    def begin(self) -> BuiltStep:
        """Return the step that is about to be written; the one before is rewritten from now on."""
        before, number = self._newest, self._newest.number + 1
        before.rewritten = f"step {before.number} of a builder, over which its step {number} has been written"
        self._newest = BuiltStep(self, number)
        return self._newest

    def check_caches(self) -> None:
        """Refuse the steps if a layer of the builder was bound to another cache, unless that is an equal one.

        Raises:
            CacheError: a cache of other blocks, or for another request.
        """
        layer = self.bindings.changed()
        if layer is not None:
            raise CacheError(
                f"{called(layer)} has another cache since the builder was made, or none",
                "the cache that the builder was made for, or an equal one",
                "make a new builder after allocating caches",
            )

    def check_layer(self, layer: Any) -> None:
        """Refuse the steps for a layer with fewer cache blocks than they are for: kernels would drop the rest.

        Raises:
            CacheError: as `check_caches`.
            MetadataError: the layer is none of the builder's, and its cache is too small.
        """
        self.check_caches()
        blocks = getattr(layer, "num_blocks", None)
        if self.num_blocks is None or blocks is None or blocks >= self.num_blocks:
            return
        raise MetadataError(
            f"metadata of a builder for {self.num_blocks} blocks in {called(layer)} with a cache of {blocks}",
            f"a builder for at most {blocks} blocks",
            "build the step with a builder of this layer, AttentionMetadataBuilder(..., layers=model)",
        )


def called(layer: Any) -> str:
    """Return what errors call a layer: by its prefix, if its class has one."""
    return f"layer {layer.prefix!r}" if hasattr(layer, "prefix") else type(layer).__name__


def is_rewritten(metadata: Any) -> bool:
    """Return whether its builder has written a later step over this one; reads nothing that varies by step."""
    built: BuiltStep | None = metadata._built
    return built is not None and built.rewritten is not None


def rewritten(metadata: Any, where: str) -> MetadataError:
    """Return the error of `where`, which got such a step."""
    return MetadataError(
        f"{where} got {metadata._built.rewritten}",
        "the newest step of a builder: all its steps share their tensors",
        "run what build() or advance() returned last, and build steps that must last with a builder of their own",
    )
