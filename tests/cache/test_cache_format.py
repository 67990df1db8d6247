"""A cache keeps its format: another format, layout or geometry is refused, whatever its size."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

import vattn
from vattn.config.attention import CacheConfig
from vattn.errors import CacheError
from vattn.layers.base.scales import QuantConfig
from vattn.quantization.formats import KV_FORMATS

BYTES = ["fp8_e4m3", "fp8_e5m2", *(name for name, fmt in KV_FORMATS.items() if fmt.packed)]


def make_layer(fmt: str = "auto", heads: int = 2, size: int = 64, **cache: Any) -> vattn.Attention:
    quant = QuantConfig("unit", "unit") if fmt != "auto" and KV_FORMATS[fmt].quantised else None
    config = CacheConfig(cache_dtype=fmt, **cache)
    return vattn.Attention(4, size, 0.125, heads, cache_config=config, quant_config=quant, prefix=fmt)


def allocate(layer: torch.nn.Module) -> torch.Tensor:
    return vattn.allocate_kv_cache(layer, num_blocks=6, dtype=torch.float32).kv_caches[0]


@pytest.mark.parametrize("stored", BYTES)
def test_formats(stored: str) -> None:
    """No other format in bytes binds the storage, be it larger, smaller or as large."""
    owner = make_layer(stored)
    storage = allocate(owner)
    for other in BYTES:
        layer = make_layer(other)
        if other == stored:
            layer.bind_kv_cache(storage, dtype=torch.float32)
            continue
        with pytest.raises(CacheError):
            layer.bind_kv_cache(storage, dtype=torch.float32)
        assert layer.config is None and layer.kv_cache is None


def test_padding_is_no_room_for_another_format() -> None:
    """An int8 block of 4352 bytes is wider than an int4 one of 2304 by a multiple of 16."""
    owner = make_layer("int8_per_token_head")
    storage = allocate(owner)
    layer = make_layer("int4_per_token_head")
    with pytest.raises(CacheError, match=r"int8_per_token_head .* used as one of int4_per_token_head"):
        layer.bind_kv_cache(storage, dtype=torch.float32)
    spec = layer.get_kv_cache_spec(torch.float32)
    assert spec is not None
    with pytest.raises(CacheError, match="used as"):
        vattn.swap_blocks(storage, storage, [(1, 2)], spec)
    # As long as the storage is there, though its layer is gone.
    del owner
    gc.collect()
    with pytest.raises(CacheError, match="used as"):
        layer.bind_kv_cache(storage, dtype=torch.float32)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"block_size": 16, "heads": 8}, {"block_size": 8, "heads": 16}),
        ({"kv_cache_layout": "NHD", "heads": 2}, {"kv_cache_layout": "HND", "heads": 2}),
        ({"heads": 4, "size": 32}, {"heads": 2, "size": 64}),
    ],
    ids=["blocks", "layouts", "heads"],
)
def test_equal_sizes(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Packed blocks of equal size that hold other rows."""

    def build(block_size: int = 16, heads: int = 2, size: int = 64, **cache: Any) -> vattn.Attention:
        config = CacheConfig(cache_dtype="turboquant_k8v4", block_size=block_size, **cache)
        return vattn.Attention(16, size, 0.125, heads, cache_config=config)

    storage = allocate(build(**first))
    wrong, right = build(**second), build(**first)
    with pytest.raises(CacheError):
        wrong.bind_kv_cache(storage, dtype=torch.float32)
    right.bind_kv_cache(storage, dtype=torch.float32)


def test_memory_of_an_engine() -> None:
    """Views in bytes too; the memory is free again when no layer is bound to it."""
    pool = torch.zeros(2, 6, 16, 2, 64, dtype=torch.uint8)
    owner = make_layer("fp8_e4m3")
    owner.bind_kv_cache(pool[0], pool[1], dtype=torch.float32)
    with pytest.raises(CacheError, match=r"fp8_e4m3 .* used as one of fp8_e5m2"):
        make_layer("fp8_e5m2").bind_kv_cache(pool[0], pool[1], dtype=torch.float32)
    del owner
    gc.collect()
    make_layer("fp8_e5m2").bind_kv_cache(pool[0], pool[1], dtype=torch.float32)


def test_copies_of_layers_keep_the_format() -> None:
    owner = make_layer("int8_per_token_head")
    allocate(owner)
    copied = copy.deepcopy(owner)
    assert copied.kv_cache is not None
    with pytest.raises(CacheError, match="used as"):
        make_layer("int4_per_token_head").bind_kv_cache(copied.kv_cache, dtype=torch.float32)


def test_groups_share_storages() -> None:
    """Layers of two groups use one storage in two formats: a block belongs to one of them."""
    window = {"per_layer_sliding_window": 16}
    layers = torch.nn.ModuleList(
        vattn.Attention(
            4, 64, 0.125, 2, prefix=f"layers.{index}", quant_config=QuantConfig("unit", "unit"),
            cache_config=CacheConfig(cache_dtype=fmt), **(window if index else {}),
        )
        for index, fmt in enumerate(["fp8_e4m3", "fp8_e5m2"])
    )  # fmt: skip
    cache = vattn.allocate_kv_cache(layers, num_blocks=8, dtype=torch.float32, hybrid=True)
    assert len(cache.groups) == 2 and len(cache.kv_caches) == 1
