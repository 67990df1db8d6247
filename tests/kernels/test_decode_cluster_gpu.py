"""Decode of few requests in clusters on a Hopper GPU: against the reference, and the same bits from every replay."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.kernels.test_decode_fast_gpu import FP8, compare_rows, decode_batch
from tests.support import Batch, poisoned_empty
from vattn.cache.layout import key_value_views
from vattn.kernels.hopper.decode import cluster_launch
from vattn.kernels.hopper.decode import launch as decode_fast
from vattn.kernels.triton.attention.launch import finish
from vattn.quantization.codecs import quantise_output
from vattn.quantization.formats import MODEL_DTYPES

pytestmark = pytest.mark.gpu(capability=(9, 0))

LLAMA = {"num_heads": 32, "num_kv_heads": 8}
LENGTHS = [[1], [63], [1000], [5000, 0], [17, 4100], [1, 15, 16], [129, 2, 900, 3300]]
"""Fewer keys than a CTA's stripe; one CTA's and all CTAs' first stripes; several turns of the stages; nothing."""


def run(batch: Batch) -> None:
    assert decode_fast.accepts(batch.args, batch.config)
    assert not cluster_launch.refusals(batch.args, batch.config)
    cluster_launch.decode(batch.args, batch.config)
    torch.cuda.synchronize()


def check(lengths: list[int], **changes: Any) -> None:
    batch = decode_batch(lengths, **{**LLAMA, **changes})
    run(batch)
    compare_rows(batch)


@pytest.mark.parametrize("cache", [{}, FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(lengths: list[int], head_size: int, cache: dict[str, Any]) -> None:
    check(lengths, head_size=head_size, **cache)


@pytest.mark.parametrize("cache", [{}, FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize("heads", [(8, 8), (12, 4), (35, 5), (64, 8), (96, 32)], ids=str)
def test_groups(heads: tuple[int, int], cache: dict[str, Any]) -> None:
    check([700, 90], num_heads=heads[0], num_kv_heads=heads[1], **cache)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [16, 48, 128])
@pytest.mark.parametrize("kv_scale", ["none", "tensor", "head"])
def test_layouts_and_scales(dtype: str, layout: str, block_size: int, kv_scale: str) -> None:
    cache = {} if kv_scale == "none" else {"kv_cache_dtype": "fp8_e4m3", "kv_scale": kv_scale}
    check([333, 1500], dtype=dtype, kv_cache_layout=layout, block_size=block_size, **cache)


@pytest.mark.parametrize("cache", [{}, FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize("window", [1, 33, 1024])
def test_masks(window: int, cache: dict[str, Any]) -> None:
    check([5, 40, 3000], sliding_window=window, logits_soft_cap=4.0, sinks=True, **cache)
    check([5, 40, 3000], sinks=True, **cache)


def test_fp8_queries() -> None:
    check([700, 40], query_format="fp8_e4m3", query_scale="head", **FP8)


@pytest.mark.parametrize("query_lens", [[2, 0, 1], [0, 3, 0], [0, 1, 2], [1, 1, 0]], ids=str)
def test_rows_that_are_not_one_per_request(query_lens: list[int]) -> None:
    check([300, 1100, 40], query_lens=query_lens, sinks=True)


@pytest.mark.parametrize("padding", [1, 2])
def test_padding(padding: int) -> None:
    check([1000], padding=padding, sinks=True)


FORMATS = [
    ("fp8_static", "divide"), ("fp8_group64", "divide"), ("fp8_group64_pow2_col", "multiply"),
    ("fp8_group128", "divide"), ("nvfp4", "divide"), ("nvfp4_swizzled", "divide"), ("fp8_per_token", "divide"),
    ("nvfp4", "approximate_divide"), ("nvfp4_swizzled", "approximate_divide"),
]  # fmt: skip


@pytest.mark.parametrize("cache", [{}, FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize(("name", "arithmetic"), FORMATS, ids=str)
def test_quantised_output(name: str, arithmetic: str, head_size: int, cache: dict[str, Any]) -> None:
    """Codes and scales are those of the kernel's own plain output."""
    batch = decode_batch(
        [700, 0, 90], head_size=head_size, output_format=name, output_arithmetic=arithmetic, **LLAMA, **cache
    )
    check_codes(batch)


def check_codes(batch: Batch) -> None:
    """Check that codes and scales are those of the kernel's own plain output; of approximate quotients as plain Triton
    divides."""
    run(batch)
    plain = batch.config.replace(output_format="none", output_arithmetic="divide")
    output = torch.empty(batch.args.query.shape, dtype=MODEL_DTYPES[plain.dtype], device="cuda")
    args = batch.args._replace(output=output, output_block_scale=None, config=plain.encode())
    run(dataclasses.replace(batch, args=args, config=plain))
    scales = batch.args.output_block_scale
    expected = poisoned_empty(batch.args.output.shape, batch.args.output.dtype).cuda()
    expected_scales = None if scales is None else torch.empty_like(scales)
    if batch.config.output_arithmetic == "approximate_divide":
        args = batch.args._replace(output=expected, output_block_scale=expected_scales)
        finish(args, batch.config, output)
    else:
        quantise_output(
            output, batch.config.output_format, expected, expected_scales, batch.args.output_scale,
            batch.config.output_arithmetic,
        )  # fmt: skip
    is_fp8 = batch.args.output.dtype == torch.float8_e4m3fn
    codes, wanted = (x.float().nan_to_num(500.0) if is_fp8 else x for x in (batch.args.output, expected))
    assert torch.equal(codes, wanted)
    if scales is not None:
        assert torch.equal(scales.float().nan_to_num(), expected_scales.float().nan_to_num())


OF_EVERY_SIZE = [
    ("nvfp4", 1.0), ("nvfp4", 3e-3), ("nvfp4", -0.02), ("nvfp4", 2.0**-30), ("nvfp4", 2.0**60), ("fp8_group64", 1.0),
    ("fp8_static", 0.02),
]  # fmt: skip


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize(("name", "scale"), OF_EVERY_SIZE, ids=str)
@pytest.mark.parametrize(("dtype", "arithmetic"), [
    ("bfloat16", "divide"), ("float16", "divide"), ("bfloat16", "approximate_divide"),
])  # fmt: skip
def test_results_of_every_size(dtype: str, arithmetic: str, name: str, head_size: int, scale: float) -> None:
    """Zeros, results that are ties under scales which are powers of two, tiny ones, large ones, infinities and NaN."""
    batch = decode_batch(
        [700, 1, 90], head_size=head_size, output_format=name, output_arithmetic=arithmetic, dtype=dtype, **LLAMA
    )
    values = key_value_views(batch.args.key_cache, batch.args.value_cache, batch.config)[1]
    sizes = [0.0, 1.0, 1e-6, 3e4, float("inf"), float("nan"), 2.0**-12, 1e-3]
    for head, size in enumerate(sizes):
        values[:, :, head] *= size
    steps = torch.arange(head_size, device="cuda") % 27 - 13
    values[:, :, 6] = (steps * 2.0**-2).to(values.dtype)
    scales = None if batch.args.output_scale is None else torch.full_like(batch.args.output_scale, scale)
    check_codes(dataclasses.replace(batch, args=batch.args._replace(output_scale=scales)))


@pytest.mark.parametrize("cache", [{}, FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize("lengths", [[1000], [6000, 3], [900, 40, 2000, 1]], ids=str)
def test_every_replay_gives_the_same_bits(lengths: list[int], cache: dict[str, Any]) -> None:
    """A part that came late, or a copy that was read early, would differ in one of many replays."""
    batch = decode_batch(lengths, **LLAMA, **cache)
    run(batch)
    first, first_lse = batch.args.output.clone(), batch.args.lse.clone()
    graph = torch.cuda.CUDAGraph()
    outputs = [torch.empty_like(first) for _ in range(20)]
    with torch.cuda.graph(graph):
        for output in outputs:
            cluster_launch.decode(batch.args._replace(output=output), batch.config)
    for _ in range(25):
        for output in outputs:
            output.view(torch.uint8).fill_(0x7F)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(output, first) for output in outputs)
    assert torch.equal(batch.args.lse, first_lse)
