"""A step of a hybrid model: one part of metadata for each group of layers, equal but for block table and slots."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from vattn.cache.groups import CacheGroup
from vattn.metadata.attention_metadata import AttentionMetadata

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(eq=False)
class GroupedMetadata(AttentionMetadata):
    """A step of a model with a cache in groups. Its own fields describe the first group.

    Attributes:
        parts: by group; everything but `block_table` and `slot_mapping` is shared.
        cache_groups: hold the parts while the step is the forward context.
    """

    parts: tuple[AttentionMetadata, ...] = ()
    cache_groups: tuple[CacheGroup, ...] = ()

    def _half(self, decodes: bool) -> Self | None:
        half = super()._half(decodes)
        if half is None or half is self:
            return half
        parts = (part._half(decodes) for part in self.parts)
        return replace(half, parts=tuple(part for part in parts if part is not None))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are present by name; tensors of further groups as `groups.<index>.<name>`."""
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
