"""Tensors of a step that the device computes: slots of encoder states, kept rows, the parts of a shared prefix."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from vattn.errors import MetadataError
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.metadata.cascade import write_shared_prefix
from vattn.metadata.cross_attention import write_cross_slots
from vattn.metadata.fast_prefill import write_logits_indices
from vattn.metadata.inputs import padded_size
from vattn.metadata.staging import StepBuffers
from vattn.metadata.step import Limits, Step


class DerivedTensors:
    """Buffers of tensors that the device computes from those that a builder copies; few steps have them."""

    def __init__(self, limits: Limits, buffers: StepBuffers) -> None:
        self._limits, self._buffers, device = limits, buffers, buffers.seq_lens.device
        self._cross_slots = torch.zeros(limits.encoder_tokens, dtype=torch.int64, device=device)
        self._logits_indices = torch.zeros(limits.num_tokens, dtype=torch.int64, device=device)

    @cached_property
    def _suffix(self) -> tuple[Tensor, Tensor]:
        """Lengths and block tables after a shared prefix; few builders make such steps, and tables may be large."""
        with torch.inference_mode(False):
            return torch.zeros_like(self._buffers.seq_lens), torch.zeros_like(self._buffers.block_table)

    def describe(
        self, metadata: AttentionMetadata, step: Step, num_encoder_tokens: int | None, num_logits: int | None
    ) -> None:
        """Add views of these buffers to a step's metadata; writes nothing to them.

        Args:
            num_encoder_tokens, num_logits: padded sizes; default those of the step.

        Raises:
            MetadataError: a padded size that does not go with the step.
        """
        if step.cross is not None or num_encoder_tokens is not None:
            self._add_cross(metadata, step, num_encoder_tokens)
        if step.num_logits is not None or num_logits is not None:
            self._add_logits(metadata, step, num_logits)
        if step.shared_prefix_len is not None:
            self._add_prefix(metadata)

    def write(self, metadata: AttentionMetadata) -> Tensor:
        """Fill the tensors of a step, and return the lengths that schedules are made of."""
        if metadata.cross_slot_mapping is not None:
            assert metadata.encoder_start_loc is not None and metadata.cross_block_table is not None
            write_cross_slots(
                metadata.encoder_start_loc,
                metadata.cross_block_table,
                self._limits.block_size,
                metadata.cross_slot_mapping,
            )
        if metadata.logits_indices is not None:
            assert metadata.logits_start_loc is not None
            write_logits_indices(metadata.query_start_loc, metadata.logits_start_loc, metadata.logits_indices)
        if metadata.prefix_lens is None:
            return metadata.seq_lens
        assert metadata.suffix_lens is not None and metadata.suffix_block_table is not None
        assert metadata.prefix_start_loc is not None
        write_shared_prefix(
            metadata.query_start_loc, metadata.seq_lens, metadata.block_table, self._limits.block_size,
            metadata.prefix_lens, metadata.prefix_start_loc, metadata.suffix_lens, metadata.suffix_block_table,
        )  # fmt: skip
        # Schedules are of the part that goes by requests.
        return metadata.suffix_lens

    def _add_cross(self, metadata: AttentionMetadata, step: Step, padded: int | None) -> None:
        """Add views of the encoder's side, with `padded` rows of states; default: as many as the step writes."""
        if step.cross is None:
            if padded != 0:
                raise MetadataError(
                    f"num_encoder_tokens_padded={padded} without encoder_lens", "both or neither", "pass encoder_lens"
                )
            return
        rows = step.cross.num_rows
        if padded is not None:
            rows = padded_size("encoder states", rows, padded, self._limits.encoder_tokens)
        metadata.encoder_seq_lens = self._buffers.encoder_seq_lens[: metadata.seq_lens.shape[0]].data
        metadata.cross_block_table = self._buffers.cross_block_table[: metadata.seq_lens.shape[0]].data
        if rows:
            metadata.cross_slot_mapping = self._cross_slots[:rows].data
            metadata.encoder_start_loc = self._buffers.encoder_start_loc[: metadata.query_start_loc.shape[0]].data

    def _add_logits(self, metadata: AttentionMetadata, step: Step, padded: int | None) -> None:
        """Add views of the kept rows; forget them in a step that keeps all, unless a size is given."""
        if padded is None and step.num_logits is not None and torch.equal(step.num_logits, step.query_lens):
            step.num_logits = None
            return
        step.num_logits = step.query_lens if step.num_logits is None else step.num_logits
        kept = int(step.num_logits.sum())
        if padded is not None:
            kept = padded_size("kept tokens", kept, padded, self._limits.num_tokens)
        metadata.logits_start_loc = self._buffers.logits_start_loc[: metadata.query_start_loc.shape[0]].data
        metadata.logits_indices = self._logits_indices[:kept].data

    def _add_prefix(self, metadata: AttentionMetadata) -> None:
        """Add views of what layers read of a shared prefix and after it."""
        if metadata.logits_indices is not None:
            raise MetadataError("shared_prefix_len with num_logits_padded", "one of the two in a step", "keep all rows")
        metadata.prefix_lens = self._buffers.prefix_lens[:2].data
        metadata.prefix_start_loc = self._buffers.prefix_start_loc[:3].data
        lengths, table = self._suffix
        metadata.suffix_lens = lengths[: metadata.seq_lens.shape[0]].data
        metadata.suffix_block_table = table[: metadata.seq_lens.shape[0]].data
