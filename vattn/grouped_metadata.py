"""A step of a hybrid model: one part of metadata for each group of layers, equal but for block table and slots."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vattn.errors import MetadataError
from vattn.kv_cache_groups import lifetime
from vattn.kv_cache_spec import KVCacheSpec
from vattn.metadata import AttentionMetadata, is_rewritten, rewritten


class CacheGroup:
    """Where the layers of one group find their part of the step; they and the builder hold the same object.

    Compiled code reads `step` and no index, so that equal layers of different groups share one graph.

    Attributes:
        index, count: which group of how many.
        spec: how long tokens are kept.
        step: this group's part of the metadata that `vattn.forward_context` holds.
    """

    def __init__(self, index: int, count: int, spec: KVCacheSpec) -> None:
        self.index, self.count, self.spec = index, count, spec
        self.step: AttentionMetadata | None = None

    @property
    def kind(self) -> str:
        """`"full"`, `"window"`, `"chunk"` or `"cross"`."""
        return lifetime(self.spec)[0]

    def part(
        self, metadata: AttentionMetadata | None, in_context: AttentionMetadata | None
    ) -> AttentionMetadata | None:
        """Return this group's part of a step: of `metadata`, or of the one in the forward context; `None` for neither.

        Raises:
            MetadataError: metadata without groups, or of another model's.
        """
        if metadata is None and in_context is None:
            return None
        step = self.step
        if metadata is not None:
            step = metadata.parts[self.index] if isinstance(metadata, GroupedMetadata) else None
        if step is None:
            raise MetadataError(
                f"metadata without a part for group {self.index} of {self.count}",
                "metadata of the model's own GroupedMetadataBuilder",
                "build steps with GroupedMetadataBuilder(..., layers=model)",
            )
        if is_rewritten(step):
            raise rewritten(step, f"a layer of group {self.index} of {self.count}")
        return step

    def __repr__(self) -> str:
        return f"CacheGroup({self.index} of {self.count}, {self.kind})"


@dataclass(eq=False)
class GroupedMetadata(AttentionMetadata):
    """A step of a model whose cache has groups. Its own fields are those of the first group.

    Attributes:
        parts: by group; everything but `block_table` and `slot_mapping` is shared.
        cache_groups: who is told of the parts while the step is the forward context.
    """

    parts: tuple[AttentionMetadata, ...] = ()
    cache_groups: tuple[CacheGroup, ...] = ()

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are present by name; those of further groups as `groups.<index>.<name>`."""
        found = super().tensors()
        for index, part in enumerate(self.parts[1:], 1):
            if part.block_table is not self.block_table:
                found[f"groups.{index}.block_table"] = part.block_table
                found[f"groups.{index}.slot_mapping"] = part.slot_mapping
        return found

    def check(self, block_size: int, num_blocks: int | None = None) -> None:
        """Run `AttentionMetadata.check` for every part."""
        for part in self.parts:
            part.check(block_size, num_blocks)
