"""Parts of the installed vLLM, put together as its model runner does, and dense attention in fp64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip(
    "vllm.v1.attention.backend", reason="vLLM is not installed; docs/vllm.md says how", exc_type=ImportError
)

from vllm.config import CacheConfig, CompilationConfig, SchedulerConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym, kFp8StaticTensorSym
from vllm.platforms.interface import DeviceCapability
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vattn.integrations.vllm.backend import VattnBackend

__all__ = [
    "AttentionBackend", "AttentionBackendEnum", "AttentionImpl", "AttentionMetadataBuilder", "DeviceCapability",
    "FullAttentionSpec", "TritonAttentionImpl", "kFp8DynamicTokenSym", "kFp8StaticTensorSym",
]  # fmt: skip

HAS_LAYOUTS = hasattr(kv_cache_interface, "create_kv_cache_views")
"""Whether this vLLM names orders of memory; before, a backend gave the shape of its cache."""

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC") if HAS_LAYOUTS else ("HND",)

NUM_BLOCKS = 12


def cache_views(spec: Any, layout: str, num_layers: int = 2) -> list[Tensor]:
    """Return the caches of layers as vLLM makes them, of bytes that vLLM sets to zero."""
    page = spec.page_size_bytes
    raw = torch.zeros(page * NUM_BLOCKS * num_layers, dtype=torch.int8)
    if HAS_LAYOUTS:
        from vllm.v1.kv_cache_interface import KVCacheTensor, create_kv_cache_views
        from vllm.v1.kv_cache_layout import KVCacheLayout

        head = page // spec.num_kv_heads
        strides = {
            "LB": (page * NUM_BLOCKS, page),
            "LH": (page * NUM_BLOCKS, head),
            "BL": (page, page * num_layers),
            "BH": (head, page * num_layers),
        }[layout[:2]]
        names = [f"layer.{index}" for index in range(num_layers)]
        tensor = KVCacheTensor(raw.numel(), names, *strides)
        return create_kv_cache_views(raw, spec, NUM_BLOCKS, KVCacheLayout[layout], tensor)
    from vllm.v1.worker.gpu.attn_utils import _reshape_attention_kv_cache

    shape = VattnBackend.get_kv_cache_shape(NUM_BLOCKS, spec.block_size, spec.num_kv_heads, spec.head_size)
    order = VattnBackend.get_kv_cache_stride_order()
    parts = raw.view(num_layers, -1)
    return [_reshape_attention_kv_cache(part, spec, shape, order, NUM_BLOCKS, None) for part in parts]


class Layer(torch.nn.Module):
    """What a backend reads of vLLM's `Attention`, which needs a whole engine to be made."""

    def __init__(self, impl: Any, dtype: torch.dtype, head_size_v: int, k_scale: Tensor, v_scale: Tensor) -> None:
        super().__init__()
        self.impl, self.dtype, self.head_size_v = impl, dtype, head_size_v
        self.register_buffer("_k_scale", k_scale)
        self.register_buffer("_v_scale", v_scale)


def engine_config(layers: dict[str, Any], max_num_seqs: int = 8, max_num_tokens: int = 64) -> Any:
    """Return the parts of vLLM's config that a builder reads; the whole needs a model."""
    compilation = CompilationConfig()
    compilation.static_forward_context.update(layers)
    scheduler = SchedulerConfig(
        max_num_batched_tokens=max_num_tokens, max_num_seqs=max_num_seqs, max_model_len=64, is_encoder_decoder=False
    )
    return SimpleNamespace(
        compilation_config=compilation,
        scheduler_config=scheduler,
        cache_config=CacheConfig(),
        model_config=None,
        speculative_config=None,
    )


def step_of(query_lens: list[int], seq_lens: list[int], tables: Tensor, block_size: int, padding: int = 0) -> Any:
    """Return a step as vLLM's runner hands it to builders, with so many rows of padding."""
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    slots = [
        int(tables[request, position // block_size]) * block_size + position % block_size
        for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True))
        for position in range(seq_len - query_len, seq_len)
    ]
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=len(query_lens),
        num_actual_tokens=sum(query_lens) + padding,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=tables,
        slot_mapping=torch.tensor(slots + [-1] * padding),
    )


def dense_attention(query: Tensor, key: Tensor, value: Tensor, request: dict[str, Any]) -> Tensor:
    """Attend the last rows of one request to all of its keys in fp64; `request`: what vLLM passed to the layer."""
    rows, heads, _ = query.shape
    group = heads // key.shape[1]
    key, value = key.double().repeat_interleave(group, 1), value.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * request["scale"]
    cap = request.get("logits_soft_cap")
    if cap:
        scores = cap * torch.tanh(scores / cap)
    at, to = torch.arange(len(key) - rows, len(key))[:, None], torch.arange(len(key))[None]
    distance = at - to
    hidden = distance < 0
    if request.get("sliding_window"):
        hidden |= distance >= request["sliding_window"]
    if request.get("alibi_slopes"):
        slopes = torch.tensor(request["alibi_slopes"], dtype=torch.float64)[:, None, None]
        past = distance.clamp(min=0).double()
        scores = scores - slopes * (past.sqrt() if request.get("use_alibi_sqrt") else past)
    scores = scores.masked_fill(hidden, float("-inf"))
    if request.get("sinks") is not None:
        sinks = request["sinks"].double()[:, None, None].expand(-1, rows, 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", weights, value)
