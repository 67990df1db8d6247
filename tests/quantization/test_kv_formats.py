"""Packed KV formats: bytes built by hand, round trips, error by step size, what is NaN, zero, tiny or too large."""

from __future__ import annotations

import math
import re
import struct
import warnings
from typing import Any

import pytest
import torch

import vattn
from tests.ops.rope_cases import make_call
from tests.support import make_config, random_paged_batch, relative_l2
from vattn import AttentionConfig, CacheConfig, QuantConfig
from vattn.cache.allocation import check_skip_layers
from vattn.cache.layout import kv_cache_shape, packed_views
from vattn.cache.stored_rows import decode_stored, stored_views
from vattn.config.rope import RopeConfig
from vattn.errors import CacheError, ConfigError, ScaleError, UnsupportedRequestError
from vattn.quantization.formats import KV_FORMATS, kv_cache_dtypes
from vattn.quantization.packed import decode_rows, encode_rows, rotate_back, rotate_query, turboquant
from vattn.quantization.packed.bit_packing import pack_codes, unpack_codes
from vattn.quantization.packed.hadamard import butterflies, flips

PACKED = [name for name, fmt in KV_FORMATS.items() if fmt.packed]
SCALE = torch.tensor([4.5 / 2688])
"""For NVFP4: normal values reach about 4.5, and 6 * 448 is the largest value under a scale of 1."""

ERRORS = {
    # A step is max / 127 with max near 2.9 sigma in 128 columns; uniform in a step: step / sqrt(12).
    "int8": 2.9 / 127 / math.sqrt(12),
    # Three mantissa bits: half a step is 2^-4 of a value at most; uniform in it, and in the binade: 2^-4 / sqrt(5.6).
    "fp8": 2**-4 / math.sqrt(5.6),
    "e4m3": 2**-4 / math.sqrt(5.6),
    # The range over 15 steps: 5.3 sigma in 128 columns.
    "int4": 5.3 / 15 / math.sqrt(12),
    "uniform4": 5.3 / 15 / math.sqrt(12),
    "uniform3": 5.3 / 7 / math.sqrt(12),
    # Eight steps from 0 to 6 of a maximum near 1.8 sigma in 16 columns; e2m1 is finer near zero.
    "nvfp4": 1.8 / 6 / math.sqrt(12) * 1.2,
    # The distortion of the codebook with the least squared error for normal numbers: 0.009497 and 0.03454.
    "codebook4": math.sqrt(0.009497),
    "codebook3": math.sqrt(0.03454),
}
"""Relative L2 error of rows of 128 normal numbers, from the size of a step."""

SLACK = 1.25
"""Over the expected error: the scale of a row varies with its largest value."""


def error_of(name: str, of_values: bool) -> float:
    part = KV_FORMATS[name].parts[of_values]
    return ERRORS.get(part.codec) or ERRORS[f"{part.codec}{part.bits}"]


def given(name: str) -> torch.Tensor | None:
    return SCALE if KV_FORMATS[name].quantised else None


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def round_trip(x: torch.Tensor, name: str, of_values: bool) -> torch.Tensor:
    codes, scales = encode_rows(x, name, of_values, given(name))
    return decode_rows(codes, scales, name, of_values, x.shape[-1], given(name))


@pytest.mark.parametrize("of_values", [False, True], ids=["keys", "values"])
@pytest.mark.parametrize("name", PACKED)
def test_the_error_is_that_of_the_step(name: str, of_values: bool) -> None:
    x = normal(400, 2, 128)
    error = relative_l2(round_trip(x, name, of_values), x)
    assert error_of(name, of_values) / SLACK < error < error_of(name, of_values) * SLACK


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_codes_are_packed_from_the_lowest_bit(bits: int) -> None:
    codes = torch.randint(1 << bits, (3, 24), generator=torch.Generator().manual_seed(bits))
    packed = pack_codes(codes.int(), bits)
    for row, stored in zip(codes.tolist(), packed.tolist(), strict=True):
        number = sum(code << (bits * place) for place, code in enumerate(row))
        assert bytes(stored) == number.to_bytes(3 * bits, "little")
    assert torch.equal(unpack_codes(packed, bits), codes.int())


def test_rows_built_by_hand() -> None:
    """One token of one head of each format, byte by byte."""
    x = torch.tensor([1.0, -2.0, 0.5, 127.0, 0.0, 3.49, -3.5, -127.0])
    codes, scales = encode_rows(x.view(1, 1, 8), "int8_per_token_head", False)
    assert bytes(codes[0, 0].tolist()) == bytes(c & 255 for c in (1, -2, 1, 127, 0, 3, -4, -127))
    assert scales.tolist() == [[[1.0]]]
    # A value of 15 steps from -5: codes are the distance, low nibbles first; then fp16 step and least value.
    x = torch.tensor([-5.0, 10.0, 0.0, 2.4, 2.6, 9.0, -4.0, -4.5])
    codes, scales = encode_rows(x.view(1, 1, 8), "turboquant_k8v4", True)
    assert codes.tolist() == [[[0xF0, 0x75, 0xE8, 0x11]]]
    assert struct.pack("<2e", 1.0, -5.0) == bytes(scales.view(torch.uint8).flatten().tolist())
    # e2m1 of 6, 3, 1.5 and 0.5 steps under a block scale of 1 (0x38 as e4m3).
    x = torch.tensor([6.0, -3.0, 1.5, 0.5] * 4)
    codes, scales = encode_rows(x.view(1, 1, 16), "nvfp4", False, torch.ones(1))
    assert codes.tolist() == [[[0xD7, 0x13] * 4]] and scales.tolist() == [[[0x38]]]


def test_the_zero_point_lies_in_the_lowest_bits_of_the_scale() -> None:
    x = normal(50, 1, 64)
    _, scales = encode_rows(x, "int4_per_token_head", False)
    y = butterflies(x * flips(64, "block_hadamard"), 64)
    low, high = y.amin(-1), y.amax(-1)
    bits = scales[..., 0].view(torch.int32)
    step = (bits & ~15).view(torch.float32)
    torch.testing.assert_close(step, (high - low) / 15, rtol=2e-6, atol=0)
    assert torch.equal(bits & 15, (-low / step + 0.5).floor().int())


@pytest.mark.parametrize("row", [0, 37, 127])
def test_signs_spread_offsets(row: int) -> None:
    """An offset along a row of the Hadamard matrix costs the unsigned codebook its accuracy, the signed one nothing."""
    x = normal(2000, 1, 128) + butterflies(torch.eye(128)[row], 128)

    def error(name: str) -> float:
        read = decode_rows(*encode_rows(x, name, False), name, False, 128)
        return float((read - x).square().sum() / x.square().sum())

    # 0.0095 is the squared error of 16 Lloyd-Max levels for normal numbers, 0.0345 that of 8.
    assert error("turboquant_4bit_nc_signed") < 0.0095 < 0.2 < error("turboquant_4bit_nc")
    assert error("turboquant_3bit_nc_signed") < 0.0345 < 0.3 < error("turboquant_3bit_nc")


@pytest.mark.parametrize("bits", [3, 4])
def test_centroids_are_the_means_of_their_intervals(bits: int) -> None:
    """The condition of Lloyd and Max, checked by integrating the normal density."""
    bounds = [-math.inf, *turboquant.BOUNDARIES[bits], math.inf]
    for low, high, level in zip(bounds, bounds[1:], turboquant.CENTROIDS[bits], strict=False):
        density = [math.exp(-z * z / 2) / math.sqrt(2 * math.pi) for z in (low, high)]
        mass = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
        assert abs((density[0] - density[1]) / mass - level) < 1e-6


@pytest.mark.parametrize("width", [8, 16, 64, 128, 256])
def test_butterflies_are_the_hadamard_matrix(width: int) -> None:
    index = torch.arange(width)
    common = index[:, None] & index[None, :]
    parity = sum((common >> bit) & 1 for bit in range(10)) % 2
    matrix = 1.0 - 2.0 * parity
    x = normal(5, width)
    torch.testing.assert_close(butterflies(x, width), (x.double() @ matrix.double()).float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["int4_per_token_head", "turboquant_4bit_nc", "turboquant_3bit_nc_signed"])
def test_rotating_queries_and_results_is_rotating_keys_and_values_back(name: str) -> None:
    width = 64 if "turbo" in name else 96
    key, value, query = normal(40, 2, width), normal(40, 2, width, seed=1), normal(7, 2, width, seed=2)
    weights = normal(7, 40, seed=3)
    stored = [encode_rows(x, name, of_values) for of_values, x in enumerate((key, value))]
    rotated = [decode_rows(*rows, name, bool(i), width, rotated=True) for i, rows in enumerate(stored)]
    turned = [decode_rows(*rows, name, bool(i), width) for i, rows in enumerate(stored)]
    scores = torch.einsum("qkd,skd->kqs", rotate_query(query, name), rotated[0])
    torch.testing.assert_close(scores, torch.einsum("qkd,skd->kqs", query, turned[0]), rtol=1e-4, atol=1e-3)
    out = rotate_back(torch.einsum("qs,skd->qkd", weights, rotated[1]), name)
    torch.testing.assert_close(out, torch.einsum("qs,skd->qkd", weights, turned[1]), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [name for name in PACKED if name != "nvfp4"])
def test_a_row_that_is_not_finite_is_nan_throughout_and_no_other(name: str, bad: float) -> None:
    x = normal(6, 2, 64)
    x[2, 1, 17] = bad
    for of_values, part in enumerate(KV_FORMATS[name].parts):
        got = round_trip(x, name, bool(of_values))
        expected = torch.zeros(6, 2, dtype=torch.bool)
        if part.codec != "e4m3":
            expected[2, 1] = True
            assert torch.equal(got.isnan().all(-1), expected) and torch.equal(got.isnan().any(-1), expected)
        elif math.isinf(bad):
            assert got[2, 1, 17] == math.copysign(448.0, bad) and not bool(got.isnan().any())
        else:
            assert got.isnan().nonzero().tolist() == [[2, 1, 17]]


def test_nvfp4_groups_that_are_not_finite() -> None:
    x = normal(1, 1, 48)
    x[0, 0, 3], x[0, 0, 20] = math.nan, -math.inf
    got = round_trip(x, "nvfp4", False)[0, 0]
    assert bool(got[:16].isnan().all()) and got[20] == pytest.approx(-4.5) and not bool(got[16:].isnan().any())


@pytest.mark.parametrize("name", PACKED)
def test_zeros_stay_zeros_and_constant_rows_constant(name: str) -> None:
    for of_values, part in enumerate(KV_FORMATS[name].parts):
        assert not bool(round_trip(torch.zeros(3, 1, 64), name, bool(of_values)).any())
        if part.codec == "uniform":
            assert torch.equal(round_trip(torch.full((3, 1, 64), -2.5), name, True), torch.full((3, 1, 64), -2.5))


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e-12])
def test_tiny_rows_come_back_tiny(name: str, size: float) -> None:
    x = normal(3, 1, 64) * size
    for of_values in (False, True):
        got = round_trip(x, name, of_values)
        assert bool(got.isfinite().all()) and float(got.abs().max()) < 1e-9


@pytest.mark.parametrize("name", PACKED)
def test_rows_beyond_fp16_scales_saturate_or_are_held(name: str) -> None:
    x = normal(3, 1, 64) * 1e7
    for of_values, part in enumerate(KV_FORMATS[name].parts):
        got = round_trip(x, name, bool(of_values))
        assert bool(got.isfinite().all())
        if part.scale_dtype == torch.float32:
            assert relative_l2(got, x) < 0.2
        if part.codec == "codebook":
            # The direction stays, the length is cut to what fp16 holds.
            angle = torch.nn.functional.cosine_similarity(got, x, dim=-1)
            assert float(angle.min()) > 0.95 and float(got.norm(dim=-1).max()) < 66000 * math.sqrt(64)


@pytest.mark.parametrize("name", PACKED)
def test_a_block_holds_codes_and_scales_one_after_the_other(name: str) -> None:
    """The storage written through views is what the documentation says, built here by concatenation."""
    config = make_config(head_size=32, head_size_v=64, num_kv_heads=2, num_heads=2, block_size=8, kv_cache_dtype=name)
    for layout in ("NHD", "HND"):
        config = config.replace(kv_cache_layout=layout)
        storage = torch.zeros(kv_cache_shape(config, 2), dtype=torch.uint8)
        parts: list[torch.Tensor] = []
        for of_values, rows in enumerate(packed_views(storage, config)):
            new = encode_rows(normal(2, 8, 2, (32, 64)[of_values]), name, bool(of_values), given(name))
            for held, stored in zip(rows, new, strict=True):
                if held is not None and stored is not None:
                    held.copy_(stored)
                    ordered = stored.transpose(1, 2) if layout == "HND" else stored
                    parts.append(ordered.contiguous().view(torch.uint8).flatten(1))
        assert torch.equal(storage, torch.cat(parts, dim=1))


def test_slots_take_the_bytes_that_turboquant_counts() -> None:
    sizes = {"turboquant_k8v4": 196, "turboquant_4bit_nc": 134, "turboquant_k3v4_nc": 118, "turboquant_3bit_nc": 102}
    sizes |= {f"{name}_signed": size for name, size in sizes.items() if name != "turboquant_k8v4"}
    assert {name: KV_FORMATS[name].token_bytes(128, 128) for name in sizes} == sizes
    assert KV_FORMATS["int4_per_token_head"].token_bytes(128, 128) == 2 * (64 + 4)
    assert KV_FORMATS["nvfp4"].token_bytes(128, 128) == 2 * (64 + 8)


def layer(index: int = 0, cache: str = "int4_per_token_head", size: int = 64, **config: Any) -> vattn.Attention:
    quant = QuantConfig(k_scale=0.002, v_scale=0.002) if KV_FORMATS[cache].quantised else None
    return vattn.Attention(
        4, size, size**-0.5, 2, prefix=f"layers.{index}", quant_config=quant,
        cache_config=CacheConfig(cache_dtype=cache, **config),
    )  # fmt: skip


def attend(model: vattn.Attention, query: Any, key: Any, value: Any) -> torch.Tensor:
    builder = vattn.AttentionMetadataBuilder(max_num_reqs=2, max_num_tokens=64, max_seq_len=128, layers=model)
    step = builder.build(query_lens=[37], seq_lens=[37], block_tables=[[3, 1, 5]])
    with torch.no_grad(), vattn.forward_context(step):
        return model(query, key, value)


def test_mixed_formats_under_one_allocator() -> None:
    formats = ("int4_per_token_head", "turboquant_4bit_nc", "int8_per_token_head")
    model = torch.nn.ModuleList(layer(i, name) for i, name in enumerate(formats))
    model.append(layer(3, "int4_per_token_head", kv_cache_dtype_skip_layers=("3",)))
    cache = vattn.allocate_kv_cache(model, num_blocks=6, dtype=torch.float32)
    sizes = [each.spec.page_size_bytes for each in cache.layers]
    assert sizes == [16 * 2 * n for n in (72, 70, 136, 512)] and cache.bytes_per_block == sum(sizes)
    assert cache.layers[3].spec.kv_cache_dtype == "float32"
    for storage in cache.kv_caches:
        storage.view(torch.uint8).random_(256)
    before = [storage.clone() for storage in cache.kv_caches]
    vattn.copy_blocks(cache, [(2, 4)])
    for old, new in zip(before, cache.kv_caches, strict=True):
        axis = 0 if new.dim() == 2 else 1
        then, now = (each.movedim(axis, 0).reshape(6, -1).view(torch.uint8) for each in (old, new))
        assert torch.equal(now[4], then[2]) and torch.equal(now[:4], then[:4])


def test_boundary_layers_keep_the_model_dtype() -> None:
    skip = vattn.boundary_layers(8)
    assert skip == ("0", "1", "6", "7")
    assert (
        vattn.boundary_layers(3) == ("0", "2") and vattn.boundary_layers(1) == () and vattn.boundary_layers(4, 0) == ()
    )
    model = torch.nn.ModuleList(layer(i, "turboquant_3bit_nc", kv_cache_dtype_skip_layers=skip) for i in range(8))
    cache = vattn.allocate_kv_cache(model, num_blocks=3, dtype=torch.float32)
    packed = [each.spec.kv_cache_dtype == "turboquant_3bit_nc" for each in cache.layers]
    assert packed == [False, False, True, True, True, True, False, False]
    with pytest.raises(ConfigError, match="num_layers"):
        vattn.boundary_layers(0)


SKIPPED_NOWHERE = {
    "another number": (("layers.0", "layers.1"), ("1", "9"), "entries '9'.*numbers 0, 1", False),
    "no number": (("attn",), ("0",), "entries '0'.*no prefix has one", True),
    "no window": (("layers.0",), ("sliding_window",), "entries 'sliding_window'.*no layer has a window", False),
}
"""Prefixes, entries, what is said, and whether no other pipeline rank could make it right."""


@pytest.mark.parametrize(("prefixes", "skip", "text", "never"), SKIPPED_NOWHERE.values(), ids=SKIPPED_NOWHERE)
def test_skipped_layers_that_are_not_there_are_told(prefixes, skip, text, never) -> None:
    def make(skip: tuple[str, ...]) -> torch.nn.ModuleList:
        config = CacheConfig(cache_dtype="int8_per_token_head", kv_cache_dtype_skip_layers=skip)
        return torch.nn.ModuleList(vattn.Attention(4, 64, 0.125, 2, prefix=p, cache_config=config) for p in prefixes)

    model = make(skip)
    with pytest.raises(ConfigError, match=text):
        check_skip_layers({each.prefix: each for each in model}, whole=True)
    told = pytest.raises(ConfigError, match=text) if never else pytest.warns(UserWarning, match=text)
    with told:
        vattn.allocate_kv_cache(model, num_blocks=3, dtype=torch.float32)
    assert all((each.kv_cache is None) == never for each in model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vattn.allocate_kv_cache(make(()), num_blocks=3, dtype=torch.float32)


def test_a_whole_model_refuses_skipped_layers_that_it_lacks() -> None:
    pytest.importorskip("transformers")
    from tests.integrations.hf_families import make_model
    from vattn.integrations.transformers import enable

    def config(*skip: str) -> CacheConfig:
        return CacheConfig(cache_dtype="int8_per_token_head", kv_cache_dtype_skip_layers=skip)

    model = make_model("llama")
    with pytest.raises(ConfigError, match=r"entries '9'.*numbers 0, 1"):
        enable(model, cache_config=config("0", "9"))
    cache = enable(model, cache_config=config("0")).allocate(num_blocks=3)
    assert [each.spec.kv_cache_dtype for each in cache.layers] == ["float32", "int8_per_token_head"]


def test_a_storage_of_another_format_is_refused() -> None:
    model = layer(cache="int8_per_token_head")
    config = make_config(head_size=64, kv_cache_dtype="int4_per_token_head", block_size=16)
    assert kv_cache_shape(config, 4) == (4, 16 * 2 * 72)
    for shape, dtype in (((4, 16 * 2 * 72), torch.uint8), ((2, 4, 16, 2, 64), torch.uint8)):
        with pytest.raises(CacheError, match="KV cache storage"):
            model.bind_kv_cache(torch.zeros(shape, dtype=dtype), dtype=torch.float32)
    owner = layer(0, "int4_per_token_head")
    reader = vattn.Attention(
        4, 64, 0.125, 2, prefix="layers.1", kv_sharing_target_layer_name="layers.0",
        cache_config=CacheConfig(cache_dtype="int8_per_token_head"),
    )  # fmt: skip
    with pytest.raises(CacheError, match="kv_cache_dtype int4_per_token_head"):
        vattn.allocate_kv_cache(torch.nn.ModuleList([owner, reader]), num_blocks=4, dtype=torch.float32)


def test_rebinding_finds_the_scales_in_the_new_storage() -> None:
    model, rows = layer(cache="int8_per_token_head"), (normal(37, 256), normal(37, 128), normal(37, 128))
    first = vattn.allocate_kv_cache(model, num_blocks=8, dtype=torch.float32)
    expected = attend(model, *rows)
    moved = first.kv_caches[0].clone()
    first.kv_caches[0].fill_(255)
    model.bind_kv_cache(moved, dtype=torch.float32)
    assert torch.equal(attend(model, *rows), expected)


def test_unknown_formats_are_told_which_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        CacheConfig(cache_dtype="int4")
    assert all(name in str(caught.value) for name in kv_cache_dtypes())


@pytest.mark.parametrize(
    ("name", "sizes", "why"),
    [
        ("turboquant_4bit_nc", (96, 64), "head_size 96 .* power of two"),
        ("nvfp4", (64, 24), "head_size_v 24 .* multiple of 16"),
    ],
)
def test_head_sizes_that_a_format_does_not_take(name: str, sizes: tuple[int, int], why: str) -> None:
    kind = "tensor" if KV_FORMATS[name].quantised else "none"
    config = AttentionConfig(2, 2, *sizes, 0.1, "float32", name, kv_scale=kind, backend="TORCH_SDPA")
    assert any(re.search(why, reason) for reason in vattn.explain(config, "cpu").refusals["TORCH_SDPA"])
    with pytest.raises(ConfigError, match=why):
        vattn.cache.specs.FullAttentionSpec(2, *sizes, kv_cache_dtype=name)
    model = vattn.Attention(
        2, sizes[0], 0.1, head_size_v=sizes[1], cache_config=CacheConfig(cache_dtype=name),
        quant_config=QuantConfig(k_scale=1.0, v_scale=1.0) if KV_FORMATS[name].quantised else None,
    )  # fmt: skip
    with pytest.raises((ConfigError, UnsupportedRequestError), match=why):
        vattn.allocate_kv_cache(model, num_blocks=2, dtype=torch.float32)


def test_scales_go_with_the_formats_that_take_them() -> None:
    with pytest.raises(ScaleError, match="k_scale"):
        vattn.Attention(2, 64, 0.1, cache_config=CacheConfig(cache_dtype="nvfp4"))
    with pytest.raises(ScaleError, match="k_scale"):
        vattn.Attention(
            2, 64, 0.1, cache_config=CacheConfig(cache_dtype="int8_per_token_head"),
            quant_config=QuantConfig(k_scale=1.0, v_scale=1.0),
        )  # fmt: skip


def test_calculated_scales_of_nvfp4_use_its_whole_range() -> None:
    model = vattn.Attention(4, 64, 0.125, 2, cache_config=CacheConfig(cache_dtype="nvfp4", calculate_kv_scales=True))
    vattn.allocate_kv_cache(model, num_blocks=8, dtype=torch.float32)
    query, key, value = normal(37, 256), normal(37, 128, seed=1) * 100, normal(37, 128, seed=2)
    attend(model, query, key, value)
    largest = torch.stack((key.abs().amax(), value.abs().amax()))
    scales = torch.stack((model.k_scale, model.v_scale)).flatten()
    assert bool(((scales * 2688) >= largest).all()) and bool(((scales * 2688) < 4 * largest).all())


@pytest.mark.parametrize("name", ["int8_per_token_head", "turboquant_3bit_nc"])
def test_batches_hold_what_their_rows_were_encoded_to(name: str) -> None:
    """The batch makers of the suite read keys back from the cache as the codecs store them."""
    batch = random_paged_batch(make_config(head_size=32, kv_cache_dtype=name, block_size=8), [3], [21])
    rows = stored_views(batch.args.key_cache, batch.args.value_cache, batch.config)[0]
    blocks = batch.args.block_table[0, :3].long()
    codes, scales = rows.codes[blocks].flatten(0, 1)[:21], rows.scales[blocks].flatten(0, 1)[:21]
    assert torch.equal(decode_stored(type(rows)(codes, scales), batch.config, False, None), batch.keys[0])


@pytest.mark.parametrize("name", ["int4_per_token_head", "turboquant_3bit_nc"])
def test_chunks_of_a_prompt_see_what_the_whole_saw(name: str) -> None:
    """Prefill reads what decode will read: cutting a prompt changes nothing but the order of sums."""
    rows = [normal(37, heads * 64, seed=heads) for heads in (4, 2, 3)]
    rows[2] = rows[2][:, :128]
    whole, cut = layer(cache=name), layer(cache=name)
    for model in (whole, cut):
        vattn.allocate_kv_cache(model, num_blocks=8, dtype=torch.float32)
    builder = vattn.AttentionMetadataBuilder(max_num_reqs=2, max_num_tokens=64, max_seq_len=128, layers=cut)
    parts = []
    for first, end in ((0, 20), (20, 36), (36, 37)):
        step = builder.build(query_lens=[end - first], seq_lens=[end], block_tables=[[3, 1, 5]])
        padded = [torch.nn.functional.pad(x[first:end], (0, 0, 0, len(step.slot_mapping) - end + first)) for x in rows]
        with torch.no_grad(), vattn.forward_context(step):
            parts.append(cut(*padded)[: end - first])
    assert relative_l2(torch.cat(parts), attend(whole, *rows)) < 1e-5


@pytest.mark.sample(2, "TRITON_ATTN")
@pytest.mark.parametrize("backend", ["TORCH_SDPA", "TRITON_ATTN"])
@pytest.mark.parametrize("name", ["int4_per_token_head", "nvfp4"])
def test_rotated_keys_are_stored_as_by_two_calls(name: str, backend: str) -> None:
    """RoPE with the cache update is rotation into a plain cache, and an update with what lies there."""
    shape = {"dtype": "bfloat16", "head_size": 32, "num_kv_heads": 2, "block_size": 8, "backend": backend}
    config, plain = make_config(kv_cache_dtype=name, **shape), make_config(**shape)
    problem = vattn.explain(config, "cpu").refusals[backend]
    if problem:
        pytest.skip(problem[0])
    rope = RopeConfig(24)
    args, other = make_call(config, rope), make_call(plain, rope)
    torch.ops.vattn.rope_kv_cache_update(*args)
    torch.ops.vattn.rope_kv_cache_update(*other)
    assert torch.equal(args.query_out, other.query_out)
    slots = args.slot_mapping
    inside = (slots >= 0) & (slots < other.key_cache.shape[0] * 8)
    blocks, offsets = slots[inside] // 8, slots[inside] % 8
    stored = torch.full_like(args.key_cache, 255)
    rows = [rows.codes[blocks, offsets] for rows in stored_views(other.key_cache, other.value_cache, plain)]
    scales = (args.k_scale, args.v_scale)
    torch.ops.vattn.kv_cache_update(*rows, stored, None, slots[inside], *scales, config.encode())
    assert torch.equal(args.key_cache, stored)


def test_the_benchmark_runs_small(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for every format, each compared with the reference first; peers that are missing say what is missing."""
    from benchmarks.attention import kv_formats

    monkeypatch.setattr("sys.argv", ["kv_formats.py", "--tiny", "--replays", "1", "--peers", "xqa"])
    kv_formats.main()
    shown = capsys.readouterr().out
    lines = [line.split(" | ")[0].strip("| ") for line in shown.splitlines()[2:] if line.startswith("|")]
    assert lines == ["fp8_e4m3", *PACKED] and "\n- XQA, fp8_e4m3: " in shown and "\n- XQA, nvfp4: " in shown


EVERY = [name for name, fmt in KV_FORMATS.items() if fmt.quantised or fmt.packed]


# The interpreter takes seconds for each; the kernel's masks are those of every format.
INTERPRETED = [(name, "TRITON_ATTN") for name in ("fp8_e4m3", "int4_per_token_head", "turboquant_3bit_nc")]


@pytest.mark.sample(3, "TRITON_ATTN")
@pytest.mark.parametrize(("name", "backend"), [*((name, "TORCH_SDPA") for name in EVERY), *INTERPRETED])
def test_what_is_not_finite_stays_in_its_request_and_head(name: str, backend: str) -> None:
    """Rows that see a NaN key or value are NaN; those of other heads and requests are as they were, to the bit."""
    scales = {"k_scale": 0.02, "v_scale": 0.02} if KV_FORMATS[name].quantised else {}
    model = vattn.Attention(
        2, 32, 0.2, 2, attn_backend=backend, cache_config=CacheConfig(cache_dtype=name),
        quant_config=QuantConfig(**scales),
    )  # fmt: skip
    try:
        vattn.allocate_kv_cache(model, num_blocks=4, dtype=torch.float32)
    except UnsupportedRequestError as error:
        pytest.skip(str(error).splitlines()[0])
    builder = vattn.AttentionMetadataBuilder(max_num_reqs=2, max_num_tokens=32, max_seq_len=32, layers=model)
    step = builder.build(query_lens=[12, 9], seq_lens=[12, 9], block_tables=[[3], [1]])

    def run(which: int, bad: float | None, token: int = 7) -> torch.Tensor:
        rows = [normal(21, 2, 32, seed=seed) for seed in range(3)]
        if bad is not None:
            rows[which][token, 1, 5] = bad
        with torch.no_grad():
            return model(*rows, metadata=step).view(21, 2, 32).clone()

    clean = run(0, None)
    # A row that sees nothing but NaN is not taken for one that sees nothing.
    assert bool(run(1, math.nan, token=0)[:12, 1].isnan().all())
    for which, bad in ((1, math.nan), (2, math.nan), (1, math.inf), (2, -math.inf)):
        got = run(which, bad)
        assert torch.equal(got[12:], clean[12:]) and torch.equal(got[:, 0], clean[:, 0])
        # A NaN value meets weights of zero too: earlier rows of the step may be NaN with it.
        assert which == 2 or torch.equal(got[:7, 1], clean[:7, 1])
        codec = KV_FORMATS[name].parts[which - 1].codec if KV_FORMATS[name].packed else "plain"
        saturates = math.isinf(bad) and codec in ("plain", "e4m3", "nvfp4")
        seen = got[7:12, 1]
        if saturates:
            assert bool(seen.isfinite().all())
        elif codec in ("plain", "nvfp4") and which == 2:
            # One column, or one group of them.
            assert bool(seen[:, 5].isnan().all())
        else:
            assert bool(seen.isnan().all())


def hard_rows(size: int) -> torch.Tensor:
    """Rows `[n, 2, size]` of ties, zeros of both signs, tiny, huge and not finite numbers."""
    column = torch.arange(size, dtype=torch.float32)
    rows = [
        torch.zeros(size), -torch.zeros(size), torch.ones(size), -torch.ones(size), column - 0.5, 0.5 - column,
        # Scales of 1 and halves between them: for int8, for steps of 15, and for e2m1.
        torch.where(column == 0, 127.0, column % 120 - 59.5), (column % 16).clamp(max=15) - torch.where(
            column % 3 == 1, 0.5, 0.0), torch.where(column % 16 == 0, 6.0 * 448, column % 12 * 112.0),
        (column == 5) * 3.0, (column == 5) * -0.3, 1e-12 * (column - 9), 1e-30 * (column - 9), 1e-44 * (column - 9),
        1e9 * (column - 31.5), 3e37 * (column / size - 0.3), 65000.0 + column, -70000.0 - column,
        torch.where(column == 3, torch.nan, column), torch.where(column == 3, torch.inf, column),
        torch.where(column == 3, -torch.inf, column), torch.full((size,), torch.inf), torch.full((size,), torch.nan),
    ]  # fmt: skip
    return torch.stack((torch.stack(rows), torch.stack(rows[1:] + rows[:1])), dim=1)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", PACKED)
def test_kernels_store_hard_rows_as_the_reference(name: str) -> None:
    rows = hard_rows(64)
    config = make_config(head_size=64, num_kv_heads=2, num_heads=2, block_size=8, kv_cache_dtype=name)
    scales = (SCALE, SCALE) if KV_FORMATS[name].quantised else (None, None)
    caches = []
    for backend in ("TRITON_ATTN", "TORCH_SDPA"):
        one = config.replace(backend=backend)
        storage = torch.full(kv_cache_shape(one, 4), 0xA5, dtype=torch.uint8)
        slots = torch.arange(len(rows))
        torch.ops.vattn.kv_cache_update(rows, rows.flip(0), storage, None, slots, *scales, one.encode())
        caches.append(storage)
    assert torch.equal(*caches)
