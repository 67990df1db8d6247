"""The codec's device functions against `vattn.quantization.codecs`, bit for bit, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.quantization.codec_kernels import decode_codes, encode_values
from vattn.kernels.hopper import epilogue as gluon_epilogue
from vattn.kernels.triton.common import epilogue
from vattn.quantization import codecs as quantization
from vattn.quantization.formats import KV_FORMATS

FP8 = ("fp8_e4m3", "fp8_e5m2")


def same_bytes(got: Tensor, expected: Tensor) -> bool:
    """Which NaN stands for a NaN is up to the hardware."""
    equal = got.view(torch.uint8) == expected.view(torch.uint8)
    return bool((equal | (got.float().isnan() & expected.float().isnan())).all())


@pytest.mark.parametrize("target", [torch.float16, torch.float32])
@pytest.mark.parametrize("fmt", FP8)
def test_every_code_decodes_to_its_value(fmt: str, target: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(KV_FORMATS[fmt].value_dtype).float()
    got = decode_codes(codes, fmt, target, native=False).float()
    assert torch.equal(got.nan_to_num(nan=-1e9), expected.nan_to_num(nan=-1e9))
    assert torch.equal(got.isnan(), expected.isnan())


def hard_values(fmt: str) -> Tensor:
    """Every stored value, every midpoint of two neighbours, both one unit in the last place off, and random bits."""
    values = torch.arange(256, dtype=torch.uint8).view(KV_FORMATS[fmt].value_dtype).float()
    values = values[values.isfinite()].unique()
    middles = (values[1:] + values[:-1]) / 2
    near = [torch.nextafter(middles, torch.full_like(middles, end)) for end in (-torch.inf, torch.inf)]
    random = torch.randint(-(2**31), 2**31 - 1, (4096,)).int().view(torch.float32)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45, 447.9, 1e5, -1e9])
    return torch.cat([values, middles, *near, random, special])


@pytest.mark.parametrize("fmt", FP8)
def test_encoding_equals_the_reference(fmt: str) -> None:
    values = hard_values(fmt)
    expected = quantization.encode_kv(values.view(-1, 1, 1), fmt, torch.ones(1)).view(-1)
    assert same_bytes(encode_values(values, fmt).view(expected.dtype), expected)


def test_e2m1_encoding_equals_the_reference() -> None:
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 0.0])
    values = torch.cat([middles, -middles, torch.randn(2000) * 3, torch.tensor([torch.inf, -torch.inf])])
    assert torch.equal(encode_values(values, "e2m1"), quantization.encode_e2m1(values))


def test_the_smallest_maximum_is_the_reference_s() -> None:
    assert epilogue.MIN_ABSMAX.value == quantization.MIN_ABSMAX
    assert gluon_epilogue.MIN_ABSMAX.value == quantization.MIN_ABSMAX
