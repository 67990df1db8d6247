"""Changes of a graph that every rewrite makes: new nodes with their fake values, other arguments, dead nodes erased."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from vattn.passes.region import Refusal, can_run, is_check, is_computed_from, is_size, same_size, value


class Builder:
    """Makes nodes with their fake values; as a context manager it takes them back if something fails."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: list[Node] = []

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for node in reversed(self.nodes):
                self.graph.erase_node(node)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Add a call; its fake value is computed from the fake values of its arguments."""
        fake_args, fake_kwargs = torch.fx.map_arg((args, kwargs), value)
        return self.keep(self.graph.call_function(target, args, kwargs), target(*fake_args, **fake_kwargs))

    def shape(self, sizes: Sequence[int | torch.SymInt], after: Node) -> list[Node | int]:
        """Return sizes as an argument: numbers, nodes that hold them, and -1 for one that no node holds.

        Args:
            after: a node on whose results the sizes may not depend.

        Raises:
            Refusal: no node holds two of them.
        """
        found = [size if isinstance(size, int) else self._size(size, after) for size in sizes]
        if found.count(-1) > 1:
            raise Refusal("the quantised tensor has two sizes that no input of the graph has", after, near=True)
        return found

    def _size(self, size: torch.SymInt, after: Node) -> Node | int:
        for node in self.graph.nodes:
            if is_size(node) and same_size(value(node), size) and not is_computed_from([node], after):
                return node
        for node in self.graph.find_nodes(op="placeholder"):
            for dim, held in enumerate(value(node).shape if isinstance(value(node), torch.Tensor) else ()):
                if same_size(held, size):
                    return self.call(torch.ops.aten.sym_size.int, node, dim)
        return -1

    def is_ordered(self) -> bool:
        """Return whether all new nodes come after what they read."""
        return all(source < node for node in self.nodes for source in node.all_input_nodes)

    def keep(self, node: Node, val: Any) -> Node:
        """Take on a node that was added, with its fake value."""
        self.nodes.append(node)
        node.meta["val"] = val
        return node


def erase_unread(nodes: Iterable[Node]) -> None:
    """Erase nodes that only checks of metadata read, and then nodes that only they have read."""
    waiting, gone = list(nodes), set[Node]()
    for node in waiting:
        if node in gone or not can_run(node) or not all(map(is_check, node.users)):
            continue
        for user in list(node.users):
            node.graph.erase_node(user)
        sources = node.all_input_nodes
        node.graph.erase_node(node)
        gone.add(node)
        waiting.extend(sources)


def change_call(call: Node, kwargs: dict[str, Any]) -> None:
    """Give a call other arguments, and Inductor the values by which it lays them out."""
    changed = {name: new for name, new in kwargs.items() if new is not call.kwargs.get(name)}
    call.kwargs = kwargs
    if "eager_input_vals" in call.meta:
        args, eager = call.meta["eager_input_vals"]
        call.meta["eager_input_vals"] = (args, {**eager, **torch.fx.map_arg(changed, value)})
