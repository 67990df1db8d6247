"""Which calls go to the Hopper prefill kernel; the kernel itself is tested on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import make_config
from vattn.backends import hopper_routes
from vattn.config.device import DeviceInfo
from vattn.errors import ShapeError
from vattn.kernels.hopper import mixed_launch
from vattn.kernels.hopper.decode import launch as decode_fast
from vattn.kernels.hopper.prefill import launch as prefill_launch
from vattn.kernels.hopper.prefill.launch import TileConfig

HOPPER = DeviceInfo("cuda", (9, 0), "a Hopper GPU")
LLAMA: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": "bfloat16"}
ORDERS = ("LBHN", "LBNH", "LHBN", "BLHN", "BLNH", "BHLN")
"""Layers, blocks, tokens and heads in the orders in which engines keep them; columns are last."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fp32": ({"dtype": "float32"}, "dtype float32"),
    "other fp8 cache": ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype fp8_e5m2"),
    "fp8 query": ({"query_format": "fp8_e4m3"}, "query_format fp8_e4m3"),
    "query quantised by the kernel": (
        {"kv_cache_dtype": "fp8_e4m3", "query_format": "fp8_e4m3", "query_load": "divide"},
        "query_load divide",
    ),
    "head": ({"head_size": 264}, "head_size 264"),
    "small head": ({"head_size": 24}, "head_size 24"),
    "head of FP8": (
        {"head_size": 120, "kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor"},
        "head_size 120 over fp8_e4m3",
    ),
    "unequal heads": ({"head_size_v": 64}, "unequal_head_sizes"),
    "block": ({"block_size": 24}, "block_size 24"),
    "no cache": ({"block_size": 0}, "contiguous_kv"),
    "encoder": ({"attn_type": "encoder", "causality": "bidirectional"}, "attn_type encoder"),
    "scale": ({"scale": -1.0}, "scale -1.0"),
    "large cap": ({"logits_soft_cap": 2e8}, "logits_soft_cap 200000000.0 (runs up to 1e+06)"),
    "alibi": ({"alibi": "linear"}, "alibi"),
    "chunks": ({"sliding_window": 64, "chunk_lookback": 1}, "chunk_lookback"),
    "tree": ({"tree_bias": True}, "tree_bias"),
    "ranges": ({"mm_prefix": "full"}, "mm_prefix"),
    "flags": ({"causality": "per_request"}, "causal_flags"),
    "invariant": ({"batch_invariant": True}, "batch_invariant"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    changes, named = REFUSED[case]
    for taken in ({}, {"logits_soft_cap": 1e6}, *({"head_size": size} for size in (32, 80, 120, 192, 256))):
        assert prefill_launch.refusals(make_config(**{**LLAMA, **taken}), HOPPER) == []
    assert named in " ".join(prefill_launch.refusals(make_config(**{**LLAMA, **changes}), HOPPER))


def test_other_devices_are_refused() -> None:
    for device in (DeviceInfo("cpu"), DeviceInfo("cuda", (8, 0)), DeviceInfo("cuda", (10, 0))):
        assert prefill_launch.refusals(make_config(**LLAMA), device)


def prefill_call(rows: int = 640, reqs: int = 2, width: int = 4, blocks: int = 3) -> Any:
    return SimpleNamespace(
        query=SimpleNamespace(shape=(rows, 8, 128), device="a GPU"), seq_lens=torch.zeros(reqs),
        block_table=torch.zeros(reqs, width), key_cache=torch.zeros(blocks, 16, 8, 128),
        value_cache=torch.zeros(blocks, 16, 8, 128),
    )  # fmt: skip


def layer_of(pool: torch.Tensor, order: str) -> torch.Tensor:
    """Return layer 1 of a pool as `[blocks, tokens, heads, columns]`."""
    return pool.permute(*(order.index(name) for name in "LBNH"), 4)[1]


def test_many_rows_per_request_go_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(**LLAMA)
    calls: list[Any] = []
    monkeypatch.setattr(DeviceInfo, "of", lambda device: HOPPER)
    monkeypatch.setattr(prefill_launch, "prefill", lambda *args: calls.append(args))
    monkeypatch.setattr(mixed_launch, "accepts", lambda args, config: False)
    prefill_launch.runs.cache_clear()
    assert hopper_routes.run(prefill_call(), config) and len(calls) == 1
    assert hopper_routes.run(prefill_call(128), config) and len(calls) == 2
    for call in (prefill_call(127), prefill_call(width=0), prefill_call(blocks=0)):
        assert not hopper_routes.run(call, config)
    for changes in ({"kv_cache_dtype": "fp8_e4m3"}, {"head_size": 256}, {"dtype": "float16", "num_heads": 10}):
        assert hopper_routes.run(prefill_call(), make_config(**{**LLAMA, **changes}))
    del calls[2:]
    for changes in ({"alibi": "linear"}, {"dtype": "float32"}, {"block_size": 24}):
        assert not hopper_routes.run(prefill_call(), make_config(**{**LLAMA, **changes}))
    assert len(calls) == 2
    prefill_launch.runs.cache_clear()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("step", [(640, 2), (1025, 17)])
def test_any_rows_at_multiples_of_16_bytes_go_to_the_kernel(
    step: tuple[int, int], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceInfo, "of", lambda device: HOPPER)
    monkeypatch.setattr("vattn.config.device.multiprocessors", lambda device: 132)
    config = make_config(**{**LLAMA, "num_heads": 32, "num_kv_heads": 8}, kv_cache_layout=layout)
    takes = prefill_launch.accepts if step[0] == 640 else mixed_launch.accepts
    for runs in (prefill_launch.runs, decode_fast.runs):
        runs.cache_clear()
    sizes = {"B": 3, "N": 16, "H": 8}
    for order in ORDERS:
        call = prefill_call(*step)
        for width, fits in ((256, True), (136, True), (132, False)):
            pool = torch.zeros(*(sizes.get(name, 2) for name in order), width, dtype=torch.bfloat16)
            call.key_cache = layer_of(pool[..., :128], order)
            assert takes(call, config) == fits, (order, width)
        call.value_cache = torch.zeros(3 * 16 * 8 * 128 + 4, dtype=torch.bfloat16)[4:].view(3, 16, 8, 128)
        assert not takes(call, config), "values start at byte 8"
    for runs in (prefill_launch.runs, decode_fast.runs):
        runs.cache_clear()


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_tensor_maps_describe_any_memory(dtype: torch.dtype, block_size: int) -> None:
    config = make_config(**LLAMA, block_size=block_size)
    for order in ORDERS:
        sizes = {"B": 5, "N": block_size, "H": 2, "L": 3}
        pool = torch.zeros(*(sizes[name] for name in order), 256, dtype=torch.uint8 if dtype.itemsize == 1 else dtype)
        cache = layer_of(pool, order)[..., 128:]
        boxes = prefill_launch.cache_boxes(cache.view(dtype), config, TileConfig(), "any")
        assert boxes.block_shape == [1, 1, min(block_size, 128), 128 // dtype.itemsize]
        cache.as_strided(boxes.shape, boxes.strides)[3, 1, 7, 5] = 1
        assert cache[3, 7, 1, 5] == 1 and pool.sum() == 1


def test_tensor_maps_take_any_stride_of_a_dimension_of_size_1() -> None:
    cache = torch.zeros(3, 16, 1, 128).bfloat16().as_strided((3, 16, 1, 128), (2048, 128, 1, 1))
    call = prefill_call()
    call.key_cache = call.value_cache = cache
    assert decode_fast.has_boxes(call)
    prefill_launch.cache_boxes(cache, make_config(**LLAMA), TileConfig(), "any")


def test_maps_of_caches_without_gaps_have_a_dimension_less() -> None:
    config = make_config(**LLAMA, block_size=64)
    for order, kind, place in (
        ("BNH", "tokens", (3, 7, 128 + 5)), ("BLNH", "tokens", (3, 7, 128 + 5)), ("BHN", "heads", (3 * 2 + 1, 7, 5)),
        ("LBHN", "heads", (3 * 2 + 1, 7, 5)), ("BLHN", "any", (3, 1, 7, 5)), ("HBN", "any", (3, 1, 7, 5)),
    ):  # fmt: skip
        sizes = {"B": 5, "N": 64, "H": 2, "L": 3}
        pool = torch.zeros(*(sizes[name] for name in order), 128).bfloat16()
        letters = order.replace("L", "")
        cache = pool.select(order.index("L"), 1) if "L" in order else pool
        cache = cache.permute(*(letters.index(name) for name in "BNH"), 3)
        assert prefill_launch.map_of(cache, cache) == kind
        boxes = prefill_launch.cache_boxes(cache, config, TileConfig(), kind)
        assert boxes.block_shape == [1] * (len(place) - 2) + [64, 64]
        cache.as_strided(boxes.shape, boxes.strides)[place] = 1
        assert cache[3, 7, 1, 5] == 1 and pool.sum() == 1
    pool = torch.zeros(5, 64, 256, dtype=torch.bfloat16)
    one_head = pool.as_strided((5, 64, 1, 128), (64 * 256, 256, 64 * 256, 1))
    boxes = prefill_launch.cache_boxes(one_head, config, TileConfig(), prefill_launch.map_of(one_head, one_head))
    assert boxes.strides == [64 * 256, 256, 1]
    tokens, heads = torch.zeros(5, 64, 2, 128), torch.zeros(5, 2, 64, 128).transpose(1, 2)
    assert prefill_launch.map_of(tokens, heads) == prefill_launch.map_of(heads, tokens) == "any"


def test_products() -> None:
    quantised = {**LLAMA, "kv_cache_dtype": "fp8_e4m3"}
    found = [
        prefill_launch.products_of(make_config(**changes))
        for changes in (LLAMA, quantised, {**quantised, "query_format": "fp8_e4m3"})
    ]
    assert found == ["plain", "widened", "native"]
    wide = make_config(**{**quantised, "query_format": "fp8_e4m3", "head_size": 256})
    assert prefill_launch.refusals(wide, HOPPER) == [] and prefill_launch.key_tile(wide, TileConfig()) == 64
    narrow = make_config(**{**LLAMA, "head_size": 64})
    assert prefill_launch.warpgroups(make_config(**LLAMA), 8192) == prefill_launch.warpgroups(narrow, 2047) == 2


def test_wide_heads_take_long_turns() -> None:
    """Two warpgroups on 16-bit heads of 256 alone, for which they were timed."""
    wide = {**LLAMA, "head_size": 256}
    shape = prefill_launch.shape_of(make_config(**wide), TileConfig(2, 4), False)
    assert (shape.LONG_PING_PONG, shape.HELD) == (True, 128)
    fp8 = make_config(**wide, kv_cache_dtype="fp8_e4m3", query_format="fp8_e4m3")
    for config, cut in (
        (make_config(**wide), TileConfig(1)),
        (make_config(**LLAMA), TileConfig(2)),
        (fp8, TileConfig(2)),
    ):
        shape = prefill_launch.shape_of(config, cut, False)
        assert (shape.LONG_PING_PONG, shape.HELD) == (False, 0)
    widened = make_config(**wide, kv_cache_dtype="fp8_e4m3")
    assert prefill_launch.refusals(widened, HOPPER) == []
    shape = prefill_launch.shape_of(widened, TileConfig(2, 4), False)
    assert (shape.LONG_PING_PONG, shape.HELD, shape.CONVERTERS) == (True, 0, 2)


def test_cuts_of_few_row_tiles_and_of_narrow_windows() -> None:
    """Half as many rows where whole tiles would not fill the card; several short tiles where few keys are seen."""
    one_head = make_config(**{**LLAMA, "num_heads": 4, "num_kv_heads": 1})
    groups = [prefill_launch.choose_tiles(one_head, tokens, 1, 132).groups for tokens in (2048, 4096, 4256, 8192)]
    assert groups == [1, 1, 2, 2]
    quantised = one_head.replace(kv_cache_dtype="fp8_e4m3", kv_scale="tensor")
    assert prefill_launch.choose_tiles(quantised, 2048, 1, 132).groups == 2
    of_both = quantised.replace(query_format="fp8_e4m3", query_scale="tensor")
    assert [prefill_launch.choose_tiles(of_both, tokens, 1, 132).groups for tokens in (4096, 4352)] == [1, 2]
    window = {"num_heads": 64, "num_kv_heads": 8, "head_size": 64, "sliding_window": 128}
    narrow = make_config(**{**LLAMA, **window})
    assert prefill_launch.choose_tiles(narrow, 8192, 1, 132) == TileConfig(1, 8, keys=64, residents=3)
    of_fp8 = narrow.replace(kv_cache_dtype="fp8_e4m3", kv_scale="tensor")
    of_both = of_fp8.replace(query_format="fp8_e4m3", query_scale="tensor")
    assert prefill_launch.choose_tiles(of_both, 8192, 1, 132).residents == 2
    assert prefill_launch.choose_tiles(of_fp8, 8192, 1, 132) == TileConfig(1, 8, converters=2, keys=64, residents=2)
    for other in (narrow.replace(sliding_window=129), narrow.replace(num_heads=8)):
        assert prefill_launch.choose_tiles(other, 8192, 1, 132).residents == 1


def test_heads_of_long_prompts_run_side_by_side() -> None:
    """Eight KV heads of requests of 4k to 8k rows, two of others; as many as divide their number."""
    config = make_config(**{**LLAMA, "num_heads": 32, "num_kv_heads": 8})
    steps = ((8192, 1), (8192, 2), (8192, 3), (32768, 4), (32768, 1))
    assert [prefill_launch.choose_tiles(config, *step, 132).together for step in steps] == [8, 8, 2, 8, 2]
    for other in ({"sliding_window": 1024}, {"head_size": 64}, {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor"}):
        assert prefill_launch.choose_tiles(config.replace(**other), 8192, 1, 132).together == 2
    shapes = [
        prefill_launch.shape_of(config.replace(num_kv_heads=n), TileConfig(together=8), False) for n in (8, 32, 4, 1)
    ]
    assert [shape.KV_GROUP for shape in shapes] == [8, 8, 4, 1]
    assert (
        mixed_launch.choose_tiles(config, 256, 64).together == 8
        and mixed_launch.choose_tiles(config, 300, 64).together == 2
    )


def test_short_prompts_of_fp8_queries_multiply_values_by_halves() -> None:
    config = make_config(**{**LLAMA, "num_heads": 32, "num_kv_heads": 8})
    of_fp8 = config.replace(kv_cache_dtype="fp8_e4m3", kv_scale="tensor")
    of_both = of_fp8.replace(query_format="fp8_e4m3", query_scale="tensor")
    assert [prefill_launch.choose_tiles(of_both, tokens, 4, 132).halves for tokens in (2048, 8188, 8192)] == [
        True,
        True,
        False,
    ]
    assert not prefill_launch.choose_tiles(of_both, 512, 1, 132).halves, "one warpgroup was not timed so"
    for other in (config, of_fp8, of_both.replace(head_size=64, head_size_v=64)):
        assert not prefill_launch.choose_tiles(other, 2048, 4, 132).halves


def test_row_tiles_are_taken_late_where_they_are_few() -> None:
    config, takes = make_config(**LLAMA), prefill_launch.takes_late
    assert takes(config, TileConfig(2, 4), 8 * 132, 132) and not takes(config, TileConfig(2, 4), 8 * 132 + 1, 132)
    assert not any(takes(config, cut, 1, 132) for cut in (TileConfig(3), TileConfig(2, 4, ahead=True)))


def test_tensor_maps_of_fp8_caches_have_whole_rows() -> None:
    config = make_config(**{**LLAMA, "kv_cache_dtype": "fp8_e4m3"}, block_size=256)
    cache = torch.zeros(5, 256, 2, 128, dtype=torch.float8_e4m3fn)
    boxes = prefill_launch.cache_boxes(cache, config, TileConfig(), "tokens")
    assert boxes.block_shape == [1, 128, 128] and boxes.shape == [5, 256, 256]


def test_the_shape_of_a_schedule_tells_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how many rows there are, holds the schedule of any kind of step, and never shrinks."""
    monkeypatch.setattr("vattn.config.device.multiprocessors", lambda device: 132)
    config, device = make_config(**LLAMA), torch.device("cpu")
    narrow = config.replace(head_size=64, head_size_v=64, sliding_window=128)
    steps = [
        (tokens, reqs) for reqs in (1, 2, 3, 17, 256) for tokens in (1, 2, 5, 64, 192, 256, 300, 1024, 8192, 20000)
    ]
    for tokens, reqs in steps:
        shape = decode_fast.plan_shape(config, tokens, reqs, device)
        schedule = torch.empty(shape, dtype=torch.int32)
        assert decode_fast.tokens_of_plan(schedule, config, reqs) == max(tokens, reqs)
        if prefill_launch.is_prefill(tokens, reqs):
            for layer in (config, narrow, narrow.replace(num_heads=32)):
                room = decode_fast.plan_shape(layer, tokens, reqs, device)[0]
                cut = prefill_launch.choose_tiles(layer, tokens, reqs, 132)
                assert prefill_launch.plan_rows(tokens, reqs, cut) <= room
        rows = decode_fast.rows_at_a_time(config, tokens, reqs)
        if rows:
            tuning = decode_fast.choose_tuning(config, reqs, rows)
            items = decode_fast.sizing(config, reqs, tuning, device, rows, tokens).max_items
            assert 1 + items + decode_fast.chunks_of(reqs, rows, tokens) <= shape[0]
        larger = decode_fast.plan_shape(config, tokens + 1, reqs + 1, device)
        assert larger[0] >= shape[0]
    for shape in ((7, 8), (100000, 7), (5,), (decode_fast.plan_shape(config, 4, 4, device)[0] + 1, 8)):
        with pytest.raises(ShapeError, match="schedule has shape"):
            decode_fast.tokens_of_plan(torch.empty(shape), config, 4)
