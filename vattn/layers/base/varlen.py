"""Varlen attention, without a cache: what encoders share with decoders that are bound to no cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vattn.config.attention import AttentionConfig
from vattn.errors import DtypeError, MetadataError, ScaleError, ShapeError
from vattn.layers.base.checks import check_tokens
from vattn.layers.base.step import LayerResult, split_heads
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.ops.fusion_notes import noted
from vattn.ops.index_dtypes import as_int32
from vattn.quantization.codecs import encode_kv, encode_query
from vattn.quantization.formats import KV_FORMATS, MODEL_DTYPES, dtype_name, resolve_kv_cache_dtype


class VarlenOp(NamedTuple):
    """What a layer asks `vattn::varlen_attention` for: the encoded config, and the format of its keys and values."""

    config: str
    kv_format: str


def check_rows(layer: Any, kv_format: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse keys and values `[T, heads, width]` with other rows or dtypes than the query's.

    Compiled code checks the rows too: the offsets of the query would read past the end of a shorter key. In a layer
    with a quantised format, keys and values may come quantised.
    """
    stored = KV_FORMATS[kv_format]
    allowed = [query.dtype, stored.value_dtype] if stored.quantised else [query.dtype]
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape[0] != query.shape[0]:
            raise ShapeError(
                f"{name} has {tensor.shape[0]} tokens and query {query.shape[0]} in layer {layer.prefix!r}",
                "the same tokens for query, key and value",
                "check the projections",
            )
        if tensor.dtype not in allowed:
            raise DtypeError(
                f"{name} is {dtype_name(tensor.dtype)} in layer {layer.prefix!r}",
                " or ".join(map(dtype_name, allowed)),
                f"convert it to the query's dtype, {dtype_name(query.dtype)}",
            )


def varlen_arguments(
    layer: Any,
    qkv: Sequence[Tensor],
    starts: tuple[Tensor, Tensor],
    output: Tensor,
    block_scale: Tensor | None,
    scales: Sequence[Tensor | None],
    op_config: str,
) -> tuple[Any, ...]:
    """Return the arguments of `vattn::varlen_attention` in the schema's order.

    Args:
        starts: offsets of queries and of keys.
        scales: of q, k and v.
    """
    # AOTInductor hands an op None for an empty list, so that an exported one holds a schedule of no elements.
    plan = [starts[0].new_empty(0)] if torch.compiler.is_exporting() else []
    nothing = (None, None, None, None)  # causal_flags, bias, tree_id, mm_ranges
    return (
        *(*qkv, *starts, output, block_scale, None, layer.output_scale),
        *(*scales, layer.alibi_slopes, layer.sinks, *nothing, plan, None, noted(op_config)),
    )


def attend_rows(
    layer: Any, op: VarlenOp, qkv: tuple[Tensor, Tensor, Tensor], starts: Tensor, result: LayerResult
) -> None:
    """Attend the rows of each sequence to its own, and write `result`.

    Args:
        qkv: `[T, heads, width]`; checked.
        starts: int32 `[B + 1]`, where each sequence starts.
    """
    query, key, value = qkv
    if layer.q_scale is not None:
        query = encode_query(query, layer.q_scale, layer.num_kv_heads)
    k_scale, v_scale = (layer.k_scale, layer.v_scale) if KV_FORMATS[op.kv_format].quantised else (None, None)
    key, value = encode_kv(key, op.kv_format, k_scale), encode_kv(value, op.kv_format, v_scale)
    scales = (layer.q_scale, k_scale, v_scale)
    torch.ops.vattn.varlen_attention(
        *varlen_arguments(
            layer, (query, key, value), (starts, starts), result.output, result.block_scale, scales, op.config
        )
    )


@lru_cache(maxsize=256)
def ops_without_cache(config: AttentionConfig, cache_dtype: str, exact_prefill: bool) -> dict[str, VarlenOp]:
    """Return by model dtype what a decoder layer asks for while it is bound to no cache.

    Args:
        config: what it asks for with a cache, for any model dtype.
        cache_dtype, exact_prefill: of its `CacheConfig`. With `exact_prefill`, keys and values are not quantised.
    """
    found = {}
    for name, dtype in MODEL_DTYPES.items():
        stored = name if exact_prefill else resolve_kv_cache_dtype(cache_dtype, dtype)
        own = config.replace(
            dtype=name,
            kv_cache_dtype=stored,
            kv_scale=config.kv_scale if KV_FORMATS[stored].quantised else "none",
            block_size=0,
            kv_cache_layout="NHD",
            mm_prefix="none",
            context_only=False,
            lse=False,
        )
        found[name] = VarlenOp(own.encode(), stored)
    return found


def attend_without_cache(
    layer: Any,
    ops: dict[str, VarlenOp],
    qkv: tuple[Tensor, Tensor, Tensor],
    metadata: AttentionMetadata,
    result: LayerResult,
) -> None:
    """Attend the rows of a step without block tables, for a layer that is bound to no cache.

    Args:
        ops: of `ops_without_cache`.
        qkv: the query `[T, heads, width]`; key and value as the layer got them, which may be `[T, heads * width]`.
    """
    query, key, value = qkv
    if dtype_name(query.dtype) not in ops:
        raise DtypeError(
            f"query is {dtype_name(query.dtype)} in layer {layer.prefix!r}", ", ".join(ops), "convert the projections"
        )
    if layer.calculate_kv_scales:
        raise ScaleError(
            f"layer {layer.prefix!r} calculates its scales and has no KV cache",
            "given scales, or cache_dtype='auto'",
            "pass QuantConfig(k_scale=..., v_scale=...), or bind a cache",
        )
    op = ops[dtype_name(query.dtype)]
    key = split_heads("key", key, layer.num_kv_heads, layer.head_size)
    value = split_heads("value", value, layer.num_kv_heads, layer.head_size_v)
    check_tokens(layer, "query", query, metadata.slot_mapping.shape[0])
    check_rows(layer, op.kv_format, query, key, value)
    if metadata.causal is not True or metadata.tree_bias is not None or metadata.mm_ranges is not None:
        raise MetadataError(
            f"a step with a mask of its own in layer {layer.prefix!r}, which has no KV cache",
            "the layer's own mask",
            "build it with query_lens alone, or bind a cache",
        )
    attend_rows(layer, op, (query, key, value), as_int32(metadata.query_start_loc), result)
