"""Small attention layers with a bound cache, their inputs, and what the reference says they return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import vattn
from tests.support import make_config
from vattn.backends import selector
from vattn.config.device import DeviceInfo
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.ops.arguments import AttentionArgs
from vattn.ops.reference import attention as reference
from vattn.quantization.codecs import dequantise_output, encode_query
from vattn.quantization.formats import OUTPUT_FORMATS

HEADS, KV_HEADS, SIZE, BLOCK, NUM_BLOCKS = 4, 2, 16, 8, 8
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""fp32 sums in another order; see tests/conformance/compare.py for the narrower dtypes."""
UNIT = vattn.QuantConfig(k_scale="unit", v_scale="unit")


def make_layer(
    *,
    kind: Any = vattn.Attention,
    bound: bool = True,
    dtype: torch.dtype = torch.float32,
    cache: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return a layer of 4 heads over 2 KV heads of 16, its cache of 8 blocks of 8 full of garbage."""
    arguments = {"num_heads": HEADS, "head_size": SIZE, "scale": 0.25, "num_kv_heads": KV_HEADS, **options}
    layer = kind(cache_config=vattn.CacheConfig(**{"block_size": BLOCK, **(cache or {})}), **arguments)
    return bind(layer, dtype) if bound else layer


def bind(model: Any, dtype: torch.dtype = torch.float32, num_blocks: int = NUM_BLOCKS) -> Any:
    """Allocate the model's caches, fill them with NaN and return the model."""
    for storage in vattn.allocate_kv_cache(model, num_blocks=num_blocks, dtype=dtype).kv_caches:
        storage.view(torch.uint8).fill_(0xFF)
    return model


def backends(attn_type: str = "decoder") -> list[str]:
    """Return the backends that run fp32 attention of a type on this CPU, over a cache of these layers."""
    causality = "bidirectional" if attn_type == "encoder_decoder" else "causal"
    changes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "block_size": BLOCK, "causality": causality}
    device = DeviceInfo.of("cpu")
    return [
        name
        for name in selector.backend_names()
        if not selector.get_backend(name).reasons(
            make_config(**changes, attn_type=attn_type, backend=name, head_size=SIZE, head_size_v=SIZE), device
        )
    ]


def make_builder(**options: Any) -> vattn.AttentionMetadataBuilder:
    """Return a builder for up to 4 requests, 32 tokens, sequences of 32."""
    sizes = {"max_num_reqs": 4, "max_num_tokens": 32, "max_seq_len": 32, "block_size": BLOCK, **options}
    return vattn.AttentionMetadataBuilder(**sizes)


def make_step(query_lens: Any = (3, 2), seq_lens: Any = None, tables: Any = None, **options: Any) -> AttentionMetadata:
    """Return metadata of a step; by default a prefill of two requests."""
    seq_lens = query_lens if seq_lens is None else seq_lens
    tables = tables or [[3, 5], [1, 6], [7, 2]][: len(query_lens)]
    capacity = {"max_mm_ranges": 2, "max_trees": 2, "max_tree_size": 4}
    return make_builder(**capacity).build(list(query_lens), list(seq_lens), tables, **options)


def make_inputs(
    tokens: int, *, real: int | None = None, dtype: torch.dtype = torch.float32, seed: int = 0, value_size: int = SIZE
) -> list[Tensor]:
    """Return query, key and value of two dimensions; rows from `real` on are NaN."""
    rng = torch.Generator().manual_seed(seed)
    inputs = []
    for columns in (HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * value_size):
        rows = torch.randn(tokens, columns, generator=rng).to(dtype)
        if real is not None:
            rows[real:] = torch.nan
        inputs.append(rows)
    return inputs


def expected(layer: vattn.Attention, query: Tensor, step: AttentionMetadata, **changes: Any) -> Tensor:
    """Return the fp32 `[T, H, V]` that the reference reads from the layer's cache as it is now."""
    assert layer.config is not None
    causal = "per_request" if isinstance(step.causal, Tensor) else "causal" if step.causal else "bidirectional"
    config = layer.config.replace(causality=causal, output_format="none", **changes)
    query = query.view(-1, layer.num_heads, layer.head_size)
    if layer.q_scale is not None:
        query = encode_query(query, layer.q_scale, layer.num_kv_heads)
    nothing: dict[str, Any] = dict.fromkeys(AttentionArgs._fields)
    args = nothing | {
        "query": query,
        "key_cache": layer.key_cache,
        "value_cache": layer.value_cache,
        "query_start_loc": step.query_start_loc,
        "seq_lens": step.seq_lens,
        "block_table": step.block_table,
        "q_scale": layer.q_scale,
        "k_scale": layer.k_scale,
        "v_scale": layer.v_scale,
        "alibi_slopes": layer.alibi_slopes,
        "sinks": layer.sinks,
        "causal_flags": step.causal if isinstance(step.causal, Tensor) else None,
        "bias": step.tree_bias,
        "tree_id": step.tree_id,
        "mm_ranges": step.mm_ranges,
    }
    return reference.paged_attention(AttentionArgs(**args), config)[0]


def dense(queries: Sequence[Tensor], keys: Sequence[Tensor], values: Sequence[Tensor], causal: bool = False) -> Tensor:
    """Return attention `[T, H, V]` of the rows of each request to all its keys, by torch's own operator."""
    out = []
    heads = ((HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, -1))
    for parts in zip(queries, keys, values, strict=True):
        q, k, v = (t.unflatten(1, h).transpose(0, 1)[None] for t, h in zip(parts, heads, strict=True))
        if not k.shape[2]:
            out.append(torch.zeros(q.shape[2], HEADS, v.shape[3]))
            continue
        made = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.25, enable_gqa=True)
        out.append(made[0].transpose(0, 1))
    return torch.cat(out)


def dense_causal(query: Tensor, key: Tensor, value: Tensor, lens: list[int]) -> Tensor:
    """Return causal attention of whole prefills `[T, H, V]`."""
    return dense(*(t.split(lens) for t in (query, key, value)), causal=True)


def dequantised(layer: vattn.Attention, result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """Return what a layer's result stands for, fp32 `[T, H, V]`."""
    codes, scales = result if isinstance(result, tuple) else (result, None)
    fmt = OUTPUT_FORMATS[layer.quant_config.output_format]
    codes = codes.view(codes.shape[0], layer.num_heads, -1)
    return dequantise_output(codes, fmt, scales, layer.output_scale)
