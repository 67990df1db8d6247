"""FLASH_ATTN where there is no library: what it says, and what it would refuse with one."""

from __future__ import annotations

import pytest

import vattn
from tests.support import make_config
from vattn.backends import flash_attn, selector
from vattn.backends.base import DeviceInfo
from vattn.errors import ConfigError, UnsupportedRequestError
from vattn.ops import flash_attention
from vattn.ops.flash_attention import LIBRARY_VARIABLE, FlashLibrary

HOPPER = DeviceInfo("cuda", (9, 0), "H")
PLAIN = make_config(
    dtype="bfloat16", kv_cache_dtype="bfloat16", head_size=64, head_size_v=64, block_size=16, backend="FLASH_ATTN"
)
FP8 = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor", "query_format": "fp8_e4m3", "query_scale": "tensor"}


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch):
    """No library loaded and none remembered, before and after."""
    monkeypatch.setattr(flash_attention, "_loaded", {})
    flash_attention.find_library.cache_clear()
    selector.forget_decisions()
    yield monkeypatch
    flash_attention.find_library.cache_clear()
    selector.forget_decisions()


def reasons(library: FlashLibrary, monkeypatch: pytest.MonkeyPatch, **changes: object) -> list[str]:
    monkeypatch.setattr(flash_attn, "find_library", lambda: library)
    monkeypatch.setattr(flash_attn, "_TRITON", type("Found", (), {"problem": staticmethod(lambda: None)}))
    return selector.get_backend("FLASH_ATTN").reasons(PLAIN.replace(**changes), HOPPER)


FA3 = FlashLibrary("FlashAttention-3", "fa3.so", paged=True)
TORCH = FlashLibrary("torch varlen_attn", "2.11", paged=False)


def test_without_a_library_the_error_says_how_to_load_one(forgotten) -> None:
    forgotten.delenv(LIBRARY_VARIABLE, raising=False)
    forgotten.setattr("torch.version.cuda", None)
    with pytest.raises(UnsupportedRequestError, match=r"vattn\.load_flash_attn\(path\)"):
        selector.choose(PLAIN, HOPPER)


def test_an_automatic_choice_passes_over_it(forgotten) -> None:
    forgotten.delenv(LIBRARY_VARIABLE, raising=False)
    forgotten.setattr("torch.version.cuda", None)
    assert selector.explain(PLAIN.replace(backend="auto"), "cpu").chosen == "TORCH_SDPA"


def test_files_that_are_no_library_are_refused(forgotten, tmp_path) -> None:
    with pytest.raises(ConfigError, match="check the path"):
        vattn.load_flash_attn(tmp_path / "absent.so")
    torn = tmp_path / "torn.so"
    torn.write_bytes(b"\x7fELF")
    with pytest.raises(ConfigError, match="built for torch"):
        vattn.load_flash_attn(torn)
    assert flash_attention._loaded == {}


def test_a_wrong_path_in_the_environment_is_the_reason_and_hides_no_other_backend(forgotten, tmp_path) -> None:
    forgotten.setenv(LIBRARY_VARIABLE, str(tmp_path / "absent.so"))
    explanation = selector.explain(PLAIN.replace(backend="auto"), "cpu")
    assert explanation.chosen == "TORCH_SDPA"
    with pytest.raises(UnsupportedRequestError, match=r"absent\.so"):
        selector.choose(PLAIN, HOPPER)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window": 100},
        {"causality": "bidirectional", "sliding_window": 100},
        {"logits_soft_cap": 30.0, "sinks": True},
        {"lse": True},
        {"block_size": 0},
        FP8,
        {**FP8, "kv_scale": "head", "query_scale": "head", "kv_cache_layout": "HND"},
    ],
)
def test_what_flash_attention_3_accepts(changes, monkeypatch) -> None:
    assert reasons(FA3, monkeypatch, **changes) == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": "float32", "kv_cache_dtype": "float32"}, "dtype float32"),
        ({"block_size": 8}, "block_size 8"),
        ({"alibi": "linear"}, "alibi is not implemented"),
        ({"tree_bias": True}, "tree_bias is not implemented"),
        ({"output_format": "fp8_static"}, "output_format fp8_static"),
        ({"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor"}, "query_format='fp8_e4m3'"),
        ({"query_format": "fp8_e4m3", "query_scale": "tensor"}, "use an FP8 cache"),
        ({"dtype": "float16", "kv_cache_dtype": "float16", "sinks": True}, "sinks in bf16"),
    ],
)
def test_what_flash_attention_3_refuses(changes, why, monkeypatch) -> None:
    found = reasons(FA3, monkeypatch, **changes)
    assert [reason for reason in found if why in reason and "fa3.so" in reason]


def test_torchs_own_has_no_paged_cache(monkeypatch) -> None:
    assert reasons(TORCH, monkeypatch, block_size=0) == []
    assert "vattn.load_flash_attn(path)" in reasons(TORCH, monkeypatch)[0]
