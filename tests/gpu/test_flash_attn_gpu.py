"""FLASH_ATTN on a CUDA GPU against the reference: torch's own library, and FlashAttention-3 where its path is given.

`VATTN_FLASH_ATTN_LIBRARY=path/to/fa3.so pytest -m gpu tests/gpu/test_flash_attn_gpu.py`
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conformance.cases import batch_of_row, make_cache_update
from tests.conformance.compare import call, compare, compare_cache_update, on_cpu, run_and_compare
from tests.conformance.rows import BOTH_WAYS, CAP, CROSS, DECODES, ENCODED, LONG, LSE, MIXED, SINKS, Row
from tests.support import make_config
from vattn.backends import selector
from vattn.backends.base import DeviceInfo
from vattn.ops import flash_attention
from vattn.ops.flash_attention import find_library

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
    "all-padding": Row({}, ((0, 0), (0, 5)), padding=(4, 1)),
    "half": Row({"dtype": "float16", "kv_cache_dtype": "float16"}, MIXED),
    "group": Row({"num_heads": 8, "num_kv_heads": 1}, MIXED),
    "head-size-72": Row({"head_size": 72, "head_size_v": 72}, LONG),
    "head-size-128": Row({"head_size": 128, "head_size_v": 128}, LONG),
    "head-size-256": Row({"head_size": 256, "head_size_v": 256}, LONG),
    "block-48": Row({"block_size": 48}, LONG),
    "block-128": Row({"block_size": 128}, LONG),
    "hnd": Row({"kv_cache_layout": "HND"}, MIXED),
    "window": Row(WINDOW, LONG),
    "window-decodes": Row({"sliding_window": 8}, DECODES),
    "both-ways": Row(BOTH_WAYS, MIXED),
    "both-ways-window": Row({**BOTH_WAYS, **WINDOW}, LONG),
    "cap": Row(CAP, MIXED),
    "sinks": Row(SINKS, MIXED),
    "sinks-lse-refused": Row({**SINKS, **LSE}, MIXED),
    "lse": Row(LSE, MIXED),
    "cross": Row({**CROSS, **LSE}, ENCODED),
    "fp8": Row(FP8, MIXED),
    "fp8-heads-window": Row({**FP8_HEADS, **WINDOW}, LONG),
}
PACKED_ROWS: dict[str, Row] = {
    "packed": Row({**PACKED}, MIXED),
    "packed-both-ways": Row({**PACKED, **BOTH_WAYS, **LSE}, MIXED),
    "packed-window": Row({**PACKED, **BOTH_WAYS, **WINDOW}, LONG),
    "packed-head-size-80": Row({**PACKED, **BOTH_WAYS, "head_size": 80, "head_size_v": 80}, LONG),
    "packed-fp8": Row({**PACKED, **FP8}, MIXED),
    "packed-cross": Row({**PACKED, **CROSS, **LSE}, ENCODED),
}


FP8_TOLERANCE = 2.0**-4
"""The library rounds softmax weights to e4m3, each by half a step: at most 2^-4 of itself."""


def check(row: Row) -> None:
    config = make_config(**{**BASE, **row.changes, "backend": "FLASH_ATTN"})
    found = selector.get_backend("FLASH_ATTN").reasons(config, DeviceInfo.of("cuda"))
    batch = batch_of_row(
        Row({**BASE, **row.changes}, row.lens, row.padding, row.table), "FLASH_ATTN", device="cuda", seed=3
    )
    if found or config.query_format == "none":
        assert run_and_compare(batch) == (not found)
        return
    call(batch.args)
    result = on_cpu(batch)
    compare(result, *result.expected(), tolerance=FP8_TOLERANCE)


@pytest.fixture
def torchs_own(monkeypatch: pytest.MonkeyPatch) -> Any:
    """FLASH_ATTN on torch's varlen attention, whatever library is loaded."""
    library = flash_attention.FlashLibrary("torch varlen_attn", torch.__version__, paged=False)
    monkeypatch.setattr("vattn.backends.flash_attn.find_library", lambda: library)
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


@pytest.mark.parametrize("name", [*ROWS, *PACKED_ROWS])
def test_flash_attention_3(name: str, fa3: None) -> None:
    check({**ROWS, **PACKED_ROWS}[name])


@pytest.mark.parametrize("name", PACKED_ROWS)
def test_torchs_own(name: str, torchs_own: Any) -> None:
    check(PACKED_ROWS[name])


@pytest.mark.parametrize("changes", [{}, {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"}])
def test_cache_update(changes: dict[str, Any], fa3: None) -> None:
    query = FP8_HEADS if changes else {}
    config = make_config(**{**BASE, **query, **changes, "backend": "FLASH_ATTN"})
    assert compare_cache_update(make_cache_update(config, device="cuda"), config)


def test_no_sync_and_a_replay_with_other_lengths(fa3: None) -> None:
    batch = batch_of_row(Row(BASE, DECODES), "FLASH_ATTN", device="cuda", seed=5)
    torch.ops.vattn.attention(*batch.args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.vattn.attention(*batch.args)
    lengths = batch.args.seq_lens.clone()
    for change in (0, -1):
        batch.args.seq_lens.copy_((lengths + change).clamp(min=0))
        batch.args.output.fill_(float("nan"))
        graph.replay()
        replayed = batch.args.output.clone()
        torch.ops.vattn.attention(*batch.args)
        torch.testing.assert_close(replayed, batch.args.output, rtol=2**-7, atol=2**-8)
