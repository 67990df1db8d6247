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
from tests.support import make_config
from vattn.backends import selector
from vattn.config.attention import AttentionConfig
from vattn.config.features import FEATURES, requested_features
from vattn.quantization.formats import KV_FORMATS, MODEL_DTYPES, OUTPUT_FORMATS

BACKENDS = selector.backend_names()
KEPT = ("plain", "plain-decodes")


def sampled_rows() -> Iterator[Any]:
    """Every backend with every row; on backends that a CPU interprets, a push takes a third of the many formats."""
    for backend, row in itertools.product(BACKENDS, ROWS):
        marks = []
        if "cpu" not in selector.get_backend(backend).capabilities.devices:
            draw = zlib.crc32(f"{fuzz_seed()} {row}".encode())
            if row in FORMATS:
                marks = [pytest.mark.long] if draw % 3 else [pytest.mark.slow] if draw % 9 else []
            elif row not in KEPT and draw % 2:
                marks = [pytest.mark.slow]
        # The kernels of TRITON_ATTN under another name: rows with trees, and two without.
        if backend == "TREE_ATTN" and "tree" not in row and row not in KEPT:
            marks = [pytest.mark.long]
        yield pytest.param(backend, row, id=f"{backend}-{row}", marks=marks)


def repeated(name: str) -> Any:
    """Return a backend as a parameter; one that runs the kernels of TRITON_ATTN under another name is slow."""
    return pytest.param(name, marks=[pytest.mark.long] if name == "TREE_ATTN" else [])


@pytest.fixture(params=[repeated(name) for name in BACKENDS])
def backend(request: pytest.FixtureRequest) -> str:
    """Name of a backend that can be used in this process."""
    return usable(request.param)


def usable(name: str) -> str:
    """Return the name of a backend, or skip the test with the reason why it cannot be used here."""
    problem = selector.get_backend(name).problem()
    if problem is not None:
        pytest.skip(problem)
    return name


def test_rows_name_every_feature_alone_and_every_pair_of_formats() -> None:
    configs = [make_config(**{"block_size": 8, **row.changes}) for row in ROWS.values()]
    asked = [requested_features(config) for config in configs]
    assert {name for name in FEATURES if frozenset({name}) not in asked} == set()
    formats = {(config.kv_cache_dtype, config.output_format) for config in configs}
    plain = [name for name, fmt in KV_FORMATS.items() if not fmt.packed]
    # Packed formats decode before anything else; they meet the output formats in turns.
    assert formats >= set(itertools.product(plain, OUTPUT_FORMATS)) | {(name, "none") for name in KV_FORMATS}


@pytest.mark.parametrize(("name", "row"), list(sampled_rows()))
def test_attention(name: str, row: str, device: str) -> None:
    run_and_compare(batch_of_row(ROWS[row], usable(name), device=device, seed=len(row)))


@pytest.mark.parametrize("row", ["plain", "lse", "window5", "tree", "fp8-heads+hnd+window"])
def test_attention_with_a_plan(backend: str, row: str, device: str) -> None:
    batch = batch_of_row(ROWS[row], backend, device=device, seed=7)
    tokens, table = batch.args.query.shape[0], batch.args.block_table
    shape = selector.get_backend(backend).plan_shape(batch.config, tokens, *table.shape)
    planned = shape and not selector.get_backend(backend).host_plan_size(batch.config)
    if planned and not refusal(batch.config, device):
        schedule = torch.full(shape, -1, dtype=torch.int32, device=device)
        torch.ops.vattn.plan(batch.args.query_start_loc, batch.args.seq_lens, schedule, batch.args.config)
        batch.args = batch.args._replace(plan=[schedule])
    run_and_compare(batch)


@pytest.mark.sample(5, "TRITON_ATTN")
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("width", [(16, 16), (24, 8)], ids=["equal", "unequal"])
@pytest.mark.parametrize("kv", KV_FORMATS)
@pytest.mark.parametrize("dtype", MODEL_DTYPES)
def test_cache_update(backend: str, dtype: str, kv: str, width: tuple[int, int], layout: str, device: str) -> None:
    kinds = ("tensor", "head") if KV_FORMATS[kv].quantised else ("none",)
    sizes = fitted({"head_size": width[0], "head_size_v": width[1], "block_size": 8, "backend": backend}, ("dtype",))
    for seed, kind in enumerate(kinds):
        config = AttentionConfig(
            num_heads=6, num_kv_heads=3, scale=1.0, dtype=dtype, kv_cache_dtype=kv, kv_cache_layout=layout,
            kv_scale=kind, **sizes,
        )  # fmt: skip
        accepted = compare_cache_update(make_cache_update(config, device=device, seed=seed), config)
        assert accepted or refusal(config, device)


def test_cache_update_of_stored_values(backend: str, device: str) -> None:
    """Keys that are FP8 already go into an FP8 cache as they are, whatever the scale."""
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


def test_a_query_with_strides_of_its_own(backend: str, device: str) -> None:
    """The query may be a slice of what one projection gave for query, key and value."""
    batch = batch_of_row(ROWS["plain"], backend, device=device, seed=5)
    tokens, heads, width = batch.args.query.shape
    fused = torch.full((tokens, heads + 5, width), torch.nan, device=device, dtype=batch.args.query.dtype)
    fused[:, 2 : 2 + heads] = batch.args.query
    batch.args = batch.args._replace(query=fused[:, 2 : 2 + heads])
    assert run_and_compare(batch)


def test_requests_that_share_blocks(backend: str, device: str) -> None:
    """A prefix in common lies in the cache once, and both tables name its blocks."""
    batch = batch_of_row(ROWS["plain-long"], backend, device=device, seed=6)
    table = batch.args.block_table
    table[1, :5] = table[0, :5]
    assert run_and_compare(batch)
