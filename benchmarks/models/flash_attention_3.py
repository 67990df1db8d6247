"""Offer a library of FlashAttention-3, such as that of vLLM's wheel, to transformers under its package's name."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAME = "flash_attn_interface"


def offer(path: str) -> None:
    """Load a library and register its functions; call it before transformers is imported, which looks for packages."""
    torch.ops.load_library(path)
    folder = Path(tempfile.mkdtemp())
    about = folder / "flash_attn_3-3.0.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-3\nVersion: 3.0.0\n")
    (about / "top_level.txt").write_text(f"{NAME}\n")
    (folder / f"{NAME}.py").write_text(f"from {__name__} import *  # noqa: F403\n")
    sys.path.insert(0, str(folder))
    __import__(NAME)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """Attend `[B, T, heads, D]`."""
    return _forward(q, k, v, None, None, None, None, softmax_scale, causal, window_size, softcap)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """Attend `[T, heads, D]` of sequences that follow one another."""
    lengths = cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k)
    return _forward(q, k, v, *lengths, softmax_scale, causal, window_size, softcap)


def flash_attn_with_kvcache(*args: Any, **options: Any) -> Tensor:
    """Refuse: the library is called for sequences without a cache."""
    raise NotImplementedError


def _forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Any, key_starts: Any, longest: Any, longest_keys: Any,
    scale: float | None, causal: bool, window: tuple[int, int], cap: float,
) -> Tensor:  # fmt: skip
    out: Tensor
    out, *_ = torch.ops._vllm_fa3_C.fwd(
        q, k, v, None, None, None, torch.empty_like(q), starts, key_starts, None, None, None, longest, longest_keys,
        None, None, None, None, None, None, None, None, None, q.shape[-1] ** -0.5 if scale is None else scale, causal,
        window[0], window[1], cap, True, None, 0, None, 0, None, 1, 0, None,
    )  # fmt: skip
    return out


__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
