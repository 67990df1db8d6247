"""One function for each FlashAttention library: run a `FlashCall`, return the log-sum-exp.

The libraries are found in `vattn.backends.flash_attn.libraries`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vattn.backends.flash_attn.libraries import NAMESPACE, FlashCall, FlashLibrary
from vattn.errors import UnknownOptionError

_NO_WINDOW = (-1, -1)


def run_flash(library: FlashLibrary, call: FlashCall, output: Tensor) -> Tensor:
    """Write the output `[T, H, V]`, but no row after the last request; return the LSE, fp32 `[H, T]`."""
    run = _RUNS.get((library.name, library.module))
    if run is None:
        raise UnknownOptionError(
            f"library {str(library)!r}", ", ".join(sorted({name for name, _ in _RUNS})), "use find_library()"
        )
    return run(call, output)


def has_schedule(library: FlashLibrary | None) -> bool:
    """Return whether a library takes a schedule that is made once a step."""
    return library is not None and (library.name, library.module) == ("FlashAttention-3", "")


def make_schedule(call: FlashCall, page_size: int, num_kv_heads: int, value_width: int) -> Tensor:
    """Return FlashAttention-3's partition of the work of a paged call, int32, made on the device."""
    assert call.seq_lens is not None
    ops: Any = getattr(torch.ops, NAMESPACE)
    heads, width = call.query.shape[1:]
    left, right = call.window
    schedule: Tensor = ops.get_scheduler_metadata(
        call.seq_lens.shape[0], call.max_query_len, call.max_seq_len, heads, num_kv_heads, width, value_width,
        call.query.dtype, call.seq_lens, call.query_start_loc, None, None, None, None, page_size, 0, call.causal,
        left, right, call.soft_cap > 0, call.num_splits, None, 0,
    )  # fmt: skip
    return schedule


def _run_fa3_library(call: FlashCall, output: Tensor) -> Tensor:
    ops: Any = getattr(torch.ops, NAMESPACE)
    q_descale, k_descale, v_descale = call.descales or (None, None, None)
    left, right = call.window
    lse: Tensor
    _, lse, *_ = ops.fwd(
        call.query, call.key, call.value, None, None, None, output, call.query_start_loc, call.kv_start_loc, None,
        None, call.seq_lens, call.max_query_len, call.max_seq_len, call.block_table, None, None, None, None, None,
        q_descale, k_descale, v_descale, call.scale, call.causal, left, right, call.soft_cap, True, call.schedule,
        call.num_splits, None, 0, call.sinks, 1, 0, None,
    )  # fmt: skip
    return lse


def _run_fa3_package(call: FlashCall, output: Tensor) -> Tensor:
    """The package has no argument for the output."""
    package: Any = importlib.import_module("flash_attn_interface")
    q_descale, k_descale, v_descale = call.descales or (None, None, None)
    common: dict[str, Any] = {
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
        "softmax_scale": call.scale,
        "causal": call.causal,
        "window_size": call.window,
        "softcap": call.soft_cap,
        "num_splits": call.num_splits,
    }
    if call.block_table is None:
        result, lse, *_ = package.flash_attn_varlen_func(
            call.query,
            call.key,
            call.value,
            call.query_start_loc,
            call.kv_start_loc,
            call.max_query_len,
            call.max_seq_len,
            return_attn_probs=True,
            **common,
        )
    else:
        result, lse, *_ = package.flash_attn_with_kvcache(
            call.query,
            call.key,
            call.value,
            cache_seqlens=call.seq_lens,
            page_table=call.block_table,
            cu_seqlens_q=call.query_start_loc,
            max_seqlen_q=call.max_query_len,
            return_softmax_lse=True,
            **common,
        )
    return _copied(result, lse, output)


def _run_fa4(call: FlashCall, output: Tensor) -> Tensor:
    """FlashAttention-4 uses `None` where the others use -1, and splits only on request."""
    package: Any = importlib.import_module("flash_attn.cute")
    result, lse, *_ = package.flash_attn_varlen_func(
        call.query,
        call.key,
        call.value,
        cu_seqlens_q=call.query_start_loc,
        cu_seqlens_k=call.kv_start_loc,
        max_seqlen_q=call.max_query_len,
        max_seqlen_k=call.max_seq_len,
        seqused_k=call.seq_lens,
        page_table=call.block_table,
        softmax_scale=call.scale,
        causal=call.causal,
        window_size=tuple(None if reach < 0 else reach for reach in call.window),
        learnable_sink=call.sinks,
        softcap=call.soft_cap,
        num_splits=1,
        return_lse=True,
    )
    return _copied(result, lse, output)


def _run_fa2(call: FlashCall, output: Tensor) -> Tensor:
    """FlashAttention-2 knows the lengths of a paged cache as offsets too."""
    package: Any = importlib.import_module("flash_attn")
    kv_start_loc = call.kv_start_loc
    if call.seq_lens is not None:
        kv_start_loc = torch.nn.functional.pad(call.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    result, lse, *_ = package.flash_attn_varlen_func(
        call.query,
        call.key,
        call.value,
        call.query_start_loc,
        kv_start_loc,
        call.max_query_len,
        call.max_seq_len,
        softmax_scale=call.scale,
        causal=call.causal,
        window_size=call.window,
        softcap=call.soft_cap,
        alibi_slopes=call.alibi_slopes,
        return_attn_probs=True,
        block_table=call.block_table,
    )
    return _copied(result, lse, output)


def _run_torch(call: FlashCall, output: Tensor) -> Tensor:
    left, right = call.window
    if call.block_table is not None:
        return _run_torch_paged(call, output)
    assert call.kv_start_loc is not None
    result, lse, *_ = torch.ops.aten._flash_attention_forward(
        call.query, call.key, call.value, call.query_start_loc, call.kv_start_loc, call.max_query_len,
        call.max_seq_len, 0.0, call.causal, False, scale=call.scale,
        window_size_left=None if left < 0 else left, window_size_right=None if right < 0 else right,
    )  # fmt: skip
    return _copied(result, lse, output)


def _run_torch_paged(call: FlashCall, output: Tensor) -> Tensor:
    """Causal attention is a window to the right of no tokens there."""
    varlen: Any = importlib.import_module("torch.nn.attention.varlen")
    window = (-1, 0) if call.causal and call.window == _NO_WINDOW else call.window
    result, lse = varlen.varlen_attn(
        call.query,
        call.key,
        call.value,
        call.query_start_loc,
        None,
        call.max_query_len,
        call.max_seq_len,
        return_aux=varlen.AuxRequest(lse=True),
        scale=call.scale,
        window_size=window,
        enable_gqa=True,
        seqused_k=call.seq_lens,
        block_table=call.block_table,
        num_splits=call.num_splits or None,
    )
    return _copied(result, lse, output)


def _copied(result: Tensor, lse: Tensor, output: Tensor) -> Tensor:
    output.copy_(result)
    return lse


_RUNS: dict[tuple[str, str], Callable[[FlashCall, Tensor], Tensor]] = {
    ("FlashAttention-3", ""): _run_fa3_library,
    ("FlashAttention-3", "flash_attn_interface"): _run_fa3_package,
    ("FlashAttention-4", "flash_attn.cute"): _run_fa4,
    ("FlashAttention-2", "flash_attn"): _run_fa2,
    ("torch varlen_attn", ""): _run_torch,
}
