"""Every causal model type that transformers lists: equal to its own eager attention, or refused with an error of vattn.

Sizes are guessed, for unknown types; those that cannot be made or run so are passed over.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from vattn.errors import VattnError

pytest.importorskip("transformers")

from tests.integrations.hf_families import BASE, LATENT
from tests.integrations.test_transformers import PROMPTS, TOLERANCE, eager_logits, logits_in_chunks
from tests.support import relative_l2
from vattn.integrations.transformers import disable, enable
from vattn.integrations.transformers.available import cache_argument

NAMES = {
    "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "d_model": 64, "n_heads": 4, "n_layers": 2, "d_ff": 96,
    "max_seq_len": 256, "n_positions": 256, "ffn_dim": 96, "decoder_layers": 2, "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96, "word_embed_proj_dim": 64, "num_layers": 2, "num_heads": 4, "ffn_hidden_size": 96,
    "rotary_dim": 8, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "sliding_window": 5,
}  # fmt: skip
GUESSES: list[dict[str, Any]] = [
    {"head_dim": 16},
    LATENT,
    {"layer_types": ["full_attention", "conv"]},
    {"layer_types": ["full_attention", "linear_attention"]},
    {},
]
LARGEST = 3e7
"""Parameters; a type that is larger takes its sizes from elsewhere."""


def make(model_type: str) -> Any:
    """Return a small model whose logits transformers can compute, and those; `None` if no guess makes one."""
    import transformers

    for guess in GUESSES:
        torch.manual_seed(0)
        try:
            config = transformers.CONFIG_MAPPING[model_type](**{**BASE, **NAMES, **guess})
            with torch.device("meta"):
                size = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
            if size > LARGEST:
                return None
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.normal_(std=0.2)
            return model, [eager_logits(model, tokens) for tokens in PROMPTS]
        except Exception:
            continue
    return None


def outcome(model_type: str) -> str:
    """Return "equal", "refused", "passed over", or what is wrong.

    Nemotron-H computes steps after a state by another formula than prompts: its own logits differ by as much.
    """
    made = make(model_type)
    if made is None:
        return "passed over"
    model, expected = made
    if not all(bool(logits.isfinite().all()) for logits in expected):
        return "passed over"
    try:
        packed = enable(model, num_blocks=33)
    except VattnError:
        return "refused"
    error = max(map(relative_l2, logits_in_chunks(packed), expected))
    if error < TOLERANCE:
        return "equal"
    own = max(relative_l2(by_tokens(model, tokens), logits) for tokens, logits in zip(PROMPTS, expected, strict=True))
    return "equal but for its own steps" if error < own else f"differs by {error}"


def by_tokens(model: Any, tokens: list[int]) -> Tensor:
    """Return the logits of a prompt that transformers computes token by token, over its own cache."""
    import transformers

    disable(model)
    name, cache = cache_argument(model.forward), transformers.DynamicCache(config=model.config)
    rows = []
    with torch.no_grad():
        for token in tokens:
            rows.append(model(input_ids=torch.tensor([[token]]), use_cache=True, **{name: cache}).logits[0])
    return torch.cat(rows)


@pytest.mark.long
def test_every_type_is_equal_or_refused() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = {model_type: outcome(model_type) for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    counts = {kind: list(found.values()).count(kind) for kind in set(found.values())}
    print(counts)
    assert set(counts) <= {"equal", "equal but for its own steps", "refused", "passed over"}, found
    assert counts["equal"] >= 60
