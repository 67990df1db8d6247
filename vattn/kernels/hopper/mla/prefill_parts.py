"""How Hopper's kernel of expanded latent attention quantises its rows to NVFP4, part by part.

Rows go through shared memory in the model dtype, half of a head's columns at a time, and a loop quantises 32 of them
in each turn. A row tile's results are quantised once in many microseconds: one straight stretch of instructions
for all of a thread's values would come from afar every time, while a loop's stay near.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vattn.kernels.hopper.compat import as_tiles, block_barrier
from vattn.kernels.hopper.mla.prefill_store import fp4_of
from vattn.kernels.hopper.prefill.load import GROUP_ROWS

PART_ROWS = gl.constexpr(32)
PART_COLUMNS = gl.constexpr(64)


@gluon.jit
def store_part(
    output, scales, scale, scale_stride, group_stride, values, first_token, known_rows, first_column,
    STRIDE: gl.constexpr, OUTPUT_GROUPS: gl.constexpr, SCALE_COLUMNS: gl.constexpr,
):  # fmt: skip
    """Quantise rows `[32, 64]`; SCALE_COLUMNS of swizzled scales, or 0: rows of scales."""
    COUNT: gl.constexpr = PART_COLUMNS // 16
    codes, stored = fp4_of(values.reshape([PART_ROWS, COUNT, 16]), scale, OUTPUT_GROUPS)
    PLACE: gl.constexpr = stored.type.layout
    row = gl.arange(0, PART_ROWS, layout=gl.SliceLayout(1, PLACE))[:, None]
    group = first_column // 16 + gl.arange(0, COUNT, layout=gl.SliceLayout(0, PLACE))[None, :]
    token = (first_token + row).to(gl.int64)
    if SCALE_COLUMNS:
        tile = (token // 128) * (SCALE_COLUMNS // 4) + group // 4
        place = tile * 512 + token % 32 * 16 + token % 128 // 32 * 4 + group % 4
    else:
        place = token * scale_stride + group.to(gl.int64) * group_stride
    gl.store(scales + place, stored, mask=(row < known_rows) & (group >= 0))
    codes = codes.reshape([PART_ROWS, PART_COLUMNS // 2, 2])
    PAIR: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, codes.type.layout))
    pairs = gl.sum(codes << (4 * gl.arange(0, 2, layout=PAIR))[None, None, :], 2).to(gl.uint8)
    CODES: gl.constexpr = pairs.type.layout
    row = gl.arange(0, PART_ROWS, layout=gl.SliceLayout(1, CODES))[:, None]
    byte = first_column // 2 + gl.arange(0, PART_COLUMNS // 2, layout=gl.SliceLayout(0, CODES))[None, :]
    target = (first_token + row).to(gl.int64) * (STRIDE // 2) + byte
    gl.store(output + target, pairs, mask=(row < known_rows) & (byte >= 0))


@gluon.jit
def store_half(
    output, scales, scale, scale_stride, group_stride, room, half, first_row, rows, first_column,
    GROUP_INDEX: gl.constexpr, STRIDE: gl.constexpr, MODEL: gl.constexpr, OUTPUT_GROUPS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
):  # fmt: skip
    """Quantise 64 columns of a warpgroup's rows."""
    PANEL: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # A group of 16 is one thread's.
    HELD: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    block_barrier()
    room.store(half.to(MODEL))
    block_barrier()
    parts = as_tiles(room, MODEL, GROUP_ROWS // PART_ROWS, [PART_ROWS, PART_COLUMNS], PANEL)
    left = gl.minimum(rows - GROUP_INDEX * GROUP_ROWS, GROUP_ROWS)
    for part in range((left + PART_ROWS - 1) // PART_ROWS):
        values = parts.index(part).load(HELD).to(gl.float32)
        first_token = first_row + GROUP_INDEX * GROUP_ROWS + part * PART_ROWS
        known_rows = left - part * PART_ROWS
        store_part(
            output, scales, scale, scale_stride, group_stride, values, first_token, known_rows, first_column, STRIDE,
            OUTPUT_GROUPS, SCALE_COLUMNS,
        )  # fmt: skip


@gluon.jit
def store_parts(
    output, scales, scale, scale_stride, group_stride, room, result, first_row, rows, head,
    GROUP_INDEX: gl.constexpr, HEADS: gl.constexpr, VALUES: gl.constexpr, MODEL: gl.constexpr,
    OUTPUT_GROUPS: gl.constexpr, SCALE_COLUMNS: gl.constexpr,
):  # fmt: skip
    """Quantise a warpgroup's rows by way of `room` `[64, 64]` in shared memory."""
    STRIDE: gl.constexpr = HEADS * VALUES
    if VALUES == 128:
        low, high = result.reshape(GROUP_ROWS, 2, PART_COLUMNS).permute(0, 2, 1).split()
        store_half(
            output, scales, scale, scale_stride, group_stride, room, low, first_row, rows, head * VALUES, GROUP_INDEX,
            STRIDE, MODEL, OUTPUT_GROUPS, SCALE_COLUMNS,
        )  # fmt: skip
        store_half(
            output, scales, scale, scale_stride, group_stride, room, high, first_row, rows,
            head * VALUES + PART_COLUMNS, GROUP_INDEX, STRIDE, MODEL, OUTPUT_GROUPS, SCALE_COLUMNS,
        )  # fmt: skip
    else:
        store_half(
            output, scales, scale, scale_stride, group_stride, room, result, first_row, rows, head * VALUES,
            GROUP_INDEX, STRIDE, MODEL, OUTPUT_GROUPS, SCALE_COLUMNS,
        )  # fmt: skip
