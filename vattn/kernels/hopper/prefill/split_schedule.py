"""Device code that schedules row tiles with keys shared by several CTAs: few rows over long contexts.

The schedule is int32 `[1 + max_items + 3 * max_tiles + 1, 8]` or longer:

- row 0: number of items, number of row tiles that are split, and for the reduction that no padding is left to it;
- rows 1 to max_items, an item each: the words of a row tile (`schedule`), first and end key tile of this part, place of
  its partial result (-1: it writes the result itself);
- then a row for each row tile that is split, as `reduce_kernel` reads it: first row, first place, parts, rows;
- the rest is a schedule of whole row tiles, which are the items where they stay so, and scratch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.kernels.hopper.prefill.schedule import plan_tiles
from vattn.kernels.hopper.schedule import MOST_UNITS, WAVES, behind

ITEM_COST = tl.constexpr(1)
"""Key tiles that opening and closing an item costs."""

CANDIDATES = tl.constexpr(8)
"""How many lengths of parts are compared: numbers 1 to `WAVES` each add a wave of items, the others split nothing."""


@triton.jit
def units_of_tiles(tiles, most_units, index, inside):
    """Return how many key tiles row tiles see, one at least; 0 outside."""
    record = tiles + (1 + index) * 8
    keys = tl.load(record + 6, mask=inside, other=0) - tl.load(record + 5, mask=inside, other=0)
    return tl.where(inside, tl.minimum(tl.maximum(keys, 1), most_units), 0)


@triton.jit
def choose_part(tiles, most_units, total, ctas, LEAST: tl.constexpr, MERGING: tl.constexpr, CHUNK: tl.constexpr):
    """Return how many key tiles a part of a row tile may have.

    CTAs take the items in turn, those of the longest row tiles first, so a wave takes as long as its first item.
    """
    longest = tl.max(units_of_tiles(tiles, most_units, tl.arange(0, CHUNK), tl.arange(0, CHUNK) < total), 0)
    longest = tl.maximum(longest, 1)
    candidate = tl.arange(0, CANDIDATES)
    is_split = (candidate > 0) & (candidate <= WAVES)
    most_items = ((total + ctas - 1) // ctas + candidate - 1) * ctas
    high = tl.zeros([CANDIDATES], tl.int32) + longest
    low = tl.where(is_split, 1, high)
    while tl.max(high - low, 0) > 0:
        middle = (low + high) // 2
        items = tl.zeros([CANDIDATES], tl.int32)
        for start in range(0, total, CHUNK):
            index = start + tl.arange(0, CHUNK)
            units = units_of_tiles(tiles, most_units, index, index < total)
            items += tl.sum((units[:, None] + middle[None, :] - 1) // middle[None, :], 0)
        fits = (items <= most_items) | (low == high)
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, tl.minimum(middle + 1, high))
    low = tl.maximum(low, tl.minimum(longest, LEAST))
    cost = tl.zeros([CANDIDATES], tl.int32)
    items = tl.zeros([CANDIDATES], tl.int32)
    for start in range(0, total, CHUNK):
        index = start + tl.arange(0, CHUNK)
        units = units_of_tiles(tiles, most_units, index, index < total)
        parts = (units[:, None] + low[None, :] - 1) // low[None, :]
        first = items[None, :] + tl.cumsum(parts, 0) - parts
        waves = (first + parts + ctas - 1) // ctas - (first + ctas - 1) // ctas
        longest_of_wave = tl.minimum(units[:, None], low[None, :]) + ITEM_COST + MERGING * (parts > 1).to(tl.int32)
        cost += tl.sum(waves * longest_of_wave, 0)
        items += tl.sum(parts, 0)
    return tl.sum(tl.where(candidate == tl.argmin(cost, 0), low, 0), 0)


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "max_tiles", "max_items", "ctas"])
def split_plan_kernel(
    query_start_loc, ordered, seq_lens, schedule, num_reqs, num_tokens, max_tiles, max_items, ctas,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, REQUESTS: tl.constexpr,
    LEAST: tl.constexpr, MERGING: tl.constexpr,
):  # fmt: skip
    """Write the schedule; one program.

    ctas: items that run at a time for each head.
    LEAST: key tiles of a part, at least.
    MERGING: key tiles that writing and reading a part's results costs.
    """
    tiles = schedule + (1 + max_items + max_tiles) * 8
    total = plan_tiles(
        query_start_loc, ordered, seq_lens, tiles, num_reqs, num_tokens, max_tiles, WINDOW, ROWS, 1, KEYS, CHUNK,
        REQUESTS,
    )  # fmt: skip
    tl.debug_barrier()
    # Items of all row tiles together fit int32, and so does what they cost.
    most_units = MOST_UNITS // tl.maximum(total, 1)
    chunk = choose_part(tiles, most_units, total, ctas, LEAST, MERGING, CHUNK)
    num_items = 0
    num_splits = 0
    num_slots = 0
    for start in range(0, total, CHUNK):
        index = start + tl.arange(0, CHUNK)
        inside = index < total
        tile = tiles + (1 + index) * 8
        units = units_of_tiles(tiles, most_units, index, inside)
        parts = (units + chunk - 1) // chunk
        step = (units + parts - 1) // tl.maximum(parts, 1)
        is_split = (parts > 1).to(tl.int32)
        item = behind(parts, num_items)
        slot = behind(parts * is_split, num_slots)
        split = behind(is_split, num_splits)
        first_row = tl.load(tile + 1, mask=inside, other=0)
        rows = tl.load(tile + 2, mask=inside, other=0)
        first_key = tl.load(tile + 5, mask=inside, other=0)
        end_key = tl.load(tile + 6, mask=inside, other=0)
        for part in range(0, tl.max(parts, 0)):
            mask = (part < parts) & (item + part < max_items)
            record = schedule + (1 + item + part) * 8
            for word in tl.static_range(5):
                tl.store(record + word, tl.load(tile + word, mask=mask, other=0), mask=mask)
            last = tl.where(part + 1 == parts, end_key, first_key + (part + 1) * step)
            tl.store(record + 5, first_key + part * step, mask=mask)
            tl.store(record + 6, last, mask=mask)
            tl.store(record + 7, tl.where(is_split > 0, slot + part, -1), mask=mask)
        tl.store(tile + 7, tl.full([CHUNK], -1, tl.int32), mask=inside)
        record = schedule + (1 + max_items + split) * 8
        tl.store(record, first_row, mask=is_split > 0)
        tl.store(record + 1, slot, mask=is_split > 0)
        tl.store(record + 2, parts, mask=is_split > 0)
        tl.store(record + 3, rows, mask=is_split > 0)
        num_items += tl.sum(parts, 0)
        num_slots += tl.sum(parts * is_split, 0)
        num_splits += tl.sum(is_split, 0)
    tl.store(tiles, total)
    tl.store(schedule, num_items)
    tl.store(schedule + 1, num_splits)
    tl.store(schedule + 2, 0x7FFFFFFF)
    tl.store(schedule + 3, 0)
