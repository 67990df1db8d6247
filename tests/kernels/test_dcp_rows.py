"""Rows of a step over sharded caches as requests of their own, and who may take them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.context_parallel_support import sharded, share
from tests.layers.mla_support import exact, make_mla_config, random_mla_batch
from tests.support import make_config, moved, random_paged_batch, relative_l2
from vattn.backends import hopper_routes
from vattn.config.dcp import DCPShard, without_dcp
from vattn.kernels.hopper.decode import launch as decode_fast
from vattn.kernels.hopper.decode_packed import launch as decode_packed
from vattn.kernels.triton.attention.dcp_rows import attention_rows, latent_rows
from vattn.ops.reference import attention as reference

QUERIES, LENGTHS = [1, 0, 5, 1, 2], [40, 7, 23, 1, 2]
SHARDS = (DCPShard(0, 1, 1), DCPShard(0, 2, 1), DCPShard(1, 3, 4), DCPShard(3, 4, 16))


@pytest.mark.parametrize("shard", SHARDS, ids=str)
def test_rows_as_requests_attend_what_the_shard_shows(shard: DCPShard, device: str) -> None:
    """The reference of the rows as decodes against the reference by true positions, with and without padding."""
    config = make_config(block_size=8, lse=True)
    for padding in (0, 2):
        full = random_paged_batch(config, QUERIES, LENGTHS, num_padding_tokens=padding, num_padding_reqs=padding)
        own, args = sharded(config, shard), share(full.args, config, shard)
        expected, expected_lse = reference.paged_attention(args, own)
        rows = moved(attention_rows(moved(args, device), own), "cpu")
        assert rows.query_start_loc.tolist() == list(range(len(args.query) + 1))
        out, lse = reference.paged_attention(rows, without_dcp(own))
        assert relative_l2(out, expected) < 1e-6 and torch.allclose(lse, expected_lse, atol=1e-6)


@pytest.mark.parametrize(("shard", "sparse"), list(zip(SHARDS, (False, True, False, True), strict=True)), ids=str)
def test_rows_of_latent_attention(shard: DCPShard, sparse: bool) -> None:
    config = make_mla_config(lse=True, sparse=sparse)
    full = random_mla_batch(config, QUERIES, LENGTHS, padding_tokens=1, padding_reqs=1, topk=6)
    own, args = sharded(config, shard), share(full, config, shard)
    expected, expected_lse = exact(args, own)
    rows, whole = latent_rows(args, own)
    out, lse = exact(rows, whole)
    assert relative_l2(out, expected) < 1e-12 and torch.allclose(lse, expected_lse)
    torch.ops.vattn.mla_attention(*args._replace(config=own.replace(backend="TRITON_MLA").encode()))
    assert relative_l2(args.output, expected) < 1e-5


@pytest.mark.parametrize(
    ("changes", "queries", "taken"),
    [
        ({}, [1, 1, 1], True),
        # As many rows as requests, but not one each: rows as requests are right all the same.
        ({}, [2, 0, 1], True),
        ({}, [2, 1, 1], False),
        ({"sinks": True, "logits_soft_cap": 3.0}, [1, 1, 1], True),
        ({"kv_cache_dtype": "int8_per_token_head"}, [1, 1, 1], True),
        ({"sliding_window": 9}, [1, 1, 1], False),
        ({"alibi": "linear"}, [1, 1, 1], False),
        ({"causality": "bidirectional"}, [1, 1, 1], False),
        ({"tree_bias": True}, [1, 1, 1], False),
        ({"mm_prefix": "full"}, [1, 1, 1], False),
        ({"batch_invariant": True}, [1, 1, 1], False),
    ],
    ids=str,
)
def test_fast_decode_takes_rows_whose_keys_have_no_order(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], queries: list[int], taken: bool
) -> None:
    """With fast paths that would take anything: they get decodes of what the rank holds, and nothing with positions."""
    config = make_config(block_size=8, lse=True, **changes)
    full = random_paged_batch(config, queries, [30, 9, 17])
    own, args = sharded(config, DCPShard(1, 2, 3)), share(full.args, config, DCPShard(1, 2, 3))
    calls = []
    for path in (decode_fast, decode_packed):
        monkeypatch.setattr(path, "accepts", lambda args, config: not config.context_parallel)
    monkeypatch.setattr(hopper_routes, "run", lambda *call: calls.append(call) or True)
    assert hopper_routes._run_dcp(args, own) is taken
    if taken:
        ((rows, whole),) = calls
        assert rows.local_seq_lens is None and rows.plan == [] and not whole.context_parallel
        expected, _ = reference.paged_attention(args, own)
        out, _ = reference.paged_attention(rows, whole)
        assert relative_l2(out, expected) < 1e-6
