"""Device code of the fast decode path's schedule: one small kernel makes work items of a step's lengths.

The schedule is int32 `[1 + max_items + num_reqs, FIELDS]`:

- row 0: number of CTAs with work, number of split requests, first row of padding, rows before the first request;
- rows 1 to max_items, an item each: request (-1 for a padding row of the query), first row, number of rows, seq_len,
  first tile, end tile, slot of its partial result (-1: it writes the result itself), next item of the same CTA (-1:
  none); CTA c starts at item c;
- the last rows, a split request each: row, first slot, number of slots, number of rows.

`vattn.kernels.hopper.schedule` says how the work is shared. Where one row is attended at a time (no `chunks`), a
request of several rows is one item, since its slots would not fit, and a request without rows stands for a row of
padding. Where several are, requests are first split into chunks of so many rows, which are treated like requests, and
the reduction writes the padding. With LONGEST, unless 0, requests of more rows and padding are left to another kernel.

Rows before the first request are padding after the last row. Offsets and lengths may hold any value.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.kernels.hopper.decode.triton_kernel import TILE_TOKENS
from vattn.kernels.hopper.schedule import FIELDS, MOST_UNITS, behind, choose_chunk, count_chunks, cut, items_of
from vattn.kernels.triton.common.mask import MAX_SEQ_LEN, clamp
from vattn.kernels.triton.common.offsets import order_offsets

ITEM_COST = tl.constexpr(4.0)
"""Tiles of a full card that opening and closing an item costs."""


@triton.jit
def cut_requests(
    query_start_loc, seq_lens, chunks, num_reqs, TOKENS: tl.constexpr, LONGEST: tl.constexpr, REQUESTS: tl.constexpr
):
    """Cut requests into chunks of up to TOKENS rows, int32 `[B + T / TOKENS, 4]`: request, first row, rows, seq_len.

    Returns:
        Number of chunks. From here on they are what requests are where TOKENS is 1.
    """
    count = tl.zeros([], tl.int32)
    for start in range(0, num_reqs, REQUESTS):
        request = start + tl.arange(0, REQUESTS)
        inside = request < num_reqs
        first_row = tl.load(query_start_loc + request, mask=inside, other=0)
        rows = tl.load(query_start_loc + request + 1, mask=inside, other=0) - first_row
        seq_len = clamp(tl.load(seq_lens + request, mask=inside, other=0), MAX_SEQ_LEN)
        parts = (rows + TOKENS - 1) // TOKENS
        if LONGEST:
            parts = tl.where(rows > LONGEST, 0, parts)
        place = count + tl.cumsum(parts, 0) - parts
        for part in range(0, tl.max(parts, 0)):
            record = chunks + (place + part) * 4
            before = part * TOKENS
            now = tl.minimum(rows - before, TOKENS)
            tl.store(record, request, mask=part < parts)
            tl.store(record + 1, first_row + before, mask=part < parts)
            tl.store(record + 2, now, mask=part < parts)
            tl.store(record + 3, seq_len - rows + before + now, mask=part < parts)
        count += tl.sum(parts, 0)
    tl.debug_barrier()
    return count


@triton.jit
def request_tiles(
    query_start_loc, seq_lens, chunks, most_tiles, index, inside, TOKENS: tl.constexpr, WINDOW: tl.constexpr
):
    """Return request, first row, rows, seq_len, first tile and visible tiles; tiles count for 1 to TOKENS rows."""
    if chunks is not None:
        request = tl.load(chunks + index * 4, mask=inside, other=0)
        first_row = tl.load(chunks + index * 4 + 1, mask=inside, other=0)
        rows = tl.load(chunks + index * 4 + 2, mask=inside, other=0)
        seq_len = tl.maximum(tl.load(chunks + index * 4 + 3, mask=inside, other=0), 0)
    else:
        request = index
        first_row = tl.load(query_start_loc + index, mask=inside, other=0)
        rows = tl.load(query_start_loc + index + 1, mask=inside, other=0) - first_row
        seq_len = clamp(tl.load(seq_lens + index, mask=inside, other=0), MAX_SEQ_LEN)
    end_tile = tl.minimum((seq_len + TILE_TOKENS - 1) // TILE_TOKENS, most_tiles)
    first_tile = tl.zeros_like(end_tile)
    few = (rows > 0) & (rows <= TOKENS)
    if WINDOW:
        first_tile = tl.where(few, tl.maximum(seq_len - rows + 1 - WINDOW, 0) // TILE_TOKENS, 0)
        first_tile = tl.minimum(first_tile, end_tile)
    tiles = tl.where(few, end_tile - first_tile, 0)
    return request, first_row, rows, seq_len, first_tile, tiles


@triton.jit
def request_units(source, index, inside, RULE: tl.constexpr):
    """Return the units of UNIT tiles that requests count as, one at least; 0 outside. RULE: TOKENS, WINDOW, UNIT."""
    query_start_loc, seq_lens, chunks, most_tiles = source
    _, _, _, _, _, tiles = request_tiles(query_start_loc, seq_lens, chunks, most_tiles, index, inside, RULE[0], RULE[1])
    return tl.where(inside, tl.maximum((tiles + RULE[2] - 1) // RULE[2], 1), 0)


@triton.jit(do_not_specialize=["num_tokens", "num_reqs", "ctas", "waves_of_requests", "max_items"])
def plan_kernel(
    query_start_loc, ordered, seq_lens, schedule, chunks, num_tokens, num_reqs, ctas, waves_of_requests, max_items,
    TOKENS: tl.constexpr, LONGEST: tl.constexpr, WINDOW: tl.constexpr, UNIT: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    """Write the schedule; one program, REQUESTS requests at a time. Chunks and shares are whole units of UNIT tiles."""
    PARTS: tl.constexpr = 2048 // REQUESTS if REQUESTS < 2048 else 1
    order_offsets(query_start_loc, ordered, num_reqs + 1, num_tokens, REQUESTS)
    query_start_loc = ordered
    padding_row = tl.load(query_start_loc + num_reqs)
    leading = tl.load(query_start_loc)
    # For the reduction: first row of padding, past every row if another kernel writes it, and rows before requests.
    tl.store(schedule + 2, 0x7FFFFFFF if LONGEST else padding_row)
    tl.store(schedule + 3, 0 if LONGEST else leading)
    if chunks is not None:
        num_reqs = cut_requests(query_start_loc, seq_lens, chunks, num_reqs, TOKENS, LONGEST, REQUESTS)
    most_tiles = MOST_UNITS // tl.maximum(num_reqs, 1)
    source = (query_start_loc, seq_lens, chunks, most_tiles)
    RULE: tl.constexpr = (TOKENS, WINDOW, UNIT)
    chunk, total = choose_chunk(
        request_units, source, num_reqs, ctas, waves_of_requests, RULE, ITEM_COST / UNIT, 0, REQUESTS
    )
    even_shares = chunk == 0
    chunk = tl.maximum(chunk, 1)
    total = tl.maximum(total, 1)
    shares = tl.minimum(ctas, total)
    num_chunks = count_chunks(request_units, source, num_reqs, chunk, RULE, REQUESTS)
    cuts = (ctas, num_chunks, total, shares, even_shares)
    line = 0
    num_items = 0
    num_slots = 0
    num_splits = 0
    for start in range(0, num_reqs, REQUESTS):
        index = start + tl.arange(0, REQUESTS)
        inside = index < num_reqs
        request, first_row, rows, seq_len, first_tile, tiles = request_tiles(
            query_start_loc, seq_lens, chunks, most_tiles, index, inside, TOKENS, WINDOW
        )
        is_empty = inside & (rows <= 0)
        pads_before = tl.cumsum(is_empty.to(tl.int32), 0) - is_empty.to(tl.int32)
        first_row = tl.where(is_empty, padding_row + pads_before, first_row)
        padding_row += tl.sum(is_empty.to(tl.int32), 0)
        # A request without rows is written without rows where there is no padding left for it.
        if chunks is None:
            rows = tl.where(is_empty, (first_row < num_tokens + leading).to(tl.int32), rows)
            first_row = tl.where(first_row < num_tokens, first_row, first_row - num_tokens)
        else:
            rows = tl.maximum(rows, 0)
        seq_len = tl.where(is_empty, 0, seq_len)
        many_rows = rows > TOKENS
        base_tile = tl.where(many_rows, 0, first_tile)
        all_tiles = tl.where(many_rows, tl.minimum((seq_len + TILE_TOKENS - 1) // TILE_TOKENS, most_tiles), tiles)

        units = tl.where(inside, tl.maximum((tiles + UNIT - 1) // UNIT, 1), 0)
        on_line = behind(units, line)
        first_share, parts, is_split = cut(units, on_line, inside, chunk, total, shares, even_shares)
        item = behind(parts, num_items)
        slot = behind(parts * is_split, num_slots)
        split = behind(is_split, num_splits)
        for first_part in range(0, tl.max(parts, 0), PARTS):
            part = first_part + tl.arange(0, PARTS)[None, :]
            begin, end, number, following = items_of(part, parts, units, on_line, first_share, item, index, cuts)
            last = tl.where(part + 1 == parts[:, None], all_tiles[:, None], tl.minimum(end * UNIT, all_tiles[:, None]))
            record = schedule + (1 + number) * FIELDS
            mask = (part < parts[:, None]) & (number < max_items)
            tl.store(record, tl.where(is_empty, -1, request)[:, None], mask=mask)
            tl.store(record + 1, first_row[:, None], mask=mask)
            tl.store(record + 2, rows[:, None], mask=mask)
            tl.store(record + 3, seq_len[:, None], mask=mask)
            tl.store(record + 4, base_tile[:, None] + tl.minimum(begin * UNIT, all_tiles[:, None]), mask=mask)
            tl.store(record + 5, base_tile[:, None] + last, mask=mask)
            tl.store(record + 6, tl.where(is_split[:, None] > 0, slot[:, None] + part, -1), mask=mask)
            tl.store(record + 7, following, mask=mask)
        record = schedule + (1 + max_items + split) * FIELDS
        tl.store(record, first_row, mask=is_split > 0)
        tl.store(record + 1, slot, mask=is_split > 0)
        tl.store(record + 2, parts, mask=is_split > 0)
        tl.store(record + 3, rows, mask=is_split > 0)
        line += tl.sum(units, 0)
        num_items += tl.sum(parts, 0)
        num_slots += tl.sum(parts * is_split, 0)
        num_splits += tl.sum(is_split, 0)
    active = tl.where(even_shares, shares, tl.minimum(ctas, num_chunks))
    tl.store(schedule, tl.where(num_items > 0, active, 0))
    tl.store(schedule + 1, num_splits)
