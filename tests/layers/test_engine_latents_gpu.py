"""Hopper's latent kernels over blocks that lie apart: the kernel and the results of contiguous ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.layers.mla_support import deepseek, error_of, random_mla_batch, run_mla
from tests.layers.test_engine_latents import apart
from tests.support import record_calls
from vattn.kernels import mla_route

pytestmark = pytest.mark.gpu(capability=(9, 0))

FP8 = {"kv_cache_dtype": "fp8_e4m3"}
LAYERS: dict[str, dict[str, Any]] = {
    "16 heads": {"num_heads": 16},
    "16 heads, small blocks": {"num_heads": 16, "block_size": 16},
    "128 heads": {"num_heads": 128},
    "128 heads, small blocks": {"num_heads": 128, "block_size": 32},
    "128 heads, large blocks": {"num_heads": 128, "block_size": 128},
    "fp8": {"num_heads": 16, **FP8},
    "fp8, small blocks": {"num_heads": 16, "block_size": 16, **FP8},
    "sparse": {"num_heads": 64, "sparse": True},
    "sparse fp8": {"num_heads": 16, "sparse": True, **FP8},
}
QUERIES, LENGTHS = [1] * 6, [1, 64, 65, 1000, 300, 511]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the decode kernels that ran, in order."""
    modules = {"hopper": mla_route.hopper, "hopper, sparse": mla_route.hopper_sparse, "general": mla_route}
    return record_calls(monkeypatch, {name: (module, "attend_latents") for name, module in modules.items()})


@pytest.mark.parametrize("layer", list(LAYERS))
def test_blocks_may_be_any_number_of_rows_apart(layer: str, kernels: list[str]) -> None:
    config = deepseek(qk_nope_head_dim=32, v_head_dim=32, lse=True, backend="TRITON_MLA", **LAYERS[layer])
    args = random_mla_batch(config, QUERIES, LENGTHS, padding_tokens=1, topk=200, device="cuda")
    args.block_table[3, 2] = -7
    error_of(args, config, sum(QUERIES))
    expected, kernel = args.output.clone(), kernels.pop()
    assert kernel == ("hopper, sparse" if config.sparse else "hopper")
    width = args.kv_cache.shape[2]
    for rows in (1, 3 * config.block_size):
        args.output.fill_(torch.nan)
        run_mla(args._replace(kv_cache=apart(args.kv_cache, rows * width, 16)), config)
        assert kernels.pop() == kernel and torch.equal(args.output, expected)


@pytest.mark.parametrize("layer", ["16 heads", "128 heads", "fp8", "sparse"])
def test_blocks_that_lie_otherwise_run_on_the_general_kernel(layer: str, kernels: list[str]) -> None:
    config = deepseek(qk_nope_head_dim=32, v_head_dim=32, lse=True, backend="TRITON_MLA", **LAYERS[layer])
    args = random_mla_batch(config, QUERIES, LENGTHS, topk=200, device="cuda")
    for gap, start in ((32, 16), (args.kv_cache.shape[2], 1)):
        error_of(args._replace(kv_cache=apart(args.kv_cache, gap, start)), config, sum(QUERIES))
        assert kernels.pop() == "general"


@pytest.mark.parametrize("layer", ["16 heads", "fp8"])
def test_prompts_and_mixed_steps(layer: str, kernels: list[str]) -> None:
    config = deepseek(lse=True, backend="TRITON_MLA", **LAYERS[layer])
    args = random_mla_batch(config, [300, *[1] * 8], [700, *[90] * 8], device="cuda")
    error_of(args, config, 308)
    expected, found = args.output.clone(), list(kernels)
    for gap in (args.kv_cache[0].numel(), 32):
        kernels.clear()
        args.output.fill_(torch.nan)
        strided = args._replace(kv_cache=apart(args.kv_cache, gap, 16))
        error_of(strided, config, 308)
        assert gap == 32 or (kernels == found and torch.equal(args.output, expected))
