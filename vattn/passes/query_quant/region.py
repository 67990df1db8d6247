"""Finds and classifies the region between a query in the model dtype and its FP8 codes.

As for outputs, but walked backwards from the codes: the region begins at the unquantised query and, on the side of the
scale, at the node that the call's `q_scale` is computed from too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from vattn.config.attention import AttentionConfig
from vattn.passes import probe, proof
from vattn.passes.near_miss import first_difference
from vattn.passes.ops import meaning, op_name, reduces
from vattn.passes.probe import Inputs, Sample, exact_scales
from vattn.passes.proof import Origin
from vattn.passes.prove import Prover
from vattn.passes.region import (
    FP8_DTYPES,
    LARGEST_REGION,
    Refusal,
    Region,
    ancestors,
    can_run,
    dtype_of,
    is_check,
    is_size,
    same_size,
    value,
)
from vattn.passes.region_precision import ROUNDED, roundings
from vattn.passes.region_run import SATURATES, constant, same_bits, unsaturated_cast
from vattn.passes.region_tokens import check_order
from vattn.quantization.codecs import to_e4m3
from vattn.quantization.formats import dtype_name

_MOST_SCALES = 4096
_ARITHMETICS = ("divide", "multiply")


def find_query_region(source: Node, codes: Node, scale: Node) -> tuple[Region, Inputs]:
    """Walk back from the codes to `source`, and from codes and scale to what they have in common.

    Args:
        codes, scale: query and `q_scale` of the call.

    Returns:
        The region of the codes, and its inputs: their only root, if any, is what `scale`, and usually `codes`, are
        computed from, and their only scale is `scale`.

    Raises:
        Refusal: the codes depend on something else than the query, the call's scale and constants.
    """
    of_codes, of_scale = _ancestors([codes], {source}), _ancestors([scale], {source})
    common = (of_codes & of_scale) - {source}
    readers = (of_codes | of_scale) - common
    roots = {node for node in common if node is scale or readers.intersection(node.users)}
    if source in _ancestors([scale], {source, *roots}):
        raise Refusal("the op's q_scale is computed from the query, which is not divided by it", codes, near=True)
    needed = _ancestors([codes, scale], {source, *roots})
    inner: list[Node] = []
    sizes: list[Node] = []
    constants: dict[Node, Tensor] = {}
    for node in codes.graph.nodes:
        if node not in needed or node is source:
            continue
        known = None if node in roots or not isinstance(value(node), Tensor) else constant(node)
        if known is not None:
            constants[node] = known
        elif is_size(node):
            sizes.append(node)
        elif node in roots or not _can_enter(node):
            if node in of_codes and node not in roots:
                raise Refusal(_not_the_scale(node, codes), codes, near=True)
            roots.add(node)
        else:
            inner.append(node)
    if len(roots) > 1:
        raise Refusal("its scale, or the op's q_scale, is made of more than one unknown value", codes, near=True)
    for root in roots:
        val = value(root)
        is_float = isinstance(val, Tensor) and val.is_floating_point()
        if not is_float or not isinstance(val.numel(), int) or val.numel() > _MOST_SCALES:
            raise Refusal(f"its scale comes from {root.name}, which is no tensor of a few numbers", codes, near=True)
    probe.check_sizes(inner, sizes)
    _check_tokens(inner)
    of_query = proof.dependants(inner, [source])
    nodes, derived = (tuple(node for node in inner if (node in of_query) == within) for within in (True, False))
    return Region(source, nodes, (codes,)), Inputs(tuple(sizes), constants, tuple(roots), derived, (scale,))


def _check_tokens(nodes: Sequence[Node]) -> None:
    """Refuse nodes that number or order the tokens: conditions on these may first be met by more tokens than are run.

    Raises:
        Refusal: there is such a node.
    """
    check_order(nodes)
    for node in nodes:
        varies = isinstance(value(node), Tensor) and not isinstance(value(node).numel(), int)
        if varies and meaning(node) != "fill" and all(map(is_size, node.all_input_nodes)):
            raise Refusal(
                f"{op_name(node.target)} numbers the tokens, which a query load treats alike", node, near=True
            )


def _ancestors(ends: Iterable[Node], stops: set[Node]) -> set[Node]:
    """Return what some nodes are computed from, themselves included, up to `stops` and to what cannot be run."""
    return ancestors(ends, lambda node: node not in stops and _can_enter(node), LARGEST_REGION)


def _can_enter(node: Node) -> bool:
    return can_run(node) and not is_size(node)


def _not_the_scale(node: Node, codes: Node) -> str:
    """Return what is wrong with a node of unknown value that codes depend on."""
    val = value(node)
    shape = tuple(val.shape) if isinstance(val, Tensor) else type(val).__name__
    if isinstance(val, Tensor) and val.dim() and same_size(val.shape[0], value(codes).shape[0]):
        return f"it reads {node.name} of shape {shape}, a value for every token; the op takes one, or one per KV head"
    return f"it reads {node.name} of shape {shape}, which is not the op's q_scale"


def check_readers(region: Region, call: Node) -> None:
    """Refuse codes that other nodes read too: these would still have to be computed.

    Raises:
        Refusal: a node other than attention calls reads them.
    """
    inside = {*region.nodes, call}
    for node in region.nodes:
        if dtype_of(node) in FP8_DTYPES:
            for user in node.users:
                # Another attention call can load the query itself.
                loads = user.kwargs.get("query") is node and "config" in user.kwargs
                if user not in inside and not loads and not is_check(user):
                    reader = "the graph returns it" if user.op == "output" else f"{user.name} reads it"
                    near = user if user.op != "output" else region.quantised[0]
                    raise Refusal(f"{reader} quantised too", near, near=True)


def classify_query(region: Region, inputs: Inputs, config: AttentionConfig) -> str:
    """Return which arithmetic, `"divide"` or `"multiply"`, gives a region's codes, proven as for outputs.

    Raises:
        Refusal: neither does, or this cannot be shown.
    """
    count = value(inputs.scales[0]).numel()
    if count not in (1, config.num_kv_heads):
        reason = f"its scale has {count} values; the op takes one, or one per KV head"
        raise Refusal(reason, inputs.scales[0], near=True)
    certain, doubtful = roundings(region.nodes)
    refusals = []
    for arithmetic in _ARITHMETICS:
        try:
            QueryProver(region, inputs, config, arithmetic, certain).prove()
        except Refusal as refusal:
            refusals.append(refusal)
            continue
        if doubtful:
            try:
                QueryProver(region, inputs, config, arithmetic, certain | doubtful).prove()
            except Refusal:
                raise Refusal(ROUNDED, min(doubtful), near=True) from None
        return arithmetic
    per_token = _value_per_token(region, config)
    if per_token is not None:
        raise Refusal("it has a scale for every token; the op takes one, or one per KV head", per_token, near=True)
    raise refusals[0]


def _value_per_token(region: Region, config: AttentionConfig) -> Node | None:
    """Return the first node that makes one value, or one per head, of every token; `None`: there is none."""
    tokens, heads, width = value(region.quantised[0]).shape
    counts = [tokens * count for count in (1, config.num_kv_heads, heads)] if width > 1 else []
    small = (node for node in region.nodes if reduces(node) and isinstance(value(node), Tensor))
    return next((node for node in small if any(same_size(value(node).numel(), count) for count in counts)), None)


class QueryProver(Prover):
    """Proves that codes equal what the op makes of the query, which it scales and rounds as it loads it.

    Args:
        arithmetic: of the op.
        wide: nodes in bf16 or fp16 that stay in fp32.
    """

    def __init__(
        self, region: Region, inputs: Inputs, config: AttentionConfig, arithmetic: str, wide: frozenset[Node]
    ) -> None:
        (codes,) = region.quantised
        super().__init__(region, codes, list(region.nodes), inputs, dtype_name(value(region.output).dtype), wide)
        self.config, self.arithmetic, self.counted = config, arithmetic, codes
        # Equal scales would hide which head has which.
        scales, shapes = torch.tensor(exact_scales(self.nodes, inputs)), [value(root).shape for root in inputs.roots]
        at = [torch.arange(math.prod(shape)).view(tuple(shape)) for shape in shapes]
        differ = [1 + index // len(scales) / 64 for index in at]
        self.rounds = [
            [scales[(first + index) % len(scales)] * part for index, part in zip(at, differ, strict=True)]
            for first in range(len(self.rounds))
        ]
        self.rounded = proof.rounded(self.needed, region.output)
        self.places: list[Tensor] = []
        self.conditions = proof.Conditions((*inputs.derived, *self.needed), [region.output, *inputs.roots])

    def prove(self) -> None:
        """Prove it.

        Raises:
            Refusal: they are others, or this cannot be shown.
        """
        x, _ = next(self._every_value())
        sample = self.run(x)
        self._check(sample)  # first, for its reason says more
        self.static(sample, self._check)
        if self.inputs.roots:
            self._check_scale_of_each_place(x)
        self.conditions.check()

    def run(self, x: Tensor, scales: Sequence[Any] | None = None) -> Sample:
        """Run the region on rows `[T, N]`, with the first values of the roots if none are given."""
        scales = self.rounds[0] if scales is None else scales
        sizes = probe.set_sizes(self.inputs.sizes, self.counted, len(x))
        shape = [probe.size_at(size, self.counted, len(x)) for size in value(self.region.output).shape]
        inputs = replace(self.inputs, sizes=())
        return Sample(x, probe.run(self.nodes, self.region.output, inputs, x.reshape(shape), scales, self.wide, sizes))

    def _origins(self, sample: Sample, known: dict[Node, Origin] | None = None) -> dict[Node, Any]:
        # The scales of all heads are one formula; runs show which head has which.
        roots = {root: proof.nowhere(sample.values[root]) for root in self.inputs.roots}
        found = super()._origins(sample, proof.origins(self.inputs.derived, roots, sample.values))
        self.places = [found[node].first.flatten() for node, _ in self.rounded]
        return found

    def _origin(self, found: dict[Node, Any], end: Node | None = None) -> Origin:
        origin = super()._origin(found, end)
        if not torch.equal(origin.first.flatten(), torch.arange(origin.first.numel())):
            raise Refusal("its codes lie in another order than the query", self.quantised, near=True)
        return origin

    def _check_scale_of_each_place(self, x: Tensor) -> None:
        """Run values near their scales: many others, zeros and infinities among them, have one code under all scales.

        Raises:
            Refusal: some place has the scale of another head.
        """
        limits = torch.finfo(x.dtype)
        for scales in self.rounds:
            scale = self._scale(self.run(x, scales)).clamp(limits.tiny, limits.max).to(x.dtype)
            near = scale.expand(len(x), -1, self.config.head_size).reshape(x.shape)
            self._check(self.run(near, scales))

    def _scale(self, sample: Sample) -> Tensor:
        """Return the scales of the heads `[H, 1]`."""
        scale = sample.values[self.inputs.scales[0]].float().reshape(-1).expand(self.config.num_kv_heads)
        return scale.repeat_interleave(self.config.group_size)[:, None]

    def _check(self, sample: Sample) -> None:
        """Refuse a run with other codes, or other values before they are rounded."""
        self.conditions.see(sample.values)
        query = sample.rows.view(-1, self.config.num_heads, self.config.head_size).float()
        scale = self._scale(sample)
        scaled = query * scale.reciprocal() if self.arithmetic == "multiply" else query / scale
        same = same_bits(sample.values[self.quantised], to_e4m3(scaled))
        for (node, is_scaled), place in zip(self.rounded, self.places, strict=True):
            got, wanted = sample.values[node].float().flatten(), (scaled if is_scaled else query).flatten()[place]
            same = same and (proof.same_scaled if is_scaled else same_bits)(got, wanted)
        if not same:
            unclamped = unsaturated_cast(scaled, torch.float8_e4m3fn)
            if not SATURATES and same_bits(sample.values[self.quantised], unclamped):
                raise Refusal(probe.NO_CLAMP, near=True)
            reason = "its codes are not those of the query divided by the op's q_scale and clamped to +-448"
            raise Refusal(reason, first_difference(self.nodes, self.region.output, [sample]), near=True)
