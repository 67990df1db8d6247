"""Which rows of latent attention are absorbed and which expanded: a rule that no length on the host is read for."""

from __future__ import annotations

from vattn.config.mla import MLAConfig

_NEVER = 1 << 30


def longest_absorbed(config: MLAConfig) -> int:
    """Return the most tokens a request may have for its rows to be attended in the latent space.

    An expanded key costs (P + V) L products once, and P + R + V a row; an absorbed one 2 L + R a row. Both forms cost
    the same at q = (P + V) L / (2 L - P - V) rows, 170 for DeepSeek. Expanded products run nearer to the hardware's
    rate, so a quarter of that is taken, or the layer's `decode_threshold` where it is larger. Layers with heads
    wider than the latent are always absorbed; sparse layers expand only requests with rows that list all visible keys.
    """
    wide = config.qk_nope_head_dim + config.v_head_dim
    saved = 2 * config.kv_lora_rank - wide
    if saved <= 0:
        return _NEVER
    return max(config.decode_threshold, wide * config.kv_lora_rank // (4 * saved))


def has_prompts(config: MLAConfig, num_tokens: int, num_reqs: int) -> bool:
    """Return whether a step of these shapes has a request that is not short; steps without run absorbed as a whole."""
    return num_tokens > longest_absorbed(config) * num_reqs


def most_aligned(config: MLAConfig) -> int:
    """Return how many places one program expands, unless a workspace holds fewer."""
    return 32 if config.dtype == "float32" else 128
