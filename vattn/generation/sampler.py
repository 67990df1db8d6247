"""Choose the next token of every request from a step's logits: the greedy ones at once, sampled ones by their settings.

Penalties and cuts are transformers' own logits processors. Each request draws from a generator of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vattn.errors import MissingPackageError
from vattn.generation.request import Request, Sampling


def choose_tokens(logits: Tensor, requests: list[Request]) -> tuple[Tensor, Tensor]:
    """Return the next token of each request, without waiting for the device.

    Args:
        logits: `[B, vocab_size]` of any float dtype; row i belongs to request i, rows behind them are ignored.
        requests: those whose last token was computed.

    Returns:
        int64 `[B]` tokens, and int64 `[2, B]`: tokens, and 1 where the logits were finite.
    """
    rows = logits[: len(requests)]
    # The largest value is NaN where any is.
    largest, tokens = rows.max(dim=-1)
    usable = largest.isfinite()
    groups: dict[Any, list[int]] = {}
    for row, request in enumerate(requests):
        if not request.sampling.greedy:
            alone = request.sampling.repetition_penalty != 1 or request.sampling.logits_processors
            groups.setdefault(row if alone else _cuts(request.sampling), []).append(row)
    for members in groups.values():
        index = torch.tensor(members, device=rows.device)
        # A row that cannot be used would stop the draw of the whole group.
        scores = torch.where(usable[index, None], rows[index].float(), 0.0)
        tokens[index] = _draw(scores, [requests[row] for row in members])
    return tokens, torch.stack((tokens, usable.long()))


def _cuts(sampling: Sampling) -> tuple[float, int, float, float]:
    return sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p


def _draw(scores: Tensor, requests: list[Request]) -> Tensor:
    """Return a token for each row of fp32 `[n, vocab_size]`; the requests have equal settings."""
    first = requests[0].sampling
    ids = scores.new_zeros(scores.shape[0], 1, dtype=torch.long)
    if first.repetition_penalty != 1 or first.logits_processors:
        ids = torch.tensor([requests[0].tokens(0, requests[0].num_tokens)], device=scores.device)
    for process in processors(first):
        scores = process(ids, scores)
    if first.temperature == 0:
        return scores.argmax(dim=-1)
    chances = scores.softmax(dim=-1)
    drawn = [
        torch.multinomial(row, 1, generator=_generator(request, scores.device))
        for row, request in zip(chances, requests, strict=True)
    ]
    return torch.cat(drawn)


def _generator(request: Request, device: torch.device) -> torch.Generator:
    if request.generator is None:
        request.generator = torch.Generator(device).manual_seed(request.sampling.seed)
    return request.generator


def processors(sampling: Sampling) -> list[Any]:
    """Return the logits processors of some settings, in transformers' order.

    Raises:
        MissingPackageError: settings beyond temperature need transformers.
    """
    made: list[Any] = []
    wanted = (
        ("RepetitionPenaltyLogitsProcessor", sampling.repetition_penalty, sampling.repetition_penalty != 1),
        ("TemperatureLogitsWarper", sampling.temperature, False),
        ("TopKLogitsWarper", sampling.top_k, sampling.top_k > 0),
        ("TopPLogitsWarper", sampling.top_p, sampling.top_p < 1),
        ("MinPLogitsWarper", sampling.min_p, sampling.min_p > 0),
    )
    for name, value, needed in wanted:
        if needed:
            made.append(getattr(_logits_process(), name)(value))
        elif name == "TemperatureLogitsWarper":
            made += sampling.logits_processors
            if sampling.temperature not in (0, 1):
                made.append(lambda ids, scores: scores / sampling.temperature)
    return made


def _logits_process() -> Any:
    try:
        from transformers.generation import logits_process
    except ImportError as error:
        raise MissingPackageError(
            "top_k, top_p, min_p or repetition_penalty without transformers",
            "transformers >= 5",
            "pip install 'vattn[transformers]', or sample by temperature alone",
        ) from error
    return logits_process
