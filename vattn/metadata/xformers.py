"""`XFormersMetadata`: a step with xFormers' own mask of its decodes, for code that calls xFormers itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vattn.backends.xformers import XFormersBackend, decode_bias
from vattn.errors import MissingPackageError
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.metadata.builder import AttentionMetadataBuilder
from vattn.metadata.inputs import Lengths, Tables
from vattn.metadata.token_order import reorder_batch

if TYPE_CHECKING:
    from xformers.ops.fmha.attn_bias import AttentionBias


@dataclass(eq=False)
class XFormersMetadata(AttentionMetadata):
    """An `AttentionMetadata` that also has `attn_bias`; layers take it like any other."""

    _bias: Any = field(default=None, repr=False, init=False)

    @property
    def num_leading_decodes(self) -> int:
        """Requests with one new token each, and cached ones, at the beginning of the step."""
        if self._lengths is None:
            return 0
        decodes = (self._lengths.query_lens == 1) & (self._lengths.seq_lens > 1)
        return int(decodes.long().cumprod(0).sum())

    @property
    def attn_bias(self) -> AttentionBias | None:
        """xFormers' `PagedBlockDiagonalCausalWithOffsetPaddedKeysMask` of the leading decodes; `None` without any.

        It shares the tensors of the step, so nothing is copied and no length is read. The op makes the same one: layers
        do not need it.
        """
        if self._bias is None and (leading := self.num_leading_decodes):
            rows = slice(leading)
            self._bias = decode_bias(self.seq_lens[rows], self.block_table[rows], self.block_size)
        return self._bias


class XFormersMetadataBuilder(AttentionMetadataBuilder):
    """Make `XFormersMetadata`; arguments and buffers are as in `AttentionMetadataBuilder`.

    Raises:
        MissingPackageError: xFormers is not installed, or too old.
        ConfigError: as for `AttentionMetadataBuilder`.

    Bring decodes first to have them all in `attn_bias`; layers need no order.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        package = XFormersBackend.capabilities.package
        problem = None if package is None else package.problem()
        if problem is not None:
            raise MissingPackageError(
                problem, "xFormers for its mask in the metadata", "use vattn.AttentionMetadataBuilder, or install it"
            )
        super().__init__(*arguments, **options)

    def build(
        self, query_lens: Lengths, seq_lens: Lengths | None = None, block_tables: Tables | None = None, **options: Any
    ) -> XFormersMetadata:
        """Check a step, copy it into the buffers and return views of them; as `AttentionMetadataBuilder.build`."""
        step = super().build(query_lens, seq_lens, block_tables, **options)
        metadata = XFormersMetadata(**{each.name: getattr(step, each.name) for each in fields(step)})
        assert self._built is not None
        self._built = metadata, self._built[1]
        return metadata

    def reorder_batch(self, input_batch: Any, scheduler_output: Any) -> bool:
        """Bring decodes to the front and prompts to the end; as `TreeAttentionMetadataBuilder.reorder_batch`."""
        return reorder_batch(input_batch, scheduler_output, self.decode_threshold)

    def advance(self, metadata: AttentionMetadata, new_blocks: Sequence[Any] | Tensor) -> XFormersMetadata:
        """Return the step that follows a step of decodes, all leading; as `AttentionMetadataBuilder.advance`."""
        after = super().advance(metadata, new_blocks)
        assert isinstance(after, XFormersMetadata)
        after._bias = None
        return after


XFormersBackend.builder = XFormersMetadataBuilder
