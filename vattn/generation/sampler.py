"""Choose the next tokens from a step's logits: the greedy ones at once, sampled ones by their settings.

Penalties and cuts are transformers' own logits processors. A draw depends on a request's seed and on the place of the
token alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vattn.errors import MissingPackageError, RequestError, VattnError
from vattn.generation.request import Request
from vattn.generation.sampling import Sampling


def choose_tokens(
    logits: Tensor, requests: Sequence[Request], places: Sequence[int], sampled: Sequence[int]
) -> tuple[Tensor, Tensor, dict[int, VattnError]]:
    """Return a token for each row, without waiting for the device.

    Args:
        logits: `[N, vocab_size]` of any float dtype; rows after the requests' are ignored.
        requests: of each row; a request with drafts has several rows.
        places: positions of the tokens that are chosen, one for each row; read where something is sampled.
        sampled: rows of requests that are not greedy.

    Returns:
        int64 `[N]` tokens; int64 `[2, N]`: tokens, and 1 where the logits could be used; and what the logits processors
        of a request raised, by row.
    """
    rows = logits[: len(requests)]
    # The largest value is NaN where any is.
    largest, tokens = rows.max(dim=-1)
    usable = largest.isfinite()
    errors: dict[int, VattnError] = {}
    groups: dict[Any, list[int]] = {}
    for row in sampled:
        sampling = requests[row].sampling
        groups.setdefault(row if sampling.needs_history else _cuts(sampling), []).append(row)
    for members in groups.values():
        index = on_device(members, rows.device)
        try:
            scores, good = _process(rows[index], usable[index], [requests[row] for row in members])
        except VattnError as error:
            errors[members[0]] = error
            continue
        usable[index] = good
        tokens[index] = _draw(scores, [requests[row] for row in members], [places[row] for row in members])
    return tokens, torch.stack((tokens, usable.long())), errors


def on_host(values: Sequence[int]) -> Tensor:
    """Return a list that is not empty as int64 on the host; several times faster than `torch.tensor`."""
    return torch.frombuffer(array("q", values), dtype=torch.int64)


def on_device(values: Sequence[int], device: torch.device) -> Tensor:
    """Return a list that is not empty as int64 on a device, without waiting for it."""
    host = on_host(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _cuts(sampling: Sampling) -> tuple[float, int, float, float]:
    return sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p


def _process(logits: Tensor, usable: Tensor, requests: list[Request]) -> tuple[Tensor, Tensor]:
    """Return fp32 scores `[n, vocab_size]` of requests with equal settings, and which rows a token can be taken from.

    Args:
        usable: bool `[n]`, which rows of the logits are finite.

    Raises:
        RequestError: a logits processor raised, or returned something else than scores.
    """
    first = requests[0].sampling
    # A row that cannot be used would stop the draw of all.
    scores = torch.where(usable[:, None], logits.float(), 0.0)
    ids = scores.new_zeros(scores.shape[0], 1, dtype=torch.long)
    if first.needs_history:
        ids = on_device(requests[0].tokens(0, requests[0].num_tokens), scores.device)[None]
    for process in processors(first):
        scores = _run(process, ids, scores)
    allowed = scores.max(dim=-1).values.isfinite()
    return torch.where(allowed[:, None], scores, 0.0), usable & allowed


def _run(process: Any, ids: Tensor, scores: Tensor) -> Tensor:
    name = getattr(process, "__name__", type(process).__name__)
    try:
        out = process(ids, scores)
    except Exception as error:
        raise RequestError(
            f"logits processor {name} raised {type(error).__name__}: {error}", "one that returns scores", "correct it"
        ) from error
    if not isinstance(out, Tensor) or out.shape != scores.shape or not out.is_floating_point():
        got = f"{out.dtype} {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise RequestError(
            f"logits processor {name} returned {got}", f"scores {tuple(scores.shape)}", "return what it was given"
        )
    return out


def _draw(scores: Tensor, requests: list[Request], places: list[int]) -> Tensor:
    """Return a token for each row of fp32 `[n, vocab_size]`."""
    if requests[0].sampling.temperature == 0:
        return scores.argmax(dim=-1)
    # The first of several exponential clocks to ring, each as fast as its token is likely: a draw without a sync.
    clocks, source = torch.empty_like(scores), torch.Generator(scores.device)
    for row, request, place in zip(clocks, requests, places, strict=True):
        row.exponential_(generator=source.manual_seed(_mixed(request.sampling.seed, place)))
    return (scores.softmax(dim=-1) / clocks.clamp_(min=torch.finfo(clocks.dtype).tiny)).argmax(dim=-1)


def _mixed(seed: int, place: int) -> int:
    """Return 64 bits that differ in about half of their places for neighbouring seeds and places (splitmix64)."""
    z = (seed + (place + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def processors(sampling: Sampling) -> list[Any]:
    """Return the logits processors of some settings, in transformers' order.

    Raises:
        MissingPackageError: settings beyond temperature need transformers.
    """
    made: list[Any] = []
    if sampling.repetition_penalty != 1:
        made.append(_logits_process().RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    made += sampling.logits_processors
    if sampling.temperature not in (0, 1):
        made.append(lambda ids, scores: scores / sampling.temperature)
    cuts = (("TopK", sampling.top_k, 0), ("TopP", sampling.top_p, 1), ("MinP", sampling.min_p, 0))
    return made + [
        getattr(_logits_process(), f"{kind}LogitsWarper")(value) for kind, value, off in cuts if value != off
    ]


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
