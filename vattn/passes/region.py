"""Finds attention nodes in a post-grad graph, and the region between one and the tensor its output is quantised to.

A region holds what is computed from the attention output alone by ops that can be run: no GEMM, no random number, no
mutation. It ends at the quantised tensor.
"""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node

from vattn.backends import selector
from vattn.config.attention import AttentionConfig
from vattn.config.mla import MLAConfig
from vattn.ops.schemas import ATTENTION_OPS
from vattn.passes import ops

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_FRAME = re.compile(r'File "(.+)", line (\d+).*(?:\n(?!\s*File ")(.*))?')
"""File, line and code of a frame of a stack trace."""

_RUNNABLE_NAMESPACES = ("aten", "prims", "vattn", "quantized_decomposed", "torchao", "compressed_tensors")
LARGEST_REGION = 400
"""How many nodes a walk from or to an attention call may find."""

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class Refusal(Exception):
    """Why an attention node is not fused.

    Args:
        reason: text for the report.
        node: the graph node that causes it.
        near: whether there is a quantiser that could have been fused.
    """

    def __init__(self, reason: str, node: Node | None = None, *, near: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.node, self.near = reason, node, near


@dataclass(frozen=True)
class AttentionNode:
    """An attention op in functionalised form.

    Attributes:
        node: the `auto_functionalized_v2` call.
        config: the parsed config string.
        base: position of the output among the tensors that the call writes.
        output: the node that holds the written output.
    """

    node: Node
    config: AttentionConfig
    base: int
    output: Node


def attention_calls(graph: Graph) -> list[tuple[Node, str]]:
    """Return every call of an attention op, functionalised or not, with the op's name."""
    found = []
    names = {getattr(torch.ops.vattn, name).default: name for name in ATTENTION_OPS}
    for node in graph.nodes:
        if node.op == "call_function":
            op = node.args[0] if _is_functionalised(node) and node.args else node.target
            if op in names:
                found.append((node, names[op]))
    return found


def _is_functionalised(node: Node) -> bool:
    return str(node.target) in ("auto_functionalized_v2", "auto_functionalized")


def describe(node: Node, op: str) -> AttentionNode:
    """Return what can be fused into an attention call.

    Raises:
        Refusal: the call is in a form that the passes do not rewrite.
    """
    if str(node.target) != "auto_functionalized_v2":
        raise Refusal("the graph was made with enable_auto_functionalized_v2=False", node)
    config = parse_config(node, op)
    allowed = {"_output_base_index", *(key for key in node.kwargs if key.startswith("_output_block_scale"))}
    if any(key.startswith("_output_") and key not in allowed for key in node.kwargs):
        raise Refusal("the output is a view into a larger tensor", node)
    base = node.kwargs["_output_base_index"]
    if not isinstance(base, int):
        raise Refusal("the output is no tensor of its own", node)
    users = [user for user in node.users if user.target is operator.getitem and user.args[1] == base + 1]
    if not users:
        raise Refusal("nothing reads the output", node)
    if len(users) > 1:
        raise Refusal("the output is taken apart twice", node)
    return AttentionNode(node, config, base, *users)


def parse_config(call: Node, op: str) -> Any:
    """Return the request of an attention call."""
    kind = MLAConfig if op == "mla_attention" else AttentionConfig
    return kind.parse(str(call.kwargs["config"]))


def value(node: Node) -> Any:
    """Return the fake value of a node."""
    return node.meta.get("val")


def dtype_of(node: Node) -> torch.dtype | None:
    """Return the dtype of the tensor that a node holds, `None` for anything else."""
    return getattr(value(node), "dtype", None)


def is_size(node: Node) -> bool:
    """Return whether a node holds a number instead of a tensor."""
    return isinstance(value(node), (int, float, torch.SymInt))


def is_check(node: Node) -> bool:
    """Return whether a node only checks metadata; `torch.export` adds such nodes after casts."""
    return isinstance(node.target, torch._ops.OpOverload) and ops.meaning(node) == "check"


_LEFT_OUT = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output}


def can_run(node: Node) -> bool:
    """Return whether a node calls an op that a region may hold: functional, deterministic, no GEMM, no value read."""
    if node.op != "call_function":
        return False
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):
        return op is operator.getitem or is_size(node)
    if op.namespace not in _RUNNABLE_NAMESPACES or op._schema.is_mutable:
        return False
    return ops.meaning(node) != "gemm" and _LEFT_OUT.isdisjoint(op.tags)


@dataclass(frozen=True)
class Region:
    """What follows from one attention output by runnable ops alone.

    Attributes:
        output: the attention output; not itself part of `nodes`.
        nodes: in graph order, the quantised tensors included, nothing that depends on them.
        quantised: FP8 or int8 tensors that cover the whole output, and bytes that cover it two values each; where there
            are none, FP8 tensors of other sizes.
    """

    output: Node
    nodes: tuple[Node, ...]
    quantised: tuple[Node, ...]

    def ancestors(self, ends: Iterable[Node]) -> list[Node]:
        """Return the region's nodes that `ends` are computed from, `ends` included, in graph order."""
        needed = ancestors(ends, set(self.nodes).__contains__)
        return [node for node in self.nodes if node in needed]


def ancestors(ends: Iterable[Node], enter: Callable[[Node], bool], limit: float = math.inf) -> set[Node]:
    """Return what some nodes are computed from, themselves included.

    Args:
        enter: whether to continue with the inputs of a node.
        limit: stop once more nodes than this are found.
    """
    found = set(ends)
    walk = list(found)
    for node in walk:
        if len(found) > limit:
            break
        if enter(node):
            new = [source for source in node.all_input_nodes if source not in found]
            found.update(new)
            walk += new
    return found


def is_computed_from(ends: Iterable[Node], start: Node) -> bool:
    """Return whether any of some nodes is computed from `start`."""
    return start in ancestors(ends, lambda node: node > start)


def check_backend(config: AttentionConfig, node: Node, work: str) -> None:
    """Refuse a config that no backend runs on the device of a node.

    Args:
        work: what is wanted of it, for the text.

    Raises:
        Refusal: there is none.
    """
    explanation = selector.explain(config, value(node).device)
    if explanation.chosen is None:
        reasons = "; ".join(f"{name}: {', '.join(why)}" for name, why in explanation.refusals.items())
        raise Refusal(f"no backend {work} ({reasons})", node, near=True)


def find_region(output: Node) -> Region:
    """Walk from an attention output to everything that can be run from it."""
    reached, ends = _reach(output, FP8_DTYPES)
    if not ends and not any(_covers(node, output, (torch.uint8,), 2) for node in reached):
        # Codes that are packed may be int8 before.
        reached, ends = _reach(output, (torch.int8,))
    if not ends:
        part, ends_of_part = _reach(output)
        # Bytes that are reached through FP8 codes alone are those codes: of half the output, as many as packed ones.
        if not any(_covers(node, output, (torch.uint8,), 2) for node in part):
            reached, ends = part, ends_of_part
    again = {node for end in ends for node in _rounded_again(end)}
    after: set[Node] = set()
    nodes = []
    for node in sorted({*reached, *again} - {output}):
        if node not in again and any(source in ends or source in after for source in node.all_input_nodes):
            after.add(node)
        else:
            nodes.append(node)
    quantised = [n for n in nodes if n in ends or _covers(n, output, (torch.uint8,), 2)]
    return Region(output, tuple(nodes), tuple(quantised))


def _reach(output: Node, whole: tuple[torch.dtype, ...] = ()) -> tuple[dict[Node, None], set[Node]]:
    """Return what can be run from an output, the nearest first, and where the walk ends.

    Of what is written in parts it ends at the last.

    Args:
        whole: end at tensors of these dtypes that cover the output; if empty, at every FP8 one, for a part of the
            output may be quantised.
    """
    reached: dict[Node, None] = {output: None}
    walk, ends = [output], set[Node]()
    for node in walk:
        if len(reached) > LARGEST_REGION:
            break
        for user in node.users:
            if user in reached or is_check(user) or not can_run(user):
                continue
            reached[user] = None
            is_end = _covers(user, output, whole) if whole else dtype_of(user) in FP8_DTYPES
            if is_end and not _lacks_parts(user):
                ends.add(user)
            else:
                walk.append(user)
    return reached, ends


def _lacks_parts(node: Node) -> bool:
    """Return whether a node writes a part of a tensor that later nodes write more of."""
    return _is_scatter(node) and any(_is_scatter(user) and user.args[0] is node for user in node.users)


def _is_scatter(node: Node) -> bool:
    return ops.meaning(node) == "scatter"


def unknown_readers(output: Node) -> list[str]:
    """Return names of unknown ops that read an output, or what is computed from it, and may quantise it."""
    reached, _ = _reach(output, FP8_DTYPES)
    found: dict[str, None] = {}
    for node in reached:
        for user in node.users:
            op = user.args[0] if _is_functionalised(user) else user.target
            if isinstance(op, torch._ops.OpOverload):
                if op.namespace not in _RUNNABLE_NAMESPACES:
                    found[op._schema.name] = None
            elif isinstance(op, torch._ops.HigherOrderOperator):
                found[op.name()] = None
    return list(found)


def _rounded_again(end: Node) -> list[Node]:
    """Return nodes that cast FP8 codes to a wider dtype and back."""
    found = []
    for wide in end.users:
        if ops.meaning(wide) == "cast":
            narrow = [u for u in wide.users if u.all_input_nodes == [wide] and _covers(u, end, FP8_DTYPES)]
            if narrow and len(narrow) == len(wide.users):
                found += [wide, *narrow]
    return found


def _covers(node: Node, output: Node, dtypes: tuple[torch.dtype, ...], values_per_element: int = 1) -> bool:
    """Return whether a node holds one of the dtypes and as many values as another."""
    return dtype_of(node) in dtypes and elements(node, values_per_element) == elements(output)


def same_size(a: Any, b: Any) -> bool:
    """Return whether two sizes are equal for certain, without adding a guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt) and a.node.expr == b.node.expr:
        return True
    return expression(a) == expression(b)


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Return whether two shapes are equal for certain."""
    return len(a) == len(b) and all(map(same_size, a, b))


def elements(node: Node, factor: int = 1) -> Any:
    """Return the expression of how many elements a node has, times a factor; `numel()` of a fake tensor is slow."""
    shape = value(node).shape
    known = math.prod(size for size in shape if isinstance(size, int))
    return _product(known * factor, tuple(size.node.expr for size in shape if not isinstance(size, int)))


@lru_cache(maxsize=1024)
def _product(known: int, varying: tuple[Any, ...]) -> Any:
    return _expanded(math.prod(varying, start=known))


def expression(size: Any) -> Any:
    """Return the symbolic expression of a size, or the size itself."""
    return _expanded(size.node.expr if isinstance(size, torch.SymInt) else size)


@lru_cache(maxsize=1024)
def _expanded(size: Any) -> Any:
    import sympy  # type: ignore[import-untyped]

    return sympy.Integer(size) if isinstance(size, int) else sympy.expand(size)


def source_line(node: Node | None) -> str:
    """Return `file:line: code` of the user's line that made a node, empty if unknown.

    A line of this package is used only if no code outside of it made the call.
    """
    trace = (node.meta.get("stack_trace") or "") if node is not None else ""
    frames = [(file, f"{file}:{line}: {code.strip()}") for file, line, code in reversed(_FRAME.findall(trace))]
    outside = [line for file, line in frames if not file.startswith(_PACKAGE)]
    return (outside or [line for _, line in frames] or [""])[0]


@dataclass(frozen=True)
class Match:
    """What a region was found to compute.

    Attributes:
        output_format: name in `OUTPUT_FORMATS`.
        arithmetic, min_scale, floor: `output_arithmetic`, `output_min_scale` and `output_floor` of the config.
        scale: position in `Inputs.scales`, or the constant static scale, or `None` for formats without one.
        codes: positions in the probed nodes that hold the codes.
        block_scales: positions of those that hold the computed scales, and how: `"plain"`, `"transposed"`,
            `"swizzled"`, or `"moved"`: sliced or transposed together with the output.
        factor: multiplies the scale at `scale`.
        moved: whether the codes are sliced or reordered.
    """

    output_format: str
    arithmetic: str
    min_scale: float | None
    scale: int | float | None
    codes: tuple[int, ...]
    block_scales: tuple[tuple[int, str], ...]
    factor: float = 1.0
    moved: bool = False
    floor: str = "scale"
