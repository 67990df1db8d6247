"""The arithmetic that a fused epilogue takes over is that of the code which Inductor generates for the device."""

from __future__ import annotations

from typing import Any

import library_forms
import pytest
import torch
from forms import static
from harness import Attend, captured

from vattn.passes import region_division as division
from vattn.passes.region import Match

E4M3 = torch.float8_e4m3fn


def per_token(o: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = o.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0
    return (o.float() / scale).clamp(-448, 448).to(E4M3), scale


def floor_of_the_scale(o: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (o.float().abs().amax(-1, keepdim=True) / 448.0).clamp(min=3e-7)
    return (o.float() * scale.reciprocal()).clamp(-448, 448).to(E4M3), scale


def by_a_number(o: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return (o.float() / 0.0137).clamp(-448, 448).to(E4M3)


def by_reciprocal(o: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return (o.float() * s.reciprocal()).clamp(-448, 448).to(E4M3)


def by_our_op(o: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return torch.ops.vattn.quant_fp8_static(o, s)


AS_GENERATED = division.as_generated


def seen_by_the_pass(form: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Match, Any, Any]:
    """Return what probing a form found, the nodes of its region and the constants that they read."""
    seen: list[tuple[Match, Any, Any]] = []
    monkeypatch.setattr(
        division, "as_generated", lambda match, nodes, _, known: seen.append((match, nodes, known)) or match
    )
    captured(Attend(form))
    return seen[0]


def matched(form: Any, monkeypatch: pytest.MonkeyPatch, device: str) -> tuple[Match, Match]:
    """Return a form's match as the CPU shows it and as code for a device would compute it."""
    match, nodes, constants = seen_by_the_pass(form, monkeypatch)
    return match, AS_GENERATED(match, nodes, torch.device(device), constants)


@pytest.mark.parametrize("form", [static, per_token, floor_of_the_scale, by_a_number, by_reciprocal, by_our_op])
def test_on_a_cpu_it_is_what_was_probed(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    probed, made = matched(form, monkeypatch, "cpu")
    assert made == probed and not probed.arithmetic.startswith("approximate")


def test_on_cuda_quotients_are_approximate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert matched(static, monkeypatch, "cuda")[1].arithmetic == "approximate_divide"
    assert matched(by_reciprocal, monkeypatch, "cuda")[1].arithmetic == "approximate_multiply"
    assert matched(by_our_op, monkeypatch, "cuda")[1].arithmetic == "divide"


def test_on_cuda_a_constant_divisor_is_a_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    _, made = matched(by_a_number, monkeypatch, "cuda")
    assert made.arithmetic == "approximate_multiply" and made.scale == 1.0 / 0.0137
    factor = torch.tensor(1.0 / 448.0)
    probed, made = matched(per_token, monkeypatch, "cuda")
    assert probed.min_scale == float(torch.tensor(1e-12) / 448.0)
    assert made.arithmetic == "approximate_divide" and made.min_scale == float(torch.tensor(1e-12) * factor)
    probed, made = matched(floor_of_the_scale, monkeypatch, "cuda")
    assert made.arithmetic == "approximate_multiply" and made.min_scale == probed.min_scale


def test_on_cuda_a_floor_is_found_in_a_tensor_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def under_the_maximum(o: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = torch.maximum(o.float().abs().amax(-1, keepdim=True), torch.tensor(1e-8)) / 448.0
        return (o.float() / scale).clamp(-448, 448).to(E4M3), scale

    def under_the_scale(o: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = torch.maximum(o.float().abs().amax(-1, keepdim=True) / 448.0, torch.tensor(1e-8))
        return (o.float() / scale).clamp(-448, 448).to(E4M3), scale

    floor = torch.tensor(1e-8)
    probed, made = matched(under_the_maximum, monkeypatch, "cuda")
    assert probed.min_scale == float(floor / 448.0) != float(floor * torch.tensor(1.0 / 448.0)) == made.min_scale
    probed, made = matched(under_the_scale, monkeypatch, "cuda")
    assert probed.min_scale == made.min_scale == float(floor)
    with pytest.raises(division.Refusal, match="is computed"):
        AS_GENERATED(probed, seen_by_the_pass(per_token, monkeypatch)[1], torch.device("cuda"))


def in_fp64(o: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return (o.double() / s.double()).clamp(-448, 448).to(E4M3)


def per_token_in_fp64(o: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (o.double().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0).float()
    return (o.double() / scale.double()).clamp(-448, 448).to(E4M3), scale


def half_in_fp64(o: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = o.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0
    return (o.double() / scale.double()).clamp(-448, 448).to(E4M3), scale


def test_on_cuda_quotients_in_fp64_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    for form in (in_fp64, per_token_in_fp64):
        probed, made = matched(form, monkeypatch, "cuda")
        assert made == probed and made.arithmetic == "divide"
    with pytest.raises(division.Refusal, match="some of its divisions are in float64"):
        matched(half_in_fp64, monkeypatch, "cuda")


def test_on_cuda_ops_of_other_libraries_divide_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    why = library_forms.missing("torchao")
    if why:
        pytest.skip(why)
    quantise = torch.ops.torchao.quantize_affine_float8_non_decomposed

    def by_op(o: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return quantise(o, s, E4M3)

    def with_computed_scales(o: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = o.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0
        return quantise(o, scale, E4M3), scale

    probed, made = matched(by_op, monkeypatch, "cuda")
    assert made == probed and made.arithmetic == "divide"
    with pytest.raises(division.Refusal, match="another library's op"):
        matched(with_computed_scales, monkeypatch, "cuda")


def test_rounded_divisions_are_taken_over_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch._inductor.config.patch({"eager_numerics.division_rounding": True}):
        assert matched(static, monkeypatch, "cuda")[1].arithmetic == "divide"
        assert matched(by_a_number, monkeypatch, "cuda")[1].arithmetic == "approximate_multiply"
        with pytest.raises(division.Refusal, match="division_rounding"):
            matched(per_token, monkeypatch, "cuda")
