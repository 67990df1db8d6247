"""What a generator compiles where nothing is requested, what forbids it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import vattn
from vattn.config.device import DeviceInfo
from vattn.errors import FusionError

pytest.importorskip("transformers")

from tests.generation.generator_support import PROMPTS, make_generator
from tests.integrations.hf_families import make_model
from vattn.compilation.regions import modules_around, region_of
from vattn.generation import compiled_model
from vattn.generation.compiled_model import CompiledModel, default_options
from vattn.integrations.transformers import disable, enable
from vattn.passes.entry import SLOT
from vattn.passes.pipeline import FusionPass

CUDA = torch.device("cuda")
SAMPLING = vattn.Sampling(8, stop_token_ids=())


def gpu(*capability: int) -> DeviceInfo:
    return DeviceInfo("cuda", capability, "a GPU")  # type: ignore[arg-type]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    """`CompiledModel` compiles as on a GPU, by a compiler that takes no time."""
    monkeypatch.setattr(compiled_model, "DeviceInfo", type("Gpu", (), {"of": staticmethod(lambda _: gpu(9, 0))}))
    monkeypatch.setattr(compiled_model, "default_options", lambda device: ({"backend": "eager"}, []))


def test_default_options() -> None:
    options, notes = default_options(gpu(9, 0))
    assert not notes and options["options"]["triton.enable_pdl"] and isinstance(options["options"][SLOT], FusionPass)
    for device in (gpu(8, 0), DeviceInfo("cpu")):
        options, (note,) = default_options(device)
        assert set(options["options"]) == {SLOT}
        assert note == f"early launches: off: for GPUs of compute capability 9.0 and newer, not {device}"


def test_passes_that_are_on_already_stay() -> None:
    with vattn.enable(strict=True):
        assert default_options(gpu(9, 0)) == ({"options": {"triton.enable_pdl": True}}, [])
    from torch._inductor import config

    with config.patch({SLOT: 3}):
        options, notes = default_options(gpu(9, 0))
    assert set(options["options"]) == {"triton.enable_pdl"} and "passes: off: Inductor's" in notes[0]


def test_layers_and_what_is_around_them_are_compiled(as_on_a_gpu: None) -> None:
    """Once for all, again by no second generator, and not after `disable`."""
    model = make_model("llama")
    packed = enable(model, num_blocks=40)
    expected = [request.output for request in make_generator(packed).generate(PROMPTS, SAMPLING)]
    compiled = CompiledModel(packed, None, CUDA, None)
    assert compiled.explain() == ["compile: 2 LlamaDecoderLayer, 1 LlamaRMSNorm, 1 LlamaRotaryEmbedding"]
    regions = [region_of(module) for module in model.modules()]
    CompiledModel(packed, None, CUDA, None)
    assert regions == [region_of(module) for module in model.modules()] and len({*regions}) == 4
    generator = make_generator(packed, compile="none")
    assert "compile: off: as requested; what was compiled before stays compiled" in str(generator.explain())
    assert [request.output for request in generator.generate(PROMPTS, SAMPLING)] == expected
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    disable(model)
    assert not any(region_of(module) for module in model.modules())
    assert model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=2, do_sample=False).shape[1] == len(PROMPTS[0]) + 2


def test_requested_ways_stay(as_on_a_gpu: None) -> None:
    packed = enable(make_model("llama"), num_blocks=40)
    assert CompiledModel(packed, "none", CUDA, None).explain() == ["compile: off: as requested"]
    assert CompiledModel(packed, None, torch.device("cpu"), None).explain() == ["compile: off: the default on cpu"]
    assert CompiledModel(packed, None, CUDA, {"backend": "eager"}).explain() == ["compile: 2 LlamaDecoderLayer"]
    assert not any(region_of(module) for module in modules_around(packed))
    assert CompiledModel(packed, "model", CUDA, None).explain() == ["compile: the whole model"]


def test_models_without_repeated_layers_run_as_they_are(as_on_a_gpu: None) -> None:
    compiled = CompiledModel(nn.Linear(2, 2), None, CUDA, None)
    assert compiled.explain() == ["compile: off: Linear has no nn.ModuleList of layers that can be compiled"]


def test_what_cannot_be_compiled_runs_as_it_is(as_on_a_gpu: None, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("llama")
    packed = enable(model, num_blocks=40)
    expected = [request.output for request in make_generator(packed).generate(PROMPTS, SAMPLING)]
    norm = type(model.model.norm)

    class Breaks(norm):  # type: ignore[misc, valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    model.model.norm.__class__ = Breaks
    compiled = CompiledModel(packed, None, CUDA, None)
    generator = make_generator(packed, compile="none")
    with caplog.at_level(logging.WARNING, "vattn"):
        assert [request.output for request in generator.generate(PROMPTS, SAMPLING)] == expected
    assert len([record for record in caplog.records if "runs uncompiled" in record.message]) == 1
    first, second = compiled.explain()
    assert first == "compile: 2 LlamaDecoderLayer, 1 LlamaRotaryEmbedding"
    assert second.startswith("compile: Breaks runs uncompiled: Unsupported: ")


def test_mistakes_in_a_step_are_not_left_to_the_code_as_it_is(as_on_a_gpu: None) -> None:
    model = make_model("llama")
    packed = enable(model, num_blocks=40)
    compiled = CompiledModel(packed, None, CUDA, None)
    model.model.layers[0].self_attn.scaling = 0.3
    with pytest.raises(vattn.errors.UnsupportedRequestError, match=r"scaling=0\.3"):
        make_generator(packed, compile="none").generate(PROMPTS[:1], SAMPLING)
    assert compiled.explain()[0].startswith("compile: 2 LlamaDecoderLayer")


def test_strict_passes_are_not_left_out(as_on_a_gpu: None) -> None:
    model = make_model("llama")
    packed = enable(model, num_blocks=40)

    def strict(self: Any, x: torch.Tensor) -> torch.Tensor:
        raise FusionError("one", "two", "three")

    CompiledModel(packed, None, CUDA, None)
    region = region_of(model.model.norm)
    assert region is not None
    call = region._or_as_written(strict, type(model.model.norm).forward)  # type: ignore[arg-type]
    with pytest.raises(FusionError):
        call(model.model.norm, torch.zeros(2))


def test_a_generator_says_how_its_model_runs() -> None:
    lines = make_generator(enable(make_model("llama"), num_blocks=40)).explain().splitlines()
    assert lines[0] == "merge_projections: 4 groups of projections are one product each"
    assert lines[1].startswith("vattn_linears: off: its kernels are for GPUs of compute capability 9.0, not ")
    assert lines[2:] == ["compile: off: the default on cpu", "no CUDA graphs"]


def test_defaults_give_the_tokens_of_a_model_without_them() -> None:
    outputs = []
    for options in ({}, {"merge_projections": False, "vattn_linears": False}):
        generator = make_generator(enable(make_model("qwen2"), num_blocks=40, **options))
        outputs.append([request.output for request in generator.generate(PROMPTS, SAMPLING)])
    assert outputs[0] == outputs[1]
