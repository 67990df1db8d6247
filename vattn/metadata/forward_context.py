"""Hand one step's metadata to every layer without passing it through the model's own signatures.

A module attribute and no `ContextVar` (Dynamo cannot trace one): inside compiled code the metadata's tensors become
graph inputs. All threads and tasks see the same attribute, so one at a time sets it: pass `metadata=` where several run
models at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from vattn.errors import MetadataError
from vattn.metadata.attention_metadata import AttentionMetadata, step_of
from vattn.metadata.hybrid import GroupedMetadata

current: AttentionMetadata | None = None


class _Block:
    """A running `with` block, its step, and the block around it in the same thread and task."""

    def __init__(self, step: AttentionMetadata | None) -> None:
        self.step, self.outer = step, _own_innermost.get()


_lock = threading.Lock()
_running: list[_Block] = []
"""All blocks that have begun and not ended, the innermost last."""

_own_innermost: ContextVar[_Block | None] = ContextVar("own_innermost", default=None)
"""The block that this thread and task entered last; it may have ended elsewhere."""


@contextmanager
def forward_context(metadata: AttentionMetadata | None) -> Iterator[None]:
    """Make `metadata` what layers use while the block runs; `None` is a profiling run. Nests; restored on exceptions.

    Raises:
        MetadataError: `metadata` is something else than a step's metadata, or of a step over which its builder has
            written another one; another thread or task is in such a block.
        CacheError: a layer of its builder was bound to another cache since.

    Example:
        >>> import vattn
        >>> with vattn.forward_context(None):
        ...     pass
    """
    global current
    if metadata is not None:
        step_of(metadata, "forward_context()")
        if metadata._built is not None and not torch.compiler.is_compiling():
            metadata._built.lineage.check_caches()
    # Dynamo traces neither locks nor context variables.
    before, block = current, None if torch.compiler.is_compiling() else _Block(metadata)
    if block is not None:
        _enter(block)
    try:
        _set_parts(before, metadata)
        current = metadata
        yield
    finally:
        left, after = (metadata, before) if block is None else (current, _leave(block))
        _set_parts(left, after)
        current = after


def _enter(block: _Block) -> None:
    with _lock:
        while block.outer is not None and block.outer not in _running:
            block.outer = block.outer.outer
        if _running and block.outer is not _running[-1]:
            raise MetadataError(
                "forward_context() while another thread or task is inside of its own",
                "one at a time: all of them see the same step",
                "pass metadata= to the layers where several run models at once",
            )
        _running.append(block)
        _own_innermost.set(block)


def _leave(block: _Block) -> AttentionMetadata | None:
    """End a block; return the step of the innermost one that still runs."""
    with _lock:
        _running.remove(block)
        if _own_innermost.get() is block:
            _own_innermost.set(block.outer)
        return _running[-1].step if _running else None


def _set_parts(before: AttentionMetadata | None, metadata: AttentionMetadata | None) -> None:
    """Take the parts of the step before away from their groups, and give the groups of a step theirs."""
    for step in (before, metadata):
        if isinstance(step, GroupedMetadata):
            for group in step.cache_groups:
                group.step = None
    if isinstance(metadata, GroupedMetadata):
        for group, part in zip(metadata.cache_groups, metadata.parts, strict=True):
            group.step = part
