"""Batch-invariant attention on a GPU: long requests, wide heads, and steps that the fast paths would take otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from tests.invariance import Requests, check_invariance

pytestmark = pytest.mark.gpu

LAYER = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": "bfloat16", "block_size": 16}
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16, head of 256": {"dtype": "float16", "head_size": 256, "num_heads": 4},
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "window, sinks": {"sliding_window": 300, "sinks": True, "head_size": 64},
    "soft cap": {"logits_soft_cap": 20.0, "num_heads": 10},
    "groups": {"output_format": "fp8_group128"},
    "alibi": {"alibi": "linear", "head_size": 80},
    "fp32": {"dtype": "float32", "head_size": 64},
}


@pytest.mark.parametrize("case", CASES)
def test_bits_do_not_depend_on_the_rest_of_the_step(case: str) -> None:
    check_invariance(Requests([1500, 17, 333, 64], "cuda", **{**LAYER, **CASES[case]}), [1, 2, 129, 512])
