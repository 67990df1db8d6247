"""A step exported with caches and metadata as inputs, as a program and through AOTInductor, against eager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vattn
from tests.compile.toy_models import Model, caches, fill_caches, make_builder, make_model, make_step
from vattn.config.device import parse_version
from vattn.errors import CacheNotBoundError, ConfigError, MetadataError, UnsupportedRequestError

STEPS = [[1] * 9, [4, 3], [1, 1], [300]]


def compare(function: Callable[..., Any], exported: Any, model: Model, tolerance: float, **options: Any) -> None:
    builder = make_builder(model, max_mm_ranges=1)
    for query_lens in STEPS:
        ids, step = make_step(builder, query_lens, **options)
        fill_caches(model)
        with vattn.forward_context(step):
            want = [model(ids), *caches(model)]
        fill_caches(model)
        got = [function(*exported.inputs((ids,), step)), *caches(model)]
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


FLAVOURS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "fp8": (
        {
            "cache_config": vattn.CacheConfig(cache_dtype="fp8"),
            "quant_config": vattn.QuantConfig(k_scale="unit", v_scale="unit"),
        },
        {},
    ),
    "unequal head sizes": ({"head_size_v": 8}, {}),
    "bidirectional": ({}, {"causal": False}),
}


@pytest.mark.parametrize("name", FLAVOURS)
def test_program_equals_eager(name: str) -> None:
    attention, options = FLAVOURS[name]
    model = make_model(1, **attention)
    ids, step = make_step(make_builder(model), [1] * 4, **options)  # as many tokens as requests must not tie them
    exported = vattn.export_step(model, (ids,), step)
    compare(exported.program.module(), exported, model, tolerance=0, **options)


def test_program_takes_a_flag_per_request() -> None:
    model = make_model(1)
    builder = make_builder(model)
    exported = vattn.export_step(model, *_flagged(builder, [True, False]))
    (ids,), step = _flagged(builder, [False, True])
    fill_caches(model)
    with vattn.forward_context(step):
        want = model(ids)
    fill_caches(model)
    assert torch.equal(exported.program.module()(*exported.inputs((ids,), step)), want)


def _flagged(builder: vattn.AttentionMetadataBuilder, causal: list[bool]) -> tuple[Any, Any]:
    ids, step = make_step(builder, [4, 3], causal=causal)
    return (ids,), step


def test_program_takes_another_number_of_blocks() -> None:
    model = make_model(1)
    exported = vattn.export_step(model, *_args(model))
    vattn.allocate_kv_cache(model, num_blocks=150)
    compare(exported.program.module(), exported, model, tolerance=0)


def _args(model: Model) -> tuple[Any, Any]:
    ids, step = make_step(make_builder(model), [2, 1])
    return (ids,), step


def test_export_leaves_the_model_as_it_was() -> None:
    model = make_model(1)
    fill_caches(model)
    before, storage = caches(model), model.layers[0].attn.kv_cache
    vattn.export_step(model, *_args(model))
    assert model.layers[0].attn.kv_cache is storage and torch.equal(caches(model)[0], before[0])


def test_no_cache_byte_is_saved(tmp_path: Path) -> None:
    sizes = []
    for num_blocks in (4, 4000):
        model = make_model(1)
        ids, step = make_step(make_builder(model), [2, 1])
        vattn.allocate_kv_cache(model, num_blocks=num_blocks)
        path = tmp_path / f"{num_blocks}.pt2"
        torch.export.save(vattn.export_step(model, (ids,), step).program, path)
        sizes.append(path.stat().st_size)
    assert abs(sizes[1] - sizes[0]) < 4096


def test_refusals() -> None:
    model = make_model(1)
    with pytest.raises(CacheNotBoundError, match="Linear has no layer with a KV cache"):
        vattn.export_step(nn.Linear(2, 2), *_args(model))
    ids, step = make_step(make_builder(model), [1])
    with pytest.raises(MetadataError, match="a sample step of 1 tokens"):
        vattn.export_step(model, (ids,), step)


def test_aot_inductor_is_refused_where_it_would_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = make_model(1)
    exported = vattn.export_step(model, *_args(model))
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    with pytest.raises(UnsupportedRequestError, match=r"AOTInductor of an exported step on torch 2\.11\.0"):
        exported.compile(str(tmp_path / "step.pt2"))
    for path in (5, tmp_path / "step", tmp_path / "none" / "step.pt2"):
        with pytest.raises(ConfigError, match="package_path"):
            exported.compile(path)


@pytest.mark.slow
@pytest.mark.skipif(parse_version(torch.__version__) < (2, 12), reason="loading the package crashes torch 2.11")
def test_aot_inductor_equals_eager(tmp_path: Path) -> None:
    model = make_model(1)
    exported = vattn.export_step(model, *_args(model))
    with torch._inductor.config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"}):  # a faster C++ compile
        function = exported.compile(str(tmp_path / "step.pt2"))
    compare(function, exported, model, tolerance=2e-5)  # fp32 sums in another order
