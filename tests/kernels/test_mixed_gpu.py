"""Steps between decode and prefill on Hopper against the reference: packed heads, and two kernels for one step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.test_prefill_gpu import CACHES, FEATURES, FP8, NATIVE, ODD, compare_rows, prefill_batch
from tests.support import Batch, capture
from vattn.kernels.hopper import mixed_launch
from vattn.kernels.hopper.prefill import launch as prefill_launch

pytestmark = pytest.mark.gpu(capability=(9, 0))


SHORT = [(1, 700), (8, 2049), (0, 5), (3, 3), (16, 16), (7, 1937), (5, 300), (17, 40), (1, 1), (31, 1003), (2, 130)]
"""Drafted tokens and short extends; the last rows of some lie past a tile of 16 tokens."""

MIXED = [(1, 4000), (300, 300), (4, 513), (1, 17), (0, 9), (64, 1937), (5, 700), (1, 2049), (2, 90), (129, 129)]


def check_packed(batch: Batch, groups: int, padded: bool = False) -> None:
    packs = prefill_launch.padded_pack if padded else prefill_launch.packs
    cut = prefill_launch.TileConfig(groups, packs(batch.config))
    prefill_launch.prefill(batch.args, batch.config, cut)
    torch.cuda.synchronize()
    compare_rows(batch)


def check_mixed(batch: Batch, route: str) -> None:
    mixed_launch.attend(batch.args, batch.config, route)
    torch.cuda.synchronize()
    compare_rows(batch)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("cache", CACHES)
def test_packed_heads(cache: str, groups: int) -> None:
    for block_size, layout in ((16, "NHD"), (64, "HND"), (256, "NHD")):
        changes = {"block_size": block_size, "kv_cache_layout": layout, **CACHES[cache]}
        check_packed(prefill_batch(SHORT, padding=40, **changes), groups)
    check_packed(prefill_batch(ODD, padding=150, **CACHES[cache]), groups)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("heads", [2, 4, 10, 16, 32])
def test_groups_of_heads(heads: int, groups: int) -> None:
    for products in ({}, FP8, NATIVE):
        check_packed(prefill_batch(SHORT, num_heads=heads, padding=3, **products), groups)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("heads", [6, 10, 14, 22])
def test_groups_that_leave_rows_unused(heads: int, groups: int) -> None:
    for products in ({}, FP8, NATIVE):
        check_packed(prefill_batch(SHORT, num_heads=heads, padding=3, **products), groups, padded=True)


@pytest.mark.parametrize(
    "changes",
    [{}, {"head_size": 64}, {"head_size": 256}, {"head_size": 256, **FP8}, {"head_size": 64, **NATIVE}],
)
def test_unused_rows_past_the_last_head(changes: dict[str, Any]) -> None:
    """Boxes of the query are larger than all heads there are."""
    for heads in (5, 7):
        batch = prefill_batch(SHORT, num_heads=heads, num_kv_heads=1, sinks=True, padding=40, **changes)
        check_packed(batch, 1, padded=True)


@pytest.mark.parametrize("products", [{}, FP8, NATIVE], ids=["plain", "widened", "native"])
@pytest.mark.parametrize("case", FEATURES)
def test_features_of_groups_that_leave_rows_unused(case: str, products: dict[str, Any]) -> None:
    check_packed(prefill_batch(SHORT, num_heads=14, padding=3, **products, **FEATURES[case]), 1, padded=True)


@pytest.mark.parametrize("products", [{}, {"head_size": 256}, FP8, NATIVE], ids=["plain", "wide", "widened", "native"])
@pytest.mark.parametrize("case", FEATURES)
def test_features_of_packed_heads(case: str, products: dict[str, Any]) -> None:
    for groups in (1, 2):
        check_packed(prefill_batch(SHORT, padding=3, **products, **FEATURES[case]), groups)


OUTPUTS: dict[str, dict[str, Any]] = {
    "fp8_static": {},
    "fp8_per_token": {},
    "fp8_group64": {"output_arithmetic": "approximate_divide", "sinks": True},
    "fp8_group128_pow2": {"output_arithmetic": "multiply"},
    "nvfp4": {},
    "nvfp4_swizzled": {},
}


@pytest.mark.parametrize("output_format", OUTPUTS)
def test_output_formats(output_format: str) -> None:
    for products in ({}, NATIVE):
        batch = prefill_batch(MIXED, output_format=output_format, padding=9, **products, **OUTPUTS[output_format])
        check_packed(batch, 2)
        for route in ("two_kernels", "split_keys"):
            batch.args.output.view(torch.uint8).fill_(0xFF)
            check_mixed(batch, route)


@pytest.mark.parametrize("output_format", OUTPUTS)
def test_output_formats_of_groups_that_leave_rows_unused(output_format: str) -> None:
    for products in ({}, NATIVE):
        changes = {"output_format": output_format, **products, **OUTPUTS[output_format]}
        batch = prefill_batch(SHORT, num_heads=10, padding=9, **changes)
        check_packed(batch, 1, padded=True)
        for route in ("two_kernels", "split_keys"):
            batch.args.output.view(torch.uint8).fill_(0xFF)
            check_mixed(batch, route)


@pytest.mark.parametrize("route", ["packed_gqa", "two_kernels", "split_keys"])
@pytest.mark.parametrize("cache", CACHES)
def test_two_kernels(cache: str, route: str) -> None:
    for heads, requests in ((8, MIXED), (2, MIXED), (32, SHORT), (10, SHORT)):
        for padding in (0, 70):
            batch = prefill_batch(requests, num_heads=heads, padding=padding, **CACHES[cache])
            check_mixed(batch, route)


@pytest.mark.parametrize("changes", [{}, {"output_format": "fp8_static"}, {"sliding_window": 333, "sinks": True}])
@pytest.mark.parametrize("products", [FP8, NATIVE], ids=["fp8", "fp8 query"])
def test_two_kernels_of_eight_rows(products: dict[str, Any], changes: dict[str, Any]) -> None:
    """Requests of more rows than the decode kernel attends at once are several chunks."""
    for heads, requests, head_size in ((8, MIXED, 128), (2, MIXED, 128), (16, SHORT, 64), (10, SHORT, 128)):
        for padding in (0, 70):
            batch = prefill_batch(
                requests, num_heads=heads, head_size=head_size, padding=padding, **products, **changes
            )
            check_mixed(batch, "two_kernels")


@pytest.mark.parametrize("case", FEATURES)
def test_features_of_two_kernels(case: str) -> None:
    for products in ({}, FP8):
        batch = prefill_batch(MIXED, padding=3, **products, **FEATURES[case])
        check_mixed(batch, "two_kernels")


FEW = [(7, 9000), (16, 5003), (1, 2049), (0, 9), (40, 3000), (3, 3), (128, 4100), (2, 0), (9, 5)]
"""Few row tiles over long contexts, short ones among them."""


@pytest.mark.parametrize("products", [{}, {"head_size": 256}, FP8, NATIVE], ids=["plain", "wide", "widened", "native"])
@pytest.mark.parametrize("case", FEATURES)
def test_features_of_split_keys(case: str, products: dict[str, Any]) -> None:
    for heads, requests in ((8, FEW), (10, FEW[:2])):
        batch = prefill_batch(requests, num_heads=heads, padding=3, **products, **FEATURES[case])
        check_mixed(batch, "split_keys")


@pytest.mark.parametrize("route", ["two_kernels", "split_keys"])
@pytest.mark.parametrize("products", [{}, FP8, NATIVE], ids=["plain", "widened", "native"])
@pytest.mark.parametrize("heads", [18, 24])
def test_large_groups_that_leave_rows_unused(heads: int, products: dict[str, Any], route: str) -> None:
    for requests in (MIXED, SHORT):
        check_mixed(prefill_batch(requests, num_heads=heads, padding=70, **products), route)


@pytest.mark.parametrize("size", [32, 80, 112, 160, 192, 224])
@pytest.mark.parametrize("products", [{}, FP8, NATIVE], ids=["plain", "widened", "native"])
def test_split_keys_of_heads_that_zeros_are_added_to(size: int, products: dict[str, Any]) -> None:
    window = {"sliding_window": 333, "sinks": True, "block_size": 64, "kv_cache_layout": "HND"}
    for changes in ({}, window, {"num_heads": 10}):
        check_mixed(prefill_batch(FEW, head_size=size, padding=9, **changes, **products), "split_keys")


@pytest.mark.parametrize("route", ["two_kernels", "split_keys"])
@pytest.mark.parametrize("products", [{}, {"head_size": 256}, FP8, NATIVE], ids=["plain", "wide", "widened", "native"])
@pytest.mark.parametrize("heads", [3, 5, 6, 7, 9, 11])
def test_groups_of_which_a_warpgroup_holds_whole_tokens(heads: int, products: dict[str, Any], route: str) -> None:
    """Its last rows are unused, and it loads its queries itself, from rows of a larger tensor."""
    if route == "two_kernels" and products.get("head_size") == 256:
        route = "packed_gqa"
    batch = prefill_batch(MIXED, num_heads=3 * heads, num_kv_heads=3, sinks=heads == 5, padding=70, **products)
    assert mixed_launch.choose_tiles(batch.config, 700, len(MIXED)).pack == heads
    check_mixed(batch, route)
    rows, _, width = batch.args.query.shape
    larger = torch.zeros((rows, 3 * heads + 2, width + 16), dtype=batch.args.query.dtype, device="cuda")
    larger.view(torch.uint8).fill_(0xFF)
    batch.args = batch.args._replace(query=larger[:, 1:-1, :width].copy_(batch.args.query))
    check_mixed(batch, route)


@pytest.mark.parametrize("products", [{}, FP8, NATIVE], ids=["plain", "widened", "native"])
@pytest.mark.parametrize("heads", [17, 29, 48, 64])
def test_large_groups(heads: int, products: dict[str, Any]) -> None:
    """Also decodes: the decode kernel takes up to 16 heads of a group. Fewer rows than requests are told from them."""
    decodes = [(1, 1 + 97 * i) for i in range(40)]
    for requests in (
        FEW,
        decodes,
        [(1, 9000), (0, 3), (1, 1)],
        [(1, 9000), (1, 1)],
        [(3, 100 + 30 * i) for i in range(60)],
    ):
        batch = attend_as_planned(requests, num_heads=2 * heads, num_kv_heads=2, **products)
        expected, _ = batch.expected()
        error = float((batch.output() - expected).norm() / expected.norm())
        assert error < (2.0**-4 if batch.config.takes_fp8_query else 2.0**-7)


@pytest.mark.parametrize("route", ["packed_gqa", "two_kernels", "split_keys"])
def test_replays_in_a_graph_with_other_lengths(route: str) -> None:
    """The kernel after an overlapped pair sees both results, replay after replay."""
    batch = prefill_batch([(300, 900), (1, 900), (20, 900), (1, 900)] * 8, padding=60)
    args = batch.args
    sizes = args.query.shape[0], args.seq_lens.shape[0], args.query.device
    shape = mixed_launch.decode_fast.plan_shape(batch.config, *sizes)
    schedule = torch.zeros(shape, dtype=torch.int32, device="cuda")
    copied = torch.empty_like(args.output)

    def step() -> None:
        mixed_launch.plan(args.query_start_loc, args.seq_lens, schedule, args.query.shape[0], batch.config, route)
        for _ in range(2):
            args.output.view(torch.uint8).fill_(0xFF)
            mixed_launch.attend(args._replace(plan=[schedule]), batch.config, route)
            copied.copy_(args.output)

    step()
    graph, _ = capture(step)
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        lengths = torch.randint(0, 900, (32,), generator=generator)
        rows = torch.minimum(torch.randint(0, 40, (32,), generator=generator), lengths)
        rows[::3] = rows[::3].clamp(max=1)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)])
        args.query_start_loc[:33].copy_(starts.int())
        args.query_start_loc[33:] = int(starts[-1])
        args.seq_lens[:32].copy_(lengths.int())
        graph.replay()
        torch.cuda.synchronize()
        compare_rows(batch)
        assert torch.equal(copied.view(torch.uint8), args.output.view(torch.uint8))


def attend_as_planned(requests: list[tuple[int, int]], **changes: Any) -> Batch:
    """Attend through the op, with a schedule of its own plan."""
    batch = prefill_batch(requests, backend="TRITON_ATTN", lse=False, **changes).planned()
    assert batch.args.plan
    batch.run()
    torch.cuda.synchronize()
    return batch


def test_the_op_goes_the_chosen_way(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    attend = mixed_launch.attend
    monkeypatch.setattr(mixed_launch, "attend", lambda *args: (calls.append(args), attend(*args)))
    for requests in ([(8, 900)] * 40, MIXED * 12):
        batch = attend_as_planned(requests, num_heads=32, num_kv_heads=8)
        expected, _ = batch.expected()
        assert float((batch.output() - expected).norm() / expected.norm()) < 2.0**-7
    assert len(calls) == 2


DRAFTS = {"groups of 5": (40, 8), "groups of 7": (28, 4), "one KV head": (8, 1)}
"""Query and KV heads of which drafts take eight rows of a tile each."""


@pytest.mark.parametrize("products", [{}, FP8, NATIVE], ids=["plain", "widened", "native"])
@pytest.mark.parametrize("case", DRAFTS)
def test_drafts_of_few_tiles_and_uneven_groups(
    case: str, products: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, kv_heads = DRAFTS[case]
    cuts = []
    launch = prefill_launch.launch
    monkeypatch.setattr(prefill_launch, "launch", lambda *args, **kw: (cuts.append(args[5]), launch(*args, **kw)))
    # As many rows as four a request, also where these are not dealt out evenly.
    for requests in ([(4, 700 + 37 * i) for i in range(100)], [(1, 90), (7, 1003), (0, 5), (8, 2049)] * 25):
        batch = attend_as_planned(requests, num_heads=heads, num_kv_heads=kv_heads, **products)
        expected, _ = batch.expected()
        error = float((batch.output() - expected).norm() / expected.norm())
        assert error < (2.0**-4 if batch.config.takes_fp8_query else 2.0**-7)
    assert [(cut.groups, cut.pack) for cut in cuts] == [(1, 8)] * 2


TILES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "four converters": (NATIVE, {"converters": 4}),
    "narrow, three warpgroups": ({"head_size": 64, **FP8}, {"groups": 3}),
    "narrow, three warpgroups, FP8 query": ({"head_size": 64, **NATIVE}, {"groups": 3}),
    "one warpgroup, not packed": ({}, {"groups": 1}),
    "halves": (NATIVE, {"halves": True}),
    "heads side by side": ({"num_heads": 24, "num_kv_heads": 12}, {"together": 8}),
    "heads side by side, FP8 query": ({"num_heads": 8, "num_kv_heads": 8, **NATIVE}, {"together": 8}),
}


@pytest.mark.parametrize("case", TILES)
def test_other_tile_configs(case: str) -> None:
    changes, tiles = TILES[case]
    for block_size in (16, 128):
        for features in ({}, {"sliding_window": 333, "sinks": True}):
            batch = prefill_batch(block_size=block_size, padding=70, **changes, **features)
            prefill_launch.prefill(batch.args, batch.config, prefill_launch.TileConfig(**tiles))
            torch.cuda.synchronize()
            compare_rows(batch)
