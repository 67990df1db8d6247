"""`build(shared_prefix_len=...)`: all rows of a step see the shared prefix at once, each request what lies behind it.

Two calls of `vattn::attention` share the work, and `merge_attn_states` weighs their results. Sinks count in the second,
and so do trees and flags, which are about new keys. What counts places from the start of a sequence is refused.
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
from vattn.errors import UnsupportedRequestError
from vattn.layers.base.arguments import StepKind, step_configs
from vattn.layers.base.step import LayerResult, LayerStep, PrefixStep, with_own_result
from vattn.ops.arguments import AttentionArgs
from vattn.quantization.codecs import quantise_output

_REFUSED = {
    "sliding_window": "a window ends inside of the prefix for some rows",
    "chunk_lookback": "chunks count from the start of the sequence",
    "alibi": "distances to keys of the prefix differ from row to row",
    "alibi_sqrt": "distances to keys of the prefix differ from row to row",
    "mm_prefix": "ranges count from the start of the sequence",
    "batch_invariant": "a row is rounded by what the others share with it",
    "context_parallel": "a rank holds a part of the prefix",
    "context_only": "exact_prefill has two parts of its own",
}
"""Features that the two parts cannot share, and why."""


class PrefixOps(NamedTuple):
    """Encoded configs of both parts.

    Attributes:
        suffix: of what lies behind the prefix, by the kind of step.
        prefix: of the prefix.
        refused: why kinds are refused that have none.
        columns: of a head's output.
        advice: what to do about a refusal.
    """

    suffix: dict[StepKind, str]
    prefix: str
    refused: dict[StepKind, str]
    columns: int
    advice: str = "build the step without shared_prefix_len, or ask for another attn_backend"


@lru_cache(maxsize=256)
def prefix_ops(config: AttentionConfig, device: DeviceInfo) -> PrefixOps:
    """Encode what a layer asks of its backend in a step with a shared prefix."""
    asked = requested_features(config)
    problems = [f"{name}: {why}" for name, why in _REFUSED.items() if name in asked]
    if config.attn_type != "decoder":
        problems.append(f"attn_type {config.attn_type}")
    part = config.with_plain_output().replace(lse=True)
    suffix, refused = step_configs(part, device)
    if problems:
        why = dict.fromkeys((*suffix, *refused), "; ".join(problems))
        return PrefixOps({}, "", why, 0, "build the step without shared_prefix_len: no backend could")
    prefix = part.replace(causality="bidirectional", sinks=False)
    problems = selector.get_backend(prefix.backend).reasons(prefix, device)
    if problems:
        return PrefixOps({}, "", dict.fromkeys((*suffix, *refused), "; ".join(problems)), 0)
    return PrefixOps(suffix, prefix.encode(), refused, config.head_size_v)


def prefix_parts(
    arguments: tuple[Any, ...], prefix: PrefixStep, ops: PrefixOps, suffix_config: str, dtype: torch.dtype
) -> tuple[AttentionArgs, AttentionArgs]:
    """Return the arguments of both parts, with outputs of their own, from those of the layer's `vattn::attention`.

    Args:
        arguments: in the schema's order, for lengths and blocks behind the prefix; the output is not used but for its
            rows.
        suffix_config: one of `ops.suffix`.
        dtype: of the model.
    """
    args = AttentionArgs(*arguments)
    suffix = with_own_result(args._replace(config=suffix_config), ops.columns, dtype)
    common = with_own_result(args._replace(config=ops.prefix), ops.columns, dtype)._replace(
        query_start_loc=prefix.start_loc,
        seq_lens=prefix.lens,
        block_table=prefix.block_table,
        sinks=None,
        causal_flags=None,
        bias=None,
        tree_id=None,
        # AOTInductor hands an op None for an empty list, so that an exported one holds a schedule of no elements.
        plan=[prefix.lens.new_empty(0)] if torch.compiler.is_exporting() else [],
    )
    return suffix, common


def attend_with_prefix(
    parts: tuple[AttentionArgs, AttentionArgs], result: LayerResult, output_format: str, output_scale: Tensor | None
) -> None:
    """Run both parts and write the merged result, quantised if the layer's is."""
    suffix, common = parts
    torch.ops.vattn.attention(*common)
    torch.ops.vattn.attention(*suffix)
    assert suffix.lse is not None and common.lse is not None
    merged = result.output if output_format == "none" else torch.empty_like(suffix.output)
    torch.ops.vattn.merge_attn_states(merged, None, common.output, common.lse, suffix.output, suffix.lse)
    if output_format != "none":
        quantise_output(merged, output_format, result.output, result.block_scale, output_scale)


def suffix_config(ops: PrefixOps, step: LayerStep, layer: str) -> str:
    """Return the encoded config of what a step attends behind the prefix.

    Raises:
        UnsupportedRequestError: the layer, or its backend, cannot attend in two parts.
    """
    kind = step.kind()
    if kind not in ops.suffix:
        raise UnsupportedRequestError(
            f"layer {layer!r} cannot attend a shared prefix apart ({ops.refused.get(kind, 'this kind of step')})",
            "layers of plain decoder attention, whose backend writes LSE and takes bidirectional queries",
            ops.advice,
        )
    return ops.suffix[kind]
