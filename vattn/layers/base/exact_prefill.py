"""`CacheConfig.exact_prefill`: rows see the keys of their own step as given, and what lies before it as it is stored.

Two attention ops share the work: `attention` over the cache up to the step, `varlen_attention` over the keys and values
of the step; `merge_attn_states` weighs their results. So the schemas stay what they are, and a backend needs no more
than the mask `context_only`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo
from vattn.errors import ConfigError
from vattn.layers.base.arguments import StepKind, step_configs
from vattn.layers.base.step import with_own_result
from vattn.ops.arguments import AttentionArgs, VarlenAttentionArgs

_REFUSED: dict[str, tuple[Any, str]] = {
    "output_format": ("none", "the two results are merged in the model dtype: quantise the layer's output instead"),
    "batch_invariant": (False, "results depend on how a prompt is cut"),
    "chunk_lookback": (None, "chunks count from the start of the sequence, which keys of one step do not know"),
    "mm_prefix": ("none", "ranges count from the start of the sequence, which keys of one step do not know"),
}
"""What cannot be asked for together, with the value that means "off"."""


def context_request(config: AttentionConfig, prefix: str) -> AttentionConfig:
    """Return what a layer with `exact_prefill` asks of the cache; sinks are counted there.

    Raises:
        ConfigError: a request that the two parts cannot share.
    """
    for name, (off, why) in _REFUSED.items():
        value = getattr(config, name)
        if value != off:
            raise ConfigError(
                f"exact_prefill with {name}={value!r} in layer {prefix!r} ({why})",
                f"{name}={off!r}",
                "leave one of the two out; CacheConfig(exact_prefill=False) is the default",
            )
    return config.replace(context_only=True, lse=True)


def step_request(config: AttentionConfig) -> AttentionConfig:
    """Return what the layer asks of the step's own keys and values, from what it asks of the cache."""
    return config.replace(
        kv_cache_dtype=config.dtype,
        kv_scale="none",
        block_size=0,
        kv_cache_layout="NHD",
        context_only=False,
        sinks=False,
    )


def step_ops(
    config: AttentionConfig, device: DeviceInfo
) -> tuple[dict[StepKind, str], dict[StepKind, str], dict[StepKind, str]]:
    """Encode both configs of every kind of step.

    Returns:
        Encoded configs of the cache's part and of the step's part, and why kinds are refused that have none.
    """
    context, refused = step_configs(config, device)
    own, also = step_configs(step_request(config), device)
    refused = {**also, **refused}
    for kind in context:
        if kind[2]:
            refused[kind] = f"exact_prefill with multimodal ranges: {_REFUSED['mm_prefix'][1]}"
    kept = [kind for kind in context if kind in own and not kind[2]]
    return {kind: context[kind] for kind in kept}, {kind: own[kind] for kind in kept}, refused


def step_parts(
    arguments: tuple[Any, ...], key: Tensor, value: Tensor, own_config: str
) -> tuple[AttentionArgs, VarlenAttentionArgs]:
    """Return the arguments of both parts, with outputs of their own, from those of the layer's `vattn::attention`.

    Args:
        arguments: in the schema's order; the output is not used but for its shape.
        key, value: `[T, K, D]` and `[T, K, V]` of the step, as the layer got them.
        own_config: the step's part of `step_ops`.
    """
    args = AttentionArgs(*arguments)
    context = with_own_result(args, args.output.shape[2], args.output.dtype)
    starts = args.query_start_loc
    own = VarlenAttentionArgs(
        query=args.query,
        key=key,
        value=value,
        query_start_loc=starts,
        kv_start_loc=starts,
        output=torch.empty_like(args.output),
        output_block_scale=None,
        lse=args.query.new_empty(args.query.shape[:2], dtype=torch.float32),
        output_scale=None,
        q_scale=args.q_scale,
        k_scale=None,
        v_scale=None,
        alibi_slopes=args.alibi_slopes,
        sinks=None,
        causal_flags=args.causal_flags,
        bias=args.bias,
        tree_id=args.tree_id,
        mm_ranges=None,
        # AOTInductor hands an op None for an empty list, so that an exported one holds a schedule of no elements.
        plan=[starts.new_empty(0)] if torch.compiler.is_exporting() else [],
        workspace=None,
        config=own_config,
    )
    return context, own


def attend_in_parts(arguments: tuple[Any, ...], key: Tensor, value: Tensor, own_config: str) -> None:
    """Run both parts and write the merged result into the output that `arguments` name."""
    context, own = step_parts(arguments, key, value, own_config)
    torch.ops.vattn.attention(*context)
    torch.ops.vattn.varlen_attention(*own)
    output = AttentionArgs(*arguments).output
    assert context.lse is not None and own.lse is not None
    torch.ops.vattn.merge_attn_states(output, None, context.output, context.lse, own.output, own.lse)
