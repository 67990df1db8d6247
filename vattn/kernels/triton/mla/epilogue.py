"""Converts results of latent attention to the requested format: a tile of one head's columns at a time.

Values are rounded to the model dtype first, then quantised, as `vattn.kernels.triton.common.epilogue` says.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from vattn.config.mla import MLAConfig
from vattn.kernels.triton.attention.launch import TRITON_DTYPES, as_bytes
from vattn.kernels.triton.common.codec import cast, encode_quotient
from vattn.kernels.triton.common.epilogue import (
    absolute_maximum,
    dynamic_scale,
    group_codes,
    group_scales,
    load_scale,
    nvfp4_codes,
    quantise_dynamic,
    quantise_static,
    swizzled_offset,
)
from vattn.kernels.triton.common.output_constants import needs_finishing, scale_kind
from vattn.kernels.triton.common.tiles import Limits
from vattn.ops.arguments_mla import MLAAttentionArgs
from vattn.quantization.formats import MODEL_DTYPES, OUTPUT_FORMATS


def kind_of(config: MLAConfig) -> str:
    """Return how a program that owns columns of one head stores them: `KIND` of `store_columns`.

    "rows": scales span heads, so that a second pass is needed.
    """
    fmt = OUTPUT_FORMATS[config.output_format]
    if fmt.group_size == 0:
        return config.output_format
    if fmt.group_size < 0 or config.v_head_dim % fmt.group_size or needs_finishing(config):
        return "rows"
    return "swizzled" if fmt.swizzled else "groups"


def epilogue_constants(config: MLAConfig, limits: Limits) -> dict[str, Any]:
    """Return what a kernel is specialised for that ends in `store_columns`.

    GROUPS: as `group_constants` of `output_constants` returns, of groups that need not fit heads.
    """
    fmt = OUTPUT_FORMATS[config.output_format]
    least = -1.0 if config.output_min_scale is None else config.output_min_scale
    groups = (max(fmt.group_size, 1), fmt.static_scale, scale_kind(config), least, config.output_arithmetic)
    return {
        "V": config.v_head_dim, "MODEL": TRITON_DTYPES[MODEL_DTYPES[config.dtype]], "KIND": kind_of(config),
        "GROUPS": groups, "NATIVE_FP8": limits.native_fp8,
    }  # fmt: skip


def epilogue_arguments(args: MLAAttentionArgs, config: MLAConfig, rows: Tensor | None = None) -> dict[str, Any]:
    """Return where `store_columns` stores: the op's output, or `rows` `[T, N, V]` of the model dtype."""
    out, scales, strides, columns = args.output if rows is None else rows, args.output_block_scale, (0, 0), 0
    if scales is not None:
        scales = as_bytes(scales)
        strides = (scales.stride(0), scales.stride(1))
        if OUTPUT_FORMATS[config.output_format].swizzled:
            columns = scales.shape[1]
    return {
        "output": as_bytes(out), "output_block_scale": scales, "output_scale": args.output_scale,
        "stride_ot": out.stride(0), "stride_oh": out.stride(1), "stride_br": strides[0], "stride_bg": strides[1],
        "SCALE_COLUMNS": columns,
    }  # fmt: skip


def clear_scales(args: MLAAttentionArgs, config: MLAConfig) -> None:
    """Zero swizzled scales: no program writes their padding."""
    if OUTPUT_FORMATS[config.output_format].swizzled and args.output_block_scale is not None:
        as_bytes(args.output_block_scale).zero_()


@triton.jit
def store_columns(
    x, token, known, head, column, output, output_block_scale, output_scale, stride_ot, stride_oh, stride_br,
    stride_bg, V: tl.constexpr, MODEL: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, NATIVE_FP8: tl.constexpr, QUICK: tl.constexpr = False,
):  # fmt: skip
    """Store fp32 columns `[rows, columns]` of one head; rows that are not known are left alone.

    KIND "rows" stores the model dtype. Columns come in whole groups, `column` being consecutive. QUICK: see `divided`.
    """
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    start = output + token.to(tl.int64) * stride_ot + head * stride_oh
    mask = known[:, None] & (column < V)[None, :]
    rounded = cast(x, MODEL)
    ARITHMETIC: tl.constexpr = GROUPS[4]
    if KIND == "none" or KIND == "rows":
        tl.store(start[:, None] + column[None, :], rounded, mask=mask)
    elif KIND == "fp8_static":
        if QUICK and ARITHMETIC == "divide":
            codes = divided(rounded.to(tl.float32), tl.full([1, 1], 0.0, tl.float32) + load_scale(output_scale))
        else:
            codes = quantise_static(rounded.to(tl.float32), load_scale(output_scale), ARITHMETIC, NATIVE_FP8)
        tl.store(start[:, None] + column[None, :], codes, mask=mask)
    else:
        SIZE: tl.constexpr = GROUPS[0]
        COUNT: tl.constexpr = COLUMNS // SIZE
        whole = tl.where((column < V)[None, :], rounded.to(tl.float32), 0.0)
        groups = tl.reshape(whole, [ROWS * COUNT, SIZE])
        given = load_scale(output_scale)
        made, step = group_scales(absolute_maximum(groups), given, GROUPS, NATIVE_FP8)
        if QUICK and GROUPS[1]:
            codes = nvfp4_codes(groups, step[:, None], ARITHMETIC == "approximate_divide", True)
        elif QUICK and ARITHMETIC == "divide":
            codes = divided(groups, step[:, None])
        else:
            codes = group_codes(groups, step[:, None], GROUPS, NATIVE_FP8)
        codes = tl.reshape(codes, [ROWS, COLUMNS])
        if GROUPS[1]:
            pairs = tl.reshape(codes, [ROWS, COLUMNS // 2, 2]) << (4 * tl.arange(0, 2))[None, None, :]
            byte = tl.min(column, 0) // 2 + tl.arange(0, COLUMNS // 2)
            packed = tl.sum(pairs, axis=2).to(tl.uint8)
            tl.store(start[:, None] + byte[None, :], packed, mask=known[:, None] & (byte < V // 2)[None, :])
        else:
            tl.store(start[:, None] + column[None, :], codes, mask=mask)
        group = tl.min(column, 0) // SIZE + tl.arange(0, COUNT)
        known_groups = known[:, None] & (group < V // SIZE)[None, :]
        place = head * (V // SIZE) + group
        if KIND == "swizzled":
            # Offsets of rows and columns of the tiled order add up.
            offset = swizzled_offset(token[:, None] + tl.zeros_like(place)[None, :],
                                     place[None, :] + tl.zeros_like(token)[:, None], SCALE_COLUMNS)  # fmt: skip
        else:
            offset = token.to(tl.int64)[:, None] * stride_br + place.to(tl.int64)[None, :] * stride_bg
        tl.store(output_block_scale + offset, tl.reshape(made, [ROWS, COUNT]), mask=known_groups)


@triton.jit
def row_scales(partial_maxima, token, known, COUNT: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    """Return the scales of rows `[rows]` from the maxima of their parts `[T, COUNT]`."""
    part = tl.arange(0, WIDTH)
    mask = known[:, None] & (part < COUNT)[None, :]
    maxima = tl.load(partial_maxima + token.to(tl.int64)[:, None] * COUNT + part[None, :], mask=mask, other=0.0)
    SCALES: tl.constexpr = GROUPS[2]
    LEAST: tl.constexpr = GROUPS[3]
    ARITHMETIC: tl.constexpr = GROUPS[4]
    return dynamic_scale(absolute_maximum(maxima), SCALES, LEAST, ARITHMETIC)


@triton.jit
def divided(x, scale):
    """Return e4m3 bytes of IEEE's quotients by scales that broadcast, with no branch a value, as `tl.div_rn` has."""
    return encode_quotient(x, scale, "fp8_e4m3", True)


@triton.jit
def row_codes(
    x, scale, MODEL: tl.constexpr, GROUPS: tl.constexpr, NATIVE_FP8: tl.constexpr, QUICK: tl.constexpr = False
):
    """Return e4m3 bytes of fp32 rows under scales `[rows]`. QUICK: see `divided`."""
    ARITHMETIC: tl.constexpr = GROUPS[4]
    if QUICK and ARITHMETIC == "divide":
        return divided(cast(x, MODEL).to(tl.float32), scale[:, None])
    else:
        return quantise_dynamic(cast(x, MODEL).to(tl.float32), scale[:, None], ARITHMETIC, NATIVE_FP8)
