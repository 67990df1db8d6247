"""Causal attention without a cache: the function, and `Attention` layers that are bound to none, against fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import vattn
from tests.compile.test_graph_counts import CountingBackend
from tests.layers.encoder_support import HEADS, KV_HEADS, SIZE, dense, offsets, packed_step, random_qkv
from tests.support import make_config, relative_l2
from vattn.errors import (
    CacheNotBoundError,
    ConfigError,
    DtypeError,
    GradientError,
    MetadataError,
    ScaleError,
    ShapeError,
    UnsupportedRequestError,
)
from vattn.quantization.codecs import decode_kv, decode_query, dequantise_output, encode_kv, encode_query
from vattn.quantization.formats import OUTPUT_FORMATS

SLOPES, SINKS = torch.tensor([0.5, 0.25, 0.125, 0.7]), torch.tensor([0.3, -1.0, 2.0, 0.0])
LENS = [7, 0, 1, 12, 2]

CLOSE = 2e-5
"""Relative L2 in fp32: sums in another order. A row that sees the one after it gives 1e-1."""

# Options of a layer, changes of a config, and what they mean.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "window": ({"per_layer_sliding_window": 3}, {"sliding_window": 3}, {"window": 3}),
    "soft cap": ({"logits_soft_cap": 0.7}, {"logits_soft_cap": 0.7}, {"soft_cap": 0.7}),
    "alibi": ({"alibi_slopes": SLOPES}, {"alibi": "linear"}, {"slopes": SLOPES}),
    "sinks": ({"sinks": SINKS}, {"sinks": True}, {"sinks": SINKS}),
    "everything": (
        {"per_layer_sliding_window": 4, "logits_soft_cap": 1.5, "alibi_slopes": SLOPES, "sinks": SINKS},
        {"sliding_window": 4, "logits_soft_cap": 1.5, "alibi": "linear", "sinks": True},
        {"window": 4, "soft_cap": 1.5, "slopes": SLOPES, "sinks": SINKS},
    ),
}
CASES = [*(("TORCH_SDPA", name) for name in OPTIONS), ("TRITON_ATTN", "plain"), ("TRITON_ATTN", "everything")]


def packed_config(**changes: Any) -> vattn.AttentionConfig:
    sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": SIZE, "head_size_v": SIZE, "scale": 0.25}
    return make_config(**{**sizes, "dtype": "float32", "kv_cache_dtype": "float32", "block_size": 0, **changes})


def make_layer(**options: Any) -> vattn.Attention:
    arguments = {"num_heads": HEADS, "head_size": SIZE, "scale": 0.25, "num_kv_heads": KV_HEADS, "prefix": "a.0"}
    return vattn.Attention(**{**arguments, **options})


# The function


@pytest.mark.parametrize(("backend", "name"), CASES)
def test_the_function_equals_causal_attention(backend: str, name: str) -> None:
    _, changes, meaning = OPTIONS[name]
    query, key, value = random_qkv(25, real=22)
    given_tensors = {
        "alibi_slopes": SLOPES if "alibi" in changes else None,
        "sinks": SINKS if "sinks" in changes else None,
    }
    found = vattn.varlen_attention(
        query, key, value, offsets(LENS), packed_config(backend=backend, **changes), **given_tensors
    )
    assert relative_l2(found.output, dense(query, key, value, LENS, causal=True, scale=0.25, **meaning)) < CLOSE
    assert not found.output[22:].any() and found.lse is None


@settings(max_examples=40)
@given(
    lens=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=6),
    padding=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    wide=st.booleans(),
)
def test_queries_are_the_last_positions_of_their_keys(
    lens: list[tuple[int, int]], padding: tuple[int, int], wide: bool
) -> None:
    """A chunk of a prompt over all keys so far, and its log-sum-exp; offsets of either width."""
    lengths, key_lengths = [n for n, _ in lens], [n + more for n, more in lens]
    (query, _, _), (_, key, value) = (
        random_qkv(sum(part) + extra, real=sum(part), seed=extra)
        for part, extra in zip((lengths, key_lengths), padding, strict=True)
    )
    starts = offsets(lengths).to(torch.int64 if wide else torch.int32)
    found = vattn.varlen_attention(
        query, key, value, starts, packed_config(lse=True), kv_start_loc=offsets(key_lengths)
    )
    real = sum(lengths)
    assert relative_l2(found.output, dense(query, key, value, lengths, key_lengths, causal=True, scale=0.25)) < CLOSE
    # Values of one make the output 1; with a zero beside them, only the log-sum-exp tells the size of a denominator.
    assert found.lse is not None and bool(found.lse[:real].isfinite().all())
    assert bool((found.lse[real:] == -torch.inf).all())


ROWS = torch.zeros(5, 4, 16)
KEYS = torch.zeros(5, 2, 16)
BAD_CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a cache": ({"config": packed_config(block_size=16)}, ConfigError, "block_size=16"),
    "no config": ({"config": "causal"}, ConfigError, "config='causal'"),
    "no tensor": ({"query_start_loc": [0, 5]}, ConfigError, r"query_start_loc=\[0, 5\]"),
    "two dimensions": ({"query": ROWS.flatten(1)}, ShapeError, r"query has shape \(5, 64\)"),
    "offsets in floats": ({"query_start_loc": torch.tensor([0.0, 5.0])}, DtypeError, "query_start_loc"),
    "offsets that fall": ({"query_start_loc": offsets([4, -1])}, MetadataError, "query_start_loc falls from 4 to 3"),
    "offsets behind the end": ({"kv_start_loc": offsets([6])}, MetadataError, "kv_start_loc ends at 6 for 5"),
    "offsets of fewer": ({"kv_start_loc": offsets([2, 3])}, ShapeError, "query_start_loc"),
    "key dtype": ({"key": KEYS.half()}, DtypeError, "key"),
    "no slopes": ({"config": packed_config(alibi="linear")}, ConfigError, "alibi_slopes is missing"),
    "a gradient": ({"query": ROWS.clone().requires_grad_()}, GradientError, "gradient"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_of_the_function(name: str) -> None:
    changes, error, text = BAD_CALLS[name]
    arguments = {"query": ROWS, "key": KEYS, "value": KEYS, "query_start_loc": offsets([5]), "config": packed_config()}
    with pytest.raises(error, match=text):
        vattn.varlen_attention(**{**arguments, **changes})


def test_the_function_compiles_into_one_graph(fresh_dynamo: None) -> None:
    config, backend = packed_config(sliding_window=3), CountingBackend()
    target = vattn.compile(
        lambda q, k, v, starts: vattn.varlen_attention(q, k, v, starts, config).output, backend=backend
    )
    for lens in ([5, 9], [3, 3, 3, 20], [17, 2]):
        query, key, value = (t.contiguous() for t in random_qkv(sum(lens)))
        for tensor in (query, key, value):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        expected = dense(query, key, value, lens, causal=True, scale=0.25, window=3)
        assert relative_l2(target(query, key, value, offsets(lens)), expected) < CLOSE
    assert len(backend.graphs) == 1


# The layer


@pytest.mark.parametrize(("backend", "name"), CASES)
def test_a_layer_without_a_cache_equals_causal_attention(backend: str, name: str) -> None:
    options, _, meaning = OPTIONS[name]
    layer, (query, key, value) = make_layer(attn_backend=backend, **options), random_qkv(25, real=22)
    out = layer(query, key, value, metadata=packed_step(LENS, num_tokens_padded=25, num_reqs_padded=7))
    expected = dense(query, key, value, LENS, causal=True, scale=0.25, **meaning).flatten(1)
    assert relative_l2(out, expected) < CLOSE and not out[22:].any()


@pytest.mark.parametrize("exact", [False, True], ids=["rounded", "exact prefill"])
def test_results_are_those_of_the_layer_with_a_cache(exact: bool) -> None:
    """FP8 keys are rounded as a cache would, unless the layer sees its step as given."""
    cache = vattn.CacheConfig(16, "fp8", exact_prefill=exact)
    quant = vattn.QuantConfig([0.011, 0.023], [0.013, 0.017], query_format="fp8_e4m3", q_scale=0.02)
    bound, free = (make_layer(cache_config=cache, quant_config=quant, sinks=SINKS) for _ in range(2))
    vattn.allocate_kv_cache(bound, num_blocks=8, dtype=torch.float32)
    query, key, value = random_qkv(13)
    with_cache = vattn.AttentionMetadataBuilder(4, 32, 64, layers=bound).build([9, 4], [9, 4], [[1], [2]])
    out = free(query, key, value, metadata=packed_step([9, 4]))
    assert relative_l2(out, bound(query, key, value, metadata=with_cache)) < CLOSE
    q = decode_query(encode_query(query, free.q_scale, KV_HEADS), free.q_scale, KV_HEADS)
    if not exact:
        key, value = (
            decode_kv(encode_kv(t, "fp8_e4m3", s), "fp8_e4m3", s)
            for t, s in ((key, free.k_scale), (value, free.v_scale))
        )
    expected = dense(q, key, value, [9, 4], causal=True, scale=0.25, sinks=SINKS)
    assert relative_l2(out, expected.flatten(1)) < CLOSE


@pytest.mark.parametrize("name", ["fp8_static", "fp8_per_token", "nvfp4"])
def test_quantised_outputs(name: str) -> None:
    fmt = OUTPUT_FORMATS[name]
    quant = vattn.QuantConfig(output_format=name, output_scale=0.01 if fmt.static_scale else None)
    layer, plain = make_layer(quant_config=quant), make_layer()
    step, qkv = packed_step([9, 4], num_tokens_padded=15), random_qkv(15, real=13)
    result = layer(*qkv, metadata=step)
    codes, scales = result if isinstance(result, tuple) else (result, None)
    got = dequantise_output(codes.view(15, HEADS, -1), fmt, scales, layer.output_scale)
    bits = 1 if fmt.container is torch.uint8 else 3
    assert relative_l2(got, plain(*qkv, metadata=step).view(15, HEADS, SIZE)) < 2.0 ** -(bits + 1)


class Embedder(nn.Module):
    """Equal causal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(48, 3 * 48) for _ in range(2))
        self.layers = nn.ModuleList(
            vattn.Attention(2, 24, 0.2, prefix=f"layers.{i}.attn", per_layer_sliding_window=5) for i in range(2)
        )
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for projection, layer in zip(self.projections, self.layers, strict=True):
            x = x + layer(*projection(x).chunk(3, dim=-1))
        return x


def test_a_model_without_caches_compiles_into_one_graph(fresh_dynamo: None) -> None:
    """The same model decodes with caches afterwards."""
    model, backend = Embedder(), CountingBackend()
    target = vattn.compile(model, backend=backend)
    for lens in ([5, 9], [3, 3, 3, 20], [17, 2]):
        x = torch.randn(sum(lens), 48)
        with vattn.forward_context(packed_step(lens)):
            torch._dynamo.maybe_mark_dynamic(x, 0)
            torch.testing.assert_close(target(x), model(x))
    assert len(backend.graphs) == 1
    x, expected = torch.randn(7, 48), None
    with vattn.forward_context(packed_step([4, 3])):
        expected = model(x)
    vattn.allocate_kv_cache(model, num_blocks=4, dtype=torch.float32)
    step = vattn.AttentionMetadataBuilder(4, 32, 64, layers=model).build([4, 3], [4, 3], [[1], [2]])
    with vattn.forward_context(step):
        torch.testing.assert_close(target(x), expected)


TABLES = {"seq_lens": [5], "block_tables": [[1]]}
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a step with tables": (
        lambda: make_layer()(ROWS, KEYS, KEYS, metadata=vattn.AttentionMetadataBuilder(2, 8, 16).build([5], **TABLES)),
        CacheNotBoundError,
        "'a.0' has no KV cache",
    ),
    "a shared cache": (
        lambda: make_layer(kv_sharing_target_layer_name="b")(ROWS, None, None, metadata=packed_step([5])),
        CacheNotBoundError,
        "'a.0' has no KV cache",
    ),
    "sinks in front": (
        lambda: vattn.StaticSinkAttention(4, 16, 0.25, 16, num_kv_heads=2, prefix="a.0")(
            ROWS, KEYS, KEYS, metadata=packed_step([5])
        ),
        CacheNotBoundError,
        "'a.0' has no KV cache",
    ),
    "rows": (lambda: make_layer()(ROWS, KEYS, KEYS, metadata=packed_step([4])), ShapeError, "query has 5 tokens"),
    "fewer keys": (
        lambda: make_layer()(ROWS, KEYS[:4], KEYS, metadata=packed_step([5])),
        ShapeError,
        "key has 4 tokens and query 5 in layer 'a.0'",
    ),
    "dtype": (
        lambda: make_layer()(ROWS.double(), KEYS.double(), KEYS.double(), metadata=packed_step([5])),
        DtypeError,
        "query is float64 in layer 'a.0'",
    ),
    "mixed dtypes": (
        lambda: make_layer()(ROWS, KEYS.half(), KEYS, metadata=packed_step([5])),
        DtypeError,
        "key is float16 in layer 'a.0'",
    ),
    "flags": (
        lambda: make_layer()(
            ROWS, KEYS, KEYS, metadata=vattn.AttentionMetadataBuilder(2, 8, 16).build([5], causal=[False])
        ),
        MetadataError,
        "a mask of its own in layer 'a.0'",
    ),
    "both ways": (
        lambda: make_layer()(
            ROWS, KEYS, KEYS, metadata=vattn.AttentionMetadataBuilder(2, 8, 16).build([5], causal=False)
        ),
        MetadataError,
        "a mask of its own in layer 'a.0'",
    ),
    "scales to calculate": (
        lambda: make_layer(cache_config=vattn.CacheConfig(cache_dtype="fp8", calculate_kv_scales=True))(
            ROWS, KEYS, KEYS, metadata=packed_step([5])
        ),
        ScaleError,
        "'a.0' calculates its scales and has no KV cache",
    ),
    "a packed format": (
        lambda: make_layer(
            cache_config=vattn.CacheConfig(cache_dtype="int8_per_token_head"),
            quant_config=vattn.QuantConfig(k_scale="unit", v_scale="unit"),
        )(ROWS, KEYS, KEYS, metadata=packed_step([5])),
        UnsupportedRequestError,
        "int8_per_token_head",
    ),
    "a backend with caches alone": (
        lambda: make_layer(attn_backend="XFORMERS")(ROWS, KEYS, KEYS, metadata=packed_step([5])),
        UnsupportedRequestError,
        "XFORMERS",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_of_the_layer(name: str) -> None:
    call, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        call()


def test_a_bound_layer_refuses_a_step_without_tables() -> None:
    """Else a step whose tables were forgotten would leave the cache without its tokens."""
    layer = make_layer()
    vattn.allocate_kv_cache(layer, num_blocks=4, dtype=torch.float32)
    with pytest.raises(MetadataError, match=r"metadata without block tables in layer 'a\.0'"):
        layer(ROWS, KEYS, KEYS, metadata=packed_step([5]))
