"""One layer's attention: vLLM's arguments handed to vattn's ops, which write into vLLM's tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from vattn.config.attention import AttentionConfig
from vattn.errors import UnsupportedRequestError
from vattn.integrations.engine_layer import EngineLayer
from vattn.integrations.vllm.request import config_of
from vattn.layers.base.arguments import layout_of


class VattnImpl(AttentionImpl):
    """Attend one layer's queries to its blocks of vLLM's cache, and write its keys and values there.

    Attributes:
        supports_dcp: releases before 0.27 count on context parallelism unless it says no.
        writes_fp8: whether vLLM requested outputs in FP8, and may pass an `output_scale`.
    """

    supports_dcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        use_alibi_sqrt: bool = False,
        chunk_lookback: int = -1,
        **others: Any,
    ) -> None:
        others |= {"chunk_lookback": chunk_lookback} if chunk_lookback != -1 else {}
        others |= {"attn_type": attn_type} if attn_type != AttentionType.DECODER else {}
        # vLLM sets the sizes of both kinds of context parallelism before it calls this.
        ranks = {"decode context parallelism": self.dcp_world_size, "prefill context parallelism": self.pcp_world_size}
        others |= {name: size for name, size in ranks.items() if size > 1}
        if others:
            raise UnsupportedRequestError(
                f"a layer with {', '.join(f'{name}={value!r:.40}' for name, value in others.items())}",
                "decoder attention with windows, sinks, soft caps and ALiBi",
                "choose another --attention-backend for this model",
            )
        self.num_heads, self.num_kv_heads = num_heads, num_heads if num_kv_heads is None else num_kv_heads
        self.head_size, self.scale = head_size, float(scale)
        self.sliding_window, self.logits_soft_cap = sliding_window, logits_soft_cap
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.alibi = "none" if alibi_slopes is None else "sqrt" if use_alibi_sqrt else "linear"
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.writes_fp8 = False
        self._bound: Tensor | None = None

    def config(self, layer: Any, block_size: int, layout: str, device: torch.device) -> AttentionConfig:
        """Return what this layer requests of vattn, over blocks of that size in that order (`"NHD"` or `"HND"`)."""
        return config_of(
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            layer.head_size_v,
            self.scale,
            layer.dtype,
            self.kv_cache_dtype,
            device.type,
            block_size=block_size,
            layout=layout,
            scale_per_head=layer._k_scale.numel() > 1,
            sliding_window=self.sliding_window,
            logits_soft_cap=self.logits_soft_cap,
            alibi=self.alibi,
            sinks=self.sinks is not None,
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        )

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Return whether outputs are written in a format: e4m3 with one static scale."""
        self.writes_fp8 = self.writes_fp8 or quant_key == kFp8StaticTensorSym
        return quant_key == kFp8StaticTensorSym

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend queries `[T, H, D]` to the cache, write `output` `[T, H, V]` in place, and return it.

        Keys and values of the step are in the cache already. Rows that pad the step are not written.
        """
        if attn_metadata is None:
            # The run that measures memory.
            return output.fill_(0)
        if output_block_scale is not None:
            raise UnsupportedRequestError(
                "an output with block scales", "FP8 outputs with one static scale", "leave fuse_attn_quant out"
            )
        if kv_cache is not self._bound:
            self._bind(layer, kv_cache)
        num_tokens, rows = attn_metadata.num_actual_tokens, output
        if query.shape[0] != num_tokens:
            query, rows = query[:num_tokens], output[:num_tokens]
        encoded = "" if output_scale is None else self._fp8_output
        self._layer.attend(query, attn_metadata, rows, output_scale, self.sinks, encoded)
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write keys and values of a step into their slots; vLLM calls this before `forward`."""
        if kv_cache is not self._bound:
            self._bind(layer, kv_cache)
        num_tokens = slot_mapping.shape[0]
        if key.shape[0] != num_tokens:
            key, value = key[:num_tokens], value[:num_tokens]
        self._layer.write(key, value, slot_mapping)

    def _bind(self, layer: Any, kv_cache: Tensor) -> None:
        """Take keys and values out of a cache `[blocks, heads, tokens, key and value columns]`, without a copy."""
        views, device = views_of(kv_cache, self.head_size, layer.head_size_v), kv_cache.device
        config = self.config(layer, kv_cache.shape[2], layout_of(views[0]), device)
        k_scale, v_scale = (None, None) if config.kv_scale == "none" else (layer._k_scale, layer._v_scale)
        slopes = None if self.alibi_slopes is None else self.alibi_slopes.to(device)
        self._layer = EngineLayer(config, *views, k_scale, v_scale, slopes)
        self._fp8_output = config.replace(output_format="fp8_static").encode()
        self._bound = kv_cache


def views_of(kv_cache: Tensor, head_size: int, head_size_v: int) -> tuple[Tensor, Tensor]:
    """Return keys `[N, S, K, D]` and values `[N, S, K, V]` of a cache `[N, K, S, D + V]`."""
    by_token = kv_cache.transpose(1, 2)
    return by_token[..., :head_size], by_token[..., head_size : head_size + head_size_v]
