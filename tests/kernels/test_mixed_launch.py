"""Steps between decode and prefill: which way shapes choose, and that the two kernels' schedules share out every row.

The prefill kernel is Gluon, which no interpreter knows; here a stand-in computes the row tiles of its schedule. The
schedules, the decode kernel and the launches are real.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.decode_support import interpret
from tests.support import Batch, make_config, random_paged_batch, relative_l2
from vattn.config.device import DeviceInfo
from vattn.kernels.hopper import mixed_launch
from vattn.kernels.hopper.decode import launch as decode_fast
from vattn.kernels.hopper.decode import triton_kernel
from vattn.kernels.hopper.prefill import launch as prefill_launch
from vattn.kernels.hopper.prefill import split_launch

LLAMA: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vattn.config.device.multiprocessors", lambda device: 132)


ROUTES = {
    "decode": (64, 64, ""),
    "four drafts": (256, 64, ""),
    "eight drafts": (512, 64, "packed_gqa"),
    "seven drafts": (448, 64, "packed_gqa"),
    "eight drafts of few requests": (64, 8, "split_keys"),
    "many drafts": (64 * 17, 64, "two_kernels"),
    "prompts and decodes": (8 * 512 + 128, 136, "two_kernels"),
    "extends": (700, 100, "packed_gqa"),
    "short extends of few requests": (30, 2, "split_keys"),
    "a prompt and a decode": (1025, 17, "two_kernels"),
    "a chunk": (300, 1, "split_keys"),
    "a prompt": (2000, 1, ""),
    "short prompts": (8192, 128, "two_kernels"),
    "prompts": (128 * 256, 128, ""),
    "nothing": (0, 4, ""),
}


@pytest.mark.parametrize("case", ROUTES)
def test_shapes_choose_the_route(case: str) -> None:
    tokens, reqs, route = ROUTES[case]
    assert mixed_launch.route_of(make_config(**LLAMA), tokens, reqs, torch.device("cpu")) == route


def test_larger_groups_than_the_decode_kernel_takes_go_to_the_prefill_kernel() -> None:
    device = torch.device("cpu")
    for heads in (17, 48, 64):
        config = make_config(**{**LLAMA, "num_heads": heads, "num_kv_heads": 1})
        for tokens, reqs in ((1, 1), (300, 300), (900, 300), (40, 4)):
            assert mixed_launch.route_of(config, tokens, reqs, device) == "split_keys"
        assert mixed_launch.route_of(config, 20000, 4, device) == ""
        assert mixed_launch.route_of(config, 2, 3, device) == ""
    config = make_config(**{**LLAMA, "num_heads": 71, "num_kv_heads": 1})
    assert mixed_launch.route_of(config, 4, 4, device) == mixed_launch.route_of(config, 40, 4, device) == ""


def test_row_tiles_of_few_keys_are_not_split() -> None:
    narrow = make_config(**{**LLAMA, "num_heads": 64, "head_size": 64, "sliding_window": 128})
    assert mixed_launch.route_of(narrow, 200, 1, torch.device("cpu")) == ""
    assert mixed_launch.route_of(narrow, 60, 4, torch.device("cpu")) == "split_keys"


def test_heads_are_packed_where_that_saves_tiles() -> None:
    for heads, pack in ((8, 1), (16, 2), (32, 4), (64, 8), (128, 16)):
        config = make_config(**{**LLAMA, "num_heads": heads})
        assert prefill_launch.packs(config) == pack
        cut = mixed_launch.choose_tiles(config, 4224, 136)
        assert (cut.groups, cut.pack, cut.tokens) == (2, pack, 128 // pack)
    assert mixed_launch.choose_tiles(make_config(**LLAMA), 512, 64).tokens == 16
    # Tiles of groups of 5, 7, 12, 13 and 17 have 120, 126, 120, 104 and 102 rows that are used.
    for heads, rows, pack in ((40, 31, 5), (40, 900, 1), (56, 90, 7), (96, 31, 12), (104, 31, 16), (136, 9, 17)):
        config = make_config(**{**LLAMA, "num_heads": heads})
        assert mixed_launch.choose_tiles(config, rows * 136 + 1, 136).pack == pack
    for heads, rows in ((8, 16), (32, 4), (40, 3), (128, 1)):
        assert mixed_launch.short_rows(make_config(**{**LLAMA, "num_heads": heads})) == rows
    assert mixed_launch.short_rows(make_config(**{**LLAMA, "head_size": 256})) == 1


def test_drafts_of_uneven_groups_leave_rows_unused() -> None:
    device = torch.device("cpu")
    for heads, tokens, cut_as in (
        (24, 6, (1, 4)), (40, 4, (1, 8)), (40, 8, (1, 8)), (40, 9, (2, 5)), (56, 4, (1, 8)), (32, 8, (1, 4)),
    ):  # fmt: skip
        config = make_config(**{**LLAMA, "num_heads": heads})
        cut = mixed_launch.choose_tiles(config, 64 * tokens, 64)
        assert (cut.groups, cut.pack) == cut_as
        assert mixed_launch.route_of(config, 64 * tokens, 64, device) == "packed_gqa"
        room = prefill_launch.plan_rows(64 * tokens, 64, cut)
        assert room <= mixed_launch.decode_fast.plan_shape(config, 64 * tokens, 64, device)[0]


def test_few_drafts_are_split() -> None:
    device = torch.device("cpu")
    for heads, reqs, few in (
        (8, 198, "packed_gqa"), (8, 197, "split_keys"), (8, 8, "split_keys"), (4, 197, ""), (16, 50, "split_keys"),
    ):  # fmt: skip
        config = make_config(**{**LLAMA, "num_heads": heads, "num_kv_heads": 1})
        assert mixed_launch.route_of(config, 4 * reqs, reqs, device) == few
        assert mixed_launch.route_of(config, reqs, reqs, device) == ""


@pytest.mark.parametrize("heads", [8, 32, 40, 96, 128, 384])
def test_a_schedule_has_room_for_both_parts(heads: int) -> None:
    config, device = make_config(**{**LLAMA, "num_heads": heads}), torch.device("cpu")
    fp8 = config.replace(kv_cache_dtype="fp8_e4m3", kv_scale="tensor")
    for reqs in (2, 3, 64, 257, 1000):
        for tokens in (reqs + 1, 2 * reqs, 5 * reqs, 8 * reqs + 1, 31 * reqs, 63 * reqs, 300 * reqs):
            rows = decode_fast.plan_shape(config, tokens, reqs, device)[0]
            assert decode_fast.tokens_of_plan(torch.empty(rows, 8), config, reqs) == tokens
            assert (
                prefill_launch.plan_rows(tokens, reqs, prefill_launch.choose_tiles(config, tokens, reqs, 132)) <= rows
            )
            assert split_launch.plan_rows(config, tokens, reqs, device) <= rows
            if config.group_size > decode_fast.MAX_GROUP_SIZE:
                decodes = decode_fast.plan_shape(config, reqs, reqs, device)[0]
                assert split_launch.plan_rows(config, reqs, reqs, device) <= decodes
                continue
            cut = mixed_launch.choose_tiles(config, tokens, reqs)
            needed = prefill_launch.plan_rows(tokens, reqs, cut)
            assert needed <= rows
            if cut.groups == 2:
                for products in (config, fp8):
                    at_once = mixed_launch.rows_at_once(products)
                    chunks = decode_fast.chunks_of(reqs, at_once, longest=mixed_launch.short_rows(products))
                    assert decode_fast.rows_of_short_requests(config, chunks, device) + needed <= rows


FP8 = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"}
QUERY_LENS = [1, 12, 0, 1, 20, 2, 1]
SEQ_LENS = [120, 12, 9, 17, 60, 50, 33]


def small_batch(padding: int, **changes: Any) -> Batch:
    values = {"num_heads": 16, "num_kv_heads": 1, "head_size": 64, "dtype": "float16", "lse": True, **changes}
    return random_paged_batch(
        make_config(**values), QUERY_LENS, SEQ_LENS, num_padding_reqs=min(padding, 1), num_padding_tokens=padding
    )


def stand_in(batch: Batch, tiles: list[Any]) -> Any:
    """Return a prefill kernel that copies the reference's rows for the row tiles of its schedule."""
    expected, expected_lse = batch.expected()

    def launched(**arguments: Any) -> None:
        schedule = arguments["schedule"]
        count = int(schedule[0, 0])
        written = arguments["output"].view(expected.shape)
        for _, first, rows, _, seq_len, begin, end in schedule[1 : 1 + count, :7].tolist():
            tiles.append((first, rows, seq_len, begin, end))
            written[first : first + rows] = expected[first : first + rows].to(written.dtype)
            batch.args.lse[first : first + rows] = expected_lse[first : first + rows]

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return launched

    return Kernel()


@pytest.mark.parametrize(
    ("padding", "changes"),
    [
        (0, {}),
        (9, {"sliding_window": 33, "sinks": True, **FP8}),
        (2, {"output_format": "fp8_group64"}),
    ],
    ids=["plain", "window, sinks, fp8, padding", "groups"],
)
def test_both_kernels_write_every_row_once(
    padding: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    interpret(monkeypatch, decode_fast, triton_kernel)
    monkeypatch.setattr(mixed_launch, "tuning_of", lambda *a: decode_fast.Tuning(1, 3, 1, overlap="end"))
    batch = small_batch(padding, **changes)
    assert mixed_launch.short_rows(batch.config) == 1
    tiles: list[Any] = []
    monkeypatch.setattr(prefill_launch, "prefill_kernel", stand_in(batch, tiles))
    mixed_launch.attend(batch.args, batch.config, "two_kernels")
    own = [row for first, rows, *_ in tiles for row in range(first, first + rows)]
    assert len(own) == len(set(own)) == sum(n for n in QUERY_LENS if n > 1) + padding
    expected, lse = batch.expected()
    assert relative_l2(batch.args.lse, lse) < 1e-4
    # FP8 codes are off by 2**-4 of a value at most.
    assert relative_l2(batch.output(), expected) < (1e-3 if batch.config.output_format == "none" else 2.0**-4)


def test_layers_that_one_kernel_refuses_keep_the_general_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceInfo, "of", lambda device: DeviceInfo("cuda", (9, 0), "a Hopper GPU"))
    prefill_launch.runs.cache_clear()
    decode_fast.runs.cache_clear()
    call: Any = SimpleNamespace(
        query=SimpleNamespace(shape=(4224, 32, 128), device="a GPU"), seq_lens=torch.zeros(136),
        block_table=torch.zeros(136, 4), key_cache=torch.zeros(3, 16, 8, 128), value_cache=torch.zeros(3, 16, 8, 128),
    )  # fmt: skip
    assert mixed_launch.accepts(call, make_config(**LLAMA))
    for changes in ({"alibi": "linear"}, {"num_heads": 8 * 71}, {"block_size": 24}):
        assert not mixed_launch.accepts(call, make_config(**{**LLAMA, **changes}))
    prefill_launch.runs.cache_clear()
    decode_fast.runs.cache_clear()


def test_fp8_heads_of_256_are_rows_of_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until their decode kernel has been compared beside the prefill kernel."""
    monkeypatch.setattr("vattn.config.device.multiprocessors", lambda device: 132)
    step = (4224, 136, torch.device("cpu"))
    for changes, route in (
        ({}, "two_kernels"),
        (FP8, "two_kernels"),
        ({"head_size": 256}, "two_kernels"),
        ({"head_size": 256, **FP8}, "packed_gqa"),
    ):
        config = make_config(**{**LLAMA, **changes})
        assert mixed_launch.route_of(config, *step) == route
