"""The fast decode path for packed KV formats on a Hopper GPU, through the op, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vattn.ops.schemas  # noqa: F401  registers the ops
from tests.kernels.decode_support import PACKED, SHORT
from tests.kernels.test_decode_packed_codes import unpack_kernel
from tests.quantization.test_kv_formats import SCALE, hard_rows
from tests.support import capture, make_config, moved, random_paged_batch, relative_l2
from vattn.cache.layout import kv_cache_shape
from vattn.config.attention import AttentionConfig
from vattn.kernels.hopper.decode import launch as decode_fast
from vattn.kernels.hopper.decode_packed import launch as decode_packed
from vattn.kernels.triton.cache import packed_update
from vattn.ops.arguments import CacheUpdateArgs
from vattn.ops.reference import attention as reference
from vattn.quantization.formats import KV_FORMATS

pytestmark = pytest.mark.gpu(capability=(9, 0))

TOLERANCE = {"bfloat16": 2.5e-3, "float16": 1.5e-3}
"""Relative L2: results are rounded to the model dtype, 1.7e-3 in bf16; the rest as in the interpreted tests."""


def config_of(fmt: str, **changes: Any) -> AttentionConfig:
    values = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16", "lse": True, "block_size": 16}
    kind = "tensor" if KV_FORMATS[fmt].quantised else "none"
    return make_config(**{**values, "kv_cache_dtype": fmt, "kv_scale": kind, "backend": "TRITON_ATTN", **changes})


def check(fmt: str, lengths: list[int], padding: int = 0, planned: bool = True, **changes: Any) -> None:
    config = config_of(fmt, **changes)
    batch = random_paged_batch(
        config, [1] * len(lengths), lengths, num_padding_reqs=padding, num_padding_tokens=padding, device="cuda"
    )
    assert decode_packed.accepts(batch.args, config)
    if planned:
        batch = batch.planned()
        assert batch.args.plan
    batch.run()
    output, lse = batch.expected()
    assert relative_l2(batch.output(), output) < TOLERANCE[config.dtype]
    assert relative_l2(batch.args.lse, lse) < 3e-4


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("fmt", PACKED)
def test_ragged_requests(fmt: str, size: int) -> None:
    check(fmt, [1, 16, 17, 300, 47, 129, 1000, 2500, 33], padding=2, head_size=size)


@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("fmt", PACKED)
def test_other_cuts(fmt: str, heads: int, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = decode_fast.Tuning(heads, 3, 8 / heads, slots=slots, max_registers=None if slots else 168)
    monkeypatch.setitem(decode_packed.TUNINGS, fmt, tuning)
    check(fmt, [1, 16, 31, 33, 300, 900], padding=1, num_heads=64)


@pytest.mark.parametrize("fmt", SHORT)
def test_codes_of_three_bits(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged requests, one that is split, masks in the other layout, and other cuts."""
    masks: dict[str, Any] = {"sliding_window": 133, "logits_soft_cap": 4.0, "sinks": True}
    check(fmt, [1, 16, 17, 300, 47, 129, 1000, 2500, 33], padding=2)
    check(fmt, [9001], dtype="float16")
    check(fmt, [5, 900, 64], planned=False, block_size=32, kv_cache_layout="HND", num_heads=21, num_kv_heads=3,
          dtype="float16", **masks)  # fmt: skip
    for heads, slots in ((2, 0), (1, 0)):
        monkeypatch.setitem(decode_packed.TUNINGS, fmt, decode_fast.Tuning(heads, 3, 8 / heads, slots=slots))
        check(fmt, [1, 16, 31, 33, 300, 900], padding=1, num_heads=64)


def test_small_and_large_queries_keep_their_digits() -> None:
    for factor in (2.0**-20, 2.0**14):
        config = config_of("int4_per_token_head", scale=0.09 / factor, lse=False)
        batch = random_paged_batch(config, [1, 1], [70, 300], device="cuda")
        batch.args.query.mul_(factor)
        batch.run()
        assert relative_l2(batch.output(), batch.expected()[0]) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("codec", ["int8", "int4", "codebook"])
def test_assembly_equals_the_plain_twin(codec: str) -> None:
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).cuda()
    plain, assembly = torch.empty(2, 4, codes.numel(), dtype=torch.float16, device="cuda").view(torch.int16)
    for part, of_assembly in ((plain, False), (assembly, True)):
        unpack_kernel[(1,)](codes, part.view(torch.float16), COUNT=codes.numel(), CODEC=codec, ASSEMBLY=of_assembly)
    if codec == "codebook":
        # Result j of assembly has columns 2 j and 2 j + 1 of eight.
        plain = plain.view(4, -1, 2).permute(1, 2, 0).reshape(-1, 4, 2).permute(1, 0, 2).reshape(4, -1)
    assert torch.equal(plain, assembly)


@pytest.mark.parametrize("fmt", PACKED)
def test_masks(fmt: str) -> None:
    masks: dict[str, Any] = {"sliding_window": 133, "logits_soft_cap": 4.0, "sinks": True}
    if KV_FORMATS[fmt].quantised:
        masks["kv_scale"] = "head"
    check(fmt, [5, 1900, 64], block_size=528)
    check(fmt, [5, 900, 64], planned=False, block_size=32, kv_cache_layout="HND", num_heads=21, num_kv_heads=3,
          dtype="float16", **masks)  # fmt: skip


@pytest.mark.parametrize("fmt", PACKED)
def test_masks_in_ctas_of_one_warp(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With log-sum-exps, at the depth that large batches have."""
    tuning = decode_fast.Tuning(1, 3, 16, max_registers=128)
    monkeypatch.setitem(decode_packed.TUNINGS, fmt, tuning)
    test_masks(fmt)
    check(fmt, [5, 900, 64, 2500], sliding_window=133, sinks=True)


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [40, 1, 7]])
@pytest.mark.parametrize("fmt", [name for name, fmt in KV_FORMATS.items() if fmt.packed])
def test_heads_of_512_in_the_general_kernel(fmt: str, query_lens: list[int]) -> None:
    config = config_of(fmt, num_heads=4, num_kv_heads=2, head_size=512, lse=False)
    batch = random_paged_batch(config, query_lens, [40, 300, 19], device="cuda")
    batch.run()
    assert relative_l2(batch.output(), batch.expected()[0]) < 4e-3


@pytest.mark.parametrize("fmt", ["int4_per_token_head", "turboquant_k8v4"])
def test_one_long_request_is_split(fmt: str) -> None:
    check(fmt, [9001], output_format="none")


@pytest.mark.parametrize("fmt", ["fp8_per_token_head", "turboquant_4bit_nc", *SHORT])
def test_a_replayed_graph_reads_new_lengths(fmt: str) -> None:
    batch = random_paged_batch(config_of(fmt), [1, 1, 1], [700, 90, 33], device="cuda", poison=False)
    batch.run()
    graph, _ = capture(lambda: torch.ops.vattn.attention(*batch.args))
    batch.args.seq_lens.copy_(torch.tensor([301, 17, 1], dtype=torch.int32))
    graph.replay()
    assert relative_l2(batch.output(), batch.expected()[0]) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("cut", [None, (1024, 4), (512, 2), (256, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fmt", [name for name, fmt in KV_FORMATS.items() if fmt.packed])
def test_stores_give_the_bytes_of_the_reference(
    fmt: str, dtype: str, cut: tuple[int, int] | None, words: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of ties, zeros, tiny, huge and not finite numbers among normal ones, in every cut that is timed."""
    if not words:  # As of a cache that begins inside a word.
        monkeypatch.setattr(packed_update, "has_words", lambda *given: False)
    if cut is not None:
        monkeypatch.setitem(packed_update.UPDATE_CUTS, fmt, cut)
    for size in (64, 128):
        config = config_of(fmt, head_size=size, num_kv_heads=4, num_heads=4, dtype=dtype, lse=False)
        hard = hard_rows(size).repeat(1, 2, 1)
        normal = torch.randn(300, 4, size, generator=torch.Generator().manual_seed(size))
        rows = torch.cat((hard, normal)).to(getattr(torch, dtype))
        slots = torch.randperm(24 * 16, generator=torch.Generator().manual_seed(1))[: len(rows)]
        scale = SCALE if config.kv_scale != "none" else None
        expected = torch.full(kv_cache_shape(config, 24), 0xA5, dtype=torch.uint8)
        args = CacheUpdateArgs(rows, rows.flip(0), expected, None, slots, scale, scale, config.encode())
        on_gpu = moved(args, "cuda")
        reference.kv_cache_update(args, config)
        torch.ops.vattn.kv_cache_update(*on_gpu)
        wrong = (on_gpu.key_cache.cpu() != expected).sum().item()
        assert wrong == 0, f"{wrong} bytes differ"
