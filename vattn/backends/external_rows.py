"""Rows of backends on kernels of other libraries: which are valid, and what invalid ones are set to.

Such kernels know neither padding nor requests with more query rows than tokens in the sequence. The results of those
rows are set afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vattn.config.attention import AttentionConfig
from vattn.ops.arguments import CacheUpdateArgs


class Rows(NamedTuple):
    """Rows as requests of their own.

    Attributes:
        request: int32 `[T]`, which request a row belongs to; any for padding.
        seq_lens: int32 `[T]`, the keys that it sees; 0 for padding and for rows before their sequence.
        start_loc: int32 `[T + 1]`, 0 to T.
    """

    request: Tensor
    seq_lens: Tensor
    start_loc: Tensor


def rows_as_requests(query_start_loc: Tensor, lengths: Tensor, num_rows: int, causal: bool = True) -> Rows:
    """Return every row of a step as a request of one token, without a sync.

    Args:
        query_start_loc: int32 `[B + 1]`.
        lengths: int32 `[B]`, keys of each request.
        num_rows: rows of the query, padding included.
        causal: whether a row sees the keys up to its own position, or all of its request.
    """
    offsets = torch.arange(num_rows + 1, dtype=torch.int32, device=lengths.device)
    rows = offsets[:-1]
    request = torch.searchsorted(query_start_loc[1:].contiguous(), rows, right=True, out_int32=True)
    request = request.clamp_(max=lengths.shape[0] - 1)
    seen = lengths[request]
    if causal:
        seen = seen - (query_start_loc[request + 1] - 1 - rows)
    return Rows(request, torch.where(rows < query_start_loc[-1], seen, 0).clamp_(min=0), offsets)


def valid_rows(
    query_start_loc: Tensor, lengths: Tensor, num_rows: int, config: AttentionConfig, *, hidden_by_kernel: bool = False
) -> Tensor:
    """Return bool `[num_rows, 1]`: rows of requests, except those before the first key of their sequence.

    Args:
        query_start_loc, lengths, num_rows: as for `rows_as_requests`.
        hidden_by_kernel: the kernel's own causal mask hides all keys from rows before a sequence, so that a causal
            request needs no lookup of its rows.
    """
    if config.attn_type == "encoder_decoder" or (hidden_by_kernel and config.causality == "causal"):
        # Rows of cross attention have no position among the keys.
        return (torch.arange(num_rows, device=lengths.device) < query_start_loc[-1]).unsqueeze(1)
    return (rows_as_requests(query_start_loc, lengths, num_rows).seq_lens > 0).unsqueeze(1)


def zero_invalid_rows(output: Tensor, lse: Tensor | None, found: Tensor, seen: Tensor) -> None:
    """Set rows that see no key to zeros and their LSE to -inf.

    Args:
        output: `[T, H, V]`; changed in place.
        lse: fp32 `[T, H]`, natural log; written unless `None`.
        found: fp32 `[T, H]`, the kernel's log-sum-exp in natural log; any value where nothing is seen.
        seen: bool `[T, H]`, or `[T, 1]`.
    """
    output.masked_fill_(~seen.unsqueeze(2), 0)
    if lse is not None:
        lse.copy_(torch.where(seen, found, float("-inf")))


class TritonCacheUpdate:
    """Write the cache by vattn's kernel, which has every format; for backends on libraries without one."""

    def kv_cache_update(self, args: CacheUpdateArgs, config: AttentionConfig) -> None:
        from vattn.kernels.triton.attention.launch import update_kv_cache

        update_kv_cache(args, config)
