"""Specs, allocation over a model, and copies of blocks."""

import pytest
import torch
from torch import nn

import vattn
from tests.support import make_config, poisoned_empty
from vattn.cache.allocation import allocate_kv_cache
from vattn.cache.copies import copy_blocks, swap_blocks
from vattn.cache.layout import block_bytes, key_value_views, kv_cache_dtype, kv_cache_shape, op_views
from vattn.cache.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    TQFullAttentionSpec,
)
from vattn.cache.stored_rows import stored_views
from vattn.config.arguments import format_bytes, parse_bytes
from vattn.config.attention import CacheConfig
from vattn.errors import CacheError, ConfigError, DeviceError, DtypeError
from vattn.layers.attention import Attention
from vattn.layers.base.scales import QuantConfig
from vattn.metadata.builder import AttentionMetadataBuilder
from vattn.quantization.formats import KV_FORMATS

LAYOUTS = {
    "nhd": {},
    "hnd": {"kv_cache_layout": "HND"},
    "unequal": {"head_size_v": 24},
    "unequal_hnd": {"head_size_v": 8, "kv_cache_layout": "HND", "block_size": 24},
}


def spec_of(config, cls=FullAttentionSpec, **extra):
    return cls(
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        head_size_v=config.head_size_v,
        kv_cache_dtype=config.kv_cache_dtype,
        block_size=config.block_size,
        layout=config.kv_cache_layout,
        **extra,
    )


def storage_bytes(tensor):
    return tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_cache_dtype_name", KV_FORMATS)
def test_page_size_is_what_a_block_of_the_storage_takes(layout, kv_cache_dtype_name):
    config = make_config(kv_cache_dtype=kv_cache_dtype_name, num_kv_heads=2, **LAYOUTS[layout])
    fmt = KV_FORMATS[kv_cache_dtype_name]
    if fmt.head_size_problems(config.head_size, config.head_size_v):
        with pytest.raises(ConfigError, match="takes"):
            spec_of(config)
        return
    spec = spec_of(config)
    storage = torch.zeros(spec.storage_shape(7), dtype=spec.storage_dtype)
    assert storage.shape == kv_cache_shape(config, 7) and storage.dtype == kv_cache_dtype(config)
    assert spec.page_size_bytes * 7 == storage_bytes(storage)
    key, value = (rows.codes for rows in stored_views(*op_views(storage, config), config))
    widths = [config.head_size, config.head_size_v]
    if fmt.packed:
        widths = [part.code_bytes(width) for part, width in zip(fmt.parts, widths, strict=True)]
    assert key.shape == (7, spec.block_size, 2, widths[0])
    assert value.shape == (7, spec.block_size, 2, widths[1])


def reads(spec, position):
    """Return the first position that a query sees: what the masks say, written once more."""
    if isinstance(spec, SlidingWindowSpec):
        return max(0, position - spec.sliding_window + 1 - spec.extra_retained_tokens)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return max(0, (position // spec.attention_chunk_size - spec.chunk_lookback) * spec.attention_chunk_size)
    return 0


@pytest.mark.parametrize(
    "spec",
    [
        FullAttentionSpec(2, 64),
        SlidingWindowSpec(2, 64, sliding_window=1),
        SlidingWindowSpec(2, 64, sliding_window=40, extra_retained_tokens=7),
        ChunkedLocalAttentionSpec(2, 64, attention_chunk_size=64),
        ChunkedLocalAttentionSpec(2, 64, attention_chunk_size=16, chunk_lookback=2),
        ChunkedLocalAttentionSpec(2, 64, attention_chunk_size=24),
        ChunkedLocalAttentionSpec(2, 64, attention_chunk_size=5, chunk_lookback=3),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else str(value),
)
@pytest.mark.parametrize("new_tokens", [1, 3, 50])
def test_blocks_that_a_step_needs_fit_the_bound_and_no_others_are_kept(spec, new_tokens):
    for length in range(0, 300, 1 if new_tokens == 1 else 7):
        first = spec.first_block(length)
        assert first == min(reads(spec, position) for position in range(length, length + new_tokens)) // 16
        used = -(-(length + new_tokens) // 16) - first
        assert used <= spec.max_blocks(length + new_tokens, new_tokens) <= spec.max_blocks(10**6, new_tokens)


@pytest.mark.parametrize(
    "spec, page, blocks",
    [
        (FullAttentionSpec(8, 128), 16 * 8 * 256 * 2, 63),
        (FullAttentionSpec(8, 128, block_size=10), 10 * 8 * 256 * 2, 100),
        (SlidingWindowSpec(8, 128, sliding_window=100, extra_retained_tokens=4), 65536, 7 + 1),
        (SlidingWindowSpec(8, 128, sliding_window=2000), 65536, 63 + 1),
        (ChunkedLocalAttentionSpec(8, 128, attention_chunk_size=64), 65536, 5),
        (ChunkedLocalAttentionSpec(8, 128, attention_chunk_size=60), 65536, 4 + 1),
        (CrossAttentionSpec(8, 128), 65536, 94),
        (EncoderOnlyAttentionSpec(8, 128), 0, 0),
        (SinkFullAttentionSpec(8, 128, sink_len=32), 65536, 63),
        (MLAAttentionSpec(1, 576), 16 * 576 * 2, 63),
        (MLAAttentionSpec(1, 576, block_size=64, row_bytes=656), 64 * 656, 16),
        (TQFullAttentionSpec(8, 128, tq_slot_size=102), 16 * 8 * 102, 63),
        (FullAttentionSpec(8, 128, 64, page_size_padded=65536), 65536, 63),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else str(value),
)
def test_page_sizes_and_bounds(spec, page, blocks):
    assert spec.page_size_bytes == page
    assert spec.max_blocks(1000, 4, max_encoder_len=1500) == blocks
    assert spec.max_memory_usage_bytes(1000, 4, max_encoder_len=1500) == blocks * page
    if page:
        storage = torch.zeros(spec.storage_shape(3), dtype=spec.storage_dtype)
        assert storage_bytes(storage) == 3 * page
    assert type(spec).merge([spec, spec]) == spec


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: FullAttentionSpec(2, 64, sliding_window=8, attention_chunk_size=16), "together with attention_chunk"),
        (lambda: FullAttentionSpec(2, 64, page_size_padded=1 << 20), "typed storage"),
        (lambda: FullAttentionSpec(2, 64, 32, page_size_padded=6144 - 16), "blocks of 6144 bytes"),
        (lambda: FullAttentionSpec(2, 64, 32, page_size_padded=6144 + 8), "multiple of 16"),
        (lambda: SinkFullAttentionSpec(2, 64), "sink_len=0"),
        (lambda: SinkFullAttentionSpec(2, 64, sink_len=24), "sink_len=24 with block_size=16"),
        (lambda: TQFullAttentionSpec(2, 64), "tq_slot_size=0"),
        (lambda: TQFullAttentionSpec(2, 64, tq_slot_size=67), "an even number"),
        (lambda: MLAAttentionSpec(2, 576), "num_kv_heads=2 of an MLA cache"),
        (lambda: MLAAttentionSpec(1, 576, 512), "head_size_v=512 of an MLA cache"),
        (lambda: MLAAttentionSpec(1, 576, row_bytes=0), "row_bytes=0"),
        (lambda: ChunkedLocalAttentionSpec(2, 64), "attention_chunk_size=0"),
        (lambda: ChunkedLocalAttentionSpec(2, 64, attention_chunk_size=8, chunk_lookback=-1), "chunk_lookback=-1"),
        (lambda: SlidingWindowSpec(2, 64, sliding_window=8, extra_retained_tokens=-1), "extra_retained_tokens=-1"),
        (lambda: SlidingWindowSpec(2, 64), "sliding_window=0"),
        (lambda: SlidingWindowSpec(2, 64, sliding_window=True), "sliding_window=True"),
        (lambda: CrossAttentionSpec(2, 64).max_blocks(100), "max_encoder_len"),
        (lambda: FullAttentionSpec(0, 64), "num_kv_heads=0"),
        (lambda: FullAttentionSpec(2, -1), "head_size=-1"),
        (lambda: FullAttentionSpec(2, 64, block_size=1.5), "block_size=1.5"),
        (lambda: FullAttentionSpec(2, 64, kv_cache_dtype="fp8"), "kv_cache_dtype='fp8'"),
        (lambda: FullAttentionSpec(2, 64, layout="NDH"), "layout='NDH'"),
        *(
            (lambda length=length: FullAttentionSpec(2, 64).max_blocks(length), "an int, .* >= 0")
            for length in (-5, "5", 2.5, True)
        ),
    ],
)
def test_wrong_specs_and_lengths(make, text):
    with pytest.raises(ConfigError, match=text):
        make()


@pytest.mark.parametrize(
    "specs, text",
    [
        ([SlidingWindowSpec(2, 64, sliding_window=w) for w in (8, 16)], "sliding_window 8 and 16"),
        ([FullAttentionSpec(2, 64, sliding_window=w) for w in (8, 16)], "sliding_window 8 and 16"),
        ([FullAttentionSpec(2, 64), FullAttentionSpec(4, 64)], "num_kv_heads 2 and 4"),
        ([FullAttentionSpec(2, 64), FullAttentionSpec(2, 64, layout="HND")], "layout NHD and HND"),
        ([FullAttentionSpec(2, 64), SinkFullAttentionSpec(2, 64, sink_len=16)], "type FullAttentionSpec and SinkFull"),
        ([], "no spec to merge"),
    ],
)
def test_unequal_specs_do_not_merge(specs, text):
    with pytest.raises(CacheError, match=text):
        FullAttentionSpec.merge(specs)


def test_records_of_hidden_tokens_merge():
    plain, window = FullAttentionSpec(2, 64), FullAttentionSpec(2, 64, sliding_window=8)
    assert FullAttentionSpec.merge([plain, window, plain]) == window


def test_a_padded_storage_is_read_and_written_like_any():
    bound = layer(0, head_size_v=24)
    plain = allocate_kv_cache(bound, num_blocks=4, dtype=torch.float32).kv_caches[0]
    padded = torch.full((4, plain.shape[1] + 48), 0xFF, dtype=torch.uint8)
    builder = AttentionMetadataBuilder(2, 32, 64, layers=bound)
    step = builder.build([20], [20], [[1, 3]])
    query, key, value = (torch.randn(20, heads * width) for heads, width in ((4, 16), (2, 16), (2, 24)))
    expected = bound(query, key, value, metadata=step)
    bound.bind_kv_cache(padded, dtype=torch.float32)
    assert torch.equal(bound(query, key, value, metadata=step), expected)
    assert bool((padded[:, plain.shape[1] :] == 0xFF).all())
    assert torch.equal(padded[[1, 3], : plain.shape[1]][0], plain[1])
    with pytest.raises(CacheError, match="KV cache storage"):
        bound.bind_kv_cache(torch.zeros((4, plain.shape[1] + 8), dtype=torch.uint8), dtype=torch.float32)
    with pytest.raises(CacheError, match="padding included"):
        swap_blocks(plain, padded, [(0, 1)], bound.get_kv_cache_spec(torch.float32))


class Model(nn.Module):
    """Attention layers of different kinds, and a linear layer that gives dtype and device."""

    def __init__(self, *layers, dtype=torch.bfloat16):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.project = nn.Linear(4, 4, dtype=dtype)


def layer(index, *, cache_config=None, **changes):
    defaults = {"num_heads": 4, "head_size": 16, "scale": 0.25, "num_kv_heads": 2}
    prefix = changes.pop("prefix", f"layers.{index}.attn")
    return Attention(**{**defaults, **changes}, prefix=prefix, cache_config=cache_config)


def test_allocates_and_binds_every_layer():
    model = Model(layer(0), layer(1, per_layer_sliding_window=8), layer(2, head_size_v=24))
    allocation = allocate_kv_cache(model, num_blocks=5)
    assert allocation.dtype == torch.bfloat16 and allocation.device == torch.device("cpu")
    assert (allocation.num_blocks, allocation.block_size, allocation.num_tokens) == (5, 16, 80)
    for bound, entry in zip(model.layers, allocation.layers, strict=True):
        assert bound.kv_cache is entry.storage
        assert entry.storage.is_contiguous() and not entry.storage.view(torch.uint8).any()
        assert entry.spec.page_size_bytes * 5 == storage_bytes(entry.storage) == entry.num_bytes
    assert [type(entry.spec).__name__ for entry in allocation.layers] == [
        "FullAttentionSpec",
        "SlidingWindowSpec",
        "FullAttentionSpec",
    ]
    assert allocation.bytes_per_layer == {
        "layers.0.attn": 5 * 16 * 2 * 32 * 2,
        "layers.1.attn": 5 * 16 * 2 * 32 * 2,
        "layers.2.attn": 5 * 16 * 2 * 40 * 2,
    }
    assert allocation.total_bytes == sum(map(storage_bytes, allocation.kv_caches)) == 5 * allocation.bytes_per_block


@pytest.mark.parametrize("name", ["turboquant_k8v4", "turboquant_k3v4_nc", "turboquant_4bit_nc_signed"])
@pytest.mark.parametrize("head_size_v", [16, 32])
def test_layers_tell_the_bytes_of_turboquant_slots(name, head_size_v):
    """The slots fill the storage that the layer binds, and the allocation says so."""
    bound = layer(0, cache_config=vattn.CacheConfig(cache_dtype=name), head_size_v=head_size_v)
    allocation = allocate_kv_cache(bound, num_blocks=5, dtype=torch.float32)
    spec = bound.get_kv_cache_spec(torch.float32)
    assert type(spec) is TQFullAttentionSpec and allocation.layers[0].spec == spec
    assert spec.tq_slot_size * 5 * 16 * 2 == storage_bytes(bound.kv_cache)
    assert spec.content_bytes == block_bytes(bound.config)
    windowed = layer(0, cache_config=vattn.CacheConfig(cache_dtype=name), per_layer_sliding_window=8)
    assert type(windowed.get_kv_cache_spec(torch.float32)).__name__ == "SlidingWindowSpec"


def test_prints_what_it_costs():
    text = str(allocate_kv_cache(Model(layer(0), layer(1), layer(2, per_layer_sliding_window=8)), num_blocks=64))
    assert "64 blocks of 16 tokens = 1024 tokens, 384.00 KiB on cpu (6.00 KiB a block over 3 layers)" in text
    assert "2 x FullAttentionSpec bfloat16 NHD, 2 KV heads of 16, 128.00 KiB each" in text
    assert "1 x SlidingWindowSpec" in text


@pytest.mark.parametrize("memory", [10 * 3072 + 3071, "30.99KiB"])
def test_memory_is_rounded_down_to_whole_blocks(memory):
    config = CacheConfig(cache_dtype="fp8")
    quant = QuantConfig(k_scale="unit", v_scale="unit")
    model = Model(*(layer(i, cache_config=config, quant_config=quant) for i in range(3)))
    allocation = allocate_kv_cache(model, memory=memory)
    assert allocation.bytes_per_block == 3 * 16 * 2 * 32
    assert allocation.num_blocks == 10 and allocation.total_bytes <= parse_bytes(memory)
    assert all(entry.storage.dtype == torch.uint8 for entry in allocation.layers)


def test_memory_too_small_says_what_a_block_needs():
    model = Model(layer(0), layer(1))
    with pytest.raises(CacheError, match=r"memory='4095B' is 4095 bytes, and one block takes 4096 bytes over 2 layers"):
        allocate_kv_cache(model, memory="4095B")
    assert allocate_kv_cache(model, memory=4096).num_blocks == 1


@pytest.mark.parametrize(
    "text, count",
    [("17", 17), ("17B", 17), ("2GiB", 2 << 30), (" 1.5 mib ", 3 << 19), ("3GB", 3 * 10**9), ("2 KB", 2000), (12, 12)],
)
def test_parse_bytes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("count, text", [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (5 << 40, "5.00 TiB")])
def test_format_bytes(count, text):
    assert format_bytes(count) == text


NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
ONE_SIZE = r"exactly one of them\. Try: pass either memory='1GiB' or num_blocks=1024"
NO_SIZES = [0, -1, "", "1 elephant", "GiB", "-2GiB", "1e9", True, 2.5, "0.2B"]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, ConfigError, ONE_SIZE),
        ({"num_blocks": 4, "memory": "1GiB"}, ConfigError, ONE_SIZE),
        *(({"num_blocks": count}, ConfigError, f"num_blocks={count!r}") for count in (0, -3, 2.0, True, "8")),
        *(({"memory": size}, ConfigError, "memory=") for size in NO_SIZES),
        ({"num_blocks": 2**50}, CacheError, "could not be allocated on cpu"),
        ({"num_blocks": 2, "dtype": torch.int8}, DtypeError, r"torch\.int8"),
        *(({"num_blocks": 2, "device": name}, DeviceError, name) for name in ("meta", "nonsense", "mps")),
        pytest.param({"num_blocks": 2, "device": "cuda"}, DeviceError, "cuda", marks=NO_CUDA),
    ],
)
def test_wrong_allocations_bind_nothing(arguments, error, text):
    model = Model(layer(0))
    with pytest.raises(error, match=text):
        allocate_kv_cache(model, **arguments)
    assert model.layers[0].kv_cache is None


def test_models_without_a_cache_to_allocate():
    with pytest.raises(ConfigError, match=r"model=\[Linear"):
        allocate_kv_cache([nn.Linear(2, 2)], num_blocks=4)
    for model, text in (
        (nn.Sequential(nn.Linear(2, 2)), "Sequential contains no attention layer that has a KV cache"),
        (Model(layer(1, kv_sharing_target_layer_name="layers.0.attn")), "no attention layer of the model"),
        (Model(layer(0), layer(0)), r"two layers of the prefix 'layers\.0\.attn'"),
        (Model(layer(0), layer(1, cache_config=CacheConfig(block_size=32))), "block sizes 16, 32"),
    ):
        with pytest.raises(CacheError, match=text):
            allocate_kv_cache(model, num_blocks=2)


def test_dtypes_are_those_of_the_model():
    """A few wide parameters do not decide."""
    model = Model(layer(0), dtype=torch.float16)
    model.norm = nn.LayerNorm(4, dtype=torch.float32)
    assert allocate_kv_cache(model, num_blocks=2).kv_caches[0].dtype == torch.float16
    assert allocate_kv_cache(model, num_blocks=2, dtype=torch.float32).kv_caches[0].dtype == torch.float32


def test_a_model_on_several_devices_needs_one_named():
    model = Model(layer(0))
    model.far = nn.Linear(2, 2, device="meta")
    with pytest.raises(DeviceError, match="cpu, meta"):
        allocate_kv_cache(model, num_blocks=2)
    assert allocate_kv_cache(model, num_blocks=2, device="cpu").num_blocks == 2


def test_shared_caches_are_one_tensor_counted_once():
    shared = layer(1, kv_sharing_target_layer_name="layers.0.attn")
    model = Model(layer(0), shared, layer(2))
    allocation = allocate_kv_cache(model, num_blocks=3)
    assert shared.kv_cache is model.layers[0].kv_cache is not model.layers[2].kv_cache
    assert len(allocation.kv_caches) == 2
    assert allocation.bytes_per_layer["layers.1.attn"] == 0
    assert allocation.layers[1].shared_with == "layers.0.attn"
    assert allocation.total_bytes == sum(map(storage_bytes, allocation.kv_caches))
    assert "shared" in str(allocation)


@pytest.mark.parametrize(
    "target, reason",
    [
        ("layers.9.attn", "is no attention layer of the model"),
        ("layers.2.attn", "does not come before it"),
        ("layers.0b.attn", "has no cache of its own"),
    ],
)
def test_wrong_sharing_targets(target, reason):
    model = Model(
        layer(0),
        layer(0, prefix="layers.0b.attn", kv_sharing_target_layer_name="layers.0.attn"),
        layer(1, kv_sharing_target_layer_name=target),
        layer(2),
    )
    with pytest.raises(CacheError, match=f"'layers.1.attn' shares the KV cache of '{target}', which {reason}"):
        allocate_kv_cache(model, num_blocks=2)
    assert all(bound.kv_cache is None for bound in model.layers)


def test_layers_without_prefix_go_by_their_path():
    allocation = allocate_kv_cache(Model(layer(0, prefix=""), layer(1, prefix="")), num_blocks=2)
    assert [entry.name for entry in allocation.layers] == ["layers.0", "layers.1"]


def test_a_cache_made_in_inference_mode_can_be_updated_outside():
    with torch.inference_mode():
        allocation = allocate_kv_cache(Model(layer(0)), num_blocks=2)
    assert not allocation.kv_caches[0].is_inference()


def filled(config, num_blocks, seed=0):
    """Return a storage of random bytes."""
    storage = torch.empty(kv_cache_shape(config, num_blocks), dtype=kv_cache_dtype(config))
    size = storage.view(torch.uint8).shape
    rng = torch.Generator().manual_seed(seed)
    storage.view(torch.uint8).copy_(torch.randint(256, size, generator=rng, dtype=torch.uint8))
    return storage


def blocks_of(storage, config):
    """Return bytes of keys and values by block."""
    return [
        view.contiguous().view(torch.uint8).flatten(1)
        for view in key_value_views(*op_views(storage.clone(), config), config)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_cache_dtype_name", ["float32", "bfloat16", "fp8_e5m2"])
def test_swap_copies_keys_and_values_of_the_named_blocks(layout, kv_cache_dtype_name):
    config = make_config(kv_cache_dtype=kv_cache_dtype_name, **LAYOUTS[layout])
    source, destination = filled(config, 6), filled(config, 9, seed=1)
    before_source, before = blocks_of(source, config), blocks_of(destination, config)
    swap_blocks(source, destination, torch.tensor([(5, 0), (2, 8), (2, 3)]), spec_of(config))
    for old, new, from_source in zip(before, blocks_of(destination, config), before_source, strict=True):
        expected = old.clone()
        expected[[0, 8, 3]] = from_source[[5, 2, 2]]
        assert torch.equal(new, expected)
    for old, new in zip(before_source, blocks_of(source, config), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copy_reaches_every_layer_and_chains_read_first(layout):
    config = make_config(**LAYOUTS[layout])
    caches = {name: filled(config, 6, seed) for seed, name in enumerate(("a", "b"))}
    before = {name: blocks_of(cache, config) for name, cache in caches.items()}
    copy_blocks(caches, torch.tensor([(1, 2), (2, 4)]))
    for name, cache in caches.items():
        for old, new in zip(before[name], blocks_of(cache, config), strict=True):
            assert torch.equal(new, old[[0, 1, 1, 3, 2, 5]])


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla"])
def test_blocks_of_latents(cache_dtype):
    """Plain latents have three dimensions, packed ones two."""
    bound = vattn.MLAAttention(
        2, 0.25, 16, 8, 16, None, 128, torch.nn.Linear(128, 64, bias=False),
        cache_config=vattn.CacheConfig(cache_dtype=cache_dtype),
    )  # fmt: skip
    allocation = allocate_kv_cache(bound, num_blocks=6, dtype=torch.float32)
    (cache,), spec = allocation.kv_caches, bound.get_kv_cache_spec(torch.float32)
    assert cache.dim() == (3 if cache_dtype == "auto" else 2)
    cache.copy_(torch.randint(255, cache.shape))
    before, other = cache.clone(), torch.zeros_like(cache)
    copy_blocks(allocation, [(1, 2), (2, 4)])
    assert torch.equal(cache, before[[0, 1, 1, 3, 2, 5]])
    swap_blocks(cache, other, [(4, 0), (1, 5)], spec)
    assert torch.equal(other[[0, 5]], cache[[4, 1]]) and not other[1:5].any()
    with pytest.raises(CacheError, match="destination storage"):
        swap_blocks(cache, other[..., :-1].contiguous(), [(4, 0)], spec)


def test_copy_treats_a_shared_storage_once():
    config = make_config()
    cache = filled(config, 5)
    before = blocks_of(cache, config)
    copy_blocks([cache, cache, cache.view(cache.shape)], torch.tensor([(1, 2), (2, 3)]))
    for old, new in zip(before, blocks_of(cache, config), strict=True):
        assert torch.equal(new, old[[0, 1, 1, 2, 4]])


def test_copy_takes_allocations_and_mappings_of_pairs():
    model = Model(layer(0), layer(1, kv_sharing_target_layer_name="layers.0.attn"))
    allocation = allocate_kv_cache(model, num_blocks=4)
    (cache,) = allocation.kv_caches
    cache.normal_()
    before = cache.clone()
    for nothing in (torch.empty((0, 2), dtype=torch.int64), []):
        copy_blocks(allocation, nothing)
        assert torch.equal(cache, before)
    copy_blocks(allocation, torch.tensor([(1, 3)]))
    assert torch.equal(cache, before[:, [0, 1, 2, 1]])
    copy_blocks([cache], [(0, 2)])
    assert torch.equal(cache, before[:, [0, 1, 0, 1]])


@pytest.mark.parametrize(
    "mapping, reason",
    [
        ([(1, 2), (4, 0)], r"source block\(s\) \[4\]"),
        ([(1, 2), (0, 4)], r"destination block\(s\) \[4\]"),
        ([(1, 2), (-1, 0)], r"source block\(s\) \[-1\]"),
        ([(1, 2), (0, -7)], r"destination block\(s\) \[-7\]"),
        ([(1, 2), (3, 2)], r"destination block\(s\) \[2\] named twice"),
    ],
)
def test_wrong_ids_copy_nothing(mapping, reason):
    config = make_config()
    caches = [filled(config, 9), filled(config, 4, seed=1)]
    before = [cache.view(torch.uint8).clone() for cache in caches]
    with pytest.raises(CacheError, match=reason):
        copy_blocks(caches, torch.tensor(mapping))
    with pytest.raises(CacheError, match=reason):
        swap_blocks(caches[1], caches[1], torch.tensor(mapping), config)
    assert all(torch.equal(cache.view(torch.uint8), old) for cache, old in zip(caches, before, strict=True))


@pytest.mark.parametrize(
    "mapping",
    [
        [1, 2],
        [(1, 2), (3,)],
        [("a", "b")],
        torch.tensor([1, 2]),
        torch.tensor([[1, 2]], dtype=torch.int32),
        torch.ones(1, 3),
    ],
)
def test_wrong_mappings_and_storages(mapping):
    cache = filled(make_config(), 4)
    with pytest.raises(CacheError, match="block_mapping"):
        copy_blocks([cache], mapping)
    with pytest.raises(CacheError, match="5 dimensions, 2 in bytes"):
        copy_blocks([cache[0]], torch.tensor([(0, 1)]))


@pytest.mark.parametrize(
    "changes", [{"head_size": 8}, {"num_kv_heads": 4}, {"kv_cache_dtype": "float16"}, {"head_size_v": 8}]
)
def test_swap_refuses_another_geometry(changes):
    config = make_config()
    cache, other = filled(config, 4), filled(make_config(**changes), 4)
    for pair, name in (((cache, other), "destination"), ((other, cache), "source")):
        with pytest.raises(CacheError, match=f"{name} storage"):
            swap_blocks(*pair, torch.tensor([(0, 1)]), config)


@pytest.mark.gpu
def test_swap_between_devices():
    config = make_config()
    host, device = filled(config, 6), poisoned_empty(kv_cache_shape(config, 4), torch.float32, "cuda")
    swap_blocks(host, device, torch.tensor([(5, 0), (1, 3)]), config)
    back = torch.zeros_like(host)
    swap_blocks(device, back, torch.tensor([(0, 5), (3, 1)], device="cuda"), config)
    # Bytes, since random ones make NaN too.
    assert torch.equal(back[:, [1, 5]].view(torch.uint8), host[:, [1, 5]].view(torch.uint8))
    assert not back[:, [0, 2, 3, 4]].any()
