"""Any options together: a request is refused, or its tokens are those of a sampler written down step by step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vattn
from vattn.generation.draws import splitmix64

pytest.importorskip("transformers")

from transformers.generation import logits_process

from tests.generation.generator_support import PROMPTS, check_empty, make_generator
from tests.integrations.hf_families import make_model
from vattn.integrations.transformers import PackedModel

MODEL = make_model("llama")
TOKENS = st.integers(0, 96)
OPTIONS = st.fixed_dictionaries(
    {
        "max_new_tokens": st.integers(4, 10),
        "stop_token_ids": st.lists(TOKENS, max_size=4).map(tuple),
        "temperature": st.sampled_from([0.0, 0.0, 0.7, 2.0]),
    },
    optional={
        "top_k": st.sampled_from([0, 1, 5, 400]),
        "top_p": st.sampled_from([0.3, 0.95]),
        "min_p": st.sampled_from([0.01, 0.2]),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "presence_penalty": st.sampled_from([-0.5, 1.0]),
        "frequency_penalty": st.sampled_from([-0.3, 0.6]),
        "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-2.0, 3.0, -math.inf]), max_size=4),
        "allowed_token_ids": st.lists(TOKENS, min_size=1, max_size=40).map(tuple),
        "bad_words": st.lists(st.lists(TOKENS, min_size=1, max_size=2).map(tuple), max_size=4).map(tuple),
        "min_tokens": st.integers(0, 5),
        "seed": st.integers(0, 2**64 - 1),
    },
)


def scores_of(ids: list[int], length: int, s: vattn.Sampling) -> torch.Tensor:
    """Return the scores that the next token is chosen by, of one request and one option after another."""
    with torch.no_grad():
        scores = MODEL(input_ids=torch.tensor([ids])).logits[:, -1].float()
    for token, bias in s.logit_bias.items():
        scores[0, token] += bias
    if s.repetition_penalty != 1:
        scores = logits_process.RepetitionPenaltyLogitsProcessor(s.repetition_penalty)(torch.tensor([ids]), scores)
    for token in set(ids[length:]):
        scores[0, token] -= s.presence_penalty + s.frequency_penalty * ids[length:].count(token)
    if s.allowed_token_ids is not None:
        others = sorted(set(range(97)) - set(s.allowed_token_ids))
        scores[0, others] = -math.inf
    for word in s.bad_words:
        if len(word) == 1 or ids[-len(word) + 1 :] == list(word[:-1]):
            scores[0, word[-1]] = -math.inf
    if len(ids) - length < s.min_tokens:
        scores[0, list(s.stop_token_ids or ())] = -math.inf
    return scores


def run_by_hand(prompt: list[int], s: vattn.Sampling) -> tuple[str, list[int]]:
    """Return how a request ends, and its output; "unclear" where rounding may choose otherwise."""
    ids = list(prompt)
    for _ in range(s.max_new_tokens):
        scores = scores_of(ids, len(prompt), s)
        best = scores[0].topk(2)
        if best.values[0] == -math.inf:
            return "failed", ids[len(prompt) :]
        if s.temperature == 0:
            token, clear = int(best.indices[0]), bool(best.values[0] - best.values[1] > 1e-3)
        else:
            token, clear = drawn(scores / s.temperature, s, splitmix64(s.seed, len(ids)))
        if not clear:
            return "unclear", []
        if token in (s.stop_token_ids or ()):
            break
        ids.append(token)
    return "finished", ids[len(prompt) :]


def drawn(scores: torch.Tensor, s: vattn.Sampling, word: int) -> tuple[int, bool]:
    """Return the token that a number falls on, and whether no rounding could move it."""
    chances, order = scores.double().softmax(-1)[0].sort(descending=True)
    keep = torch.ones(97, dtype=torch.bool)
    edges = []
    if s.top_k:
        keep &= chances >= chances[min(s.top_k, 97) - 1]
        edges.append((chances[: min(s.top_k, 97)].min() / chances[min(s.top_k, 96) :].max()) if s.top_k < 97 else 2.0)
    left = chances * keep
    before = (left.cumsum(0) - left) / left.sum()
    keep &= before < s.top_p
    edges += [1 + abs(float(one) - s.top_p) for one in before]
    edges += [1 + abs(float(one) - s.min_p) for one in chances / chances[0]] if s.min_p else []
    keep &= chances >= s.min_p * chances[0]
    weights = torch.zeros(97, dtype=torch.float64)
    weights[order[keep]] = chances[keep]
    ends = (weights / weights.sum()).cumsum(0)
    number = (word >> 12) / 2**52
    token = int((ends <= number).sum())
    clear = min(edges, default=2.0) > 1 + 1e-5 and float((ends - number).abs().min()) > 1e-4
    return token, clear


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, len(PROMPTS) - 1), OPTIONS), min_size=1, max_size=4))
def test_requests_are_refused_or_right(packed: PackedModel, wanted: list[tuple[int, dict[str, Any]]]) -> None:
    """In one batch, so that rows with all kinds of options meet."""
    jobs = []
    for place, options in wanted:
        try:
            sampling = vattn.Sampling(**options)
        except vattn.errors.ConfigError:
            cuts = {name for name in ("top_k", "top_p", "min_p") if options.get(name)}
            assert cuts and options["temperature"] == 0
            sampling = vattn.Sampling(**{name: value for name, value in options.items() if name not in cuts})
        jobs.append((PROMPTS[place], sampling))
    generator = make_generator(packed)
    done = generator.generate([prompt for prompt, _ in jobs], [sampling for _, sampling in jobs])
    for request, (prompt, sampling) in zip(done, jobs, strict=True):
        state, output = run_by_hand(prompt, sampling)
        assert state == "unclear" or (request.state, request.output) == (state, output)
    check_empty(generator)
