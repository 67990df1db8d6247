"""Scales of a layer: given, unit or calculated from the first real tokens; what they and the cache survive."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import vattn
from tests.layers.layer_support import CLOSE, KV_HEADS, SIZE, UNIT, bind, expected, make_inputs, make_layer, make_step
from tests.support import unchanged
from vattn.errors import ArgumentError, ConfigError, ScaleError
from vattn.layers.base.scales import HEADROOM, first_scale, make_scale
from vattn.quantization.formats import KV_FORMATS

CALCULATE = {"cache_dtype": "fp8", "calculate_kv_scales": True}


def calculated(**options):
    return make_layer(cache=CALCULATE, **options)


def scale_of(rows, fmt="fp8_e4m3"):
    """The scale that the rows call for."""
    return rows.abs().amax() * HEADROOM / KV_FORMATS[fmt].max_value


# Given and unit scales


@pytest.mark.parametrize("fmt", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize(
    ("source", "values"),
    [("unit", [1.0]), (0.5, [0.5]), ([0.02, 0.03], [0.02, 0.03]), (torch.tensor(0.25), [0.25])],
    ids=["unit", "number", "per head", "tensor"],
)
def test_given_scales(source, values, fmt):
    layer = make_layer(cache={"cache_dtype": fmt}, quant_config=vattn.QuantConfig(k_scale=source, v_scale=source))
    assert layer.k_scale.dtype == torch.float32
    assert layer.k_scale.tolist() == pytest.approx(values)
    assert layer.config.kv_scale == ("head" if len(values) == KV_HEADS else "tensor")
    query, key, value = make_inputs(5)
    out = layer(query, key, value, metadata=make_step())
    torch.testing.assert_close(out.view(5, 4, SIZE), expected(layer, query, make_step()), **CLOSE)
    assert layer.v_scale.tolist() == pytest.approx(values)


BAD_SCALES = {
    "none for fp8": ({"v_scale": 1.0}, {"cache_dtype": "fp8"}, "no k_scale"),
    "no v_scale": ({"k_scale": 1.0}, {"cache_dtype": "fp8"}, "no v_scale"),
    "for a plain cache": ({"k_scale": 1.0}, {}, "k_scale given"),
    "given and calculated": ({"k_scale": 1.0, "v_scale": 1.0}, CALCULATE, "calculate_kv_scales=True"),
    "three values": ({"k_scale": [1.0] * 3, "v_scale": 1.0}, {"cache_dtype": "fp8"}, "k_scale has 3 values"),
    "of another granularity": ({"k_scale": [1.0, 1.0], "v_scale": 1.0}, {"cache_dtype": "fp8"}, "v_scale 1"),
    "another word": ({"k_scale": "one", "v_scale": 1.0}, {"cache_dtype": "fp8"}, "k_scale='one'"),
    "zero": ({"k_scale": 0.0, "v_scale": 1.0}, {"cache_dtype": "fp8"}, "k_scale=[0.0]"),
    "negative": ({"k_scale": 1.0, "v_scale": -1.0}, {"cache_dtype": "fp8"}, "v_scale=[-1.0]"),
    "NaN": ({"k_scale": torch.tensor([torch.nan]), "v_scale": 1.0}, {"cache_dtype": "fp8"}, "k_scale=[nan]"),
    "infinite": ({"k_scale": float("inf"), "v_scale": 1.0}, {"cache_dtype": "fp8"}, "k_scale=[inf]"),
}


@pytest.mark.parametrize(("values", "cache", "named"), BAD_SCALES.values(), ids=BAD_SCALES.keys())
def test_bad_scales_are_refused_at_construction(values, cache, named):
    with pytest.raises(ScaleError) as caught:
        make_layer(bound=False, cache=cache, quant_config=vattn.QuantConfig(**values))
    assert named in str(caught.value)
    assert caught.value.allowed


@pytest.mark.parametrize("value", [float("nan"), True, ["1"]], ids=str)
def test_scales_that_are_no_numbers_are_refused(value):
    with pytest.raises(ArgumentError) as caught:
        vattn.QuantConfig(k_scale=value, v_scale=1.0)
    assert caught.value.got == f"QuantConfig(k_scale={value!r})"
    assert caught.value.allowed == "Tensor | float | Sequence[float] | str or None"


@pytest.mark.parametrize("fmt", ["auto", "float16", "int8_per_token_head", "int4_per_token_head", "turboquant_k8v4"])
@pytest.mark.parametrize("make", [vattn.Attention, vattn.EncoderOnlyAttention], ids=["cached", "encoder"])
def test_scales_are_not_calculated_for_caches_that_take_none(make, fmt):
    cache = vattn.CacheConfig(cache_dtype=fmt, calculate_kv_scales=True)
    with pytest.raises(ScaleError, match="calculate_kv_scales=True with cache_dtype") as caught:
        make(8, 64, 0.125, 2, cache_config=cache)
    assert caught.value.fix


@pytest.mark.parametrize("fmt", ["auto", "int8_per_token_head", "turboquant_k8v4", "fp8"])
def test_unit_scales_with_every_format(fmt):
    """Engines set scales of 1 for all layers; only a format that is scaled has a buffer for them."""
    unit = make_layer(cache={"cache_dtype": fmt}, quant_config=vattn.QuantConfig("unit", "unit"))
    if fmt == "fp8":
        assert unit.k_scale.item() == 1 and unit.config.kv_scale == "tensor"
        return
    assert unit.k_scale is None and unit.config.kv_scale == "none"
    other, rows = make_layer(cache={"cache_dtype": fmt}), make_inputs(5)
    assert torch.equal(unit(*rows, metadata=make_step()), other(*rows, metadata=make_step()))


def test_one_scale_for_both():
    layer = make_layer(cache={"cache_dtype": "fp8"}, quant_config=vattn.QuantConfig(0.02, "k_scale"))
    assert layer.k_scale.tolist() == layer.v_scale.tolist() == pytest.approx([0.02])
    with pytest.raises(ScaleError, match="v_scale='k_scale' if one scale is for both"):
        make_layer(bound=False, cache={"cache_dtype": "fp8"}, quant_config=vattn.QuantConfig(0.02))
    with pytest.raises(ScaleError, match=r"QuantConfig\('unit', 'unit'\) if 1.0 is meant"):
        make_layer(bound=False, cache={"cache_dtype": "fp8"})
    with pytest.raises(vattn.errors.ConfigError, match="cap or None"):
        make_layer(bound=False, logits_soft_cap=0.0)


def test_a_skipped_layer_calculates_nothing():
    cache = {**CALCULATE, "kv_cache_dtype_skip_layers": ("0",)}
    layer = make_layer(bound=False, prefix="0", cache=cache)
    assert not layer.calculate_kv_scales and layer.k_scale is None


def test_a_sharing_layer_takes_no_scales_of_its_own():
    quant = vattn.QuantConfig(k_scale=1.0, v_scale=1.0)
    with pytest.raises(ScaleError, match="the target's scales"):
        make_layer(
            bound=False, prefix="1", kv_sharing_target_layer_name="0", cache={"cache_dtype": "fp8"}, quant_config=quant
        )


# Calculated scales


def test_scales_come_from_the_first_real_tokens_alone():
    layer, (query, key, value) = calculated(), make_inputs(9, real=5)
    step = make_step([3, 2], num_tokens_padded=9)
    out = layer(query, key, value, metadata=step)
    torch.testing.assert_close(layer.k_scale[0], scale_of(key[:5]))
    torch.testing.assert_close(layer.v_scale[0], scale_of(value[:5]))
    # Everything of this step was written with the new scales, and is read with them.
    torch.testing.assert_close(out.view(9, 4, SIZE), expected(layer, query, step), **CLOSE)
    plain = make_layer()(query, key, value, metadata=step)
    error = (out - plain)[:5].norm() / plain[:5].norm()
    assert error < 0.05  # e4m3: 2^-4 relative error at most, unless values clip or underflow


def test_scales_are_not_calculated_again():
    layer, (query, key, value) = calculated(), make_inputs(5)
    layer(query, key, value, metadata=make_step())
    before = layer.k_scale.clone(), layer.v_scale.clone()
    step = make_step([1, 1], [4, 3])
    out = layer(query[:2], 10 * key[:2], 10 * value[:2], metadata=step)
    assert torch.equal(layer.k_scale, before[0])
    assert torch.equal(layer.v_scale, before[1])
    torch.testing.assert_close(out.view(2, 4, SIZE), expected(layer, query[:2], step), **CLOSE)


def test_profiling_and_padding_calculate_nothing():
    layer, inputs = calculated(), make_inputs(5)
    with unchanged(layer):
        layer(*inputs)
        # A warm-up before a capture: rows of padding only.
        layer(*inputs, metadata=make_step([0], [0], [[3]], num_tokens_padded=5))
        assert layer(*make_inputs(0), metadata=make_step([0], [0], [[3]])).shape == (0, 4 * SIZE)
    layer(*inputs, metadata=make_step())
    torch.testing.assert_close(layer.k_scale[0], scale_of(inputs[1]))


def test_zeros_decide_no_scale():
    """Zeros are stored as zeros under any scale: a warm-up with zeros leaves the decision to the first real values."""
    layer, (query, key, value) = calculated(), make_inputs(5)
    layer(query, key, torch.zeros_like(value), metadata=make_step())
    k_scale = layer.k_scale.clone()
    torch.testing.assert_close(k_scale[0], scale_of(key))
    assert layer.v_scale.item() == 1.0
    layer(query, 5 * key, value, metadata=make_step())
    assert torch.equal(layer.k_scale, k_scale)
    torch.testing.assert_close(layer.v_scale[0], scale_of(value))


def test_infinities_and_nan_of_real_tokens_do_not_count():
    layer, (query, key, value) = calculated(), make_inputs(5)
    key[0, 0], key[1, 1] = torch.inf, torch.nan
    layer(query, key, value, metadata=make_step())
    torch.testing.assert_close(layer.k_scale[0], scale_of(key[torch.isfinite(key)]))


def test_no_scale_is_calculated_for_what_is_quantised_already():
    layer = calculated()
    query, key, value = make_inputs(5)
    with unchanged(layer), pytest.raises(ScaleError, match="key is float8_e4m3fn"):
        layer(query, key.to(torch.float8_e4m3fn), value.to(torch.float8_e4m3fn), metadata=make_step())


def test_query_scale_is_calculated_with_them():
    layer = calculated(quant_config=vattn.QuantConfig(query_format="fp8_e4m3"))
    query, key, value = make_inputs(9, real=5)
    step = make_step([3, 2], num_tokens_padded=9)
    out = layer(query, key, value, metadata=step)
    torch.testing.assert_close(layer.q_scale[0], scale_of(query[:5]))
    torch.testing.assert_close(out.view(9, 4, SIZE), expected(layer, query, step), **CLOSE)
    assert not out[5:].any()


def test_a_given_query_scale_is_kept():
    layer = calculated(quant_config=vattn.QuantConfig(query_format="fp8_e4m3", q_scale=0.125))
    layer(*make_inputs(5), metadata=make_step())
    assert layer.q_scale.item() == 0.125
    assert layer.scales_ready.tolist() == [1, 1, 1]


def test_compiled_scales_equal_eager_ones():
    eager, inputs = calculated(), make_inputs(9, real=5)
    layer = calculated()
    step = make_step([3, 2], num_tokens_padded=9)
    out = torch.compile(layer, fullgraph=True, backend="aot_eager")(*inputs, metadata=step)
    assert torch.equal(out, eager(*inputs, metadata=step))
    assert torch.equal(layer.k_scale, eager.k_scale)
    assert layer.scales_ready.tolist() == [1, 1, 1]


def test_first_scale():
    values, old = torch.tensor([[[1.0, -3.0]], [[100.0, 7.0]]]), torch.tensor([0.5])
    real, ready = torch.tensor([True, False]), torch.zeros(1, dtype=torch.int32)
    scale, now = first_scale(values, real, old, ready, 448.0)
    torch.testing.assert_close(scale, torch.tensor([3.0 * HEADROOM / 448]))
    assert now.tolist() == [1]
    for mask, flag in ((real, ready + 1), (torch.zeros_like(real), ready)):
        scale, now = first_scale(values, mask, old, flag, 448.0)
        assert torch.equal(scale, old)
        assert torch.equal(now, flag)


def test_make_scale_copies():
    source = torch.tensor([0.5])
    scale = make_scale("k_scale", source, (1,))
    source.fill_(9.0)
    assert scale.item() == 0.5


# What scales and caches survive


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("cache", [CALCULATE, {"cache_dtype": "fp8_e5m2"}, {}], ids=["calculated", "given", "plain"])
def test_changing_the_models_dtype_changes_no_buffer(cache, dtype):
    scales = {"k_scale": 0.013, "v_scale": 0.7} if cache.get("cache_dtype") == "fp8_e5m2" else {}
    quant = vattn.QuantConfig(
        **scales, query_format="fp8_e4m3", q_scale=0.01, output_format="fp8_static", output_scale=0.3
    )
    layer = make_layer(cache=cache, quant_config=quant, alibi_slopes=[0.1, 0.2, 0.3, 0.4])
    layer(*make_inputs(5), metadata=make_step())
    storage = layer.kv_cache
    with unchanged(layer):
        nn.Sequential(layer).to(dtype)
    assert layer.kv_cache is storage


def test_a_parameter_follows_the_model_and_the_cache_must_be_made_again():
    layer = make_layer(sinks=nn.Parameter(torch.zeros(4), requires_grad=False)).to(torch.bfloat16)
    assert layer.sinks.dtype == torch.bfloat16
    with pytest.raises(vattn.errors.DtypeError, match="allocate the KV cache again"):
        layer(*make_inputs(5, dtype=torch.bfloat16), metadata=make_step())
    bind(layer, torch.bfloat16)
    assert layer(*make_inputs(5, dtype=torch.bfloat16), metadata=make_step()).isfinite().all()


def test_saved_scales_are_loaded_and_not_calculated_again():
    saved = calculated(quant_config=vattn.QuantConfig(query_format="fp8_e4m3"))
    saved(*make_inputs(5), metadata=make_step())
    state = saved.state_dict()
    assert set(state) == {"k_scale", "v_scale", "q_scale", "scales_ready"}
    for order in ("bind first", "load first"):
        layer = calculated(bound=order == "bind first", quant_config=vattn.QuantConfig(query_format="fp8_e4m3"))
        layer.load_state_dict(state)
        if order == "load first":
            bind(layer)
        layer(*make_inputs(5, seed=9), metadata=make_step())
        assert all(torch.equal(state[name], layer.state_dict()[name]) for name in state)


@pytest.mark.parametrize("assign", [False, True])
def test_loading_keeps_the_tensors_that_others_hold(assign):
    """A sharing layer and a captured CUDA graph hold the target's scale tensor; a checkpoint may have another dtype."""
    layer = make_layer(cache={"cache_dtype": "fp8"}, quant_config=UNIT)
    held = layer.k_scale
    state = {"k_scale": torch.tensor([0.5], dtype=torch.bfloat16), "v_scale": torch.tensor([2.0])}
    layer.load_state_dict(state, assign=assign)
    assert layer.k_scale is held
    assert (held.item(), held.dtype, layer.v_scale.item()) == (0.5, torch.float32, 2.0)


def test_a_model_made_on_meta_loads_its_scales():
    quant = vattn.QuantConfig(k_scale=0.5, v_scale=2.0)
    saved = make_layer(bound=False, cache={"cache_dtype": "fp8"}, quant_config=quant).state_dict()
    for way in ("assign", "empty"):
        with torch.device("meta"):
            layer = make_layer(bound=False, cache={"cache_dtype": "fp8"}, quant_config=quant)
        if way == "empty":
            layer.to_empty(device="cpu").to(torch.bfloat16)
        layer.load_state_dict(saved, assign=way == "assign")
        assert (layer.k_scale.item(), layer.v_scale.item()) == (0.5, 2.0)
        assert layer.k_scale.dtype == torch.float32


@pytest.mark.parametrize("way", ["empty", "assign"])
def test_a_model_made_on_meta_keeps_the_numbers_it_was_given(way):
    """No state dict holds them, so memory without values would be used in silence."""
    numbers = [0.1, 0.2, 0.3, 0.4]
    with torch.device("meta"):
        layer = make_layer(bound=False, alibi_slopes=numbers, sinks=numbers, cache=CALCULATE)
    if way == "empty":
        layer.to_empty(device="cpu")
    layer.load_state_dict(make_layer(bound=False, cache=CALCULATE).state_dict(), assign=way == "assign")
    bind(layer)
    assert torch.equal(layer.alibi_slopes, torch.tensor(numbers))
    assert torch.equal(layer.sinks, torch.tensor(numbers))
    assert not layer.clip_counts.any()


def test_tensors_that_never_got_values_are_refused():
    layer = make_layer(bound=False, alibi_slopes=torch.ones(4, device="meta"))
    layer.to_empty(device="cpu")
    with pytest.raises(ConfigError, match=r"alibi_slopes of layer \(no prefix given\) on meta"):
        bind(layer)


def test_sinks_that_are_no_parameter_are_copied_and_stay_fp32():
    given = torch.randn(4, dtype=torch.float64)
    layer = make_layer(sinks=given).to(torch.bfloat16)
    assert layer.sinks.dtype == torch.float32
    assert torch.equal(layer.sinks, given.float())


def test_scalars_of_a_checkpoint_are_loaded():
    layer = make_layer(cache={"cache_dtype": "fp8"}, quant_config=UNIT)
    layer.load_state_dict({"k_scale": torch.tensor(0.5), "v_scale": torch.tensor(2.0)})
    assert [layer.k_scale.tolist(), layer.v_scale.tolist()] == [[0.5], [2.0]]


def test_a_layer_made_in_inference_mode_calculates_outside_of_it():
    with torch.inference_mode():
        layer = make_layer(cache=CALCULATE)
    with torch.no_grad():
        layer(*make_inputs(5), metadata=make_step())
    assert layer.scales_ready.tolist() == [1, 1, 1]


def test_a_failed_conversion_loses_no_buffer():
    layer = make_layer(cache=CALCULATE, sinks=nn.Parameter(torch.zeros(4)))

    def fail(tensor):
        raise MemoryError

    with unchanged(layer), pytest.raises(MemoryError):
        layer._apply(fail)


def test_a_copied_model_keeps_sharing():
    cache = {"cache": CALCULATE}
    first = make_layer(bound=False, prefix="0", **cache)
    second = make_layer(bound=False, prefix="1", kv_sharing_target_layer_name="0", **cache)
    model = nn.ModuleList([first, second])
    bind(model)
    twin = copy.deepcopy(model)
    assert twin[1].kv_cache is twin[0].kv_cache
    assert twin[1].k_scale is twin[0].k_scale
    assert twin[0].kv_cache is not first.kv_cache


# Clipping


def test_clip_rates_count_real_values_beyond_the_range():
    quant = vattn.QuantConfig(k_scale=[0.001, 0.01], v_scale=[1.0, 1.0])
    layer = make_layer(prefix="layers.0", cache={"cache_dtype": "fp8"}, quant_config=quant)
    query, key, value = make_inputs(9, real=5)
    with vattn.observe_clipping(layer):
        layer(query, key, value, metadata=make_step([3, 2], num_tokens_padded=9))
        layer(query[:1], key[:1], value[:1], metadata=make_step([1], [4], [[3]]))
    limit = 448 * torch.tensor([0.001, 0.01]).repeat_interleave(SIZE)
    seen = torch.cat([key[:5], key[:1]])
    assert vattn.clip_rates(layer) == {
        "layers.0": {"key": pytest.approx((seen.abs() > limit).float().mean().item()), "value": 0.0}
    }
    assert 0 < vattn.clip_rates(layer)["layers.0"]["key"] < 1
    layer(query, 1e6 * key, value, metadata=make_step([3, 2], num_tokens_padded=9))
    assert vattn.clip_rates(layer)["layers.0"]["value"] == 0.0  # only while observing


def test_clip_rates_start_anew_and_name_only_quantised_layers():
    quant = vattn.QuantConfig(k_scale=1e-6, v_scale=1e-6)
    model = nn.ModuleList([make_layer(cache={"cache_dtype": "fp8"}, quant_config=quant), make_layer()])
    with vattn.observe_clipping(model):
        model[0](*make_inputs(5), metadata=make_step())
    assert vattn.clip_rates(model) == {"0": {"key": 1.0, "value": 1.0}}
    with pytest.raises(ZeroDivisionError), vattn.observe_clipping(model):
        raise ZeroDivisionError
    assert not model[0].observing
    assert all(rate != rate for rate in vattn.clip_rates(model)["0"].values())  # NaN: nothing was seen
