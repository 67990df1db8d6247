"""The arithmetic that a fused epilogue takes over is that of the code which Inductor generates for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import library_forms
import pytest
import torch
from forms import E4M3, rounded, static
from harness import captured_bundle
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from vattn.passes import region_division as division
from vattn.passes.region import Match

Form = Callable[[Tensor, Tensor], Any]
Seen = dict[Form, tuple[Match, Any, Any]]
CUDA = torch.device("cuda")


def largest(o: Tensor) -> Tensor:
    return o.float().abs().amax(-1, keepdim=True)


def divided(scale_of: Callable[[Tensor], Tensor]) -> Form:
    """Return quantisation by computed scales."""

    def function(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        scale = scale_of(o)
        return rounded(o.float() / scale), scale

    return function


def floor_of_the_scale(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    scale = (largest(o) / 448.0).clamp(min=3e-7)
    return rounded(o.float() * scale.reciprocal()), scale


def by_a_number(o: Tensor, s: Tensor) -> Tensor:
    return rounded(o.float() / 0.0137)


def by_reciprocal(o: Tensor, s: Tensor) -> Tensor:
    return rounded(o.float() * s.reciprocal())


def by_our_op(o: Tensor, s: Tensor) -> Tensor:
    return torch.ops.vattn.quant_fp8_static(o, s)


def in_fp64(o: Tensor, s: Tensor) -> Tensor:
    return rounded(o.double() / s.double())


def per_token_in_fp64(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    scale = (o.double().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0).float()
    return rounded(o.double() / scale.double()), scale


def half_in_fp64(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    scale = largest(o).clamp(min=1e-12) / 448.0
    return rounded(o.double() / scale.double()), scale


def by_torchao(o: Tensor, s: Tensor) -> Tensor:
    return torch.ops.torchao.quantize_affine_float8_non_decomposed(o, s, E4M3)


def by_torchao_with_computed_scales(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    scale = largest(o).clamp(min=1e-12) / 448.0
    return by_torchao(o, scale), scale


FLOOR = torch.tensor(1e-8)
per_token = divided(lambda o: largest(o).clamp(min=1e-12) / 448.0)
under_the_maximum = divided(lambda o: torch.maximum(largest(o), torch.tensor(1e-8)) / 448.0)
under_the_scale = divided(lambda o: torch.maximum(largest(o) / 448.0, torch.tensor(1e-8)))

ON_A_CPU = (static, per_token, floor_of_the_scale, by_a_number, by_reciprocal, by_our_op)
FORMS = [*ON_A_CPU, under_the_maximum, under_the_scale, in_fp64, per_token_in_fp64, half_in_fp64]
TORCHAO = library_forms.missing("torchao")
if not TORCHAO:
    FORMS += [by_torchao, by_torchao_with_computed_scales]


@pytest.fixture(scope="module")
def seen() -> Seen:
    """Return what probing each form found, the nodes of its region and the constants that they read."""
    found: list[Any] = []

    def noted(match: Match, nodes: Any, device: torch.device, constants: Any) -> Match:
        found.append((match, nodes, constants))
        return match

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(division, "as_generated", noted)
        captured_bundle(FORMS)
    return dict(zip(FORMS, found, strict=True))


def matched(seen: Seen, form: Form, device: torch.device = CUDA) -> tuple[Match, Match]:
    """Return a form's match as the CPU shows it and as code for a device would compute it."""
    match, nodes, constants = seen[form]
    return match, division.as_generated(match, nodes, device, constants)


def test_on_a_cpu_it_is_what_was_probed(seen: Seen) -> None:
    for form in ON_A_CPU:
        probed, made = matched(seen, form, torch.device("cpu"))
        assert made == probed and not probed.arithmetic.startswith("approximate")


def test_on_cuda_quotients_are_approximate(seen: Seen) -> None:
    assert matched(seen, static)[1].arithmetic == "approximate_divide"
    assert matched(seen, by_reciprocal)[1].arithmetic == "approximate_multiply"
    assert matched(seen, by_our_op)[1].arithmetic == "divide"


def test_on_cuda_a_constant_divisor_is_a_factor(seen: Seen) -> None:
    probed, made = matched(seen, by_a_number)
    assert made.arithmetic == "approximate_multiply" and made.scale == 1.0 / 0.0137
    packed = division.as_generated(replace(probed, output_format="nvfp4"), seen[by_a_number][1], CUDA)
    assert packed.arithmetic == "approximate_divide" and packed.scale == probed.scale
    probed, made = matched(seen, per_token)
    assert probed.min_scale == float(torch.tensor(1e-12) / 448.0)
    assert made.arithmetic == "approximate_divide"
    assert made.min_scale == float(torch.tensor(1e-12) * torch.tensor(1.0 / 448.0))
    probed, made = matched(seen, floor_of_the_scale)
    assert made.arithmetic == "approximate_multiply" and made.min_scale == probed.min_scale


def test_on_cuda_a_floor_is_found_in_a_tensor_too(seen: Seen) -> None:
    probed, made = matched(seen, under_the_maximum)
    assert probed.min_scale == float(FLOOR / 448.0) != float(FLOOR * torch.tensor(1.0 / 448.0)) == made.min_scale
    probed, made = matched(seen, under_the_scale)
    assert probed.min_scale == made.min_scale == float(FLOOR)
    with pytest.raises(division.Refusal, match="is computed"):
        division.as_generated(probed, seen[per_token][1], CUDA)


def test_on_cuda_quotients_in_fp64_are_exact(seen: Seen) -> None:
    for form in (in_fp64, per_token_in_fp64):
        probed, made = matched(seen, form)
        assert made == probed and made.arithmetic == "divide"
    with pytest.raises(division.Refusal, match="some of its divisions are in float64"):
        matched(seen, half_in_fp64)
    with pytest.raises(division.Refusal, match="a number divides in float64"):
        division.as_generated(replace(matched(seen, in_fp64)[0], scale=0.5), seen[in_fp64][1], CUDA)


@pytest.mark.skipif(bool(TORCHAO), reason=TORCHAO)
def test_on_cuda_ops_of_other_libraries_divide_exactly(seen: Seen) -> None:
    probed, made = matched(seen, by_torchao)
    assert made == probed and made.arithmetic == "divide"
    with pytest.raises(division.Refusal, match="another library's op"):
        matched(seen, by_torchao_with_computed_scales)


def test_rounded_divisions_are_taken_over_or_refused(seen: Seen) -> None:
    with torch._inductor.config.patch({"eager_numerics.division_rounding": True}):
        assert matched(seen, static)[1].arithmetic == "divide"
        assert matched(seen, by_a_number)[1].arithmetic == "approximate_multiply"
        with pytest.raises(division.Refusal, match="division_rounding"):
            matched(seen, per_token)


def test_on_cuda_queries_are_quantised_as_generated_code_does() -> None:
    graph = torch.fx.Graph()
    query = graph.placeholder("query")
    divided_by = [graph.call_function(torch.ops.aten.div.Tensor, (query, query)) for _ in range(2)]
    own = graph.call_function(torch.ops.vattn.quant_fp8_static.default, (query, query))
    with FakeTensorMode():
        for node in (*graph.nodes,):
            node.meta["val"] = torch.empty(3, device="cuda")
        divided_by[1].meta["val"] = torch.empty(3, device="cuda", dtype=torch.float64)
    plain, wide = ([node] for node in divided_by)
    assert division.query_arithmetic("divide", plain, False, query) == "approximate_divide"
    assert division.query_arithmetic("multiply", plain, False, query) == "approximate_multiply"
    assert division.query_arithmetic("divide", wide, True, query) == "divide"
    assert division.query_arithmetic("divide", [own], True, query) == "divide"
    with pytest.raises(division.Refusal, match="its scale is a constant"):
        division.query_arithmetic("divide", plain, True, query)
    with pytest.raises(division.Refusal, match="some of its divisions are in float64"):
        division.query_arithmetic("divide", divided_by, False, query)
    with torch._inductor.config.patch({"eager_numerics.division_rounding": True}):
        assert division.query_arithmetic("divide", plain, False, query) == "divide"
        with pytest.raises(division.Refusal, match="division_rounding"):
            division.query_arithmetic("multiply", plain, False, query)
