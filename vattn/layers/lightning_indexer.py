"""`LightningIndexer`: chooses the positions that rows of a sparse latent attention layer see."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vattn import context
from vattn.errors import CacheNotBoundError, ConfigError, MetadataError, ShapeError
from vattn.metadata import AttentionMetadata
from vattn.ops.mla_indexer import SCALE_BYTES, quantise_rows


class LightningIndexer(nn.Module):
    """Keep index keys of a layer in a paged cache of their own, and choose `topk` positions for each row.

    Args:
        num_heads, head_size: heads of an index query, and their columns (those of a key), a multiple of 4.
        topk: positions that a row sees.
        max_tokens: tokens of the largest step, padding included.
        block_size: tokens of a block, as in the layer's own cache: both use one block table.
        topk_indices: int32 `[max_tokens, topk]` to share among layers; default: own memory.

    Attributes:
        topk_indices: what `MLAAttention(use_sparse=True, indexer=...)` reads.

    Raises:
        ConfigError: sizes below 1, or a `head_size` that is no multiple of 4.
        ShapeError: `topk_indices` of another shape or dtype.

    State: both buffers are outside of the state dict.

    Example:
        >>> import torch, vattn
        >>> indexer = LightningIndexer(num_heads=2, head_size=8, topk=2, max_tokens=8, block_size=16)
        >>> indexer.allocate(num_blocks=4)
        >>> builder = vattn.AttentionMetadataBuilder(max_num_reqs=2, max_num_tokens=8, max_seq_len=32, block_size=16)
        >>> step = builder.build(query_lens=[4], seq_lens=[4], block_tables=[[1]])
        >>> found = indexer(torch.randn(4, 2, 8), torch.ones(4, 2), torch.randn(4, 8), metadata=step)
        >>> found[:2].tolist()
        [[0, -1], [0, 1]]
    """

    index_cache: Tensor | None
    topk_indices: Tensor

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        topk: int,
        max_tokens: int,
        block_size: int = 64,
        topk_indices: Tensor | None = None,
    ) -> None:
        super().__init__()
        sizes = {"num_heads": num_heads, "topk": topk, "max_tokens": max_tokens, "block_size": block_size}
        wrong = {name: size for name, size in sizes.items() if not isinstance(size, int) or size < 1}
        if wrong or not isinstance(head_size, int) or head_size < 4 or head_size % 4:
            came = ", ".join(f"{name}={size!r}" for name, size in (wrong or {"head_size": head_size}).items())
            raise ConfigError(f"LightningIndexer({came})", "ints from 1 up, head_size a multiple of 4", "fix the sizes")
        self.num_heads, self.head_size, self.topk = num_heads, head_size, topk
        self.max_tokens, self.block_size = max_tokens, block_size
        if topk_indices is None:
            topk_indices = torch.full((max_tokens, topk), -1, dtype=torch.int32)
        elif topk_indices.shape != (max_tokens, topk) or topk_indices.dtype != torch.int32:
            raise ShapeError(
                f"topk_indices {tuple(topk_indices.shape)} of {topk_indices.dtype}",
                f"int32 ({max_tokens}, {topk})",
                "share the buffer of an indexer of the same sizes",
            )
        self.register_buffer("topk_indices", topk_indices, persistent=False)
        self.register_buffer("index_cache", None, persistent=False)

    def allocate(self, num_blocks: int) -> None:
        """Allocate the cache, zeroed: as many blocks as the layer's own has."""
        shape = (num_blocks, self.block_size, self.head_size + SCALE_BYTES)
        with torch.inference_mode(False):
            self.index_cache = torch.zeros(shape, dtype=torch.uint8, device=self.topk_indices.device)

    def forward(self, query: Tensor, weights: Tensor, key: Tensor, metadata: AttentionMetadata | None = None) -> Tensor:
        """Write the step's keys and choose the positions of its rows.

        Args:
            query: `[T, num_heads, head_size]`, any float dtype; quantised here, per token and head.
            weights: `[T, num_heads]`, of the heads; a score is `sum(weight * relu(q . k))`.
            key: `[T, head_size]`.
            metadata: this step's; default the one of `vattn.forward_context`.

        Returns:
            `topk_indices[:T]`, written: a row that sees at most `topk` tokens gets all of them.

        Raises:
            CacheNotBoundError: `allocate` was not called.
            MetadataError: no step.
            ShapeError, DtypeError, DeviceError: tensors that contradict the sizes.
        """
        metadata = context.current if metadata is None else metadata
        if not isinstance(metadata, AttentionMetadata):
            raise MetadataError(
                f"metadata of type {type(metadata).__name__} in LightningIndexer", "a step", "pass metadata=step"
            )
        cache, tokens = self.index_cache, query.shape[0]
        if cache is None:
            raise CacheNotBoundError("LightningIndexer has no cache", "indexer.allocate(num_blocks)", "call it first")
        if query.shape != (tokens, self.num_heads, self.head_size) or not tokens <= self.max_tokens:
            raise ShapeError(
                f"query has shape {tuple(query.shape)} in LightningIndexer",
                f"[T, {self.num_heads}, {self.head_size}] with T <= {self.max_tokens}",
                "make the indexer for the largest step",
            )
        codes, scale = quantise_rows(query)
        factors = weights.float() * scale
        listed = self.topk_indices[:tokens]
        torch.ops.vattn.mla_indexer_update(key, cache, metadata.slot_mapping)
        torch.ops.vattn.mla_indexer_select(
            codes, factors, cache, metadata.query_start_loc, metadata.seq_lens, metadata.block_table, listed
        )
        return listed
