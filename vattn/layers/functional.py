"""The ops as functions that allocate their outputs, for callers with a cache of their own or without one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import vattn.ops.schemas  # noqa: F401  registers the ops
from vattn.cache.layout import op_views
from vattn.config.attention import AttentionConfig
from vattn.config.rope import RopeConfig
from vattn.config.typed import typed_on_error
from vattn.errors import MetadataError, ShapeError
from vattn.layers.encoder.cu_seqlens import check_offsets
from vattn.metadata.attention_metadata import AttentionMetadata, step_of
from vattn.ops.arguments import VarlenAttentionArgs
from vattn.ops.checks import check_storage, check_varlen_attention
from vattn.ops.fusion_notes import noted
from vattn.quantization.formats import MODEL_DTYPES, OUTPUT_FORMATS

KVCache = Tensor | tuple[Tensor, Tensor]
"""A storage of `vattn.kv_cache_shape(config, num_blocks)`, or a tuple of keys `[num_blocks, block_size, num_kv_heads,
head_size]` and values `[..., head_size_v]` in memory of your own: any strides but adjacent columns."""


class AttentionOutput(NamedTuple):
    """What `paged_attention` returns.

    Attributes:
        output: `[T, num_heads, head_size_v]` in the model dtype or the output format's container.
        lse: fp32 `[T, num_heads]`, or `None` unless `config.lse`.
        block_scale: scales that the output format computed, or `None`.
    """

    output: Tensor
    lse: Tensor | None
    block_scale: Tensor | None


def new_output(query: Tensor, config: AttentionConfig) -> AttentionOutput:
    """Return uninitialised outputs of `vattn::attention` for this query and config."""
    if query.dim() != 3:
        raise ShapeError(
            f"query has shape {tuple(query.shape)}", "[T, num_heads, head_size]", "reshape it, requests packed"
        )
    output, block_scale = OUTPUT_FORMATS[config.output_format].allocate(
        query, config.head_size_v, MODEL_DTYPES[config.dtype]
    )
    lse = query.new_empty(query.shape[:2], dtype=torch.float32) if config.lse else None
    return AttentionOutput(output, lse, block_scale)


@typed_on_error
def update_kv_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: KVCache,
    slot_mapping: Tensor,
    config: AttentionConfig,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write new keys and values into their slots of a cache, in place.

    Args:
        key, value: `[T, num_kv_heads, head_size]` and `[T, num_kv_heads, head_size_v]`.
        kv_cache: storage of `vattn.kv_cache_shape(config, num_blocks)`, or keys and values as views with any strides;
            mutated.
        slot_mapping: int64 or int32 `[T]`, `block * block_size + offset`; one out of range (-1) writes nothing.
        k_scale, v_scale: fp32, for a quantised cache.

    Raises:
        ConfigError, ShapeError, DtypeError, DeviceError, StrideError, ScaleError: not a config, or a wrong tensor.
        UnsupportedRequestError: no backend, or not the one named in the config, writes it on the cache's device.
    """
    cache = _views(kv_cache, config)
    torch.ops.vattn.kv_cache_update(key, value, *cache, slot_mapping, k_scale, v_scale, config.encode())


@typed_on_error
def rope_update_kv_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: KVCache,
    slot_mapping: Tensor,
    rope: RopeConfig,
    config: AttentionConfig,
    *,
    positions: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Rotate queries and keys, write keys and values into their slots of a cache in place, and return the queries.

    One kernel on a GPU. Norm and rotation are computed in fp32; results are rounded to the model dtype and then
    quantised, if the config asks for it. `vattn.options(rope=...)` finds the same steps in a compiled model.

    Args:
        query: `[T, num_heads, head_size]` in the model dtype; may be a slice of one projection, as key and value.
        key, value: `[T, num_kv_heads, head_size]` and `[T, num_kv_heads, head_size_v]`.
        cos, sin: float `[N, R / 2]`, one angle per pair, or `[N, R]`, one factor per column; R = `rope.rotary_dim`. Row
            t is token t's (N = T), or row `positions[t]`.
        kv_cache: as for `update_kv_cache`; mutated.
        slot_mapping: int64 or int32 `[T]`, as for `update_kv_cache`; a slot out of range writes nothing.
        rope: the rotation and the norm before it.
        positions: int32 or int64 `[T]`; rows of the tables.
        q_weight, k_weight: `[head_size]` of the norms, fp32 or model dtype.
        q_scale: fp32, 1 value or one per KV head, with a query format in the config.
        k_scale, v_scale: fp32, for a quantised cache.

    Returns:
        `[T, num_heads, head_size]` in the model dtype, or e4m3 with a query format; every row is written.

    Raises:
        ConfigError, ShapeError, DtypeError, DeviceError, StrideError, ScaleError: a tensor contradicts the configs.
        UnsupportedRequestError: the config's backend has no such op.

    Example:
        >>> import torch, vattn
        >>> config = vattn.AttentionConfig(2, 1, 16, 16, 0.25, "float32", "float32", block_size=8)
        >>> cache = torch.zeros(vattn.kv_cache_shape(config, num_blocks=2))
        >>> angles = torch.outer(torch.arange(32.0), 10000 ** (-torch.arange(8) / 8))
        >>> ones, slots, rope = torch.ones(2, 1, 16), torch.tensor([8, 9]), vattn.RopeConfig(rotary_dim=16)
        >>> rotated = vattn.rope_update_kv_cache(
        ...     torch.ones(2, 2, 16), ones, ones, angles.cos(), angles.sin(), cache, slots, rope, config,
        ...     positions=torch.tensor([0, 3]),
        ... )
        >>> bool((rotated[0] == 1).all()), bool((rotated[1] == cache[0, 1, 1]).all())
        (True, True)
    """
    dtype = torch.float8_e4m3fn if config.query_format != "none" else MODEL_DTYPES[config.dtype]
    query_out = query.new_empty(query.shape, dtype=dtype)
    torch.ops.vattn.rope_kv_cache_update(
        query, key, value, cos, sin, positions, query_out, *_views(kv_cache, config), slot_mapping, q_weight, k_weight,
        q_scale, k_scale, v_scale, rope.encode(), config.encode(),
    )  # fmt: skip
    return query_out


@typed_on_error
def paged_attention(
    query: Tensor,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    config: AttentionConfig,
    *,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    output_scale: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> AttentionOutput:
    """Attend queries without padding to a paged cache; `vattn.ops.arguments.AttentionArgs` documents each tensor.

    The config decides the mask; metadata adds flags, trees and ranges that the config names. Cross attention reads
    the encoder's part of the metadata. Lengths, offsets and tables of metadata made by hand are not looked at, since
    that would wait for the device: `metadata.check()` does, and `docs/five-tensors.md` says what wrong ones mean.

    Raises:
        ConfigError, MetadataError: not a config or metadata, a step built with `causal=False` for a causal config, or
            cross attention in a step without encoder lengths.
        UnsupportedRequestError: no backend, or not the one named in the config, runs it on the query's device.
        ShapeError, DtypeError, DeviceError, ScaleError: a tensor contradicts the config.

    Example:
        >>> import torch, vattn
        >>> config = vattn.AttentionConfig(2, 1, 16, 16, 0.25, "float32", "float32", block_size=8)
        >>> cache = torch.zeros(vattn.kv_cache_shape(config, num_blocks=3))
        >>> builder = vattn.AttentionMetadataBuilder(max_num_reqs=2, max_num_tokens=8, max_seq_len=16, block_size=8)
        >>> step = builder.build(query_lens=[2], seq_lens=[2], block_tables=[[1]])
        >>> vattn.update_kv_cache(torch.randn(2, 1, 16), torch.ones(2, 1, 16), cache, step.slot_mapping, config)
        >>> vattn.paged_attention(torch.randn(2, 2, 16), cache, step, config).output[:, :, 0].round(decimals=3)
        tensor([[1., 1.],
                [1., 1.]])
    """
    seq_lens, block_table = _keys_of(metadata, config)
    result = new_output(query, config)
    flags = metadata.causal if isinstance(metadata.causal, Tensor) else None
    tree_id = metadata.tree_id if metadata.tree_bias is not None else None
    torch.ops.vattn.attention(
        query, *_views(kv_cache, config), metadata.query_start_loc, seq_lens, block_table, result.output,
        result.block_scale, result.lse, output_scale, q_scale, k_scale, v_scale, alibi_slopes, sinks, flags,
        metadata.tree_bias, tree_id, metadata.mm_ranges, None, [], None, noted(config.encode()),
    )  # fmt: skip
    return result


@typed_on_error
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    config: AttentionConfig,
    *,
    kv_start_loc: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    output_scale: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> AttentionOutput:
    """Attend queries without padding to keys without padding and without a cache, as to score prompts or embed texts.

    Args:
        query: `[T, num_heads, head_size]`, one sequence after the other.
        key, value: `[Tk, num_kv_heads, head_size]` and `[Tk, num_kv_heads, head_size_v]`, in the model dtype or the
            config's FP8 format.
        query_start_loc: int32 or int64 `[B + 1]`, where each sequence starts; rows after the last are padding, and
            come out zero.
        config: with `block_size=0`. A causal row sees keys up to its own position; a sequence ends with its last key.
        kv_start_loc: the same for the keys; default `query_start_loc`. A sequence with more keys than queries has its
            queries at its last positions.
        q_scale, k_scale, v_scale, output_scale, alibi_slopes, sinks: as for the ops, where the config has them.

    Raises:
        ConfigError: not a config, or one with a cache.
        MetadataError: offsets on the CPU that do not start at 0, fall, or end after the rows. Compiled code and CUDA
            leave that to `vattn.check_cu_seqlens`; nothing outside of the tensors is read.
        UnsupportedRequestError: no backend, or not the one named in the config, runs it on the query's device.
        ShapeError, DtypeError, DeviceError, StrideError, ScaleError: a tensor contradicts the config.

    Example:
        >>> import torch, vattn
        >>> config = vattn.AttentionConfig(2, 1, 16, 16, 0.25, "float32", "float32", block_size=0, sliding_window=8)
        >>> starts = torch.tensor([0, 5, 9])
        >>> query, key, value = torch.randn(9, 2, 16), torch.randn(9, 1, 16), torch.ones(9, 1, 16)
        >>> vattn.varlen_attention(query, key, value, starts, config).output.shape
        torch.Size([9, 2, 16])
    """
    kv_start_loc = query_start_loc if kv_start_loc is None else kv_start_loc
    result = new_output(query, config)
    args = VarlenAttentionArgs(
        query=query,
        key=key,
        value=value,
        query_start_loc=query_start_loc,
        kv_start_loc=kv_start_loc,
        output=result.output,
        output_block_scale=result.block_scale,
        lse=result.lse,
        output_scale=output_scale,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        causal_flags=None,
        bias=None,
        tree_id=None,
        mm_ranges=None,
        plan=[],
        workspace=None,
        config=noted(config.encode()),
    )
    if not torch.compiler.is_compiling():
        check_varlen_attention(args)
        for name, offsets, rows in (
            ("query_start_loc", query_start_loc, query.shape[0]),
            ("kv_start_loc", kv_start_loc, key.shape[0]),
        ):
            if offsets.device.type == "cpu":
                check_offsets(name, offsets, rows, None, padded=True)
    torch.ops.vattn.varlen_attention(*args)
    return result


def _views(kv_cache: KVCache, config: AttentionConfig) -> tuple[Tensor, Tensor | None]:
    """Return what the ops take of a cache."""
    if isinstance(kv_cache, tuple):
        return kv_cache
    if not torch.compiler.is_compiling():
        check_storage(kv_cache, config)
    else:
        for size in kv_cache.shape:
            # Fixed in the graph: Inductor loses an offset of values that varies with a size (pytorch/pytorch#198068).
            range(size)
    return op_views(kv_cache, config)


def _keys_of(metadata: AttentionMetadata, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    """Return lengths and block table of the config's keys; raise if the step contradicts the config."""
    step_of(metadata, "paged_attention()")
    if metadata.causal is False and config.causality != "bidirectional":
        raise MetadataError(
            f"a step built with causal=False for a config with causality {config.causality}",
            "a bidirectional config",
            "config.replace(causality='bidirectional')",
        )
    if config.attn_type != "encoder_decoder":
        return metadata.seq_lens, metadata.block_table
    if metadata.encoder_seq_lens is None or metadata.cross_block_table is None:
        raise MetadataError(
            "metadata without encoder lengths for a cross-attention config",
            "encoder_seq_lens and cross_block_table",
            "pass encoder_lens= and cross_block_tables= to builder.build",
        )
    return metadata.encoder_seq_lens, metadata.cross_block_table


@typed_on_error
def merge_attn_states(
    prefix_output: Tensor, prefix_lse: Tensor, suffix_output: Tensor, suffix_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Combine two partial results of the same query rows over disjoint keys.

    Args:
        prefix_output, suffix_output: `[T, num_heads, head_size_v]`.
        prefix_lse, suffix_lse: fp32 `[T, num_heads]`, natural log; -inf or +inf marks an empty part, whose output may
            hold anything. Sinks must be in exactly one part.

    Returns:
        The output over both parts and its LSE; rows of two empty parts are 0 and -inf.
    """
    output, lse = torch.empty_like(prefix_output), torch.empty_like(prefix_lse)
    torch.ops.vattn.merge_attn_states(output, lse, prefix_output, prefix_lse, suffix_output, suffix_lse)
    return output, lse
