"""What the proofs know about single nodes: where elements come from, which numbers matter, what was met in runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fx_programs import COLUMNS, run
from test_by_hand import template
from torch import Tensor
from torch.fx import Node

from vattn.passes import proof
from vattn.passes.proof import Conditions, Origin
from vattn.passes.region import Refusal

E4M3 = torch.float8_e4m3fn
TOKENS = 3
INF = torch.inf

Program = Callable[[Tensor, Tensor], Any]


class Traced:
    """A program behind attention, run once."""

    def __init__(self, program: Program, output: Tensor | None = None) -> None:
        gm = template().behind(program)
        self.nodes = [node for node in gm.graph.nodes if node.meta.get("site")]
        made = torch.randn(TOKENS, COLUMNS, generator=torch.Generator()).bfloat16() if output is None else output
        _, self.values = run(gm, made, torch.tensor([0.3]), keep=True)
        (end,) = gm.graph.find_nodes(op="output")
        self.ends: list[Node] = list(end.args[0])
        names = {node.name: node for node in gm.graph.nodes}
        self.output, self.scale = names[template().flat.name], names[template().scale.name]

    def origin(self, end: int = 0) -> Origin:
        known = {self.output: proof.start(self.values[self.output])}
        found = proof.origins(self.nodes, known, self.values)[self.ends[end]]
        assert isinstance(found, Origin)
        return found

    def numbers(self) -> set[float]:
        return proof.check_scaled(self.nodes, [self.output], [self.scale], self.values)

    def gathered(self, end: int = 0) -> Any:
        weights = torch.arange(TOKENS * COLUMNS).view(TOKENS, COLUMNS)
        exact = {torch.bfloat16, torch.float32}
        return proof.gathered(self.nodes, self.output, weights, self.values, exact).get(self.ends[end])


PLACE = torch.arange(TOKENS * COLUMNS).view(TOKENS, COLUMNS)
COLUMN = torch.arange(COLUMNS)
MOVED: dict[str, tuple[Program, Tensor]] = {
    "multiplied": (lambda o, s: o * 2, PLACE),
    "flipped": (lambda o, s: o.flip(1).float() / s, PLACE.flip(1)),
    "transposed": (lambda o, s: o.t().exp(), PLACE.t()),
    "sliced": (lambda o, s: (o * s)[:, 100:], PLACE[:, 100:]),
    "split": (lambda o, s: o.split([56, 200], 1)[1] * s, PLACE[:, 56:]),
    "in heads": (lambda o, s: (o.view(-1, 4, 64) * 3).abs(), PLACE.view(-1, 4, 64)),
    "bits": (lambda o, s: o.view(torch.int16) & 7, PLACE),
    "stacked": (lambda o, s: torch.stack((o, o), 1), torch.stack((PLACE, PLACE), 1)),
    "a copy": (lambda o, s: torch.empty_like(o).copy_(o * s), PLACE),
    "our op": (lambda o, s: torch.ops.vattn.quant_fp8_static(o.float(), s), PLACE),
}


@pytest.mark.parametrize("name", MOVED)
def test_elements_of_one_value_have_its_place_and_one_formula(name: str) -> None:
    program, wanted = MOVED[name]
    origin = Traced(program).origin()
    assert torch.equal(origin.first, wanted) and torch.equal(origin.last, wanted)
    assert len(origin.formula.unique()) == 1


FORMULAS: dict[str, tuple[Program, Tensor]] = {
    "first token": (lambda o, s: torch.cat((o[:1] * 2, o[1:])), torch.arange(TOKENS)[:, None] == 0),
    "two factors": (lambda o, s: torch.cat((o[:1] * 2, o[1:] * 3)), torch.arange(TOKENS)[:, None] == 0),
    "one column": (lambda o, s: torch.where(torch.arange(256) == 17, o, o * s), COLUMN == 17),
    "constants of columns": (lambda o, s: o * torch.where(torch.arange(256) == 17, 1.5, 1.0), COLUMN == 17),
    "written columns": (lambda o, s: torch.slice_scatter(o * s, (o * s)[:, 40:] * 2, 1, 40), COLUMN >= 40),
    "a written token": (lambda o, s: torch.select_scatter(o * s, o[0], 0, 0), torch.arange(TOKENS)[:, None] == 0),
    "swapped operands": (lambda o, s: torch.cat(((o - s)[:1], (s - o)[1:])), torch.arange(TOKENS)[:, None] == 0),
    "two dtypes": (lambda o, s: torch.cat((o.half().float()[:1], o.float()[1:])), torch.arange(TOKENS)[:, None] == 0),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_elements_of_other_formulas_are_told_apart(name: str) -> None:
    program, apart = FORMULAS[name]
    formula = Traced(program).origin().formula
    apart = apart.expand(formula.shape)
    assert len(formula[apart].unique()) == len(formula[~apart].unique()) == 1 and len(formula.unique()) == 2


ROW = COLUMNS * torch.arange(TOKENS)
FULL = torch.zeros(TOKENS, dtype=torch.int64)
REACHES: dict[str, tuple[Program, Tensor, Tensor]] = {
    "amax": (lambda o, s: o.abs().amax(-1), ROW, ROW + 255),
    "amax, kept": (lambda o, s: o.abs().amax(-1, keepdim=True), ROW[:, None], ROW[:, None] + 255),
    "max of groups": (lambda o, s: o.view(-1, 4, 64).max(-1)[0], PLACE[:, ::64], PLACE[:, 63::64]),
    "of all": (lambda o, s: o.abs().amax(), torch.tensor(0), PLACE[-1, -1]),
    "by its row's maximum": (
        lambda o, s: o / o.amax(-1, keepdim=True), ROW[:, None].expand(-1, 256), ROW[:, None].expand(-1, 256) + 255,
    ),
    "two columns": (lambda o, s: o[:, 1:] * o[:, :-1], PLACE[:, :-1], PLACE[:, 1:]),
    "running": (lambda o, s: o.cumsum(1), PLACE * 0, PLACE * 0 + (1 << 40)),
    "the largest": (lambda o, s: o.topk(2)[0], PLACE[:, :2] * 0, PLACE[:, :2] * 0 + (1 << 40)),
    "by an index": (
        lambda o, s: o.gather(1, o.argmax(-1, keepdim=True)), PLACE[:, :1] * 0, PLACE[:, :1] * 0 + (1 << 40),
    ),
    "chosen by values": (
        lambda o, s: o.index_select(1, (o[0, :7] > 0).long()), PLACE[:, :7] * 0, PLACE[:, :7] * 0 + (1 << 40),
    ),
    "bytes": (lambda o, s: o.view(torch.uint8), PLACE.repeat(1, 2) * 0, PLACE.repeat(1, 2) * 0 + (1 << 40)),
}  # fmt: skip


@pytest.mark.parametrize("name", REACHES)
def test_elements_of_several_values_span_them(name: str) -> None:
    program, first, last = REACHES[name]
    traced = Traced(program)
    found = proof.origins(traced.nodes, {traced.output: proof.start(traced.values[traced.output])}, traced.values)[
        traced.ends[0]
    ]
    assert torch.equal(found.first, first) and torch.equal(found.last, last)
    assert proof.first_unknown(traced.nodes, {traced.ends[0]: found}) is traced.ends[0]


def test_a_value_of_one_place_is_known() -> None:
    traced = Traced(lambda o, s: o * 2)
    found = proof.origins(traced.nodes, {traced.output: proof.start(traced.values[traced.output])}, traced.values)
    assert proof.first_unknown(traced.nodes, found) is None


NUMBERS: dict[str, tuple[Program, set[float]]] = {
    "none": (lambda o, s: (o.float() / s).clamp(-448, 448).to(E4M3), set()),
    "limits": (lambda o, s: (o.float() / s).clamp(-240, 448), {240.0}),
    "compared": (lambda o, s: torch.where(o.float() / s > 3.7, 4.0, o.float() / s), {3.7, 4.0}),
    "before it is scaled": (lambda o, s: torch.where(o.float() > 3.7, 4.0, o.float()) / s, set()),
    "a tensor": (lambda o, s: torch.minimum(o.float() / s, torch.tensor(-5.5)), {5.5}),
    "factors": (lambda o, s: (o.float() / s) * 7.0, set()),
    "taken apart": (lambda o, s: (o.float() / s).split(128, 1)[1], set()),
    "any op of values": (lambda o, s: o.float().sin().cumsum(1) / s, set()),
    "of the scale": (lambda o, s: o.float() / s.clamp(min=0.25), set()),
    "codes": (lambda o, s: (o.float() / s).to(E4M3).float().sin(), set()),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_scaled_values_meet(name: str) -> None:
    program, wanted = NUMBERS[name]
    if name == "codes":
        with pytest.raises(Refusal, match="sin changes scaled values"):
            Traced(program).numbers()
    else:
        assert Traced(program).numbers() == wanted


CHANGED: dict[str, tuple[Program, str]] = {
    "a function": (lambda o, s: (o.float() / s).sin(), "sin"),
    "a sum": (lambda o, s: o.float() / s + 1.0, "add"),
    "a product of two": (lambda o, s: (o.float() / s) * (o.float() * s), "mul"),
    "a quotient of two": (lambda o, s: (o.float() / s) / (o.float() * s), "div"),
    "a maximum": (lambda o, s: (o.float() / s).amax(-1), "amax"),
    "rounding": (lambda o, s: (o.float() / s).round(), "round"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_scaled_values_are_scaled_limited_and_selected_alone(name: str) -> None:
    program, op = CHANGED[name]
    with pytest.raises(Refusal, match=f"{op} changes scaled values") as refused:
        Traced(program).numbers()
    assert refused.value.near and refused.value.node is not None


SUM = PLACE.sum(1)
GATHERED: dict[str, tuple[Program, Any]] = {
    "largest": (lambda o, s: o.abs().amax(-1), SUM),
    "kept": (lambda o, s: o.float().amax(-1, keepdim=True), SUM[:, None]),
    "in two steps": (lambda o, s: o.view(-1, 4, 64).abs().amax(-1).amax(-1), SUM),
    "max": (lambda o, s: o.abs().max(-1)[0], SUM),
    "both ends": (lambda o, s: torch.maximum(o.amax(-1), -o.amin(-1)), SUM),
    "two halves": (lambda o, s: torch.maximum(o[:, :99].amax(-1), o[:, 99:].amax(-1)), SUM),
    "one end twice": (lambda o, s: torch.maximum(o.amax(-1), o.amax(-1)), SUM),
    "above zero": (lambda o, s: o.amax(-1).clamp(min=0), SUM),
    "above a number": (lambda o, s: o.amax(-1).clamp(min=0.1), None),
    "above a tensor": (lambda o, s: torch.maximum(o.float().amax(-1), s), None),
    "positive": (lambda o, s: o.relu().amax(-1), SUM),
    "sorted": (lambda o, s: o.abs().sort(-1)[0][:, -1], SUM),
    "largest of some": (lambda o, s: o.abs().topk(2, -1)[0][:, 0], SUM),
    "the k-th": (lambda o, s: o.abs().kthvalue(256, -1)[0], SUM),
    "along tokens": (lambda o, s: o.abs().t().amax(0), SUM),
    "running": (lambda o, s: o.abs().cummax(1)[0][:, -1], SUM),
    "the first": (lambda o, s: o.abs()[:, 0], PLACE[:, 0]),
    "half": (lambda o, s: o[:, 128:].abs().amax(-1), PLACE[:, 128:].sum(1)),
    "padded": (lambda o, s: torch.cat((o, torch.zeros_like(o)), 1).amax(-1), SUM),
    "beside a sum": (
        lambda o, s: torch.stack((o.float().amax(-1), o.float().sum(-1)), 1).amax(-1),
        None,
    ),
    "scaled": (lambda o, s: (o * 2).amax(-1), None),
    "fewer bits": (lambda o, s: o.to(torch.float8_e5m2).float().abs().amax(-1), None),
    "a sum": (lambda o, s: o.abs().sum(-1), None),
    "bits": (lambda o, s: o.view(torch.int16).amax(-1), None),
}


@pytest.mark.parametrize("name", GATHERED)
def test_weights_of_the_values_behind_a_maximum(name: str) -> None:
    program, wanted = GATHERED[name]
    found = Traced(program).gathered()
    assert found is None if wanted is None else torch.equal(found, wanted)


def test_conditions_are_met_and_not() -> None:
    def program(o: Tensor, s: Tensor) -> Tensor:
        return torch.where(o > 0.5, o, o * 2)

    some = torch.ones(TOKENS, COLUMNS).bfloat16()
    for outputs, says in (([some], "always"), ([some * 0], "never"), ([some, some * 0], "")):
        traced = [Traced(program, output) for output in outputs]
        first = traced[0]
        conditions = Conditions(first.nodes, [first.output])
        for other in traced:
            conditions.see({node: other.values[twin] for node, twin in zip(first.nodes, other.nodes, strict=True)})
        if says:
            with pytest.raises(Refusal, match=f"gt is {says} true for the inputs that are tried") as refused:
                conditions.check()
            assert refused.value.near and refused.value.node in first.nodes
        else:
            conditions.check()
    first = Traced(lambda o, s: torch.where(o > 9, o, torch.where(o < -9, o, o * 2)))
    with pytest.raises(Refusal) as refused:
        Conditions(first.nodes, [first.output]).check()  # none was seen
    assert refused.value.node is next(n for n in first.nodes if n.meta["val"].dtype == torch.bool)
    first = Traced(lambda o, s: torch.where(torch.arange(256) > 300, o, o * 2))
    Conditions(first.nodes, [first.output]).check()  # of no value


def test_what_is_rounded_to_codes() -> None:
    def program(o: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        x = o.float() / s
        return x, x.to(E4M3).view(-1, 4, 64), torch.ops.vattn.quant_fp8_static(o.float(), s)

    traced = Traced(program)
    scaled, _, own = traced.ends
    assert proof.rounded(traced.nodes, traced.output) == [(scaled, True), (own.args[0], False)]
    split = Traced(lambda o, s: (o.split([56, 200], 1)[1] * s).to(E4M3))
    assert proof.rounded(split.nodes, split.output) == [(split.ends[0].args[0], True)]


SAME = [
    (500.0, 448.0), (-500.0, -448.0), (440.0, 448.0), (464.0, 432.0), (2.0**-12, 2.0**-13), (INF, 448.0), (3.0, 3.0),
    (torch.nan, torch.nan), (-(2.0**-12), -0.0), (432.0, 448.0),
]  # fmt: skip
OTHER = [
    (431.9, 448.0), (3.0, 3.0000002), (2.0**-11, 2.0**-12), (2.0**-12, -(2.0**-12)), (torch.nan, 448.0),
    (-448.0, 448.0), (0.0, -0.0), (500.0, torch.nan),
]  # fmt: skip


@pytest.mark.skipif(not proof.SATURATES, reason="casts make NaN of large values")
def test_scaled_values_are_the_same_where_codes_cannot_differ() -> None:
    for pairs, same in ((SAME, True), (OTHER, False)):
        for got, wanted in pairs:
            assert proof.same_scaled(torch.tensor([got]), torch.tensor([wanted])) is same, (got, wanted)


@pytest.mark.parametrize(
    ("got", "wanted", "same"),
    [
        (3.0, 3.0, True),
        (200.0, 127.0, True),
        (-127.4, -127.0, True),
        (-200.0, -127.5, True),
        (torch.nan, torch.nan, True),
    ]
    + [
        (3.0, 4.0, False),
        (-127.0, 127.0, False),
        (-127.5, -127.0, False),
        (-127.5, 126.0, False),
        (126.0, 127.0, False),
        (torch.nan, 127.0, False),
    ],
)
def test_integers_are_the_same_where_codes_cannot_differ(got: float, wanted: float, same: bool) -> None:
    assert proof.same_rounded(torch.tensor([got]), torch.tensor([wanted])) is same
