"""Bidirectional varlen attention of encoders, for the head sizes of vision towers, in 16 bits or FP8.

Only the last tile is masked and keys are not split, so tiles can be larger than the general kernel's, which pads heads
to 128 columns. Tiles are numbered and padding is handled as in `kernel.py`. Other requests run on the general kernel.

A head of 72 or 80 is computed as 128 columns: two parts of 64 and 16 would be less work, but Triton 3.6 miscompiles
products of operands with rows of different widths in shared memory.

FP8 queries and keys are multiplied in FP8 if the hardware can and the model is bf16 (fp16 would lose digits). Softmax
weights stay in 16 bits, and values are converted to them exactly.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from vattn.config.attention import AttentionConfig
from vattn.config.device import not_allowed
from vattn.config.features import requested_features
from vattn.kernels.triton.attention.kernel import find_keys, find_rows
from vattn.kernels.triton.attention.launch import TRITON_DTYPES, as_bytes, finish, rows_to_write
from vattn.kernels.triton.common.codec import cast, decode, dot
from vattn.kernels.triton.common.epilogue import load_scale, store_rows
from vattn.kernels.triton.common.mask import LOG2E
from vattn.kernels.triton.common.output_constants import row_output
from vattn.kernels.triton.common.tiles import Limits, compute_dtype
from vattn.ops.arguments import VarlenAttentionArgs
from vattn.quantization.formats import KV_FORMATS, MODEL_DTYPES, OUTPUT_FORMATS

HEAD_SIZES = range(64, 136, 8)
FEATURES = frozenset({"bidirectional", "contiguous_kv"})
TIMED_OUTPUTS = frozenset({"none"})
"""Output formats that `accepts` takes: those that were timed against the general kernel."""

MIN_ROWS_PER_REQUEST = 32
"""Average below which most tiles would be empty, and splitting keys pays."""


@triton.jit
def load_part(pointer, rows, columns, mask, STRIDE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Return rows `[rows, PADDED]`, zero if masked (`None`: no row is) or beyond WIDTH columns."""
    pointers = pointer + rows.to(tl.int64)[:, None] * STRIDE + columns[None, :]
    if mask is not None:
        return tl.load(pointers, mask=mask[:, None] & (columns < WIDTH)[None, :], other=0)
    elif WIDTH < PADDED:
        return tl.load(pointers, mask=(columns < WIDTH)[None, :], other=0)
    else:
        return tl.load(pointers)


@triton.jit
def operand(raw, FORMAT: tl.constexpr, COMPUTE: tl.constexpr, FP8_DOT: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Convert loaded rows to an operand of the product of queries and keys."""
    if FP8_DOT:
        return raw.to(tl.float8e4nv, bitcast=True)
    else:
        return decode(raw, FORMAT, COMPUTE, NATIVE_FP8)


@triton.jit
def fold_tile(
    q, key, value, rows, inside, factor, acc, m, total, BLOCK_M: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, FORMAT: tl.constexpr, COMPUTE: tl.constexpr,
    FP8_DOT: tl.constexpr, NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys and values to the running sums; `inside` masks keys, `None`: no mask."""
    d = tl.arange(0, BLOCK_D)
    k = operand(load_part(key, rows, d, inside, K_ROW, D, BLOCK_D), FORMAT, COMPUTE, FP8_DOT, NATIVE_FP8)
    s = dot(q, tl.trans(k), tl.zeros([BLOCK_M, TILE], tl.float32)) * factor
    if inside is not None:
        s = tl.where(inside[None, :], s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, axis=1))
    # If all scores are -inf, keep the sums at zero instead of exp2(-inf + inf).
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    total = total * alpha + tl.sum(p, axis=1)
    v = decode(load_part(value, rows, d, inside, V_ROW, D, BLOCK_D), FORMAT, COMPUTE, NATIVE_FP8)
    acc = dot(cast(p, COMPUTE), v, acc * alpha[:, None])
    return acc, m_new, total


@triton.jit(
    do_not_specialize=["num_tokens", "num_keys", "num_reqs"],
    do_not_specialize_on_alignment=["query_start_loc", "kv_start_loc"],
)
def encoder_kernel(
    query, key, value, query_start_loc, kv_start_loc, output, q_scale, k_scale, v_scale, output_scale,
    num_tokens, num_keys, num_reqs, scale,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr, V_ROW: tl.constexpr,
    V_HEAD: tl.constexpr, OUT_ROW: tl.constexpr, OUT_HEAD: tl.constexpr,
    FORMAT: tl.constexpr, COMPUTE: tl.constexpr, FP8_DOT: tl.constexpr, NATIVE_FP8: tl.constexpr, MODEL: tl.constexpr,
    OUTPUT: tl.constexpr, STAGES: tl.constexpr, CROSS: tl.constexpr,
):  # fmt: skip
    """See `vattn.ops.reference.attention.varlen_attention`. Grid: tiles of query rows, query heads."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    request, first_row, q_end, _ = find_rows(tile, query_start_loc, num_reqs, num_tokens, BLOCK_M)
    if first_row >= q_end:
        return
    token = first_row + tl.arange(0, BLOCK_M)
    row_valid = token < q_end
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    output += head * OUT_HEAD
    out_offsets = token.to(tl.int64)[:, None] * OUT_ROW + d[None, :]
    out_mask = row_valid[:, None] & (d < D)[None, :]
    if request < 0:
        tl.store(output + out_offsets, acc.to(output.dtype.element_ty), mask=out_mask)
        return

    kv_start, seq_len = find_keys(kv_start_loc, request, num_keys)
    factor = scale * LOG2E
    out_factor = 1.0
    if q_scale is not None:
        factor = factor * tl.load(q_scale) * tl.load(k_scale)
        out_factor = tl.load(v_scale)
    q = load_part(query + head * Q_HEAD, token, d, row_valid, Q_ROW, D, BLOCK_D)
    q = operand(q, FORMAT, COMPUTE, FP8_DOT, NATIVE_FP8)
    key += (head // GROUP).to(tl.int64) * K_HEAD
    value += (head // GROUP).to(tl.int64) * V_HEAD

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    n = tl.arange(0, TILE)
    whole = seq_len // TILE
    for j in tl.range(0, whole, num_stages=STAGES):
        acc, m, total = fold_tile(
            q, key, value, kv_start + j * TILE + n, None, factor, acc, m, total, BLOCK_M, TILE, D, BLOCK_D, K_ROW,
            V_ROW, FORMAT, COMPUTE, FP8_DOT, NATIVE_FP8,
        )  # fmt: skip
    if whole * TILE < seq_len:
        k = whole * TILE + n
        acc, m, total = fold_tile(
            q, key, value, kv_start + k, k < seq_len, factor, acc, m, total, BLOCK_M, TILE, D, BLOCK_D, K_ROW, V_ROW,
            FORMAT, COMPUTE, FP8_DOT, NATIVE_FP8,
        )  # fmt: skip

    # A row before the first key (a query longer than its keys) sees nothing, unless positions are counted apart; a NaN
    # total is not an empty row.
    position = seq_len - (q_end - token)
    seen = total != 0.0
    if not CROSS:
        seen = seen & (position >= 0)
    weight = tl.where(seen, out_factor / tl.where(seen, total, 1.0), 0.0)
    acc = tl.where(seen[:, None], acc * weight[:, None], 0.0)
    store_rows(output + out_offsets, acc, out_mask, load_scale(output_scale), MODEL, OUTPUT)


def refusals(config: AttentionConfig) -> list[str]:
    """Return why the kernel cannot run a layer, empty if it can."""
    found = [f"{name} is not implemented" for name in sorted(requested_features(config) - FEATURES)]
    plain = (config.dtype, "none")
    found += not_allowed(config, {"dtype": ("float16", "bfloat16"), "query_load": ("plain",)})
    if (config.kv_cache_dtype, config.query_format) not in (plain, ("fp8_e4m3", "fp8_e4m3")):
        found.append(f"keys in {config.kv_cache_dtype}, query_format {config.query_format} (runs {plain}, or both FP8)")
    if config.causality != "bidirectional" or config.block_size:
        found.append(
            f"causality {config.causality}, block_size {config.block_size} (runs bidirectional, without cache)"
        )
    if config.head_size not in HEAD_SIZES or config.head_size_v != config.head_size:
        found.append(f"head sizes {config.head_size} and {config.head_size_v} (runs multiples of 8 from 64 to 128)")
    return found


_refusals = lru_cache(maxsize=256)(refusals)


def accepts(args: VarlenAttentionArgs, config: AttentionConfig) -> bool:
    """Return whether `attend` takes a call; shapes alone decide, so that a capture stays right for other lengths."""
    rows, num_reqs = args.query.shape[0], args.query_start_loc.shape[0] - 1
    nvidia = args.query.is_cuda and torch.version.hip is None
    if not nvidia or rows < MIN_ROWS_PER_REQUEST * num_reqs or config.output_format not in TIMED_OUTPUTS:
        return False
    return not _refusals(config)


def attend(args: VarlenAttentionArgs, config: AttentionConfig, limits: Limits | None = None) -> None:
    """Run `vattn::varlen_attention` for a config without `refusals`. Reads nothing from the device."""
    limits = limits or Limits.of(args.query.device)
    constants, options = kernel_constants(config, limits)
    query, key, value = as_bytes(args.query), as_bytes(args.key), as_bytes(args.value)
    num_tokens, num_reqs = query.shape[0], args.query_start_loc.shape[0] - 1
    fmt = OUTPUT_FORMATS[config.output_format]
    if num_tokens == 0:
        if fmt.swizzled and args.output_block_scale is not None:
            args.output_block_scale.view(torch.uint8).zero_()
        return
    # No program has the whole groups that scales need.
    output = as_bytes(rows_to_write(args, config, finished=not fmt.group_size))
    grid = (num_tokens // constants["BLOCK_M"] + num_reqs + 2, config.num_heads)
    encoder_kernel[grid](
        query=query, key=key, value=value, query_start_loc=args.query_start_loc, kv_start_loc=args.kv_start_loc,
        output=output, q_scale=args.q_scale, k_scale=args.k_scale, v_scale=args.v_scale,
        output_scale=None if fmt.group_size else args.output_scale,
        num_tokens=num_tokens, num_keys=key.shape[0], num_reqs=num_reqs,
        scale=config.scale, Q_ROW=query.stride(0), Q_HEAD=query.stride(1), K_ROW=key.stride(0), K_HEAD=key.stride(1),
        V_ROW=value.stride(0), V_HEAD=value.stride(1), OUT_ROW=output.stride(0), OUT_HEAD=output.stride(1),
        enable_fp_fusion=True, **constants, **options,
    )  # fmt: skip
    if fmt.group_size:
        finish(args, config, output)


def padded_width(size: int) -> int:
    """Return the columns that are multiplied for a head of `size`."""
    return 64 if size <= 64 else 128


def kernel_constants(config: AttentionConfig, limits: Limits) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the kernel's constexpr arguments without strides, and its launch options."""
    size, fp8 = config.head_size, KV_FORMATS[config.kv_cache_dtype].quantised
    fp8_dot = fp8 and limits.native_fp8 and config.dtype == "bfloat16" and not limits.interpreted
    rows, keys, warps, stages = _tile(size, fp8, fp8_dot, limits)
    constants = {
        "GROUP": config.group_size, "BLOCK_M": rows, "TILE": keys, "D": size, "BLOCK_D": padded_width(size),
        "FORMAT": config.kv_cache_dtype, "COMPUTE": TRITON_DTYPES[compute_dtype(config)], "FP8_DOT": fp8_dot,
        "NATIVE_FP8": limits.native_fp8, "MODEL": TRITON_DTYPES[MODEL_DTYPES[config.dtype]],
        "OUTPUT": row_output(config), "STAGES": stages, "CROSS": config.attn_type == "encoder_decoder",
    }  # fmt: skip
    return constants, {"num_warps": warps, "num_stages": stages}


def _tile(size: int, fp8: bool, fp8_dot: bool, limits: Limits) -> tuple[int, int, int, int]:
    """Return query rows, keys, warps and stages of a program: the fastest on an H200."""
    if limits.interpreted:
        return 32, 32, 4, 1
    if not limits.warpgroups:
        return 64, 32, 4, 2
    if fp8 == fp8_dot and (size <= 64 or (size < 128 and not fp8)):
        return 64, 64, 4, 3
    return (128, 128, 8, 2) if fp8_dot else (128, 64, 8, 3)
