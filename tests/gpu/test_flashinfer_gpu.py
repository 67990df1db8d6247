"""FLASHINFER on a CUDA GPU against the reference. What FlashInfer must compile first is marked slow as well."""

from __future__ import annotations

import pytest

from tests.conformance.cases import batch_of_row, make_cache_update
from tests.conformance.compare import call, compare_cache_update, run_and_compare
from tests.conformance.rows import BOTH_WAYS, CAP, CROSS, DECODES, ENCODED, LONG, LSE, MIXED, SINKS, Row
from tests.support import make_config
from vattn.backends import selector
from vattn.backends.base import DeviceInfo
from vattn.errors import GraphContractError

pytestmark = pytest.mark.gpu

BASE = {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "head_size": 128, "head_size_v": 128, "block_size": 16}
FP8 = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor"}
PACKED = {"block_size": 0}

ROWS: dict[str, Row] = {
    "plain": Row({}, MIXED),
    "decodes": Row({}, DECODES, padding=(0, 2)),
    "long": Row({}, LONG),
    "all-padding": Row({}, ((0, 0), (0, 5)), padding=(4, 1)),
    "group": Row({"num_heads": 8, "num_kv_heads": 1}, MIXED),
    "block-8": Row({"block_size": 8}, MIXED),
    "block-48": Row({"block_size": 48}, LONG),
    "hnd": Row({"kv_cache_layout": "HND"}, MIXED),
    "both-ways": Row(BOTH_WAYS, MIXED),
    "sinks-lse": Row({**SINKS, **LSE}, MIXED),
    "lse": Row(LSE, MIXED),
    "cross": Row({**CROSS, **LSE}, ENCODED),
    "fp8": Row(FP8, MIXED),
    "fp8-heads": Row({**FP8, "kv_scale": "head", **LSE}, LONG),
    "packed": Row(PACKED, MIXED),
    "packed-both-ways": Row({**PACKED, **BOTH_WAYS, **LSE}, MIXED),
    "packed-cross": Row({**PACKED, **CROSS, **LSE}, ENCODED),
}
COMPILED: dict[str, Row] = {
    "window-cap": Row({"sliding_window": 37, **CAP}, LONG),
    "head-size-64": Row({"head_size": 64, "head_size_v": 64}, MIXED),
    "half": Row({"dtype": "float16", "kv_cache_dtype": "float16"}, MIXED),
}


@pytest.fixture(autouse=True)
def installed() -> None:
    problem = selector.get_backend("FLASHINFER").problem()
    if problem is not None:
        pytest.skip(problem)


def check(row: Row) -> None:
    changes = {**BASE, **row.changes}
    config = make_config(**{**changes, "backend": "FLASHINFER"})
    assert selector.get_backend("FLASHINFER").reasons(config, DeviceInfo.of("cuda")) == []
    batch = batch_of_row(Row(changes, row.lens, row.padding, row.table), "FLASHINFER", device="cuda", seed=3)
    assert run_and_compare(batch)


@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str) -> None:
    check(ROWS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_rows_that_flashinfer_compiles_first(name: str) -> None:
    check(COMPILED[name])


def test_cache_update() -> None:
    config = make_config(**{**BASE, **FP8, "backend": "FLASHINFER"})
    assert compare_cache_update(make_cache_update(config, device="cuda"), config)


def test_a_capture_is_refused() -> None:
    import torch

    batch = batch_of_row(Row(BASE, DECODES), "FLASHINFER", device="cuda", seed=5)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(GraphContractError, match="TRITON_ATTN"), torch.cuda.graph(graph):
        call(batch.args)
