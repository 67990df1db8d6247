"""Finds out which quantiser a region is: compares its runs, bit for bit, with the reference quantisers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from vattn.passes import proof
from vattn.passes import region_moves as moves
from vattn.passes.near_miss import dynamic_ways, first_difference, static_ways
from vattn.passes.ops import REORDERS, meaning, op_name
from vattn.passes.output_quant.prove_scales import ScaleProver
from vattn.passes.output_quant.quantisers import Quantiser, quantisers
from vattn.passes.probe import Inputs, Sample, constant_scales, samples
from vattn.passes.prove import Prover
from vattn.passes.region import Match, Refusal, Region, dtype_of
from vattn.passes.region_precision import LOW, ROUNDED, roundings
from vattn.passes.region_run import same_bits
from vattn.quantization import codecs as quantization
from vattn.quantization.formats import MODEL_DTYPES, OUTPUT_FORMATS

_LAYOUTS = ("plain", "transposed", "swizzled", "moved")
_MOST_FLOORS = 24
_SAMPLES_TO_EXPLAIN = 8


@dataclass
class _Candidate:
    """A quantiser that agrees with all runs of the region so far.

    Attributes:
        scale: as in `Match`.
        block_scales: which nodes hold the computed scales, and how; `None` before the first run.
    """

    way: Quantiser
    scale: int | float | None
    factor: float = 1.0
    block_scales: dict[int, frozenset[str]] | None = field(default=None)


class Classifier:
    """Compares one quantised tensor of a region with the quantisers of the op.

    Args:
        nodes: the part of the region to run, `quantised` included.
        dtype: name of the model dtype.
    """

    def __init__(self, region: Region, quantised: Node, nodes: list[Node], inputs: Inputs, dtype: str) -> None:
        self.region, self.quantised, self.nodes, self.inputs = region, quantised, nodes, inputs
        self.dtype = dtype
        self.reorders = not REORDERS.isdisjoint(map(meaning, nodes))
        self.same_as_codes = [n for n in nodes if dtype_of(n) == dtype_of(quantised)]
        self.packed = dtype_of(quantised) == torch.uint8
        self.integers = dtype_of(quantised) == torch.int8
        self.limits = tuple({f.limit: None for f in OUTPUT_FORMATS.values() if f.container is dtype_of(quantised)})
        self.inverts = any(_inverts(node, inputs) for node in nodes)
        self.chooses = "choice" in map(meaning, nodes)
        self.needed = region.ancestors([quantised])
        self.rounded = proof.rounded(self.needed, region.output, self.integers)
        if self.packed:
            self.rounded = [(node, is_scaled) for node, is_scaled in self.rounded if not is_scaled]
        self.conditions = proof.Conditions((*inputs.derived, *self.needed), [region.output, *inputs.roots])
        self._places: dict[int, moves.Positions] = {}

    def classify(self) -> Match:
        """Return the format in which the region writes the quantised tensor.

        Raises:
            Refusal: in none.
        """
        certain, doubtful = roundings(self.nodes)
        left, seen = self._left(None, certain)
        widths = [certain]
        if doubtful and (left or self._left(None, certain | doubtful)[0]):
            wide = certain | doubtful
            if left:
                agreeing = self._left([replace(c) for c in left], wide)[0]
                widths += [wide] if agreeing else []
                left = agreeing or self._but_for_the_floor(left, wide)
            if not left:
                raise Refusal(ROUNDED, next(n for n in self.nodes if n in doubtful), near=True)
        if not left:
            raise self._differs(seen)
        found = self._proven(sorted(left, key=lambda c: not c.block_scales), seen, widths[0])
        for unrounded in widths[1:]:
            try:
                self._prove(found, seen, unrounded)
            except Refusal:
                raise Refusal(ROUNDED, next(n for n in self.nodes if n in doubtful), near=True) from None
        return self._match(found, seen[0])

    def _differs(self, seen: list[Sample]) -> Refusal:
        odd = first_difference(self.needed, self.region.output, seen) or self.quantised
        return Refusal(f"{self._why(seen)}; first differs at {op_name(odd.target) or odd.name}", odd, near=True)

    def _is_static(self, candidate: _Candidate) -> bool:
        return candidate.way.fmt.static_scale and not self.packed

    def _proven(self, left: list[_Candidate], seen: list[Sample], wide: frozenset[Node]) -> _Candidate:
        """Return the first candidate, or of an op of a library, which no structure tells apart, the one that is proven.

        Raises:
            Refusal: it is not.
        """
        by_structure = all(is_scaled for _, is_scaled in self.rounded)
        *others, last = left[:1] if by_structure else left
        for found in others:
            with suppress(Refusal):
                self._prove(found, seen, wide)
                return found
        self._prove(last, seen, wide)
        return last

    def _prove(self, found: _Candidate, seen: list[Sample], wide: frozenset[Node]) -> None:
        """Refuse a region that differs from the quantiser that was found, on inputs that were not run.

        Raises:
            Refusal: it is not, or this cannot be shown.
        """
        region = self.region, self.quantised, self.nodes, self.inputs, self.dtype, wide

        def check(sample: Sample) -> None:
            self.conditions.see(sample.values)
            if not self._agrees(found, sample):
                raise self._differs([sample])

        if self._is_static(found):
            Prover(*region).static(seen[0], check)
        else:
            ends = [node for node, is_scaled in self.rounded if not is_scaled]
            ends = ends or (self._find_scaled(found, seen) if self.packed else [node for node, _ in self.rounded])
            held = {self.nodes[index] for index in found.block_scales or ()}
            scale_of = partial(self._scale, found)
            prover = ScaleProver(
                *region, way=found.way, scale_of=scale_of, held=held, ends=ends, check=check, sample=seen[0]
            )
            prover.prove()
        self.conditions.check()

    def _find_scaled(self, found: _Candidate, seen: list[Sample]) -> list[Node]:
        """Return the first node that holds what a packed format rounds, bit for bit from here on.

        Raises:
            Refusal: none does.
        """
        left = [node for node in self.needed if dtype_of(node) == torch.float32]
        for sample in seen:
            scale = self._scale(found, sample.values)
            scaled = found.way.scaled(sample.rows, scale, found.way(sample.rows, scale)[1])
            left = [node for node in left if self._holds(node, scaled, sample, same_bits)]
        if not left:
            raise Refusal("no node holds the scaled values before they are rounded", self.quantised, near=True)
        self.rounded = [(left[0], True)]
        return left[:1]

    def _but_for_the_floor(self, left: list[_Candidate], wide: frozenset[Node]) -> list[_Candidate]:
        """Return the candidates that agree without roundings too, apart from a floor that is rounded to bf16 or fp16.

        Whether generated code rounds the floor shows only where all values are smaller; the op does, as eager code,
        which must agree everywhere.
        """
        unrounded = {way.same_but_floor() for way in (candidate.way for candidate in self._left(None, wide)[0])}
        floored = [c for c in left if c.way.min_scale and c.way.same_but_floor() in unrounded]
        return self._left([replace(c) for c in floored], frozenset())[0] if floored else []

    def _left(self, left: list[_Candidate] | None, wide: frozenset[Node]) -> tuple[list[_Candidate], list[Sample]]:
        """Return the candidates that agree with every run, and the first runs."""
        seen: list[Sample] = []

        def every() -> bool:
            return not all(self._is_static(candidate) for candidate in left or ())

        def few() -> bool:
            return self.reorders and not self._is_whole(seen[0])

        runs = samples(self.region, self.nodes, self.inputs, self.dtype, wide, every, self.packed, few)
        for sample in runs:
            if len(seen) < _SAMPLES_TO_EXPLAIN:
                seen.append(sample)
            self.conditions.see(sample.values)
            if left is None:
                left = list(self._candidates(sample))
            left = [candidate for candidate in left if self._agrees(candidate, sample)]
            if left:
                codes = sample.values[self.quantised]
                self.same_as_codes = [n for n in self.same_as_codes if same_bits(sample.values[n], codes)]
            elif len(seen) == _SAMPLES_TO_EXPLAIN:
                break
        return left or [], seen

    def places(self, sample: Sample) -> moves.Positions:
        """Return the positions of the elements of each node in a sample's output; empty if nothing is reordered."""
        if not self.reorders:
            return {}
        count = sample.rows.shape[0]
        if count not in self._places:
            self._places[count] = moves.positions(self.nodes, self.region.output, sample.values)
        return self._places[count]

    def _is_whole(self, sample: Sample) -> bool:
        """Return whether the codes are known to be those of all values, in order."""
        place, values = self.places(sample).get(self.quantised), sample.rows.numel()
        return place is not None and moves.is_whole(place, values, values // place.numel())

    def _candidates(self, sample: Sample) -> Iterator[_Candidate]:
        constants = [] if self.inputs.roots else constant_scales(self.nodes, self.inputs)
        factors = [1.0]
        for number in constant_scales(self.nodes, self.inputs):
            if self.inputs.roots and number != 1.0 and torch.frexp(torch.tensor(number))[0] == 0.5:
                factors += [number, 1 / number]
        columns = sample.rows.shape[1]
        floors = self._floors(sample, constants)
        for way in quantisers(columns, self.quantised, floors, self.chooses, self.inverts):
            if not way.fmt.static_scale:
                if not self.inputs.roots:
                    yield _Candidate(way, None)
            elif self.inputs.roots:
                for factor in factors:
                    for index in range(len(self.inputs.scales)):
                        yield _Candidate(way, index, factor)
            else:
                for constant in constants:
                    yield _Candidate(way, constant)

    def _floors(self, sample: Sample, numbers: Sequence[float]) -> list[float | None]:
        """Return possible least computed scales: numbers of the region, and the scale of a row of zeros."""
        floors: dict[float | None, None] = {None: None, 0.0: None}
        for number in numbers:
            exact, rounded = torch.tensor(number), torch.tensor(number).to(MODEL_DTYPES[self.dtype]).float()
            for least in (exact, rounded, *(at / limit for at in (exact, rounded) for limit in self.limits)):
                if 0 < float(least) < 1:
                    floors[float(least)] = None
        tokens, columns = sample.rows.shape
        at = int((sample.rows == 0).all(1).int().argmax())
        for node in self.nodes:
            val, place = sample.values[node], self.places(sample).get(node)
            floats = isinstance(val, Tensor) and val.dtype in (torch.float32, *LOW)
            if not floats or val.numel() > tokens * columns / 8:
                continue
            zeros = val.reshape(tokens, -1)[at, :1] if val.numel() % tokens == 0 else val.flatten()[:1]
            if isinstance(place, Tensor) and place.shape == val.shape:
                zeros = val[place // columns == at].flatten()[:1]
            for least in (zeros.float(), *(zeros.float() / limit for limit in self.limits)):
                if least.numel() and 0 < float(least) < float("inf"):
                    floors[float(least)] = None
        return list(floors)[:_MOST_FLOORS]

    def _scale(self, candidate: _Candidate, values: dict[Node, Any]) -> float:
        """Return the static scale in a run, 0 if there is none."""
        if isinstance(candidate.scale, int):
            return float(values[self.inputs.scales[candidate.scale]]) * candidate.factor
        return candidate.scale or 0.0

    def _agrees(self, candidate: _Candidate, sample: Sample) -> bool:
        scale = self._scale(candidate, sample.values)
        codes, scales = candidate.way(sample.rows, scale)
        if not same_bits(self._moved(codes, sample), sample.values[self.quantised]):
            return False
        scaled = candidate.way.scaled(sample.rows, scale, scales) if self.rounded else sample.rows
        for node, is_scaled in self.rounded:
            same: Callable[[Tensor, Tensor], bool] = same_bits
            if is_scaled and not self.packed:
                same = proof.same_rounded if self.integers else proof.same_scaled
            wanted = scaled if is_scaled else sample.rows.float()
            if not self._holds(node, wanted, sample, same):
                return False
        if scales is not None:
            held = candidate.block_scales
            if held is None:
                held = dict.fromkeys(range(len(self.nodes)), frozenset(_LAYOUTS))
            found = {index: ways & self._layouts(self.nodes[index], scales, sample) for index, ways in held.items()}
            candidate.block_scales = {index: ways for index, ways in found.items() if ways}
        return True

    def _holds(self, node: Node, wanted: Tensor, sample: Sample, same: Callable[[Tensor, Tensor], bool]) -> bool:
        """Return whether a node holds the same as `wanted` does at its places."""
        got, place = sample.values[node], self.places(sample).get(node)
        wanted = wanted.flatten() if place is None else wanted.flatten()[place.flatten()]
        return got.numel() == wanted.numel() and same(got.float().flatten(), wanted)

    def _moved(self, codes: Tensor, sample: Sample) -> Tensor:
        place = self.places(sample).get(self.quantised)
        step = sample.rows.numel() // codes.numel()
        if place is None or moves.is_whole(place, sample.rows.numel(), step):
            return codes
        return codes.flatten()[place // step]

    def _layouts(self, node: Node, scales: Tensor, sample: Sample) -> frozenset[str]:
        """Return the layouts in which a node may hold computed scales, empty if it holds none."""
        got = sample.values[node]
        if not isinstance(got, Tensor):
            return frozenset()
        layouts = {"plain": scales, "transposed": scales.t()}
        if scales.dtype == torch.float8_e4m3fn:
            layouts["swizzled"] = quantization.swizzle_block_scales(scales)
        place = self.places(sample).get(node)
        if isinstance(place, Tensor) and place.shape == got.shape and got.numel() * 8 <= sample.rows.numel():
            columns = sample.rows.shape[1]
            group = columns // scales.shape[1]
            layouts["moved"] = scales[place // columns, place % columns // group]
        return frozenset(name for name, wanted in layouts.items() if _holds(got, wanted))

    def _match(self, found: _Candidate, sample: Sample) -> Match:
        same = set(self.same_as_codes)
        codes = tuple(index for index, node in enumerate(self.nodes) if node in same)
        fmt = found.way.fmt
        place = self.places(sample).get(self.quantised)
        moved = not moves.is_whole(place, sample.rows.numel(), 2 if fmt.container is torch.uint8 else 1)
        if moved and fmt.container is torch.uint8:
            raise Refusal("the packed codes are sliced or transposed before they are packed", self.quantised, near=True)
        scales = tuple((i, next(filter(ways.__contains__, _LAYOUTS))) for i, ways in (found.block_scales or {}).items())
        return Match(
            fmt.name,
            found.way.arithmetic,
            found.way.min_scale,
            found.scale,
            codes,
            scales,
            found.factor,
            moved,
            found.way.floor,
        )

    def _why(self, seen: list[Sample]) -> str:
        """Return why no quantiser of the op agrees: the name of a well-known one that does, or what else is known."""
        scales: list[Any] = [None]
        if self.inputs.roots:
            scales = list(range(len(self.inputs.scales)))
        else:
            scales += constant_scales(self.nodes, self.inputs)
        floors = self._floors(seen[0], constant_scales(self.nodes, self.inputs))

        def is_it(way: Callable[..., Tensor], scale: Any, floor: float | None) -> bool:
            for sample in seen:
                step = float(sample.values[self.inputs.scales[scale]]) if isinstance(scale, int) else scale or 1.0
                made = way(sample.rows, step, floor)
                if not same_bits(self._moved(made, sample), sample.values[self.quantised]):
                    return False
            return True

        for reason, way in static_ways(dtype_of(self.quantised)).items():
            if any(is_it(way, scale, None) for scale in scales):
                return reason
        for reason, way in dynamic_ways(seen[0].rows.shape[1], dtype_of(self.quantised)).items():
            if any(is_it(way, None, floor) for floor in floors):
                return reason
        if dtype_of(self.quantised) not in (torch.float8_e4m3fn, torch.int8, torch.uint8):
            return f"it casts to {dtype_of(self.quantised)}; output formats hold float8_e4m3fn, int8 or packed e2m1"
        finite = [sample.values[self.quantised].float() for sample in seen if bool(sample.rows.isfinite().all())]
        if not all(bool(codes.isfinite().all()) for codes in finite):
            return "finite values become NaN: clamp to +-448 before the cast"
        name = self._of_finite_groups(seen, floors)
        if name:
            return f"of finite values that were tried it makes {name}, of those beside NaN or infinities something else"
        return "its values are those of no supported format"

    def _of_finite_groups(self, seen: list[Sample], floors: Sequence[float | None]) -> str:
        """Return the format with computed scales that agrees on groups of finite values, empty if there is none."""
        for way in quantisers(seen[0].rows.shape[1], self.quantised, floors):
            fp8 = way.fmt.container == torch.float8_e4m3fn and not way.fmt.static_scale
            if fp8 and all(self._agrees_in_finite_groups(way, sample) for sample in seen):
                return way.fmt.name
        return ""

    def _agrees_in_finite_groups(self, way: Quantiser, sample: Sample) -> bool:
        got, (tokens, columns) = sample.values[self.quantised], sample.rows.shape
        groups = tokens, -1, columns if way.fmt.group_size < 0 else way.fmt.group_size
        codes, _ = way(sample.rows, 0.0)
        if got.numel() != codes.numel():
            return False
        finite = sample.rows.reshape(groups).isfinite().all(-1)
        return same_bits(got.reshape(groups)[finite], codes.reshape(groups)[finite])


def _inverts(node: Node, inputs: Inputs) -> bool:
    """Return whether a node may be the reciprocal of a maximum, or a number divided by one."""
    name, first = op_name(node.target), node.args[0]
    filled = isinstance(first, Node) and (first in inputs.constants or meaning(first) == "fill")
    return name in ("reciprocal", "pow") or (filled and name in ("div", "true_divide"))


def _holds(got: Tensor, scales: Tensor) -> bool:
    if got.numel() != scales.numel():
        return False
    if torch.uint8 in (got.dtype, scales.dtype) and got.itemsize == 1:
        got, scales = (held.contiguous().view(torch.uint8) for held in (got, scales))
    return same_bits(got, scales)
