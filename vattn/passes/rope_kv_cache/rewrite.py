"""Replaces RoPE, a cache update and the query's quantisation by one op.

Everything that can fail happens before anything is changed: new nodes are made beside the old ones first.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from vattn.passes.output_quant.rewrite import Builder, erase_unread
from vattn.passes.region import Refusal, expression, is_check, op_name, same_size, value
from vattn.passes.rope_kv_cache.find import FoundRope
from vattn.quantization.formats import MODEL_DTYPES, dtype_name

aten = torch.ops.aten

_RESHAPES = frozenset("view reshape _unsafe_view unsqueeze squeeze alias".split())
_SPLITS = ("split", "split_with_sizes")


def rewrite_rope(found: FoundRope, order: dict[Node, int]) -> None:
    """Let one op do what was found, and drop what it replaces.

    Args:
        order: position of every node of the graph.
    """
    update, attention = found.update, found.attention
    graph, builder = attention.graph, Builder(attention.graph)
    old_query = attention.kwargs["query"]
    assert isinstance(old_query, Node)
    try:
        with value(old_query).fake_mode, graph.inserting_before(attention):
            call = _new_call(builder, found, order)
            query = graph.call_function(operator.getitem, (call, 1))
            builder.nodes.append(query)
            query.meta["val"] = call.meta["val"][1]
    except Exception:
        builder.undo()
        raise
    unsorted = False
    for user in list(update.users):
        # What the update has written follows the query among what the new op writes.
        assert user.target is operator.getitem
        user.args = (call, user.args[1] + 1)  # type: ignore[operator]
        if order[user] < order[attention]:
            query.append(user)
            unsorted = unsorted or any(order[reader] < order[attention] for reader in user.users)
    attention.kwargs = {**attention.kwargs, "query": query}
    if "eager_input_vals" in attention.meta:
        args, eager = attention.meta["eager_input_vals"]
        attention.meta["eager_input_vals"] = (args, {**eager, "query": value(query)})
    graph.erase_node(update)
    erase_unread(found.dead)
    if unsorted:
        from torch._inductor.pattern_matcher import stable_topological_sort

        stable_topological_sort(graph)


def _new_call(builder: Builder, found: FoundRope, order: dict[Node, int]) -> Node:
    """Add the functionalised call of the op, and what it reads, in front of the attention call."""
    update, config = found.update, found.config
    query = _heads(builder, found.query, config.num_heads, config.head_size)
    key = _heads(builder, found.key, config.num_kv_heads, config.head_size)
    tokens: Any = value(query).shape[0]
    if not isinstance(tokens, int):
        tokens = builder.call(aten.sym_size.int, query, 0)
    dtype = torch.float8_e4m3fn if found.q_scale is not None else MODEL_DTYPES[config.dtype]
    shape = [tokens, config.num_heads, config.head_size]
    out = builder.call(aten.empty.memory_format, shape, dtype=dtype, device=value(query).device)
    moved = {name: at for name, at in update.kwargs.items() if name.startswith("_kv_cache_")}
    moved["_kv_cache_base_index"] = update.kwargs["_kv_cache_base_index"] + 1  # type: ignore[operator]
    cos, sin, positions = _tables(builder, found, tokens, order)
    _check_tables(cos, sin)
    kwargs: dict[str, Any] = {
        "query": query,
        "key": key,
        "value": update.kwargs["value"],
        "cos": cos,
        "sin": sin,
        "positions": positions,
        "slot_mapping": update.kwargs["slot_mapping"],
        "q_weight": _flat(builder, found.q_weight),
        "k_weight": _flat(builder, found.k_weight),
        "q_scale": _flat(builder, found.q_scale),
        "k_scale": update.kwargs["k_scale"],
        "v_scale": update.kwargs["v_scale"],
        "rope": found.rope.encode(),
        "config": config.encode(),
        "_query_out_base_index": 0,
        **moved,
        "_all_bases": [out, *update.kwargs["_all_bases"]],  # type: ignore[misc]
    }
    op = torch.ops.vattn.rope_kv_cache_update.default
    call = builder.graph.call_function(update.target, (op,), kwargs)  # type: ignore[arg-type]
    builder.nodes.append(call)
    call.meta = {k: v for k, v in update.meta.items() if k not in ("val", "eager_input_vals")}
    call.meta["val"] = (value(update)[0], value(out), *value(update)[1:])
    call.meta["eager_input_vals"] = ((None,), torch.fx.map_arg(_nodes_only(kwargs), value))
    return call


def _nodes_only(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments as Inductor keeps their eager values: `None` for what is no tensor."""
    return {k: v if isinstance(v, (Node, list)) else None for k, v in kwargs.items()}


def _heads(builder: Builder, place: tuple[Node, int, int], num_heads: int, head_size: int) -> Node:
    """View some heads of a tensor as `[T, heads, D]`."""
    node, first, heads = place
    val = value(node)
    if val.dim() != 3 or not same_size(val.shape[1], heads) or not same_size(val.shape[2], head_size):
        node = builder.call(aten.reshape.default, node, [-1, heads, head_size])
    if heads != num_heads:
        node = builder.call(aten.slice.Tensor, node, 1, first, first + num_heads)
    if value(node).stride(-1) != 1:
        raise Refusal("the columns of a head do not lie together", node, near=True)
    return node


def _tables(builder: Builder, found: FoundRope, tokens: Any, order: dict[Node, int]) -> tuple[Node, Node, Node | None]:
    """Return tables and positions: the user's own if this layer alone looks up rows of them, else rows and `None`.

    Rows that other layers read are gathered once for all: a position that is read first costs a kernel a wait.
    """
    places = (found.cos, found.sin)
    looked_up = [_looked_up(node, tokens) if not part else None for node, part in places]
    if None not in looked_up:
        (cos, positions, cos_part), (sin, others, sin_part) = looked_up  # type: ignore[misc]
        if positions is others and not any(_is_read_elsewhere(node, found.dead) for node, _ in places):
            if value(positions).dim() != 1:
                positions = builder.call(aten.reshape.default, positions, [tokens])
            return _columns(builder, cos, cos_part), _columns(builder, sin, sin_part), positions

    def is_earlier(node: Node) -> bool:
        return node in order and order[node] < order[found.attention]

    cos, sin = (_table(builder, place, tokens, is_earlier) for place in places)
    return cos, sin, None


def _check_tables(cos: Node, sin: Node) -> None:
    """Refuse tables that the op does not take: it wants both in one model dtype."""
    dtypes = [value(table).dtype for table in (cos, sin)]
    if dtypes[0] != dtypes[1] or dtypes[0] not in MODEL_DTYPES.values():
        told = " and ".join(dict.fromkeys(dtype_name(dtype) for dtype in dtypes))
        raise Refusal(f"the tables are {told}: give both one model dtype ahead of the rotation", cos, near=True)


def _is_read_elsewhere(node: Node, dead: frozenset[Node]) -> bool:
    """Return whether rows of a table, or views of them, are read by what stays in the graph."""

    def is_view(at: Node) -> bool:
        return op_name(at.target) in (*_RESHAPES, *_SPLITS) or at.target is operator.getitem

    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if is_view(user):
                stack.append(user)
            elif user not in dead and not is_check(user):
                return True
    return False


def _columns(builder: Builder, table: Node, part: range | None) -> Node:
    """Return some columns of a table, or all of them."""
    return table if part is None else builder.call(aten.slice.Tensor, table, 1, part.start, part.stop)


def _looked_up(node: Node, tokens: Any) -> tuple[Node, Node, range | None] | None:
    """Return a table and the positions of which a node holds the rows, or some columns of them; `None`: neither."""
    while op_name(node.target) in _RESHAPES:
        node = node.args[0]  # type: ignore[assignment]
    part, split = None, node.args[0] if node.target is operator.getitem else None
    if isinstance(split, Node) and op_name(split.target) in _SPLITS:
        rows, at = split.args[0], node.args[1]
        if not isinstance(rows, Node) or value(rows).dim() != 2 or split.args[2:] not in ((-1,), (1,)):
            return None
        ends = list(itertools.accumulate(int(piece.shape[1]) for piece in value(split)))
        part, node = range(ends[at] - int(value(node).shape[1]), ends[at]), rows  # type: ignore[index]
    args: Any = node.args
    table, positions = args[0] if args else None, None
    if node.target is aten.index.Tensor and len(args[1]) == 1:
        positions = args[1][0]
    elif node.target is aten.index_select.default and args[1] == 0:
        positions = args[2]
    elif node.target is aten.embedding.default:
        positions = args[1]
    if not isinstance(table, Node) or not isinstance(positions, Node) or value(table).dim() != 2:
        return None
    count = value(tokens) if isinstance(tokens, Node) else tokens
    whole = value(positions).dtype in (torch.int32, torch.int64)
    return (table, positions, part) if whole and same_size(value(positions).numel(), count) else None


def _table(builder: Builder, place: tuple[Node, str], tokens: Any, is_earlier: Callable[[Node], bool]) -> Node:
    """View a table as `[T, columns]`, by the node that a layer before made if there is one."""
    node, part = place
    if part:
        pairs = builder.call(aten.view_as_real.default, node)
        node = builder.call(aten.select.int, pairs, -1, 0 if part == "real" else 1)
    while op_name(node.target) in _RESHAPES:
        node = node.args[0]  # type: ignore[assignment]
    val, count = value(node), value(tokens) if isinstance(tokens, Node) else tokens
    columns = int(expression(val.numel()) / expression(count))
    if val.is_contiguous():
        for user in node.users:
            is_view = user.target is aten.as_strided.default and user.args[2:] == ([columns, 1],)
            if is_view and is_earlier(user) and all(map(same_size, value(user).shape, (count, columns))):
                return user
        # Inductor gives each op a copy, made by a kernel, of what is no buffer yet; this makes one of it, once.
        return builder.call(aten.as_strided.default, node, [tokens, columns], [columns, 1])
    if val.dim() != 2 or not same_size(val.shape[0], count):
        node = builder.call(aten.reshape.default, node, [tokens, columns])
    return node


def _flat(builder: Builder, node: Node | None) -> Node | None:
    """View a weight or scale as one dimension."""
    if node is None or value(node).dim() == 1:
        return node
    return builder.call(aten.reshape.default, node, [value(node).numel()])
