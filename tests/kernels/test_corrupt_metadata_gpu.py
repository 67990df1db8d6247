"""Corrupt metadata on a GPU: every kernel keeps to its tensors, writes every row, and is right where it can be.

The interpreter runs the same for plain Triton in `test_corrupt_metadata`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import vattn.ops.schemas  # noqa: F401  registers the ops
from tests.kernels.corrupt_metadata import check_attention, with_corrupt_metadata, with_full_cache
from tests.layers.mla_support import deepseek, random_mla_batch
from tests.support import make_config, moved, random_packed_batch, random_paged_batch
from vattn.backends import selector
from vattn.backends.mla.registry import mla_backends
from vattn.ops.reference import attention as reference
from vattn.ops.reference import mla as mla_reference
from vattn.quantization.codecs import dequantise_output

pytestmark = pytest.mark.gpu(capability=(9, 0))

SEEDS = int(os.environ.get("VATTN_CORRUPT_SEEDS", "12"))
SAMPLE = [
    "paged_attention[decode]", "paged_attention[prefill]", "paged_attention[general splits]",
    "latent_attention[decode]",
]  # fmt: skip
LAYER = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16", "lse": True,
         "backend": "TRITON_ATTN"}  # fmt: skip
FP8 = {"kv_cache_dtype": "fp8_e4m3"}
ONES, MIXED = [1] * 24, [1] * 30 + [40, 300, 2, 100, 1, 5]

PAGED: dict[str, tuple[list[int], dict[str, Any]]] = {
    "decode": (ONES, {}),
    "decode window sinks": (ONES, {"sliding_window": 50, "sinks": True}),
    "decode fp8": (ONES, FP8),
    "decode fp8 few": ([1] * 9, FP8),
    "decode groups": (ONES, {"output_format": "fp8_group128"}),
    "decode wide": (ONES, {"head_size": 256, **FP8}),
    "clusters": ([1, 1], {}),
    "whole requests": ([1] * 30, {}),
    "drafts": ([4] * 6, {}),
    "drafts in chunks": ([8] * 3, {}),
    "packed cache": (ONES, {"kv_cache_dtype": "int8_per_token_head"}),
    "prefill": ([200, 1, 333, 0, 90], {}),
    "prefill window": ([200, 1, 333, 0, 90], {"sliding_window": 70, "sinks": True}),
    "prefill fp8": ([200, 1, 333, 0, 90], FP8),
    "prefill fp8 query": ([200, 1, 333], {**FP8, "query_format": "fp8_e4m3"}),
    "prefill 256": ([200, 1, 333], {"head_size": 256}),
    "two kernels": (MIXED, {}),
    "packed heads": ([4] * 80, {}),
    "general decode": ([1] * 5, {"head_size": 24}),
    "general splits": ([1, 2], {"head_size": 24, "sinks": True}),
    "general prefill": ([70, 1, 90], {"head_size": 24}),
    "general tree": ([7, 1, 9], {"tree_bias": True}),
    "general flags": ([70, 1, 90], {"causality": "per_request", "sliding_window": 40, "chunk_lookback": 1}),
    "general ranges": ([70, 1, 90], {"mm_prefix": "full"}),
    "context parallel": (ONES, {"context_parallel": True, "context_rank": 1, "context_world": 2}),
}


def lengths_of(query_lens: list[int]) -> list[int]:
    return [query + (37 * i) % 250 for i, query in enumerate(query_lens)]


def output_of(args: Any, config: Any) -> Tensor:
    torch.cuda.synchronize()
    return dequantise_output(args.output, config.output_format, args.output_block_scale, args.output_scale)


def with_plan(args: Any, made_from: Any, config: Any, planned: int) -> Any:
    """Return arguments without a plan, with their own, or with that of another step of the same shapes."""
    backend: Any = mla_backends().get(config.backend) or selector.get_backend(config.backend)
    shape = backend.plan_shape(config, args.query.shape[0], *args.block_table.shape)
    if not planned or not shape:
        return args
    source = args if planned == 1 else made_from
    schedule = torch.full(shape, -1, dtype=torch.int32, device=args.query.device)
    torch.ops.vattn.plan(source.query_start_loc, source.seq_lens, schedule, args.config)
    return args._replace(plan=[schedule])


@pytest.mark.parametrize("name", PAGED)
def test_paged_attention(name: str) -> None:
    query_lens, changes = PAGED[name]
    config = make_config(**LAYER | changes)
    batch = random_paged_batch(config, query_lens, lengths_of(query_lens), poison=False)
    given = moved(with_full_cache(batch.args), "cuda")
    limit = 6e-2 if config.output_format != "none" or config.query_format != "none" else 1.5e-2

    def call(args: Any) -> Tensor:
        torch.ops.vattn.attention(*args)
        return output_of(args, config)

    def expected(args: Any) -> tuple[Tensor, Tensor]:
        return reference.paged_attention(moved(args, "cpu"), config)

    for seed in range(SEEDS):
        args = with_corrupt_metadata(given, seed, sum(query_lens) + 20)
        planned = with_plan(args, given, config, seed % 3)
        check_attention(planned, call, expected, None if seed % 3 == 2 else limit)


@pytest.mark.parametrize("size", [72, 80, 128])
def test_varlen_attention(size: int) -> None:
    config = make_config(**LAYER | {"head_size": size, "block_size": 0, "causality": "bidirectional", "lse": False})
    batch = random_packed_batch(config, [70, 1, 90], [70, 1, 90], poison=False, num_padding_tokens=9, device="cuda")

    def call(args: Any) -> Tensor:
        torch.ops.vattn.varlen_attention(*args)
        return output_of(args, config)

    for seed in range(SEEDS):
        args = with_corrupt_metadata(batch.args, seed, 190)
        check_attention(args, call, lambda args: reference.packed_attention(moved(args, "cpu"), config), 1.5e-2)


LATENT: dict[str, tuple[list[int], dict[str, Any]]] = {
    "decode": (ONES, {}),
    "decode fp8": (ONES, FP8),
    "decode 128 heads": (ONES[:9], {"num_heads": 128}),
    "drafts": ([4] * 6, {}),
    "drafts of other lengths": ([1, 3, 2, 7, 1, 1, 1], {}),
    "prompts": ([1, 200, 2, 333, 0, 90], {}),
    "plain decode": (ONES[:7], {"num_heads": 12}),
    "plain prompts": ([1, 200, 2, 333, 0, 90], {"num_heads": 12, "v_head_dim": 96}),
    "sparse": (ONES[:7], {"sparse": True, "num_heads": 64}),
    "sparse fp8": (ONES[:7], {"sparse": True, **FP8}),
    "sparse plain": (ONES[:7], {"sparse": True}),
    "sparse prompts": ([1, 90, 2], {"sparse": True, "num_heads": 64}),
}


@pytest.mark.parametrize("name", LATENT)
def test_latent_attention(name: str) -> None:
    query_lens, changes = LATENT[name]
    config = deepseek(backend="TRITON_MLA", lse=True, **changes)
    topk = 96 if config.sparse else 0
    args = random_mla_batch(config, query_lens, lengths_of(query_lens), topk=topk)
    args = moved(with_full_cache(args), "cuda")

    def call(args: Any) -> Tensor:
        torch.ops.vattn.mla_attention(*args)
        return output_of(args, config)

    def expected(args: Any) -> tuple[Tensor, Tensor]:
        return mla_reference.attend_latents(moved(args, "cpu"), config)

    for seed in range(SEEDS):
        step = with_corrupt_metadata(args, seed, sum(query_lens) + 20)
        limit = None if seed % 3 == 2 else 2e-2
        check_attention(with_plan(step, args, config, seed % 3), call, expected, limit, 2e-2)


def test_memcheck_of_a_sample() -> None:
    """Every tensor is an allocation of its own there, so that compute-sanitizer sees what guard bytes cannot: reads."""
    tool = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if tool is None:
        pytest.skip("needs compute-sanitizer")
    tests = [f"{__file__}::test_{name}" for name in SAMPLE]
    check = [tool, "--tool", "memcheck", "--report-api-errors", "no"]
    command = [*check, sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    environment = {**os.environ, "VATTN_CORRUPT_SEEDS": "3", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run([*command, *tests], env=environment, capture_output=True, text=True, timeout=240, check=False)
    if "ERROR SUMMARY" not in done.stdout:
        pytest.skip(f"compute-sanitizer does not run here: {done.stdout[-300:]}")
    assert "ERROR SUMMARY: 0 errors" in done.stdout and done.returncode == 0, done.stdout[-6000:]
