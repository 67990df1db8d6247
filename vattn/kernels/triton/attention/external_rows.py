"""What surrounds a call of another library's paged kernel, one launch each: rows as requests, their tables, their end.

`vattn.backends.external_rows` does some of it in torch operators.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vattn.kernels.triton.common.mask import MAX_SEQ_LEN, clamp

_ROWS, _COLUMNS, _HEADS = 128, 1024, 8


@triton.jit(
    do_not_specialize=["num_rows", "num_reqs"],
    do_not_specialize_on_alignment=["request_out", "lengths_out", "starts_out"],
)
def rows_kernel(
    query_start_loc, seq_lens, request_out, lengths_out, starts_out, num_rows, num_reqs,
    CAUSAL: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `vattn.backends.external_rows.rows_as_requests`. Grid: blocks of rows and of the offset after them."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    # The first request that ends after the row.
    low = tl.zeros((BLOCK,), tl.int32)
    high = low + num_reqs
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        end = tl.load(query_start_loc + middle + 1, mask=middle < num_reqs, other=0)
        searching = low < high
        goes_up = searching & (end <= row)
        high = tl.where(searching & (end > row), middle, high)
        low = tl.where(goes_up, middle + 1, low)
    real = inside & (low < num_reqs)
    request = tl.minimum(low, num_reqs - 1)
    real = real & (tl.load(query_start_loc + request, mask=real, other=0) <= row)
    length = clamp(tl.load(seq_lens + request, mask=real, other=0), MAX_SEQ_LEN)
    if CAUSAL:
        end = tl.minimum(tl.load(query_start_loc + request + 1, mask=real, other=0), num_rows)
        length = tl.where(real, tl.maximum(length - (end - 1 - row), 0), 0)
    tl.store(request_out + row, request, mask=inside)
    tl.store(lengths_out + row, length, mask=inside)
    tl.store(starts_out + row, row, mask=row <= num_rows)


@triton.jit(
    do_not_specialize=["width", "stride_table", "num_blocks"], do_not_specialize_on_alignment=["request", "lengths"]
)
def table_kernel(
    block_table, request, lengths, table_out, lengths_out, width, stride_table, num_blocks,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the used entries of a table, those out of range as the nearest block. Grid: rows, blocks of columns."""
    row = tl.program_id(0).to(tl.int64)
    source = row
    if request is not None:
        source = tl.load(request + row).to(tl.int64)
    length = tl.minimum(tl.load(lengths + row), width * BLOCK_SIZE)
    if tl.program_id(1) == 0:
        tl.store(lengths_out + row, length)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = (column < width) & (column * BLOCK_SIZE < length)
    block = tl.load(block_table + source * stride_table + column, mask=used, other=0)
    block = tl.maximum(tl.minimum(block, num_blocks - 1), 0)
    tl.store(table_out + row * width + column, block, mask=column < width)


@triton.jit(do_not_specialize=["num_reqs"])
def finish_rows_kernel(
    output, lse, found, query_start_loc, num_reqs, stride_ot, stride_oh, stride_lt, stride_lh, stride_ft, stride_fh,
    NUM_HEADS: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """See `vattn.backends.external_rows.zero_invalid_rows`; all rows of requests are valid. Grid: rows, heads."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    known = head < NUM_HEADS
    real = tl.zeros((BLOCK_H,), tl.int64) + row < tl.load(query_start_loc + num_reqs)
    log = tl.load(found + row * stride_ft + head * stride_fh, mask=known & real, other=float("inf"))
    unseen = (log == float("inf")) | (log == float("-inf"))
    column = tl.arange(0, BLOCK_V)[None, :]
    target = output + row * stride_ot + (head * stride_oh)[:, None] + column
    zero = tl.zeros((BLOCK_H, BLOCK_V), output.dtype.element_ty)
    tl.store(target, zero, mask=(known & unseen)[:, None] & (column < V))
    if lse is not None:
        tl.store(lse + row * stride_lt + head * stride_lh, tl.where(unseen, float("-inf"), log), mask=known)


def write_rows(
    query_start_loc: Tensor, seq_lens: Tensor, request: Tensor, lengths: Tensor, starts: Tensor, causal: bool
) -> None:
    """Fill what `rows_as_requests` returns: int32 `[T]`, `[T]` and `[T + 1]`."""
    num_rows, num_reqs = request.shape[0], seq_lens.shape[0]
    rows_kernel[(-(-(num_rows + 1) // _ROWS),)](
        query_start_loc, seq_lens, request, lengths, starts, num_rows, num_reqs, CAUSAL=causal,
        STEPS=num_reqs.bit_length(), BLOCK=_ROWS, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def table_of_rows(
    block_table: Tensor, request: Tensor | None, lengths: Tensor, num_blocks: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """Return the table of rows `[T, W]` (of the requests themselves without `request`) and their lengths in it."""
    rows, width = lengths.shape[0], block_table.shape[1]
    table = torch.empty((rows, width), dtype=torch.int32, device=block_table.device)
    inside = torch.empty((rows,), dtype=torch.int32, device=block_table.device)
    block = min(_COLUMNS, triton.next_power_of_2(width))
    table_kernel[(rows, -(-width // block))](
        block_table, request, lengths, table, inside, width, block_table.stride(0), num_blocks,
        BLOCK_SIZE=block_size, BLOCK=block, num_warps=1 if block <= 256 else 4, enable_fp_fusion=True,
    )  # fmt: skip
    return table, inside


def finish_rows(output: Tensor, lse: Tensor | None, found: Tensor, query_start_loc: Tensor) -> None:
    """Put right the rows of padding and those that see no key; `found` is the library's LSE, fp32 `[T, H]`."""
    num_rows, num_heads, width = output.shape
    strides = found.stride() if lse is None else lse.stride()
    heads = min(_HEADS, triton.next_power_of_2(num_heads))
    finish_rows_kernel[(num_rows, -(-num_heads // heads))](
        output, lse, found, query_start_loc, query_start_loc.shape[0] - 1, *output.stride()[:2], *strides,
        *found.stride(), NUM_HEADS=num_heads, V=width, BLOCK_V=triton.next_power_of_2(width), BLOCK_H=heads,
        num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
