"""Draw tokens from scores, for all rows of a step at once and without waiting for the device.

`top_k`, `top_p` and `min_p` keep the tokens that transformers' warpers keep, with one difference: of tokens exactly as
likely as the last one that `top_p` keeps, all are kept, as transformers' `top_k` does too. So no result depends on the
order of a sort.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LANES = 512
"""Tokens whose weights are added up first: about the square root of a vocabulary."""

_WORD = 1 << 64
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def splitmix64(seed: int, position: int) -> int:
    """Return 64 bits, about half of which differ between neighbouring seeds or positions."""
    z = (seed + (position + 1) * _GOLDEN) % _WORD
    z = (z ^ z >> 30) * _FIRST % _WORD
    z = (z ^ z >> 27) * _SECOND % _WORD
    return z ^ z >> 31


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return fp64 numbers from 0 up to 1, without 1: the upper 52 bits of `splitmix64`.

    Args:
        seeds: int64, of any shape; seeds from 2**63 on as their two's complement.
        positions: int64, of the same shape.

    Example:
        >>> import torch
        >>> from vattn.generation.draws import splitmix64, uniforms
        >>> uniforms(torch.tensor([3]), torch.tensor([5])).item() == (splitmix64(3, 5) >> 12) / 2**52
        True
    """
    z = seeds + (positions + 1) * _signed(_GOLDEN)
    z = (z ^ _shift_right(z, 30)) * _signed(_FIRST)
    z = (z ^ _shift_right(z, 27)) * _signed(_SECOND)
    return _shift_right(z ^ _shift_right(z, 31), 12).double() * 2.0**-52


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD >> 1 else word


def _shift_right(z: Tensor, by: int) -> Tensor:
    """Return int64 shifted to the right, with zeros from the left."""
    return z >> by & (1 << 64 - by) - 1


def truncate(scores: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None, most: int) -> Tensor:
    """Return scores with `-inf` for the tokens that `top_k`, then `top_p`, then `min_p` leave out.

    Args:
        scores: fp32 `[n, vocab_size]`.
        top_k: int64 `[n]`, from 1 up to `most`, the size of the vocabulary for none; `None` where no row has one.
        top_p, min_p: fp64 `[n]`, or `None`.
        most: a bound on how many of the likeliest tokens `top_k` and `top_p` need.
    """
    largest = scores.max(dim=-1, keepdim=True).values
    if top_k is not None or top_p is not None:
        whole = most >= scores.shape[1]
        ranked = scores.sort(dim=-1, descending=True).values if whole else scores.topk(most, dim=-1).values
        last = top_k if top_k is not None else torch.full_like(scores[:, 0], ranked.shape[1], dtype=torch.int64)
        # A row without `top_k` asks for no more than it needs of a narrower ranking.
        least = ranked.gather(1, (last - 1).clamp(max=ranked.shape[1] - 1)[:, None])
        if ranked.shape[1] < scores.shape[1]:
            least = torch.where(last[:, None] > ranked.shape[1], -torch.inf, least)
        scores = scores.masked_fill(scores < least, -torch.inf)
        if top_p is not None:
            total = (scores - largest).exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
            weights = (ranked - largest).exp().masked_fill(ranked < least, 0.0).double()
            before = weights.cumsum(dim=-1) - weights
            kept = (before < top_p[:, None] * total).sum(dim=-1, keepdim=True)
            least = torch.where(top_p[:, None] < 1, ranked.gather(1, kept - 1), -torch.inf)
            scores = scores.masked_fill(scores < least, -torch.inf)
    if min_p is not None:
        scores = scores.masked_fill((scores - largest).exp() < min_p[:, None], -torch.inf)
    return scores


def draw(scores: Tensor, numbers: Tensor) -> Tensor:
    """Return int64 `[n]`: a token of each row, drawn from the softmax of its scores.

    Args:
        scores: fp32 `[n, vocab_size]`, at least one of each row above `-inf`.
        numbers: fp64 `[n]`, uniform from 0 up to 1, without 1.
    """
    weights = (scores - scores.max(dim=-1, keepdim=True).values).exp()
    weights = torch.nn.functional.pad(weights, (0, -weights.shape[1] % _LANES)).unflatten(1, (-1, _LANES))
    sums = weights.sum(dim=-1, dtype=torch.float64)
    lane, rest = _find_interval(sums, numbers * sums.sum(dim=-1))
    chosen = weights.take_along_dim(lane[:, None, None], dim=1).squeeze(1).double()
    return lane * _LANES + _find_interval(chosen, rest)[0]


def _find_interval(widths: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Return in which interval of each row a number falls, and how far from its beginning.

    Args:
        widths: fp64 `[n, m]`, from 0 up; what has no width is never returned.
        at: fp64 `[n]`, from 0 up; what lies beyond the end for its rounding falls into the last one.
    """
    ends = widths.cumsum(dim=-1)
    at = torch.minimum(at, ends[:, -1] * (1 - 2.0**-52))
    index = (ends <= at[:, None]).sum(dim=-1, keepdim=True)
    begin = ends.gather(1, index) - widths.gather(1, index)
    return index.squeeze(1), (at[:, None] - begin).clamp(min=0.0).squeeze(1)
