"""Log-probabilities of chosen tokens, of prompts and of the likeliest tokens, by the model's own logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vattn.generation.request import Request, TokenLogprobs
from vattn.generation.transfers import has_kernels, on_device

_SLICE = 256
"""Rows of logits that are converted to fp32 at once."""

_GROUP = 32
"""Neighbours in the vocabulary of which the likeliest one is found first."""


@dataclass
class StepLogprobs:
    """Log-probabilities of a step.

    Attributes:
        values: fp64 `[m, 2 + 2 * most]`: log-probability and rank of a token, then log-probabilities of the `most`
            likeliest tokens, then their ids.
        lines: by row of the step: its row in `values`, and how many of the likeliest tokens its request asks for.
        prompts: requests, the position of the first token of the prompt in this step, and how many tokens there are.
            Their values follow those of `lines`.
    """

    values: Tensor
    lines: dict[int, tuple[int, int]]
    prompts: list[tuple[Request, int, int]]

    def of_rows(self, row: int, count: int) -> list[TokenLogprobs]:
        """Return the log-probabilities of the tokens of some rows from `row` on; none if their request gets none."""
        if row not in self.lines:
            return []
        line, most = self.lines[row]
        return [_token(values, most) for values in self.values[line : line + count].tolist()]

    def store_prompts(self) -> None:
        """Write the log-probabilities of prompts into their requests."""
        line = len(self.lines)
        for request, first, count in self.prompts:
            most, values = request.sampling.prompt_logprobs or 0, self.values[line : line + count].tolist()
            line += count
            if request.prompt_logprobs is not None:
                request.prompt_logprobs[first : first + count] = [_token(each, most) for each in values]
                request.has_prompt_logprobs = request.has_prompt_logprobs or first + count == len(request.prompt)


def compute_logprobs(
    logits: Tensor,
    tokens: Tensor,
    requests: Sequence[Request],
    rows: Sequence[int],
    prompts: Sequence[tuple[Request, int, int]],
) -> StepLogprobs:
    """Return the log-probabilities of chosen tokens, and of tokens of prompts.

    Args:
        logits: `[N, vocab_size]` of any float dtype: a row for each chosen token, and then one for each token of the
            prompts.
        tokens: int64 `[len(requests)]`, the chosen ones.
        requests: of the chosen tokens.
        rows: of the chosen tokens whose requests ask for log-probabilities.
        prompts: see `StepLogprobs`.
    """
    counts = [requests[row].sampling.logprobs or 0 for row in rows]
    wanted = [request.prompt[first : first + count] for request, first, count in prompts]
    most = max([*counts, *(request.sampling.prompt_logprobs or 0 for request, _, _ in prompts)])
    parts = []
    if rows:
        own, chosen = logits[: len(requests)], tokens
        if len(rows) < len(requests):
            index = on_device(rows, logits.device)
            own, chosen = logits.index_select(0, index), tokens.index_select(0, index)
        parts.append(_compute(own, chosen, most))
    if prompts:
        targets = on_device([token for each in wanted for token in each], logits.device)
        begin = len(requests)
        for part in targets.split(_SLICE):
            parts.append(_compute(logits[begin : begin + part.shape[0]], part, most))
            begin += part.shape[0]
    lines = {row: (line, count) for line, (row, count) in enumerate(zip(rows, counts, strict=True))}
    return StepLogprobs(torch.cat(parts), lines, list(prompts))


def _compute(logits: Tensor, tokens: Tensor, count: int) -> Tensor:
    maxima, vocab_size = None, logits.shape[1]
    if has_kernels(logits):
        from vattn.kernels.triton.sample import normalise

        scores, in_groups = logits, count and vocab_size % _GROUP == 0 and vocab_size >= 8 * _GROUP * count
        total, rank, maxima = normalise(logits, tokens, _GROUP if in_groups else 0)
    else:
        scores = logits.float()
        total = scores.logsumexp(dim=-1, keepdim=True)
        rank = (scores > scores.gather(1, tokens[:, None])).sum(dim=-1, keepdim=True) + 1
    parts = [scores.gather(1, tokens[:, None]).float() - total, rank]
    if count:
        values, ids = scores.topk(count, dim=-1) if maxima is None else likeliest(scores, maxima, count)
        parts += [values.float() - total, ids]
    return torch.cat([part.double() for part in parts], dim=1)


def likeliest(scores: Tensor, maxima: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest values of each row, and their places, as `torch.topk` does, in less time.

    They lie in the groups with the largest maxima.

    Args:
        scores: `[n, V]`.
        maxima: `[n, V / group]`, the largest value of each group of neighbours.
        count: how many.
    """
    group = scores.shape[1] // maxima.shape[1]
    groups = maxima.topk(count, dim=-1, sorted=False).indices
    places = (groups[:, :, None] * group + torch.arange(group, device=scores.device)).flatten(1)
    best = scores.gather(1, places).topk(count, dim=-1)
    return best.values, places.gather(1, best.indices)


def _token(values: list[float], count: int) -> TokenLogprobs:
    """Return a row of `StepLogprobs.values` with `count` of the likeliest tokens."""
    most = len(values) // 2 - 1
    top = zip(map(int, values[2 + most : 2 + most + count]), values[2 : 2 + count], strict=True)
    return TokenLogprobs(values[0], int(values[1]), dict(top))
