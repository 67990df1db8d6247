"""Small random models with layers that keep a state for each request, in addition to attention."""

from __future__ import annotations

from typing import Any

from tests.integrations.hf_families import BASE, LATENT, Family, random_model

MAMBA_2 = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16,
    "mamba_d_conv": 4, "mamba_expand": 2,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"]}

HYBRIDS = {
    "qwen3_next": Family("qwen3_next", "gated delta rule, experts", {**DELTA, **EXPERTS}),
    "qwen3_5": Family("qwen3_5_text", "gated delta rule", DELTA),
    "qwen3_5_moe": Family("qwen3_5_moe_text", "gated delta rule, experts", {**DELTA, **EXPERTS}),
    "kimi_linear": Family(
        "kimi_linear",
        "Kimi delta attention, latent attention (expanded), experts",
        {
            **LATENT, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_experts": 4,
            "num_experts_per_token": 2, "moe_intermediate_size": 32,
            "linear_attn_config": {
                "head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4, "kda_layers": [1, 3],
                "full_attn_layers": [2],
            },
        },
    ),
    "olmo_hybrid": Family("olmo_hybrid", "gated delta rule", {"layer_types": DELTA["layer_types"]}),
    "jamba": Family(
        "jamba",
        "Mamba, experts; chunks after the first run token by token",
        {
            "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
            "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
            "use_mamba_kernels": False,
        },
    ),
    "bamba": Family("bamba", "Mamba 2", {**MAMBA_2, "attn_layer_indices": [1]}),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        "Mamba 2, experts, no positions (Granite 4)",
        {
            **MAMBA_2, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4,
            "num_experts_per_tok": 2, "shared_intermediate_size": 64, "position_embedding_type": "nope",
        },
    ),
    "nemotron_h": Family(
        "nemotron_h",
        "Mamba 2, layers of experts alone, no positions",
        {
            "layers_block_type": ["mamba", "attention", "mamba", "moe"], "num_hidden_layers": 4, "mamba_num_heads": 4,
            "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16, "head_dim": 16,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
            "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "falcon_h1": Family(
        "falcon_h1",
        "Mamba 2 and attention side by side in every layer",
        {**MAMBA_2, "mamba_d_ssm": 128, "head_dim": 16},
    ),
    "zamba2": Family(
        "zamba2",
        "Mamba 2, attention layers of one shared block",
        {
            "layers_block_type": ["mamba", "hybrid", "mamba"], "mamba_d_state": 16, "mamba_d_conv": 4,
            "mamba_expand": 2, "n_mamba_heads": 4, "mamba_headdim": 32, "mamba_ngroups": 1,
            "chunk_size": 16, "num_mem_blocks": 1, "adapter_rank": 8, "num_key_value_heads": 4,
            # transformers bounds time steps below in prompts, and not in decodes.
            "time_step_min": 1e-9,
        },
    ),
    "lfm2": Family("lfm2", "short convolutions", CONVOLUTIONS),
    "lfm2_moe": Family(
        "lfm2_moe",
        "short convolutions, experts",
        {
            **CONVOLUTIONS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "num_dense_layers": 1,
        },
    ),
}  # fmt: skip


def table() -> str:
    """Return the families as the documentation shows them; a family that fails its test has no place here."""
    rows = [f"| `{family.model_type}` | {family.special} |" for family in HYBRIDS.values()]
    return "\n".join(["| model type | layers with states, and what is special |", "|---|---|", *rows])


def make_hybrid(name: str, seed: int = 0, **changes: Any) -> Any:
    """Return a family's model in eval mode, fp32, with transformers' eager attention."""
    return random_model(HYBRIDS[name], seed, {**BASE, "num_hidden_layers": 3, **HYBRIDS[name].options, **changes})
