"""What `vattn::rope_kv_cache_update` means, in fp32 on any device, free of syncs: the executable specification.

A head of D columns goes through an optional RMSNorm over all of them, then its first R are rotated in pairs, all in
fp32 without a rounding between. The results are rounded to the model dtype; what is quantised is quantised after that,
except a query with `round_query=False`.

Letters as in `vattn.ops.arguments`; R columns are rotated, in R / 2 pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.config.attention import AttentionConfig
from vattn.config.rope import RopeConfig
from vattn.ops.arguments import CacheUpdateArgs, RopeUpdateArgs
from vattn.quantization.formats import FP8_E4M3_MAX, MODEL_DTYPES


def rotate_all(args: RopeUpdateArgs, rope: RopeConfig, config: AttentionConfig) -> CacheUpdateArgs:
    """Write `query_out` and return the cache update: rotated keys in the model dtype, and the values."""
    dtype = MODEL_DTYPES[config.dtype]
    cos, sin = (rows_of(table, args.positions) for table in (args.cos, args.sin))
    query = rotate(normalise(args.query, args.q_weight, rope), cos, sin, rope)
    key = rotate(normalise(args.key, args.k_weight, rope), cos, sin, rope).to(dtype)
    if args.q_scale is not None:
        if rope.round_query:
            query = query.to(dtype).float()
        query = scale_query(query, args.q_scale, config.num_kv_heads, rope.query_arithmetic)
    args.query_out.copy_(query.to(args.query_out.dtype))
    return CacheUpdateArgs(
        key,
        args.value,
        args.key_cache,
        args.value_cache,
        args.slot_mapping,
        args.k_scale,
        args.v_scale,
        config.encode(),
    )


def rows_of(table: Tensor, positions: Tensor | None) -> Tensor:
    """Return the tables' rows `[T, columns]` of every token; NaN for a position outside of a table."""
    if positions is None:
        return table
    count = table.shape[0]
    rows = torch.where(positions < 0, positions + count, positions).long()
    inside = (rows >= 0) & (rows < count)
    return torch.where(inside[:, None], table[rows.clamp(0, count - 1)], torch.nan)


def normalise(x: Tensor, weight: Tensor | None, rope: RopeConfig) -> Tensor:
    """Return heads `[T, heads, D]` in fp32, normalised if the config has a norm; fp64 stays fp64."""
    x = _wide(x)
    if rope.norm == "none":
        return x
    x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + rope.norm_eps)
    if weight is None:
        return x
    return x * (1.0 + _wide(weight) if rope.norm == "rms_one_plus" else _wide(weight))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rope: RopeConfig) -> Tensor:
    """Rotate the pairs of the first R columns of `x [T, heads, D]` by cos and sin, `[T, R / 2]` or `[T, R]`."""
    half = rope.rotary_dim // 2
    rotated, passed = x[..., : rope.rotary_dim], x[..., rope.rotary_dim :]
    pairs = _paired(rotated, rope)
    if cos.shape[-1] == half:
        cos, sin = (table[:, None, None, :] for table in (cos, sin))
    else:
        cos, sin = (_paired(table[:, None, :], rope) for table in (cos, sin))
    cos, sin = _wide(cos).expand(-1, -1, 2, -1), _wide(sin).expand(-1, -1, 2, -1)
    first, second = pairs[..., 0, :], pairs[..., 1, :]
    pairs = torch.stack(
        (first * cos[..., 0, :] - second * sin[..., 0, :], second * cos[..., 1, :] + first * sin[..., 1, :]), dim=-2
    )
    if rope.style == "interleaved":
        pairs = pairs.transpose(-1, -2)
    return torch.cat((pairs.flatten(-2), passed), dim=-1)


def _paired(columns: Tensor, rope: RopeConfig) -> Tensor:
    """View `[..., R]` as `[..., 2, R / 2]`: first and second members of every pair."""
    if rope.style == "interleaved":
        return columns.unflatten(-1, (-1, 2)).transpose(-1, -2)
    return columns.unflatten(-1, (2, -1))


def scale_query(query: Tensor, q_scale: Tensor, num_kv_heads: int, arithmetic: str) -> Tensor:
    """Return a query `[T, H, D]` over its scale, within e4m3's range but not rounded to its codes."""
    if q_scale.numel() != 1:
        q_scale = q_scale.repeat_interleave(query.shape[1] // num_kv_heads).view(-1, 1)
    else:
        q_scale = q_scale.reshape(())
    scaled = query * q_scale if arithmetic.endswith("multiply") else query / q_scale
    return scaled.clamp(-FP8_E4M3_MAX, FP8_E4M3_MAX)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
