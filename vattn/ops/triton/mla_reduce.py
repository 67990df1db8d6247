"""The merge of what the latent decode path of Hopper splits."""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.ops import variants
from vattn.ops.triton.codec import INTERPRETED
from vattn.ops.triton.mask import LN2
from vattn.ops.triton.mla_schedule import FIELDS


def merge_tile(rows: int, splits: int) -> dict[str, int]:
    """Return columns and parts that one program of one warp holds at a time.

    Args:
        rows: how many are merged.
        splits: about how many parts each has; with large parts, see `vattn.ops.variants`, all are held if they fit.
    """
    if variants.current().latent_parts == "small":
        return {"COLUMNS": 64 if rows <= 64 else 128 if rows <= 512 else 512, "STEP": 8}
    columns = 64 if splits >= 32 else 128 if splits >= 4 else 512
    return {"COLUMNS": columns, "STEP": 4096 // columns}


@triton.jit(do_not_specialize=["max_items"], do_not_specialize_on_alignment=["query_start_loc"])
def mla_reduce_kernel(
    schedule, partial, stats, query_start_loc, output, lse, max_items,
    HEADS: tl.constexpr, PARTIAL_ROWS: tl.constexpr, LATENT: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Merge COLUMNS columns of one row of a split request. Grid: rows of as many requests as there are, columns.

    `partial` is fp32 `[slots, PARTIAL_ROWS, LATENT]`, unnormalised, `stats` the rows' maxima in base 2 and sums.
    """
    if not INTERPRETED:
        tl.extra.cuda.gdc_wait()
    index = tl.program_id(0) // PARTIAL_ROWS
    row = tl.program_id(0) % PARTIAL_ROWS
    if index >= tl.load(schedule + 1):
        return
    record = schedule + (1 + max_items + index) * FIELDS
    request = tl.load(record)
    first = tl.load(record + 1).to(tl.int64)
    count = tl.load(record + 2)
    start = tl.load(query_start_loc + request).to(tl.int64)
    if row >= (tl.load(query_start_loc + request + 1) - start) * HEADS:
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    maximum = tl.zeros([], tl.float32) - 1e30
    total = tl.zeros([], tl.float32)
    x = tl.zeros([COLUMNS], tl.float32)
    for at in range(0, count, STEP):
        split = at + tl.arange(0, STEP)
        known = split < count
        place = (first + split) * PARTIAL_ROWS + row
        m = tl.load(stats + place * 2, mask=known, other=-1e30)
        part_total = tl.load(stats + place * 2 + 1, mask=known, other=0.0)
        part = tl.load(partial + place[:, None] * LATENT + column[None, :], mask=known[:, None], other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(m, 0))
        decay = tl.exp2(maximum - new_maximum)
        weight = tl.where(known, tl.exp2(m - new_maximum), 0.0)
        x = x * decay + tl.sum(weight[:, None] * part, 0)
        total = total * decay + tl.sum(weight * part_total, 0)
        maximum = new_maximum
    seen = total != 0.0
    safe = tl.where(seen, total, 1.0)
    place = start * HEADS + row
    x = tl.where(seen, x / safe, 0.0)
    tl.store(output + place * LATENT + column, x.to(output.dtype.element_ty))
    if lse is not None:
        if tl.program_id(1) == 0:
            tl.store(lse + place, tl.where(seen, (maximum + tl.log2(safe)) * LN2, float("-inf")))
