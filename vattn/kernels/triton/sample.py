"""Draw a token from each of many rows of logits in one launch, without sorts or copies of the logits; and compute for
such rows what log-probabilities need.

One program takes one row. The least logit that `top_k` and `top_p` keep is found by narrowing a range to an eighth in
each pass over the row: of values first, since few keys are far from the largest one, then of bits. Logits of 16 bits
take three or four passes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vattn.config.device import multiprocessors

_MOST = 8192
"""Tokens that a program reads at once."""

# The constants of `vattn.generation.draws.splitmix64`, as int64.
_GOLDEN: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_FIRST: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_SECOND: tl.constexpr = tl.constexpr(0x94D049BB133111EB - (1 << 64))
_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)

SAME_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""By dtype: how many of the lowest bits of fp32 are the same in all of its values."""


@triton.jit
def _key(value, SAME: tl.constexpr):
    """Return int64 in the order of fp32 values, without the lowest bits, which are the same in all values of a sign."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SAME).to(tl.int64)


@triton.jit
def _value(key, SAME: tl.constexpr):
    """Return the value of a key."""
    bits = (key << SAME).to(tl.int32)
    bits = tl.where(bits < 0, bits | ((1 << SAME) - 1), bits)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _above(low, high, eighths: tl.constexpr, by_value, SAME: tl.constexpr):
    """Return a key between two others, some eighths of the way from `low` to `high`."""
    least = _value(low, SAME)
    middle = _key(least + (_value(high - 1, SAME) - least) * (eighths / 8), SAME)
    key = tl.where(by_value, middle, low + (high - low) * eighths // 8)
    return tl.minimum(tl.maximum(key, low + 1), high - 1)


@triton.jit
def _narrow(sums, target, key, successor, low, high, exact):
    """Return a range of keys that begins at `key` if the tokens from it up reach the target, and whether exactly."""
    found = tl.sum(sums.to(tl.float64))
    reaches = found >= target
    return tl.where(reaches, key, low), tl.where(reaches, successor, high), tl.where(reaches, found == target, exact)


@triton.jit
def _least(
    row, vocab_size, low, high, target, floor, largest, factor, SAME: tl.constexpr, MASS: tl.constexpr,
    PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Return the largest key such that the tokens from it up are at least as many as the target.

    Args:
        low, high: int64, keys between which it is; `low` is known to satisfy this, `high` not to.
        target: fp64, a number of tokens, or with `MASS` a share of the weights of the tokens from `floor` up.
        floor: fp32, the least logit that counts.
        factor: weights are 2 ** ((logit - largest) * factor).
    """
    place = tl.arange(0, PART)
    turn = 0
    while high - low > 1:
        by_value = (turn < 4) & (high - low > 256)
        k1 = _above(low, high, 1, by_value, SAME)
        k2 = _above(low, high, 2, by_value, SAME)
        k3 = _above(low, high, 3, by_value, SAME)
        k4 = _above(low, high, 4, by_value, SAME)
        k5 = _above(low, high, 5, by_value, SAME)
        k6 = _above(low, high, 6, by_value, SAME)
        k7 = _above(low, high, 7, by_value, SAME)
        v1, v2, v3, v4 = _value(k1, SAME), _value(k2, SAME), _value(k3, SAME), _value(k4, SAME)
        v5, v6, v7 = _value(k5, SAME), _value(k6, SAME), _value(k7, SAME)
        s0 = tl.zeros((PART,), tl.float32)
        s1, s2, s3, s4, s5, s6, s7 = s0, s0, s0, s0, s0, s0, s0
        for start in range(0, vocab_size, PART * PARTS):
            for part in tl.static_range(PARTS):
                token = start + part * PART + place
                x = tl.load(row + token, mask=token < vocab_size, other=-float("inf")).to(tl.float32)
                if MASS:
                    weight = tl.exp2((x - largest) * factor)
                    s0 += tl.where(x >= floor, weight, 0.0)
                else:
                    weight = tl.full((PART,), 1.0, tl.float32)
                s1 += tl.where(x >= v1, weight, 0.0)
                s2 += tl.where(x >= v2, weight, 0.0)
                s3 += tl.where(x >= v3, weight, 0.0)
                s4 += tl.where(x >= v4, weight, 0.0)
                s5 += tl.where(x >= v5, weight, 0.0)
                s6 += tl.where(x >= v6, weight, 0.0)
                s7 += tl.where(x >= v7, weight, 0.0)
        if MASS:
            if turn == 0:
                target *= tl.sum(s0.to(tl.float64))
        # A range of keys for each sum that reaches the target and its successor that does not.
        next_low, next_high, exact = _narrow(s1, target, k1, k2, low, k1, False)
        next_low, next_high, exact = _narrow(s2, target, k2, k3, next_low, next_high, exact)
        next_low, next_high, exact = _narrow(s3, target, k3, k4, next_low, next_high, exact)
        next_low, next_high, exact = _narrow(s4, target, k4, k5, next_low, next_high, exact)
        next_low, next_high, exact = _narrow(s5, target, k5, k6, next_low, next_high, exact)
        next_low, next_high, exact = _narrow(s6, target, k6, k7, next_low, next_high, exact)
        next_low, next_high, exact = _narrow(s7, target, k7, high, next_low, next_high, exact)
        # So many tokens and no more: higher keys with as many tokens keep the same ones.
        low, high = next_low, tl.where(exact & (not MASS), next_low + 1, next_high)
        turn += 1
    return low


@triton.jit
def sample_kernel(
    logits, rows, temperatures, drawn, top_k, top_p, min_p, seeds, positions, sums, tokens, usable, vocab_size, stride,
    SAME: tl.constexpr, SOME: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """See `sample`. Grid: rows."""
    index = tl.program_id(0)
    source = tl.load(rows + index)
    row = logits + source * stride
    part_place = tl.arange(0, PART)
    most = tl.full((PART,), -float("inf"), tl.float32)
    fewest = tl.full((PART,), float("inf"), tl.float32)
    counts = tl.zeros((PART,), tl.int32)
    broken = tl.zeros((PART,), tl.int32)
    for start in range(0, vocab_size, PART * PARTS):
        for part in tl.static_range(PARTS):
            token = start + part * PART + part_place
            x = tl.load(row + token, mask=token < vocab_size, other=-float("inf")).to(tl.float32)
            broken |= (x != x).to(tl.int32)
            most = tl.maximum(most, x)
            if TOP_K or TOP_P:
                fewest = tl.minimum(fewest, tl.where(x == -float("inf"), float("inf"), x))
                counts += (x > -float("inf")).to(tl.int32)
    largest = tl.max(most, axis=0)
    good = (tl.max(broken, axis=0) == 0) & (largest > -float("inf")) & (largest < float("inf"))
    draws = good
    if SOME:
        draws = good & (tl.load(drawn + index) != 0)
    chosen = 0
    if draws:
        factor = _LOG2E / tl.load(temperatures + index)
        top = _key(largest, SAME) + 1
        floor = -float("inf")
        if TOP_K:
            wanted = tl.load(top_k + index)
            # Otherwise it keeps all tokens that can be drawn.
            if wanted < tl.sum(counts):
                low = _key(tl.min(fewest, axis=0), SAME)
                count = wanted.to(tl.float64)
                floor = _value(
                    _least(row, vocab_size, low, top, count, floor, largest, factor, SAME, False, PART, PARTS), SAME
                )
        if TOP_P:
            share = tl.load(top_p + index)
            if share < 1:
                # Tokens below this have less than the rest of the weights even if they are all others.
                rest = tl.log2((1 - share).to(tl.float32) / vocab_size) - 1
                low = tl.minimum(_key(largest + rest / factor, SAME), top - 1) - 1
                low = tl.maximum(low, _key(tl.maximum(floor, tl.min(fewest, axis=0)), SAME))
                floor = tl.maximum(
                    floor,
                    _value(
                        _least(row, vocab_size, low, top, share, floor, largest, factor, SAME, True, PART, PARTS), SAME
                    ),
                )
        least = tl.load(min_p + index) if MIN_P else 0.0
        place = tl.arange(0, BLOCK)
        for start in range(0, vocab_size, BLOCK):
            x = tl.load(row + start + place, mask=start + place < vocab_size, other=-float("inf")).to(tl.float32)
            weights = tl.exp2((x - largest) * factor)
            kept = (x >= floor) & (weights >= least)
            total = tl.sum(tl.where(kept, weights, 0.0).to(tl.float64))
            tl.store(sums + index * BLOCKS + start // BLOCK, total)
        tl.debug_barrier()
        blocks = tl.arange(0, BLOCKS)
        widths = tl.load(sums + index * BLOCKS + blocks, mask=blocks * BLOCK < vocab_size, other=0.0)
        ends = tl.cumsum(widths, axis=0)
        z = tl.load(seeds + index) + (tl.load(positions + source) + 1) * _GOLDEN
        z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _FIRST
        z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _SECOND
        number = (((z ^ ((z >> 31) & 0x1FFFFFFFF)) >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) * 2.220446049250313e-16
        whole = tl.sum(tl.where(blocks == BLOCKS - 1, ends, 0.0))
        at = tl.minimum(number * whole, whole * (1 - 2.220446049250313e-16))
        block = tl.sum((ends <= at).to(tl.int32))
        rest_of = at - tl.sum(tl.where(blocks == block, ends - widths, 0.0))
        start = block * BLOCK
        x = tl.load(row + start + place, mask=start + place < vocab_size, other=-float("inf")).to(tl.float32)
        weights = tl.exp2((x - largest) * factor)
        kept = (x >= floor) & (weights >= least)
        ends = tl.cumsum(tl.where(kept, weights, 0.0).to(tl.float64), axis=0)
        whole = tl.max(ends, axis=0)
        rest_of = tl.minimum(tl.maximum(rest_of, 0.0), whole * (1 - 2.220446049250313e-16))
        chosen = start + tl.sum((ends <= rest_of).to(tl.int32))
    elif good:
        first = tl.full((PART,), 0x7FFFFFFF, tl.int32)
        for start in range(0, vocab_size, PART * PARTS):
            for part in tl.static_range(PARTS):
                token = start + part * PART + part_place
                x = tl.load(row + token, mask=token < vocab_size, other=-float("inf")).to(tl.float32)
                first = tl.minimum(first, tl.where(x == largest, token, 0x7FFFFFFF))
        chosen = tl.min(first, axis=0)
    tl.store(tokens + source, chosen)
    tl.store(usable + source, good)


def sample(
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    drawn: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    tokens: Tensor,
    usable: Tensor,
) -> None:
    """Write the tokens of some rows, drawn from the tokens that `top_k`, then `top_p`, then `min_p` leave.

    Args:
        logits: fp32, fp16 or bf16 `[N, vocab_size]`, contiguous rows.
        rows: int64 `[n]`.
        temperature: fp32 `[n]`, above 0.
        drawn: bool `[n]`, the others get the likeliest token; `None` if all are drawn.
        top_k: int64 `[n]`, from 1; the size of the vocabulary for none.
        top_p, min_p: fp64 `[n]`.
        seeds: int64 `[n]`.
        positions: int64 `[N]`, of the tokens.
        tokens: int64 `[N]`, written at the rows.
        usable: int64 `[N]`, written at the rows: 1 where the largest logit is finite.
    """
    vocab_size, count = logits.shape[1], rows.shape[0]
    warps, most = _size(count, logits.device)
    block = min(most, triton.next_power_of_2(vocab_size))
    blocks = triton.next_power_of_2(-(-vocab_size // block))
    sums = torch.empty(count, blocks, dtype=torch.float64, device=logits.device)
    sample_kernel[(count,)](
        logits, rows, temperature, drawn, top_k, top_p, min_p, seeds, positions, sums, tokens, usable,
        vocab_size, logits.stride(0),
        SAME=SAME_BITS[logits.dtype], SOME=drawn is not None,
        TOP_K=top_k is not None, TOP_P=top_p is not None, MIN_P=min_p is not None,
        BLOCK=block, BLOCKS=max(2, blocks), PART=max(1, block // 4), PARTS=4,
        num_warps=warps if block == most else 4,
    )  # fmt: skip


def _size(count: int, device: torch.device) -> tuple[int, int]:
    """Return the warps of a program and the tokens that it reads at once: half where two share a multiprocessor."""
    few = device.type != "cuda" or count <= multiprocessors(device)
    return (16, _MOST) if few else (8, _MOST // 2)


@triton.jit
def normalise_kernel(
    logits, tokens, totals, ranks, maxima, vocab_size, stride, GROUP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """See `normalise`. Grid: rows."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    place = tl.arange(0, BLOCK)
    own = tl.load(row + tl.load(tokens + index)).to(tl.float32)
    most = tl.full((BLOCK,), -float("inf"), tl.float32)
    likelier = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        values = tl.load(row + start + place, mask=start + place < vocab_size, other=-float("inf")).to(tl.float32)
        most = tl.maximum(most, values, propagate_nan=tl.PropagateNan.ALL)
        likelier += (values > own).to(tl.int32)
        if maxima is not None:
            group = start // GROUP + tl.arange(0, BLOCK // GROUP)
            groups = vocab_size // GROUP
            found = tl.max(tl.reshape(values, [BLOCK // GROUP, GROUP]), axis=1)
            tl.store(maxima + index * groups + group, found, mask=group < groups)
    largest = tl.max(most, axis=0)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        values = tl.load(row + start + place, mask=start + place < vocab_size, other=-float("inf")).to(tl.float32)
        sums += tl.exp(values - largest)
    total = tl.log(tl.sum(sums.to(tl.float64))).to(tl.float32) + largest
    tl.store(totals + index, total)
    tl.store(ranks + index, tl.sum(likelier).to(tl.int64) + 1)


def normalise(logits: Tensor, tokens: Tensor, group: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what log-probabilities need: logarithms of the sums of exponentials, ranks, and the largest of each group.

    Args:
        logits: fp32, fp16 or bf16 `[n, vocab_size]`, contiguous rows.
        tokens: int64 `[n]`.
        group: tokens of a group, which divides the vocabulary and is a power of two; 0 for none.

    Returns:
        fp32 `[n, 1]`; int64 `[n, 1]`, 1 for the likeliest token; fp32 `[n, vocab_size / group]` or `None`.
    """
    count, vocab_size = logits.shape
    totals = torch.empty(count, 1, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(count, 1, dtype=torch.int64, device=logits.device)
    maxima = logits.new_empty(count, vocab_size // group, dtype=torch.float32) if group else None
    block = max(group, min(_MOST, triton.next_power_of_2(vocab_size)))
    normalise_kernel[(count,)](
        logits, tokens, totals, ranks, maxima, vocab_size, logits.stride(0), GROUP=group, BLOCK=block,
        num_warps=16 if block == _MOST else 4,
    )  # fmt: skip
    return totals, ranks, maxima
