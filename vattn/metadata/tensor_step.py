"""Steps from tensors: checked by shape, copied into a builder's buffers or left as they are, never read by the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vattn.config.arguments import read_count
from vattn.errors import MetadataError
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.metadata.inputs import over_capacity
from vattn.metadata.staging import StepBuffers
from vattn.metadata.step import Limits
from vattn.ops.index_dtypes import INDEX_DTYPES
from vattn.quantization.formats import dtype_name


class TensorStep(NamedTuple):
    """Tensors of one step as the caller has them, with sizes that go together."""

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    positions: Tensor | None
    causal: bool | Tensor
    max_query_len: int
    max_seq_len: int

    def describe(self, buffers: StepBuffers, num_reqs: int, num_tokens: int) -> AttentionMetadata:
        """Return metadata of the padded sizes as views of a builder's buffers; writes nothing."""
        return self._replace(
            query_start_loc=buffers.query_start_loc[: num_reqs + 1],
            seq_lens=buffers.seq_lens[:num_reqs],
            block_table=buffers.block_table[:num_reqs],
            slot_mapping=buffers.slot_mapping[:num_tokens],
            positions=None if self.positions is None else buffers.positions[:num_tokens],
            causal=self.causal if isinstance(self.causal, bool) else buffers.causal_flags[:num_reqs],
        ).as_given(self.seq_lens.shape[0], self.slot_mapping.shape[0])

    def as_given(self, num_reqs: int, num_tokens: int) -> AttentionMetadata:
        """Return metadata of these tensors themselves, with the numbers of real requests and tokens."""
        # `.data`: as in `StepBuffers.describe`.
        return AttentionMetadata(
            query_start_loc=self.query_start_loc.data,
            seq_lens=self.seq_lens.data,
            block_table=self.block_table.data,
            slot_mapping=self.slot_mapping.data,
            positions=None if self.positions is None else self.positions.data,
            causal=self.causal if isinstance(self.causal, bool) else self.causal.data,
            num_reqs=num_reqs,
            num_actual_tokens=num_tokens,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
        )

    def write(self, to: AttentionMetadata) -> None:
        """Enqueue copies into the tensors of a step, and its padding."""
        count = self.seq_lens.shape[0]
        to.query_start_loc[: count + 1].copy_(self.query_start_loc)
        if to.seq_lens.shape[0] > count:
            to.query_start_loc[count + 1 :].copy_(self.query_start_loc[count:])
        width = min(self.block_table.shape[1], to.block_table.shape[1])
        to.block_table[:count, :width].copy_(self.block_table[:, :width])
        if to.block_table.shape[1] > width:
            # A length beyond the table must not reach blocks of an earlier step.
            to.block_table[:count, width:].fill_(-1)
        _copy(self.seq_lens, to.seq_lens, 0)
        _copy(self.slot_mapping, to.slot_mapping, -1)
        if self.positions is not None and to.positions is not None:
            _copy(self.positions, to.positions, 0)
        if isinstance(self.causal, Tensor) and isinstance(to.causal, Tensor):
            _copy(self.causal, to.causal, 1)


def read_tensor_step(
    limits: Limits,
    device: torch.device,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    positions: Tensor | None,
    causal: bool | Tensor,
    max_query_len: int | None,
    max_seq_len: int | None,
    copy: bool,
) -> TensorStep:
    """Return a step of tensors that go together and fit a builder; their values stay unread.

    Args:
        copy: whether they will be copied; layers take int32 flags only.
        ...: as in `AttentionMetadataBuilder.build_from_tensors`.

    Raises:
        MetadataError: anything else.
    """
    _check("seq_lens", seq_lens, (None,), device)
    num_reqs = seq_lens.shape[0]
    _check("query_start_loc", query_start_loc, (num_reqs + 1,), device)
    _check("block_table", block_table, (num_reqs, None), device)
    _check("slot_mapping", slot_mapping, (None,), device)
    num_tokens, width = slot_mapping.shape[0], block_table.shape[1]
    if positions is not None:
        _check("positions", positions, (num_tokens,), device)
    if not isinstance(causal, bool):
        _check("causal", causal, (num_reqs,), device, (torch.bool, *INDEX_DTYPES) if copy else (torch.int32,))
    if max_query_len is None:
        max_query_len = num_tokens
    if max_seq_len is None:
        max_seq_len = min(limits.seq_len, width * limits.block_size)
    fix = "pass an upper bound of the lengths, or None"
    max_query_len = read_count("max_query_len", max_query_len, 0, fix, MetadataError)
    max_seq_len = read_count("max_seq_len", max_seq_len, 0, fix, MetadataError)
    for what, count, limit, name in (
        ("requests", num_reqs, limits.num_reqs, "max_num_reqs"),
        ("tokens", num_tokens, limits.num_tokens, "max_num_tokens"),
        ("new tokens in one request", max_query_len, limits.num_tokens, "max_num_tokens"),
        ("positions in one request", max_seq_len, limits.seq_len, "max_seq_len"),
    ):
        if count > limit:
            raise over_capacity(what, count, limit, name)
    needed = -(-max_seq_len // limits.block_size)
    if needed > width:
        raise MetadataError(
            f"a block table of {width} columns for up to {max_seq_len} tokens in blocks of {limits.block_size}",
            f"at least {needed} columns",
            "pass the whole table, or a smaller max_seq_len",
        )
    tensors = query_start_loc, seq_lens, block_table, slot_mapping, positions
    return TensorStep(*tensors, causal, max_query_len, max_seq_len)


def _copy(values: Tensor, to: Tensor, padding: int) -> None:
    count = values.shape[0]
    to[:count].copy_(values)
    if to.shape[0] > count:
        to[count:].fill_(padding)


def _check(
    name: str,
    tensor: object,
    shape: tuple[int | None, ...],
    device: torch.device,
    dtypes: tuple[torch.dtype, ...] = INDEX_DTYPES,
) -> None:
    """Refuse what is no tensor of such a shape on the device; `None` allows any size."""
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    allowed = f"{' or '.join(map(dtype_name, dtypes))} [{sizes}] on {device}"
    if not isinstance(tensor, Tensor):
        raise MetadataError(f"{name}={tensor!r:.60}", allowed, "pass a tensor, or host numbers to build()")
    fits = tensor.dim() == len(shape) and all(
        size in (None, own) for size, own in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype not in dtypes or tensor.device != device or tensor.layout != torch.strided:
        kind = "" if tensor.layout == torch.strided else f"{tensor.layout} "
        raise MetadataError(
            f"{name} is {kind}{dtype_name(tensor.dtype)} {list(tensor.shape)} on {tensor.device}",
            allowed,
            "pass tensors of one step on the builder's device, or host numbers to build()",
        )
