"""Says how the query reaches an attention call, and whether its quantisation shares a kernel with what makes it."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from vattn.passes.region import FP8_DTYPES, value

_MOVES = frozenset("view reshape _unsafe_view permute transpose expand squeeze unsqueeze slice select clone".split())


def describe_query(call: Node) -> str:
    """Return how the query reaches an attention call, for the report."""
    query = call.kwargs.get("query")
    if not isinstance(query, Node) or not isinstance(value(query), torch.Tensor):
        return ""
    if value(query).dtype not in FP8_DTYPES:
        return ""
    cast = query
    while _name(cast) in _MOVES:
        cast = cast.all_input_nodes[0]
    if cast.op == "placeholder":
        return "FP8, an input of the graph"
    producer = _producer(cast)
    if producer is None:
        return "FP8, quantised in the kernel of its pointwise producer"
    return f"FP8, quantised in a kernel of its own behind {producer}"


def _producer(node: Node) -> str | None:
    """Return the op that a pointwise chain ends at if the chain only scales and casts its result, else `None`.

    `None` means that arithmetic on more than one value of the result (RoPE) or none at all comes before.
    """
    while True:
        inputs = [source for source in node.all_input_nodes if _is_full(source, node)]
        if len(inputs) > 1:
            return None
        if not inputs:
            return node.name
        node = inputs[0]
        if node.op != "call_function":
            return f"the input {node.name}"
        if not _is_pointwise(node):
            return _name(node) or node.name


def _is_full(source: Node, like: Node) -> bool:
    a, b = value(source), value(like)
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dim() > 0 and not _is_scale(a)


def _is_scale(tensor: torch.Tensor) -> bool:
    count = tensor.numel()
    return isinstance(count, int) and count <= 256


def _name(node: Node) -> str:
    return node.target._schema.name.split("::")[1] if isinstance(node.target, torch._ops.OpOverload) else ""


def _is_pointwise(node: Node) -> bool:
    if node.target is operator.getitem or not isinstance(node.target, torch._ops.OpOverload):
        return False
    tagged = torch.Tag.pointwise in node.target.tags
    return tagged or _name(node) in _MOVES or _name(node) in ("convert_element_type", "cat", "split", "where")
