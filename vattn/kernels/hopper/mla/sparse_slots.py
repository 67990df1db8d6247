"""What sparse decode on Hopper reads: the slots of every token's listed keys, and a schedule of equal parts of them."""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.kernels.hopper.schedule import FIELDS
from vattn.kernels.triton.mla.kernels import find_request


@triton.jit(
    do_not_specialize=[
        "num_tokens", "num_reqs", "num_blocks", "table_stride", "table_width", "topk_stride", "topk", "ctas",
    ],
    do_not_specialize_on_alignment=["topk_indices", "query_start_loc", "seq_lens", "block_table"],
)  # fmt: skip
def mla_slots_kernel(
    topk_indices, query_start_loc, seq_lens, block_table, slots, starts, lengths, schedule, num_tokens, num_reqs,
    num_blocks, table_stride, table_width, topk_stride, topk, ctas,
    SPLITS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write what one token sees, as if it were a request of one token. Grid: tokens.

    `slots` is `[T, topk]`, -1 for what is not seen; `lengths` `[T]` are their ends, `starts` `[T + 1]` count tokens.
    The schedule is that of `vattn.kernels.hopper.mla.schedule`, of SPLITS items a token; PARTS is a power of two.
    """
    token = tl.program_id(0)
    request = find_request(query_start_loc, num_reqs, token, 1, 0)
    is_real = request < num_reqs
    end = tl.load(query_start_loc + request + 1, mask=is_real, other=0)
    seq_len = tl.maximum(tl.load(seq_lens + request, mask=is_real, other=0), 0)
    limit = tl.where(is_real, tl.minimum(seq_len - (end - 1 - token), table_width * BLOCK_SIZE), 0)
    table = block_table + request.to(tl.int64) * table_stride
    used = tl.zeros([], tl.int32)
    for first in range(0, topk, BLOCK):
        place = first + tl.arange(0, BLOCK)
        position = tl.load(topk_indices + token.to(tl.int64) * topk_stride + place, mask=place < topk, other=-1)
        exists = (position >= 0) & (position < limit)
        position = tl.where(exists, position, 0)
        block = tl.load(table + position // BLOCK_SIZE, mask=exists, other=-1)
        exists = exists & (block >= 0) & (block < num_blocks)
        slot = tl.where(exists, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(slots + token.to(tl.int64) * topk + place, slot, mask=place < topk)
        used = tl.maximum(used, tl.max(tl.where(exists, place + 1, 0), 0))
    tl.store(lengths + token, used)
    tl.store(starts + token, token)
    part = tl.arange(0, PARTS)
    tiles = (used + TILE - 1) // TILE
    chunk = (tiles + SPLITS - 1) // SPLITS
    items = num_tokens * SPLITS
    item = token * SPLITS + part
    record = schedule + (1 + item) * FIELDS
    inside = part < SPLITS
    tl.store(record, tl.zeros_like(part) + token, mask=inside)
    tl.store(record + 1, tl.minimum(part * chunk, tiles), mask=inside)
    tl.store(record + 2, tl.minimum((part + 1) * chunk, tiles), mask=inside)
    tl.store(record + 3, tl.where(SPLITS > 1, item, -1), mask=inside)
    tl.store(record + 4, tl.where(item + ctas < items, item + ctas, -1), mask=inside)
    split = schedule + (1 + items + token) * FIELDS
    tl.store(split, token)
    tl.store(split + 1, token * SPLITS)
    tl.store(split + 2, SPLITS)
    if token == 0:
        tl.store(starts + num_tokens, num_tokens)
        tl.store(schedule, tl.minimum(ctas, items))
        tl.store(schedule + 1, tl.where(SPLITS > 1, num_tokens, 0))
