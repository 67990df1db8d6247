"""Corrupt metadata on a CPU: the reference, the torch backends, and Triton's kernels in the interpreter."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import vattn
from tests.kernels.corrupt_metadata import Guarded, check_attention, corrupted, with_corrupt_metadata, with_full_cache
from tests.kernels.decode_support import interpret
from tests.layers.mla_support import make_mla_config, random_mla_batch
from tests.support import make_config, random_packed_batch, random_paged_batch
from vattn.cache.layout import kv_cache_dtype as kv_cache_dtype_of
from vattn.cache.layout import kv_cache_shape, op_views
from vattn.errors import MetadataError
from vattn.kernels.hopper.decode import launch as decode_fast
from vattn.kernels.hopper.decode import triton_kernel
from vattn.kernels.hopper.prefill.schedule import max_row_tiles, prefill_plan_kernel
from vattn.ops.arguments import CacheUpdateArgs
from vattn.ops.reference import attention as reference
from vattn.ops.reference import mla as mla_reference
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
@settings(max_examples=4, deadline=None)
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
    args = with_corrupt_metadata(with_full_cache(batch.args), seed, 40)
    check_attention(args, call, lambda args: reference.paged_attention(args, config), limit)


BY_HAND: dict[str, tuple[dict[str, list[Any]], list[bool], str]] = {
    "right": ({}, [False, False, False], ""),
    "an offset below 0": ({"query_start_loc": [-5, 1, 3]}, [False, False, False], "offsets that start at 0"),
    "a first offset above 0": ({"query_start_loc": [1, 1, 3]}, [True, False, False], "offsets that start at 0"),
    "offsets that end early": ({"query_start_loc": [0, 1, 2]}, [False, False, True], "padding row 2 has a slot"),
    "a length below 0": ({"seq_lens": [-9, 20]}, [True, False, False], "seq_lens[0]=-9"),
    "a length below its query": ({"seq_lens": [9, 1]}, [False, True, False], "shorter than its query_len"),
    "a block that is none": ({"block_table": [[99, -1], [3, 4]]}, [True, False, False], "block ids from 0"),
    "a length beyond the table": ({"seq_lens": [9, 99]}, [False, False, False], "its block table has"),
}
"""What differs from a right step of a decode and two new tokens, which rows are zeros, and what `check` says."""


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "TRITON_ATTN"])
@pytest.mark.parametrize("case", BY_HAND)
def test_metadata_by_hand(backend: str, case: str) -> None:
    """`paged_attention` takes it as the device does, without reading it; `check` names what is wrong."""
    changes, zeros, text = BY_HAND[case]
    config = make_config(num_heads=2, num_kv_heads=1, head_size=16, block_size=16, lse=True, backend=backend)
    right: dict[str, list[Any]] = {"query_start_loc": [0, 1, 3], "seq_lens": [9, 20], "block_table": [[1, 2], [3, 4]]}
    tensors = {name: torch.tensor(values).int() for name, values in (right | changes).items()}
    step = vattn.AttentionMetadata(**tensors, slot_mapping=torch.tensor([24, 66, 67]))
    if text:
        with pytest.raises(MetadataError, match=re.escape(text)):
            step.check(16, 6)
    else:
        step.check(16, 6)
    rng = torch.Generator().manual_seed(3)
    cache = torch.randn(kv_cache_shape(config, 6), generator=rng)
    query, before = torch.randn(3, 2, 16, generator=rng), cache.clone()
    torch.use_deterministic_algorithms(True)  # Rows that stay unwritten are then NaN.
    try:
        output, lse, _ = vattn.paged_attention(query, cache, step, config)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(cache, before) and lse is not None
    assert (output == 0).all(-1).all(-1).tolist() == zeros
    assert (lse == -torch.inf).all(-1).tolist() == zeros
    assert not output.isnan().any() and not lse.isnan().any()


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "TRITON_ATTN"])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_varlen_attention(backend: str, seed: int) -> None:
    config = make_config(lse=True, backend=backend, block_size=0, causality="bidirectional")
    batch = random_packed_batch(config, QUERY_LENS, SEQ_LENS, poison=False, num_padding_tokens=2)

    def call(args: Any) -> Tensor:
        torch.ops.vattn.varlen_attention(*args)
        return output_of(args, config)

    args = with_corrupt_metadata(batch.args, seed, 70)
    check_attention(args, call, lambda args: reference.packed_attention(args, config), 1e-5)


@pytest.mark.parametrize("backend", ["TORCH_MLA", "TRITON_MLA"])
@pytest.mark.parametrize("lens", [(QUERY_LENS, SEQ_LENS), ([1, 1, 1, 1, 1], SEQ_LENS), ([1, 30], [33, 31])], ids=str)
@pytest.mark.parametrize("sparse", [False, True])
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_latent_attention(backend: str, lens: tuple[list[int], list[int]], sparse: bool, seed: int) -> None:
    config = make_mla_config(lse=True, backend=backend, sparse=sparse, num_heads=5)
    args = random_mla_batch(config, *lens, padding_tokens=2, padding_reqs=1, topk=6 if sparse else 0)

    def call(args: Any) -> Tensor:
        torch.ops.vattn.mla_attention(*args)
        return output_of(args, config)

    args = with_corrupt_metadata(with_full_cache(args), seed, 40)
    check_attention(args, call, lambda args: mla_reference.attend_latents(args, config), 1e-5)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_decodes_by_a_schedule(seed: int) -> None:
    config = make_config(num_heads=6, num_kv_heads=2, head_size=64, dtype="float16", lse=True)
    batch = random_paged_batch(config, DECODES[:3], SEQ_LENS[:3], poison=False, num_padding_tokens=2,
                               num_padding_reqs=2)  # fmt: skip

    def call(args: Any) -> Tensor:
        decode_fast.decode(args, config, decode_fast.Tuning(2, 3, 2))
        return output_of(args, config)

    with pytest.MonkeyPatch.context() as patch:
        interpret(patch, decode_fast, triton_kernel)
        args = with_corrupt_metadata(batch.args, seed, 40)
        check_attention(args, call, lambda args: reference.paged_attention(args, config), 2e-3)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), tokens=st.integers(1, 40), least=st.sampled_from([1, 3]))
def test_row_tiles_cover_every_row_once(seed: int, tokens: int, least: int) -> None:
    """Requests of fewer rows than `least` aside."""
    rng = torch.Generator().manual_seed(seed)
    starts = corrupted(torch.tensor([0, 3, 3, 11, 20, 40]).int().clamp(max=tokens), 0.4, tokens, rng)
    lengths = corrupted(torch.tensor([5, 0, 30, 9, 20]).int(), 0.4, 60, rng)
    tiles = max_row_tiles(tokens, 5, 8)
    schedule = torch.full((1 + 2 * tiles, 8), -99, dtype=torch.int32)
    prefill_plan_kernel[(1,)](
        starts, torch.empty_like(starts), lengths, schedule, 5, tokens, tiles, WINDOW=7, ROWS=8, LEAST=least, KEYS=16,
        CHUNK=16, REQUESTS=16,
    )  # fmt: skip
    times = torch.zeros(tokens, dtype=torch.int32)
    spans = reference.ranges(starts, tokens)
    for start, end in spans:
        if end - start < least:
            times[start:end] += 1
    for request, row, rows, _, seq_len, first, end, _ in schedule[1 : 1 + int(schedule[0, 0])].tolist():
        assert 0 <= request < 5 and row >= 0 and 0 < rows <= 8 and row + rows <= tokens and 0 <= first <= end
        assert seq_len < 0 or spans[request][0] <= row < row + rows <= spans[request][1]
        times[row : row + rows] += 1
    assert bool((times == 1).all())


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "fp8_e4m3", "int8_per_token_head"])
def test_slots_out_of_range_write_nothing(kv_cache_dtype: str) -> None:
    config = make_config(kv_cache_dtype=kv_cache_dtype, backend="TRITON_ATTN", head_size=32)
    storage = torch.zeros(kv_cache_shape(config, 3), dtype=kv_cache_dtype_of(config))
    size = 3 * config.block_size
    slots = torch.tensor([5, -1, size, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), size - 1, -size])
    rows = torch.randn(len(slots), config.num_kv_heads, config.head_size)
    scale = torch.ones(1) if config.kv_scale != "none" else None
    args = CacheUpdateArgs(rows, rows + 1, *op_views(storage, config), slots, scale, scale, config.encode())
    guarded = Guarded(args)
    torch.ops.vattn.kv_cache_update(*guarded.args)
    guarded.check(may_change=("key_cache", "value_cache"))
    valid = (slots >= 0) & (slots < size)
    reference.kv_cache_update(args._replace(key=rows[valid], value=rows[valid] + 1, slot_mapping=slots[valid]), config)
    for got, expected in zip((guarded.args.key_cache, guarded.args.value_cache), args[2:4], strict=True):
        if expected is not None:
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
