"""Write new keys and values into their slots of a packed cache in one launch; a program takes some heads."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from vattn.cache.layout import PackedRows, packed_views
from vattn.config.attention import AttentionConfig
from vattn.kernels.replay import unrecorded
from vattn.kernels.triton.cache.packed_rows import TRITON_CODECS, part_constants
from vattn.kernels.triton.cache.packed_words import WORD_STORES
from vattn.kernels.triton.cache.update import head_scale, slot_start
from vattn.kernels.triton.common.tiles import Limits, next_power_of_two
from vattn.ops.arguments import CacheUpdateArgs
from vattn.quantization.formats import KV_FORMATS, PackedPart


@triton.jit
def load_columns(source, rows, FIRST: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Return COUNT columns of rows from FIRST on, zeros from WIDTH on."""
    column = FIRST + tl.arange(0, COUNT)[None, :]
    return tl.load(source + column, mask=rows & (column < WIDTH), other=0)


@triton.jit
def load_quarters(source, rows, PART: tl.constexpr):
    """Return rows `[heads, width]`; a thread gets as many columns of each quarter."""
    QUARTER: tl.constexpr = PART[1] // 4
    WIDTH: tl.constexpr = PART[0]
    low = tl.join(load_columns(source, rows, 0, QUARTER, WIDTH), load_columns(source, rows, QUARTER, QUARTER, WIDTH))
    high = tl.join(
        load_columns(source, rows, 2 * QUARTER, QUARTER, WIDTH),
        load_columns(source, rows, 3 * QUARTER, QUARTER, WIDTH),
    )
    return tl.reshape(tl.permute(tl.join(low, high), (0, 3, 2, 1)), [rows.shape[0], PART[1]])


@triton.jit
def load_groups(source, rows, PART: tl.constexpr):
    """Return rows `[heads, width]`; a thread gets whole groups of 16 columns."""
    HALF: tl.constexpr = PART[1] // 2
    column = tl.arange(0, HALF)
    # A thread loads half a group at once.
    column = (column // 8 * 16 + column % 8)[None, :]
    low = tl.load(source + column, mask=rows & (column < PART[0]), other=0)
    high = tl.load(source + column + 8, mask=rows & (column < PART[0] - 8), other=0)
    pairs = tl.reshape(tl.join(low, high), [rows.shape[0], PART[1] // 16, 8, 2])
    return tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), [rows.shape[0], PART[1]])


@triton.jit
def load_rows(source, rows, PART: tl.constexpr, WORDS: tl.constexpr):
    """Return rows `[heads, width]`; rotated rows and words are loaded in parts.

    Then one thread holds the distant columns that it sums, and few threads compute what a row or group needs once.
    """
    if PART[3] >= 64 or (WORDS and PART[6] == 0 and PART[1] >= 64):
        return load_quarters(source, rows, PART)
    elif WORDS and PART[6] == 16:
        return load_groups(source, rows, PART)
    else:
        return load_columns(source, rows, 0, PART[1], PART[0])


@triton.jit
def _store_heads(
    source, codes, scales, given, slot, num_slots, token, head, known, stride_t, stride_h, BLOCK_SIZE: tl.constexpr,
    CODE_STRIDES: tl.constexpr, SCALE_STRIDES: tl.constexpr, PER_HEAD: tl.constexpr, PART: tl.constexpr,
    STORE: tl.constexpr, NATIVE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    rows = known[:, None]
    x = load_rows(source + token * stride_t + (head * stride_h)[:, None], rows, PART, WORDS)
    target = codes + slot_start(slot, num_slots, BLOCK_SIZE, CODE_STRIDES) + (head * CODE_STRIDES[2])[:, None]
    scale_target = scales
    if scales is not None:
        start = slot_start(slot, num_slots, BLOCK_SIZE, SCALE_STRIDES)
        scale_target = scales + start + (head * SCALE_STRIDES[2])[:, None]
    STORE(x.to(tl.float32), head_scale(given, head, known, PER_HEAD), target, scale_target, rows, PART, NATIVE)


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slot_mapping", "k_scale", "v_scale"])
def packed_update_kernel(
    key, value, key_codes, key_scales, value_codes, value_scales, slot_mapping, k_scale, v_scale, num_slots,
    stride_kt, stride_kh, stride_vt, stride_vh, NUM_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    K_STRIDES: tl.constexpr, K_SCALE_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr, V_SCALE_STRIDES: tl.constexpr,
    PER_HEAD: tl.constexpr, KEY_PART: tl.constexpr, VALUE_PART: tl.constexpr, STORE_KEY: tl.constexpr,
    STORE_VALUE: tl.constexpr, NATIVE: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """See `vattn.ops.reference.attention.kv_cache_update`. Grid: tokens, tiles of heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    known = head < NUM_HEADS
    _store_heads(key, key_codes, key_scales, k_scale, slot, num_slots, token, head, known, stride_kt, stride_kh,
                 BLOCK_SIZE, K_STRIDES, K_SCALE_STRIDES, PER_HEAD, KEY_PART, STORE_KEY, NATIVE, WORDS)  # fmt: skip
    _store_heads(value, value_codes, value_scales, v_scale, slot, num_slots, token, head, known, stride_vt, stride_vh,
                 BLOCK_SIZE, V_STRIDES, V_SCALE_STRIDES, PER_HEAD, VALUE_PART, STORE_VALUE, NATIVE, WORDS)  # fmt: skip


def strides(view: Tensor | None) -> tuple[int, ...]:
    """Return the strides of block, row and head, in elements; ones without a tensor."""
    return (1, 1, 1) if view is None else tuple(view.stride()[:3])


UPDATE_CUTS: dict[str, tuple[int, int]] = {
    "fp8_per_token_head": (1024, 2),
    "turboquant_k8v4": (1024, 2),
    "int8_per_token_head": (1024, 2),
    "nvfp4": (512, 1),
    "int4_per_token_head": (1024, 1),
    "turboquant_4bit_nc": (1024, 1),
    "turboquant_k3v4_nc": (1024, 1),
    "turboquant_3bit_nc": (1024, 1),
}
"""Columns, of all heads together, and warps of a program by format: the fastest on an H200."""


def choose_update(config: AttentionConfig, wide: int) -> tuple[int, int]:
    """Return the heads and warps of a program for rows of up to `wide` columns."""
    columns, num_warps = UPDATE_CUTS.get(config.kv_cache_dtype.removesuffix("_signed"), (1024, 4))
    return min(max(1, columns // wide), next_power_of_two(config.num_kv_heads)), num_warps


def has_words(codes: tuple[Tensor, Tensor], parts: tuple[PackedPart, PackedPart], limits: Limits) -> bool:
    """Return whether both parts of a format are stored by words, and codes of keys and of values are aligned to them.

    In blocks of few tokens the values may begin inside a word.
    """
    aligned = all((view.data_ptr() | view.stride(0)) % 4 == 0 for view in codes)
    return limits.native_fp8 and aligned and all(part.codec in WORD_STORES for part in parts)


def choose_store(part: PackedPart, words: bool) -> Any:
    """Return the device function that stores rows of a part of a format."""
    return WORD_STORES[part.codec] if words else TRITON_CODECS[part.codec].store


def update_packed(args: CacheUpdateArgs, config: AttentionConfig, limits: Limits | None = None) -> None:
    """Run `vattn::kv_cache_update` for a packed format; `limits` overrides the limits of the device."""
    num_tokens = args.key.shape[0]
    if num_tokens == 0:
        return
    limits = limits or Limits.of(args.key.device)
    key, value = packed_views(args.key_cache, config)
    parts = KV_FORMATS[config.kv_cache_dtype].parts
    words = has_words((key.codes, value.codes), parts, limits)
    constants = [part_constants(p, w) for p, w in zip(parts, (config.head_size, config.head_size_v), strict=True)]
    tile, num_warps = choose_update(config, max(constants[0][1], constants[1][1]))
    unrecorded(packed_update_kernel)[(num_tokens, -(-config.num_kv_heads // tile))](
        args.key, args.value, key.codes, key.scales, value.codes, value.scales, args.slot_mapping, args.k_scale,
        args.v_scale, key.codes.shape[0] * config.block_size, *args.key.stride()[:2], *args.value.stride()[:2],
        NUM_HEADS=config.num_kv_heads, BLOCK_SIZE=config.block_size, PER_HEAD=config.kv_scale == "head",
        **_place(key, "K"), **_place(value, "V"), KEY_PART=constants[0], VALUE_PART=constants[1],
        STORE_KEY=choose_store(parts[0], words), STORE_VALUE=choose_store(parts[1], words),
        NATIVE=limits.native_fp8, WORDS=words, TILE=tile, num_warps=num_warps,
        # An FMA rounds once, the reference twice.
        enable_fp_fusion=False,
    )  # fmt: skip


def _place(rows: PackedRows, name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}_STRIDES": strides(rows.codes), f"{name}_SCALE_STRIDES": strides(rows.scales)}
