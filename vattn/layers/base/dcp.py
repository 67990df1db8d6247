"""Context parallelism of one layer: the request for its rank's part, and how the parts of all ranks are combined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vattn.cache.layout import row_view
from vattn.config.mla import MLAConfig
from vattn.distributed.group import ContextParallel
from vattn.errors import ConfigError, MetadataError, UnsupportedRequestError
from vattn.layers.base.step import Args, LayerResult, with_own_result
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.ops.arguments_mla import MLAAttentionArgs
from vattn.quantization.codecs import quantise_output
from vattn.quantization.formats import OUTPUT_FORMATS


def check_context_parallel(layer: Any, num_heads: int, head_size_v: int, requested: dict[str, bool]) -> None:
    """Refuse ranks that cannot share a layer.

    Args:
        num_heads, head_size_v: query heads of all ranks together, value columns of one.
        requested: other features that need every token or one rank's order, by name.

    Raises:
        ConfigError: heads that the ranks do not divide, or no `ContextParallel`.
        UnsupportedRequestError: a layer, or a combination, that has no meaning over a shared cache.
    """
    parallel, name = layer.context_parallel, f"layer {layer.prefix!r}"
    if not isinstance(parallel, ContextParallel):
        raise ConfigError(
            f"context_parallel of type {type(parallel).__name__} in {name}",
            "vattn.distributed.ContextParallel or None",
            "pass ContextParallel.of(group)",
        )
    if not layer.takes_context_parallel:
        raise UnsupportedRequestError(
            f"context_parallel in {name}, a {type(layer).__name__}",
            "context parallelism in vattn.Attention and vattn.MLAAttention",
            "leave it out of this layer and of its builder",
        )
    world, fmt = parallel.world_size, OUTPUT_FORMATS[layer.quant_config.output_format]
    if num_heads % world:
        raise ConfigError(
            f"{num_heads} query heads for {world} ranks in {name}",
            "as many heads on every rank",
            "use a group with a size that divides num_heads",
        )
    columns = num_heads // world * head_size_v
    if (fmt.group_size > 0 and columns % fmt.group_size) or (fmt.group_size == 16 and head_size_v % 16):
        raise ConfigError(
            f"output_format={fmt.name!r} with rows of {columns} columns on each rank in {name}",
            f"rows and, for NVFP4, heads that are a multiple of {fmt.group_size}",
            "use another group size or per-token scales",
        )
    combinations = {
        **requested,
        "calculate_kv_scales": layer.cache_config.calculate_kv_scales,
        "exact_prefill": getattr(layer.cache_config, "exact_prefill", False),
    }
    refused = [what for what, there in combinations.items() if there]
    if refused:
        raise UnsupportedRequestError(
            f"context_parallel with {', '.join(refused)} in {name}",
            "one of them: each rank sees its own queries and its own share of the tokens",
            f"leave {refused[0]} out",
        )


def partial_request(parallel: ContextParallel) -> dict[str, Any]:
    """Return the config fields of one rank's part: it says how much it counts, and is rounded and quantised later."""
    return {
        "context_parallel": True,
        "context_rank": parallel.rank,
        "context_world": parallel.world_size,
        "context_interleave": parallel.interleave,
        "lse": True,
        "output_format": "none",
    }


def check_step_ranks(prefix: str, parallel: ContextParallel | None, metadata: AttentionMetadata) -> None:
    """Refuse a step for another share of the tokens than the layer's cache holds. Eager calls only.

    Raises:
        MetadataError: another share, or a layer without a process group.
    """
    shard = None if parallel is None else parallel.dcp_shard
    if metadata.dcp_shard != shard or (metadata.local_seq_lens is None) != (shard is None):
        raise MetadataError(
            f"metadata of {metadata.dcp_shard or 'whole requests'} in layer {prefix!r}, which holds "
            f"{shard or 'all tokens'}",
            "the same ContextParallel for layers and builder",
            "pass context_parallel= to AttentionMetadataBuilder and to the layers, or to neither",
        )
    if parallel is not None and parallel.world_size > 1 and not parallel.group_name:
        raise MetadataError(
            f"layer {prefix!r} has context parallelism without a process group",
            "ContextParallel.of(group)",
            "make the layers after torch.distributed.init_process_group",
        )


def all_heads(query: Tensor, parallel: ContextParallel) -> Tensor:
    """Return a placeholder for what `gather_heads` returns, for checks: nothing is sent."""
    return query[:, :1].expand(-1, query.shape[1] * parallel.world_size, -1)


def partial_arguments(args: Args, query: Tensor, head_size_v: int, dtype: torch.dtype) -> Args:
    """Return the arguments of this rank's part: queries of all ranks, an output of its own, and an LSE."""
    changes: dict[str, Any] = {} if isinstance(args, MLAAttentionArgs) else {"sinks": None}
    return with_own_result(args._replace(query=query, **changes), head_size_v, dtype)


def gather_rows(part: Tensor, parallel: ContextParallel, what: str) -> Tensor:
    """Return `[world * rows, ...]` of every rank's `[rows, ...]`, in the order of ranks; every rank calls it.

    Raises:
        ConfigError: no process group.
    """
    if not parallel.group_name:
        raise ConfigError(
            f"{what} with {part.shape[0]} rows, one rank's of {parallel.world_size}, without a process group",
            "a group to gather it in, or the rows of all heads",
            "make the layers with ContextParallel.of(group)",
        )
    from torch.distributed import _functional_collectives  # noqa: F401

    ops = torch.ops._c10d_functional
    gathered = ops.all_gather_into_tensor(part.contiguous(), parallel.world_size, parallel.group_name)
    return ops.wait_tensor(gathered)


def attend_parts(
    op: Callable[..., None],
    args: Args,
    query: Tensor,
    result: LayerResult,
    layer: Any,
    head_size_v: int,
    sinks: Tensor | None = None,
    encode: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Attend all heads to this rank's tokens, combine with the other ranks, and write this rank's heads.

    Args:
        op: `vattn::attention` or `vattn::mla_attention`.
        args: its arguments, but for the query and what is written.
        query: `[T, h, D]`, this rank's heads in the model dtype.
        result: written in the layer's output format.
        encode: what quantises the queries of all heads.
    """
    from vattn.distributed.combine import combine, gather_heads

    parallel = layer.context_parallel
    gathered = gather_heads(query, parallel)
    if encode is not None:
        gathered = encode(gathered)
    part = partial_arguments(args, gathered, head_size_v, query.dtype)
    assert part.lse is not None
    op(*part)
    combined, _ = combine(part.output, part.lse, parallel, sinks)
    # Rounded first, as the kernels' own epilogues do.
    quantise_output(
        combined.to(query.dtype),
        layer.quant_config.output_format,
        result.output,
        result.block_scale,
        layer.output_scale,
    )


def whole_arguments(
    args: MLAAttentionArgs, metadata: AttentionMetadata, config: MLAConfig, encoded: str, parallel: ContextParallel
) -> MLAAttentionArgs:
    """Gather the latents of a step's requests, and return arguments for this rank's heads over them.

    Args:
        args: with this rank's queries and output, and the cache and weights of the layer.
        config, encoded: of these heads over a cache of all tokens, and as the op takes it.
    """
    blocks, rows, table = metadata.whole_blocks, metadata.whole_rows, metadata.whole_table
    assert blocks is not None and rows is not None and table is not None and args.kv_b_weight is not None
    cache, heads = args.kv_cache, config.num_heads
    stored = row_view(cache, config)
    # Not every device indexes FP8 tensors, and not every collective sends them.
    stored = stored.view(torch.uint8) if stored.dtype.itemsize == 1 else stored
    sent = stored.index_select(0, blocks).flatten(0, 1)
    ops = torch.ops._c10d_functional
    gathered = ops.wait_tensor(ops.all_gather_into_tensor(sent, parallel.world_size, parallel.group_name))
    whole = gathered.index_select(0, rows).unflatten(0, (-1, config.block_size))
    whole = whole.flatten(1) if config.packed else whole
    own = slice(parallel.rank * heads, (parallel.rank + 1) * heads)
    return args._replace(
        kv_cache=whole.view(cache.dtype) if whole.dtype != cache.dtype else whole,
        block_table=table,
        kv_b_weight=args.kv_b_weight[own],
        local_seq_lens=None,
        plan=[],
        config=encoded,
    )
