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
from vattn.grouped_metadata import CacheGroup, GroupedMetadata
from vattn.metadata import AttentionMetadata

current: AttentionMetadata | None = None


class _Block:
    """One `with` block, and the running one that it began in."""

    __slots__ = ("ended", "outer")

    def __init__(self, outer: _Block | None) -> None:
        self.outer, self.ended = outer, False


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
        MetadataError: `metadata` is something else than a step's metadata; another thread or task is in such a block.

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
    block = None if torch.compiler.is_compiling() else _enter()
    before, parts = current, _set_parts(current, metadata)
    current = metadata
    try:
        yield
    finally:
        current = before
        for group, part in parts:
            group.step = part
        if block is not None:
            block.ended = True


def _enter() -> _Block:
    """Note that a block begins, and return it."""
    global _innermost
    with _entering:
        outer = _running(_own_innermost.get())
        if outer is not _running(_innermost):
            raise MetadataError(
                "forward_context() while another thread or task is inside of its own",
                "one at a time: all of them see the same step",
                "pass metadata= to the layers where several run models at once",
            )
        block = _innermost = _Block(outer)
        _own_innermost.set(block)
    return block


def _running(block: _Block | None) -> _Block | None:
    """Return the block, or the nearest around it that has not ended."""
    while block is not None and block.ended:
        block = block.outer
    return block


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
