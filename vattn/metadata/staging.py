"""The buffers of one builder's metadata: filled from a step's host values, copied to the device in few pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.metadata.step import Limits, Step

_ALIGNMENT = 64
"""Rows of the small buffers start on multiples of this many elements, so that kernels may assume aligned addresses."""


class StepBuffers:
    """One set of buffers for a whole capacity: on the device, or pinned on the host for staging."""

    def __init__(self, limits: Limits, device: torch.device, pinned: bool) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)

        self.requests = zeros(11, _round_up(max(2, limits.num_reqs) + 1))
        self.query_start_loc, self.seq_lens, self.causal_flags, self.tree_id, *rest = self.requests.unbind()
        self.encoder_seq_lens, self.encoder_start_loc, self.logits_start_loc, self.local_seq_lens, *rest = rest
        self.prefix_lens, self.prefix_start_loc, self.state_slots = rest
        rows = zeros(1 + limits.tables, _round_up(limits.num_tokens), dtype=torch.int64)
        self.positions, *self.slot_mappings = rows.unbind()
        self.block_tables = [zeros(limits.num_reqs, limits.table_width) for _ in range(limits.tables)]
        self.slot_mapping, self.block_table = self.slot_mappings[0], self.block_tables[0]
        self.entries = zeros(2 * limits.num_reqs, dtype=torch.int64)
        self.cross_block_table = zeros(limits.num_reqs, -(-limits.encoder_len // limits.block_size))
        self.mm_ranges = zeros(limits.num_reqs, limits.mm_ranges, 2)
        self.tree_bias = zeros(limits.trees * limits.tree_size**2, dtype=torch.float32)

    def fill(self, step: Step, num_reqs: int, num_tokens: int) -> None:
        """Write a step and its padding; on the host."""
        _fill_offsets(self.query_start_loc, step.query_lens, num_reqs)
        _fill(self.seq_lens, step.seq_lens, num_reqs)
        _fill(self.positions, step.positions, num_tokens)
        for slots, table, part in zip(self.slot_mappings, self.block_tables, (step, *step.others), strict=True):
            _fill(slots, part.slots, num_tokens, -1)
            _fill_table(table, part.table, num_reqs)
        if isinstance(step.causal, Tensor):
            _fill(self.causal_flags, step.causal, num_reqs, 1)
        if step.tree_bias is not None and step.tree_id is not None:
            self.tree_bias[: step.tree_bias.numel()] = step.tree_bias.reshape(-1)
            _fill(self.tree_id, step.tree_id, num_reqs, -1)
        if step.mm_ranges is not None:
            self.mm_ranges[:num_reqs] = 0
            self.mm_ranges[: step.mm_ranges.shape[0], : step.mm_ranges.shape[1]] = step.mm_ranges
        if step.cross is not None:
            _fill(self.encoder_seq_lens, step.cross.lengths, num_reqs)
            _fill_offsets(self.encoder_start_loc, step.cross.lengths * step.cross.new, num_reqs)
            _fill_table(self.cross_block_table, step.cross.table, num_reqs)
        if step.held is not None:
            _fill(self.local_seq_lens, step.held, num_reqs)
        if step.state_slots is not None:
            _fill(self.state_slots, step.state_slots, num_reqs)
        if step.num_logits is not None:
            _fill_offsets(self.logits_start_loc, step.num_logits, num_reqs)
        if step.shared_prefix_len is not None:
            self.prefix_lens[0] = step.shared_prefix_len
            self.prefix_lens[1] = 0

    def pieces(self, to: StepBuffers, step: Step, num_reqs: int, num_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the contiguous pieces of a step: staged here, and where they go."""
        yield self.requests, to.requests
        yield self.positions[:num_tokens], to.positions[:num_tokens]
        for here, there in zip(self.slot_mappings, to.slot_mappings, strict=True):
            yield here[:num_tokens], there[:num_tokens]
        for here, there in zip(self.block_tables, to.block_tables, strict=True):
            yield here[:num_reqs], there[:num_reqs]
        if step.mm_ranges is not None:
            yield self.mm_ranges[:num_reqs], to.mm_ranges[:num_reqs]
        if step.tree_bias is not None:
            size = step.tree_bias.numel()
            yield self.tree_bias[:size], to.tree_bias[:size]
        if step.cross is not None:
            yield self.cross_block_table[:num_reqs], to.cross_block_table[:num_reqs]

    def describe(self, step: Step, num_reqs: int, num_tokens: int, decode_threshold: int) -> AttentionMetadata:
        """Return a step's metadata as views of these buffers; writes nothing.

        Args:
            num_reqs, num_tokens: padded sizes.
            decode_threshold: longest query that still counts as a decode.
        """
        bias = step.tree_bias
        queries, lengths = step.query_lens, step.seq_lens
        decodes, decode_tokens = queries.shape[0], step.num_tokens
        if step.max_query_len > decode_threshold or bool((queries == lengths).any()):
            decode = (queries <= decode_threshold) & ((lengths > queries) | (queries == 0))
            decodes, decode_tokens = int(decode.sum()), int(queries[decode].sum())
        given_end = int(step.positions.max()) if step.given_places and step.num_tokens else step.max_seq_len - 1
        # `.data`: plain tensors over the memory of the views; Dynamo would also trace and guard the bases of views.
        return AttentionMetadata(
            query_start_loc=self.query_start_loc[: num_reqs + 1].data,
            seq_lens=self.seq_lens[:num_reqs].data,
            block_table=self.block_table[:num_reqs, : 0 if step.packed else None].data,
            slot_mapping=self.slot_mapping[:num_tokens].data,
            positions=self.positions[:num_tokens].data,
            causal=step.causal if isinstance(step.causal, bool) else self.causal_flags[:num_reqs].data,
            tree_bias=None if bias is None else self.tree_bias[: bias.numel()].view(bias.shape).data,
            tree_id=None if bias is None else self.tree_id[:num_reqs].data,
            mm_ranges=None if step.mm_ranges is None else self.mm_ranges[:num_reqs].data,
            num_reqs=queries.shape[0],
            num_actual_tokens=step.num_tokens,
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
            max_position=given_end,
            num_prefills=queries.shape[0] - decodes,
            num_prefill_tokens=step.num_tokens - decode_tokens,
            num_decodes=decodes,
            num_decode_tokens=decode_tokens,
            local_seq_lens=None if step.held is None else self.local_seq_lens[:num_reqs].data,
            state_slots=None if step.state_slots is None else self.state_slots[:num_reqs].data,
        )


class Staging:
    """Where a step is written before it is copied to the device: two sets of host buffers in turn.

    The host fills one while the device may still be reading the other. Where the buffers themselves are the host's,
    they are all there is.

    Args:
        buffers: what kernels read.
        make: makes a set of the same sizes in pinned memory.
        device: of `buffers`.
    """

    def __init__(self, buffers: StepBuffers, make: Callable[[], StepBuffers], device: torch.device) -> None:
        self._sets = [] if device.type == "cuda" else [buffers]
        self._copied: list[torch.cuda.Event] = []
        self._make, self._device, self._turn = make, device, 0

    def next(self) -> StepBuffers:
        """Return the set to fill, once the device has read what was copied out of it."""
        if not self._sets:
            # Not before the first step: a builder of steps from tensors needs no pinned memory.
            with torch.inference_mode(False):
                self._sets = [self._make(), self._make()]
            self._copied = [torch.cuda.Event() for _ in self._sets]
        self._turn = (self._turn + 1) % len(self._sets)
        if self._copied:
            self._copied[self._turn].synchronize()
        return self._sets[self._turn]

    def copied(self) -> None:
        """Note that all copies out of that set are enqueued on the current stream."""
        if self._copied:
            self._copied[self._turn].record(torch.cuda.current_stream(self._device))


def _fill_offsets(to: Tensor, lengths: Tensor, num_reqs: int) -> None:
    """Write where each request's rows start; entry 0 is always 0."""
    real = lengths.shape[0]
    to[1 : real + 1] = lengths.cumsum(0)
    if num_reqs > real:
        to[real + 1 : num_reqs + 1] = to[real].item()


def _fill(to: Tensor, values: Tensor, count: int, padding: int = 0) -> None:
    """Write `values`, padded to `count`."""
    to[: values.shape[0]] = values
    if count > values.shape[0]:
        to[values.shape[0] : count] = padding


def _fill_table(to: Tensor, table: Tensor, num_reqs: int) -> None:
    """Write a block table, padded with 0 to `num_reqs` rows and the width of `to`; wider columns are left out."""
    rows, columns = table.shape[0], min(table.shape[1], to.shape[1])
    to[:rows, :columns] = table[:, :columns]
    to[:rows, columns:] = 0
    if num_reqs > rows:
        to[rows:num_reqs] = 0


def _round_up(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
