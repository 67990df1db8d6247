"""The layers of a hybrid model that keep tokens equally long."""

from __future__ import annotations

from typing import Any

from vattn.cache.groups import lifetime
from vattn.cache.specs import KVCacheSpec


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
        self.step: Any = None

    @property
    def kind(self) -> str:
        """`"full"`, `"window"`, `"chunk"` or `"cross"`."""
        return lifetime(self.spec)[0]

    def __repr__(self) -> str:
        return f"CacheGroup({self.index} of {self.count}, {self.kind})"
