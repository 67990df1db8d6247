"""Puts programs ahead of an attention call by hand, into a post-grad graph that is captured once.

A program makes the call's query, and in a layer with RoPE the key that goes into the cache too. The graph runs on what
it was captured with, so that what a pass makes of it can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from fx_programs import add_program, captured_graph, copied
from harness import HEADS, WIDTH, step
from queries import KV_HEADS, Way, Written, rounded
from queries import inputs as query_inputs
from rope_forms import LayerWithRope, RopeForm
from rope_forms import inputs as rope_inputs
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

import vattn
from vattn.passes.region import attention_calls

Connect = Callable[[GraphModule, list[Node], tuple[Any, ...]], Any]

TABLES = ("angles", "cos", "sin", "cos_sin", "q_weight", "k_weight", "bias", "low_rank")


def run(gm: GraphModule, inputs: list[Any]) -> list[Any]:
    """Run a graph op by op on copies of its inputs; returns its results and the copies, which it may write."""
    held = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
    with torch.no_grad():
        return [*Interpreter(GraphModule(gm, gm.graph)).run(*held), *held]


class Ahead:
    """A captured graph that returns some results and, negated, the places that programs read.

    Attributes:
        inputs: what the graph was called with.
    """

    def __init__(self, gm: GraphModule, inputs: list[Any], results: int) -> None:
        self.gm, self.inputs, self.results = gm, inputs, results

    def of(
        self,
        program: Callable[..., tuple[Any, ...]],
        connect: Callable[[GraphModule, list[Node], tuple[Any, ...]], Any],
    ) -> GraphModule:
        """Return a copy with a program in it.

        Args:
            connect: gets the graph, the places and what holds the program's results; lets calls read these, and
                returns what else the graph returns.
        """
        gm = copied(self.gm)
        (end,) = gm.graph.find_nodes(op="output")
        results = list(end.args[0][: self.results])
        marks = [mark for mark in end.args[0][self.results :] if mark.target is torch.ops.aten.neg.default]
        places = [mark.args[0] for mark in marks]
        first = marks[-1].next
        gm.graph.erase_node(end)
        for mark in marks:
            gm.graph.erase_node(mark)
        with gm.graph.inserting_before(first):
            made = add_program(gm, program, places)
        results += connect(gm, places, made)
        gm.graph.output(results)
        gm.graph.eliminate_dead_code()
        gm.graph.lint()
        return gm


@cache
def _rope_layer(q_scale: float | tuple[float, ...] | None, fp8_cache: bool) -> Ahead:
    def marks(layer: Any, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        held = query, key, layer.projected, positions, *(getattr(layer, name) for name in TABLES)
        # There are as many positions as tokens.
        layer.escaped = (query[:, 0, 0] + positions, *(x.neg() for x in held))
        return query, key

    options: dict[str, Any] = {"cache": "fp8"} if fp8_cache else {}
    if q_scale is not None:
        options["q_scale"] = list(q_scale) if isinstance(q_scale, tuple) else q_scale
    model = LayerWithRope(RopeForm(marks, "", options=options))

    def function(x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        output, escaped = model(x, positions)
        return output, *escaped

    with step(model, [3, 4]):
        gm, inputs = captured_graph(function, *rope_inputs(7), compiler=vattn.compile)
    return Ahead(gm, inputs, 1)


def with_rope(form: RopeForm) -> tuple[GraphModule, list[Any]]:
    """Return the graph of a layer with RoPE as a form writes it, and what to call it with."""
    q_scale = form.options.get("q_scale")
    ahead = _rope_layer(tuple(q_scale) if isinstance(q_scale, list) else q_scale, "cache" in form.options)

    def program(query: Tensor, key: Tensor, projected: Tensor, positions: Tensor, *tables: Tensor) -> tuple[Any, ...]:
        escaped = torch.zeros(())
        layer = SimpleNamespace(projected=projected, escaped=escaped, **dict(zip(TABLES, tables, strict=True)))
        made = form.write(layer, query, key, positions)  # type: ignore[arg-type]
        return (*made, *(() if layer.escaped is escaped else (layer.escaped,)))

    def connect(gm: GraphModule, places: list[Node], made: tuple[Any, ...]) -> Any:
        for old, new in zip(places, made[:2], strict=False):
            old.replace_all_uses_with(new, lambda user, new=new: user > new)
        return made[2:]

    return ahead.of(program, connect), ahead.inputs


@cache
def _query_layer(scales: tuple[float, ...], backend: str) -> Ahead:
    def make(module: Any, x: Tensor) -> Tensor:
        module.seen = x, module.proj.weight
        return module.proj(x)

    def way(q: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        q_scale = s if len(scales) == 1 else s[:KV_HEADS]
        return (rounded(q.float() / s[0]), q_scale, *(x.neg() for x in (*model.seen, s)))

    model = Written(way, list(scales), make, backend=backend)
    gm, inputs = captured_graph(model, query_inputs(), compiler=vattn.compile)
    return Ahead(gm, inputs, 1)


def with_query(
    way: Way,
    make: Callable[[Any, Tensor], Tensor] = lambda module, x: module.proj(x),
    scales: tuple[float, ...] = (0.0137,),
    backend: str = "auto",
    returned: Callable[[Tensor], Tensor] | None = None,
) -> tuple[GraphModule, list[Any]]:
    """Return the graph of attention to a quantised query, as in `Written`, and what to call it with.

    Args:
        returned: of the codes, what the graph returns too.
    """
    ahead = _query_layer(scales, backend)

    class Projection:
        def __init__(self, weight: Tensor) -> None:
            self.weight = weight

        def __call__(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight)

    def program(x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Any, ...]:
        codes, q_scale = way(make(SimpleNamespace(proj=Projection(weight)), x), scale)
        others = () if returned is None else (returned(codes),)
        return codes.reshape(-1, HEADS, WIDTH), q_scale, *others

    def connect(gm: GraphModule, places: list[Node], made: tuple[Any, ...]) -> Any:
        ((call, _),) = attention_calls(gm.graph)
        call.kwargs = {**call.kwargs, "query": made[0], "q_scale": made[1]}
        return made[2:]

    return ahead.of(program, connect), ahead.inputs
