"""`BuilderBase`: the buffers of a builder, what it plans for, and steps from tensors on the device."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vattn.cache.bindings import CacheBindings, cache_kind
from vattn.config.arguments import MOST_INT32, read_count
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo
from vattn.config.typed import typed_on_error
from vattn.distributed.group import ContextParallel
from vattn.errors import ConfigError, DeviceError, MetadataError
from vattn.metadata.advance import DecodeRun
from vattn.metadata.attention_metadata import AttentionMetadata, step_of
from vattn.metadata.block_conflicts import BlockConflicts
from vattn.metadata.dcp import builder_facts, telling_others
from vattn.metadata.derived import DerivedTensors
from vattn.metadata.inputs import padded_size
from vattn.metadata.lineage import Lineage
from vattn.metadata.plans import StepPlans, all_layers, block_size_of, device_of, find_layers
from vattn.metadata.staging import Staging, StepBuffers
from vattn.metadata.state_slots import num_state_slots
from vattn.metadata.step import Limits, Step
from vattn.metadata.tensor_step import read_tensor_step


class BuilderBase:
    """What every step of a builder needs; for the arguments see `AttentionMetadataBuilder`."""

    _num_tables = 1
    """Block tables of a step."""

    @typed_on_error
    def __init__(
        self,
        max_num_reqs: int,
        max_num_tokens: int,
        max_seq_len: int,
        block_size: int | None = None,
        device: torch.device | str | None = None,
        *,
        layers: nn.Module | Iterable[nn.Module | AttentionConfig] = (),
        num_blocks: int | None = None,
        decode_threshold: int = 1,
        max_mm_ranges: int = 0,
        max_trees: int = 0,
        max_tree_size: int = 0,
        max_encoder_len: int = 0,
        max_encoder_tokens: int | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> None:
        self.max_num_reqs = max(2, _capacity("max_num_reqs", max_num_reqs))
        self.max_num_tokens = max_num_tokens = _capacity("max_num_tokens", max_num_tokens)
        self.max_seq_len = max_seq_len = _capacity("max_seq_len", max_seq_len)
        if block_size is not None:
            block_size = read_count("block_size", block_size, 1, "leave it out for that of the layers' CacheConfig")
        self.decode_threshold = _capacity("decode_threshold", decode_threshold)
        max_encoder_len = _capacity("max_encoder_len", max_encoder_len, 0)
        self.context_parallel = context_parallel
        with telling_others(context_parallel):
            given = all_layers(layers)
            self._num_state_slots = num_state_slots(given)
            self.block_size = block_size = block_size_of(given) if block_size is None else block_size
        device = device_of(given) if device is None else device
        DeviceInfo.of(device)  # refuses what is no device
        self.device = torch.device(device)
        if self.device.type == "meta":
            raise DeviceError("a builder on meta", "a device that holds numbers", "give it the device of the cache")
        if max_encoder_tokens is None:
            max_encoder_tokens = self.max_num_reqs * max_encoder_len
        limits = Limits(
            num_reqs=self.max_num_reqs,
            num_tokens=max_num_tokens,
            seq_len=max_seq_len,
            block_size=block_size,
            num_blocks=None if num_blocks is None else _capacity("num_blocks", num_blocks),
            mm_ranges=_capacity("max_mm_ranges", max_mm_ranges, 0),
            trees=_capacity("max_trees", max_trees, 0),
            tree_size=_capacity("max_tree_size", max_tree_size, 0),
            encoder_len=max_encoder_len,
            encoder_tokens=_capacity("max_encoder_tokens", max_encoder_tokens, 0),
            tables=self._num_tables,
            dcp_shard=None if context_parallel is None else context_parallel.dcp_shard,
        )
        self.table_width = limits.table_width
        with telling_others(context_parallel):
            found = find_layers(given, limits, self.device, context_parallel)
        self.backends, self.num_blocks, self._sink_layers = found.backends, found.num_blocks, found.sink_layers
        reserved = max((layer.sink_len // block_size for layer in self._sink_layers), default=0)
        self._limits = dataclasses.replace(limits, num_blocks=self.num_blocks, reserved_blocks=reserved)
        # Views of buffers are given out as `.data`: Dynamo would also trace and guard the base of a view.
        # Buffers made in inference mode could not be rewritten outside of it.
        with torch.inference_mode(False):
            self._allocate()
            self._plans = StepPlans(found, self._limits, self.device)
        self._gathers_keys = any(getattr(layer, "gathers_keys", False) for layer in given)
        self._conflicts = BlockConflicts(self.num_blocks, found.reaches)
        self._builds = itertools.count()
        self._lineage = Lineage(CacheBindings(found.bound, cache_kind), self.num_blocks)
        if context_parallel is not None:
            context_parallel.agree(builder_facts(self._limits, found.requests))

    @property
    def host_planned(self) -> frozenset[str]:
        """Names of the backends that this builder plans for on the host."""
        return self._plans.host_planned

    @property
    def has_states(self) -> bool:
        """Whether layers keep a state for each request, so that every step needs `state_slots`."""
        return self._num_state_slots is not None

    def _allocate(self) -> None:
        self._buffers = StepBuffers(self._limits, self.device, pinned=False)
        self._derived = DerivedTensors(self._limits, self._buffers)
        make = partial(StepBuffers, self._limits, torch.device("cpu"), pinned=True)
        self._staging = Staging(self._buffers, make, self.device)
        self._host_table = self._buffers.block_table
        self._built: tuple[AttentionMetadata, Step | DecodeRun] | None = None
        """The last step as it was returned, and as it was read; or the run of decodes once it was advanced."""

    @typed_on_error
    def build_from_tensors(
        self,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
        *,
        positions: Tensor | None = None,
        max_query_len: int | None = None,
        max_seq_len: int | None = None,
        num_reqs_padded: int | None = None,
        num_tokens_padded: int | None = None,
        causal: bool | Tensor = True,
        copy: bool = True,
    ) -> AttentionMetadata:
        """Copy a step's device tensors into the buffers, plan it there, and return views of the buffers.

        For engines that have no lengths on the host. Nothing waits for the device or reads from it, so a CUDA graph can
        capture the call: make one step of the same sizes before, since kernels compile then.

        Args:
            query_start_loc: int32 or int64 `[B + 1]`, as are all integers here; padded requests repeat the last value.
            seq_lens: `[B]`, cached plus new tokens; 0 or 1 for padded requests.
            block_table: `[B, W]` with any strides; entries past a request's last block are not read.
            slot_mapping: `[T]`, -1 for tokens that are not stored and for padding.
            positions: `[T]`, for models that read `metadata.positions`, which is `None` without them.
            max_query_len, max_seq_len: upper bounds of what the tensors hold; default: what the sizes of tensors and
                builder allow.
            num_reqs_padded, num_tokens_padded: pad to these sizes; default no padding beyond 2 requests.
            causal: `True` (each layer's own rule), `False` (bidirectional), or `[B]` flags, bools too.
            copy: `False` leaves the tensors where they are, and only makes the schedules. Flags are then int32, and
                nothing is padded: a single request compiles a graph of its own, and so do integers of other dtypes.

        Returns:
            Metadata that counts padded requests and tokens of the arguments as real ones. What needs lengths on the
            host is not known: `max_position` is -1, and the numbers of prefills and decodes are 0.

        Raises:
            MetadataError: shapes, dtypes or devices that do not go together; a step beyond the capacity; a table that
                is too narrow for `max_seq_len`; layers of a backend that plans on the host; a builder with
                `context_parallel`. No buffer was touched.
            CacheError: a layer was bound to another cache since the builder was made; no buffer was touched.

        Values are not checked: `check` does that, and synchronises.

        Example:
            >>> import torch, vattn
            >>> builder = vattn.AttentionMetadataBuilder(max_num_reqs=4, max_num_tokens=8, max_seq_len=64)
            >>> starts, lengths = torch.tensor([0, 3, 4]), torch.tensor([3, 18])
            >>> table, slots = torch.tensor([[1, 0], [2, 5]]), torch.tensor([16, 17, 18, 81])
            >>> step = builder.build_from_tensors(starts, lengths, table, slots, num_tokens_padded=6)
            >>> step.seq_lens, step.slot_mapping.tolist()
            (tensor([ 3, 18], dtype=torch.int32), [16, 17, 18, 81, -1, -1])
        """
        self._refuse_tensors()
        self._lineage.check_caches()
        step = read_tensor_step(
            self._limits, self._buffers.seq_lens.device, query_start_loc, seq_lens, block_table, slot_mapping,
            positions, causal, max_query_len, max_seq_len, copy,
        )  # fmt: skip
        if not copy and (num_reqs_padded is not None or num_tokens_padded is not None):
            raise MetadataError("copy=False with padded sizes", "tensors that are padded already", "leave one out")
        num_reqs, num_tokens = step.seq_lens.shape[0], step.slot_mapping.shape[0]
        padded_reqs, padded_tokens = self._padded(num_reqs, num_tokens, num_reqs_padded, num_tokens_padded)
        for layer in self._sink_layers:
            layer.write_changed_sinks()
        if copy:
            metadata = step.describe(self._buffers, padded_reqs, padded_tokens)
        else:
            metadata = step.as_given(num_reqs, num_tokens)
        metadata.block_size = self.block_size
        # `advance` needs lengths on the host.
        self._built, metadata._built = None, self._lineage.begin()
        if copy:
            step.write(metadata)
        self._plans.fill_on_device(metadata)
        metadata.mark_dynamic()
        return metadata

    def _padded(
        self, num_reqs: int, num_tokens: int, num_reqs_padded: int | None, num_tokens_padded: int | None
    ) -> tuple[int, int]:
        """Return the padded numbers of requests and tokens."""
        padded_reqs, padded_tokens = max(2, num_reqs), num_tokens
        if num_reqs_padded is not None:
            padded_reqs = padded_size("requests", num_reqs, num_reqs_padded, self.max_num_reqs)
        if num_tokens_padded is not None:
            padded_tokens = padded_size("tokens", num_tokens, num_tokens_padded, self.max_num_tokens)
        return padded_reqs, padded_tokens

    def _refuse_tensors(self) -> None:
        """Raise MetadataError if this builder needs lengths on the host."""
        reasons = [f"layers on {name}, which plans on the host" for name in sorted(self._plans.host_backends)]
        if self.context_parallel is not None:
            reasons.append("context_parallel")
        if reasons:
            raise MetadataError(
                f"build_from_tensors() of a builder with {reasons[0]}",
                "builders of one rank with layers that plan on the device",
                "call build() with lengths on the host, or choose another attn_backend",
            )

    def check(self, metadata: AttentionMetadata) -> None:
        """Run `AttentionMetadata.check` with this builder's block size and number of blocks; synchronises."""
        step_of(metadata, "check()").check(self.block_size, self.num_blocks)


def _capacity(name: str, size: Any, least: int = 1) -> int:
    count = read_count(name, size, least, f"give the builder the largest {name} of any step")
    if count > MOST_INT32:
        raise ConfigError(f"{name}={count}", f"up to {MOST_INT32}: steps count in int32", f"give a smaller {name}")
    return count
