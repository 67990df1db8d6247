"""Rows of a latent attention cache in Triton: loads and stores of every format of `vattn.quantization.mla_formats`.

A row is reached through a pointer to the storage's elements, bytes for all but the plain formats. Loads return values
without `k_scale`, which callers multiply in where it costs least.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.config.mla import MLAConfig
from vattn.kernels.triton.cache.update import stored
from vattn.kernels.triton.common.codec import cast, decode, encode_e2m1, encode_e4m3, encode_quotient
from vattn.kernels.triton.common.epilogue import absolute_maximum
from vattn.quantization.mla_formats import DS_MLA_GROUP, NVFP4_GROUP

LEAST_SCALE = tl.constexpr(2.0**-100)
"""`vattn.quantization.mla_formats._LEAST_SCALE`: that of a group of zeros."""

FP8_GROUP = tl.constexpr(DS_MLA_GROUP)
FP4_GROUP = tl.constexpr(NVFP4_GROUP)


def row_strides(config: MLAConfig, block_stride: int) -> tuple[int, int]:
    """Return how far apart blocks and rows are, in elements of the storage."""
    return block_stride, config.row_bytes if config.packed else config.head_size


@triton.jit
def row_offset(block, offset, STRIDES: tl.constexpr):
    """Return where rows begin, in elements."""
    return block.to(tl.int64) * STRIDES[0] + offset * STRIDES[1]


@triton.jit
def decode_fp4(code):
    """Return e2m1 codes 0 to 15 in int32 as fp32."""
    magnitude = code & 7
    # From code 2 on exponent and mantissa are those of fp32, two bits of them; below lie 0 and a half.
    normal = ((magnitude << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return tl.where(code >= 8, -value, value)


@triton.jit
def load_latents(
    row, exists, FIRST, WIDTH: tl.constexpr, L: tl.constexpr, R: tl.constexpr, FORMAT: tl.constexpr,
    TARGET: tl.constexpr, NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    """Return latent columns [FIRST, FIRST + WIDTH) of rows as TARGET, zeros where a row or column does not exist.

    WIDTH is a power of two, FIRST a multiple of it; packed formats need WIDTH >= 16.
    """
    column = FIRST + tl.arange(0, WIDTH)
    mask = exists[:, None] & (column < L)[None, :]
    if FORMAT == "fp8_ds_mla":
        values = decode(tl.load(row[:, None] + column[None, :], mask=mask, other=0), "fp8_e4m3", tl.float32, NATIVE_FP8)
        GROUPS: tl.constexpr = (WIDTH + FP8_GROUP - 1) // FP8_GROUP
        group = FIRST // FP8_GROUP + tl.arange(0, GROUPS)
        scales = (row + L).to(tl.pointer_type(tl.float32))
        known = exists[:, None] & (group < L // FP8_GROUP)[None, :]
        scale = tl.load(scales[:, None] + group[None, :], mask=known, other=0.0)
        grouped = tl.reshape(values, [values.shape[0], GROUPS, WIDTH // GROUPS]) * tl.expand_dims(scale, 2)
        return cast(tl.reshape(grouped, [values.shape[0], WIDTH]), TARGET)
    elif FORMAT == "nvfp4_ds_mla":
        pair = FIRST // 2 + tl.arange(0, WIDTH // 2)
        pair_mask = exists[:, None] & (pair < L // 2)[None, :]
        codes = tl.load(row[:, None] + pair[None, :], mask=pair_mask, other=0).to(tl.int32)
        values = decode_fp4(tl.interleave(codes & 15, codes >> 4))
        COUNT: tl.constexpr = WIDTH // FP4_GROUP
        block = FIRST // FP4_GROUP + tl.arange(0, COUNT)
        place = (L // FP4_GROUP // 4) * (block % 4) + block // 4
        block_mask = exists[:, None] & (block < L // FP4_GROUP)[None, :]
        stored_scale = tl.load(row[:, None] + (L // 2 + R + place)[None, :], mask=block_mask, other=0)
        step = decode(stored_scale, "fp8_e4m3", tl.float32, NATIVE_FP8)
        blocks = tl.reshape(values, [values.shape[0], COUNT, FP4_GROUP]) * tl.expand_dims(step, 2)
        return cast(tl.reshape(blocks, [values.shape[0], WIDTH]), TARGET)
    else:
        return decode(tl.load(row[:, None] + column[None, :], mask=mask, other=0), FORMAT, TARGET, NATIVE_FP8)


@triton.jit
def load_ropes(
    row, exists, R_TILE: tl.constexpr, L: tl.constexpr, R: tl.constexpr, FORMAT: tl.constexpr, TARGET: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    """Return the rotated keys of rows as TARGET `[rows, R_TILE]`, zeros where there is none."""
    column = tl.arange(0, R_TILE)
    mask = exists[:, None] & (column < R)[None, :]
    if FORMAT == "fp8_ds_mla":
        tail = (row + (L + 4 * (L // FP8_GROUP))).to(tl.pointer_type(tl.bfloat16))
        return tl.load(tail[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32).to(TARGET)
    elif FORMAT == "nvfp4_ds_mla":
        raw = tl.load(row[:, None] + (L // 2 + column)[None, :], mask=mask, other=0)
        return decode(raw, "fp8_e4m3", TARGET, NATIVE_FP8)
    else:
        return decode(tl.load(row[:, None] + (L + column)[None, :], mask=mask, other=0), FORMAT, TARGET, NATIVE_FP8)


@triton.jit
def store_row(
    row, latent, rope, scale, L: tl.constexpr, R: tl.constexpr, L_TILE: tl.constexpr, R_TILE: tl.constexpr,
    FORMAT: tl.constexpr, NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    """Store one row of latents `[L_TILE]` and rotated keys `[R_TILE]`, bit for bit as the reference; `scale` `[1]`."""
    column = tl.arange(0, L_TILE)
    rope_column = tl.arange(0, R_TILE)
    if FORMAT == "fp8_ds_mla":
        GROUPS: tl.constexpr = L_TILE // FP8_GROUP
        group = tl.arange(0, GROUPS)
        x = tl.reshape(tl.where(column < L, latent.to(tl.float32), 0.0), [GROUPS, FP8_GROUP])
        absmax = absolute_maximum(x)
        step = tl.div_rn(absmax, tl.full(absmax.shape, 448.0, tl.float32))
        step = tl.where(step < LEAST_SCALE, LEAST_SCALE, step)
        codes = encode_quotient(x, step[:, None], "fp8_e4m3", NATIVE_FP8)
        tl.store(row + column, tl.reshape(codes, [L_TILE]), mask=column < L)
        scales = (row + L).to(tl.pointer_type(tl.float32))
        tl.store(scales + group, step, mask=group < L // FP8_GROUP)
        tail = (row + (L + 4 * (L // FP8_GROUP))).to(tl.pointer_type(tl.bfloat16))
        tl.store(tail + rope_column, cast(rope.to(tl.float32), tl.bfloat16), mask=rope_column < R)
    elif FORMAT == "nvfp4_ds_mla":
        COUNT: tl.constexpr = L_TILE // FP4_GROUP
        block = tl.arange(0, COUNT)
        x = tl.reshape(tl.where(column < L, latent.to(tl.float32), 0.0), [COUNT, FP4_GROUP])
        absmax = absolute_maximum(x)
        code = encode_e4m3(tl.div_rn(absmax, tl.full(absmax.shape, 6.0, tl.float32)))
        step = decode(code, "fp8_e4m3", tl.float32, False)[:, None]
        # A block is stored as zeros if its scale rounds to zero or is NaN.
        ratio = tl.div_rn(x, tl.zeros_like(x) + tl.where(step > 0.0, step, 1.0))
        values = tl.where(step > 0.0, encode_e2m1(ratio), 0)
        pairs = tl.reshape(values, [L_TILE // 2, 2]) << (4 * tl.arange(0, 2))[None, :]
        half = tl.arange(0, L_TILE // 2)
        tl.store(row + half, tl.sum(pairs, axis=1).to(tl.uint8), mask=half < L // 2)
        raw = encode_e4m3(rope.to(tl.float32))
        tl.store(row + L // 2 + rope_column, raw, mask=rope_column < R)
        place = (L // FP4_GROUP // 4) * (block % 4) + block // 4
        tl.store(row + L // 2 + R + place, code, mask=block < L // FP4_GROUP)
    else:
        element: tl.constexpr = row.dtype.element_ty
        tl.store(row + column, stored(latent, scale, FORMAT, element, NATIVE_FP8), mask=column < L)
        tl.store(row + L + rope_column, stored(rope, scale, FORMAT, element, NATIVE_FP8), mask=rope_column < R)
