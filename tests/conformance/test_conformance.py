"""Every backend against the reference on the same hand-picked rows; what a backend refuses it must refuse by name."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.conformance.cases import batch_of_row, fitted, make_cache_update
from tests.conformance.compare import compare_cache_update, refusal, run_and_compare
from tests.conformance.fuzz import fuzz_seed
from tests.conformance.rows import FORMATS, ROWS
from tests.support import make_config, usable
from vattn.backends import selector
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo
from vattn.config.features import FEATURES, requested_features
from vattn.quantization.formats import KV_FORMATS, MODEL_DTYPES, OUTPUT_FORMATS

BACKENDS = selector.backend_names()
PLAIN = ("plain", "plain-decodes")


def places() -> Iterator[tuple[str, str, list[Any]]]:
    """Yield every device with the backends that run on it, and the device's marks."""
    interpreted = {"interpreter"} if DeviceInfo.of("cpu").triton_interpreter else set()
    for device, kinds in (("cpu", {"cpu"} | interpreted), ("cuda", {"cuda"})):
        for name in BACKENDS:
            if kinds & set(selector.get_backend(name).capabilities.devices):
                yield device, name, [pytest.mark.gpu] if device == "cuda" else []


def attention_cases() -> Iterator[Any]:
    """Every row on a GPU and by torch; the other backends take fewer on a CPU."""
    for (device, name, marks), row in itertools.product(places(), ROWS):
        yield pytest.param(device, name, row, id=f"{device}-{name}-{row}", marks=marks or cpu_marks(name, row))


def cpu_marks(name: str, row: str) -> list[Any]:
    """Backends that run another's code take the rows about what they add; an interpreted one draws from all rows."""
    if name in ADDED and row not in PLAIN and ADDED[name] not in row:
        return [pytest.mark.long]
    if "cpu" in selector.get_backend(name).capabilities.devices or row in PLAIN:
        return []
    if "wide" in row or "block-size2048+" in row:
        return [pytest.mark.long]
    draw = zlib.crc32(f"{fuzz_seed()} {row}".encode())
    if row in FORMATS:
        return [pytest.mark.long] if draw % 3 else [pytest.mark.slow] if draw % 9 else []
    return [pytest.mark.slow] if draw % 3 else []


DIFFERENTIAL = "DIFFERENTIAL_FLASH_ATTN"
ADDED = {"TREE_ATTN": "tree", DIFFERENTIAL: "pairs"}


PLACES = {
    (name, device): pytest.param(
        (name, device), id=f"{name}-{device}", marks=marks or ([pytest.mark.long] if name in ADDED else [])
    )
    for device, name, marks in places()
}


@pytest.fixture(params=PLACES.values())
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Name of a backend that can be used in this process, and a device."""
    return usable(request.param[0]), request.param[1]


def test_rows_name_every_feature_alone_and_every_pair_of_formats() -> None:
    configs = [make_config(**{"block_size": 8, **row.changes}) for row in ROWS.values()]
    asked = [requested_features(config) for config in configs]
    assert {name for name in FEATURES if frozenset({name}) not in asked} == set()
    formats = {(config.kv_cache_dtype, config.output_format) for config in configs}
    plain = [name for name, fmt in KV_FORMATS.items() if not fmt.packed]
    # Packed formats decode before anything else; they meet the output formats in turns.
    assert formats >= set(itertools.product(plain, OUTPUT_FORMATS)) | {(name, "none") for name in KV_FORMATS}


@pytest.mark.parametrize(("device", "name", "row"), list(attention_cases()))
def test_attention(name: str, row: str, device: str) -> None:
    run_and_compare(batch_of_row(ROWS[row], usable(name), device=device, seed=len(row)))


@pytest.mark.parametrize("row", ["plain", "lse", "window5", "tree", "fp8-heads+hnd+window"])
def test_attention_with_a_plan(place: tuple[str, str], row: str) -> None:
    backend, device = place
    batch = batch_of_row(ROWS[row], backend, device=device, seed=7)
    if not selector.get_backend(backend).host_plan_size(batch.config) and not refusal(batch.config, device):
        batch = batch.planned()
    if not batch.args.plan:
        pytest.skip("takes no schedule here, so it would repeat test_attention")
    run_and_compare(batch)


# TORCH_SDPA calls the reference, so that on a CPU this would compare it with itself.
WRITERS = [param for place, param in PLACES.items() if place not in {("TORCH_SDPA", "cpu"), (DIFFERENTIAL, "cpu")}]


@pytest.mark.sample(3, "TRITON_ATTN")
@pytest.mark.parametrize("place", WRITERS, indirect=True)
@pytest.mark.parametrize(("layout", "width"), [("NHD", (16, 16)), ("HND", (24, 8))], ids=["NHD-equal", "HND-unequal"])
@pytest.mark.parametrize("kv", KV_FORMATS)
@pytest.mark.parametrize("dtype", MODEL_DTYPES)
def test_cache_update(place: tuple[str, str], dtype: str, kv: str, width: tuple[int, int], layout: str) -> None:
    backend, device = place
    kinds = ("tensor", "head") if KV_FORMATS[kv].quantised else ("none",)
    sizes = fitted({"head_size": width[0], "head_size_v": width[1], "block_size": 8, "backend": backend}, ("dtype",))
    for seed, kind in enumerate(kinds):
        config = AttentionConfig(
            num_heads=6, num_kv_heads=3, scale=1.0, dtype=dtype, kv_cache_dtype=kv, kv_cache_layout=layout,
            kv_scale=kind, **sizes,
        )  # fmt: skip
        accepted = compare_cache_update(make_cache_update(config, device=device, seed=seed), config)
        assert accepted or refusal(config, device)


def test_cache_update_of_stored_values(place: tuple[str, str]) -> None:
    """Keys that are FP8 already go into an FP8 cache as they are, whatever the scale."""
    backend, device = place
    can = selector.get_backend(backend).capabilities
    for kv in ("fp8_e4m3", "fp8_e5m2"):
        sizes = fitted({"head_size": 16, "head_size_v": 16, "block_size": 8, "backend": backend}, ("dtype",))
        # Some binaries read an FP8 cache with an FP8 query alone.
        query = "none" if len(can.query_formats) == 1 or can.package is not None else "fp8_e4m3"
        config = make_config(
            num_heads=2, dtype="bfloat16", kv_cache_dtype=kv, kv_scale="tensor", query_format=query, **sizes
        )
        args = make_cache_update(config, device=device, seed=3)
        stored = KV_FORMATS[kv].value_dtype
        accepted = compare_cache_update(args._replace(key=args.key.to(stored), value=args.value.to(stored)), config)
        assert accepted == (kv in can.kv_cache_dtypes and not can.required_features)


def test_a_query_with_strides_of_its_own(place: tuple[str, str]) -> None:
    """The query may be a slice of what one projection gave for query, key and value."""
    backend, device = place
    batch = batch_of_row(ROWS["plain"], backend, device=device, seed=5)
    tokens, heads, width = batch.args.query.shape
    fused = torch.full((tokens, heads + 5, width), torch.nan, device=device, dtype=batch.args.query.dtype)
    fused[:, 2 : 2 + heads] = batch.args.query
    batch.args = batch.args._replace(query=fused[:, 2 : 2 + heads])
    assert run_and_compare(batch)


def test_requests_that_share_blocks(place: tuple[str, str]) -> None:
    """A prefix in common lies in the cache once, and both tables name its blocks."""
    backend, device = place
    batch = batch_of_row(ROWS["plain-long"], backend, device=device, seed=6)
    table = batch.args.block_table
    table[1, :5] = table[0, :5]
    assert run_and_compare(batch)
