"""The latent attention ops on a CPU: against the un-absorbed formula in fp64, and what they refuse."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conformance import fuzz_mla
from tests.layers.mla_support import (
    compare_with_formula,
    exact,
    make_mla_config,
    random_mla_batch,
    rounded_formula,
    run_mla,
)
from tests.support import poisoned_empty, relative_l2, unchanged
from vattn.cache.layout import mla_cache_dtype, mla_cache_shape, row_view
from vattn.config.mla import MLAConfig
from vattn.errors import (
    ConfigError,
    DtypeError,
    GradientError,
    ScaleError,
    ShapeError,
    StrideError,
    UnsupportedRequestError,
    VattnError,
)
from vattn.ops.arguments_mla import MLACacheUpdateArgs
from vattn.ops.reference.mla import attend_expanded, attend_latents, read_rows
from vattn.ops.reference.mla_absorb import absorb, elements_per_token, weight_values, workspace_tokens
from vattn.quantization.formats import MODEL_DTYPES
from vattn.quantization.mla_formats import MLA_FORMATS, decode_rows, encode_rows

LATENTS = {"fp8_ds_mla": 128, "nvfp4_ds_mla": 64}


def config_of(kv_cache_dtype: str, **changes: Any) -> MLAConfig:
    return make_mla_config(kv_cache_dtype=kv_cache_dtype, kv_lora_rank=LATENTS.get(kv_cache_dtype, 20), **changes)


def check(
    config: MLAConfig, query_lens: list[int], seq_lens: list[int], workspace: int | None = None, **kw: Any
) -> None:
    args = random_mla_batch(config, query_lens, seq_lens, **kw)
    if workspace is not None:
        args = args._replace(workspace=args.query.new_empty(workspace * elements_per_token(config)))
    # fp32 math differs by its rounding alone; narrower dtypes round the result once, half a unit in the last place.
    limit = {"float32": 2e-6, "bfloat16": 2.0**-9, "float16": 2.0**-12}[config.dtype]
    compare_with_formula(args, config, sum(query_lens), limit, 1e-5)


@pytest.mark.parametrize("kv_cache_dtype", list(MLA_FORMATS))
@pytest.mark.parametrize("workspace", [None, 8, 19])
def test_every_format_equals_the_formula(kv_cache_dtype: str, workspace: int | None) -> None:
    dtype = kv_cache_dtype if kv_cache_dtype in ("float16", "bfloat16") else "float32"
    config = config_of(kv_cache_dtype, dtype=dtype, lse=True)
    check(config, [1, 5, 0, 2, 17, 3], [9, 21, 0, 30, 17, 3], workspace, padding_tokens=3, padding_reqs=1)


@given(
    heads=st.integers(1, 5),
    nope=st.integers(1, 20),
    rope=st.integers(1, 9),
    values=st.integers(1, 20),
    latent=st.integers(1, 40),
    block_size=st.sampled_from([8, 16, 24]),
    threshold=st.integers(1, 6),
    workspace=st.sampled_from([None, 1, 2, 5]),
    lens=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 60)), min_size=1, max_size=5),
    seed=st.integers(0, 9),
)
def test_geometries_and_mixes(
    heads: int, nope: int, rope: int, values: int, latent: int, block_size: int, threshold: int,
    workspace: int | None, lens: list[tuple[int, int]], seed: int,
) -> None:  # fmt: skip
    config = make_mla_config(
        num_heads=heads, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=values, kv_lora_rank=latent,
        block_size=block_size, decode_threshold=threshold, lse=True,
    )  # fmt: skip
    queries = [query for query, _ in lens]
    seq_lens = [query + context for query, context in lens]
    room = None if workspace is None else workspace * block_size
    check(config, queries, seq_lens, room, seed=seed, padding_tokens=seed % 3, padding_reqs=seed % 2)


def test_a_query_longer_than_its_sequence_has_empty_rows() -> None:
    for threshold in (1, 9):
        config = make_mla_config(lse=True, decode_threshold=threshold)
        args = random_mla_batch(config, [5, 4], [3, 0])
        got, lse = run_mla(args, config)
        expected, expected_lse = exact(args, config)
        assert relative_l2(got, expected) < 2e-6
        assert lse is not None and torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
        assert not got[:2].any() and not got[5:].any()


@pytest.mark.parametrize("threshold", [1, 100])
def test_bf16_is_no_worse_than_the_formula_in_bf16(threshold: int) -> None:
    config = make_mla_config(
        dtype="bfloat16", num_heads=4, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, kv_lora_rank=64,
        decode_threshold=threshold,
    )  # fmt: skip
    args = random_mla_batch(config, [1, 30, 2], [90, 77, 40])
    got, _ = run_mla(args, config)
    expected, _ = exact(args, config)
    assert relative_l2(got, expected) <= 2 * relative_l2(rounded_formula(args, config), expected)


@pytest.mark.parametrize("weight_format", ["fp8_tensor", "fp8_block128"])
def test_fp8_weights(weight_format: str) -> None:
    config = make_mla_config(num_heads=9, kv_lora_rank=150, weight_format=weight_format, lse=True)
    check(config, [1, 9], [20, 12])


def test_fp8_weights_by_hand() -> None:
    codes = torch.randint(-8, 9, (9, 40, 150)).float()
    weight, dtype = codes.to(torch.float8_e4m3fn), torch.float32
    config = make_mla_config(num_heads=9, kv_lora_rank=150, weight_format="fp8_tensor")
    assert torch.equal(weight_values(weight, torch.tensor([0.25]), config, dtype), codes / 4)
    blocks = torch.arange(1.0, 7).view(3, 2)
    config = config.replace(weight_format="fp8_block128")
    scales = blocks.repeat_interleave(128, 0)[:360].repeat_interleave(128, 1)[:, :150].reshape(9, 40, 150)
    assert torch.equal(weight_values(weight, blocks, config, dtype), codes * scales)


def test_queries_are_absorbed_row_by_row() -> None:
    config = make_mla_config(num_heads=3, qk_nope_head_dim=5, kv_lora_rank=20, dtype="bfloat16")
    query = torch.randn(4, 3, config.qk_head_dim).bfloat16()
    query[2:] = torch.nan
    weights = torch.randn(3, 5, 20).bfloat16()
    found = absorb(query, weights, config)
    want = torch.einsum("tnp,npl->tnl", query[:2, :, :5].double(), weights.double())
    torch.testing.assert_close(found[:2, :, :20].double(), want, rtol=2.0**-8, atol=1e-6)
    assert torch.equal(found[:2, :, 20:], query[:2, :, 5:])


def test_a_workspace_holds_whole_blocks() -> None:
    config = make_mla_config(block_size=16)
    each = elements_per_token(config)
    assert [workspace_tokens(None, config, most) for most in (3, 16, 47)] == [16, 16, 32]
    assert workspace_tokens(torch.empty(47 * each), config, 3) == 32
    with pytest.raises(ShapeError, match=f"at least {16 * each}, for one block of 16"):
        workspace_tokens(torch.empty(16 * each - 1), config, 99)


def test_rows_beyond_the_block_table_are_not_seen() -> None:
    config = config_of("float32", block_size=8)
    args = random_mla_batch(config, [2], [16])
    long = args._replace(seq_lens=args.seq_lens + 9, block_table=args.block_table[:, :2])
    positions = torch.arange(16)
    weight = weight_values(args.kv_b_weight, None, config, torch.float32)
    rows = row_view(args.kv_cache, config)[args.block_table[0, positions // 8].long(), positions % 8]
    want, _ = attend_expanded(
        args.query.float(), *read_rows(rows, None, config), weight, torch.ones(2, 16, dtype=torch.bool), config, None
    )
    assert relative_l2(attend_latents(long, config)[0], want) < 2e-6


@pytest.mark.parametrize("topk", [1, 4, 100])
def test_sparse_rows_see_what_is_listed(topk: int) -> None:
    config = make_mla_config(sparse=True, lse=True)
    check(config, [1, 7, 2, 9], [40, 31, 2, 9], 16, topk=topk, padding_tokens=2)


def test_sparse_with_every_position_is_dense() -> None:
    sparse, dense = make_mla_config(sparse=True), make_mla_config()
    args = random_mla_batch(sparse, [1, 7], [40, 31], topk=64)
    got, _ = run_mla(args, sparse)
    expected, _ = run_mla(args._replace(topk_indices=None, config=dense.encode()), dense)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("backend", ["TORCH_MLA", "TRITON_MLA"])
@pytest.mark.parametrize("queries", [1, 9])
def test_positions_listed_twice_count_twice(backend: str, queries: int) -> None:
    """In decodes and prompts, which expand latents."""
    if backend == "TRITON_MLA":
        pytest.importorskip("triton")
    config = make_mla_config(sparse=True, lse=True, backend=backend)
    args = random_mla_batch(config, [queries], [40], topk=3)
    once, log_once = run_mla(args, config)
    assert args.topk_indices is not None and log_once is not None
    once, log_once = once.clone(), log_once.clone()
    twice, log_twice = run_mla(args._replace(topk_indices=args.topk_indices.repeat(1, 2)), config)
    torch.testing.assert_close(twice, once, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_twice, log_once + math.log(2), rtol=1e-5, atol=1e-5)
    uneven, _ = run_mla(args._replace(topk_indices=args.topk_indices[:, [0, 0, 0, 1, 2]]), config)
    assert relative_l2(uneven, once) > 0.01


@pytest.mark.parametrize("backend", ["TORCH_MLA", "TRITON_MLA"])
def test_positions_out_of_range_are_not_seen(backend: str) -> None:
    if backend == "TRITON_MLA":
        pytest.importorskip("triton")
    config = make_mla_config(sparse=True, backend=backend)
    args = random_mla_batch(config, [2], [5], topk=4)
    assert args.topk_indices is not None
    expected, _ = run_mla(args, config)
    expected = expected.clone()
    corrupt = torch.cat((args.topk_indices, torch.tensor([[5, 10**9, -7], [5, 2**31 - 1, -(2**31)]]).int()), 1)
    got, _ = run_mla(args._replace(topk_indices=corrupt), config)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("backend", ["TORCH_MLA", "TRITON_MLA"])
@pytest.mark.parametrize(
    ("kv_cache_dtype", "dtype"),
    [(name, name if name in MODEL_DTYPES else "float32") for name in MLA_FORMATS]
    + [("fp8_ds_mla", "bfloat16"), ("nvfp4_ds_mla", "bfloat16")],
)
def test_cache_update_writes_its_slots_alone(kv_cache_dtype: str, dtype: str, backend: str, device: str) -> None:
    if backend == "TRITON_MLA":
        pytest.importorskip("triton")
    latent = 3 * LATENTS.get(kv_cache_dtype, 20)
    config = make_mla_config(kv_cache_dtype=kv_cache_dtype, dtype=dtype, kv_lora_rank=latent, backend=backend)
    expected = poisoned_empty(mla_cache_shape(config, 3), mla_cache_dtype(config))
    cache = expected.clone().to(device)
    scale = torch.tensor([0.02]) if config.kv_scale == "tensor" else None
    wide = torch.randn(8, latent + 9) * (torch.logspace(-6, 3, 8)[:, None] if config.packed else 1.0)
    wide[6, :latent] = 0.0
    wide[7, 3] = torch.inf
    kv_c, k_pe = wide.to(MODEL_DTYPES[dtype])[:, : latent + 6].split((latent, 6), 1)
    slots = [5, -1, 23, 24, 10**12, 0, 7, 8]
    rows = row_view(expected, config)
    for token, slot in enumerate(slots):
        if 0 <= slot < 24:
            one = slice(token, token + 1)
            # On the device: dividing by a number rounds differently on a GPU.
            row = [None if t is None else t.to(device) for t in (kv_c[one], k_pe[one], scale)]
            rows[slot // 8, slot % 8] = encode_rows(row[0], row[1], kv_cache_dtype, row[2])[0].cpu()
    given = MLACacheUpdateArgs(kv_c, k_pe, cache, torch.tensor(slots), scale, config.encode())
    torch.ops.vattn.mla_kv_cache_update(*(t.to(device) if isinstance(t, torch.Tensor) else t for t in given))
    assert torch.equal(cache.cpu().view(torch.uint8), expected.view(torch.uint8))


def test_row_bytes_of_packed_formats() -> None:
    def row_bytes(name: str) -> int:
        return MLA_FORMATS[name].row_bytes(512, 64)

    assert (row_bytes("fp8_ds_mla"), row_bytes("nvfp4_ds_mla"), row_bytes("bfloat16")) == (656, 352, 1152)


def test_bytes_of_fp8_ds_mla_rows() -> None:
    latent = torch.zeros(1, 512)
    latent[0, [0, 130, 511]] = torch.tensor([448.0, -224.0, 3.5])
    row = encode_rows(latent, torch.full((1, 64), 1.5), "fp8_ds_mla", None)[0]
    codes, scales, tail = row[:512].view(torch.float8_e4m3fn).float(), row[512:528], row[528:].clone()
    assert codes[0] == 448 and codes[130] == -448 and codes[511] == 448
    assert scales.clone().view(torch.float32)[[0, 1, 3]].tolist() == pytest.approx([1.0, 0.5, 3.5 / 448])
    assert torch.equal(tail.view(torch.bfloat16), torch.full((64,), 1.5, dtype=torch.bfloat16))


def test_bytes_of_nvfp4_ds_mla_rows() -> None:
    latent = torch.zeros(1, 512)
    latent[0, 16 * 6 + 1] = 6.0  # block 6: its scale is byte 8 * (6 & 3) + (6 >> 2) = 17
    latent[0, 16 * 6 + 2] = -3.0
    row = encode_rows(latent, torch.full((1, 64), -2.0), "nvfp4_ds_mla", None)[0]
    assert row[48].item() == 7 << 4 and row[49].item() == 0b1101
    assert torch.equal(row[256:320].view(torch.float8_e4m3fn).float(), torch.full((64,), -2.0))
    scales = row[320:].view(torch.float8_e4m3fn).float()
    assert scales[17] == 1.0 and scales.sum() == 1.0


@pytest.mark.parametrize(("name", "error"), [("fp8_e4m3", 0.03), ("fp8_ds_mla", 0.03), ("nvfp4_ds_mla", 0.12)])
def test_rows_come_back(name: str, error: float) -> None:
    latent, rope = torch.randn(50, 128), torch.randn(50, 64)
    scale = torch.tensor([0.01]) if name == "fp8_e4m3" else None
    got = decode_rows(encode_rows(latent, rope, name, scale), name, 128, 64, scale)
    assert relative_l2(got[0], latent) < error and relative_l2(got[1], rope) < 0.03


@pytest.mark.parametrize(
    "output_format", ["fp8_static", "fp8_per_token", "fp8_group64", "fp8_group128_pow2_col", "nvfp4_swizzled"]
)
def test_quantised_outputs(output_format: str) -> None:
    config = make_mla_config(num_heads=4, v_head_dim=32, output_format=output_format)
    args = random_mla_batch(config, [1, 7], [30, 9], padding_tokens=2)
    got, _ = run_mla(args, config)
    expected, _ = exact(args, config)
    assert relative_l2(got, expected) < (0.15 if "nvfp4" in output_format else 0.04)
    assert not got[8:].any()


def test_absorbed_queries_are_quantised() -> None:
    plain = make_mla_config(kv_cache_dtype="fp8_e4m3", lse=True, decode_threshold=3)
    config = plain.replace(query_format="fp8_e4m3")
    lens = [1, 5, 0, 3], [30, 21, 0, 17]
    check(config, *lens, 16, padding_tokens=2)
    args = random_mla_batch(config, *lens)
    got = run_mla(args, config)[0].clone()
    unrounded, _ = run_mla(args._replace(q_scale=None, config=plain.encode()), plain)
    # Five rows are too many to be absorbed; the others differ by some per cent.
    assert torch.equal(got[1:6], unrounded[1:6])
    assert 0.002 < relative_l2(got[:1], unrounded[:1]) < 0.1 and 0.002 < relative_l2(got[6:], unrounded[6:]) < 0.1


def test_codes_of_a_query_by_hand() -> None:
    config = make_mla_config(num_heads=1, kv_cache_dtype="fp8_e4m3", query_format="fp8_e4m3", lse=True)
    args = random_mla_batch(config, [1], [7])
    assert args.q_scale is not None and args.k_scale is not None
    latent_row = (args.query[0, 0, :12].double() @ args.kv_b_weight[0, :12].double()).float()
    row = torch.cat((latent_row, args.query[0, 0, 12:]))
    codes = (row / args.q_scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * args.q_scale.double()
    stored = args.kv_cache[args.block_table[0, 0].long()][:7].view(torch.float8_e4m3fn).double() * args.k_scale.double()
    expected = torch.logsumexp((stored * codes).sum(-1) * config.scale, 0)
    _, lse = run_mla(args, config)
    assert lse is not None and abs(float(lse[0, 0]) - float(expected)) < 1e-5


def bad_calls() -> dict[str, tuple[type[VattnError], dict[str, Any]]]:
    config = make_mla_config()
    args = random_mla_batch(config, [1, 3], [9, 12])
    wide = torch.zeros(4, 3, 36)
    return {
        "query of another width": (ShapeError, {"query": torch.zeros(4, 3, 17)}),
        "query of another dtype": (DtypeError, {"query": args.query.half()}),
        "query with strides": (StrideError, {"query": wide[:, :, ::2]}),
        "weight of another geometry": (ShapeError, {"kv_b_weight": torch.zeros(3, 22, 21)}),
        "weight of another dtype": (DtypeError, {"kv_b_weight": args.kv_b_weight.double()}),
        "weight with strides": (StrideError, {"kv_b_weight": torch.zeros(3, 20, 22).transpose(1, 2)}),
        "a scale of a plain weight": (ScaleError, {"kv_b_scale": torch.ones(1)}),
        "cache of another row": (ShapeError, {"kv_cache": torch.zeros(9, 8, 30)}),
        "cache of another format": (DtypeError, {"kv_cache": args.kv_cache.to(torch.uint8)}),
        "lengths of another dtype": (DtypeError, {"seq_lens": args.seq_lens.float()}),
        "tables of other requests": (ShapeError, {"block_table": args.block_table[:1]}),
        "output of another width": (ShapeError, {"output": torch.zeros(4, 3, 11)}),
        "lse unasked": (ConfigError, {"lse": torch.zeros(4, 3)}),
        "scale unasked": (ScaleError, {"k_scale": torch.ones(1)}),
        "scale of queries unasked": (ScaleError, {"q_scale": torch.ones(1)}),
        "top-k unasked": (ConfigError, {"topk_indices": torch.zeros(4, 2).int()}),
        "a workspace smaller than a block": (
            ShapeError,
            {"workspace": torch.zeros(8 * elements_per_token(config) - 1)},
        ),
        "a workspace of another dtype": (DtypeError, {"workspace": torch.zeros(10**5).half()}),
        "context parallelism": (ConfigError, {"local_seq_lens": args.seq_lens}),
        "gradients": (GradientError, {"query": args.query.clone().requires_grad_()}),
    }


@pytest.mark.parametrize("name", list(bad_calls()))
def test_wrong_arguments_are_refused_by_name(name: str) -> None:
    error, changes = bad_calls()[name]
    args = random_mla_batch(make_mla_config(), [1, 3], [9, 12])._replace(**changes)
    with unchanged(args), pytest.raises(error):
        torch.ops.vattn.mla_attention(*args)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 0},
        {"kv_cache_dtype": "int8", "kv_scale": "none"},
        {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "none"},
        {"kv_scale": "tensor"},
        {"kv_cache_dtype": "fp8_ds_mla"},
        {"query_format": "fp8_e4m3"},
        {"query_format": "int8"},
        {"weight_format": "int4"},
        {"output_format": "fp8_group64"},
        {"output_arithmetic": "multiply"},
        {"output_min_scale": 0.5},
        {"decode_threshold": 0},
        {"scale": float("nan")},
    ],
    ids=str,
)
def test_configs_that_contradict_themselves(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_mla_config(**changes)


def test_config_strings() -> None:
    config = make_mla_config(output_format="fp8_per_token", lse=True, sparse=True)
    assert MLAConfig.parse(config.encode()) == config
    assert make_mla_config(decode_threshold=8).encode().startswith("mla1 num_heads=3 ")
    with pytest.raises(ConfigError, match="starts with 'vattn1'"):
        MLAConfig.parse("vattn1 num_heads=3")


def test_opcheck() -> None:
    config = make_mla_config(lse=True, output_format="fp8_per_token")
    args = random_mla_batch(config, [1, 3], [9, 12])._replace(query=torch.randn(4, 3, 18))
    utilities = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    result = torch.library.opcheck(torch.ops.vattn.mla_attention.default, tuple(args), test_utils=utilities)
    assert set(result.values()) == {"SUCCESS"}
    cache = torch.zeros(mla_cache_shape(config, 3))
    update = (torch.randn(2, 20), torch.randn(2, 6), cache, torch.tensor([3, -1]), None, config.encode())
    result = torch.library.opcheck(torch.ops.vattn.mla_kv_cache_update.default, update)
    assert set(result.values()) == {"SUCCESS"}


def test_no_backend_is_named_for_what_none_runs() -> None:
    args = random_mla_batch(make_mla_config(), [1], [4])
    config = make_mla_config(output_format="fp8_static", output_arithmetic="approximate_divide")
    with pytest.raises(UnsupportedRequestError, match="TORCH_MLA: output_arithmetic approximate_divide"):
        torch.ops.vattn.mla_attention(*args._replace(config=config.encode()))


@pytest.mark.parametrize("seed", range(3))
def test_random_small_requests_equal_the_formula(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(15):
        request = fuzz_mla.draw(rng, "TORCH_MLA")
        assert fuzz_mla.check(request), request
