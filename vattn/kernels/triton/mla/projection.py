"""Latent attention's projections per head in Triton: queries into the latent space, results out of it.

The second one quantises its result where it is made; no unquantised output exists. If the scale of a row spans all
heads, two launches multiply twice: the first keeps only the largest magnitudes. With OVERLAP the second one multiplies
while the first still does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vattn.config.mla import MLAConfig
from vattn.kernels.triton.attention.launch import TRITON_DTYPES
from vattn.kernels.triton.common.codec import INTERPRETED, cast, dot
from vattn.kernels.triton.common.epilogue import absolute_maximum
from vattn.kernels.triton.common.output_constants import needs_finishing
from vattn.kernels.triton.common.tiles import Limits, next_power_of_two
from vattn.kernels.triton.mla.epilogue import (
    epilogue_arguments,
    epilogue_constants,
    kind_of,
    row_codes,
    row_scales,
    store_columns,
)
from vattn.ops.arguments_mla import MLAAttentionArgs
from vattn.quantization.formats import MODEL_DTYPES, OUTPUT_FORMATS


@triton.jit
def short_rows(query_start_loc, complete, num_reqs, token, known, LONGEST: tl.constexpr):
    """Return which tokens belong to requests of at most LONGEST tokens; rows of padding belong to none.

    With `complete` `[B]`, longer requests that are not complete count too.
    """
    low = tl.zeros_like(token)
    high = low + num_reqs + 1
    while tl.max(high - low, 0) > 1:
        middle = (low + high) // 2
        first = tl.load(query_start_loc + middle, mask=middle <= num_reqs, other=2147483647)
        low = tl.where(first <= token, middle, low)
        high = tl.where(first <= token, high, tl.maximum(middle, low + 1))
    real = known & (low < num_reqs)
    start = tl.load(query_start_loc + low, mask=real, other=0)
    real = real & (start <= token)
    end = tl.load(query_start_loc + low + 1, mask=real, other=0)
    is_short = end - start <= LONGEST
    if complete is not None:
        is_short = is_short | (tl.load(complete + low, mask=real, other=0) == 0)
    return real & is_short


@triton.jit(
    do_not_specialize=["num_tokens", "num_reqs", "stride_br", "stride_bg"],
    do_not_specialize_on_alignment=["query_start_loc", "output_scale", "output_block_scale"],
)
def mla_project_kernel(
    x, weight, query_start_loc, complete, maxima, output, output_block_scale, output_scale, num_tokens, num_reqs,
    stride_xt, stride_xh, stride_ot, stride_oh, stride_br, stride_bg,
    K: tl.constexpr, K_STEP: tl.constexpr, W_HEAD: tl.constexpr, W_ROW: tl.constexpr, W_COLUMN: tl.constexpr,
    V: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, LONGEST: tl.constexpr,
    PASS: tl.constexpr, PARTS: tl.constexpr, PARTS_TILE: tl.constexpr, MODEL: tl.constexpr, KIND: tl.constexpr,
    GROUPS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, NATIVE_FP8: tl.constexpr, OVERLAP: tl.constexpr,
    QUICK: tl.constexpr,
):  # fmt: skip
    """Multiply `x[t, n, :]` by a head's `[K, V]`. Grid: tiles of tokens, heads times tiles of columns.

    PASS "all" stores by KIND; "maxima" stores the largest magnitudes of the rounded values `[T, PARTS]` alone, "codes"
    stores rows under the scales that they make. LONGEST, unless 0: tokens of longer requests and padding are left out.
    OVERLAP: "codes" may start while "maxima" runs, which waited for all kernels before it. QUICK: codes without
    branches.
    """
    TILES: tl.constexpr = (V + COLUMNS - 1) // COLUMNS
    if OVERLAP and not INTERPRETED and PASS == "maxima":
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    known = token < num_tokens
    if LONGEST:
        known = short_rows(query_start_loc, complete, num_reqs, token, known, LONGEST)
        if tl.max(known.to(tl.int32), 0) == 0:
            if OVERLAP and not INTERPRETED and PASS == "codes":
                # Who waits for this launch waits for the one before it.
                tl.extra.cuda.gdc_wait()
            return
    head = tl.program_id(1) // TILES
    column = tl.program_id(1) % TILES * COLUMNS + tl.arange(0, COLUMNS)
    rows = x + token.to(tl.int64) * stride_xt + head * stride_xh
    step = tl.arange(0, K_STEP)
    matrix = weight + head * W_HEAD + column[None, :] * W_COLUMN
    acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    for first in range(0, K, K_STEP):
        k = first + step
        a = tl.load(rows[:, None] + k[None, :], mask=known[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(matrix + k[:, None] * W_ROW, mask=(k < K)[:, None] & (column < V)[None, :], other=0.0)
        acc = dot(a, b, acc)
    if PASS == "maxima":
        largest = absolute_maximum(tl.where((column < V)[None, :], cast(acc, MODEL).to(tl.float32), 0.0))
        tl.store(maxima + token.to(tl.int64) * PARTS + tl.program_id(1), largest, mask=known)
    elif PASS == "codes":
        if OVERLAP and not INTERPRETED:
            tl.extra.cuda.gdc_wait()
        scale = row_scales(maxima, token, known, PARTS, PARTS_TILE, GROUPS)
        place = token.to(tl.int64) * stride_ot + head * stride_oh
        codes = row_codes(acc, scale, MODEL, GROUPS, NATIVE_FP8, QUICK)
        tl.store(output + place[:, None] + column[None, :], codes, mask=known[:, None] & (column < V)[None, :])
        if tl.program_id(1) == 0:
            tl.store(output_block_scale + token.to(tl.int64) * stride_br, scale, mask=known)
    else:
        store_columns(acc, token, known, head, column, output, output_block_scale, output_scale, stride_ot, stride_oh,
                      stride_br, stride_bg, V, MODEL, KIND, GROUPS, SCALE_COLUMNS, NATIVE_FP8, QUICK)  # fmt: skip


@dataclass(frozen=True)
class ProjectionTiles:
    """Tile config of one launch: tokens and columns of a program, steps of the inner dimension, launch options."""

    block_m: int
    columns: int
    k_step: int
    num_warps: int = 4
    num_stages: int = 3


def projection_tiles(
    tokens: int, heads: int, inner: int, width: int, exact: bool, constants: dict[str, Any], limits: Limits
) -> ProjectionTiles:
    """Return tiles from shapes alone. `exact`: of fp32 values; `constants`: of `epilogue_constants`."""
    size = constants["GROUPS"][0]
    # Codes of four bits take most registers.
    most = 16 if exact or limits.interpreted else 32 if size == 16 else 64
    block_m = max(16, min(next_power_of_two(tokens), most))
    columns = max(16, next_power_of_two(width))
    # Narrow tiles where whole heads would leave multiprocessors idle, or would not stay in registers.
    while columns > 32 and (
        columns > 128 or exact or -(-tokens // block_m) * heads * (width / columns) < limits.processors
    ):
        columns //= 2
    if constants["KIND"] in ("groups", "swizzled"):
        columns = max(columns, size)
    plain = ProjectionTiles(block_m, columns, 32 if exact else max(16, min(64, next_power_of_two(inner))))
    return _deep(plain, tokens, heads, inner, width, size, limits) if _is_hopper(exact, limits) else plain


def _is_hopper(exact: bool, limits: Limits) -> bool:
    """Return whether tiles and quotients are those that were timed on Hopper."""
    return limits.warpgroups and limits.native_fp8 and not exact


def _deep(
    plain: ProjectionTiles, tokens: int, heads: int, inner: int, width: int, size: int, limits: Limits
) -> ProjectionTiles:
    """Return tiles such that all programs together keep as many loads in flight as shared memory holds.

    Where a group needs wide tiles, rows are split instead: by the bytes that a program reads, or that all do together,
    for the L2 cache gives all multiprocessors less than half of what each could take.
    """

    def programs(rows: int) -> int:
        return -(-tokens // rows) * heads * -(-width // plain.columns)

    def cost(rows: int) -> float:
        count, read = programs(rows), rows + plain.columns
        return max(count / (0.42 * limits.processors), -(-count // limits.processors)) * read

    rows = plain.block_m
    if plain.columns == size:
        rows = min((n for n in (64, 32, 16) if n <= rows), key=cost)
    resident = -(-programs(rows) // limits.processors)
    stage = 2 * plain.k_step * (rows + plain.columns)
    # A stage more than the loop has steps would stay empty.
    stages = min((limits.shared_bytes // resident - 4096) // stage, -(-inner // plain.k_step), 8)
    warps = 8 if rows * plain.columns >= 4096 and size > 16 else 4
    return ProjectionTiles(rows, plain.columns, plain.k_step, warps, max(stages, plain.num_stages))


def launch_projection(
    x: Tensor,
    weight: Tensor,
    args: MLAAttentionArgs,
    target: dict[str, Any],
    constants: dict[str, Any],
    limits: Limits,
    longest: int = 0,
    complete: Tensor | None = None,
) -> None:
    """Multiply `x` `[T, N, K]` by `weight` `[N, K, V]` of any strides into `target`, epilogue included."""
    tokens, heads, inner = x.shape
    width, exact = constants["V"], x.dtype == torch.float32
    tiles = projection_tiles(tokens, heads, inner, width, exact, constants, limits)
    parts = heads * -(-width // tiles.columns)
    grid = (-(-tokens // tiles.block_m), parts)
    passes = ["all"] if constants["KIND"] != "rows" or target["output_block_scale"] is None else ["maxima", "codes"]
    maxima = x.new_empty((tokens, parts), dtype=torch.float32) if len(passes) > 1 else None
    hopper = _is_hopper(exact, limits)
    overlap = hopper and len(passes) > 1
    for name in passes:
        options: dict[str, Any] = {"launch_pdl": True} if overlap and name == "codes" else {}
        mla_project_kernel[grid](
            x, weight, args.query_start_loc, complete, maxima, num_tokens=tokens, num_reqs=args.seq_lens.shape[0],
            stride_xt=x.stride(0), stride_xh=x.stride(1), K=inner, K_STEP=tiles.k_step,
            W_HEAD=weight.stride(0), W_ROW=weight.stride(1), W_COLUMN=weight.stride(2),
            COLUMNS=tiles.columns, BLOCK_M=tiles.block_m, LONGEST=longest, PASS=name, PARTS=parts,
            PARTS_TILE=next_power_of_two(parts), OVERLAP=overlap, QUICK=hopper, **target, **constants, **options,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages, enable_fp_fusion=True,
        )  # fmt: skip


def project_output(
    latent: Tensor,
    w_uv: Tensor,
    args: MLAAttentionArgs,
    config: MLAConfig,
    limits: Limits,
    rows: Tensor | None = None,
    longest: int = 0,
    complete: Tensor | None = None,
) -> None:
    """Multiply results `[T, N, L]` by `w_uv` `[N, L, V]`, quantise them and write output and scales.

    With `rows` `[T, N, V]` they are written there, in the model dtype.
    """
    constants, target = epilogue_constants(config, limits), epilogue_arguments(args, config, rows)
    if rows is not None:
        target["output_block_scale"] = None
    launch_projection(latent, w_uv, args, target, constants, limits, longest, complete)


def project_to(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    args: MLAAttentionArgs,
    config: MLAConfig,
    limits: Limits,
    longest: int = 0,
    complete: Tensor | None = None,
) -> None:
    """Multiply `x` `[T, N, K]` by `weight` `[N, K, V]` into `out` `[T, N, V]` of the model dtype."""
    constants = {
        "V": weight.shape[2], "MODEL": TRITON_DTYPES[MODEL_DTYPES[config.dtype]], "KIND": "none",
        "GROUPS": (1, False, False, -1.0, "divide"), "NATIVE_FP8": limits.native_fp8,
    }  # fmt: skip
    target = {
        "output": out, "output_block_scale": None, "output_scale": None, "stride_ot": out.stride(0),
        "stride_oh": out.stride(1), "stride_br": 0, "stride_bg": 0, "SCALE_COLUMNS": 0,
    }  # fmt: skip
    launch_projection(x, weight, args, target, constants, limits, longest, complete)


def spans_heads(config: MLAConfig) -> bool:
    """Return whether the finishing kernel computes the scales: of groups that span heads, or of formats of its own."""
    spans = OUTPUT_FORMATS[config.output_format].group_size > 0 or needs_finishing(config)
    return spans and kind_of(config) == "rows"
