"""Device code of the latent decode path's schedule: one small kernel makes work items of a step's lengths.

The schedule is int32 `[1 + max_items + num_reqs, FIELDS]`:

- row 0: number of CTAs with work, number of split requests, first row after the last request, rows before the first;
- rows 1 to max_items, an item each: request, first tile, end tile, slot of its partial result (-1: it writes the result
  itself), next item of the same CTA (-1: none), the request's first token, its rows, its length; CTA c starts at item
  c, which has no rows if there is nothing for it to do;
- the last rows, a split request each: request, first slot, number of slots, the request's first token, its rows.

Such a schedule is FULL: the reader of a record loads nothing else, and need not know how many there are.
`vattn.kernels.hopper.mla.sparse_launch` makes others, with neither tokens, rows and lengths nor records of CTAs without
work.

`vattn.kernels.hopper.schedule` says how the work is shared. A request of more than SPLIT_QUERY rows is one item of
length one, since its partial results would find no room: the CTA that has it attends all of its keys. With LONGEST,
unless 0, requests of more rows, or of fewer than SHORTEST, have no item: other kernels attend them. With `owners`
requests are parts of others (`cut_requests`), and records name these, by which block tables
are found. Offsets and lengths are those of `bounded_step`; how far block tables go is not known here.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from vattn.kernels.hopper.schedule import FIELDS, MOST_UNITS, behind, choose_chunk, count_chunks, cut, items_of

ITEM_COST = tl.constexpr(1.0)
"""Tiles of 64 rows that opening and closing an item costs."""


@triton.jit
def request_tiles(source, request, inside, RULE: tl.constexpr):
    """Return the tiles that requests count as, one at least; 0 outside, and for those without an item.

    RULE: SPLIT_QUERY, TILE, LONGEST, SHORTEST.
    """
    query_start_loc, seq_lens, most_tiles = source
    first = tl.load(query_start_loc + request, mask=inside, other=0)
    rows = tl.load(query_start_loc + request + 1, mask=inside, other=0) - first
    keys = tl.maximum(tl.load(seq_lens + request, mask=inside, other=0), 0)
    tiles = tl.where((rows > 0) & (rows <= RULE[0]), tl.minimum((keys + RULE[1] - 1) // RULE[1], most_tiles), 0)
    if RULE[2]:
        inside = inside & (rows <= RULE[2]) & (rows >= RULE[3])
    return tl.where(inside, tl.maximum(tiles, 1), 0)


@triton.jit(
    do_not_specialize=["num_reqs", "ctas", "max_items"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "owners"],
)
def mla_schedule_kernel(
    query_start_loc, seq_lens, owners, schedule, num_reqs, ctas, max_items, SPLIT_QUERY: tl.constexpr,
    TILE: tl.constexpr, REQUESTS: tl.constexpr, PARTS: tl.constexpr, LONGEST: tl.constexpr, SHORTEST: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """Write the schedule; one program, REQUESTS requests and PARTS items of each at a time."""
    source = (query_start_loc, seq_lens, MOST_UNITS // tl.maximum(num_reqs, 1))
    RULE: tl.constexpr = (SPLIT_QUERY, TILE, LONGEST, SHORTEST)
    chunk, total = choose_chunk(request_tiles, source, num_reqs, ctas, None, RULE, ITEM_COST, LEAST, REQUESTS)
    even_shares = chunk == 0
    chunk = tl.maximum(chunk, 1)
    active = tl.minimum(ctas, total)
    # Without a tile on the line nothing is shared, but divided all the same.
    total, shares = tl.maximum(total, 1), tl.maximum(active, 1)
    num_chunks = count_chunks(request_tiles, source, num_reqs, chunk, RULE, REQUESTS)
    cuts = (ctas, num_chunks, total, shares, even_shares)
    line = tl.zeros([], tl.int32)
    num_items = tl.zeros([], tl.int32)
    num_slots = tl.zeros([], tl.int32)
    num_splits = tl.zeros([], tl.int32)
    num_busy = tl.zeros([], tl.int32)
    for start in range(0, num_reqs, REQUESTS):
        request = start + tl.arange(0, REQUESTS)
        tiles = request_tiles(source, request, request < num_reqs, RULE)
        on_line = behind(tiles, line)
        first_share, parts, is_split = cut(tiles, on_line, tiles > 0, chunk, total, shares, even_shares)
        busy = (tiles > 0).to(tl.int32)
        rank = behind(busy, num_busy)
        item = behind(parts, num_items)
        slot = behind(parts * is_split, num_slots)
        split = behind(is_split, num_splits)
        owner = request
        if owners is not None:
            owner = tl.load(owners + request, mask=request < num_reqs, other=0)
        known = request < num_reqs
        token = tl.load(query_start_loc + request, mask=known, other=0)
        rows = tl.load(query_start_loc + request + 1, mask=known, other=0) - token
        seq_len = tl.maximum(tl.load(seq_lens + request, mask=known, other=0), 0)
        for first_part in range(0, tl.max(parts, 0), PARTS):
            part = first_part + tl.arange(0, PARTS)[None, :]
            begin, end, index, following = items_of(part, parts, tiles, on_line, first_share, item, rank, cuts)
            record = schedule + (1 + index) * FIELDS
            mask = (part < parts[:, None]) & (index < max_items)
            tl.store(record, tl.zeros_like(index) + owner[:, None], mask=mask)
            tl.store(record + 1, begin, mask=mask)
            tl.store(record + 2, end, mask=mask)
            tl.store(record + 3, tl.where(is_split[:, None] > 0, slot[:, None] + part, -1), mask=mask)
            tl.store(record + 4, following, mask=mask)
            tl.store(record + 5, tl.zeros_like(index) + token[:, None], mask=mask)
            tl.store(record + 6, tl.zeros_like(index) + rows[:, None], mask=mask)
            tl.store(record + 7, tl.zeros_like(index) + seq_len[:, None], mask=mask)
        record = schedule + (1 + max_items + split) * FIELDS
        tl.store(record, owner, mask=is_split > 0)
        tl.store(record + 1, slot, mask=is_split > 0)
        tl.store(record + 2, parts, mask=is_split > 0)
        tl.store(record + 3, token, mask=is_split > 0)
        tl.store(record + 4, rows, mask=is_split > 0)
        line += tl.sum(tiles, 0)
        num_items += tl.sum(parts, 0)
        num_slots += tl.sum(parts * is_split, 0)
        num_splits += tl.sum(is_split, 0)
        num_busy += tl.sum(busy, 0)
    busy_ctas = tl.where(even_shares, active, tl.minimum(ctas, num_chunks))
    tl.store(schedule, busy_ctas)
    tl.store(schedule + 1, num_splits)
    tl.store(schedule + 2, tl.load(query_start_loc + num_reqs))
    tl.store(schedule + 3, tl.load(query_start_loc))
    for first_cta in range(0, ctas, 128):
        idle = first_cta + tl.arange(0, 128)
        mask = (idle >= busy_ctas) & (idle < ctas)
        for column in tl.static_range(FIELDS):
            # Request 0, from its first tile on, and of no rows; there is no slot and no next item.
            nothing = tl.zeros_like(idle) - (1 if (column == 3) | (column == 4) else 0)
            tl.store(schedule + (1 + idle) * FIELDS + column, nothing, mask=mask)


class Parts(NamedTuple):
    """Requests that others were split into, int32; a request without rows has no keys either."""

    starts: Tensor
    """`[P + 1]`, the first row of each, and where the last ends."""
    lengths: Tensor
    """`[P]`, keys up to the last row of each."""
    owners: Tensor
    """`[P]`, the request that each is of."""


@triton.jit(
    do_not_specialize=["num_parts", "num_reqs"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "starts", "lengths", "owners"],
)
def mla_split_kernel(query_start_loc, seq_lens, starts, lengths, owners, num_parts, num_reqs, MOST: tl.constexpr):
    """Write one part of at most MOST rows. Grid: parts.

    A request has room for one part more than it may fill.
    """
    part = tl.program_id(0)
    request = tl.zeros([], tl.int32)
    end_request = request + num_reqs + 1
    while end_request - request > 1:
        middle = (request + end_request) // 2
        begun = tl.load(query_start_loc + middle) // MOST + middle <= part
        request = tl.where(begun, middle, request)
        end_request = tl.where(begun, end_request, middle)
    is_real = request < num_reqs
    start = tl.load(query_start_loc + request)
    end = tl.load(query_start_loc + request + 1, mask=is_real, other=0)
    end = tl.where(is_real, end, start)
    # Rows before the first request are of no part.
    first = tl.maximum(tl.minimum(start + (part - start // MOST - request) * MOST, end), start)
    behind = tl.where(part < start // MOST + request, start, tl.minimum(first + MOST, end))
    length = tl.load(seq_lens + request, mask=is_real, other=0) - (end - behind)
    tl.store(starts + part, first)
    tl.store(lengths + part, tl.where(behind > first, tl.maximum(length, 0), 0))
    tl.store(owners + part, tl.minimum(request, num_reqs - 1))
    if part == num_parts - 1:
        tl.store(starts + num_parts, tl.load(query_start_loc + num_reqs))


def cut_requests(query_start_loc: Tensor, seq_lens: Tensor, parts: Parts, most: int) -> None:
    """Write parts of at most `most` rows each; every row sees the same keys as before.

    Row i of a request sits at `seq_len - query_len + i`, so the rows of a part form a request that ends with its last
    row. There must be room for one part more per request than its rows fill.
    """
    count = parts.lengths.shape[0]
    mla_split_kernel[(count,)](
        query_start_loc, seq_lens, *parts, count, seq_lens.shape[0], MOST=most, num_warps=1, enable_fp_fusion=True
    )
