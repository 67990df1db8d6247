"""The transformers integration: every family equals its own eager attention, everything else is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import vattn
from tests.support import relative_l2

pytest.importorskip("transformers")

from tests.integrations.hf_families import FAMILIES, make_model, table
from vattn.errors import (
    CacheError,
    CacheNotBoundError,
    ConfigError,
    MetadataError,
    ScaleError,
    ShapeError,
    UnsupportedRequestError,
)
from vattn.integrations.transformers import PackedModel, disable, enable, enable_adapters
from vattn.integrations.transformers.available import cache_argument

BLOCK = 16
TOLERANCE = 1e-4
"""Relative L2 of fp32 logits: sums in another order, through two layers."""

PROMPTS = [list(range(3, 44)), [7, 5, 90, 11, 13, 2, 64]]


def eager_logits(model: Any, tokens: list[int], cache: Any = None) -> torch.Tensor:
    given = {} if cache is None else {cache_argument(model.forward): cache}
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens], device=model.device), **given).logits[0]


class Runner:
    """Steps over requests that own fixed blocks."""

    def __init__(self, packed: PackedModel, forward: Any = None) -> None:
        self.forward, self.device = packed if forward is None else forward, next(packed.parameters()).device
        self.builder = vattn.AttentionMetadataBuilder(4, 64, 128, BLOCK, self.device, layers=packed)
        self.tables = [list(range(1, 9)), list(range(9, 17))]

    def step(self, parts: list[tuple[list[int], int]]) -> list[torch.Tensor]:
        """Run new tokens of each request after what it has cached; return the logits of all of them."""
        query_lens = [len(tokens) for tokens, _ in parts]
        metadata = self.builder.build(
            query_lens,
            [n + c for n, (_, c) in zip(query_lens, parts, strict=True)],
            self.tables[: len(parts)],
            state_slots=list(range(1, len(parts) + 1)) if self.builder.has_states else None,
        )
        ids = torch.tensor([token for tokens, _ in parts for token in tokens], device=self.device)
        with torch.no_grad(), vattn.forward_context(metadata):
            return list(self.forward(ids, metadata.positions).split(query_lens))


def logits_in_chunks(packed: PackedModel) -> list[torch.Tensor]:
    """Return the logits of `PROMPTS` by prefill, chunked prefill, decode and mixed steps, packed after each other."""
    runner, (long, short) = Runner(packed), PROMPTS
    steps = [
        runner.step(parts)
        for parts in (
            [(long[:20], 0), (short[:3], 0)],
            [(long[20:33], 20), (short[3:4], 3)],
            [(long[33:34], 33), (short[4:5], 4)],
            [(long[34:], 34), (short[5:], 5)],
        )
    ]
    return [torch.cat(rows) for rows in zip(*steps, strict=True)]


@pytest.mark.parametrize("name", FAMILIES)
def test_family_equals_its_eager_attention(name: str, device: str) -> None:
    """fp32: sums in another order, and products of the model that a GPU may take in TF32 nowhere."""
    model = make_model(name).to(device)
    expected = [eager_logits(model, tokens) for tokens in PROMPTS]
    for got, want in zip(logits_in_chunks(enable(model, num_blocks=17)), expected, strict=True):
        assert relative_l2(got, want) < (TOLERANCE if device == "cpu" else 1e-3)
    disable(model)
    assert relative_l2(eager_logits(model, PROMPTS[0]), expected[0]) <= (0 if device == "cpu" else 1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bloom"])
def test_prompts_need_no_cache(name: str) -> None:
    """Windows with soft caps, sinks and ALiBi are among them. The model has a cache afterwards, as ever."""
    model = make_model(name)
    expected = torch.cat([eager_logits(model, tokens) for tokens in PROMPTS])
    packed = enable(model)
    step = vattn.AttentionMetadataBuilder(4, 64, 64).build([len(tokens) for tokens in PROMPTS])
    with torch.no_grad(), vattn.forward_context(step):
        got = packed(torch.tensor([token for tokens in PROMPTS for token in tokens]), step.positions)
    assert relative_l2(got, expected) < TOLERANCE
    packed.allocate(num_blocks=17)
    got = torch.cat(Runner(packed).step([(tokens, 0) for tokens in PROMPTS]))
    assert relative_l2(got, expected) < TOLERANCE


def test_a_model_whose_layers_were_compiled_comes_back() -> None:
    """What `enable` finds out runs as it is written, whatever was compiled while the model was on vattn before."""
    model = make_model("llama")
    expected = eager_logits(model, PROMPTS[0])
    torch._dynamo.reset()
    for _ in range(2):
        packed = enable(model, num_blocks=17)
        vattn.compile_regions(packed, backend="eager")
        assert relative_l2(Runner(packed).step([(PROMPTS[0], 0)])[0], expected) < TOLERANCE
        disable(model)


def test_the_documented_families_are_those_tested() -> None:
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    assert table() in page, "put what tests.integrations.hf_families.table() returns between the marks"


COMPILED = ("llama", "gemma2", "gpt_oss", "mixtral", "bloom", "gpt2")


@pytest.mark.parametrize(
    ("name", "backend"),
    [("llama", "eager"), *(pytest.param(name, "inductor", marks=pytest.mark.long) for name in COMPILED)],
)
def test_whole_models_compile_into_one_graph(name: str, backend: str, fresh_dynamo: None) -> None:
    model = make_model(name)
    expected = eager_logits(model, PROMPTS[0])
    packed = enable(model, num_blocks=17)
    runner = Runner(packed, vattn.compile(packed, backend=backend))
    long, short = PROMPTS
    steps = ([(long[:20], 0), (short[:3], 0)], [(long[20:33], 20), (short[3:4], 3)], [(long[33:], 33)])
    got = [runner.step(parts)[0] for parts in steps]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert relative_l2(torch.cat(got), expected) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral", "bloom"])
def test_fp8_caches(name: str) -> None:
    """Dequantised keys and values differ by up to 2**-4 each; a layer left unquantised would be equal."""
    model = make_model(name)
    expected = eager_logits(model, PROMPTS[0])
    config = vattn.CacheConfig(cache_dtype="fp8")
    packed = enable(model, cache_config=config, quant_config=vattn.QuantConfig(0.02, 0.02), num_blocks=17)
    runner = Runner(packed)
    got = torch.cat([runner.step([(PROMPTS[0][:30], 0)])[0], runner.step([(PROMPTS[0][30:], 30)])[0]])
    assert 1e-3 < relative_l2(got, expected) < 0.15


def test_scales_of_a_checkpoint_are_used() -> None:
    """Those on the modules of a loaded model, of both keys and values; a refused model keeps them."""
    config = vattn.CacheConfig(cache_dtype="fp8")
    model = make_model("llama")
    with pytest.raises(ScaleError):
        enable(model, cache_config=config)
    attention = [module for module in model.modules() if type(module).__name__ == "LlamaAttention"]
    for module in attention:
        module.register_buffer("k_scale", torch.tensor([0.03]))
    with pytest.raises(ScaleError, match=r"v_scale.*calibrat"):
        enable(model, cache_config=config)
    assert "vattn" not in dict(model.named_modules()) and model.config._attn_implementation == "eager"
    for module in attention:
        module.register_buffer("v_scale", torch.tensor(0.05))
    packed = enable(model, cache_config=config, num_blocks=17)
    layers = [module for module in packed.modules() if isinstance(module, vattn.Attention)]
    assert [layer.k_scale.item() for layer in layers] == pytest.approx([0.03] * 2)
    assert [layer.v_scale.item() for layer in layers] == pytest.approx([0.05] * 2)


def test_calls_outside_of_a_step_say_what_to_call() -> None:
    model = make_model("llama")
    ids = torch.tensor([PROMPTS[0]])
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    packed = enable(model, num_blocks=17)
    for call in (lambda: model.generate(ids, max_new_tokens=4), lambda: model(ids)):
        with pytest.raises(MetadataError, match=r"vattn\.Generator.*disable\(model\)"):
            call()
    disable(packed)
    disable(packed)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
    assert not any("vattn" in name for name in model.state_dict())


REFUSED_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"memory": "lots"}, ConfigError, "memory='lots'"),
    ({"memory": "10B", "merge_projections": True, "vattn_linears": True}, CacheError, "memory='10B'"),
    ({"memory": "1MiB", "num_blocks": 8}, ConfigError, "exactly one"),
    ({"num_blocks": 0}, ConfigError, "num_blocks=0"),
    ({"attn_backend": "FLASH_ATTN", "num_blocks": 8}, UnsupportedRequestError, "FLASH_ATTN"),
    ({"vattn_linears": "yes"}, ConfigError, "vattn_linears"),
    ({"merge_projections": 3}, ConfigError, "merge_projections"),
    ({"scales_per_head": 1}, ConfigError, "scales_per_head"),
    ({"batch_invariant": None}, ConfigError, "batch_invariant"),
    ({"cache_config": "fp8"}, ConfigError, "CacheConfig"),
    ({"cache_config": vattn.CacheConfig(sliding_window=8)}, ConfigError, "comes from the model"),
    ({"calibration": 5}, ConfigError, "calibration=5"),
    ({"quant_config": 0.5}, ConfigError, "QuantConfig"),
    ({"query_format": "fp8_e4m3"}, ConfigError, "without calibration"),
    ({"quant_config": vattn.QuantConfig(output_format="fp8_per_token")}, ConfigError, "quantise_linears"),
]


@pytest.mark.parametrize(("options", "error", "text"), REFUSED_OPTIONS)
def test_a_refused_model_stays_as_it_was(options: dict[str, Any], error: type[Exception], text: str) -> None:
    model = make_model("llama")
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        expected = model(ids).logits
    names, classes = list(model.state_dict()), [type(module) for module in model.modules()]
    with pytest.raises(error, match=text):
        enable(model, **options)
    assert model.config._attn_implementation == "eager" and "_vattn_before" not in model.__dict__
    assert list(model.state_dict()) == names and [type(module) for module in model.modules()] == classes
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)
    assert enable(model, num_blocks=8).enabled


def test_what_fails_midway_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that are not ours, too."""
    model = make_model("llama")

    def fail(linears: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("vattn.integrations.transformers.linears.Linears._replace", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        enable(model, merge_projections=True, vattn_linears=True)
    assert not any("vattn" in type(module).__module__ for module in model.modules())
    enable(model, merge_projections=True, vattn_linears=False)


def test_models_without_values_are_refused() -> None:
    model = make_model("llama")
    model.lm_head.to("meta")
    with pytest.raises(ConfigError, match=r"'lm_head\.weight' has no values"):
        enable(model)


def test_models_in_other_dtypes_are_refused_by_their_own() -> None:
    with pytest.raises(ConfigError, match=r"a model in torch\.float64.*call model\.float\(\) first"):
        enable(make_model("llama").double())


def test_another_default_device_is_refused() -> None:
    """What a step says to the host would lie on it."""
    model, packed = make_model("llama"), enable(make_model("llama"), num_blocks=17)
    for call in (lambda: enable(model), lambda: vattn.Generator(packed), lambda: vattn.Embedder(packed)):
        with (
            torch.device("meta"),
            pytest.raises(ConfigError, match=r"default device 'meta'.*set_default_device\('cpu'\)"),
        ):
            call()
    vattn.Generator(packed)


def test_what_is_made_in_inference_mode_runs_outside() -> None:
    """Tensors of inference mode know no version, and cannot be written in place outside."""
    sampling = vattn.Sampling(max_new_tokens=3, stop_token_ids=())
    wanted = vattn.Generator(enable(make_model("llama"), num_blocks=17)).generate([PROMPTS[1]], sampling)[0].output
    model = make_model("llama")
    with torch.inference_mode():
        packed = enable(model, num_blocks=17)
        enable_adapters(packed)
    assert vattn.Generator(packed).generate([PROMPTS[1]], sampling)[0].output == wanted
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2.0)
    assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))


def test_disable_takes_models_alone() -> None:
    with pytest.raises(ConfigError, match="disable with int"):
        disable(3)  # type: ignore[arg-type]
    model = make_model("llama")
    enable(model)
    for part in (torch.nn.Linear(2, 2), model.model):
        with pytest.raises(ConfigError, match="a model that is not on vattn"):
            disable(part)
    disable(model)
    disable(model)  # one that is off stays so


def test_padded_batches_are_refused() -> None:
    model = make_model("llama")
    runner = Runner(enable(model, num_blocks=17))
    step = runner.builder.build([3, 3], [3, 3], runner.tables)
    ids, mask = torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.long)
    with torch.no_grad(), vattn.forward_context(step):
        with pytest.raises(ShapeError, match="packed"):
            model(ids)
        with pytest.raises(MetadataError, match="attention_mask"):
            model(ids[:1], attention_mask=mask[:1])
    model.model.layers[0].self_attn.scaling = 0.3
    with pytest.raises(UnsupportedRequestError, match=r"scaling=0\.3"):
        runner.step([([1, 2, 3], 0)])


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "starcoder2", "phi3", "bloom"])
def test_merged_projections(name: str) -> None:
    """The same logits, state dict and loading; phi3 and bloom have nothing to merge but run on."""
    model = make_model(name)
    expected = eager_logits(model, PROMPTS[1])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    runner = Runner(enable(model, num_blocks=17))
    assert relative_l2(runner.step([(PROMPTS[1], 0)])[0], expected) < TOLERANCE
    own = {key: value for key, value in model.state_dict().items() if ".vattn." not in key}
    assert own.keys() == before.keys() and all(torch.equal(own[key], value) for key, value in before.items())
    other = make_model(name, seed=1)
    model.load_state_dict(other.state_dict(), strict=False)
    assert relative_l2(runner.step([(PROMPTS[1], 0)])[0], eager_logits(other, PROMPTS[1])) < TOLERANCE
    disable(model)
    assert relative_l2(eager_logits(model, PROMPTS[1]), eager_logits(other, PROMPTS[1])) < TOLERANCE


@pytest.mark.long
def test_merged_projections_compile_into_one_product() -> None:
    packed = enable(make_model("llama"), merge_projections=True, num_blocks=17)
    torch._dynamo.reset()
    code: list[str] = []
    step = Runner(packed, vattn.compile(packed))
    _, code = torch._inductor.utils.run_and_get_code(lambda: step.step([(PROMPTS[1], 0), (PROMPTS[0], 0)]))
    # Two layers of four products (merged, out, merged, down), and the head.
    assert sum(text.count("extern_kernels.mm(") + text.count("extern_kernels.addmm(") for text in code) == 9


def test_merged_projections_share_one_graph_over_layers_and_lengths() -> None:
    packed = enable(make_model("llama", num_hidden_layers=3), merge_projections=True, num_blocks=17)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    vattn.compile_regions(packed, backend="eager")
    for parts in ([(PROMPTS[1], 0), (PROMPTS[0], 0)], [(PROMPTS[0], 0)], [(PROMPTS[1][:2], 0)]):
        Runner(packed).step(parts)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("way", ["cast", "assigned", "data", "copied"])
def test_merged_weights_that_moved_are_taken_in(way: str) -> None:
    """Casting and back, new parameters, what peft does to merge an adapter, and a copy of the whole model."""
    model, other = make_model("llama"), make_model("llama", seed=1)
    packed = enable(model, num_blocks=17)
    runner = Runner(packed)
    if way == "cast":
        model.load_state_dict(other.state_dict(), strict=False)
        model.bfloat16().float()
        other.bfloat16().float()
    elif way == "copied":
        packed = copy.deepcopy(packed)
        runner.step([(PROMPTS[1], 0)])
        packed.model.load_state_dict(other.state_dict(), strict=False)
        packed.allocate(num_blocks=17)
        runner = Runner(packed)
    else:
        for name, parameter in other.named_parameters():
            module, _, own = name.rpartition(".")
            part = model.get_submodule(module)
            if way == "assigned":
                setattr(part, own, torch.nn.Parameter(parameter.detach().clone()))
            else:
                getattr(part, own).data = parameter.detach().clone()
    assert relative_l2(runner.step([(PROMPTS[1], 0)])[0], eager_logits(other, PROMPTS[1])) < TOLERANCE
    storages = {
        linear.weight.untyped_storage().data_ptr()
        for linear in packed.model.model.layers[0].mlp.children()
        if isinstance(linear, torch.nn.Linear)
    }
    assert len(storages) == 2


REFUSED = {
    "mamba": ({}, "takes no position_ids"),
    "llama4_text": (
        {"attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 64, "head_dim": 16},
        "a mask by",
    ),
    "gemma3_text": ({"use_bidirectional_attention": True, "head_dim": 16}, "a mask by"),
    "gpt_neo": (
        {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        "exchangeable attention",
    ),
    "recurrent_gemma": (
        {},
        "layers of RecurrentGemmaForCausalLM call attention|a state besides keys|fails on packed tokens",
    ),
    "biogpt": ({}, "padding mask"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_be_expressed_is_refused_and_left_alone(model_type: str) -> None:
    import transformers

    from tests.integrations.hf_families import BASE

    changes, reason = REFUSED[model_type]
    config = transformers.CONFIG_MAPPING[model_type](**{**BASE, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    before = model.config._attn_implementation, set(dict(model.named_modules()))
    with pytest.raises(UnsupportedRequestError, match=reason):
        enable(model)
    assert before == (model.config._attn_implementation, set(dict(model.named_modules())))


class Mixing(torch.nn.Module):
    """Adds to every token a little of the one before it, as a convolution would."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 0.3 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


def test_tokens_that_meet_outside_of_attention_are_found() -> None:
    model = make_model("llama")
    model.model.layers[1].mlp = Mixing(model.model.layers[1].mlp)
    with pytest.raises(UnsupportedRequestError, match="outside of attention"):
        enable(model)


def test_wrong_arguments() -> None:
    model = make_model("llama")
    with pytest.raises(ConfigError, match="a model of transformers"):
        enable(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="eval"):
        enable(model.train())
    with pytest.raises(ConfigError, match="with its head"):
        enable(model.eval().model)
    enable(model)
    with pytest.raises(ConfigError, match="disable"):
        enable(model)
    with pytest.raises(CacheNotBoundError, match="no KV cache"):
        Runner(PackedModel(model))


def test_a_projection_that_divides_by_the_largest_value_of_a_row_is_enabled() -> None:
    """Quantisers without a floor give NaN for a row of zeros; attention gives none while notes are taken."""

    class Divided(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            largest = x.abs().amax(-1, keepdim=True)
            return super().forward(x / largest) * largest

    model, plain = make_model("llama"), make_model("llama")
    for layer in model.model.layers:
        layer.self_attn.o_proj.__class__ = Divided
    got = Runner(enable(model, num_blocks=9)).step([([5, 6, 7], 0)])[0]
    assert relative_l2(got, eager_logits(plain, [5, 6, 7])) < 1e-5


def test_models_of_one_config_object_are_enabled_apart() -> None:
    """Which attention runs is written in a config; another model's must not change with it."""
    first, second, plain = (make_model("llama") for _ in range(3))
    for model in (second, plain):
        for module in model.modules():
            if "config" in module.__dict__:
                module.config = first.config
    packed = enable(first, num_blocks=9), enable(second, num_blocks=9)
    expected = eager_logits(plain, [5, 6, 7])
    disable(packed[0])
    assert torch.equal(eager_logits(first, [5, 6, 7]), expected) and torch.equal(
        eager_logits(plain, [5, 6, 7]), expected
    )
    assert relative_l2(Runner(packed[1]).step([([5, 6, 7], 0)])[0], expected) < 1e-5
    disable(packed[1])
    assert torch.equal(eager_logits(second, [5, 6, 7]), expected)
