"""The fast decode path for packed KV formats on a Hopper GPU, through the op, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import make_config, random_paged_batch, relative_l2
from vattn.backends import selector

pytestmark = pytest.mark.gpu

FAST = ["int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "turboquant_k8v4", "turboquant_4bit_nc"]
TOLERANCE = {"bfloat16": 2.5e-3, "float16": 1.5e-3}
"""Relative L2: results are rounded to the model dtype, 1.7e-3 in bf16; the rest as in the interpreted tests."""


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def check(fmt: str, lengths: list[int], padding: int = 0, planned: bool = True, **changes: Any) -> None:
    from vattn.ops.triton import decode_packed

    values = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16", "lse": True, "block_size": 16}
    config = make_config(**{**values, "kv_cache_dtype": fmt, "backend": "TRITON_ATTN", **changes})
    batch = random_paged_batch(
        config, [1] * len(lengths), lengths, num_padding_reqs=padding, num_padding_tokens=padding, device="cuda"
    )
    assert decode_packed.accepts(batch.args, config)
    if planned:
        rows, table = batch.args.query.shape[0], batch.args.block_table
        shape = selector.get_backend("TRITON_ATTN").plan_shape(config, rows, *table.shape)
        schedule = torch.full(shape, -1, dtype=torch.int32, device="cuda")
        torch.ops.vattn.plan(batch.args.query_start_loc, batch.args.seq_lens, schedule, config.encode())
        batch.args = batch.args._replace(plan=[schedule])
    batch.run()
    output, lse = batch.expected()
    assert relative_l2(batch.output(), output) < TOLERANCE[config.dtype]
    assert relative_l2(batch.args.lse, lse) < 3e-4


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("fmt", FAST)
def test_ragged_requests(fmt: str, size: int) -> None:
    check(fmt, [1, 16, 17, 300, 47, 129, 1000, 2500, 33], padding=2, head_size=size)


@pytest.mark.parametrize("fmt", FAST)
def test_masks(fmt: str) -> None:
    masks: dict[str, Any] = {"sliding_window": 133, "logits_soft_cap": 4.0, "sinks": True}
    check(fmt, [5, 900, 64], planned=False, block_size=32, kv_cache_layout="HND", num_heads=21, num_kv_heads=3,
          dtype="float16", **masks)  # fmt: skip


@pytest.mark.parametrize("fmt", ["int4_per_token_head", "turboquant_k8v4"])
def test_one_long_request_is_split(fmt: str) -> None:
    check(fmt, [9001], output_format="none")


@pytest.mark.parametrize("fmt", ["fp8_per_token_head", "turboquant_4bit_nc"])
def test_a_replayed_graph_reads_new_lengths(fmt: str) -> None:
    config = make_config(
        num_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16", block_size=16, kv_cache_dtype=fmt,
        backend="TRITON_ATTN", lse=True,
    )  # fmt: skip
    batch = random_paged_batch(config, [1, 1, 1], [700, 90, 33], device="cuda", poison=False)
    batch.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.vattn.attention(*batch.args)
    batch.args.seq_lens.copy_(torch.tensor([301, 17, 1], dtype=torch.int32))
    graph.replay()
    assert relative_l2(batch.output(), batch.expected()[0]) < TOLERANCE["bfloat16"]
