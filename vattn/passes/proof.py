"""Shows that a region which agreed with a quantiser in every run agrees with it elsewhere too.

Runs hold every value of a 16-bit model dtype, but not in each place, nor under each scale. So each code must be
computed from its own value, and its group's maximum, by a formula that runs have met with every value; what is rounded
must equal what the quantiser rounds; and values that depend on a scale may only be scaled, limited and selected.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from vattn.passes.ops import MOVES, PLACING, is_pointwise, meaning, moves, op_name, reduces
from vattn.passes.region import FP8_DTYPES, Refusal, dtype_of, is_size
from vattn.passes.region_moves import reduced_dims
from vattn.passes.region_run import SATURATES, same_bits
from vattn.quantization.formats import FP8_E4M3_MAX, INT8_MAX

_SCALING = frozenset({"scaling", "inverse"})
_LIMITING = frozenset({"limit", "choice", "sign", "fill", "copy"})
_NUMBERS = frozenset({0.0, 1.0, FP8_E4M3_MAX, float("inf")})
"""Numbers that scaled values are compared with in any quantiser: runs hold values around them."""

_NOWHERE, _EVERYWHERE = 1 << 40, -1


class Origin(NamedTuple):
    """Where each element of a node comes from.

    Attributes:
        formula: equal numbers for equal formulas.
        first, last: the first and the last place in the output that it depends on; `last < first` if on none.
    """

    formula: Tensor
    first: Tensor
    last: Tensor

    def each(self, change: Any) -> Origin:
        """Return the origin with each part changed in one way."""
        return Origin(*map(change, self))


def origins(nodes: Sequence[Node], known: dict[Node, Origin], values: dict[Node, Any]) -> dict[Node, Any]:
    """Return where the elements of each node come from.

    Args:
        known: the origins of the output, and of nodes to go no further back than.
        values: of all nodes and their inputs in one run.
    """
    found: dict[Node, Any] = dict(known)
    for node in nodes:
        if node not in found and not is_size(node) and any(source in found for source in node.all_input_nodes):
            found[node] = _origin(node, found, values)
    return found


def start(output: Tensor) -> Origin:
    """Return the origin of the output itself."""
    place = torch.arange(output.numel()).view(output.shape)
    return Origin(torch.zeros_like(place), place, place)


def nowhere(made: Tensor, number: int = 0) -> Origin:
    """Return the origin of elements of one formula that depend on no place of the output."""
    like = torch.full(made.shape, number)
    return Origin(like, torch.full_like(like, _NOWHERE), torch.full_like(like, _EVERYWHERE))


def _constant(made: Any) -> Any:
    """Return the origin of a node that does not depend on the output: its formula is its value."""
    if not isinstance(made, Tensor):
        return made
    bits = made.double().view(torch.int64) if made.is_floating_point() else made.to(torch.int64)
    return nowhere(made)._replace(formula=bits)


def _origin(node: Node, found: dict[Node, Any], values: dict[Node, Any]) -> Any:
    does, made, args = meaning(node), values[node], node.args
    if node.target is operator.getitem:
        return found[args[0]][args[1]]  # type: ignore[index]
    plain = [a for a in args if not isinstance(a, (Node, list))]
    seed = zlib.crc32(f"{node.target} {plain} {node.kwargs} {dtype_of(node)}".encode())
    of = {source: found.get(source) or _constant(values[source]) for source in node.all_input_nodes}
    data = placed(node)
    reinterprets = node.target is torch.ops.aten.view.dtype
    if does in PLACING - {"copy"} and not reinterprets:
        if any(source in found and source not in data for source in node.all_input_nodes):
            return _unknown(made)
        parts = []
        for part in range(3):
            moved = {source: of[source][part] if source in data else values[source] for source in of}
            read = torch.fx.map_arg((args, dict(node.kwargs)), moved.__getitem__)
            parts.append(node.target(*read[0], **read[1]))  # type: ignore[operator, index]
        if isinstance(made, (list, tuple)):
            return [Origin(*each) for each in zip(*parts, strict=True)]
        return Origin(*parts)
    if does == "copy":
        source: Origin = of[args[1]]  # type: ignore[index]
        source = source._replace(formula=_mixed(torch.tensor(seed), source.formula))
        return source.each(lambda part: part.expand(made.shape))
    operands = [operand for operand in of.values() if isinstance(operand, Origin)]
    if reduces(node) and len(operands) == 1:
        return _reduced(node, operands[0], made, seed)
    if is_pointwise(node) or does in ("cast", "fill") or (reinterprets and made.shape == operands[0].first.shape):
        total = nowhere(made, seed)
        for operand in operands:
            total = Origin(
                _mixed(total.formula, operand.formula),
                torch.minimum(total.first, operand.first),
                torch.maximum(total.last, operand.last),
            )
        return total
    if node.target.namespace not in ("aten", "prims"):  # type: ignore[union-attr]
        return _of_quantiser(operands[0], made)
    return _unknown(made)


def placed(node: Node) -> set[Any]:
    """Return what an op of `PLACING` puts into other places, as opposed to indices."""
    first, *rest = node.args
    if meaning(node) == "copy":
        return {rest[0]}
    data = set(first) if isinstance(first, (list, tuple)) else {first}
    return data | {rest[0]} if meaning(node) == "scatter" else data


def _reduced(node: Node, operand: Origin, made: Any, seed: int) -> Any:
    dims, keep = reduced_dims(node, operand.first.dim())
    dims = dims if operand.first.dim() else []
    total = Origin(
        _mixed(operand.formula, seed).sum(dims, keep),
        operand.first.amin(dims, keep) if dims else operand.first,
        operand.last.amax(dims, keep) if dims else operand.last,
    )
    return (total,) * len(made) if isinstance(made, (tuple, list)) else total


def _of_quantiser(source: Origin, made: Any) -> Any:
    """Return the origin of what a library's quantiser returns: what it reads is looked at instead."""
    if isinstance(made, (tuple, list)):
        return [_of_quantiser(source, each) for each in made]
    same = isinstance(made, Tensor) and made.numel() == source.first.numel()
    return source.each(lambda part: part.reshape(made.shape)) if same else nowhere(made)


def _mixed(number: Tensor, *others: Any) -> Tensor:
    for other in others:
        number = (number ^ (number >> 29)) * 0x5851F42D4C957F2D + other
    return (number ^ (number >> 31)) * 0x14057B7EF767814F


def _unknown(made: Any) -> Any:
    """Return the origin of elements that may depend on everything."""
    if isinstance(made, (tuple, list)):
        return [_unknown(each) for each in made]
    each = torch.arange(made.numel()).view(made.shape)
    return Origin(each, torch.zeros_like(each), torch.full_like(each, _NOWHERE))


def first_unknown(nodes: Iterable[Node], found: dict[Node, Any]) -> Node | None:
    """Return the first node with elements that depend on more than one place, `None` if there is none."""
    for node in nodes:
        origin = found.get(node)
        if isinstance(origin, Origin) and bool((origin.last > origin.first).any()):
            return node
    return None


class Conditions:
    """Which conditions of a region were met, and which were not, in its runs."""

    def __init__(self, nodes: Iterable[Node], starts: Iterable[Node]) -> None:
        nodes = list(nodes)
        known = dependants(nodes, starts)
        self.missing = {(n, met) for n in nodes if n in known and dtype_of(n) == torch.bool for met in (True, False)}

    def see(self, values: dict[Node, Any]) -> None:
        """Take note of a run."""
        self.missing = {(n, met) for n, met in self.missing if n not in values or not bool((values[n] == met).any())}

    def check(self) -> None:
        """Refuse a region with a condition that was always or never met.

        Raises:
            Refusal: there is one.
        """
        if self.missing:
            node, met = min(self.missing)
            seen = "never" if met else "always"
            raise Refusal(f"{op_name(node.target)} is {seen} true for the inputs that are tried", node, near=True)


def dependants(nodes: Iterable[Node], starts: Iterable[Node]) -> set[Node]:
    """Return the nodes, given in graph order, that depend on some others, those included."""
    found = set(starts)
    for node in nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def rounded(nodes: Sequence[Node], output: Node, integers: bool = False) -> list[tuple[Node, bool]]:
    """Return what is rounded to FP8, or to integers, and whether it is scaled yet: ops of libraries do."""
    found: dict[Node, bool] = {}
    unrounded = {output}
    for node in nodes:
        sources = [source for source in node.all_input_nodes if source in unrounded]
        if not sources or not isinstance(node.target, torch._ops.OpOverload):
            unrounded.update([node] if sources else [])
        elif node.target.namespace not in ("aten", "prims"):
            found[sources[0]] = False
        elif dtype_of(node) in FP8_DTYPES and (not moves(node) or op_name(node.target) == "view"):
            found[sources[-1]] = True
        elif integers and node.target is torch.ops.aten.round.default:
            found[sources[0]] = True
        else:
            unrounded.add(node)
    return list(found.items())


def same_scaled(got: Tensor, wanted: Tensor) -> bool:
    """Return whether numbers are equal, or so large or small that they have the same codes in any case."""

    def shown(x: Tensor) -> Tensor:
        x = x.clamp(-FP8_E4M3_MAX, FP8_E4M3_MAX) if SATURATES else x
        x = torch.where((x.abs() >= 432) & (x.abs() <= 464), torch.copysign(torch.tensor(448.0), x), x)
        return torch.where(x.abs() < 2.0**-11, torch.copysign(torch.tensor(0.0), x), x)

    wanted = wanted.clamp(-FP8_E4M3_MAX, FP8_E4M3_MAX)
    return same_bits(got, wanted) or same_bits(shown(got), shown(wanted))


def same_rounded(got: Tensor, wanted: Tensor) -> bool:
    """Return whether numbers are equal, or so large that they have the same int8 codes in any case."""

    def shown(x: Tensor) -> Tensor:
        return torch.where(x <= -INT8_MAX - 0.5, -INT8_MAX - 1, x.clamp(-INT8_MAX, INT8_MAX))

    return same_bits(shown(got), shown(wanted))


def check_scaled(
    nodes: Sequence[Node], starts: Iterable[Node], scales: Collection[Node], values: dict[Node, Any]
) -> set[float]:
    """Return the numbers that scaled values are compared with, besides those of any quantiser.

    Args:
        starts: what is scaled.
        scales: nodes of unknown value that scale.

    Raises:
        Refusal: scaled values are changed in another way than by scaling, limits and selection.
    """
    found: set[float] = set()
    scaled = dependants(nodes, scales) & dependants(nodes, starts) - set(scales)
    for node in nodes:
        val = values[node]
        if node not in scaled or not isinstance(val, Tensor) or dtype_of(node) in (*FP8_DTYPES, torch.uint8):
            continue
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        does, own = meaning(node), node.target.namespace in ("aten", "prims")
        if own and does not in MOVES | {"cast", "scatter"}:
            twice = does in _SCALING and sum(source in scaled for source in node.all_input_nodes) > 1
            if val.dtype != torch.bool and (does not in _SCALING | _LIMITING or twice):
                raise Refusal(
                    f"{op_name(node.target)} changes scaled values, of which only some are tried", node, near=True
                )
        if does not in _SCALING:
            numbers = [values[n] for n in node.all_input_nodes if n not in scaled and n not in scales]
            numbers = [float(n.flatten()[0]) for n in numbers if isinstance(n, Tensor) and n.numel() == 1]
            numbers += [float(a) for a in node.args if isinstance(a, (int, float))]
            found.update(abs(number) for number in numbers)
    return found - _NUMBERS


def gathered(
    nodes: Sequence[Node], output: Node, weights: Tensor, values: dict[Node, Any], exact: Collection[torch.dtype]
) -> dict[Node, Any]:
    """Return, for nodes made of maxima, minima and magnitudes alone, the sum of the weights of the values behind each.

    Args:
        weights: a number for each value of the output, of its shape.
        values: of all nodes and their inputs in one run.
        exact: dtypes that hold each value of the output.
    """
    found, reached = {output: weights}, dependants(nodes, [output])
    for node in nodes:
        sources = [source for source in node.all_input_nodes if source in reached]
        if node not in found and sources and all(source in found for source in sources):
            made = _gathered(node, found, values, exact)
            if made is not None:
                found[node] = made
    return found


def _gathered(node: Node, found: dict[Node, Any], values: dict[Node, Any], exact: Collection[torch.dtype]) -> Any:
    name, does, made, args = op_name(node.target), meaning(node), values[node], node.args
    if node.target is operator.getitem:
        return found[args[0]][args[1]]  # type: ignore[index]
    sources = [found[source] for source in node.all_input_nodes if source in found]
    if node.target is torch.ops.aten.view.dtype:
        return None
    if does in MOVES | {"scatter"}:

        def weight(source: Node) -> Any:
            blank = isinstance(values[source], Tensor) and values[source].is_floating_point()
            return found.get(source, torch.zeros_like(values[source], dtype=torch.int64) if blank else values[source])

        read = torch.fx.map_arg((args, dict(node.kwargs)), weight)
        return node.target(*read[0], **read[1])  # type: ignore[operator, index]
    if name in ("abs", "neg", "relu") or (does == "cast" and dtype_of(node) in exact):
        return sources[0]
    if name in ("clamp", "clamp_min", "maximum", "minimum"):
        others = [values[source] for source in node.all_input_nodes if source not in found] + list(args[1:])
        if any(
            bool((torch.as_tensor(other) != 0).any()) for other in others if isinstance(other, (Tensor, int, float))
        ):
            return None
        a, b = sources[0], sources[-1]
        return torch.where(a == b, a, a + b)
    if does == "extreme":
        dims, keep = reduced_dims(node, sources[0].dim())
        total = sources[0].sum(dims, keep)
        return (total,) * len(made) if isinstance(made, (tuple, list)) else total
    if does == "line":
        return _along(name, node, sources[0], made)
    return None


def _along(name: str, node: Node, weights: Tensor, made: Any) -> Any:
    place = 2 if name in ("topk", "kthvalue") else 1
    dim: Any = node.args[place] if len(node.args) > place else node.kwargs.get("dim", -1)
    if dim is None or not weights.dim():
        return None
    if name in ("cummax", "cummin"):
        return (weights.cumsum(dim),) * 2
    keep = isinstance(made, Tensor) or made[0].dim() == weights.dim()
    total = weights.sum(dim, keep)
    return tuple(total.expand(each.shape) for each in made) if isinstance(made, (tuple, list)) else total
