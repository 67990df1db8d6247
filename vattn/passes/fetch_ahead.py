"""Tells the op that turns query and key which weight the GEMM behind attention reads, so that it can fetch it early.

Attention of few tokens leaves memory idle, and the GEMM behind it waits for its weight. Nothing is computed otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from vattn.passes.moves import MOVES
from vattn.passes.region import GEMMS, op_name, value

FETCHED = ", which fetches the next GEMM's weight in steps of one or two tokens"

_TRANSPOSES = frozenset("t permute transpose view reshape alias detach".split())
_MOST_MOVES = 8


def fetch_ahead(call: Node, order: dict[Node, int]) -> bool:
    """Give the op that makes the query of an attention call the weight behind it, if both are there.

    Args:
        order: position of every node of the graph.
    """
    query = call.kwargs.get("query")
    turn = query.args[0] if isinstance(query, Node) and query.args else None
    if not isinstance(turn, Node) or turn.args[:1] != (torch.ops.vattn.rope_kv_cache_update.default,):
        return False
    weight = weight_behind(call)
    if weight is None or order.get(weight, 0) > order.get(call, 0):
        return False
    turn.kwargs = {**turn.kwargs, "next_weight": weight}
    if "eager_input_vals" in turn.meta:
        args, eager = turn.meta["eager_input_vals"]
        turn.meta["eager_input_vals"] = (args, {**eager, "next_weight": value(weight)})
    return True


def weight_behind(call: Node) -> Node | None:
    """Return the weight of the first GEMM that reads an attention call's output, as it came into the graph."""
    stack = [(user, 0) for user in call.users]
    while stack:
        node, moves = stack.pop(0)
        name = op_name(node.target)
        if name in GEMMS:
            return _weight(node)
        plain = node.op == "call_function" and not name
        if (plain or name in MOVES) and moves < _MOST_MOVES:
            stack += [(user, moves + 1) for user in node.users]
    return None


def _weight(gemm: Node) -> Node | None:
    found: dict[int, Node] = {}
    for node in gemm.all_input_nodes:
        while op_name(node.target) in _TRANSPOSES and isinstance(node.args[0], Node):
            node = node.args[0]
        val = value(node)
        if node.op not in ("placeholder", "get_attr") or not isinstance(val, Tensor) or val.dim() != 2:
            continue
        if isinstance(val.numel(), int) and (val.is_contiguous() or val.t().is_contiguous()):
            found[val.numel()] = node
    return found[max(found)] if found else None
