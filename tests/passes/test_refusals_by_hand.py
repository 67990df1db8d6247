"""What the passes leave alone, and which words the report has for it, in graphs that are put together by hand."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fx_layers import with_query, with_rope
from fx_programs import copied
from queries import PER_TENSOR, rounded
from rope_forms import FORMS, RopeForm, chunked, gathered, halves_turned, looked_up, rms
from test_by_hand import template
from test_rope import targets
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from vattn.config.attention import AttentionConfig
from vattn.errors import FusionError
from vattn.ops.fusion_notes import NodeReport
from vattn.passes import graphviz, region
from vattn.passes.graph_edits import Builder
from vattn.passes.inductor import sort_graph
from vattn.passes.ops import op_name
from vattn.passes.pipeline import FusionPass, fuse_graph
from vattn.passes.query_quant.find import IN_LOAD, IN_PRODUCER, OWN_KERNEL, ROUNDED_EARLY
from vattn.passes.region import Refusal, attention_calls, describe, find_region
from vattn.passes.region_tokens import check_order, reach
from vattn.passes.rope_kv_cache.find import find_rope, find_update
from vattn.quantization.formats import OUTPUT_FORMATS

E4M3 = torch.float8_e4m3fn


def call_of(gm: GraphModule) -> Node:
    ((call, _),) = attention_calls(gm.graph)
    return call


def update_of(gm: GraphModule) -> Node:
    (update,) = (n for n in gm.graph.nodes if n.args and n.args[0] is torch.ops.vattn.kv_cache_update.default)
    return update


def configured(call: Node, **changes: Any) -> None:
    """Change the request of a call."""
    config = AttentionConfig.parse(str(call.kwargs["config"])).replace(**changes)
    call.kwargs = {**call.kwargs, "config": config.encode()}


def rope_report(gm: GraphModule) -> NodeReport:
    before = targets(gm.graph)
    (node,) = fuse_graph(gm.graph, rope="always")
    assert targets(gm.graph) == before or node.rope_outcome == "fused"
    return node


def turned_pairs(layer: Any, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """By tables of the model, not of cosines made in the graph; halves in the wrong places."""
    cos, sin = layer.cos[positions][:, None], layer.sin[positions][:, None]

    def turn(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((second * cos + first * sin, first * cos - second * sin), dim=-1).to(x.dtype)

    return turn(query), turn(key)


def three_tables(layer: Any, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    third = layer.angles[positions][:, None].sigmoid().repeat(1, 1, 2)
    turned = chunked(layer, query, key, positions)
    return tuple((x.float() * third).bfloat16() for x in turned)  # type: ignore[return-value]


def two_weights(layer: Any, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    def norm(x: Tensor) -> Tensor:
        return rms(x.float(), layer.q_weight.float(), 1e-6) * layer.k_weight.float()

    cos, sin = gathered(layer, positions)
    return tuple(halves_turned(norm(x), cos, sin).bfloat16() for x in (query, key))  # type: ignore[return-value]


def scaled_by_a_tensor(layer: Any, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    query, key = (x.float() * layer.cos_sin[0, :1] for x in chunked(layer, query, key, positions))
    return query.bfloat16(), key.bfloat16()


def one_table(layer: Any, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    cos = layer.angles[positions].cos()[:, None]
    return halves_turned(query.float(), cos, cos).bfloat16(), halves_turned(key.float(), cos, cos).bfloat16()


ROPE_REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "another rotation by the model's tables": (turned_pairs, "not as a rotation that the op has"),
    "three tables": (three_tables, "it depends on more than two tables"),
    "two weights": (two_weights, "it depends on more than one weight"),
    "a scaled key": (scaled_by_a_tensor, "it is scaled"),
    "one table": (one_table, "it depends on one table alone"),
}


@pytest.mark.parametrize("name", ROPE_REFUSED)
def test_rope_that_no_op_has(name: str) -> None:
    write, says = ROPE_REFUSED[name]
    node = rope_report(with_rope(RopeForm(write, ""))[0])
    assert node.rope_outcome == "near miss" and says in node.rope, node.rope


def test_columns_that_all_take_part_are_no_rotation() -> None:
    """A projection of heads by the model's tensors is nothing to report."""

    def mixed(layer: Any, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return query, (
            key.float() * key.float().sum(-1, keepdim=True) * layer.cos[positions].sum(-1)[:, None, None]
        ).bfloat16()

    assert rope_report(with_rope(RopeForm(mixed, ""))[0]).rope == ""


def by_embedding(layer: Any, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    tables = [nn.functional.embedding(positions, table)[:, None] for table in (layer.cos, layer.sin)]
    return tuple(halves_turned(x.float(), *tables).to(x.dtype) for x in (query, key))  # type: ignore[return-value]


def by_index_select(layer: Any, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    tables = [table.index_select(0, positions)[:, None] for table in (layer.cos, layer.sin)]
    return tuple(halves_turned(x.float(), *tables).to(x.dtype) for x in (query, key))  # type: ignore[return-value]


def by_positions_of_a_batch(layer: Any, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    batch = positions[None]
    tables = [table[batch].squeeze(0)[:, None] for table in (layer.cos, layer.sin)]
    return tuple(halves_turned(x.float(), *tables).to(x.dtype) for x in (query, key))  # type: ignore[return-value]


@pytest.mark.parametrize("write", [looked_up, by_embedding, by_index_select, by_positions_of_a_batch])
def test_whole_tables_go_to_the_op(write: Callable[..., Any]) -> None:
    gm, _ = with_rope(RopeForm(write, ""))
    assert rope_report(gm).rope_outcome == "fused"
    (call,) = (n for n in gm.graph.nodes if n.args and n.args[0] is torch.ops.vattn.rope_kv_cache_update.default)
    assert call.kwargs["cos"].op == call.kwargs["sin"].op == "placeholder"
    assert call.kwargs["cos"] is not call.kwargs["sin"] and call.kwargs["positions"].meta["val"].dim() == 1


def test_tables_that_are_read_elsewhere_too_are_gathered_once() -> None:
    def also_read(layer: Any, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = layer.cos[positions], layer.sin[positions]
        layer.escaped = cos.sum()
        tables = cos[:, None], sin[:, None]
        return tuple(halves_turned(x.float(), *tables).to(x.dtype) for x in (query, key))  # type: ignore[return-value]

    gm, _ = with_rope(RopeForm(also_read, ""))
    assert rope_report(gm).rope_outcome == "fused"
    (call,) = (n for n in gm.graph.nodes if n.args and n.args[0] is torch.ops.vattn.rope_kv_cache_update.default)
    assert call.kwargs["positions"] is None and call.kwargs["cos"].op == "call_function"


def test_rope_beside_other_requests() -> None:
    form = FORMS["chunk and cat, fp32"]
    gm, _ = with_rope(form)
    configured(update_of(gm), kv_cache_layout="HND")
    assert "cache update and attention differ in kv_cache_layout" in rope_report(gm).rope
    gm, _ = with_rope(FORMS["FP8 query"])
    configured(call_of(gm), query_load="divide")
    assert "the attention call quantises the query as it loads it" in rope_report(gm).rope
    gm, _ = with_rope(form)
    update_of(gm).target = torch.ops.higher_order.auto_functionalized
    assert "the graph was made with enable_auto_functionalized_v2=False" in rope_report(gm).rope
    gm, _ = with_rope(form)
    for call in (update_of(gm), call_of(gm)):
        configured(call, backend="FLASH_ATTN")
    assert "backend FLASH_ATTN has no such op" in rope_report(gm).rope
    gm, _ = with_rope(form)
    call, (cache, *_) = call_of(gm), update_of(gm).users
    with gm.graph.inserting_before(call):
        zero = gm.graph.call_function(torch.ops.aten.select.int, (cache, 0, 0))
        zero.meta["val"] = cache.meta["val"][0]
        query = gm.graph.call_function(torch.ops.aten.index_put.default, (call.kwargs["query"], [None], zero))
        query.meta["val"] = call.kwargs["query"].meta["val"]
    call.kwargs = {**call.kwargs, "query": query}
    assert rope_report(gm).rope_outcome == "near miss"


def test_a_cache_that_is_viewed_before_it_is_read() -> None:
    gm, _ = with_rope(FORMS["chunk and cat, fp32"])
    call = call_of(gm)
    for name in ("key_cache", "value_cache"):
        with gm.graph.inserting_before(call), Builder(gm.graph) as builder:
            call.kwargs = {**call.kwargs, name: builder.call(torch.ops.aten.alias.default, call.kwargs[name])}
    with gm.graph.inserting_after(call):
        later = gm.graph.node_copy(call)
    update = update_of(gm)
    assert find_update(call) is update and find_update(later) is None  # it reads what the first may have read already
    gm.graph.erase_node(later)
    assert rope_report(gm).rope_outcome == "fused"
    gm.graph.lint()


def test_a_rotated_query_that_reads_the_updated_cache() -> None:
    gm, _ = with_rope(FORMS["chunk and cat, fp32"])
    call, update = call_of(gm), update_of(gm)
    found = find_rope(update, call, "always")
    assert found is not None
    source, (cache, *_) = found.query.source, update.users
    with source.meta["val"].fake_mode, Builder(gm.graph) as builder, gm.graph.inserting_after(cache):
        held = builder.call(torch.ops.aten.select.int, cache, 0, 0)
        while held.meta["val"].dim():
            with gm.graph.inserting_after(held):
                held = builder.call(torch.ops.aten.select.int, held, 0, 0)
        with gm.graph.inserting_after(held):
            gated = builder.call(torch.ops.aten.add.Tensor, source, held)
    for user in [user for user in source.users if user is not gated]:
        user.replace_input_with(source, gated)
    sort_graph(gm.graph)
    assert "the query is computed from the updated cache" in rope_report(gm).rope


def in_fp8(scale: Callable[[Any], Any], limit: float = 448.0) -> Callable[..., Any]:
    """Return RoPE whose query is rounded to FP8 by a scale of the layer's tensors."""

    def write(layer: Any, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        query, key = chunked(layer, query, key, positions)
        return (query.float() / scale(layer)).clamp(-limit, limit).to(E4M3), key

    return write


ONE, FOUR = lambda layer: layer.cos_sin[0, :1], lambda layer: layer.cos_sin[0, :4, None]
FP8 = {"query_format": "fp8_e4m3", "query_scale": "tensor"}
QUERIES: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "no query format": (in_fp8(ONE), {}, "the query is FP8 but the attention call has no query format"),
    "a constant scale": (in_fp8(lambda layer: 0.03), FP8, "its FP8 scale is a constant of the graph"),
    "a scale in bf16": (in_fp8(lambda layer: layer.bias[:1]), FP8, "the query's scale is torch.bfloat16"),
    "a scale for each KV head": (
        in_fp8(lambda layer: layer.cos_sin[0, :2].repeat_interleave(2)[:, None]), FP8,
        "the query has 2 scales, the attention call one",
    ),
    "a scale for each query head": (in_fp8(FOUR), FP8, "the query: "),
    "a clamp to a little more than 448": (in_fp8(ONE, 448.5), FP8, "its quantisation does not clamp before the cast"),
    "no clamp to 448": (in_fp8(ONE, 1e9), FP8, "its quantisation does not clamp before the cast"),
}  # fmt: skip


@pytest.mark.parametrize("name", QUERIES)
def test_rotated_queries_that_the_op_does_not_quantise(name: str) -> None:
    write, changes, says = QUERIES[name]
    gm, _ = with_rope(RopeForm(write, ""))
    configured(call_of(gm), **changes)
    node = rope_report(gm)
    assert node.rope_outcome == "near miss" and says in node.rope, node.rope


def test_a_rotated_query_of_our_op() -> None:
    def write(layer: Any, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        query, key = chunked(layer, query, key, positions)
        return torch.ops.vattn.quant_fp8_static(query.float(), layer.cos_sin[0, :1].reshape(1, 1).reshape(1)), key

    gm, _ = with_rope(RopeForm(write, ""))
    configured(call_of(gm), **FP8)
    node = rope_report(gm)
    assert node.rope_outcome == "fused" and "the query's quantisation" in node.rope, node.rope


def query_report(gm: GraphModule) -> NodeReport:
    (node,) = fuse_graph(gm.graph)
    return node


def test_a_query_that_needs_a_scale_of_its_own() -> None:
    gm, _ = with_query(PER_TENSOR["divide"])
    call = call_of(gm)
    call.kwargs = {**call.kwargs, "q_scale": None}
    node = query_report(gm)
    assert node.query == f"{OWN_KERNEL} mm: the op has no q_scale" and node.query_outcome == "near miss"


def test_a_constant_scale_of_a_query() -> None:
    def way(q: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.full((1,), 0.03)
        return rounded(q.float() / scale), scale

    assert query_report(with_query(way)[0]).query == f"{IN_LOAD}, after mm"


def test_scales_of_a_query_that_are_neither_one_nor_of_heads() -> None:
    def way(q: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        three = s.repeat(3)
        return rounded(q.float() / three[:1]), three

    node = query_report(with_query(way)[0])
    assert node.query.endswith("its scale has 3 values; the op takes one, or one per KV head"), node.query


def test_a_query_that_is_scaled_by_the_number_of_tokens() -> None:
    def way(q: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return rounded(q.float() / (s * torch.full((1,), q.shape[0]))), s

    assert query_report(with_query(way)[0]).query.endswith(", a size or a number that varies")


def test_two_unknown_scales_of_a_query() -> None:
    def way(q: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return rounded(q.float() / (s * q.float().mean())), s

    assert query_report(with_query(way)[0]).query_outcome == "near miss"


def test_outputs_that_cannot_be_taken() -> None:
    """Calls that other passes have left in a form of their own."""

    def static(o: Tensor, s: Tensor) -> Tensor:
        return rounded(o.float() / s)

    def changed(change: Callable[[GraphModule, Node, Node], Any]) -> NodeReport:
        gm = copied(template().behind(static))
        call = call_of(gm)
        change(gm, call, next(iter(call.users)))
        (node,) = fuse_graph(gm.graph)
        assert "fp8_static" not in str(call.kwargs["config"]).partition(" # ")[0]
        return node

    def view(gm: GraphModule, call: Node, output: Node) -> None:
        call.kwargs = {**call.kwargs, "_output_size": [4]}

    def no_tensor(gm: GraphModule, call: Node, output: Node) -> None:
        call.kwargs = {**call.kwargs, "_output_base_index": None}

    def taken_twice(gm: GraphModule, call: Node, output: Node) -> None:
        with gm.graph.inserting_after(output):
            other = gm.graph.call_function(operator.getitem, output.args)
            other.meta = dict(output.meta)

    def unread(gm: GraphModule, call: Node, output: Node) -> None:
        (end,) = gm.graph.find_nodes(op="output")
        gm.graph.erase_node(end)
        for node in reversed(gm.graph.nodes):
            if node > call and not node.users:
                gm.graph.erase_node(node)
        gm.graph.output(())

    def older(gm: GraphModule, call: Node, output: Node) -> None:
        call.target = torch.ops.higher_order.auto_functionalized

    def scale_elsewhere(gm: GraphModule, call: Node, output: Node) -> None:
        (scale,) = (node for node in gm.graph.nodes if node.name == template().scale.name)
        with scale.meta["val"].fake_mode:
            scale.meta["val"] = torch.ones(1, device="meta")

    assert changed(older).reason == "the graph was made with enable_auto_functionalized_v2=False"
    assert changed(scale_elsewhere).reason == "the scale is on meta"
    assert changed(view).reason == "the output is a view into a larger tensor"
    assert changed(no_tensor).reason == "the output is no tensor of its own"
    assert changed(taken_twice).reason == "the output is taken apart twice"
    assert changed(unread).reason == "nothing reads the output"


def test_readers_of_which_nothing_is_known_are_named() -> None:
    with torch.library._scoped_library("vattn_test", "FRAGMENT") as library:
        library.define("mystery(Tensor x) -> Tensor")
        library.impl("mystery", lambda x: x.sum(-1), "CompositeExplicitAutograd")
        gm = template().behind(lambda o, s: torch.ops.vattn_test.mystery(o))
        (node,) = fuse_graph(gm.graph)
    assert node.outcome == "refused"
    assert node.reason == (
        "the output is not quantised, unless vattn_test::mystery does it, of which nothing is known here"
    )
    (node,) = fuse_graph(template().behind(lambda o, s: o * 2).graph)
    assert (node.outcome, node.reason) == ("refused", "the output is not quantised")


def test_checks_of_metadata_are_no_readers() -> None:
    """`torch.export` adds them."""
    gm = copied(template().behind(lambda o, s: rounded((o * 1.0).float() / s)))
    call = call_of(gm)
    for node in list(gm.graph.nodes):
        if node > call and isinstance(node.meta.get("val"), Tensor):
            with gm.graph.inserting_after(node):
                check = gm.graph.call_function(torch.ops.aten._assert_tensor_metadata.default, (node, None, None, None))
                check.meta["val"] = None
    (node,) = fuse_graph(gm.graph)
    gm.graph.lint()
    assert node.outcome == "fused", node.reason
    checked = [node.args[0] for node in gm.graph.nodes if "_assert_tensor_metadata" in str(node.target)]
    assert [node.meta["val"].dtype for node in checked] == [E4M3]
    assert [made.dtype for made in call.meta["val"][1:]] == [E4M3]


def test_regions_end_at_a_number_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    (call,) = attention_calls((gm := template().behind(lambda o, s: rounded(o.float() / s))).graph)
    output = describe(*call).output
    for most, found in ((6, 1), (5, 0)):  # the output, its view, and four ops before the cast
        monkeypatch.setattr(region, "LARGEST_REGION", most)
        assert len(find_region(output).quantised) == found
    (end,) = gm.graph.find_nodes(op="output")
    sizes = [len(region.ancestors([end], lambda node: True, most)) for most in (0, 1, 2, 3)]
    assert sizes == [1, 2, 3, 4]


QUANTISED: dict[str, tuple[Callable[[Tensor, Tensor], Any], list[torch.dtype]]] = {
    "FP8": (lambda o, s: rounded(o.float() / s), [E4M3]),
    "int8": (lambda o, s: (o.float() / s).round().to(torch.int8), [torch.int8]),
    "packed from int8": (lambda o, s: ((o > 1).to(torch.int8)[:, ::2] | 3).to(torch.uint8), [torch.uint8]),
    "packed beside whole int8": (
        lambda o, s: ((i := (o > 1).to(torch.int8))[:, ::2] << 4 | i[:, 1::2]).to(torch.uint8), [torch.uint8],
    ),
    "the codes of half": (lambda o, s: rounded(o[:, 128:].float() / s).view(torch.uint8), [E4M3]),
    "written in two parts": (
        lambda o, s: (
            first := torch.zeros(o.shape, dtype=E4M3).slice_scatter(rounded(o[:, :128].float() / s), 1, 0, 128),
            first.slice_scatter(rounded(o[:, 128:].float() / s), 1, 128, 256),
            first.view(torch.uint8),
        )[1:], [E4M3],
    ),
    "bytes alone": (lambda o, s: (o > 1).to(torch.uint8), []),
}  # fmt: skip


@pytest.mark.parametrize("name", QUANTISED)
def test_regions_end_at_codes(name: str) -> None:
    program, wanted = QUANTISED[name]
    (call,) = attention_calls(template().behind(program).graph)
    found = find_region(describe(*call).output).quantised
    assert [node.meta["val"].dtype for node in found] == wanted
    assert name != "written in two parts" or op_name(found[0].args[0].target) == "slice_scatter"


def test_reports_of_a_graph_are_in_the_order_of_its_calls() -> None:
    graph = torch.fx.Graph()
    for program in (lambda o, s: rounded(o.float() / s), lambda o, s: o * 2):
        for old, new in (graph.graph_copy(template().behind(program).graph, made := {}), made)[1].items():
            new.meta = dict(old.meta)
    graph.output([node for node in graph.nodes if node.meta.get("site") and not node.users])
    first, second = fuse_graph(graph)
    assert (first.outcome, second.outcome, second.index) == ("fused", "refused", 1)
    assert [
        f"'index':{index}" in str(call.kwargs["config"]) for index, (call, _) in enumerate(attention_calls(graph))
    ] == [True] * 2


def test_what_reads_codes_too_is_in_no_region() -> None:
    def program(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        codes = rounded(o.float() / s)
        return codes, o.copy_(codes) * 2

    gm = template().behind(program)
    (call,) = attention_calls(gm.graph)
    found = find_region(describe(*call).output)
    assert [node.meta["val"].dtype for node in found.quantised] == [E4M3]
    assert not {"copy", "mul"} & {op_name(node.target) for node in found.nodes}


def test_a_device_of_the_user_is_not_that_of_trials() -> None:
    with torch.device("meta"):
        (node,) = fuse_graph(template().behind(lambda o, s: rounded(o.float() / s)).graph)
    assert node.outcome == "fused", node.reason


@pytest.mark.parametrize("count", [4, 5])
def test_regions_of_many_unknown_values(count: int) -> None:
    def program(o: Tensor, s: Tensor) -> Tensor:
        x = o.float()
        for _ in range(count):
            x = x / torch.mm(torch.randn(2, 2), torch.randn(2, 2))[0, :1]
        return rounded(x)

    (node,) = fuse_graph(template().behind(program).graph)
    says = "the region reads 5 unknown values; a quantiser has one scale"
    assert node.outcome == "near miss" and (node.reason == says) == (count == 5), node.reason


def test_a_format_that_may_not_be_used_is_named() -> None:
    (node,) = fuse_graph(template().behind(lambda o, s: rounded(o.float() / s)).graph, ("fp8_per_token",))
    assert node.outcome == "near miss" and node.reason == "it is fp8_static, which is not among output_formats"


INDEXED: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "all alike": (lambda o: o.flip(0).t().contiguous().t(), 0),
    "the first 40": (lambda o: o[:40], 40),
    "the last 40": (lambda o: o[-40:], 40),
    "all but 40": (lambda o: o[40:], 40),
    "one token": (lambda o: o[33], 33),
    "some tokens": (lambda o: o[torch.tensor([3, 17])], 17),
    "selected tokens": (lambda o: o.index_select(0, torch.tensor([21, 2])), 21),
    "columns": (lambda o: o[:, 200:], 0),
    "selected columns": (lambda o: o.index_select(1, torch.tensor([21, 2])), 0),
    "some columns": (lambda o: o[:, torch.tensor([3, 17])], 0),
    "padded in front": (lambda o: nn.functional.pad(o, (0, 0, 7, 0)), 7),
    "moved on": (lambda o: nn.functional.pad(o, (0, 0, 7, -7)), 7),
    "before others": (lambda o: torch.cat((o, torch.zeros(40, 256, dtype=o.dtype))), 40),
    "padded columns": (lambda o: nn.functional.pad(o, (0, 9)), 0),
    "a part": (lambda o: o.narrow(0, 5, 20), 25),
    "parts": (lambda o: o[:60].split([11, 49])[1], 60),
}


@pytest.mark.parametrize("name", INDEXED)
def test_how_many_tokens_a_graph_tells_apart(name: str) -> None:
    program, count = INDEXED[name]
    gm = template().behind(lambda o, s: program(o))
    nodes = [node for node in gm.graph.nodes if node.meta.get("site")]
    assert reach(nodes, next(iter(call_of(gm).users))) == count


def test_a_drawing_shows_what_is_attention_what_is_fused_and_what_is_not() -> None:
    gm = copied(template().behind(lambda o, s: (rounded(o.float() / s), s * 2)))
    call = call_of(gm)

    def coloured(text: str) -> dict[str, str]:
        lines = [line for line in text.splitlines() if "fillcolor=" in line and '" [label="' in line]
        return {line.split('"')[1]: line.rpartition('fillcolor="')[2].split('"')[0] for line in lines}

    before = graphviz.draw(gm.graph, "before 0")
    assert before.startswith('digraph "before 0" {') and f'"{call.name}" -> ' in before
    colours, codes = coloured(before), next(n for n in gm.graph.nodes if getattr(n.meta.get("val"), "dtype", 0) is E4M3)
    doubled = next(n for n in gm.graph.nodes if n.meta.get("site") and n.target is torch.ops.aten.mul.Tensor)
    assert colours[call.name] == graphviz._ATTENTION and colours[codes.name] == graphviz._REGION
    assert colours[doubled.name] == "white"
    fuse_graph(gm.graph)
    after = graphviz.draw(gm.graph, "after 0")
    assert coloured(after)[call.name] == graphviz._FUSED and graphviz._REGION not in coloured(after).values()
    assert "output_format=fp8_static" in after
    quantised, _ = with_query(PER_TENSOR["divide"])
    assert graphviz._REGION in coloured(graphviz.draw(quantised.graph, "before 1")).values()


def test_strict_asks_for_attention() -> None:
    graph = torch.fx.Graph()
    graph.output(graph.placeholder("x")).meta["desc"] = []  # as AOTAutograd marks a whole graph
    formats = tuple(OUTPUT_FORMATS)
    FusionPass(True, formats, (), for_all=True)(graph)
    FusionPass(False, formats, ())(graph)
    with pytest.raises(FusionError, match="a compiled graph holds no attention of vattn"):
        FusionPass(True, formats, ())(graph)
    branch = GraphModule({}, template().behind(lambda o, s: rounded(o.float() / s)).graph)
    whole = GraphModule({}, graph)
    whole.add_module("branch", branch)
    FusionPass(True, formats, ())(whole.graph)  # a branch holds it


def test_a_scale_of_a_query_for_each_token_and_head() -> None:
    def way(q: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        x = q.float().view(-1, 4, 64)
        return rounded(x / (x.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-10)), s

    node = query_report(with_query(way)[0])
    assert node.query.endswith("it has a scale for every token; the op takes one, or one per KV head"), node.query
    assert node.query_source == "program.py:1: amax"


def test_a_query_that_was_rounded_before_its_rotation() -> None:
    def write(layer: Any, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return chunked(layer, (rounded(query.float() / 0.03).float() * 0.03).bfloat16(), key, positions)

    for form, says in ((RopeForm(write, ""), ROUNDED_EARLY), (FORMS["chunk and cat, fp32"], "")):
        (node,) = fuse_graph(with_rope(form)[0].graph, rope="never")
        assert node.query == says


def test_counting_along_the_tokens_is_seen_without_a_dimension() -> None:
    for program in (lambda o: o.flatten().sort()[0], lambda o: o.flatten().cumsum(0), lambda o: o.topk(1, 0)[0]):
        gm = template().behind(lambda o, s, program=program: program(o))
        nodes = [node for node in gm.graph.nodes if node.meta.get("site")]
        with pytest.raises(Refusal, match="runs along the tokens"):
            check_order(nodes)
    gm = template().behind(lambda o, s: (o.sort()[0], o.cumsum(1), o.topk(3)[0]))
    check_order([node for node in gm.graph.nodes if node.meta.get("site")])


def test_sizes_of_new_views_are_those_of_inputs() -> None:
    gm = template().behind(lambda o, s: o * 2)
    call = call_of(gm)
    tokens = next(iter(call.users)).meta["val"].shape[0]
    mode = call.kwargs["query"].meta["val"].fake_mode
    with mode.shape_env.ignore_fresh_unbacked_symbols():
        unknown = [mode.shape_env.create_unbacked_symint() for _ in range(2)]
    with Builder(gm.graph) as builder, mode, gm.graph.inserting_before(call):
        found, width = builder.shape([tokens, 256], call)
        assert found.meta["val"] is not None and found < call and width == 256
        assert found.op == "placeholder" and builder.shape([unknown[0], 256], call) == [-1, 256]
        with pytest.raises(Refusal, match="two sizes that no input of the graph has"):
            builder.shape(unknown, call)


def test_a_change_that_fails_takes_its_nodes_back() -> None:
    gm = template().behind(lambda o, s: o * 2)
    call, before = call_of(gm), [node.name for node in gm.graph.nodes]
    scale = next(node for node in gm.graph.nodes if node.meta.get("site"))
    with pytest.raises(ZeroDivisionError), Builder(gm.graph) as builder, scale.meta["val"].fake_mode:
        with gm.graph.inserting_after(scale):
            one = builder.call(torch.ops.aten.neg.default, scale)
            builder.call(torch.ops.aten.neg.default, one)
        assert not builder.is_ordered() or one > scale
        _ = 1 / 0
    assert [node.name for node in gm.graph.nodes] == before and call in gm.graph.nodes


def test_a_query_of_an_op_is_named_after_it() -> None:
    node = query_report(with_query(PER_TENSOR["divide"], lambda m, x: nn.functional.silu(m.proj(x)))[0])
    assert (node.query, node.query_outcome) == (IN_PRODUCER, "fused")
