"""Take the tokens that a step chose into a request: its output, its text, and whether it ends."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from vattn.errors import RequestError, VattnError
from vattn.generation.logprobs import TokenLogprobs
from vattn.generation.request import FAILED, FINISHED, Progress, Request


def take_tokens(
    request: Request,
    tokens: Sequence[int],
    usable: Sequence[int],
    error: VattnError | None,
    logprobs: Sequence[TokenLogprobs] = (),
) -> Progress:
    """Append the tokens that a step chose to a request, which may finish or fail.

    Args:
        tokens: in order; those after the end of the request are dropped.
        usable: 0 for tokens with unusable logits.
        error: what its logits processors raised.
        logprobs: of the tokens, if the request asks for them.
    """
    taken: list[int] = []
    text, forced = "", request.sampling.forced_eos_token_id
    for token, good in zip(tokens, usable, strict=True):
        if error is None and not good:
            error = _not_finite(request)
        if error is not None:
            request.end(FAILED, "error", error)
            break
        if request.first_token is None:
            request.first_token = time.monotonic()
            watched = request.sampling.stopping_criteria or request.logprobs is not None
            request.plain = request.stream is None and request.uncounted is None and not watched
        ends = False
        if forced is not None and len(request.prompt) + len(request.output) + 1 >= request.limit:
            token, ends = forced, True
        try:
            reason = _append(request, token, ends)
            text += _show(request, bool(reason))
        except VattnError as failed:
            request.end(FAILED, "error", failed)
            break
        if reason == "stop token":
            request.stop_reason = token
        else:
            if request.logprobs is not None:
                request.logprobs.append(logprobs[len(taken)])
            taken.append(token)
        if request.stream is not None and request.stream.found:
            reason, request.stop_reason = "stop string", request.stream.found
        if reason:
            request.end(FINISHED, reason)
            break
    return Progress(request, text, tuple(taken))


def _append(request: Request, token: int, stops: bool) -> str:
    """Append a token to a request's output, unless it ends it; return why the request ends, "" if it does not.

    Args:
        stops: whether it ends the request, whatever the request's stop tokens are.
    """
    # A pending token is counted already.
    request.uncached += not request.pending
    request.pending = False
    if stops or token in request.stop_token_ids:
        return "stop token"
    if token == request.uncounted:
        raise RequestError(
            f"the padding token {token}, chosen after {len(request.output)} tokens of a model that counts no position "
            "for it",
            "outputs without padding",
            f"Sampling(logit_bias={{{token}: -1e9}}), or stop_token_ids with {token}",
        )
    request.output.append(token)
    if _criteria_met(request):
        return "stopping criterion"
    return "" if len(request.prompt) + len(request.output) < request.limit else "length"


def _show(request: Request, last: bool) -> str:
    """Return the new text of a request's output."""
    if request.stream is None:
        return ""
    try:
        fresh = request.stream.push(request.output, last)
    except Exception as error:
        raise RequestError(
            f"tokens {request.output[-4:]} at the end of the output, of which the tokenizer's decode() raised "
            f"{type(error).__name__}: {error}",
            "ids that the tokenizer knows",
            "check that it is the model's own",
        ) from error
    request.text = request.stream.text
    return fresh


def _criteria_met(request: Request) -> bool:
    criteria = request.sampling.stopping_criteria
    if not criteria:
        return False
    ids = torch.tensor([request.tokens(0, request.num_tokens)])
    try:
        return any(bool(torch.as_tensor(met(ids, None)).any()) for met in criteria)
    except Exception as error:
        raise RequestError(
            f"a stopping criterion raised {type(error).__name__}: {error}", "criteria that return a bool", "correct it"
        ) from error


def _not_finite(request: Request) -> RequestError:
    return RequestError(
        f"logits that are not finite after {len(request.prompt) + len(request.output)} tokens",
        "finite logits, of which the logits processors leave some, and so do allowed tokens, bad words and grammars",
        "check these, the weights, and the scales of the cache (vattn.audit)",
    )
