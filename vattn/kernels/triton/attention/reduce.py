"""Second kernel: merge the partials of splits, and quantise formats with scales across heads.

A row is its flattened columns (head, value column), as in `vattn.quantization.codecs`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.kernels.triton.common.codec import cast, encode_quotient
from vattn.kernels.triton.common.epilogue import (
    absolute_maximum,
    computed_scales,
    encode_int8,
    quantise_dynamic,
    quantise_nvfp4,
    quantise_static,
    scaled,
    swizzled_offset,
)
from vattn.kernels.triton.common.mask import LN2, LOG2E

SPLIT_STEP = tl.constexpr(8)
"""Partials merged at once."""


@triton.jit
def merge_columns(source, source_lse, sinks, row, column, inside, num_splits, H: tl.constexpr, V: tl.constexpr):
    """Return fp32 values of columns of a row and the base-2 log-sum-exp of their heads.

    An infinite log marks a row of no request, which is zero.
    """
    head = column // V
    m = tl.full(column.shape, float("-inf"), tl.float32)
    if sinks is not None:
        m = tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32) * LOG2E
    total = tl.where(m == float("-inf"), 0.0, 1.0)
    x = tl.zeros(column.shape, tl.float32)
    first = (row * H + head).to(tl.int64) * num_splits
    for s in range(0, num_splits, SPLIT_STEP):
        split = s + tl.arange(0, SPLIT_STEP)[:, None]
        index = first[None, :] + split
        log = tl.load(source_lse + index, mask=inside[None, :] & (split < num_splits), other=float("-inf"))
        # Empty partials are not written, so they are not read.
        part = tl.load(source + index * V + (column % V)[None, :], mask=tl.abs(log) != float("inf"), other=0.0)
        m_new = tl.maximum(m, tl.max(log, axis=0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - m_safe)
        weight = tl.exp2(log - m_safe[None, :])
        x = x * alpha + tl.sum(weight * part, axis=0)
        total = total * alpha + tl.sum(weight, axis=0)
        m = m_new
    seen = (total != 0.0) & (m != float("inf"))
    x = tl.where(seen, x / tl.where(seen, total, 1.0), 0.0)
    return x, tl.where(seen, m + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))


@triton.jit
def load_columns(
    source, source_lse, sinks, row, column, inside, num_splits, H: tl.constexpr, V: tl.constexpr,
    MODEL: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Return merged columns of a row, rounded to the model dtype, as fp32, and base-2 logs (zero without splits)."""
    if SPLIT:
        x, log = merge_columns(source, source_lse, sinks, row, column, inside, num_splits, H, V)
        x = cast(tl.where(inside, x, 0.0), MODEL).to(tl.float32)
    else:
        x = tl.load(source + row.to(tl.int64) * (H * V) + column, mask=inside, other=0.0).to(tl.float32)
        log = tl.zeros(column.shape, tl.float32)
    return x, log


@triton.jit
def codes_of(x, scale, ARITHMETIC: tl.constexpr, INT8: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Return e4m3 bytes of values under computed scales, which broadcast; INT8: int8 instead."""
    if INT8:
        return encode_int8(scaled(x, scale, ARITHMETIC))
    elif ARITHMETIC == "divide" and NATIVE_FP8:
        return encode_quotient(x, scale, "fp8_e4m3", True)
    else:
        return quantise_dynamic(x, scale, ARITHMETIC, NATIVE_FP8)


@triton.jit
def store_token(
    output, lse, x, log, step, row, column, inside, stride_ot, stride_oh, stride_lt, stride_lh, V: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, ARITHMETIC: tl.constexpr, INT8: tl.constexpr, NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    """Store columns of a row that share a step `[1]`, and the log-sum-exps of the heads that start there."""
    code = tl.reshape(codes_of(x[None, :], step[:, None], ARITHMETIC, INT8, NATIVE_FP8), [BLOCK])
    tl.store(output + row.to(tl.int64) * stride_ot + column // V * stride_oh + column % V, code, mask=inside)
    if SPLIT and lse is not None:
        pointers = lse + row.to(tl.int64) * stride_lt + column // V * stride_lh
        tl.store(pointers, log * LN2, mask=inside & (column % V == 0))


@triton.jit(do_not_specialize=["num_tokens", "num_splits", "stride_br", "stride_bg"])
def finish_kernel(
    source, source_lse, output, output_block_scale, lse, output_scale, sinks,
    num_tokens, num_splits, stride_ot, stride_oh, stride_br, stride_bg, stride_lt, stride_lh,
    H: tl.constexpr, V: tl.constexpr, MODEL: tl.constexpr, OUTPUT: tl.constexpr, GROUP: tl.constexpr,
    SCALES: tl.constexpr, SCALE_COLUMNS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
    ARITHMETIC: tl.constexpr, APPROXIMATE: tl.constexpr, LIMIT: tl.constexpr, MIN_SCALE: tl.constexpr,
    INT8: tl.constexpr, NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    """Finish one block of columns of a row. Grid: rows (of padded scales if swizzled), column blocks.

    OUTPUT is "none", "fp8_static", "token", "group", "nvfp4" or "nvfp4_swizzled"; SCALE_COLUMNS is the padded number of
    swizzled scales of a row.
    """
    COLUMNS: tl.constexpr = H * V
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if OUTPUT == "nvfp4_swizzled":
        if row >= num_tokens:
            group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
            zero = tl.zeros([BLOCK // GROUP], tl.uint8)
            tl.store(output_block_scale + swizzled_offset(row, group, SCALE_COLUMNS), zero, mask=group < SCALE_COLUMNS)
            return
    if OUTPUT == "token":
        if COLUMNS <= BLOCK:
            # The whole row is in registers.
            inside = column < COLUMNS
            x, log = load_columns(source, source_lse, sinks, row, column, inside, num_splits, H, V,
                                  MODEL, SPLIT)  # fmt: skip
            row_scale, step = computed_scales(absolute_maximum(x[None, :]), SCALES, MIN_SCALE, ARITHMETIC, APPROXIMATE,
                                              LIMIT)  # fmt: skip
            store_token(output, lse, x, log, step, row, column, inside, stride_ot, stride_oh, stride_lt, stride_lh,
                        V, SPLIT, BLOCK, ARITHMETIC, INT8, NATIVE_FP8)  # fmt: skip
        else:
            absmax = tl.zeros([BLOCK], tl.float32)
            for base in range(0, COLUMNS, BLOCK):
                c = base + tl.arange(0, BLOCK)
                x, _ = load_columns(source, source_lse, sinks, row, c, c < COLUMNS, num_splits, H, V,
                                    MODEL, SPLIT)  # fmt: skip
                absmax = tl.where((x != x) | (absmax != absmax), float("nan"), tl.maximum(absmax, tl.abs(x)))
            row_scale, step = computed_scales(absolute_maximum(absmax[None, :]), SCALES, MIN_SCALE, ARITHMETIC,
                                              APPROXIMATE, LIMIT)  # fmt: skip
            for base in range(0, COLUMNS, BLOCK):
                c = base + tl.arange(0, BLOCK)
                x, log = load_columns(source, source_lse, sinks, row, c, c < COLUMNS, num_splits, H, V,
                                      MODEL, SPLIT)  # fmt: skip
                store_token(output, lse, x, log, step, row, c, c < COLUMNS, stride_ot, stride_oh, stride_lt,
                            stride_lh, V, SPLIT, BLOCK, ARITHMETIC, INT8, NATIVE_FP8)  # fmt: skip
        tl.store(output_block_scale + row * stride_br + tl.arange(0, 1), row_scale)
    else:
        inside = column < COLUMNS
        x, log = load_columns(source, source_lse, sinks, row, column, inside, num_splits, H, V,
                              MODEL, SPLIT)  # fmt: skip
        if SPLIT and lse is not None:
            lse_offsets = row.to(tl.int64) * stride_lt + column // V * stride_lh
            tl.store(lse + lse_offsets, log * LN2, mask=inside & (column % V == 0))
        offsets = row.to(tl.int64) * stride_ot + column // V * stride_oh + column % V
        if OUTPUT == "none":
            tl.store(output + offsets, cast(x, MODEL), mask=inside)
        elif OUTPUT == "fp8_static":
            tl.store(output + offsets, quantise_static(x, tl.load(output_scale), ARITHMETIC, NATIVE_FP8), mask=inside)
        else:
            GROUPS: tl.constexpr = BLOCK // GROUP
            group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
            x_groups = tl.reshape(x, [GROUPS, GROUP])
            if OUTPUT == "group":
                scale, step = computed_scales(absolute_maximum(x_groups), SCALES, MIN_SCALE, ARITHMETIC, APPROXIMATE,
                                              LIMIT)  # fmt: skip
                code = tl.reshape(codes_of(x_groups, step[:, None], ARITHMETIC, INT8, NATIVE_FP8), [BLOCK])
                tl.store(output + offsets, code, mask=inside)
                scale_offsets = row.to(tl.int64) * stride_br + group.to(tl.int64) * stride_bg
                tl.store(output_block_scale + scale_offsets, scale, mask=group < COLUMNS // GROUP)
            else:
                codes, block_scale = quantise_nvfp4(x_groups, tl.load(output_scale), ARITHMETIC, NATIVE_FP8)
                pair = tl.reshape(codes, [BLOCK // 2, 2]) << (4 * tl.arange(0, 2))[None, :]
                byte = tl.program_id(1) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
                bytes_of_head: tl.constexpr = V // 2
                offsets = row.to(tl.int64) * stride_ot + byte // bytes_of_head * stride_oh + byte % bytes_of_head
                tl.store(output + offsets, tl.sum(pair, axis=1).to(tl.uint8), mask=byte < COLUMNS // 2)
                if OUTPUT == "nvfp4_swizzled":
                    block_scale = tl.where(group < COLUMNS // GROUP, block_scale, 0).to(tl.uint8)
                    scale_offsets = swizzled_offset(row, group, SCALE_COLUMNS)
                    tl.store(output_block_scale + scale_offsets, block_scale, mask=group < SCALE_COLUMNS)
                else:
                    scale_offsets = row.to(tl.int64) * stride_br + group.to(tl.int64) * stride_bg
                    tl.store(output_block_scale + scale_offsets, block_scale, mask=group < COLUMNS // GROUP)
