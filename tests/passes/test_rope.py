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
from harness import Capture, copied, in_regions, step
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
from torch import Tensor, nn

import vattn
from vattn.errors import ConfigError, FusionError
from vattn.passes import verdicts
from vattn.passes.pipeline import FusionPass
from vattn.passes.rope_kv_cache import find as rope_kv_cache
from vattn.passes.rope_kv_cache import probe as rope_probe
from vattn.quantization.formats import OUTPUT_FORMATS

LENGTHS = [3, 4]


captured = partial(harness.captured, query_lens=LENGTHS, inputs=inputs, rope="always")
"""Compile up to the passes, which fuse RoPE wherever it is possible."""


def both_ways(capture: Capture, model: Any, lengths: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Run the graph after and before the passes, op by op, on a cache of zeros; returns output and cache of each."""

    def run() -> tuple[Tensor, Tensor]:
        model.attn.kv_cache.zero_()
        with step(model, lengths):
            output, escaped = capture.target(*inputs(sum(lengths)))
        return torch.cat((output.float().flatten(), escaped.float().flatten())), model.attn.kv_cache.clone()

    return capture.both(run)


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


FAST = (
    "transformers' way, bf16",
    "halves written in place",
    "one table for both",
    "RMSNorm by torch",
    "FP8 query and cache behind a norm",
    "the query alone",
)
"""Forms that the compiler treats differently; `test_by_hand` judges all of them without it."""


def targets(graph: torch.fx.Graph) -> list[str]:
    called = [node.args[0] if "auto_functionalized" in str(node.target) else node.target for node in graph.nodes]
    return [str(target).removesuffix(".default") for target in called]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in FORMS])
def test_forms(name: str) -> None:
    form = FORMS[name]
    model = LayerWithRope(form)
    capture = captured(model)
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
        check_same(both_ways(capture, model, lengths), form)


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


def test_on_a_cpu_auto_leaves_it_to_inductor() -> None:
    capture = captured(LayerWithRope(FORMS["chunk and cat, fp32"]), rope="auto")
    (node,) = capture.report
    assert node.rope_outcome == "refused" and "RoPE refused: left to Inductor" in str(node)


def test_code_that_rounds_after_every_operation_is_left_alone() -> None:
    with torch._inductor.config.patch(emulate_precision_casts=True):
        (node,) = captured(LayerWithRope(FORMS["transformers' way, bf16"])).report
    assert node.rope_outcome == "near miss" and "emulate_precision_casts" in node.rope


def test_never_says_nothing() -> None:
    (node,) = captured(LayerWithRope(FORMS["chunk and cat, fp32"]), rope="never").report
    assert node.rope == ""


def test_wrong_choices_are_refused() -> None:
    for enter in (vattn.options, vattn.enable):
        for wrong in ("sometimes", True, None):
            with pytest.raises(ConfigError, match="rope="):
                enter(rope=wrong)
        with pytest.raises(ConfigError, match="strict='yes'"):
            enter(strict="yes")
    with pytest.raises(Exception, match="rope='yes'"), step(model := LayerWithRope(FORMS["no RoPE"]), LENGTHS):
        vattn.compile(model, backend=vattn.backend, options={"vattn.rope": "yes"})(*inputs(7))


def test_the_choice_is_part_of_the_cache_key() -> None:
    passes = [FusionPass(False, ("none",), (), choice) for choice in rope_kv_cache.ROPE_CHOICES]
    assert len({p.uuid() for p in passes}) == len(passes) and passes[0] != passes[1]


def graph_of_codes(form: RopeForm) -> torch.fx.Graph:
    """Return the graph of a layer and a function that quantises its output, so that RoPE alone is missed."""

    def codes(*args: Tensor) -> Tensor:
        return (model(*args)[0].float() / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn)

    model = LayerWithRope(form)
    capture = Capture(codes, rope="never")
    with step(model, LENGTHS):
        capture.target(*inputs(7))
    return capture.before[0].graph


def test_strict_requires_rope_only_where_it_always_should_be() -> None:
    graph = graph_of_codes(RopeForm(swapped, ""))
    FusionPass(True, tuple(OUTPUT_FORMATS), (), "auto")(copied(graph))
    with pytest.raises(FusionError, match="not as a rotation"):
        FusionPass(True, tuple(OUTPUT_FORMATS), (), "always")(graph)


def test_strict_takes_a_model_without_rope() -> None:
    FusionPass(True, tuple(OUTPUT_FORMATS), (), "always")(graph_of_codes(FORMS["a low-rank part, no RoPE"]))


def test_an_exception_in_the_matcher_leaves_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for place, name in ((rope_probe, "_classify"), (vattn.passes.rope_kv_cache.rewrite, "_new_call")):
        verdicts.forget()
        with monkeypatch.context() as patch:
            patch.setattr(place, name, lambda *args: 1 / 0)
            capture = captured(LayerWithRope(FORMS["chunk and cat, fp32"]))
        (node,) = capture.report
        assert node.rope_outcome == "refused" and "ZeroDivisionError" in node.rope
        assert targets(capture.after[0].graph) == targets(capture.before[0].graph)
    verdicts.forget()


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


def test_a_model_of_equal_layers_is_probed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for the key and once for the query, whatever the number of layers."""
    verdicts.forget()
    calls: list[str] = []
    classify = rope_probe._classify
    monkeypatch.setattr(rope_probe, "_classify", lambda *args: calls.append("") or classify(*args))
    model = Stack(3)
    for index, layer in enumerate(model.layers):
        layer.inner.attn.prefix = f"layers.{index}.attn"
    capture = captured(model)
    assert [node.rope_outcome for node in capture.report] == ["fused"] * 3
    assert len(calls) == 2


class StackOfOneTable(Stack):
    """As `Stack`, whose layers get cos and sin in the place of positions."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().forward(x, gathered(self.layers[0].inner, positions))  # type: ignore[arg-type]


def test_layers_share_the_views_of_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_forms, "gathered", lambda layer, tables: tables)
    capture = captured(StackOfOneTable(2))
    assert [node.rope_outcome for node in capture.report] == ["fused"] * 2
    views = [node for node in capture.after[0].graph.nodes if node.target is torch.ops.aten.as_strided.default]
    assert sorted(str(view.args[0]) for view in views) == ["cos", "sin"]


def test_equal_regions_share_one_fused_graph() -> None:
    model = Stack(3)
    capture = Capture(model, rope="always", compiler=in_regions)
    with step(model, LENGTHS):
        fused, plain = capture.both(lambda: model(*inputs(7)))
    assert torch.equal(fused, plain)
    (node,) = capture.report
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
    model = LayerWithRope(form)
    capture = captured(model)
    (node,) = capture.report
    assert (node.rope_outcome == "fused") == is_rope, node.rope
    check_same(both_ways(capture, model, [5, 2]), form)


@settings(max_examples=3)
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
