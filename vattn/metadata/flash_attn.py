"""`FlashAttentionMetadata`: a step described by prefills first, then decodes; `advance_step` makes it the next step.

It shares the tensors of an `AttentionMetadata`, which is what layers take: `metadata.common`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vattn.backends.advance_step import advance
from vattn.config.arguments import read_count
from vattn.config.attention import AttentionType
from vattn.errors import GraphContractError, MetadataError, UnknownOptionError
from vattn.metadata.attention_metadata import AttentionMetadata, host_plan_key
from vattn.metadata.lineage import BuiltStep, is_rewritten, rewritten
from vattn.ops.arguments import AdvanceArgs

Replan = Callable[[AttentionMetadata], None]


class DecodeInput(NamedTuple):
    """The tokens and positions of a decode step: what a model reads besides the metadata, one row a request.

    Attributes:
        input_tokens, input_positions: int32 or int64 `[num_seqs]`; the positions may be the metadata's own.
    """

    input_tokens: Tensor
    input_positions: Tensor


class SequenceOffsets(NamedTuple):
    """Offsets of the queries and keys of each request, for attention without a cache.

    Attributes:
        query_start_loc, key_start_loc: int32 `[B + 1]`.
        max_query_len, max_key_len: over the requests.
    """

    query_start_loc: Tensor
    max_query_len: int
    key_start_loc: Tensor
    max_key_len: int


@dataclass(eq=False)
class FlashAttentionMetadata:
    """Describe the requests of one step, prefills first: their tokens come before the tokens of the decodes.

    `FlashAttentionMetadataBuilder` makes one. B requests, padding included; padding has length 0 and slot -1.

    Attributes:
        num_prefills, num_prefill_tokens: requests that are no decodes, and their tokens.
        num_decode_tokens: tokens of the decodes, rows of padding included.
        slot_mapping: int64 `[T]`.
        seq_lens: cached plus new tokens of the real requests, on the host.
        seq_lens_tensor: int32 `[B]`, the same on the device.
        max_prefill_seq_len, max_decode_seq_len: longest sequences, 0 where there is none.
        context_lens_tensor: int32 `[B]`, tokens that were there before this step.
        block_tables: int32 `[B, W]`.
        use_cuda_graph: whether the step was padded for a graph.
        max_query_len, max_decode_query_len: longest queries, of all requests and of the decodes.
        query_start_loc, seq_start_loc: int32 `[B + 1]`, offsets of the new tokens and of whole sequences.
        encoder_seq_lens, encoder_seq_lens_tensor: encoder states of each request; `None` without an encoder.
        encoder_seq_start_loc: int32 `[B + 1]`, their offsets.
        max_encoder_seq_len, num_encoder_tokens: the longest, and all.
        cross_slot_mapping: int64 `[E]`, where the states that this step writes go.
        cross_block_tables: int32 `[B, Wc]`.
        block_size: tokens per cache block; 0: unknown.
        lookahead: how many more tokens the blocks of every request have room for; `None`: unknown.
    """

    num_prefills: int
    num_prefill_tokens: int
    num_decode_tokens: int
    slot_mapping: Tensor
    seq_lens: list[int]
    seq_lens_tensor: Tensor
    max_prefill_seq_len: int
    max_decode_seq_len: int
    context_lens_tensor: Tensor
    block_tables: Tensor
    use_cuda_graph: bool
    max_query_len: int
    max_decode_query_len: int
    query_start_loc: Tensor
    seq_start_loc: Tensor
    encoder_seq_lens: list[int] | None = None
    encoder_seq_lens_tensor: Tensor | None = None
    encoder_seq_start_loc: Tensor | None = None
    max_encoder_seq_len: int | None = None
    num_encoder_tokens: int | None = None
    cross_slot_mapping: Tensor | None = None
    cross_block_tables: Tensor | None = None
    block_size: int = 0
    lookahead: int | None = None
    _common: AttentionMetadata | None = field(default=None, repr=False)
    _padded: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    """`context_lens_tensor` and `seq_start_loc` of as many requests as `common` has."""
    _replan: Replan | None = field(default=None, repr=False)
    _halves: dict[tuple[int, int], FlashAttentionMetadata] = field(default_factory=dict, repr=False)
    _built: BuiltStep | None = field(default=None, repr=False)
    """Which step of its builder this is, or a half of."""

    @property
    def common(self) -> AttentionMetadata:
        """The step as layers take it: the same tensors, in the same order of requests."""
        if self._common is None:
            self._common = self._as_common()
        return self._common

    @property
    def prefill_metadata(self) -> FlashAttentionMetadata | None:
        """Only the prefills, `None` if there are none. Views of the same tensors; kept until `advance_step`."""
        decodes = {"num_decode_tokens": 0, "max_decode_seq_len": 0, "max_decode_query_len": 0}
        rows = slice(self.num_prefill_tokens)
        return self._half(0, self.num_prefills, rows, **decodes, use_cuda_graph=False, lookahead=None)

    @property
    def decode_metadata(self) -> FlashAttentionMetadata | None:
        """Only the decodes, `None` if there are none: views, and offsets that start at 0 again."""
        prefills = {"num_prefills": 0, "num_prefill_tokens": 0, "max_prefill_seq_len": 0, "cross_slot_mapping": None}
        rows, end = slice(self.num_prefill_tokens, None), self.seq_lens_tensor.shape[0]
        return self._half(self.num_prefills, end, rows, **prefills, max_query_len=self.max_decode_query_len)

    @property
    def is_all_encoder_attn_metadata_set(self) -> bool:
        """Whether the fields of encoder attention are there."""
        found = (self.encoder_seq_lens, self.encoder_seq_lens_tensor, self.max_encoder_seq_len)
        return all(value is not None for value in found)

    @property
    def is_all_cross_attn_metadata_set(self) -> bool:
        """Whether the fields of cross attention are there, including the encoder's."""
        return self.is_all_encoder_attn_metadata_set and self.cross_block_tables is not None

    def sequence_offsets(self, attn_type: str) -> SequenceOffsets:
        """Return the offsets of queries and keys for a type of attention over packed queries, keys and values.

        Args:
            attn_type: a value of `AttentionType`.

        Raises:
            MetadataError: the type needs fields of the encoder that are missing, or is encoder-only, with decodes; the
                builder has written another step over this one.
            UnknownOptionError: no such type.
        """
        if is_rewritten(self):
            raise rewritten(self, "sequence_offsets()")
        longest = max(self.seq_lens, default=0)
        if attn_type == AttentionType.ENCODER_ONLY and self.num_decode_tokens:
            raise MetadataError(
                f"encoder-only attention in a step with {self.num_decode_tokens} decode tokens",
                "whole texts, which are prefills",
                "build the step with seq_lens equal to query_lens",
            )
        if attn_type in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
            return SequenceOffsets(self.seq_start_loc, longest, self.seq_start_loc, longest)
        if attn_type not in (AttentionType.ENCODER, AttentionType.ENCODER_DECODER):
            raise UnknownOptionError(
                f"Invalid attention type {attn_type!r}", ", ".join(AttentionType), "take one of these"
            )
        crosses = attn_type == AttentionType.ENCODER_DECODER
        starts, longest_text = self.encoder_seq_start_loc, self.max_encoder_seq_len
        complete = self.is_all_cross_attn_metadata_set if crosses else self.is_all_encoder_attn_metadata_set
        if starts is None or longest_text is None or not complete:
            what = "Encoder/decoder cross-attention" if crosses else "Encoder attention"
            raise MetadataError(
                f"{what} requires setting {'cross-attention' if crosses else 'encoder'} metadata attributes.",
                "encoder_seq_lens, encoder_seq_lens_tensor, max_encoder_seq_len" + crosses * ", cross_block_tables",
                "build the step with encoder_lens" + crosses * " and cross_block_tables",
            )
        if crosses:
            return SequenceOffsets(self.seq_start_loc, longest, starts, longest_text)
        return SequenceOffsets(starts, longest_text, starts, longest_text)

    def advance_step(
        self,
        model_input: DecodeInput,
        sampled_token_ids: Tensor | None,
        block_size: int,
        num_seqs: int,
        num_queries: int,
        turn_prefills_into_decodes: bool = False,
    ) -> None:
        """Move the step one token on, in place: what follows when every request has sampled a token.

        One kernel on the device: the sampled tokens become the inputs, positions and lengths grow by one, and slots go
        where the block tables say. Schedules of the layers are remade. No sync: it captures as part of a CUDA graph,
        which then runs several steps; the numbers on the host then stay as they were at the capture.

        Args:
            model_input: tokens and positions that the model reads, in any object with these two tensors; written.
            sampled_token_ids: int32 or int64 `[num_queries]` or `[num_queries, 1]`, or longer. `None`: the
                sampler has written its tokens into `model_input.input_tokens` itself.
            block_size: tokens per cache block.
            num_seqs: requests, padding included.
            num_queries: real requests. Of these, one of length 0 is padding all the same and stays as it is, so that a
                graph captured for many requests replays for fewer.
            turn_prefills_into_decodes: the step had prefills; their prompts are complete, and they decode from now on.

        Raises:
            MetadataError: prefills, decodes of more than one token, tensors that do not fit, another block size, blocks
                without room for the token, or a step over which its builder has written another one; nothing has
                changed.
            GraphContractError: padding in a step that was not built for a graph.
        """
        block_size, num_seqs, num_queries = (
            read_count(name, count, 1, "pass what the step was built for", MetadataError)
            for name, count in (("block_size", block_size), ("num_seqs", num_seqs), ("num_queries", num_queries))
        )
        if is_rewritten(self):
            raise rewritten(self, "advance_step()")
        self._check_advance(block_size, num_seqs, num_queries, turn_prefills_into_decodes)
        given = sampled_token_ids is None or isinstance(sampled_token_ids, Tensor)
        if not given or not hasattr(model_input, "input_positions"):
            raise MetadataError(
                f"model_input of type {type(model_input).__name__}, sampled_token_ids of type "
                f"{type(sampled_token_ids).__name__}",
                "what has input_tokens and input_positions, such as vattn.DecodeInput, and a tensor or None",
                "pass vattn.DecodeInput(tokens, positions) and the sampled tokens on the device",
            )
        sampled = (model_input.input_tokens if sampled_token_ids is None else sampled_token_ids).reshape(-1)
        _check_rows("input_tokens", model_input.input_tokens, num_seqs, self.slot_mapping.device)
        _check_rows("input_positions", model_input.input_positions, num_seqs, self.slot_mapping.device)
        _check_rows("sampled_token_ids", sampled, num_queries, self.slot_mapping.device, longer=True)
        common = self.common
        if self._built is not None:
            # Halves and copies describe the previous step from now on; this object describes the next one.
            self._built = common._built = self._built.lineage.begin()
        if turn_prefills_into_decodes:
            self._turn_into_decodes(common, num_seqs)
        positions = model_input.input_positions if common.positions is None else common.positions
        # A batch of one has a second, empty request in `common`.
        context_lens, seq_start_loc = self._padded or (self.context_lens_tensor, self.seq_start_loc)
        advance(
            AdvanceArgs(
                input_tokens=model_input.input_tokens,
                input_positions=model_input.input_positions,
                positions=positions,
                sampled=sampled,
                seq_lens=common.seq_lens,
                context_lens=context_lens,
                query_start_loc=common.query_start_loc,
                seq_start_loc=seq_start_loc,
                slot_mapping=self.slot_mapping,
                block_table=common.block_table,
                block_size=block_size,
                num_queries=num_queries,
                from_prefills=turn_prefills_into_decodes,
            )
        )
        self._halves.clear()
        self.seq_lens = [length + (row < num_queries) for row, length in enumerate(self.seq_lens)]
        self.max_decode_seq_len = max(self.seq_lens, default=0)
        common.max_seq_len, common._lengths = self.max_decode_seq_len, None
        if self.lookahead is not None:
            self.lookahead -= 1
        if self._replan is not None:
            self._replan(common)

    def _check_advance(self, block_size: int, num_seqs: int, num_queries: int, turn: bool) -> None:
        if num_seqs != num_queries and (num_seqs < num_queries or not self.use_cuda_graph):
            raise GraphContractError(
                f"num_seqs={num_seqs}, num_queries={num_queries}, use_cuda_graph={self.use_cuda_graph}",
                "equal numbers, or more num_seqs in a step padded for a CUDA graph",
                "build the step with batch_size=num_seqs",
            )
        if self.num_prefills and not turn:
            raise MetadataError(
                f"advance_step on a batch with {self.num_prefills} prefills of {self.num_prefill_tokens} tokens",
                "decodes only",
                "pass turn_prefills_into_decodes=True once their prompts are through, or build the next step",
            )
        if self.max_decode_query_len > 1:
            raise MetadataError(
                f"advance_step on decodes of up to {self.max_decode_query_len} tokens",
                "one token a request",
                "build the next step",
            )
        reqs, rows = self.seq_lens_tensor.shape[0], self.slot_mapping.shape[0]
        if reqs != num_seqs or (rows < num_seqs if turn else rows != num_seqs):
            raise MetadataError(
                f"num_seqs={num_seqs} for {reqs} requests with {rows} rows",
                "one row a request, padding included",
                "pass the padded number of requests as num_seqs",
            )
        if not self.block_tables.shape[1]:
            raise MetadataError("advance_step in a step without a cache", "a step with block tables", "pass them")
        plans = self.common.plans
        if any(host_plan_key(key) in plans for key in plans) or (plans and self._replan is None):
            raise MetadataError(
                "advance_step with schedules that the device cannot remake",
                "layers of backends that plan on the device, and a step of FlashAttentionMetadataBuilder",
                "take FLASH_ATTN or TRITON_ATTN, or build every step",
            )
        if self.block_size and block_size != self.block_size:
            raise MetadataError(
                f"block_size={block_size} for tables of blocks of {self.block_size}", f"{self.block_size}", "pass it"
            )
        if self.lookahead is not None and self.lookahead < 1:
            raise MetadataError(
                "advance_step with no room left in the blocks of a request",
                "as many steps as num_lookahead_slots of the build",
                "build the step with block tables for all steps and num_lookahead_slots= one less than their number",
            )

    def _turn_into_decodes(self, common: AttentionMetadata, num_seqs: int) -> None:
        """Give the metadata one row a request; the kernel writes what the rows hold."""
        self.num_decode_tokens, self.num_prefills, self.num_prefill_tokens = num_seqs, 0, 0
        self.max_query_len = self.max_decode_query_len = 1
        self.max_prefill_seq_len = 0
        # A padded step may have fewer rows than requests; then all of them stay.
        self.slot_mapping = self.slot_mapping[:num_seqs]
        common.slot_mapping = self.slot_mapping
        if common.positions is not None:
            common.positions = common.positions[:num_seqs].data
        common.mark_dynamic()
        common.cross_slot_mapping = common.encoder_start_loc = self.cross_slot_mapping = None
        common.num_decodes, common.num_decode_tokens = common.num_reqs, common.num_reqs
        common.num_prefills = common.num_prefill_tokens = 0
        common.num_actual_tokens, common.max_query_len = common.num_reqs, 1

    def _half(self, first: int, end: int, rows: slice, **numbers: Any) -> FlashAttentionMetadata | None:
        """Return requests `first` to `end` as views, and offsets that start at 0; `numbers`: what differs besides."""
        own = slice(first, end)
        if first == end or (first, end) in self._halves:
            return self._halves.get((first, end))
        half = replace(
            self,
            slot_mapping=self.slot_mapping[rows],
            seq_lens=self.seq_lens[own],
            seq_lens_tensor=self.seq_lens_tensor[own],
            context_lens_tensor=self.context_lens_tensor[own],
            block_tables=self.block_tables[own],
            query_start_loc=_offsets(self.query_start_loc, first, end),
            seq_start_loc=_offsets(self.seq_start_loc, first, end),
            _common=None,
            _padded=None,
            _replan=None,
            _halves={},
            **self._encoder_fields(first, end),
            **numbers,
        )
        return self._halves.setdefault((first, end), half)

    def _encoder_fields(self, first: int, end: int) -> dict[str, Any]:
        """Return the encoder's fields of a range of requests."""
        tensor, starts, tables = self.encoder_seq_lens_tensor, self.encoder_seq_start_loc, self.cross_block_tables
        lengths = None if self.encoder_seq_lens is None else self.encoder_seq_lens[first:end]
        return {
            "encoder_seq_lens": lengths,
            "encoder_seq_lens_tensor": None if tensor is None else tensor[first:end],
            "encoder_seq_start_loc": None if starts is None else _offsets(starts, first, end),
            "max_encoder_seq_len": None if lengths is None else max(lengths, default=0),
            "num_encoder_tokens": None if lengths is None else sum(lengths),
            "cross_block_tables": None if tables is None else tables[first:end],
        }

    def _as_common(self) -> AttentionMetadata:
        """Describe the same tensors as an `AttentionMetadata`; positions are computed from the lengths."""
        num_reqs, num_tokens = self.seq_lens_tensor.shape[0], self.slot_mapping.shape[0]
        rows = torch.arange(num_tokens, device=self.slot_mapping.device)
        starts = self.query_start_loc.long()
        request = torch.searchsorted(starts[1:].contiguous(), rows, right=True).clamp(max=num_reqs - 1)
        positions = rows - starts[request] + self.context_lens_tensor.long()[request]
        real = len(self.seq_lens)
        crosses = self.encoder_seq_lens_tensor is not None and self.cross_block_tables is not None
        return AttentionMetadata(
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens_tensor,
            block_table=self.block_tables,
            slot_mapping=self.slot_mapping,
            positions=torch.where(rows < starts[-1], positions, 0),
            encoder_seq_lens=self.encoder_seq_lens_tensor if crosses else None,
            cross_block_table=self.cross_block_tables if crosses else None,
            cross_slot_mapping=self.cross_slot_mapping if crosses else None,
            num_reqs=real,
            max_query_len=self.max_query_len,
            max_seq_len=max(self.seq_lens, default=0),
            num_prefills=self.num_prefills,
            num_prefill_tokens=self.num_prefill_tokens,
            num_decodes=real - self.num_prefills,
            num_decode_tokens=self.num_decode_tokens,
            block_size=self.block_size,
            _built=self._built,
        )


def _offsets(starts: Tensor, first: int, end: int) -> Tensor:
    """Return the offsets of requests `first` to `end`, from 0."""
    return starts[first : end + 1] - starts[first] if first else starts[: end + 1]


def _check_rows(name: str, tensor: Tensor, rows: int, device: torch.device, longer: bool = False) -> None:
    fits = tensor.dim() == 1 and (tensor.shape[0] == rows or (longer and tensor.shape[0] > rows))
    contiguous = tensor.is_contiguous()
    if not fits or not contiguous or tensor.dtype not in (torch.int32, torch.int64) or tensor.device != device:
        raise MetadataError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}",
            f"contiguous int32 or int64 of {rows} rows on {device}",
            f"pass one {name.removesuffix('s')} a request",
        )
