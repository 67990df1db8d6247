"""Query quantisation: in the kernel of what makes the query where there is one, in the attention kernel otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from forms import static
from harness import COLUMNS, HEADS, WIDTH, Attend, Capture, captured, code_of, in_regions, step
from hypothesis import given, settings
from hypothesis import strategies as st
from queries import PER_HEAD, PER_TENSOR, REFUSED, Written, by_group, heads, inputs, rounded
from torch import Tensor, nn

import vattn
from tests.support import make_config
from vattn.backends import selector
from vattn.config.device import DeviceInfo
from vattn.errors import FusionError
from vattn.ops.fusion_notes import NodeReport
from vattn.passes import verdicts
from vattn.passes.pipeline import fuse_graph
from vattn.passes.query_quant import find as query_quant
from vattn.passes.query_quant.find import IN_LOAD, IN_PRODUCER, IS_INPUT, OWN_KERNEL, ROUNDED_EARLY, in_load
from vattn.passes.region_run import same_bits

SCALES = [0.0137, 0.031]


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x.view(-1, HEADS, WIDTH).float()
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).bfloat16().flatten(1)


class Quantised(nn.Module):
    """A layer that quantises its query, behind RoPE or behind a GEMM alone."""

    def __init__(self, rotate: bool, q_scale: Any = 0.03) -> None:
        super().__init__()
        scales = vattn.QuantConfig(query_format="fp8_e4m3", q_scale=q_scale)
        self.attn = vattn.Attention(HEADS, WIDTH, WIDTH**-0.5, 2, prefix="layers.0.attn", quant_config=scales)
        self.qkv = nn.Linear(COLUMNS, 2 * COLUMNS, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.rotate = rotate
        self.register_buffer("scale", torch.tensor([0.0137]))
        self.register_buffer("angles", torch.randn(1, 1, WIDTH // 2))
        vattn.allocate_kv_cache(self, num_blocks=16, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).split((COLUMNS, COLUMNS // 2, COLUMNS // 2), dim=-1)
        if self.rotate:
            query = rope(query, self.angles.cos(), self.angles.sin())
        return static(self.attn(query, key, value), self.scale)


def compare(model: nn.Module, *arguments: Tensor, dynamic: bool = True) -> tuple[NodeReport, Capture]:
    """Run the graph with and without the passes, op by op; both must return the same bits."""
    compiler = vattn.compile if dynamic else partial(torch.compile, dynamic=False)
    capture = Capture(model, compiler=compiler, fullgraph=True)
    for got, expected in zip(*capture.both(lambda: capture.target(*arguments)), strict=True):
        # Casts without a clamp give NaN before torch 2.12.
        assert same_bits(got, expected) and not bool(got.isnan().all())
    assert len(capture.report) == 1  # both calls ran one graph
    return capture.report[0], capture


def calls_of(capture: Capture) -> str:
    return "\n".join(str(node.kwargs.get("config")) for node in capture.after[0].graph.nodes)


def casts_of(capture: Capture) -> int:
    nodes = capture.after[0].graph.nodes
    return sum(getattr(node.meta.get("val"), "dtype", None) is torch.float8_e4m3fn for node in nodes)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", [*PER_TENSOR, *PER_HEAD])
def test_however_it_is_written_the_attention_kernel_takes_it_over(name: str) -> None:
    way = PER_TENSOR.get(name) or PER_HEAD[name]
    node, capture = compare(Written(way, SCALES if name in PER_HEAD else None), inputs())
    assert (node.query, node.query_outcome) == (f"{IN_LOAD}, after mm", "fused")
    assert "queries.py" in node.query_source
    arithmetic = "multiply" if "reciprocal" in name or "one over" in name else "divide"
    assert f"query_load={arithmetic}" in calls_of(capture) and casts_of(capture) == 0


@pytest.mark.parametrize(
    ("name", "dtype"), [("divide", torch.float32), ("computed scale", torch.float16), ("groups", torch.float16)]
)
def test_other_dtypes_and_fixed_sizes(name: str, dtype: torch.dtype) -> None:
    way = PER_TENSOR.get(name) or PER_HEAD[name]
    model = Written(way, SCALES if name in PER_HEAD else None, dtype=dtype)
    node, _ = compare(model, inputs(dtype=dtype), dynamic=False)
    assert node.query == f"{IN_LOAD}, after mm"


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_query_load_means_is_refused_with_the_line(name: str) -> None:
    way, reason, line = REFUSED[name]
    node, capture = compare(Written(way), inputs())
    assert (node.query, node.query_outcome) == (f"{OWN_KERNEL} mm: {reason}", "near miss")
    assert line in node.query_source and "queries.py" in node.query_source
    assert "query_load" not in calls_of(capture)


def test_the_scale_of_another_head_in_a_row_of_a_fixed_number() -> None:
    """The proof's runs have values in that row that are zeros or infinities under every scale."""
    node, _ = compare(Written(another_head_in_a_row, SCALES), inputs(300), dynamic=False)
    assert node.query_outcome == "near miss" and "query divided by the op's q_scale" in node.query


def divided(q: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    return PER_TENSOR["divide"](q, s)


class Both(Written):
    """Returns the codes too."""

    def forward(self, x: Tensor) -> Any:
        codes, q_scale = self.way(self.make(self, x), self.scale)
        output = x.new_empty((x.shape[0], HEADS, WIDTH))
        self.attend(codes.reshape(-1, HEADS, WIDTH), q_scale, output)
        return output, codes.float()


class OwnScale(Written):
    """Quantises by a scale that is not the op's."""

    def __init__(self) -> None:
        super().__init__(lambda q, s: (rounded(q.float() / self.own), s))
        self.register_buffer("own", torch.tensor([0.0137]))


def per_query_head(q: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    return rounded(heads(q).float() / s[:, None]), s.view(2, 2).amax(1)


def by_columns(module: Any, x: Tensor) -> Tensor:
    return (module.proj.weight @ x.t()).t()


KEPT: dict[str, tuple[Callable[[], Written], str]] = {
    "codes read elsewhere": (lambda: Both(divided), ".* reads it quantised too"),
    "a scale per query head": (lambda: Written(per_query_head, [0.01, 0.02, 0.03, 0.04]), ".*not those of the query.*"),
    "an unrelated scale": (OwnScale, r".*of shape \(1,\), which is not the op's q_scale"),
    # Its codes were copied into rows; the op could not read it.
    "a query that lies column by column": (
        lambda: Written(lambda q, s: (rounded(q.float() / s).contiguous(), s), make=by_columns),
        ".*does not lie row by row in memory, as the op takes it",
    ),
    "another dtype": (
        lambda: Written(divided, make=lambda module, x: x.float() @ module.proj.weight.float().t()),
        "it is rounded from another dtype than bfloat16, in which the op takes it",
    ),
}


def another_head_in_a_row(q: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    row = torch.arange(q.shape[0]) == 127
    return rounded(by_group(q).float() / s[(torch.arange(2) + row[:, None]) % 2][:, :, None, None]), s


KEPT_WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "codes read elsewhere": ({"way": divided, "returned": lambda codes: codes.float()}, "reads it quantised too"),
    "codes returned": ({"way": divided, "returned": lambda codes: codes.view(torch.uint8)}, "reads it quantised too"),
    "a scale per query head": (
        {"way": per_query_head, "scales": (0.01, 0.02, 0.03, 0.04)},
        "not those of the query divided by the op's q_scale and clamped to +-448",
    ),
    "the scale of another head in a row": (
        {"way": another_head_in_a_row, "scales": (0.01, 0.02)},
        "iota numbers the tokens, which a query load treats alike",
    ),
    "a query that lies column by column": (
        {"way": lambda q, s: (rounded(q.float() / s).contiguous(), s), "make": by_columns},
        "does not lie row by row in memory, as the op takes it",
    ),
    "another dtype": (
        {"way": divided, "make": lambda module, x: x.float() @ module.proj.weight.float().t()},
        "it is rounded from another dtype than bfloat16, in which the op takes it",
    ),
    "a q_scale of the query": (
        {"way": lambda q, s: (rounded(q.float() / s), q.float().abs().amax().reshape(1) / 448)},
        "the op's q_scale is computed from the query, which is not divided by it",
    ),
    "a scale of an input": (
        {"way": lambda q, s: (rounded(q.float() / q.new_ones(1).float()), s)},
        "not those of the query divided by the op's q_scale and clamped to +-448",
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_the_op_cannot_read_stays(name: str) -> None:
    make, why = KEPT[name]
    node, _ = compare(make(), inputs())
    assert re.fullmatch(f"FP8, quantised .*, after mm: {why}|{OWN_KERNEL} mm: {why}", node.query), node.query
    assert node.query_outcome == "near miss"
    assert name != "codes read elsewhere" or "codes.float()" in node.query_source


PRODUCERS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "gelu": (lambda module, x: nn.functional.gelu(module.proj(x)), IN_PRODUCER),
    "residual": (lambda module, x: x + module.proj(x), IN_PRODUCER),
    "norm": (lambda module, x: nn.functional.rms_norm(module.proj(x), (COLUMNS,)), IN_PRODUCER),
    "rope": (lambda module, x: rope(module.proj(x), torch.tensor(0.6), torch.tensor(0.8)), IN_PRODUCER),
    "two parts": (lambda module, x: torch.cat([module.proj(x)[:, 64:], x[:, :64]], 1), IN_PRODUCER),
    "softmax": (lambda module, x: module.proj(x).softmax(-1), IN_PRODUCER),
    "an input": (lambda module, x: x, f"{IN_LOAD}, after the input arg"),
    "a bias": (lambda module, x: nn.functional.linear(x, module.proj.weight, x[0]), f"{IN_LOAD}, after addmm"),
    "sliced": (lambda module, x: module.proj(torch.cat([x, x]))[: x.shape[0]], f"{IN_LOAD}, after mm"),
    "batched": (lambda module, x: torch.bmm(x[None], module.proj.weight[None])[0], f"{IN_LOAD}, after bmm"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", PRODUCERS)
def test_it_stays_where_inductor_makes_a_kernel_anyway(name: str) -> None:
    make, expected = PRODUCERS[name]
    node, capture = compare(Written(divided, make=make), inputs())
    assert node.query.startswith(expected) and node.query_outcome == "fused"
    assert ("query_load" in calls_of(capture)) == expected.startswith(IN_LOAD)


def test_two_calls_that_read_the_same_codes_load_the_query_both() -> None:
    class Twice(Written):
        def forward(self, x: Tensor) -> Any:
            codes, q_scale = self.way(self.make(self, x), self.scale)
            query = codes.reshape(-1, HEADS, WIDTH)
            outputs = [x.new_empty((x.shape[0], HEADS, WIDTH)) for _ in range(2)]
            for output in outputs:
                self.attend(query, q_scale, output)
            return tuple(outputs)

    capture = Capture(Twice(divided))
    fused, plain = capture.both(lambda: capture.target(inputs()))
    assert all(map(torch.equal, fused, plain))
    assert [node.query for node in capture.report] == [f"{IN_LOAD}, after mm"] * 2 and casts_of(capture) == 0


def test_a_graph_that_went_through_the_pass_stays_as_it_is() -> None:
    _, capture = compare(Written(divided), inputs())
    before = calls_of(capture)
    (node,) = fuse_graph(capture.after[0].graph)
    assert (node.query, node.query_outcome) == (IN_LOAD, "fused")
    assert before.partition(" # ")[0] in calls_of(capture)


def test_codes_that_the_kernel_of_rope_makes_can_have_more_readers() -> None:
    node, _ = compare(Both(divided, make=PRODUCERS["rope"][0]), inputs())
    assert (node.query, node.query_outcome) == (IN_PRODUCER, "fused")


def test_our_quantising_op_is_a_kernel_also_behind_rope() -> None:
    node, capture = compare(Written(PER_TENSOR["our op"], make=PRODUCERS["rope"][0]), inputs())
    assert node.query.startswith(IN_LOAD) and "query_load=divide" in calls_of(capture)


def kernels_of(model: nn.Module, **options: Any) -> tuple[str, list[str]]:
    """Return the code that Inductor generates, which is not compiled, and its C++ kernels."""
    code = code_of(vattn.compile(model, **options), model, [3, 4], inputs())
    return code, re.findall(r"^\s+(cpp_fused\w*)\(", code, re.MULTILINE)


@pytest.mark.parametrize("q_scale", [0.03, [0.02, 0.05]], ids=["tensor", "head"])
def test_rope_and_query_quantisation_are_one_kernel(q_scale: Any) -> None:
    code, kernels = kernels_of(Quantised(True, q_scale), options=vattn.options(strict=True))
    # RoPE, its angles and the quantisation: nothing else is left to a kernel of its own.
    assert len(kernels) == 1 and "cos" in kernels[0], kernels
    assert "float8_e4m3fn" in code and "query_load" not in code.replace('"query_load', "")
    (node,) = vattn.fusion_report()
    assert (node.query, node.query_outcome) == (IN_PRODUCER, "fused")


@pytest.mark.parametrize("q_scale", [0.03, [0.02, 0.05]], ids=["tensor", "head"])
def test_behind_a_gemm_no_kernel_is_left(q_scale: Any) -> None:
    """The layer's own quantisation, of a slice of a fused projection."""
    model = Quantised(False, q_scale)
    assert len(kernels_of(model)[1]) == 2  # the query's quantisation and the output's
    code, kernels = kernels_of(model, options=vattn.options(strict=True))
    assert kernels == [] and "query_load=divide" in code
    (node,) = vattn.fusion_report()
    assert node.query == f"{IN_LOAD}, after mm" and "self.attn(" in node.query_source


class Stack(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Quantised(False) for _ in range(count))
        for index, layer in enumerate(self.layers):
            layer.attn.prefix = f"layers.{index}.attn"
        vattn.allocate_kv_cache(self, num_blocks=16, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).to(torch.float32).bfloat16()
        return x


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_regions_and_varying_sizes(mode: Any) -> None:
    """Compiled whole and by regions, fused equals unfused in every bit, with one graph for all sizes."""
    models = [Stack(2), Stack(2)]
    captures = [Capture(models[0]), Capture(models[1], compiler=in_regions)]
    for query_lens in ([3, 4], [5, 1, 2], [9, 9]):
        results = []
        for capture, model in zip(captures, models, strict=True):
            with mode(), step(model, query_lens):
                results += capture.both(partial(capture.target, inputs(sum(query_lens))))
        assert all(torch.equal(result, results[0]) for result in results)
    for capture in captures:
        assert {(node.outcome, node.query) for node in capture.report} == {("fused", f"{IN_LOAD}, after mm")}
    assert [len(capture.report) for capture in captures] == [2, 1]


def test_equal_layers_are_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts.forget()
    calls: list[str] = []
    classify = query_quant.classify_query
    monkeypatch.setattr(query_quant, "classify_query", lambda *args: calls.append("") or classify(*args))
    capture = captured(Stack(3), inputs=lambda tokens: [inputs(tokens)])
    assert [node.query_outcome for node in capture.report] == ["fused"] * 3 and len(calls) == 1


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.12", reason="older ones crash when they load the package")
def test_export_and_aot_inductor(tmp_path: Any) -> None:
    """`torch.export` leaves assertions on the metadata of every cast behind; they must not hide the quantisers."""
    model = Stack(2)
    builder = vattn.AttentionMetadataBuilder(8, 64, 64, 16, layers=model)
    exported = vattn.export_step(model, (inputs(3),), builder.build([2, 1], [2, 1], [[1], [2]]))
    assert "_assert_tensor_metadata" in str(exported.program.graph)
    with vattn.enable(strict=True):
        package = exported.compile(str(tmp_path / "model.pt2"))
    assert [(node.outcome, node.query) for node in vattn.fusion_report()] == [("fused", f"{IN_LOAD}, after mm")] * 2
    for query_lens in ([2, 1], [3, 4]):
        step_, x = builder.build(query_lens, query_lens, [[1], [2]]), inputs(sum(query_lens))
        got = package(*exported.inputs((x,), step_)).float()
        with step(model, query_lens):
            want = model(x).float()
        # The compiled residual rounds to bf16 at other places than the eager one, which moves single codes by a step.
        assert (got - want).norm() < 0.02 * want.norm()


def test_the_report_says_where_a_small_kernel_rounds_first() -> None:
    pytest.importorskip("triton")
    hopper, fp8 = DeviceInfo("cuda", (9, 0), "GPU"), {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor"}
    asked = {"head_size": 128, "dtype": "bfloat16", "query_format": "fp8_e4m3", "query_scale": "tensor"}
    config = make_config(**asked, **fp8, backend="TRITON_ATTN", query_load="approximate_divide")
    assert in_load(config, hopper) == (
        f"{IN_LOAD} (Hopper's prefill kernel takes the query rounded: a small kernel does that first)"
    )
    assert in_load(config.replace(kv_cache_dtype="bfloat16", kv_scale="none"), hopper) == IN_LOAD
    assert in_load(config.replace(backend="TORCH_SDPA", query_load="divide"), DeviceInfo.of("cpu")) == IN_LOAD
    assert in_load(config, DeviceInfo("cuda", (5, 0), "GPU")) == IN_LOAD  # which no backend can run


def test_a_query_in_the_models_dtype_is_not_mentioned() -> None:
    capture = captured(Attend(static))
    assert (capture.report[0].query, capture.report[0].query_outcome) == ("", "")


def test_quantisation_before_rope_is_left_alone() -> None:
    """Strict accepts it: the op cannot see it."""

    class Early(Attend):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
            codes = rounded(query.float() / self.scale)
            query = rope((codes.float() * self.scale).bfloat16(), torch.tensor(0.6), torch.tensor(0.8))
            return super().forward(query, key, value)

    (node,) = captured(Early(static)).report
    assert (node.query, node.query_outcome) == (ROUNDED_EARLY, "") and node.is_fused


def test_a_query_that_comes_quantised() -> None:
    class Given(Written):
        def forward(self, codes: Tensor) -> Any:
            output = codes.new_empty((codes.shape[0], HEADS, WIDTH), dtype=torch.bfloat16)
            self.attend(codes.view(-1, HEADS, WIDTH), self.scale, output)
            return (output,)

    node, _ = compare(Given(divided), rounded(inputs().float()))
    assert (node.query, node.query_outcome) == (IS_INPUT, "")


def test_strict_raises_for_a_query_in_a_kernel_of_its_own() -> None:
    class Layer(Written):
        def forward(self, x: Tensor) -> Any:
            return static(super().forward(x)[0].flatten(1), self.scale)

    target = torch.compile(Layer(REFUSED["too narrow"][0]), options=vattn.options(strict=True))
    with pytest.raises(FusionError, match=r"attention 1/1: fused.*its codes are not those of the query"):
        target(inputs())


def test_a_backend_without_query_loads_keeps_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = selector.get_backend("TORCH_SDPA")
    monkeypatch.setattr(backend, "capabilities", replace(backend.capabilities, query_loads=("plain",)))
    selector._decide.cache_clear()
    try:
        node, _ = compare(Written(divided, backend="TORCH_SDPA"), inputs())
    finally:
        selector._decide.cache_clear()
    assert node.query.startswith(f"{OWN_KERNEL} mm: no backend rounds it while loading (TORCH_SDPA: query_load divide")
    assert node.query_outcome == "near miss"


@pytest.mark.parametrize(
    "place", ["query_quant.find.classify_query", "pipeline.rewrite_query", "query_quant.find.find_query_region"]
)
def test_a_matcher_that_throws_breaks_nothing(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError("for the test")

    verdicts.forget()
    monkeypatch.setattr(f"vattn.passes.{place}", broken)
    node, capture = compare(Written(divided), inputs())
    assert node.query == "the matcher failed: ZeroDivisionError: for the test"
    assert node.query_outcome == "refused" and "query_load" not in calls_of(capture)


def plumbing(name: str, way: Any) -> Any:
    """Return a way with its query or its codes led through shapes that change nothing."""
    return {
        "none": way,
        "codes as heads and back": lambda q, s: (way(q, s)[0].reshape(-1, HEADS, WIDTH).flatten(1), way(q, s)[1]),
        "batch of one": lambda q, s: (way(q[None][0], s)[0][None], way(q, s)[1]),
        "transposed twice": lambda q, s: (way(q.t().contiguous().t().contiguous(), s)[0], way(q, s)[1]),
        "padded and cut": lambda q, s: (way(torch.cat([q, q[:1]])[: q.shape[0]], s)[0], way(q, s)[1]),
    }[name]


SHAPES = ["none", "codes as heads and back", "batch of one", "transposed twice", "padded and cut"]
ANY_WAY = {**{n: (w, 1) for n, w in PER_TENSOR.items()}, **{n: (w, 2) for n, w in PER_HEAD.items()}}


@settings(max_examples=4)
@given(
    way=st.sampled_from([*ANY_WAY, *REFUSED]),
    producer=st.sampled_from(list(PRODUCERS)),
    shapes=st.sampled_from(SHAPES),
    dynamic=st.booleans(),
)
def test_random_programs(way: str, producer: str, shapes: str, dynamic: bool) -> None:
    """Whatever is composed, the result keeps its bits; what has a meaning never ends as a kernel of its own."""
    form, scales = ANY_WAY.get(way) or (REFUSED[way][0], 1)
    model = Written(plumbing(shapes, form), SCALES[:scales], make=PRODUCERS[producer][0])
    node, _ = compare(model, inputs(), dynamic=dynamic)
    if way in ANY_WAY:
        assert node.query_outcome == "fused", node.query
