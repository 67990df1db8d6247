"""The output variants that the passes need: multiplication by a reciprocal, and other floors under computed scales."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from forms import E4M3

from tests.support import make_config
from vattn.backends import selector
from vattn.config.attention import AttentionConfig
from vattn.errors import ConfigError
from vattn.quantization.codecs import quantise_rows
from vattn.quantization.formats import OUTPUT_FORMATS


def rows() -> torch.Tensor:
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[2] = 0
    x[3] = 1e-20
    return x


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_division_and_multiplication_round_ties_differently() -> None:
    codes = torch.arange(126, dtype=torch.uint8)
    ties = (codes.view(E4M3).float() + (codes + 1).view(E4M3).float())[None] / 2
    scale = torch.tensor([7 / 512])  # ties times this are exact
    divided, _ = quantise_rows(ties * scale, OUTPUT_FORMATS["fp8_static"], scale)
    multiplied, _ = quantise_rows(ties * scale, OUTPUT_FORMATS["fp8_static"], scale.reciprocal(), "multiply")
    assert same(divided, ties.to(E4M3))
    assert same(multiplied, (ties * scale * scale.reciprocal()).to(E4M3))
    assert 10 < int((divided.view(torch.uint8) != multiplied.view(torch.uint8)).sum()) < 100


@pytest.mark.parametrize("name", ["fp8_per_token", "fp8_group64", "fp8_group64_col"])
@pytest.mark.parametrize("arithmetic", ["divide", "multiply"])
def test_floor_under_the_scale(name: str, arithmetic: str) -> None:
    x, least = rows(), 3e-7
    codes, scales = quantise_rows(x, OUTPUT_FORMATS[name], None, arithmetic, least)
    assert scales is not None
    groups = x.float().view(6, scales.shape[1], -1)
    expected = (groups.abs().amax(-1) / 448).clamp(min=least)
    assert torch.equal(scales, expected)
    wide = expected.unsqueeze(-1)
    quotient = groups * (1 / wide) if arithmetic == "multiply" else groups / wide
    assert same(codes, quotient.clamp(-448, 448).to(E4M3).view(6, 128))


def test_a_backend_without_them_says_so() -> None:
    class Plain(type(selector.get_backend("TORCH_SDPA"))):  # type: ignore[misc]
        capabilities = replace(selector.get_backend("TORCH_SDPA").capabilities, output_variants=False)

    config = make_config(output_format="fp8_per_token", output_arithmetic="multiply", output_min_scale=1e-6)
    assert Plain().reasons(config, selector.DeviceInfo("cpu")) == [
        "output_arithmetic multiply (divides)",
        "output_min_scale 1e-06 (has the default)",
    ]
    assert AttentionConfig.parse(config.encode()) == config


def test_only_a_backend_that_divides_as_inductor_does_on_cuda_takes_approximate_arithmetic() -> None:
    config = make_config(output_format="fp8_per_token", output_arithmetic="approximate_divide")
    exact = selector.get_backend("TORCH_SDPA").reasons(config, selector.DeviceInfo("cpu"))
    assert exact == ["output_arithmetic approximate_divide (divides exactly)"]
    assert selector.get_backend("TRITON_ATTN").capabilities.approximate_division


@pytest.mark.parametrize(
    "changes",
    [
        {"output_format": "none", "output_arithmetic": "multiply"},
        {"output_format": "none", "output_arithmetic": "approximate_divide"},
        {"output_format": "nvfp4", "output_arithmetic": "approximate_multiply"},
        {"output_format": "nvfp4", "output_arithmetic": "multiply"},
        {"output_format": "fp8_static", "output_min_scale": 1e-6},
        {"output_format": "fp8_per_token", "output_min_scale": -1e-6},
        {"output_format": "fp8_per_token", "output_arithmetic": "guess"},
        {"output_format": "fp8_per_token", "output_floor": "zero"},
        {"output_format": "fp8_per_token", "output_min_scale": 1e-6, "output_floor": "rounded_scale"},
        {"output_format": "fp8_group64_pow2", "output_min_scale": 1e-6, "output_floor": "zero"},
        {"output_format": "fp8_group64", "output_min_scale": 1e-6, "output_floor": "least"},
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"output_(arithmetic|min_scale|floor)="):
        make_config(**changes)
