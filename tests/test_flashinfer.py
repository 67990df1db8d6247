"""FLASHINFER as data: what it accepts and refuses, and what it says where it cannot run."""

from __future__ import annotations

import pytest

from tests.support import make_config
from vattn.backends import flashinfer, selector
from vattn.backends.base import DeviceInfo

HOPPER = DeviceInfo("cuda", (9, 0), "H")
PLAIN = make_config(
    dtype="bfloat16", kv_cache_dtype="bfloat16", head_size=128, head_size_v=128, block_size=16, backend="FLASHINFER"
)
FP8 = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor"}


def reasons(monkeypatch: pytest.MonkeyPatch, **changes: object) -> list[str]:
    backend = selector.get_backend("FLASHINFER")
    monkeypatch.setattr(type(backend), "problem", lambda self: None)
    return backend.reasons(PLAIN.replace(**changes), HOPPER)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        FP8,
        {**FP8, "kv_scale": "head", "kv_cache_layout": "HND"},
        {"sliding_window": 100, "logits_soft_cap": 30.0, "sinks": True, "lse": True},
        {"causality": "bidirectional", "block_size": 0},
    ],
)
def test_accepts(changes, monkeypatch) -> None:
    assert reasons(monkeypatch, **changes) == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"head_size": 80, "head_size_v": 80}, "head_size 80 (runs 64, 128, 256)"),
        ({"causality": "bidirectional", "sliding_window": 9}, "windows reach to the left alone"),
        ({**FP8, "block_size": 0}, "outside a paged cache"),
        ({"alibi": "linear"}, "alibi is not implemented"),
        ({"tree_bias": True}, "tree_bias is not implemented"),
        ({"output_format": "fp8_static"}, "output_format fp8_static"),
        ({**FP8, "query_format": "fp8_e4m3", "query_scale": "tensor"}, "query_format fp8_e4m3"),
    ],
)
def test_refuses(changes, why, monkeypatch) -> None:
    assert [reason for reason in reasons(monkeypatch, **changes) if why in reason]


def test_a_missing_package_is_named_with_its_extra(monkeypatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", _absent)
    assert "vattn[flashinfer]" in selector.get_backend("FLASHINFER").problem()


def _absent(name: str) -> str:
    import importlib.metadata

    raise importlib.metadata.PackageNotFoundError(name)


def test_without_a_compiler_or_ready_kernels_the_reason_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    assert "flashinfer-jit-cache" in flashinfer._compiler_problem()


def test_nvcc_under_cuda_home_is_found(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert flashinfer._compiler_problem() is None
