"""The merge of what the latent decode path of Hopper splits."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from vattn.kernels.hopper.schedule import FIELDS
from vattn.kernels.triton.common.codec import INTERPRETED
from vattn.kernels.triton.common.mask import LN2
from vattn.kernels.triton.common.tiles import next_power_of_two

MOST_PROGRAMS = 16
"""Programs of one warp that a multiprocessor merges with at a time."""
FEW_PROGRAMS = 4
"""As many where most requests stay whole, and what has to start is what takes time."""


def merge_parts(
    rows: int, splits: int, heads: int, partial_rows: int, processors: int, full: bool, **tensors: Any
) -> None:
    """Merge what latent decode has split, all parts of a row at once if they fit.

    Args:
        rows: how many may have to be merged: all rows of all requests.
        splits: about how many parts each has.
        heads, partial_rows: of a token, and of a slot of the partial results.
        full: see `vattn.kernels.hopper.mla.schedule`.
        tensors: what the kernels below take.
    """
    latent = tensors["output"].shape[-1]
    common = {"HEADS": heads, "PARTIAL_ROWS": partial_rows, "LATENT": latent, "num_warps": 1, "launch_pdl": True}
    step = min(64, next_power_of_two(max(4, splits)))
    columns = max(32, 2048 // step)
    most = MOST_PROGRAMS if splits > 1 else FEW_PROGRAMS
    programs = min(rows * (latent // columns), processors * most)
    mla_merge_parts_kernel[(programs,)](**tensors, COLUMNS=columns, STEP=step, FULL=full, **common)


@triton.jit
def merge_row(
    partial, stats, output, lse, first, count, start, row, column, panel, HEADS: tl.constexpr,
    PARTIAL_ROWS: tl.constexpr, LATENT: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Merge columns `[COLUMNS]` of one row of a split request, STEP parts at a time, and store them.

    first, count: slots of the request's parts. start: its first token. The row's LSE is stored with panel 0.
    """
    maximum = tl.zeros([], tl.float32) - 1e30
    total = tl.zeros([], tl.float32)
    x = tl.zeros([COLUMNS], tl.float32)
    for at in range(0, count, STEP):
        split = at + tl.arange(0, STEP)
        known = split < count
        place = (first.to(tl.int64) + split) * PARTIAL_ROWS + row
        m = tl.load(stats + place * 2, mask=known, other=-1e30)
        part_total = tl.load(stats + place * 2 + 1, mask=known, other=0.0)
        part = tl.load(partial + place[:, None] * LATENT + column[None, :], mask=known[:, None], other=0.0)
        part = part.to(tl.float32)
        new_maximum = tl.maximum(maximum, tl.max(m, 0))
        decay = tl.exp2(maximum - new_maximum)
        weight = tl.where(known, tl.exp2(m - new_maximum), 0.0)
        x = x * decay + tl.sum(weight[:, None] * part, 0)
        total = total * decay + tl.sum(weight * part_total, 0)
        maximum = new_maximum
    seen = total != 0.0
    safe = tl.where(seen, total, 1.0)
    place = start.to(tl.int64) * HEADS + row
    x = tl.where(seen, x / safe, 0.0)
    tl.store(output + place * LATENT + column, x.to(output.dtype.element_ty))
    if lse is not None:
        if panel == 0:
            tl.store(lse + place, tl.where(seen, (maximum + tl.log2(safe)) * LN2, float("-inf")))


@triton.jit
def load_split(schedule, query_start_loc, max_items, index, FULL: tl.constexpr):
    """Return of a split request: first slot, number of slots, first token, rows."""
    record = schedule + (1 + max_items + index) * FIELDS
    first = tl.load(record + 1)
    count = tl.load(record + 2)
    if FULL:
        start = tl.load(record + 3)
        rows = tl.load(record + 4)
    else:
        request = tl.load(record)
        start = tl.load(query_start_loc + request)
        rows = tl.load(query_start_loc + request + 1) - start
    return first, count, start, rows


@triton.jit(do_not_specialize=["max_items", "num_tokens"], do_not_specialize_on_alignment=["query_start_loc"])
def mla_merge_parts_kernel(
    schedule, partial, stats, query_start_loc, output, lse, max_items, num_tokens, HEADS: tl.constexpr,
    PARTIAL_ROWS: tl.constexpr, LATENT: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Merge COLUMNS columns of one row of a split request after the other, STEP parts at a time. Grid: any number.

    `partial` is fp32 or bf16 `[slots, PARTIAL_ROWS, LATENT]`, unnormalised, `stats` maxima in base 2 and sums.
    FULL: see `vattn.kernels.hopper.mla.schedule`. The next kernel may be launched while this one runs.
    """
    PANELS: tl.constexpr = LATENT // COLUMNS
    OF_REQUEST: tl.constexpr = PARTIAL_ROWS * PANELS
    number = tl.program_id(0)
    # The schedule was written before the kernel that this one waits for began. It has a record for every program, empty
    # if need be, so the record is loaded together with the number of splits.
    splits = tl.load(schedule + 1)
    if FULL:
        first, count, start, rows = load_split(schedule, query_start_loc, max_items, number // OF_REQUEST, FULL)
    else:
        first, count, start, rows = 0, 0, 0, 0
    if not INTERPRETED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for job in range(number, splits * OF_REQUEST, tl.num_programs(0)):
        if (job != number) | (not FULL):
            first, count, start, rows = load_split(schedule, query_start_loc, max_items, job // OF_REQUEST, FULL)
        row = job % OF_REQUEST // PANELS
        panel = job % PANELS
        # A plan that was made for more rows keeps inside of those that there are.
        if row < tl.minimum(rows, num_tokens - start) * HEADS:
            column = panel * COLUMNS + tl.arange(0, COLUMNS)
            merge_row(
                partial, stats, output, lse, first, count, start, row, column, panel, HEADS, PARTIAL_ROWS, LATENT,
                COLUMNS, STEP,
            )  # fmt: skip
