"""Norm, rotation and store of latent rows in one launch: `vattn.ops.reference.mla_rope` says what it computes."""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.config.mla import MLAConfig
from vattn.config.rope import RopeConfig
from vattn.kernels.triton.attention.launch import TRITON_DTYPES
from vattn.kernels.triton.cache.update import slot_start
from vattn.kernels.triton.common.codec import cast
from vattn.kernels.triton.common.tiles import Limits, next_power_of_two
from vattn.kernels.triton.mla.rows import row_strides, store_row
from vattn.ops.reference.mla_rope import MLARopeUpdateArgs
from vattn.quantization.formats import MODEL_DTYPES


@triton.jit(
    do_not_specialize=["num_slots", "eps", "num_rows"],
    do_not_specialize_on_alignment=["slot_mapping", "k_scale", "positions"],
)
def mla_rope_update_kernel(
    kv_c, k_pe, cos, sin, positions, norm_weight, cache, slot_mapping, k_scale, num_slots, num_rows, stride_c, stride_p,
    stride_row, stride_column, eps,
    L: tl.constexpr, R: tl.constexpr, L_TILE: tl.constexpr, R_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    STRIDES: tl.constexpr, FORMAT: tl.constexpr, MODEL: tl.constexpr, NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
    FULL_TABLE: tl.constexpr, NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    """Write one token's row. Grid: tokens. FULL_TABLE: a table's row has a factor for every column."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    scale = tl.full((1,), 1.0, tl.float32)
    if k_scale is not None:
        scale = tl.load(k_scale + tl.zeros((1,), tl.int32))
    column = tl.arange(0, L_TILE)
    latent = tl.load(kv_c + token * stride_c + column, mask=column < L, other=0.0).to(tl.float32)
    if NORM != "none":
        latent = latent * tl.rsqrt(tl.sum(latent * latent, 0) / L + eps)
        if norm_weight is not None:
            weight = tl.load(norm_weight + column, mask=column < L, other=0.0).to(tl.float32)
            if NORM == "rms_one_plus":
                weight = weight + 1.0
            latent = latent * weight
    place = tl.arange(0, R_TILE)
    inside = place < R
    if INTERLEAVED:
        partner = place ^ 1
        is_first = place % 2 == 0
        pair = place // 2
    else:
        partner = tl.where(place < R // 2, place + R // 2, place - R // 2)
        is_first = place < R // 2
        pair = place % (R // 2)
    if FULL_TABLE:
        pair = place
    row = token
    known = inside
    if positions is not None:
        row = tl.load(positions + token).to(tl.int64)
        row = tl.where(row < 0, row + num_rows, row)
        known = inside & (place < tl.where((row >= 0) & (row < num_rows), R, 0))
    offset = row * stride_row + pair * stride_column
    c = tl.load(cos + offset, mask=known, other=float("nan")).to(tl.float32)
    s = tl.load(sin + offset, mask=known, other=float("nan")).to(tl.float32)
    key = k_pe + token * stride_p
    x = tl.load(key + place, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(key + partner, mask=inside, other=0.0).to(tl.float32)
    product = other * s
    rope = tl.fma(x, c, tl.where(is_first, -product, product))
    target = cache + slot_start(slot, num_slots, BLOCK_SIZE, STRIDES)
    store_row(target, cast(latent, MODEL), cast(rope, MODEL), scale, L, R, L_TILE, R_TILE, FORMAT, NATIVE_FP8)


def rope_update(args: MLARopeUpdateArgs, rope: RopeConfig, config: MLAConfig, limits: Limits | None = None) -> None:
    """Run `vattn::mla_rope_kv_cache_update`."""
    if not args.slot_mapping.numel():
        return
    limits = limits or Limits.of(args.kv_c.device)
    cos, sin = args.cos, args.sin
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    latent, columns = config.kv_lora_rank, config.qk_rope_head_dim
    mla_rope_update_kernel[(args.slot_mapping.shape[0],)](
        args.kv_c, args.k_pe, cos, sin, args.positions, args.norm_weight, args.kv_cache, args.slot_mapping,
        args.k_scale, args.kv_cache.shape[0] * config.block_size, cos.shape[0], args.kv_c.stride(0),
        args.k_pe.stride(0), cos.stride(0), cos.stride(1), rope.norm_eps, L=latent, R=columns,
        L_TILE=next_power_of_two(latent), R_TILE=next_power_of_two(columns), BLOCK_SIZE=config.block_size,
        STRIDES=row_strides(config, args.kv_cache.stride(0)), FORMAT=config.kv_cache_dtype,
        MODEL=TRITON_DTYPES[MODEL_DTYPES[config.dtype]], NORM=rope.norm, INTERLEAVED=rope.style == "interleaved",
        FULL_TABLE=cos.shape[1] == columns, NATIVE_FP8=limits.native_fp8, num_warps=1 if latent <= 512 else 4,
        enable_fp_fusion=False,
    )  # fmt: skip
