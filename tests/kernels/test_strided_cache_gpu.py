"""Hopper's kernels over keys and values with gaps, as engines keep them: the reference's results."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.conformance.cases import batch_of_row
from tests.conformance.compare import call, compare, on_cpu
from tests.conformance.rows import Row

pytestmark = pytest.mark.gpu

BASE: dict[str, Any] = {
    "dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "num_heads": 16, "num_kv_heads": 4, "head_size": 128,
    "head_size_v": 128, "block_size": 16,
}  # fmt: skip
CACHES = {"bf16": {}, "fp8": {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor"}}
STEPS = {
    "decode": ((1, 900), (1, 33), (1, 1)),
    "many decodes": ((1, 700),) * 160,
    "drafts": ((4, 500), (4, 77)),
    "prompts": ((300, 300), (200, 500)),
    "mixed": ((400, 800), *(((1, 300),) * 40)),
}


def with_gaps(view: Tensor, order: str) -> Tensor:
    """Return a copy of keys or values inside an engine's memory."""
    blocks, tokens, heads, width = view.shape
    if order == "a layer of three":
        pool = view.new_empty(blocks, 3, tokens, heads, width)[:, 1]
    elif order == "side by side":
        pool = view.new_empty(blocks, tokens, heads, 2 * width)[..., width:]
    else:
        pool = view.new_empty(blocks, heads, tokens, 2 * width)[..., :width].transpose(1, 2)
    return pool.copy_(view)


@pytest.mark.parametrize("order", ["a layer of three", "side by side", "heads first, side by side"])
@pytest.mark.parametrize("step", list(STEPS))
@pytest.mark.parametrize("cache", list(CACHES))
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_results_do_not_depend_on_gaps(layout: str, cache: str, step: str, order: str) -> None:
    changes = {**BASE, **CACHES[cache], "kv_cache_layout": layout}
    batch = batch_of_row(Row(changes, STEPS[step]), "TRITON_ATTN", device="cuda", seed=3)
    key, value = (with_gaps(view, order) for view in (batch.args.key_cache, batch.args.value_cache))
    batch.args = batch.args._replace(key_cache=key, value_cache=value)
    call(batch.args)
    result = on_cpu(batch)
    compare(result, *result.expected())
