"""Steps with prompts in the interpreter: expanded beside absorbed requests, chunks, packed rows, quantised outputs."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.test_mla import TOLERANCE
from tests.layers.mla_support import (
    compare_with_formula,
    deepseek,
    exact,
    make_mla_config,
    quantised,
    random_mla_batch,
    run_mla,
)
from tests.support import relative_l2
from vattn.config.mla import MLAConfig
from vattn.ops.arguments_mla import MLAAttentionArgs
from vattn.ops.reference.mla_absorb import elements_per_token
from vattn.quantization.mla_formats import MLA_FORMATS

pytest.importorskip("triton")

from vattn.kernels.triton.common.tiles import Limits
from vattn.kernels.triton.mla import absorb_rule as mla_rule
from vattn.kernels.triton.mla import launch as mla_launch
from vattn.kernels.triton.mla import prefill as mla_prefill
from vattn.kernels.triton.mla import projection as mla_project
from vattn.kernels.triton.mla.epilogue import clear_scales, kind_of

if torch.cuda.is_available():
    pytest.skip("a GPU runs the compiled kernels in tests/layers/test_mla_gpu.py", allow_module_level=True)

LATENTS = {"fp8_ds_mla": 128, "nvfp4_ds_mla": 64}
MIX = ([1, 22, 0, 9], [9, 30, 0, 9])
"""Query and sequence lengths: short requests and prompts with and without context."""


def config_of(kv_cache_dtype: str = "float32", **changes: Any) -> MLAConfig:
    dtype = kv_cache_dtype if kv_cache_dtype in ("float16", "bfloat16") else "float32"
    latent = LATENTS.get(kv_cache_dtype, 20)
    values = {"dtype": dtype, "kv_lora_rank": latent, "backend": "TRITON_MLA", "lse": True, **changes}
    return make_mla_config(kv_cache_dtype=kv_cache_dtype, **values)


def with_room(args: MLAAttentionArgs, tokens: int | None, config: MLAConfig) -> MLAAttentionArgs:
    if tokens is None:
        return args
    return args._replace(workspace=args.query.new_empty(tokens * elements_per_token(config)))


def check(config: MLAConfig, query_lens: list[int], seq_lens: list[int], room: int | None = None, **kw: Any) -> None:
    args = with_room(random_mla_batch(config, query_lens, seq_lens, **kw), room, config)
    assert mla_rule.has_prompts(config, args.query.shape[0], args.seq_lens.shape[0])
    limit = TOLERANCE[config.dtype]
    compare_with_formula(args, config, sum(query_lens), limit, 10 * limit)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kv_cache_dtype", list(MLA_FORMATS))
def test_mixtures(kv_cache_dtype: str) -> None:
    check(config_of(kv_cache_dtype, num_heads=2, decode_threshold=1), *MIX, 40, padding_tokens=3)


def test_without_a_workspace() -> None:
    check(config_of(), *MIX, padding_tokens=3)


@pytest.mark.parametrize("room", [8, 19, pytest.param(70, marks=pytest.mark.long)])
def test_chunks_of_every_size(room: int) -> None:
    check(config_of(num_heads=1), [20, 8], [31, 20], room, padding_tokens=2)


@pytest.mark.long
@given(
    heads=st.integers(1, 3),
    nope=st.integers(1, 20),
    rope=st.integers(1, 9),
    values=st.integers(1, 20),
    spare=st.integers(1, 20),
    block_size=st.sampled_from([8, 24]),
    room=st.sampled_from([None, 1, 3]),
    lens=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=3),
    seed=st.integers(0, 9),
)
def test_geometries(
    heads: int, nope: int, rope: int, values: int, spare: int, block_size: int, room: int | None,
    lens: list[tuple[int, int]], seed: int,
) -> None:  # fmt: skip
    config = config_of(
        num_heads=heads, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=values,
        kv_lora_rank=(nope + values) // 2 + spare, block_size=block_size, decode_threshold=1,
    )  # fmt: skip
    queries = [query for query, _ in lens]
    # One long request at least, so that the step is one with prompts.
    queries[0] += (mla_rule.longest_absorbed(config) + 1) * len(queries)
    seq_lens = [query + context for query, (_, context) in zip(queries, lens, strict=True)]
    check(config, queries, seq_lens, None if room is None else room * block_size, seed=seed)


def test_queries_longer_than_their_sequences_have_empty_rows() -> None:
    check(config_of(num_heads=1), [20, 9], [12, 0])


def test_blocks_that_are_none_are_not_seen() -> None:
    config = config_of("bfloat16", num_heads=2)
    args = random_mla_batch(config, [20, 9], [40, 9])
    args.block_table[0, 1] = -5
    args.block_table[0, 3] = 10**6
    got, _ = run_mla(args, config)
    assert relative_l2(got, exact(args, config)[0]) < TOLERANCE["bfloat16"]


def test_no_more_room_is_used_than_there_is() -> None:
    config = config_of(num_heads=1)
    args = random_mla_batch(config, [20, 9], [31, 9])
    elements = 16 * elements_per_token(config) + 5
    room = torch.full((elements + 64,), 7.0)
    run_mla(args._replace(workspace=room[:elements]), config)
    assert (room[elements:] == 7.0).all() and (room[:elements] != 7.0).any()


def test_the_rule_of_short_requests() -> None:
    assert mla_rule.longest_absorbed(deepseek()) == 42
    assert mla_rule.longest_absorbed(deepseek(decode_threshold=100)) == 100
    assert mla_rule.longest_absorbed(deepseek(kv_lora_rank=128)) > 1 << 20


FORMATS = (
    "fp8_static", "fp8_per_token", "fp8_group64", "fp8_group128_pow2_col", "nvfp4", "nvfp4_swizzled",
)  # fmt: skip


def quantising(output_format: str, **changes: Any) -> MLAConfig:
    values = {"num_heads": 4, "v_head_dim": 64, "qk_nope_head_dim": 16, "kv_lora_rank": 60, "lse": False, **changes}
    return config_of(output_format=output_format, **values)


def same(got: MLAAttentionArgs, expected: MLAAttentionArgs) -> None:
    """Compare codes and scales; the interpreter's products differ in their last place from one call to the next."""
    off = got.output.view(torch.uint8) != expected.output.view(torch.uint8)
    assert off.float().mean() < 2e-3
    if got.output_block_scale is not None and expected.output_block_scale is not None:
        made, wanted = (x.float() for x in (got.output_block_scale, expected.output_block_scale))
        assert ((made - wanted).abs() > 2e-6 * wanted.abs()).float().mean() < 2e-3


@functools.lru_cache(maxsize=1)
def unquantised(dtype: str) -> torch.Tensor:
    """Return the results of a step with a prompt in the model dtype."""
    args = random_mla_batch(quantising("none", dtype=dtype, kv_cache_dtype=dtype), *PROMPT, padding_tokens=1)
    torch.ops.vattn.mla_attention(*args)
    return args.output


PROMPT = ([1, 18], [9, 20])


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
@pytest.mark.parametrize("output_format", FORMATS)
def test_outputs_of_steps_with_prompts_are_quantised_inside(output_format: str, dtype: str) -> None:
    config = quantising(output_format, dtype=dtype, kv_cache_dtype=dtype)
    args = random_mla_batch(config, *PROMPT, padding_tokens=1)
    torch.ops.vattn.mla_attention(*args)
    same(args, quantised(unquantised(dtype), args, config))


@pytest.mark.parametrize(
    ("output_format", "dtype"), [*((name, "bfloat16") for name in FORMATS), ("fp8_group64", "float32")]
)
def test_the_up_projection_quantises_inside(output_format: str, dtype: str) -> None:
    config, limits = quantising(output_format, dtype=dtype, kv_cache_dtype=dtype), Limits.of(torch.device("cpu"))
    args = random_mla_batch(config, [1, 2, 2], [9, 7, 30], padding_tokens=1)
    latent = torch.randn(6, 4, 60).to(args.query.dtype)
    w_uv = args.kv_b_weight[:, 16:].transpose(1, 2)
    values = torch.empty(6, 4, 64, dtype=args.query.dtype)
    mla_project.project_to(latent, w_uv, values, args, config, limits)
    expected = torch.einsum("tnl,nlv->tnv", latent.double(), w_uv.double())
    assert relative_l2(values, expected) < (2e-6 if dtype == "float32" else 3e-3)
    if mla_project.spans_heads(config):
        assert output_format == "fp8_group128_pow2_col" and kind_of(config) == "rows"
        return
    clear_scales(args, config)
    mla_project.project_output(latent, w_uv, args, config, limits)
    same(args, quantised(values, args, config))


@pytest.mark.parametrize("output_format", ["fp8_per_token", "fp8_group128_pow2_col", "nvfp4_swizzled"])
def test_outputs_of_decode_steps(output_format: str) -> None:
    config = quantising(output_format)
    args = random_mla_batch(config, [1, 2], [30, 9], padding_tokens=2)
    got, _ = run_mla(args, config)
    assert relative_l2(got, exact(args, config)[0]) < (0.15 if "nvfp4" in output_format else 0.04)
    assert not got[3:].any()


def test_arithmetic_and_floors_of_outputs() -> None:
    changes = {"output_arithmetic": "multiply", "output_min_scale": 0.5, "num_heads": 1}
    config = quantising("fp8_group64", **changes)
    args = random_mla_batch(config, [30, 1], [30, 9])
    run_mla(args, config)
    assert args.output_block_scale is not None and (args.output_block_scale == 0.5).all()


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_ds_mla", "nvfp4_ds_mla"])
def test_packed_rows_in_sparse_and_decode_steps(kv_cache_dtype: str) -> None:
    for sparse in (False, True):
        config = config_of(kv_cache_dtype, sparse=sparse)
        args = random_mla_batch(config, [1, 2, 0], [30, 9, 0], topk=12, padding_tokens=1)
        got, _ = run_mla(args, config)
        assert relative_l2(got, exact(args, config)[0]) < TOLERANCE["float32"]


def test_sparse_prompts_that_list_all_they_see_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = mla_launch.choose_tiles
    monkeypatch.setattr(mla_launch, "choose_tiles", lambda *a: replace(choose(*a), num_splits=2))
    config = config_of(sparse=True, num_heads=2)
    args = random_mla_batch(config, [8, 9, 2, 7], [11, 9, 20, 24], topk=12, padding_tokens=2)
    assert args.topk_indices is not None
    in_order = torch.arange(12, dtype=torch.int32)
    for first, length, rows in ((0, 11, 8), (8, 9, 9)):
        for i in range(rows):
            limit = length - rows + i + 1
            args.topk_indices[first + i] = torch.where(in_order < limit, in_order, -1)
    # One row leaves a position out: its request is not complete. The last request sees more than it can list.
    args.topk_indices[15, 3] = -1
    complete = mla_prefill.complete_requests(args, config)
    assert complete is not None and complete.tolist() == [1, 0, 1, 0]
    compare_with_formula(args, config, 26, TOLERANCE["float32"], 1e-5)


@pytest.mark.parametrize("output_format", ["fp8_static", "fp8_per_token", "fp8_group64", "fp8_group64_pow2", "nvfp4"])
def test_the_up_projection_of_hopper_gives_the_same_bytes(output_format: str) -> None:
    """The codes of branch-free quotients, and tiles that are cut by bytes."""
    config = quantising(output_format, dtype="float16", kv_cache_dtype="float16")
    hopper = Limits(132, 232448, True, interpreted=True)
    args = random_mla_batch(config, [1, 16], [9, 30], padding_tokens=1)
    latent = (torch.randn(18, 4, 60) * torch.logspace(-4, 2, 18)[:, None, None]).to(args.query.dtype)
    latent[5], latent[7, 1, 3] = 0.0, torch.nan
    w_uv = args.kv_b_weight[:, 16:].transpose(1, 2)
    got = []
    for known in (hopper, replace(hopper, warpgroups=False)):
        own = args._replace(output=torch.empty_like(args.output), output_block_scale=None)
        if args.output_block_scale is not None:
            own = own._replace(output_block_scale=torch.empty_like(args.output_block_scale))
        mla_project.project_output(latent, w_uv, own, config, known)
        got.append([t.view(torch.uint8) for t in (own.output, own.output_block_scale) if t is not None])
    for first, second in zip(*got, strict=True):
        assert torch.equal(first, second)
