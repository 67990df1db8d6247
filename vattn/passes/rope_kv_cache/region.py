"""Extracts the region that computes a query or a key, and runs it in fp64 on chosen inputs.

A region leads from one tensor of heads, the source, to the argument of an op. Its other inputs are its leaves: tables
of angles, weights and scales, before any copies, casts, broadcasts or repeats of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from vattn.passes import verdicts
from vattn.passes.ops import meaning, op_name, unwritten
from vattn.passes.region import (
    FP8_DTYPES,
    LARGEST_REGION,
    Refusal,
    ancestors,
    can_run,
    expression,
    is_size,
    value,
)
from vattn.passes.region_run import cpu_arguments

_LARGEST_RUN = 1 << 23
_MOVES = frozenset({"reshape", "spread", "same"})
_PRIMES = (5, 7, 11, 13, 17, 19, 23)
_WIDE = {torch.bool: torch.bool, torch.complex64: torch.complex128, torch.complex128: torch.complex128}


def history(end: Node) -> list[Node]:
    """Return the nodes that `end` is computed from by ops that can be run, inputs first.

    The order depends on the computation alone, so equal layers of a model have equal histories. It starts with nodes
    that cannot be run.

    Raises:
        Refusal: it is too long.
    """
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(end, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen and not is_size(node):
            seen.add(node)
            if len(seen) > LARGEST_REGION:
                raise Refusal(f"more than {LARGEST_REGION} nodes make {end.name}", end)
            stack.append((node, True))
            if can_run(node):
                stack.extend((source, False) for source in reversed(node.all_input_nodes))
    return order


@dataclass(frozen=True)
class RotationRegion:
    """The nodes between a tensor of heads and a query or key.

    Attributes:
        source: the unrotated heads.
        end: the query or key.
        nodes: what to run, in order; without the source and the leaves.
        leaves: tensors that are read from outside, in the order in which they are found.
    """

    source: Node
    end: Node
    nodes: tuple[Node, ...]
    leaves: tuple[Node, ...]


def constants_of(past: Sequence[Node]) -> set[Node]:
    """Return nodes that depend on no input tensor of the graph: filled, counted or uninitialised tensors."""
    found: set[Node] = set()
    for node in past:
        if can_run(node) and all(source in found or is_size(source) for source in node.all_input_nodes):
            found.add(node)
    return found


def computed_from(source: Node, past: Sequence[Node]) -> set[Node]:
    """Return the nodes of a history that are computed from one of them."""
    found = {source}
    for node in past:
        if can_run(node) and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found - {source}


def region_between(source: Node, end: Node, past: Sequence[Node]) -> RotationRegion:
    """Extract the region from the history of its end.

    Raises:
        Refusal: the end does not depend on the source, or the region reads a tensor that is not float.
    """
    dependent = computed_from(source, past)
    if end not in dependent:
        raise Refusal(f"{source.name} has no part in {end.name}", end)
    needed = ancestors([end], dependent.__contains__) & dependent
    inside, leaves, constants = set(needed), dict[Node, None](), constants_of(past)
    for node in past:
        if node in needed:
            for other in node.all_input_nodes:
                if other is not source and other not in needed and not is_size(other):
                    _climb(other, inside, leaves, constants)
    for leaf in leaves:
        val = value(leaf)
        if not isinstance(val, Tensor) or not (val.is_floating_point() or val.is_complex()):
            raise Refusal(f"the region reads {leaf.name}, which holds no floats", end)
    nodes = tuple(node for node in past if node in inside and node not in leaves)
    return RotationRegion(source, end, nodes, tuple(leaves))


def _climb(node: Node, inside: set[Node], leaves: dict[Node, None], constants: set[Node]) -> None:
    """Find the leaf before a node; add the nodes between, or all its history if it is constant, to the region."""
    if node in constants:
        inside |= ancestors([node], lambda inner: not is_size(inner))
        return
    while node not in leaves:
        source = before_copies(node)
        if source is None:
            leaves[node] = None
            return
        inside.add(node)
        node = source


def same_computation(a: Node, b: Node, depth: int = 30) -> bool:
    """Return whether two nodes are one, or apply the same functional ops to the same nodes."""
    if a is b:
        return True
    if a.target is not b.target or not (can_run(a) and can_run(b)) or depth == 0:
        return False
    sources = a.all_input_nodes, b.all_input_nodes
    names = [{source: f"<{i}>" for i, source in enumerate(nodes)} for nodes in sources]
    shown = [str(torch.fx.map_arg((n.args, dict(n.kwargs)), names[i].__getitem__)) for i, n in enumerate((a, b))]
    same = len(sources[0]) == len(sources[1]) and shown[0] == shown[1]
    return same and all(same_computation(x, y, depth - 1) for x, y in zip(*sources, strict=True))


def before_copies(node: Node) -> Node | None:
    """Return the node that a node copies, broadcasts, repeats, casts or adds one to; `None`: it does something else."""
    if not can_run(node) or is_size(node):
        return None
    sources = [source for source in node.all_input_nodes if not is_size(source)]
    name = op_name(node.target)
    if len(sources) != 1 or not isinstance(value(sources[0]), Tensor):
        return None
    (source,) = sources
    if meaning(node) in _MOVES or (name == "cat" and node.args[0].count(source) == len(node.args[0])):  # type: ignore[union-attr,arg-type]
        return source
    if meaning(node) == "cast":
        # Narrower too: generated code does not round what it casts and reads in one kernel.
        floats = all(value(n).dtype.is_floating_point and value(n).dtype not in FP8_DTYPES for n in (source, node))
        return source if floats else None
    is_weight = value(source).dim() == 1 and isinstance(value(source).numel(), int)
    if name == "add" and is_weight and not node.kwargs and 1 in node.args:
        return source
    return None


class Run:
    """Runs a region in fp64; casts between float dtypes change nothing.

    Attributes:
        sizes: value of every symbolic size.
        clamped: whether all values that were cast to FP8 were within its range.

    Raises:
        Refusal: the region's token count is fixed and large.
    """

    def __init__(self, region: RotationRegion) -> None:
        self.region, self.clamped = region, True
        self.sizes: dict[Any, int] = {}
        for node in (region.source, region.end, *region.nodes, *region.leaves):
            for size in getattr(value(node), "shape", ()):
                for symbol in expression(size).free_symbols - set(self.sizes):
                    self.sizes[symbol] = _PRIMES[len(self.sizes) % len(_PRIMES)]
        shape = self.shape(region.end)
        if math.prod(shape) > _LARGEST_RUN:
            raise Refusal(f"its token count is fixed at {shape[0]}, too many to try it out", region.end)

    def size(self, size: Any) -> int:
        """Return the value of a size.

        Raises:
            Refusal: it depends on data.
        """
        number = expression(size).subs(self.sizes)
        if not number.is_Integer:
            raise Refusal(f"the region depends on the size {size}", self.region.end)
        return int(number)

    def shape(self, node: Node) -> list[int]:
        """Return the shape of a node's value."""
        return [self.size(size) for size in value(node).shape]

    def __call__(self, inputs: dict[Node, Tensor]) -> Tensor:
        """Return the value of the region's end, given values of its source and leaves."""
        env: dict[Node, Any] = dict(inputs)
        for node in self.region.nodes:
            env[node] = self._run(node, env)
        result = env[self.region.end]
        assert isinstance(result, Tensor)
        return result

    def _run(self, node: Node, env: dict[Node, Any]) -> Any:
        def look_up(source: Node) -> Any:
            return env[source] if source in env else self.size(value(source))

        name = op_name(node.target)
        args, kwargs = cpu_arguments(node, look_up)
        if unwritten(node):
            return torch.full(self.shape(node), torch.nan, dtype=torch.float64)
        if meaning(node) == "cast":
            return self._cast(args[0], value(node).dtype)
        if name == "quant_fp8_static":
            return (args[0] / args[1].reshape(())).clamp(-448.0, 448.0)
        if isinstance(kwargs.get("dtype"), torch.dtype):
            kwargs["dtype"] = _widened(kwargs["dtype"])
        return _as_wide(node.target(*args, **kwargs))  # type: ignore[operator]

    def _cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype in FP8_DTYPES:
            self.clamped = self.clamped and not bool((x.abs() > 448.0).any())
            return x
        return x.to(_widened(dtype))


def _widened(dtype: torch.dtype) -> torch.dtype:
    if dtype in _WIDE:
        return _WIDE[dtype]
    return torch.float64 if dtype.is_floating_point else dtype


def _as_wide(result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        return type(result)(map(_as_wide, result))
    return result.to(_widened(result.dtype)) if isinstance(result, Tensor) else result


def fingerprint(end: Node, past: Sequence[Node], extra: str) -> str:
    """Return a hash of everything that a verdict about the history of a node depends on."""
    names = verdicts.numbered(past)
    types = [verdicts.typed(node) if isinstance(value(node), Tensor) else str(type(value(node))) for node in past]

    def name(node: Node) -> str:
        return names.get(node) or str(expression(value(node)))

    return verdicts.fingerprint(filter(can_run, past), name, [extra, names[end], *types])
