"""Batch-invariant attention: a row's bits do not depend on what else is in the step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.invariance import Requests, check_invariance, check_random_steps
from tests.support import make_config
from vattn.backends import selector
from vattn.config.device import DeviceInfo
from vattn.errors import UnsupportedRequestError

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 9, "sinks": True},
    "fp8": {"kv_cache_dtype": "fp8_e4m3", "dtype": "float16", "logits_soft_cap": 5.0},
    "groups": {"output_format": "nvfp4", "dtype": "bfloat16", "num_heads": 6, "alibi": "linear"},
}


LARGE: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16, head of 256": {"dtype": "float16", "head_size": 256, "num_heads": 4},
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "window, sinks": {"sliding_window": 300, "sinks": True, "head_size": 64},
    "soft cap": {"logits_soft_cap": 20.0, "num_heads": 10},
    "groups": {"output_format": "fp8_group128"},
    "alibi": {"alibi": "linear", "head_size": 80},
    "fp32": {"dtype": "float32", "head_size": 64},
    "fp8 queries": {"kv_cache_dtype": "fp8_e4m3", "query_format": "fp8_e4m3", "query_scale": "tensor"},
    "fp8, head of 256": {"kv_cache_dtype": "fp8_e4m3", "head_size": 256, "num_heads": 4},
    "groups of seven, blocks of 64": {"num_heads": 14, "block_size": 64},
    "a head of 80 a KV head": {"num_heads": 3, "num_kv_heads": 3, "head_size": 80},
    "static output": {"output_format": "fp8_static", "sinks": True},
}
GENERAL = ("alibi", "fp32")
"""Layers that the kernel made for Hopper cannot run."""


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = selector.get_backend("TRITON_ATTN").reasons(make_config(batch_invariant=True), DeviceInfo.of("cpu"))
    if reasons:
        pytest.skip("; ".join(reasons))
    # NumPy's product may sum a row otherwise at another place among the rows: what a BLAS does, not the kernels.
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: (a[:, :, None] * b).sum(1, dtype=dtype))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", ["plain", *(pytest.param(case, marks=pytest.mark.slow) for case in list(CASES)[1:])])
def test_bits_do_not_depend_on_the_rest_of_the_step(case: str) -> None:
    check_invariance(Requests([21, 3], "cpu", block_size=8, **CASES[case]), [1, 7])


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE)
def test_bits_of_long_requests_and_wide_heads(case: str) -> None:
    """Steps that the fast paths would take otherwise."""
    check_invariance(_large(case, [1500, 17, 333, 64]), [1, 2, 129, 512])


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in LARGE if case not in GENERAL])
def test_bits_of_parts_with_fixed_limits(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper's kernel, of every layer that it can run, also those that it does not get by itself yet."""
    from vattn.kernels.hopper.prefill import fixed_launch

    requests = _large(case, [2600, 17, 333, 64, 1025, 530])
    monkeypatch.setattr(fixed_launch, "untested", lambda config: [])
    if fixed_launch.refusals(requests.config, DeviceInfo.of("cuda")):
        pytest.skip("the kernel is made for Hopper")
    monkeypatch.setattr(fixed_launch, "runs", lambda config, device: True)
    check_random_steps(requests, 25, 1)
    check_invariance(requests, [1, 129, 512])


def _large(case: str, lengths: list[int]) -> Requests:
    layer = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": "bfloat16", "block_size": 16, **LARGE[case]}
    return Requests(lengths, "cuda", **layer)


@pytest.mark.usefixtures("interpreted")
def test_a_layer_without_the_promise_is_cut_by_its_batch() -> None:
    """What the promise costs: without it tiles and splits follow the step."""
    from vattn.kernels.triton.common.tiles import Limits, choose_tiles

    limits = Limits(132, 227 << 10, True)
    for tokens, requests, keys in ((1, 1, 1 << 17), (64, 64, 4096), (8192, 1, 8192)):
        config = make_config(num_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16")
        fixed = choose_tiles(config.replace(batch_invariant=True), tokens, requests, keys, limits)
        assert fixed == choose_tiles(config.replace(batch_invariant=True), 5, 3, 70, limits)
        assert (fixed.num_splits, fixed.full_loop, fixed.block_m) == (1, False, 64)
        assert fixed != choose_tiles(config, tokens, requests, keys, limits)


@pytest.mark.usefixtures("interpreted")
def test_explain_states_the_promise_and_other_backends_refuse() -> None:
    config = make_config(batch_invariant=True, dtype="bfloat16")
    found = selector.explain(config, DeviceInfo("cuda", (9, 0), "sm_90"))
    assert found.chosen == "TRITON_ATTN" and "batch_invariant: one kernel" in str(found)
    with pytest.raises(UnsupportedRequestError, match="batch_invariant is not implemented"):
        selector.choose(config.replace(backend="TORCH_SDPA"), DeviceInfo("cpu"))
