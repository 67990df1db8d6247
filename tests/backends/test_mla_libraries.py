"""FLASHINFER_MLA and FLASHMLA on the CPU, over stand-ins for the libraries: what surrounds their calls."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.backends import fake_mla_libraries
from tests.layers import mla_support
from tests.layers.mla_support import exact, random_mla_batch, rounded_formula
from tests.support import relative_l2
from vattn.backends import selector
from vattn.backends.mla import flash_mla as mla_flash_mla
from vattn.backends.mla import flashinfer_mla as mla_flashinfer
from vattn.backends.mla.registry import MLA_PRIORITY, mla_backends
from vattn.config.device import DeviceInfo
from vattn.errors import ConfigError

NAMES = ("FLASHINFER_MLA", "FLASHMLA")


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    mla_flashinfer._wrapper.cache_clear()
    fake_mla_libraries.install(monkeypatch)


deepseek = partial(mla_support.deepseek, num_heads=2, qk_nope_head_dim=8, v_head_dim=12, lse=True)


def finite(args: Any) -> Any:
    """Fill what nobody owns with numbers: these libraries multiply it by zero."""
    args.kv_cache.nan_to_num_(0.5)
    return args


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weight_format", ["none", "fp8_block128"])
def test_steps_of_every_kind(name: str, weight_format: str) -> None:
    config = deepseek(weight_format=weight_format)
    args = finite(random_mla_batch(config, [1, 3, 0, 5, 2], [70, 65, 9, 4, 130], padding_tokens=2, padding_reqs=1))
    mla_backends()[name].mla_attention(args, config)
    expected, expected_lse = exact(args, config)
    assert relative_l2(args.output.float(), expected) <= 2 * relative_l2(rounded_formula(args, config), expected)
    assert not args.output[11:].any() and not args.output[4].any()
    assert args.lse is not None and torch.equal(args.lse == -torch.inf, expected_lse == -torch.inf)
    assert (args.lse - expected_lse)[expected_lse.isfinite()].abs().max() < 3e-2


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("name", NAMES)
def test_steps_without_keys_or_rows(name: str) -> None:
    config = deepseek()
    for lens in (([2, 1], [0, 0]), ([0, 0], [5, 0])):
        args = finite(random_mla_batch(config, *lens, padding_tokens=1))
        mla_backends()[name].mla_attention(args, config)
        assert not args.output.any() and args.lse is not None and (args.lse == -torch.inf).all()


def test_the_operator_comes_before_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def decode(
        query: Tensor, cache: Tensor, width: int, lengths: Tensor, table: Tensor, scale: float, causal: bool, *rest: Any
    ) -> tuple[Any, ...]:
        assert rest == (None, None, None)
        asked.append(len(lengths))
        found = fake_mla_libraries.dense_decode(query, cache, width, lengths, table, scale, causal)
        return *found, "metadata", "splits"

    monkeypatch.setattr(mla_flash_mla, "_operator", lambda: decode)
    config = deepseek()
    args = finite(random_mla_batch(config, [1, 1], [70, 9]))
    mla_backends()["FLASHMLA"].mla_attention(args, config)
    assert relative_l2(args.output.float(), exact(args, config)[0]) < 2e-2 and asked == [2]
    assert mla_backends()["FLASHMLA"].problem() is None


@pytest.mark.parametrize("name", NAMES)
def test_limits_are_data(name: str) -> None:
    backend, hopper = mla_backends()[name], DeviceInfo("cuda", (9, 0))
    assert backend.limits(deepseek(), hopper) == []
    refused = {
        "sparse": {"sparse": True},
        "kv_lora_rank": {"kv_lora_rank": 256},
        "kv_cache_dtype": {"kv_cache_dtype": "fp8_e4m3"},
        "output_format": {"output_format": "fp8_per_token"},
        "dtype": {"dtype": "float32"},
        "scale": {"scale": -1.0},
    }
    if name == "FLASHMLA":
        refused["block_size"] = {"block_size": 16}
        assert "sm_90" in backend.limits(deepseek(), DeviceInfo("cuda", (10, 0)))[0]
    for text, changes in refused.items():
        assert any(text in reason for reason in backend.limits(deepseek(**changes), hopper)), text
    assert any("runs on cuda" in reason for reason in backend.limits(deepseek(), DeviceInfo("cpu")))


def test_they_are_asked_for_by_name_alone() -> None:
    assert not set(NAMES) & {name for names in MLA_PRIORITY.values() for name in names}
    for name, missing in zip(NAMES, ("flashinfer-python is not installed", "load_flash_mla"), strict=True):
        text = str(selector.explain(deepseek(backend=name), DeviceInfo("cuda", (9, 0))))
        assert "chosen : none" in text and missing in text


@pytest.mark.usefixtures("libraries")
def test_without_a_record_they_are_called_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_flash_mla.importlib.util, "find_spec", lambda name: SimpleNamespace())
    text = str(selector.explain(deepseek(backend="FLASHMLA", num_heads=7), DeviceInfo("cuda", (9, 0))))
    assert "chosen : FLASHMLA" in text and "untested" in text


def test_libraries_that_are_none(tmp_path: Any) -> None:
    path = tmp_path / "none.so"
    path.write_bytes(b"none")
    with pytest.raises(ConfigError, match="FlashMLA library"):
        mla_flash_mla.load_flash_mla(path)
