"""Hand one step's metadata to every layer without passing it through the model's own signatures.

A module attribute and no `ContextVar` (Dynamo cannot trace one): inside compiled code the metadata's tensors become
graph inputs. All threads see the same attribute: pass `metadata=` where several run models at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vattn.errors import MetadataError
from vattn.grouped_metadata import CacheGroup, GroupedMetadata
from vattn.metadata import AttentionMetadata

current: AttentionMetadata | None = None


@contextmanager
def forward_context(metadata: AttentionMetadata | None) -> Iterator[None]:
    """Make `metadata` what layers use while the block runs; `None` is a profiling run. Nests; restored on exceptions.

    Raises:
        MetadataError: `metadata` is something else than a step's metadata.

    Example:
        >>> import vattn
        >>> with vattn.forward_context(None):
        ...     pass
    """
    global current
    if metadata is not None and not isinstance(metadata, AttentionMetadata):
        raise MetadataError(
            f"metadata of type {type(metadata).__name__}",
            "AttentionMetadata, or None for a profiling run",
            "pass what builder.build returned, or its .common where it has one",
        )
    before, parts = current, _set_parts(current, metadata)
    current = metadata
    try:
        yield
    finally:
        current = before
        for group, part in parts:
            group.step = part


def _set_parts(
    before: AttentionMetadata | None, metadata: AttentionMetadata | None
) -> list[tuple[CacheGroup, AttentionMetadata | None]]:
    """Give the groups of a step their parts, take those of the step before away, and return what all of them had."""
    steps = [step for step in (before, metadata) if isinstance(step, GroupedMetadata)]
    had = [(group, group.step) for step in steps for group in step.cache_groups]
    for group, _ in had:
        group.step = None
    if isinstance(metadata, GroupedMetadata):
        for group, part in zip(metadata.cache_groups, metadata.parts, strict=True):
            group.step = part
    return had
