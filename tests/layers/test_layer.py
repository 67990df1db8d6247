"""The `Attention` layer: inputs, metadata, choices, sharing, refusals. Scales are in test_layer_scales.py."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import vattn
from tests.layers.layer_support import (
    BLOCK,
    CLOSE,
    HEADS,
    KV_HEADS,
    NUM_BLOCKS,
    SIZE,
    UNIT,
    bind,
    dense_causal,
    dequantised,
    expected,
    make_inputs,
    make_layer,
    make_step,
)
from tests.support import unchanged
from vattn.cache.specs import FullAttentionSpec, SlidingWindowSpec
from vattn.errors import (
    CacheError,
    CacheNotBoundError,
    ConfigError,
    DeviceError,
    DtypeError,
    GradientError,
    MetadataError,
    ScaleError,
    ShapeError,
    StrideError,
    UnknownOptionError,
    UnsupportedRequestError,
    VattnError,
)
from vattn.quantization.formats import MODEL_DTYPES, OUTPUT_FORMATS


def assert_runs(layer, step, *, tokens=5, real=None, changes=None, **tolerance):
    """Run a step and compare it with the reference over the cache that it wrote."""
    query, key, value = make_inputs(tokens, real=real, value_size=layer.head_size_v)
    out = dequantised(layer, layer(query, key, value, metadata=step))
    assert out.isfinite().all()
    torch.testing.assert_close(out, expected(layer, query, step, **(changes or {})), **(tolerance or CLOSE))
    if real is not None:
        assert not out[real:].any()
    return out


def test_prefill_equals_dense_attention():
    layer, (query, key, value) = make_layer(), make_inputs(5)
    out = layer(query, key, value, metadata=make_step([3, 2]))
    assert out.shape == (5, HEADS * SIZE)
    torch.testing.assert_close(out.view(5, HEADS, SIZE), dense_causal(query, key, value, [3, 2]), **CLOSE)


def test_decode_sees_what_earlier_steps_wrote():
    layer, (query, key, value) = make_layer(), make_inputs(13, seed=3)
    whole = dense_causal(query, key, value, [13])
    outs = []
    for first, last in ((0, 7), (7, 12), (12, 13)):
        step = make_step([last - first], [last], [[4, 2]])
        outs.append(layer(query[first:last], key[first:last], value[first:last], metadata=step))
    torch.testing.assert_close(torch.cat(outs).view(13, HEADS, SIZE), whole, **CLOSE)


def test_padding_rows_are_zero_and_never_read():
    step = make_step([3, 2], num_reqs_padded=3, num_tokens_padded=9)
    assert_runs(make_layer(), step, tokens=9, real=5)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("shape", [None, (5, HEADS * SIZE), (5, HEADS, SIZE), (1, 5, HEADS * SIZE)], ids=str)
def test_input_and_output_shapes(dims, shape):
    query, key, value = make_inputs(5)
    plain = make_layer()(query, key, value, metadata=make_step())
    if dims == 3:
        query, key, value = (t.unflatten(1, (-1, SIZE)) for t in (query, key, value))
    out = make_layer()(query, key, value, shape, metadata=make_step())
    assert out.shape == torch.Size(shape or (5, HEADS * SIZE))
    assert torch.equal(out.flatten(), plain.flatten())


def test_unequal_head_sizes():
    layer = make_layer(head_size_v=24)
    out = assert_runs(layer, make_step())
    assert out.shape == (5, HEADS, 24)


@pytest.mark.parametrize("shape", [(5, 63), (4, HEADS * SIZE), (-1, HEADS * SIZE), ()], ids=str)
@pytest.mark.parametrize("profiling", [False, True])
def test_wrong_output_shape_is_refused_before_anything_is_written(shape, profiling):
    layer = make_layer()
    with unchanged(layer), pytest.raises(ShapeError, match="output_shape"):
        layer(*make_inputs(5), shape, metadata=None if profiling else make_step())


# Profiling and binding


@pytest.mark.parametrize("bound", [False, True])
def test_a_profiling_call_returns_zeros_and_touches_nothing(bound):
    layer = make_layer(bound=bound)
    with unchanged(layer), vattn.forward_context(None):
        out = layer(*make_inputs(4, real=0))
    assert out.shape == (4, HEADS * SIZE)
    assert not out.any()


@pytest.mark.parametrize("bound", [False, True], ids=["never bound", "taken away"])
def test_metadata_without_a_cache_is_an_error(bound):
    layer = make_layer(bound=bound, prefix="model.layers.0.attn")
    layer.kv_cache = None
    with pytest.raises(CacheNotBoundError, match=r"'model\.layers\.0\.attn' has no KV cache"):
        layer(*make_inputs(5), metadata=make_step())


def test_moving_to_another_device_drops_the_cache():
    layer = make_layer()
    layer.to("meta")
    assert layer.kv_cache is None
    assert "backend=none yet" in repr(layer)


@pytest.mark.parametrize(
    "storage",
    [
        torch.zeros(2, NUM_BLOCKS, BLOCK, KV_HEADS, SIZE + 8),
        torch.zeros(2, NUM_BLOCKS, BLOCK, KV_HEADS, SIZE, dtype=torch.float16),
        torch.zeros(NUM_BLOCKS, 2, BLOCK, KV_HEADS, SIZE).transpose(0, 1),
        torch.zeros(NUM_BLOCKS, BLOCK),
        torch.zeros(7),
    ],
    ids=["head size", "dtype", "strides", "two dimensions", "one dimension"],
)
def test_a_storage_that_does_not_fit_is_refused(storage):
    layer = make_layer(bound=False)
    with pytest.raises(CacheError, match="KV cache storage"):
        layer.bind_kv_cache(storage, dtype=torch.float32)
    assert layer.kv_cache is None
    assert layer.config is None


def test_kv_cache_specs():
    assert isinstance(make_layer(bound=False).get_kv_cache_spec(torch.float16), FullAttentionSpec)
    windowed = make_layer(bound=False, per_layer_sliding_window=12).get_kv_cache_spec(torch.float16)
    assert isinstance(windowed, SlidingWindowSpec)
    assert windowed.sliding_window == 12
    # A range may reach keys that the window has left behind.
    ranges = make_layer(bound=False, per_layer_sliding_window=12, mm_prefix="full")
    assert isinstance(ranges.get_kv_cache_spec(torch.float16), FullAttentionSpec)
    shared = make_layer(bound=False, prefix="1", kv_sharing_target_layer_name="0")
    assert shared.get_kv_cache_spec(torch.float16) is None


# Where metadata comes from


@pytest.mark.parametrize("wrong", [3, [], {"seq_lens": 1}])
def test_what_is_no_metadata_is_refused(wrong):
    layer = make_layer()
    with pytest.raises(MetadataError, match="metadata of type"), vattn.forward_context(wrong):
        pass
    with pytest.raises(MetadataError, match="metadata of type"):
        layer(*make_inputs(8), metadata=wrong)


def test_metadata_by_position_is_refused():
    layer = make_layer()
    with pytest.raises(ShapeError, match="metadata in the place of output_shape"):
        layer(*make_inputs(8), make_step())


def test_masks_of_the_layer_reach_the_op():
    slopes = [0.5, 0.25, 0.125, 0.1]
    for options in (
        {"per_layer_sliding_window": 4},
        {"cache": {"sliding_window": 4}},
        {"per_layer_sliding_window": 8, "chunk_lookback": 1},
        {"logits_soft_cap": 0.7},
        {"alibi_slopes": slopes},
        {"alibi_slopes": torch.tensor(slopes), "use_alibi_sqrt": True},
        {"sinks": torch.tensor([0.1, 2.0, -1.0, 0.0])},
        {"sinks": nn.Parameter(torch.tensor([0.1, 2.0, -1.0, 0.0]), requires_grad=False)},
        {"cache": {"kv_cache_layout": "HND"}},
    ):
        out = assert_runs(make_layer(**options), make_step([11, 9]), tokens=20)
        if options != {"cache": {"kv_cache_layout": "HND"}}:
            plain = make_layer()(*make_inputs(20), metadata=make_step([11, 9]))
            assert not torch.allclose(out.flatten(1), plain, rtol=1e-3, atol=1e-3)


def test_the_layers_own_window_wins_over_the_models():
    layer = make_layer(per_layer_sliding_window=3, cache={"sliding_window": 20})
    assert layer.config.sliding_window == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_queries_that_no_cache_is_for_are_told_what_one_can_be(dtype):
    with pytest.raises(
        DtypeError, match=r"Try: pass queries of torch\.float32.*for float16, bfloat16, float32"
    ) as told:
        make_layer()(*(each.to(dtype) for each in make_inputs(20)), metadata=make_step([11, 9]))
    assert str(dtype) not in str(told.value)


BAD_OPTIONS = {
    "unknown backend": ({"attn_backend": "FAST"}, UnknownOptionError, "FAST"),
    "unknown type": ({"attn_type": "prefix"}, ConfigError, "attn_type='prefix'"),
    "encoder": ({"attn_type": "encoder_only"}, UnsupportedRequestError, "use vattn.EncoderOnlyAttention"),
    "heads do not divide": ({"num_kv_heads": 3}, ConfigError, "num_kv_heads=3"),
    "no heads": ({"num_heads": 0, "num_kv_heads": 1}, ConfigError, "num_heads=0"),
    "no KV heads": ({"num_kv_heads": 0}, ConfigError, "num_kv_heads=0"),
    "no scale": ({"scale": None}, ConfigError, "scale=None"),
    "scale is NaN": ({"scale": float("nan")}, ConfigError, "scale=nan"),
    "soft cap": ({"logits_soft_cap": -1.0}, ConfigError, "logits_soft_cap=-1.0"),
    "soft cap is text": ({"logits_soft_cap": "30"}, ConfigError, "logits_soft_cap='30'"),
    "window": ({"per_layer_sliding_window": 0}, ConfigError, "sliding_window=0"),
    "lookback without window": ({"chunk_lookback": 1}, ConfigError, "chunk_lookback=1"),
    "negative lookback": ({"chunk_lookback": -2, "per_layer_sliding_window": 8}, ConfigError, "chunk_lookback=-2"),
    "sqrt without slopes": ({"use_alibi_sqrt": True}, ConfigError, "use_alibi_sqrt"),
    "too few slopes": ({"alibi_slopes": [1.0, 2.0]}, ShapeError, "alibi_slopes"),
    "slopes of a text": ({"alibi_slopes": "abcd"}, ConfigError, "'abcd' instead of numbers"),
    "sinks of a text": ({"sinks": "abcd"}, ConfigError, "'abcd' instead of numbers"),
    "too few sinks": ({"sinks": torch.zeros(2)}, ShapeError, "sinks"),
    "sinks of two dimensions": ({"sinks": torch.zeros(4, 1)}, ShapeError, "sinks"),
    "ranges": ({"mm_prefix": "some"}, ConfigError, "mm_prefix='some'"),
    "flag": ({"batch_invariant": "yes"}, ConfigError, "batch_invariant='yes'"),
    "shares with itself": ({"prefix": "a", "kv_sharing_target_layer_name": "a"}, ConfigError, "itself"),
    "cache dtype": ({"cache": {"cache_dtype": "int4"}}, ConfigError, "int4"),
    "switch": ({"cache": {"exact_prefill": "False"}}, ConfigError, "exact_prefill='False'"),
}


@pytest.mark.parametrize(("options", "error", "named"), BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
def test_bad_options_are_refused_at_construction(options, error, named):
    with pytest.raises(error) as caught:
        make_layer(bound=False, **options)
    assert named in str(caught.value)
    assert caught.value.allowed


def test_an_explicit_backend_never_falls_back():
    wide = {"head_size": 1024, "num_heads": 1, "num_kv_heads": 1}
    assert make_layer(**wide).config.backend == "TORCH_SDPA"
    layer = make_layer(bound=False, attn_backend="TRITON_ATTN", **wide)
    with pytest.raises(UnsupportedRequestError, match="backend TRITON_ATTN cannot run"):
        bind(layer)
    assert layer.kv_cache is None
    with pytest.raises(UnsupportedRequestError, match="batch_invariant is not implemented"):
        make_layer(batch_invariant=True, attn_backend="TORCH_SDPA")


def test_repr_shows_the_request_and_the_backend():
    assert "backend=none yet" in repr(make_layer(bound=False))
    text = repr(make_layer(head_size_v=24, attn_backend="TORCH_SDPA", quant_config=UNIT, cache={"cache_dtype": "fp8"}))
    for part in ("num_heads=4", "num_kv_heads=2", "head_size_v=24", "scale=0.25", "kv_cache=fp8_e4m3", "block_size=8"):
        assert part in text
    assert "backend=TORCH_SDPA (requested)" in text


@pytest.mark.filterwarnings("ignore:kv_cache_dtype_skip_layers")  # each layer is a model
def test_skipped_layers_keep_the_model_dtype():
    cache = {"cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ("1", "sliding_window")}
    layers = {
        "model.layers.0.attn": {},
        "model.layers.1.attn": {},
        "model.layers.11.attn": {},
        "model.layers.2.attn": {"per_layer_sliding_window": 4},
    }
    found = {
        prefix: make_layer(prefix=prefix, cache=cache, quant_config=UNIT, **options).config.kv_cache_dtype
        for prefix, options in layers.items()
    }
    assert list(found.values()) == ["fp8_e4m3", "float32", "fp8_e4m3", "float32"]


# What metadata asks of a layer


def tree(size, seed=0):
    bias = torch.randn(2, size, size, generator=torch.Generator().manual_seed(seed))
    return bias.masked_fill(torch.ones(size, size).triu(1).bool(), -torch.inf)


STEPS = {
    "bidirectional": ({"causal": False}, {}),
    "flags": ({"causal": [1, 0]}, {}),
    "tree": ({"tree_bias": tree(3), "tree_id": [1, -1]}, {"tree_bias": True}),
    "ranges": ({"mm_ranges": [[(1, 2)], []]}, {"mm_prefix": "full"}),
    "flags and ranges": ({"causal": [1, 0], "mm_ranges": [[(0, 2)], []]}, {"mm_prefix": "full"}),
    "tree and ranges": (
        {"tree_bias": tree(3), "tree_id": [0, -1], "mm_ranges": [[], [(0, 1)]]},
        {"tree_bias": True, "mm_prefix": "full"},
    ),
}


@pytest.mark.parametrize(("asked", "changes"), STEPS.values(), ids=STEPS.keys())
def test_metadata_changes_the_mask_of_a_step(asked, changes):
    out = assert_runs(make_layer(), make_step(**asked), changes=changes)
    plain = make_layer()(*make_inputs(5), metadata=make_step())
    assert not torch.allclose(out.flatten(1), plain, rtol=1e-3, atol=1e-3)


def test_clamped_ranges_are_the_layers_choice():
    step = make_step([9], mm_ranges=[[(0, 8)]])
    clamped = assert_runs(make_layer(mm_prefix="clamped", per_layer_sliding_window=3), step, tokens=9)
    whole = assert_runs(make_layer(per_layer_sliding_window=3), step, tokens=9, changes={"mm_prefix": "full"})
    assert not torch.allclose(clamped, whole, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["bidirectional", "flags", "tree"])
def test_a_step_that_contradicts_the_layer_is_refused_before_anything_is_written(name):
    """The square root of ALiBi is causal, and a tree needs causal rows."""
    layer = make_layer(alibi_slopes=[1.0] * HEADS, use_alibi_sqrt=True)
    asked = {**STEPS[name][0], **({"causal": False} if name == "tree" else {})}
    with unchanged(layer), pytest.raises(UnsupportedRequestError, match="cannot run this step"):
        layer(*make_inputs(5), metadata=make_step(**asked))


# Quantised queries and outputs


@pytest.mark.parametrize("name", OUTPUT_FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_output_formats(name, dtype):
    fmt = OUTPUT_FORMATS[name]
    quant = vattn.QuantConfig(output_format=name, output_scale=0.01 if fmt.static_scale else None)
    layer = make_layer(num_heads=8, num_kv_heads=2, quant_config=quant, dtype=MODEL_DTYPES[dtype])
    plain = make_layer(num_heads=8, num_kv_heads=2, dtype=MODEL_DTYPES[dtype])
    inputs = torch.randn(5, 8 * SIZE).to(MODEL_DTYPES[dtype]), *make_inputs(5, dtype=MODEL_DTYPES[dtype])[1:]
    result, exact = layer(*inputs, metadata=make_step()), plain(*inputs, metadata=make_step())
    assert isinstance(result, tuple) == (fmt.block_scale_dtype is not None)
    codes = result[0] if isinstance(result, tuple) else result
    assert codes.dtype == (fmt.container or MODEL_DTYPES[dtype])
    for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (layer(*inputs), result)), strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), "a profiling call"
        assert not a.float().any()
    # e4m3 keeps 4 significant bits, e2m1 2 at best, int8 7: half a step, relative to the row's largest value.
    tolerance = {None: 0.0, torch.float8_e4m3fn: 0.07, torch.uint8: 0.3, torch.int8: 0.004}[fmt.container]
    if fmt.exponents == "floor":
        tolerance = 0.125  # maxima up to 512 powers are limited to 448
    error = (dequantised(layer, result).flatten(1) - exact.float()).abs()
    assert (error <= tolerance * exact.float().abs().amax(1, keepdim=True) + 1e-6).all()


@pytest.mark.parametrize("q_scale", [0.02, [0.02, 0.05], "unit"], ids=str)
def test_fp8_query(q_scale):
    layer = make_layer(quant_config=vattn.QuantConfig(query_format="fp8_e4m3", q_scale=q_scale))
    assert layer.config.query_scale == ("head" if isinstance(q_scale, list) else "tensor")
    assert_runs(layer, make_step([3, 2], num_tokens_padded=7), tokens=7, real=5)


BAD_QUANT = {
    "no output scale": ({"output_format": "fp8_static"}, ScaleError),
    "output scale for nothing": ({"output_scale": 1.0}, ScaleError),
    "output scale for dynamic scales": ({"output_format": "fp8_per_token", "output_scale": 1.0}, ScaleError),
    "two output scales": ({"output_format": "fp8_static", "output_scale": [1.0, 2.0]}, ScaleError),
    "query scale for nothing": ({"q_scale": 1.0}, ScaleError),
    "no query scale": ({"query_format": "fp8_e4m3"}, ScaleError),
    "three query scales": ({"query_format": "fp8_e4m3", "q_scale": [1.0, 1.0, 1.0]}, ScaleError),
    "unknown output format": ({"output_format": "fp8"}, ConfigError),
    "unknown query format": ({"query_format": "int8"}, ConfigError),
    "group of 64 and rows of 96": ({"output_format": "fp8_group128"}, ConfigError),
}


@pytest.mark.parametrize(("values", "error"), BAD_QUANT.values(), ids=BAD_QUANT.keys())
def test_bad_quantisation_is_refused_at_construction(values, error):
    with pytest.raises(error):
        make_layer(bound=False, quant_config=vattn.QuantConfig(**values))


# Sharing a cache


def sharing_model(**options):
    """Two layers; the second reads the first one's cache."""
    first = make_layer(bound=False, prefix="layers.0")
    second = make_layer(bound=False, prefix="layers.1", kv_sharing_target_layer_name="layers.0", **options)
    return nn.ModuleList([first, second])


@pytest.mark.parametrize(("key", "value"), [(True, True), (True, False), (False, True)], ids=["both", "key", "value"])
def test_a_sharing_layer_takes_no_key_or_value(key, value):
    model, inputs = bind(sharing_model()), make_inputs(5)
    with pytest.raises(ShapeError, match="neither for one that shares a cache"):
        model[1](inputs[0], inputs[1] if key else None, inputs[2] if value else None, metadata=make_step())


def test_causal_that_is_no_flag_is_refused():
    """A list is true whatever it holds."""
    step = dataclasses.replace(make_step(), causal=[1, 0])
    with pytest.raises(MetadataError, match=r"metadata.causal=\[1, 0\]"):
        make_layer()(*make_inputs(5), metadata=step)


def test_metadata_of_another_block_size_is_refused():
    layer = make_layer()
    builder = vattn.AttentionMetadataBuilder(max_num_reqs=2, max_num_tokens=8, max_seq_len=32, block_size=2 * BLOCK)
    step = builder.build(query_lens=[3, 2], seq_lens=[3, 2], block_tables=[[1], [2]])
    with (
        unchanged(layer),
        pytest.raises(MetadataError, match=f"blocks of {2 * BLOCK} tokens.*Allowed: blocks of {BLOCK}"),
    ):
        layer(*make_inputs(5), metadata=step)


@pytest.mark.parametrize("missing", [(1,), (2,), (1, 2)], ids=["key", "value", "both"])
def test_a_layer_with_a_cache_needs_key_and_value(missing):
    layer = make_layer()
    inputs = make_inputs(5)
    with unchanged(layer), pytest.raises(ShapeError, match="both for a layer with its own cache"):
        layer(*(None if i in missing else t for i, t in enumerate(inputs)), metadata=make_step())


GEOMETRIES = {
    "num_kv_heads": {"num_kv_heads": 4},
    "head_size": {"head_size": 24, "head_size_v": 16},
    "head_size_v": {"head_size_v": 24},
    "kv_cache_dtype": {"cache": {"cache_dtype": "float16"}},
    "block_size": {"cache": {"block_size": 16}},
    "kv_cache_layout": {"cache": {"kv_cache_layout": "HND"}},
}


@pytest.mark.parametrize(("field", "options"), GEOMETRIES.items(), ids=GEOMETRIES.keys())
def test_sharing_needs_equal_geometry(field, options):
    model = sharing_model(**options)
    with pytest.raises(CacheError, match=f"has {field} "):
        bind(model)
    assert model[0].kv_cache is None and model[1].kv_cache is None


def test_binding_a_sharing_layer_by_hand():
    first, second = sharing_model()
    bind(first)
    with pytest.raises(CacheError, match="without a target"):
        second.bind_kv_cache(first.kv_cache, dtype=torch.float32)
    with pytest.raises(CacheError, match="not bound to this storage"):
        second.bind_kv_cache(first.kv_cache.clone(), dtype=torch.float32, target=first)
    with pytest.raises(CacheError, match="with a target"):
        first.bind_kv_cache(first.kv_cache, dtype=torch.float32, target=first)
    with pytest.raises(CacheError, match=r"of float32.*of float16"):
        second.bind_kv_cache(first.kv_cache, dtype=torch.float16, target=first)
    second.bind_kv_cache(first.kv_cache, dtype=torch.float32, target=first)
    assert second.kv_cache is first.kv_cache


# Refused steps


def wrong_inputs():
    """Name -> (change of the inputs, error)."""
    query, key, value = make_inputs(5)
    return {
        "query width": ((query[:, :-1], key, value), ShapeError),
        "key width": ((query, key[:, :-1], value), ShapeError),
        "value width": ((query, key, value[:, :-1]), ShapeError),
        "query of four dimensions": ((query[None, None], key, value), ShapeError),
        "fewer keys": ((query, key[:3], value[:3]), ShapeError),
        "fewer values": ((query, key, value[:3]), ShapeError),
        "fewer queries": ((query[:3], key, value), ShapeError),
        "fewer tokens than slots": ((query[:4], key[:4], value[:4]), ShapeError),
        "query dtype": ((query.half(), key, value), DtypeError),
        "key dtype": ((query, key.half(), value), DtypeError),
        "value dtype": ((query, key, value.double()), DtypeError),
        "key device": ((query, key.to("meta"), value), DeviceError),
        "query device": ((query.to("meta"), key, value), DeviceError),
        "gradient of the query": ((query.clone().requires_grad_(), key, value), GradientError),
        "gradient of the key": ((query, key.clone().requires_grad_(), value), GradientError),
    }


def wrong_steps():
    """Name -> changes of the metadata."""
    step = make_step(tree_bias=tree(3), tree_id=[1, -1], mm_ranges=[[(1, 2)], []], causal=[1, 0])
    return {
        "table of one dimension": {"block_table": step.block_table[0]},
        "table of one request": {"block_table": step.block_table[:1]},
        "table dtype": {"block_table": step.block_table.float()},
        "slots dtype": {"slot_mapping": step.slot_mapping.float()},
        "too few slots": {"slot_mapping": step.slot_mapping[:4]},
        "lengths dtype": {"seq_lens": step.seq_lens.float()},
        "offsets without the last": {"query_start_loc": step.query_start_loc[:-1]},
        "flags of one request": {"causal": step.causal[:1]},
        "flags dtype": {"causal": step.causal.bool()},
        "tree without ids": {"tree_bias": step.tree_bias},
        "tree not square": {"tree_bias": step.tree_bias[:, :2], "tree_id": step.tree_id},
        "tree dtype": {"tree_bias": step.tree_bias.half(), "tree_id": step.tree_id},
        "ranges of one request": {"mm_ranges": step.mm_ranges[:1]},
        "lengths on another device": {"seq_lens": step.seq_lens.to("meta")},
    }


def test_what_an_op_refuses_names_the_layer_and_a_list_is_no_tensor() -> None:
    layer, (query, key, value) = make_layer(prefix="own"), make_inputs(5)
    with pytest.raises(DtypeError, match=r"^layer 'own': key has dtype float16"):
        layer(query, key.half(), value, metadata=make_step())
    with pytest.raises(ShapeError, match=r"query is list.*pass query as a tensor"):
        layer(query.tolist(), key, value, metadata=make_step())


def test_a_tensor_of_the_layer_may_be_parametrized() -> None:
    layer, inputs = make_layer(sinks=torch.zeros(4)), make_inputs(5)
    with torch.no_grad():
        want = layer(*inputs, metadata=make_step())
        layer.sinks = torch.nn.Parameter(layer._buffers.pop("sinks"), requires_grad=False)
        torch.nn.utils.parametrize.register_parametrization(layer, "sinks", torch.nn.Identity())
        assert torch.equal(layer(*inputs, metadata=make_step()), want)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_an_input_elsewhere_is_what_the_message_names(name: str) -> None:
    layer, given = make_layer(prefix="own"), dict(zip(("query", "key", "value"), make_inputs(5), strict=True))
    given[name] = given[name].to("meta")
    with torch.no_grad(), pytest.raises(DeviceError, match=f"^{name} is on meta in layer 'own'.*cpu, where"):
        layer(*given.values(), metadata=make_step())


CALCULATE = {"cache": {"cache_dtype": "fp8", "calculate_kv_scales": True}}
LAYERS = {
    "plain": {},
    "calculated": CALCULATE,
    "fp8 query": {**CALCULATE, "quant_config": vattn.QuantConfig(query_format="fp8_e4m3")},
}


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("name", wrong_inputs())
def test_wrong_inputs_leave_cache_and_scales_alone(name, options):
    layer = make_layer(**options)
    inputs, error = wrong_inputs()[name]
    with unchanged(layer), pytest.raises(error), vattn.observe_clipping(layer):
        layer(*inputs, metadata=make_step())


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("name", wrong_steps())
def test_wrong_metadata_leaves_cache_and_scales_alone(name, options):
    layer = make_layer(**options)
    with unchanged(layer), pytest.raises(VattnError) as caught, vattn.observe_clipping(layer):
        layer(*make_inputs(5), metadata=dataclasses.replace(make_step(), **wrong_steps()[name]))
    assert caught.value.allowed


@pytest.mark.parametrize("grad_mode", [False, True])
def test_tangents_are_refused(grad_mode):
    layer, (query, key, value) = make_layer(), make_inputs(5)
    with unchanged(layer), torch.set_grad_enabled(grad_mode), forward_ad.dual_level():
        with pytest.raises(GradientError, match="tangent"):
            layer(forward_ad.make_dual(query, query), key, value, metadata=make_step())
    with unchanged(layer), torch.set_grad_enabled(grad_mode), pytest.raises(GradientError, match="tangent"):
        torch.func.jvp(lambda rows: layer(query, rows, value, metadata=make_step()), (key,), (key,))
    with forward_ad.dual_level():  # Others may differentiate beside the layer.
        layer(query, key, value, metadata=make_step())


@pytest.mark.parametrize(
    "turn", [Tensor.to_sparse, lambda rows: torch.nested.nested_tensor([rows[:2], rows[2:]], layout=torch.jagged)]
)
def test_rows_that_are_not_strided_are_refused(turn):
    layer, inputs = make_layer(), make_inputs(5)
    for place in range(3):
        given = [turn(rows) if index == place else rows for index, rows in enumerate(inputs)]
        with pytest.raises(StrideError, match="a plain strided tensor"):
            layer(*given, metadata=make_step())


def test_a_query_that_comes_quantised_says_who_quantises_it():
    layer, (query, key, value) = make_layer(), make_inputs(5)
    with pytest.raises(DtypeError, match=r"QuantConfig\(query_format='fp8_e4m3'"):
        layer(query.to(torch.float8_e4m3fn), key, value, metadata=make_step())


def test_gradients_are_fine_without_grad_mode():
    layer, (query, key, value) = make_layer(), make_inputs(5)
    with torch.no_grad():
        out = layer(query.requires_grad_(), key, value, metadata=make_step())
    assert not out.requires_grad


@pytest.mark.parametrize(
    "make", [make_layer, lambda: vattn.MLAAttention(2, 0.25, 8, 8, 8, None, 16, torch.nn.Linear(16, 32, False))]
)
def test_what_is_no_storage_and_no_dtype_is_not_bound(make):
    layer = make()
    before = layer.kv_cache
    with pytest.raises(CacheError, match="storage of type NoneType"):
        layer.bind_kv_cache(None, dtype=torch.float32)
    for dtype in ("float32", torch.float64):
        with pytest.raises(DtypeError, match="dtype="):
            layer.bind_kv_cache(torch.zeros(4, 16, 24), dtype=dtype)
    assert layer.kv_cache is before


@pytest.mark.parametrize("window", [0, -1, 2.5, "4", True, 2**31])
@pytest.mark.parametrize("kind", [vattn.Attention, vattn.EncoderOnlyAttention])
def test_a_wrong_window_is_named_as_it_came(kind: type, window: object) -> None:
    with pytest.raises(ConfigError, match=rf"^per_layer_sliding_window={window!r}\. Allowed: None or an int from 1"):
        kind(2, 16, 0.25, per_layer_sliding_window=window)
    with pytest.raises(ConfigError, match=r"^sliding_window=0"):
        kind(2, 16, 0.25, cache_config=vattn.CacheConfig(sliding_window=0))


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_that_require_a_gradient_are_refused(name: str) -> None:
    layer, inputs, step = make_layer(cache={"cache_dtype": "fp8"}, quant_config=UNIT), make_inputs(5), make_step()
    getattr(layer, name).requires_grad_()
    with pytest.raises(GradientError):
        layer(*inputs, metadata=step)
    with torch.no_grad():
        assert layer(*inputs, metadata=step).shape == (5, HEADS * SIZE)
