"""Ways of latent attention's up-projection on a GPU: the bytes of the plain one, from launches that overlap too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.test_mla_gpu import deepseek
from tests.mla_support import random_mla_batch
from vattn.formats import OUTPUT_FORMATS
from vattn.ops import variants
from vattn.ops.mla_arguments import MLAAttentionArgs

pytestmark = pytest.mark.gpu

FORMATS = [name for name in OUTPUT_FORMATS if name != "none"]


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these ways are for GPUs with warpgroups, and were counted for sm_90")


def codes(args: MLAAttentionArgs, way: str) -> list[Tensor]:
    """Return copies of what a call writes."""
    with variants.using(latent_output=way):
        torch.ops.vattn.mla_attention(*args)
    return [t.contiguous().view(torch.uint8).clone() for t in (args.output, args.output_block_scale) if t is not None]


def expect_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    """Products of other tiles are added up in another order: a bf16 value in a few hundred rounds elsewhere."""
    for got, wanted in zip(found, expected, strict=True):
        assert (got != wanted).float().mean() < 1e-2


@pytest.mark.parametrize("way", ["deep", "early"])
@pytest.mark.parametrize("output_format", FORMATS)
def test_decode_steps(output_format: str, way: str) -> None:
    for heads, tokens in ((16, 1), (16, 128), (128, 33)):
        config = deepseek(num_heads=heads, qk_nope_head_dim=128, v_head_dim=128, output_format=output_format, lse=False)
        args = random_mla_batch(config, [1] * tokens, [*range(3, 3 + 7 * tokens, 7)], padding_tokens=2, device="cuda")
        expect_equal(codes(args, way), codes(args, "plain"))


@pytest.mark.parametrize("output_format", ["fp8_per_token", "fp8_group64", "nvfp4"])
def test_steps_with_prompts(output_format: str) -> None:
    config = deepseek(qk_nope_head_dim=128, v_head_dim=128, output_format=output_format, lse=False)
    args = random_mla_batch(config, [1, 300, 7, 1], [900, 300, 40, 5], padding_tokens=2, device="cuda")
    expect_equal(codes(args, "early"), codes(args, "plain"))


@pytest.mark.parametrize("output_format", ["fp8_per_token", "fp8_group128", "fp8_static"])
def test_overlapping_launches_wait_for_what_they_read(output_format: str) -> None:
    config = deepseek(qk_nope_head_dim=128, v_head_dim=128, output_format=output_format, lse=False)
    queries: dict[str, Any] = {"padding_tokens": 0, "device": "cuda"}
    args = random_mla_batch(config, [1] * 64, [*range(40, 40 + 64 * 9, 9)], **queries)
    codes(args, "early")
    graph = torch.cuda.CUDAGraph()
    with variants.using(latent_output="early"), torch.cuda.graph(graph):
        for _ in range(3):
            torch.ops.vattn.mla_attention(*args)
    for factor in range(1, 13):
        args.query.normal_().mul_(0.1 * factor)
        graph.replay()
        written = [
            t.contiguous().view(torch.uint8).clone() for t in (args.output, args.output_block_scale) if t is not None
        ]
        expect_equal(written, codes(args, "plain"))
