"""Decides whether attention followed by output quantisation can be one attention call; changes nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from vattn.backends import selector
from vattn.config.attention import AttentionConfig
from vattn.passes import probe
from vattn.passes import region_division as division
from vattn.passes.output_quant import match
from vattn.passes.region import (
    AttentionNode,
    Match,
    Refusal,
    Region,
    expression,
    find_region,
    is_check,
    lacks_parts,
    same_shape,
    same_size,
    unknown_readers,
    value,
)
from vattn.passes.region_tokens import token_counts
from vattn.quantization.formats import OUTPUT_FORMATS, OutputFormat

_known: dict[str, Match | Refused] = {}
"""What regions of this process were found to compute, or why none: a model of equal layers asks once."""


@dataclass(frozen=True)
class Refused:
    """Why a region is no supported quantiser, and which of the probed nodes is the first that differs from one."""

    reason: str
    differs: int | None


@dataclass(frozen=True)
class Found:
    """A region that an attention call can replace.

    Attributes:
        config: the request with the output format in it.
        scale: node of the static scale, its constant value, or `None`.
        factor: the static scale is this many times that.
        codes: nodes that hold the quantised tensor.
        moved: whether they hold it sliced or transposed: what the region did to the output is then done to the codes.
        block_scales: nodes that hold the computed scales and are read from outside, with their layout.
        dead: nodes that nothing reads any more, in graph order.
    """

    config: AttentionConfig
    scale: Node | float | None
    factor: float
    codes: tuple[Node, ...]
    moved: bool
    block_scales: tuple[tuple[Node, str], ...]
    dead: tuple[Node, ...]


def find(attention: AttentionNode, order: dict[Node, int], names: Sequence[str]) -> Found:
    """Find out what an attention call can write instead of its output, without changing anything.

    Args:
        order: position of every node of the graph.
        names: output formats that may be used.

    Raises:
        Refusal: nothing; with the reason.
    """
    region = find_region(attention.output, order)
    if any(map(lacks_parts, region.quantised)):
        region = find_region(attention.output, order, in_parts=True)
    if not region.quantised:
        readers = unknown_readers(attention.output)
        doubt = f", unless {' or '.join(readers)} does it, of which nothing is known here" if readers else ""
        raise Refusal(f"the output is not quantised{doubt}", attention.output)
    first: Refusal | None = None
    for quantised in region.quantised:
        try:
            return _find_one(attention, region, quantised, order, names)
        except Refusal as refusal:
            first = first or refusal
    assert first is not None
    raise first


def _find_one(
    attention: AttentionNode, region: Region, quantised: Node, order: dict[Node, int], names: Sequence[str]
) -> Found:
    with probe.isolated():
        inputs, nodes = _probed(region, quantised)
        match = _classified(attention, region, quantised, nodes, inputs)
    match = division.as_generated(match, nodes, value(region.output).device, inputs.constants.values())
    codes = [nodes[index] for index in match.codes]
    scales = {nodes[index]: layout for index, layout in match.block_scales}
    made = {node for node in scales if not scales.keys().isdisjoint(_before(node, region))}
    scales = {node: layout for node, layout in scales.items() if node not in made or not _is_spread(node)}
    try:
        dead, read, name = _replaced(region, codes, scales, match.output_format, names)
    except Refusal:
        # What is made of other scales is left to the graph, which has them from the call then.
        first = {node: layout for node, layout in scales.items() if node not in made}
        if len(first) == len(scales):
            raise
        dead, read, name = _replaced(region, codes, first, match.output_format, names)
    config = attention.config.replace(
        output_format=name,
        output_arithmetic=match.arithmetic,
        output_min_scale=match.min_scale,
    )
    _ask_backend(config, value(region.output).device, quantised)
    scale: Node | float | None = match.scale
    if isinstance(match.scale, int) and inputs.scales:
        scale = inputs.scales[match.scale]
        _check_scale(scale, attention, order)
    unread = tuple(sorted(dead, key=order.__getitem__))
    return Found(config, scale, match.factor, tuple(codes), match.moved, tuple(read.items()), unread)


def _replaced(
    region: Region, codes: Sequence[Node], scales: dict[Node, str], name: str, names: Sequence[str]
) -> tuple[set[Node], dict[Node, str], str]:
    """Return what is dead, which scales are read and the format that has them, if codes and scales are replaced."""
    dead = _dead_nodes(region, {*codes, *scales})
    read = {node: layout for node, layout in scales.items() if not dead.issuperset(node.users)}
    return dead, read, _with_layout(region.output, name, read, names)


def _is_spread(node: Node) -> bool:
    """Return whether a node shows elements more than once."""
    val = value(node)
    return any(
        same_size(stride, 0) and not same_size(size, 1) for size, stride in zip(val.shape, val.stride(), strict=True)
    )


def _before(node: Node, region: Region) -> set[Node]:
    """Return the region's nodes that a node is computed from."""
    return set(region.ancestors([node])) - {node}


def _probed(region: Region, quantised: Node) -> tuple[probe.Inputs, list[Node]]:
    """Return what to probe: what makes the quantised tensor, the others if they can be run too, and side results."""
    try:
        needed = region.ancestors(list(region.quantised))
        inputs = probe.find_inputs(needed, region.output)
    except Refusal:
        needed = region.ancestors([quantised])
        inputs = probe.find_inputs(needed, region.output)
    return inputs, _with_side_results(region, needed, inputs)


def _with_side_results(region: Region, needed: list[Node], inputs: probe.Inputs) -> list[Node]:
    """Add to the nodes that make the quantised tensor those that can be run beside them: copies of scales and such."""
    known = {region.output, *needed, *inputs.sizes, *inputs.constants, *inputs.roots, *inputs.derived}
    chosen = set(needed)
    for node in region.nodes:
        if node not in chosen and all(source in known for source in node.all_input_nodes):
            chosen.add(node)
            known.add(node)
    return [node for node in region.nodes if node in chosen]


def _classified(
    attention: AttentionNode,
    region: Region,
    quantised: Node,
    nodes: list[Node],
    inputs: probe.Inputs,
) -> Match:
    from torch._inductor import config

    counts = token_counts((*inputs.derived, *inputs.sizes, *nodes), region.output)
    extra = (attention.config.dtype, f"emulate_precision_casts={config.emulate_precision_casts}", f"tokens {counts}")
    key = _fingerprint(region, quantised, nodes, inputs, extra)
    if key not in _known:
        try:
            _known[key] = match.Asked(region, quantised, nodes, inputs, attention.config.dtype).classify()
        except Refusal as refusal:
            position = nodes.index(refusal.node) if refusal.node in nodes else None
            _known[key] = Refused(refusal.reason, position)
    known = _known[key]
    if isinstance(known, Refused):
        node = quantised if known.differs is None else nodes[known.differs]
        raise Refusal(known.reason, node, near=True)
    return known


def _fingerprint(
    region: Region, quantised: Node, nodes: list[Node], inputs: probe.Inputs, extra: tuple[str, ...]
) -> str:
    """Return a hash of everything that a probe's verdict depends on."""
    names: dict[Node, str] = {region.output: "output"}
    names.update((node, f"size {expression(value(node))}") for node in inputs.sizes)
    names.update((node, f"constant {tensor.dtype} {tensor.tolist()}") for node, tensor in inputs.constants.items())
    names.update(
        (node, f"scale {i} {value(node).dtype} {tuple(value(node).shape)}") for i, node in enumerate(inputs.roots)
    )
    names.update((node, f"derived {index}") for index, node in enumerate(inputs.derived))
    names.update((node, f"%{index}") for index, node in enumerate(nodes))
    lines = [*extra, str(value(region.output).dtype), str(tuple(map(expression, value(region.output).shape)))]
    for node in (*inputs.derived, *nodes):
        arguments = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda source: f"<{names[source]}>")
        lines.append(f"{names[node]} {node.target} {arguments}")
    lines += [names[quantised], *(names[node] for node in inputs.scales)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _dead_nodes(region: Region, replaced: set[Node]) -> set[Node]:
    """Return what nothing reads once `replaced` are replaced, `replaced` included.

    Raises:
        Refusal: something else reads the output or a value on the way.
    """
    inside = set(region.nodes)
    dead, stack = set(replaced), [region.output]
    while stack:
        node = stack.pop()
        for user in node.users:
            if user in dead or is_check(user):
                continue
            if user not in inside:
                raise Refusal(_why_read(user, node, region), node if user.op == "output" else user, near=True)
            dead.add(user)
            stack.append(user)
    return dead


def _why_read(user: Node, node: Node, region: Region) -> str:
    """Say why something that reads a node of a region, or returns it, keeps the region alive."""
    if node in region.quantised:
        return "the output is quantised in more than one way"
    if user.op == "output":
        what = "the attention output" if node is region.output else "a value made of the attention output"
        return f"the graph also returns {what} unquantised"
    what = "the attention output" if node is region.output else node.name
    return f"{user.name} reads {what}, which is not quantised yet"


def _layouts(name: str) -> list[OutputFormat]:
    """Return the formats that hold what one does, with its scales in whatever layout."""

    def held(fmt: OutputFormat) -> tuple[object, ...]:
        return fmt.container, fmt.group_size, fmt.power_of_two, fmt.static_scale

    return [fmt for fmt in OUTPUT_FORMATS.values() if held(fmt) == held(OUTPUT_FORMATS[name])]


def _with_layout(output: Node, name: str, read: dict[Node, str], names: Sequence[str]) -> str:
    """Return the variant of a format whose scales lie as the readers expect them.

    Raises:
        Refusal: no variant has that layout, or none that may be used.
    """
    fitting = [fmt for fmt in _layouts(name) if all(_fits(output, fmt, node, way) for node, way in read.items())]
    for variant in fitting:
        if variant.name in names:
            return variant.name
    if fitting:
        raise Refusal(f"it is {fitting[0].name}, which is not among output_formats", output, near=True)
    node = next(iter(read))
    raise Refusal(f"the scales lie in no layout that {name} can be written with", node, near=True)


def _fits(output: Node, fmt: OutputFormat, node: Node, layout: str) -> bool:
    if fmt.swizzled != (layout == "swizzled"):
        return False
    if layout == "moved":
        return not fmt.column_major
    wanted = value(node)
    with value(output).fake_mode:
        made = in_layout(new_block_scale(output, fmt), layout)
        if made.dtype != wanted.dtype:
            made = made.view(wanted.dtype)
        if not same_shape(made.shape, wanted.shape):
            made = made.reshape(wanted.shape)
    pairs = zip(made.stride(), wanted.stride(), wanted.shape, strict=True)
    return all(same_size(a, b) or same_size(size, 1) for a, b, size in pairs)


def in_layout(scales: Tensor, layout: str) -> Tensor:
    """View computed scales as a node that holds them in some layout sees them."""
    return scales.t() if layout == "transposed" else scales


def new_block_scale(output: Node, fmt: OutputFormat) -> Tensor:
    """Return a fake tensor like the scales that a format computes; called under the graph's fake mode."""
    tokens, heads, width = value(output).shape
    shape = fmt.block_scale_shape(tokens, heads * width)
    assert shape is not None
    strides = (1, shape[0]) if fmt.column_major else (shape[1], 1)
    return torch.empty_strided(shape, strides, dtype=fmt.block_scale_dtype, device=value(output).device)


def _ask_backend(config: AttentionConfig, device: torch.device, quantised: Node) -> None:
    explanation = selector.explain(config, device)
    if explanation.chosen is None:
        reasons = "; ".join(f"{name}: {', '.join(why)}" for name, why in explanation.refusals.items())
        raise Refusal(f"no backend writes {config.output_format} here ({reasons})", quantised, near=True)


def _check_scale(scale: Node, attention: AttentionNode, order: dict[Node, int]) -> None:
    """Refuse a scale that the op cannot take.

    Raises:
        Refusal: it is computed from the attention's own results, in a dtype with more than fp32's digits, or elsewhere.
    """
    val = value(scale)
    if val.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise Refusal(f"the scale is {val.dtype}", scale, near=True)
    if val.device != value(attention.output).device:
        raise Refusal(f"the scale is on {val.device}", scale, near=True)
    start, stack, seen = order[attention.node], [scale], set()
    while stack:
        node = stack.pop()
        if node is attention.node:
            raise Refusal("the scale is computed from the attention's results", scale, near=True)
        if node not in seen and order[node] > start:
            seen.add(node)
            stack.extend(node.all_input_nodes)
