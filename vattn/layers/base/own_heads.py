"""Prompts over a sharded cache: each rank gathers the keys and values of its own heads, and attends only these heads.

The parts of all heads over a rank's own keys would run on slower kernels, as rows of a prompt see keys by their true
positions. Here the kernels are those for a cache of all tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vattn.config.attention import AttentionConfig
from vattn.config.dcp import without_dcp
from vattn.config.device import DeviceInfo
from vattn.distributed.group import ContextParallel
from vattn.layers.base.arguments import StepKind, step_configs
from vattn.layers.base.step import LayerStep
from vattn.metadata.whole_keys import WholeKeys
from vattn.ops.arguments import AttentionArgs
from vattn.ops.fusion_notes import noted
from vattn.quantization.codecs import encode_query
from vattn.quantization.formats import KV_FORMATS


class OwnHeads(NamedTuple):
    """What a rank requests for its heads over all tokens.

    Attributes:
        ops: encoded configs, by kind of step.
        config: what they have in common.
        heads, kv_heads: this rank's, among those of the layer.
    """

    ops: dict[StepKind, str]
    config: AttentionConfig
    heads: slice
    kv_heads: slice

    @staticmethod
    def of(layer: Any, config: AttentionConfig, device: DeviceInfo) -> OwnHeads | None:
        """Return the request of a bound layer; `None` where prompts are attended in parts, as on one rank.

        Packed formats have no rows of single heads, and a result that is the same in any batch may not depend on how
        many keys a step has.
        """
        parallel = layer.context_parallel
        if parallel is None or parallel.world_size == 1 or not parallel.group_name:
            return None
        world, rank, kv_heads = parallel.world_size, parallel.rank, config.num_kv_heads
        whole_kv_heads = kv_heads % world == 0 or world % kv_heads == 0
        if KV_FORMATS[config.kv_cache_dtype].packed or not whole_kv_heads or config.batch_invariant:
            return None
        heads, own = config.num_heads // world, max(1, kv_heads // world)
        first = rank * kv_heads // world
        request = without_dcp(config).replace(
            num_heads=heads,
            num_kv_heads=own,
            lse=False,
            output_format=layer.quant_config.output_format,
            sinks=layer.sinks is not None,
            kv_cache_layout="NHD",
        )
        ops, _ = step_configs(request, device)
        if not ops:
            return None
        return OwnHeads(ops, request, slice(rank * heads, (rank + 1) * heads), slice(first, first + own))


def attend_own_heads(own: OwnHeads, args: AttentionArgs, step: LayerStep, layer: Any) -> bool:
    """Gather the keys and values of a step's requests and attend; return whether this rank's heads may be.

    Args:
        args: with this rank's queries, in the model dtype, and the layer's result.
    """
    config, keys = own.ops.get(step.kind()), step.whole_keys
    if config is None or keys is None or args.value_cache is None:
        return False
    parallel, query = layer.context_parallel, args.query
    per_head = own.config.kv_scale == "head"
    q_scale = _of_heads(args.q_scale, own.kv_heads, own.config.query_scale == "head")
    if q_scale is not None:
        query = encode_query(query, q_scale, own.config.num_kv_heads)
    torch.ops.vattn.attention(
        *args._replace(
            query=query,
            key_cache=_gather(args.key_cache, keys, own, parallel),
            value_cache=_gather(args.value_cache, keys, own, parallel),
            block_table=keys.whole_table,
            q_scale=q_scale,
            k_scale=_of_heads(args.k_scale, own.kv_heads, per_head),
            v_scale=_of_heads(args.v_scale, own.kv_heads, per_head),
            alibi_slopes=_of_heads(args.alibi_slopes, own.heads),
            sinks=_of_heads(layer.sinks, own.heads),
            local_seq_lens=None,
            plan=[],
            config=noted(config),
        )
    )
    return True


def _of_heads(tensor: Tensor | None, heads: slice, per_head: bool = True) -> Tensor | None:
    return tensor[heads] if tensor is not None and per_head else tensor


def _gather(cache: Tensor, keys: WholeKeys, own: OwnHeads, parallel: ContextParallel) -> Tensor:
    """Return `[blocks, block_size, own KV heads, D]` of all ranks' keys or values, in the order of tokens."""
    world, heads = parallel.world_size, own.config.num_kv_heads
    # Not every device indexes FP8 tensors, and not every collective sends them.
    stored = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    if stored.shape[2] == world * heads:
        by_rank = stored.unflatten(2, (world, heads)).permute(2, 0, 1, 3, 4)
        sent = by_rank.index_select(1, keys.whole_blocks).flatten(1, 2)
    else:
        # Ranks that share a KV head each get all of it.
        by_head = stored.permute(2, 0, 1, 3).index_select(1, keys.whole_blocks).flatten(1, 2)
        sent = by_head.repeat_interleave(world // stored.shape[2], 0).unsqueeze(2)
    sizes = [sent.shape[1]] * world
    ops = torch.ops._c10d_functional
    received = ops.wait_tensor(ops.all_to_all_single(sent.flatten(0, 1), sizes, sizes, parallel.group_name))
    whole = received.index_select(0, keys.whole_rows).unflatten(0, (-1, cache.shape[1]))
    return whole.view(cache.dtype) if whole.dtype != cache.dtype else whole
