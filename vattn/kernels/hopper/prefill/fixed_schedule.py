"""Device code that schedules row tiles by parts of the keys with fixed limits (`parts`).

The schedule is int32 `[1 + max_items + 3 * max_tiles + 1, 8]` or longer, as `split_schedule`'s, except for two things:
items without a place may have several parts, which one CTA attends in order, and places count rows: a part of a row
tile of r rows takes r places, and so many after it lies the part of the next keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.kernels.hopper.prefill.parts import PARTS_PER_DOUBLING
from vattn.kernels.hopper.prefill.schedule import plan_tiles
from vattn.kernels.hopper.prefill.split_schedule import choose_part, units_of_tiles
from vattn.kernels.hopper.schedule import MOST_UNITS, behind

PARTS = tl.constexpr(PARTS_PER_DOUBLING.value)


@triton.jit
def part_of(tile, PART: tl.constexpr):
    """Return which part each key tile belongs to."""
    # The exponent of a quotient below 2**24 is exact.
    exponent = (tile // (PART * PARTS)).to(tl.float32).to(tl.int32, bitcast=True) >> 23
    doublings = tl.maximum(exponent - 126, 0)
    return doublings * (PARTS // 2) + tile // (PART << doublings)


@triton.jit
def start_of(part, PART: tl.constexpr):
    """Return the first key tile of each part."""
    doublings = tl.maximum(part - PARTS // 2, 0) // (PARTS // 2)
    return (part - doublings * (PARTS // 2)) * (PART << doublings)


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "max_tiles", "max_items", "max_places", "ctas"])
def fixed_plan_kernel(
    query_start_loc, ordered, seq_lens, schedule, num_reqs, num_tokens, max_tiles, max_items, max_places, ctas,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, REQUESTS: tl.constexpr,
    PART: tl.constexpr, MERGING: tl.constexpr,
):  # fmt: skip
    """Write the schedule; one program. The longest row tiles are split, as far as items and places suffice.

    ctas: items that run at a time for each head.
    max_places: rows that partial results have room for.
    MERGING: key tiles that writing and reading a part's results costs.
    """
    tiles = schedule + (1 + max_items + max_tiles) * 8
    total = plan_tiles(
        query_start_loc, ordered, seq_lens, tiles, num_reqs, num_tokens, max_tiles, WINDOW, ROWS, 1, KEYS, CHUNK,
        REQUESTS,
    )  # fmt: skip
    tl.debug_barrier()
    most_units = MOST_UNITS // tl.maximum(total, 1)
    chunk = choose_part(tiles, most_units, total, ctas, PART, MERGING, CHUNK)
    num_items = tl.zeros([], tl.int32)
    num_splits = tl.zeros([], tl.int32)
    num_places = tl.zeros([], tl.int32)
    for start in range(0, total, CHUNK):
        index = start + tl.arange(0, CHUNK)
        inside = index < total
        tile = tiles + (1 + index) * 8
        first_row = tl.load(tile + 1, mask=inside, other=0)
        rows = tl.load(tile + 2, mask=inside, other=0)
        first = tl.load(tile + 5, mask=inside, other=0)
        end = tl.load(tile + 6, mask=inside, other=0)
        first_part = part_of(first, PART)
        last_part = part_of(tl.maximum(end - 1, 0), PART)
        parts = last_part - first_part + 1
        is_long = units_of_tiles(tiles, most_units, index, inside) > chunk
        wanted = inside & is_long & (parts > 1) & (parts * rows <= max_places)
        # Sums that do not fit int32 belong to lengths that no block table has room for.
        item_ends = num_items + tl.cumsum(tl.where(wanted, parts, 0), 0)
        place_ends = num_places + tl.cumsum(tl.where(wanted, parts * rows, 0), 0)
        fits = (item_ends + total <= max_items) & (place_ends <= max_places) & (item_ends >= 0) & (place_ends >= 0)
        is_split = wanted & fits
        items = tl.where(is_split, parts, inside.to(tl.int32))
        item = behind(items, num_items)
        split = behind(is_split.to(tl.int32), num_splits)
        place = place_ends - parts * rows
        record = schedule + (1 + max_items + split) * 8
        tl.store(record, first_row, mask=is_split)
        tl.store(record + 1, place, mask=is_split)
        tl.store(record + 2, parts, mask=is_split)
        tl.store(record + 3, rows, mask=is_split)
        for back in range(0, tl.max(items, 0)):
            mask = back < items
            part = last_part - back
            record = schedule + (1 + item + back) * 8
            for word in tl.static_range(5):
                tl.store(record + word, tl.load(tile + word, mask=mask, other=0), mask=mask)
            own_first = tl.where(is_split, tl.maximum(first, start_of(part, PART)), first)
            own_end = tl.where(is_split & (back > 0), start_of(part + 1, PART), end)
            tl.store(record + 5, own_first, mask=mask)
            tl.store(record + 6, own_end, mask=mask)
            tl.store(record + 7, tl.where(is_split, place + (part - first_part) * rows, -1), mask=mask)
        num_items += tl.sum(items, 0)
        num_splits += tl.sum(is_split.to(tl.int32), 0)
        num_places += tl.sum(tl.where(is_split, parts * rows, 0), 0)
    tl.store(schedule, num_items)
    tl.store(schedule + 1, num_splits)
