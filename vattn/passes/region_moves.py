"""Follows the values of an attention output through slices, transposes and other ops that only move them.

Quantisers of single values, rows or groups commute with moves of whole values, rows or groups. So a region is compared
with a quantiser of the whole output followed by the same moves, and the moves are repeated on the codes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from vattn.passes.ops import meaning, moves, op_name, reduces

Positions = dict[Node, Any]
"""The place of each element of a node in the flattened output. A reduced element has the first place of the elements
that it was reduced from; so has a byte that holds two values."""


def positions(nodes: Sequence[Node], output: Node, values: dict[Node, Any]) -> Positions:
    """Return the positions of the elements of each node, for nodes where they are known.

    Args:
        values: the values of all nodes and of their inputs in one run.
    """
    start = torch.arange(values[output].numel()).view(values[output].shape)
    found: Positions = {output: start}
    for node in nodes:
        if any(source in found for source in node.all_input_nodes):
            place = _follow(node, found, values)
            if place is not None:
                found[node] = place
    return found


def _follow(node: Node, found: Positions, values: dict[Node, Any]) -> Any:
    if node.target is operator.getitem:
        return found[node.args[0]][node.args[1]]  # type: ignore[index]
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):
        return None
    name = op_name(op)
    if op.namespace == "vattn":
        return _follow_quantiser(node, name, found, values)
    if op is torch.ops.aten.view.dtype or meaning(node) in ("cast", "copy"):
        source = found.get(node.args[1] if name == "copy" else node.args[0])  # type: ignore[arg-type]
        same = isinstance(values[node], Tensor) and source is not None and source.shape == values[node].shape
        return source if same else None
    if moves(node):
        return _follow_move(node, found, values)
    if reduces(node):
        first = _first_of(node, found)
        return (first,) * len(values[node]) if isinstance(values[node], (tuple, list)) else first
    return _follow_pointwise(node, found, values[node]) if isinstance(values[node], Tensor) else None


def _follow_move(node: Node, found: Positions, values: dict[Node, Any]) -> Any:
    data = node.args[0]
    sources = [data] if isinstance(data, Node) else list(data)  # type: ignore[arg-type]
    if not all(source in found for source in sources):
        return None
    args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: found[n] if n in sources else values[n])
    if op_name(node.target) == "constant_pad_nd":
        return None
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _first_of(node: Node, found: Positions) -> Tensor | None:
    source = found.get(node.args[0])  # type: ignore[arg-type]
    return None if source is None else source.amin(*reduced_dims(node, source.dim()))


def reduced_dims(node: Node, rank: int) -> tuple[list[int], bool]:
    """Return the dimensions that a reduction reduces, and whether it keeps them."""
    rest = list(node.args[2:] if op_name(node.target) in ("linalg_vector_norm", "norm", "topk") else node.args[1:])
    dims: Any = rest[0] if rest else node.kwargs.get("dim")
    keep = rest[1] if len(rest) > 1 else node.kwargs.get("keepdim", False)
    return [dims] if isinstance(dims, int) else list(dims or range(rank)), bool(keep)


def _follow_pointwise(node: Node, found: Positions, made: Tensor) -> Tensor | None:
    sources = [found[source] for source in node.all_input_nodes if source in found]
    if not all(isinstance(source, Tensor) for source in sources):
        return None
    whole = [source for source in sources if source.shape == made.shape]
    if not whole:
        try:
            return sources[0].expand(made.shape) if len(sources) == 1 else None
        except RuntimeError:
            return None
    if all(source is whole[0] or torch.equal(source, whole[0]) for source in whole):
        return whole[0]
    least, most = torch.stack(whole).amin(0), torch.stack(whole).amax(0)
    packs = not made.is_floating_point() and bool((most - least == 1).all())
    return least if packs else None


def _follow_quantiser(node: Node, name: str, found: Positions, values: dict[Node, Any]) -> Any:
    source = found.get(node.args[0])  # type: ignore[arg-type]
    if source is None:
        return None
    if name == "quant_fp8_static":
        return source
    scales = values[node][1]
    rows = source.unflatten(1, (scales.shape[1], -1)).amin(-1) if scales.shape[0] == len(source) else None
    if name == "quant_nvfp4":
        rows = source[:, ::16] if not node.args[2] else None
        return source[:, ::2], rows
    return source, rows


def is_whole(place: Tensor | None, count: int, step: int) -> bool:
    """Return whether positions are all `count` values of the output in order, `step` values to an element."""
    if place is None:
        return True
    return place.numel() * step == count and torch.equal(place.flatten(), torch.arange(0, count, step))
