"""The fast decode path's Triton kernels in the interpreter: schedule, chunks, reduction, masks against the reference.

The interpreter knows no inline assembly and no bf16 products, so an FP8 cache takes the plain lowering and plain
caches are fp16; programmatic launches are nothing there. `test_decode_fast_gpu` runs what a GPU compiles.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.kernels.decode_support import interpret
from tests.support import Batch, make_config, poisoned_empty, random_paged_batch, relative_l2
from vattn.kernels.hopper.decode import launch as decode_fast
from vattn.kernels.hopper.decode import triton_kernel
from vattn.quantization.codecs import quantise_output

TOLERANCE = 1e-3
"""Relative L2: weights and results are rounded to fp16, 1.4e-4 of a value on average each."""

FP8 = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"}
LENGTHS = [1, 17, 100, 48]
GROUPED = ["fp8_group64", "fp8_group64_pow2_col", "fp8_group128", "nvfp4", "nvfp4_swizzled"]
"""Groups of 128 and swizzled scales are left to the finishing kernel here, as heads are 64 wide."""


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, decode_fast, triton_kernel)


def decode_batch(lengths: list[int], *, padding: int = 0, query_lens: list[int] | None = None, **changes: Any) -> Batch:
    values = {"num_heads": 6, "num_kv_heads": 2, "head_size": 64, "dtype": "float16", "lse": True, **changes}
    query_lens = query_lens or [1] * len(lengths)
    tokens = len(lengths) + padding - sum(query_lens)
    return random_paged_batch(
        make_config(**values), query_lens, lengths, num_padding_reqs=padding, num_padding_tokens=tokens
    )


def check(batch: Batch, heads: int = 2) -> None:
    decode_fast.decode(batch.args, batch.config, decode_fast.Tuning(heads, 3, 2))
    output, lse = batch.expected()
    assert relative_l2(batch.output(), output) < TOLERANCE
    assert relative_l2(batch.args.lse, lse) < 1e-4


@pytest.mark.parametrize("cache", [{}, FP8], ids=["plain", "fp8"])
def test_ragged_requests(cache: dict[str, Any]) -> None:
    check(decode_batch(LENGTHS, **cache))


@pytest.mark.parametrize("cache", [{}, FP8], ids=["plain", "fp8"])
def test_masks_and_padding(cache: dict[str, Any]) -> None:
    changes = {"sliding_window": 33, "logits_soft_cap": 4.0, "sinks": True, "block_size": 32, "kv_cache_layout": "HND"}
    check(decode_batch(LENGTHS, padding=2, **changes, **cache), heads=1)


@pytest.mark.parametrize(("size", "cache"), [(32, {}), (80, FP8), (120, {}), (96, FP8), (192, {})], ids=str)
def test_heads_that_zeros_are_added_to(size: int, cache: dict[str, Any]) -> None:
    """What lies behind a head, the next one's numbers or NaN, is neither read nor overwritten."""
    check(decode_batch(LENGTHS, padding=1, sinks=True, head_size=size, num_kv_heads=3, **cache))
    # More requests: one program reduces a head's columns.
    check(decode_batch([300, 5, 9, 1, 200, 33], head_size=size, **cache))


def test_wide_groups_and_heads_that_do_not_fill_a_cta() -> None:
    check(decode_batch([17, 60], num_heads=33, num_kv_heads=3))


def test_rows_that_are_not_one_per_request() -> None:
    check(decode_batch([40, 100, 0, 90], query_lens=[2, 1, 0, 0], sinks=True))
    check(decode_batch([40, 1, 30], query_lens=[0, 3, 0]))


def attended(cache: str, lengths: tuple[int, ...], output_format: str) -> Batch:
    fp8 = FP8 if cache == "fp8" else {}
    batch = decode_batch(list(lengths), output_format=output_format, padding=1, num_heads=4, **fp8)
    decode_fast.decode(batch.args, batch.config, decode_fast.Tuning(2, 3, 2))
    return batch


plain_batch = cache(lambda cache, lengths: attended(cache, lengths, "none"))


@pytest.mark.sample(5)
@pytest.mark.parametrize("lengths", [(40, 5), (40, 5, 33, 1, 17)], ids=["few", "many"])
@pytest.mark.parametrize("cache", ["plain", "fp8"])
@pytest.mark.parametrize("name", ["fp8_static", "fp8_per_token", *GROUPED])
def test_quantised_output(name: str, cache: str, lengths: tuple[int, ...]) -> None:
    """Requests that are split and such that are not, and scales computed with the results or by a kernel after them."""
    args = attended(cache, lengths, name).args
    expected, scales = poisoned_empty(args.output.shape, args.output.dtype), args.output_block_scale
    expected_scales = None if scales is None else torch.empty_like(scales)
    quantise_output(plain_batch(cache, lengths).args.output, name, expected, expected_scales, args.output_scale)
    assert torch.equal(args.output.view(torch.uint8), expected.view(torch.uint8))
    if scales is not None:
        assert torch.equal(scales.float(), expected_scales.float())
