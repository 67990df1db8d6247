"""LoRA adapters of PEFT, several in one batch: logits of PEFT's own models, prefixes, compiled code, refusals."""

from __future__ import annotations

import copy
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import vattn
from tests.support import relative_l2
from vattn import errors
from vattn.generation import prepare as generation
from vattn.integrations.transformers import LoRAAdapters, disable, enable, enable_adapters
from vattn.layers.fp8_linear import exact_inputs
from vattn.layers.lora import LoRAProduct

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

SAMPLING = vattn.Sampling(max_new_tokens=6, stop_token_ids=())
PROMPT = list(range(3, 40))
KINDS: dict[str, dict[str, Any]] = {
    "small": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "large": {
        "r": 8, "lora_alpha": 9, "use_rslora": True, "target_modules": "all-linear", "alpha_pattern": {"k_proj": 7},
        "rank_pattern": {"o_proj": 5},
    },
    "one layer": {"r": 2, "lora_alpha": 4, "target_modules": ["gate_proj", "k_proj"], "layers_to_transform": [1]},
}  # fmt: skip


def base() -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=101, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def save(folder: Path, seed: int, **options: Any) -> Any:
    """Save an adapter of random weights, and return PEFT's own model with it."""
    model = peft.get_peft_model(base(), peft.LoraConfig(**options))
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("adapters")
    return folder, {name: save(folder / name, seed, **kind) for seed, (name, kind) in enumerate(KINDS.items())}


def with_adapters(folder: Path, **options: Any) -> tuple[Any, LoRAAdapters]:
    packed = enable(base(), num_blocks=64, **options)
    adapters = enable_adapters(packed, max_adapters=4, max_rank=8)
    for name in KINDS:
        adapters.load(name, folder / name)
    return packed, adapters


@pytest.mark.parametrize("options", [{}, {"merge_projections": True}, {"vattn_linears": True}], ids=str)
def test_logits_are_those_of_peft(saved: tuple[Path, dict[str, Any]], options: dict[str, Any]) -> None:
    """Prefills and decodes of five requests in one step, in two orders of adapters."""
    folder, models = saved
    packed, adapters = with_adapters(folder, **options)
    builder = vattn.AttentionMetadataBuilder(5, 64, max_seq_len=32, layers=packed)
    names = ["large", None, "small", "large", "one layer"]
    ids = torch.randint(101, (5, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        own = [base() if name is None else models[name] for name in names]
        alone = [model(input_ids=row[None]).logits[0] for model, row in zip(own, ids, strict=True)]
    for counts, ends in (([4, 8, 1, 3, 8], [4, 8, 1, 3, 8]), ([5, 1, 8, 6, 1], [9] * 5)):
        step = builder.build(counts, ends, [[i + 1] for i in range(5)])
        adapters.set_rows(names, counts)
        tokens = torch.cat([row[end - count : end] for row, count, end in zip(ids, counts, ends, strict=True)])
        with torch.no_grad(), vattn.forward_context(step):
            got = packed(tokens, step.positions)
        want = torch.cat([row[end - count : end] for row, count, end in zip(alone, counts, ends, strict=True)])
        # fp32 on both sides.
        assert relative_l2(got, want) < 2e-5
    disable(packed.model)
    with torch.no_grad():
        assert relative_l2(packed.model(input_ids=ids[1:2]).logits[0], alone[1]) < 2e-5
    assert packed.adapters is None and not any(hasattr(part, "lora") for part in packed.model.modules())


def test_generated_tokens_and_prefixes(saved: tuple[Path, dict[str, Any]]) -> None:
    folder, models = saved
    packed, adapters = with_adapters(folder, merge_projections=True)
    generator = vattn.Generator(packed, max_num_reqs=4, token_budget=24, max_seq_len=96)
    names = ["small", "large", None, "large"]
    done = generator.generate([PROMPT] * 3 + [PROMPT[:5]], SAMPLING, adapter=names)
    for request, name in zip(done, names, strict=True):
        model = base() if name is None else models[name]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([request.prompt + request.output])).logits[0]
        assert logits[len(request.prompt) - 1 : -1].argmax(-1).tolist() == request.output
        assert request.reused == 0, "blocks of another adapter"
    assert [request.reused for request in generator.generate([PROMPT] * 3, SAMPLING, adapter=names[:3])] == [32] * 3
    # An adapter of the same name again finds no blocks of the one before; the others' stay.
    adapters.remove("small")
    adapters.load("small", folder / "one layer")
    again = generator.generate([PROMPT] * 3, SAMPLING, adapter=names[:3])
    assert [request.reused for request in again] == [0, 32, 32]
    other = generator.generate([PROMPT], SAMPLING, adapter="one layer")[0]
    assert again[0].output == other.output != done[0].output and other.reused == 0


def test_fp8_linears_with_adapters(saved: tuple[Path, dict[str, Any]]) -> None:
    """The difference that an adapter makes to FP8 linears without quantised inputs is PEFT's on their weights."""
    folder, _ = saved
    model = base()
    vattn.quantise_linears(model, "fp8_per_token")
    packed = enable(model, num_blocks=16, merge_projections=True)
    adapters = enable_adapters(packed, max_adapters=2, max_rank=8)
    adapters.load("large", folder / "large")
    rounded = base()
    for name, module in packed.model.named_modules():
        if hasattr(module, "dequantised"):
            rounded.get_submodule(name).weight.data = module.dequantised()
    theirs = peft.PeftModel.from_pretrained(rounded, folder / "large").eval()
    step = vattn.AttentionMetadataBuilder(1, 16, max_seq_len=16, layers=packed).build([9], [9], [[1]])
    adapters.set_rows(["large"], [9])
    ids = torch.arange(5, 14)
    parts = [module.merged.quantised for module in packed.model.modules() if hasattr(module, "merged")]
    with torch.no_grad(), vattn.forward_context(step), exact_inputs(packed), exact_inputs(torch.nn.ModuleList(parts)):
        got, want = packed(ids, step.positions), theirs(input_ids=ids[None]).logits[0]
    assert relative_l2(got, want) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("how", ["layers", "model"])
def test_compiled_code_stays_as_it_is(saved: tuple[Path, dict[str, Any]], how: str) -> None:
    """Steps with and without adapters are compiled once each; loading one more compiles nothing."""
    folder, models = saved
    packed, adapters = with_adapters(folder, merge_projections=True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = {"backend": "eager"}
    generator = vattn.Generator(packed, max_num_reqs=4, max_seq_len=96, compile=how, compile_options=options)
    prompts, names = [PROMPT, PROMPT[:7], PROMPT[:3]], ["small", None, "large"]
    done = generator.generate(prompts, SAMPLING, adapter=names)
    plain = generator.generate(prompts, SAMPLING)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    adapters.load("one more", folder / "one layer")
    more = generator.generate(prompts, SAMPLING, adapter=["one more", "large", None])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    all_names = [*names, None, None, None, "one layer", "large", None]
    for request, name in zip([*done, *plain, *more], all_names, strict=True):
        model = base() if name is None else models[name]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([request.prompt + request.output])).logits[0]
        assert logits[len(request.prompt) - 1 : -1].argmax(-1).tolist() == request.output


def test_requests_are_refused_alone(saved: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = saved
    packed, adapters = with_adapters(folder)
    generator = vattn.Generator(packed, max_num_reqs=2, max_seq_len=96)
    done = generator.generate([PROMPT, PROMPT], SAMPLING, adapter=["typo", "small"])
    assert done[0].state == "failed" and "'typo'" in str(done[0].error) and done[1].state == "finished"
    with pytest.raises(errors.RequestError, match="'small', 'large'"):
        generator.add(PROMPT, adapter="typo")
    with pytest.raises(errors.ConfigError, match="adapter=\\['small'\\]"):
        generator.add(PROMPT, adapter=["small"])  # type: ignore[arg-type]
    request = generator.add(PROMPT, SAMPLING, adapter="small")
    with pytest.raises(errors.RequestError, match="1 requests"):
        adapters.remove("small")
    generator.cancel(request)
    adapters.set_rows(["small"], [2])
    with pytest.raises(errors.RequestError, match="the rows of set_rows"):
        adapters.remove("small")
    adapters.set_rows([], [])
    adapters.remove("small")
    with pytest.raises(errors.RequestError):
        adapters.remove("small")
    plain = vattn.Generator(enable(base(), num_blocks=16))
    with pytest.raises(errors.RequestError, match="no adapters"):
        plain.add(PROMPT, adapter="small")


def test_two_threads_load_into_two_slots(saved: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = saved
    adapters = enable_adapters(enable(base(), num_blocks=16), max_adapters=4, max_rank=8)
    put, other = LoRAProduct.put, threading.Event()

    def slowly(self: LoRAProduct, *args: Any) -> None:
        other.wait(0.02)
        put(self, *args)

    monkeypatch.setattr(LoRAProduct, "put", slowly)
    with ThreadPoolExecutor(2) as pool:
        small, large = pool.map(lambda name: adapters.load(name, folder / name), ("small", "one layer"))
    assert {small.slot, large.slot} == {0, 1} and adapters.loaded == {"small": small, "one layer": large}


def changed(folder: Path, target: Path, **changes: Any) -> Path:
    """Copy an adapter with other entries in its configuration."""
    target.mkdir()
    config = json.loads((folder / "adapter_config.json").read_text()) | changes
    (target / "adapter_config.json").write_text(json.dumps(config))
    (target / "adapter_model.safetensors").write_bytes((folder / "adapter_model.safetensors").read_bytes())
    return target


def test_adapters_that_are_refused(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = saved
    packed, adapters = with_adapters(folder)
    before = [product.a.clone() for product, _ in adapters.products.values()]
    for index, (changes, text) in enumerate(
        [
            ({"use_dora": True}, "DoRA"),
            ({"bias": "lora_only"}, "biases"),
            ({"modules_to_save": ["lm_head"]}, "whole modules"),
            ({"init_lora_weights": "pissa_niter_4"}, "initialisation"),
            ({"an_option_of_next_year": 1}, "an_option_of_next_year=1"),
            ({"peft_type": "IA3"}, "IA3"),
        ]
    ):
        with pytest.raises(errors.UnsupportedRequestError, match=text):
            adapters.load("new", changed(folder / "small", tmp_path / str(index), **changes))
    save(tmp_path / "saved head", 0, r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    config = {"modules_to_save": None}
    with pytest.raises(errors.UnsupportedRequestError, match="lm_head"):
        adapters.load("new", changed(tmp_path / "saved head", tmp_path / "head", **config))
    save(tmp_path / "rank", 0, r=9, target_modules=["q_proj"])
    with pytest.raises(errors.ConfigError, match="max_rank=8"):
        adapters.load("new", tmp_path / "rank")
    packed.model.config._name_or_path = "company/model-8b"
    named = enable_adapters(enable(named_base(), num_blocks=8), target_modules=["q_proj", "v_proj", "down_proj"])
    other = changed(folder / "small", tmp_path / "other", base_model_name_or_path="company/model-1b")
    with pytest.raises(errors.ConfigError, match="model-1b"):
        named.load("new", other)
    named.load("new", other, check_base=False)
    with pytest.raises(errors.ConfigError, match="target_modules"):
        named.load("large", folder / "large")
    for name, path in (("small", folder / "small"), ("", folder / "small"), ("new", tmp_path / "missing")):
        with pytest.raises(errors.ConfigError):
            adapters.load(name, path)
    with pytest.raises(errors.ConfigError, match="a folder"):
        adapters.load("new", 5)  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigError, match="check_base='no'"):
        adapters.load("new", folder / "small", check_base="no")  # type: ignore[arg-type]
    adapters.load("fourth", folder / "small")
    with pytest.raises(errors.ConfigError, match="max_adapters=4"):
        adapters.load("fifth", folder / "small")
    adapters.remove("fourth")
    assert all(torch.equal(product.a, a) for (product, _), a in zip(adapters.products.values(), before, strict=True))


def named_base() -> Any:
    model = base()
    model.config._name_or_path = "/models/model-8b"
    return model


def test_models_that_are_refused() -> None:
    packed = enable(base(), num_blocks=8)
    with pytest.raises(errors.ConfigError, match="what enable returned"):
        enable_adapters(base())  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigError, match="lm_head"):
        enable_adapters(packed, target_modules=["q_proj", "lm_head"])
    for names, text in (
        (5, r"target_modules=\['5'\]"),
        ([], "without a name"),
        ("q_proj", r"target_modules=\['q_proj'\]"),
    ):
        with pytest.raises(errors.ConfigError, match=text):
            enable_adapters(packed, target_modules=names)  # type: ignore[arg-type]
    enable_adapters(packed)
    with pytest.raises(errors.ConfigError, match="one call"):
        enable_adapters(packed)
    model = base()
    mlp = model.model.layers[1].mlp
    mlp.gate_proj = Reversed(mlp.gate_proj)
    routed = enable(model, num_blocks=8)
    with pytest.raises(errors.UnsupportedRequestError, match=r"layers.1.mlp.gate_proj.inner"):
        enable_adapters(routed)
    enable_adapters(routed, target_modules=["q_proj", "down_proj"])


def run(packed: Any, ids: list[int] = PROMPT) -> torch.Tensor:
    """Return logits of a prompt, in blocks of the cache."""
    builder = vattn.AttentionMetadataBuilder(1, 64, max_seq_len=64, layers=packed)
    step = builder.build([len(ids)], [len(ids)], [[20, 21, 22, 23]])
    with torch.no_grad(), vattn.forward_context(step):
        return packed(torch.tensor(ids), step.positions)


def test_rows_of_a_generator_are_those_of_its_steps_alone(
    saved: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other steps between them have no adapter, or that of `set_rows`; a new generator captures graphs without any."""
    packed, adapters = with_adapters(saved[0])
    plain = run(packed)
    adapters.set_rows(["small"], [len(PROMPT)])
    small = run(packed)
    generator = vattn.Generator(packed, max_num_reqs=2)
    # Other prompts: a block that is reused could have been overwritten here.
    prompts = [PROMPT[:5], PROMPT[3:9]]
    want = [request.output for request in generator.generate(prompts, SAMPLING, adapter=["large", None])]
    assert torch.equal(run(packed), plain)
    adapters.set_rows(["small"], [len(PROMPT)])
    requests = [generator.add(p, SAMPLING, adapter=a) for p, a in zip(prompts, ("large", None), strict=True)]
    while generator.busy:
        generator.step()
        assert torch.equal(run(packed), small)
    assert [request.output for request in requests] == want
    adapters.rows.reserve(adapters.rows.max_num_tokens + 1)
    assert torch.equal(run(packed), small)
    captured = []
    capture = generation.capture
    noted = lambda *args: captured.append(adapters.rows.active) or capture(*args)  # noqa: E731
    monkeypatch.setattr(generation, "capture", noted)
    vattn.Generator(packed, max_num_reqs=2)
    assert captured == [False]


def test_linear_layers_with_adapters_stay(saved: tuple[Path, dict[str, Any]]) -> None:
    """They are neither quantised, separated nor copied; a refusal changes nothing."""
    for options in ({"merge_projections": False}, {"merge_projections": True}):
        packed, adapters = with_adapters(saved[0], **options)
        adapters.set_rows(["large"], [len(PROMPT)])
        want = run(packed)
        with pytest.raises(errors.ConfigError, match="enable_adapters afterwards"):
            vattn.quantise_linears(packed, "fp8_per_token")
        for copied in (packed, packed.model):
            with pytest.raises(errors.ConfigError, match="copy of a model with adapters"):
                copy.deepcopy(copied)
        assert torch.equal(run(packed), want)
    value = packed.model.model.layers[0].self_attn.v_proj
    before = value.weight
    value.weight = torch.nn.Parameter(before.detach().bfloat16())
    for _ in range(2):
        with pytest.raises(errors.ConfigError, match="of another kind"):
            run(packed)
    value.weight = before
    assert torch.equal(run(packed), want)


def test_enable_adapters_takes_the_cache() -> None:
    """Its runs write to blocks of an earlier generator, which refuses its next step."""
    packed = enable(base(), num_blocks=16)
    generator = vattn.Generator(packed, max_num_reqs=2)
    generator.add(PROMPT, SAMPLING)
    generator.step()
    enable_adapters(packed)
    with pytest.raises(errors.CacheError, match="taken by another"):
        generator.step()


def test_a_request_that_was_not_queued_uses_no_adapter(saved: tuple[Path, dict[str, Any]]) -> None:
    packed, adapters = with_adapters(saved[0])
    generator = vattn.Generator(packed, max_num_reqs=2, max_queue=1)
    generator.add(PROMPT, SAMPLING)
    with pytest.raises(errors.QueueFullError) as refused:
        generator.add(PROMPT, SAMPLING, adapter="small")
    adapters.remove("small")
    with pytest.raises(errors.VattnError, match="grammar") as without_tokenizer:
        generator.add(PROMPT, vattn.Sampling(grammar=vattn.Grammar(regex="a+")), adapter="large")
    adapters.remove("large")
    del refused, without_tokenizer


def test_prompts_with_images_use_adapters(tmp_path: Path) -> None:
    """Those of the language model: its vision tower has layers of the same names."""
    from tests.integrations.media_families import make, prompt

    options = {"r": 4, "lora_alpha": 8, "target_modules": r".*language_model.*(q_proj|down_proj)"}
    model, inputs = peft.get_peft_model(make("llava"), peft.LoraConfig(**options)), prompt("llava", [7, 5], [9, 4])
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    expected = model.eval().generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=None)
    packed = enable(make("llava"), num_blocks=16)
    enable_adapters(packed, max_rank=4).load("own", tmp_path)
    generator = vattn.Generator(packed, max_seq_len=64)
    with_adapter, without = generator.generate([inputs] * 2, SAMPLING, adapter=["own", None])
    assert with_adapter.output == expected[0, inputs["input_ids"].shape[1] :].tolist() != without.output


class Reversed(torch.nn.Module):
    """Run a layer on tokens in another order, as a router of experts does."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.flip(-2)).flip(-2)
