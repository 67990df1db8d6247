"""Finds how code that Inductor generates would round a region's divisions; a fused epilogue repeats that.

A region is probed on a CPU, where divisions round correctly, in eager and in generated code alike. Code that Inductor
generates for CUDA multiplies by the reciprocal of a divisor known at compile time, and its other quotients are the
hardware's approximate ones unless `torch._inductor.config.eager_numerics.division_rounding` is set. Quotients in fp64
round correctly there too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Node

from vattn.passes.inductor import rounds_divisions
from vattn.passes.ops import meaning, op_name
from vattn.passes.region import Match, Refusal, value
from vattn.quantization.formats import OUTPUT_FORMATS

_QUOTIENTS = ("div", "true_divide", "rsqrt")


def as_generated(match: Match, nodes: Sequence[Node], device: torch.device, constants: Iterable[Tensor] = ()) -> Match:
    """Return a match with the arithmetic, and the floor, of the code that a region becomes on a device.

    Args:
        nodes: the region's nodes, among which `match.codes` counts.
        constants: tensors known at compile time that they read.

    Raises:
        Refusal: no epilogue rounds as the code would.
    """
    fmt = OUTPUT_FORMATS[match.output_format]
    namespaces = _namespaces(nodes)
    if device.type != "cuda" or "vattn" in namespaces:
        return match  # vattn's quantising ops are not generated code: they divide exactly
    if namespaces - {"aten", "prims"}:
        if fmt.static_scale:
            return match  # ops of other libraries are not generated code either
        raise Refusal(
            "the scale is divided by generated code and the values by another library's op, which rounds otherwise",
            nodes[match.codes[0]],
            near=True,
        )
    if _divides_in_fp64(nodes):
        if isinstance(match.scale, float):
            raise Refusal(f"a number divides in float64: {_CONVERT}", nodes[match.codes[0]], near=True)
        return match
    if fmt.static_scale and isinstance(match.scale, float) and match.arithmetic == "divide":
        if fmt.container is not torch.float8_e4m3fn:
            return replace(match, arithmetic="approximate_divide")
        return replace(match, arithmetic="approximate_multiply", scale=1.0 / _divisor(match.scale, nodes))
    if rounds_divisions():
        if fmt.static_scale and fmt.container is torch.float8_e4m3fn:
            return match
        why = f"with eager_numerics.division_rounding no epilogue divides as Inductor does for {match.output_format}"
        raise Refusal(why, nodes[match.codes[0]], near=True)
    return replace(match, arithmetic=f"approximate_{match.arithmetic}", min_scale=_floor(match, nodes, constants))


def query_arithmetic(arithmetic: str, nodes: Sequence[Node], is_constant: bool, query: Node) -> str:
    """Return the arithmetic of the code that a query's quantisation becomes on the query's device.

    Args:
        arithmetic: `"divide"` or `"multiply"`, as the probe found.
        nodes: what quantises the query.
        is_constant: whether the scale is known at compile time.

    Raises:
        Refusal: no query load rounds as the code would.
    """
    if value(query).device.type != "cuda" or _namespaces(nodes) - {"aten", "prims"} or _divides_in_fp64(nodes):
        return arithmetic
    if is_constant:
        raise Refusal("its scale is a constant: make it a tensor, and the op's q_scale the same", query, near=True)
    if not rounds_divisions():
        return f"approximate_{arithmetic}"
    if arithmetic == "divide":
        return arithmetic
    raise Refusal("with eager_numerics.division_rounding no query load multiplies as Inductor does", query, near=True)


_CONVERT = "convert to float32 first"


def _divides_in_fp64(nodes: Sequence[Node]) -> bool:
    """Return whether quotients are computed in fp64, which the hardware rounds correctly.

    Raises:
        Refusal: some are and some are not.
    """
    quotients = [node for node in nodes if meaning(node) == "inverse" or op_name(node.target) in _QUOTIENTS]
    wide = [node for node in quotients if value(node).dtype == torch.float64]
    if wide and len(wide) < len(quotients):
        raise Refusal(f"some of its divisions are in float64, which no epilogue has: {_CONVERT}", wide[0], near=True)
    return bool(wide)


def _namespaces(nodes: Iterable[Node]) -> set[str]:
    """Return the namespaces of the ops that nodes call; Inductor generates code for those of `aten` and `prims`."""
    return {node.target.namespace for node in nodes if isinstance(node.target, torch._ops.OpOverload)}


def _divisor(scale: float, nodes: Sequence[Node]) -> float:
    """Return the number that a constant scale was rounded from; Inductor takes the reciprocal of that number."""
    for node in nodes:
        if op_name(node.target) in ("div", "true_divide"):
            divisor = node.args[1]
            if isinstance(divisor, (int, float)) and float(torch.tensor(float(divisor))) == scale:
                return float(divisor)
    return scale


def _floor(match: Match, nodes: Sequence[Node], constants: Iterable[Tensor]) -> float | None:
    """Return the least scale; a least maximum is multiplied by a reciprocal where the probe divided it.

    Raises:
        Refusal: neither is a number in the code, so it is unknown how generated code rounds it.
    """
    if not match.min_scale:
        return match.min_scale
    numbers = [torch.tensor(float(at)) for node in nodes for at in node.args if isinstance(at, (int, float))]
    numbers += [value.flatten()[0].float() for value in constants if value.numel() and value.is_floating_point()]
    numbers += [number.to(dtype).float() for number in numbers for dtype in (torch.bfloat16, torch.float16)]
    limit = OUTPUT_FORMATS[match.output_format].limit
    for number in numbers if match.floor != "maximum" else ():
        if float(number / limit) == match.min_scale:
            return float(number * torch.tensor(1.0 / limit))
    if all(float(number) != match.min_scale for number in numbers):
        why = f"the floor under its scale, {match.min_scale:.4g}, is computed, which generated code may round otherwise"
        raise Refusal(f"{why}: write it as one number", nodes[match.codes[0]], near=True)
    return match.min_scale
