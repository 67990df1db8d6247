"""`enable` compares a model with itself before it accepts it: what differs is named, and the model stays as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vattn
from vattn.errors import ConfigError, UnsupportedRequestError

pytest.importorskip("transformers")

from tests.integrations.hf_families import make_model
from vattn.integrations.transformers import PackedModel, disable, enable
from vattn.integrations.transformers.attention_interface import ModelAttention

IDS = torch.tensor([[5, 6, 7]])
Forward = Any


def _scaled(layer: Any, args: tuple[Any, ...], forward: Forward) -> Any:
    query, key, value = args
    return forward(layer, query * 1.2, key, value)


def _sees_other_requests(layer: Any, args: tuple[Any, ...], forward: Forward) -> Any:
    """Attention reads the values of the request before."""
    query, key, value = args
    return forward(layer, query, key, value.roll(1, 0))


def _reads_unwritten_slots(layer: Any, args: tuple[Any, ...], forward: Forward) -> Any:
    """One slot too many, with a weight of nothing."""
    return forward(layer, *args) + 0 * layer.kv_cache.float().flatten()[-1]


def _forgets(layer: Any, args: tuple[Any, ...], forward: Forward) -> Any:
    """The last row is wrong, in a step with a decode alone."""
    out = forward(layer, *args)
    step = vattn.metadata.forward_context.current_step()
    assert step is not None
    if step.num_decodes:
        out[-1] *= 0.5
    return out


WRONG = {
    "scale": (_scaled, r"comes out of attention layer 'model\.layers\.0\.self_attn' differs"),
    "requests": (_sees_other_requests, "comes out of attention layer"),
    "unwritten slots": (_reads_unwritten_slots, "by nan"),
    "decodes": (_forgets, "tokens 3 to 3 of a request"),
}


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, torch.float32) for kind in WRONG), ("scale", torch.bfloat16)], ids=str
)
def test_wrong_attention_is_refused(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, text = WRONG[kind]
    forward = ModelAttention.forward
    monkeypatch.setattr(ModelAttention, "forward", lambda self, *args: wrong(self, args, forward))
    model = make_model("llama").to(dtype)
    with torch.no_grad():
        expected = model(IDS).logits
    names, random = set(dict(model.named_modules())), torch.get_rng_state()
    with pytest.raises(UnsupportedRequestError, match=text):
        enable(model, num_blocks=4)
    assert set(dict(model.named_modules())) == names and "_vattn_before" not in model.__dict__
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, expected)
    assert enable(model, num_blocks=4, prove=False).enabled


def test_libraries_that_spread_nan_get_large_values(monkeypatch: pytest.MonkeyPatch) -> None:
    unsafe = SimpleNamespace(capabilities=SimpleNamespace(garbage_safe=False))
    monkeypatch.setattr("vattn.integrations.transformers.prove.get_backend", lambda name: unsafe)
    forward, largest = ModelAttention.forward, []

    def looking(layer: Any, *args: Any) -> Any:
        largest.append(float(layer.kv_cache.max()))
        return forward(layer, *args)

    monkeypatch.setattr(ModelAttention, "forward", looking)
    enable(make_model("llama"))
    assert len(largest) == 4 and min(largest) > 100 and all(value < 200 for value in largest)


def test_wrong_positions_and_logits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = PackedModel.forward
    model = make_model("gpt2")
    changes = {
        "goes into attention layer 'transformer.h.0.attn'": lambda self, ids, at: forward(self, ids, at + 1),
        "the logits differ": lambda self, ids, at: forward(self, ids, at).roll(1, 0),
    }
    for text, wrong in changes.items():
        monkeypatch.setattr(PackedModel, "forward", wrong)
        with pytest.raises(UnsupportedRequestError, match=text):
            enable(model)


@pytest.mark.parametrize("merged", [False, True])
def test_what_is_proven_leaves_nothing(merged: bool) -> None:
    """Neither a cache nor hooks, whatever format the cache gets and however the linears run."""
    model = make_model("llama")
    calls: list[int] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    config = vattn.CacheConfig(cache_dtype="fp8", block_size=8)
    packed = enable(model, cache_config=config, quant_config=vattn.QuantConfig(0.1, 0.1), merge_projections=merged)
    layers = [module for module in packed.modules() if isinstance(module, vattn.Attention)]
    assert packed.kv_cache is None and all(layer.kv_cache is None for layer in layers)
    assert sum(len(module._forward_hooks) for module in model.modules()) == 1 and calls
    assert packed.allocate(num_blocks=4).block_size == 8


def test_falcon_is_compared_with_its_attention_that_is_right() -> None:
    model = make_model("falcon-alibi")
    model.config._attn_implementation = "eager"
    enable(model)
    disable(model)
    assert model.config._attn_implementation == "eager"


def test_eager_attention_that_rounds_large_scores_is_compared_in_fp32() -> None:
    """Its own results are off by 7 % here."""
    model = make_model("llama").to(torch.bfloat16)
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.mul_(10)
    enable(model)
    disable(model)
    assert model.config._attn_implementation == "eager"


def test_short_models_and_dynamic_fp8_are_proven() -> None:
    enable(make_model("gpt2", n_positions=8))
    model = make_model("llama", hidden_size=128, intermediate_size=128).to(torch.bfloat16)
    vattn.quantise_linears(model, "fp8_dynamic")
    enable(model, merge_projections=True)


def test_the_switch_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match="prove"):
        enable(make_model("llama"), prove="no")  # type: ignore[arg-type]
