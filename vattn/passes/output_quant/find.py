"""Finds output quantisation that an attention call can do; changes nothing."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import Node

from vattn.config.attention import AttentionConfig
from vattn.passes import probe
from vattn.passes import region_division as division
from vattn.passes.inductor import rounds_every_operation
from vattn.passes.ops import op_name
from vattn.passes.output_quant.match import Classifier
from vattn.passes.region import (
    AttentionNode,
    Refusal,
    Region,
    check_backend,
    dtype_of,
    expression,
    find_region,
    is_check,
    is_computed_from,
    same_shape,
    same_size,
    unknown_readers,
    value,
)
from vattn.passes.region_tokens import token_counts
from vattn.passes.verdicts import judged, region_fingerprint, typed
from vattn.quantization.formats import OUTPUT_FORMATS, OutputFormat

_HELD = operator.attrgetter("container", "group_size", "power_of_two", "static_scale", "exponents", "limit")
"""What formats that differ in the layout of their scales alone have in common."""


@dataclass(frozen=True)
class Found:
    """A region that an attention call can replace.

    Attributes:
        config: the request with the output format in it.
        scale: node of the static scale, its constant value, or `None`.
        factor: multiplies `scale`.
        codes: nodes that hold the quantised tensor.
        moved: whether they hold it sliced or transposed: the region's moves are then repeated on the codes.
        block_scales: nodes that hold the computed scales and are read from outside the region, with their layout.
        dead: nodes that nothing will read any more.
    """

    config: AttentionConfig
    scale: Node | float | None
    factor: float
    codes: tuple[Node, ...]
    moved: bool
    block_scales: tuple[tuple[Node, str], ...]
    dead: frozenset[Node]


def find(attention: AttentionNode, names: Sequence[str]) -> Found:
    """Find out what an attention call can write instead of its output.

    Args:
        names: output formats that may be used.

    Raises:
        Refusal: nothing.
    """
    region = find_region(attention.output)
    if not region.quantised:
        readers = unknown_readers(attention.output)
        doubt = f", unless {' or '.join(readers)} does it, of which nothing is known here" if readers else ""
        raise Refusal(f"the output is not quantised{doubt}", attention.output)
    packed = [node for node in reversed(region.quantised) if dtype_of(node) == torch.uint8]
    tried = [*packed, *(node for node in region.quantised if node not in packed)]
    refusals: dict[Node, Refusal] = {}
    for quantised in _likely_first(region, packed) + tried[len(packed) :]:
        try:
            return _find_one(attention, region, quantised, names)
        except Refusal as refusal:
            refusals[quantised] = refusal
    raise refusals[tried[0]]


def _likely_first(region: Region, packed: Sequence[Node]) -> list[Node]:
    """Sort bytes: packed ones depend on all halves that they are made of, and all that are unpacked depend on them."""
    before = {node: set(region.ancestors([node])) for node in packed} if len(packed) > 1 else {}

    def apart(node: Node) -> int:
        return sum(node not in before[other] and other not in before[node] for other in packed)

    return sorted(packed, key=apart) if before else list(packed)


def _find_one(attention: AttentionNode, region: Region, quantised: Node, names: Sequence[str]) -> Found:
    with probe.isolated():
        inputs, nodes = _probed(region, quantised)
        dtype, counts = attention.config.dtype, token_counts((*inputs.derived, *inputs.sizes, *nodes), region.output)
        facts = ["output", dtype, f"rounds each {rounds_every_operation()}", f"tokens {counts}"]
        key = region_fingerprint(region.output, (quantised, *inputs.scales), nodes, inputs, facts)
        match = judged(key, nodes, quantised, Classifier(region, quantised, nodes, inputs, dtype).classify)
    match = division.as_generated(match, nodes, value(region.output).device, inputs.constants.values())
    codes = [nodes[index] for index in match.codes]
    scales = {nodes[index]: layout for index, layout in match.block_scales}
    made = {node for node in scales if len(scales.keys() & region.ancestors([node])) > 1}
    scales = {node: layout for node, layout in scales.items() if node not in made or not _is_spread(node)}
    try:
        dead, read, name = _replaced(region, codes, scales, match.output_format, names)
    except Refusal:
        # Scales that are computed from other scales stay in the graph, which computes them from the scales of the call.
        first = {node: layout for node, layout in scales.items() if node not in made}
        dead, read, name = _replaced(region, codes, first, match.output_format, names)
    config = attention.config.replace(
        output_format=name,
        output_arithmetic=match.arithmetic,
        output_min_scale=match.min_scale,
        output_floor=match.floor,
    )
    check_backend(config, quantised, f"writes {name} here")
    scale: Node | float | None = match.scale
    if isinstance(match.scale, int) and inputs.scales:
        scale = inputs.scales[match.scale]
        _check_scale(scale, attention)
    return Found(config, scale, match.factor, tuple(codes), match.moved, tuple(read.items()), frozenset(dead))


def _replaced(
    region: Region, codes: Sequence[Node], scales: dict[Node, str], name: str, names: Sequence[str]
) -> tuple[set[Node], dict[Node, str], str]:
    """Return dead nodes, the scales that are read, and the format that has them, once codes and scales are replaced."""
    dead = _dead_nodes(region, {*codes, *scales})
    read = {node: layout for node, layout in scales.items() if not dead.issuperset(node.users)}
    return dead, read, _with_layout(region.output, name, read, names)


def _is_spread(node: Node) -> bool:
    """Return whether a node is a view that repeats elements."""
    val = value(node)
    return any(
        same_size(stride, 0) and not same_size(size, 1) for size, stride in zip(val.shape, val.stride(), strict=True)
    )


def _probed(region: Region, quantised: Node) -> tuple[probe.Inputs, list[Node]]:
    """Return what to probe: what computes the quantised tensor, the others if they can be run too, and side results."""
    try:
        needed = region.ancestors(list(region.quantised))
        inputs = probe.find_inputs(needed, region.output)
    except Refusal:
        needed = region.ancestors([quantised])
        inputs = probe.find_inputs(needed, region.output)
    return inputs, _with_side_results(region, needed, inputs)


def _with_side_results(region: Region, needed: list[Node], inputs: probe.Inputs) -> list[Node]:
    """Add nodes that can be run with those that compute the quantised tensor, such as copies of scales."""
    known = {region.output, *needed, *inputs.sizes, *inputs.constants, *inputs.roots, *inputs.derived}
    chosen = set(needed)
    for node in region.nodes:
        if node not in chosen and all(source in known for source in node.all_input_nodes):
            chosen.add(node)
            known.add(node)
    return [node for node in region.nodes if node in chosen]


def _dead_nodes(region: Region, replaced: set[Node]) -> set[Node]:
    """Return the nodes that nothing reads once `replaced` are replaced, `replaced` included.

    Raises:
        Refusal: something else reads the output or a value on the way.
    """
    inside = set(region.nodes)
    dead, walk = set(replaced), [region.output]
    for node in walk:
        for user in node.users:
            if user in dead or is_check(user):
                continue
            if user not in inside:
                raise Refusal(_why_read(user, node, region), node if user.op == "output" else user, near=True)
            dead.add(user)
            walk.append(user)
    return dead


def _why_read(user: Node, node: Node, region: Region) -> str:
    """Return why a region must stay that something outside reads or returns a node of."""
    if node in region.quantised:
        return "the output is quantised in more than one way: quantise it once and read those codes"
    if user.op == "output":
        what = "the attention output" if node is region.output else "a value made of the attention output"
        return f"the graph also returns {what} unquantised: return the codes alone"
    what = "the attention output" if node is region.output else "a value made of the attention output"
    reader = op_name(user.target) or str(user.target)
    return f"{reader} reads {what} unquantised: let it read the codes and their scale"


def _with_layout(output: Node, name: str, read: dict[Node, str], names: Sequence[str]) -> str:
    """Return the variant of a format that has the layout of scales that the readers expect.

    Raises:
        Refusal: no variant that may be used has that layout.
    """
    same = [fmt for fmt in OUTPUT_FORMATS.values() if _HELD(fmt) == _HELD(OUTPUT_FORMATS[name])]
    fitting = [fmt for fmt in same if all(_fits(output, fmt, node, way) for node, way in read.items())]
    for variant in fitting:
        if variant.name in names:
            return variant.name
    if fitting:
        raise Refusal(f"it is {fitting[0].name}, which is not among output_formats", output, near=True)
    node = next(iter(read))
    raise Refusal(f"the scales lie in no layout that {name} can be written with", node, near=True)


def _fits(output: Node, fmt: OutputFormat, node: Node, layout: str) -> bool:
    """Return whether a node's scales have the layout of a format; equal layers of a graph are looked at once."""
    known = _fitting.setdefault(value(output).fake_mode, {})
    strides = tuple(map(expression, value(node).stride()))
    key = fmt.name, layout, typed(output), typed(node), strides
    if key not in known:
        known[key] = _has_layout(output, fmt, node, layout)
    return known[key]


_fitting: WeakKeyDictionary[Any, dict[Any, bool]] = WeakKeyDictionary()


def _has_layout(output: Node, fmt: OutputFormat, node: Node, layout: str) -> bool:
    if fmt.swizzled != (layout == "swizzled"):
        return False
    if layout == "moved":
        return not fmt.column_major
    wanted = value(node)
    with value(output).fake_mode:
        made = new_block_scale(output, fmt)
        made = made.t() if layout == "transposed" else made
        if made.itemsize != wanted.itemsize:
            why = f"its scales are declared as {wanted.dtype} and are {made.dtype}: compute them without that op"
            raise Refusal(why, node, near=True)
        if made.dtype != wanted.dtype:
            made = made.view(wanted.dtype)
        if not same_shape(made.shape, wanted.shape):
            made = made.reshape(wanted.shape)
    pairs = zip(made.stride(), wanted.stride(), wanted.shape, strict=True)
    return all(same_size(a, b) or same_size(size, 1) for a, b, size in pairs)


def new_block_scale(output: Node, fmt: OutputFormat) -> Tensor:
    """Return a fake tensor like the scales of a format; called under the graph's fake mode."""
    tokens, heads, width = value(output).shape
    shape = fmt.block_scale_shape(tokens, heads * width)
    assert shape is not None
    strides = (1, shape[0]) if fmt.column_major else (shape[1], 1)
    return torch.empty_strided(shape, strides, dtype=fmt.block_scale_dtype, device=value(output).device)


def _check_scale(scale: Node, attention: AttentionNode) -> None:
    """Refuse a scale that the op cannot take.

    Raises:
        Refusal: it is computed from the attention's own results, or on another device.
    """
    if value(scale).device != value(attention.output).device:
        raise Refusal(f"the scale is on {value(scale).device}", scale, near=True)
    if is_computed_from([scale], attention.node):
        raise Refusal("the scale is computed from the attention's results", scale, near=True)
