"""Steps of as many rows as requests, but not one row for each: CUDA graphs of engines run them too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.cases import batch_of_row
from tests.conformance.compare import call, compare, on_cpu
from tests.conformance.rows import Row

pytestmark = pytest.mark.gpu(capability=(9, 0))

BASE: dict[str, Any] = {
    "dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "num_heads": 32, "num_kv_heads": 8, "head_size": 128,
    "head_size_v": 128, "block_size": 16,
}  # fmt: skip
FP8 = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor"}


@pytest.mark.parametrize("layer", [{}, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    "step",
    [
        ((3, 300), (1, 20), (0, 0), (0, 0)),
        ((10, 300), (6, 77), *(((0, 0),) * 14)),
        ((1, 9), (0, 0), (30, 30), *(((0, 0),) * 29), (1, 500)),
        ((4, 90), (2, 40), (0, 0)),
    ],
    ids=["few", "sixteen", "a prompt among decodes", "two a request"],
)
def test_rows_are_right_however_requests_share_them(layer: dict[str, Any], step: tuple[tuple[int, int], ...]) -> None:
    batch = batch_of_row(Row({**BASE, **layer}, step, padding=(0, 0)), "TRITON_ATTN", device="cuda", seed=5)
    for _ in range(2):
        batch.args.output.fill_(float("nan"))
        call(batch.args)
        result = on_cpu(batch)
        compare(result, *result.expected())
