"""Metadata with any values on a CPU: the reference, the torch backends, and Triton's kernels in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import vattn.ops.schemas  # noqa: F401  registers the ops
from tests.kernels.wild import check_attention, with_wild_metadata
from tests.support import make_config, random_packed_batch, random_paged_batch
from vattn.ops.reference import attention as reference
from vattn.quantization.codecs import dequantise_output

QUERY_LENS, SEQ_LENS = [3, 1, 0, 9, 1], [20, 33, 4, 9, 0]
DECODES = [1] * 5

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "decode": {"query_lens": DECODES},
    "window-sinks": {"sliding_window": 21, "sinks": True},
    "chunks-flags": {"sliding_window": 24, "chunk_lookback": 1, "causality": "per_request"},
    "tree": {"tree_bias": True},
    "ranges": {"mm_prefix": "full", "sliding_window": 4},
    "dcp": {"context_parallel": True, "context_rank": 1, "context_world": 3, "context_interleave": 4},
    "fp8": {"kv_cache_dtype": "fp8_e4m3", "output_format": "fp8_static"},
    "packed": {"kv_cache_dtype": "int8_per_token_head", "head_size": 32},
    "bidirectional": {"causality": "bidirectional", "sliding_window": 9, "alibi": "linear"},
}


def output_of(args: Any, config: Any) -> Tensor:
    return dequantise_output(args.output, config.output_format, args.output_block_scale, args.output_scale)


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "TRITON_ATTN"])
@pytest.mark.parametrize("feature", FEATURES)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_paged_attention(backend: str, feature: str, seed: int) -> None:
    changes = dict(FEATURES[feature])
    query_lens = changes.pop("query_lens", QUERY_LENS)
    config = make_config(lse=True, backend=backend, **changes)
    batch = random_paged_batch(config, query_lens, SEQ_LENS, poison=False, num_padding_tokens=2, num_padding_reqs=1)

    def call(args: Any) -> Tensor:
        torch.ops.vattn.attention(*args)
        return output_of(args, config)

    limit = 5e-2 if config.output_format != "none" else 2e-2 if config.kv_cache_dtype != config.dtype else 1e-5
    args = with_wild_metadata(batch.args, seed, 40)
    check_attention(args, call, lambda args: reference.paged_attention(args, config), limit)


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "TRITON_ATTN"])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_varlen_attention(backend: str, seed: int) -> None:
    config = make_config(lse=True, backend=backend, block_size=0, causality="bidirectional")
    batch = random_packed_batch(config, QUERY_LENS, SEQ_LENS, poison=False, num_padding_tokens=2)

    def call(args: Any) -> Tensor:
        torch.ops.vattn.varlen_attention(*args)
        return output_of(args, config)

    args = with_wild_metadata(batch.args, seed, 70)
    check_attention(args, call, lambda args: reference.packed_attention(args, config), 1e-5)
