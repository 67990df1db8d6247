"""Log-probabilities of chosen tokens and of the likeliest ones, by the model's own logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vattn.generation.request import Request, TokenLogprobs
from vattn.generation.transfers import on_device

_SLICE = 256
"""Rows of logits that are converted to fp32 at once."""


@dataclass
class Measured:
    """Log-probabilities of a step.

    Attributes:
        values: fp64 `[m, 2 + 2 * most]`: log-probability and rank of a token, the likeliest tokens and their ids.
        lines: the line of `values` of each row of the step that has one, and how many of the likeliest it gets.
        prompts: requests, with the position of the first token of their prompts that was measured, and how many were;
            their lines follow each other after those of `lines`.
    """

    values: Tensor
    lines: dict[int, tuple[int, int]]
    prompts: list[tuple[Request, int, int]]

    def of(self, row: int, count: int) -> list[TokenLogprobs]:
        """Return the log-probabilities of the tokens of some rows from `row` on; none if their request gets none."""
        if row not in self.lines:
            return []
        line, most = self.lines[row]
        return [_token(values, most) for values in self.values[line : line + count].tolist()]

    def note_prompts(self) -> None:
        """Give requests the log-probabilities of their prompts."""
        line = len(self.lines)
        for request, first, count in self.prompts:
            most, values = request.sampling.prompt_logprobs or 0, self.values[line : line + count].tolist()
            line += count
            if request.prompt_logprobs is not None:
                request.prompt_logprobs[first : first + count] = [_token(each, most) for each in values]
                request.scored = request.scored or first + count == len(request.prompt)


def measure(
    logits: Tensor,
    tokens: Tensor,
    requests: Sequence[Request],
    rows: Sequence[int],
    prompts: Sequence[tuple[Request, int, int]],
) -> Measured:
    """Measure chosen tokens, and tokens of prompts.

    Args:
        logits: `[N, vocab_size]` of any float dtype: a row for each chosen token, and then one for each token of the
            prompts.
        tokens: int64 `[len(requests)]`, the chosen ones.
        requests: of the chosen tokens.
        rows: those to measure.
        prompts: see `Measured`.
    """
    counts = [requests[row].sampling.logprobs or 0 for row in rows]
    wanted = [request.prompt[first : first + count] for request, first, count in prompts]
    most = max([*counts, *(request.sampling.prompt_logprobs or 0 for request, _, _ in prompts)])
    parts = []
    if rows:
        index = on_device(rows, logits.device)
        parts.append(_measure(logits.index_select(0, index), tokens.index_select(0, index), most))
    if prompts:
        targets = on_device([token for each in wanted for token in each], logits.device)
        begin = len(requests)
        for part in targets.split(_SLICE):
            parts.append(_measure(logits[begin : begin + part.shape[0]], part, most))
            begin += part.shape[0]
    lines = {row: (line, count) for line, (row, count) in enumerate(zip(rows, counts, strict=True))}
    return Measured(torch.cat(parts), lines, list(prompts))


def _measure(logits: Tensor, tokens: Tensor, count: int) -> Tensor:
    scores = logits.float()
    total = scores.logsumexp(dim=-1, keepdim=True)
    own = scores.gather(1, tokens[:, None])
    rank = (scores > own).sum(dim=-1, keepdim=True) + 1
    best = scores.topk(count, dim=-1)
    return torch.cat([part.double() for part in (own - total, rank, best.values - total, best.indices)], dim=1)


def _token(values: list[float], count: int) -> TokenLogprobs:
    """Return what a line says, with some number of the likeliest tokens."""
    most = len(values) // 2 - 1
    top = zip(map(int, values[2 + most : 2 + most + count]), values[2 : 2 + count], strict=True)
    return TokenLogprobs(values[0], int(values[1]), dict(top))
