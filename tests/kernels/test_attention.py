"""How the attention launch is cut must not show: splits, tiles, full loops, head chunks and column steps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from tests.conformance.compare import compare
from tests.support import Batch, make_config, poisoned_like, random_packed_batch, random_paged_batch
from tools.compile_kernels.launches import TARGETS
from vattn.kernels.triton.attention import launch
from vattn.kernels.triton.attention.kernel import attention_kernel
from vattn.kernels.triton.attention.reduce import finish_kernel
from vattn.kernels.triton.common.tiles import Limits, Tiles, choose_tiles, compute_dtype
from vattn.quantization.codecs import quantise_output, quantise_rows
from vattn.quantization.formats import OUTPUT_FACTORS, OUTPUT_FORMATS

PLAIN = Tiles(block_m=16, group_tile=2, tile=16, d_step=16, num_splits=1, full_loop=False, num_warps=4, num_stages=1)

CUTS: dict[str, Tiles] = {
    "plain": PLAIN,
    "splits": replace(PLAIN, num_splits=3),
    "more-splits-than-tiles": replace(PLAIN, num_splits=9),
    "full-loop": replace(PLAIN, block_m=32, full_loop=True),
    "wide-tiles": replace(PLAIN, block_m=64, tile=64, full_loop=True),
    "one-head-of-a-group": replace(PLAIN, group_tile=1),
    "column-steps": replace(PLAIN, d_step=8),
}

DCP: dict[str, Any] = {
    "context_parallel": True, "context_rank": 1, "context_world": 3, "context_interleave": 4,
}  # fmt: skip

FEATURES: dict[str, dict[str, Any]] = {
    "causal": {"num_heads": 4, "num_kv_heads": 2},
    "window-sinks": {"sliding_window": 21, "sinks": True},
    "bidirectional-window": {"causality": "bidirectional", "sliding_window": 19, "alibi": "linear"},
    "chunks-flags": {"sliding_window": 24, "chunk_lookback": 1, "causality": "per_request"},
    "context": {"context_only": True, "sliding_window": 21, "sinks": True},
    "ranges": {"mm_prefix": "full", "sliding_window": 4},
    "dcp": DCP,
    "dcp-window-alibi": {**DCP, "sliding_window": 21, "alibi": "linear", "logits_soft_cap": 2.5},
    "dcp-bidirectional-ranges": {**DCP, "causality": "bidirectional", "sliding_window": 9, "mm_prefix": "full"},
    "dcp-chunks-flags": {**DCP, "sliding_window": 24, "chunk_lookback": 1, "causality": "per_request"},
    "fp8": {
        "kv_cache_dtype": "fp8_e4m3",
        "kv_scale": "head",
        "query_format": "fp8_e4m3",
        "query_scale": "head",
        "num_heads": 4,
        "num_kv_heads": 2,
    },
}


def run(batch: Batch, tiles: Tiles) -> None:
    """Run a batch cut in a given way and compare it with the reference."""
    launch.paged_attention(batch.args, batch.config, tiles)
    compare(batch, *batch.expected())


PAIRS = [(cut, "causal") for cut in CUTS] + [
    (cut, features) for features in FEATURES if features != "causal" for cut in ("splits", "full-loop")
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("cut", "features"), PAIRS)
def test_every_cut_gives_the_reference(cut: str, features: str) -> None:
    config = make_config(**{"lse": True, "block_size": 8, "num_heads": 2, "num_kv_heads": 1, **FEATURES[features]})
    batch = random_paged_batch(config, [9, 1, 0, 4], [37, 50, 3, 2], num_padding_tokens=2, num_padding_reqs=1)
    run(batch, CUTS[cut])


@pytest.mark.parametrize("cut", ["splits", "full-loop"])
def test_a_key_that_is_nan_is_not_lost(cut: str) -> None:
    """Its split is not taken for an empty one: rows that see it are NaN, their log-sum-exp too, and others are not."""
    config = make_config(lse=True, block_size=8)
    batch = random_paged_batch(config, [2, 1], [45, 50])
    batch.args.key_cache[int(batch.args.block_table[1, 0]), 3] = torch.nan
    launch.paged_attention(batch.args, config, CUTS[cut])
    assert bool(batch.args.output[2:].isnan().all()) and bool(batch.args.lse[2:].isnan().all())
    assert bool(batch.args.output[:2].isfinite().all()) and bool(batch.args.lse[:2].isfinite().all())


def test_invalid_blocks_in_tiles_that_need_no_mask() -> None:
    batch = random_paged_batch(make_config(block_size=8, lse=True), [20, 17], [80, 60])
    batch.args.block_table[0, 2] = 2**31 - 1
    batch.args.block_table[1, 3] = -1
    run(batch, CUTS["full-loop"])


def test_groups_wider_than_a_tile() -> None:
    batch = random_paged_batch(make_config(num_heads=38, num_kv_heads=2, head_size=8, lse=True), [2, 1], [9, 20])
    run(batch, replace(PLAIN, group_tile=16))


def test_packed_keys_with_strides_of_their_own() -> None:
    batch = random_packed_batch(make_config(block_size=0, lse=True), [5, 1, 0], [9, 33, 4], num_padding_tokens=2)
    tokens, heads, width = batch.args.key.shape
    fused = torch.full((tokens, 2 * heads + 3, width), torch.nan)
    fused[:, :heads], fused[:, heads : 2 * heads] = batch.args.key, batch.args.value
    batch.args = batch.args._replace(key=fused[:, :heads], value=fused[:, heads : 2 * heads])
    launch.packed_attention(batch.args, batch.config)
    compare(batch, *batch.expected())


def test_bf16_queries_beyond_the_range_of_fp16() -> None:
    config = make_config(dtype="bfloat16", kv_cache_dtype="fp8_e4m3", scale=1e-32, lse=True)
    batch = random_paged_batch(config, [3, 1], [9, 20])
    assert compute_dtype(config) is torch.float16
    batch.args.query.mul_(1e32)
    run(batch, PLAIN)


VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"output_format": name} for name in OUTPUT_FORMATS},
    "static-multiply": {"output_format": "fp8_static", "output_arithmetic": "multiply"},
    "token-multiply": {"output_format": "fp8_per_token", "output_arithmetic": "multiply", "output_min_scale": 1e-5},
    "group-multiply": {"output_format": "fp8_group64_col", "output_arithmetic": "multiply"},
    # Rows of zeros, such as padding, become NaN.
    "token-no-minimum": {"output_format": "fp8_per_token", "output_min_scale": 0.0},
    "group-minimum": {"output_format": "fp8_group128_pow2", "output_min_scale": 0.003},
    "group-rounded": {"output_format": "fp8_group64_pow2", "output_min_scale": 0.003, "output_floor": "rounded_scale"},
    "group-no-zeros": {"output_format": "fp8_group64", "output_min_scale": 0.003, "output_floor": "zero"},
    "token-no-zeros": {"output_format": "fp8_per_token", "output_min_scale": 0.003, "output_floor": "zero"},
    "int8-multiply": {"output_format": "int8_per_token", "output_arithmetic": "multiply", "output_min_scale": 0.01},
    "int8-no-zeros": {"output_format": "int8_per_token", "output_min_scale": 0.003, "output_floor": "zero"},
    **{
        f"{name}-{arithmetic}": {
            "output_format": name,
            "output_arithmetic": arithmetic,
            "output_min_scale": 0.003,
            "output_floor": "maximum",
        }
        for name, arithmetic in zip(
            ("fp8_per_token", "fp8_group64", "fp8_group128_col", "int8_per_token"), OUTPUT_FACTORS, strict=True
        )
    },
}


def attended(splits: int, **output: Any) -> Batch:
    """Return a batch of bf16 rows and their attention, which is the same whatever the output format makes of it."""
    config = make_config(num_heads=8, num_kv_heads=1, head_size=32, dtype="bfloat16", **output)
    batch = random_paged_batch(config, [2, 1, 2], [9, 20, 1], num_padding_tokens=2)
    launch.paged_attention(batch.args, config, replace(PLAIN, group_tile=8, d_step=32, num_splits=splits))
    return batch


@cache
def plain_rows(splits: int) -> Tensor:
    return attended(splits).args.output


@pytest.mark.sample(5)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_quantised_outputs_are_the_reference_s_bit_for_bit(variant: str, splits: int) -> None:
    """The same kernel without quantisation, quantised by `vattn.quantization.codecs`, gives the same bytes."""
    batch = attended(splits, **VARIANTS[variant])
    args, config = batch.args, batch.config
    expected = [poisoned_like(t) for t in (args.output, args.output_block_scale)]
    quantise_output(
        plain_rows(splits), config.output_format, expected[0], expected[1], args.output_scale,
        config.output_arithmetic, config.output_min_scale, config.output_floor,
    )  # fmt: skip
    for got, want in zip((args.output, args.output_block_scale), expected, strict=True):
        if want is not None and got is not None:
            assert got.stride() == want.stride()
            torch.testing.assert_close(
                got.float(), want.float(), rtol=0, atol=0, equal_nan=variant == "token-no-minimum"
            )


APPROXIMATE = [
    ("fp8_static", "divide", 1), ("fp8_static", "multiply", 3), ("fp8_per_token", "divide", 3),
    ("fp8_per_token", "multiply", 1), ("fp8_group64_col", "divide", 1), ("fp8_group64_col", "multiply", 3),
]  # fmt: skip


def finished(rows: Tensor, **output: Any) -> tuple[Batch, Any]:
    """Return what the finishing kernel makes of rows `[T, N]`, and its config."""
    config = make_config(num_heads=4, num_kv_heads=1, head_size=32, dtype="bfloat16", **output)
    batch = random_paged_batch(config, [len(rows)], [len(rows)])
    launch.finish(batch.args, config, rows.view(len(rows), 4, 32))
    return batch, config


EVERY = [
    ("int8_per_token", "divide", None, "scale"), ("int8_per_token", "quotient", 0.0, "maximum"),
    ("mxfp8_ceil", "divide", None, "scale"), ("mxfp8_floor", "divide", None, "scale"),
    ("fp8_group64", "factor", 1e-4, "maximum"), ("fp8_per_token", "factor_inverse", 0.0, "maximum"),
    ("fp8_group128", "quotient_inverse", 1e-4, "maximum"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arithmetic", "least", "floor"), EVERY)
def test_every_value_is_finished_as_the_reference_says(
    name: str, arithmetic: str, least: float | None, floor: str
) -> None:
    """Every bf16 value, infinities and NaN too, among its neighbours.

    Subnormal ones are left out, which Triton's interpreter does not load exactly.
    """
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    every = torch.where((every.abs() > 0) & (every.abs() < 2.0**-126), 0.0, every)
    rows = every.view(-1, 128)
    batch, _ = finished(
        rows, output_format=name, output_arithmetic=arithmetic, output_min_scale=least, output_floor=floor
    )
    wanted = quantise_rows(rows, OUTPUT_FORMATS[name], None, arithmetic, least, floor)
    for got, want in zip((batch.args.output.flatten(1), batch.args.output_block_scale), wanted, strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        bits = torch.uint8 if got.itemsize == 1 else torch.int32
        both_nan = got.float().isnan() & want.float().isnan()
        assert bool(((got.view(bits) == want.view(bits)) | both_nan).all())


def test_approximate_factors_take_constant_divisors_as_factors() -> None:
    """As generated CUDA code; what the interpreter divides is exact."""
    rows = torch.randn(40, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    rows[3] = 0
    batch, _ = finished(
        rows, output_format="fp8_group64", output_arithmetic="approximate_factor", output_min_scale=1e-4,
        output_floor="maximum",
    )  # fmt: skip
    groups = rows.float().view(40, 2, 64)
    largest = groups.abs().amax(-1).clamp(min=1e-4)
    assert torch.equal(batch.args.output_block_scale, largest * (1 / 448))
    codes = (groups * (448.0 / largest).unsqueeze(-1)).to(torch.float8_e4m3fn)
    assert torch.equal(batch.args.output.view(torch.uint8).flatten(), codes.view(torch.uint8).flatten())


@pytest.mark.parametrize(("name", "arithmetic", "splits"), APPROXIMATE)
def test_approximate_arithmetic_is_that_of_inductor_s_code(name: str, arithmetic: str, splits: int) -> None:
    """Constant divisors become factors; what the interpreter divides is exact. The GPU tests compare with real code."""
    args = attended(splits, output_format=name, output_arithmetic=f"approximate_{arithmetic}").args
    plain, scale = plain_rows(splits), args.output_scale
    rows = plain.flatten(1).float().view(len(plain), -1, 64 if name == "fp8_group64_col" else 256)
    by_factor = arithmetic == "multiply"
    if scale is None:
        scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-10) * (1 / 448)
        assert torch.equal(args.output_block_scale, scale.squeeze(-1))
        codes = rows * (1 / scale) if by_factor else rows / scale
    else:
        codes = rows * scale if by_factor else rows / scale
    expected = codes.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(args.output.view(torch.uint8).flatten(), expected.flatten())


def test_a_given_workspace_is_used_and_one_too_small_is_not() -> None:
    for size in (1 << 16, 4):
        batch = random_paged_batch(make_config(lse=True), [1, 1], [40, 33])
        workspace = torch.full((size,), 255, dtype=torch.uint8)
        batch.args = batch.args._replace(workspace=workspace)
        run(batch, CUTS["splits"])
        assert bool((workspace != 255).any()) == (size == 1 << 16)


def test_no_tokens_at_all() -> None:
    config = make_config(num_heads=4, head_size=32, dtype="bfloat16", output_format="nvfp4_swizzled")
    batch = random_paged_batch(config, [0, 0], [5, 0])
    launch.paged_attention(batch.args, config)
    assert not batch.args.output_block_scale.view(torch.uint8).any()


def test_what_changes_from_step_to_step_specialises_nothing() -> None:
    steps = {"num_tokens", "num_splits"}
    for kernel, names in ((attention_kernel, {*steps, "num_reqs"}), (finish_kernel, steps)):
        parameters = {p.name: p for p in kernel_parameters(kernel)}
        assert all(parameters[name].do_not_specialize for name in names)


def kernel_parameters(kernel: Any) -> list[Any]:
    from triton.runtime.jit import JITFunction

    return kernel.params if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs).params


def test_splits_fill_the_card_and_stay_within_the_keys() -> None:
    limits = Limits(132, 227 << 10, True)
    config = make_config(num_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16")
    assert choose_tiles(config, 1, 1, 1 << 17, limits).num_splits == 33
    assert choose_tiles(config, 1, 1, 100, limits).num_splits == 1
    assert choose_tiles(config, 256, 256, 1 << 17, limits).num_splits == 1
    windowed = config.replace(sliding_window=100)
    assert choose_tiles(windowed, 1, 1, 1 << 17, limits).num_splits == 1
    for block_size, rows in ((16, 64), (0, 128)):
        prefill = choose_tiles(config.replace(block_size=block_size), 8192, 1, 8192, limits)
        assert (prefill.block_m, prefill.num_splits, prefill.full_loop) == (rows, 1, True)


FULL = replace(PLAIN, block_m=32, tile=64, full_loop=True)
"""Loops over tiles that need no mask."""
WAYS = {
    "folded": replace(FULL, folded=True),
    "narrower masks": replace(FULL, masked_tile=16),
    "both": replace(FULL, masked_tile=32, folded=True),
    "hoisted": replace(FULL, masked_tile=32, folded=True, hoisted=True),
    "positive": replace(FULL, masked_tile=32, folded=True, hoisted=True, positive=True),
    "together": replace(FULL, masked_tile=32, folded=True, together=2),
}
LOOPS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window, sinks": {"sliding_window": 100, "sinks": True},
    "negative scale": {"scale": -0.7},
    "soft cap": {"logits_soft_cap": 5.0},
    "bidirectional": {"causality": "bidirectional"},
}


WAY_PAIRS = [("both", features) for features in LOOPS] + [("folded", "causal"), ("narrower masks", "causal")]
WAY_PAIRS += [("hoisted", "window, sinks"), ("hoisted", "soft cap"), ("positive", "causal")]
WAY_PAIRS += [("positive", "window, sinks"), ("together", "causal")]


@pytest.mark.parametrize(("way", "features"), WAY_PAIRS)
def test_every_loop_without_masks_gives_the_reference(way: str, features: str) -> None:
    heads = 2 if way == "together" else 1
    config = make_config(lse=True, block_size=8, num_heads=2 * heads, num_kv_heads=heads, **LOOPS[features])
    batch = random_paged_batch(config, [20, 3], [139, 90])
    run(batch, WAYS[way])


@pytest.mark.parametrize("block_size", [2, 32, 64])
def test_hoisted_places_of_other_blocks(block_size: int) -> None:
    config = make_config(block_size=block_size, lse=True, kv_cache_layout="HND")
    batch = random_paged_batch(config, [17, 3], [139, 70])
    run(batch, WAYS["hoisted"])


def test_packed_keys_in_loops_without_masks() -> None:
    batch = random_packed_batch(make_config(block_size=0, lse=True), [20, 5], [70, 20])
    launch.packed_attention(batch.args, batch.config, WAYS["both"])
    compare(batch, *batch.expected())


def test_invalid_blocks_in_folded_loops() -> None:
    batch = random_paged_batch(make_config(block_size=8, lse=True), [10, 7], [140, 130])
    batch.args.block_table[0, 2] = 2**31 - 1
    run(batch, WAYS["both"])


BOXED = replace(FULL, d_step=32, folded=True, boxes=True, positive=True, masked_tile=32)


BOXED_PAIRS = [(features, False) for features in ("causal", "window, sinks")]
BOXED_PAIRS += [(features, True) for features in LOOPS if features != "negative scale"]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("features", "ahead"), BOXED_PAIRS)
def test_packed_keys_loaded_by_tensor_maps(features: str, ahead: bool) -> None:
    """Tiles begin anywhere: requests follow each other without gaps."""
    config = make_config(block_size=0, lse=True, head_size=32, head_size_v=32, **LOOPS[features])
    batch = random_packed_batch(config, [20, 37], [20, 150])
    launch.packed_attention(batch.args, batch.config, replace(BOXED, scores_ahead=ahead))
    compare(batch, *batch.expected())


def test_nothing_comes_before_the_first_tile() -> None:
    """Where keys are multiplied ahead, zeros stand before the first tile's values, which may be infinite."""
    batch = random_packed_batch(make_config(block_size=0, head_size=32, head_size_v=32), [20], [203])
    batch.args.value[:64] = float("inf")
    launch.packed_attention(batch.args, batch.config, replace(BOXED, scores_ahead=True))
    assert batch.args.output.isposinf().all()


LONG: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}


def tiles_of(target: str = "sm_90", mapped: bool = True, rows: int = 8192, **changes: Any) -> Tiles:
    return choose_tiles(make_config(**{**LONG, **changes}), rows, 1, rows, TARGETS[target], mapped)


def test_tiles_of_long_prefills_over_a_cache() -> None:
    tiles = tiles_of()
    paired = Tiles(64, 4, 64, 128, 1, True, 4, 3, masked_tile=32, folded=True, hoisted=True, positive=True)
    assert tiles == replace(paired, together=8)
    assert tiles_of(num_kv_heads=4).together == 4 and tiles_of(rows=8193) == tiles_of("sm_100") == paired
    # Query, keys and values of two programs share a multiprocessor's memory with what the system keeps.
    assert 2 * (64 * 128 * 2 + 3 * 2 * 64 * 128 * 2 + 1024) <= 233472
    for other in ({"block_size": 24}, {"block_size": 128}, {"head_size_v": 64}):
        assert not tiles_of(**other).hoisted
    for other in ({"scale": -0.1}, {"query_format": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e4m3"}):
        assert not tiles_of(**other).positive
    for narrow in (tiles_of("sm_80"), tiles_of(kv_cache_dtype="fp8_e4m3"), tiles_of(head_size=64)):
        assert narrow.tile <= 64 and narrow.masked_tile == 0
    assert not tiles_of(logits_soft_cap=30.0).folded and not tiles_of(mm_prefix="full").folded
    assert not choose_tiles(make_config(**LONG), 64, 64, 8192, TARGETS["sm_90"]).folded


def test_tiles_of_long_prefills_over_packed_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: dict[str, Any] = {"block_size": 0}
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    boxed = tiles_of(**packed)
    short = replace(tiles_of(), hoisted=False, boxes=True, together=1)
    assert boxed == tiles_of(**packed, dtype="float16") == replace(short, together=4, scores_ahead=True)
    assert tiles_of(**packed, sliding_window=100, sinks=True) == tiles_of(**packed, scale=1e-40) == short
    assert tiles_of(**packed, rows=4095) == tiles_of(**packed, rows=8193) == short
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    assert tiles_of(**packed) == short
    for tiles in (tiles_of(**packed, mapped=False), tiles_of("sm_100", **packed)):
        assert (tiles.block_m, tiles.tile, tiles.positive, tiles.boxes) == (128, 64, True, False)
    for other in ({"scale": -0.1}, {"head_size": 80}, {"head_size_v": 64}, {"alibi": "linear"}, {"rows": 8}):
        assert not tiles_of(**packed, **other).boxes
    for other in ({"batch_invariant": True}, {"mm_prefix": "full"}, {"kv_cache_dtype": "fp8_e4m3"}):
        assert not tiles_of(**packed, **other).boxes
