"""Proves that a region which agreed with a quantiser in the runs so far agrees with it elsewhere.

Outputs with a given scale and queries are proven here, outputs with computed scales in `output_quant.prove_scales`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from vattn.passes import proof
from vattn.passes.probe import Inputs, Sample, exact_scales, run
from vattn.passes.probe_inputs import cycled, every_value, scales_near
from vattn.passes.proof import Origin
from vattn.passes.region import Refusal, Region, value
from vattn.passes.region_tokens import possible_count, token_counts
from vattn.quantization.formats import MODEL_DTYPES

_MOST_ELEMENTS = 1 << 25
"""How many elements one pass over every value may take."""
Check = Callable[[Sample], None]

_MOST_RUNS = 8
"""Runs under one scale beyond which not every value is run under every scale."""


class Prover:
    """Proves what one quantised tensor of a region is.

    Args:
        nodes: the part of the region that was run.
        dtype: name of the model dtype.
        wide: nodes in bf16 or fp16 that stay in fp32.

    Attributes:
        needed: nodes that the quantised tensor is computed from, itself included.
        rounds: values for all roots, one list a run; those of a run differ, since equal ones would hide which root is
            used.
        counted: the node `[T, H, V]` of which the tokens are counted.
    """

    def __init__(
        self, region: Region, quantised: Node, nodes: list[Node], inputs: Inputs, dtype: str, wide: frozenset[Node]
    ) -> None:
        self.region, self.quantised, self.nodes, self.inputs = region, quantised, nodes, inputs
        self.dtype, self.wide = dtype, wide
        self.needed, self.counted = region.ancestors([quantised]), region.output
        scales, count = exact_scales(nodes, inputs), len(inputs.roots)
        each = range(len(scales) if count else 1)
        self.rounds: list[list[Any]] = [
            [scales[(first + index) % len(scales)] for index in range(count)] for first in each
        ]

    def run(self, x: Tensor, scales: Sequence[Any] | None = None) -> Sample:
        """Run the region on rows `[T, N]`, with the first values of the roots if none are given."""
        scales = self.rounds[0] if scales is None else scales
        shaped = x.view(len(x), *map(int, value(self.region.output).shape[1:]))
        return Sample(x, run(self.nodes, self.region.output, self.inputs, shaped, scales, self.wide))

    def rounds_at(self, numbers: Collection[float]) -> list[list[Any]]:
        """Return `rounds`, and runs under scales by which some value comes out as each of some numbers."""
        roots = self.inputs.roots
        return self.rounds + ([[scale] * len(roots) for scale in scales_near(numbers)] if roots else [])

    def check_roots(self, sample: Sample) -> set[float]:
        """Return the numbers that given scales are compared with.

        Raises:
            Refusal: what is made of them is more than scaled, limited and selected.
        """
        roots = self.inputs.roots
        return proof.check_scaled(self.inputs.derived, roots, roots, sample.values)

    def static(self, sample: Sample, check: Callable[[Sample], None]) -> None:
        """Prove a quantiser with a static scale.

        Args:
            sample: one run.
            check: refuses a run that differs from the quantiser.

        Raises:
            Refusal: it is another, or this cannot be shown.
        """
        unknown = [*self.inputs.roots, *self.inputs.derived]
        scaled = proof.check_scaled(self.needed, [self.region.output], unknown, sample.values)
        numbers = self.check_roots(sample) | scaled
        rounds = self.rounds_at(numbers)
        for x, many in self._every_value():
            for scales in rounds[:1] if many else rounds:
                check(self.run(x, scales))

    def _every_value(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield rows that hold every value of the model dtype for each formula; and whether these are many."""
        values = every_value(MODEL_DTYPES[self.dtype])
        tokens, heads, width = value(self.counted).shape
        columns = int(heads) * int(width)
        count = token_counts((*self.inputs.derived, *self.inputs.sizes, *self.nodes), self.counted)[0]
        count = possible_count(tokens, count + len(values) // columns)
        x = torch.zeros(count * columns, dtype=values.dtype)
        origin = self._origin(self._origins(self.run(x.view(count, -1))))
        formulas, place = origin.formula.flatten(), origin.first.flatten()
        parts = [place[formulas == formula] for formula in formulas.unique()[: _MOST_ELEMENTS // len(values)]]
        runs = -(-len(values) // min(map(len, parts)))
        if runs * len(x) > _MOST_ELEMENTS or sum(map(len, parts)) < len(place):
            raise Refusal("it has too many parts to try every value in each", self.quantised, near=True)
        for index in range(runs):
            for part in parts:
                x[part] = cycled(values, index * len(part), len(part))
            yield x.clone().view(count, -1), runs > _MOST_RUNS

    def _origins(self, sample: Sample, known: dict[Node, Origin] | None = None) -> dict[Node, Any]:
        """Return where the elements of each node come from.

        Args:
            known: origins of nodes to go no further back than.
        """
        start = proof.start(sample.values[self.region.output])
        return proof.origins(self.needed, {self.region.output: start, **(known or {})}, sample.values)

    def _origin(self, found: dict[Node, Any], end: Node | None = None) -> Origin:
        """Return where the elements of a node come from, each from one place.

        Args:
            found: a result of `_origins`.
            end: the node; the quantised tensor if `None`.

        Raises:
            Refusal: not each from one place.
        """
        origin: Origin = found[end or self.quantised]
        if bool((origin.last != origin.first).any()):
            node = proof.first_unknown(self.needed, found)
            raise Refusal("a code depends on other values than its own", node or self.quantised, near=True)
        return origin
