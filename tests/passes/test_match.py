"""Which quantisers, scales and floors are tried for a region, and where its scales are found, without a proof."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fx_programs import COLUMNS
from test_by_hand import template
from torch import Tensor
from torch.fx import Node

from vattn.passes import probe
from vattn.passes.output_quant import find, match
from vattn.passes.output_quant.match import Classifier
from vattn.passes.output_quant.quantisers import OUTPUT_FACTORS, Quantiser, quantisers
from vattn.passes.probe import Sample, samples
from vattn.passes.probe_inputs import PROBE_SCALES
from vattn.passes.region import attention_calls, describe, find_region
from vattn.quantization.codecs import swizzle_block_scales
from vattn.quantization.formats import OUTPUT_FORMATS

E4M3 = torch.float8_e4m3fn
Program = Callable[[Tensor, Tensor], Any]


def rounded(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(E4M3)


def tokens(floor: float = 1e-10) -> Program:
    def program(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        scale = (o.float().abs().amax(-1, keepdim=True) / 448).clamp(min=floor)
        return rounded(o.float() / scale), scale

    return program


def classifier_of(program: Program) -> tuple[Classifier, Sample]:
    """Return a classifier, and the first of its samples with zeros in another row than the first."""
    gm = template().behind(program)
    (call,) = attention_calls(gm.graph)
    region = find_region(describe(*call).output)
    quantised = region.quantised[-1]
    inputs, nodes = find._probed(region, quantised)
    made = Classifier(region, quantised, nodes, inputs, "bfloat16")
    runs = samples(region, nodes, inputs, "bfloat16", frozenset(), lambda: False, made.packed, lambda: made.reorders)
    return made, next(run for run in runs if bool(run.rows[0].any()))


def fp32(number: float) -> float:
    return float(torch.tensor(number))


def test_floors_are_small_numbers_of_the_region_and_what_zeros_give() -> None:
    made, sample = classifier_of(tokens(0.007))
    low, limit = float(torch.tensor(0.3).bfloat16()), torch.tensor(448.0)
    found = made._floors(sample, [0.3, 1.0, 2.0])
    wanted = [None, 0.0, fp32(0.3), low, float(torch.tensor(0.3) / limit), float(torch.tensor(low) / limit)]
    wanted += [float(torch.tensor(number) / limit) for number in (1.0, 2.0)]
    assert found == [*wanted, fp32(0.007), float(torch.tensor(0.007) / limit)]
    assert made._floors(sample, []) == [None, 0.0, *found[-2:]]
    assert len(made._floors(sample, [number / 100 for number in range(1, 99)])) == 24


def test_floors_of_a_moved_output_are_those_of_its_zeros() -> None:
    def program(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return tokens(0.007)(o.view(-1, 4, 64).flip(1).flatten(1), s)

    made, sample = classifier_of(program)
    assert made._floors(sample, []) == [None, 0.0, fp32(0.007), float(torch.tensor(0.007) / 448)]


GIVEN: dict[str, tuple[Program, list[float]]] = {
    "alone": (lambda o, s: rounded(o.float() / s), [1.0]),
    "times a power of two": (lambda o, s: rounded(o.float() / s * 4), [1.0, 4.0, 0.25]),
    "times another number": (lambda o, s: rounded(o.float() / s * 3), [1.0]),
}


@pytest.mark.parametrize("name", GIVEN)
def test_given_scales_are_tried_with_powers_of_two(name: str) -> None:
    program, factors = GIVEN[name]
    made, sample = classifier_of(program)
    tried = list(made._candidates(sample))
    assert {one.way.fmt.static_scale for one in tried} == {True} and {one.scale for one in tried} == {0}
    first = [one.factor for one in tried if one.way == tried[0].way]
    assert first == factors
    assert made._scale(tried[-1], sample.values) == fp32(float(sample.values[made.inputs.scales[0]])) * factors[-1]


def test_constant_scales_are_tried_beside_computed_ones() -> None:
    made, sample = classifier_of(lambda o, s: rounded(o.float() / 0.02))
    tried = list(made._candidates(sample))
    constants = [one.scale for one in tried if one.way.fmt.static_scale and one.way.arithmetic == "divide"]
    assert constants == [1.0, fp32(0.02)] and {one.factor for one in tried} == {1.0}
    assert {one.scale for one in tried if not one.way.fmt.static_scale} == {None}
    assert [made._scale(one, {}) for one in (tried[0], next(c for c in tried if c.scale is None))] == [1.0, 0.0]


def test_rows_are_run_under_every_scale_of_every_root(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[Any, int]] = []
    given, _ = classifier_of(lambda o, s: rounded(o.float() / s))
    number, _ = classifier_of(lambda o, s: rounded(o.float() / 0.02 * 3))
    monkeypatch.setattr(probe, "probe_outputs", lambda o, d, steps, round_, c: runs.append((steps, round_)) or [])

    def steps_of(made: Classifier, roots: int) -> list[Any]:
        runs.clear()
        inputs = replace(made.inputs, roots=made.inputs.roots * roots)
        assert not list(samples(made.region, made.nodes, inputs, "bfloat16", frozenset(), lambda: False))
        assert [round_ for _, round_ in runs] == list(range(len(runs)))
        return [steps for steps, _ in runs]

    scales = [fp32(scale) for scale in PROBE_SCALES]
    assert steps_of(given, 1) == [(scale, 1 / scale) for scale in scales]
    turned = scales[1:] + scales[:1]
    assert steps_of(given, 2) == [(scale, 1 / scale) for scale in scales + turned]
    assert steps_of(number, 1) == [(scale,) for scale in (PROBE_SCALES[0], 1.0, fp32(0.02), 3.0)]


def test_factors_have_least_maxima_alone() -> None:
    made, _ = classifier_of(tokens())
    for inverts in (True, False):
        tried = list(quantisers(256, made.quantised, [None, 0.1], inverts=inverts))
        factors = [way for way in tried if way.arithmetic in OUTPUT_FACTORS]
        assert {(way.min_scale, way.floor) for way in factors} == ({(0.1, "maximum")} if inverts else set())
        assert {way.arithmetic for way in tried} - {*OUTPUT_FACTORS} == {"divide", "multiply"}


def named(fmt: str) -> Quantiser:
    return Quantiser(OUTPUT_FORMATS[fmt])


def test_scales_are_found_in_every_layout() -> None:
    def program(o: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        x = o.float().view(-1, 4, 64)
        scale = x.abs().amax(-1).clamp(min=1e-10) / 448
        return rounded(x / scale.unsqueeze(-1)).view(-1, 256), scale, scale.t(), scale[:, :3], scale * 2

    made, sample = classifier_of(program)
    _, scales = named("fp8_group64")(sample.rows, 0.0)
    assert scales is not None
    small = {
        node.name: node
        for node in made.nodes
        if sample.values[node].numel() in (scales.numel(), scales.numel() * 3 // 4)
    }
    found = {name: made._layouts(node, scales, sample) for name, node in small.items()}
    held = {name: ways for name, ways in found.items() if ways}
    plain, moved = frozenset({"plain", "moved"}), frozenset({"moved"})
    assert held == {"div": plain, "unsqueeze": plain, "permute": {"transposed", "moved"}, "slice_2": moved}
    assert made._layouts(made.quantised, scales, sample) == frozenset()


def test_scales_are_held_bit_for_bit() -> None:
    codes = torch.arange(16, dtype=torch.uint8).view(4, 4)
    scales = codes.view(E4M3)
    assert match._holds(scales, scales) and match._holds(codes, scales) and match._holds(scales, codes)
    assert match._holds(scales.flatten(), scales) and not match._holds(scales.flatten()[1:], scales)
    assert not match._holds(scales.t(), scales) and match._holds(codes.t().contiguous(), scales.t())
    assert not match._holds(codes.int(), scales) and not match._holds(scales.float(), scales)
    assert not match._holds(swizzle_block_scales(scales), scales)


INVERTS: dict[str, tuple[Program, bool]] = {
    "reciprocal": (lambda o, s: o.reciprocal(), True),
    "pow": (lambda o, s: o.pow(-1), True),
    "over": (lambda o, s: torch.full((), 448.0) / o, True),
    "times": (lambda o, s: torch.full((), 448.0) * o, False),
    "by a number": (lambda o, s: o / 448, False),
}


@pytest.mark.parametrize("name", INVERTS)
def test_reciprocals_are_noticed(name: str) -> None:
    program, wanted = INVERTS[name]
    nodes: list[Node] = [node for node in template().behind(program).graph.nodes if node.meta.get("site")]
    inputs = find.probe.find_inputs([nodes[-1]], nodes[-1].all_input_nodes[-1])
    assert match._inverts(nodes[-1], inputs) == wanted


def test_finite_groups_are_compared_apart() -> None:
    def program(o: Tensor, s: Tensor) -> Tensor:
        whole = torch.where(o.isfinite(), o, torch.nan).float().view(-1, 4, 64)
        return rounded(whole / (whole.abs().amax(-1, keepdim=True) / 448)).view(-1, COLUMNS)

    made, sample = classifier_of(program)
    finite = sample.rows[:1].float() + 1.5
    values = {**sample.values, made.quantised: named("fp8_group64")(finite, 0.0)[0]}
    same = Sample(finite, values)
    assert made._agrees_in_finite_groups(named("fp8_group64"), same)
    broken = finite.clone()
    broken[0, 70] = torch.inf
    assert made._agrees_in_finite_groups(named("fp8_group64"), Sample(broken, values))
    broken[0, 3] = -9.0
    assert not made._agrees_in_finite_groups(named("fp8_group64"), Sample(broken, values))
    assert made._agrees_in_finite_groups(named("fp8_per_token"), same)  # all groups have one maximum
    assert not made._agrees_in_finite_groups(named("fp8_group64"), Sample(finite.repeat(2, 1), values))
