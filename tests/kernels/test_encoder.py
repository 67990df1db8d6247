"""The encoder kernel in Triton's interpreter against the reference, and that it compiles for real targets."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.cases import make_batch
from tests.conformance.compare import compare
from tests.support import Batch, make_config, random_packed_batch
from vattn.config.attention import AttentionConfig
from vattn.kernels.triton.attention import encoder
from vattn.kernels.triton.common.tiles import Limits

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")

FP8 = {"kv_cache_dtype": "fp8_e4m3", "query_format": "fp8_e4m3"}
LENS = ([33, 0, 40, 1, 3], [33, 0, 40, 1, 0])
"""Rows and keys: tiles that end anywhere, nothing, one, rows without any key."""


def encoder_config(size: int, **changes: Any) -> AttentionConfig:
    values: dict[str, Any] = {
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_size": size,
        "dtype": "bfloat16",
        "block_size": 0,
        "causality": "bidirectional",
        "attn_type": "encoder",
        "backend": "TRITON_ATTN",
        **changes,
    }
    return make_config(**values)


def check(batch: Batch) -> None:
    assert encoder.refusals(batch.config) == []
    encoder.attend(batch.args, batch.config)
    compare(batch, *batch.expected())


@pytest.mark.parametrize(("size", "fp8"), [(64, False), (72, False), (80, False), (72, True), (128, True)])
def test_head_sizes(size: int, fp8: bool) -> None:
    config = encoder_config(size, dtype="bfloat16" if size % 16 else "float16", **(FP8 if fp8 else {}))
    check(random_packed_batch(config, *LENS, num_padding_tokens=5, num_padding_reqs=2, seed=size))


@pytest.mark.parametrize("name", ["fp8_static", "fp8_per_token", "fp8_group64_col", "nvfp4"])
def test_quantised_outputs(name: str) -> None:
    check(random_packed_batch(encoder_config(64, output_format=name), [33, 0, 3], [33, 0, 2], num_padding_tokens=3))


@pytest.mark.parametrize("arithmetic", ["multiply", "approximate_divide"])
def test_arithmetic_of_static_outputs(arithmetic: str) -> None:
    config = encoder_config(72, output_format="fp8_static", output_arithmetic=arithmetic)
    check(make_batch(config, [(40, 40), (17, 17)]))


@pytest.mark.parametrize("heads", [(3, 3), (5, 1)], ids=str)
def test_heads(heads: tuple[int, int]) -> None:
    config = encoder_config(72, num_heads=heads[0], num_kv_heads=heads[1])
    check(random_packed_batch(config, [40, 17, 4], [40, 17, 2]))


@pytest.mark.parametrize("fp8", [False, True])
def test_rows_that_are_counted_apart_from_the_keys(fp8: bool) -> None:
    """More rows than keys: without positions among them each sees every key."""
    config = encoder_config(72, attn_type="encoder_decoder", **(FP8 if fp8 else {}))
    check(random_packed_batch(config, [40, 5, 3], [7, 60, 0], num_padding_tokens=4))


def test_a_scale_that_is_negative() -> None:
    check(random_packed_batch(encoder_config(64, scale=-0.2), [40, 17], [40, 17]))


def test_views_of_one_projection_whose_neighbours_are_nan() -> None:
    """Columns behind a head are its neighbour's; rows behind a sequence are the next one's."""
    batch = random_packed_batch(encoder_config(72), [40, 17], [40, 17], num_padding_tokens=9)

    def strided(rows: Tensor) -> Tensor:
        wide = torch.full((rows.shape[0], rows.shape[1], 3, rows.shape[2]), torch.nan, dtype=rows.dtype)
        wide[:, :, 1] = rows
        return wide[:, :, 1]

    args = batch.args
    batch.args = args._replace(query=strided(args.query), key=strided(args.key), value=strided(args.value))
    check(batch)


def test_offsets_behind_the_end_reach_nothing() -> None:
    """Keys that do not exist are not read; a wrong offset on the device cannot be refused."""
    batch = random_packed_batch(encoder_config(64), [40, 17], [40, 17])
    good = batch.args
    encoder.attend(good, batch.config)
    first = good.output[:40].clone()
    starts = torch.tensor([0, 40, 5000], dtype=torch.int32)
    encoder.attend(good._replace(query_start_loc=starts, kv_start_loc=starts), batch.config)
    assert torch.equal(good.output[:40], first)


def test_a_nan_key_reaches_every_row_that_sees_it_and_no_other() -> None:
    batch = random_packed_batch(encoder_config(64, num_heads=4, num_kv_heads=2), [40, 17], [40, 17])
    batch.args.key[45, 1, 3] = torch.nan
    encoder.attend(batch.args, batch.config)
    bad = batch.args.output.isnan().any(dim=2)
    assert bad[40:, 2:].all() and not bad[:40].any() and not bad[:, :2].any()


REFUSED: dict[str, dict[str, Any]] = {
    "sliding_window is not implemented": {"sliding_window": 5},
    "sinks is not implemented": {"sinks": True},
    "lse is not implemented": {"lse": True},
    "kv_scale_per_head": {**FP8, "kv_scale": "head"},
    "dtype float32": {"dtype": "float32"},
    "keys in fp8_e4m3, query_format none": {"kv_cache_dtype": "fp8_e4m3"},
    "keys in float16": {"kv_cache_dtype": "float16"},
    "causality causal": {"causality": "causal"},
    "head sizes 56": {"head_size": 56},
    "head sizes 136": {"head_size": 136},
    "unequal_head_sizes": {"head_size_v": 72},
    "query_load divide": {**FP8, "query_load": "divide"},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(reason: str) -> None:
    changes = {"head_size": 64, **REFUSED[reason]}
    found = encoder.refusals(encoder_config(changes.pop("head_size"), **changes))
    assert any(reason in text for text in found), found


def test_calls_of_few_rows_stay_with_the_general_kernel() -> None:
    batch = random_packed_batch(encoder_config(64), [40, 17], [40, 17])
    assert not encoder.accepts(batch.args, batch.config), "this one is on the CPU"


def test_hopper_multiplies_fp8_and_bf16_models_only() -> None:
    limits = Limits(132, 227 << 10, native_fp8=True)
    for dtype, native in (("bfloat16", True), ("float16", False)):
        constants, _ = encoder.kernel_constants(encoder_config(72, dtype=dtype, **FP8), limits)
        assert constants["FP8_DOT"] == native
