"""The plugin has the methods of the installed vLLM, and declares what it does."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.vllm.engine_parts import (
    AttentionBackend,
    AttentionBackendEnum,
    AttentionImpl,
    AttentionMetadataBuilder,
    DeviceCapability,
    Layer,
    TritonAttentionImpl,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
)
from vattn.errors import UnsupportedRequestError
from vattn.integrations import engine_versions
from vattn.integrations import vllm as plugin
from vattn.integrations.vllm.backend import VattnBackend
from vattn.integrations.vllm.builder import VattnMetadataBuilder
from vattn.integrations.vllm.impl import VattnImpl

ROOT = Path(__file__).parents[3]

BASES = {VattnBackend: AttentionBackend, VattnMetadataBuilder: AttentionMetadataBuilder, VattnImpl: AttentionImpl}

OVERRIDDEN = [
    (ours, base, name)
    for ours, base in BASES.items()
    for name, member in vars(ours).items()
    if callable(getattr(ours, name)) and not isinstance(member, type) and hasattr(base, name)
]


@pytest.mark.parametrize(("ours", "base", "name"), OVERRIDDEN, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_an_overridden_method_takes_what_the_base_class_does(ours: type, base: type, name: str) -> None:
    theirs = inspect.signature(getattr(base, name)).parameters
    own = dict(inspect.signature(getattr(ours, name)).parameters)
    for parameter in theirs.values():
        mine = own.pop(parameter.name)
        assert (mine.kind, mine.default) == (parameter.kind, parameter.default), parameter.name
    for extra in own.values():
        assert extra.default is not inspect.Parameter.empty or extra.kind is inspect.Parameter.VAR_KEYWORD


def test_a_layer_takes_the_extra_arguments_that_vllms_own_backend_does() -> None:
    theirs = inspect.signature(TritonAttentionImpl.__init__).parameters
    assert set(theirs) <= set(inspect.signature(VattnImpl.__init__).parameters)


def test_registration_is_found_and_may_be_repeated() -> None:
    declared = re.search(r'"vllm.general_plugins"\]\nvattn = "(.*)"', (ROOT / "pyproject.toml").read_text())
    assert declared is not None
    register = EntryPoint("vattn", declared[1], "vllm.general_plugins").load()
    register()
    register()
    assert AttentionBackendEnum[VattnBackend.get_name()].get_class() is VattnBackend
    assert VattnBackend.get_name() == (plugin.NAME if hasattr(AttentionBackendEnum, "register") else "CUSTOM")


def reasons(**changed: Any) -> list[str]:
    request = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None, "use_mla": False,
        "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0), "attn_type": "decoder",
    }  # fmt: skip
    return VattnBackend.validate_configuration(**{**request, **changed})


@pytest.mark.parametrize(
    "requested",
    [
        {},
        {"head_size": 80, "dtype": torch.float32},
        {"kv_cache_dtype": "fp8", "use_per_head_quant_scales": True},
        {"kv_cache_dtype": "fp8_e5m2", "dtype": torch.float16},
        {"has_sink": True, "has_sliding_window": True, "block_size": 48},
        {"use_batch_invariant": True, "use_kv_connector": True},
        {"block_size": 528, "device_capability": DeviceCapability(8, 0)},
    ],
)
def test_what_is_supported_has_no_reasons(requested: dict[str, Any]) -> None:
    assert reasons(**requested) == []


@pytest.mark.parametrize(
    ("requested", "named"),
    [
        ({"head_size": 100}, "head_size"),
        ({"head_size": 1024}, "head_size"),
        ({"dtype": torch.float64}, "dtype"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype"),
        ({"block_size": 24}, "block_size"),
        ({"use_mla": True}, "MLA"),
        ({"use_sparse": True}, "sparse"),
        ({"use_mm_prefix": True}, "multimodal"),
        ({"use_non_causal": True}, "non-causal"),
        ({"attn_type": "encoder_only"}, "encoder_only"),
        ({"use_pcp": True}, "PCP"),
        ({"device_capability": DeviceCapability(7, 5)}, "sm_75"),
    ],
)
def test_what_is_not_supported_is_refused_when_the_engine_starts(requested: dict[str, Any], named: str) -> None:
    assert any(named in reason for reason in reasons(**requested))


def test_an_untested_release_is_refused_by_name_until_a_switch_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_versions, "version", lambda name: "0.99.1+cu130")
    (reason,) = reasons()
    assert (
        "0.99.1" in reason
        and "VATTN_ALLOW_UNTESTED" in reason
        and all(known in reason for known in plugin.TESTED_VERSIONS)
    )
    monkeypatch.setenv("VATTN_ALLOW_UNTESTED", "1")
    assert reasons() == []


@pytest.mark.parametrize("extra", [{"attn_type": "encoder_only"}, {"chunk_lookback": 1}, {"new_feature": 3}])
def test_a_layer_with_what_the_plugin_does_not_know_is_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedRequestError, match=next(iter(extra))):
        VattnImpl(2, 64, 0.125, 1, **extra)


def test_context_parallelism_is_refused() -> None:
    impl = VattnImpl.__new__(VattnImpl)
    impl.dcp_world_size = 2
    with pytest.raises(UnsupportedRequestError, match="decode context parallelism=2"):
        impl.__init__(2, 64, 0.125, 1)


def test_batch_invariance_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    impl = VattnImpl(2, 64, 0.125, 1)
    layer = Layer(impl, torch.bfloat16, 64, torch.ones(()), torch.ones(()))
    for value, expected in (("0", False), ("1", True)):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
        assert impl.config(layer, 16, "HND", torch.device("cpu")).batch_invariant is expected


def test_outputs_in_fp8_with_one_scale_are_offered_and_no_others() -> None:
    impl = VattnImpl(2, 64, 0.125, 1)
    assert not impl.fused_output_quant_supported(kFp8DynamicTokenSym) and not impl.writes_fp8
    assert impl.fused_output_quant_supported(kFp8StaticTensorSym) and impl.writes_fp8
