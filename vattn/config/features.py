"""Names of what a request needs beyond plain causal attention."""

from __future__ import annotations

from collections.abc import Callable

from vattn.config.attention import AttentionConfig

_REQUESTED: dict[str, Callable[[AttentionConfig], bool]] = {
    "bidirectional": lambda config: config.causality == "bidirectional",
    "causal_flags": lambda config: config.causality == "per_request",
    "sliding_window": lambda config: config.sliding_window is not None and config.chunk_lookback is None,
    "chunk_lookback": lambda config: config.chunk_lookback is not None,
    "logits_soft_cap": lambda config: config.logits_soft_cap is not None,
    "alibi": lambda config: config.alibi == "linear",
    "alibi_sqrt": lambda config: config.alibi == "sqrt",
    "sinks": lambda config: config.sinks,
    "tree_bias": lambda config: config.tree_bias,
    "mm_prefix": lambda config: config.mm_prefix != "none",
    "unequal_head_sizes": lambda config: config.head_size != config.head_size_v and config.head_pairs == "none",
    "head_pairs": lambda config: config.head_pairs != "none",
    "kv_scale_per_head": lambda config: config.kv_scale == "head",
    "query_scale_per_head": lambda config: config.query_scale == "head",
    "lse": lambda config: config.lse,
    "context_parallel": lambda config: config.context_parallel,
    "context_only": lambda config: config.context_only,
    "batch_invariant": lambda config: config.batch_invariant,
    "hnd_layout": lambda config: config.kv_cache_layout == "HND" and config.block_size > 0,
    "contiguous_kv": lambda config: config.block_size == 0,
}

FEATURES: tuple[str, ...] = tuple(_REQUESTED)
"""Everything beyond plain causal attention that a request can ask for, one name each."""


def requested_features(config: AttentionConfig) -> frozenset[str]:
    """Return the names in `FEATURES` that a config needs."""
    return frozenset(name for name, requested in _REQUESTED.items() if requested(config))


_PART_FIELDS = ("dtype", "kv_cache_dtype", "query_format", "query_load", "output_format", "attn_type", "causality")


def request_parts(config: AttentionConfig) -> frozenset[str]:
    """Return the features of a request and `field=value` of every format and kind; exclusions are sets of these."""
    return requested_features(config) | {f"{name}={getattr(config, name)}" for name in _PART_FIELDS}
