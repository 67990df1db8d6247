"""The plugin against the installed SGLang: how it is found and chosen, which methods it overrides, what it refuses."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.sglang_engine import (
    ForwardMode,
    RadixAttention,
    Scheduler,
    ServerArgs,
    make_layer,
    make_pool,
    make_runner,
    make_swa_pool,
)
from tests.repo.test_packaging import run_python
from vattn.errors import ConfigError, UnsupportedRequestError
from vattn.integrations import engine_versions, sglang
from vattn.integrations.sglang.backend import VattnBackend

ROOT = Path(__file__).parents[2]


def test_the_module_imports_nothing_of_the_engine() -> None:
    code = "import sys, vattn.integrations.sglang; print([name for name in sys.modules if name.startswith('sglang')])"
    assert run_python(code).strip() == "[]"


def test_methods_have_the_signatures_of_the_installed_base_class() -> None:
    base, overridden = VattnBackend.__mro__[1], []
    for name, own in vars(VattnBackend).items():
        if name.startswith("__") or not inspect.isfunction(theirs := getattr(base, name, None)):
            continue
        # Names, order, kinds and defaults; an engine calls by these.
        signatures = [
            [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()] for f in (own, theirs)
        ]
        assert signatures[0] == signatures[1], name
        overridden.append(name)
    assert sorted(overridden) == [
        "forward_decode",
        "forward_extend",
        "get_cuda_graph_seq_len_fill_value",
        "init_cuda_graph_state",
        "init_forward_metadata_in_graph",
        "init_forward_metadata_out_graph",
    ]
    flags = [name for name, value in vars(VattnBackend).items() if isinstance(value, bool)]
    assert flags == ["needs_cpu_seq_lens", "extend_dummy_seqs_capped_by_req_pool"]


def test_the_engine_finds_the_plugin_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point of pyproject, read by SGLang's own loader; then its parser takes the name, and it builds it."""
    from sglang.srt import plugins
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup

    group = plugins.GENERAL_PLUGINS_GROUP
    text = (ROOT / "pyproject.toml").read_text()
    value = text.split(f'[project.entry-points."{group}"]\n')[1].split("\n")[0]
    info = tmp_path / "vattn_plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vattn-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{value.replace(chr(34), '')}\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    monkeypatch.delitem(attention_registry.ATTENTION_BACKENDS, "vattn", raising=False)
    register, _ = plugins.load_plugins_by_group(group)["vattn"]
    assert register is sglang.register
    register()
    register()  # each process may load plugins more than once
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    chosen = parser.parse_args(["--model-path", "none", "--attention-backend", "vattn"])
    assert chosen.attention_backend == "vattn"
    backend = attention_backend_setup._build_full_attention_backend_from_str(
        model_runner=make_runner(make_pool(), make_layer()), backend_str="vattn", init_new_workspace=False
    )
    assert type(backend) is VattnBackend


def test_an_untested_release_is_named_with_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(make_pool(), make_layer())
    monkeypatch.delenv("VATTN_ALLOW_UNTESTED", raising=False)
    for version in ("0.9.0", "0.5.23rc1"):
        monkeypatch.setattr(engine_versions, "version", lambda package, version=version: version)
        with pytest.raises(ConfigError, match=rf"sglang {version}, .*0\.5\.22, 0\.5\.23.*VATTN_ALLOW_UNTESTED=1"):
            sglang.create_backend(runner)
    monkeypatch.setattr(engine_versions, "version", lambda package: "0.5.23+cu130")
    assert sglang.create_backend(runner)
    monkeypatch.setattr(engine_versions, "version", lambda package: "0.9.0")
    monkeypatch.setenv("VATTN_ALLOW_UNTESTED", "1")
    assert sglang.create_backend(runner)


def changed(layer: RadixAttention, **attributes: Any) -> RadixAttention:
    for name, value in attributes.items():
        assert hasattr(layer, name)
        setattr(layer, name, value)
    return layer


def encoder_type() -> Any:
    return type(make_layer().attn_type)


REFUSED_LAYERS = {
    "encoder": ({"attn_type": "ENCODER_ONLY"}, "attn_type=.*ENCODER_ONLY"),
    "bidirectional": ({"attn_type": "DECODER_BIDIRECTIONAL"}, "attn_type=.*DECODER_BIDIRECTIONAL"),
    "cross": ({"is_cross_attention": True}, "is_cross_attention=True"),
    "chunks": ({"use_irope": True}, "use_irope=True"),
    "positions": ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode='ALIBI'"),
    "cap": ({"logit_capping_method": "other"}, "logit_capping_method='other'"),
    "temperature": ({"xai_temperature_len": 1024}, "xai_temperature_len=1024"),
    "head size": ({"qk_head_dim": 20, "v_head_dim": 20}, "layer 0 of the model: .*head_size 20"),
}


@pytest.mark.parametrize("attributes, reason", REFUSED_LAYERS.values(), ids=REFUSED_LAYERS)
def test_a_layer_that_is_not_served_is_refused_at_the_start(attributes: dict[str, Any], reason: str) -> None:
    if "attn_type" in attributes:
        attributes = {"attn_type": encoder_type()[attributes["attn_type"]]}
    with pytest.raises(UnsupportedRequestError, match=reason):
        sglang.create_backend(make_runner(make_pool(), changed(make_layer(), **attributes)))


REFUSED_OPTIONS = {
    "speculative_algorithm": "NGRAM",
    "enable_dp_attention": True,
    "enable_two_batch_overlap": True,
    "enable_pdmux": True,
    "enable_torch_compile": True,
    "enable_hisparse": True,
    "enable_prefill_cp": True,
    "dllm_algorithm": "LowConfidence",
    "dcp_size": 2,
    "attn_cp_size": 2,
}


@pytest.mark.parametrize("name", REFUSED_OPTIONS)
def test_an_option_of_the_server_that_is_not_served_is_refused_at_the_start(name: str) -> None:
    runner = make_runner(make_pool(), make_layer())
    sglang.create_backend(runner)
    setattr(runner.server_args, name, REFUSED_OPTIONS[name])
    with pytest.raises(UnsupportedRequestError, match=f"SGLang's {name}={REFUSED_OPTIONS[name]!r} with"):
        sglang.create_backend(runner)


def test_a_cache_that_is_not_served_is_refused_at_the_start() -> None:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    latent = MLATokenToKVPool(64, 16, torch.bfloat16, 32, 16, 1, "cpu", False)
    with pytest.raises(UnsupportedRequestError, match=r"cache MLATokenToKVPool of bfloat16.*MHATokenToKVPool and"):
        sglang.create_backend(make_runner(latent))
    for make in (make_pool, make_swa_pool):
        pool = make()
        part = getattr(pool, "swa_kv_pool", pool)
        part.kv_cache_layout = "page_major"
        with pytest.raises(UnsupportedRequestError, match="MHATokenToKVPool"):
            sglang.create_backend(make_runner(pool))
    runner = make_runner(make_pool(), make_layer())
    runner.kv_index_translator = SimpleNamespace(is_translating=True)
    with pytest.raises(UnsupportedRequestError, match="unified memory pool"):
        sglang.create_backend(runner)


def test_a_page_size_that_no_kernel_takes_names_the_option() -> None:
    runner = make_runner(make_pool(page_size=12), make_layer())
    with pytest.raises(UnsupportedRequestError, match=r"block_size 12.*block_size: --page-size"):
        sglang.create_backend(runner)


def test_steps_that_are_not_served_are_refused() -> None:
    runner = make_runner(make_pool(), layer := make_layer())
    backend, scheduler = sglang.create_backend(runner), Scheduler(runner)
    verify = scheduler.batch({0: 3}, ForwardMode.TARGET_VERIFY)
    with pytest.raises(UnsupportedRequestError, match="a step of kind TARGET_VERIFY"):
        backend.init_forward_metadata(verify)
    prompt = scheduler.batch({1: 3}, ForwardMode.EXTEND)
    with pytest.raises(UnsupportedRequestError, match="CUDA graph of whole prompt steps"):
        backend.init_forward_metadata_out_graph(prompt, in_capture=True)
    backend.init_forward_metadata(prompt)
    query, key = torch.zeros(3, 4, 16), torch.zeros(3, 2, 16)
    with pytest.raises(UnsupportedRequestError, match="attention with return_lse"):
        backend.forward(query, key, key, layer, prompt, return_lse=True)
    backend.forward(query, key, key, layer, prompt, return_lse=False, q_rope=None)
