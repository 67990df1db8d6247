"""The lightning indexer of sparse latent attention: its cache, its scores, and the positions it chooses, in torch.

Every query row has H small heads, every cached token one key for all of them. The score of a token is the sum over
heads of `weight[h] * relu(q[h] . k)`; a row sees the K tokens with the highest scores, of equal ones the first. Queries
and keys are e4m3: the queries' scales are part of the weights, a key's is stored with it and multiplies its score.

Letters: T query tokens (padding included), B requests, H index heads, D columns of one, W columns of the block table.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from vattn.errors import ShapeError
from vattn.ops.checks import check_lengths
from vattn.ops.index_dtypes import INDEX_DTYPES
from vattn.ops.reference.attention import write_slots
from vattn.ops.tensor_checks import OncePerSignature, check_rows, check_tensor
from vattn.quantization.formats import FP8_E4M3_MAX, MODEL_DTYPES

SCALE_BYTES = 4
"""Bytes of the fp32 scale after the codes of a key."""

_LEAST_SCALE = 2.0**-100
"""Scale of a key of zeros."""


class IndexerUpdateArgs(NamedTuple):
    """`vattn::mla_indexer_update`: quantise index keys and write them into their slots."""

    key: Tensor
    """`[T, D]`, float16, bfloat16 or float32."""
    index_cache: Tensor
    """uint8 `[num_blocks, block_size, D + 4]`: e4m3 codes, then their fp32 scale; mutated."""
    slot_mapping: Tensor
    """int64 or int32 `[T]`, as for the layer's own cache."""


class IndexerSelectArgs(NamedTuple):
    """`vattn::mla_indexer_select`: the positions that each row sees."""

    query: Tensor
    """e4m3 `[T, H, D]`."""
    weights: Tensor
    """fp32 `[T, H]`, scales of the queries multiplied in."""
    index_cache: Tensor
    """As above; read only."""
    query_start_loc: Tensor
    """int32 or int64 `[B + 1]`."""
    seq_lens: Tensor
    """int32 or int64 `[B]`."""
    block_table: Tensor
    """int32 or int64 `[B, W]`; that of the layer's own cache."""
    topk_indices: Tensor
    """int32 `[T, K]`; every row is written: positions in its request, then -1. A row that sees at most K tokens gets
    all of them, in order; others get K in no particular order. Rows of padding get -1. Mutated."""


@OncePerSignature
def check_indexer_update(args: IndexerUpdateArgs) -> None:
    """Check the arguments of `vattn::mla_indexer_update`.

    Raises:
        ShapeError, DtypeError, DeviceError, StrideError: by kind of mistake.
    """
    device = args.key.device
    tokens, columns = args.key.shape if args.key.ndim == 2 else (0, 0)
    check_rows("key", args.key, (tokens, columns), tuple(MODEL_DTYPES.values()), device, "[T, D]")
    _check_index_cache(args.index_cache, columns, device)
    check_tensor("slot_mapping", args.slot_mapping, (tokens,), INDEX_DTYPES, device)


@OncePerSignature
def check_indexer_select(args: IndexerSelectArgs) -> None:
    """Check the arguments of `vattn::mla_indexer_select`.

    Raises:
        ShapeError, DtypeError, DeviceError, StrideError: by kind of mistake.
    """
    device, int32 = args.query.device, (torch.int32,)
    tokens, heads, columns = args.query.shape if args.query.ndim == 3 else (0, 0, 0)
    check_tensor("query", args.query, (tokens, heads, columns), (torch.float8_e4m3fn,), device, "[T, H, D]")
    check_tensor("weights", args.weights, (tokens, heads), (torch.float32,), device)
    _check_index_cache(args.index_cache, columns, device)
    check_lengths(args, device)
    listed = args.topk_indices.shape[1] if args.topk_indices.ndim == 2 else 0
    check_rows("topk_indices", args.topk_indices, (tokens, max(1, listed)), int32, device)


def _check_index_cache(cache: Tensor, columns: int, device: torch.device) -> None:
    if columns % 4:
        raise ShapeError(f"index keys of {columns} columns", "a multiple of 4, so that scales are aligned", "pad them")
    blocks, size = cache.shape[:2] if cache.ndim == 3 else (0, 0)
    check_tensor("index_cache", cache, (max(1, blocks), max(1, size), columns + SCALE_BYTES), (torch.uint8,), device)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes of rows `[..., D]` and fp32 scales `[...]`: largest magnitude over 448."""
    wide = x.float()
    scale = (wide.abs().amax(-1) / torch.tensor(FP8_E4M3_MAX, device=x.device)).clamp(min=_LEAST_SCALE)
    codes = (wide / scale.unsqueeze(-1)).clamp(-FP8_E4M3_MAX, FP8_E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, scale


def mla_indexer_update(args: IndexerUpdateArgs) -> None:
    """Write keys into their slots; a slot outside the cache writes nothing. No sync."""
    codes, scale = quantise_rows(args.key)
    rows = torch.cat((codes.view(torch.uint8), scale.unsqueeze(-1).view(torch.uint8)), -1)
    write_slots(args.index_cache, rows, args.slot_mapping)


def index_scores(query: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
    """Return fp32 scores `[q, s]` of rows `[q, H, D]` and stored keys `[s, D + 4]`."""
    codes, scale = rows.split((rows.shape[-1] - SCALE_BYTES, SCALE_BYTES), -1)
    keys = codes.contiguous().view(torch.float8_e4m3fn).float()
    products = torch.einsum("qhd,sd->qhs", query.float(), keys).relu()
    return torch.einsum("qhs,qh->qs", products, weights) * scale.contiguous().view(torch.float32).squeeze(-1)


def mla_indexer_select(args: IndexerSelectArgs) -> None:
    """Choose positions request by request: the executable specification."""
    cache, size, listed = args.index_cache, args.index_cache.shape[1], args.topk_indices.shape[1]
    args.topk_indices.fill_(-1)
    lengths = args.seq_lens.tolist()
    for request, (start, end) in enumerate(itertools.pairwise(args.query_start_loc.tolist())):
        keys = min(max(lengths[request], 0), args.block_table.shape[1] * size)
        position = torch.arange(keys, device=cache.device)
        blocks = args.block_table[request, position // size].long()
        known = (blocks >= 0) & (blocks < cache.shape[0])
        rows = cache[torch.where(known, blocks, 0), position % size]
        scores = index_scores(args.query[start:end], args.weights[start:end], rows)
        for row in range(start, end):
            limit = min(lengths[request] - (end - 1 - row), keys)
            if limit <= 0:
                continue
            # Keys in blocks that are none are chosen last; attention does not see them.
            own = torch.where(known[:limit], scores[row - start, :limit], -torch.inf)
            chosen = torch.sort(own, descending=True, stable=True).indices[:listed].sort().values
            args.topk_indices[row, : len(chosen)] = chosen.int()
