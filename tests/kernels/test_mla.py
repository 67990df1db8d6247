"""Latent attention's Triton kernels in the interpreter: against the un-absorbed formula, on poisoned batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.layers.mla_support import compare_with_formula, exact, make_mla_config, random_mla_batch, run_mla
from tests.support import relative_l2
from vattn.config.mla import MLAConfig
from vattn.ops.reference import mla as mla_reference
from vattn.ops.reference.mla_absorb import absorb, key_and_value_weights, quantised_query

pytest.importorskip("triton")

from vattn.kernels.hopper.mla import schedule as mla_cut
from vattn.kernels.hopper.mla.sparse_launch import mla_slots_kernel
from vattn.kernels.triton.common.tiles import Limits
from vattn.kernels.triton.mla import launch as mla_launch

if torch.cuda.is_available():
    pytest.skip("a GPU runs the compiled kernels in tests/layers/test_mla_gpu.py", allow_module_level=True)

TOLERANCE = {"float32": 3e-6, "float16": 1.5e-3, "bfloat16": 1.2e-2}
"""Relative L2 error: queries, weights, latents and results are each rounded to the model dtype once."""


def check(config: MLAConfig, query_lens: list[int], seq_lens: list[int], **kw: Any) -> None:
    config = config.replace(backend="TRITON_MLA")
    args = random_mla_batch(config, query_lens, seq_lens, **kw)
    limit = TOLERANCE[config.dtype]
    compare_with_formula(args, config, sum(query_lens), limit, 10 * limit)


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "float16", "bfloat16", "fp8_e4m3"])
def test_mixtures(kv_cache_dtype: str) -> None:
    dtype = "float32" if kv_cache_dtype == "fp8_e4m3" else kv_cache_dtype
    config = make_mla_config(dtype=dtype, kv_cache_dtype=kv_cache_dtype, lse=True)
    check(config, [1, 5, 0, 2, 9], [9, 21, 0, 30, 9], padding_tokens=3, padding_reqs=1)


@pytest.mark.parametrize("heads", [1, 16, 40])
@pytest.mark.parametrize("lens", [([1], [50]), ([3, 1], [40, 33]), ([5, 4], [3, 0])], ids=str)
def test_heads_and_splits(heads: int, lens: tuple[list[int], list[int]]) -> None:
    config = make_mla_config(
        num_heads=heads, block_size=16, kv_lora_rank=32, qk_rope_head_dim=16, lse=True, decode_threshold=5
    )
    check(config, *lens, padding_tokens=1)


SHORT, PROMPTS = ([1, 3, 0, 2], [40, 31, 0, 2]), ([1, 30, 0, 2], [40, 31, 0, 30])


@pytest.mark.parametrize(
    ("dtype", "lens", "sparse"),
    [
        ("float32", SHORT, False),
        ("bfloat16", SHORT, True),
        pytest.param("float32", PROMPTS, False, marks=pytest.mark.long),
    ],
    ids=["short", "sparse", "prompts"],
)
def test_queries_are_quantised(dtype: str, lens: tuple[list[int], list[int]], sparse: bool) -> None:
    """Requests of at most 7 rows are absorbed by the formula, and by this backend in steps that have many more rows."""
    config = make_mla_config(
        dtype=dtype, kv_cache_dtype="fp8_e4m3", query_format="fp8_e4m3", lse=True, decode_threshold=7, num_heads=5,
        sparse=sparse, backend="TRITON_MLA",
    )  # fmt: skip
    args = random_mla_batch(config, *lens, padding_tokens=2, topk=6)
    got, lse = run_mla(args, config)
    expected, _ = exact(args, config)
    # A value that lies between two codes may come out as the other one, a sixteenth away, of one of 18 columns.
    assert relative_l2(got, expected) < (1e-3 if dtype == "float32" else 2e-2)
    plain = config.replace(query_format="none")
    unquantised = run_mla(args._replace(q_scale=None, config=plain.encode()), plain)[0]
    assert relative_l2(unquantised, expected) > (5e-3 if dtype == "float32" else 0)
    assert not got[sum(lens[0]) :].any() and lse is not None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_codes_of_queries_bit_for_bit(dtype: str) -> None:
    config = make_mla_config(
        dtype=dtype, kv_cache_dtype="fp8_e4m3", query_format="fp8_e4m3", num_heads=3, backend="TRITON_MLA"
    )
    args = random_mla_batch(config, [4], [9])
    values = (torch.randn(4, 3, 40) * torch.logspace(-4, 2, 40)).to(getattr(torch, dtype))
    values[0, 0, :2] = torch.tensor([float("inf"), 0.0])
    wide, rope = values[..., :24], values[..., 24:30]
    got = mla_launch.quantise_query(wide[..., :20], rope, args, config, Limits.of(values.device))
    assert args.q_scale is not None
    expected = quantised_query(torch.cat((wide[..., :20], rope), -1), args.q_scale, config)
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("tokens", [12, 14])
def test_padding_does_not_reach_the_row_before(tokens: int) -> None:
    # Products in bf16 of an odd number of columns, on CPUs with AMX.
    config = make_mla_config(dtype="bfloat16", qk_nope_head_dim=33, num_heads=8, kv_lora_rank=3)
    args = random_mla_batch(config, [tokens], [tokens], padding_tokens=5)
    assert absorb(args.query, key_and_value_weights(args.kv_b_weight, config)[0], config)[:tokens].isfinite().all()


@pytest.mark.parametrize("topk", [3, 40])
def test_sparse(topk: int) -> None:
    config = make_mla_config(num_heads=18, sparse=True, lse=True)
    check(config, [1, 3, 0, 2], [40, 31, 0, 2], topk=topk, padding_tokens=2)


def test_no_tokens() -> None:
    config = make_mla_config(backend="TRITON_MLA")
    args = random_mla_batch(config, [0], [5])
    assert run_mla(args, config)[0].shape == (0, 3, 10)


@pytest.mark.parametrize("lens", [([1, 2], [50, 9]), ([5, 1], [9, 3])], ids=str)
def test_rows_that_see_a_nan_are_nan(lens: tuple[list[int], list[int]]) -> None:
    """Split over programs or not, decoded or expanded: what is NaN isn't taken for empty. Others stay as they are."""
    config = make_mla_config(lse=True, backend="TRITON_MLA", block_size=16)
    args = random_mla_batch(config, *lens)
    clean = run_mla(args, config)[0].clone()
    cache = args.kv_cache.clone()
    cache[args.block_table[0, 0], 0] = float("nan")
    got, lse = run_mla(args._replace(kv_cache=cache), config)
    rows = lens[0][0]
    assert bool(got[:rows].isnan().all()) and lse is not None and bool(lse[:rows].isnan().all())
    assert torch.equal(got[rows:], clean[rows:])


@pytest.mark.parametrize(("splits", "apart"), [(1, 8), (3, 8), (1, 24)])
def test_slots_of_listed_keys(splits: int, apart: int) -> None:
    """Against a loop over tokens; what a list names out of range or behind its row is none."""
    config = make_mla_config(sparse=True)
    args = random_mla_batch(config, [1, 3, 0, 2], [40, 31, 0, 2], padding_tokens=2, topk=70)
    assert args.topk_indices is not None
    args.topk_indices[1, :3] = torch.tensor([31, 10**9, -5])
    args.block_table[1, 1] = 10**9
    tokens, topk = args.topk_indices.shape
    slots, starts, lengths, schedule = (
        torch.full(shape, 77, dtype=torch.int32) for shape in ((tokens, topk), (tokens + 1,), (tokens,), (60, 8))
    )
    mla_slots_kernel[(tokens,)](
        args.topk_indices, args.query_start_loc, args.seq_lens, args.block_table, slots, starts, lengths, schedule,
        tokens, 4, args.kv_cache.shape[0], args.block_table.stride(0), args.block_table.shape[1], topk, topk, 5,
        SPLITS=splits, PARTS=4, TILE=16, BLOCK_SIZE=8, BLOCK_ROWS=apart, BLOCK=32,
    )  # fmt: skip
    assert starts.tolist() == list(range(tokens + 1))
    owner = [(0, 40), (1, 29), (1, 30), (1, 31), (3, 1), (3, 2), (0, 0), (0, 0)]
    for token, (request, limit) in enumerate(owner):
        expected = []
        for position in args.topk_indices[token].tolist():
            block = int(args.block_table[request, position // 8]) if 0 <= position < limit else -1
            expected.append(block * apart + position % 8 if 0 <= block < args.kv_cache.shape[0] else -1)
        assert slots[token].tolist() == expected
        used = max((i + 1 for i, slot in enumerate(expected) if slot >= 0), default=0)
        assert int(lengths[token]) == used
        items = schedule[1 + token * splits : 1 + (token + 1) * splits]
        covered = [tile for _, begin, end, *_ in items.tolist() for tile in range(begin, end)]
        assert covered == list(range(-(-used // 16))) and (items[:, 0] == token).all()
        following = [i + 5 if i + 5 < tokens * splits else -1 for i in range(token * splits, (token + 1) * splits)]
        assert items[:, 4].tolist() == following
    assert schedule[0, :2].tolist() == [5, tokens if splits > 1 else 0]


@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize(
    "lens",
    [([1, 3, 0, 5, 1], [40, 33, 9, 60, 1]), ([9, 2, 1], [4, 50, 0]), ([1, 1], [2, 3])],
    ids=["uneven", "more rows than keys", "whole"],
)
def test_requests_cut_into_parts_see_the_same(most: int, lens: tuple[list[int], list[int]]) -> None:
    config = make_mla_config(lse=True, backend="TRITON_MLA")
    args = random_mla_batch(config, *lens, padding_tokens=2, padding_reqs=1)
    count = args.query.shape[0] // most + args.seq_lens.shape[0]
    own = mla_cut.Parts(*(torch.full((size,), -7, dtype=torch.int32) for size in (count + 1, count, count)))
    mla_cut.cut_requests(args.query_start_loc, args.seq_lens, own, most)
    table = args.block_table[own.owners.long()]
    parts = args._replace(query_start_loc=own.starts, seq_lens=own.lengths, block_table=table)
    rows = parts.query_start_loc.diff()
    assert rows.min() >= 0 and rows.max() <= most and parts.query_start_loc[-1] == sum(lens[0])
    assert parts.query_start_loc[0] == 0 and parts.seq_lens.min() >= 0 and (parts.seq_lens[rows == 0] == 0).all()
    whole = mla_reference.attend_latents(args, config, torch.float64)
    cut = mla_reference.attend_latents(parts, config, torch.float64)
    for expected, got in zip(whole, cut, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
