"""Kernels of other libraries that the benchmarks run beside vattn's, where they are found."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Step = Callable[[], Tensor]
"""Run one decode step; returns the output `[B, H, D]`."""


def load_fa3(folder: Path) -> Any | None:
    """Load a FlashAttention-3 library `fa3.so` with paged KV from a folder; `None` if there is none."""
    library = folder / "fa3.so"
    if not library.exists():
        return None
    torch.ops.load_library(str(library))
    return torch.ops._vllm_fa3_C


def fa3_decode(
    ops: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    seq_lens: Tensor,
    scale: float,
    max_len: int,
    window: int | None = None,
    tokens: int = 1,
) -> Step:
    """Return a decode step of FlashAttention-3; an FP8 cache takes an FP8 query, the only way it runs."""
    left = -1 if window is None else window - 1
    right = -1 if window is None else 0
    rows, heads, width = query.shape
    batch = rows // tokens
    kv_heads, block_size = key.shape[2], key.shape[1]
    output = torch.empty_like(query)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * tokens
    quantised = key.dtype == torch.float8_e4m3fn
    descale = torch.ones(batch, kv_heads, device=query.device) if quantised else None
    q = query.to(torch.float8_e4m3fn) if quantised else query
    schedule = ops.get_scheduler_metadata(
        batch, tokens, max_len, heads, kv_heads, width, width, q.dtype, seq_lens, starts, None, None, None, None,
        block_size, 0, True, left, right, False, 0, None, 0,
    )  # fmt: skip

    def step() -> Tensor:
        ops.fwd(
            q, key, value, None, None, None, output, starts, None, None, None, seq_lens, tokens, max_len, table,
            None, None, None, None, None, descale, descale, descale, scale, True, left, right, 0.0, True, schedule, 0,
            None, 0, None, 1, 0, None,
        )  # fmt: skip
        return output

    return step


def load_xqa() -> Any | None:
    """Return FlashInfer's XQA decode function; `None` without FlashInfer."""
    try:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        from flashinfer.decode import xqa_batch_decode_with_kv_cache
    except (ImportError, OSError) as error:
        print(f"XQA is left out: {error!r}", file=sys.stderr)
        return None
    return xqa_batch_decode_with_kv_cache


def xqa_decode(
    function: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    seq_lens: Tensor,
    scale: float,
    max_len: int,
) -> Step:
    """Return a decode step of XQA, programmatic dependent launch on (its default)."""
    workspace = torch.zeros(160 << 20, dtype=torch.uint8, device=query.device)
    output = torch.empty_like(query)
    lengths = seq_lens.view(torch.uint32)

    def step() -> Tensor:
        return function(
            query, (key, value), workspace, table, lengths, max_len, bmm1_scale=scale, bmm2_scale=1.0, out=output,
            kv_layout="NHD",
        )  # fmt: skip

    return step
