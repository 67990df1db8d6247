"""Every format gives the same bytes on a GPU as on the CPU, where the definitions are tested.

Eagerly to the bit. Compiled code divides approximately (Inductor's default on CUDA; two units in the last place by
CUDA's tables), so there a computed fp32 scale may be that far off, and a code may be the neighbour of a tie.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vattn.quantization import codecs as qz

pytestmark = pytest.mark.gpu


def inputs(dtype: torch.dtype) -> Tensor:
    """Rows `[14, 256]` of every magnitude, with zeros, values far above any range, infinities, and NaN in one row."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(14, 256, generator=generator) * torch.logspace(-8, 5, 14).unsqueeze(1)
    x[0], x[5, 3], x[6, :2], x[7, 200] = 0.0, 1e9, torch.tensor([math.inf, -math.inf]), math.nan
    return x.to(dtype)


def encodings(x: Tensor, scale: Tensor, heads: Tensor) -> dict[str, Tensor]:
    per_head = x.view(14, 4, 64)
    codes = {
        "e4m3": qz.encode_kv(per_head, "fp8_e4m3", heads),
        "e5m2": qz.encode_kv(per_head, "fp8_e5m2", scale),
        "query": qz.encode_query(per_head, heads[:2], 2),
        "static": qz.quant_fp8_static(x, scale),
        "e2m1": qz.encode_e2m1(x.float()),
    }
    for name, pair in (
        ("per_token", qz.quant_fp8_per_token(x)),
        ("group", qz.quant_fp8_group(x, 64, False, True)),
        ("pow2", qz.quant_fp8_group(x, 128, True, False)),
        ("nvfp4", qz.quant_nvfp4(x, scale, False)),
        ("swizzled", qz.quant_nvfp4(x, scale, True)),
    ):
        codes[name], codes[name + "_scale"] = pair
    return codes


def comparable(x: Tensor) -> Tensor:
    """Values with every NaN made the same one: its sign and payload carry no meaning."""
    values = x.float() if x.dtype.is_floating_point else x
    nan = values.isnan() if values.dtype.is_floating_point else torch.zeros_like(values, dtype=torch.bool)
    return torch.where(nan, math.nan, values.double()).cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_encodings_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    x, scale, heads = inputs(dtype), torch.tensor([0.0113]), torch.tensor([0.0113, 0.37, 1.9, 7e-4])
    got = encodings(x.cuda(), scale.cuda(), heads.cuda())
    for name, expected in encodings(x, scale, heads).items():
        assert got[name].stride() == expected.stride(), name
        torch.testing.assert_close(
            comparable(got[name]),
            comparable(expected),
            rtol=0,
            atol=0,
            equal_nan=True,
            msg=lambda m, name=name: f"{name}: {m}",
        )


TWO_UNITS = 2 * 2.0**-23


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compiled_encodings_differ_by_the_rounding_of_a_division(dtype: torch.dtype) -> None:
    x, scale, heads = inputs(dtype), torch.tensor([0.0113]), torch.tensor([0.0113, 0.37, 1.9, 7e-4])
    got = torch.compile(encodings, fullgraph=True)(x.cuda(), scale.cuda(), heads.cuda())
    for name, expected in encodings(x, scale, heads).items():
        assert got[name].stride() == expected.stride(), name
        ours, theirs = comparable(got[name]), comparable(expected)
        if expected.dtype == torch.float32:
            torch.testing.assert_close(ours, theirs, rtol=TWO_UNITS, atol=0, equal_nan=True)
            continue
        differing = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
        assert differing.double().mean() <= 1e-3, (name, int(differing.sum()))


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_every_code_decodes_as_on_the_cpu(name: str) -> None:
    codes, scale = torch.arange(256, dtype=torch.uint8).view(64, 2, 2), torch.tensor([0.37, 1.9])
    got = qz.decode_kv(codes.cuda(), name, scale.cuda()).cpu()
    torch.testing.assert_close(got, qz.decode_kv(codes, name, scale), rtol=0, atol=0, equal_nan=True)
