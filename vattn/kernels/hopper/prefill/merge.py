"""Merge the parts of a row tile (`parts`): in the CTA that attends one after the other, or in a kernel of its own.

Both compute the same, rounded alike: sums and products are fused where this file says so and nowhere else.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vattn.kernels.hopper.compat import wait_for_previous_kernel
from vattn.kernels.hopper.epilogue import load_scale, store_result
from vattn.kernels.hopper.prefill.load import GROUP_ROWS
from vattn.kernels.hopper.prefill.softmax import LOWEST, NATIVE_BITS
from vattn.kernels.hopper.prefill.store import is_stored, normalise
from vattn.kernels.hopper.prefill.tile_queue import RECORD

AHEAD = gl.constexpr(16)
"""Parts that are loaded at a time."""

MERGED_ROWS = gl.constexpr(4)
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
def add_later(
    acc, log_maximum, total, later, later_maximum, later_total, is_later, chain, kept, rows, SHAPE: gl.constexpr,
    GROUP_INDEX: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """Return a part's sums of values, maximum (in base 2) and sums of weights together with those of later parts.

    later, chain, kept: sums of values of later parts in registers, device memory and shared memory, see `Shape.KEPT`;
    every thread loads what it stored itself. is_later: whether there are later parts.
    rows: tokens of this warpgroup. KEEP: store the sums of values for the next part.
    """
    log_maximum, weight, decay = weigh(log_maximum, later_maximum)
    total = gl.fma(later_total, decay, total * weight)
    if SHAPE.KEPT < 0:
        acc = add(acc, weight, later, decay)
    elif SHAPE.KEPT == SHAPE.D:
        acc = add_shared(kept.index(GROUP_INDEX), acc, weight, decay, is_later, KEEP)
    elif SHAPE.KEPT > 0:
        low, high = acc.reshape(GROUP_ROWS, 2, SHAPE.D // 2).permute(0, 2, 1).split()
        low = add_shared(kept.index(GROUP_INDEX), low, weight, decay, is_later, KEEP)
        high = add_stored(chain, high, weight, decay, is_later, rows, SHAPE, GROUP_INDEX, KEEP)
        both = gl.join(low, high).permute(0, 2, 1).reshape(GROUP_ROWS, SHAPE.D)
        acc = gl.convert_layout(both, acc.type.layout)
    else:
        acc = add_stored(chain, acc, weight, decay, is_later, rows, SHAPE, GROUP_INDEX, KEEP)
    return acc, log_maximum, total


@gluon.jit
def add_shared(kept, acc, weight, decay, is_later, KEEP: gl.constexpr):
    """Add sums of values `[64, D]` that shared memory holds as `[D // 8, 64, 8]`."""
    D: gl.constexpr = acc.shape[1]
    later = kept.load(acc.reshape(GROUP_ROWS, D // 8, 8).permute(1, 0, 2).type.layout)
    later = gl.where(is_later, later, 0.0).permute(1, 0, 2).reshape(GROUP_ROWS, D)
    acc = add(acc, weight, gl.convert_layout(later, acc.type.layout), decay)
    if KEEP:
        kept.store(acc.reshape(GROUP_ROWS, D // 8, 8).permute(1, 0, 2))
    return acc


@gluon.jit
def add_stored(
    chain, acc, weight, decay, is_later, rows, SHAPE: gl.constexpr, GROUP_INDEX: gl.constexpr, KEEP: gl.constexpr
):
    """Add sums of values `[64, D]` that device memory holds as `[D // 8, 64, 8]`, so that threads' places follow."""
    GROUP: gl.constexpr = SHAPE.HEADS // SHAPE.KV_HEADS
    FILLED: gl.constexpr = SHAPE.PACK if SHAPE.PACK <= GROUP else GROUP
    D: gl.constexpr = acc.shape[1]
    row = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, acc.type.layout))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, acc.type.layout))
    base = chain + (gl.program_id(0) * SHAPE.GROUPS + GROUP_INDEX) * (GROUP_ROWS * D)
    places = base + (row * 8)[:, None] + (column // 8 * (GROUP_ROWS * 8) + column % 8)[None, :]
    mask = is_stored(row, rows, SHAPE.PACK, FILLED)
    acc = add(acc, weight, gl.load(places, mask=(mask & is_later)[:, None], other=0.0), decay)
    if KEEP:
        gl.store(places, acc, mask=mask[:, None])
    return acc


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
    kept = gl.allocate_shared_memory(gl.float32, [MERGED_ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    num_tiles = gl.load(schedule + 1)
    for work in range(gl.program_id(0), num_tiles * (CHUNKS * (HEADS // FILLED)), gl.num_programs(0)):
        first_head = work % (HEADS // FILLED) * FILLED
        chunk = work // (HEADS // FILLED) % CHUNKS
        record = schedule + (1 + max_items + work // (HEADS // FILLED * CHUNKS)) * RECORD
        first_row = gl.load(record)
        place = gl.load(record + 1)
        parts = gl.load(record + 2)
        rows = gl.load(record + 3)
        # The schedule is of an earlier kernel than the parts.
        wait_for_previous_kernel()
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
                loaded = ()
                for i in gl.static_range(AHEAD):
                    part = parts - 1 - start - i
                    at = (place + part * rows + token).to(gl.int64) * HEADS + head
                    stats = partial_stats + at * 2
                    there = inside & (part >= 0)
                    own_maximum = gl.load(stats, mask=there, other=LOWEST)
                    own_total = gl.load(stats + 1, mask=there, other=0.0)
                    sums = partial_output + at[:, None] * SIZE + column[None, :]
                    own = gl.load(sums, mask=mask & (part >= 0), other=0.0)
                    loaded = loaded + ((own_maximum, own_total, own),)  # type: ignore[assignment]
                # All loads are under way before the first is waited for: the assembler would rather take turns.
                kept.store(log_maximum)
                log_maximum = kept.load(ROW)
                for i in gl.static_range(AHEAD):
                    own_maximum, own_total, own = loaded[i]
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
    wait_for_previous_kernel()
