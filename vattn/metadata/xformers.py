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
from vattn.metadata.inputs import Lengths, Tables, read_integers

if TYPE_CHECKING:
    from xformers.ops.fmha.attn_bias import AttentionBias


@dataclass(eq=False)
class XFormersMetadata(AttentionMetadata):
    """An `AttentionMetadata` that also has `attn_bias`; layers take it like any other.

    Attributes:
        num_leading_decodes: requests with one new token each, and cached ones, at the beginning of the step.
    """

    num_leading_decodes: int = 0
    _bias: Any = field(default=None, repr=False)

    @property
    def attn_bias(self) -> AttentionBias | None:
        """xFormers' `PagedBlockDiagonalCausalWithOffsetPaddedKeysMask` of the leading decodes; `None` without any.

        It shares the tensors of the step, so nothing is copied and no length is read. The op makes the same one: layers
        do not need it.
        """
        if self._bias is None and self.num_leading_decodes:
            rows = slice(self.num_leading_decodes)
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
        self,
        query_lens: Lengths,
        seq_lens: Lengths | None = None,
        block_tables: Tables | None = None,
        **options: Any,
    ) -> XFormersMetadata:
        """Check a step, copy it into the buffers and return views of them; as `AttentionMetadataBuilder.build`."""
        step = super().build(query_lens, seq_lens, block_tables, **options)
        queries = read_integers("query_lens", query_lens)
        lengths = queries if seq_lens is None else read_integers("seq_lens", seq_lens)
        decodes = (queries == 1) & (lengths > 1)
        leading = int(decodes.long().cumprod(0).sum()) if block_tables is not None else 0
        metadata = XFormersMetadata(
            **{each.name: getattr(step, each.name) for each in fields(step)}, num_leading_decodes=leading
        )
        assert self._built is not None
        self._built = metadata, self._built[1]
        return metadata

    def advance(self, metadata: AttentionMetadata, new_blocks: Sequence[Any] | Tensor) -> XFormersMetadata:
        """Return the step that follows a step of decodes, all leading; as `AttentionMetadataBuilder.advance`."""
        after = super().advance(metadata, new_blocks)
        assert isinstance(after, XFormersMetadata)
        after.num_leading_decodes, after._bias = after.num_reqs, None
        return after
