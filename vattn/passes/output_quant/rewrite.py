"""Replaces a region by an attention call that writes the quantised tensor and its scales.

New nodes are added next to the old ones first, so that whatever can fail does so before the graph is changed.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node

from vattn.passes.graph_edits import Builder, change_call, erase_unread
from vattn.passes.inductor import makes_package, sort_graph
from vattn.passes.ops import meaning, op_name
from vattn.passes.output_quant.find import Found
from vattn.passes.output_quant.replay import Replay, token_slices
from vattn.passes.region import AttentionNode, Refusal, is_check, same_shape, value
from vattn.quantization.formats import OUTPUT_FORMATS, OutputFormat

aten = torch.ops.aten

_LONG_ENOUGH = 16
"""Elements of a constant that Inductor does not inline into its code."""


def rewrite(attention: AttentionNode, found: Found) -> None:
    """Let an attention call write what a region computed, and drop the region."""
    hop, output = attention.node, attention.output
    fmt = OUTPUT_FORMATS[found.config.output_format]
    with Builder(hop.graph) as builder, value(output).fake_mode:
        with hop.graph.inserting_before(hop):
            tokens = _tokens(builder, attention)
            kwargs, written = _new_arguments(builder, attention, found, fmt, tokens)
        with hop.graph.inserting_before(output.next):
            replacements = _replacements(builder, attention, found, written, tokens)
        unsorted = found.moved or not builder.is_ordered()
    old_base = hop.kwargs["_all_bases"][attention.base]  # type: ignore[index]
    change_call(hop, kwargs)
    hop.meta["val"] = (*value(hop)[:1], *map(value, written))
    output.meta["val"] = value(written[attention.base])
    for old, new in replacements.items():
        old.replace_all_uses_with(new)
    for check in filter(is_check, list(output.users)):
        hop.graph.erase_node(check)
    erase_unread([old_base, *found.dead])  # type: ignore[list-item]
    if unsorted or (isinstance(found.scale, Node) and found.scale > hop):
        sort_graph(hop.graph)


def _tokens(builder: Builder, attention: AttentionNode) -> Node | int:
    """Return the number of tokens as an argument for other nodes."""
    tokens = value(attention.output).shape[0]
    if isinstance(tokens, int):
        return tokens
    return builder.call(aten.sym_size.int, attention.node.kwargs["query"], 0)


def _new_arguments(
    builder: Builder, attention: AttentionNode, found: Found, fmt: OutputFormat, tokens: Node | int
) -> tuple[dict[str, Any], list[Node]]:
    """Return the call's new keyword arguments, and the tensors it writes."""
    val = value(attention.output)
    heads, width = int(val.shape[1]), int(val.shape[2])
    kwargs = dict(attention.node.kwargs)
    bases = list(kwargs["_all_bases"])  # type: ignore[arg-type]
    shape = [tokens, heads, fmt.output_columns(width)]
    bases[attention.base] = builder.call(aten.empty.memory_format, shape, dtype=fmt.container, device=val.device)
    if fmt.group_size:
        kwargs["_output_block_scale_base_index"] = len(bases)
        bases.append(_block_scale(builder, fmt, tokens, heads * width, val.device))
    if fmt.static_scale:
        assert found.scale is not None
        kwargs["output_scale"] = _static_scale(builder, found.scale, found.factor, val.device)
    return {**kwargs, "_all_bases": bases, "config": found.config.encode()}, bases


def _block_scale(builder: Builder, fmt: OutputFormat, tokens: Node | int, columns: int, device: torch.device) -> Node:
    counted: Any = tokens
    if fmt.swizzled and isinstance(tokens, Node):
        tiles = builder.call(operator.floordiv, builder.call(operator.add, tokens, 127), 128)
        counted = builder.call(operator.mul, tiles, 128)
    elif fmt.swizzled:
        counted = (counted + 127) // 128 * 128
    shape = fmt.block_scale_shape(1, columns)
    assert shape is not None
    sizes = [counted, shape[1]]
    if not fmt.column_major:
        return builder.call(aten.empty.memory_format, sizes, dtype=fmt.block_scale_dtype, device=device)
    strides = [1, counted]
    return builder.call(aten.empty_strided.default, sizes, strides, dtype=fmt.block_scale_dtype, device=device)


def _static_scale(builder: Builder, scale: Node | float, factor: float, device: torch.device) -> Node:
    if not isinstance(scale, Node):
        return _constant(builder, scale, device)
    if value(scale).dtype != torch.float32:
        scale = builder.call(torch.ops.prims.convert_element_type.default, scale, torch.float32)
    if factor != 1.0:
        scale = builder.call(aten.mul.Tensor, scale, factor)
    return builder.call(aten.reshape.default, scale, [1]) if value(scale).dim() != 1 else scale


def _constant(builder: Builder, number: float, device: torch.device) -> Node:
    """Return a node that holds a number, fp32 `[1]`, without a kernel that fills it in every run.

    A constant of the graph is made once. Inductor would fill one of up to eight elements in every run, so it is longer.
    AOTInductor, which keeps constants in its package, gets the kernel.
    """
    module, mode = builder.graph.owning_module, detect_fake_mode()
    name = f"_vattn_scale_{struct.pack('<f', number).hex()}_{device.type}"
    if module is None or mode is None or makes_package():
        return builder.call(aten.full.default, [1], number, dtype=torch.float32, device=device)
    if not hasattr(module, name):
        with unset_fake_temporarily():
            module.register_buffer(name, torch.full((_LONG_ENOUGH,), number, dtype=torch.float32, device=device))
    whole = builder.keep(builder.graph.get_attr(name), mode.from_tensor(getattr(module, name)))
    return builder.call(aten.slice.Tensor, whole, 0, 0, 1)


def _replacements(
    builder: Builder, attention: AttentionNode, found: Found, written: Sequence[Node], tokens: Node | int
) -> dict[Node, Node]:
    """Return new nodes for the codes and the scales."""
    output = attention.output
    # The call still has its old value: views are made of the tensors that it will write, then of its results.
    codes = written[attention.base]
    if found.moved:
        new = _moved_codes(builder, output, codes, found)
    else:
        new = {node: _viewed(builder, attention, codes, node) for node in found.codes}
    sources = {written[attention.base]: output}
    if found.block_scales:
        results = builder.graph.call_function(operator.getitem, (attention.node, len(written)))
        sources[written[-1]] = builder.keep(results, value(written[-1]))
    for node, layout in found.block_scales:
        if layout == "moved":
            made = _moved_scales(builder, attention, written[-1], node, found.dead, tokens)
        elif layout == "transposed":
            made = _viewed(builder, attention, builder.call(aten.permute.default, written[-1], [1, 0]), node)
        else:
            made = _viewed(builder, attention, written[-1], node)
        new[node] = made
    for made in builder.nodes:
        if made.target is not operator.getitem:
            for source, result in sources.items():
                made.replace_input_with(source, result)
    return {old: sources.get(made, made) for old, made in new.items()}


def _moved_codes(builder: Builder, output: Node, codes: Node, found: Found) -> dict[Node, Node]:
    """Return new nodes for slices or transposes of the codes."""
    container = value(codes).dtype
    bytes_alone = any(meaning(node) in ("reorder", "join") or op_name(node.target) == "repeat" for node in found.dead)
    start = builder.call(aten.view.dtype, codes, torch.uint8) if bytes_alone else codes
    replay = Replay(builder.call, output, start, found.dead)
    new = {}
    for node in found.codes:
        made = replay(node)
        new[node] = _laid(builder, builder.call(aten.view.dtype, made, container) if bytes_alone else made, node)
    return new


def _moved_scales(
    builder: Builder, attention: AttentionNode, scales: Node, node: Node, inside: Collection[Node], tokens: Node | int
) -> Node:
    """Return a new node for the scales of slices or transposes of the output."""
    output = attention.output
    slices = token_slices(node, output, inside)
    if slices is not None:
        for start, end, step in slices:
            scales = builder.call(aten.slice.Tensor, scales, 0, start, end, step)
        return _laid(builder, _viewed(builder, attention, scales, node), node)
    heads, width = (int(size) for size in value(output).shape[1:])
    groups = int(value(scales).shape[1])
    each = builder.call(aten.unsqueeze.default, scales, -1)
    each = builder.call(aten.expand.default, each, [tokens, groups, heads * width // groups])
    each = builder.call(aten.reshape.default, each, [tokens, heads, width])
    return _laid(builder, Replay(builder.call, output, each, inside)(node), node)


def _laid(builder: Builder, made: Node, like: Node) -> Node:
    """Return a node with the shape and strides of another.

    Raises:
        Refusal: that is not possible.
    """
    a, b = value(made), value(like)
    if not same_shape(a.shape, b.shape) or a.dtype != b.dtype:
        raise Refusal(f"{like.name} cannot be made of codes and scales of the whole output", like, near=True)
    if same_shape(a.stride(), b.stride()):
        return made
    if b.is_contiguous():
        return builder.call(aten.clone.default, made, memory_format=torch.contiguous_format)
    raise Refusal(f"{like.name} lies otherwise in memory than slices of the whole would", like, near=True)


def _viewed(builder: Builder, attention: AttentionNode, source: Node, like: Node) -> Node:
    """View a tensor in the dtype and shape of another node."""
    wanted = value(like)
    if value(source).dtype != wanted.dtype:
        source = builder.call(aten.view.dtype, source, wanted.dtype)
    if same_shape(value(source).shape, wanted.shape):
        return source
    return builder.call(aten.reshape.default, source, builder.shape(wanted.shape, attention.node))
