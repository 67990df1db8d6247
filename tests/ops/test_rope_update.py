"""`vattn::rope_kv_cache_update` against an oracle of its own in fp64, on the CPU backend; and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import vattn
from tests.ops.rope_cases import MAX_POSITIONS, expected, make_call, steps_apart
from tests.quantization.codec_kernels import encode_quotients, encode_values
from tests.support import make_config, storage_of, unchanged
from tools.compile_kernels.launches import TARGETS
from vattn import errors
from vattn.backends import hopper_routes
from vattn.cache.layout import key_value_views
from vattn.config.attention import AttentionConfig
from vattn.config.rope import RopeConfig
from vattn.kernels.triton.cache.rope_update import RopeTiles, rope_update, start_of_launch
from vattn.ops.arguments import RopeUpdateArgs
from vattn.ops.reference import attention as reference

FP8_QUERY = {"query_format": "fp8_e4m3", "query_scale": "tensor"}


@dataclass(frozen=True)
class Call:
    """One combination: config, rotation, and how the call is made."""

    config: dict[str, Any]
    rope: RopeConfig
    make: dict[str, Any] = field(default_factory=dict)


BF16 = {"dtype": "bfloat16", "num_heads": 6, "num_kv_heads": 3}
CALLS: dict[str, Call] = {
    "fp32": Call({}, RopeConfig(16)),
    "bf16 full tables": Call({**BF16, "head_size": 24}, RopeConfig(24), {"full_tables": True}),
    "fp16 bf16-tables": Call(
        {"dtype": "float16", "num_kv_heads": 1}, RopeConfig(16), {"table_dtype": torch.bfloat16, "full_tables": True}
    ),
    "rows per token": Call(BF16, RopeConfig(16, "interleaved"), {"positions": None}),
    "int32 positions": Call(BF16, RopeConfig(16), {"positions": torch.int32}),
    "partial": Call({**BF16, "head_size": 40}, RopeConfig(12)),
    "partial interleaved full": Call({**BF16, "head_size": 40}, RopeConfig(10, "interleaved"), {"full_tables": True}),
    "one pair": Call({**BF16, "kv_cache_layout": "HND"}, RopeConfig(2)),
    "norm": Call({**BF16, "head_size": 72}, RopeConfig(72, norm="rms", norm_eps=1e-6)),
    "norm partial": Call({**BF16, "head_size": 40}, RopeConfig(6, norm="rms", norm_eps=1e-5), {"seed": 1}),
    "norm one plus": Call(BF16, RopeConfig(16, "interleaved", "rms_one_plus", 1e-6)),
    "norm no weight": Call(BF16, RopeConfig(16, norm="rms", norm_eps=1e-2), {"weights": False}),
    "fp8 cache": Call({**BF16, "kv_cache_dtype": "fp8_e4m3"}, RopeConfig(16)),
    "e5m2 cache HND per head": Call(
        {**BF16, "kv_cache_dtype": "fp8_e5m2", "kv_scale": "head", "kv_cache_layout": "HND"}, RopeConfig(8)
    ),
    "unequal heads": Call({**BF16, "head_size": 24, "head_size_v": 8, "kv_cache_dtype": "fp8_e4m3"}, RopeConfig(24)),
    "fp8 query": Call({**BF16, **FP8_QUERY}, RopeConfig(16)),
    "fp8 query per head unrounded": Call(
        {**BF16, **FP8_QUERY, "query_scale": "head", "kv_cache_dtype": "fp8_e4m3"}, RopeConfig(16, round_query=False)
    ),
    "fp8 query multiplied": Call({**BF16, **FP8_QUERY}, RopeConfig(16, query_arithmetic="multiply")),
    "fp8 everything": Call(
        {**BF16, **FP8_QUERY, "query_scale": "head", "kv_cache_dtype": "fp8_e4m3", "kv_scale": "head", "head_size": 40},
        RopeConfig(20, "interleaved", "rms_one_plus", 1e-6),
    ),
    "mixed dtypes": Call({**BF16, "kv_cache_dtype": "float16"}, RopeConfig(16)),
    "two tokens": Call(BF16, RopeConfig(16), {"num_tokens": 2}),
    "no tokens": Call(BF16, RopeConfig(16), {"num_tokens": 0}),
}


def check_call(name: str, backend: str, device: str = "cpu") -> None:
    """Run one call and compare everything it may write with the oracle's."""
    call = CALLS[name]
    config = make_config(block_size=8, backend=backend, **call.config)
    args = make_call(config, call.rope, device=device, **call.make)
    compare(args, call.rope, config)


def compare(args: RopeUpdateArgs, rope: RopeConfig, config: AttentionConfig) -> None:
    kept = {k: v.clone() for k, v in args._asdict().items() if isinstance(v, Tensor) and k not in WRITTEN}
    _, query, update = expected(args, rope, config)
    torch.ops.vattn.rope_kv_cache_update(*args)
    reference.kv_cache_update(update, config)
    # One step, in fp32 some: the oracle computes in fp64 and rounds once. A code further away is another value.
    limit = 1 if config.dtype != "float32" else 1 << 12
    close(args.query_out, query, limit if args.q_scale is None else 1)
    (key, value), (other_key, other_value) = (
        [view.cpu() for view in key_value_views(cached.key_cache, cached.value_cache, config)]
        for cached in (args, update)
    )
    close(key, other_key, limit)
    close(value, other_value, 0)
    for field_name, before in kept.items():
        after = getattr(args, field_name)
        assert torch.equal(as_bytes(before), as_bytes(after)), field_name


WRITTEN = ("query_out", "key_cache", "value_cache")


def as_bytes(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8)


def close(got: Tensor, want: Tensor, limit: int) -> None:
    """Everywhere within some representable values; rarely more than none, except in fp32."""
    apart = steps_apart(got, want)
    if not apart.numel():
        return
    small = want.detach().cpu().float().abs() < 1e-4 if got.dtype == torch.float32 else torch.zeros_like(apart).bool()
    assert int(apart[~small].max()) <= limit, (int(apart.max()), limit)
    assert got.dtype == torch.float32 or float((apart > 0).float().mean()) < 4e-3


@pytest.mark.parametrize("call", list(CALLS))
def test_it_equals_the_oracle(call: str) -> None:
    check_call(call, "TORCH_SDPA")


def test_a_position_outside_of_the_table_gives_nan_and_touches_nothing_else() -> None:
    config = make_config(backend="TORCH_SDPA")
    rope = RopeConfig(8)
    args = make_call(config, rope, num_tokens=4)
    args.positions.copy_(torch.tensor([0, MAX_POSITIONS, -MAX_POSITIONS, -MAX_POSITIONS - 1]))
    torch.ops.vattn.rope_kv_cache_update(*args)
    turned = args.query_out[..., :8].isnan().all(-1).all(-1)
    assert turned.tolist() == [False, True, False, True]
    assert torch.equal(args.query_out[..., 8:], args.query[..., 8:])


def test_slots_outside_of_the_cache_write_nothing_but_queries_are_written() -> None:
    config = make_config(backend="TORCH_SDPA")
    args = make_call(config, RopeConfig(16))
    args.slot_mapping.fill_(-1)
    with unchanged(storage_of(args)):
        torch.ops.vattn.rope_kv_cache_update(*args)
    assert not bool(args.query_out.isnan().any())


def test_the_public_function() -> None:
    config = make_config(dtype="bfloat16", kv_cache_dtype="fp8_e4m3", **FP8_QUERY, backend="TORCH_SDPA")
    rope = RopeConfig(16, norm="rms", norm_eps=1e-6)
    args = make_call(config, rope)
    optional = {n: getattr(args, n) for n in "positions q_weight k_weight q_scale k_scale v_scale".split()}
    out = vattn.rope_update_kv_cache(
        args.query,
        args.key,
        args.value,
        args.cos,
        args.sin,
        storage_of(args),
        args.slot_mapping,
        rope,
        config,
        **optional,
    )
    again = make_call(config, rope)
    torch.ops.vattn.rope_kv_cache_update(*again)
    assert torch.equal(as_bytes(out), as_bytes(again.query_out))
    assert torch.equal(as_bytes(storage_of(args)), as_bytes(storage_of(again)))


QUANTISED: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3", **FP8_QUERY}
NORMED = RopeConfig(16, norm="rms", norm_eps=1e-6)


def _like(name: str, **changes: Any) -> Any:
    def edit(args: RopeUpdateArgs) -> RopeUpdateArgs:
        tensor = getattr(args, name)
        shape = changes.get("shape") or tuple(tensor.shape)
        return args._replace(**{name: torch.zeros(shape, dtype=changes.get("dtype", tensor.dtype))})

    return edit


REFUSALS: dict[str, tuple[Any, type[Exception], str]] = {
    "query of other heads": (_like("query", shape=(9, 3, 16)), errors.ShapeError, "num_heads"),
    "key of other tokens": (_like("key", shape=(18, 2, 16)), errors.ShapeError, r"key has shape \(18"),
    "query of another dtype": (_like("query", dtype=torch.float32), errors.DtypeError, "query has dtype float32"),
    "key in FP8": (_like("key", dtype=torch.float8_e4m3fn), errors.DtypeError, "key has dtype float8_e4m3fn"),
    "table of a third width": (_like("cos", shape=(37, 7)), errors.ShapeError, "rotary_dim / 2"),
    "tables of two shapes": (_like("sin", shape=(36, 8)), errors.ShapeError, "as cos"),
    "tables of two dtypes": (_like("sin", dtype=torch.bfloat16), errors.DtypeError, "sin has dtype"),
    "table of one dimension": (_like("cos", shape=(37,)), errors.ShapeError, "cos has shape"),
    "table of integers": (_like("cos", dtype=torch.int32), errors.DtypeError, "cos has dtype int32"),
    "rows for other tokens": (lambda a: a._replace(positions=None), errors.ShapeError, "cos has shape"),
    "positions as floats": (_like("positions", dtype=torch.float32), errors.DtypeError, "positions"),
    "output in the model dtype": (_like("query_out", dtype=torch.bfloat16), errors.DtypeError, "query_out"),
    "slots as fp32": (_like("slot_mapping", dtype=torch.float32), errors.DtypeError, "slot_mapping"),
    "weight of another size": (_like("q_weight", shape=(15,)), errors.ShapeError, "q_weight"),
    "weight in fp16": (_like("k_weight", dtype=torch.float16), errors.DtypeError, "k_weight"),
    "weight without a norm": (
        lambda a: a._replace(rope=RopeConfig(16).encode()), errors.ConfigError, "q_weight was given.*norm",
    ),
    "no query scale": (lambda a: a._replace(q_scale=None), errors.ScaleError, "q_scale is missing"),
    "no cache scale": (lambda a: a._replace(v_scale=None), errors.ScaleError, "v_scale is missing"),
    "more columns than a head has": (
        lambda a: a._replace(rope=RopeConfig(18).encode()), errors.ConfigError, "rotary_dim=18",
    ),
    "output over an input": (None, errors.StrideError, "overlaps"),
    "a strided output": (
        lambda a: a._replace(query_out=torch.zeros(9, 4, 32).to(torch.float8_e4m3fn)[..., :16]),
        errors.StrideError, "query_out has strides",
    ),
    "another version": (lambda a: a._replace(rope="rope9 rotary_dim=16"), errors.ConfigError, "rope9"),
    "on two devices": (lambda a: a._replace(cos=a.cos.to("meta"), sin=a.sin.to("meta")), errors.DeviceError, "meta"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", list(REFUSALS))
def test_mistakes_are_refused_and_nothing_is_written(mistake: str) -> None:
    edit, error, message = REFUSALS[mistake]
    config = make_config(backend="TORCH_SDPA", **QUANTISED)
    args = make_call(config, NORMED, seed=1)
    if mistake == "output over an input":
        flat = torch.zeros(9 * 4 * 16 * 2, dtype=torch.uint8)
        query = flat.view(torch.bfloat16).view(9, 4, 16)
        args = args._replace(query=query, query_out=flat[: 9 * 64].view(torch.float8_e4m3fn).view(9, 4, 16))
    else:
        args = edit(args)
    with unchanged(args), pytest.raises(error, match=message):
        torch.ops.vattn.rope_kv_cache_update(*args)


def test_a_backend_without_the_op_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from vattn.backends.torch_sdpa.backend import TorchSDPABackend

    can = replace(TorchSDPABackend.capabilities, rope_update=False)
    monkeypatch.setattr(TorchSDPABackend, "capabilities", can)
    with pytest.raises(errors.UnsupportedRequestError, match="rope_update=True"):
        torch.ops.vattn.rope_kv_cache_update(*make_call(make_config(backend="TORCH_SDPA"), RopeConfig(16)))


WRONG_ROPES = [
    {"rotary_dim": 7}, {"rotary_dim": 0}, {"rotary_dim": 8, "style": "gptj"}, {"rotary_dim": 8, "norm": "layer"},
    {"rotary_dim": 8, "norm_eps": 1e-6}, {"rotary_dim": 8, "norm": "rms", "norm_eps": -1.0}, {"rotary_dim": "8"},
    {"rotary_dim": 8, "query_arithmetic": "add"}, {"rotary_dim": 8, "round_query": 1},
]  # fmt: skip


@pytest.mark.parametrize("values", WRONG_ROPES, ids=str)
def test_wrong_rotations_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError):
        RopeConfig(**values)


def test_the_string_of_a_rotation_is_canonical() -> None:
    rope = RopeConfig(64, "interleaved", "rms_one_plus", 1e-6, False, "multiply")
    assert RopeConfig.parse(rope.encode()) == rope
    assert RopeConfig.parse(RopeConfig(8).encode() + " # a note") == RopeConfig(8)
    for text in ("rope1", "rope1 rotary_dim=x", "rope1 rotary_dim=8 colour=red"):
        with pytest.raises(errors.ConfigError):
            RopeConfig.parse(text)


# The kernel, in Triton's interpreter: the same calls as on the CPU backend, and cuts that must not show.


@pytest.mark.sample(3, "cpu")
@pytest.mark.parametrize("call", list(CALLS))
def test_the_kernel_equals_the_oracle(call: str, device: str) -> None:
    check_call(call, "TRITON_ATTN", device)


@pytest.mark.sample(3)
@pytest.mark.parametrize("elements", [16, 64, 4096])
def test_every_cut_gives_the_same_bytes(elements: int) -> None:
    """One head a tile, tiles that end among the heads, and all heads in one."""
    config = make_config(
        dtype="bfloat16", num_heads=6, num_kv_heads=3, kv_cache_dtype="fp8_e4m3", query_format="fp8_e4m3",
        query_scale="head", kv_scale="head", backend="TRITON_ATTN",
    )  # fmt: skip
    rope = RopeConfig(12, norm="rms", norm_eps=1e-6)
    calls = [make_call(config, rope, num_tokens=3) for _ in range(2)]
    torch.ops.vattn.rope_kv_cache_update(*calls[0])
    rope_update(calls[1], rope, config, tiles=RopeTiles(elements, 4))
    for first, second in ([call.query_out for call in calls], list(map(storage_of, calls))):
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))


@pytest.mark.parametrize(
    ("changes", "tokens", "expected"),
    [
        ({}, 2, "both"),
        ({"head_size": 64, "kv_cache_dtype": "bfloat16"}, 2, "both"),
        ({"kv_cache_dtype": "bfloat16"}, 2, "wait"),  # The decode kernel behind is launched early itself, and piles up.
        ({"head_size": 256}, 2, "both"),
        ({"head_size": 256, "num_heads": 64}, 2, "both"),  # Launched early, and a multiprocessor has room for one CTA.
        ({"backend": "FLASHINFER"}, 2, "wait"),
        ({}, 22, "both"),
        ({}, 23, ""),
    ],
)
def test_when_a_launch_of_few_tokens_starts(changes: dict[str, object], tokens: int, expected: str) -> None:
    asked = {"dtype": "bfloat16", "num_heads": 32, "num_kv_heads": 8, "head_size": 128, "kv_cache_dtype": "fp8_e4m3"}
    config = make_config(**{**asked, "backend": "TRITON_ATTN", **changes})
    hopper = TARGETS["sm_90"]
    next_may_start = hopper_routes.next_may_start(config)
    assert start_of_launch(tokens, 6, hopper, next_may_start) == expected
    assert start_of_launch(tokens, 6, TARGETS["sm_80"], next_may_start) == ""


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2"])
def test_quotients_are_encoded_as_the_codec_does(fmt: str) -> None:
    values = torch.cat((torch.randn(120) * 400, torch.tensor([0.0, -0.0, 1e9, -1e9, torch.inf, -torch.inf, 1e-9, 3.0])))
    scales = torch.tensor([0.0313, 1.0, 7e-3, 1e-30])
    got = encode_quotients(values, scales, fmt, native=False)
    for scale, row in zip(scales, got, strict=True):
        assert torch.equal(row, encode_values(values / scale, fmt))


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)])
def test_quotients_by_corrected_products_are_those_of_the_division(dtype: torch.dtype, largest: float) -> None:
    """What the native lowering of `encode_quotient` computes; fp64 emulates FMA, since it holds products exactly."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.float().double()

    def codes(x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-largest, largest).to(dtype).view(torch.uint8)

    stored = torch.arange(0x7B if largest > 448 else 0x7E, dtype=torch.uint8).view(dtype).float()
    ties = (stored[1:] + stored[:-1]) / 2
    bf16 = torch.arange(0, 1 << 16, 3, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    for scale in (*(torch.rand(40) * torch.exp2(torch.randint(-55, 55, (40,)).float())), torch.tensor(-0.37)):
        near = ((ties * scale)[:, None].view(torch.int32) + torch.arange(-2, 3, dtype=torch.int32)).view(torch.float32)
        x = torch.cat((bf16[bf16.isfinite()], near.flatten(), torch.tensor([0.0, -0.0, torch.inf, -torch.inf])))
        wide, s = x.double(), scale.double()
        reciprocal = rounded(1 / s)
        product = rounded(wide * reciprocal)
        corrected = rounded(rounded(wide - product * s) * reciprocal + product)
        usual = (product.abs() < 2.0**40) & (product.abs() > 2.0**-40)
        assert torch.equal(codes(torch.where(usual, corrected, product).float()), codes(x / scale))
