"""The Hopper prefill kernel against the reference on odd, poisoned batches; every row of every head by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conformance.compare import compare, on_cpu
from tests.kernels.fp8_products import summed_lse
from tests.support import Batch, capture, make_config, random_paged_batch
from vattn.cache.layout import key_value_views
from vattn.config.device import DeviceInfo
from vattn.kernels.hopper.prefill import launch as prefill_launch

pytestmark = pytest.mark.gpu(capability=(9, 0))


ODD = [(1000, 1000), (1, 700), (0, 5), (513, 2049), (130, 130), (64, 1937), (257, 300), (2, 2), (128, 384), (77, 1003)]
"""(query rows, keys): whole prompts, chunks at every kind of offset, decodes and empty requests."""


def prefill_batch(requests: list[tuple[int, int]] = ODD, *, seed: int = 0, padding: int = 0, **changes: Any) -> Batch:
    values = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": "bfloat16", "lse": True, **changes}
    query_lens, seq_lens = (list(lengths) for lengths in zip(*requests, strict=True))
    return random_paged_batch(
        make_config(**values), query_lens, seq_lens, seed=seed, device="cuda", num_padding_reqs=min(padding, 1),
        num_padding_tokens=padding,
    )  # fmt: skip


SHORT = [(9, 700), (1, 5), (0, 7), (30, 333), (12, 12), (3, 2000)]

FP8 = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"}
NATIVE = {**FP8, "query_format": "fp8_e4m3", "query_scale": "head"}

NATIVE_TOLERANCE = 2.0**-4
"""Of FP8 products: weights are rounded to e4m3, half a unit in the last place of which is 2**-4 of them at most."""

NATIVE_LSE_TOLERANCE = 4e-3
"""FP8 matrix instructions keep about 13 bits of a score's partial sums."""


def compare_rows(batch: Batch) -> None:
    """Compare output and LSE with the reference."""
    output, lse = batch.expected()
    tolerances = (NATIVE_TOLERANCE, NATIVE_LSE_TOLERANCE) if batch.config.takes_fp8_query else (None, None)
    compare(on_cpu(batch), output.cpu(), lse.cpu(), *tolerances)


def check(batch: Batch) -> None:
    """Run the kernel on a batch and compare output and LSE with the reference."""
    assert prefill_launch.refusals(batch.config, DeviceInfo.of("cuda")) == []
    prefill_launch.prefill(batch.args, batch.config)
    torch.cuda.synchronize()
    compare_rows(batch)


CACHES: dict[str, dict[str, Any]] = {
    "64": {"head_size": 64},
    "128": {},
    "256": {"head_size": 256},
    "64, fp8": {"head_size": 64, **FP8},
    "128, fp8": FP8,
    "256, fp8": {"head_size": 256, **FP8},
    "64, fp8 query": {"head_size": 64, **NATIVE},
    "128, fp8 query": NATIVE,
    "256, fp8 query": {"head_size": 256, **NATIVE},
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256, 48, 528, 2048])
def test_caches(block_size: int, layout: str, cache: str) -> None:
    check(prefill_batch(block_size=block_size, kv_cache_layout=layout, padding=150, **CACHES[cache]))


PADDED = {"plain": (32, 40, 80, 96, 112, 120, 160, 192, 224), "fp8": (48, 80, 96, 112, 160, 192, 224)}
"""Head sizes behind which tensor maps fill in zeros."""

PADDED_CASES: list[tuple[int, dict[str, Any]]] = [(size, {}) for size in PADDED["plain"]]
PADDED_CASES += [(size, {"dtype": "float16"}) for size in (80, 192)]
PADDED_CASES += [(size, products) for size in PADDED["fp8"] for products in (FP8, NATIVE)]


@pytest.mark.parametrize(("size", "products"), PADDED_CASES, ids=str)
def test_heads_that_zeros_are_added_to(size: int, products: dict[str, Any]) -> None:
    """Alone and side by side in a tile, whatever lies behind a head; one that is NaN stays the only one."""
    for changes in ({}, {"sliding_window": 333, "logits_soft_cap": 20.0, "sinks": True, "kv_cache_layout": "HND"}):
        check(prefill_batch(head_size=size, padding=9, block_size=32, **changes, **products))
    batch = prefill_batch(SHORT, head_size=size, num_heads=10, padding=9, output_format="fp8_static", **products)
    tiles = prefill_launch.TileConfig(1, prefill_launch.padded_pack(batch.config), ahead=True)
    prefill_launch.prefill(batch.args, batch.config, tiles)
    compare_rows(batch)
    batch = prefill_batch(head_size=size, num_kv_heads=8, **products)
    if batch.args.query.dtype != torch.float8_e4m3fn:
        batch.args.query[:, 3] = float("nan")
        prefill_launch.prefill(batch.args, batch.config)
        assert batch.args.output[:, 3].isnan().all(1)[:1000].all()
        others = [0, 1, 2, 4, 5, 6, 7]
        assert not batch.args.output[:, others].isnan().any()


@pytest.mark.parametrize("cache", CACHES)
def test_row_tiles_that_see_nothing(cache: str) -> None:
    """More row tiles than CTAs, taken late: the one behind a tile without keys too."""
    for requests in (ODD, [(0, 5), (300, 100), (2000, 2000), (40, 0), (1, 9)] * 3):
        check(prefill_batch(requests, padding=150, **CACHES[cache]))


@pytest.mark.parametrize("products", [{}, FP8, NATIVE], ids=["plain", "widened", "native"])
@pytest.mark.parametrize(("heads", "window", "block_size"), [(8, 128, 16), (16, 100, 32), (32, 1, 128), (4, 64, 64)])
def test_narrow_windows(heads: int, window: int, block_size: int, products: dict[str, Any]) -> None:
    """Heads of 64 side by side in key tiles of 64, several CTAs a multiprocessor."""
    changes = {"num_heads": heads, "head_size": 64, "sliding_window": window, "block_size": block_size}
    for requests in (ODD, [(3000, 3000), (40, 900), (0, 7), (9, 3)]):
        batch = prefill_batch(requests, padding=70, sinks=heads != 8, **changes, **products)
        assert prefill_launch.sees_few_keys(batch.config)
        check(batch)


SHAPES: dict[str, dict[str, Any]] = {
    "head of 64, fp16": {"head_size": 64, "dtype": "float16", "block_size": 64},
    "head of 256, fp16": {"head_size": 256, "dtype": "float16", "block_size": 64},
    "fp16, fp8": {"dtype": "float16", **FP8},
    "fp16, fp8 query": {"dtype": "float16", **NATIVE},
    "one scale, groups of 5": {**FP8, "kv_scale": "tensor", "num_heads": 10},
    "no scales": {**NATIVE, "kv_scale": "tensor", "query_scale": "tensor", "num_heads": 3, "num_kv_heads": 3},
    "fp16": {"dtype": "float16"},
    "no groups, odd heads": {"num_heads": 3, "num_kv_heads": 3},
    "groups of 7": {"num_heads": 14, "num_kv_heads": 2},
    "one KV head": {"num_heads": 8, "num_kv_heads": 1},
    "no lse": {"lse": False},
}
FEATURES: dict[str, dict[str, Any]] = {
    "window 1": {"sliding_window": 1},
    "window 100": {"sliding_window": 100},
    "window 128": {"sliding_window": 128, "block_size": 64},
    "window 700": {"sliding_window": 700, "block_size": 256},
    "soft cap": {"logits_soft_cap": 5.0},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 333, "logits_soft_cap": 20.0, "sinks": True, "kv_cache_layout": "HND"},
    "large scores": {"scale": 3.0},
}
OUTPUTS: dict[str, dict[str, Any]] = {
    "fp8_static": {},
    "fp8_per_token": {},
    "fp8_group128": {"output_min_scale": 1e-3},
    "fp8_group128_pow2": {"output_arithmetic": "multiply"},
    "fp8_group64_col": {"output_arithmetic": "multiply", "output_min_scale": 1e-3},
    "fp8_group64_pow2_col": {"sinks": True, "kv_cache_layout": "HND"},
    "fp8_group64": {"output_arithmetic": "approximate_divide"},
    "nvfp4": {"block_size": 64},
    "nvfp4_swizzled": {},
}


@pytest.mark.parametrize("case", SHAPES)
def test_shapes(case: str) -> None:
    check(prefill_batch(**SHAPES[case]))


PRODUCTS: dict[str, dict[str, Any]] = {"plain": {}, "wide": {"head_size": 256}, "widened": FP8, "native": NATIVE}
NARROW: dict[str, dict[str, Any]] = {"narrow": {"head_size": 64}, "narrow, native": {"head_size": 64, **NATIVE}}
WIDE: dict[str, dict[str, Any]] = {
    "wide, widened": {"head_size": 256, **FP8},
    "wide, native": {"head_size": 256, **NATIVE},
}


@pytest.mark.parametrize("products", [*PRODUCTS, *WIDE])
@pytest.mark.parametrize("case", FEATURES)
def test_features(case: str, products: str) -> None:
    changes = {**(PRODUCTS | WIDE)[products], **FEATURES[case]}
    if products == "wide, native" and case == "large scores":
        # Sums of twice as many columns are cut off twice as often: `tests.kernels.fp8_products` gives one row's
        # log-sum-exp an error of 3.1e-3 at this scale, and 4.6e-3 at half as much again.
        changes["scale"] = 1.0
    check(prefill_batch(padding=3, **changes))


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_fp8_scores_are_what_the_instructions_sum(head_size: int) -> None:
    """Of large scores the log-sum-exp is off by as much as cut-off sums explain, and by no more than fp32 rounds."""
    batch = prefill_batch(head_size=head_size, scale=3.0, padding=3, **NATIVE)
    prefill_launch.prefill(batch.args, batch.config)
    torch.cuda.synchronize()
    got = on_cpu(batch)
    for request, row in ((0, 0), (0, 7), (0, 70), (4, 0), (4, 1), (4, 2), (4, 129), (7, 1)):
        expected = summed_lse(got, request, row)
        error = (got.args.lse[int(got.args.query_start_loc[request]) + row] - expected).abs()
        assert (error <= 1e-4 * expected.abs().clamp(min=1)).all(), (request, row, error)


@pytest.mark.parametrize("products", [*PRODUCTS, *NARROW, *WIDE])
@pytest.mark.parametrize("output_format", OUTPUTS)
def test_output_formats(output_format: str, products: str) -> None:
    changes = {**(PRODUCTS | NARROW | WIDE)[products], **OUTPUTS[output_format]}
    check(prefill_batch(output_format=output_format, padding=9, **changes))


def test_swizzled_scales_of_whole_and_of_broken_tiles() -> None:
    for rows in (256, 300):
        check(prefill_batch([(rows, rows)], output_format="nvfp4_swizzled"))


@pytest.mark.parametrize("changes", [{}, {"sinks": True}, {"sliding_window": 50}, FP8, NATIVE], ids=str)
def test_queries_longer_than_their_sequences(changes: dict[str, Any]) -> None:
    check(prefill_batch([(300, 100), (200, 0), (129, 128), (70, 3), (500, 20)], padding=5, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_cache_layout": "HND"},
        {"block_size": 256},
        {"block_size": 48},
        {"head_size": 256},
        FP8,
        {"head_size": 256, **FP8},
        NATIVE,
    ],
    ids=str,
)
def test_block_ids_out_of_range_hide_their_keys(changes: dict[str, Any]) -> None:
    batch = prefill_batch(**changes)
    table = batch.args.block_table
    blocks = key_value_views(batch.args.key_cache, batch.args.value_cache, batch.config)[0].shape[0]
    for request, column, block in ((0, 0, -1), (0, 3, blocks), (3, 7, 2**31 - 1), (3, 8, -(2**31)), (4, 0, blocks + 5)):
        if column < table.shape[1]:
            table[request, column] = block
    check(batch)


def test_many_requests_and_long_ones() -> None:
    check(prefill_batch([(70 + 3 * n, 90 + 40 * n) for n in range(60)], num_heads=4))
    for products in PRODUCTS.values():
        check(prefill_batch([(3000, 9001), (1, 9000)], num_heads=4, num_kv_heads=1, padding=128, **products))


def test_long_requests_of_narrow_heads() -> None:
    """From 2048 rows per request on, three warpgroups share a tile."""
    requests = [(3000, 9001), (2500, 2500), (1, 17), (4100, 4500)]
    for changes in ({}, {"dtype": "float16", "sliding_window": 700}, {"sinks": True, "logits_soft_cap": 20.0}):
        check(prefill_batch(requests, head_size=64, num_heads=4, num_kv_heads=2, padding=7, **changes))


@pytest.mark.parametrize("products", PRODUCTS)
def test_layers_share_a_schedule_made_once_a_step(products: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = prefill_batch(padding=40, backend="TRITON_ATTN", **PRODUCTS[products]).planned()
    (schedule,) = batch.args.plan
    filled = schedule.clone()
    monkeypatch.setattr(prefill_launch, "plan", None)
    for _ in range(3):
        batch.args.output.view(torch.uint8).fill_(0xFF)
        torch.ops.vattn.attention(*batch.args)
        compare_rows(batch)
    assert torch.equal(schedule, filled)


def test_replays_in_a_graph_with_other_lengths() -> None:
    batch = prefill_batch([(300, 900), (40, 900), (200, 900), (1, 900)], padding=60)
    args = batch.args
    prefill_launch.prefill(args, batch.config)
    graph, _ = capture(lambda: prefill_launch.prefill(args, batch.config))
    for starts, lengths in (([0, 1, 300, 301, 520], [5, 899, 64, 300]), ([0, 540, 540, 540, 541], [900, 3, 0, 500])):
        args.query_start_loc[:5].copy_(torch.tensor(starts, dtype=torch.int32))
        args.query_start_loc[5:] = starts[-1]
        args.seq_lens[:4].copy_(torch.tensor(lengths, dtype=torch.int32))
        args.output.view(torch.uint8).fill_(0xFF)
        graph.replay()
        torch.cuda.synchronize()
        compare_rows(batch)
