"""Names the first node of a region at which it stops being a quantiser that an attention call can be.

Values are followed from the output on: unchanged, then scaled once, then clamped, then cast; scales from a maximum on.
What does none of these is the first difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Node

from vattn.passes.probe import Sample
from vattn.passes.region import FP8_DTYPES, op_name, value
from vattn.passes.region_moves import MOVES
from vattn.quantization.formats import FP8_E4M3_MAX, NVFP4_GROUP_SIZE

_MAXIMA = frozenset("amax amin max min aminmax linalg_vector_norm sort topk cummax kthvalue argmax".split())
_SCALE_ARITHMETIC = frozenset(
    "div true_divide mul reciprocal clamp clamp_min clamp_max maximum minimum max min abs neg log2 exp2 ceil pow where "
    "gt ge eq lt le ne isfinite isnan bitwise_and bitwise_or view frexp ldexp full gather full_like".split()
)
_SIGNS = frozenset({"abs", "neg"})
_SCALING = frozenset("div true_divide mul ldexp".split())


def first_difference(nodes: Sequence[Node], output: Node, quantised: Node, seen: Sequence[Sample]) -> Node:
    """Return the first node, of those that make the quantised tensor, that no quantiser has.

    Args:
        nodes: what makes the quantised tensor, in graph order, itself included.
        seen: some runs of them.
    """
    scaled: dict[Node, bool] = {output: False}
    scaling = quantised
    for node in nodes:
        made = seen[0].values[node]
        if not isinstance(made, Tensor):
            continue
        data = [source for source in node.all_input_nodes if source in scaled]
        if made.numel() < seen[0].rows.numel() / 8 or made.dtype == torch.bool or not data:
            if _is_odd_scale(node, made, bool(data), seen[0].rows):
                return node
            continue
        if op_name(node.target) in _SCALING and not any(scaled[source] for source in data) and len(data) == 1:
            scaled[node] = not _unchanged(node, data[0], seen)
            scaling = node if scaled[node] else scaling
        elif _is_step(node, data[0], seen):
            scaled[node] = any(scaled[source] for source in data)
        else:
            return node
    return scaling


def _is_odd_scale(node: Node, made: Tensor, reduces: bool, rows: Tensor) -> bool:
    """Return whether a value smaller than the output is neither a maximum of rows or groups nor scale arithmetic."""
    name = op_name(node.target)
    if made.dtype == torch.bool or name in MOVES or name in ("convert_element_type", "_to_copy"):
        return False
    if not reduces:
        return name not in _SCALE_ARITHMETIC | _MAXIMA
    sizes = (rows.shape[1], 128, 64, NVFP4_GROUP_SIZE)
    whole = made.numel() == 1 and rows.shape[0] > 1
    return name not in _MAXIMA or whole or not any(made.numel() * size == rows.numel() for size in sizes)


def _values(sample: Sample, node: Node) -> Tensor:
    return sample.values[node].float().flatten()


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _unchanged(node: Node, source: Node, seen: Sequence[Sample]) -> bool:
    return all(_same(_values(sample, node), _values(sample, source)) for sample in seen)


def _is_step(node: Node, source: Node, seen: Sequence[Sample]) -> bool:
    """Return whether a node only moves, clamps, casts to FP8, or changes nothing about the values it reads."""
    name, val = op_name(node.target), value(node)
    if name in MOVES or name in _SIGNS:
        return True
    if val.dtype in FP8_DTYPES:
        return val.dtype == torch.float8_e4m3fn
    if not val.is_floating_point():
        return True  # of packed values, which are judged as a whole

    def clamps(sample: Sample) -> bool:
        before, after = _values(sample, source), _values(sample, node)
        inside = before.abs() <= FP8_E4M3_MAX
        return before.shape == after.shape and _same(after[inside | before.isnan()], before[inside | before.isnan()])

    return all(map(clamps, seen))
