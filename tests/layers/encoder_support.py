"""Packed sequences for the layers without a cache, and what dense attention says about them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import vattn

HEADS, KV_HEADS, SIZE = 4, 2, 16


def offsets(lens: Sequence[int]) -> Tensor:
    """Return int32 `[len(lens) + 1]`."""
    return torch.tensor([0, *lens]).cumsum(0).int()


def packed_step(lens: Sequence[int], **padding: int) -> vattn.AttentionMetadata:
    """Return the step of texts of these lengths."""
    return vattn.AttentionMetadataBuilder(16, 128, 64, 16).build(list(lens), **padding)


def random_qkv(
    tokens: int,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    size: int = SIZE,
    *,
    real: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[Tensor]:
    """Return query, key and value `[T, heads, size]`, views of one projection; rows from `real` on are NaN."""
    rng = torch.Generator().manual_seed(seed)
    fused = torch.randn(tokens, heads + 2 * kv_heads, size, generator=rng).to(dtype)
    if real is not None:
        fused[real:] = torch.nan
    return list(fused.split([heads, kv_heads, kv_heads], dim=1))


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lens: Sequence[int],
    kv_lens: Sequence[int] | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return fp64 `[T, H, V]`, one score matrix per sequence, as a textbook writes it; rows of padding are zero."""
    out = query.new_zeros(*query.shape[:2], value.shape[2], dtype=torch.float64)
    first = first_key = 0
    for length, keys in zip(lens, lens if kv_lens is None else kv_lens, strict=True):
        rows, seen = slice(first, first + length), slice(first_key, first_key + keys)
        q, k, v = (t[part].double().transpose(0, 1) for t, part in ((query, rows), (key, seen), (value, seen)))
        k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], dim=0) for t in (k, v))
        scores = q @ k.transpose(1, 2) * (q.shape[2] ** -0.5 if scale is None else scale)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        distance = torch.arange(keys - length, keys)[:, None] - torch.arange(keys)
        if causal:
            scores = scores.masked_fill(distance < 0, -torch.inf)
        distance = distance.abs()
        if slopes is not None:
            scores = scores - slopes.double()[:, None, None] * distance
        if window is not None:
            scores = scores.masked_fill(distance >= window, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, length, 1)], dim=2)
        out[rows] = (scores.softmax(2)[:, :, :keys] @ v).transpose(0, 1)
        first, first_key = first + length, first_key + keys
    return out
