"""Time a decode step of transformers' own `generate` with a static cache, compiled."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.models.decoder import Sizes


def transformers_ms(sizes: Sizes, batch: int, context: int, new_tokens: int, device: str) -> dict[str, float]:
    """Return ms a step of transformers' own Llama in bf16 with a static cache, compiled by `generate`.

    The vocabulary is small, so that the head costs next to nothing. A step is what more tokens add to a call.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024, hidden_size=sizes.hidden, intermediate_size=sizes.ffn, num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads, head_dim=sizes.head_size,
        max_position_embeddings=8192, dtype=torch.bfloat16,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(before)
    return generate_ms(model, batch, context, new_tokens)


def generate_ms(model: Any, batch: int, context: int, new_tokens: int) -> dict[str, float]:
    """Return ms a step of `model.generate` with a static cache, compiled, and seconds of its first call."""
    from transformers import GenerationConfig

    torch._dynamo.reset()
    device = model.device.type
    prompt = torch.randint(2, model.config.vocab_size, (batch, context), device=device)
    seconds: dict[int, list[float]] = {}
    for tokens in (new_tokens, 4) * 3:
        how = GenerationConfig(
            max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, cache_implementation="static",
            pad_token_id=0, eos_token_id=1, max_length=None,
        )  # fmt: skip
        torch.cuda.synchronize() if device != "cpu" else None
        begin = time.perf_counter()
        with torch.no_grad():
            model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=how)
        torch.cuda.synchronize() if device != "cpu" else None
        seconds.setdefault(tokens, []).append(time.perf_counter() - begin)
    cold = seconds[new_tokens][0]
    step = (min(seconds[new_tokens]) - min(seconds[4])) / (new_tokens - 4)
    return {"ms": round(step * 1e3, 3), "cold_seconds": round(cold, 1)}
