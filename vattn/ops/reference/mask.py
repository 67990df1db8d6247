"""Who sees whom, and what is added to a score: the mask algebra of vattn, stated once.

Query row i of a request sits at position `seq_len - query_len + i`, key k at position k. The positions of queries and
keys are broadcast against each other, so every formula below reads as if for one pair (q, k). Under attention type
`encoder_decoder` rows have no position among the keys, and see all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.config.attention import AttentionConfig


def positions(query_len: int, seq_len: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return int64 positions of the query rows `[query_len, 1]` and of the keys `[1, seq_len]`.

    Rows of a request that is shorter than its query have negative positions.
    """
    rows = torch.arange(seq_len - query_len, seq_len, device=device)
    return rows.unsqueeze(1), torch.arange(seq_len, device=device).unsqueeze(0)


def visible_mask(
    config: AttentionConfig,
    query_len: int,
    seq_len: int,
    *,
    causal: bool | None = None,
    mm_ranges: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return bool `[query_len, seq_len]`: which keys each row of one request sees, tree bias aside.

    Args:
        causal: this request's flag under causality `per_request`; otherwise the config decides.
        mm_ranges: `[R, 2]` inclusive ranges of this request; those with start >= end are unused.

    Example:
        >>> from vattn.config.attention import AttentionConfig
        >>> config = AttentionConfig(1, 1, 8, 8, 1.0, "float32", "float32", sliding_window=2)
        >>> visible_mask(config, query_len=2, seq_len=4).int()
        tensor([[0, 1, 1, 0],
                [0, 0, 1, 1]], dtype=torch.int32)
    """
    if config.attn_type == "encoder_decoder":
        return torch.ones(query_len, seq_len, dtype=torch.bool, device=device)
    q, k = positions(query_len, seq_len, device)
    causal = is_causal(config, causal)
    visible = k <= q if causal else torch.ones_like(k <= q)
    if config.chunk_size is not None and config.chunk_lookback is not None:
        visible = visible & _within_chunks(q, k, config.chunk_size, config.chunk_lookback, causal)
    elif config.sliding_window is not None:
        visible = visible & _within_window(q, k, config.sliding_window, causal)
    if config.mm_prefix != "none" and mm_ranges is not None:
        visible = visible | _within_same_range(q, k, mm_ranges, config)
    if config.context_only:
        visible = visible & (k < seq_len - query_len)
    return visible & (q >= 0)


def is_causal(config: AttentionConfig, flag: bool | None = None) -> bool:
    """Return whether a request's rows see the past only; `flag` counts under causality `per_request`."""
    return bool(flag) if config.causality == "per_request" else config.causality == "causal"


def _within_window(q: Tensor, k: Tensor, window: int, causal: bool) -> Tensor:
    """A window of W shows W tokens, the row itself included; a bidirectional one reaches as far to the right."""
    left = q - k < window
    return left if causal else left & (k - q < window)


def _within_chunks(q: Tensor, k: Tensor, chunk_size: int, lookback: int, causal: bool) -> Tensor:
    """A row sees its own chunk and `lookback` chunks before it; a bidirectional one as many after it."""
    distance = q // chunk_size - k // chunk_size
    return distance <= lookback if causal else distance.abs() <= lookback


def _within_same_range(q: Tensor, k: Tensor, mm_ranges: Tensor, config: AttentionConfig) -> Tensor:
    """Tokens of one image see each other both ways; `clamped` keeps the window's left edge."""
    visible = torch.zeros_like(k <= q)
    for start, end in mm_ranges.tolist():
        if start < end:
            visible = visible | ((start <= q) & (q <= end) & (start <= k) & (k <= end))
    if config.mm_prefix == "clamped" and config.sliding_window is not None:
        visible = visible & (q - k < config.sliding_window)
    return visible


def alibi_bias(
    config: AttentionConfig, slopes: Tensor, query_len: int, seq_len: int, *, causal: bool | None = None
) -> Tensor:
    """Return fp32 `[H, query_len, seq_len]`: what ALiBi adds to the scores of one request.

    Causal rows add `slope * (k - q)`, also to keys after them that a multimodal range shows. Bidirectional rows
    subtract `slope * |k - q|`. The sqrt form subtracts `slope * sqrt(q - k)` and leaves keys after the row alone.
    """
    q, k = positions(query_len, seq_len, slopes.device)
    distance = (k - q).float()
    if config.alibi == "sqrt":
        distance = -(-distance).clamp(min=0).sqrt()
    elif not is_causal(config, causal):
        distance = -distance.abs()
    return slopes.float().view(-1, 1, 1) * distance


def tree_bias(bias: Tensor, tree_id: int, query_len: int, seq_len: int) -> Tensor:
    """Return fp32 `[query_len, seq_len]`: what tree `tree_id` of `bias` `[trees, n, n]` adds to one request's scores.

    Row r of the query and the c-th new key (position `seq_len - query_len + c`) get `bias[tree_id, r, c]` where both
    are below n, so -inf hides a new token from another branch. Everything else, and a request without a tree, gets 0.
    """
    added = torch.zeros(query_len, seq_len, dtype=torch.float32, device=bias.device)
    if not 0 <= tree_id < bias.shape[0]:
        return added
    context_len = seq_len - query_len
    first = max(0, -context_len)
    size = min(bias.shape[1], query_len)
    if first < size:
        columns = slice(context_len + first, context_len + size)
        added[:size, columns] = bias[tree_id, :size, first:size].float()
    return added
