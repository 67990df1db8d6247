"""Hand one step's metadata to every layer without passing it through the model's own signatures.

A step belongs to the thread that entered it. Compiled code reads it from a `threading.local`, which Dynamo traces (a
`ContextVar` it does not), so that the step's tensors become graph inputs. Tasks of one thread see the same step, so
only one of them may be in a block: pass `metadata=` where several tasks run models at once.
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

in_thread = threading.local()
"""`step`: what the innermost block of this thread holds; missing outside of blocks. `blocks`: those that run."""

_lock = threading.Lock()
_num_blocks = 0
_any_block = False
"""Whether any thread is in a block; a bool, since compiled code without a step is guarded on it."""


def current_step() -> AttentionMetadata | None:
    """Return the step of this thread's forward context; `None`: a profiling call.

    Raises:
        MetadataError: this thread has no forward context, and another one has.
    """
    if hasattr(in_thread, "step"):
        step: AttentionMetadata | None = in_thread.step
        return step
    if _any_block:
        raise MetadataError(
            "a call in a thread without a forward context, while another thread is in one",
            "a step of this thread, or of the call",
            "enter vattn.forward_context(step) in this thread, or pass metadata=step; None is a profiling call",
        )
    return None


class _Block:
    """A running `with` block, its step, and the block around it in the same task."""

    def __init__(self, step: AttentionMetadata | None) -> None:
        self.step, self.outer = step, _own_innermost.get()
        if not hasattr(in_thread, "blocks"):
            in_thread.blocks = []
        self.running: list[_Block] = in_thread.blocks
        """All blocks of the thread that have begun and not ended, the innermost last."""


_own_innermost: ContextVar[_Block | None] = ContextVar("own_innermost", default=None)
"""The block that this task entered last; it may have ended elsewhere."""


@contextmanager
def forward_context(metadata: AttentionMetadata | None) -> Iterator[None]:
    """Make `metadata` what layers use in this thread while the block runs; `None` is a profiling run.

    Blocks nest, and are restored on exceptions. Other threads do not see the step: each enters its own.

    Raises:
        MetadataError: `metadata` is something else than a step's metadata, or of a step over which its builder has
            written another one; another task of this thread is in such a block.
        CacheError: a layer of its builder was bound to another cache since.

    Example:
        >>> import vattn
        >>> with vattn.forward_context(None):
        ...     pass
    """
    if metadata is not None:
        step_of(metadata, "forward_context()")
        if metadata._built is not None and not torch.compiler.is_compiling():
            metadata._built.lineage.check_caches()
    if torch.compiler.is_compiling():  # Dynamo traces neither locks nor context variables.
        outer = getattr(in_thread, "step", None)
        _set_step(metadata, outer)
        try:
            yield
        finally:
            _set_step(outer, metadata)
        return
    block = _Block(metadata)
    _enter(block)
    try:
        yield
    finally:
        _leave(block)


def _enter(block: _Block) -> None:
    while block.outer is not None and block.outer not in block.running:
        block.outer = block.outer.outer
    if block.running and block.outer is not block.running[-1]:
        raise MetadataError(
            "forward_context() while another task of this thread is inside of its own",
            "one at a time: the tasks of a thread see the same step",
            "pass metadata= to the layers where several tasks run models at once",
        )
    _set_step(block.step, block.running[-1].step if block.running else None)
    block.running.append(block)
    _own_innermost.set(block)
    _count(1)


def _leave(block: _Block) -> None:
    """End a block; the step is that of the innermost one that still runs."""
    was_innermost = block.running[-1] is block
    block.running.remove(block)
    if _own_innermost.get() is block:
        _own_innermost.set(block.outer)
    if was_innermost and in_thread.__dict__.get("blocks") is block.running:  # A generator may end in another thread.
        _set_step(block.running[-1].step if block.running else None, block.step)
        if not block.running:
            del in_thread.step
    _count(-1)


def _count(change: int) -> None:
    global _num_blocks, _any_block
    with _lock:
        _num_blocks += change
        _any_block = _num_blocks > 0


def _set_step(step: AttentionMetadata | None, before: AttentionMetadata | None) -> None:
    """Set the step of this thread, and its parts in their groups instead of those of the step before."""
    if isinstance(before, GroupedMetadata):
        for group in before.cache_groups:
            group.step = None
    if isinstance(step, GroupedMetadata):
        for group, part in zip(step.cache_groups, step.parts, strict=True):
            group.step = part
    in_thread.step = step
