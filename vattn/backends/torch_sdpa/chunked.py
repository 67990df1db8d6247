"""Query rows of a request in chunks, so that memory stays bounded, and attention over one chunk written out in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vattn.config.attention import AttentionConfig
from vattn.config.dcp import Stripe
from vattn.ops.arguments import AttentionArgs, VarlenAttentionArgs
from vattn.quantization import packed as kv_formats

Args = AttentionArgs | VarlenAttentionArgs

_SCORES_PER_CHUNK = 1 << 22
"""Scores that the written-out math holds at once (16 MiB in fp32)."""

_MASK_PER_CHUNK = 1 << 22
"""Mask entries of one `scaled_dot_product_attention` call."""


@dataclass(frozen=True)
class Request:
    """What the host knows of one request.

    Attributes:
        index: row of the block table.
        first_row: first row of the packed query.
        query_len, seq_len: new tokens, and keys in all.
        context_len: position of query row 0; negative when some rows lie before the sequence.
        num_keys: keys that can be read, `seq_len` cut to what the block table or the packed keys hold.
        causal: causal or bidirectional.
        tree: which tree bias applies, -1 = none.
        held: how many of its keys can be read on this rank, under context parallelism.
    """

    index: int
    first_row: int
    query_len: int
    seq_len: int
    context_len: int
    num_keys: int
    causal: bool
    tree: int = -1
    held: int = 0

    @property
    def rows(self) -> slice:
        """Its rows of the packed query."""
        return slice(self.first_row, self.first_row + self.query_len)


@dataclass(frozen=True)
class Chunk:
    """Query rows `[first_row, end_row)` of a request, and the keys `[first_key, end_key)` that they can see at most.

    Keys are counted as they are held: under context parallelism `stripe` tells their positions.
    """

    first_row: int
    end_row: int
    first_key: int
    end_key: int
    stripe: Stripe | None

    def rows_and_keys(self, request: Request, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the positions of the rows `[rows, 1]` and of the keys `[1, keys]`."""
        start = request.context_len
        q = torch.arange(start + self.first_row, start + self.end_row, device=device)
        k = torch.arange(self.first_key, self.end_key, device=device)
        return q[:, None], (k if self.stripe is None else self.stripe.position(k))[None, :]


def chunks(request: Request, config: AttentionConfig, plain: bool) -> Iterator[Chunk]:
    """Split a request's query rows so that mask or scores stay bounded; rows before position 0 are left out."""
    if request.num_keys == 0:
        return
    budget = _MASK_PER_CHUNK if plain else _SCORES_PER_CHUNK // config.num_heads
    step, stripe = max(1, budget // request.num_keys), config.stripe
    for first in range(max(0, -request.context_len), request.query_len, step):
        end = min(first + step, request.query_len)
        first_key, end_key = _key_range(request, request.context_len + first, request.context_len + end, config)
        if stripe is not None:
            first_key, end_key = stripe.count(first_key), min(stripe.count(end_key), request.held)
        if first_key < end_key:
            yield Chunk(first, end, first_key, end_key, stripe)


def _key_range(request: Request, first: int, end: int, config: AttentionConfig) -> tuple[int, int]:
    """Return bounds of the keys that query positions `[first, end)` can see."""
    window, chunk, lookback = config.sliding_window, config.chunk_size, config.chunk_lookback
    low, high = 0, _last_key(request, config)
    if config.mm_prefix != "none":
        return low, high
    if chunk is not None and lookback is not None:
        low = (first // chunk - lookback) * chunk
        high = ((end - 1) // chunk + lookback + 1) * chunk
    elif window is not None:
        low, high = first - window + 1, end - 1 + window
    if request.causal:
        high = min(high, end)
    return max(0, low), min(high, _last_key(request, config))


def _last_key(request: Request, config: AttentionConfig) -> int:
    """Return behind which position no row of a request sees a key."""
    return min(request.num_keys, max(0, request.context_len)) if config.context_only else request.num_keys


def visible_keys(
    request: Request, chunk: Chunk, ranges: Tensor | None, config: AttentionConfig, device: torch.device
) -> Tensor:
    """Return bool `[rows, keys]` of a chunk: which query row sees which key."""
    q, k = chunk.rows_and_keys(request, device)
    seen = k <= q if request.causal else torch.ones(q.shape[0], k.shape[1], dtype=torch.bool, device=device)
    window, size = config.sliding_window, config.chunk_size
    if size is not None and config.chunk_lookback is not None:
        apart = q // size - k // size
        seen = seen & (apart <= config.chunk_lookback) & (-apart <= config.chunk_lookback)
    elif window is not None:
        seen = seen & (q - k < window)
        if not request.causal:
            seen = seen & (k - q < window)
    if ranges is not None:
        low, high = ranges[:, :1], ranges[:, 1:]
        query_inside = (q.view(-1) >= low) & (q.view(-1) <= high) & (low < high)
        key_inside = (k >= low) & (k <= high)
        together = (query_inside.float().T @ key_inside.float()) > 0
        if config.mm_prefix == "clamped" and window is not None:
            together &= q - k < window
        seen = seen | together
    return seen


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    args: Args,
    request: Request,
    chunk: Chunk,
    config: AttentionConfig,
) -> tuple[Tensor, Tensor]:
    """Return `[n, H, V]` and log-sum-exp `[n, H]` of one chunk, every feature included, in fp32."""
    rows, num_keys, heads = query.shape[0], key.shape[0], config.num_heads
    # Keys that no row sees may be garbage: zero times NaN would still be NaN.
    unseen = ~visible.any(0)[:, None, None]
    key, value = key.masked_fill(unseen, 0), value.masked_fill(unseen, 0)
    grouped = query.transpose(0, 1).reshape(config.num_kv_heads, config.group_size * rows, -1)
    scores = (grouped @ key.permute(1, 2, 0)).view(heads, rows, num_keys) * config.scale
    if config.logits_soft_cap is not None:
        scores = config.logits_soft_cap * torch.tanh(scores / config.logits_soft_cap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if config.alibi != "none" and args.alibi_slopes is not None:
        scores += _alibi(args.alibi_slopes, request, chunk, config)
    if request.tree >= 0 and args.bias is not None:
        _add_tree_bias(scores, args.bias[request.tree], request, chunk)
    sinks = None if args.sinks is None else args.sinks.float()[:, None]
    peak = scores.amax(-1) if sinks is None else torch.maximum(scores.amax(-1), sinks)
    peak = peak.masked_fill(peak == float("-inf"), 0)
    weights = torch.exp(scores - peak[:, :, None])
    total = weights.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sinks - peak)
    weighted = weights.view(config.num_kv_heads, -1, num_keys) @ value.transpose(0, 1)
    out = weighted.view(heads, rows, -1) / total.masked_fill(total == 0, 1)[:, :, None]
    out = kv_formats.rotate_back(out.transpose(0, 1), config.kv_cache_dtype)
    return out, (peak + torch.log(total)).transpose(0, 1)


def _alibi(slopes: Tensor, request: Request, chunk: Chunk, config: AttentionConfig) -> Tensor:
    """Return `[H, rows, keys]` to add to the scores."""
    q, k = chunk.rows_and_keys(request, slopes.device)
    if config.alibi == "sqrt":
        distance = -(q - k).clamp(min=0).float().sqrt()
    else:
        distance = ((k - q) if request.causal else -(k - q).abs()).float()
    return slopes.float()[:, None, None] * distance


def _add_tree_bias(scores: Tensor, bias: Tensor, request: Request, chunk: Chunk) -> None:
    """Add `bias[row, key - context_len]` where both are inside the tree, in place."""
    size = bias.shape[0]
    rows = slice(chunk.first_row, min(chunk.end_row, size))
    stripe, context = chunk.stripe, request.context_len
    # Keys are held in order, so those inside the tree are neighbours.
    held = [place if stripe is None else stripe.count(place) for place in (context, context + size)]
    first, end = (min(max(place, chunk.first_key), chunk.end_key) for place in held)
    if rows.start >= rows.stop or first >= end:
        return
    key = torch.arange(first, end, device=bias.device)
    columns = (key if stripe is None else stripe.position(key)) - context
    scores[:, : rows.stop - rows.start, first - chunk.first_key : end - chunk.first_key] += bias[rows, columns].float()
