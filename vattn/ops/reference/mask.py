"""Defines which keys a query row sees and what is added to its scores; the chunked torch backend uses this too.

Query row i of a request has position `seq_len - query_len + i`, key k has position k. Positions of queries `[q, 1]` and
keys `[1, s]` are broadcast, so every formula below reads as for one pair (q, k). Under attention type
`encoder_decoder` rows have no position among the keys and see all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.config.attention import AttentionConfig


def positions(query_len: int, seq_len: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return int64 positions of the query rows `[query_len, 1]` and of the keys `[1, seq_len]`.

    Rows of a request that is shorter than its query have negative positions.
    """
    return row_positions(query_len, seq_len, device), torch.arange(seq_len, device=device).unsqueeze(0)


def row_positions(query_len: int, seq_len: int, device: torch.device | str = "cpu") -> Tensor:
    """Return int64 positions of the query rows `[query_len, 1]`."""
    return torch.arange(seq_len - query_len, seq_len, device=device).unsqueeze(1)


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
    q, k = positions(query_len, seq_len, device)
    return visible_keys(config, q, k, seq_len - query_len, is_causal(config, causal), mm_ranges)


def visible_keys(
    config: AttentionConfig, q: Tensor, k: Tensor, context_len: int, causal: bool, mm_ranges: Tensor | None
) -> Tensor:
    """Return bool `[q, s]`: which keys of a request, at some positions, its rows see, tree bias aside."""
    if config.attn_type == "encoder_decoder":
        return torch.ones(q.shape[0], k.shape[1], dtype=torch.bool, device=q.device)
    visible = visible_at(config, q, k, causal, mm_ranges)
    if config.context_only:
        visible = visible & (k < context_len)
    return visible & (q >= 0)


def visible_at(config: AttentionConfig, q: Tensor, k: Tensor, causal: bool, mm_ranges: Tensor | None) -> Tensor:
    """Return bool `[q, s]` for rows and keys at positions from 0 on, by causality, window, chunks and ranges.

    A window of W shows W tokens, the row itself included; a bidirectional one as many to the right. With chunks a row
    sees its own chunk and `lookback` chunks before it; bidirectional rows as many after it. Tokens of one multimodal
    range see each other both ways; `clamped` keeps the window's left edge.
    """
    visible = k <= q if causal else torch.ones_like(k <= q)
    window = config.sliding_window
    if config.chunk_size is not None and config.chunk_lookback is not None:
        visible = visible & ((q // config.chunk_size - k // config.chunk_size).abs() <= config.chunk_lookback)
    elif window is not None:
        visible = visible & ((q - k).abs() < window)
    if mm_ranges is not None:
        low, high = mm_ranges[:, :1], mm_ranges[:, 1:]
        of_query = (low <= q.view(-1)) & (q.view(-1) <= high) & (low < high)
        of_key = (low <= k) & (k <= high)
        together = (of_query.float().T @ of_key.float()) > 0
        if config.mm_prefix == "clamped" and window is not None:
            together = together & (q - k < window)
        visible = visible | together
    return visible


def is_causal(config: AttentionConfig, flag: bool | None = None) -> bool:
    """Return whether a request's rows see only the past; `flag` counts under causality `per_request`."""
    return bool(flag) if config.causality == "per_request" else config.causality == "causal"


def alibi_bias(config: AttentionConfig, slopes: Tensor, q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Return fp32 `[H, q, s]`: what ALiBi adds to the scores of rows and keys at some positions.

    Causal rows add `slope * (k - q)`, also to keys after them that a multimodal range shows. Bidirectional rows
    subtract `slope * |k - q|`. The sqrt form subtracts `slope * sqrt(q - k)`, and nothing from keys after the row.
    """
    distance = (k - q).float()
    if config.alibi == "sqrt":
        distance = -(-distance).clamp(min=0).sqrt()
    elif not causal:
        distance = -distance.abs()
    return slopes.float().view(-1, 1, 1) * distance


def tree_bias(bias: Tensor, tree_id: int, q: Tensor, k: Tensor, context_len: int) -> Tensor:
    """Return fp32 `[q, s]`: what tree `tree_id` of `bias` `[trees, n, n]` adds to the scores of a request.

    Row r of the request and its c-th new key (position `context_len + c`) get `bias[tree_id, r, c]` if both are below
    n, so -inf hides a new token from another branch. All others, and a request without a tree, get 0.
    """
    size = bias.shape[1]
    if not 0 <= tree_id < bias.shape[0]:
        return torch.zeros(q.shape[0], k.shape[1], device=bias.device)
    row, column = q - context_len, k - context_len
    inside = (row < size) & (column >= 0) & (column < size)
    return torch.where(inside, bias[tree_id, row.clamp(max=size - 1), column.clamp(0, size - 1)].float(), 0.0)
