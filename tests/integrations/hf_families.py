"""Small random models of the families that the transformers integration is tested on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

BASE = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WIDE = {"head_dim": 32}
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SHARING = {
    "head_dim": 32, "sliding_window": 5, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
ROUTED_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One model type, what is special about it, what its small configuration changes, and whose logits are expected."""

    model_type: str
    special: str
    options: dict[str, Any] = field(default_factory=dict)
    expected: str = "eager"
    """Attention of transformers that is right; Falcon's eager one adds the bias of ALiBi twice."""


FAMILIES = {
    "llama": Family("llama", "grouped queries"),
    "llama-2": Family("llama", "a KV head for each query head (Llama 2)", {"num_key_value_heads": 4}),
    "llama-3": Family("llama", "frequencies of RoPE stretched (Llama 3.1)", {"rope_parameters": LLAMA_3}),
    "mistral": Family("mistral", "a window in every layer", {"sliding_window": 5}),
    "qwen2": Family("qwen2", "biases"),
    "qwen3": Family("qwen3", "norms of queries and keys", WIDE),
    "qwen3_moe": Family(
        "qwen3_moe", "experts", {**WIDE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    ),
    "mixtral": Family("mixtral", "experts", EXPERTS),
    "gemma2": Family(
        "gemma2",
        "soft cap, every second layer with a window",
        {**WIDE, "sliding_window": 5, "query_pre_attn_scalar": 32},
    ),
    "gemma3": Family(
        "gemma3_text",
        "five of six layers with a window, two RoPE bases",
        {**WIDE, "sliding_window": 5, "num_hidden_layers": 7},
    ),
    "phi3": Family("phi3", "one projection, heads of 96", {"hidden_size": 192, "num_attention_heads": 2}),
    "olmo2": Family("olmo2", "norms of whole rows of queries and keys"),
    "starcoder2": Family("starcoder2", "one KV head", {"num_key_value_heads": 1, "sliding_window": 7}),
    "gpt_neox": Family("gpt_neox", "a quarter of each head rotated"),
    "falcon": Family(
        "falcon",
        "one KV head, an own forward",
        {"multi_query": True, "new_decoder_architecture": False, "alibi": False},
    ),
    "falcon-groups": Family(
        "falcon",
        "grouped queries, an own forward",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    ),
    "falcon-alibi": Family(
        "falcon",
        "ALiBi, an own forward",
        {"multi_query": False, "new_decoder_architecture": False, "alibi": True},
        "sdpa",
    ),
    "bloom": Family("bloom", "ALiBi, an own forward", {"n_head": 4, "n_layer": 2}),
    "mpt": Family("mpt", "ALiBi, an own forward", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}),
    "gpt_oss": Family(
        "gpt_oss", "sinks, experts, every second layer with a window", {**WIDE, **EXPERTS, "sliding_window": 5}
    ),
    "gemma3n": Family(
        "gemma3n_text",
        "layers that share keys and values, embeddings in every layer",
        {**SHARING, "activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [96] * 4, "laurel_rank": 4},
    ),
    "gemma4": Family(
        "gemma4_text",
        "layers that share keys and values, embeddings in every layer, larger heads in full layers",
        {**SHARING, "global_head_dim": 48},
    ),
    "cohere": Family("cohere", "parallel layers"),
    "cohere2": Family(
        "cohere2", "windows, some layers without positions", {"sliding_window": 5, "num_hidden_layers": 4}
    ),
    "gpt2": Family("gpt2", "learned positions", {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256}),
    "deepseek_v3": Family(
        "deepseek_v3", "latent projections, expanded: keys of 24, values of 16", {**LATENT, **ROUTED_EXPERTS}
    ),
}


def table() -> str:
    """Return the families as the documentation shows them; a family that fails its test has no place here."""
    rows = [f"| `{family.model_type}` | {family.special} |" for family in FAMILIES.values()]
    return "\n".join(["| model type | what is special about it |", "|---|---|", *rows])


def make_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """Return a family's model in eval mode, fp32, with transformers' eager attention."""
    return random_model(FAMILIES[name], seed, {**BASE, **FAMILIES[name].options, **changes})


def random_model(family: Family, seed: int, options: dict[str, Any]) -> Any:
    """Return a model of random weights for a family and all options of its configuration."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.CONFIG_MAPPING[family.model_type](**options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=family.expected).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than a family's start, so that attention decides about the logits.
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model.requires_grad_(False)
