"""The up-projection of latent attention on a GPU at the sizes of decode steps, and two launches of it that overlap."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.layers.mla_support import random_mla_batch
from tests.layers.test_mla_gpu import deepseek
from vattn.ops.arguments_mla import MLAAttentionArgs
from vattn.quantization.codecs import quantise_output
from vattn.quantization.formats import OUTPUT_FORMATS

pytestmark = pytest.mark.gpu(capability=(9, 0))


@pytest.mark.parametrize("output_format", [name for name in OUTPUT_FORMATS if name != "none"])
def test_decode_steps(output_format: str) -> None:
    for heads, tokens in ((16, 1), (16, 128), (128, 33)):
        config = deepseek(num_heads=heads, qk_nope_head_dim=128, v_head_dim=128, output_format=output_format, lse=False)
        args = random_mla_batch(config, [1] * tokens, [*range(3, 3 + 7 * tokens, 7)], padding_tokens=2, device="cuda")
        torch.ops.vattn.mla_attention(*args)
        plain, values = config.replace(output_format="none"), torch.empty_like(args.query[..., :128])
        bare = args._replace(output=values, output_block_scale=None, output_scale=None, config=plain.encode())
        torch.ops.vattn.mla_attention(*bare)
        out, scales = OUTPUT_FORMATS[output_format].allocate(args.query, 128, values.dtype)
        quantise_output(values, output_format, out, scales, args.output_scale)
        # Torch multiplies in another order: a value in a hundred or two rounds to the other neighbour in bf16.
        off = (args.output.contiguous().view(torch.uint8) != out.contiguous().view(torch.uint8)).float().mean()
        assert off < 2e-2


def written(args: MLAAttentionArgs) -> list[Tensor]:
    assert args.output_block_scale is not None
    return [t.view(torch.uint8).clone() for t in (args.output, args.output_block_scale)]


def test_overlapping_launches_wait_for_what_they_read() -> None:
    """Each of three calls in a graph writes what a call alone does: no launch reads maxima that are not there yet."""
    config = deepseek(qk_nope_head_dim=128, v_head_dim=128, output_format="fp8_per_token", lse=False)
    args = random_mla_batch(config, [1] * 64, [*range(40, 40 + 64 * 9, 9)], device="cuda")
    torch.ops.vattn.mla_attention(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            torch.ops.vattn.mla_attention(*args)
    for factor in range(1, 13):
        args.query.normal_().mul_(0.1 * factor)
        graph.replay()
        got = written(args)
        torch.cuda.synchronize()
        torch.ops.vattn.mla_attention(*args)
        torch.cuda.synchronize()
        for mine, wanted in zip(got, written(args), strict=True):
            assert torch.equal(mine, wanted)
