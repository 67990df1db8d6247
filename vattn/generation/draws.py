"""Draw tokens from scores, for all rows of a step at once and without waiting for the device.

The cuts are those of transformers' warpers, with one difference: of tokens that are exactly as likely as the last one
that `top_p` keeps, all are kept, as `top_k` does there too. So a result depends on no order of sorting.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LANES = 512
"""Tokens whose weights are added up first: about the square root of a vocabulary."""

_WORD = 1 << 64
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mixed(seed: int, place: int) -> int:
    """Return 64 bits that differ in about half of their places for neighbouring seeds and places (splitmix64)."""
    z = (seed + (place + 1) * _GOLDEN) % _WORD
    z = (z ^ z >> 30) * _FIRST % _WORD
    z = (z ^ z >> 27) * _SECOND % _WORD
    return z ^ z >> 31


def uniforms(seeds: Tensor, places: Tensor) -> Tensor:
    """Return fp64 numbers from 0 up to 1, without 1: the upper 52 bits of `mixed`.

    Args:
        seeds: int64, of any shape; seeds from 2**63 on as their two's complement.
        places: int64, of the same shape.

    Example:
        >>> import torch
        >>> from vattn.generation.draws import mixed, uniforms
        >>> uniforms(torch.tensor([3]), torch.tensor([5])).item() == (mixed(3, 5) >> 12) / 2**52
        True
    """
    z = seeds + (places + 1) * _signed(_GOLDEN)
    z = (z ^ _shifted(z, 30)) * _signed(_FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(_SECOND)
    return _shifted(z ^ _shifted(z, 31), 12).double() * 2.0**-52


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD >> 1 else word


def _shifted(z: Tensor, by: int) -> Tensor:
    """Return int64 shifted to the right, with zeros from the left."""
    return z >> by & (1 << 64 - by) - 1


def cut(scores: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None, most: int) -> Tensor:
    """Return scores with `-inf` for the tokens that `top_k`, then `top_p`, then `min_p` leave out.

    Args:
        scores: fp32 `[n, vocab_size]`.
        top_k: int64 `[n]`, from 1 up to `most`, the size of the vocabulary for none; `None` where no row has one.
        top_p, min_p: fp64 `[n]`, or `None`.
        most: a bound of the likeliest tokens that `top_k` and `top_p` ask for.
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
    """Return int64 `[n]`, the token of each row in which a number falls, each as wide as its token is likely.

    Args:
        scores: fp32 `[n, vocab_size]`, logarithms of weights, one of each row above `-inf`.
        numbers: fp64 `[n]`, from 0 up to 1, without 1.
    """
    weights = (scores - scores.max(dim=-1, keepdim=True).values).exp()
    weights = torch.nn.functional.pad(weights, (0, -weights.shape[1] % _LANES)).unflatten(1, (-1, _LANES))
    sums = weights.sum(dim=-1, dtype=torch.float64)
    lane, rest = _fall(sums, numbers * sums.sum(dim=-1))
    chosen = weights.take_along_dim(lane[:, None, None], dim=1).squeeze(1).double()
    return lane * _LANES + _fall(chosen, rest)[0]


def _fall(widths: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
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
