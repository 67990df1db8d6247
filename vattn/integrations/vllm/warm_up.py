"""Compile the kernels of every kind of step before vLLM serves requests, which must not wait for a compiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger

from vattn.metadata.attention_metadata import AttentionMetadata

logger = init_logger("vllm.vattn")

MakeStep = Callable[[Tensor, Tensor, Tensor, Tensor], AttentionMetadata]
"""From offsets, lengths, block table and slots."""


def warm_up(
    layers: Mapping[str, Any], kv_cache_spec: Any, vllm_config: Any, device: torch.device, make_step: MakeStep
) -> None:
    """Run steps of all shapes that choose kernels, once for each kind of layer, over a cache of a few empty blocks.

    vLLM has no cache and no block tables yet. Kernels are compiled for what divides their sizes, so the blocks are as
    many, modulo 16, as vLLM's, and tables as wide.
    """
    start, scheduler = time.perf_counter(), vllm_config.scheduler_config
    most_tokens, block_size = scheduler.max_num_batched_tokens, kv_cache_spec.block_size
    cache = _empty_cache(kv_cache_spec, vllm_config, device)
    width = -(-vllm_config.model_config.max_model_len // block_size)
    table = torch.zeros(scheduler.max_num_seqs, width, dtype=torch.int32, device=device)
    slots = torch.full((most_tokens,), -1, dtype=torch.int64, device=device)
    kinds: dict[str, Any] = {}
    for layer in layers.values():
        kinds.setdefault(layer.impl.config(layer, block_size, "HND", device).encode(), layer)
    for layer in kinds.values():
        impl, model = layer.impl, {"device": device, "dtype": layer.dtype}
        query = torch.zeros(most_tokens, impl.num_heads, impl.head_size, **model)
        key = torch.zeros(most_tokens, impl.num_kv_heads, impl.head_size, **model)
        value = torch.zeros(most_tokens, impl.num_kv_heads, layer.head_size_v, **model)
        rows = most_tokens, impl.num_heads, layer.head_size_v
        outputs: list[tuple[Tensor, Tensor | None]] = [(torch.empty(rows, **model), None)]
        if impl.writes_fp8:
            one = torch.ones((), device=device)
            outputs.append((torch.empty(rows, device=device, dtype=torch.float8_e4m3fn), one))
        for num_tokens, num_reqs in shapes(most_tokens, scheduler.max_num_seqs, _draft_tokens(vllm_config)):
            starts = (torch.arange(num_reqs + 1, device=device) * num_tokens // num_reqs).int()
            # Requests without cached tokens.
            step = make_step(starts, starts.diff(), table[:num_reqs], slots[:num_tokens])
            impl.do_kv_cache_update(layer, key[:num_tokens], value[:num_tokens], cache, slots[:num_tokens])
            for output, scale in outputs:
                impl.forward(layer, query[:num_tokens], key, value, cache, step, output[:num_tokens], scale)
    torch.cuda.synchronize(device)
    logger.info("vattn compiled the kernels of %d kinds of layers in %.1f s", len(kinds), time.perf_counter() - start)


def shapes(most_tokens: int, most_reqs: int, drafts: int = 0) -> Iterator[tuple[int, int]]:
    """Yield tokens and requests of steps: decodes of every size, drafts, and prompts alone and beside decodes."""
    most_reqs = min(most_reqs, most_tokens)
    for num_reqs in range(1, most_reqs + 1):
        for rows in {1, 1 + drafts}:
            if rows * num_reqs <= most_tokens:
                yield rows * num_reqs, num_reqs
    powers = [1 << exponent for exponent in range(most_tokens.bit_length())]
    sizes = sorted({size for power in powers for size in (power - 1, power, power + 1, 3 * power // 2)} - {0})
    for num_reqs in (size for size in sizes if size <= most_reqs):
        for num_tokens in {*sizes, most_tokens}:
            if num_reqs < num_tokens <= most_tokens:
                yield num_tokens, num_reqs


def _draft_tokens(vllm_config: Any) -> int:
    speculation = vllm_config.speculative_config
    return getattr(speculation, "num_speculative_tokens", None) or 0


def _empty_cache(spec: Any, vllm_config: Any, device: torch.device) -> Tensor:
    """Return a cache `[blocks, heads, tokens, columns]` of a few blocks in the order of vLLM's."""
    blocks = 16 + (vllm_config.cache_config.num_gpu_blocks or 0) % 16
    shape = (blocks, spec.num_kv_heads, spec.block_size, spec.head_size + spec.head_size_v)
    order = (0, 1, 2, 3)
    layout = getattr(vllm_config.cache_config, "kv_cache_layout", None)
    if layout is not None:
        from vllm.v1.kv_cache_layout import KVCacheLayout

        order = KVCacheLayout[layout].layer_view_order
    physical = torch.zeros([shape[dim] for dim in order], dtype=spec.dtype, device=device)
    return physical.permute([order.index(dim) for dim in range(4)])
