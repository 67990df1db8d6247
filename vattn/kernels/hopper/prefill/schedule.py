"""Device code of the prefill schedule: one small kernel cuts a step's query rows into row tiles, longest first.

The schedule is int32 `[1 + 2 * max_tiles, 8]` or longer, made once a step:

- row 0: number of row tiles;
- rows 1 to max_tiles, a row tile each, by falling number of key tiles: request, first row of the query, rows, position
  of the first row (negative where a query is longer than its sequence), seq_len (-1: rows of padding), first and end
  key tile (equal: the rows see nothing), unused;
- the rest is scratch: the same before sorting.

Offsets and lengths may hold any value; how far the block table goes is not known here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.kernels.triton.common.mask import MAX_SEQ_LEN, clamp
from vattn.kernels.triton.common.offsets import order_offsets

RECORD_WORDS = 8


def max_row_tiles(num_tokens: int, num_reqs: int, rows: int) -> int:
    """Return the most tiles of so many rows that a batch of these shapes can have, its padding included.

    Rows of no request may lie before the first request and after the last one.
    """
    return num_tokens // rows + num_reqs + 2


@triton.jit
def tile_counts(query_start_loc, request, inside, ROWS: tl.constexpr, LEAST: tl.constexpr):
    """Return how many row tiles requests have: none if they have fewer rows than LEAST."""
    first = tl.load(query_start_loc + request, mask=inside, other=0)
    end = tl.load(query_start_loc + request + 1, mask=inside, other=0)
    counts = (end - first + ROWS - 1) // ROWS
    if LEAST > 1:
        counts = tl.where(end - first < LEAST, 0, counts)
    return counts


@triton.jit
def find_request(query_start_loc, tile, num_reqs, ROWS: tl.constexpr, LEAST: tl.constexpr, REQUESTS: tl.constexpr):
    """Return each tile's request (num_reqs: padding) and the first tile of that request."""
    request = tl.zeros_like(tile)
    base = tl.zeros_like(tile)
    before = 0
    for start in range(0, num_reqs, REQUESTS):
        candidate = start + tl.arange(0, REQUESTS)
        inside = candidate < num_reqs
        counts = tile_counts(query_start_loc, candidate, inside, ROWS, LEAST)
        ends = before + tl.cumsum(counts, 0)
        passed = (ends[None, :] <= tile[:, None]) & inside[None, :]
        request += tl.sum(passed.to(tl.int32), 1)
        base = tl.maximum(base, tl.max(tl.where(passed, ends[None, :], 0), 1))
        before += tl.sum(counts, 0)
    return request, base


@triton.jit
def write_tiles(
    query_start_loc, seq_lens, unsorted, first_tile, total, num_reqs, num_tokens, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, LEAST: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    """Write the records of CHUNK tiles in the order of the query."""
    tile = first_tile + tl.arange(0, CHUNK)
    inside = tile < total
    request, base = find_request(query_start_loc, tile, num_reqs, ROWS, LEAST, REQUESTS)
    is_real = request < num_reqs
    first = tl.load(query_start_loc + request, mask=inside, other=0)
    end = tl.load(query_start_loc + request + 1, mask=inside & is_real, other=0)
    end = tl.where(is_real, end, num_tokens)
    seq_len = clamp(tl.load(seq_lens + request, mask=inside & is_real, other=0), MAX_SEQ_LEN)
    row = first + (tile - base) * ROWS
    # Rows before the first request follow those after the last one.
    is_leading = row >= num_tokens
    row = tl.where(is_leading, row - (num_tokens - first + ROWS - 1) // ROWS * ROWS - first, row)
    end = tl.where(is_leading, tl.load(query_start_loc), end)
    rows = tl.minimum(end - row, ROWS)
    position = seq_len - (end - row)
    keys = tl.maximum(tl.minimum(position + rows, seq_len), 0)
    keys = tl.where(is_real, keys, 0)
    end_key = (keys + KEYS - 1) // KEYS
    first_key = tl.zeros_like(end_key)
    if WINDOW:
        first_key = tl.minimum(tl.maximum(position - WINDOW + 1, 0) // KEYS, end_key)
    record = unsorted + tile * 8
    tl.store(record, tl.where(is_real, request, 0), mask=inside)
    tl.store(record + 1, row, mask=inside)
    tl.store(record + 2, rows, mask=inside)
    tl.store(record + 3, position, mask=inside)
    tl.store(record + 4, tl.where(is_real, seq_len, -1), mask=inside)
    tl.store(record + 5, first_key, mask=inside)
    tl.store(record + 6, end_key, mask=inside)


@triton.jit
def sort_tiles(unsorted, schedule, first_tile, total, CHUNK: tl.constexpr):
    """Copy the records of CHUNK tiles to their places: as many tiles are longer, or equal and earlier."""
    tile = first_tile + tl.arange(0, CHUNK)
    inside = tile < total
    cost = tl.load(unsorted + tile * 8 + 6, mask=inside, other=0) - tl.load(
        unsorted + tile * 8 + 5, mask=inside, other=0
    )
    rank = tl.zeros_like(tile)
    for start in range(0, total, CHUNK):
        other = start + tl.arange(0, CHUNK)
        there = other < total
        other_cost = tl.load(unsorted + other * 8 + 6, mask=there, other=0) - tl.load(
            unsorted + other * 8 + 5, mask=there, other=0
        )
        equal = (other_cost[None, :] == cost[:, None]) & (other[None, :] < tile[:, None])
        first = ((other_cost[None, :] > cost[:, None]) | equal) & there[None, :]
        rank += tl.sum(first.to(tl.int32), 1)
    for word in tl.static_range(7):
        value = tl.load(unsorted + tile * 8 + word, mask=inside, other=0)
        tl.store(schedule + (1 + rank) * 8 + word, value, mask=inside)


@triton.jit
def plan_tiles(
    query_start_loc, ordered, seq_lens, schedule, num_reqs, num_tokens, max_tiles, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, LEAST: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    """Write the row tiles of a schedule and return how many there are."""
    order_offsets(query_start_loc, ordered, num_reqs + 1, num_tokens, REQUESTS)
    query_start_loc = ordered
    total = 0
    for start in range(0, num_reqs, REQUESTS):
        request = start + tl.arange(0, REQUESTS)
        total += tl.sum(tile_counts(query_start_loc, request, request < num_reqs, ROWS, LEAST), 0)
    padding = tl.load(query_start_loc + num_reqs)
    total += (num_tokens - padding + ROWS - 1) // ROWS + (tl.load(query_start_loc) + ROWS - 1) // ROWS
    unsorted = schedule + (1 + max_tiles) * 8
    for first_tile in range(0, total, CHUNK):
        write_tiles(
            query_start_loc, seq_lens, unsorted, first_tile, total, num_reqs, num_tokens, WINDOW, ROWS, LEAST, KEYS,
            CHUNK, REQUESTS,
        )  # fmt: skip
    tl.debug_barrier()
    for first_tile in range(0, total, CHUNK):
        sort_tiles(unsorted, schedule, first_tile, total, CHUNK)
    return total


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "max_tiles"])
def prefill_plan_kernel(
    query_start_loc, ordered, seq_lens, schedule, num_reqs, num_tokens, max_tiles, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, LEAST: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    """Write the schedule; one program. Requests of fewer rows than LEAST are left to another kernel."""
    total = plan_tiles(
        query_start_loc, ordered, seq_lens, schedule, num_reqs, num_tokens, max_tiles, WINDOW, ROWS, LEAST, KEYS,
        CHUNK, REQUESTS,
    )  # fmt: skip
    tl.store(schedule, total)
