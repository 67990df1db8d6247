"""How a consumer warpgroup of the Hopper prefill kernel stores its rows: in the model dtype, or quantised."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vattn.kernels.hopper.epilogue import load_scale, store_result, store_row_groups
from vattn.kernels.hopper.prefill.load import GROUP_ROWS
from vattn.kernels.hopper.prefill.softmax import tokens_of


@gluon.jit
def store_rows(
    output, lse, block_scale, output_scale, scale_stride, group_stride, result, log_sum, first_row, rows, head,
    GROUP_INDEX: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, SIZE: gl.constexpr, PACK: gl.constexpr,
    FILLED: gl.constexpr, MODEL: gl.constexpr, OUTPUT: gl.constexpr, OUTPUT_GROUPS: gl.constexpr,
    DIRECT: gl.constexpr = False,
):  # fmt: skip
    """Store this warpgroup's rows of a tile, and their logs if requested: FILLED of a token's PACK rows.

    DIRECT: as threads hold them, without shared memory through which rows are sorted; in no groups then.
    """
    if DIRECT:
        store_columns(
            output, block_scale, output_scale, scale_stride, group_stride, result, first_row, rows, head, 0,
            GROUP_INDEX, HEADS, SIZE, D, PACK, FILLED, MODEL, OUTPUT, OUTPUT_GROUPS, True,
        )  # fmt: skip
    elif D == 256:
        # By halves: the shared memory through which rows are sorted is scarce.
        low, high = result.reshape(GROUP_ROWS, 2, 128).permute(0, 2, 1).split()
        store_columns(
            output, block_scale, output_scale, scale_stride, group_stride, low, first_row, rows, head, 0, GROUP_INDEX,
            HEADS, SIZE, 128, PACK, FILLED, MODEL, OUTPUT, OUTPUT_GROUPS,
        )  # fmt: skip
        store_columns(
            output, block_scale, output_scale, scale_stride, group_stride, high, first_row, rows, head, 128,
            GROUP_INDEX, HEADS, SIZE, 128, PACK, FILLED, MODEL, OUTPUT, OUTPUT_GROUPS,
        )  # fmt: skip
    else:
        store_columns(
            output, block_scale, output_scale, scale_stride, group_stride, result, first_row, rows, head, 0,
            GROUP_INDEX, HEADS, SIZE, D, PACK, FILLED, MODEL, OUTPUT, OUTPUT_GROUPS,
        )  # fmt: skip
    if lse is not None:
        log_row = GROUP_INDEX * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=log_sum.type.layout)
        token = tokens_of(log_row, PACK)
        log_head = head + log_row % PACK
        inside = token < rows
        if FILLED < PACK:
            inside = inside & (log_row % PACK < FILLED)
        gl.store(lse + (first_row + token).to(gl.int64) * HEADS + log_head, log_sum, mask=inside)


@gluon.jit
def store_columns(
    output, block_scale, output_scale, scale_stride, group_stride, result, first_row, rows, head, FIRST: gl.constexpr,
    GROUP_INDEX: gl.constexpr, HEADS: gl.constexpr, SIZE: gl.constexpr, COLUMNS: gl.constexpr, PACK: gl.constexpr,
    FILLED: gl.constexpr, MODEL: gl.constexpr, OUTPUT: gl.constexpr, OUTPUT_GROUPS: gl.constexpr,
    DIRECT: gl.constexpr = False,
):  # fmt: skip
    """Store COLUMNS columns of this warpgroup's rows; DIRECT: as threads hold them."""
    THREADS: gl.constexpr = COLUMNS // 8
    in_rows: gl.constexpr = gl.BlockedLayout([1, 8], [32 // THREADS, THREADS], [4, 1], [1, 0])
    coalesced: gl.constexpr = result.type.layout if DIRECT else in_rows
    rounded = result.to(MODEL)
    if not DIRECT:
        rounded = gl.convert_layout(rounded, coalesced)
    if OUTPUT_GROUPS[0] > 0:
        store_row_groups(
            output, block_scale, rounded, first_row, GROUP_INDEX * GROUP_ROWS, rows, head * SIZE + FIRST,
            load_scale(output_scale), scale_stride, group_stride, PACK, FILLED, SIZE, HEADS * SIZE, MODEL,
            OUTPUT_GROUPS,
        )  # fmt: skip
    else:
        row = GROUP_INDEX * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, coalesced))
        column = FIRST + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, coalesced))
        token = tokens_of(row, PACK)
        offsets = (first_row + token)[:, None].to(gl.int64) * (HEADS * SIZE) + head * SIZE + column[None, :]
        if PACK > 1:
            offsets += (row % PACK * SIZE)[:, None]
        mask = (token[:, None] < rows) & (column[None, :] < SIZE)
        if FILLED < PACK:
            mask = mask & (row % PACK < FILLED)[:, None]
        if OUTPUT == "none":
            gl.store(output + offsets, rounded, mask=mask)
        else:
            store_result(output + offsets, rounded.to(gl.float32), mask, load_scale(output_scale), MODEL, OUTPUT)
