"""Device code of the fast decode path's schedule: one small kernel turns a step's lengths into work items.

The schedule is int32 `[1 + max_items + num_reqs, 8]`:

- row 0: number of items, number of split requests;
- rows 1 to max_items, an item each: request (-1 for a padding row of the query), first row, number of rows, seq_len,
  first tile, end tile, slot of its partial result (-1: it writes the result itself);
- the last rows, a split request each: row, first slot, number of slots.

A request of one row is cut into equal chunks of at most `chunk` tiles. The chunk is the smallest that leaves no more
items than a whole number of waves of CTAs; of a few numbers of waves the one with the lowest estimate wins. So equal
lengths get equal splits, a batch that fills the card gets none, and a long request among short ones gets many. A
request of several rows is one item, since its slots would not fit. A request without rows stands for a row of padding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.ops.triton.decode_fast_kernels import ITEM_FIELDS, SPLIT_FIELDS, TILE_TOKENS

WAVE_CHOICES = tl.constexpr(4)

# Estimates are in tiles. Opening and closing an item costs about as much as four tiles of a full card, and the CTAs
# that still run when others have ended get about twice their share of the memory bandwidth.
ITEM_COST = tl.constexpr(4.0)
TAIL_SPEED = tl.constexpr(2.0)


@triton.jit
def request_tiles(query_start_loc, seq_lens, request, inside, WINDOW: tl.constexpr):
    """Return first row, rows, seq_len, first tile and visible tiles; tiles count for requests of one row alone."""
    first_row = tl.load(query_start_loc + request, mask=inside, other=0)
    rows = tl.load(query_start_loc + request + 1, mask=inside, other=0) - first_row
    seq_len = tl.maximum(tl.load(seq_lens + request, mask=inside, other=0), 0)
    end_tile = (seq_len + TILE_TOKENS - 1) // TILE_TOKENS
    first_tile = tl.zeros_like(end_tile)
    if WINDOW:
        first_tile = tl.where(rows == 1, tl.maximum(seq_len - WINDOW, 0) // TILE_TOKENS, 0)
    tiles = tl.where(rows == 1, end_tile - first_tile, 0)
    return first_row, rows, seq_len, first_tile, tiles


@triton.jit
def choose_chunk(
    query_start_loc, seq_lens, num_reqs, ctas, waves_of_requests, WINDOW: tl.constexpr, UNIT: tl.constexpr,
    REQUESTS: tl.constexpr,
):  # fmt: skip
    """Return how many units of UNIT tiles an item may have."""
    longest = 1
    total = tl.zeros([], tl.int32)
    for start in range(0, num_reqs, REQUESTS):
        request = start + tl.arange(0, REQUESTS)
        _, _, _, _, tiles = request_tiles(query_start_loc, seq_lens, request, request < num_reqs, WINDOW)
        units = (tiles + UNIT - 1) // UNIT
        longest = tl.maximum(longest, tl.max(units, 0))
        total += tl.sum(units, 0)
    waves = waves_of_requests + tl.arange(0, WAVE_CHOICES)
    low = tl.full([WAVE_CHOICES], 1, tl.int32)
    high = low * longest
    while tl.max(high - low, 0) > 0:
        middle = (low + high) // 2
        items = tl.zeros([WAVE_CHOICES], tl.int32)
        for start in range(0, num_reqs, REQUESTS):
            request = start + tl.arange(0, REQUESTS)
            inside = request < num_reqs
            _, _, _, _, tiles = request_tiles(query_start_loc, seq_lens, request, inside, WINDOW)
            units = (tiles + UNIT - 1) // UNIT
            chunks = (units[:, None] + middle[None, :] - 1) // middle[None, :]
            items += tl.sum(tl.where(inside[:, None], tl.maximum(chunks, 1), 0), 0)
        fits = items <= waves * ctas
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, tl.minimum(middle + 1, high))
    ideal = total.to(tl.float32) / ctas
    excess = tl.maximum(waves.to(tl.float32) * low.to(tl.float32) - ideal, 0.0)
    estimate = ideal + excess / TAIL_SPEED + ITEM_COST / UNIT * waves.to(tl.float32)
    best = tl.argmin(estimate, 0)
    return tl.sum(tl.where(tl.arange(0, WAVE_CHOICES) == best, low, 0), 0)


@triton.jit
def plan_kernel(
    query_start_loc, seq_lens, schedule, num_reqs, ctas, waves_of_requests, max_items, WINDOW: tl.constexpr,
    UNIT: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    """Write the schedule; one program, REQUESTS requests at a time. Chunks are multiples of UNIT tiles."""
    chunk = choose_chunk(query_start_loc, seq_lens, num_reqs, ctas, waves_of_requests, WINDOW, UNIT, REQUESTS)
    padding_row = tl.load(query_start_loc + num_reqs)
    num_items = 0
    num_slots = 0
    num_splits = 0
    for start in range(0, num_reqs, REQUESTS):
        request = start + tl.arange(0, REQUESTS)
        inside = request < num_reqs
        first_row, rows, seq_len, first_tile, tiles = request_tiles(query_start_loc, seq_lens, request, inside, WINDOW)
        is_empty = inside & (rows <= 0)
        pads_before = tl.cumsum(is_empty.to(tl.int32), 0) - is_empty.to(tl.int32)
        first_row = tl.where(is_empty, padding_row + pads_before, first_row)
        padding_row += tl.sum(is_empty.to(tl.int32), 0)
        units = (tiles + UNIT - 1) // UNIT
        items = tl.where(rows == 1, tl.maximum((units + chunk - 1) // chunk, 1), 1)
        items = tl.where(inside & ((rows > 0) | (first_row < num_reqs)), items, 0)
        is_split = (items > 1).to(tl.int32)
        item = num_items + tl.cumsum(items, 0) - items
        slot = num_slots + tl.cumsum(items * is_split, 0) - items * is_split
        split = num_splits + tl.cumsum(is_split, 0) - is_split
        many_rows = rows > 1
        all_tiles = (seq_len + TILE_TOKENS - 1) // TILE_TOKENS
        for part in range(0, tl.max(items, 0)):
            record = schedule + (1 + item + part) * ITEM_FIELDS
            mask = (part < items) & (item + part < max_items)
            tl.store(record, tl.where(is_empty, -1, request), mask=mask)
            tl.store(record + 1, first_row, mask=mask)
            tl.store(record + 2, tl.where(is_empty, 1, rows), mask=mask)
            tl.store(record + 3, tl.where(is_empty, 0, seq_len), mask=mask)
            begin = first_tile + tl.minimum(units * part // tl.maximum(items, 1) * UNIT, tiles)
            end = first_tile + tl.minimum(units * (part + 1) // tl.maximum(items, 1) * UNIT, tiles)
            tl.store(record + 4, tl.where(many_rows, 0, begin), mask=mask)
            tl.store(record + 5, tl.where(many_rows, all_tiles, end), mask=mask)
            tl.store(record + 6, tl.where(is_split > 0, slot + part, -1), mask=mask)
        record = schedule + (1 + max_items + split) * SPLIT_FIELDS
        tl.store(record, first_row, mask=is_split > 0)
        tl.store(record + 1, slot, mask=is_split > 0)
        tl.store(record + 2, items, mask=is_split > 0)
        num_items += tl.sum(items, 0)
        num_slots += tl.sum(items * is_split, 0)
        num_splits += tl.sum(is_split, 0)
    tl.store(schedule, tl.minimum(num_items, max_items))
    tl.store(schedule + 1, num_splits)
