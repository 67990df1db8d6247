"""Merge the parts of a row tile (`parts`): in the CTA that attends one after the other, or in a kernel of its own.

Both compute the same, rounded alike: sums and products are fused where this file says so and nowhere else.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vattn.kernels.hopper.compat import block_barrier, wait_for_previous_kernel
from vattn.kernels.hopper.epilogue import load_scale, store_result
from vattn.kernels.hopper.prefill.load import GROUP_ROWS
from vattn.kernels.hopper.prefill.parts import LAST, WHOLE
from vattn.kernels.hopper.prefill.softmax import LOWEST, NATIVE_BITS
from vattn.kernels.hopper.prefill.store import finish_rows, normalise, store_part
from vattn.kernels.hopper.prefill.tile_queue import RECORD

AHEAD = gl.constexpr(8)
"""Parts that are loaded at a time."""

MERGED_ROWS = gl.constexpr(8)
"""Rows of a program, each a head of a token."""


@gluon.jit
def weigh(log_maximum, later_maximum):
    """Return the maximum (in base 2) of a part and of later keys, and what their sums are multiplied by."""
    maximum = gl.maximum(log_maximum, later_maximum)
    return maximum, gl.exp2(log_maximum - maximum), gl.exp2(later_maximum - maximum)


@gluon.jit
def add(acc, weight, later, decay):
    """Return sums of values of a part and of later keys."""
    by_row: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    weight = gl.convert_layout(weight, by_row)[:, None]
    decay = gl.convert_layout(decay, by_row)[:, None]
    return gl.fma(later, gl.zeros_like(acc) + decay, acc * weight)


@gluon.jit
def chain_places(chain, acc, total, GROUP_INDEX: gl.constexpr, GROUPS: gl.constexpr):
    """Return where this warpgroup keeps its sums of values `[64, D]`, maxima and sums of weights between parts."""
    D: gl.constexpr = acc.shape[1]
    base = chain + (gl.program_id(0) * GROUPS + GROUP_INDEX) * (GROUP_ROWS * (D + 2))
    row = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, acc.type.layout))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, acc.type.layout))
    maxima = base + GROUP_ROWS * D + gl.arange(0, GROUP_ROWS, layout=total.type.layout)
    return base + row[:, None] * D + column[None, :], maxima, maxima + GROUP_ROWS


@gluon.jit
def halves_of(values):
    """Return the first and the second half of columns `[64, D]`."""
    return values.reshape(GROUP_ROWS, 2, values.shape[1] // 2).permute(0, 2, 1).split()


@gluon.jit
def add_later(acc, weight, places, decay):
    """Return sums of values of a part and of later keys, by halves of wide heads: registers hold one result."""
    D: gl.constexpr = acc.shape[1]
    if D == 256:
        low, high = halves_of(acc)
        first, second = halves_of(places)
        low = add(low, weight, gl.load(first), decay)
        high = add(high, weight, gl.load(second), decay)
        return gl.convert_layout(gl.join(low, high).permute(0, 2, 1).reshape(GROUP_ROWS, D), acc.type.layout)
    else:
        return add(acc, weight, gl.load(places), decay)


@gluon.jit
def finish_part(
    written, partial_output, partial_stats, chain, place, acc, log_maximum, total, rows, first_row, own_rows, head,
    SHAPE: gl.constexpr, GROUP_INDEX: gl.constexpr, STORED_INDEX: gl.constexpr, BITS: gl.constexpr,
    DIRECT: gl.constexpr,
):  # fmt: skip
    """Store a part's results where its place says, together with those of later parts if this CTA has them."""
    GROUP: gl.constexpr = SHAPE.HEADS // SHAPE.KV_HEADS
    FILLED: gl.constexpr = SHAPE.PACK if SHAPE.PACK <= GROUP else GROUP
    TOKENS: gl.constexpr = GROUP_ROWS // SHAPE.PACK
    accs, maxima, totals = chain_places(chain, acc, total, GROUP_INDEX, SHAPE.GROUPS)
    if place < -2:
        # Another thread may have stored what this one loads of a row.
        block_barrier()
        log_maximum, weight, decay = weigh(log_maximum, gl.load(maxima))
        total = gl.fma(gl.load(totals), decay, total * weight)
        acc = add_later(acc, weight, accs, decay)
        block_barrier()
    if (place == WHOLE) | (place == LAST):
        finish_rows(written, acc, log_maximum, total, first_row, own_rows, head, SHAPE, STORED_INDEX, BITS, DIRECT)
    elif place < 0:
        gl.store(accs, acc)
        gl.store(maxima, log_maximum)
        gl.store(totals, total)
    elif SHAPE.SPLIT:
        store_part(
            partial_output, partial_stats, place + GROUP_INDEX * TOKENS, acc, log_maximum, total, rows, head,
            GROUP_INDEX, SHAPE.HEADS, SHAPE.SIZE, SHAPE.PACK, FILLED,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["max_items"])
def merge_parts_kernel(
    schedule, partial_output, partial_stats, output, lse, sinks, v_scale, output_scale, max_items, SHAPE: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Merge the parts of row tiles that several CTAs attended; programs walk over (row tile, rows, heads).

    The schedule is `fixed_schedule`'s: after its items a record for each such row tile.
    """
    HEADS: gl.constexpr = SHAPE.HEADS
    GROUP: gl.constexpr = HEADS // SHAPE.KV_HEADS
    FILLED: gl.constexpr = SHAPE.PACK if SHAPE.PACK <= GROUP else GROUP
    TOKENS: gl.constexpr = GROUP_ROWS // SHAPE.PACK * SHAPE.GROUPS
    CHUNKS: gl.constexpr = (TOKENS * FILLED + MERGED_ROWS - 1) // MERGED_ROWS
    D: gl.constexpr = SHAPE.D
    SIZE: gl.constexpr = SHAPE.SIZE
    MODEL: gl.constexpr = gl.float16 if SHAPE.MODEL == "float16" else gl.bfloat16
    BITS: gl.constexpr = NATIVE_BITS if SHAPE.CACHE == "native" else 0.0
    KV_SCALE: gl.constexpr = SHAPE.KV_SCALE
    OUTPUT: gl.constexpr = SHAPE.OUTPUT
    layout: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [num_warps, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, layout)
    column = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    wait_for_previous_kernel()
    num_tiles = gl.load(schedule + 1)
    for work in range(gl.program_id(0), num_tiles * (CHUNKS * (HEADS // FILLED)), gl.num_programs(0)):
        first_head = work % (HEADS // FILLED) * FILLED
        chunk = work // (HEADS // FILLED) % CHUNKS
        record = schedule + (1 + max_items + work // (HEADS // FILLED * CHUNKS)) * RECORD
        first_row = gl.load(record)
        place = gl.load(record + 1)
        parts = gl.load(record + 2)
        rows = gl.load(record + 3)
        index = chunk * MERGED_ROWS + gl.arange(0, MERGED_ROWS, layout=ROW)
        token = index // FILLED
        head = first_head + index % FILLED
        inside = token < rows
        mask = inside[:, None] & (column < SIZE)[None, :]
        if chunk * MERGED_ROWS < rows * FILLED:
            acc = gl.zeros([MERGED_ROWS, D], gl.float32, layout)
            log_maximum = gl.full([MERGED_ROWS], LOWEST, gl.float32, ROW)
            total = gl.zeros([MERGED_ROWS], gl.float32, ROW)
            for start in range(0, parts, AHEAD):
                for i in gl.static_range(AHEAD):
                    part = parts - 1 - start - i
                    at = (place + part * rows + token).to(gl.int64) * HEADS + head
                    stats = partial_stats + at * 2
                    there = inside & (part >= 0)
                    own_maximum = gl.load(stats, mask=there, other=LOWEST)
                    own_total = gl.load(stats + 1, mask=there, other=0.0)
                    sums = partial_output + at[:, None] * SIZE + column[None, :]
                    own = gl.load(sums, mask=mask & (part >= 0), other=0.0)
                    log_maximum, weight, decay = weigh(own_maximum, log_maximum)
                    total = gl.fma(total, decay, own_total * weight)
                    acc = add(own, weight, acc, decay)
            sink = None
            if sinks is not None:
                sink = gl.load(sinks + head, mask=inside, other=0.0).to(gl.float32)
            result, log_sum = normalise(acc, log_maximum, total, sink, v_scale, first_head // GROUP, KV_SCALE, BITS)
            row = (first_row + token).to(gl.int64)
            places = output + (row * HEADS + head)[:, None] * SIZE + column[None, :]
            store_result(places, result, mask, load_scale(output_scale), MODEL, OUTPUT)
            if lse is not None:
                gl.store(lse + row * HEADS + head, log_sum, mask=inside)
