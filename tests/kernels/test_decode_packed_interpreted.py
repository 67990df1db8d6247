"""The fast decode path for packed KV formats in the interpreter: every codec, chunks, masks against the reference."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.decode_support import PACKED, SHORT, interpret
from tests.support import make_config, random_paged_batch, relative_l2
from vattn.cache.layout import packed_views
from vattn.config.device import DeviceInfo
from vattn.kernels.hopper.decode import launch as decode_fast
from vattn.kernels.hopper.decode import triton_kernel
from vattn.kernels.hopper.decode_packed import codes, codes_3bit, codes_e2m1, kernel
from vattn.kernels.hopper.decode_packed import launch as decode_packed
from vattn.quantization.formats import KV_FORMATS

TOLERANCE = 1.5e-3
"""Relative L2: rotated queries, centroids, weights and results are rounded to fp16, 1.4e-4 on average each; weights
that carry a value's scale meet codes that lie up to 8 steps off."""

LENGTHS = [1, 17, 100, 48]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, decode_packed, triton_kernel, codes, codes_e2m1, codes_3bit, kernel)


def check(
    fmt: str, padding: int = 0, heads: int = 2, slots: int = 0, lengths: list[int] = LENGTHS, **changes: Any
) -> None:
    values = {"num_heads": 6, "num_kv_heads": 2, "head_size": 64, "dtype": "float16", "lse": True, "block_size": 16}
    kind = "tensor" if KV_FORMATS[fmt].quantised else "none"
    config = make_config(**{**values, "kv_cache_dtype": fmt, "kv_scale": kind, **changes})
    batch = random_paged_batch(
        config, [1] * len(lengths), lengths, num_padding_reqs=padding, num_padding_tokens=padding
    )
    # A row of zeros, and one whose columns are subnormal in fp16.
    batch.args.query[0, 0] = 0.0
    batch.args.query[1, 1] *= 2.0**-13
    decode_packed.decode(batch.args, config, decode_fast.Tuning(heads, 3, 2, slots=slots))
    output, lse = batch.expected()
    assert relative_l2(batch.output(), output) < TOLERANCE
    # No zero below zero: codes of an output format would differ.
    assert not batch.args.output[len(lengths) :].signbit().any()
    assert relative_l2(batch.args.lse, lse) < 3e-4


@pytest.mark.sample(3)
@pytest.mark.parametrize("fmt", PACKED)
def test_ragged_requests(fmt: str) -> None:
    """One tile at a time, or two."""
    check(fmt, slots=2 if "4" in fmt else 0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("fmt", ["fp8_per_token_head", "int4_per_token_head", "turboquant_4bit_nc_signed", "nvfp4"])
def test_masks_and_padding(fmt: str) -> None:
    masks = {"sliding_window": 33, "logits_soft_cap": 4.0, "sinks": True, "block_size": 32, "kv_cache_layout": "HND"}
    if fmt == "nvfp4":
        masks["kv_scale"] = "head"
    check(fmt, padding=2, heads=1, slots=2 if fmt.startswith("fp8") else 0, **masks)


@pytest.mark.parametrize("fmt", SHORT)
def test_codes_of_three_bits(fmt: str) -> None:
    masks = {"sliding_window": 33, "logits_soft_cap": 4.0, "sinks": True, "kv_cache_layout": "HND"}
    layer = {"head_size": 128, "num_heads": 2, "num_kv_heads": 1, **(masks if fmt == "turboquant_3bit_nc" else {})}
    check(fmt, padding=2, heads=1, slots=2, lengths=[1, 60, 17], **layer)


def test_wide_groups_and_heads_that_do_not_fill_a_cta() -> None:
    check("turboquant_4bit_nc", lengths=[17, 40], num_heads=24, num_kv_heads=3)


def test_which_formats_go_the_fast_way() -> None:
    hopper = DeviceInfo("cuda", (9, 0))
    packed = [name for name, fmt in KV_FORMATS.items() if fmt.packed]
    for name in packed:
        kind = "tensor" if KV_FORMATS[name].quantised else "none"
        config = make_config(head_size=128, dtype="bfloat16", block_size=16, kv_cache_dtype=name, kv_scale=kind)
        plain = name.removesuffix("_signed")
        assert (not decode_packed.refusals(config, hopper)) == (plain in PACKED + SHORT)
        narrow = config.replace(head_size=64, head_size_v=64)
        assert (not decode_packed.refusals(narrow, hopper)) == (plain in PACKED)


def test_a_key_that_is_nan() -> None:
    """Stored as e4m3: the rows that see it are NaN, and no others."""
    config = make_config(
        num_heads=6, num_kv_heads=2, head_size=64, dtype="float16", block_size=16, kv_cache_dtype="turboquant_k8v4"
    )
    batch = random_paged_batch(config, [1] * len(LENGTHS), LENGTHS)
    keys = packed_views(batch.args.key_cache, config)[0]
    keys.codes[batch.args.block_table[2, 0], 3, 1, 5] = 0x7F
    decode_packed.decode(batch.args, config)
    seen = batch.args.output.isnan().all(-1)
    assert bool(seen[2, 3:].all()) and int(seen.sum()) == 3
    assert not bool(batch.args.output[~seen].isnan().any())
