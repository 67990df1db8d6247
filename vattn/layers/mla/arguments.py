"""What an `MLAAttention` refuses at construction, and what it reads of a call apart from lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vattn.backends.mla.registry import mla_backends
from vattn.config.arguments import integer, read_count
from vattn.errors import (
    ConfigError,
    DtypeError,
    MetadataError,
    ScaleError,
    ShapeError,
    UnknownOptionError,
    UnsupportedRequestError,
)
from vattn.layers.base.checks import called, given_step
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.metadata.hybrid import GroupedMetadata
from vattn.quantization.formats import dtype_name


def check_latent_arguments(layer: Any, kv_b_proj: object) -> None:
    """Refuse what no dtype and no device can make right."""
    name = f"layer {layer.prefix!r}"
    if not isinstance(kv_b_proj, nn.Module):
        raise ConfigError(
            f"kv_b_proj of type {type(kv_b_proj).__name__} in {name}", "a linear module", "pass the projection"
        )
    if not isinstance(layer.prefix, str):
        raise ConfigError(f"prefix={layer.prefix!r:.60}", "a text", "pass the layer's name in its model")
    for size in ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"):
        read_count(size, getattr(layer, size), 1, f"check the {size} of {name}")
    if layer.attn_backend not in ("auto", *mla_backends()):
        raise UnknownOptionError(
            f"attn_backend {layer.attn_backend!r} of latent attention in {name}",
            ", ".join(("auto", *mla_backends())),
            "choose one of these names",
        )
    rank = layer.q_lora_rank
    if rank is not None and (integer(rank) or 0) < 1:
        raise ConfigError(f"q_lora_rank={rank!r} in {name}", "None or a positive int", "pass None for none")
    tokens = layer.workspace_tokens
    if tokens is not None and (integer(tokens) or 0) < layer.cache_config.block_size:
        raise ConfigError(
            f"workspace_tokens={tokens!r} in {name}",
            f"None, or an int from {layer.cache_config.block_size} on, one block",
            "give room for more tokens",
        )
    if (layer.indexer is not None) != bool(layer.use_sparse):
        raise ConfigError(
            f"use_sparse={layer.use_sparse!r} and indexer of type {type(layer.indexer).__name__} in {name}",
            "an indexer with use_sparse=True, and only with it",
            "pass both or neither",
        )
    if layer.use_sparse:
        check_indexer(layer.indexer, layer.prefix)
    quant, cache = layer.quant_config, layer.cache_config
    numbers = (int, float, str)
    same = isinstance(quant.v_scale, numbers) and isinstance(quant.k_scale, numbers) and quant.v_scale == quant.k_scale
    if quant.v_scale is not None and quant.v_scale is not quant.k_scale and not same:
        raise ScaleError(
            f"v_scale={quant.v_scale!r:.60} in {name}",
            "none, or that of the keys: a cached row is key and value",
            "drop v_scale, or write v_scale='k_scale'",
        )
    unsupported = {
        "sliding_window": cache.sliding_window is not None,
        "kv_cache_dtype_skip_layers": bool(cache.kv_cache_dtype_skip_layers),
        "kv_cache_layout": cache.kv_cache_layout != "NHD",
    }
    requested = [what for what, given in unsupported.items() if given]
    if requested:
        raise UnsupportedRequestError(
            f"{', '.join(requested)} in {name}", "latent attention without it", f"leave {requested[0]} out"
        )


def check_indexer(indexer: object, prefix: str) -> None:
    """Refuse what has no list of positions to read, whatever the step.

    Raises:
        ConfigError: `topk_indices` is missing or no tensor.
        ShapeError, DtypeError: it is no int32 `[max_tokens, K]`.
    """
    buffer = getattr(indexer, "topk_indices", None)
    allowed = "an object whose topk_indices is an int32 tensor [max_tokens, K], K >= 1"
    if not isinstance(buffer, Tensor):
        kind = f"topk_indices of type {type(buffer).__name__}"
        got = kind if hasattr(indexer, "topk_indices") else "no topk_indices"
        raise ConfigError(
            f"indexer of type {type(indexer).__name__} with {got} in layer {prefix!r}",
            allowed,
            "pass a LightningIndexer, or make the buffer in the indexer's constructor",
        )
    if buffer.dim() != 2 or not buffer.shape[1]:
        raise ShapeError(
            f"indexer.topk_indices has shape {tuple(buffer.shape)} in layer {prefix!r}",
            allowed,
            "make the buffer for the largest step",
        )
    if buffer.dtype != torch.int32:
        raise DtypeError(
            f"indexer.topk_indices is {dtype_name(buffer.dtype)} in layer {prefix!r}", allowed, "make it int32"
        )


def plain_step(layer: Any, metadata: AttentionMetadata | None) -> AttentionMetadata | None:
    """Return the step that a layer runs in, `None` for a profiling call; refuse one with more than lengths."""
    metadata = given_step(layer, metadata)
    if metadata is None:
        return None
    if isinstance(metadata, GroupedMetadata):
        raise MetadataError(
            f"metadata of type {type(metadata).__name__} in {called(layer)}",
            "AttentionMetadata without groups, or None for a profiling call",
            "pass what builder.build returned",
        )
    extras = {
        "causal": metadata.causal is not True,
        "tree_bias": metadata.tree_bias is not None,
        "mm_ranges": metadata.mm_ranges is not None,
        "shared_prefix_len": metadata.prefix_lens is not None,
    }
    requested = [name for name, given in extras.items() if given]
    if requested:
        raise UnsupportedRequestError(
            f"a step with {', '.join(requested)} in {called(layer)}", "plain causal steps", "build it without"
        )
    return metadata


def latent_rows(kv_c_normed: Tensor, k_pe: Tensor, layer: Any) -> tuple[Tensor, Tensor]:
    """Return latents and rotated keys `[T, R]`; refuse what is no tensor of rows."""
    for name, rows, width in (("kv_c_normed", kv_c_normed, layer.kv_lora_rank), ("k_pe", k_pe, layer.qk_rope_head_dim)):
        if not isinstance(rows, Tensor) or rows.dim() < 2:
            got = f"has shape {tuple(rows.shape)}" if isinstance(rows, Tensor) else f"is {type(rows).__name__}"
            raise ShapeError(f"{name} {got} in layer {layer.prefix!r}", f"a tensor [tokens, {width}]", f"pass {name}")
    return kv_c_normed, k_pe.squeeze(1) if k_pe.dim() == 3 and k_pe.shape[1] == 1 else k_pe


def listed_positions(layer: Any, num_tokens: int) -> Tensor | None:
    """Return int32 `[T, K]`, what the layer's indexer lists for this step; `None` for a dense layer."""
    if not layer.use_sparse:
        return None
    buffer = layer.indexer.topk_indices
    if buffer.shape[0] < num_tokens:
        raise ShapeError(
            f"indexer.topk_indices has shape {tuple(buffer.shape)} in layer {layer.prefix!r} for {num_tokens} tokens",
            "int32 [max_tokens, K] with a row per token",
            "make the buffer for the largest step",
        )
    return buffer[:num_tokens]
