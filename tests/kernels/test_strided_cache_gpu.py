"""Hopper's kernels over keys and values in an engine's memory: the kernel and the results of vattn's own storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.cases import batch_of_row, make_cache_update
from tests.conformance.compare import call, compare, on_cpu
from tests.conformance.rows import Row
from tests.support import make_config, record_calls
from vattn.backends import hopper_routes
from vattn.kernels.hopper.decode import cluster_launch
from vattn.kernels.triton.attention import launch as general_launch

pytestmark = pytest.mark.gpu(capability=(9, 0))

BASE: dict[str, Any] = {
    "dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "num_heads": 16, "num_kv_heads": 4, "head_size": 128,
    "head_size_v": 128, "block_size": 16,
}  # fmt: skip
FP8 = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor"}
LAYERS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": FP8,
    "fp8 query": {**FP8, "query_format": "fp8_e4m3", "query_scale": "tensor"},
    "wide": {"head_size": 256, "head_size_v": 256, "block_size": 64},
    "window of one head": {"sliding_window": 100, "num_heads": 4, "num_kv_heads": 1, "block_size": 256},
}
STEPS: dict[str, tuple[tuple[int, int], ...]] = {
    "decode": ((1, 900), (1, 33), (1, 1)),
    "many decodes": ((1, 700),) * 160,
    "drafts": ((4, 500), (4, 77)),
    "few prompts": ((300, 300), (200, 500)),
    "prompts": ((300, 300), (200, 500), (900, 900)),
    "mixed": ((400, 800), *(((1, 300),) * 40)),
}
KERNELS = {
    "decode": "clusters",
    "many decodes": "decode",
    "drafts": "decode",
    "few prompts": "mixed",
    "prompts": "prefill",
    "mixed": "mixed",
}
"""Of layers with four KV heads of 128. The others run decodes and prompts on Hopper's kernels, which are tested."""

OTHERS = ("wide", "window of one head")
CASES = [(layer, step) for layer in LAYERS for step in STEPS if layer not in OTHERS or step not in ("drafts", "mixed")]

SIDE_BY_SIDE = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
APART = ("2BHND", "2LBNHD", "LB2NHD", "BL2HND", "2BHLND")
ORDERS = (*SIDE_BY_SIDE, *APART)
"""Memory by letters: layers, blocks, heads, tokens, keys and values (2), columns of one (D) or of both (C)."""


def placed(key: Tensor, value: Tensor, order: str, padding: int = 0) -> tuple[Tensor, Tensor]:
    """Return copies of keys and values in layer 1 of a pool full of NaN; `padding`: columns after those of a row."""
    blocks, tokens, heads, width = key.shape
    sizes = {"L": 3, "B": blocks, "N": tokens, "H": heads, "2": 2, "D": width + padding, "C": 2 * width + padding}
    pool = torch.empty([sizes[name] for name in order], dtype=key.dtype, device=key.device)
    pool.view(torch.uint8).fill_(0xFF)
    if "L" in order:
        pool, order = pool.select(order.index("L"), 1), order.replace("L", "")
    if "2" in order:
        parts = pool.permute([order.index(name) for name in "2BNHD"])
        views = parts[0, ..., :width], parts[1, ..., :width]
    else:
        both = pool.permute([order.index(name) for name in "BNHC"])
        views = both[..., :width], both[..., width : 2 * width]
    return views[0].copy_(key), views[1].copy_(value)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that ran, in order."""
    functions = {
        "clusters": (cluster_launch, "decode"),
        "decode": (hopper_routes.decode, "decode"),
        "mixed": (hopper_routes.mixed_launch, "attend"),
        "prefill": (hopper_routes.prefill, "prefill"),
        "general": (general_launch, "paged_attention"),
    }
    return record_calls(monkeypatch, functions)


@pytest.mark.parametrize(("layer", "step"), CASES)
def test_any_memory_runs_on_the_same_kernel_with_the_same_results(layer: str, step: str, kernels: list[str]) -> None:
    batch = batch_of_row(
        Row({**BASE, **LAYERS[layer]}, STEPS[step], padding=(0, 0)), "TRITON_ATTN", device="cuda", seed=3
    )
    call(batch.args)
    expected_kernel = kernels.pop()
    assert expected_kernel != "general"
    if layer not in OTHERS:
        assert expected_kernel == KERNELS[step]
    result = on_cpu(batch)
    # FP8 queries on an FP8 cache are multiplied in FP8, weights included.
    compare(result, *result.expected(), 2.0**-4 if batch.config.takes_fp8_query else None)
    expected = batch.args.output.clone()
    for order in ORDERS:
        key, value = placed(batch.args.key_cache, batch.args.value_cache, order)
        batch.args.output.view(torch.uint8).fill_(0xFF)
        call(batch.args._replace(key_cache=key, value_cache=value))
        assert kernels.pop() == expected_kernel, order
        assert torch.equal(batch.args.output, expected), order


@pytest.mark.parametrize("step", list(STEPS))
def test_keys_by_tokens_with_values_by_heads(step: str, kernels: list[str]) -> None:
    batch = batch_of_row(Row(BASE, STEPS[step], padding=(0, 0)), "TRITON_ATTN", device="cuda", seed=3)
    value = batch.args.value_cache.transpose(1, 2).contiguous().transpose(1, 2)
    batch.args = batch.args._replace(value_cache=value)
    call(batch.args)
    # Clusters want equal strides of both.
    assert kernels == ["decode" if step == "decode" else KERNELS[step]]
    result = on_cpu(batch)
    compare(result, *result.expected())


@pytest.mark.parametrize("step", list(STEPS))
def test_rows_beside_multiples_of_16_bytes_run_on_the_general_kernel(step: str, kernels: list[str]) -> None:
    batch = batch_of_row(Row(BASE, STEPS[step], padding=(0, 0)), "TRITON_ATTN", device="cuda", seed=3)
    key, value = placed(batch.args.key_cache, batch.args.value_cache, "2LBNHD", padding=4)
    batch.args = batch.args._replace(key_cache=key, value_cache=value)
    call(batch.args)
    assert kernels == ["general"]
    result = on_cpu(batch)
    compare(result, *result.expected())


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_writes_go_into_any_memory(dtype: str) -> None:
    config = make_config(**{**BASE, "kv_cache_dtype": dtype})
    plain = make_cache_update(config, device="cuda")
    call(plain)
    for order in ORDERS:
        strided = make_cache_update(config, device="cuda")
        views = placed(strided.key_cache, strided.value_cache, order)
        call(strided._replace(key_cache=views[0], value_cache=views[1]))
        for written, expected in zip(views, (plain.key_cache, plain.value_cache), strict=True):
            assert torch.equal(written.view(torch.uint8), expected.view(torch.uint8)), order


@pytest.mark.parametrize("step", ["decode", "many decodes", "prompts", "mixed"])
def test_heads_may_be_more_than_two_billion_elements_apart(step: str, kernels: list[str]) -> None:
    """As in a pool with heads before blocks: offsets inside a layer exceed 32 bits."""
    batch = batch_of_row(Row({**BASE, **FP8}, STEPS[step], padding=(0, 0)), "TRITON_ATTN", device="cuda", seed=3)
    call(batch.args)
    expected, kernel = batch.args.output.clone(), kernels.pop()
    apart = 2**30
    views = []
    for view in (batch.args.key_cache, batch.args.value_cache):
        blocks, tokens, heads, width = view.shape
        memory = torch.empty((heads - 1) * apart + blocks * tokens * width, dtype=torch.uint8, device="cuda")
        strided = memory.view(view.dtype).as_strided(view.shape, (tokens * width, width, apart, 1))
        views.append(strided.copy_(view))
    batch.args.output.view(torch.uint8).fill_(0xFF)
    call(batch.args._replace(key_cache=views[0], value_cache=views[1]))
    # Clusters compute offsets inside a layer in 32 bits.
    assert kernels.pop() == ("decode" if kernel == "clusters" else kernel)
    difference = (batch.args.output.float() - expected.float()).norm() / expected.float().norm()
    assert difference < (0.01 if kernel == "clusters" else 1e-9)
