"""Device code that splits a step's requests into work items, shared by the schedules of decode and of latent decode.

A schedule is int32 `[1 + max_items + requests, FIELDS]`: a header, a record for each item, and one for each request
that is split. An item's record names the next item of the same CTA. Lengths count in units: tiles, or groups of them.

Two ways of sharing the work are estimated, and the cheaper one is taken:

- Even chunks: every request is split into equal chunks, which CTAs take round-robin. The number of waves is the
  cheapest of a few. Requests of equal lengths are split equally, and a batch that fills the card is not split.
- Even shares: the requests are laid end to end, and the line is split into as many equal shares as there are CTAs. Any
  mixture of lengths is balanced, at the price of more splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

FIELDS = tl.constexpr(8)
"""Integers of a record."""

WAVES = tl.constexpr(4)
"""Numbers of waves that are tried."""

MOST_UNITS = tl.constexpr(1 << 30)
"""Of all requests together: sums of units fit int32."""

TAIL_SPEED = tl.constexpr(2.0)
"""CTAs that still run when others have ended get about twice their share of the memory bandwidth."""

SHARES_COST = tl.constexpr(3.0)
"""Time of even shares in items: most CTAs write partial results."""


@triton.jit
def choose_chunk(
    units_of: tl.constexpr, source, num_reqs, ctas, waves_of_requests, RULE: tl.constexpr, ITEM_COST: tl.constexpr,
    LEAST: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    """Return how many units an item may have, 0 for even shares, and the units of all requests.

    Args:
        units_of: returns the units of requests, from `source`, their indices, whether they exist, and RULE.
        waves_of_requests: waves that one item per request takes; `None`: of the requests that have units.
        ITEM_COST: units that an item costs on top of its own.
        LEAST: units of a part below which merging costs more than splitting saves; 0: none are.
    """
    longest = tl.full([], 1, tl.int32)
    total = tl.zeros([], tl.int32)
    busy = tl.zeros([], tl.int32)
    for start in range(0, num_reqs, REQUESTS):
        request = start + tl.arange(0, REQUESTS)
        units = units_of(source, request, request < num_reqs, RULE)
        longest = tl.maximum(longest, tl.max(units, 0))
        total += tl.sum(units, 0)
        busy += tl.sum((units > 0).to(tl.int32), 0)
    if waves_of_requests is None:
        waves_of_requests = tl.maximum((busy + ctas - 1) // ctas, 1)
    waves = waves_of_requests + tl.arange(0, WAVES)
    low = tl.full([WAVES], 1, tl.int32)
    high = low * longest
    while tl.max(high - low, 0) > 0:
        middle = (low + high) // 2
        items = tl.zeros([WAVES], tl.int32)
        for start in range(0, num_reqs, REQUESTS):
            request = start + tl.arange(0, REQUESTS)
            units = units_of(source, request, request < num_reqs, RULE)
            items += tl.sum((units[:, None] + middle[None, :] - 1) // middle[None, :], 0)
        fits = items <= waves * ctas
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, tl.minimum(middle + 1, high))
    if LEAST:
        low = tl.maximum(low, tl.minimum(longest, LEAST))
    ideal = total.to(tl.float32) / ctas
    excess = tl.maximum(waves.to(tl.float32) * low.to(tl.float32) - ideal, 0.0)
    is_split = (low < longest).to(tl.float32)
    chunks = ideal + excess / TAIL_SPEED + ITEM_COST * (waves.to(tl.float32) + is_split)
    shares = ideal + ITEM_COST * (SHARES_COST + busy.to(tl.float32) / ctas)
    if LEAST:
        shares = tl.where(ideal < LEAST, float("inf"), shares)
    best = tl.argmin(chunks, 0)
    chunk = tl.sum(tl.where(tl.arange(0, WAVES) == best, low, 0), 0)
    return tl.where(shares < tl.min(chunks, 0), 0, chunk), total


@triton.jit
def count_chunks(units_of: tl.constexpr, source, num_reqs, chunk, RULE: tl.constexpr, REQUESTS: tl.constexpr):
    """Return how many chunks all requests have."""
    count = tl.zeros([], tl.int32)
    for start in range(0, num_reqs, REQUESTS):
        request = start + tl.arange(0, REQUESTS)
        units = units_of(source, request, request < num_reqs, RULE)
        count += tl.sum((units + chunk - 1) // chunk, 0)
    return count


@triton.jit
def share_start(share, total, shares):
    """Return the first unit of a share of the line."""
    return (share.to(tl.int64) * total // shares).to(tl.int32)


@triton.jit
def share_of(unit, total, shares):
    """Return the share that a unit of the line belongs to: the last that starts at or before it."""
    return (((unit.to(tl.int64) + 1) * shares - 1) // total).to(tl.int32)


@triton.jit
def behind(counts, before):
    """Return where each of some begins, after `before` others."""
    return before + tl.cumsum(counts, 0) - counts


@triton.jit
def cut(units, on_line, has_items, chunk, total, shares, even_shares):
    """Return the first share of each request, its number of parts, and 1 if these are several, else 0."""
    first_share = share_of(on_line, total, shares)
    parts_of_line = share_of(on_line + units - 1, total, shares) - first_share + 1
    parts = tl.where(even_shares, parts_of_line, (units + chunk - 1) // chunk)
    parts = tl.where(has_items, parts, 0)
    return first_share, parts, (parts > 1).to(tl.int32)


@triton.jit
def items_of(part, parts, units, on_line, first_share, item, rank, cuts):
    """Return the first and end unit of parts `[requests, parts]`, their item numbers, and the CTA's next item or -1.

    Args:
        item: number of each request's first item in even chunks; `rank`: of each request among those with items.
        cuts: CTAs, chunks of all requests, units of the line, its shares, whether shares are even.
    """
    ctas, num_chunks, total, shares, even_shares = cuts
    count, length, place = tl.maximum(parts, 1)[:, None], units[:, None], on_line[:, None]
    share = first_share[:, None] + part
    share_begin = share_start(share, total, shares)
    share_end = share_start(share + 1, total, shares)
    begin = tl.where(even_shares, tl.maximum(share_begin - place, 0), length * part // count)
    end = tl.where(even_shares, tl.minimum(share_end - place, length), length * (part + 1) // count)
    # In even shares the item that opens a share has its number; the others follow by request.
    of_line = tl.where(place + begin == share_begin, share, shares + rank[:, None])
    next_of_line = tl.where(place + end < share_end, shares + rank[:, None] + 1, -1)
    number = tl.where(even_shares, of_line, item[:, None] + part)
    next_of_wave = tl.where(number + ctas < num_chunks, number + ctas, -1)
    return begin, end, number, tl.where(even_shares, next_of_line, next_of_wave)
