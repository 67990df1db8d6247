"""`EncoderOnlyAttention` against dense attention; its refusals; compiled, exported and fused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import vattn
from tests.compile.test_graph_counts import CountingBackend
from tests.layers.encoder_support import HEADS, KV_HEADS, SIZE, dense, packed_step, random_qkv
from tests.support import relative_l2
from vattn.errors import (
    ConfigError,
    DtypeError,
    GradientError,
    MetadataError,
    ScaleError,
    ShapeError,
    UnknownOptionError,
    UnsupportedRequestError,
)
from vattn.quantization.codecs import decode_kv, decode_query, dequantise_output, encode_kv, encode_query
from vattn.quantization.formats import OUTPUT_FORMATS

BACKENDS = ("TORCH_SDPA", "TRITON_ATTN")
SLOPES, SINKS = torch.tensor([0.5, 0.25, 0.125, 0.7]), torch.tensor([0.3, -1.0, 2.0, 0.0])

CLOSE = 2e-5
"""Relative L2 in fp32: sums in another order. A wrong mask or bias gives 1e-1."""


def make_layer(**options: Any) -> vattn.EncoderOnlyAttention:
    arguments = {"num_heads": HEADS, "head_size": SIZE, "scale": 0.25, "num_kv_heads": KV_HEADS, **options}
    return vattn.EncoderOnlyAttention(**arguments)


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the model's window": ({"cache_config": vattn.CacheConfig(sliding_window=5)}, {"window": 5}),
    "everything": (
        {"per_layer_sliding_window": 4, "logits_soft_cap": 1.5, "alibi_slopes": SLOPES.tolist(), "sinks": SINKS},
        {"window": 4, "soft_cap": 1.5, "slopes": SLOPES, "sinks": SINKS},
    ),
}
LENS = [7, 0, 1, 12, 2]


@pytest.mark.parametrize(
    ("backend", "name"), [*(("TORCH_SDPA", name) for name in OPTIONS), ("TRITON_ATTN", "everything")]
)
def test_equals_dense_attention(backend: str, name: str) -> None:
    options, meaning = OPTIONS[name]
    layer = make_layer(attn_backend=backend, **options)
    query, key, value = random_qkv(25, real=22)
    out = layer(query, key, value, metadata=packed_step(LENS, num_tokens_padded=25, num_reqs_padded=7))
    expected = dense(query, key, value, LENS, **{"scale": 0.25, **meaning}).flatten(1)
    assert out.shape == (25, HEADS * SIZE) and not out[22:].any()
    assert relative_l2(out, expected) < CLOSE


@pytest.mark.parametrize(
    ("backend", "heads"), [("TORCH_SDPA", (4, 4)), ("TORCH_SDPA", (5, 1)), ("TRITON_ATTN", (6, 2))], ids=str
)
def test_head_counts_and_value_width(backend: str, heads: tuple[int, int]) -> None:
    layer = vattn.EncoderOnlyAttention(heads[0], 24, 0.2, heads[1], head_size_v=40, attn_backend=backend)
    query, key, _ = random_qkv(20, *heads, 24)
    value = torch.randn(20, heads[1], 40)
    out = layer(query.flatten(1), key, value.flatten(1), (20, heads[0], 40), metadata=packed_step([9, 11]))
    assert relative_l2(out, dense(query, key, value, [9, 11], scale=0.2)) < CLOSE


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp8_keys_values_and_query(backend: str) -> None:
    """What is attended to is what the formats store; keys that are stored already are taken as they are."""
    quant = vattn.QuantConfig([0.011, 0.023], [0.013, 0.017], query_format="fp8_e4m3", q_scale=0.02)
    layer = make_layer(
        cache_config=vattn.CacheConfig(cache_dtype="fp8"), quant_config=quant, attn_backend=backend
    )  # fmt: skip
    step, (query, key, value) = packed_step([9, 4]), random_qkv(13)
    stored = [encode_kv(t, "fp8_e4m3", s) for t, s in ((key, layer.k_scale), (value, layer.v_scale))]
    k, v = (
        decode_kv(t, "fp8_e4m3", s) for t, s in zip(stored, (layer.k_scale, layer.v_scale), strict=True)
    )  # fmt: skip
    q = decode_query(encode_query(query, layer.q_scale, KV_HEADS), layer.q_scale, KV_HEADS)
    out = layer(query, key, value, metadata=step)
    assert relative_l2(out, dense(q, k, v, [9, 4], scale=0.25).flatten(1)) < CLOSE
    assert torch.equal(layer(query, *stored, metadata=step), out)


@pytest.mark.parametrize("name", OUTPUT_FORMATS)
def test_quantised_outputs(name: str) -> None:
    fmt = OUTPUT_FORMATS[name]
    quant = vattn.QuantConfig(output_format=name, output_scale=0.01 if fmt.static_scale else None)
    layer, plain = (vattn.EncoderOnlyAttention(8, 16, 0.25, 2, quant_config=q) for q in (quant, None))
    step, qkv = packed_step([9, 4], num_tokens_padded=15), random_qkv(15, 8, real=13)
    result = layer(*qkv, metadata=step)
    codes, scales = result if isinstance(result, tuple) else (result, None)
    got = dequantise_output(codes.view(15, 8, -1), fmt, scales, layer.output_scale)
    bits = 1 if fmt.container is torch.uint8 else 3
    assert relative_l2(got, plain(*qkv, metadata=step).view(15, 8, 16)) < 2.0 ** -(bits + 1)
    assert not got[13:].any()
    with vattn.forward_context(None):
        dry = layer(*qkv)
    for ours, theirs in zip(*(r if isinstance(r, tuple) else (r,) for r in (dry, result)), strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
        assert not ours.float().any()


@settings(max_examples=40)
@given(
    lens=st.lists(st.integers(0, 20), min_size=1, max_size=6),
    padding=st.tuples(st.integers(0, 4), st.integers(0, 3)),
    heads=st.sampled_from([(4, 2), (3, 3), (5, 1)]),
    options=st.fixed_dictionaries(
        {},
        optional={
            "per_layer_sliding_window": st.integers(1, 25),
            "logits_soft_cap": st.floats(0.3, 20.0),
            "alibi_slopes": st.just(True),
            "sinks": st.just(True),
        },
    ),
)
def test_random_packed_batches(
    lens: list[int], padding: tuple[int, int], heads: tuple[int, int], options: dict[str, Any]
) -> None:
    tokens, reqs = sum(lens) + padding[0], max(2, len(lens)) + padding[1]
    slopes, sinks = torch.rand(heads[0]), torch.randn(heads[0])
    given_options = {
        **options,
        **{name: t for name, t in (("alibi_slopes", slopes), ("sinks", sinks)) if name in options},
    }
    layer = vattn.EncoderOnlyAttention(heads[0], 8, 0.3, heads[1], **given_options)
    query, key, value = random_qkv(tokens, *heads, 8, real=sum(lens))
    out = layer(query, key, value, metadata=packed_step(lens, num_tokens_padded=tokens, num_reqs_padded=reqs))
    expected = dense(
        query,
        key,
        value,
        lens,
        scale=0.3,
        window=options.get("per_layer_sliding_window"),
        soft_cap=options.get("logits_soft_cap"),
        slopes=slopes if "alibi_slopes" in options else None,
        sinks=sinks if "sinks" in options else None,
    ).flatten(1)
    assert relative_l2(out, expected) < CLOSE and not out[sum(lens) :].any()


# Refusals


BAD_OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "decoder": ({"attn_type": "decoder"}, UnsupportedRequestError, "use vattn.Attention"),
    "cross": ({"attn_type": "encoder_decoder"}, UnsupportedRequestError, "use vattn.CrossAttention"),
    "unknown type": ({"attn_type": "prefix"}, ConfigError, "attn_type='prefix'"),
    "sharing": ({"kv_sharing_target_layer_name": "a"}, UnsupportedRequestError, "no cache to share"),
    "no type": ({"attn_type": ""}, ConfigError, "attn_type=''"),
    "cache of a dict": ({"cache_config": {}}, ConfigError, "cache_config of type dict"),
    "scales of a dict": ({"quant_config": {"k_scale": 1.0}}, ConfigError, "quant_config of type dict"),
    "sqrt": ({"alibi_slopes": [1.0] * 4, "use_alibi_sqrt": True}, ConfigError, "alibi='sqrt'"),
    "sqrt alone": ({"use_alibi_sqrt": True}, ConfigError, "use_alibi_sqrt without alibi_slopes"),
    "unknown backend": ({"attn_backend": "FAST"}, UnknownOptionError, "FAST"),
    "heads": ({"num_kv_heads": 3}, ConfigError, "num_kv_heads=3"),
    "window": ({"per_layer_sliding_window": 0}, ConfigError, "sliding_window=0"),
    "slopes": ({"alibi_slopes": [1.0]}, ShapeError, "alibi_slopes"),
    "prefix": ({"prefix": 3}, ConfigError, "prefix=3"),
    "no scales": ({"cache_config": vattn.CacheConfig(cache_dtype="fp8")}, ScaleError, "no k_scale"),
    "calculated": (
        {"cache_config": vattn.CacheConfig(cache_dtype="fp8", calculate_kv_scales=True)},
        ScaleError,
        "keeps nothing between steps",
    ),
    "scales for nothing": ({"quant_config": vattn.QuantConfig(k_scale=1.0, v_scale=1.0)}, ScaleError, "k_scale given"),
    "FP8 query": ({"quant_config": vattn.QuantConfig(query_format="fp8_e4m3")}, ScaleError, "no q_scale"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options(name: str) -> None:
    options, error, text = BAD_OPTIONS[name]
    with pytest.raises(error) as caught:
        make_layer(**options)
    assert text in str(caught.value)


def test_bad_calls() -> None:
    layer, step, (query, key, value) = make_layer(prefix="bert.0"), packed_step([3, 2]), random_qkv(5)
    with pytest.raises(ShapeError, match=r"query has shape \(5, 63\)"):
        layer(query.flatten(1)[:, :63], key, value, metadata=step)
    with pytest.raises(ShapeError, match="key has 4 tokens and query 5"):
        layer(query, key[:4], value, metadata=step)
    with pytest.raises(ShapeError, match="value has 4 tokens and query 5"):
        layer(query, key, value[:4], metadata=step)
    with pytest.raises(ShapeError, match="5, the tokens of the metadata"):
        layer(query[:4], key[:4], value[:4], metadata=step)
    with pytest.raises(DtypeError, match=r"float64 in layer 'bert\.0'"):
        layer(query.double(), key.double(), value.double(), metadata=step)
    with pytest.raises(ShapeError, match="key is None"):
        layer(query, None, None, metadata=step)
    with pytest.raises(DtypeError, match="value is bfloat16"):
        layer(query, key, value.bfloat16(), metadata=step)
    with pytest.raises(ShapeError, match="output_shape"):
        layer(query, key, value, (4, 64), metadata=step)
    with pytest.raises(GradientError):
        layer(query.requires_grad_(), key, value, metadata=step)


def test_steps_that_mean_something_else() -> None:
    layer, qkv = make_layer(), random_qkv(5)
    builder = vattn.AttentionMetadataBuilder(4, 8, 32, 16, max_mm_ranges=1, max_trees=1, max_tree_size=2)
    for options, text in (
        ({"causal": [0, 1]}, "causal flags"),
        ({"mm_ranges": [[(0, 2)], []]}, "mm_ranges"),
        ({"tree_bias": torch.zeros(1, 2, 2), "tree_id": [0, -1]}, "tree_bias"),
    ):
        with pytest.raises(MetadataError, match=text):
            layer(*qkv, metadata=builder.build([3, 2], **options))  # type: ignore[arg-type]
    with pytest.raises(MetadataError, match="cached tokens"):
        layer(*qkv, metadata=builder.build([3, 2], [3, 9], [[1], [2]]))
    with pytest.raises(MetadataError, match="cached tokens"):
        layer(*qkv, metadata=builder.build([4, 1], [4, 3], [[1], [2]]))
    starts, slots = torch.tensor([0, 3, 5], dtype=torch.int32), torch.arange(5)
    for lens, right in (([3, 2], True), ([3, 3], False)):  # the longest request says nothing of the others
        lengths, table = torch.tensor(lens, dtype=torch.int32), torch.tensor([[1], [2]], dtype=torch.int32)
        step = builder.build_from_tensors(starts, lengths, table, slots, max_query_len=3, max_seq_len=3)
        if right:
            layer(*qkv, metadata=step)
        else:
            with pytest.raises(MetadataError, match="cached tokens"):
                layer(*qkv, metadata=step)
    # A step with a cache whose requests have cached nothing is a step of whole texts.
    assert layer(*qkv, metadata=builder.build([3, 2], [3, 2], [[1], [2]])).shape == (5, 64)


def test_a_backend_that_cannot_says_so() -> None:
    layer = make_layer(attn_backend="TORCH_SDPA", batch_invariant=True)
    with pytest.raises(UnsupportedRequestError, match="batch_invariant is not implemented"):
        layer(*random_qkv(5), metadata=packed_step([3, 2]))
    with pytest.raises(UnsupportedRequestError, match="batch_invariant"):
        layer.resolve_config(torch.float32, "cpu")


# The module


def test_the_module() -> None:
    layer = make_layer(
        cache_config=vattn.CacheConfig(cache_dtype="fp8", sliding_window=7),
        quant_config=vattn.QuantConfig(0.5, 0.25),
        sinks=nn.Parameter(SINKS.clone()),
        alibi_slopes=SLOPES,
    )
    assert layer.get_kv_cache_spec(torch.float32) is None
    assert repr(layer) == (
        "EncoderOnlyAttention(num_heads=4, num_kv_heads=2, head_size=16, scale=0.25, sliding_window=7, backend=auto)"
    )
    assert layer.resolve_config(torch.bfloat16, "cpu").backend == "TORCH_SDPA"
    state = layer.state_dict()
    assert set(state) == {"k_scale", "v_scale", "sinks"}
    layer.to(torch.bfloat16)
    assert layer.k_scale.dtype == layer.alibi_slopes.dtype == torch.float32
    other = make_layer(
        cache_config=vattn.CacheConfig(cache_dtype="fp8"),
        quant_config=vattn.QuantConfig("unit", "unit"),
        sinks=nn.Parameter(torch.zeros(4)),
    )
    other.load_state_dict(state)
    assert all(torch.equal(other.state_dict()[name], state[name]) for name in state)


def test_slopes_that_are_a_parameter_are_copied_as_fp32() -> None:
    layer = make_layer(alibi_slopes=nn.Parameter(SLOPES.clone())).to(torch.bfloat16)
    assert layer.alibi_slopes.dtype == torch.float32 and not list(layer.parameters())


def test_a_model_without_caches_needs_none_and_a_mixed_one_skips_them() -> None:
    model = nn.ModuleDict({"encoder": make_layer(prefix="e"), "decoder": vattn.Attention(4, 16, 0.25, prefix="d")})
    allocation = vattn.allocate_kv_cache(model, num_blocks=2, dtype=torch.float32)
    assert [layer.name for layer in allocation.layers] == ["d"]


# Compiled


class Block(nn.Module):
    """A layer of an encoder."""

    def __init__(self, index: int, **options: Any) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 128, bias=False)
        self.attn = make_layer(prefix=f"layers.{index}.attn", **options)
        self.out = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.attn(*self.qkv(x).split([64, 32, 32], dim=-1)))


class Encoder(nn.Module):
    """Equal layers, as in `nn.ModuleList` of a model."""

    def __init__(self, num_layers: int, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(i, **options) for i in range(num_layers))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


FLAVOURS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window, alibi, sinks": {"per_layer_sliding_window": 3, "alibi_slopes": SLOPES, "sinks": SINKS},
    "fp8": {"cache_config": vattn.CacheConfig(cache_dtype="fp8"), "quant_config": vattn.QuantConfig("unit", "unit")},
}
TEXTS = ([5, 9], [1, 1], [30, 2, 7], [3, 0, 8, 1, 1], [64])


@pytest.mark.parametrize(("name", "how"), [*((name, "whole") for name in FLAVOURS), ("fp8", "regional")])
def test_one_graph_for_all_lengths(name: str, how: str, fresh_dynamo: None) -> None:
    model, backend = Encoder(2, **FLAVOURS[name]), CountingBackend()
    eager, target = Encoder(2, **FLAVOURS[name]), model
    eager.load_state_dict(model.state_dict())
    if how == "whole":
        target = vattn.compile(model, backend=backend)
    else:
        assert vattn.compile_regions(model, backend=backend) == 2
    for lens in TEXTS:
        x = torch.randn(sum(lens), 64)
        with vattn.forward_context(packed_step(lens)):
            torch.testing.assert_close(target(x), eager(x))
    assert len(backend.graphs) == 1


def test_a_profiling_call_compiles(fresh_dynamo: None) -> None:
    model, backend = Encoder(2), CountingBackend()
    target = vattn.compile(model, backend=backend)
    for tokens in (4, 9):
        with vattn.forward_context(None):
            assert target(torch.randn(tokens, 64)).shape == (tokens, 64)
    assert len(backend.graphs) == 1


def test_compiled_code_refuses_a_short_key(fresh_dynamo: None) -> None:
    """The offsets are the query's: they would reach behind the key."""
    layer = make_layer()
    target = vattn.compile(lambda q, k, v, step: layer(q, k, v, metadata=step), backend="eager")
    query, key, value = random_qkv(14)
    with pytest.raises(Exception, match="key has 9 tokens and query 14"):
        target(query, key[:9], value, packed_step([5, 9]))


def test_inductor_and_export(fresh_dynamo: None) -> None:
    model = Encoder(1, per_layer_sliding_window=4)
    target = vattn.compile(model)
    x, step = torch.randn(14, 64), packed_step([5, 9])
    exported = vattn.export_step(model, (x,), step)
    for lens in ([5, 9], [3, 1, 7]):
        x, step = torch.randn(sum(lens), 64), packed_step(lens)
        with vattn.forward_context(step):
            expected = model(x)
            torch.testing.assert_close(target(x), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(exported.program.module()(*exported.inputs((x,), step)), expected)
