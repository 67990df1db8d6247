"""FLASH_ATTN on a CUDA GPU against the reference: torch's own library, and FlashAttention-3 where its path is given.

`VATTN_FLASH_ATTN_LIBRARY=path/to/fa3.so pytest -m gpu tests/backends/test_flash_attn_gpu.py`
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conformance.cases import batch_of_row
from tests.conformance.compare import call, compare, on_cpu, run_and_compare
from tests.conformance.rows import BOTH_WAYS, CAP, CROSS, DECODES, ENCODED, LONG, LSE, MIXED, SINKS, Row
from tests.support import Batch, capture, make_config, no_sync
from vattn.backends import selector
from vattn.backends.flash_attn import libraries as flash_attention
from vattn.backends.flash_attn.libraries import find_library
from vattn.config.device import DeviceInfo

pytestmark = pytest.mark.gpu

BASE = {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "head_size": 64, "head_size_v": 64, "block_size": 16}
FP8 = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor", "query_format": "fp8_e4m3", "query_scale": "tensor"}
FP8_HEADS = {**FP8, "kv_scale": "head", "query_scale": "head"}
WINDOW = {"sliding_window": 37}
PACKED = {"block_size": 0}

ROWS: dict[str, Row] = {
    "plain": Row({}, MIXED),
    "decodes": Row({}, DECODES, padding=(0, 2)),
    "long": Row({}, LONG),
    "prefill": Row({}, ((37, 37), (22, 240), (130, 130)), padding=(5, 1)),
    "two-rows-each": Row({}, ((2, 60), (3, 3), (1, 900), (0, 0)), padding=(1, 1)),
    "all-padding": Row({}, ((0, 0), (0, 5)), padding=(4, 1)),
    "half": Row({"dtype": "float16", "kv_cache_dtype": "float16"}, MIXED),
    "group": Row({"num_heads": 8, "num_kv_heads": 1}, MIXED),
    "head-size-32": Row({"head_size": 32, "head_size_v": 32}, DECODES),
    "head-size-72": Row({"head_size": 72, "head_size_v": 72}, LONG),
    "head-size-128": Row({"head_size": 128, "head_size_v": 128}, LONG),
    "head-size-256": Row({"head_size": 256, "head_size_v": 256}, LONG),
    "block-48": Row({"block_size": 48}, LONG),
    "block-128": Row({"block_size": 128}, LONG),
    "block-528": Row({"block_size": 528}, ((1, 1100), (130, 700), (3, 3))),
    "block-2048": Row({"block_size": 2048}, ((1, 4100), (130, 2200), (3, 3))),
    "hnd": Row({"kv_cache_layout": "HND"}, MIXED),
    "window": Row(WINDOW, LONG),
    "window-decodes": Row({"sliding_window": 8}, DECODES),
    "window-wider-than-the-table": Row({"sliding_window": 5000}, DECODES),
    "both-ways": Row(BOTH_WAYS, MIXED),
    "both-ways-window": Row({**BOTH_WAYS, **WINDOW}, LONG),
    "cap": Row(CAP, MIXED),
    "cap-long": Row(CAP, LONG),
    "sinks": Row(SINKS, MIXED),
    "sinks-window-long": Row({**SINKS, **WINDOW}, LONG),
    "sinks-lse-refused": Row({**SINKS, **LSE}, MIXED),
    "lse": Row(LSE, MIXED),
    "cross": Row({**CROSS, **LSE}, ENCODED),
    "cross-decodes": Row({**CROSS, **LSE}, DECODES),
    "fp8": Row(FP8, MIXED),
    "fp8-long": Row(FP8, LONG),
    "fp8-head-size-72-refused": Row({**FP8, "head_size": 72, "head_size_v": 72}, MIXED),
    "mixed-dtypes-refused": Row({"kv_cache_dtype": "float16"}, MIXED),
    "invariant": Row({"batch_invariant": True}, MIXED),
    "invariant-decodes": Row({"batch_invariant": True}, DECODES),
    "invariant-window-refused": Row({"batch_invariant": True, **WINDOW}, DECODES),
    "scale-negative": Row({"scale": -0.3, **LSE}, MIXED),
    "scale-zero": Row({"scale": 0.0}, LONG),
    "fp8-scale-negative": Row({**FP8, "scale": -0.1}, MIXED),
    "fp8-heads-window": Row({**FP8_HEADS, **WINDOW}, LONG),
}
PACKED_ROWS: dict[str, Row] = {
    "packed": Row({**PACKED}, MIXED),
    "packed-both-ways": Row({**PACKED, **BOTH_WAYS, **LSE}, MIXED),
    "packed-window": Row({**PACKED, **BOTH_WAYS, **WINDOW}, LONG),
    "packed-head-size-80": Row({**PACKED, **BOTH_WAYS, "head_size": 80, "head_size_v": 80}, LONG),
    "packed-invariant": Row({**PACKED, "batch_invariant": True}, LONG),
    "packed-fp8-head-size-72-refused": Row({**PACKED, **FP8, "head_size": 72, "head_size_v": 72}, MIXED),
    "packed-fp8": Row({**PACKED, **FP8}, MIXED),
    "packed-cross": Row({**PACKED, **CROSS, **LSE}, ENCODED),
}


def batch_of(row: Row, seed: int = 3) -> Batch:
    merged = Row({**BASE, **row.changes}, row.lens, row.padding, row.table)
    return batch_of_row(merged, "FLASH_ATTN", device="cuda", seed=seed)


def check(row: Row, plan: bool = False) -> None:
    config = make_config(**{**BASE, **row.changes, "backend": "FLASH_ATTN"})
    found = selector.get_backend("FLASH_ATTN").reasons(config, DeviceInfo.of("cuda"))
    batch = batch_of(row)
    batch = batch.planned() if plan and not found else batch
    assert run_and_compare(batch) == (not found)


@pytest.fixture
def torchs_own(monkeypatch: pytest.MonkeyPatch) -> Any:
    """FLASH_ATTN on torch's varlen attention, whatever library is loaded."""
    library = flash_attention.FlashLibrary("torch varlen_attn", torch.__version__, paged=False)
    monkeypatch.setattr("vattn.backends.flash_attn.backend.find_library", lambda *_: library)
    selector.forget_decisions()
    from vattn.backends import dispatch

    dispatch._resolve.cache_clear()
    yield library
    selector.forget_decisions()
    dispatch._resolve.cache_clear()


@pytest.fixture
def fa3() -> None:
    library = find_library()
    if library is None or not library.paged:
        pytest.skip("needs FlashAttention-3: VATTN_FLASH_ATTN_LIBRARY=path")


@pytest.mark.parametrize("name", ROWS)
def test_flash_attention_3_with_a_plan(name: str, fa3: None) -> None:
    check(ROWS[name], plan=True)


SPLIT = ((1, 9000), (1, 40), (1, 3333), *(((1, 700),) * 20), (1, 1), (1, 0))
"""One request so long beside the others that its keys are worth sharing among processors."""


@pytest.mark.parametrize("plan", [False, True])
@pytest.mark.parametrize("changes", [{}, {"sliding_window": 300}, SINKS, {"num_heads": 32, "num_kv_heads": 8}])
def test_long_sequences_are_cut_into_parts(changes: dict[str, Any], plan: bool, fa3: None) -> None:
    check(Row(changes, SPLIT, padding=(0, 3)), plan=plan)


def test_more_rows_than_the_library_balances(fa3: None) -> None:
    check(Row({}, tuple((1, 1 + index % 50) for index in range(1000))), plan=True)


INVARIANT = {"batch_invariant": True, "head_size": 128, "head_size_v": 128, "num_heads": 8, "num_kv_heads": 2}
NARROW, WIDE = ({"head_size": size, "head_size_v": size} for size in (64, 256))


@pytest.mark.parametrize("changes", [{}, SINKS, CAP, NARROW, WIDE, FP8, {"num_heads": 16}, {"block_size": 128}])
def test_neighbours_and_chunks_change_no_bit(changes: dict[str, Any], fa3: None) -> None:
    """A request's rows are the same alone, among others, in one chunk or row by row."""
    whole = batch_of(Row({**INVARIANT, **changes}, ((200, 1500), (1, 31), (77, 400), (1, 2900), (130, 130))))
    call(whole.args)
    starts = whole.args.query_start_loc.tolist()
    for request, pieces in ((0, (200,)), (0, (1, 63, 136)), (2, (64, 13)), (3, (1,)), (4, (1,) * 130)):
        begin, seq_len = starts[request], whole.seq_lens[request] - whole.query_lens[request]
        for piece in pieces:
            seq_len += piece
            alone = whole.args._replace(
                query=whole.args.query[begin : begin + piece],
                output=torch.full_like(whole.args.output[:piece], torch.nan),
                query_start_loc=torch.tensor([0, piece, piece], dtype=torch.int32, device="cuda"),
                seq_lens=torch.tensor([seq_len, 0], dtype=torch.int32, device="cuda"),
                block_table=whole.args.block_table[[request, request]],
            )
            call(alone)
            assert torch.equal(alone.output, whole.args.output[begin : begin + piece]), (request, piece)
            begin += piece


@pytest.mark.parametrize("name", PACKED_ROWS)
def test_flash_attention_3_without_a_cache(name: str, fa3: None) -> None:
    check(PACKED_ROWS[name])


@pytest.mark.parametrize("name", PACKED_ROWS)
def test_torchs_own(name: str, torchs_own: Any) -> None:
    check(PACKED_ROWS[name])


@pytest.mark.parametrize("plan", [False, True])
def test_no_sync_and_a_replay_with_other_lengths(plan: bool, fa3: None) -> None:
    batch = batch_of(Row(BASE, (*DECODES, (1, 2000))), seed=5)
    batch = batch.planned() if plan else batch

    def step() -> None:
        for schedule in batch.args.plan:
            torch.ops.vattn.plan(batch.args.query_start_loc, batch.args.seq_lens, schedule, batch.args.config)
        # Two layers share a schedule.
        torch.ops.vattn.attention(*batch.args)
        torch.ops.vattn.attention(*batch.args)

    step()
    with no_sync():
        step()
    graph, _ = capture(step)
    lengths = batch.args.seq_lens.clone()
    for change in (0, -1, -30):
        batch.args.seq_lens.copy_((lengths + change).clamp(min=0))
        batch.args.output.fill_(float("nan"))
        graph.replay()
        replayed = batch.args.output.clone()
        step()
        torch.testing.assert_close(replayed, batch.args.output, rtol=2**-7, atol=2**-8)
        moved = on_cpu(batch)
        compare(moved, *moved.expected())
