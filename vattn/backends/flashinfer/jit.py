"""Finds which of FlashInfer's kernels are prebuilt; it compiles others where it may and can."""

from __future__ import annotations

import importlib.util
import os
import shutil
from functools import lru_cache
from pathlib import Path

import torch

from vattn.config.attention import AttentionConfig
from vattn.quantization.formats import KV_FORMATS, MODEL_DTYPES

INSTALL = (
    "install the CUDA toolkit with nvcc, set CUDA_HOME and leave FLASHINFER_DISABLE_JIT unset, or install the package "
    "flashinfer-jit-cache"
)
"""What to do where a kernel is missing."""

USUAL_HOME = "/usr/local/cuda"
"""Where a CUDA toolkit is found without being named."""

XQA_BLOCKS = (16, 32, 64, 128)
"""Block sizes of FlashInfer's XQA kernels."""


def can_compile() -> bool:
    """Return whether there is an nvcc where FlashInfer looks for one, and it is allowed to compile."""
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        return False
    if shutil.which("nvcc"):
        return True
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), USUAL_HOME)
    return any(home and (Path(home) / "bin" / "nvcc").exists() for home in homes)


def compiler_problem() -> str | None:
    """Return why FlashInfer has no kernels at all, `None` if some are prebuilt or can be compiled."""
    if importlib.util.find_spec("flashinfer_jit_cache") or can_compile():
        return None
    return f"FlashInfer compiles its kernels on first use and no nvcc was found ({INSTALL})"


def is_built(config: AttentionConfig, family: str, query_dtype: torch.dtype | None = None) -> bool:
    """Return whether a kernel of FlashInfer is prebuilt; otherwise it is compiled on first use.

    Args:
        family: `"fa2"` or `"fa3"`, FlashInfer's name of the kernels.
        query_dtype: if it is not the model's.
    """
    from flashinfer.jit.attention import modules

    dtype, width = MODEL_DTYPES[config.dtype], config.head_size
    kv_dtype = KV_FORMATS[config.kv_cache_dtype].value_dtype
    window, cap = config.sliding_window is not None, config.logits_soft_cap is not None
    spec = modules.gen_batch_prefill_module(
        family, query_dtype or dtype, kv_dtype, dtype, torch.int32, width, width, 0, window, cap, False
    )
    if config.tree_bias and not _packs_masks():
        return False
    return bool(spec.is_aot)


def _packs_masks() -> bool:
    """Return whether the kernel that packs masks is prebuilt."""
    from flashinfer.jit.quantization import gen_quantization_module

    return bool(gen_quantization_module().is_aot)


def runs_xqa(config: AttentionConfig, device: torch.device) -> bool:
    """Return whether a step of decodes runs on FlashInfer's XQA kernels.

    They round the query to e4m3, so it must be e4m3 already, and the weights, which costs up to 2^-4 of a result; they
    give no log-sum-exp.
    """
    plain = (
        config.scale > 0
        and not config.lse
        and not config.sinks
        and config.logits_soft_cap is None
        and config.causality == "causal"
    )
    fp8 = config.kv_cache_dtype == "fp8_e4m3" and config.query_format == "fp8_e4m3" and config.dtype == "bfloat16"
    scales = config.kv_scale == config.query_scale == "tensor"
    sizes = config.block_size in XQA_BLOCKS and config.head_size % 16 == 0 and config.head_size <= 256
    if not (plain and fp8 and scales and sizes) or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return can_compile() or xqa_is_built(config)


@lru_cache(maxsize=64)
def xqa_is_built(config: AttentionConfig) -> bool:
    """Return whether the XQA kernel of a config is prebuilt."""
    from flashinfer.jit.xqa import gen_xqa_module

    dtype, window = MODEL_DTYPES[config.dtype], config.sliding_window is not None
    spec = gen_xqa_module(
        dtype, torch.float8_e4m3fn, config.block_size, config.head_size, config.group_size, window, dtype, 1
    )
    return bool(spec.is_aot)
