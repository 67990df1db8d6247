"""`GroupedMetadataBuilder`: steps of a model with a cache in groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vattn.cache.groups import CacheGroup
from vattn.cache.specs import ChunkedLocalAttentionSpec, KVCacheSpec, SlidingWindowSpec
from vattn.errors import ConfigError, MetadataError
from vattn.metadata.attention_metadata import AttentionMetadata, CaptureKey, refuse_contradiction
from vattn.metadata.block_conflicts import Reach, refuse_conflicts, used_entries
from vattn.metadata.builder import AttentionMetadataBuilder
from vattn.metadata.checks import check_block_table, check_slots
from vattn.metadata.hybrid import GroupedMetadata
from vattn.metadata.inputs import Lengths, Masks, read_integers, read_step
from vattn.metadata.step import Step, most_held


class GroupedMetadataBuilder(AttentionMetadataBuilder):
    """Make `GroupedMetadata` at fixed addresses, for a model with a cache allocated with `hybrid=True`.

    Args:
        layers: the model; needed, since its layers know their groups.
        ...: as in `AttentionMetadataBuilder`.

    Attributes:
        groups: the groups in their order.

    Raises:
        ConfigError: layers without groups, or some of another allocation.

    Example:
        >>> import torch, vattn
        >>> model = torch.nn.ModuleList(
        ...     vattn.Attention(2, 16, 0.25, per_layer_sliding_window=window) for window in (None, 24)
        ... )
        >>> cache = vattn.allocate_kv_cache(model, num_blocks=8, dtype=torch.float32, hybrid=True)
        >>> builder = vattn.GroupedMetadataBuilder(2, 8, max_seq_len=64, layers=model)
        >>> step = builder.build([1], [49], block_tables=[[[1, 2, 3, 4]], [[0, 5, 6, 7]]])
        >>> [part.slot_mapping.tolist() for part in step.parts]
        [[64], [112]]
    """

    def __init__(self, *capacity: Any, layers: nn.Module | None = None, **options: Any) -> None:
        if not isinstance(layers, nn.Module):
            raise ConfigError(
                f"layers of type {type(layers).__name__}", "the model: its layers know their groups", "layers=model"
            )
        self.groups = _groups_of(layers)
        self._own = [group for group in self.groups if group.kind != "cross"]
        self._num_tables = max(1, len(self._own))
        super().__init__(*capacity, layers=layers, **options)
        self._clusters = _clusters(layers, self._own)

    def build(  # type: ignore[override]
        self,
        query_lens: Lengths,
        seq_lens: Lengths,
        block_tables: Sequence[Any],
        *,
        slot_mapping: Lengths | None = None,
        capture_key: CaptureKey | None = None,
        **options: Any,
    ) -> GroupedMetadata:
        """Check a step, copy it into the buffers and return views of them.

        Args:
            query_lens, seq_lens, **options: as in `AttentionMetadataBuilder.build`.
            block_tables: one table for each group without encoder states: block ids of each request, in order; 0 for
                blocks that a window has left. Encoder states have `cross_block_tables`, as without groups.
            slot_mapping: only -1 everywhere: a step that stores nothing. `block_tables` is then one table for all.
            capture_key: the key of a CUDA graph that will replay this step.

        Raises:
            MetadataError: values that contradict each other, the capacity or the cache; a block that was freed and is
                needed; no buffer was touched.
            GraphContractError: the step contradicts `capture_key`; no buffer was touched.
        """
        if slot_mapping is not None:
            if bool((read_integers("slot_mapping", slot_mapping) != -1).any()):
                raise MetadataError("slot_mapping with slots", "-1 everywhere: groups differ in slots", "leave it out")
            block_tables = [block_tables] * len(self._own)
        if len(block_tables) != len(self._own):
            raise MetadataError(
                f"{len(block_tables)} block tables",
                f"{len(self._own)}: one for each of {', '.join(map(repr, self._own))}",
                "pass a list of tables, each with one row of block ids for each request",
            )
        if capture_key is not None:
            options["capture_key"] = self._own_key(capture_key)
        first = super().build(query_lens, seq_lens, block_tables, slot_mapping=slot_mapping, **options)
        num_reqs, num_tokens = first.seq_lens.shape[0], first.slot_mapping.shape[0]
        parts = [first]
        for table, slots in zip(self._buffers.block_tables[1:], self._buffers.slot_mappings[1:], strict=True):
            part = dataclasses.replace(first, block_table=table[:num_reqs].data, slot_mapping=slots[:num_tokens].data)
            parts.append(part)
        # Encoder states have tables of their own among the fields that all parts share.
        order = tuple(parts[group.index] if group.kind != "cross" else first for group in self.groups)
        fields = {field.name: getattr(first, field.name) for field in dataclasses.fields(AttentionMetadata)}
        metadata = GroupedMetadata(**fields, parts=order, cache_groups=self.groups)
        metadata.mark_dynamic()
        return metadata

    def _read(self, query_lens: Any, seq_lens: Any, block_tables: Any, slot_mapping: Any, masks: Masks) -> Step:
        """Return the first group's step, and keep the others for when its buffers are written."""
        steps = []
        for table in block_tables or [None]:
            steps.append(read_step(self._limits, None, query_lens, seq_lens, table, slot_mapping, masks))
            masks = (True, None, None, None)
        if slot_mapping is None:
            for group, step in zip(self._own, steps, strict=False):
                self._check_held(group, step)
            for cluster in self._clusters:
                self._check_written(cluster, [steps[index] for index in cluster])
        elif self._own:
            held = torch.as_tensor(most_held(self._limits.dcp_shard, steps[0].seq_lens), device="cpu")
            check_block_table(steps[0].table, held, self.block_size, self.num_blocks)
        steps[0].others = steps[1:]
        return steps[0]

    def advance(self, metadata: AttentionMetadata, new_blocks: Sequence[Any] | Tensor) -> AttentionMetadata:
        """Refuse: blocks that a window has left are found from whole tables only.

        Raises:
            MetadataError: always.
        """
        raise MetadataError("advance() of a builder with groups", "builders of one table", "call build() for each step")

    def _refuse_tensors(self) -> None:
        raise MetadataError(
            "build_from_tensors() of a builder with groups", "builders of one table", "call build() for each step"
        )

    def _check_held(self, group: CacheGroup, step: Step) -> None:
        """Refuse a step that reads, or writes to, a block which was freed."""
        size, contexts = self.block_size, step.seq_lens - step.query_lens
        used = used_entries([_reach(group.spec)], step.table.shape[1], -(-step.seq_lens // size), contexts, size)
        wrong = used & (step.table == 0)
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            raise MetadataError(
                f"request {row}: entry {column} of the block table of {group!r} is 0, a block that was freed",
                f"blocks of the request from entry {int(used[row].int().argmax())} on",
                "keep blocks until no query can read them: HybridBlockTable does",
            )

    def _check_written(self, cluster: Sequence[int], steps: Sequence[Step]) -> None:
        """Refuse a step that writes into a block which another entry names too, in groups that share storages."""
        size, width = self.block_size, max(step.table.shape[1] for step in steps)
        # Rows of the groups follow each other.
        table = torch.cat([nn.functional.pad(step.table, (0, width - step.table.shape[1])) for step in steps])
        slots = torch.cat([step.slots for step in steps])
        shard = self._limits.dcp_shard
        if shard is None and self._conflicts.absent(table, slots, size, steps[0].max_seq_len):
            return
        held = torch.as_tensor(most_held(shard, steps[0].seq_lens), device="cpu")
        for step in steps:
            check_block_table(step.table, held, size, self.num_blocks)
            check_slots(step.slots, size, self.num_blocks)
        places, used, num_reqs = [], [], steps[0].seq_lens.shape[0]
        for order, (index, step) in enumerate(zip(cluster, steps, strict=True)):
            request = torch.repeat_interleave(torch.arange(num_reqs, device="cpu"), step.query_lens) + order * num_reqs
            local = step.positions if shard is None else shard.local_indices(step.positions).clamp(min=0)
            places.append(request * width + local // size)
            reach = _reach(self._own[index].spec)
            used.append(used_entries([reach], width, -(-held // size), step.seq_lens - step.query_lens, size))
        stored, one = slots >= 0, steps[0]
        contexts = one.seq_lens - one.query_lens if shard is None else torch.full_like(one.seq_lens, -1)
        groups = torch.arange(len(steps), device="cpu").repeat_interleave(num_reqs)
        refuse_conflicts(
            table,
            torch.cat(used),
            torch.cat(places)[stored],
            slots[stored],
            contexts.repeat(len(steps)),
            size,
            lambda row: f"request {row % num_reqs} of {self._own[cluster[row // num_reqs]]!r}",
            groups,
        )

    def _own_key(self, captured: CaptureKey) -> CaptureKey:
        """Return the first group's part of a key, after comparing the others'."""
        tables = zip(self._buffers.block_tables[1:], self._buffers.slot_mappings[1:], strict=True)
        own = tuple(tensor.data_ptr() for pair in tables for tensor in pair)
        split = len(captured.buffers) - len(own)
        refuse_contradiction(captured, captured._replace(buffers=(*captured.buffers[:split], *own)))
        return captured._replace(buffers=captured.buffers[:split])


def _groups_of(model: nn.Module) -> tuple[CacheGroup, ...]:
    layers = [module for module in model.modules() if hasattr(module, "bind_kv_cache")]
    groups = {group.index: group for layer in layers if (group := getattr(layer, "kv_cache_group", None)) is not None}
    held = [getattr(layer, "kv_cache_group", None) for layer in layers]
    foreign = [group for group in held if group is None or groups[group.index] is not group]
    counts = {group.count for group in groups.values()}
    if not groups or foreign or counts != {len(groups)}:
        raise ConfigError(
            f"{len(layers)} layers, of which {len(foreign)} are in no group of the same cache",
            "a model with all of its caches allocated with hybrid=True",
            "allocate_kv_cache(model, hybrid=True), or AttentionMetadataBuilder for a cache without groups",
        )
    return tuple(groups[index] for index in sorted(groups))


def _clusters(model: nn.Module, groups: Sequence[CacheGroup]) -> list[list[int]]:
    """Return the places of groups that share storages, so that they must not share blocks, together."""
    storages: list[set[int]] = [set() for _ in groups]
    for layer in model.modules():
        group, cache = getattr(layer, "kv_cache_group", None), getattr(layer, "kv_cache", None)
        if group in groups and isinstance(cache, Tensor):
            storages[groups.index(group)].add(cache.untyped_storage().data_ptr())
    clusters: list[list[int]] = []
    for index, own in enumerate(storages):
        together = [cluster for cluster in clusters if any(storages[other] & own for other in cluster)]
        merged = [*(other for cluster in together for other in cluster), index]
        clusters = [*(cluster for cluster in clusters if cluster not in together), merged]
    return clusters


def _reach(spec: KVCacheSpec) -> Reach:
    if isinstance(spec, SlidingWindowSpec):
        # What is retained beyond the window is the caller's wish, and no kernel reads it.
        return Reach(spec.sliding_window)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return Reach(None, spec.attention_chunk_size, spec.chunk_lookback)
    return Reach()
