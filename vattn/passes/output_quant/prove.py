"""Proves that a region which agreed with a quantiser in the runs so far agrees with it elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from vattn.passes import proof
from vattn.passes.output_quant.quantisers import Quantiser
from vattn.passes.probe import Inputs, Sample, exact_scales, run
from vattn.passes.probe_inputs import (
    cycled,
    every_maximum,
    every_quotient,
    every_row,
    every_scaled,
    every_value,
    scales_near,
)
from vattn.passes.proof import Origin
from vattn.passes.region import Refusal, Region, dtype_of, value
from vattn.passes.region_run import same_bits
from vattn.passes.region_tokens import TOKEN_COUNTS, possible_count, token_counts
from vattn.quantization.codecs import encode_e2m1, pack_e2m1
from vattn.quantization.formats import MODEL_DTYPES

_MOST_ELEMENTS = 1 << 24
"""How many elements one pass over every value may take."""
_MOST_RUNS = 8
"""Runs under one scale beyond which not every value is run under every scale."""
_MOST_SMALL_RUNS = 256
_MOST_PARTS = 64
_FACTORS = ("scale", "step", "divisor", "reciprocal")

Check = Callable[[Sample], None]


class Prover:
    """Proves what one quantised tensor of a region is.

    Args:
        nodes: the part of the region that was run.
        needed: those that the quantised tensor is computed from, itself included.
        dtype: name of the model dtype.
        wide: nodes in bf16 or fp16 that stay in fp32.
    """

    def __init__(
        self, region: Region, quantised: Node, nodes: list[Node], inputs: Inputs, dtype: str, wide: frozenset[Node]
    ) -> None:
        self.region, self.quantised, self.nodes, self.inputs = region, quantised, nodes, inputs
        self.dtype, self.wide = dtype, wide
        self.needed = region.ancestors([quantised])
        self.scales = exact_scales(nodes, inputs, dtype)

    def run(self, x: Tensor, scales: Sequence[float]) -> Sample:
        """Run the region on rows `[T, N]`."""
        shaped = x.view(len(x), *map(int, value(self.region.output).shape[1:]))
        return Sample(x, run(self.nodes, self.region.output, self.inputs, shaped, scales, self.wide))

    def roots(self, first: int) -> list[float]:
        """Return a value for each root, all different: equal ones would hide which root is used."""
        return [self.scales[(first + index) % len(self.scales)] for index in range(max(1, len(self.inputs.roots)))]

    def static(self, sample: Sample, check: Check) -> None:
        """Prove a quantiser with a static scale.

        Args:
            sample: one run.
            check: refuses a run that differs from the quantiser.

        Raises:
            Refusal: it is another, or this cannot be shown.
        """
        unknown = [*self.inputs.roots, *self.inputs.derived]
        nodes = [*self.inputs.derived, *self.needed]
        numbers = proof.check_scaled(nodes, self.region.output, unknown, sample.rows.numel() // 8, sample.values)
        rounds = [self.roots(index) for index in range(len(self.scales) if self.inputs.roots else 1)]
        if self.inputs.roots:
            rounds += [[scale] * len(self.inputs.roots) for scale in scales_near(numbers)]
        for x, many in self._every_value():
            for scales in rounds[:1] if many else rounds:
                check(self.run(x, scales))

    def _every_value(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield rows that hold every value of the model dtype for each formula; and whether these are many."""
        values = every_value(MODEL_DTYPES[self.dtype])
        tokens, heads, width = value(self.region.output).shape
        columns = int(heads) * int(width)
        count = token_counts((*self.inputs.derived, *self.inputs.sizes, *self.nodes), self.region.output)[0]
        count = possible_count(tokens, count + max(0, -(-len(values) // columns) - TOKEN_COUNTS[0]))
        x = torch.zeros(count * columns, dtype=values.dtype)
        origin = self._origin(self.run(x.view(count, -1), self.roots(0)))
        formulas, place = origin.formula.flatten(), origin.first.flatten()
        parts = [place[formulas == formula] for formula in formulas.unique()[: _MOST_ELEMENTS // len(values)]]
        runs = -(-len(values) // min(map(len, parts)))
        if runs * len(x) > _MOST_ELEMENTS or sum(map(len, parts)) < len(place):
            raise Refusal("it has too many parts to try every value in each", self.quantised, near=True)
        for index in range(runs):
            for part in parts:
                x[part] = cycled(values, index * len(part), len(part))
            yield x.clone().view(count, -1), runs > _MOST_RUNS

    def computed(
        self,
        way: Quantiser,
        scale_in: Callable[[Sample], float],
        held: Collection[Node],
        end: Node,
        sample: Sample,
        check: Check,
    ) -> None:
        """Prove a quantiser with computed scales.

        Args:
            scale_in: returns the static scale in a run, if there is one.
            held: nodes that hold the computed scales.
            end: the node that is rounded to codes.
            sample: one run.
            check: refuses a run that differs from the quantiser.

        Raises:
            Refusal: it is another, or this cannot be shown.
        """
        values, output = sample.values, self.region.output
        group = sample.rows.shape[1] if way.fmt.group_size < 0 else way.fmt.group_size
        found = proof.origins(self.nodes, {output: proof.start(values[output])}, values)
        maxima = self._maxima(group, sample, found)
        small = self._check_scales(way, scale_in, held, group, sample, found, maxima)
        unknown = [*self.inputs.roots, *self.inputs.derived, *maxima, *small]
        nodes = [*self.inputs.derived, *self.region.ancestors([end])]
        if proof.check_scaled(nodes, output, unknown, 0, values):
            for x in _chunks(every_quotient(sample.rows.shape[1]), len(sample.rows)):
                check(self.run(x, self.roots(0)))
        self._check_parts(sample, [*maxima, *small], end, check)

    def _maxima(self, group: int, sample: Sample, found: dict[Node, Any]) -> dict[Node, Tensor]:
        """Return the nodes that hold maxima of groups, made of nothing else, with the group of each element."""
        largest = sample.rows.float().view(-1, group).abs().amax(-1)
        maxima: dict[Node, Tensor] = {}
        for node in self.needed:
            origin, made = found.get(node), sample.values[node]
            if not isinstance(origin, Origin) or not made.is_floating_point() or made.numel() * 8 > sample.rows.numel():
                continue
            place = origin.first.clamp(0, sample.rows.numel() - 1) // group
            inside = bool((origin.last // group == place).all()) and bool((origin.first // group == place).all())
            if (
                inside
                and same_bits(made.float() + 0.0, largest[place])
                and not maxima.keys() & self.region.ancestors([node])
            ):
                maxima[node] = place
        if not maxima:
            raise Refusal("no node holds the maxima of groups", self.quantised, near=True)
        stack, done = list(maxima), set[Node]()
        while stack:
            node = stack.pop()
            if node in done or node is self.region.output:
                continue
            done.add(node)
            if not proof.takes_maxima(node, found, sample.values):
                raise Refusal("its scales are not made of maxima alone", node, near=True)
            stack += [source for source in node.all_input_nodes if source in found]
        return maxima

    def _check_scales(
        self,
        way: Quantiser,
        scale_in: Callable[[Sample], float],
        held: Collection[Node],
        group: int,
        sample: Sample,
        found: dict[Node, Any],
        maxima: dict[Node, Tensor],
    ) -> list[Node]:
        """Return the nodes with one value for each group that hold a scale, or another factor, for every maximum.

        Raises:
            Refusal: values are scaled by other nodes than those.
        """
        output, values = self.region.output, sample.values
        apart = proof.dependants(self.nodes, maxima)
        leaves = {node: proof.nowhere(values[node]) for node in maxima}
        known = proof.origins(self.nodes, {output: proof.start(values[output]), **leaves}, values)
        small = [n for n in self.nodes if n in apart and _is_nowhere(known.get(n)) and n not in maxima]
        place = {n: found[n].first // group for n in small if isinstance(found[n], Origin)}
        fits: dict[Node, set[str]] = {n: set(_FACTORS) for n in place if values[n].is_floating_point()}
        every, count = every_maximum(self.dtype), sample.rows.numel() // group
        runs = min(-(-len(every) // count), _MOST_SMALL_RUNS)
        for first in range(3 if self.inputs.roots else 1):
            for index in range(runs):
                tried = cycled(every, index * len(every) // runs, count)
                given = {n: tried[at].to(dtype_of(n)) for n, at in maxima.items()}
                made = run(small, output, self.inputs, values[output], self.roots(first), self.wide, given)
                wanted = _factors(way, tried, scale_in(Sample(sample.rows, made)))
                for node, names in fits.items():
                    got = made[node].float()
                    fits[node] = {name for name in names if same_bits(got, wanted[name].flatten()[place[node]])}
        good = {node for node in small if fits.get(node)} | maxima.keys()
        constant = {*self.inputs.constants, *self.inputs.roots, *self.inputs.derived, *self.inputs.sizes}
        for node in small:
            if proof.only_scales(node) and all(source in good | constant for source in node.all_input_nodes):
                good.add(node)
        for node in self.nodes:
            read = [node] if node in held else [] if node in small else node.all_input_nodes
            odd = [source for source in read if source in small and source not in good]
            if odd:
                raise Refusal("its scales are those of no supported format for some maxima", odd[0], near=True)
        return small

    def check_packing(self, end: Node, sample: Sample) -> None:
        """Prove that values which are scaled already are rounded to e2m1 and packed in pairs.

        Args:
            end: the node that holds them, in the order of the output.

        Raises:
            Refusal: they are not, or this cannot be shown.
        """
        after = [node for node in self.needed if node in proof.dependants(self.needed, [end]) and node is not end]
        before = proof.dependants(self.needed, [self.region.output]) - {end, *after}
        for node in after:
            if not before.isdisjoint(node.all_input_nodes):
                raise Refusal("what is packed does not depend on scaled values alone", node, near=True)
        like = sample.values[end]
        origin: Origin = proof.origins(after, {end: proof.start(like)}, sample.values)[self.quantised]
        pairs = bool((origin.last - origin.first == 1).all())
        if not pairs or bool((origin.formula != origin.formula.flatten()[:1]).any()):
            raise Refusal("values are packed otherwise than in pairs", self.quantised, near=True)
        numbers = [float(a) for node in after for a in node.args if isinstance(a, (int, float))]
        tried = every_scaled(numbers)
        for index in range(0, len(tried), like.numel()):
            made = cycled(tried, index, like.numel()).view(like.shape)
            x = sample.values[self.region.output]
            got = run(after, self.region.output, self.inputs, x, [1.0], given={end: made})
            wanted = pack_e2m1(encode_e2m1(made.flatten()))
            if not same_bits(got[self.quantised], wanted):
                raise Refusal("some scaled values are not rounded as e2m1", self.quantised, near=True)

    def _check_parts(self, sample: Sample, known: Collection[Node], end: Node, check: Check) -> None:
        """Run every value in each part of the columns that has a formula of its own.

        Raises:
            Refusal: there are too many, or a code depends on more than its value and its group's maximum.
        """
        origin = self._origin(sample, known, end)
        if bool((origin.formula == origin.formula.flatten()[:1]).all()):
            return
        formulas = torch.zeros(sample.rows.shape, dtype=torch.int64)
        formulas.view(-1)[origin.first.flatten()] = origin.formula.flatten()
        if bool((formulas != formulas[:1]).any()):
            raise Refusal("it treats some tokens otherwise than the others", end, near=True)
        columns = sample.rows.shape[1]
        edges = (formulas[0, 1:] != formulas[0, :-1]).nonzero().flatten() + 1
        step = math.gcd(columns, *edges.tolist())
        if columns // step > _MOST_PARTS:
            raise Refusal("it has too many parts to try every value in each", end, near=True)
        rows = every_row(columns, MODEL_DTYPES[self.dtype])
        for shift in range(step, columns, step):
            for x in _chunks(rows.roll(shift, 1), len(sample.rows)):
                check(self.run(x, self.roots(0)))

    def _origin(self, sample: Sample, known: Collection[Node] = (), end: Node | None = None) -> Origin:
        """Return where the elements of a node come from, each from one place.

        Args:
            known: nodes to go no further back than.
            end: the node; the quantised tensor if `None`.

        Raises:
            Refusal: not each from one place.
        """
        leaves = {node: proof.nowhere(sample.values[node]) for node in known}
        start = proof.start(sample.values[self.region.output])
        found = proof.origins(self.needed, {self.region.output: start, **leaves}, sample.values)
        origin: Origin = found[end or self.quantised]
        if bool((origin.last != origin.first).any()):
            node = proof.first_unknown(self.needed, found)
            raise Refusal("a code depends on other values than its own", node or self.quantised, near=True)
        return origin


def _is_nowhere(origin: Any) -> bool:
    return isinstance(origin, Origin) and bool((origin.last < origin.first).all())


def _factors(way: Quantiser, maxima: Tensor, scale: float) -> dict[str, Tensor]:
    """Return what groups with some maxima `[M]` may be scaled by, or compared with."""
    scales = way.scales_of(maxima, scale)
    step = way.step(scales, scale)
    return dict(zip(_FACTORS, (scales.float(), scales.float() * scale, step, step.reciprocal()), strict=True))


def _chunks(rows: Tensor, count: int) -> Iterator[Tensor]:
    for start in range(0, len(rows), count):
        yield cycled(rows, start, count)
