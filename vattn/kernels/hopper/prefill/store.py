"""How a consumer warpgroup of the Hopper prefill kernel stores its rows: in the model dtype, or quantised."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vattn.kernels.hopper.epilogue import load_scale, store_result, store_row_groups
from vattn.kernels.hopper.prefill.load import GROUP_ROWS
from vattn.kernels.hopper.prefill.softmax import load_sinks, tokens_of
from vattn.kernels.triton.common.mask import LN2, LOG2E


@gluon.jit
def finish_rows(
    written, acc, log_maximum, total, first_row, rows, head, SHAPE: gl.constexpr, GROUP_INDEX: gl.constexpr,
    BITS: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """Store this warpgroup's rows from sums of values, maxima (in base 2) and sums of weights."""
    output, lse, block_scale, sinks, v_scale, output_scale, scale_stride, group_stride = written
    GROUP: gl.constexpr = SHAPE.HEADS // SHAPE.KV_HEADS
    FILLED: gl.constexpr = SHAPE.PACK if SHAPE.PACK <= GROUP else GROUP
    MODEL: gl.constexpr = gl.float16 if SHAPE.MODEL == "float16" else gl.bfloat16
    OUTPUT: gl.constexpr = SHAPE.OUTPUT
    OUTPUT_GROUPS: gl.constexpr = SHAPE.OUTPUT_GROUPS
    ROW: gl.constexpr = total.type.layout
    sink = None
    if sinks is not None:
        sink = load_sinks(sinks, head, gl.arange(0, GROUP_ROWS, layout=ROW), SHAPE.PACK, FILLED)
    result, log_sum = normalise(acc, log_maximum, total, sink, v_scale, head // GROUP, SHAPE.KV_SCALE, BITS)
    store_rows(
        output, lse, block_scale, output_scale, scale_stride, group_stride, result, log_sum, first_row, rows, head,
        GROUP_INDEX, SHAPE.HEADS, SHAPE.D, SHAPE.SIZE, SHAPE.PACK, FILLED, MODEL, OUTPUT, OUTPUT_GROUPS, DIRECT,
    )  # fmt: skip


@gluon.jit
def normalise(acc, log_maximum, total, sink, v_scale, kv_head, KV_SCALE: gl.constexpr, BITS: gl.constexpr):
    """Return rows and their logs from sums of values, maxima (in base 2) and sums of weights."""
    norm = gl.where(total > 0.0, 1.0 / total, 0.0)
    if sink is not None:
        sink = sink * LOG2E
        with_sink = gl.maximum(log_maximum, sink)
        shrink = gl.exp2(log_maximum - with_sink)
        total = total * shrink + gl.exp2(sink - with_sink + BITS)
        norm = shrink / total
        log_maximum = with_sink
    log_sum = LN2 * (log_maximum - BITS + gl.log2(total))
    if KV_SCALE:
        norm = norm * gl.load(v_scale + kv_head * (KV_SCALE - 1))
    return acc * gl.convert_layout(norm, gl.SliceLayout(1, acc.type.layout))[:, None], log_sum


@gluon.jit
def store_nothing(
    written, seq_len, first_row, rows, head, SHAPE: gl.constexpr, GROUP_INDEX: gl.constexpr, RESULT: gl.constexpr,
    ROW: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """Store this warpgroup's rows, which see no key."""
    output, lse, block_scale, sinks, _, output_scale, scale_stride, group_stride = written
    D: gl.constexpr = SHAPE.D
    GROUP: gl.constexpr = SHAPE.HEADS // SHAPE.KV_HEADS
    FILLED: gl.constexpr = SHAPE.PACK if SHAPE.PACK <= GROUP else GROUP
    MODEL: gl.constexpr = gl.float16 if SHAPE.MODEL == "float16" else gl.bfloat16
    OUTPUT: gl.constexpr = SHAPE.OUTPUT
    OUTPUT_GROUPS: gl.constexpr = SHAPE.OUTPUT_GROUPS
    empty = gl.full([GROUP_ROWS], float("-inf"), gl.float32, ROW)
    if sinks is not None:
        if seq_len >= 0:
            own_sinks = load_sinks(sinks, head, gl.arange(0, GROUP_ROWS, layout=ROW), SHAPE.PACK, FILLED)
            empty = gl.zeros([GROUP_ROWS], gl.float32, ROW) + own_sinks
    nothing = gl.zeros([GROUP_ROWS, D], gl.float32, RESULT)
    store_rows(
        output, lse, block_scale, output_scale, scale_stride, group_stride, nothing, empty, first_row, rows, head,
        GROUP_INDEX, SHAPE.HEADS, SHAPE.D, SHAPE.SIZE, SHAPE.PACK, FILLED, MODEL, OUTPUT, OUTPUT_GROUPS, DIRECT,
    )  # fmt: skip


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


@gluon.jit
def store_part(
    partial_output, partial_stats, first, acc, maximum, total, rows, head, GROUP_INDEX: gl.constexpr,
    HEADS: gl.constexpr, SIZE: gl.constexpr, PACK: gl.constexpr, FILLED: gl.constexpr,
):  # fmt: skip
    """Store this warpgroup's rows over some of the keys: sums of values, maxima and sums of weights.

    Another kernel merges them: fp32 `[places, H, SIZE]` and `[places, H, 2]`. `first`: place of the first token.
    """
    TOKENS: gl.constexpr = GROUP_ROWS // PACK
    D: gl.constexpr = acc.shape[1]
    own_rows = gl.minimum(rows - GROUP_INDEX * TOKENS, TOKENS)
    row = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, acc.type.layout))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, acc.type.layout))
    mask = is_stored(row, own_rows, PACK, FILLED)[:, None]
    if SIZE < D:
        mask = mask & (column < SIZE)[None, :]
    place = (first + tokens_of(row, PACK)).to(gl.int64) * HEADS + head + row % PACK
    gl.store(partial_output + place[:, None] * SIZE + column[None, :], acc, mask=mask)
    row = gl.arange(0, GROUP_ROWS, layout=maximum.type.layout)
    place = (first + tokens_of(row, PACK)).to(gl.int64) * HEADS + head + row % PACK
    inside = is_stored(row, own_rows, PACK, FILLED)
    gl.store(partial_stats + place * 2, maximum, mask=inside)
    gl.store(partial_stats + place * 2 + 1, total, mask=inside)


@gluon.jit
def is_stored(row, rows, PACK: gl.constexpr, FILLED: gl.constexpr):
    """Return which rows of a warpgroup hold a head of one of its `rows` tokens."""
    inside = tokens_of(row, PACK) < rows
    if FILLED < PACK:
        inside = inside & (row % PACK < FILLED)
    return inside
