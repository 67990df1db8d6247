"""The RoPE kernel in Triton's interpreter: the same calls as on the CPU backend, and cuts that must not show."""

from __future__ import annotations

import pytest
import torch

from tests.ops.rope_cases import make_call
from tests.ops.test_rope_update import CALLS, check_call
from tests.quantization.codec_kernels import encode_quotients, encode_values
from tests.support import make_config
from tools.compile_kernels.launches import TARGETS
from vattn.backends import hopper_routes
from vattn.config.rope import RopeConfig
from vattn.kernels.triton.cache.rope_update import RopeTiles, rope_update, start_of_launch


@pytest.mark.sample(3, "cpu")
@pytest.mark.parametrize("call", list(CALLS))
def test_it_equals_the_oracle(call: str, device: str) -> None:
    check_call(call, "TRITON_ATTN", device)


@pytest.mark.sample(3)
@pytest.mark.parametrize("elements", [16, 64, 4096])
def test_every_cut_gives_the_same_bytes(elements: int) -> None:
    """One head a tile, tiles that end among the heads, and all heads in one."""
    config = make_config(
        dtype="bfloat16", num_heads=6, num_kv_heads=3, kv_cache_dtype="fp8_e4m3", query_format="fp8_e4m3",
        query_scale="head", kv_scale="head", backend="TRITON_ATTN",
    )  # fmt: skip
    rope = RopeConfig(12, norm="rms", norm_eps=1e-6)
    calls = [make_call(config, rope, num_tokens=3) for _ in range(2)]
    torch.ops.vattn.rope_kv_cache_update(*calls[0])
    rope_update(calls[1], rope, config, tiles=RopeTiles(elements, 4))
    for name in ("query_out", "kv_cache"):
        first, second = (getattr(call, name).view(torch.uint8) for call in calls)
        assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("changes", "tokens", "expected"),
    [
        ({}, 2, "both"),
        ({"head_size": 64, "kv_cache_dtype": "bfloat16"}, 2, "both"),
        ({"kv_cache_dtype": "bfloat16"}, 2, "wait"),  # The decode kernel behind is launched early itself, and piles up.
        ({"head_size": 256}, 2, "both"),
        ({"head_size": 256, "num_heads": 64}, 2, "both"),  # Launched early, and a multiprocessor has room for one CTA.
        ({"backend": "FLASHINFER"}, 2, "wait"),
        ({}, 22, "both"),
        ({}, 23, ""),
    ],
)
def test_when_a_launch_of_few_tokens_starts(changes: dict[str, object], tokens: int, expected: str) -> None:
    asked = {"dtype": "bfloat16", "num_heads": 32, "num_kv_heads": 8, "head_size": 128, "kv_cache_dtype": "fp8_e4m3"}
    config = make_config(**{**asked, "backend": "TRITON_ATTN", **changes})
    hopper = TARGETS["sm_90"]
    next_may_start = hopper_routes.next_may_start(config)
    assert start_of_launch(tokens, 6, hopper, next_may_start) == expected
    assert start_of_launch(tokens, 6, TARGETS["sm_80"], next_may_start) == ""


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2"])
def test_quotients_are_encoded_as_the_codec_does(fmt: str) -> None:
    values = torch.cat((torch.randn(120) * 400, torch.tensor([0.0, -0.0, 1e9, -1e9, torch.inf, -torch.inf, 1e-9, 3.0])))
    scales = torch.tensor([0.0313, 1.0, 7e-3, 1e-30])
    got = encode_quotients(values, scales, fmt, native=False)
    for scale, row in zip(scales, got, strict=True):
        assert torch.equal(row, encode_values(values / scale, fmt))


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)])
def test_quotients_by_corrected_products_are_those_of_the_division(dtype: torch.dtype, largest: float) -> None:
    """What the native lowering of `encode_quotient` computes; fp64 emulates FMA, since it holds products exactly."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.float().double()

    def codes(x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-largest, largest).to(dtype).view(torch.uint8)

    stored = torch.arange(0x7B if largest > 448 else 0x7E, dtype=torch.uint8).view(dtype).float()
    ties = (stored[1:] + stored[:-1]) / 2
    bf16 = torch.arange(0, 1 << 16, 3, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    for scale in (*(torch.rand(40) * torch.exp2(torch.randint(-55, 55, (40,)).float())), torch.tensor(-0.37)):
        near = ((ties * scale)[:, None].view(torch.int32) + torch.arange(-2, 3, dtype=torch.int32)).view(torch.float32)
        x = torch.cat((bf16[bf16.isfinite()], near.flatten(), torch.tensor([0.0, -0.0, torch.inf, -torch.inf])))
        wide, s = x.double(), scale.double()
        reciprocal = rounded(1 / s)
        product = rounded(wide * reciprocal)
        corrected = rounded(rounded(wide - product * s) * reciprocal + product)
        usual = (product.abs() < 2.0**40) & (product.abs() > 2.0**-40)
        assert torch.equal(codes(torch.where(usual, corrected, product).float()), codes(x / scale))
