"""`LightningIndexer`: chooses the positions that rows of a sparse latent attention layer see."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vattn.config.arguments import read_count
from vattn.errors import CacheNotBoundError, ConfigError, DtypeError, ShapeError, UnsupportedRequestError
from vattn.layers.base.checks import check_block_size, check_no_gradients, check_tokens
from vattn.layers.mla.arguments import plain_step
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.ops.index_dtypes import as_int32, as_int64
from vattn.ops.reference.mla_indexer import (
    SCALE_BYTES,
    IndexerSelectArgs,
    IndexerUpdateArgs,
    check_indexer_select,
    check_indexer_update,
    quantise_rows,
)
from vattn.quantization.formats import dtype_name

_NAME = "LightningIndexer"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class LightningIndexer(nn.Module):
    """Keep index keys of a layer in a paged cache of their own, and choose `topk` positions for each row.

    Args:
        num_heads, head_size: heads of an index query, and their columns (a key has as many), a multiple of 4.
        topk: positions that a row sees.
        max_tokens: tokens of the largest step, padding included.
        block_size: tokens of a block, as in the layer's own cache: both use one block table.
        topk_indices: int32 `[max_tokens, topk]` to share among layers; default: own memory.

    Attributes:
        topk_indices: what `MLAAttention(use_sparse=True, indexer=...)` reads.

    Raises:
        ConfigError: sizes below 1, or a `head_size` that is no multiple of 4.
        ShapeError: `topk_indices` of another shape or dtype.

    State: both buffers are outside of the state dict. Every rank would need all index keys, so that there is none over
    a cache that ranks share.

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
        sizes = {
            "num_heads": num_heads, "head_size": head_size, "topk": topk, "max_tokens": max_tokens,
            "block_size": block_size,
        }  # fmt: skip
        counts = [read_count(name, size, 1, f"fix {name} of {_NAME}") for name, size in sizes.items()]
        self.num_heads, self.head_size, self.topk, self.max_tokens, self.block_size = counts
        if self.head_size % 4:
            raise ConfigError(f"{_NAME}(head_size={head_size})", "a multiple of 4", "pad the index heads")
        shape = self.max_tokens, self.topk
        if topk_indices is None:
            topk_indices = torch.full(shape, -1, dtype=torch.int32)
        elif not isinstance(topk_indices, Tensor) or topk_indices.shape != shape or topk_indices.dtype != torch.int32:
            got = f"of type {type(topk_indices).__name__}"
            if isinstance(topk_indices, Tensor):
                got = f"{tuple(topk_indices.shape)} of {dtype_name(topk_indices.dtype)}"
            raise ShapeError(
                f"topk_indices {got} in {_NAME}", f"int32 {shape}", "share the buffer of an indexer of the same sizes"
            )
        self.register_buffer("topk_indices", topk_indices, persistent=False)
        self.register_buffer("index_cache", None, persistent=False)

    @property
    def num_blocks(self) -> int | None:
        """Blocks of the cache; `None` before `allocate`."""
        return None if self.index_cache is None else self.index_cache.shape[0]

    def allocate(self, num_blocks: int) -> None:
        """Allocate the cache, zeroed: as many blocks as the layer's own has.

        Raises:
            ConfigError: no positive int.
        """
        blocks = read_count("num_blocks", num_blocks, 1, "pass as many as the layer's cache has")
        shape = (blocks, self.block_size, self.head_size + SCALE_BYTES)
        with torch.inference_mode(False):
            self.index_cache = torch.zeros(shape, dtype=torch.uint8, device=self.topk_indices.device)

    def forward(self, query: Tensor, weights: Tensor, key: Tensor, metadata: AttentionMetadata | None = None) -> Tensor:
        """Write the step's keys and choose the positions of its rows.

        Args:
            query: `[T, num_heads, head_size]`, float16, bfloat16 or float32, as the others; quantised here, per token
                and head.
            weights: `[T, num_heads]`, of the heads; a score is `sum(weight * relu(q . k))`.
            key: `[T, head_size]`.
            metadata: this step's; default the one of `vattn.forward_context`. Without any this is a profiling call:
                no cache is needed and nothing is written.

        Returns:
            `topk_indices[:T]`, written: a row that sees at most `topk` tokens gets all of them.

        Raises:
            CacheNotBoundError: `allocate` was not called.
            MetadataError: no step, or one for blocks of another size.
            ShapeError, DtypeError, DeviceError: tensors that contradict the sizes or the step.
            UnsupportedRequestError: a step over a cache that ranks share, or one that a sparse layer refuses.
        """
        metadata, tokens = plain_step(self, metadata), self._check_rows(query, weights, key)
        if metadata is None:
            return self.topk_indices[:tokens]
        if metadata.dcp_shard is not None:
            raise UnsupportedRequestError(
                f"a step of {metadata.dcp_shard} in {_NAME}",
                "steps over a cache that no ranks share: a row's positions are chosen among all tokens",
                "leave context_parallel out, or give the layer an indexer of your own",
            )
        cache = self.index_cache
        if cache is None:
            raise CacheNotBoundError(f"{_NAME} has no cache", "indexer.allocate(num_blocks)", "call it first")
        codes, scale = quantise_rows(query)
        update = IndexerUpdateArgs(key, cache, as_int64(metadata.slot_mapping))
        select = IndexerSelectArgs(
            codes, weights.float() * scale, cache,
            as_int32(metadata.query_start_loc), as_int32(metadata.seq_lens), as_int32(metadata.block_table),
            self.topk_indices[:tokens],
        )  # fmt: skip
        if not torch.compiler.is_compiling():
            self._check_step(query, weights, metadata)
            # Before the first op writes; compiled code leaves it to each of them.
            check_indexer_update(update)
            check_indexer_select(select)
        torch.ops.vattn.mla_indexer_update(*update)
        torch.ops.vattn.mla_indexer_select(*select)
        return select.topk_indices

    def _check_rows(self, query: Tensor, weights: Tensor, key: Tensor) -> int:
        """Return the number of rows; refuse what is no tensor of rows of the sizes."""
        given = {"query": query, "weights": weights, "key": key}
        wrong = [f"{name} is {type(t).__name__}" for name, t in given.items() if not isinstance(t, Tensor)]
        if wrong:
            raise ShapeError(f"{', '.join(wrong)} in {_NAME}", "tensors of rows", "pass query, weights and key")
        widths = {"query": (self.num_heads, self.head_size), "weights": (self.num_heads,), "key": (self.head_size,)}
        tokens = query.shape[0] if query.dim() else 0
        for name, tensor in given.items():
            shape = (tokens, *widths[name])
            if tensor.shape != shape or not tokens <= self.max_tokens:
                raise ShapeError(
                    f"{name} has shape {tuple(tensor.shape)} in {_NAME}",
                    f"{shape}, of at most {self.max_tokens} tokens",
                    "pass a row per token of the step, and make the indexer for the largest one",
                )
            if tensor.dtype not in _DTYPES:
                allowed = ", ".join(map(dtype_name, _DTYPES))
                raise DtypeError(f"{name} is {dtype_name(tensor.dtype)} in {_NAME}", allowed, f"convert {name}")
        return tokens

    def _check_step(self, query: Tensor, weights: Tensor, metadata: AttentionMetadata) -> None:
        """Refuse rows and blocks that are not the step's. Eager calls only."""
        check_tokens(self, "query", query, metadata.slot_mapping.shape[0])
        fix = "make the indexer with the block_size of the layer's CacheConfig"
        check_block_size(self, metadata.block_size, self.block_size, fix)
        fix = "call it under torch.no_grad() or torch.inference_mode()"
        check_no_gradients(self, (query, weights), "choosing positions has no backward", fix)
