"""The general kernel's loops over tiles that need no mask give the same results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import triton

from tests.conformance.compare import compare
from tests.support import make_config, random_packed_batch, random_paged_batch
from tools.compile_kernels.launches import TARGETS
from vattn.kernels.triton.attention import launch
from vattn.kernels.triton.common.tiles import Tiles, choose_tiles

FULL = Tiles(block_m=32, group_tile=2, tile=64, d_step=16, num_splits=1, full_loop=True, num_warps=4, num_stages=1)
WAYS = {
    "folded": replace(FULL, folded=True),
    "narrower masks": replace(FULL, masked_tile=16),
    "both": replace(FULL, masked_tile=32, folded=True),
    "hoisted": replace(FULL, masked_tile=32, folded=True, hoisted=True),
    "positive": replace(FULL, masked_tile=32, folded=True, hoisted=True, positive=True),
    "together": replace(FULL, masked_tile=32, folded=True, together=2),
}
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window, sinks": {"sliding_window": 100, "sinks": True},
    "negative scale": {"scale": -0.7},
    "soft cap": {"logits_soft_cap": 5.0},
    "bidirectional": {"causality": "bidirectional"},
}


PAIRS = [("both", features) for features in FEATURES] + [("folded", "causal"), ("narrower masks", "causal")]
PAIRS += [("hoisted", "window, sinks"), ("hoisted", "soft cap"), ("positive", "causal"), ("positive", "window, sinks")]
PAIRS += [("together", "causal")]


@pytest.mark.parametrize(("way", "features"), PAIRS)
def test_every_way_gives_the_reference(way: str, features: str) -> None:
    heads = 2 if way == "together" else 1
    config = make_config(lse=True, block_size=8, num_heads=2 * heads, num_kv_heads=heads, **FEATURES[features])
    batch = random_paged_batch(config, [20, 3], [139, 90])
    launch.paged_attention(batch.args, batch.config, WAYS[way])
    compare(batch, *batch.expected())


@pytest.mark.parametrize("block_size", [2, 32, 64])
def test_hoisted_places_of_other_blocks(block_size: int) -> None:
    config = make_config(block_size=block_size, lse=True, kv_cache_layout="HND")
    batch = random_paged_batch(config, [17, 3], [139, 70])
    launch.paged_attention(batch.args, batch.config, WAYS["hoisted"])
    compare(batch, *batch.expected())


def test_packed_keys() -> None:
    batch = random_packed_batch(make_config(block_size=0, lse=True), [20, 5], [70, 20])
    launch.packed_attention(batch.args, batch.config, WAYS["both"])
    compare(batch, *batch.expected())


def test_invalid_blocks() -> None:
    batch = random_paged_batch(make_config(block_size=8, lse=True), [10, 7], [140, 130])
    batch.args.block_table[0, 2] = 2**31 - 1
    launch.paged_attention(batch.args, batch.config, WAYS["both"])
    compare(batch, *batch.expected())


BOXED = replace(FULL, d_step=32, folded=True, boxes=True, positive=True, masked_tile=32)


BOXED_PAIRS = [(features, False) for features in ("causal", "window, sinks")]
BOXED_PAIRS += [(features, True) for features in FEATURES if features != "negative scale"]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("features", "ahead"), BOXED_PAIRS)
def test_packed_keys_loaded_by_tensor_maps(features: str, ahead: bool) -> None:
    """Tiles begin anywhere: requests follow each other without gaps."""
    config = make_config(block_size=0, lse=True, head_size=32, head_size_v=32, **FEATURES[features])
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
