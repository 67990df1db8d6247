"""Draw a token from each of many rows of logits in one launch, without sorts or copies of the logits; and compute for
such rows what log-probabilities need.

One program takes one row. The least logit that `top_k` and `top_p` keep is found by bisecting the bits of logits, two
bits in a pass, so that 16-bit logits take eight passes over a row, which is in the L2 cache after the first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST = 8192
"""Tokens that a program reads at once."""

# The constants of `vattn.generation.draws.splitmix64`, as int64.
_GOLDEN: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_FIRST: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_SECOND: tl.constexpr = tl.constexpr(0x94D049BB133111EB - (1 << 64))

SAME_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""By dtype: how many of the lowest bits of fp32 are the same in all of its values."""


@triton.jit
def _key(logits, SAME: tl.constexpr):
    """Return int32 in the order of fp32 values, without the lowest bits, which are the same in all values of a sign."""
    bits = logits.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SAME


@triton.jit
def _least(
    row, vocab_size, low, high, target, floor, largest, temperature, SAME: tl.constexpr, MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the largest key such that the tokens from it up are at least as many as the target.

    Args:
        low, high: int64, keys between which it is; `low` is known to satisfy this, `high` not to.
        target: fp64, a number of tokens, or with `MASS` the sum of their weights.
        floor: key of the least token that counts.
    """
    place = tl.arange(0, BLOCK)
    while high - low > 1:
        # In quarters; equal thresholds near the end do no harm.
        width = high - low
        first = low + tl.maximum(width // 4, 1)
        second = low + tl.maximum(width // 2, 1)
        third = low + tl.maximum(width * 3 // 4, 1)
        one = tl.zeros((BLOCK,), tl.float32)
        two = tl.zeros((BLOCK,), tl.float32)
        three = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            logits = tl.load(row + start + place, mask=start + place < vocab_size, other=-float("inf")).to(tl.float32)
            keys = _key(logits, SAME).to(tl.int64)
            counts = (keys >= floor) & (start + place < vocab_size)
            weights = tl.where(counts, tl.exp((logits - largest) / temperature) if MASS else 1.0, 0.0)
            one += tl.where(keys >= first, weights, 0.0)
            two += tl.where(keys >= second, weights, 0.0)
            three += tl.where(keys >= third, weights, 0.0)
        if tl.sum(three.to(tl.float64)) >= target:
            low = third
        elif tl.sum(two.to(tl.float64)) >= target:
            low, high = second, third
        elif tl.sum(one.to(tl.float64)) >= target:
            low, high = first, second
        else:
            high = first
    return low


@triton.jit
def sample_kernel(
    logits, rows, temperatures, drawn, top_k, top_p, min_p, seeds, positions, sums, tokens, usable, vocab_size, stride,
    SAME: tl.constexpr, SOME: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """See `sample`. Grid: rows."""
    index = tl.program_id(0)
    source = tl.load(rows + index)
    row = logits + source * stride
    place = tl.arange(0, BLOCK)
    largest = -float("inf")
    token = 0
    broken = 0
    for start in range(0, vocab_size, BLOCK):
        values = tl.load(row + start + place, mask=start + place < vocab_size, other=-float("inf")).to(tl.float32)
        broken += tl.sum((values != values).to(tl.int32))
        most = tl.max(tl.where(values != values, -float("inf"), values), axis=0)
        if most > largest:
            largest = most
            token = start + tl.argmax(values, axis=0)
    good = (broken == 0) & (largest > -float("inf")) & (largest < float("inf"))
    draws = good
    if SOME:
        draws = good & (tl.load(drawn + index) != 0)
    if draws:
        temperature = tl.load(temperatures + index)
        # Above every key, and below that of the least number.
        top = _key(largest, SAME).to(tl.int64) + 1
        bottom = tl.full((), -(1 << 31), tl.int64)
        floor = bottom
        if TOP_K:
            wanted = tl.load(top_k + index)
            if wanted < vocab_size:
                floor = _least(
                    row,
                    vocab_size,
                    bottom,
                    top,
                    wanted.to(tl.float64),
                    bottom,
                    largest,
                    temperature,
                    SAME,
                    False,
                    BLOCK,
                )
        if TOP_P:
            share = tl.load(top_p + index)
            if share < 1:
                weights = tl.zeros((BLOCK,), tl.float32)
                for start in range(0, vocab_size, BLOCK):
                    inside = start + place < vocab_size
                    values = tl.load(row + start + place, mask=inside, other=-float("inf")).to(tl.float32)
                    kept = inside & (_key(values, SAME).to(tl.int64) >= floor)
                    weights += tl.where(kept, tl.exp((values - largest) / temperature), 0.0)
                mass = share * tl.sum(weights.to(tl.float64))
                floor = tl.maximum(
                    floor,
                    _least(row, vocab_size, floor, top, mass, floor, largest, temperature, SAME, True, BLOCK),
                )
        least = tl.load(min_p + index) if MIN_P else 0.0
        for start in range(0, vocab_size, BLOCK):
            inside = start + place < vocab_size
            values = tl.load(row + start + place, mask=inside, other=-float("inf")).to(tl.float32)
            weights = tl.exp((values - largest) / temperature)
            kept = inside & (_key(values, SAME).to(tl.int64) >= floor) & (weights >= least)
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
        rest = at - tl.sum(tl.where(blocks == block, ends - widths, 0.0))
        start = block * BLOCK
        inside = start + place < vocab_size
        values = tl.load(row + start + place, mask=inside, other=-float("inf")).to(tl.float32)
        weights = tl.exp((values - largest) / temperature)
        kept = inside & (_key(values, SAME).to(tl.int64) >= floor) & (weights >= least)
        ends = tl.cumsum(tl.where(kept, weights, 0.0).to(tl.float64), axis=0)
        whole = tl.max(ends, axis=0)
        rest = tl.minimum(tl.maximum(rest, 0.0), whole * (1 - 2.220446049250313e-16))
        token = start + tl.sum((ends <= rest).to(tl.int32))
    tl.store(tokens + source, token)
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
    vocab_size = logits.shape[1]
    block = min(_MOST, triton.next_power_of_2(vocab_size))
    blocks = triton.next_power_of_2(-(-vocab_size // block))
    count = rows.shape[0]
    sums = torch.empty(count, blocks, dtype=torch.float64, device=logits.device)
    sample_kernel[(count,)](
        logits, rows, temperature, drawn, top_k, top_p, min_p, seeds, positions, sums, tokens, usable,
        vocab_size, logits.stride(0),
        SAME=SAME_BITS[logits.dtype], SOME=drawn is not None,
        TOP_K=top_k is not None, TOP_P=top_p is not None, MIN_P=min_p is not None,
        BLOCK=block, BLOCKS=max(2, blocks), num_warps=16 if block == _MOST else 4,
    )  # fmt: skip


@triton.jit
def normalise_kernel(logits, tokens, totals, ranks, vocab_size, stride, BLOCK: tl.constexpr):
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
    largest = tl.max(most, axis=0)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        values = tl.load(row + start + place, mask=start + place < vocab_size, other=-float("inf")).to(tl.float32)
        sums += tl.exp(values - largest)
    total = tl.log(tl.sum(sums.to(tl.float64))).to(tl.float32) + largest
    tl.store(totals + index, total)
    tl.store(ranks + index, tl.sum(likelier).to(tl.int64) + 1)


def normalise(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp32 `[n, 1]` logarithms of the sums of exponentials, and int64 `[n, 1]` ranks of tokens, 1 the likeliest.

    Args:
        logits: fp32, fp16 or bf16 `[n, vocab_size]`, contiguous rows.
        tokens: int64 `[n]`.
    """
    count, vocab_size = logits.shape
    totals = torch.empty(count, 1, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(count, 1, dtype=torch.int64, device=logits.device)
    block = min(_MOST, triton.next_power_of_2(vocab_size))
    normalise_kernel[(count,)](
        logits, tokens, totals, ranks, vocab_size, logits.stride(0), BLOCK=block, num_warps=16 if block == _MOST else 4
    )
    return totals, ranks
