"""RoPE and attention joined into one op: what is joined, what stays apart, and that nothing else changes."""

from __future__ import annotations

import re
from functools import partial

import harness
import pytest
import torch
from harness import Capture, step
from rope_forms import FORMS, LayerWithRope, RopeForm, chunked, inputs
from test_rope import LENGTHS, Stack, both_ways, captured, check_same, generated_code, targets
from torch import Tensor

import vattn
from vattn.errors import FusionError
from vattn.passes import rope_join
from vattn.passes.pipeline import fuse_graph

JOINED = "one op with attention, which runs as the two that it was: backend TORCH_SDPA has no such kernel"


@pytest.fixture
def attend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "fuse_graph", partial(fuse_graph, rope="attend"))


def check_joined(capture: Capture, count: int = 1) -> None:
    called = targets(capture.after[0].graph)
    assert called.count("vattn.rope_attention") == count
    assert not {"vattn.attention", "vattn.rope_kv_cache_update", "vattn.kv_cache_update"} & set(called)
    assert [node.rope_outcome for node in capture.report] == ["fused"] * count
    assert all(node.rope.endswith(JOINED) for node in capture.report), capture.report


@pytest.mark.parametrize(
    "name",
    [
        "FP8 query, a scale for each KV head", "tables looked up",
        pytest.param("chunk and cat, fp32", marks=pytest.mark.slow), pytest.param("FP8 cache", marks=pytest.mark.slow),
        pytest.param("FP8 query and cache behind a norm", marks=pytest.mark.slow),
        pytest.param("partial, interleaved", marks=pytest.mark.slow),
        pytest.param("RMSNorm without a weight", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_it_computes_what_the_graph_computed(name: str, attend: None) -> None:
    form = FORMS[name]
    model = LayerWithRope(form)
    capture, target = captured(model)
    check_joined(capture)
    for lengths in (LENGTHS, [9, 1, 2], [1, 1, 1]):
        check_same(both_ways(capture, target, model, lengths), form)


@pytest.mark.slow
def test_it_is_bitwise_the_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for choice in ("always", "attend"):
        monkeypatch.setattr(harness, "fuse_graph", partial(fuse_graph, rope=choice))
        model = LayerWithRope(FORMS["FP8 query and cache behind a norm"])
        capture, target = captured(model)
        results.append(both_ways(capture, target, model, LENGTHS)[0])
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine, other)


def test_a_quantised_output_is_joined_too(attend: None) -> None:
    def codes(model: LayerWithRope, *args: Tensor) -> Tensor:
        return (model(*args)[0].float() / model.out_scale).clamp(-448, 448).to(torch.float8_e4m3fn)

    model = LayerWithRope(FORMS["FP8 cache"])
    model.register_buffer("out_scale", torch.tensor(0.01))
    torch._dynamo.reset()
    capture = Capture()
    target = vattn.compile(partial(codes, model), backend=capture.backend)
    results = []
    for fused in (True, False):
        capture.fused = fused
        with step(model, LENGTHS):
            results.append(target(*inputs(7)))
    check_joined(capture)
    assert capture.report[0].output_format == "fp8_static" and capture.report[0].outcome == "fused"
    assert torch.equal(*(codes.view(torch.uint8) for codes in results))


@pytest.mark.slow
def test_every_layer_of_a_model(attend: None) -> None:
    model = Stack(3)
    for index, layer in enumerate(model.layers):
        layer.inner.attn.prefix = f"layers.{index}.attn"
    capture, target = captured(model)
    check_joined(capture, 3)
    results = []
    for fused in (True, False):
        capture.fused = fused
        with step(model, LENGTHS):
            results.append(target(*inputs(7)))
    assert torch.equal(*results)


def test_what_the_form_refuses_is_not_joined(attend: None) -> None:
    capture, _ = captured(LayerWithRope(FORMS["different tables"]))
    called = targets(capture.after[0].graph)
    assert "vattn.rope_attention" not in called and "vattn.attention" in called
    assert capture.report[0].rope_outcome == "near miss"


def test_other_scales_stay_apart(attend: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_other_scale(call: torch.fx.Node, rope: torch.fx.Node) -> None:
        scale = call.kwargs["k_scale"]
        assert isinstance(scale, torch.fx.Node)
        with call.graph.inserting_before(call):
            copy = call.graph.call_function(torch.ops.aten.mul.Tensor, (scale, 1.0))
        copy.meta.update(scale.meta)
        call.kwargs = {**call.kwargs, "k_scale": copy}

    monkeypatch.setattr(rope_join, "_check_same_cache", with_other_scale)
    capture, target = captured(model := LayerWithRope(FORMS["FP8 cache"]))
    called = targets(capture.after[0].graph)
    assert "vattn.rope_kv_cache_update" in called and "vattn.attention" in called
    (node,) = capture.report
    assert node.rope_outcome == "near miss" and "different tensors as k_scale" in node.rope
    check_same(both_ways(capture, target, model, LENGTHS), FORMS["FP8 cache"])


def test_an_exception_leaves_the_pair(attend: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_join, "_arguments", lambda *args: 1 / 0)
    capture, _ = captured(LayerWithRope(FORMS["chunk and cat, fp32"]))
    (node,) = capture.report
    assert node.rope_outcome == "refused" and "ZeroDivisionError" in node.rope
    assert "vattn.rope_kv_cache_update" in targets(capture.after[0].graph)


@pytest.mark.slow
def test_strict_asks_for_it() -> None:
    def written(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        query, key = chunked(layer, query, key, positions)
        return query * 1.25, key

    model = LayerWithRope(RopeForm(written, "", False))
    torch._dynamo.reset()
    run = vattn.compile(model, options=vattn.options(strict=True, rope="attend"))
    with step(model, LENGTHS), pytest.raises(FusionError, match="RoPE near miss"):
        run(*inputs(7))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["chunk and cat, fp32", "FP8 query, a scale for each KV head"])
def test_generated_code(form: str) -> None:
    """Bitwise as the unfused compiled graph, one op a layer, and no copy of the cache."""
    _, after = generated_code(form, "attend")
    assert len(re.findall(r"torch\.ops\.vattn\.rope_attention\.default\(", after)) == 1
    assert "vattn.attention" not in after and "clone" not in after
