"""Sum a few rows over ranks that can write to each other's memory, and add a residual and normalise on the way.

Each rank has an inbox, `[2, ranks, rows, pairs]` int64. A packet holds two 16-bit values, and above them how often its
row was summed: it says of itself that it has arrived, so that nothing else is signalled, and no fence is needed. Every
rank writes its rows to the inboxes of all others, waits for theirs, and adds in the order of the ranks: results are
equal on all ranks, bit by bit.

Sums of a row take the two halves of the inbox in turn. A rank writes its part of sum `n + 2` only after it has seen the
others' parts of sum `n + 1`, which they write after they have read all of sum `n`; so nothing is overwritten unread.
Launches of one inbox must be in one order on each rank, as those of any collective.

A rank that waits looks at a flag in the host's memory from time to time, and stops waiting if it is set: its results
are anything then. After a number of looks it ends the kernel with an error instead.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _symmetric_memory as symmetric

from vattn.kernels.triton.common.codec import cast
from vattn.kernels.triton.common.launching import launch

FLAGS = 1024
"""Entries of `flag`, which are written together: every thread of a kernel reads its own."""


class Inbox:
    """What a rank needs to sum rows of 16-bit values with the other ranks of a group, on one host.

    Args:
        group: of GPUs that can write to each other's memory; every rank makes an inbox at the same time.
        device: of this rank.
        width: values of a row, an even number.
        most_rows: rows of the largest sum.

    Attributes:
        rank, world_size: of the group.
        addresses: int64 `[world_size]`, of the inboxes of all ranks.
        counts: int32 `[most_rows]`, how often each row was summed.
        flag: int32 `[FLAGS]` in the host's memory; ones end all waiting.

    Raises:
        RuntimeError: torch cannot share the memory.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, width: int, most_rows: int) -> None:
        self.rank, self.world_size = group.rank(), group.size()
        self.width, self.most_rows = width, most_rows
        shape = 2, self.world_size, most_rows, width // 2
        self._memory = symmetric.empty(shape, dtype=torch.int64, device=device)
        # Counts begin at one. Nothing is written by others before all have met.
        self._memory.zero_()
        self.counts = torch.zeros(most_rows, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        self._handle: Any = symmetric.rendezvous(self._memory, group)
        self.addresses = torch.tensor(list(self._handle.buffer_ptrs), dtype=torch.int64, device=device)
        self.flag: Tensor = torch.zeros(FLAGS, dtype=torch.int32, pin_memory=True)

    def abort(self) -> None:
        """Let kernels that wait for other ranks end; what they and later ones compute is anything."""
        self.flag.fill_(1)


@triton.jit
def _values(pairs, DTYPE: tl.constexpr):
    """Return the lower and upper 16-bit values of int32 pairs, in fp32."""
    low = pairs.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _pairs(low, high, DTYPE: tl.constexpr):
    """Return int32 pairs of two fp32 values, rounded to 16 bits."""
    low = cast(low, DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (cast(high, DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _arrived(packets, inside, count):
    return tl.min(tl.where(inside, ((packets >> 32).to(tl.int32) == count).to(tl.int32), 1))


@triton.jit
def _await(places, inside, count, flag, looks, LOOK_AFTER: tl.constexpr, THREADS: tl.constexpr):
    """Return the packets of a row once all of them have arrived."""
    packets = tl.load(places, mask=inside, other=0, volatile=True)
    over = _arrived(packets, inside, count)
    tries = 0
    looked = 0
    while over == 0:
        packets = tl.load(places, mask=inside, other=0, volatile=True)
        over = _arrived(packets, inside, count)
        tries += 1
        if tries == LOOK_AFTER:
            tries = 0
            looked += 1
            # Threads may see the flag at different times; the maximum is the same for all of them.
            over = tl.maximum(over, tl.max(tl.load(flag + tl.arange(0, THREADS), volatile=True)))
            if (over == 0) & (looked >= looks):
                tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    return packets


@triton.jit(do_not_specialize=["looks"])
def sum_ranks_kernel(
    x, residual, weight, total, normed, inboxes, counts, flag, looks, eps,
    PAIRS: tl.constexpr, MOST_ROWS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
    DTYPE: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr, LOOK_AFTER: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Write the sum of `x` over ranks to `total`, with ADD plus `residual`; with NORM its RMSNorm to `normed`.

    Grid: rows. All of them, and `weight`, are int32 pairs of DTYPE, PAIRS a row. The sum is rounded before the residual
    is added, and the result of that too. EARLY: the kernel before may still run.

    Args:
        inboxes: int64 `[RANKS]`, addresses of the inboxes of all ranks.
        counts: int32 `[MOST_ROWS]`, how often each row was summed.
        flag: int32, an entry for each thread; it is read after LOOK_AFTER tries.
        looks: how often it is read.
    """
    row = tl.program_id(0)
    pair = tl.arange(0, BLOCK)
    inside = pair < PAIRS
    place = row.to(tl.int64) * PAIRS + pair
    if NORM:
        scale = tl.load(weight + pair, mask=inside, other=0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    count = tl.load(counts + row) + 1
    own = tl.load(x + place, mask=inside, other=0)
    if ADD:
        before = tl.load(residual + place, mask=inside, other=0)
    packets = (count.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    half = (count & 1) * (RANKS * MOST_ROWS * PAIRS)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            inbox = tl.load(inboxes + rank).to(tl.pointer_type(tl.int64))
            tl.store(tl.multiple_of(inbox, 16) + half + RANK * MOST_ROWS * PAIRS + place, packets, mask=inside)
    inbox = tl.multiple_of(tl.load(inboxes + RANK).to(tl.pointer_type(tl.int64)), 16)
    for rank in tl.static_range(RANKS):
        part = own
        if rank != RANK:
            places = inbox + half + rank * MOST_ROWS * PAIRS + place
            part = _await(places, inside, count, flag, looks, LOOK_AFTER, 32 * WARPS).to(tl.int32)
        part_low, part_high = _values(part, DTYPE)
        if rank == 0:
            low, high = part_low, part_high
        else:
            low += part_low
            high += part_high
    tl.store(counts + row, count)
    if ADD:
        before_low, before_high = _values(before, DTYPE)
        low = cast(low, DTYPE).to(tl.float32) + before_low
        high = cast(high, DTYPE).to(tl.float32) + before_high
    result = _pairs(low, high, DTYPE)
    tl.store(total + place, result, mask=inside)
    if NORM:
        low, high = _values(result, DTYPE)
        mean = tl.sum(low * low + high * high) / (2 * PAIRS)
        factor = 1.0 / tl.sqrt_rn(mean + eps)
        scale_low, scale_high = _values(scale, DTYPE)
        # As transformers': rounded before the weight is multiplied.
        low = cast(low * factor, DTYPE).to(tl.float32) * scale_low
        high = cast(high * factor, DTYPE).to(tl.float32) * scale_high
        tl.store(normed + place, _pairs(low, high, DTYPE), mask=inside)


LOOK_AFTER = 256
"""Tries before a rank that waits reads the flag, over PCIe."""

LOOKS = 1 << 21
"""Times that it reads it before it ends the kernel by an error: at about 0.2 ms, minutes."""

WARPS = 8


def launch_sum_ranks(
    inbox: Inbox,
    x: Tensor,
    total: Tensor,
    residual: Tensor | None = None,
    norm: tuple[Tensor, float, Tensor] | None = None,
    *,
    warps: int = WARPS,
    early: bool = False,
    looks: int = LOOKS,
) -> None:
    """Sum rows over ranks; see the kernel.

    Args:
        x, total, residual: contiguous `[T, width]` of one 16-bit dtype; `total` may be `x`.
        norm: the weight `[width]`, epsilon, and where to write normalised rows.
    """
    weight, eps, normed = (None, 0.0, None) if norm is None else norm
    block = triton.next_power_of_2(inbox.width // 2)
    views = {"x": x, "residual": residual, "weight": weight, "total": total, "normed": normed}
    launch(
        sum_ranks_kernel,
        (x.shape[0],),
        {**{name: None if each is None else each.view(torch.int32) for name, each in views.items()},
         "inboxes": inbox.addresses, "counts": inbox.counts, "flag": inbox.flag, "looks": looks, "eps": eps},
        {"PAIRS": inbox.width // 2, "MOST_ROWS": inbox.most_rows, "RANK": inbox.rank, "RANKS": inbox.world_size,
         "BLOCK": block, "DTYPE": tl.bfloat16 if x.dtype is torch.bfloat16 else tl.float16, "ADD": residual is not None,
         "NORM": norm is not None, "EARLY": early, "LOOK_AFTER": LOOK_AFTER, "WARPS": warps, "num_warps": warps,
         **({"launch_pdl": True} if early else {})},
    )  # fmt: skip
