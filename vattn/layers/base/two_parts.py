"""Attention in two parts: two ops see different keys of the same rows, and `merge_attn_states` weighs their results.

- A step with a cascade (`build(shared_prefix_len=...)`): all rows see the shared prefix at once, as if they were one
  request's, and each request's rows see the keys after it. Sinks count in the second part, and so do trees and flags,
  which are about new keys.
- A layer with `CacheConfig.exact_prefill`: rows see the keys of earlier steps as they are stored, and the keys of
  their own step as they are given. Sinks count in the first part.

So the schemas stay what they are, and a backend needs an LSE and one more mask (`context_only`) at most.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vattn.backends import selector
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo
from vattn.config.features import requested_features
from vattn.errors import ConfigError, UnsupportedRequestError
from vattn.layers.base.arguments import StepKind, step_configs
from vattn.layers.base.step import CascadeStep, LayerResult, LayerStep, with_own_result
from vattn.ops.arguments import AttentionArgs, VarlenAttentionArgs
from vattn.quantization.codecs import quantise_output

Part = AttentionArgs | VarlenAttentionArgs


def attend_in_parts(
    parts: tuple[Part, ...], result: LayerResult, output_format: str, output_scale: Tensor | None
) -> None:
    """Run both parts and write the merged result, quantised if the layer's is."""
    for part in parts:
        op = torch.ops.vattn.attention if isinstance(part, AttentionArgs) else torch.ops.vattn.varlen_attention
        op(*part)
    first, second = parts
    assert first.lse is not None and second.lse is not None
    merged = result.output if output_format == "none" else torch.empty_like(second.output)
    torch.ops.vattn.merge_attn_states(merged, None, first.output, first.lse, second.output, second.lse)
    if output_format != "none":
        quantise_output(merged, output_format, result.output, result.block_scale, output_scale)


_NO_CASCADE = {
    "sliding_window": "a window ends inside of the prefix for some rows",
    "chunk_lookback": "chunks count from the start of the sequence",
    "alibi": "distances to keys of the prefix differ from row to row",
    "alibi_sqrt": "distances to keys of the prefix differ from row to row",
    "mm_prefix": "ranges count from the start of the sequence",
    "batch_invariant": "a row is rounded by what the others share with it",
    "context_parallel": "a rank holds a part of the prefix",
    "context_only": "exact_prefill has two parts of its own",
}
"""Features that a cascade cannot have, and why."""


class CascadeOps(NamedTuple):
    """Encoded configs of the two parts of a cascade.

    Attributes:
        suffix: of the keys after the prefix, by the kind of step.
        prefix: of the prefix.
        refused: why kinds are refused that have none.
        columns: of a head's output.
        advice: what to do about a refusal.
    """

    suffix: dict[StepKind, str]
    prefix: str
    refused: dict[StepKind, str]
    columns: int
    advice: str = "build the step without shared_prefix_len, or choose another attn_backend"


@lru_cache(maxsize=256)
def cascade_ops(config: AttentionConfig, device: DeviceInfo) -> CascadeOps:
    """Encode what a layer asks of its backend in a step with a cascade."""
    features = requested_features(config)
    problems = [f"{name}: {why}" for name, why in _NO_CASCADE.items() if name in features]
    if config.attn_type != "decoder":
        problems.append(f"attn_type {config.attn_type}")
    part = config.with_plain_output().replace(lse=True)
    suffix, refused = step_configs(part, device)
    if problems:
        why = dict.fromkeys((*suffix, *refused), "; ".join(problems))
        return CascadeOps({}, "", why, 0, "build the step without shared_prefix_len: no backend could")
    prefix = part.replace(causality="bidirectional", sinks=False)
    problems = selector.get_backend(prefix.backend).reasons(prefix, device)
    if problems:
        return CascadeOps({}, "", dict.fromkeys((*suffix, *refused), "; ".join(problems)), 0)
    return CascadeOps(suffix, prefix.encode(), refused, config.head_size_v)


def suffix_config(ops: CascadeOps, step: LayerStep, layer: str) -> str:
    """Return the encoded config of what a step attends after the prefix.

    Raises:
        UnsupportedRequestError: the layer, or its backend, cannot attend in two parts.
    """
    kind = step.kind()
    if kind not in ops.suffix:
        raise UnsupportedRequestError(
            f"layer {layer!r} cannot attend a shared prefix apart ({ops.refused.get(kind, 'this kind of step')})",
            "layers of plain decoder attention with a backend that writes LSE and takes bidirectional queries",
            ops.advice,
        )
    return ops.suffix[kind]


def cascade_parts(args: AttentionArgs, prefix: CascadeStep, ops: CascadeOps) -> tuple[Part, Part]:
    """Return the arguments of both parts of a cascade: the prefix, and the keys after it.

    Args:
        args: the layer's, with lengths and blocks after the prefix and a config of `ops.suffix`; of its output only
            the rows count. The query is in the model dtype.
    """
    suffix = with_own_result(args, ops.columns, args.query.dtype)
    common = with_own_result(args, ops.columns, args.query.dtype)._replace(
        config=ops.prefix,
        query_start_loc=prefix.start_loc,
        seq_lens=prefix.lens,
        block_table=prefix.block_table,
        sinks=None,
        causal_flags=None,
        bias=None,
        tree_id=None,
        plan=_no_plan(prefix.lens),
    )
    return common, suffix


_NO_EXACT_PREFILL: dict[str, tuple[Any, str]] = {
    "output_format": ("none", "the two results are merged in the model dtype: quantise the layer's output instead"),
    "batch_invariant": (False, "results depend on how a prompt is cut"),
    "chunk_lookback": (None, "chunks count from the start of the sequence, which keys of one step do not know"),
    "mm_prefix": ("none", "ranges count from the start of the sequence, which keys of one step do not know"),
}
"""Fields that exact prefill cannot go with, with the value that means "off", and why."""


def context_request(config: AttentionConfig, prefix: str) -> AttentionConfig:
    """Return what a layer with `exact_prefill` asks of the cache; sinks are counted there.

    Raises:
        ConfigError: a request that the two parts cannot share.
    """
    for name, (off, why) in _NO_EXACT_PREFILL.items():
        value = getattr(config, name)
        if value != off:
            raise ConfigError(
                f"exact_prefill with {name}={value!r} in layer {prefix!r} ({why})",
                f"{name}={off!r}",
                "leave one of the two out; CacheConfig(exact_prefill=False) is the default",
            )
    return config.replace(context_only=True, lse=True)


def step_request(config: AttentionConfig) -> AttentionConfig:
    """Return what a layer with `exact_prefill` asks of the step's keys and values, from what it asks of the cache."""
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
    """Encode both configs of every kind of step of a layer with `exact_prefill`.

    Returns:
        Encoded configs of the cache's part and of the step's part, and why kinds are refused that have none.
    """
    context, refused = step_configs(config, device)
    own, also = step_configs(step_request(config), device)
    refused = {**also, **refused}
    for kind in context:
        if kind[2]:
            refused[kind] = f"exact_prefill with multimodal ranges: {_NO_EXACT_PREFILL['mm_prefix'][1]}"
    kept = [kind for kind in context if kind in own and not kind[2]]
    return {kind: context[kind] for kind in kept}, {kind: own[kind] for kind in kept}, refused


def step_parts(args: AttentionArgs, key: Tensor, value: Tensor, own_config: str) -> tuple[Part, Part]:
    """Return the arguments of both parts of exact prefill: the cache up to the step, and the keys of the step.

    Args:
        args: the layer's; of its output only the shape counts.
        key, value: `[T, K, D]` and `[T, K, V]` of the step, as the layer got them.
        own_config: the step's part of `step_ops`.
    """
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
        plan=_no_plan(starts),
        workspace=None,
        config=own_config,
    )
    return with_own_result(args, args.output.shape[2], args.output.dtype), own


def _no_plan(tensor: Tensor) -> list[Tensor]:
    # AOTInductor hands an op None for an empty list, so that an exported one holds a schedule of no elements.
    return [tensor.new_empty(0)] if torch.compiler.is_exporting() else []
