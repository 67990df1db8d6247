"""What backends over another library's kernels have in common: which rows count, and what the others come out as.

Such a kernel knows neither our padding nor requests whose query is longer than the sequence: their rows are put right
afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.config.attention import AttentionConfig
from vattn.ops.arguments import CacheUpdateArgs


def rows_that_ask(
    query_start_loc: Tensor, lengths: Tensor, num_rows: int, config: AttentionConfig, *, hidden_by_kernel: bool = False
) -> Tensor:
    """Return bool `[num_rows, 1]`: rows of requests, except those that lie before the first key of their sequence.

    Args:
        query_start_loc: int32 `[B + 1]`.
        lengths: int32 `[B]`, keys of each request.
        num_rows: rows of the query, padding included.
        hidden_by_kernel: the kernel's own causal mask leaves nothing to the rows before a sequence, so that a causal
            request needs no lookup of its rows.

    Device work alone: no sync.
    """
    rows = torch.arange(num_rows, device=query_start_loc.device)
    real = rows < query_start_loc[-1]
    if config.attn_type == "encoder_decoder" or (hidden_by_kernel and config.causality == "causal"):
        # Rows of cross attention have no position among the keys.
        return real.unsqueeze(1)
    request = torch.searchsorted(query_start_loc[1:].contiguous(), rows, right=True).clamp(max=lengths.shape[0] - 1)
    return (real & (rows >= query_start_loc[request + 1] - lengths[request])).unsqueeze(1)


def put_right(output: Tensor, lse: Tensor | None, found: Tensor, seen: Tensor) -> None:
    """Make rows that see no key what our contract says: zeros, and the log of nothing.

    Args:
        output: `[T, H, V]`; changed in place.
        lse: fp32 `[T, H]`, natural log; written, `None` if nobody asked.
        found: fp32 `[T, H]`, the kernel's log-sum-exp in natural log, of any value where nothing is seen.
        seen: bool `[T, H]`, or `[T, 1]`.
    """
    output.masked_fill_(~seen.unsqueeze(2), 0)
    if lse is not None:
        lse.copy_(torch.where(seen, found, float("-inf")))


class TritonCacheUpdate:
    """Write the cache by our own kernel, which every format has; for backends whose library has none."""

    def kv_cache_update(self, args: CacheUpdateArgs, config: AttentionConfig) -> None:
        """Run `vattn::kv_cache_update`. Arguments are checked already."""
        from vattn.kernels.triton.attention.launch import update_kv_cache

        update_kv_cache(args, config)
