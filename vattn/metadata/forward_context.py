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
from vattn.metadata.attention_metadata import AttentionMetadata, is_rewritten, rewritten
from vattn.metadata.hybrid import GroupedMetadata

current: AttentionMetadata | None = None


class _Block:
    """One `with` block: the running one that it began in, and the steps from before it and its own."""

    __slots__ = ("before", "ended", "outer", "step")

    def __init__(self, before: AttentionMetadata | None, step: AttentionMetadata | None) -> None:
        self.outer: _Block | None = None
        self.before, self.step, self.ended = before, step, False


_entering = threading.Lock()
_innermost: _Block | None = None
_own_innermost: ContextVar[_Block | None] = ContextVar("own_innermost", default=None)
"""The block that was entered last, of all and of this thread and task. Where they differ, another one is halfway
through a model with its step. Either may have ended: a task that began in a block outlives it, and a generator may be
closed elsewhere."""


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
    if metadata is not None and not isinstance(metadata, AttentionMetadata):
        raise MetadataError(
            f"metadata of type {type(metadata).__name__}",
            "AttentionMetadata, or None for a profiling run",
            "pass what builder.build returned, or its .common where it has one",
        )
    if metadata is not None and is_rewritten(metadata):
        raise rewritten(metadata, "forward_context()")
    if metadata is not None and metadata._built is not None and not torch.compiler.is_compiling():
        metadata._built.check_caches()
    before = current
    block = None if torch.compiler.is_compiling() else _Block(before, metadata)
    if block is not None:
        try:
            _enter(block)
        except BaseException:
            # Ctrl-C behind its becoming the innermost would keep everybody out.
            block.ended = True
            raise
    try:
        _set_parts(before, metadata)
        current = metadata
        yield
    finally:
        if block is not None:
            # Before anything is called: Ctrl-C there would leave it running.
            block.ended = True
        left, after = (metadata, before) if block is None else _leave(block)
        _set_parts(left, after)
        current = after


def _enter(block: _Block) -> None:
    """Note that a block begins."""
    global _innermost
    with _entering:
        outer = _running(_own_innermost.get())
        if outer is not _running(_innermost):
            raise MetadataError(
                "forward_context() while another thread or task is inside of its own",
                "one at a time: all of them see the same step",
                "pass metadata= to the layers where several run models at once",
            )
        block.outer = outer
        if outer is None:
            # A step that is current outside of all blocks was left by one whose end was interrupted.
            block.before = None
        _innermost = block
        _own_innermost.set(block)


def _leave(block: _Block) -> tuple[AttentionMetadata | None, AttentionMetadata | None]:
    """Return the step that was current in a block that has ended, and that of the innermost block that still runs."""
    with _entering:
        running = _running(_innermost)
    outermost = block
    while outermost.outer is not None:
        outermost = outermost.outer
    return current, outermost.before if running is None else running.step


def _running(block: _Block | None) -> _Block | None:
    """Return the block, or the nearest around it that has not ended."""
    while block is not None and block.ended:
        block = block.outer
    return block


def _set_parts(before: AttentionMetadata | None, metadata: AttentionMetadata | None) -> None:
    """Take the parts of the step before away from their groups, and give the groups of a step theirs."""
    for step in (before, metadata):
        if isinstance(step, GroupedMetadata):
            for group in step.cache_groups:
                group.step = None
    if isinstance(metadata, GroupedMetadata):
        for group, part in zip(metadata.cache_groups, metadata.parts, strict=True):
            group.step = part
