"""What the plugin can do, as every release of vLLM that it supports reads it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from vattn.backends.selector import explain
from vattn.config.device import DeviceInfo
from vattn.errors import UnsupportedRequestError, VattnError
from vattn.integrations.engine_versions import check_version
from vattn.integrations.vllm import NAME, TESTED_VERSIONS
from vattn.integrations.vllm.request import config_of

try:
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vattn.integrations.vllm.builder import VattnMetadataBuilder
    from vattn.integrations.vllm.impl import VattnImpl
except ImportError as error:
    # vLLM swallows the text of an ImportError.
    check_version("vllm", TESTED_VERSIONS)
    raise UnsupportedRequestError(str(error)) from error


class VattnBackend(AttentionBackend):
    """Run decoder attention of vLLM on vattn's ops, over vLLM's own cache memory."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2",
    ]  # fmt: skip
    forward_includes_kv_cache_update: bool = False
    supports_kv_cache_update_bypass: bool = True

    @staticmethod
    def get_name() -> str:
        """Return the name that vLLM's registry has: releases before 0.27 have no `VATTN`."""
        return NAME if NAME in AttentionBackendEnum.__members__ else "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[VattnImpl]:
        """Return the class of a layer's attention."""
        return VattnImpl

    @staticmethod
    def get_builder_cls() -> type[VattnMetadataBuilder]:
        """Return the class that makes a step's metadata."""
        return VattnMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return the sizes of blocks that all kernels take; vLLM cuts other multiples of them, as of hybrid models.

        The general kernel takes smaller ones too, but vLLM falls back to the smallest size of this list.
        """
        return list(range(16, 2049, 16))

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return every head size."""
        return list(range(8, 513, 8))

    @classmethod
    def supports_sink(cls) -> bool:
        """Return that heads may have a learned sink."""
        return True

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        """Return that ALiBi may grow with the square root of the distance."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return that layers may have windows."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return that rows can be computed independently of the batch."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Return that an FP8 cache may have a scale for each KV head."""
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Return why vattn refuses, or `None`. The metadata builder checks again, with the numbers of heads."""
        try:
            check_version("vllm", TESTED_VERSIONS)
            config = config_of(1, 1, head_size, head_size, 1.0, dtype, kv_cache_dtype or "auto", "cuda", sinks=has_sink)
        except VattnError as error:
            return str(error)
        device = DeviceInfo("cuda", (device_capability.major, device_capability.minor), "GPU")
        explanation = explain(config, device)
        return None if explanation.chosen else explanation.problem()

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        """Return all orders of memory, the fastest first: Hopper's kernel for prompts takes `LBHNC`."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return tuple(KVCacheLayout)

    # vLLM 0.26 calls these for the cache's shape and order instead.

    @classmethod
    def get_required_kv_cache_layout(cls) -> Any:
        """Return the order that Hopper's kernel for prompts takes."""
        return "HND"

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return `[blocks, heads, tokens, columns]`; keys and values of a token are side by side."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Return the order of a layer in memory, or of all layers: blocks, heads, layers, tokens, columns."""
        return (1, 2, 0, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)
