"""Replaces RoPE, a cache update and the query's quantisation by one op.

New nodes are added next to the old ones first, so that whatever can fail does so before the graph is changed.
"""

from __future__ import annotations

import itertools
import math
import operator
from typing import Any

import torch
from torch.fx import Node

from vattn.passes.graph_edits import Builder, change_call, erase_unread
from vattn.passes.inductor import sort_graph
from vattn.passes.ops import meaning, op_name
from vattn.passes.region import Refusal, expression, is_check, same_shape, same_size, value
from vattn.passes.rope_kv_cache.find import FoundRope
from vattn.passes.rope_kv_cache.probe import Rotation, table_rows
from vattn.quantization.formats import MODEL_DTYPES, dtype_name

aten = torch.ops.aten

_SPLITS = ("split", "split_with_sizes")


def rewrite_rope(found: FoundRope) -> None:
    """Replace what was found by one op."""
    update, attention = found.update, found.attention
    graph, old_query = attention.graph, attention.kwargs["query"]
    assert isinstance(old_query, Node)
    with Builder(graph) as builder, value(old_query).fake_mode, graph.inserting_before(attention):
        call = _new_call(builder, found)
        query = builder.keep(graph.call_function(operator.getitem, (call, 1)), value(call)[1])
        unsorted = not builder.is_ordered()
    for user in list(update.users):
        # The new op's first result is the query; the update's results follow it.
        assert user.target is operator.getitem
        user.args = (call, user.args[1] + 1)  # type: ignore[operator]
        if user < attention:
            query.append(user)
            unsorted = unsorted or any(reader < attention for reader in user.users)
    change_call(attention, {**attention.kwargs, "query": query})
    graph.erase_node(update)
    erase_unread(found.dead)
    if unsorted:
        sort_graph(graph)


def _new_call(builder: Builder, found: FoundRope) -> Node:
    """Add the functionalised call of the op and its arguments before the attention call."""
    update, config = found.update, found.config
    query = _heads(builder, found.query, config.num_heads, config.head_size)
    key = _heads(builder, found.key, config.num_kv_heads, config.head_size)
    tokens: Any = value(query).shape[0]
    if not isinstance(tokens, int):
        tokens = builder.call(aten.sym_size.int, query, 0)
    dtype = torch.float8_e4m3fn if found.query.scale is not None else MODEL_DTYPES[config.dtype]
    shape = [tokens, config.num_heads, config.head_size]
    out = builder.call(aten.empty.memory_format, shape, dtype=dtype, device=value(query).device)
    moved = {name: at for name, at in update.kwargs.items() if name.startswith(("_key_cache_", "_value_cache_"))}
    # The query is the new first base.
    moved |= {name: at + 1 for name, at in moved.items() if name.endswith("_base_index")}  # type: ignore[operator]
    cos, sin, positions = _tables(builder, found, tokens)
    _check_tables(cos, sin)
    kwargs: dict[str, Any] = {
        "query": query,
        "key": key,
        "value": update.kwargs["value"],
        "cos": cos,
        "sin": sin,
        "positions": positions,
        "slot_mapping": update.kwargs["slot_mapping"],
        "q_weight": _flat(builder, found.query.weight),
        "k_weight": _flat(builder, found.key.weight),
        "q_scale": _flat(builder, found.query.scale),
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
    call.meta = {k: v for k, v in update.meta.items() if k not in ("val", "eager_input_vals")}
    builder.keep(call, (value(update)[0], value(out), *value(update)[1:]))
    # Inductor keeps the eager values of tensors alone.
    tensors = {name: x if isinstance(x, (Node, list)) else None for name, x in kwargs.items()}
    call.meta["eager_input_vals"] = ((None,), torch.fx.map_arg(tensors, value))
    return call


def _heads(builder: Builder, rotation: Rotation[Node], num_heads: int, head_size: int) -> Node:
    """View some heads of a tensor as `[T, heads, D]`."""
    node, first, heads = rotation.source, rotation.first_head, rotation.heads_of_source
    val = value(node)
    if val.dim() != 3 or not same_size(val.shape[1], heads) or not same_size(val.shape[2], head_size):
        node = builder.call(aten.reshape.default, node, [-1, heads, head_size])
    if heads != num_heads:
        node = builder.call(aten.slice.Tensor, node, 1, first, first + num_heads)
    if value(node).stride(-1) != 1:
        raise Refusal("the columns of a head do not lie together", node, near=True)
    return node


def _tables(builder: Builder, found: FoundRope, tokens: Any) -> tuple[Node, Node, Node | None]:
    """Return tables and positions: the user's own if only this layer looks up rows of them, else rows and `None`.

    Rows that other layers read too are gathered once for all layers: reading positions first makes the op wait.
    """
    places = (found.key.cos, found.key.sin)
    looked_up = [_looked_up(node, tokens) if not part else None for node, part in places]
    if None not in looked_up:
        (cos, positions, cos_part), (sin, others, sin_part) = looked_up  # type: ignore[misc]
        if positions is others and not any(_is_read_elsewhere(node, found.dead) for node, _ in places):
            if value(positions).dim() != 1:
                positions = builder.call(aten.reshape.default, positions, [tokens])
            return _columns(builder, cos, cos_part), _columns(builder, sin, sin_part), positions

    cos, sin = (_table(builder, place, tokens, found.attention) for place in places)
    return cos, sin, None


def _check_tables(cos: Node, sin: Node) -> None:
    """Refuse tables unless both have one model dtype."""
    dtypes = [value(table).dtype for table in (cos, sin)]
    if dtypes[0] != dtypes[1] or dtypes[0] not in MODEL_DTYPES.values():
        dtypes_found = " and ".join(dict.fromkeys(dtype_name(dtype) for dtype in dtypes))
        raise Refusal(f"the tables are {dtypes_found}: give both one model dtype before the rotation", cos, near=True)


def _is_read_elsewhere(node: Node, dead: frozenset[Node]) -> bool:
    """Return whether a node that stays in the graph reads rows of a table, or views of them."""

    def is_view(at: Node) -> bool:
        return meaning(at) == "reshape" or op_name(at.target) in _SPLITS or at.target is operator.getitem

    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    walk = [node]
    for view in walk:
        for user in view.users:
            if is_view(user):
                walk.append(user)
            elif user not in dead and not is_check(user):
                return True
    return False


def _columns(builder: Builder, table: Node, part: range | None) -> Node:
    """Return some columns of a table, or all of them."""
    return table if part is None else builder.call(aten.slice.Tensor, table, 1, part.start, part.stop)


def _looked_up(node: Node, tokens: Any) -> tuple[Node, Node, range | None] | None:
    """Return the table, positions and columns that a node holds rows of; `None`: it holds no rows of a table."""
    while meaning(node) == "reshape":
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


def _table(builder: Builder, place: tuple[Node, str], tokens: Any, attention: Node) -> Node:
    """View a table as `[T, columns]`, by the node of an earlier layer if there is one."""
    node, part = place
    val, count = value(node), value(tokens) if isinstance(tokens, Node) else tokens
    rows, columns = table_rows(node, count), int(val.shape[-1])
    if part:
        pairs = builder.call(aten.view_as_real.default, node)
        node = builder.call(aten.select.int, pairs, -1, 0 if part == "real" else 1)
    if rows != expression(count):
        node = _repeated(builder, node, count, attention)
    else:
        columns = int(expression(val.numel()) / rows)
        while meaning(node) == "reshape":
            node = node.args[0]  # type: ignore[assignment]
    val = value(node)
    if val.is_contiguous():
        for user in node.users:
            is_view = user.target is aten.as_strided.default and user.args[2:] == ([columns, 1],)
            if is_view and user < attention and same_shape(value(user).shape, (count, columns)):
                return user
        # Inductor would copy a table that is not a buffer yet for every op; this makes it a buffer once.
        return builder.call(aten.as_strided.default, node, [tokens, columns], [columns, 1])
    if val.dim() != 2 or not same_size(val.shape[0], count):
        node = builder.call(aten.reshape.default, node, [tokens, columns])
    return node


def _repeated(builder: Builder, table: Node, count: Any, attention: Node) -> Node:
    """Return a table of all sequences of a batch, made of one that they share; an earlier layer's if there is one."""
    *sizes, columns = value(table).shape
    rows = math.prod(sizes)
    times, length = builder.shape([count // rows, rows], attention)
    if -1 in (times, length):
        raise Refusal("all sequences share the tables, but no input of the graph has their number", table, near=True)

    def once(op: Any, node: Node, shape: list[Any]) -> Node:
        made = (user for user in node.users if user.target is op and user.args[1:] == (shape,) and user < attention)
        return next(made, None) or builder.call(op, node, shape)

    table = once(aten.reshape.default, table, [length, columns])
    table = once(aten.expand.default, table, [times, length, columns])
    return once(aten.reshape.default, table, [-1, columns])


def _flat(builder: Builder, node: Node | None) -> Node | None:
    """View a weight or scale as one dimension."""
    if node is None or value(node).dim() == 1:
        return node
    return builder.call(aten.reshape.default, node, [value(node).numel()])
