"""Device code of the latent decode path's schedule: one small kernel turns a step's lengths into work items.

The schedule is int32 `[1 + max_items + num_reqs, 8]`:

- row 0: number of CTAs with work, number of split requests;
- rows 1 to max_items, an item each: request, first tile, end tile, slot of its partial result (-1: it writes the result
  itself), next item of the same CTA (-1: none), the request's first token, its rows, its length; CTA c starts at item
  c, which has no rows if there is nothing for it to do;
- the last rows, a split request each: request, first slot, number of slots, the request's first token, its rows.

Such a schedule is FULL: who reads a record has to load nothing else, and need not know how many there are.
`vattn.kernels.hopper.mla.sparse_slots` makes others, with neither tokens, rows and lengths nor records of CTAs without
work.

Two ways of sharing the work are estimated, and the cheaper one is taken. Even chunks: every request is cut into equal
chunks, of which CTAs take turns. Even shares: the requests are laid end to end and the line is cut into as many equal
shares as there are CTAs. A request of more than SPLIT_QUERY rows is one item of length one, since its partial results
would find no room: whoever gets it attends all of its keys. With LONGEST, unless 0, requests of more rows, or of fewer
than SHORTEST, have no item: others attend them. With `owners` requests are parts of others
(`vattn.kernels.hopper.mla.split_requests`), and records name these, by which block tables are found.
"""

from __future__ import annotations

import triton
import triton.language as tl

FIELDS = tl.constexpr(8)
WAVES = tl.constexpr(4)
"""Numbers of turns that are tried."""

# In tiles. Opening and closing an item costs about as much as one tile of 64 rows, and the CTAs that still run when
# others have ended get about twice their share of the memory bandwidth.
ITEM_COST = tl.constexpr(1.0)
TAIL_SPEED = tl.constexpr(2.0)
SHARES_COST = tl.constexpr(3.0)
"""Items' worth of time that even shares cost, for most CTAs then write partial results."""


@triton.jit
def request_tiles(
    query_start_loc, seq_lens, request, inside, SPLIT_QUERY: tl.constexpr, TILE: tl.constexpr, LONGEST: tl.constexpr,
    SHORTEST: tl.constexpr,
):  # fmt: skip
    """Return the tiles that requests count as, one at least; 0 outside, and for those without an item."""
    first = tl.load(query_start_loc + request, mask=inside, other=0)
    rows = tl.load(query_start_loc + request + 1, mask=inside, other=0) - first
    keys = tl.maximum(tl.load(seq_lens + request, mask=inside, other=0), 0)
    tiles = tl.where((rows > 0) & (rows <= SPLIT_QUERY), (keys + TILE - 1) // TILE, 0)
    if LONGEST:
        inside = inside & (rows <= LONGEST) & (rows >= SHORTEST)
    return tl.where(inside, tl.maximum(tiles, 1), 0)


@triton.jit
def choose_chunk(
    query_start_loc, seq_lens, num_reqs, ctas, SPLIT_QUERY: tl.constexpr, TILE: tl.constexpr, REQUESTS: tl.constexpr,
    LONGEST: tl.constexpr, SHORTEST: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Return how many tiles an item may have, 0 for even shares, and the tiles of all requests."""
    longest = tl.full([], 1, tl.int32)
    total = tl.zeros([], tl.int32)
    busy = tl.zeros([], tl.int32)
    for start in range(0, num_reqs, REQUESTS):
        request = start + tl.arange(0, REQUESTS)
        tiles = request_tiles(
            query_start_loc, seq_lens, request, request < num_reqs, SPLIT_QUERY, TILE, LONGEST, SHORTEST
        )
        longest = tl.maximum(longest, tl.max(tiles, 0))
        total += tl.sum(tiles, 0)
        busy += tl.sum((tiles > 0).to(tl.int32), 0)
    waves = tl.maximum((busy + ctas - 1) // ctas, 1) + tl.arange(0, WAVES)
    low = tl.full([WAVES], 1, tl.int32)
    high = low * longest
    while tl.max(high - low, 0) > 0:
        middle = (low + high) // 2
        items = tl.zeros([WAVES], tl.int32)
        for start in range(0, num_reqs, REQUESTS):
            request = start + tl.arange(0, REQUESTS)
            tiles = request_tiles(
                query_start_loc, seq_lens, request, request < num_reqs, SPLIT_QUERY, TILE, LONGEST, SHORTEST
            )
            items += tl.sum((tiles[:, None] + middle[None, :] - 1) // middle[None, :], 0)
        fits = items <= waves * ctas
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, tl.minimum(middle + 1, high))
    # Partial results of fewer tiles than LEAST cost more to merge than they save.
    low = tl.maximum(low, tl.minimum(longest, LEAST))
    ideal = total.to(tl.float32) / ctas
    excess = tl.maximum(waves.to(tl.float32) * low.to(tl.float32) - ideal, 0.0)
    is_split = (low < longest).to(tl.float32)
    chunks = ideal + excess / TAIL_SPEED + ITEM_COST * (waves.to(tl.float32) + is_split)
    shares = ideal + ITEM_COST * (SHARES_COST + busy.to(tl.float32) / ctas)
    shares = tl.where(ideal < LEAST, float("inf"), shares)
    best = tl.argmin(chunks, 0)
    chunk = tl.sum(tl.where(tl.arange(0, WAVES) == best, low, 0), 0)
    return tl.where(shares < tl.min(chunks, 0), 0, chunk), total


@triton.jit
def share_start(share, total, shares):
    """Return the first tile of a share of the line."""
    return (share.to(tl.int64) * total // shares).to(tl.int32)


@triton.jit
def share_of(tile, total, shares):
    """Return the share that a tile of the line belongs to: the last that starts at or before it."""
    return (((tile.to(tl.int64) + 1) * shares - 1) // total).to(tl.int32)


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
    chunk, total = choose_chunk(
        query_start_loc, seq_lens, num_reqs, ctas, SPLIT_QUERY, TILE, REQUESTS, LONGEST, SHORTEST, LEAST
    )
    even_shares = chunk == 0
    chunk = tl.maximum(chunk, 1)
    active = tl.minimum(ctas, total)
    # Without a tile on the line nothing is shared, but divided all the same.
    total, shares = tl.maximum(total, 1), tl.maximum(active, 1)
    num_chunks = tl.zeros([], tl.int32)
    for start in range(0, num_reqs, REQUESTS):
        request = start + tl.arange(0, REQUESTS)
        tiles = request_tiles(
            query_start_loc, seq_lens, request, request < num_reqs, SPLIT_QUERY, TILE, LONGEST, SHORTEST
        )
        num_chunks += tl.sum((tiles + chunk - 1) // chunk, 0)
    line = tl.zeros([], tl.int32)
    num_items = tl.zeros([], tl.int32)
    num_slots = tl.zeros([], tl.int32)
    num_splits = tl.zeros([], tl.int32)
    num_busy = tl.zeros([], tl.int32)
    for start in range(0, num_reqs, REQUESTS):
        request = start + tl.arange(0, REQUESTS)
        tiles = request_tiles(
            query_start_loc, seq_lens, request, request < num_reqs, SPLIT_QUERY, TILE, LONGEST, SHORTEST
        )
        on_line = line + tl.cumsum(tiles, 0) - tiles
        first_share = share_of(on_line, total, shares)
        parts_of_line = share_of(on_line + tiles - 1, total, shares) - first_share + 1
        parts = tl.where(even_shares, parts_of_line, (tiles + chunk - 1) // chunk)
        parts = tl.where((request < num_reqs) & (tiles > 0), parts, 0)
        busy = (tiles > 0).to(tl.int32)
        rank = num_busy + tl.cumsum(busy, 0) - busy
        is_split = (parts > 1).to(tl.int32)
        item = num_items + tl.cumsum(parts, 0) - parts
        slot = num_slots + tl.cumsum(parts * is_split, 0) - parts * is_split
        split = num_splits + tl.cumsum(is_split, 0) - is_split
        owner = request
        if owners is not None:
            owner = tl.load(owners + request, mask=request < num_reqs, other=0)
        known = request < num_reqs
        token = tl.load(query_start_loc + request, mask=known, other=0)
        rows = tl.load(query_start_loc + request + 1, mask=known, other=0) - token
        seq_len = tl.maximum(tl.load(seq_lens + request, mask=known, other=0), 0)
        for first_part in range(0, tl.max(parts, 0), PARTS):
            part = first_part + tl.arange(0, PARTS)[None, :]
            count, length, place = tl.maximum(parts, 1)[:, None], tiles[:, None], on_line[:, None]
            share = first_share[:, None] + part
            share_begin = share_start(share, total, shares)
            share_end = share_start(share + 1, total, shares)
            begin = tl.where(even_shares, tl.maximum(share_begin - place, 0), length * part // count)
            end = tl.where(even_shares, tl.minimum(share_end - place, length), length * (part + 1) // count)
            # In even shares the item that opens a share has its number, the others follow by request, of those that
            # have items.
            of_line = tl.where(place + begin == share_begin, share, shares + rank[:, None])
            next_of_line = tl.where(place + end < share_end, shares + rank[:, None] + 1, -1)
            index = tl.where(even_shares, of_line, item[:, None] + part)
            next_of_turn = tl.where(index + ctas < num_chunks, index + ctas, -1)
            record = schedule + (1 + index) * FIELDS
            mask = (part < parts[:, None]) & (index < max_items)
            tl.store(record, tl.zeros_like(index) + owner[:, None], mask=mask)
            tl.store(record + 1, begin, mask=mask)
            tl.store(record + 2, end, mask=mask)
            tl.store(record + 3, tl.where(is_split[:, None] > 0, slot[:, None] + part, -1), mask=mask)
            tl.store(record + 4, tl.where(even_shares, next_of_line, next_of_turn), mask=mask)
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
    for first_cta in range(0, ctas, 128):
        idle = first_cta + tl.arange(0, 128)
        mask = (idle >= busy_ctas) & (idle < ctas)
        for column in tl.static_range(FIELDS):
            # Request 0, from its first tile on, and of no rows; there is no slot and no next item.
            nothing = tl.zeros_like(idle) - (1 if (column == 3) | (column == 4) else 0)
            tl.store(schedule + (1 + idle) * FIELDS + column, nothing, mask=mask)
