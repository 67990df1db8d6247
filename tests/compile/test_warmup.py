"""Warming up: every size runs once per kind of layer, caches and scales stay as they are, mistakes are named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vattn
from vattn.errors import CacheNotBoundError, ConfigError


def model(**changes) -> nn.ModuleDict:
    layers = nn.ModuleDict(
        {
            name: vattn.Attention(4, 16, 0.25, 2, prefix=name, per_layer_sliding_window=window, **changes)
            for name, window in (("a", None), ("b", 8), ("c", None))
        }
    )
    vattn.allocate_kv_cache(layers, num_blocks=6, dtype=torch.float32)
    return layers


def builder_of(layers: nn.Module) -> vattn.AttentionMetadataBuilder:
    return vattn.AttentionMetadataBuilder(4, 16, max_seq_len=40, layers=layers)


def test_one_layer_of_a_kind_runs_every_size_and_nothing_is_written() -> None:
    layers = model()
    for layer in layers.values():
        layer.kv_cache.normal_()
    before = [layer.kv_cache.clone() for layer in layers.values()]
    lines: list[str] = []
    report = vattn.warmup(
        layers, builder_of(layers), decode_batches=[1, 4], prefill_lens=[16, 7], progress=lines.append
    )
    alone = ["decode of 1", "decode of 4", "prefill of 16", "prefill of 7"]
    names = [*alone, "2 prefills of 7", "prefill of 7 and a decode"]
    assert list(report.seconds) == [f"{name}: {layer}" for name in names for layer in "ab"]
    assert len(lines) == 12 and lines[-1].startswith("warmup 12/12, prefill of 7 and a decode: b:")
    assert str(report).startswith("12 steps warmed in")
    assert all(torch.equal(layer.kv_cache, old) for layer, old in zip(layers.values(), before, strict=True))


def test_scales_are_not_taken(capsys) -> None:
    config = vattn.CacheConfig(cache_dtype="fp8", calculate_kv_scales=True)
    layers = model(cache_config=config)
    before = {name: value.clone() for name, value in layers.state_dict().items()}
    vattn.warmup(layers, builder_of(layers), decode_batches=[2])
    assert "warmup 2/2, decode of 2: b: " in capsys.readouterr().err
    assert all(torch.equal(value, layers.state_dict()[name]) for name, value in before.items())


def test_a_function_runs_in_the_place_of_the_layers() -> None:
    layers, seen = model(), []

    def function(x: torch.Tensor) -> None:
        layers["a"](x, x[:, :32], x[:, :32])
        seen.append(tuple(x.shape))

    report = vattn.warmup(
        layers,
        builder_of(layers),
        decode_batches=[3],
        prefill_lens=[5],
        function=function,
        make_inputs=lambda step: [torch.zeros(step.slot_mapping.shape[0], 64)],
        progress=False,
    )
    assert seen == [(3, 64), (5, 64), (15, 64), (6, 64)] and next(iter(report.seconds)) == "decode of 3: function"


def test_layers_that_need_more_are_named() -> None:
    layers = model()
    layers["x"] = vattn.CrossAttention(4, 16, 0.25, 2, prefix="x")
    vattn.allocate_kv_cache(layers, num_blocks=6, dtype=torch.float32)
    assert vattn.warmup(layers, builder_of(layers), progress=False).left_out == ("x",)


def test_mistakes() -> None:
    layers = model()
    builder = builder_of(layers)
    for options, text in (
        ({"decode_batches": [5]}, "1 to 4"),
        ({"decode_batches": [0]}, "decode_batches with 0"),
        ({"prefill_lens": [17]}, "1 to 16"),
        ({"decode_batches": []}, "at least one size"),
        ({"decode_batches": [1.5]}, "decode_batches with 1.5"),
        ({"function": print}, "both or neither"),
        ({"decode_batches": 4}, "decode_batches=4"),
        ({"prefill_lens": (size for size in (1, 2))}, "a list of sizes"),
    ):
        with pytest.raises(ConfigError, match=text):
            vattn.warmup(layers, builder, **{"progress": False, **options})
    flash = vattn.FlashAttentionMetadataBuilder(max_num_reqs=4, max_num_tokens=16, max_seq_len=64)
    with pytest.raises(ConfigError, match="a FlashAttentionMetadataBuilder"):
        vattn.warmup(layers, flash)
    with pytest.raises(ConfigError, match="no layer of Linear"):
        vattn.warmup(nn.Linear(2, 2), builder)
    with pytest.raises(CacheNotBoundError):
        vattn.warmup(vattn.Attention(4, 16, 0.25), builder)
