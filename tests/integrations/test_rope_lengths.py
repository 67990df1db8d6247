"""RoPE whose frequencies go by the longest request of a step: fixed to one length, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import vattn
from tests.support import relative_l2

pytest.importorskip("transformers")

from tests.integrations.hf_families import make_model
from tests.integrations.test_transformers import TOLERANCE, Runner, eager_logits
from vattn.integrations.transformers import disable, enable

LIMIT = 32
"""Longest request with the frequencies of short ones."""

LONG, SHORT = list(range(3, 43)), [5, 6, 7]
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 48, "long_factor": [4.0] * 48,
    "factor": 8.0, "original_max_position_embeddings": LIMIT,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
MODELS: dict[str, dict[str, Any]] = {
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": LIMIT},
    "llama": {"rope_parameters": DYNAMIC, "max_position_embeddings": LIMIT},
    "gemma3": {
        "rope_parameters": {
            "full_attention": DYNAMIC,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
        "max_position_embeddings": LIMIT,
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_frequencies_are_those_of_one_length(name: str) -> None:
    """A request gets its own logits in chunks and with others, at lengths that use the chosen frequencies."""
    model = make_model(name, **MODELS[name])
    want = {len(tokens): eager_logits(model, tokens) for tokens in (SHORT, LONG[:LIMIT], LONG)}
    for length, fitting in ((LIMIT, LONG[:LIMIT]), (len(LONG), LONG)):
        # What long calls leave in the model is not used.
        eager_logits(model, LONG)
        packed = enable(model, num_blocks=17, rope_length=length)
        runner = Runner(packed)
        first = runner.step([(fitting[:20], 0), (SHORT, 0)])
        second = runner.step([(fitting[20:], 20)])
        assert relative_l2(torch.cat((first[0], second[0])), want[len(fitting)]) < TOLERANCE
        assert (relative_l2(first[1], want[len(SHORT)]) < TOLERANCE) == (length == LIMIT)
        disable(model)
        for tokens in (LONG, SHORT):
            assert relative_l2(eager_logits(model, tokens), want[len(tokens)]) == 0


def test_longer_requests_are_refused() -> None:
    packed = enable(make_model("phi3", **MODELS["phi3"]), num_blocks=17, rope_length=LIMIT)
    with pytest.raises(vattn.errors.MetadataError, match=r"40 tokens.*rope_length=32"):
        Runner(packed).step([(LONG, 0)])
    assert vattn.Generator(packed).scheduler.max_seq_len == LIMIT
    with pytest.raises(vattn.errors.ConfigError, match="max_seq_len=33"):
        vattn.Generator(packed, max_seq_len=33)


@pytest.mark.parametrize("name", MODELS)
def test_models_are_refused_without_a_length(name: str) -> None:
    model = make_model(name, **MODELS[name])
    want = eager_logits(model, LONG)
    with pytest.raises(vattn.errors.UnsupportedRequestError, match="rope_length=32"):
        enable(model)
    assert relative_l2(eager_logits(model, LONG), want) == 0


@pytest.mark.parametrize("length", [0, True, "32", 2.0])
def test_lengths_are_positive_ints(length: Any) -> None:
    with pytest.raises(vattn.errors.ConfigError, match="rope_length"):
        enable(make_model("phi3", **MODELS["phi3"]), rope_length=length)


def test_models_that_have_no_use_for_a_length_refuse_it() -> None:
    with pytest.raises(vattn.errors.ConfigError, match="same for every length"):
        enable(make_model("llama"), rope_length=LIMIT)


class _ByLength(nn.Module):
    """Rotates all keys by other frequencies after a long step, without an error."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        slower = torch.where(position_ids.max() >= LIMIT, 0.5, 1.0)
        return self.inner(x, position_ids * slower)


def test_frequencies_by_length_are_found_by_what_a_model_does() -> None:
    model = make_model("llama")
    model.model.rotary_emb = _ByLength(model.model.rotary_emb)
    with pytest.raises(vattn.errors.UnsupportedRequestError, match="position of one token changes how others"):
        enable(model)
