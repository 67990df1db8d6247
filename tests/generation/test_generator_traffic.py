"""Random arrivals, cancels and failures: every request ends as it should, and no block, row or token is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vattn
from vattn import errors

pytest.importorskip("transformers")

from tests.generation.generator_support import Characters, Faulty, check_empty, chosen
from tests.integrations.hf_families import make_model
from vattn.integrations.transformers import PackedModel, disable, enable

KINDS = ["run", "cancel", "early", "nan", "processor", "criterion", "sampled", "stop"]
"""What becomes of a request: cancelled after two tokens, cancelled before the next step, ..."""

arrivals = st.tuples(st.integers(1, 60), st.integers(1, 20), st.sampled_from(KINDS), st.integers(0, 9))
_MODELS: dict[str, PackedModel] = {}
_PLAIN: dict[str, Any] = {}


def model_with(name: str, num_blocks: int) -> PackedModel:
    """Return a model on a fresh cache; gemma2 has groups."""
    if name not in _MODELS:
        changes = {"sliding_window": 20} if name == "gemma2" else {}
        _MODELS[name], _PLAIN[name] = enable(make_model(name, **changes)), make_model(name, **changes)
    _MODELS[name].allocate(num_blocks=num_blocks, hybrid=name == "gemma2")
    return _MODELS[name]


def raises(*arguments: Any) -> Any:
    raise ValueError("of the user")


def sampling_of(kind: str, new: int) -> vattn.Sampling:
    changes: dict[str, Any] = {
        "processor": {"logits_processors": (raises,)},
        "criterion": {"stopping_criteria": (raises,)},
        "sampled": {"temperature": 0.8, "seed": new},
        "stop": {"stop_strings": ("a", "bc")},
    }.get(kind, {})
    return vattn.Sampling(new, stop_token_ids=(), **changes)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@given(
    st.booleans(),
    st.lists(arrivals, min_size=1, max_size=10),
    st.integers(5, 40),
    st.booleans(),
    st.integers(10, 24),
    st.integers(0, 12),
)
@settings(max_examples=8)
def test_random_traffic_leaks_nothing(
    name: str, speculate: bool, traffic: Any, budget: int, reuse: bool, num_blocks: int, raise_in: int
) -> None:
    faulty = Faulty(model_with(name, num_blocks))
    # Requests without text take a shorter way.
    tokenizer = Characters() if any(kind == "stop" for _, _, kind, _ in traffic) else None
    generator = vattn.Generator(
        faulty, tokenizer, token_budget=budget, reuse_prefixes=reuse, max_num_reqs=3, max_queue=6,
        speculation=vattn.PromptLookup(shortest=1) if speculate else None,
    )  # fmt: skip
    # The model raises once, if at all: nothing is lost by that.
    faulty.raise_in = raise_in
    most = generator.scheduler.max_seq_len
    pending, alive = list(traffic), []
    while pending or generator.busy:
        while pending and pending[0][3] <= 5:
            length, new, kind, _ = pending.pop(0)
            prompt = [3 + (i * length) % 80 for i in range(length)] + [90] * (kind == "nan")
            try:
                request = generator.add(prompt, sampling_of(kind, new))
            except errors.RequestError:
                assert len(prompt) + new > most
                continue
            except errors.QueueFullError:
                assert len(generator.scheduler.waiting) >= 6, "preempted requests wait too"
                continue
            alive.append((request, kind))
            if kind == "early":
                generator.cancel(request)
        if pending:
            pending[0] = (*pending[0][:3], pending[0][3] - 3)
        try:
            generator.step()
        except ZeroDivisionError:
            assert faulty.raise_in == 0
        for request, kind in alive:
            if kind == "cancel" and len(request.output) >= 2:
                generator.cancel(request)
    for request, kind in alive:
        assert_ended(request, kind, _PLAIN[name])
    check_empty(generator)


def assert_ended(request: vattn.Request, kind: str, model: Any) -> None:
    """Assert that a request ended in a way that its kind can, if whole with the tokens of a model alone."""
    poisoned = 90 in (request.prompt + request.output)[len(request.prompt) - 1 :]
    allowed = {"processor": {"failed"}, "criterion": {"failed"}, "nan": {"failed"}, "early": {"cancelled"}}
    states = allowed.get(kind, {"finished"} | ({"failed"} if poisoned else set()))
    assert request.state in states | ({"cancelled"} if kind == "cancel" else set()), (request, kind, request.error)
    if kind == "processor" and request.prompt[-1] != 90:
        assert "raised ValueError: of the user" in str(request.error) and not request.output
    if request.state == "finished":
        whole = len(request.output) == request.sampling.max_new_tokens
        assert whole or request.reason == "stop string"
        assert not any(stop in request.text for stop in request.sampling.stop_strings)
        if kind not in ("sampled", "stop"):
            assert request.output == chosen(model, request.prompt, request.output)
    if request.state == "failed":
        assert isinstance(request.error, errors.RequestError)


def test_weights_that_are_not_finite() -> None:
    """enable() names them; weights that become NaN later fail each request with our error, and none has tokens."""
    model = make_model("llama")
    packed = enable(model, num_blocks=16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    generator = vattn.Generator(packed, max_num_reqs=2)
    sampled = vattn.Sampling(4, temperature=1.0, top_k=3)
    done = generator.generate([[1, 2], [3], [4] * 30], [vattn.Sampling(4), sampled, vattn.Sampling(4)])
    assert all(request.state == "failed" and not request.output for request in done)
    assert all("not finite" in str(request.error) for request in done)
    assert generator.scheduler.pool.num_kept == 0, "no request finds what is wrong"
    check_empty(generator)
    disable(packed)
    with pytest.raises(errors.ConfigError, match="not finite"):
        enable(model)
