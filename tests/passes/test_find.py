"""What finding a quantiser asks of single nodes, and how numbers become nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from small_graphs import T, Written
from torch.fx import Node

from vattn.passes import probe, region, region_tokens
from vattn.passes import region_division as division
from vattn.passes.graph_edits import Builder
from vattn.passes.output_quant import find, rewrite
from vattn.passes.output_quant.replay import Replay, token_slices
from vattn.passes.probe import Inputs, exact_scales, size_at
from vattn.passes.proof import Conditions
from vattn.passes.region import Refusal, source_line, unknown_readers, value
from vattn.passes.region_moves import positions, reduced_dims
from vattn.passes.region_run import run_nodes
from vattn.quantization.formats import OUTPUT_FORMATS

OUTPUT = (T, 4, 64)
LAYOUTS = {
    "rows": ((4, 1), "plain", ["fp8_group64"]),
    "columns": ((1, T), "plain", ["fp8_group64_col"]),
    "rows, transposed": ((1, 4), "transposed", ["fp8_group64"]),
    "columns, transposed": ((T, 1), "transposed", ["fp8_group64_col"]),
    "rows with gaps": ((8, 1), "plain", []),
    "moved": ((8, 1), "moved", ["fp8_group64"]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_scales_fit_formats_that_lie_as_readers_expect(name: str) -> None:
    strides, layout, fits = LAYOUTS[name]
    graph = Written(lambda x, scales: x * 1, OUTPUT, (T, 4))
    output, node = graph.end, graph.inputs[1]
    tokens = value(output).shape[0]
    shape = (4, tokens) if layout == "transposed" else (tokens, 4)
    with value(output).fake_mode:
        node.meta["val"] = torch.empty_strided(shape, [tokens if stride == T else stride for stride in strides])
    formats = [OUTPUT_FORMATS[f"fp8_group64{layout}"] for layout in ("", "_col")]
    assert [fmt.name for fmt in formats if find._fits(output, fmt, node, layout)] == fits


def test_views_that_repeat_elements() -> None:
    def spread(program: object) -> bool:
        return find._is_spread(Written(program, (T, 4)).end)  # type: ignore[arg-type]

    assert spread(lambda x: x.unsqueeze(-1).expand(-1, -1, 8)) and spread(lambda x: x[:1].expand(5, 4))
    assert not spread(lambda x: x[:, :3]) and not spread(lambda x: x[:, :1].expand(-1, 1))


@pytest.mark.parametrize("packaged", [False, True])
def test_numbers_are_constants_of_a_graph_unless_it_is_packaged(
    packaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewrite, "makes_package", lambda: packaged)
    graph = Written(lambda x: x * 1, OUTPUT)

    def add(number: float) -> Node:
        (end,) = graph.gm.graph.find_nodes(op="output")
        with Builder(graph.gm.graph) as builder, value(graph.end).fake_mode, graph.gm.graph.inserting_before(end):
            end.args = (rewrite._constant(builder, number, torch.device("cpu")),)
        return end.args[0]

    for number in (0.37, 0.37, 2.0):
        made = add(number)
        assert value(made).shape == (1,) and value(made).dtype == torch.float32
        graph.gm.recompile()
        assert torch.equal(graph.gm(torch.zeros(3, 4, 64)), torch.tensor([number]))
    buffers = [buffer for name, buffer in graph.gm.named_buffers() if name.startswith("_vattn_scale_")]
    assert len(buffers) == (0 if packaged else 2) and all(buffer.numel() > 8 for buffer in buffers)


CASTS: dict[str, tuple[Callable[..., object], bool]] = {
    "fewer digits": (lambda x: x.bfloat16(), True),
    "other digits": (lambda x: x.half().bfloat16(), True),
    "more digits": (lambda x: x.bfloat16().float(), False),
    "of integers": (lambda x: x.int().float(), False),
    "no cast": (lambda x: x.view(-1, 2), False),
    "another op": (lambda x: x.bfloat16() * 2, False),
}


@pytest.mark.parametrize("name", CASTS)
def test_casts_that_lose_digits(name: str) -> None:
    program, loses = CASTS[name]
    assert probe._loses_digits(Written(program, (T, 4)).end) == loses


def test_scales_are_values_that_all_roots_hold() -> None:
    roots = Written(lambda x, y: x + y, (1,), (1, torch.float16)).inputs
    for order in (roots, roots[::-1]):
        scales = exact_scales([], Inputs((), {}, tuple(order), (), ()))
        assert len(scales) == 4 and all(float(torch.tensor(scale).half()) == scale for scale in scales)


def test_sizes_that_no_node_holds_are_those_of_an_input() -> None:
    graph = Written(lambda x, y: y * 1, (3, 64), OUTPUT)
    tokens = value(graph.end).shape[0]
    with Builder(graph.gm.graph) as builder, value(graph.end).fake_mode, graph.gm.graph.inserting_before(graph.end):
        (made,) = builder.shape([tokens], graph.end)
        assert made.target is torch.ops.aten.sym_size.int and made.args == (graph.inputs[1], 0)


def test_sizes_vary_with_the_tokens() -> None:
    end = Written(lambda x: x * 1, OUTPUT).end
    tokens = value(end).shape[0]
    assert [size_at(size, end, 7) for size in (5, tokens, 2 * tokens + 1)] == [5, 7, 15]
    with pytest.raises(Refusal, match=r"the region depends on the size 0\.5, which varies with no token count"):
        size_at(0.5, end, 7)  # type: ignore[arg-type]


S = sympy.Symbol("s", positive=True, integer=True)


@pytest.mark.parametrize(
    ("size", "number", "wanted"),
    [(S, 9, 9), (2 * S, 9, 5), (S + 3, 10, 7), (sympy.Mod(S, 4), 9, 0), (S, 1 << 62, 0), (2 * S, 1 << 62, 0)],
)
def test_from_how_many_tokens_on_a_size_is_beyond_a_number(size: Any, number: int, wanted: int) -> None:
    assert region_tokens._symbols_beyond(size, number) == wanted


@pytest.mark.parametrize(
    ("size", "wanted"),
    [(S, 0), (3 * S, 0), (S + 40, 40), (sympy.Max(S, 7), 7), (sympy.Max(2 * S, 9) + 3, 5), (sympy.Min(S, 3) + 50, 3)],
)
def test_numbers_in_sizes_are_tried_beyond(size: Any, wanted: int) -> None:
    assert region_tokens._symbols_in_formula(size) == wanted


def test_token_counts_of_sizes() -> None:
    t = sympy.Symbol("t", positive=True, integer=True)
    assert region_tokens.symbols_at(8 * S, 31) == {S: 4} and region_tokens.symbols_at(sympy.Min(S, 4), 9) == {S: 9}
    found = region_tokens.symbols_at(S * t, 31)
    assert sorted(found.values()) == [6, 7] or sorted(found.values()) == [5, 6]


def test_constant_scales_are_those_of_numbers_that_divide() -> None:
    program = Written(lambda x, s: x / s / 0.3 * 0.7, (T, 4), (1,))
    nodes = list(program.gm.graph.nodes)
    assert [division._divisor(float(torch.tensor(number)), nodes) for number in (0.3, 0.7)] == [
        0.3,
        float(torch.tensor(0.7)),
    ]


def test_slices_of_tokens_are_repeated_in_their_order() -> None:
    graph = Written(lambda x: (x * 1)[2:].view(-1, 256)[:-3:2], OUTPUT)
    (output,) = (node for node in graph.gm.graph.nodes if node.name == "mul")
    inside = {node for node in graph.gm.graph.nodes if node > output}
    starts = [slice_[0] for slice_ in token_slices(graph.end, output, inside) or ()]
    assert starts == [2, 0]
    columns = Written(lambda x: (x * 1)[2:, :3], OUTPUT)
    (output,) = (node for node in columns.gm.graph.nodes if node.name == "mul")
    assert token_slices(columns.end, output, set(columns.gm.graph.nodes)) is None


def test_sizes_that_are_taken_from_the_output_are_not_repeated() -> None:
    graph = Written(lambda x: (x * 1)[2:5], OUTPUT)
    output = graph.end.args[0]
    with Builder(graph.gm.graph) as builder, value(output).fake_mode, graph.gm.graph.inserting_before(graph.end):
        size = builder.call(torch.ops.aten.sym_size.int, output, 0)
    graph.end.args = (output, 0, 2, size)
    inside = {size, graph.end}
    assert token_slices(graph.end, output, inside) is None
    with pytest.raises(Refusal, match=f"the size {size.name} is taken from the output"):
        Replay(lambda *args: args[1], output, output, inside)(graph.end)


def test_lines_are_those_of_the_innermost_call_of_the_user() -> None:
    node = Written(lambda x: x * 1, OUTPUT).end
    frames = [("model.py", 3, "layer(x)"), ("layer.py", 7, "x * 1"), (region.__file__, 9, "inner(x)")]
    for count, line in ((3, "layer.py:7: x * 1"), (2, "layer.py:7: x * 1"), (1, "model.py:3: layer(x)"), (0, "")):
        node.meta["stack_trace"] = "".join(
            f'  File "{f}", line {n}, in f\n    {code}\n' for f, n, code in frames[:count]
        )
        assert source_line(node) == line
    node.meta["stack_trace"] = f'  File "{region.__file__}", line 9, in f\n    inner(x)\n'
    assert source_line(node) == f"{region.__file__}:9: inner(x)" and source_line(None) == ""


def test_unknown_readers_are_named_from_the_output_on() -> None:
    with torch.library._scoped_library("vattn_odd", "FRAGMENT") as library:
        for name in ("b", "a"):
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, lambda x: x.clone(), "CompositeExplicitAutograd")
        ops = torch.ops.vattn_odd
        graph = Written(lambda x: ops.a((y := x * 1).exp()) + ops.b(y), (T, 4))
    (output,) = (node for node in graph.gm.graph.nodes if node.name == "mul")
    assert unknown_readers(output) == ["vattn_odd::b", "vattn_odd::a"]
    with graph.gm.graph.inserting_after(output):
        graph.gm.graph.call_function(torch.ops.higher_order.invoke_subgraph, (None, "part", output))
    assert "invoke_subgraph" in unknown_readers(output)


def test_the_first_condition_that_is_not_tried_is_named() -> None:
    graph = Written(lambda x: torch.where(x > 5, x, torch.where(x < -5, x * 2, x * 3)), (7,))
    values: dict[Node, object] = {}

    def see(x: torch.Tensor) -> None:
        values[graph.inputs[0]] = x
        run_nodes([node for node in graph.gm.graph.nodes if node.op == "call_function"], values)
        conditions.see(values)

    conditions = Conditions(graph.gm.graph.nodes, graph.inputs)
    for x, says in (([0], "gt is never true"), ([6], "lt is never true"), ([-6], "")):
        see(torch.tensor(x).expand(7).float())
        if not says:
            conditions.check()
            break
        with pytest.raises(Refusal, match=says) as refused:
            conditions.check()
        assert refused.value.near


def test_dimensions_of_norms_follow_their_order() -> None:
    graph = Written(lambda x: torch.linalg.vector_norm(x, 2, [1], True), (T, 4))
    assert reduced_dims(graph.end, 2) == ([1], True)
    assert reduced_dims(Written(lambda x: x.amax(-1), (T, 4)).end, 2) == ([-1], False)


ROWS = torch.arange(5 * 256).view(5, 256)
PLACES: dict[str, tuple[Callable[..., object], torch.Tensor | None, torch.Tensor | None]] = {
    "static": (lambda x: torch.ops.vattn.quant_fp8_static(x, torch.ones(1)), ROWS, None),
    "groups": (lambda x: torch.ops.vattn.quant_fp8_group(x, 64, False, False), ROWS, ROWS[:, ::64]),
    "NVFP4": (lambda x: torch.ops.vattn.quant_nvfp4(x, torch.ones(1), False), ROWS[:, ::2], ROWS[:, ::16]),
    "NVFP4, swizzled": (lambda x: torch.ops.vattn.quant_nvfp4(x, torch.ones(1), True), ROWS[:, ::2], None),
    "of unknown places": (
        lambda x: torch.ops.vattn.quant_fp8_static(torch.nn.functional.pad(x, (0, 8)), x[0, :1]),
        None,
        None,
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_places_of_what_an_op_writes(name: str) -> None:
    program, codes, scales = PLACES[name]
    graph = Written(program, (T, 256))
    nodes = [node for node in graph.gm.graph.nodes if node.op == "call_function"]
    values: dict[Node, object] = {graph.inputs[0]: torch.randn(5, 256)}
    run_nodes(nodes, values)
    (quantiser,) = (node for node in nodes if str(node.target).startswith("vattn."))
    made = positions(nodes, graph.inputs[0], values).get(quantiser)
    for got, wanted in zip(made if isinstance(made, tuple) else (made, None), (codes, scales), strict=True):
        assert got is None if wanted is None else torch.equal(got, wanted)
