"""Makes one op of `rope_kv_cache_update` and the attention call behind it, where nothing else reads what lies between.

What the op computes is what the two compute. What it saves is a kernel, in steps that a backend runs as one: the report
says which.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from vattn.backends import selector
from vattn.backends.base import DeviceInfo
from vattn.config import AttentionConfig
from vattn.passes.region import Refusal, op_name, same_shape, same_size, value
from vattn.passes.rewrite import erase_unread
from vattn.passes.rope_region import same_computation
from vattn.rope_config import RopeConfig

_VIEWS = frozenset("view reshape _unsafe_view as_strided alias".split())
_FROM_ROPE = "query key value cos sin positions slot_mapping q_weight k_weight rope".split()


def join(call: Node, graph: Graph) -> str:
    """Let an attention call do what the op that turns its query does, in place; returns what the report says of it.

    Raises:
        Refusal: it cannot, with the reason; the graph computes what it did by the same ops then.
    """
    query = call.kwargs["query"]
    rope = query.args[0] if isinstance(query, Node) and query.target is operator.getitem else None
    assert isinstance(query, Node) and isinstance(rope, Node)
    if any(user is not call and not _asks_size(user) for user in query.users):
        raise Refusal("the turned query is also read elsewhere", query, near=True)
    for user in set(query.users) - {call}:
        user.args = (rope.kwargs["query"], *user.args[1:])
    cache = _behind_views(call.kwargs["kv_cache"])
    if cache.target is not operator.getitem or cache.args[0] is not rope:
        raise Refusal("something lies between the cache write and the attention call", cache, near=True)
    _check_same_cache(call, rope)
    for name in ("k_scale", "v_scale"):
        mine, other = call.kwargs[name], rope.kwargs[name]
        if mine is not other and not _same(mine, other):
            raise Refusal(f"the cache is written and read with different tensors as {name}", call, near=True)
    kwargs = _arguments(call, rope)
    order = {node: position for position, node in enumerate(graph.nodes)}
    _check_order(kwargs, rope, order)
    _change(call, rope, kwargs, order)
    return _which_steps(call)


def _asks_size(user: Node) -> bool:
    """Return whether a node asks for a size alone: the query has the same ones before it is turned."""
    return user.target is torch.ops.aten.sym_size.int


def _behind_views(cache: Any) -> Node:
    while op_name(cache.target) in _VIEWS:
        cache = cache.all_input_nodes[0]
    assert isinstance(cache, Node)
    return cache


def _same(a: Any, b: Any) -> bool:
    return isinstance(a, Node) and isinstance(b, Node) and same_computation(a, b)


def _check_same_cache(call: Node, rope: Node) -> None:
    """Refuse an attention call that reads another part of the tensor, or in another shape, than was written."""
    base = rope.kwargs["_all_bases"][rope.kwargs["_kv_cache_base_index"]]  # type: ignore[index]
    written, read = value(base), value(call.kwargs["kv_cache"])  # type: ignore[arg-type]
    layout: dict[str, Any] = {
        part: rope.kwargs.get(f"_kv_cache_{part}") for part in ("size", "stride", "storage_offset")
    }
    if "_kv_cache_slice_dim" in rope.kwargs:
        raise Refusal("the cache is a slice of a larger tensor", call, near=True)
    if layout["size"] is None:
        layout = {"size": written.shape, "stride": written.stride(), "storage_offset": written.storage_offset()}
    same = same_shape(read.shape, layout["size"]) and same_shape(read.stride(), layout["stride"])
    if not same or not same_size(read.storage_offset(), layout["storage_offset"]):
        raise Refusal("the cache is written and read in different layouts", call, near=True)


def _arguments(call: Node, rope: Node) -> dict[str, Any]:
    """Return the keyword arguments of the joined call: written are the attention's tensors, then the cache's."""
    kwargs: dict[str, Any] = {name: at for name, at in call.kwargs.items() if name not in ("query", "kv_cache")}
    written: Any = rope.kwargs["_all_bases"]
    kwargs.update({name: rope.kwargs[name] for name in _FROM_ROPE})
    kwargs["q_factor"] = rope.kwargs["q_scale"]
    bases: list[Any] = list(call.kwargs["_all_bases"])  # type: ignore[arg-type]
    kwargs.update({name: at for name, at in rope.kwargs.items() if name.startswith("_kv_cache_")})
    # The op that turns writes the query first.
    kwargs["_kv_cache_base_index"] = len(bases) + rope.kwargs["_kv_cache_base_index"] - 1  # type: ignore[operator]
    kwargs["_all_bases"] = [*bases, *written[1:]]
    return kwargs


def _check_order(kwargs: dict[str, Any], rope: Node, order: dict[Node, int]) -> None:
    """Refuse an attention call that reads something made of what the op ahead of it writes."""
    stack: list[Node] = []
    torch.fx.map_arg(kwargs, stack.append)
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node is rope:
            raise Refusal("the attention call reads what is computed from the updated cache", rope, near=True)
        if node not in seen and order[node] > order[rope]:
            seen.add(node)
            stack.extend(node.all_input_nodes)


def _change(call: Node, rope: Node, kwargs: dict[str, Any], order: dict[Node, int]) -> None:
    """Put the joined call in the place of the attention call, and drop the other."""
    old_query, old_cache = call.kwargs["query"], call.kwargs["kv_cache"]
    first = len(call.kwargs["_all_bases"])  # type: ignore[arg-type]
    query_base: Any = rope.kwargs["_all_bases"][0]  # type: ignore[index]
    call.args = (torch.ops.vattn.rope_attention.default,)
    call.kwargs = kwargs
    call.meta["val"] = (value(call)[0], *map(value, kwargs["_all_bases"]))
    if "eager_input_vals" in call.meta:
        nodes = {name: at if isinstance(at, (Node, list)) else None for name, at in kwargs.items()}
        call.meta["eager_input_vals"] = ((None,), torch.fx.map_arg(nodes, value))
    erase_unread([old_query, old_cache])  # type: ignore[list-item]
    for user in list(rope.users):
        if user is old_query:
            continue
        # Behind the query, which is written first, come the cache's tensors; results follow what the op returns.
        user.args = (call, user.args[1] - 1 + first)  # type: ignore[operator]
    rope.graph.erase_node(rope)
    if not query_base.users:
        rope.graph.erase_node(query_base)
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(call.graph)


def _which_steps(call: Node) -> str:
    """Return which steps of a joined call are one kernel."""
    config = AttentionConfig.parse(str(call.kwargs["config"]))
    device = DeviceInfo.of(value(call.kwargs["query"]).device)  # type: ignore[arg-type]
    backend = selector.choose(config, device)
    limits = backend.rope_attention_limits(RopeConfig.parse(str(call.kwargs["rope"])), config, device)
    if limits:
        return f"one op with attention, which runs as the two that it was: {'; '.join(limits)}"
    return f"one kernel with attention in decode steps of up to {backend.rope_attention_tokens} tokens, two in others"
