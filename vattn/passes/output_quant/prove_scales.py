"""Proves a quantiser with computed scales: its maxima, the scales made of them, and the values that are scaled."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from vattn.passes import proof
from vattn.passes.ops import PLACING, is_pointwise, meaning, op_name
from vattn.passes.output_quant.quantisers import Quantiser
from vattn.passes.probe import Sample, run, run_one
from vattn.passes.probe_inputs import (
    TIED_SCALES,
    cycled,
    every_mantissa,
    every_maximum,
    every_quotient,
    every_row,
    every_scaled,
)
from vattn.passes.proof import Origin
from vattn.passes.prove import Check, Prover
from vattn.passes.region import FP8_DTYPES, Refusal, dtype_of, is_size, value
from vattn.passes.region_precision import LOW
from vattn.passes.region_run import same_bits
from vattn.passes.region_tokens import possible_count, token_counts
from vattn.quantization.codecs import encode_e2m1, pack_e2m1
from vattn.quantization.formats import FP4_E2M1_MAX, MODEL_DTYPES

_BLOCK_SCALES = "NVFP4, but block scales are not rounded from maximum / 6 / scale, bit for bit; write that"
_MOST_PARTS = 64
_MOST_RUNS = 64
"""How often a region of few tokens is run to see every quotient."""


class ScaleProver(Prover):
    """Proves what one quantised tensor of a region is, whose scales are computed.

    Args:
        region: the arguments of `Prover`.
        way: the quantiser that it was found to be.
        scale_of: returns the static scale in a run, 0 if there is none.
        held: nodes that hold the computed scales.
        ends: nodes that hold what is rounded to codes, or what ops of libraries scale and round.
        check: refuses a run that differs from the quantiser.
        sample: one run.
    """

    def __init__(
        self,
        *region: Any,
        way: Quantiser,
        scale_of: Callable[[dict[Node, Any]], float],
        held: Collection[Node],
        ends: Sequence[Node],
        check: Check,
        sample: Sample,
    ) -> None:
        super().__init__(*region)
        self.way, self.scale_of, self.held, self.ends, self.check = way, scale_of, held, ends, check
        self.sample = self.run(sample.rows)
        self.columns = sample.rows.shape[1]
        self.libraries = [node for node in self.needed if _is_library(node)]
        self.packs = way.fmt.container is torch.uint8 and not self.libraries
        self.group = self.columns if way.fmt.group_size < 0 else way.fmt.group_size

    def prove(self) -> None:
        """Prove it.

        Raises:
            Refusal: it is another quantiser, or this cannot be shown.
        """
        computes = self._computes_scales()
        maxima = self._maxima() if computes else {}
        small = self._small(maxima)
        if computes:
            self._check_scales(maxima, small)
        else:
            self._check_moved_scales()
        if self.libraries:
            self._check_op()
        unknown = [*self.inputs.roots, *self.inputs.derived, *maxima, *small]
        nodes = self.region.ancestors(self.ends)
        numbers = proof.check_scaled(nodes, [self.region.output], unknown, self.sample.values)
        reads_all = self._check_places(maxima, small)
        if computes and (numbers or self._compares(set(nodes) - set(small))):
            self._check_quotients(reads_all)
        if self.packs:
            self._check_packing(self.ends[0])
        if self.way.fmt.container is torch.int8:
            self._check_integers()

    def _computes_scales(self) -> bool:
        """Return whether the region computes scales, and not an op of a library."""
        reached = proof.dependants(self.needed, [self.region.output])
        return not [op for op in self.libraries if reached.intersection(op.all_input_nodes).issubset(self.ends)]

    def _check_moved_scales(self) -> None:
        """Refuse scales of an op that are changed, not only moved."""
        for node in self.held:
            moves = _is_library(node) or node.target is operator.getitem or meaning(node) in PLACING
            if not moves:
                raise Refusal("the scales that an op computes are changed", node, near=True)

    def _check_op(self) -> None:
        """Run an op on maxima of every mantissa, since what it does with them cannot be read."""
        rows = every_mantissa(self.columns, self.group).to(MODEL_DTYPES[self.dtype])
        for scales in {(scale,) * len(self.inputs.roots) for scale in TIED_SCALES}:
            for x in self._batches(rows):
                self.check(self.run(x, scales))

    def _maxima(self) -> dict[Node, Tensor]:
        """Return the nodes that hold maxima of groups, made of nothing else, with the group of each element."""
        rows, values, output = self.sample.rows, self.sample.values, self.region.output
        weights = torch.empty(values[output].shape, dtype=torch.int64).random_(generator=torch.Generator())
        sums = weights.view(-1, self.group).sum(-1)
        sums, order = torch.cat((sums, 2 * sums)).sort()  # twice: of values and negated ones
        order = order % (rows.numel() // self.group)
        largest = rows.float().view(-1, self.group).abs().amax(-1)
        exact = {torch.float32, torch.float64, MODEL_DTYPES[self.dtype]}
        found: dict[Node, Tensor] = {}
        for node, total in proof.gathered(self.needed, output, weights, values, exact).items():
            made = values[node]
            small = isinstance(made, Tensor) and made.is_floating_point() and made.numel() * 8 <= rows.numel()
            if not small or not found.keys().isdisjoint(self.region.ancestors([node])):
                continue
            place = torch.searchsorted(sums, total.contiguous()).clamp(max=len(sums) - 1)
            if torch.equal(sums[place], total) and same_bits(made.float() + 0.0, largest[order[place]]):
                found[node] = order[place]
        if not found:
            raise Refusal("no node holds the maxima of groups alone", self.ends[0], near=True)
        return found

    def _small(self, maxima: Collection[Node]) -> list[Node]:
        """Return the nodes that are made of maxima, and of nothing else of the output."""
        others = {self.region.output}
        for node in self.nodes:
            filled = op_name(node.target).endswith("_like") or is_size(node)
            if node not in maxima and not filled and not others.isdisjoint(node.all_input_nodes):
                others.add(node)
        made = proof.dependants(self.nodes, maxima)
        return [node for node in self.nodes if node in made and node not in others and node not in maxima]

    def _check_scales(self, maxima: dict[Node, Tensor], small: list[Node]) -> None:
        """Refuse scales that are wrong for some maximum, or that depend on the place.

        Raises:
            Refusal: values are scaled by other numbers than scales, or more than that is not the same for all groups.
        """
        output, values = self.region.output, self.sample.values
        unknown = [*self.inputs.roots, *self.inputs.derived]
        numbers = self.check_roots(self.sample) | proof.check_scaled(small, maxima, unknown, values)
        every = every_maximum(self.dtype)
        fits: dict[Node, set[str]] = {}
        for roots in self.rounds_at({n * f for n in numbers for f in (1, FP4_E2M1_MAX, 1 / FP4_E2M1_MAX)}):
            env = run([], output, self.inputs, values[output], roots, self.wide)
            made = self._of_maxima(small, {node: every.to(dtype_of(node)) for node in maxima}, env)
            wanted = self.way.factors(every, self.scale_of(env))
            for node, got in made.items():
                if isinstance(got, Tensor) and (got.is_floating_point() or got.dtype == torch.uint8):
                    fits[node] = {name for name in fits.get(node, wanted) if _fits(name, got, wanted[name])}
        good = {node for node, names in fits.items() if names - {"unrounded"}} | maxima.keys()
        for node in small:  # the bytes of scales
            if meaning(node) in PLACING and good.issuperset(node.all_input_nodes):
                good.add(node)
        for node in self.nodes:
            if node in small and _narrows(node) and "unrounded" not in fits.get(node.all_input_nodes[0], ()):
                raise Refusal(_BLOCK_SCALES, node, near=True)
            read = [node] if node in self.held else [] if node in small else node.all_input_nodes
            odd = [source for source in read if source in small and source not in good]
            if odd:
                raise Refusal("its scales are those of no supported format for some maxima", odd[0], near=True)

    def _of_maxima(self, small: list[Node], found: dict[Node, Any], given: dict[Node, Any]) -> dict[Node, Any]:
        """Return what nodes hold for many maxima at once; those that are no function of one maximum are left out.

        Args:
            found: the maxima, `[M]`.
            given: values of what does not depend on them.
        """
        inside, given = {*small, *found}, {**self.sample.values, **given}
        for node in small:
            if all(source in found or source not in inside for source in node.all_input_nodes):
                made = self._of_maximum(node, found, given)
                if made is not None:
                    found[node] = made
        return found

    def _of_maximum(self, node: Node, found: dict[Node, Any], given: dict[Node, Any]) -> Any:
        sources = [source for source in node.all_input_nodes if source in found]
        if node.target is operator.getitem:
            return found[sources[0]][node.args[1]]
        reinterprets = node.target is torch.ops.aten.view.dtype
        if meaning(node) in PLACING and not reinterprets:
            first, *rest = (found[source] for source in sources)
            if proof.placed(node).issuperset(sources) and all(same_bits(first, other) for other in rest):
                made = self.sample.values[node]
                return (first,) * len(made) if isinstance(made, (tuple, list)) else first
        same_size = reinterprets and value(node).itemsize == value(sources[0]).itemsize
        filled = op_name(node.target).endswith("_like")
        if not is_pointwise(node) and meaning(node) != "cast" and not filled and not same_size:
            return None
        read = dict(found)
        for source in node.all_input_nodes:
            if source not in found:
                held = read[source] = given[source]
                if held.dim():
                    if not held.numel() or bool((held != held.flatten()[0]).any()):
                        return None
                    read[source] = held.flatten()[:1]
        return run_one(node, read, self.wide)

    def _check_places(self, maxima: dict[Node, Tensor], small: list[Node]) -> bool:
        """Refuse codes that depend on more than their value and the maximum of its group; returns whether all are read.

        Raises:
            Refusal: there are some, or places have too many formulas to try every value in each.
        """
        values, output = self.sample.values, self.region.output
        place = proof.start(values[output]).first
        leaves = {node: proof.nowhere(values[node]) for node in (*maxima, *small) if isinstance(values[node], Tensor)}
        groups = {output: Origin(torch.zeros_like(place), place // self.group, place // self.group)}
        groups |= {node: Origin(torch.zeros_like(of), of, of) for node, of in maxima.items()}
        found = proof.origins(self.nodes, groups, values)
        read = self.region.ancestors([self.quantised, *self.held])
        for node in [node for node in small if node in read]:
            if isinstance(found.get(node), Origin) and bool((found[node].last > found[node].first).any()):
                raise Refusal("its scales depend on several groups", node, near=True)
        values_of = self._origins(self.sample, leaves)
        own = [self._origin(values_of, end) for end in self.ends]
        for end, origin in zip(self.ends, own, strict=True):
            group = origin.first // self.group
            if not torch.equal(found[end].first, group) or not torch.equal(found[end].last, group):
                raise Refusal("values are divided by the scale of another group than their own", end, near=True)
        formula, first = (torch.cat([origin[part].flatten() for origin in own]) for part in (0, 1))
        self._check_parts(formula, first)
        return first.unique().numel() == self.sample.rows.numel()

    def _check_parts(self, formula: Tensor, place: Tensor) -> None:
        """Run every value in each part of the columns that has a formula of its own."""
        if bool((formula == formula[:1]).all()):
            return
        formulas = torch.zeros(self.sample.rows.shape, dtype=torch.int64)
        formulas.view(-1)[place] = formula
        if bool((formulas != formulas[:1]).any()):
            raise Refusal("it treats some tokens otherwise than the others", self.ends[0], near=True)
        edges = (formulas[0, 1:] != formulas[0, :-1]).nonzero().flatten() + 1
        step = math.gcd(self.columns, *edges.tolist())
        if self.columns // step > _MOST_PARTS:
            raise Refusal("it has too many parts to try every value in each", self.ends[0], near=True)
        rows = every_row(self.columns, self.dtype)
        for shift in range(step, self.columns, step):
            for x in self._batches(rows.roll(shift, 1)):
                self.check(self.run(x))

    def _batches(self, rows: Tensor) -> Iterator[Tensor]:
        """Yield outputs `[T, N]` that hold all rows."""
        tokens = value(self.region.output).shape[0]
        count = token_counts((*self.inputs.derived, *self.inputs.sizes, *self.nodes), self.region.output)[0]
        count = possible_count(tokens, count + len(rows))
        for start in range(0, len(rows), count):
            yield cycled(rows, start, count)

    def _compares(self, nodes: Collection[Node]) -> bool:
        """Return whether a node compares two values that depend on the output."""
        reached = proof.dependants(self.nodes, [self.region.output])
        return any(
            dtype_of(node) == torch.bool and sum(source in reached for source in node.all_input_nodes) > 1
            for node in nodes
        )

    def _check_quotients(self, reads_all: bool) -> None:
        """Run every quotient of a value and a maximum, which scaling by powers of two makes all there are.

        Raises:
            Refusal: the region has too few tokens for that.
        """
        batches = list(self._batches(every_quotient(self.columns).to(MODEL_DTYPES[self.dtype])))
        if not reads_all or len(batches) > _MOST_RUNS:
            raise Refusal("it compares scaled values, on too few tokens to try all of them", self.ends[0], near=True)
        for x in batches:
            self.check(self.run(x))

    def _check_integers(self) -> None:
        """Refuse integers that are more than limited, by numbers, once they are rounded.

        Raises:
            Refusal: they are.
        """
        ops = [node for node in self.libraries if dtype_of(node) is torch.int8]
        after = proof.dependants(self.needed, ops or self.ends) - {*ops, *self.ends}
        for node in [node for node in self.needed if node in after]:
            plain = meaning(node) in PLACING | {"cast"} or node.target is torch.ops.aten.round.default
            limits = meaning(node) == "limit" or op_name(node.target) in ("minimum", "maximum")
            others = [n for n in node.all_input_nodes if n not in after and n not in self.inputs.constants]
            if not plain and (others or not limits):
                why = f"{op_name(node.target)} changes values that are rounded to integers already"
                raise Refusal(why, node, near=True)

    def _check_packing(self, end: Node) -> None:
        """Refuse values, scaled already, that are not rounded to e2m1 and packed in pairs.

        Raises:
            Refusal: they are not, or this cannot be shown.
        """
        reached = proof.dependants(self.needed, [end]) - {end}
        after = [node for node in self.needed if node in reached]
        before = {self.region.output, *self.needed} - {end} - reached
        for node in after:
            if any(source in before and not is_size(source) for source in node.all_input_nodes):
                raise Refusal("what is packed does not depend on scaled values alone", node, near=True)
        like = self.sample.values[end]
        origin: Origin = proof.origins(after, {end: proof.start(like)}, self.sample.values)[self.quantised]
        pairs = bool((origin.last - origin.first == 1).all())
        if not pairs or bool((origin.formula != origin.formula.flatten()[:1]).any()):
            raise Refusal("values are packed otherwise than in pairs", self.quantised, near=True)
        numbers = [float(a) for node in after for a in node.args if isinstance(a, (int, float))]
        numbers += [number for made in self.inputs.constants.values() for number in made.float().flatten().tolist()]
        tried = every_scaled(numbers)
        given = {node: made for node, made in self.sample.values.items() if node not in reached}
        x = self.sample.values[self.region.output]
        for start in range(0, len(tried), like.numel()):
            made = cycled(tried, start, like.numel())
            given[end] = made.view(like.shape)
            got = run(after, self.region.output, self.inputs, x, (), self.wide, given)
            if not same_bits(got[self.quantised], pack_e2m1(encode_e2m1(made))):
                raise Refusal("some scaled values are not rounded as e2m1", self.quantised, near=True)


def _is_library(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in ("aten", "prims")


def _fits(name: str, got: Tensor, wanted: Tensor) -> bool:
    if name == "unrounded":
        return proof.same_scaled(got.float(), wanted)
    if torch.uint8 in (got.dtype, wanted.dtype):
        return same_bits(got, wanted)
    return same_bits(got.double(), wanted.double())


def _narrows(node: Node) -> bool:
    source = node.all_input_nodes[0]
    return dtype_of(node) in FP8_DTYPES and dtype_of(source) in (torch.float32, torch.float64, *LOW)
