"""Changes of a graph that every rewrite makes: new nodes with their fake values, other arguments, dead nodes erased."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from vattn.passes.region import can_run, is_check, value


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

    def keep(self, node: Node, val: Any) -> Node:
        """Take on a node that was added, with its fake value."""
        self.nodes.append(node)
        node.meta["val"] = val
        return node


def erase_unread(nodes: Iterable[Node]) -> None:
    """Erase nodes that only checks of metadata read, and then nodes that only they have read."""
    stack = list(nodes)
    gone: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in gone or not can_run(node) or not all(map(is_check, node.users)):
            continue
        for user in list(node.users):
            node.graph.erase_node(user)
        sources = node.all_input_nodes
        node.graph.erase_node(node)
        gone.add(node)
        stack.extend(sources)


def change_call(call: Node, kwargs: dict[str, Any]) -> None:
    """Give a call other arguments, and Inductor the values by which it lays them out."""
    changed = {name: new for name, new in kwargs.items() if new is not call.kwargs.get(name)}
    call.kwargs = kwargs
    if "eager_input_vals" in call.meta:
        args, eager = call.meta["eager_input_vals"]
        call.meta["eager_input_vals"] = (args, {**eager, **torch.fx.map_arg(changed, value)})
