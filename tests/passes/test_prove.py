"""Under which scales and on which values a region is proven, and which nodes a proof tells apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from test_match import classifier_of, rounded
from test_proof import Program
from torch import Tensor

from vattn.passes.output_quant import prove_scales
from vattn.passes.probe_inputs import PROBE_SCALES, every_value
from vattn.passes.prove import Prover
from vattn.passes.region import Refusal

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def prover_of(program: Program) -> Prover:
    made, _ = classifier_of(program)
    return Prover(made.region, made.quantised, made.nodes, made.inputs, "bfloat16", frozenset())


def test_roots_are_given_scales_that_differ() -> None:
    prover = prover_of(lambda o, s: rounded(o.float() / s))
    scales = [float(torch.tensor(scale)) for scale in PROBE_SCALES]
    assert prover.rounds == [[scale] for scale in scales]
    assert prover.rounds_at({3.0})[len(scales) :] == [[3.0], [1 / 3.0]]
    prover = prover_of(lambda o, s: rounded(o.float() / s[:, None] * s.reciprocal()[None]))
    assert len(prover.inputs.roots) == 1  # the other is made of it
    two = replace(prover.inputs, roots=prover.inputs.roots * 2)
    prover = Prover(prover.region, prover.quantised, prover.nodes, two, "bfloat16", frozenset())
    assert prover.rounds == [[*pair] for pair in zip(scales, scales[1:] + scales[:1], strict=True)]
    assert prover.rounds_at({3.0})[len(scales) :] == [[3.0, 3.0], [1 / 3.0, 1 / 3.0]]
    prover = prover_of(lambda o, s: rounded(o.float() / 0.02))
    assert prover.rounds == prover.rounds_at({3.0}) == [[]]


def either(column: Callable[[Tensor], Tensor]) -> Program:
    """Return a quantiser that negates some columns."""

    def program(o: Tensor, s: Tensor) -> Tensor:
        x = o.float() / s
        return rounded(torch.where(column(torch.arange(256)), -x, x))

    return program


PARTS: dict[str, tuple[Program, list[int], int]] = {
    "one formula": (lambda o, s: rounded(o.float() / s), [256], 1),
    "two halves": (either(lambda at: at < 128), [128, 128], 2),
    "one column": (either(lambda at: at == 17), [1, 238], 229),
}


@pytest.mark.parametrize("name", PARTS)
def test_every_value_is_run_in_each_part_of_the_columns(name: str) -> None:
    program, sizes, count = PARTS[name]
    runs = list(prover_of(program)._every_value())
    assert len(runs) == count and {many for _, many in runs} == {count > 8}
    seen = torch.stack([x for x, _ in runs])
    starts = {"one formula": [0], "two halves": [0, 128], "one column": [17, 18]}[name]
    wanted = every_value(BF16).view(torch.int16).sort()[0]
    for start, size in zip(starts, sizes, strict=True):
        part = seen[..., start : start + size]
        assert torch.equal(part.reshape(-1).contiguous().view(torch.int16).unique(), wanted)


def test_codes_of_several_values_are_refused() -> None:
    prover = prover_of(lambda o, s: rounded((o.float() + o.float().roll(1, 1)) / s))
    with pytest.raises(Refusal, match="a code depends on other values than its own") as refused:
        list(prover._every_value())
    assert refused.value.near and "add" in refused.value.node.name


def test_scales_fit_by_their_kind() -> None:
    fits, x = prove_scales._fits, torch.tensor([1.0, 2.0, 0.5])
    codes = x.to(E4M3)
    assert fits("scale", x, x) and fits("scale", x.bfloat16(), x) and fits("scale", codes, x)
    assert not fits("scale", x, x * 2) and not fits("scale", codes.view(torch.uint8), x)
    assert fits("bytes", codes.view(torch.uint8), codes.view(torch.uint8)) and not fits(
        "bytes", x, codes.view(torch.uint8)
    )
    assert fits("unrounded", torch.tensor([500.0]), torch.tensor([448.0])) == prove_scales.proof.SATURATES
    assert not fits("scale", torch.tensor([500.0]), torch.tensor([448.0]))


def test_nodes_that_round_to_codes_and_ops_of_libraries() -> None:
    def program(o: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        codes = (o / s).to(E4M3)
        return codes, o.to(torch.float8_e5m2), codes.view(-1, 4, 64), torch.ops.vattn.quant_fp8_static(o.float(), s)

    made, _ = classifier_of(lambda o, s: program(o, s)[::-1])
    narrow = {node.name for node in made.region.nodes if prove_scales._narrows(node)}
    library = {node.name for node in made.region.nodes if prove_scales._is_library(node)}
    assert library == {"quant_fp8_static"}
    assert narrow == library | {
        n.name for n in made.region.nodes if "convert_element_type" in n.name and n.meta["val"].itemsize == 1
    }
