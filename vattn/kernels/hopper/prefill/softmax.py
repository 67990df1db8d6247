"""What a consumer warpgroup of the Hopper prefill kernel does between its two products: masks, weights, scales."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from vattn.kernels.hopper.columns import part_start, parts_between
from vattn.kernels.hopper.compat import as_tiles, block_barrier
from vattn.kernels.hopper.prefill.load import GROUP_ROWS
from vattn.kernels.hopper.prefill.ping_pong import ping_pong_wait

LOWEST = gl.constexpr(-1.0e30)
"""Where running maxima start: finite, so that differences are never NaN."""

HIDDEN = gl.constexpr(0x7FFFFFFF)

NATIVE_BITS = gl.constexpr(8.0)
"""FP8 weights are at most 2 to this power, so that those of 2**-17 of the largest still count."""

RECIPROCAL = gl.constexpr("rcp.approx.ftz.f32 $0, $1;")
"""Of numbers from 1 on: a quotient would ask for ranges that they never reach."""

WIDENED_SHRINK = gl.constexpr(0.0625)
"""What bf16 queries are scaled down by on their way to fp16: up to 2**20 they stay finite."""


@gluon.jit
def tokens_of(row, PACK: gl.constexpr):
    """Return which of a tile's tokens its rows belong to."""
    if PACK == 1:
        return row
    else:
        return row // PACK


@gluon.jit
def load_sinks(sinks, head, row, PACK: gl.constexpr, FILLED: gl.constexpr):
    """Return the sink of each row: one value where a tile has one head, else `[rows]`; 0 for unused rows."""
    if PACK == 1:
        return gl.load(sinks + head).to(gl.float32)
    elif FILLED < PACK:
        return gl.load(sinks + head + row % PACK, mask=row % PACK < FILLED, other=0.0).to(gl.float32)
    else:
        return gl.load(sinks + head + row % PACK).to(gl.float32)


@gluon.jit
def multiply_keys(held, query, keys, no_scores, HELD: gl.constexpr, USED: gl.constexpr, D: gl.constexpr):
    """Start the product of this warpgroup's queries and a tile of keys; HELD columns of the queries are in registers.

    Shared memory has those fewer to read for every tile. Columns from USED on are zeros, and left out.
    """
    scores = no_scores
    if HELD > 0:
        first = keys.slice(0, HELD, dim=1).permute((1, 0))
        scores = warpgroup_mma(held, first, no_scores, use_acc=False, is_async=True)
    if HELD == 0 and USED == D:
        scores = warpgroup_mma(query, keys.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    else:
        for i in gl.static_range(parts_between(HELD, USED)):
            scores = multiply_part(query, keys, scores, part_start(HELD, USED, i), part_start(HELD, USED, i + 1))
    return scores


@gluon.jit
def multiply_part(query, keys, scores, FIRST: gl.constexpr, END: gl.constexpr):
    """Start adding the products of columns from FIRST to END, the first of which begin the sums."""
    part = keys.slice(FIRST, END - FIRST, dim=1).permute((1, 0))
    return warpgroup_mma(query.slice(FIRST, END - FIRST, dim=1), part, scores, use_acc=FIRST > 0, is_async=True)


@gluon.jit
def hide(
    scores, position, key_tile, seq_len, missing, PACK: gl.constexpr, KEYS: gl.constexpr, WINDOW: gl.constexpr,
    BOX: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return scores with everything invisible at -inf: the future, the window, missing blocks, the last box's shift."""
    row = position + tokens_of(gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, LAYOUT)), PACK)
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
    token = key_tile * KEYS + column
    partial = seq_len % BOX
    shift = gl.where(partial == 0, 0, BOX - partial)
    tail = seq_len - partial
    shifted = gl.where(token < tail + shift, HIDDEN, token - shift)
    token = gl.where(token < tail, token, shifted)
    token = gl.where(((missing >> (column // BOX)) & 1) == 0, token, HIDDEN)
    visible = token[None, :] <= row[:, None]
    if WINDOW:
        visible = visible & (token[None, :] > row[:, None] - WINDOW)
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def cap_scores(scores, scale, SOFT_CAP: gl.constexpr):
    """Return scores as they are, or of a cap c -1 / (1 + exp(2 score / c)), 2 c times that is capped, less c."""
    if SOFT_CAP:
        return gl.inline_asm_elementwise(
            RECIPROCAL, "=f,f", [-1.0 - gl.exp2(scores * scale)], dtype=gl.float32, is_pure=True, pack=1
        )
    else:
        return scores


@gluon.jit
def weights_of(scores, maximum, scale, BITS: gl.constexpr):
    """Return the unnormalised weights of scores, at most 2 ** BITS."""
    return gl.exp2(scores * scale - (maximum * scale - BITS)[:, None])


@gluon.jit
def decay_of(old, new, scale):
    """Return what earlier weights shrink by. The difference comes first: its rounding must not be scaled."""
    return gl.exp2((old - new) * scale)


@gluon.jit
def as_left(weights, KEYS: gl.constexpr, CACHE: gl.constexpr, MATH: gl.constexpr, LAYOUT: gl.constexpr):
    """Return weights as the left operand of the second product; no value leaves its thread.

    FP8 ones in the order in which `turn_values` stores tokens.
    """
    if CACHE == "native":
        sorted = weights.reshape(GROUP_ROWS, KEYS // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(GROUP_ROWS, KEYS)
        return gl.convert_layout(sorted, LAYOUT).to(MATH)
    else:
        return gl.convert_layout(weights.to(MATH), LAYOUT)


@gluon.jit
def as_right(values, CACHE: gl.constexpr):
    """Return a tile of values as `[KEYS, D]`."""
    if CACHE == "native":
        return values.permute((1, 0))
    else:
        return values


@gluon.jit
def half_of(values, HALF: gl.constexpr, KEYS: gl.constexpr, CACHE: gl.constexpr):
    """Return the first (0) or second (1) half of a tile of values as `[KEYS // 2, D]`."""
    SIDE: gl.constexpr = 1 if CACHE == "native" else 0
    return as_right(values.slice(HALF * (KEYS // 2), KEYS // 2, dim=SIDE), CACHE)


@gluon.jit
def score_scale(scale, q_scale, k_scale, kv_head, QUERY_SCALE: gl.constexpr, KV_SCALE: gl.constexpr):
    """Return what scores of a head are multiplied by. QUERY_SCALE and KV_SCALE: 0 none, 1 one value, 2 one a head."""
    if QUERY_SCALE:
        scale = scale * gl.load(q_scale + kv_head * (QUERY_SCALE - 1))
    if KV_SCALE:
        scale = scale * gl.load(k_scale + kv_head * (KV_SCALE - 1))
    return scale


@gluon.jit
def widen_query(query, D: gl.constexpr, SHRINK: gl.constexpr):
    """Turn this warpgroup's bf16 queries into fp16 in place."""
    if SHRINK:
        THREADS: gl.constexpr = D // 8
        rows: gl.constexpr = gl.BlockedLayout([1, 8], [32 // THREADS, THREADS], [4, 1], [1, 0])
        panels: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        values = query.load(rows).to(gl.float32) * WIDENED_SHRINK
        block_barrier()
        as_tiles(query, gl.float16, 1, [GROUP_ROWS, D], panels).index(0).store(values.to(gl.float16))
        fence_async_shared()
        block_barrier()


@gluon.jit
def add_tile(
    scores, maximum, sums, acc, scale, values, value_full, stage, phase, BITS: gl.constexpr, CACHE: gl.constexpr,
    MATH: gl.constexpr, LEFT: gl.constexpr, BARRIER: gl.constexpr = None, HALVES: gl.constexpr = False,
):  # fmt: skip
    """Start adding a tile of values, weighed, to the results; return the new maximum, sums and results.

    BARRIER: of the ping-pong to wait for first, or `None`. HALVES: values of the first half are multiplied while the
    weights of the second are computed.
    """
    N: gl.constexpr = scores.shape[1]
    new_maximum = gl.maximum(maximum, gl.max(scores, 1))
    decay = decay_of(maximum, new_maximum, scale)
    if HALVES:
        exponents = scores * scale - (new_maximum * scale - BITS)[:, None]
        low, high = exponents.reshape(GROUP_ROWS, 2, N // 2).permute(0, 2, 1).split()
        first = gl.exp2(low)
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, LEFT.parent))[:, None]
        left = as_left(first, N // 2, CACHE, MATH, LEFT)
        mbarrier.wait(value_full.index(stage), phase)
        if BARRIER is not None:
            ping_pong_wait(BARRIER)
        acc = warpgroup_mma(left, half_of(values.index(stage), 0, N, CACHE), acc, is_async=True)
        second = gl.exp2(high)
        right = as_left(second, N // 2, CACHE, MATH, LEFT)
        acc = warpgroup_mma(right, half_of(values.index(stage), 1, N, CACHE), acc, is_async=True)
        new_sums = gl.sum(first.reshape(GROUP_ROWS, N // 16, 8), 1) + gl.sum(second.reshape(GROUP_ROWS, N // 16, 8), 1)
        new_sums = gl.convert_layout(new_sums, sums.type.layout)
    else:
        weights = weights_of(scores, new_maximum, scale, BITS)
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, LEFT.parent))[:, None]
        left = as_left(weights, N, CACHE, MATH, LEFT)
        mbarrier.wait(value_full.index(stage), phase)
        if BARRIER is not None:
            ping_pong_wait(BARRIER)
        acc = warpgroup_mma(left, as_right(values.index(stage), CACHE), acc, is_async=True)
        new_sums = gl.sum(weights.reshape(GROUP_ROWS, N // 8, 8), 1)
    sums = sums * gl.convert_layout(decay, gl.SliceLayout(1, sums.type.layout))[:, None] + new_sums
    return new_maximum, sums, acc
