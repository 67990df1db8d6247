"""Repeats the slices and transposes of a region on the codes and scales of a fused call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.fx import Node

from vattn.passes.ops import REORDERS, meaning, moves, op_name, reduces
from vattn.passes.region import Refusal, same_shape, same_size, value
from vattn.passes.region_moves import reduced_dims

aten = torch.ops.aten
Call = Callable[..., Node]


class Replay:
    """Makes nodes that hold moved codes or scales; one for each of the two.

    Args:
        call: adds a call to the graph, with its fake value.
        output: the attention output that the region starts from.
        start: replaces it, of the same shape.
        inside: the region's nodes.
    """

    def __init__(self, call: Call, output: Node, start: Node, inside: Collection[Node]) -> None:
        self.call, self.inside = call, inside
        self.made: dict[Node, Node] = {output: start}

    def __call__(self, node: Node) -> Node:
        """Return a node that holds the part of `start` that a node of the region holds of the output."""
        if node not in self.made:
            self.made[node] = self._make(node)
        return self.made[node]

    def _make(self, node: Node) -> Node:
        if moves(node):
            args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), self._source)
            return self.call(node.target, *args, **kwargs)
        if node.target is operator.getitem:
            quantiser = node.args[0]
            if moves(quantiser):  # type: ignore[arg-type]
                return self.call(operator.getitem, self(quantiser), node.args[1])  # type: ignore[arg-type]
            if reduces(quantiser):  # type: ignore[arg-type]
                return self._first(quantiser)  # type: ignore[arg-type]
            moved = self(quantiser.args[0])  # type: ignore[union-attr, arg-type]
            if node.args[1] == 0:
                return moved
            columns, groups = int(value(moved).shape[1]), int(value(node).shape[1])
            return self.call(aten.slice.Tensor, moved, 1, 0, columns, columns // groups)
        if reduces(node):
            return self._first(node)
        sources = [source for source in node.all_input_nodes if source in self.inside or source in self.made]
        if not sources and meaning(node) == "cast":
            sources = node.all_input_nodes  # codes that are cast once more
        whole = [source for source in sources if same_shape(value(source).shape, value(node).shape)]
        if not sources:
            raise Refusal(f"{node.name} cannot be repeated on codes", node, near=True)
        moved = self((whole or sources)[0])
        return moved if whole else self._expanded(moved, node)

    def _expanded(self, moved: Node, like: Node) -> Node:
        held, wanted = value(moved).shape, value(like).shape
        kept = (None,) * (len(wanted) - len(held)) + tuple(held)
        sizes = [-1 if a is not None and same_size(a, b) else b for a, b in zip(kept, wanted, strict=True)]
        if not all(isinstance(size, int) for size in sizes):
            raise Refusal(f"{like.name} spreads scales over a varying size", like, near=True)
        return self.call(aten.expand.default, moved, sizes)

    def _source(self, node: Node) -> Node:
        if node in self.made or (node in self.inside and isinstance(value(node), torch.Tensor)):
            return self(node)
        if node in self.inside:
            raise Refusal(f"the size {node.name} is taken from the output", node, near=True)
        return node

    def _first(self, node: Node) -> Node:
        """Return the first element along the dimensions that a reduction reduces: all of them share a scale."""
        moved = self(node.args[0])  # type: ignore[arg-type]
        rank = value(moved).dim()
        dims, keep = reduced_dims(node, rank)
        for dim in sorted((d % rank for d in dims), reverse=True):
            if keep:
                moved = self.call(aten.slice.Tensor, moved, dim, 0, 1)
            else:
                moved = self.call(aten.select.int, moved, dim, 0)
        return moved


def token_slices(node: Node, output: Node, inside: Collection[Node]) -> list[tuple[Any, ...]] | None:
    """Return the slices along tokens that lead from an output to a node, if all other moves are plain views."""
    tokens = value(output).shape[0]
    found: list[tuple[Any, ...]] = []
    while node is not output:
        name = op_name(node.target)
        sources = [source for source in node.all_input_nodes if source in inside or source is output]
        if not sources:
            return None
        source = sources[0]
        if name == "slice":
            given = list(node.args[1:])
            dim, *ends = given + [0, None, None, 1][len(given) :]
            if dim != 0 or any(isinstance(end, Node) and end in inside for end in ends):
                return None
            found.append(tuple(ends))
            tokens = None
        elif meaning(node) in REORDERS or (tokens is None and value(source).dim() and not _keeps_first(source, node)):
            return None
        node = source
    return found[::-1]


def _keeps_first(source: Node, node: Node) -> bool:
    val, made = value(source), value(node)
    return isinstance(val, torch.Tensor) and made.dim() > 0 and same_size(val.shape[0], made.shape[0])
