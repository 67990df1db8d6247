"""Splits requests of uneven numbers of rows into requests of a few rows each; every row sees the same keys as before.

Row i of a request sits at `seq_len - query_len + i`, so the rows of a part form a request that ends with its last
row. With parts of one program's rows each, no program has to attend all rows of a long request one after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from vattn.kernels.triton.mla.kernels import find_request


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
    request = find_request(query_start_loc, num_reqs, part, 1, MOST)
    is_real = request < num_reqs
    start = tl.load(query_start_loc + request)
    end = tl.load(query_start_loc + request + 1, mask=is_real, other=0)
    end = tl.where(is_real, end, start)
    first = tl.minimum(start + (part - start // MOST - request) * MOST, end)
    behind = tl.minimum(first + MOST, end)
    length = tl.load(seq_lens + request, mask=is_real, other=0) - (end - behind)
    tl.store(starts + part, first)
    tl.store(lengths + part, tl.where(behind > first, tl.maximum(length, 0), 0))
    tl.store(owners + part, tl.minimum(request, num_reqs - 1))
    if part == num_parts - 1:
        tl.store(starts + num_parts, tl.load(query_start_loc + num_reqs))


def cut_requests(query_start_loc: Tensor, seq_lens: Tensor, parts: Parts, most: int) -> None:
    """Write parts of at most `most` rows each; there must be room for one more per request than its rows fill."""
    count = parts.lengths.shape[0]
    mla_split_kernel[(count,)](
        query_start_loc, seq_lens, *parts, count, seq_lens.shape[0], MOST=most, num_warps=1, enable_fp_fusion=True
    )
