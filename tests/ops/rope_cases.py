"""Random calls of `vattn::rope_kv_cache_update`, and what they should do computed another way, in fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support import poisoned_empty, random_scale
from vattn.cache.layout import kv_cache_dtype, kv_cache_shape, op_views
from vattn.config.attention import AttentionConfig
from vattn.config.rope import RopeConfig
from vattn.ops.arguments import CacheUpdateArgs, RopeUpdateArgs
from vattn.quantization.codecs import encode_kv, encode_query
from vattn.quantization.formats import MODEL_DTYPES

NUM_BLOCKS, MAX_POSITIONS = 5, 37


def make_call(
    config: AttentionConfig,
    rope: RopeConfig,
    *,
    num_tokens: int = 9,
    full_tables: bool = False,
    table_dtype: torch.dtype = torch.float32,
    positions: torch.dtype | None = torch.int64,
    weights: bool = True,
    device: str = "cpu",
    seed: int = 0,
) -> RopeUpdateArgs:
    """Return a call on slices of one projection's result, with slots out of range over a cache of garbage."""
    rng = torch.Generator().manual_seed(seed)
    heads, kv_heads, dtype = config.num_heads, config.num_kv_heads, MODEL_DTYPES[config.dtype]
    sizes = [heads * config.head_size, kv_heads * config.head_size, kv_heads * config.head_size_v]
    projected = (torch.randn(num_tokens, sum(sizes) + 5, generator=rng) * 3).to(dtype)
    projected[:, sum(sizes) :] = torch.nan
    if num_tokens > 3:
        projected[1, :: sizes[0] // 2] *= 300
    query, key, value = projected.to(device)[:, : sum(sizes)].split(sizes, dim=1)
    slots = torch.randperm(NUM_BLOCKS * config.block_size, generator=rng)[:num_tokens]
    if num_tokens > 8:
        outside = torch.tensor([-1, -7, NUM_BLOCKS * config.block_size, 2**62, -(2**62)])
        slots[torch.randperm(num_tokens, generator=rng)[: len(outside)]] = outside
    columns = rope.rotary_dim if full_tables else rope.rotary_dim // 2
    rows = num_tokens if positions is None else MAX_POSITIONS
    # Arbitrary factors, not cosines: nothing may hold only where squares sum to one.
    cos, sin = (torch.randn(rows, columns, generator=rng).to(table_dtype).to(device) for _ in range(2))
    taken = None
    if positions is not None:
        taken = torch.randint(-MAX_POSITIONS, MAX_POSITIONS, (num_tokens,), generator=rng).to(positions).to(device)
    weight_dtype = dtype if seed % 2 else torch.float32
    scales = [
        random_scale(kind, kv_heads, 12.0, rng) for kind in (config.query_scale, config.kv_scale, config.kv_scale)
    ]
    q_weight = k_weight = None
    if rope.norm != "none" and weights:
        q_weight, k_weight = (
            (torch.rand(config.head_size, generator=rng) + 0.5).to(weight_dtype).to(device) for _ in range(2)
        )
    out_dtype = dtype if config.query_format == "none" else torch.float8_e4m3fn
    q_scale, k_scale, v_scale = (None if s is None else s.to(device) for s in scales)
    storage = poisoned_empty(kv_cache_shape(config, NUM_BLOCKS), kv_cache_dtype(config), device)
    key_cache, value_cache = op_views(storage, config)
    return RopeUpdateArgs(
        query=query.unflatten(1, (heads, -1)),
        key=key.unflatten(1, (kv_heads, -1)),
        value=value.unflatten(1, (kv_heads, -1)),
        cos=cos,
        sin=sin,
        positions=taken,
        query_out=poisoned_empty((num_tokens, heads, config.head_size), out_dtype, device),
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=slots.to(device),
        q_weight=q_weight,
        k_weight=k_weight,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        rope=rope.encode(),
        config=config.encode(),
    )


def turned(x: Tensor, weight: Tensor | None, args: RopeUpdateArgs, rope: RopeConfig) -> Tensor:
    """Return heads after norm and rotation in fp64, column by column: an oracle that shares no code with ours."""
    x, cos, sin = x.detach().cpu().double(), args.cos.cpu().double(), args.sin.cpu().double()
    if rope.norm != "none":
        x = x / ((x**2).sum(-1, keepdim=True) / x.shape[-1] + rope.norm_eps).sqrt()
        if weight is not None:
            x = x * (weight.cpu().double() + (1 if rope.norm == "rms_one_plus" else 0))
    out, half = x.clone(), rope.rotary_dim // 2
    for token in range(x.shape[0]):
        row = token if args.positions is None else int(args.positions[token])
        for pair in range(half):
            a, b = (2 * pair, 2 * pair + 1) if rope.style == "interleaved" else (pair, pair + half)
            i, j = (a, b) if cos.shape[1] == rope.rotary_dim else (pair, pair)
            out[token, :, a] = x[token, :, a] * cos[row, i] - x[token, :, b] * sin[row, i]
            out[token, :, b] = x[token, :, b] * cos[row, j] + x[token, :, a] * sin[row, j]
    return out


def expected(args: RopeUpdateArgs, rope: RopeConfig, config: AttentionConfig) -> tuple[Tensor, Tensor, CacheUpdateArgs]:
    """Return the query as fp64 before any rounding, as it should be stored, and the cache update that should happen."""
    dtype = MODEL_DTYPES[config.dtype]
    exact = turned(args.query, args.q_weight, args, rope)
    key = turned(args.key, args.k_weight, args, rope).to(dtype)
    stored = exact.to(dtype)
    if args.q_scale is not None:
        scale = args.q_scale.cpu()
        rounded = stored.float() if rope.round_query else exact.float()
        stored = encode_query(rounded, 1 / scale if "multiply" in rope.query_arithmetic else scale, config.num_kv_heads)
    copies: Any = [t.detach().cpu().clone() if isinstance(t, Tensor) else t for t in args]
    copied = RopeUpdateArgs(*copies)
    update = CacheUpdateArgs(
        key,
        copied.value,
        copied.key_cache,
        copied.value_cache,
        copied.slot_mapping,
        copied.k_scale,
        copied.v_scale,
        copied.config,
    )
    assert encode_kv(key, config.kv_cache_dtype, update.k_scale) is not None
    return exact, stored, update


def steps_apart(a: Tensor, b: Tensor) -> Tensor:
    """Return how many representable values lie between two tensors of one float dtype; 0 for NaN and NaN."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[a.itemsize]
    low = torch.iinfo(integer).min
    ordered = []
    for x in (a, b):
        bits = x.detach().cpu().contiguous().view(integer).long()
        ordered.append(torch.where(bits < 0, low - bits, bits))
    both_nan = a.detach().cpu().float().isnan() & b.detach().cpu().float().isnan()
    return torch.where(both_nan, 0, (ordered[0] - ordered[1]).abs())
