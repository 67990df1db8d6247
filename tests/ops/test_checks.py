"""Every mistake that the checks name: its class, what came, what is allowed, what to do; and nothing was written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import vattn.ops.schemas  # noqa: F401  registers the ops
from tests.support import make_config, poisoned_empty, random_packed_batch, random_paged_batch, unchanged
from vattn import errors
from vattn.cache.layout import kv_cache_dtype, kv_cache_shape, op_views
from vattn.config.attention import AttentionConfig
from vattn.ops import checks
from vattn.ops.arguments import CacheUpdateArgs, MergeArgs, PlanArgs

T, B = 4, 2
FULL: dict[str, Any] = {
    "kv_cache_dtype": "fp8_e4m3",
    "kv_scale": "head",
    "query_format": "fp8_e4m3",
    "query_scale": "tensor",
    "alibi": "linear",
    "sinks": True,
    "causality": "per_request",
    "mm_prefix": "full",
    "lse": True,
    "output_format": "fp8_static",
}
"""Asks for every optional tensor except a tree and a block scale."""

DYNAMIC = {"output_format": "fp8_group64"}
COLUMNS = {"output_format": "fp8_group64_col"}
UNEQUAL = {"head_size": 24, "head_size_v": 8}
PACKED = {"kv_cache_dtype": "int8_per_token_head", "head_size": 32, "head_size_v": 32}
TREE = {"tree_bias": True}

Edit = Callable[[Tensor], "Tensor | None"]


def wrong_shape(x: Tensor) -> Tensor:
    return torch.zeros((*x.shape[:-1], x.shape[-1] + 1), dtype=x.dtype)


def wrong_dtype(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.float64)


def on_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def strided(x: Tensor) -> Tensor:
    """The same shape with a gap after every element of the last dimension."""
    return torch.zeros((*x.shape, 2), dtype=x.dtype)[..., 0]


def gap_between_rows(x: Tensor) -> Tensor:
    return torch.zeros((*x.shape[:-1], x.shape[-1] + 3), dtype=x.dtype)[..., : x.shape[-1]]


def absent(x: Tensor) -> None:
    return None


Case = tuple[dict[str, Any], str, Edit, type[errors.VattnError], str]
"""Config, field, what is done to it, error class, and a pattern of the message."""

SHAPES = [
    "block_table",
    "query_start_loc",
    "seq_lens",
    "lse",
    "alibi_slopes",
    "sinks",
    "causal_flags",
    "mm_ranges",
    "output",
    "query",
    "key_cache",
]
SCALES = ["q_scale", "k_scale", "v_scale", "output_scale"]

ATTENTION: list[Case] = [
    *(
        (FULL, name, wrong_dtype, errors.DtypeError, f"{name} has dtype float64.*Allowed.*Try: convert")
        for name in SHAPES
    ),
    *((FULL, name, wrong_dtype, errors.DtypeError, f"{name} has dtype float64.*float32") for name in SCALES),
    *((FULL, name, on_meta, errors.DeviceError, f"{name} is on meta.*cpu.*move") for name in SHAPES[:-3] + SCALES),
    (FULL, "query", on_meta, errors.DeviceError, "a tensor on meta beside .* on cpu.*pass tensors with values"),
    *(
        (FULL, name, wrong_shape, errors.ShapeError, rf"{name} has shape \(.*Allowed: \(.*\) = .*Try: build")
        for name in SHAPES
        if name not in ("seq_lens", "block_table")
    ),
    (FULL, "seq_lens", wrong_shape, errors.ShapeError, r"block_table has shape \(2, .*\(3, "),
    (FULL, "seq_lens", lambda x: x[:0], errors.ShapeError, r"seq_lens has shape \(0,\).*B >= 1"),
    (FULL, "seq_lens", lambda x: x[0], errors.ShapeError, r"seq_lens has shape \(\).*one entry per request"),
    (FULL, "block_table", lambda x: x[:1], errors.ShapeError, r"block_table has shape \(1, "),
    (FULL, "block_table", lambda x: x[:, :0], errors.ShapeError, r"\(2, 0\).*W >= 1"),
    (FULL, "block_table", lambda x: x[0], errors.ShapeError, r"\[B, W\]"),
    (FULL, "query", lambda x: x[0], errors.ShapeError, r"\[T, num_heads, head_size\]"),
    (FULL, "query", lambda x: x.flatten()[0], errors.ShapeError, r"query has shape \(\)"),
    ({}, "query", lambda x: x.half(), errors.DtypeError, "query has dtype float16.*Allowed: float32"),
    ({}, "query", lambda x: x.to(torch.float8_e4m3fn), errors.DtypeError, "float8_e4m3fn.*Allowed: float32"),
    *((FULL, name, strided, errors.StrideError, f"{name} has strides.*") for name in SHAPES),
    *((FULL, name, gap_between_rows, errors.StrideError, "contiguous memory") for name in ("output", "lse")),
    *((FULL, name, absent, errors.ScaleError, f"{name} is missing.*a tensor.*pass {name}") for name in SCALES),
    *(
        (FULL, name, absent, errors.ConfigError, f"{name} is missing, but the config has .*a tensor.*pass {name}")
        for name in ("lse", "alibi_slopes", "sinks", "causal_flags", "mm_ranges")
    ),
    (FULL, "k_scale", lambda x: x[:1], errors.ScaleError, r"k_scale has shape \(1,\).*shape \(2,\), one per KV head"),
    (FULL, "q_scale", lambda x: x.expand(2), errors.ScaleError, r"q_scale has shape \(2,\).*one value"),
    (FULL, "v_scale", lambda x: x.expand(2, 2)[0].repeat(2)[::2], errors.StrideError, "v_scale has strides"),
    (FULL, "output_scale", lambda x: x.view(1, 1), errors.ScaleError, r"shape \(1, 1\).*one value"),
    (FULL, "key_cache", lambda x: x[:0], errors.ShapeError, r"key_cache has shape \(0, .*num_blocks >= 1"),
    (FULL, "key_cache", lambda x: x.view(torch.float8_e5m2), errors.DtypeError, "float8_e5m2.*float8_e4m3fn or uint8"),
    (FULL, "key_cache", lambda x: x.transpose(1, 2), errors.ShapeError, "key_cache has shape"),
    (FULL, "key_cache", lambda x: x[:, :1].expand(x.shape), errors.StrideError, "key_cache.*elements overlap"),
    (FULL, "value_cache", absent, errors.ShapeError, "key_cache without value_cache"),
    (UNEQUAL, "value_cache", lambda x: x[1:], errors.ShapeError, "value_cache has shape.*the blocks of key_cache"),
    (UNEQUAL, "value_cache", strided, errors.StrideError, "value_cache has strides.*columns lie apart"),
    (PACKED, "key_cache", lambda x: x[:0], errors.ShapeError, "num_blocks >= 1"),
    (PACKED, "key_cache", strided, errors.StrideError, "key_cache has strides"),
    (
        PACKED,
        "key_cache",
        lambda x: torch.zeros(x.numel() + 2, dtype=torch.uint8)[2:].view(x.shape),
        errors.StrideError,
        "starts at byte 2 of its memory.*multiples of 4",
    ),
    (TREE, "bias", absent, errors.ConfigError, "bias is missing, but the config has tree_bias=True"),
    (TREE, "tree_id", absent, errors.ConfigError, "tree_id is missing"),
    (TREE, "bias", lambda x: x[:, :2], errors.ShapeError, r"bias has shape \(2, 2, 5\).*\[trees, n, n\]"),
    (TREE, "bias", lambda x: x[0], errors.ShapeError, r"bias has shape \(5, 5\)"),
    (TREE, "tree_id", wrong_shape, errors.ShapeError, r"tree_id has shape \(3,\)"),
    (TREE, "bias", lambda x: x.mT, errors.StrideError, "bias has strides"),
    (DYNAMIC, "output_block_scale", absent, errors.ConfigError, "output_block_scale is missing.*dynamic scales"),
    (DYNAMIC, "output_block_scale", wrong_shape, errors.ShapeError, r"\(4, 2\).*\(4, 1\)"),
    (DYNAMIC, "output_block_scale", wrong_dtype, errors.DtypeError, "float64.*float32"),
    (COLUMNS, "output_block_scale", wrong_dtype, errors.DtypeError, "float64.*float32"),
    (
        {**COLUMNS, "head_size": 64},
        "output_block_scale",
        lambda x: x.contiguous(),
        errors.StrideError,
        r"\(1, 4\).*transpose",
    ),
    (
        {**DYNAMIC, "head_size": 64},
        "output_block_scale",
        lambda x: x.t().contiguous().t(),
        errors.StrideError,
        "contiguous",
    ),
    ({"output_format": "nvfp4_swizzled"}, "output_block_scale", lambda x: x[:4, :1], errors.ShapeError, r"\(128, 4\)"),
    (
        {"output_format": "nvfp4"},
        "output",
        lambda x: x.repeat(1, 1, 2),
        errors.ShapeError,
        r"\(4, 4, 16\).*\(4, 4, 8\)",
    ),
    ({"dtype": "bfloat16"}, "output", lambda x: x.float(), errors.DtypeError, "output has dtype float32.*bfloat16"),
]

OTHERS = {
    "lse": torch.zeros(T, 4),
    "alibi_slopes": torch.zeros(4),
    "sinks": torch.zeros(4),
    "causal_flags": torch.zeros(B, dtype=torch.int32),
    "bias": torch.zeros(1, 2, 2),
    "tree_id": torch.zeros(B, dtype=torch.int32),
    "mm_ranges": torch.zeros(B, 1, 2, dtype=torch.int32),
    "output_block_scale": torch.zeros(T, 1),
    "output_scale": torch.ones(1),
    "q_scale": torch.ones(1),
    "k_scale": torch.ones(1),
    "v_scale": torch.ones(1),
}
"""Tensors that would be right if the config asked for them."""


def refuses(call: Callable[[], Any], error: type[errors.VattnError], pattern: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert type(raised.value) is error
    assert re.search(pattern, str(raised.value)), str(raised.value)
    assert raised.value.got and raised.value.allowed and raised.value.fix, str(raised.value)


def refuses_and_writes_nothing(op: Any, args: Any, error: type[errors.VattnError], pattern: str) -> None:
    with unchanged(args):
        refuses(lambda: op(*args), error, pattern)


def paged(changes: dict[str, Any]) -> tuple[Any, AttentionConfig]:
    config = make_config(block_size=8, backend="TORCH_SDPA", **changes)
    return random_paged_batch(config, [3, 1], [9, 1]).args, config


@pytest.mark.parametrize("name", list(OTHERS))
def test_a_tensor_that_the_config_does_not_ask_for_is_refused(name: str) -> None:
    error = errors.ScaleError if name.endswith("_scale") and name != "output_block_scale" else errors.ConfigError
    pattern = f"{name} was given, but the config has no .*Allowed: None.*Try: pass None or set"
    args, config = paged({})
    given = args._replace(**{name: OTHERS[name]})
    refuses(lambda: checks.check_attention(given), error, pattern)
    refuses_and_writes_nothing(torch.ops.vattn.attention, given, error, pattern)
    packed = random_packed_batch(config.replace(block_size=0), [3, 1], [9, 1])
    given = packed.args._replace(**{name: OTHERS[name]})
    refuses_and_writes_nothing(torch.ops.vattn.varlen_attention, given, error, pattern)


def test_reserved_and_foreign_arguments_are_refused() -> None:
    args, config = paged({})
    local = args._replace(local_seq_lens=args.seq_lens)
    refuses(lambda: checks.check_attention(local), errors.ConfigError, "local_seq_lens.*context_parallel=True")
    sharded = args._replace(config=config.replace(context_parallel=True).encode())
    refuses(lambda: checks.check_attention(sharded), errors.ConfigError, "local_seq_lens is missing")
    plan = args._replace(plan=[torch.zeros(3)])
    refuses(lambda: checks.check_attention(plan), errors.DtypeError, "plan has dtype float32.*int32")
    for dtype in (torch.int32, torch.int64):
        plan = args._replace(plan=[torch.zeros(3, 8, dtype=dtype, device="meta")])
        refuses(lambda given=plan: checks.check_attention(given), errors.DeviceError, "plan is on meta")  # type: ignore[misc]
    plan = args._replace(plan=[torch.zeros(3, 8, dtype=torch.int32)[:, ::2]])
    refuses(lambda: checks.check_attention(plan), errors.StrideError, "plan has strides")
    workspace = args._replace(workspace=torch.zeros(4, device="meta"))
    refuses(lambda: checks.check_attention(workspace), errors.DeviceError, "workspace is on meta")
    workspace = args._replace(workspace=torch.zeros(8)[::2])
    refuses(lambda: checks.check_attention(workspace), errors.StrideError, "workspace has strides")
    without_cache = args._replace(config=config.replace(block_size=0).encode())
    refuses(lambda: checks.check_attention(without_cache), errors.ConfigError, "block_size=0.*varlen_attention")


def test_what_need_not_be_contiguous_is_accepted() -> None:
    args, _ = paged({"sinks": True, "dtype": "bfloat16"})
    wide_table = torch.zeros(B, 9, dtype=torch.int32)
    wide_table[:, : args.block_table.shape[1]] = args.block_table
    spaced = torch.cat([args.query, args.query], dim=1)[:, :4]
    assert not spaced.is_contiguous()
    checks.check_attention(args._replace(query=spaced, block_table=wide_table[:, :4]))
    checks.check_attention(args._replace(sinks=args.sinks.bfloat16()))
    checks.check_attention(args._replace(plan=[torch.zeros(3, dtype=torch.int64)], workspace=torch.zeros(5)))


def test_a_check_ahead_holds_for_the_same_tensors_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    args, _ = paged({})
    looked: list[Any] = []
    monkeypatch.setattr(checks.check_attention, "_check", looked.append)
    monkeypatch.setattr(checks.check_attention, "_accepted", {})
    checks.check_attention.ahead(args)
    args.query.resize_(1, 1, 1)
    checks.check_attention(args._replace(config="".join(args.config)))
    assert len(looked) == 1
    checks.check_attention(args)
    assert len(looked) == 2
    for field in ("query", "plan", "workspace", "config"):
        checks.check_attention.ahead(args)
        other: Any = {"plan": [args.seq_lens], "config": args.config + " "}.get(field, torch.zeros(3))
        checks.check_attention(args._replace(**{field: other}))
        assert len(looked) == 3
        looked.pop()


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_value_may_be_a_scalar(shape: tuple[int, ...]) -> None:
    args, _ = paged({"kv_cache_dtype": "fp8_e4m3"})
    checks.check_attention(args._replace(k_scale=torch.ones(shape), v_scale=torch.ones(shape)))


def test_no_tokens_at_all_are_accepted() -> None:
    config = make_config(lse=True)
    checks.check_attention(random_paged_batch(config, [0], [0]).args)
    checks.check_varlen_attention(random_packed_batch(config.replace(block_size=0), [0], [0]).args)


VARLEN: list[Case] = [
    ({}, "key", wrong_shape, errors.ShapeError, r"key has shape .*\[T, num_kv_heads, head_size\]"),
    ({}, "value", lambda x: x[1:], errors.ShapeError, r"value has shape \(9, 2, 16\).*\(10, 2, 16\)"),
    ({}, "key", lambda x: x.half(), errors.DtypeError, "key has dtype float16.*float32"),
    ({"kv_cache_dtype": "fp8_e5m2"}, "key", lambda x: x.float(), errors.DtypeError, "float32.*float8_e5m2"),
    ({}, "value", strided, errors.StrideError, r"value has strides.*stride 1.*value\.contiguous"),
    ({}, "key", on_meta, errors.DeviceError, "key is on meta"),
    ({}, "kv_start_loc", lambda x: x[:1], errors.ShapeError, r"kv_start_loc has shape \(1,\)"),
    ({}, "kv_start_loc", lambda x: x[:2], errors.ShapeError, r"query_start_loc has shape \(3,\).*\(2,\)"),
    ({}, "kv_start_loc", lambda x: x.short(), errors.DtypeError, "kv_start_loc has dtype int16.*int32 or int64"),
    (FULL, "k_scale", absent, errors.ScaleError, "k_scale is missing"),
    (FULL, "mm_ranges", wrong_shape, errors.ShapeError, r"mm_ranges has shape \(2, 3, 3\)"),
    (FULL, "output", wrong_dtype, errors.DtypeError, "output has dtype"),
]


def test_varlen_attention_takes_no_block_size() -> None:
    config = make_config(block_size=0)
    args = random_packed_batch(config, [3, 1], [9, 1]).args
    args = args._replace(config=config.replace(block_size=16).encode())
    refuses(lambda: checks.check_varlen_attention(args), errors.ConfigError, "block_size=16.*block_size=0")


UPDATE: list[Case] = [
    ({}, "key", wrong_shape, errors.ShapeError, r"key has shape \(4, 2, 17\).*\(4, 2, 16\)"),
    ({}, "key", lambda x: x.view(4, 1, 32), errors.ShapeError, "key has shape"),
    ({}, "value", lambda x: x[:3], errors.ShapeError, r"value has shape \(3, 2, 16\)"),
    ({}, "key", lambda x: x.double(), errors.DtypeError, "key has dtype float64.*float32"),
    ({}, "key", lambda x: x.to(torch.float8_e4m3fn), errors.DtypeError, "float8_e4m3fn.*Allowed: float32"),
    (
        {"kv_cache_dtype": "fp8_e4m3"},
        "key",
        lambda x: x.to(torch.float8_e5m2),
        errors.DtypeError,
        "float8_e5m2.*float32 or float8_e4m3fn",
    ),
    ({}, "value", strided, errors.StrideError, "value has strides.*stride 1"),
    ({}, "slot_mapping", lambda x: x.float(), errors.DtypeError, "slot_mapping has dtype float32.*int32 or int64"),
    (
        {},
        "slot_mapping",
        lambda x: x[:2],
        errors.ShapeError,
        r"\(2,\).*\(4,\) = \[T\], one slot per row of key.*query and key of the step",
    ),
    ({}, "slot_mapping", on_meta, errors.DeviceError, "slot_mapping is on meta"),
    ({}, "key_cache", lambda x: x[:1], errors.ShapeError, "value_cache has shape"),
    ({}, "value_cache", lambda x: x.bfloat16(), errors.DtypeError, "bfloat16.*float32"),
    ({}, "key_cache", strided, errors.StrideError, "key_cache has strides.*columns lie apart"),
    ({}, "k_scale", lambda x: torch.ones(1), errors.ScaleError, "k_scale was given"),
    ({"kv_cache_dtype": "fp8_e4m3"}, "v_scale", absent, errors.ScaleError, "v_scale is missing"),
    ({"kv_cache_dtype": "fp8_e4m3"}, "k_scale", lambda x: torch.ones(2), errors.ScaleError, r"\(2,\).*one value"),
]


def update_args(changes: dict[str, Any]) -> CacheUpdateArgs:
    config = make_config(block_size=8, backend="TORCH_SDPA", **changes)
    scale = torch.full((1,), 0.01) if config.kv_scale != "none" else None
    key, value = torch.randn(4, 2, config.head_size), torch.randn(4, 2, config.head_size_v)
    cache = poisoned_empty(kv_cache_shape(config, 3), kv_cache_dtype(config))
    return CacheUpdateArgs(key, value, *op_views(cache, config), torch.arange(4), scale, scale, config.encode())


def test_keys_in_the_cache_dtype_are_accepted() -> None:
    args = update_args({"kv_cache_dtype": "fp8_e5m2"})
    checks.check_kv_cache_update(args._replace(key=args.key.to(torch.float8_e5m2)))


def merge_args(changes: dict[str, Any]) -> MergeArgs:
    parts = (torch.randn(3, 2, 8), torch.randn(3, 2))
    return MergeArgs(torch.zeros(3, 2, 8), torch.zeros(3, 2), *parts, *(part.clone() for part in parts))


MERGES: list[Case] = [
    ({}, "output", lambda x: x[0], errors.ShapeError, r"output has shape \(2, 8\).*\[T, H, V\]"),
    ({}, "output", lambda x: x.to(torch.int32), errors.DtypeError, "int32.*float16 or bfloat16 or float32"),
    ({}, "output", strided, errors.StrideError, "output has strides"),
    ({}, "output_lse", lambda x: x.half(), errors.DtypeError, "output_lse has dtype float16.*float32"),
    ({}, "output_lse", lambda x: x.t(), errors.ShapeError, "output_lse has shape"),
    ({}, "prefix_output", lambda x: x[:2], errors.ShapeError, r"prefix_output has shape \(2, 2, 8\)"),
    ({}, "suffix_output", lambda x: x.half(), errors.DtypeError, "suffix_output has dtype float16.*float32"),
    ({}, "suffix_output", on_meta, errors.DeviceError, "suffix_output is on meta"),
    ({}, "prefix_lse", lambda x: x.double(), errors.DtypeError, "prefix_lse has dtype float64"),
    ({}, "suffix_lse", lambda x: x[:, :1], errors.ShapeError, r"suffix_lse has shape \(3, 1\)"),
]


def packed(changes: dict[str, Any]) -> Any:
    return random_packed_batch(make_config(block_size=0, backend="TORCH_SDPA", **changes), [3, 1], [9, 1]).args


CASES: list[tuple[str, Callable[[dict[str, Any]], Any], Callable[[Any], None], Case]] = [
    *(("attention", lambda changes: paged(changes)[0], checks.check_attention, case) for case in ATTENTION),
    *(("varlen_attention", packed, checks.check_varlen_attention, case) for case in VARLEN),
    *(("kv_cache_update", update_args, checks.check_kv_cache_update, case) for case in UPDATE),
    *(("merge_attn_states", merge_args, checks.check_merge, case) for case in MERGES),
]


@pytest.mark.parametrize(
    ("op", "make", "check", "case"),
    CASES,
    ids=[f"{op}-{case[1]}-{case[2].__name__}-{case[3].__name__}" for op, _, _, case in CASES],
)
def test_ops_refuse_and_write_nothing(
    op: str, make: Callable[[dict[str, Any]], Any], check: Callable[[Any], None], case: Case
) -> None:
    changes, field, edit, error, pattern = case
    args = make(changes)
    check(args)
    args = args._replace(**{field: edit(getattr(args, field))})
    # With a meta tensor torch would run the op's shape function.
    call = (lambda *wrong: check(type(args)(*wrong))) if edit is on_meta else getattr(torch.ops.vattn, op)
    refuses_and_writes_nothing(call, args, error, pattern)


def test_merging_into_an_input_is_refused() -> None:
    args = merge_args({})
    shared = args._replace(output=args.prefix_output)
    refuses(lambda: checks.check_merge(shared), errors.StrideError, "output overlaps an input.*memory of its own")
    shared = args._replace(output_lse=args.suffix_lse)
    refuses(lambda: checks.check_merge(shared), errors.StrideError, "output_lse overlaps an input")
    checks.check_merge(args._replace(output_lse=None))


def test_planning_refuses() -> None:
    config = make_config()
    args = PlanArgs(torch.zeros(3).int(), torch.zeros(2).int(), torch.zeros(7).int(), config.encode())
    checks.check_plan(args)
    for field, edited, error, pattern in (
        ("seq_lens", torch.zeros(0).int(), errors.ShapeError, "seq_lens"),
        ("query_start_loc", torch.zeros(2).int(), errors.ShapeError, r"query_start_loc has shape \(2,\).*\(3,\)"),
        ("seq_lens", torch.zeros(2), errors.DtypeError, "seq_lens has dtype float32.*int32 or int64"),
        ("schedule", torch.zeros(7), errors.DtypeError, "schedule has dtype float32.*int32"),
        ("schedule", torch.zeros(14).int()[::2], errors.StrideError, "schedule has strides"),
        ("schedule", torch.zeros(7, device="meta").int(), errors.DeviceError, "schedule is on meta"),
    ):
        wrong = args._replace(**{field: edited})
        refuses(lambda wrong=wrong: checks.check_plan(wrong), error, pattern)  # type: ignore[misc]


def test_quantisers_refuse() -> None:
    ops, x, scale = torch.ops.vattn, torch.zeros(3, 64), torch.ones(1)
    refuses(lambda: ops.quant_fp8_static(x.view(3, 2, 32), scale), errors.ShapeError, r"quant_fp8_static.*\(3, 2, 32\)")
    refuses(lambda: ops.quant_fp8_per_token(torch.zeros(3, 0)), errors.ShapeError, r"\(3, 0\).*N >= 1")
    refuses(lambda: ops.quant_fp8_per_token(x.double()), errors.DtypeError, "quant_fp8_per_token: input.*float64")
    refuses(lambda: ops.quant_fp8_static(x, torch.ones(3)), errors.ScaleError, r"scale has shape \(3,\).*one value")
    refuses(lambda: ops.quant_fp8_static(x, scale.double()), errors.DtypeError, "scale has dtype float64.*float32")
    refuses(
        lambda: checks.check_quantiser_input("quant_fp8_static", x, scale.to("meta")),
        errors.DeviceError,
        "scale is on meta",
    )
    refuses(lambda: ops.quant_fp8_group(x, 48, False, False), errors.ShapeError, "64 columns for groups of 48.*divides")
    refuses(lambda: ops.quant_fp8_group(x, 0, False, False), errors.ShapeError, "groups of 0.*positive")
    refuses(lambda: ops.quant_nvfp4(x[:, :40], scale, False), errors.ShapeError, "40 columns for groups of 16")
