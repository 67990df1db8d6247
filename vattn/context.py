"""Hand one step's metadata to every layer without passing it through the model's own signatures.

A module attribute and no `ContextVar` (Dynamo cannot trace one): inside compiled code the metadata's tensors become
graph inputs. All threads see the same attribute: pass `metadata=` where several run models at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vattn.metadata import AttentionMetadata

current: AttentionMetadata | None = None


@contextmanager
def forward_context(metadata: AttentionMetadata | None) -> Iterator[None]:
    """Make `metadata` what layers use while the block runs; `None` is a profiling run. Nests; restored on exceptions.

    Example:
        >>> import vattn
        >>> with vattn.forward_context(None):
        ...     pass
    """
    global current
    before = current
    current = metadata
    try:
        yield
    finally:
        current = before
