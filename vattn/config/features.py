"""What a request asks for beyond plain causal attention, as names."""

from __future__ import annotations

from vattn.config.attention import AttentionConfig

FEATURES: tuple[str, ...] = (
    "bidirectional",
    "causal_flags",
    "sliding_window",
    "chunk_lookback",
    "logits_soft_cap",
    "alibi",
    "alibi_sqrt",
    "sinks",
    "tree_bias",
    "mm_prefix",
    "unequal_head_sizes",
    "head_pairs",
    "kv_scale_per_head",
    "query_scale_per_head",
    "lse",
    "context_parallel",
    "context_only",
    "batch_invariant",
    "hnd_layout",
    "contiguous_kv",
)
"""Everything beyond plain causal attention that a request can ask for, one name each."""


def requested_features(config: AttentionConfig) -> frozenset[str]:
    """Return the names in `FEATURES` that a config asks for."""
    asked = {
        "bidirectional": config.causality == "bidirectional",
        "causal_flags": config.causality == "per_request",
        "sliding_window": config.sliding_window is not None and config.chunk_lookback is None,
        "chunk_lookback": config.chunk_lookback is not None,
        "logits_soft_cap": config.logits_soft_cap is not None,
        "alibi": config.alibi == "linear",
        "alibi_sqrt": config.alibi == "sqrt",
        "sinks": config.sinks,
        "tree_bias": config.tree_bias,
        "mm_prefix": config.mm_prefix != "none",
        "unequal_head_sizes": config.head_size != config.head_size_v and config.head_pairs == "none",
        "head_pairs": config.head_pairs != "none",
        "kv_scale_per_head": config.kv_scale == "head",
        "query_scale_per_head": config.query_scale == "head",
        "lse": config.lse,
        "context_parallel": config.context_parallel,
        "context_only": config.context_only,
        "batch_invariant": config.batch_invariant,
        "hnd_layout": config.kv_cache_layout == "HND" and config.block_size > 0,
        "contiguous_kv": config.block_size == 0,
    }
    return frozenset(name for name, wanted in asked.items() if wanted)


_PART_FIELDS = ("dtype", "kv_cache_dtype", "query_format", "query_load", "output_format", "attn_type", "causality")


def request_parts(config: AttentionConfig) -> frozenset[str]:
    """Return what a request consists of: its features, and `field=value` for every format and kind.

    Exclusions are sets of these names, and so are the cells of recorded runs.
    """
    return requested_features(config) | {f"{name}={getattr(config, name)}" for name in _PART_FIELDS}
