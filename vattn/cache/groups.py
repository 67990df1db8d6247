"""Groups of layers that share block ids: which layers, which storages, and what it costs.

The layers of a group keep their tokens for equally long, so one block table serves them all. Groups take their blocks
from one pool of ids, so that two layers of different groups can share one storage: a block belongs to one group, and
with it to one of the two. Only layers with blocks of the same shape and dtype share a storage.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from vattn.cache.specs import (
    PAGE_ALIGNMENT,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    KVCacheSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    ceil_div,
    round_up,
)
from vattn.errors import CacheError

TOLERATED_WASTE = 0.1
"""Memory of one request that fewer groups may cost over the best grouping: each group has a block table of its own."""

Lifetime: TypeAlias = tuple[str, int, int]
PageType: TypeAlias = tuple[torch.dtype, tuple[int, ...], str]
"""Dtype and shape of one block, and the layer's name if no other layer may share its storage."""


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share one block table.

    Attributes:
        layer_names: in the model's order.
        specs: one for each layer.
        storages: which storage of the allocation each layer uses.
    """

    layer_names: tuple[str, ...]
    specs: tuple[KVCacheSpec, ...]
    storages: tuple[int, ...]

    @property
    def spec(self) -> KVCacheSpec:
        """The first layer's: how long tokens are kept is the same for all."""
        return self.specs[0]

    @property
    def kind(self) -> str:
        """`"full"`, `"window"`, `"chunk"` or `"cross"`."""
        return lifetime(self.spec)[0]

    @property
    def content_bytes(self) -> int:
        """Bytes of one block that the layers use, padding not counted."""
        return sum(spec.content_bytes for spec in self.specs)


class CacheGroup:
    """Where the layers of one group find their part of the step; they and the builder hold the same object.

    Compiled code reads `step` and no index, so that equal layers of different groups share one graph.

    Attributes:
        index, count: which group of how many.
        spec: how long tokens are kept.
    """

    def __init__(self, index: int, count: int, spec: KVCacheSpec) -> None:
        self.index, self.count, self.spec = index, count, spec
        self._in_thread = threading.local()

    def __reduce__(self) -> tuple[type[CacheGroup], tuple[int, int, KVCacheSpec]]:
        return CacheGroup, (self.index, self.count, self.spec)

    @property
    def step(self) -> Any:
        """This group's part of the metadata that `vattn.forward_context` holds in this thread."""
        return getattr(self._in_thread, "step", None)

    @step.setter
    def step(self, part: Any) -> None:
        self._in_thread.step = part

    @property
    def kind(self) -> str:
        """`"full"`, `"window"`, `"chunk"` or `"cross"`."""
        return lifetime(self.spec)[0]

    def __repr__(self) -> str:
        return f"CacheGroup({self.index} of {self.count}, {self.kind})"


@dataclass(frozen=True)
class Grouping:
    """How the layers of a model share blocks.

    Attributes:
        groups: the full ones first.
        page_types: what each storage holds: dtype, shape of one block, and its only layer if it must have one.
        bytes_per_block: bytes that one block id takes over all storages, whichever group has it.
        request_bytes, used_bytes: of one request of `max_seq_len` tokens: what its blocks take, and what its layers use
            of that.
    """

    groups: tuple[KVCacheGroup, ...]
    page_types: tuple[PageType, ...]
    bytes_per_block: int
    request_bytes: int
    used_bytes: int

    @property
    def waste(self) -> float:
        """Share of a request's memory that no layer uses: padding, and storages that its groups have no layer for."""
        return 1 - self.used_bytes / self.request_bytes if self.request_bytes else 0.0


def lifetime(spec: KVCacheSpec) -> Lifetime:
    """Return what decides how long a layer keeps its tokens; layers with equal ones can share a block table."""
    if isinstance(spec, SlidingWindowSpec):
        return "window", spec.sliding_window, spec.extra_retained_tokens
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return "chunk", spec.attention_chunk_size, spec.chunk_lookback
    return ("cross" if isinstance(spec, CrossAttentionSpec) else "full"), 0, 0


def common_block_size(specs: Mapping[str, KVCacheSpec]) -> int:
    """Return the tokens per block of all layers.

    Raises:
        CacheError: no layer stores anything, or block sizes differ.
    """
    if not specs:
        raise CacheError("no layer of the model has a KV cache of its own", "at least one", "check the sharing targets")
    sizes = sorted({spec.block_size for spec in specs.values()})
    if len(sizes) > 1:
        raise CacheError(
            f"layers with block sizes {', '.join(map(str, sizes))}",
            "one block size: block ids count the same tokens in every layer",
            "give every layer the same CacheConfig.block_size",
        )
    return sizes[0]


def group_layers(specs: Mapping[str, KVCacheSpec], max_seq_len: int = 32768) -> Grouping:
    """Put the layers of a hybrid model into groups.

    All groups have at most a common number of layers, so that each fits the storages of the largest group. The number
    is chosen for the fewest groups with memory for one long request within a tenth of the least.
    Storages in bytes are padded to a common page size where that takes less memory.

    Args:
        specs: what each layer stores, by name in the model's order; equal block sizes.
        max_seq_len: length of the request; encoder inputs count as equally long.

    Raises:
        CacheError: no layer stores anything, or block sizes differ.

    Example:
        >>> from vattn.cache.specs import FullAttentionSpec, SlidingWindowSpec
        >>> from vattn.cache.groups import group_layers
        >>> full, window = FullAttentionSpec(2, 64), SlidingWindowSpec(2, 64, sliding_window=128)
        >>> grouping = group_layers({f"layers.{i}": window if i % 4 else full for i in range(8)})
        >>> [group.kind for group in grouping.groups], len(grouping.page_types)
        (['full', 'window', 'window', 'window'], 2)
        >>> grouping.waste
        0.0
    """
    common_block_size(specs)
    kinds: defaultdict[Lifetime, list[str]] = defaultdict(list)
    for name, spec in specs.items():
        kinds[lifetime(spec)].append(name)
    order = sorted(kinds, key=lambda kind: (kind[0] == "cross", kind[0] != "full", kind[1]))
    plans = [
        _plan(candidate, [kinds[kind] for kind in order], size, max_seq_len)
        for candidate in _paddings(specs)
        for size in range(1, max(map(len, kinds.values())) + 1)
    ]
    least = min(plan.request_bytes for plan in plans)
    good = [plan for plan in plans if plan.request_bytes <= least * (1 + TOLERATED_WASTE)]
    return min(good, key=lambda plan: (len(plan.groups), plan.request_bytes))


def _paddings(specs: Mapping[str, KVCacheSpec]) -> list[Mapping[str, KVCacheSpec]]:
    """Return the specs as they are, and with all storages in bytes padded to the largest page."""
    pages = {spec.page_size_bytes for spec in specs.values() if spec.in_bytes}
    if len(pages) < 2:
        return [specs]
    size = round_up(max(pages), PAGE_ALIGNMENT)
    padded = {
        name: dataclasses.replace(spec, page_size_padded=size) if spec.in_bytes else spec
        for name, spec in specs.items()
    }
    return [specs, padded]


def _plan(specs: Mapping[str, KVCacheSpec], kinds: Sequence[Sequence[str]], size: int, max_seq_len: int) -> Grouping:
    """Cut each kind into groups of at most about `size` layers, evenly, and give every layer a storage."""
    groups: list[tuple[str, ...]] = []
    for names in kinds:
        count = ceil_div(len(names), size)
        by_type: defaultdict[PageType, list[str]] = defaultdict(list)
        for name in names:
            by_type[_page_type(name, specs[name])].append(name)
        parts: list[list[str]] = [[] for _ in range(count)]
        for alike in by_type.values():
            # Layer by layer to the group that has the fewest, so that no type gathers in the first group.
            for place, name in enumerate(alike):
                parts[place % count].append(name)
        groups += [tuple(sorted(part, key=list(specs).index)) for part in parts if part]
    return _with_storages(specs, groups, max_seq_len)


def _with_storages(specs: Mapping[str, KVCacheSpec], groups: Sequence[tuple[str, ...]], max_seq_len: int) -> Grouping:
    storages: defaultdict[PageType, list[int]] = defaultdict(list)
    page_types: list[PageType] = []
    placed = []
    for names in groups:
        taken: Counter[PageType] = Counter()
        places = []
        for name in names:
            kind = _page_type(name, specs[name])
            if taken[kind] == len(storages[kind]):
                storages[kind].append(len(page_types))
                page_types.append(kind)
            places.append(storages[kind][taken[kind]])
            taken[kind] += 1
        placed.append(KVCacheGroup(names, tuple(specs[name] for name in names), tuple(places)))
    per_block = sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape, _ in page_types)
    blocks = [group.spec.max_blocks(max_seq_len, 1, max_seq_len) for group in placed]
    return Grouping(
        groups=tuple(placed),
        page_types=tuple(page_types),
        bytes_per_block=per_block,
        request_bytes=per_block * sum(blocks),
        used_bytes=sum(count * group.content_bytes for count, group in zip(blocks, placed, strict=True)),
    )


def _page_type(name: str, spec: KVCacheSpec) -> PageType:
    # Sinks are in blocks that belong to no request, so two layers with sinks would write the same ones.
    return spec.storage_dtype, spec.storage_shape(1), name if isinstance(spec, SinkFullAttentionSpec) else ""
