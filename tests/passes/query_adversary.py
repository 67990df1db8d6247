"""Query quantisers, whole ones and joined ones, that are changed in one place as in `adversary`.

The attention call is not run: the codes that it reads are compared.
"""

from __future__ import annotations

from typing import Any

import torch
from adversary import CHANGES, Adversary, Site, cast
from fx_layers import with_query
from harness import HEADS, WIDTH
from queries import KV_HEADS, PER_HEAD, PER_TENSOR, Way, heads, in_columns, rounded
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

import vattn
from vattn.ops.fusion_notes import NodeReport
from vattn.passes.query_quant.find import IN_LOAD
from vattn.quantization.codecs import to_e4m3

aten = torch.ops.aten


def halves(q: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([rounded(x.float() / s) for x in heads(q).chunk(2, -1)], -1), s


WAYS: dict[str, Way] = {
    **{name: PER_TENSOR[name] for name in ("divide", "reciprocal", "heads in turn", "heads stacked")},
    **{name: PER_HEAD[name] for name in ("groups", "reciprocal of groups", "columns", "groups joined")},
    "columns joined": in_columns(lambda x, s: x / s),
    "halves joined": halves,
}


def column_by_the_reciprocal(site: Site) -> Node:
    """Multiply by the reciprocal in one column of what is divided."""
    if site.node.target is not aten.div.Tensor:
        raise TypeError("no quotient")
    x, scale = site.node.args
    there = site.call(aten.eq.Scalar, site.index(-1), float(site.place()[-1]))
    return site.where(there, site.call(aten.mul.Tensor, x, site.call(aten.reciprocal.default, scale)))


def factor_in_bf16(site: Site) -> Node:
    """Multiply before the cast to fp32, by a number that rounding to bf16 often undoes."""
    if site.node.target is not cast or site.node.args[0].meta["val"].dtype is not torch.bfloat16:
        raise TypeError("no cast of the query")
    product = site.call(aten.mul.Tensor, site.node.args[0], site.factor())
    product.meta = {"val": site.node.args[0].meta["val"]}
    return site.call(cast, product, torch.float32)


class QueryAdversary(Adversary):
    """Draws and judges programs that make the query of an attention call."""

    changes = CHANGES | {change.__name__: change for change in (column_by_the_reciprocal, factor_in_bf16)}
    # The graph is captured on 7 tokens: a slice of more rows would make it a graph for few tokens.
    del changes["first_rows"]

    def __init__(self) -> None:
        self.dtype = torch.bfloat16
        self.bases = {
            name: with_query(way, lambda module, x: x, (0.0137, 0.031) if name in PER_HEAD else (0.0137,))[0]
            for name, way in WAYS.items()
        }
        self._block: tuple[int, Any] = -1, None

    def fuses(self, report: NodeReport) -> bool:
        return report.query.startswith(IN_LOAD)

    def run(self, gm: GraphModule, output: Tensor, scale: Tensor, keep: bool = False) -> tuple[Any, dict[Node, Any]]:
        """Run a graph on a query `[T, COLUMNS]` up to the attention call; returns the codes that this reads."""
        runner = _Run(gm, output, scale)
        runner.run(*gm.graph.find_nodes(op="placeholder"))
        return (runner.codes,), runner.seen


class _Run(Interpreter):
    """Runs a graph up to its attention call, with products in bf16 as generated code has them, in fp32."""

    def __init__(self, gm: GraphModule, query: Tensor, scale: Tensor) -> None:
        super().__init__(gm)
        self.query, self.scale, self.seen = query, scale, dict[Node, Any]()
        self.codes = torch.empty(0)

    def run_node(self, n: Node) -> Any:
        self.seen[n] = super().run_node(n)
        return self.seen[n]

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        node = super().placeholder(target, args, kwargs)
        val = node.meta["val"]
        if isinstance(val, torch.SymInt):
            return len(self.query)
        if val.dtype is torch.float32:
            return self.scale * torch.tensor([1.0, 1.37])[: len(val)]
        return self.query if isinstance(val.shape[0], torch.SymInt) else torch.zeros(val.shape, dtype=val.dtype)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if str(target) != "auto_functionalized_v2":
            low = target is aten.mul.Tensor and args[0].dtype is torch.bfloat16
            return super().call_function(target, (args[0].float(), *args[1:]) if low else args, kwargs)
        load, query = vattn.AttentionConfig.parse(kwargs["config"]).query_load, kwargs["query"]
        if query.dtype is torch.bfloat16:
            query = query.view(-1, HEADS, WIDTH).float()
            scale = kwargs["q_scale"].expand(KV_HEADS).repeat_interleave(HEADS // KV_HEADS)[:, None]
            query = to_e4m3(query / scale if load == "divide" else query * scale.reciprocal())
        self.codes = query
        return (None, *kwargs["_all_bases"])
