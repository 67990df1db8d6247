"""RoPE, the query's quantisation and the cache write as one op: what fuses, what is refused, and what it computes."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import harness
import pytest
import rope_forms
import torch
from harness import Capture, step
from hypothesis import given, settings
from hypothesis import strategies as st
from rope_forms import (
    FORMS,
    HEADS,
    WIDTH,
    LayerWithRope,
    RopeForm,
    gathered,
    inputs,
    looked_up,
    swapped,
    table_of_both,
)
from test_entry import assert_same_but_cached, run_process
from torch import Tensor, nn

import vattn
from vattn.errors import ConfigError, FusionError
from vattn.passes.pipeline import FusionPass, fuse_graph
from vattn.passes.rope_kv_cache import find as rope_kv_cache
from vattn.passes.rope_kv_cache import probe as rope_probe

LENGTHS = [3, 4]


def captured(model: nn.Module, lengths: list[int] | None = None) -> tuple[Capture, Any]:
    """Compile up to the passes with `rope="always"`."""
    torch._dynamo.reset()
    capture = Capture()
    target = vattn.compile(model, backend=capture.backend)
    with step(model, lengths or LENGTHS):
        target(*inputs(sum(lengths or LENGTHS)))
    return capture, target


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "fuse_graph", partial(fuse_graph, rope="always"))


def both_ways(capture: Capture, target: Any, model: Any, lengths: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Run the graph after and before the passes, op by op, on a cache of zeros; returns output and cache of each."""
    results = []
    for fused in (True, False):
        capture.fused = fused
        model.attn.kv_cache.zero_()
        with step(model, lengths):
            output, escaped = target(*inputs(sum(lengths)))
        results.append((torch.cat((output.float().flatten(), escaped.float().flatten())), model.attn.kv_cache.clone()))
    return results


def values(cache: Tensor) -> Tensor:
    return (cache.view(torch.float8_e4m3fn) if cache.dtype == torch.uint8 else cache).float()


def check_same(results: list[tuple[Tensor, Tensor]], form: RopeForm) -> None:
    """Compare the graphs run op by op; `test_generated_code` compares what Inductor makes of them, bitwise."""
    (output, cache), (plain_output, plain_cache) = results
    if form.exact:
        assert torch.equal(output, plain_output) and torch.equal(cache, plain_cache)
        return
    # The graph before rounds to bf16 after every op, the fused op once; a code of the query then may be the next one,
    # up to 12 % away.
    limit = 0.08 if "q_scale" in form.options else 0.02
    assert (output - plain_output).norm() <= limit * plain_output.norm()
    assert (values(cache) - values(plain_cache)).norm() <= 0.02 * values(plain_cache).norm()


def targets(graph: torch.fx.Graph) -> list[str]:
    called = [node.args[0] if "auto_functionalized" in str(node.target) else node.target for node in graph.nodes]
    return [str(target).removesuffix(".default") for target in called]


@pytest.mark.parametrize("name", list(FORMS))
def test_forms(name: str, always: None) -> None:
    form = FORMS[name]
    model = LayerWithRope(form)
    capture, target = captured(model)
    (node,) = capture.report
    assert form.says in node.rope, node.rope
    called = targets(capture.after[0].graph)
    assert called.count("vattn.rope_kv_cache_update") == int(form.fuses is True), node.rope
    assert called.count("vattn.kv_cache_update") == int(form.fuses is not True)
    if not form.fuses:
        assert node.rope_outcome == ("" if form.fuses is None else "near miss")
        return
    assert node.rope_outcome == "fused"
    if form.write in (looked_up, table_of_both):
        assert not {"aten.index.Tensor", "aten.index_select"} & set(called)
    assert "q_scale" not in form.options or node.query == "FP8, quantised by the op that rotates it"
    for lengths in (LENGTHS, [9, 1, 2]):
        check_same(both_ways(capture, target, model, lengths), form)


def compiled(form: str, **options: Any) -> tuple[LayerWithRope, Any]:
    torch._dynamo.reset()
    model = LayerWithRope(FORMS[form])
    return model, vattn.compile(model, options=vattn.options(**options))


def generated_code(form: str, rope: str) -> list[str]:
    """Return what is generated without the pass and with it; steps of three sizes must give the same bits both ways."""
    from torch._inductor.utils import run_and_get_code

    results = []
    for choice in ("never", rope):
        model, run = compiled(form, rope=choice)
        outputs = []
        for count, lengths in enumerate(([3, 4], [5, 1, 2], [9, 9])):
            with step(model, lengths):
                if count:
                    outputs.append(run(*inputs(sum(lengths)))[0])
                else:
                    (output, _), codes = run_and_get_code(run, *inputs(sum(lengths)))
                    outputs.append(output)
        assert len(codes) == 1
        results.append((torch.cat(outputs), model.attn.kv_cache.clone(), codes[0]))
    (unfused, unfused_cache, before), (fused, fused_cache, after) = results
    assert torch.equal(unfused, fused) and torch.equal(unfused_cache, fused_cache)
    return [before, after]


@pytest.mark.long
@pytest.mark.parametrize(
    "form",
    [
        "chunk and cat, fp32",
        "transformers' way, bf16",
        "FP8 query, a scale for each KV head",
        "FP8 query and cache behind a norm",
        "RMSNorm by torch",
        "RMSNorm without a weight",
    ],
)
def test_generated_code(form: str) -> None:
    """Bitwise as the unfused compiled graph, one graph for all sizes, no copy of the cache, no kernel for RoPE."""
    before, after = generated_code(form, "always")
    assert len(re.findall(r"torch\.ops\.vattn\.rope_kv_cache_update\.default\(", after)) == 1
    assert "vattn.kv_cache_update" not in after and "clone" not in after
    kernels = [len(re.findall(r"^\s+cpp_fused\w*\(", code, re.MULTILINE)) for code in (before, after)]
    assert kernels[1] <= kernels[0]  # what is left makes cos and sin
    node = vattn.fusion_report().nodes[-1]
    assert node.rope_outcome == "fused" and "rope_forms.py" in node.rope_source


def test_on_a_cpu_auto_leaves_it_to_inductor(caplog: pytest.LogCaptureFixture) -> None:
    model, run = compiled("chunk and cat, fp32")
    with step(model, LENGTHS), caplog.at_level("INFO", logger="vattn"):
        run(*inputs(7))
    (node,) = vattn.fusion_report()
    assert node.rope_outcome == "refused" and "left to Inductor" in node.rope
    text = str(vattn.fusion_report())
    assert "RoPE refused: left to Inductor" in text
    assert vattn.fusion_report().as_dict()[node.graph][0]["rope"] == node.rope
    assert sum("left to Inductor" in record.getMessage() for record in caplog.records) == 1


def test_code_that_rounds_after_every_operation_is_left_alone() -> None:
    with torch._inductor.config.patch(emulate_precision_casts=True):
        model, run = compiled("transformers' way, bf16", rope="always")
        with step(model, LENGTHS):
            run(*inputs(7))
    (node,) = vattn.fusion_report()
    assert node.rope_outcome == "near miss" and "emulate_precision_casts" in node.rope


def test_never_says_nothing() -> None:
    model, run = compiled("chunk and cat, fp32", rope="never")
    with step(model, LENGTHS):
        run(*inputs(7))
    assert [node.rope for node in vattn.fusion_report()] == [""]


def test_wrong_choices_are_refused() -> None:
    for wrong in ("sometimes", True, None):
        for enter in (vattn.options, vattn.enable):
            with pytest.raises(ConfigError, match="rope="):
                enter(rope=wrong)
    with pytest.raises(Exception, match="rope='yes'"), step(model := LayerWithRope(FORMS["no RoPE"]), LENGTHS):
        vattn.compile(model, backend=vattn.backend, options={"vattn.rope": "yes"})(*inputs(7))


def test_the_choice_is_part_of_the_cache_key() -> None:
    passes = [FusionPass(False, ("none",), (), choice) for choice in rope_kv_cache.ROPE_CHOICES]
    assert len({p.uuid() for p in passes}) == len(passes) and passes[0] != passes[1]


def test_strict_asks_for_rope_only_where_it_always_should_be() -> None:
    def codes(model: LayerWithRope, *args: Tensor) -> Tensor:
        return (model(*args)[0].float() / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn)

    model = LayerWithRope(RopeForm(swapped, ""))
    for choice, raises in (("auto", False), ("always", True)):
        torch._dynamo.reset()
        run = vattn.compile(partial(codes, model), options=vattn.options(strict=True, rope=choice))
        with step(model, LENGTHS):
            if raises:
                with pytest.raises(FusionError, match="not as a rotation"):
                    run(*inputs(7))
            else:
                run(*inputs(7))


def test_an_exception_in_the_matcher_leaves_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch, always: None) -> None:
    for place, name in ((rope_probe, "_classify"), (vattn.passes.rope_kv_cache.rewrite, "_new_call")):
        rope_probe._known.clear()
        with monkeypatch.context() as patch:
            patch.setattr(place, name, lambda *args: 1 / 0)
            capture, _ = captured(LayerWithRope(FORMS["chunk and cat, fp32"]))
        (node,) = capture.report
        assert node.rope_outcome == "refused" and "ZeroDivisionError" in node.rope
        assert targets(capture.after[0].graph) == targets(capture.before[0].graph)
    rope_probe._known.clear()


class Stack(nn.Module):
    """Layers that add to their input."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, positions)
        return x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = LayerWithRope(FORMS["chunk and cat, fp32"])
        self.out = nn.Linear(HEADS * WIDTH, 64, bias=False, dtype=torch.bfloat16).requires_grad_(False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.out(self.inner(x, positions)[0])


def test_a_model_of_equal_layers_asks_twice(monkeypatch: pytest.MonkeyPatch, always: None) -> None:
    """Once for the key and once for the query, whatever the number of layers."""
    rope_probe._known.clear()
    calls: list[str] = []
    classify = rope_probe._classify
    monkeypatch.setattr(rope_probe, "_classify", lambda *args: calls.append("") or classify(*args))
    model = Stack(5)
    for index, layer in enumerate(model.layers):
        layer.inner.attn.prefix = f"layers.{index}.attn"
    capture, _ = captured(model)
    assert [node.rope_outcome for node in capture.report] == ["fused"] * 5
    assert len(calls) == 2


class StackOfOneTable(Stack):
    """As `Stack`, whose layers get cos and sin in the place of positions."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().forward(x, gathered(self.layers[0].inner, positions))  # type: ignore[arg-type]


def test_layers_share_the_views_of_tables(monkeypatch: pytest.MonkeyPatch, always: None) -> None:
    monkeypatch.setattr(rope_forms, "gathered", lambda layer, tables: tables)
    capture, _ = captured(StackOfOneTable(3))
    assert [node.rope_outcome for node in capture.report] == ["fused"] * 3
    views = [node for node in capture.after[0].graph.nodes if node.target is torch.ops.aten.as_strided.default]
    assert sorted(str(view.args[0]) for view in views) == ["cos", "sin"]


def test_equal_regions_share_one_fused_graph() -> None:
    results = []
    for choice in ("never", "always"):
        torch._dynamo.reset()
        model = Stack(4)
        vattn.compile_regions(model, options=vattn.options(rope=choice))
        with step(model, LENGTHS):
            results.append(model(*inputs(7)))
    assert torch.equal(*results)
    (node,) = list(vattn.fusion_report())[-1:]
    assert node.rope_outcome == "fused" and node.count == 1


@pytest.mark.long
@pytest.mark.skipif(torch.__version__ < "2.12", reason="older ones crash when they load the package")
def test_export_and_aot_inductor(tmp_path: Path) -> None:
    # Not with an FP8 query: AOTInductor makes a constant of its scale, which the op does not take.
    model = LayerWithRope(FORMS["FP8 cache"])
    builder = vattn.AttentionMetadataBuilder(8, 64, 64, 16, layers=model)
    sample = builder.build([2, 1], [2, 1], [[1], [2]])
    exported = vattn.export_step(model, tuple(inputs(3)), sample)
    with vattn.enable(rope="always"):
        package = exported.compile(str(tmp_path / "model.pt2"))
    assert [node.rope_outcome for node in vattn.fusion_report()] == ["fused"]
    built = builder.build([3, 4], [3, 4], [[1], [2]])
    got = package(*exported.inputs(tuple(inputs(7)), built))[0]
    with vattn.forward_context(built):
        want = model(*inputs(7))[0]
    assert (got.float() - want.float()).norm() < 0.02 * want.float().norm()


@pytest.mark.long
def test_the_report_survives_the_compile_cache(tmp_path: Path) -> None:
    first, second = (run_process(tmp_path, "rope") for _ in range(2))
    assert second["inductor"] == {"fxgraph_cache_hit": 1} and first["outputs"] == second["outputs"]
    assert_same_but_cached(first["report"], second["report"])
    ((node,),) = second["report"].values()
    assert node["rope_outcome"] == "fused"


def test_explain_fusion_shows_it() -> None:
    from vattn.cli.explain_fusion import explain_fusion

    def make() -> tuple[Any, ...]:
        model = LayerWithRope(FORMS["chunk and cat, fp32"])
        return model, inputs(7), harness.step_of(model, LENGTHS)

    report, _ = explain_fusion(make)
    assert "RoPE refused: left to Inductor" in str(report)


PAIRINGS = ("chunk", "slices", "stride", "unflatten")
"""How the members of pairs are taken apart; the first two are NeoX."""


@st.composite
def programs(draw: st.DrawFn) -> tuple[RopeForm, bool]:
    """Return a small random program around RoPE, and whether it is RoPE."""
    pairing = draw(st.sampled_from(PAIRINGS))
    columns = draw(st.sampled_from((WIDTH, WIDTH // 2, 6)))
    wide = draw(st.booleans())
    doubled = draw(st.booleans())
    mistake = draw(st.sampled_from(("none", "none", "none", "sign", "order", "shift", "scale", "sine")))

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        dtype, half = x.dtype, columns // 2
        x, rest = x[..., :columns], x[..., columns:]
        x = x.float() if wide else x
        cos, sin = (t[..., :half].to(x.dtype) for t in (cos, sin))
        if pairing == "chunk":
            first, second = x.chunk(2, dim=-1)
        elif pairing == "slices":
            first, second = x[..., :half], x[..., half:]
        elif pairing == "stride":
            first, second = x[..., ::2], x[..., 1::2]
        else:
            first, second = x.unflatten(-1, (half, 2)).unbind(-1)
        if mistake == "shift":
            second = second + 0.5
        if mistake == "scale":
            cos = cos * 1.25  # another table, which the op takes
        a = first * cos + second * sin if mistake == "sign" else first * cos - second * sin
        b = second * cos + first * (cos if mistake == "sine" else sin)
        if mistake == "order":
            a, b = b, a
        if pairing in ("chunk", "slices"):
            turned = torch.cat((a, b), dim=-1)
        else:
            turned = torch.stack((a, b), dim=-1).flatten(-2)
        return torch.cat((turned, rest.to(turned.dtype)), dim=-1).to(dtype)

    def write(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if doubled:
            angles = layer.angles[positions].repeat(1, 2)[:, None, : WIDTH // 2]
            cos, sin = angles.cos(), angles.sin()
        else:
            cos, sin = gathered(layer, positions)
        return turn(query, cos, sin), turn(key, cos, sin)

    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["q_scale"] = draw(st.sampled_from((0.03, [0.03, 0.02])))
    if draw(st.booleans()):
        options["cache"] = "fp8"
    is_rope = mistake == "none" or (mistake == "scale" and wide)  # Else one table is rounded and the other is not.
    return RopeForm(write, "", is_rope, not is_rope or (wide and "q_scale" not in options), options), is_rope


def check_program(form: RopeForm, is_rope: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "fuse_graph", partial(fuse_graph, rope="always"))
        model = LayerWithRope(form)
        capture, target = captured(model)
        (node,) = capture.report
        assert (node.rope_outcome == "fused") == is_rope, node.rope
        check_same(both_ways(capture, target, model, [5, 2]), form)


@settings(max_examples=6)
@given(programs())
def test_random_programs(program: tuple[RopeForm, bool]) -> None:
    check_program(*program)


@pytest.mark.long
@settings(max_examples=60)
@given(programs())
def test_many_random_programs(program: tuple[RopeForm, bool]) -> None:
    check_program(*program)


def test_the_guide_lists_the_forms() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "fusion-proofs.md").read_text()
    for name, form in FORMS.items():
        verdict = "fused" if form.fuses else "nothing to report" if form.fuses is None else f"refused: {form.says}"
        assert f"| {name} | {verdict} |" in guide
