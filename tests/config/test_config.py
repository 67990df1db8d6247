"""AttentionConfig and CacheConfig: what they refuse, and the canonical string that travels into the ops."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vattn.config.attention import ALIBI_KINDS, CAUSALITIES, AttentionConfig, AttentionType, CacheConfig
from vattn.errors import ConfigError
from vattn.quantization.formats import KV_FORMATS, OUTPUT_FORMATS, kv_cache_dtypes, resolve_kv_cache_dtype

BASE = AttentionConfig(8, 2, 64, 64, 0.125, "float16", "float16")

CROSS = {"attn_type": "encoder_decoder", "causality": "bidirectional"}
BAD_FIELDS = {
    "no heads": ({"num_heads": 0}, "num_heads=0"),
    "heads not an int": ({"num_heads": 8.0}, "num_heads=8.0"),
    "heads a bool": ({"num_kv_heads": True}, "num_kv_heads=True"),
    "heads do not divide": ({"num_kv_heads": 3}, "num_heads=8 is no multiple of num_kv_heads=3"),
    "negative head size": ({"head_size": -64}, "head_size=-64"),
    "negative block size": ({"block_size": -8}, "block_size=-8"),
    "scale is NaN": ({"scale": float("nan")}, "scale=nan"),
    "scale is infinite": ({"scale": float("inf")}, "scale=inf"),
    "scale is text": ({"scale": "0.1"}, "scale='0.1'"),
    "dtype": ({"dtype": "float64"}, "dtype='float64'"),
    "auto is not canonical": ({"kv_cache_dtype": "auto"}, "kv_cache_dtype='auto'"),
    "alias is not canonical": ({"kv_cache_dtype": "fp8", "kv_scale": "tensor"}, "kv_cache_dtype='fp8'"),
    "layout": ({"kv_cache_layout": "DHN"}, "kv_cache_layout='DHN'"),
    "kv scale without fp8": ({"kv_scale": "tensor"}, "kv_scale='tensor'"),
    "fp8 without kv scale": ({"kv_cache_dtype": "fp8_e4m3"}, "kv_scale='none'"),
    "query scale without fp8": ({"query_scale": "head"}, "query_scale='head'"),
    "fp8 query without scale": ({"query_format": "fp8_e4m3"}, "query_scale='none'"),
    "query load without fp8": ({"query_load": "divide"}, "query_load='divide'"),
    "query load": ({"query_format": "fp8_e4m3", "query_scale": "tensor", "query_load": "round"}, "query_load='round'"),
    "no query load": ({"query_load": None}, "query_load=None"),
    "output format": ({"output_format": "fp8"}, "output_format='fp8'"),
    "group does not divide the row": (
        {"num_heads": 3, "num_kv_heads": 1, "head_size_v": 24, "output_format": "fp8_group64"},
        "rows of 72 columns",
    ),
    "nvfp4 group does not divide the row": (
        {"num_heads": 1, "num_kv_heads": 1, "head_size_v": 24, "output_format": "nvfp4"},
        "rows of 24 columns",
    ),
    "attention type": ({"attn_type": "prefix"}, "attn_type='prefix'"),
    "causality": ({"causality": "no"}, "causality='no'"),
    "alibi": ({"alibi": "cubic"}, "alibi='cubic'"),
    "multimodal prefix": ({"mm_prefix": "yes"}, "mm_prefix='yes'"),
    "window 0": ({"sliding_window": 0}, "sliding_window=0"),
    "window not an int": ({"sliding_window": 4.0}, "sliding_window=4.0"),
    "window beyond int32": ({"sliding_window": 2**30 + 1}, "sliding_window=1073741825"),
    "soft cap 0": ({"logits_soft_cap": 0.0}, "logits_soft_cap=0.0"),
    "soft cap negative": ({"logits_soft_cap": -30.0}, "logits_soft_cap=-30.0"),
    "soft cap infinite": ({"logits_soft_cap": float("inf")}, "logits_soft_cap=inf"),
    "lookback without window": ({"chunk_lookback": 0}, "chunk_lookback=0"),
    "lookback negative": ({"chunk_lookback": -1, "sliding_window": 8}, "chunk_lookback=-1"),
    "lookback leaves empty chunks": ({"chunk_lookback": 8, "sliding_window": 8}, "chunk_lookback=8"),
    "sqrt alibi is causal": ({"alibi": "sqrt", "causality": "bidirectional"}, "alibi='sqrt'"),
    "sqrt alibi is not per request": ({"alibi": "sqrt", "causality": "per_request"}, "alibi='sqrt'"),
    "tree is causal": ({"tree_bias": True, "causality": "bidirectional"}, "tree_bias"),
    "cross attention is not causal": ({"attn_type": "encoder_decoder"}, "causality='causal'"),
    "cross attention has no window": ({**CROSS, "sliding_window": 8}, "sliding_window=8"),
    "cross attention has no alibi": ({**CROSS, "alibi": "linear"}, "alibi='linear'"),
    "cross attention has no ranges": ({**CROSS, "mm_prefix": "full"}, "mm_prefix='full'"),
    "flag not a bool": ({"sinks": 1}, "sinks=1"),
    "backend name with a space": ({"backend": "MY BACKEND"}, "backend='MY BACKEND'"),
    "empty backend name": ({"backend": ""}, "backend=''"),
}

BAD_CACHES = {
    "block size 0": ({"block_size": 0}, "block_size=0"),
    "block size between the smallest": ({"block_size": 3}, "block_size=3"),
    "block size no multiple of 8": ({"block_size": 12}, "block_size=12"),
    "block size too large": ({"block_size": 2056}, "block_size=2056"),
    "block size not an int": ({"block_size": 16.0}, "block_size=16.0"),
    "cache dtype": ({"cache_dtype": "int8"}, "cache_dtype='int8'"),
    "layout": ({"kv_cache_layout": "nhd"}, "kv_cache_layout='nhd'"),
    "window": ({"sliding_window": 0}, "sliding_window=0"),
    "window not an int": ({"sliding_window": "64"}, "sliding_window='64'"),
    "window that is a bool": ({"sliding_window": True}, "sliding_window=True"),
    "skip layer by name": ({"kv_cache_dtype_skip_layers": ("first",)}, "'first'"),
    "skip layer as an int": ({"kv_cache_dtype_skip_layers": (0,)}, "0"),
    "skip layers as one string": ({"kv_cache_dtype_skip_layers": "12"}, "'12'"),
}


@pytest.mark.parametrize(
    ("make", "values", "named"),
    [
        pytest.param(make, *case, id=name)
        for make, cases in ((BASE.replace, BAD_FIELDS), (CacheConfig, BAD_CACHES))
        for name, case in cases.items()
    ],
)
def test_bad_field_is_refused_by_name(make, values, named):
    with pytest.raises(ConfigError) as caught:
        make(**values)
    assert named in caught.value.got
    assert caught.value.allowed
    assert caught.value.fix


def test_is_frozen_and_hashable():
    assert {BASE: 1}[BASE.replace()] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        BASE.num_heads = 4


def test_derived_sizes():
    assert BASE.group_size == 4
    assert BASE.chunk_size is None
    assert BASE.replace(sliding_window=10).chunk_size is None
    assert BASE.replace(sliding_window=10, chunk_lookback=0).chunk_size == 10
    assert BASE.replace(sliding_window=10, chunk_lookback=2).chunk_size == 3


def test_string_names_what_differs_from_the_defaults():
    text = BASE.replace(sliding_window=128, sinks=True).encode()
    assert text == (
        "vattn1 num_heads=8 num_kv_heads=2 head_size=64 head_size_v=64 scale=0.125 "
        "dtype=float16 kv_cache_dtype=float16 sliding_window=128 sinks=True"
    )


def test_numbers_of_another_type_give_the_same_string():
    whole = BASE.replace(scale=1, logits_soft_cap=30)
    assert whole.encode() == BASE.replace(scale=1.0, logits_soft_cap=30.0).encode()


def test_attention_type_may_be_the_enum():
    config = BASE.replace(attn_type=AttentionType.ENCODER_ONLY)
    assert config == BASE.replace(attn_type="encoder_only")
    assert AttentionConfig.parse(config.encode()) == config


@st.composite
def configs(draw):
    """Any config that the constructor accepts."""
    kv_heads = draw(st.integers(1, 4))
    lookback = draw(st.none() | st.integers(0, 3))
    least = 1 if lookback is None else lookback + 1
    window = draw(st.integers(least, 4096) if lookback is not None else st.none() | st.integers(least, 4096))
    kv_dtype = draw(st.sampled_from(list(KV_FORMATS)))
    query = draw(st.sampled_from(["none", "fp8_e4m3"]))
    causality = draw(st.sampled_from(CAUSALITIES))
    alibi = draw(st.sampled_from([kind for kind in ALIBI_KINDS if causality == "causal" or kind != "sqrt"]))
    mm_prefix = draw(st.sampled_from(["none", "full", "clamped"]))
    context_only, parallel = draw(st.booleans()), draw(st.booleans())
    compares_positions = causality != "bidirectional" or window is not None or alibi != "none" or mm_prefix != "none"
    compares_positions = compares_positions or context_only
    kinds = [kind for kind in AttentionType if kind != AttentionType.ENCODER_DECODER or not compares_positions]
    scales = st.sampled_from(["tensor", "head"])
    return AttentionConfig(
        num_heads=kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=kv_heads,
        head_size=draw(st.integers(1, 600)),
        head_size_v=128 * draw(st.integers(1, 4)),
        scale=draw(st.floats(-1e30, 1e30)),
        dtype=draw(st.sampled_from(["float16", "bfloat16", "float32"])),
        kv_cache_dtype=kv_dtype,
        block_size=draw(st.sampled_from([0, 1, 8, 528, 2048])),
        kv_cache_layout=draw(st.sampled_from(["NHD", "HND"])),
        kv_scale=draw(scales) if KV_FORMATS[kv_dtype].quantised else "none",
        query_format=query,
        query_scale=draw(scales) if query != "none" else "none",
        output_format=draw(st.sampled_from(list(OUTPUT_FORMATS))),
        attn_type=draw(st.sampled_from(kinds)),
        causality=causality,
        sliding_window=window,
        chunk_lookback=lookback,
        logits_soft_cap=draw(st.none() | st.floats(1e-3, 1e3)),
        alibi=alibi,
        sinks=draw(st.booleans()),
        tree_bias=causality == "causal" and draw(st.booleans()),
        mm_prefix=mm_prefix,
        lse=draw(st.booleans()),
        context_parallel=parallel,
        context_only=context_only and not parallel,
        batch_invariant=draw(st.booleans()),
        backend=draw(st.sampled_from(["auto", "TORCH_SDPA", "X_1"])),
    )


@given(configs())
def test_parse_undoes_encode(config):
    assert AttentionConfig.parse(config.encode()) == config
    assert AttentionConfig.parse(config.encode()).encode() == config.encode()


def test_parse_is_cached():
    assert AttentionConfig.parse(BASE.encode()) is AttentionConfig.parse(BASE.encode())


BAD_STRINGS = {
    "other version": (BASE.encode().replace("vattn1", "vattn2"), "vattn2"),
    "no version": ("num_heads=8", "num_heads=8"),
    "empty": ("", "''"),
    "unknown field": (BASE.encode() + " windw=4", "windw"),
    "missing field": ("vattn1 num_heads=8", "num_kv_heads"),
    "not a number": (BASE.encode() + " sliding_window=many", "many"),
    "not a bool": (BASE.encode() + " sinks=yes", "yes"),
    "out of range": (BASE.encode() + " sliding_window=-1", "sliding_window=-1"),
    "no value": (BASE.encode() + " backend", "backend"),
}


@pytest.mark.parametrize(("text", "named"), BAD_STRINGS.values(), ids=BAD_STRINGS.keys())
def test_bad_string_is_refused(text, named):
    with pytest.raises(ConfigError, match=named):
        AttentionConfig.parse(text)


def test_cache_config_takes_a_list_of_skip_layers_and_is_hashable():
    config = CacheConfig(kv_cache_dtype_skip_layers=["0", "sliding_window"])
    assert config.kv_cache_dtype_skip_layers == ("0", "sliding_window")
    assert hash(config) == hash(dataclasses.replace(config))


@pytest.mark.parametrize("name", kv_cache_dtypes())
def test_every_cache_dtype_name_resolves_to_a_format(name):
    CacheConfig(cache_dtype=name)
    assert resolve_kv_cache_dtype(name, torch.bfloat16) in KV_FORMATS
    if name == "auto":
        assert resolve_kv_cache_dtype(name, torch.float32) == "float32"
