"""What the rewrites add to a graph, one function at a time: in small graphs that run before and after."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_graphs import Shape, T, Written
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from vattn.config.rope import RopeConfig
from vattn.passes.graph_edits import Builder
from vattn.passes.output_quant import rewrite as output_rewrite
from vattn.passes.output_quant.replay import Replay
from vattn.passes.region import Refusal, value
from vattn.passes.rope_kv_cache import rewrite as rope_rewrite
from vattn.passes.rope_kv_cache.probe import Rotation
from vattn.quantization.formats import OUTPUT_FORMATS

BF16, I64 = torch.bfloat16, torch.int64
COUNT = 5


class Added(Written):
    """A graph to whose end nodes are added."""

    def add(self, make: Callable[[Builder, Node, Node], Any]) -> tuple[Node, list[Node]]:
        """Call a function with a builder, the graph's result and its end; returns a new result and all new nodes."""
        (end,) = self.gm.graph.find_nodes(op="output")
        mode = value(self.inputs[0]).fake_mode
        with Builder(self.gm.graph) as builder, mode, self.gm.graph.inserting_before(end):
            made = make(builder, self.end, end)
        end.args = (made,)
        self.gm.graph.lint()
        return made, builder.nodes

    def run(self, *inputs: Any) -> Tensor:
        with torch.no_grad():
            made: Tensor = Interpreter(GraphModule(self.gm, self.gm.graph)).run(*inputs)
        return made


def rotation(source: Node, first_head: int, heads: int) -> Rotation[Node]:
    return Rotation(RopeConfig(8), source, first_head, heads, (source, ""), (source, ""), None, None)


HEADS: dict[str, tuple[Callable[[Tensor], Tensor], Shape, int, int, int]] = {
    "as they are": (lambda x: x * 1, (T, 4, 8), 0, 4, 0),
    "some": (lambda x: x * 1, (T, 5, 8), 1, 5, 1),
    "of rows": (lambda x: x * 1, (T, 40), 1, 5, 2),
    "all of rows": (lambda x: x * 1, (T, 32), 0, 4, 1),
    "of a batch": (lambda x: x * 1, (1, T, 4, 8), 0, 4, 1),
    "in other pieces": (lambda x: x * 1, (T, 8, 4), 0, 4, 1),
    "of half the size": (lambda x: x * 1, (T, 4, 2, 4), 0, 4, 1),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_are_viewed_by_token(name: str) -> None:
    program, shape, first, heads, count = HEADS[name]
    added = Added(program, shape)
    made, nodes = added.add(lambda builder, end, _: rope_rewrite._heads(builder, rotation(end, first, heads), 4, 8))
    assert len(nodes) == count and value(made).shape[1:] == (4, 8)
    x = torch.randn([COUNT if size == T else size for size in shape])
    assert torch.equal(added.run(x), x.reshape(COUNT, heads, 8)[:, first : first + 4])


def test_heads_with_columns_apart_are_refused() -> None:
    added = Added(lambda x: (x * 1).transpose(1, 2), (T, 8, 4))
    with pytest.raises(Refusal, match="the columns of a head do not lie together") as refused:
        added.add(lambda builder, end, _: rope_rewrite._heads(builder, rotation(end, 0, 4), 4, 8))
    assert refused.value.near


TABLE, POSITIONS = (40, 8), (T, I64)
LOOKED_UP: dict[str, tuple[Callable[..., Tensor], list[Shape], range | None]] = {
    "by an index": (lambda table, at: table[at], [TABLE, POSITIONS], None),
    "by int32": (lambda table, at: table[at], [TABLE, (T, torch.int32)], None),
    "by a batch": (lambda table, at: table[at], [TABLE, (1, T, I64)], None),
    "viewed": (lambda table, at: table[at].unsqueeze(1).view(-1, 8), [TABLE, POSITIONS], None),
    "by index_select": (lambda table, at: table.index_select(0, at), [TABLE, POSITIONS], None),
    "by an embedding": (lambda table, at: nn.functional.embedding(at, table), [TABLE, POSITIONS], None),
    "the first half": (lambda table, at: table[at].chunk(2, -1)[0], [TABLE, POSITIONS], range(4)),
    "the second half": (lambda table, at: table[at].chunk(2, 1)[1].unsqueeze(1), [TABLE, POSITIONS], range(4, 8)),
    "a piece": (lambda table, at: table[at].split([2, 3, 3], -1)[1], [TABLE, POSITIONS], range(2, 5)),
}  # fmt: skip
NOT_LOOKED_UP: dict[str, tuple[Callable[..., Tensor], list[Shape]]] = {
    "columns": (lambda table, at: table.index_select(1, at), [(8, 40), POSITIONS]),
    "two indices": (lambda table, at: table[at, at], [TABLE, POSITIONS]),
    "an index behind a slice": (lambda table, at: table[:, at], [(8, 40), POSITIONS]),
    "by truth values": (lambda table, at: table[at], [(T, 8), (T, torch.bool)]),
    "by few": (lambda table, at: table[at], [TABLE, (3, I64)]),
    "of three sizes": (lambda table, at: table[at], [(40, 2, 4), POSITIONS]),
    "pieces of tokens": (lambda table, at: table[at].split([3, at.shape[0] - 3], 0)[1], [TABLE, POSITIONS]),
    "pieces of a batch": (lambda table, at: table[at].split([2, 6], -1)[1], [TABLE, (1, T, I64)]),
    "computed": (lambda table, at: table[at].cos(), [TABLE, POSITIONS]),
    "an input": (lambda table, at: table, [(T, 8), POSITIONS]),
}


@pytest.mark.parametrize("name", LOOKED_UP)
def test_rows_are_traced_to_their_table(name: str) -> None:
    program, shapes, part = LOOKED_UP[name]
    added = Added(program, *shapes)
    (table, positions), count = added.inputs, value(added.inputs[1]).shape[-1]
    assert rope_rewrite._looked_up(added.end, count) == (table, positions, part)
    assert rope_rewrite._looked_up(added.end, count + 1) is None
    added.add(lambda builder, *_: rope_rewrite._columns(builder, table, part))
    x = torch.randn(40, 8)
    assert torch.equal(added.run(x, torch.arange(COUNT)), x if part is None else x[:, part.start : part.stop])


@pytest.mark.parametrize("name", NOT_LOOKED_UP)
def test_other_tensors_hold_no_rows_of_a_table(name: str) -> None:
    program, shapes = NOT_LOOKED_UP[name]
    added = Added(program, *shapes)
    symbols = [size for node in added.inputs for size in value(node).shape if isinstance(size, torch.SymInt)]
    assert rope_rewrite._looked_up(added.end, symbols[0] if symbols else 7) is None


def test_rows_are_read_elsewhere_unless_all_readers_go() -> None:
    added = Added(lambda table, at: table[at].view(-1, 2, 4).split(1, 1)[0].neg() + 1, TABLE, POSITIONS)
    names = {node.name: node for node in added.gm.graph.nodes}
    rows, negated, more = names["index"], names["neg"], names["add"]
    for at in (rows, names["view"], names["getitem"]):
        assert rope_rewrite._is_read_elsewhere(at, frozenset())
        assert not rope_rewrite._is_read_elsewhere(at, frozenset({negated}))
    assert rope_rewrite._is_read_elsewhere(negated, frozenset({negated}))
    assert not rope_rewrite._is_read_elsewhere(negated, frozenset({more}))


def test_rows_that_stay_in_the_graph_are_read_instead_of_their_tables() -> None:
    def program(cos: Tensor, sin: Tensor, at: Tensor) -> Tensor:
        rows = cos[at]
        return rows * sin[at] + rows.neg()

    added = Added(program, TABLE, TABLE, POSITIONS)
    names = {node.name: node for node in added.gm.graph.nodes}
    cos, sin, product, negated = (names[name] for name in ("index", "index_1", "mul", "neg"))

    def tables(dead: set[Node]) -> Any:
        places = SimpleNamespace(cos=(cos, ""), sin=(sin, ""))
        found: Any = SimpleNamespace(key=places, dead=frozenset(dead), attention=added.end)
        builder = Builder(added.gm.graph)
        with value(cos).fake_mode, added.gm.graph.inserting_before(added.end):
            size = builder.call(torch.ops.aten.sym_size.int, added.inputs[2], 0)
            return rope_rewrite._tables(builder, found, size)

    assert tables({product, negated}) == tuple(added.inputs)
    rows = tables({product})  # the cosines are read elsewhere
    assert rows[2] is None and rows[0].args[0] is cos and rows[1].args[0] is sin


TABLES: dict[str, tuple[Callable[[Tensor], Tensor], Shape, str, list[str]]] = {
    "rows": (lambda x: x * 1, (T, 8), "", ["as_strided"]),
    "of heads": (lambda x: x * 1, (T, 1, 8), "", ["as_strided"]),
    "viewed": (lambda x: (x * 1).unsqueeze(1), (T, 8), "", ["as_strided"]),
    "real": (lambda x: x * 1, (T, 1, 4, torch.complex64), "real", ["view_as_real", "select", "reshape"]),
    "imaginary": (lambda x: x * 1, (T, 4, torch.complex64), "imag", ["view_as_real", "select"]),
    "apart": (lambda x: (x * 1).t(), (8, T), "", []),
    "apart, of heads": (lambda x: (x * 1).transpose(0, 2), (8, 1, T), "", ["reshape"]),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_viewed_by_token(name: str) -> None:
    program, shape, part, ops = TABLES[name]
    added = Added(program, shape)
    sizes: list[Node] = []

    def make(builder: Builder, end: Node, last: Node) -> Node:
        if not sizes:
            sizes.append(builder.call(torch.ops.aten.sym_size.int, added.inputs[0], shape.index(T)))
        return rope_rewrite._table(builder, (end, part), sizes[0], last)

    made, nodes = added.add(make)
    assert [str(node.target).split(".")[1] for node in nodes[1:]] == ops
    x = torch.randn([COUNT if size == T else size for size in shape if isinstance(size, int)])
    x = torch.complex(x, x + 1) if part else x
    want = program(x).reshape(COUNT, -1)
    assert torch.equal(added.run(x), getattr(want, part) if part else want)
    if ops == ["as_strided"]:  # a later layer takes the same node
        assert added.add(make) == (made, [])


@pytest.mark.parametrize("shape", [(3, 8), (1, 3, 8)])
def test_tables_of_a_sequence_are_repeated_once(shape: Shape) -> None:
    added = Added(lambda x, table: x * 1, (6, 4), shape)
    table = added.inputs[1]
    _, nodes = added.add(lambda builder, _, last: rope_rewrite._table(builder, (table, ""), 6, last))
    x = torch.randn(shape)
    assert torch.equal(added.run(torch.zeros(6, 4), x), x.view(3, 8).repeat(2, 1))
    again, more = added.add(lambda builder, _, last: rope_rewrite._repeated(builder, table, 6, last))
    assert len(nodes) >= 3 and more == [] and again in nodes


def test_tables_of_sequences_of_unknown_number_are_refused() -> None:
    added = Added(lambda x, table: torch.cat((x, x)), (T, 4), (3, 8))
    tokens = value(added.inputs[0]).shape[0]
    with pytest.raises(Refusal, match="no input of the graph has their number") as refused:
        added.add(lambda builder, _, last: rope_rewrite._repeated(builder, added.inputs[1], tokens * 3 // 2, last))
    assert refused.value.near


def test_flat_weights_stay() -> None:
    added = Added(lambda x: x.view(2, 3), (6,))
    assert rope_rewrite._flat(Builder(added.gm.graph), added.inputs[0]) is added.inputs[0]
    assert rope_rewrite._flat(Builder(added.gm.graph), None) is None
    _, nodes = added.add(lambda builder, end, _: rope_rewrite._flat(builder, end))
    assert len(nodes) == 1 and torch.equal(added.run(torch.arange(6)), torch.arange(6))


REPLAYED: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Tensor], Tensor]]] = {
    "a part": (lambda x, y: x.split([1, 3], 1)[1], lambda x: x[:, 1:]),
    "values of a reduction": (lambda x, y: x.max(1, keepdim=True)[0], lambda x: x[:, :1]),
    "spread": (lambda x, y: x.amax(1, keepdim=True) + y, lambda x: x[:, :1].expand(-1, 4)),
}


@pytest.mark.parametrize("name", REPLAYED)
def test_moves_are_replayed(name: str) -> None:
    program, moved = REPLAYED[name]
    added = Added(lambda x, y: program(x * 1, y), (T, 4), (4,))
    (output,) = (node for node in added.gm.graph.nodes if node.name == "mul")
    inside = [node for node in added.gm.graph.nodes if node > output]
    added.add(lambda builder, *_: Replay(builder.call, output, added.inputs[0], inside)(added.end))
    x = torch.randn(COUNT, 4)
    assert torch.equal(added.run(x, torch.zeros(4)), moved(x))


@pytest.mark.parametrize("keep", [False, True])
def test_reductions_are_replayed_as_first_elements(keep: bool) -> None:
    added = Added(lambda x: (x * 1).amax((1, -1), keep), (T, 4, 8))
    output, end = added.end.args[0], added.end
    added.add(lambda builder, *_: Replay(builder.call, output, added.inputs[0], [end])(end))
    x = torch.randn(COUNT, 4, 8)
    assert torch.equal(added.run(x), x[:, :1, :1] if keep else x[:, 0, 0])


def test_moves_ahead_of_an_op_are_replayed_on_codes_and_on_a_column_of_each_group() -> None:
    added = Added(lambda x: torch.ops.vattn.quant_fp8_group((x * 1)[1:], 64, False, False), (T, 256))
    (output,) = (node for node in added.gm.graph.nodes if node.name == "mul")
    inside = [node for node in added.gm.graph.nodes if node > output and node.op == "call_function"]
    codes, scales = added.end  # type: ignore[misc]
    x = torch.randn(COUNT, 256)
    added.end = scales
    _, nodes = added.add(
        lambda builder, *_: tuple(Replay(builder.call, output, added.inputs[0], inside)(end) for end in (codes, scales))
    )
    got = added.run(x)
    assert len(nodes) == 3  # codes are moved, scales are moved and chosen
    assert torch.equal(got[0], x[1:]) and torch.equal(got[1], x[1:, ::64])


def test_what_reads_no_codes_is_not_replayed() -> None:
    added = Added(lambda x, y: y + 1, (T, 4), (T, 4))
    with pytest.raises(Refusal, match=r"^add cannot be repeated on codes") as refused:
        added.add(lambda builder, *_: Replay(builder.call, added.inputs[0], added.inputs[0], [])(added.end))
    assert refused.value.near


def test_scales_that_are_spread_over_the_tokens_are_refused() -> None:
    added = Added(lambda x, y: (x * 1).amax(0) + y, (T, 4), (T, 4))
    (output,) = (node for node in added.gm.graph.nodes if node.name == "mul")
    inside = [node for node in added.gm.graph.nodes if node > output]
    with pytest.raises(Refusal, match="spreads scales over a varying size") as refused:
        added.add(lambda builder, *_: Replay(builder.call, output, added.inputs[0], inside)(added.end))
    assert refused.value.near


STATIC: dict[str, tuple[Shape, float, int]] = {
    "as it is": ((1,), 1.0, 0),
    "a number": ((), 1.0, 1),
    "a matrix": ((1, 1), 1.0, 1),
    "in bf16": ((1, BF16), 1.0, 1),
    "scaled": ((1,), 0.25, 1),
    "all": ((1, 1, BF16), 4.0, 3),
}


@pytest.mark.parametrize("name", STATIC)
def test_static_scales_are_one_fp32_value(name: str) -> None:
    shape, factor, count = STATIC[name]
    added = Added(lambda s: s, shape)
    device = torch.device("cpu")
    made, nodes = added.add(
        lambda builder, end, _: output_rewrite._static_scale(builder, added.inputs[0], factor, device)
    )
    scale = torch.full([size for size in shape if isinstance(size, int)], 0.3).to(value(added.inputs[0]).dtype)
    got = added.run(scale)
    assert len(nodes) == count and got.dtype == torch.float32 == value(made).dtype
    assert torch.equal(got, scale.float().view(1) * factor)


@pytest.mark.parametrize(("tokens", "tiles"), [(1, 128), (128, 128), (129, 256)])
@pytest.mark.parametrize("varies", [False, True])
def test_memory_of_block_scales_is_of_their_layout(tokens: int, tiles: int, varies: bool) -> None:
    for fmt in (f for f in OUTPUT_FORMATS.values() if f.group_size):
        added = Added(lambda x: x * 1, (T, 512))

        def make(builder: Builder, end: Node, _: Node, fmt: Any = fmt) -> Node:
            count = builder.call(torch.ops.aten.sym_size.int, end, 0) if varies else tokens
            return output_rewrite._block_scale(builder, fmt, count, 512, torch.device("cpu"))

        added.add(make)
        got, wanted = added.run(torch.zeros(tokens, 512)), fmt.block_scale_shape(tokens, 512)
        assert got.shape == wanted and got.dtype == fmt.block_scale_dtype
        assert not fmt.swizzled or got.shape[0] == tiles
        assert got.stride() == ((1, tokens) if fmt.column_major else (wanted[1], 1))


def test_results_are_laid_as_what_they_replace() -> None:
    added = Added(lambda x, y: x.t().contiguous(), (T, 6), (6, T))
    x, y = added.inputs

    def laid(make: Callable[[Tensor], Tensor], like: Node) -> Tensor:
        with value(x).fake_mode:
            node = added.gm.graph.call_function(torch.ops.aten.clone.default, (x,))
            node.meta["val"] = make(value(x))
        return value(output_rewrite._laid(Builder(added.gm.graph), node, like))

    with value(x).fake_mode:
        assert laid(lambda x: x.clone(), x).is_contiguous()
        turned = added.gm.graph.call_function(torch.ops.aten.t.default, (x,))
        turned.meta["val"] = value(x).t()
    assert laid(lambda x: x.t(), turned).stride() == value(turned).stride()
    assert laid(lambda x: x.t(), y).is_contiguous()
    with pytest.raises(Refusal, match="lies otherwise in memory") as refused:
        laid(lambda x: x.t().contiguous(), turned)
    assert refused.value.near
    for make in (lambda x: x[:, 1:], lambda x: x.double()):
        with pytest.raises(Refusal, match="cannot be made of codes and scales of the whole output") as refused:
            laid(make, x)
        assert refused.value.near
