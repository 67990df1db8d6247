"""The reference's cache update byte by byte, and merging of partial results."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support import make_config, poisoned_empty, relative_l2, storage_of
from vattn.cache.layout import key_value_views, kv_cache_dtype, kv_cache_shape, op_views
from vattn.config.attention import AttentionConfig
from vattn.ops.arguments import CacheUpdateArgs, MergeArgs
from vattn.ops.reference import attention as reference
from vattn.ops.reference.mask import visible_mask
from vattn.quantization.codecs import encode_kv
from vattn.quantization.formats import KV_FORMATS

NUM_BLOCKS, BLOCK_SIZE = 5, 8
SLOTS = [0, 39, 13, -1, 40, 17, -(2**63), 2**63 - 1, 22]
"""First and last slot, some between, and four that name nothing."""

UPDATES = {
    "nhd": {},
    "hnd": {"kv_cache_layout": "HND"},
    "bf16_in_fp16": {"dtype": "bfloat16", "kv_cache_dtype": "float16"},
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "fp8_heads_hnd": {"kv_cache_dtype": "fp8_e5m2", "kv_scale": "head", "kv_cache_layout": "HND"},
    "unequal": {"head_size": 24, "head_size_v": 16},
    "unequal_hnd_fp8": {"head_size": 24, "head_size_v": 16, "kv_cache_layout": "HND", "kv_cache_dtype": "fp8_e4m3"},
    "unequal_bf16": {"head_size": 8, "head_size_v": 40, "dtype": "bfloat16"},
}


def update_args(config: AttentionConfig, slots: list[int]) -> CacheUpdateArgs:
    heads, dtype = config.num_kv_heads, getattr(torch, config.dtype)
    scale = {"none": None, "tensor": torch.tensor([0.0113]), "head": torch.tensor([0.0113, 0.37])}[config.kv_scale]
    return CacheUpdateArgs(
        torch.randn(len(slots), heads, config.head_size).to(dtype),
        torch.randn(len(slots), heads, config.head_size_v).to(dtype),
        *op_views(poisoned_empty(kv_cache_shape(config, NUM_BLOCKS), kv_cache_dtype(config)), config),
        torch.tensor(slots, dtype=torch.int64),
        scale,
        None if scale is None else scale * 1.7,
        config.encode(),
    )


def first_byte(config: AttentionConfig, slot: int, head: int, is_value: bool) -> int:
    """Where the storage holds the head of a slot, from the words of `vattn.cache.layout` alone."""
    block, offset = divmod(slot, BLOCK_SIZE)
    width = config.head_size_v if is_value else config.head_size
    row = offset * config.num_kv_heads + head
    if config.kv_cache_layout == "HND":
        row = head * BLOCK_SIZE + offset
    rows = BLOCK_SIZE * config.num_kv_heads
    if config.head_size == config.head_size_v:
        element = ((is_value * NUM_BLOCKS + block) * rows + row) * width
    else:
        element = block * rows * (config.head_size + config.head_size_v) + row * width
        element += rows * config.head_size if is_value else 0
    return element * KV_FORMATS[config.kv_cache_dtype].element_size


@pytest.mark.parametrize("name", list(UPDATES))
def test_an_update_writes_its_slots_and_nothing_else(name: str) -> None:
    config = make_config(block_size=BLOCK_SIZE, **UPDATES[name])
    args = update_args(config, SLOTS)
    expected = torch.full((storage_of(args).numel() * storage_of(args).element_size(),), 0xFF, dtype=torch.uint8)
    for row, slot in enumerate(SLOTS):
        for head in range(config.num_kv_heads if 0 <= slot < NUM_BLOCKS * BLOCK_SIZE else 0):
            for part, scale, is_value in ((args.key, args.k_scale, False), (args.value, args.v_scale, True)):
                of_head = scale if scale is None or scale.numel() == 1 else scale[head : head + 1]
                stored = encode_kv(part[row, head : head + 1], config.kv_cache_dtype, of_head).view(torch.uint8)
                start = first_byte(config, slot, head, is_value)
                expected[start : start + stored.numel()] = stored.flatten()
    reference.kv_cache_update(args, config)
    assert torch.equal(storage_of(args).view(torch.uint8).flatten(), expected)


def test_fp8_keys_are_stored_as_they_are() -> None:
    config = make_config(block_size=BLOCK_SIZE, kv_cache_dtype="fp8_e4m3")
    args = update_args(config, [3, 30])
    codes = torch.arange(64, dtype=torch.uint8).view(2, 2, 16)
    reference.kv_cache_update(args._replace(key=codes.view(torch.float8_e4m3fn)), config)
    key_cache, _ = key_value_views(args.key_cache, args.value_cache, config)
    assert torch.equal(key_cache.view(torch.uint8)[[0, 3], [3, 6]], codes)


@pytest.mark.parametrize(
    "slots", [[], [-1, NUM_BLOCKS * BLOCK_SIZE, 10**6], [NUM_BLOCKS * BLOCK_SIZE]], ids=["empty", "no slot", "the next"]
)
def test_an_update_without_slots_writes_nothing(slots: list[int]) -> None:
    config = make_config(block_size=BLOCK_SIZE)
    args = update_args(config, slots)
    reference.kv_cache_update(args, config)
    assert storage_of(args).isnan().all()


def test_of_two_tokens_with_one_slot_one_is_stored() -> None:
    config = make_config(block_size=BLOCK_SIZE)
    args = update_args(config, [9, 9])
    reference.kv_cache_update(args, config)
    assert any(torch.equal(args.key_cache[1, 1], row) for row in args.key)


def merge(parts: list[tuple[Tensor, Tensor]], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    (prefix, prefix_lse), (suffix, suffix_lse) = parts
    output, lse = poisoned_empty(prefix.shape, dtype), poisoned_empty(prefix_lse.shape, torch.float32)
    reference.merge_attn_states(MergeArgs(output, lse, prefix, prefix_lse, suffix, suffix_lse))
    return output, lse


@given(
    seq_len=st.integers(1, 40),
    cut=st.floats(0, 1),
    window=st.one_of(st.none(), st.integers(1, 9)),
    sink_in=st.sampled_from(["none", "prefix", "suffix"]),
    size=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_split_and_merge_is_the_whole(seq_len: int, cut: float, window: int | None, sink_in: str, size: float) -> None:
    config = make_config(sliding_window=window, sinks=sink_in != "none")
    query, key = size * torch.randn(6, 4, 16), torch.randn(seq_len, 2, 16)
    value, sinks = torch.randn(seq_len, 2, 16), torch.randn(4)
    visible, middle = visible_mask(config, 6, seq_len), int(cut * seq_len)
    whole = reference.attend(query, key, value, visible, config, sinks=sinks if config.sinks else None)
    parts = [
        reference.attend(
            query, key[keys], value[keys], visible[:, keys], config, sinks=sinks if sink_in == name else None
        )
        for name, keys in (("prefix", slice(0, middle)), ("suffix", slice(middle, seq_len)))
    ]
    out, lse = merge(parts)
    # Both sides round in fp32; scores reach a few hundred at the largest size, so exp() turns 2e-5 of absolute error
    # into relative error of the weights.
    assert relative_l2(out, whole[0]) < 1e-4
    assert relative_l2(lse, whole[1]) < 1e-6


@pytest.mark.parametrize("empty", [-math.inf, math.inf])
@pytest.mark.parametrize("kernel", ["reference", "triton"])
def test_merging_by_hand(kernel: str, empty: float) -> None:
    prefix, suffix = torch.tensor([[[1.0]], [[2.0]], [[math.nan]], [[math.nan]]]), torch.tensor([[[5.0]]] * 4)
    suffix[3] = math.inf
    prefix_lse = torch.tensor([[0.0], [100.0], [empty], [empty]])
    suffix_lse = torch.tensor([[math.log(3)], [-100.0], [1.5], [empty]])
    if kernel == "triton":
        pytest.importorskip("triton")
        from vattn.kernels.triton.attention.merge import merge_attn_states

        out, lse = torch.empty(4, 1, 1), torch.empty(4, 1)
        merge_attn_states(MergeArgs(out, lse, prefix, prefix_lse, suffix, suffix_lse))
    else:
        out, lse = merge([(prefix, prefix_lse), (suffix, suffix_lse)])
    assert out.flatten().tolist() == pytest.approx([4.0, 2.0, 5.0, 0.0])
    assert lse.flatten().tolist() == pytest.approx([math.log(4), 100.0, 1.5, -math.inf])


def test_merging_rounds_once_to_the_output_dtype() -> None:
    parts = [(torch.randn(3, 2, 8), torch.randn(3, 2)) for _ in range(2)]
    exact, _ = merge(parts)
    rounded, _ = merge(parts, torch.bfloat16)
    assert torch.equal(rounded, exact.to(torch.bfloat16))
    (prefix, prefix_lse), (suffix, suffix_lse) = parts
    output = poisoned_empty(prefix.shape, torch.float32)
    reference.merge_attn_states(MergeArgs(output, None, prefix, prefix_lse, suffix, suffix_lse))
    assert torch.equal(output, exact)
