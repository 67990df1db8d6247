"""DeepSeek's models of transformers on `MLAAttention`: logits equal those of transformers' own attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vattn
from tests.support import relative_l2
from vattn.errors import ConfigError, UnsupportedRequestError, VattnError

transformers = pytest.importorskip("transformers")
if not hasattr(getattr(transformers, "DeepseekV3ForCausalLM", None), "from_pretrained"):
    pytest.skip("transformers without DeepSeek-V3", allow_module_level=True)

from tests.integrations.test_transformers import Runner, eager_logits  # noqa: E402
from vattn.integrations.transformers import disable  # noqa: E402
from vattn.integrations.transformers.mla import enable_latent_attention  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "max_position_embeddings": 128, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V3": ("DeepseekV3", {"q_lora_rank": 20, "first_k_dense_replace": 1}),
    "DeepSeek-V2": ("DeepseekV2", {"q_lora_rank": 20, "first_k_dense_replace": 1}),
    "DeepSeek-V2-Lite": ("DeepseekV2", {"q_lora_rank": None, "first_k_dense_replace": 2}),
    "Kimi-like": (
        "DeepseekV3",
        {"q_lora_rank": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "first_k_dense_replace": 2,
         "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                             "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 50000.0}},
    ),
}  # fmt: skip


def make_model(name: str) -> Any:
    kind, changes = MODELS[name]
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    config._attn_implementation = "eager"
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", list(MODELS))
def test_logits_equal_those_of_transformers(name: str, compiled: bool) -> None:
    if compiled and name not in ("DeepSeek-V2-Lite", "Kimi-like"):
        pytest.skip("routing to experts is not compiled here")
    model = make_model(name)
    prompts = [torch.randint(0, 99, (length,)).tolist() for length in (29, 18)]
    expected = [eager_logits(model, prompt) for prompt in prompts]
    packed = enable_latent_attention(model, num_blocks=17)
    runner = Runner(packed, vattn.compile(packed, fullgraph=True) if compiled else None)
    done = [0, 0]
    # Prompts whole and in chunks, with decodes.
    for query_lens in ([12, 0], [9, 16], [1, 1], [7, 1]):
        spans = [slice(start, start + query) for start, query in zip(done, query_lens, strict=True)]
        parts = [(prompt[span], span.start) for prompt, span in zip(prompts, spans, strict=True)]
        wanted = torch.cat([logits[span] for logits, span in zip(expected, spans, strict=True)])
        assert relative_l2(torch.cat(runner.step(parts)), wanted) < 2e-5
        done = [span.stop for span in spans]
    disable(packed)
    assert torch.equal(eager_logits(model, prompts[0]), expected[0])


def test_the_cache_holds_one_row_a_token() -> None:
    packed = enable_latent_attention(make_model("DeepSeek-V3"), num_blocks=4)
    assert packed.kv_cache is not None
    assert [tuple(cache.shape) for cache in packed.kv_cache.kv_caches] == [(4, 16, 32)] * 2


def test_other_models_are_refused() -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(UnsupportedRequestError, match="without latent attention"):
        enable_latent_attention(transformers.LlamaForCausalLM(config).eval())


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention_is_refused(name: str) -> None:
    """Such models attend by an indexer of their own, which a layer without one would leave out."""
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers without {name}")
    torch.manual_seed(3)
    sizes = {**SIZES, "q_lora_rank": 20, "first_k_dense_replace": 1, "pad_token_id": 0}
    config = transformers.CONFIG_MAPPING[name](**sizes, index_topk=4, index_n_heads=2, index_head_dim=16)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])
    with torch.no_grad():
        expected = model(ids).logits
        with pytest.raises(UnsupportedRequestError, match="sparse attention"):
            enable_latent_attention(model)
        assert torch.equal(model(ids).logits, expected)


def test_models_that_no_step_could_run_are_refused() -> None:
    model = make_model("DeepSeek-V2-Lite")
    with pytest.raises(ConfigError, match="with its head"):
        enable_latent_attention(model.model)
    outputs = vattn.QuantConfig(output_format="fp8_static", output_scale=1.0)
    with pytest.raises(ConfigError, match="quantise_linears"):
        enable_latent_attention(model, quant_config=outputs)
    with torch.device("meta"):
        empty = make_model("DeepSeek-V2-Lite")
    with pytest.raises(ConfigError, match="meta"):
        enable_latent_attention(empty)
    with pytest.raises(ConfigError, match="training mode"):
        enable_latent_attention(model.train())
    enable_latent_attention(model.eval())
    with pytest.raises(ConfigError, match="on vattn"):
        enable_latent_attention(model)


@pytest.mark.parametrize("options", [{"memory": "lots"}, {"attn_backend": "FLASH_ATTN", "num_blocks": 4}], ids=str)
def test_a_refused_model_stays_as_it_was(options: dict[str, Any]) -> None:
    model = make_model("DeepSeek-V2-Lite")
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        expected = model(ids).logits
    with pytest.raises(VattnError):
        enable_latent_attention(model, **options)
    assert not any("vattn" in name for name, _ in model.named_modules())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)
    enable_latent_attention(model, num_blocks=4)
