"""Rotate queries and keys, write queries to a tensor and keys and values into their slots, in one launch.

See `vattn.ops.reference.rope`. A program takes some query heads of one token, or some key heads with their values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from vattn.cache.layout import key_value_views, kv_cache_dtype, kv_cache_shape, op_views
from vattn.config.attention import AttentionConfig
from vattn.config.rope import RopeConfig
from vattn.kernels.triton.attention.launch import TRITON_DTYPES, as_bytes
from vattn.kernels.triton.cache.packed_update import update_packed
from vattn.kernels.triton.cache.update import head_scale, slot_start, stored
from vattn.kernels.triton.common.codec import cast, encode, encode_native, encode_quotient
from vattn.kernels.triton.common.tiles import Limits, next_power_of_two
from vattn.ops.arguments import CacheUpdateArgs, RopeUpdateArgs
from vattn.quantization.formats import KV_FORMATS, MODEL_DTYPES


@triton.jit
def _load_columns(rows, inside, first: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Return fp32 `[heads, WIDTH]` of the COUNT columns from `first` on; zeros elsewhere."""
    column = tl.arange(0, WIDTH)[None, :]
    return tl.load(rows + first + column, mask=inside & (column < COUNT), other=0).to(tl.float32)


@triton.jit
def _load_pairs(rows, inside, SHAPE: tl.constexpr):
    """Return the first and second members of all pairs, fp32 `[heads, WIDTH]`."""
    HALF: tl.constexpr = SHAPE[1]
    WIDTH: tl.constexpr = SHAPE[2]
    if SHAPE[5]:
        column = tl.arange(0, 2 * WIDTH)[None, :]
        both = tl.load(rows + column, mask=inside & (column < 2 * HALF), other=0).to(tl.float32)
        return tl.split(tl.reshape(both, (both.shape[0], WIDTH, 2)))
    else:
        return _load_columns(rows, inside, 0, HALF, WIDTH), _load_columns(rows, inside, HALF, HALF, WIDTH)


@triton.jit
def _store_pairs(rows, first, second, inside, SHAPE: tl.constexpr):
    HALF: tl.constexpr = SHAPE[1]
    WIDTH: tl.constexpr = SHAPE[2]
    if SHAPE[5]:
        column = tl.arange(0, 2 * WIDTH)[None, :]
        both = tl.reshape(tl.join(first, second), (first.shape[0], 2 * WIDTH))
        tl.store(rows + column, both, mask=inside & (column < 2 * HALF))
    else:
        column = tl.arange(0, WIDTH)[None, :]
        tl.store(rows + column, first, mask=inside & (column < HALF))
        tl.store(rows + HALF + column, second, mask=inside & (column < HALF))


@triton.jit
def _table_row(table, row, known, stride_n, stride_c, SHAPE: tl.constexpr, ROWS: tl.constexpr, KEEP: tl.constexpr):
    """Return the factors of the first and second members of all pairs, fp32 `[ROWS, WIDTH]` with equal rows."""
    HALF: tl.constexpr = SHAPE[1]
    column = tl.zeros((ROWS, 1), tl.int32) + tl.arange(0, SHAPE[2])[None, :]
    inside = column < tl.where(known, HALF, 0)
    STEP: tl.constexpr = 2 if SHAPE[4] and SHAPE[5] else 1
    start = table + row * stride_n
    first = tl.load(start + column * STEP * stride_c, mask=inside, other=float("nan"), eviction_policy=KEEP).to(
        tl.float32
    )
    if SHAPE[4]:
        SHIFT: tl.constexpr = 1 if SHAPE[5] else HALF
        second = tl.load(
            start + (column * STEP + SHIFT) * stride_c, mask=inside, other=float("nan"), eviction_policy=KEEP
        )
        return first, second.to(tl.float32)
    else:
        return first, first


@triton.jit
def _rotated_heads(
    rows, inside, weight, tables, eps, SHAPE: tl.constexpr, NORM: tl.constexpr, TILE: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """Return fp32 first and second members after norm and rotation, and the columns that are not rotated.

    `tables`: cosines, sines, their row, number of rows, strides. Heads are loaded before the row. With KEEP every head
    loads the row in the layout of its own columns; otherwise threads would exchange it after barriers.
    """
    D: tl.constexpr = SHAPE[0]
    HALF: tl.constexpr = SHAPE[1]
    REST: tl.constexpr = SHAPE[3]
    ROWS: tl.constexpr = TILE if KEEP != "" else 1
    cos, sin, row, num_rows, stride_cn, stride_cc, stride_sn, stride_sc = tables
    first, second = _load_pairs(rows, inside, SHAPE)
    passed = first
    if D > 2 * HALF:
        passed = _load_columns(rows, inside, 2 * HALF, D - 2 * HALF, REST)
    row = tl.where(row < 0, row + num_rows, row)
    known = (row >= 0) & (row < num_rows)
    cos_a, cos_b = _table_row(cos, row, known, stride_cn, stride_cc, SHAPE, ROWS, KEEP)
    sin_a, sin_b = _table_row(sin, row, known, stride_sn, stride_sc, SHAPE, ROWS, KEEP)
    if NORM != "none":
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if D > 2 * HALF:
            squares += tl.sum(passed * passed, axis=1)
        factor = tl.rsqrt(squares / D + eps)[:, None]
        first, second, passed = first * factor, second * factor, passed * factor
        if weight is not None:
            here = tl.full((1, 1), True, tl.int1)
            weight_a, weight_b = _load_pairs(weight, here, SHAPE)
            ONE: tl.constexpr = 1.0 if NORM == "rms_one_plus" else 0.0
            first, second = first * (weight_a + ONE), second * (weight_b + ONE)
            if D > 2 * HALF:
                passed = passed * (_load_columns(weight, here, 2 * HALF, D - 2 * HALF, REST) + ONE)
    # Contracted as in generated code; the compiler itself might round the other product.
    return tl.fma(first, cos_a, -(second * sin_a)), tl.fma(second, cos_b, first * sin_b), passed


@triton.jit
def query_codes(x, scale, MODEL: tl.constexpr, ROUND: tl.constexpr, ARITHMETIC: tl.constexpr, NATIVE: tl.constexpr):
    """Encode a query: in the model dtype, or as e4m3 bytes under a scale."""
    if ARITHMETIC == "none":
        return cast(x, MODEL)
    else:
        if ROUND:
            x = cast(x, MODEL).to(tl.float32)
        if ARITHMETIC == "divide":
            return encode_quotient(x, scale, "fp8_e4m3", NATIVE)
        else:
            scaled = x / scale if ARITHMETIC == "approximate_divide" else x * scale
            return encode_native(scaled, "fp8_e4m3") if NATIVE else encode(scaled, "fp8_e4m3", tl.uint8)


@triton.jit
def _query_tile(
    query, weight, query_out, q_scale, tile, token, tables, stride_t, stride_h, eps,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, PER_HEAD: tl.constexpr, MODEL: tl.constexpr, ROUND: tl.constexpr,
    ARITHMETIC: tl.constexpr, NATIVE: tl.constexpr, TILE: tl.constexpr, SHAPE: tl.constexpr, NORM: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = SHAPE[0]
    HALF: tl.constexpr = SHAPE[1]
    REST: tl.constexpr = SHAPE[3]
    head = tile * TILE + tl.arange(0, TILE)
    inside = (head < NUM_HEADS)[:, None]
    scale = head_scale(q_scale, head // GROUP, head < NUM_HEADS, PER_HEAD)
    rows = query + token * stride_t + (head * stride_h)[:, None]
    first, second, passed = _rotated_heads(rows, inside, weight, tables, eps, SHAPE, NORM, TILE, KEEP)
    target = query_out + token * (NUM_HEADS * D) + (head * D)[:, None]
    first = query_codes(first, scale, MODEL, ROUND, ARITHMETIC, NATIVE)
    second = query_codes(second, scale, MODEL, ROUND, ARITHMETIC, NATIVE)
    _store_pairs(target, first, second, inside, SHAPE)
    if D > 2 * HALF:
        column = tl.arange(0, REST)[None, :]
        codes = query_codes(passed, scale, MODEL, ROUND, ARITHMETIC, NATIVE)
        tl.store(target + 2 * HALF + column, codes, mask=inside & (column < D - 2 * HALF))


@triton.jit
def _key_value_tile(
    key, value, weight, key_cache, value_cache, slot_mapping, k_scale, v_scale, tile, token, tables, num_slots,
    stride_kt, stride_kh, stride_vt, stride_vh, eps,
    NUM_HEADS: tl.constexpr, V: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr, PER_HEAD: tl.constexpr, MODEL: tl.constexpr,
    FORMAT: tl.constexpr, NATIVE: tl.constexpr, TILE: tl.constexpr, SHAPE: tl.constexpr, NORM: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = SHAPE[0]
    HALF: tl.constexpr = SHAPE[1]
    REST: tl.constexpr = SHAPE[3]
    STORED: tl.constexpr = key_cache.dtype.element_ty
    # Issue all loads first, scales too: the compiler does not move loads above stores.
    slot = tl.load(slot_mapping + token, eviction_policy=KEEP).to(tl.int64)
    head = tile * TILE + tl.arange(0, TILE)
    scale = head_scale(k_scale, head, head < NUM_HEADS, PER_HEAD)
    value_scale = head_scale(v_scale, head, head < NUM_HEADS, PER_HEAD)
    there = (head < NUM_HEADS)[:, None]
    column = tl.arange(0, VALUE_WIDTH)[None, :]
    x = tl.load(value + token * stride_vt + (head * stride_vh)[:, None] + column, mask=there & (column < V), other=0)
    rows = key + token * stride_kt + (head * stride_kh)[:, None]
    first, second, passed = _rotated_heads(rows, there, weight, tables, eps, SHAPE, NORM, TILE, KEEP)
    inside = (head < tl.where((slot >= 0) & (slot < num_slots), NUM_HEADS, 0))[:, None]
    wide_head = head.to(tl.int64)[:, None]
    target = key_cache + slot_start(slot, num_slots, BLOCK_SIZE, K_STRIDES) + wide_head * K_STRIDES[2]
    first = stored(cast(first, MODEL), scale, FORMAT, STORED, NATIVE)
    second = stored(cast(second, MODEL), scale, FORMAT, STORED, NATIVE)
    _store_pairs(target, first, second, inside, SHAPE)
    if D > 2 * HALF:
        rest = tl.arange(0, REST)[None, :]
        codes = stored(cast(passed, MODEL), scale, FORMAT, STORED, NATIVE)
        tl.store(target + 2 * HALF + rest, codes, mask=inside & (rest < D - 2 * HALF))
    target = value_cache + slot_start(slot, num_slots, BLOCK_SIZE, V_STRIDES) + wide_head * V_STRIDES[2] + column
    x = stored(x, value_scale, FORMAT, STORED, NATIVE)
    tl.store(target, x, mask=inside & (column < V))


@triton.jit(
    do_not_specialize=["num_slots", "num_rows", "eps"],
    do_not_specialize_on_alignment=["slot_mapping", "positions", "q_scale", "k_scale", "v_scale"],
)
def rope_update_kernel(
    query, key, value, cos, sin, positions, query_out, key_cache, value_cache, slot_mapping, q_weight, k_weight,
    q_scale, k_scale, v_scale, num_slots, num_rows, eps, stride_qt, stride_qh, stride_kt, stride_kh, stride_vt,
    stride_vh, stride_cn, stride_cc, stride_sn, stride_sc,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, V: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    SHAPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr,
    MODEL: tl.constexpr, FORMAT: tl.constexpr, PER_HEAD_Q: tl.constexpr, PER_HEAD_KV: tl.constexpr,
    NORM: tl.constexpr, ROUND: tl.constexpr, ARITHMETIC: tl.constexpr, NATIVE: tl.constexpr,
    Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """See `vattn.ops.reference.rope`. Grid: tokens, tiles of query heads and then of KV heads.

    KEEP: eviction policy of what every layer of a step reads again. With few tokens a launch takes little more than its
    dependent loads, so these should stay in the L2 cache while weights stream through it.

    SHAPE: head size, pairs, powers of two for pairs and for columns that are not rotated, full tables, interleaved
    pairs. EARLY: "", or launched while the previous kernel may run: wait for it first. "both": then let the next kernel
    start; earlier it would share multiprocessors with the previous one.
    """
    if EARLY != "":
        tl.extra.cuda.gdc_wait()
    if EARLY == "both":
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    Q_TILES: tl.constexpr = (NUM_HEADS + Q_TILE - 1) // Q_TILE
    row = token
    if positions is not None:
        row = tl.load(positions + token, eviction_policy=KEEP).to(tl.int64)
    tables = (cos, sin, row, num_rows, stride_cn, stride_cc, stride_sn, stride_sc)
    if tile < Q_TILES:
        _query_tile(
            query, q_weight, query_out, q_scale, tile, token, tables, stride_qt, stride_qh, eps, NUM_HEADS,
            NUM_HEADS // NUM_KV_HEADS, PER_HEAD_Q, MODEL, ROUND, ARITHMETIC, NATIVE, Q_TILE, SHAPE, NORM,
            KEEP)  # fmt: skip
    else:
        _key_value_tile(
            key, value, k_weight, key_cache, value_cache, slot_mapping, k_scale, v_scale, tile - Q_TILES, token,
            tables, num_slots, stride_kt, stride_kh, stride_vt, stride_vh, eps, NUM_KV_HEADS, V, VALUE_WIDTH,
            BLOCK_SIZE, K_STRIDES, V_STRIDES, PER_HEAD_KV, MODEL, FORMAT, NATIVE, KV_TILE, SHAPE, NORM,
            KEEP)  # fmt: skip


@dataclass(frozen=True)
class RopeTiles:
    """Tile config of a launch.

    Attributes:
        elements: of a tile, keys and values together.
        num_warps: of a program.
        keep: eviction policy of what every layer reads again.
    """

    elements: int
    num_warps: int
    keep: str = ""


FASTEST = RopeTiles(1024, 2, "evict_last")
"""The fastest on an H200 from 64 to 8192 tokens; one token is 0.06 us faster in tiles of 256."""


def rope_update(
    args: RopeUpdateArgs,
    rope: RopeConfig,
    config: AttentionConfig,
    limits: Limits | None = None,
    tiles: RopeTiles | None = None,
    next_may_start: bool = False,
) -> None:
    """Run `vattn::rope_kv_cache_update`.

    Args:
        limits, tiles: override the limits of the device and the default tiles.
        next_may_start: whether the next kernel may be launched while this one runs; it must wait before it reads the
            result.
    """
    num_tokens = args.query.shape[0]
    if num_tokens == 0:
        return
    if KV_FORMATS[config.kv_cache_dtype].packed:
        _rope_update_packed(args, rope, config, limits, tiles, next_may_start)
        return
    limits = limits or Limits.of(args.query.device)
    tiles = tiles or FASTEST
    key_cache, value_cache = (as_bytes(view) for view in key_value_views(args.key_cache, args.value_cache, config))
    constants = rope_constants(rope, config, args.cos.shape[1] == rope.rotary_dim, limits, tiles)
    programs = -(-config.num_heads // constants["Q_TILE"]) - (-config.num_kv_heads // constants["KV_TILE"])
    early = start_of_launch(num_tokens, programs, limits, next_may_start)
    options = {"launch_pdl": True} if early else {}
    rope_update_kernel[(num_tokens, programs)](
        args.query, args.key, as_bytes(args.value), args.cos, args.sin, args.positions, as_bytes(args.query_out),
        key_cache, value_cache, args.slot_mapping, args.q_weight, args.k_weight, args.q_scale, args.k_scale,
        args.v_scale, key_cache.shape[0] * config.block_size, args.cos.shape[0], rope.norm_eps,
        *args.query.stride()[:2], *args.key.stride()[:2], *args.value.stride()[:2], *args.cos.stride(),
        *args.sin.stride(),
        K_STRIDES=key_cache.stride()[:3], V_STRIDES=value_cache.stride()[:3],
        EARLY=early, enable_fp_fusion=True, **options, **constants,
    )  # fmt: skip


def start_of_launch(num_tokens: int, programs: int, limits: Limits, next_may_start: bool) -> str:
    """Return EARLY of the kernel for a launch with `programs` programs per token.

    It starts while the previous kernel runs if no multiprocessor has more than one program. In captured graphs
    `vattn.compilation.graph_edges` undoes that where it does not pay.
    """
    if not limits.hopper or num_tokens * programs > limits.processors:
        return ""
    return "both" if next_may_start else "wait"


def _rope_update_packed(
    args: RopeUpdateArgs, rope: RopeConfig, config: AttentionConfig, limits: Limits | None, tiles: RopeTiles | None,
    next_may_start: bool,
) -> None:  # fmt: skip
    """Rotate keys into a scratch cache, then encode them: packed rows are encoded whole, the kernel holds halves."""
    num_tokens = args.key.shape[0]
    plain = config.replace(kv_cache_dtype=config.dtype, kv_scale="none", kv_cache_layout="NHD")
    shape = kv_cache_shape(plain, -(-num_tokens // config.block_size))
    rows = torch.empty(shape, dtype=kv_cache_dtype(plain), device=args.key.device)
    slots = torch.arange(num_tokens, dtype=torch.int64, device=args.key.device)
    key_rows, value_rows = op_views(rows, plain)
    rotated = args._replace(key_cache=key_rows, value_cache=value_rows, slot_mapping=slots, k_scale=None, v_scale=None)
    rope_update(rotated, rope, plain, limits, tiles, next_may_start)
    key = key_rows.flatten(0, 1)[:num_tokens]
    update = CacheUpdateArgs(
        key, args.value, args.key_cache, None, args.slot_mapping, args.k_scale, args.v_scale, args.config
    )
    update_packed(update, config, limits)


def rope_constants(
    rope: RopeConfig, config: AttentionConfig, full: bool, limits: Limits, tiles: RopeTiles
) -> dict[str, Any]:
    """Return the kernel's constexpr arguments but the cache's strides, and its options."""
    half, rest = rope.rotary_dim // 2, config.head_size - rope.rotary_dim
    interleaved = rope.style == "interleaved"
    heads = max(1, tiles.elements // next_power_of_two(config.head_size))
    return {
        "NUM_HEADS": config.num_heads, "NUM_KV_HEADS": config.num_kv_heads, "V": config.head_size_v,
        "VALUE_WIDTH": next_power_of_two(config.head_size_v), "BLOCK_SIZE": config.block_size,
        "SHAPE": (config.head_size, half, next_power_of_two(half), next_power_of_two(max(rest, 1)), full, interleaved),
        "MODEL": TRITON_DTYPES[MODEL_DTYPES[config.dtype]], "FORMAT": config.kv_cache_dtype,
        "PER_HEAD_Q": config.query_scale == "head", "PER_HEAD_KV": config.kv_scale == "head",
        "NORM": rope.norm, "ROUND": rope.round_query, "NATIVE": limits.native_fp8,
        "ARITHMETIC": "none" if config.query_format == "none" else rope.query_arithmetic,
        "KEEP": tiles.keep, "Q_TILE": min(heads, next_power_of_two(config.num_heads)),
        "KV_TILE": min(max(1, heads // 2), next_power_of_two(config.num_kv_heads)), "num_warps": tiles.num_warps,
    }  # fmt: skip
