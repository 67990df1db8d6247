"""Finds the user's query quantisation before an attention call, and where it should happen; changes nothing.

If Inductor generates the kernel that computes the query (RoPE, a norm), quantisation is free there. After a GEMM or an
input of the graph it would be a separate kernel, so the attention kernel rounds the query as it loads it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from vattn.backends import selector
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo
from vattn.config.mla import MLAConfig
from vattn.passes import probe
from vattn.passes.inductor import rounds_every_operation
from vattn.passes.ops import meaning, op_name
from vattn.passes.query_quant.region import check_readers, classify_query, find_query_region
from vattn.passes.region import (
    FP8_DTYPES,
    LARGEST_REGION,
    AttentionNode,
    Refusal,
    Region,
    ancestors,
    can_run,
    check_backend,
    dtype_of,
    same_size,
    value,
)
from vattn.passes.region_division import query_arithmetic
from vattn.passes.verdicts import judged, region_fingerprint
from vattn.quantization.formats import MODEL_DTYPES

IN_PRODUCER = "FP8, quantised in the kernel of its pointwise producer"
IN_LOAD = "FP8, quantised as the attention kernel loads it"
IN_ROPE = "FP8, quantised by the op that rotates it"
IS_INPUT = "FP8, an input of the graph"
OWN_KERNEL = "FP8, quantised in a separate kernel after"
ROUNDED_EARLY = (
    "in the model dtype, but rounded to FP8 and changed again before the op: rounding commutes neither with RoPE nor "
    "with other arithmetic, so it is left alone"
)
_LONGEST_CHAIN = 100


@dataclass(frozen=True)
class FoundQuery:
    """A query quantisation that an attention call can do as it loads the query.

    Attributes:
        config: the request with `query_load` in it.
        source: node that holds the query in the model dtype, in any shape.
        producer: name of the op that computes it, for the report.
    """

    config: AttentionConfig
    source: Node
    producer: str


@dataclass(frozen=True)
class _Chain:
    """What a query is computed from.

    Attributes:
        sources: nodes that hold all of it in the model dtype, the nearest first.
        wide: nodes that hold all of it in fp32.
        end: the first node before the query that is no move and no arithmetic on one tensor of the same size.
        by_op: whether a quantising op, which is a separate kernel, is between.
    """

    sources: tuple[Node, ...]
    wide: tuple[Node, ...]
    end: Node
    by_op: bool

    @property
    def has_own_kernel(self) -> bool:
        """Whether Inductor generates no kernel that computes the query, so that quantisation needs one."""
        return self.by_op or _is_extern(self.end)


def describe_query(call: Node) -> str:
    """Return how the query of an attention call is quantised, for the report; empty: never."""
    query = call.kwargs.get("query")
    if not isinstance(query, Node) or not isinstance(value(query), Tensor):
        return ""
    text = str(call.kwargs["config"])
    if text.startswith(MLAConfig.head):
        return ""
    config = AttentionConfig.parse(text)
    if config.query_format == "none":
        return ROUNDED_EARLY if _was_fp8(query) else ""
    if not config.takes_fp8_query:
        return in_load(config, value(query).device)
    maker = before_moves(query)
    if maker.op != "call_function":
        return IS_INPUT
    if not can_run(maker):
        return IN_ROPE if _name(maker) == "rope_kv_cache_update" else f"FP8, made by {_name(maker)}"
    chain = _chain(query, config)
    return f"{OWN_KERNEL} {_name(chain.end)}" if chain.has_own_kernel else IN_PRODUCER


def in_load(config: AttentionConfig, device: torch.device | DeviceInfo) -> str:
    """Return that the op rounds the query, with the notes of the chosen backend."""
    chosen = selector.explain(config, device).chosen
    if chosen is None:
        return IN_LOAD
    backend = selector.get_backend(chosen)
    notes = [note for note in backend.notes(config) if note not in backend.notes(config.replace(query_load="plain"))]
    return f"{IN_LOAD} ({'; '.join(notes)})" if notes else IN_LOAD


def find_query(attention: AttentionNode) -> FoundQuery | None:
    """Return how an attention call can do its query's quantisation; `None`: there is none that it should do.

    Args:
        attention: a call of which `describe_query` says that the quantisation is a kernel of its own.

    Raises:
        Refusal: the quantisation is a separate kernel and the call cannot do it.
    """
    query: Any = attention.node.kwargs["query"]
    config = attention.config
    chain = _chain(query, config)
    made = [source for source in chain.sources if _is_extern(before_moves(source))]
    refusals = []
    for source in chain.sources if chain.by_op else made:
        try:
            return _taken_over(attention, query, source)
        except Refusal as refusal:
            refusals.append(refusal)
    between = [source for source in chain.sources if source not in made]
    between += [source for source in chain.wide if not _is_extern(_before_casts(source))]
    if not chain.by_op and any(_is_quantised_from(attention, query, source) for source in between):
        return None
    if not refusals:
        raise Refusal(f"it is rounded from another dtype than {config.dtype}, in which the op takes it", query)
    raise refusals[0]


def quantising_nodes(call: Node) -> set[Node]:
    """Return the nodes between the last kernel before an attention call's FP8 query and the call, for Graphviz."""
    query = call.kwargs.get("query")
    text = str(call.kwargs.get("config", ""))
    if not isinstance(query, Node) or not text.startswith(AttentionConfig.head):
        return set()
    config = AttentionConfig.parse(text)
    if not config.takes_fp8_query or not can_run(before_moves(query)):
        return set()
    chain = _chain(query, config)
    nodes: set[Node] = set()
    node = query
    while node is not chain.end and node not in chain.sources:
        nodes.add(node)
        node = node.all_input_nodes[0]
    return nodes


def _taken_over(attention: AttentionNode, query: Node, source: Node) -> FoundQuery:
    """Return what the call becomes if it loads `source` instead of `query`.

    Raises:
        Refusal: it cannot.
    """
    region, inputs, arithmetic = _classified(attention, query, source)
    check_readers(region, attention.node)
    nodes = (*inputs.derived, *region.nodes)
    arithmetic = query_arithmetic(arithmetic, nodes, not inputs.roots, query)
    config = attention.config.replace(query_load=arithmetic)
    check_backend(config, query, "rounds it while loading")
    return FoundQuery(config, source, _name(before_moves(source)))


def _is_quantised_from(attention: AttentionNode, query: Node, source: Node) -> bool:
    try:
        _classified(attention, query, source)
    except Refusal:
        return False
    return True


def _chain(query: Node, config: AttentionConfig) -> _Chain:
    """Walk back from a query through moves and arithmetic on one tensor of the same size."""
    by_dtype: dict[torch.dtype, list[Node]] = {torch.float32: [], MODEL_DTYPES[config.dtype]: []}
    sources, node, by_op = by_dtype[MODEL_DTYPES[config.dtype]], query, False
    for _ in range(_LONGEST_CHAIN):
        if _holds_all(node, query) and value(node).dtype in by_dtype:
            by_dtype[value(node).dtype].append(node)
        by_op = by_op or (not sources and can_run(node) and _is_extern(node))
        before = _data_input(node) if can_run(node) and (not sources or not _is_extern(node)) else None
        if before is None:
            break
        node = before
    return _Chain(tuple(sources), tuple(by_dtype[torch.float32]), node, by_op)


def _data_input(node: Node) -> Node | None:
    """Return the one tensor that a move or a pointwise op changes, `None` for any other op."""
    inputs = node.all_input_nodes
    if meaning(node) in ("join", "scatter") and value(node).dtype in FP8_DTYPES:
        return _before_parts(node)
    if _is_move(node):
        return inputs[0]
    same = [source for source in inputs if _holds_all(source, node)]
    return same[0] if len(same) == 1 else None


def _before_parts(joined: Node) -> Node | None:
    """Return the one node that all parts of an FP8 tensor are computed from; `None`: there is none."""

    def is_before(node: Node) -> bool:
        return _holds_all(node, joined) and value(node).dtype not in FP8_DTYPES

    seen = ancestors([joined], lambda node: can_run(node) and not is_before(node), LARGEST_REGION)
    found = {before_moves(node) for node in seen if is_before(node)}
    return found.pop() if len(found) == 1 else None


def _is_move(node: Node) -> bool:
    return node.target is operator.getitem or meaning(node) in ("reshape", "part", "same")


def _holds_all(node: Node, like: Node) -> bool:
    a, b = value(node), value(like)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.is_complex():
        return False
    return same_size(a.numel(), b.numel())


def before_moves(node: Node) -> Node:
    """Return the node that computed the values of a node."""
    while _is_move(node) and can_run(node):
        node = node.all_input_nodes[0]
    return node


def _before_casts(node: Node) -> Node:
    """Return the node that computed the values of a node, before casts too."""
    node = before_moves(node)
    while meaning(node) == "cast":
        node = before_moves(node.all_input_nodes[0])
    return node


def _is_extern(node: Node) -> bool:
    """Return whether Inductor generates no kernel for a node that quantisation could be part of."""
    if not can_run(node):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    own = node.target.namespace in ("aten", "prims")
    return not own or meaning(node) == "complex" or op_name(node.target) in ("sort", "topk")


def _name(node: Node) -> str:
    """Return the name of the op that a node calls, or of the node."""
    if op_name(node.target):
        return op_name(node.target)
    if "auto_functionalized" in str(node.target) and node.args:
        return str(getattr(node.args[0], "_schema", node).name).split("::")[-1]
    return f"the input {node.name}" if node.op in ("placeholder", "get_attr") else node.name


def _was_fp8(query: Node) -> bool:
    """Return whether a query in the model dtype was FP8 at some point after the last GEMM."""
    past = ancestors([query], lambda node: not _is_extern(node), LARGEST_REGION)
    return any(dtype_of(node) in FP8_DTYPES for node in past)


def _classified(attention: AttentionNode, query: Node, source: Node) -> tuple[Region, probe.Inputs, str]:
    """Return the region between `source` and `query`, its inputs, and the arithmetic of its quantisation.

    Raises:
        Refusal: it is not a quantisation that a query load has.
    """
    scale, end, config = attention.node.kwargs["q_scale"], before_moves(query), attention.config
    if not isinstance(scale, Node):
        raise Refusal("the op has no q_scale", end, near=True)
    with probe.isolated():
        try:
            region, inputs = find_query_region(source, query, scale)
        except Refusal as refusal:
            raise Refusal(refusal.reason, end, near=True) from None
        sizes = f"query {config.num_heads} {config.num_kv_heads} {config.head_size}"
        facts = [sizes, f"rounds each {rounds_every_operation()}"]
        key = region_fingerprint(source, (query, scale), region.nodes, inputs, facts)
        return region, inputs, judged(key, region.nodes, end, lambda: classify_query(region, inputs, config))
