"""Decode context parallelism of few rows: the queries of all heads, and the results of a rank's own heads.

Both write to the inboxes of the other ranks and wait for theirs, as `sum_ranks` does and explains: a row here is one
head of one token. All-gather and all-to-all of NCCL take several times as long for so few bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vattn.distributed.inbox import Inbox
from vattn.kernels.triton.common.launching import launch
from vattn.kernels.triton.sum_ranks import LOOK_AFTER, LOOKS, _await, _values

WARPS = 1


@triton.jit
def _inbox_of(inboxes, rank):
    return tl.multiple_of(tl.load(inboxes + rank).to(tl.pointer_type(tl.int64)), 16)


@triton.jit(do_not_specialize=["looks"])
def gather_heads_kernel(
    part, gathered, inboxes, counts, flag, looks,
    PAIRS: tl.constexpr, HEADS: tl.constexpr, MOST_ROWS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    BLOCK: tl.constexpr, LOOK_AFTER: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Write `[T, RANKS * HEADS, ...]` of the `[T, HEADS, ...]` of all ranks, int32 pairs of 16 bits. Grid: T * HEADS.

    Args:
        inboxes, counts, flag, looks: see `sum_ranks_kernel`.
    """
    row = tl.program_id(0)
    pair = tl.arange(0, BLOCK)
    inside = pair < PAIRS
    token = row // HEADS
    head = row % HEADS
    count = tl.load(counts + row) + 1
    own = tl.load(part + row.to(tl.int64) * PAIRS + pair, mask=inside, other=0)
    packets = (count.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    half = (count & 1) * (RANKS * MOST_ROWS * PAIRS)
    place = row * PAIRS + pair
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            tl.store(_inbox_of(inboxes, rank) + half + RANK * MOST_ROWS * PAIRS + place, packets, mask=inside)
    inbox = _inbox_of(inboxes, RANK)
    for rank in tl.static_range(RANKS):
        values = own
        if rank != RANK:
            places = inbox + half + rank * MOST_ROWS * PAIRS + place
            values = _await(places, inside, count, flag, looks, LOOK_AFTER, 32 * WARPS).to(tl.int32)
        target = (token.to(tl.int64) * RANKS + rank) * HEADS + head
        tl.store(gathered + target * PAIRS + pair, values, mask=inside)
    tl.store(counts + row, count)


@triton.jit
def _weight(lse, total):
    """Return a part's share of the denominator, 0 for a part without keys."""
    base = tl.where(total == float("-inf"), 0.0, total)
    return tl.where(lse == float("-inf"), 0.0, tl.exp(lse - base))


@triton.jit(do_not_specialize=["looks"])
def combine_heads_kernel(
    output, lse, sinks, combined, inboxes, counts, flag, looks,
    PAIRS: tl.constexpr, HEADS: tl.constexpr, MOST_ROWS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    BLOCK: tl.constexpr, DTYPE: tl.constexpr, SINKS: tl.constexpr, LOOK_AFTER: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Combine the parts of a rank's own heads, as `vattn.distributed.combine.combine_parts`. Grid: T * HEADS.

    Args:
        output, lse: int32 pairs `[T, RANKS * HEADS, PAIRS]` and fp32 `[T, RANKS * HEADS]`, this rank's parts.
        sinks: `[RANKS * HEADS]`, with SINKS.
        combined: `[T, HEADS, 2 * PAIRS]` of DTYPE.
        inboxes, counts, flag, looks: see `sum_ranks_kernel`; a row has a packet more, the log-sum-exp.
    """
    row = tl.program_id(0)
    pair = tl.arange(0, BLOCK)
    inside = pair < PAIRS
    token = row // HEADS
    head = row % HEADS
    count = tl.load(counts + row) + 1
    stamp = count.to(tl.int64) << 32
    half = (count & 1) * (RANKS * MOST_ROWS * (PAIRS + 1))
    # The last packet of a row is its log-sum-exp.
    place = row * (PAIRS + 1) + pair
    sent = pair <= PAIRS
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            source = (token.to(tl.int64) * RANKS + rank) * HEADS + head
            values = tl.load(output + source * PAIRS + pair, mask=inside, other=0)
            values = tl.where(inside, values, tl.load(lse + source).to(tl.int32, bitcast=True))
            packets = stamp | (values.to(tl.int64) & 0xFFFFFFFF)
            target = _inbox_of(inboxes, rank) + half + RANK * MOST_ROWS * (PAIRS + 1) + place
            tl.store(target, packets, mask=sent)
    own = (token.to(tl.int64) * RANKS + RANK) * HEADS + head
    inbox = _inbox_of(inboxes, RANK)
    # Twice over what has arrived: the weights need the log-sum-exps of all.
    peak = tl.load(lse + own)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            places = inbox + half + rank * MOST_ROWS * (PAIRS + 1) + place
            packets = _await(places, sent, count, flag, looks, LOOK_AFTER, 32 * WARPS).to(tl.int32)
            peak = tl.maximum(peak, _last(packets, pair, PAIRS))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    denominator = 0.0
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            part_lse = tl.load(lse + own)
        else:
            place_of_lse = inbox + half + rank * MOST_ROWS * (PAIRS + 1) + row * (PAIRS + 1) + PAIRS
            part_lse = tl.load(place_of_lse, volatile=True).to(tl.int32).to(tl.float32, bitcast=True)
        denominator += tl.exp(part_lse - base)
    total = base + tl.log(denominator)
    if SINKS:
        sink = tl.load(sinks + RANK * HEADS + head).to(tl.float32)
        top = tl.maximum(total, sink)
        # A sink of -inf beside no keys: nothing is left.
        safe = tl.where(top == float("-inf"), 0.0, top)
        total = safe + tl.log(tl.exp(total - safe) + tl.exp(sink - safe))
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            part_lse = tl.load(lse + own)
            values = tl.load(output + own * PAIRS + pair, mask=inside, other=0)
        else:
            places = inbox + half + rank * MOST_ROWS * (PAIRS + 1) + row * (PAIRS + 1)
            part_lse = tl.load(places + PAIRS, volatile=True).to(tl.int32).to(tl.float32, bitcast=True)
            values = tl.load(places + pair, mask=inside, other=0, volatile=True).to(tl.int32)
        weight = _weight(part_lse, total)
        # Parts without keys may hold anything.
        part_low, part_high = _values(tl.where(part_lse == float("-inf"), 0, values), DTYPE)
        low += part_low * weight
        high += part_high * weight
    tl.store(counts + row, count)
    target = combined + row.to(tl.int64) * (2 * PAIRS) + 2 * pair
    tl.store(target, low.to(DTYPE), mask=inside)
    tl.store(target + 1, high.to(DTYPE), mask=inside)


@triton.jit
def _last(packets, pair, PAIRS: tl.constexpr):
    """Return the log-sum-exp in a row of packets."""
    return tl.max(tl.where(pair == PAIRS, packets.to(tl.float32, bitcast=True), float("-inf")))


def launch_gather_heads(inbox: Inbox, part: Tensor, gathered: Tensor, looks: int = LOOKS) -> None:
    """Gather heads; see the kernel. An inbox's rows are `[tokens, heads of a rank]`, of one head's width.

    Args:
        part: `[T, heads of a rank, D]` of 16 bits, contiguous.
        gathered: `[T, all heads, D]`.
    """
    tokens, heads, size = part.shape
    launch(
        gather_heads_kernel,
        (tokens * heads,),
        {"part": part.view(torch.int32), "gathered": gathered.view(torch.int32), "inboxes": inbox.addresses,
         "counts": inbox.counts, "flag": inbox.flag, "looks": looks},
        {"PAIRS": size // 2, "HEADS": heads, "BLOCK": triton.next_power_of_2(size // 2), **_constants(inbox)},
    )  # fmt: skip


def launch_combine_heads(
    inbox: Inbox, output: Tensor, lse: Tensor, combined: Tensor, sinks: Tensor | None = None, looks: int = LOOKS
) -> None:
    """Combine the parts of a rank's heads; see the kernel. The inbox is as wide as a value row and two more.

    Args:
        output, lse: `[T, all heads, V]` of 16 bits and fp32 `[T, all heads]`, contiguous.
        combined: `[T, heads of a rank, V]`, contiguous.
        sinks: `[all heads]`.
    """
    tokens, heads, size = combined.shape
    launch(
        combine_heads_kernel,
        (tokens * heads,),
        {"output": output.view(torch.int32), "lse": lse, "sinks": sinks, "combined": combined,
         "inboxes": inbox.addresses, "counts": inbox.counts, "flag": inbox.flag, "looks": looks},
        {"PAIRS": size // 2, "HEADS": heads, "BLOCK": triton.next_power_of_2(size // 2 + 1),
         "DTYPE": tl.bfloat16 if output.dtype is torch.bfloat16 else tl.float16, "SINKS": sinks is not None,
         **_constants(inbox)},
    )  # fmt: skip


def _constants(inbox: Inbox) -> dict[str, int]:
    return {"MOST_ROWS": inbox.most_rows, "RANK": inbox.rank, "RANKS": inbox.world_size, "LOOK_AFTER": LOOK_AFTER,
            "WARPS": WARPS, "num_warps": WARPS}  # fmt: skip
