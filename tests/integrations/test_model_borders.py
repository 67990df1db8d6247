"""What `enable` finds out about positions and shared keys, and what it says where people pass or call other things."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import vattn
from tests.support import relative_l2
from vattn.errors import ConfigError, MissingAttributeError, RequestError, UnsupportedRequestError

transformers = pytest.importorskip("transformers")

from tests.integrations.hf_families import BASE, make_model  # noqa: E402
from tests.integrations.test_transformers import PROMPTS, TOLERANCE, Runner, eager_logits  # noqa: E402
from vattn.integrations.transformers import disable, enable  # noqa: E402
from vattn.integrations.transformers.swapped_linears import MergedPart  # noqa: E402

TEMPERATURE = {
    "num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0], "layer_types": ["full_attention"] * 4, "head_dim": 16,
    "num_local_experts": 2, "intermediate_size_mlp": 64, "attn_temperature_tuning": True, "floor_scale": 8192,
}  # fmt: skip
"""Llama 4 without chunked layers."""

SHARED_KEYS = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 5, "head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
}  # fmt: skip
"""Gemma 4 as its small models are: the last layers have no keys of their own."""


def make(model_type: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    try:
        config = transformers.CONFIG_MAPPING[model_type](**{**BASE, **changes})
    except KeyError:
        pytest.skip(f"transformers without {model_type}")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("roberta", {"is_decoder": True, "pad_token_id": 1}),
        pytest.param("xlm-roberta-xl", {"is_decoder": True, "pad_token_id": 0}, marks=pytest.mark.slow),
        pytest.param("data2vec-text", {"is_decoder": True, "pad_token_id": 1}, marks=pytest.mark.slow),
        pytest.param("roberta-prelayernorm", {"is_decoder": True, "pad_token_id": 1}, marks=pytest.mark.slow),
        ("gemma4_text", SHARED_KEYS),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_positions_and_keys_are_the_models_own(model_type: str, changes: dict[str, Any]) -> None:
    """RoBERTa counts positions from the id of padding on; later layers of Gemma 4 read the keys of earlier ones."""
    model = make(model_type, **changes)
    long, short = PROMPTS
    expected = [eager_logits(model, tokens) for tokens in PROMPTS]
    packed = enable(model, num_blocks=17)
    if model_type == "roberta":
        with pytest.raises(ConfigError, match="max_seq_len=1025 for a model with a table of"):
            vattn.Generator(packed, max_seq_len=1025)
        # The model skips padding where it counts, and its `generate` does not.
        generator = vattn.Generator(packed)
        with pytest.raises(RequestError, match=r"padding token 1 in a prompt of \w+, which counts no position for it"):
            generator.add([5, 1, 7])
        sampling = vattn.Sampling(max_new_tokens=2, stop_token_ids=())
        padded = {"input_ids": [[5, 7, 1]], "attention_mask": [[1, 1, 0]]}
        one, other = generator.generate([[5, 7], padded], sampling)
        assert one.output == other.output and one.error is None
        likely = vattn.Sampling(4, stop_token_ids=(), logit_bias={1: 1e4})
        done = generator.generate([[5, 7]], likely)[0]
        assert "the padding token 1, chosen after 0 tokens" in str(done.error) and done.output == []
        assert generator.generate([[5, 7]], replace(likely, stop_token_ids=(1,)))[0].reason == "stop token"
    runner = Runner(packed)
    first, second = runner.step([(long[:20], 0), (short[:3], 0)]), runner.step([(long[20:], 20), (short[3:], 3)])
    for request, want in enumerate(expected):
        assert relative_l2(torch.cat((first[request], second[request])), want) < TOLERANCE


def test_attention_that_asks_the_cache_for_its_length_is_refused() -> None:
    """No temperature is other than 1 in the few tokens that `enable` runs."""
    with pytest.raises(UnsupportedRequestError, match="number of cached tokens"):
        enable(make("llama4_text", **TEMPERATURE))


def test_positions_that_count_in_another_way_are_refused() -> None:
    model = make("llama")
    forward = model.model.forward

    def backwards(*arguments: Any, position_ids: Any = None, **options: Any) -> Any:
        own = torch.tensor([[11, 10, 9]])
        return forward(*arguments, position_ids=own if position_ids is None else position_ids, **options)

    model.model.forward = backwards
    with pytest.raises(UnsupportedRequestError, match="numbers the positions"):
        enable(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize:UserWarning")
def test_scales_over_a_whole_step_are_named() -> None:
    model = make_model("llama")
    model.lm_head = torch.ao.nn.quantized.dynamic.Linear.from_float(_prepared(model.lm_head))
    with pytest.raises(UnsupportedRequestError, match=r"'lm_head' of torch\.ao quantises all tokens of a step by one"):
        enable(model)


def _prepared(linear: nn.Linear) -> nn.Linear:
    linear.qconfig = torch.ao.quantization.default_dynamic_qconfig  # type: ignore[assignment]
    return linear


class OtherTensor(torch.Tensor):
    """Weights with products of their own, as those of torchao."""


def test_weights_of_other_tensor_classes_stay() -> None:
    model = make_model("llama")
    layers = [layer.self_attn for layer in model.model.layers]
    layers[0].k_proj.weight = nn.Parameter(layers[0].k_proj.weight.as_subclass(OtherTensor), requires_grad=False)
    with pytest.raises(ConfigError, match=r"merge_projections=True.*layers\.0\.self_attn .*class OtherTensor"):
        enable(model, merge_projections=True)
    with pytest.raises(ConfigError, match=r"vattn_linears=True.*layers\.0\.self_attn\.k_proj.*class OtherTensor"):
        enable(model, vattn_linears=True)
    packed = enable(model)
    kinds = [[type(linear) for linear in (layer.q_proj, layer.k_proj)] for layer in layers]
    assert kinds == [[nn.Linear, nn.Linear], [MergedPart, MergedPart]]
    assert "layers.0.self_attn (q_proj, k_proj, v_proj) stay apart: weights of class OtherTensor" in packed.explain()


class PeftModel(nn.Module):
    """A wrapper with a base model inside, as that of peft."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model


def test_the_model_inside_of_another_module_is_named() -> None:
    with pytest.raises(ConfigError, match=r"PeftModel.*enable\(model\.base_model\.model\)"):
        enable(PeftModel(make_model("llama")))
    with pytest.raises(ConfigError, match=r"use vattn\.Attention"):
        enable(nn.Linear(2, 2))


def test_heads_that_no_backend_runs_are_refused_before_allocation() -> None:
    model = make_model("deepseek_v3", v_head_dim=12)
    with pytest.raises(UnsupportedRequestError, match="head_size 12"):
        enable(model)
    assert "_vattn_before" not in model.__dict__


def test_models_without_attention_are_refused() -> None:
    from vattn.integrations.transformers.mla import enable_latent_attention

    model = make("bailing_hybrid")
    for function, reason in ((enable, "only contain LinearAttention"), (enable_latent_attention, "a state besides")):
        with pytest.raises(UnsupportedRequestError, match=reason):
            function(model)


@pytest.mark.filterwarnings("ignore")
def test_sparse_attention_behind_images_is_refused_by_both() -> None:
    """MistralLarge4 has latent attention that an indexer masks; neither function sends people to the other."""
    from vattn.integrations.transformers.mla import enable_latent_attention

    if "mistral_large4" not in transformers.CONFIG_MAPPING:
        pytest.skip("transformers without mistral_large4")
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    indexer = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    text = transformers.CONFIG_MAPPING["mistral_large4_text"](**{**BASE, **latent, **indexer, **experts})
    sizes = ("hidden_size", "intermediate_size", "image_size")
    vision = {"num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 16, **dict.fromkeys(sizes, 32)}
    config = transformers.CONFIG_MAPPING["mistral_large4"](
        text_config=text.to_dict(), vision_config={"model_type": "pixtral", **vision}
    )
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    for function in (enable, enable_latent_attention):
        with pytest.raises(UnsupportedRequestError, match=r"as sparse attention.*transformers' own") as e:
            function(model)
        assert "Try: keep this model on transformers' own attention." in str(e.value)


def test_what_people_try_with_a_packed_model() -> None:
    packed = enable(make_model("llama"))
    with pytest.raises(
        MissingAttributeError, match=r"PackedModel\.generate.*Try: vattn\.Generator\(packed, tokenizer\)\.gen"
    ):
        packed.generate(torch.tensor([[1, 2]]))
    assert not hasattr(packed, "config") and not hasattr(packed, "no_such_attribute")
    with pytest.raises(ConfigError, match=r"call disable\(model\) before anything that runs the model"):
        transformers.pipeline("text-generation", model=packed, tokenizer=transformers.PreTrainedTokenizerBase())
    for whole in (packed, packed.model):
        with pytest.raises(ConfigError, match="state dicts"):
            torch.save(whole, io.BytesIO())


def test_another_attention_implementation_is_noticed() -> None:
    model = make_model("llama")
    packed = enable(model, num_blocks=9)
    generator = vattn.Generator(packed, max_num_reqs=2, max_seq_len=128)
    for change in (lambda: model.set_attn_implementation("sdpa"), lambda: model.set_attn_implementation("vattn")):
        change()
        with pytest.raises(ConfigError, match=r"whose attention is '(sdpa|vattn)' since.*disable\(model\) before"):
            generator.generate([[1, 2, 3]])
    disable(model)
    assert len(vattn.Generator(enable(model, num_blocks=9)).generate([[1, 2, 3]])) == 1


def test_copies_are_taken_off_apart() -> None:
    packed = enable(make_model("llama"))
    disable(copy.deepcopy(packed.model))
    copied = copy.deepcopy(packed)
    disable(copied)
    assert packed.enabled and not copied.enabled
    disable(packed)
    assert not packed.enabled
