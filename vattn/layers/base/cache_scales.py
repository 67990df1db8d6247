"""`CacheScales`: the scales of a layer's cache as buffers of the layer, their calculation, and counts of what clips."""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.config.attention import CacheConfig
from vattn.errors import ScaleError
from vattn.layers.base.arguments import layer_scales
from vattn.layers.base.buffers import OwnBuffers
from vattn.layers.base.scales import QuantConfig, count_clipped, first_scale
from vattn.ops.arguments import CacheUpdateArgs
from vattn.quantization.formats import FP8_E4M3_MAX, KV_FORMATS, dtype_name


class CacheScales(OwnBuffers):
    """Layer with a KV cache that may be quantised."""

    # None for what the layer does not quantise; declared for the type checker as what the code that uses them finds.
    k_scale: Tensor
    v_scale: Tensor
    q_scale: Tensor
    output_scale: Tensor
    scales_ready: Tensor
    clip_counts: Tensor
    num_kv_heads: int
    cache_config: CacheConfig
    quant_config: QuantConfig
    calculate_kv_scales: bool
    _cache_dtype: str
    observing = False

    def _register_scales(self, quantised: bool, shared: bool) -> None:
        """Make the scales of cache, query and output from `quant_config`, or refuse what is missing or too many.

        Args:
            quantised: whether the cache is.
            shared: whether another layer owns it, and with it the scales.
        """
        self.calculate_kv_scales = self.cache_config.calculate_kv_scales and quantised and not shared
        scales = layer_scales(
            self, self._cache_dtype, quantised=quantised, calculate=self.calculate_kv_scales, shared=shared
        )
        for name, scale in scales.items():
            # A state dict holds scales once: a shared layer's entry would overwrite its target's when it is loaded.
            self.register_buffer(name, scale, persistent=not shared or name not in ("k_scale", "v_scale"))
        # Of k_scale, v_scale and q_scale: 1 once it is calculated, or given.
        ready = [0, 0, int(scales["q_scale"] is None or self.quant_config.q_scale is not None)]
        self.register_buffer(
            "scales_ready", torch.tensor(ready, dtype=torch.int32, device="cpu") if self.calculate_kv_scales else None
        )
        counts = torch.zeros((2, 2), dtype=torch.int64, device="cpu") if quantised else None
        self.register_buffer("clip_counts", counts, persistent=False)

    def _write_cache(self, query: Tensor, query_slots: Tensor, update: CacheUpdateArgs) -> None:
        """Write keys and values into their slots; before that, calculate scales and count what clips, if requested.

        Args:
            query_slots: one entry per row of `query`; negative for rows that must not decide a scale.
        """
        if self.calculate_kv_scales:
            self._calculate_scales(query, update.key, update.value, query_slots >= 0, update.slot_mapping >= 0)
        if self.observing and self.clip_counts is not None and self.config is not None:
            real, largest = update.slot_mapping >= 0, KV_FORMATS[self.config.kv_cache_dtype].max_value
            keys = count_clipped(update.key, real, self.k_scale, largest)
            values = count_clipped(update.value, real, self.v_scale, largest)
            self.clip_counts.add_(torch.stack((keys, values)))
        torch.ops.vattn.kv_cache_update(*update)

    def _calculate_scales(
        self, query: Tensor, key: Tensor, value: Tensor, real_queries: Tensor, real_keys: Tensor
    ) -> None:
        """Set the scales from the first step that has a real token, before anything of it is written."""
        assert self.config is not None
        if key.dtype != query.dtype or value.dtype != query.dtype:
            raise ScaleError(
                f"key is {dtype_name(key.dtype)} and value {dtype_name(value.dtype)} in layer {self.prefix!r}, which "
                "calculates its scales",
                f"{dtype_name(query.dtype)}: what is quantised already has its scale",
                "QuantConfig(k_scale=..., v_scale=...) without calculate_kv_scales",
            )
        ready = self.scales_ready.split(1)
        largest = KV_FORMATS[self.config.kv_cache_dtype].max_value
        new_k, k_ready = first_scale(key, real_keys, self.k_scale, ready[0], largest)
        new_v, v_ready = first_scale(value, real_keys, self.v_scale, ready[1], largest)
        q_ready = ready[2]
        if self.q_scale is not None and self.quant_config.q_scale is None:
            new_q, q_ready = first_scale(query, real_queries, self.q_scale, q_ready, FP8_E4M3_MAX)
            self.q_scale.copy_(new_q)
        self.k_scale.copy_(new_k)
        self.v_scale.copy_(new_v)
        self.scales_ready.copy_(torch.cat((k_ready, v_ready, q_ready)))
