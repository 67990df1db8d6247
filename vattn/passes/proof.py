"""Shows that a region which agreed with a quantiser in every run agrees with it elsewhere too.

Runs hold every value of a 16-bit model dtype, every maximum and many scales, but not each of them in each column. So a
region must compute every code by one formula, and each of its conditions must have been met and not met. Values that
depend on a scale, of which only some are tried, may only be scaled, limited and selected.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from vattn.passes.region import FP8_DTYPES, Refusal, dtype_of, is_size, op_name, value
from vattn.passes.region_moves import MOVES, reduced_dims
from vattn.passes.region_precision import CASTS
from vattn.passes.region_run import SATURATES, same_bits
from vattn.quantization.formats import FP8_E4M3_MAX

_SCATTERS = frozenset({"slice_scatter", "select_scatter"})
_ALIKE = frozenset("sort topk cummax kthvalue gather aminmax bucketize linalg_vector_norm norm argmax".split())
"""Ops besides pointwise ones and reductions that treat all elements alike."""

_MAXIMA = frozenset("maximum minimum clamp clamp_min relu abs neg".split())
_SCALING = frozenset("mul div true_divide reciprocal ldexp pow addcdiv".split())
_LIMITING = frozenset(
    "clamp clamp_min clamp_max minimum maximum fmin fmax hardtanh relu where masked_fill copysign abs neg sign "
    "nan_to_num full full_like".split()
)
_NUMBERS = frozenset({0.0, 1.0, FP8_E4M3_MAX, float("inf")})
"""Numbers that scaled values are compared with in any quantiser: runs hold values around them."""


def dependants(nodes: Iterable[Node], starts: Iterable[Node]) -> set[Node]:
    """Return the nodes, in graph order, that depend on some others, those included."""
    found = set(starts)
    for node in nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


class Conditions:
    """Which conditions of a region were met, and which were not, in its runs."""

    def __init__(self, nodes: Sequence[Node], starts: Iterable[Node]) -> None:
        known = dependants(nodes, starts)
        self.missing = {(n, met) for n in nodes if n in known and dtype_of(n) == torch.bool for met in (True, False)}

    def see(self, values: dict[Node, Any]) -> None:
        """Take note of a run."""
        self.missing = {(n, met) for n, met in self.missing if not bool((values[n] == met).any())}

    def check(self, needed: Iterable[Node]) -> None:
        """Refuse a region whose result depends on a condition that was always or never met.

        Raises:
            Refusal: there is one among `needed`.
        """
        for node, met in sorted(self.missing):
            if node in needed:
                seen = "never" if met else "always"
                raise Refusal(f"{op_name(node.target)} is {seen} true for the inputs that are tried", node, near=True)


def check_formula(nodes: Sequence[Node], output: Node, end: Node, values: dict[Node, Any]) -> None:
    """Refuse a region that computes some elements of `end` otherwise than the others.

    Args:
        values: of all nodes and their inputs in one run.

    Raises:
        Refusal: it does.
    """
    made: dict[Node, Any] = {output: torch.zeros(values[output].shape, dtype=torch.int64)}
    for node in nodes:
        if not is_size(node) and any(source in made for source in node.all_input_nodes):
            made[node] = _formula(node, made, values)
    if not _is_one(made[end]):
        odd = next((n for n in nodes if isinstance(made.get(n), Tensor) and not _is_one(made[n])), end)
        raise Refusal("it treats some tokens or columns otherwise than the others", odd, near=True)


def _formula(node: Node, made: dict[Node, Any], values: dict[Node, Any]) -> Any:
    """Return a number for each element of a node: equal numbers for equal formulas of the elements of the output."""
    name, val, args = op_name(node.target), values[node], node.args
    if node.target is operator.getitem:
        return made[args[0]][args[1]]  # type: ignore[index]
    seed = zlib.crc32(f"{node.target} {[a for a in args if not isinstance(a, (Node, list))]} {node.kwargs}".encode())
    data: list[Any] = list(args[0]) if isinstance(args[0], (list, tuple)) else [args[0]]
    if name in _SCATTERS:
        data.append(args[1])
    reinterprets = node.target is torch.ops.aten.view.dtype
    if name in MOVES | _SCATTERS and not reinterprets:
        if any(source in made and source not in data for source in node.all_input_nodes):
            return _each_apart(val)
        moved = {source: _numbers(source, made, values) for source in data}
        read = torch.fx.map_arg((args, dict(node.kwargs)), lambda source: moved.get(source, values[source]))
        return node.target(*read[0], **read[1])  # type: ignore[operator, index]
    operands = [_numbers(source, made, values) for source in node.all_input_nodes]
    operands = [operand for operand in operands if isinstance(operand, Tensor)]
    if torch.Tag.reduction in node.target.tags and len(operands) == 1:  # type: ignore[union-attr]
        sums = _mixed(operands[0], seed).sum(*reduced_dims(node, operands[0].dim()))
        return (sums,) * len(val) if isinstance(val, tuple) else sums
    pointwise = torch.Tag.pointwise in node.target.tags or name in CASTS  # type: ignore[union-attr]
    if pointwise or (reinterprets and val.shape == operands[0].shape) or name.endswith("_like"):
        total = torch.full(val.shape, seed)
        for operand in operands:
            total = _mixed(total, operand)
        return total
    alike = name in _ALIKE or node.target.namespace not in ("aten", "prims")  # type: ignore[union-attr]
    if alike and all(map(_is_one, operands)):
        one = _mixed(torch.tensor(seed), *(operand.flatten()[0] for operand in operands))
        return type(val)(one.expand(v.shape) for v in val) if isinstance(val, (tuple, list)) else one.expand(val.shape)
    return _each_apart(val)


def _numbers(node: Node, made: dict[Node, Any], values: dict[Node, Any]) -> Any:
    """Return the formulas of a node's elements; of constants and scales, their values."""
    val = values[node]
    if node in made or not isinstance(val, Tensor):
        return made.get(node, val)
    return val.double().view(torch.int64) if val.is_floating_point() else val.to(torch.int64)


def _mixed(number: Tensor, *others: Any) -> Tensor:
    for other in others:
        number = (number ^ (number >> 29)) * 0x5851F42D4C957F2D + other
    return (number ^ (number >> 31)) * 0x14057B7EF767814F


def _is_one(numbers: Any) -> bool:
    return isinstance(numbers, Tensor) and bool((numbers == numbers.flatten()[:1]).all())


def _each_apart(val: Any) -> Any:
    if isinstance(val, (tuple, list)):
        return type(val)(map(_each_apart, val))
    return torch.arange(val.numel()).view(val.shape)


def entering(nodes: Iterable[Node], packed: bool) -> list[tuple[Node, bool]]:
    """Return what is rounded to FP8, and whether it is scaled yet: ops of libraries scale it themselves."""
    found: dict[Node, bool] = {}
    for node in nodes:
        sources = [s for s in node.all_input_nodes if isinstance(value(s), Tensor) and value(s).is_floating_point()]
        if not isinstance(node.target, torch._ops.OpOverload) or not sources:
            continue
        if node.target.namespace not in ("aten", "prims"):
            found[sources[0]] = False
        elif dtype_of(node) in FP8_DTYPES and dtype_of(sources[-1]) not in FP8_DTYPES and not packed:
            found[sources[-1]] = True
    return list(found.items())


def same_scaled(got: Tensor, wanted: Tensor) -> bool:
    """Return whether numbers are equal, or so large or small that they have the same codes in any case."""

    def shown(x: Tensor) -> Tensor:
        x = x.clamp(-FP8_E4M3_MAX, FP8_E4M3_MAX) if SATURATES else x
        x = torch.where((x.abs() >= 432) & (x.abs() <= 464), torch.copysign(torch.tensor(448.0), x), x)
        x = torch.where(x.abs() < 2.0**-11, torch.copysign(torch.tensor(0.0), x), x)
        return x.nan_to_num(500.0, 500.0, 500.0).view(torch.int32)

    return torch.equal(shown(got), shown(wanted.clamp(-FP8_E4M3_MAX, FP8_E4M3_MAX)))


def check_scaled(nodes: Sequence[Node], output: Node, scales: Sequence[Node], least: int, values: Any) -> set[float]:
    """Return the numbers that scaled values are compared with, besides those of any quantiser.

    Args:
        scales: nodes of unknown value that scale: roots, and maxima.
        least: leave out nodes with fewer elements in `values`.

    Raises:
        Refusal: scaled values are changed in another way than by scaling, limits and selection.
    """
    found: set[float] = set()
    scaled = dependants(nodes, scales) & dependants(nodes, [output]) - set(scales)
    for node in nodes:
        val = values[node]
        if node not in scaled or not isinstance(val, Tensor) or dtype_of(node) in (*FP8_DTYPES, torch.uint8):
            continue
        if val.numel() < least or not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = op_name(node.target)
        if node.target.namespace in ("aten", "prims") and name not in MOVES | CASTS and val.dtype != torch.bool:
            twice = name in _SCALING and sum(source in scaled for source in node.all_input_nodes) > 1
            if name not in _SCALING | _LIMITING or twice:
                raise Refusal(f"{name} changes scaled values, of which only some are tried", node, near=True)
        if name not in _SCALING:
            numbers = [values[n] for n in node.all_input_nodes if n not in scaled and n not in scales]
            numbers = [float(n.flatten()[0]) for n in numbers if isinstance(n, Tensor) and n.numel() == 1]
            numbers += [float(a) for a in node.args if isinstance(a, (int, float))]
            found.update(abs(number) for number in numbers)
    return found - _NUMBERS


def same_magnitudes(got: Tensor, wanted: Tensor) -> bool:
    """Return whether numbers are equal but for their signs."""
    return same_bits(got.abs(), wanted.abs())


def takes_maxima(node: Node) -> bool:
    """Return whether a node reduces or orders what it reads."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.all_input_nodes:
        return False
    return torch.Tag.reduction in node.target.tags or op_name(node.target) in _ALIKE


def is_large(val: Any, count: int) -> bool:
    """Return whether a value has about as many elements as the output, not one or few for each group."""
    return isinstance(val, Tensor) and val.is_floating_point() and val.numel() * 8 > count


def first_odd_maximum(nodes: Sequence[Node], sample: Any) -> Node | None:
    """Return the first of the nodes between reductions that does more than take maxima, `None` if there is none."""
    for node in nodes:
        name = op_name(node.target)
        small = isinstance(sample.values[node], Tensor) and not is_large(sample.values[node], sample.rows.numel())
        plain = name in MOVES | CASTS | _MAXIMA or takes_maxima(node) or node.target is operator.getitem
        if small and not plain and sample.values[node].is_floating_point():
            return node
    return None
