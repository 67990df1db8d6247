"""Stand-ins for FlashInfer's MLA wrapper and for FlashMLA on the CPU: they read only what the real ones read.

As those do, they know no padding, and FlashInfer's plans from lengths on the host. Rows that see nothing come out as
garbage, with a log-sum-exp that is not finite.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor


def attend(query: Tensor, rows: Tensor, width: int, scale: float, first: int) -> tuple[Tensor, Tensor]:
    """Return `[q, N, width]` and LSE `[q, N]` of absorbed rows; row i sees keys up to `first + i`."""
    assert scale > 0, "the kernels find the largest score ahead of the scale"
    scores = torch.einsum("qnd,sd->qns", query.double(), rows.double()) * scale
    position = first + torch.arange(len(query))
    hidden = torch.arange(len(rows))[None, :] > position[:, None]
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    out = torch.softmax(scores, -1) @ rows[:, :width].double()
    return out.to(query.dtype), lse.float()


class MLAWrapper:
    """`flashinfer.mla.BatchMLAPagedAttentionWrapper`."""

    def __init__(self, float_workspace_buffer: Tensor) -> None:
        assert float_workspace_buffer.dtype == torch.uint8

    def plan(
        self, *, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor, num_heads: int,
        head_dim_ckv: int, head_dim_kpe: int, page_size: int, causal: bool, sm_scale: float, q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        for tensor in (qo_indptr, kv_indptr, kv_indices, kv_len_arr):
            assert tensor.dtype == torch.int32
        assert len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1 and causal and q_data_type == kv_data_type
        assert (head_dim_ckv, head_dim_kpe) == (512, 64)
        self.told = qo_indptr.tolist(), kv_indptr.tolist(), kv_indices.long(), kv_len_arr.tolist(), page_size, sm_scale
        self.heads = num_heads

    def run(
        self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, *, return_lse: bool,
        return_lse_base_on_e: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        starts, pages, ids, lengths, size, scale = self.told
        assert return_lse and return_lse_base_on_e and q_nope.shape == (starts[-1], self.heads, 512)
        assert q_nope.is_contiguous() and q_pe.is_contiguous() and ckv_cache.shape[1] == size
        out, lse = torch.full_like(q_nope, 3.0), torch.full(q_nope.shape[:2], torch.nan)
        for i, keys in enumerate(lengths):
            used = ids[pages[i] : pages[i + 1]]
            assert len(used) == -(-keys // size)
            rows = torch.cat((ckv_cache[used], kpe_cache[used]), -1).flatten(0, 1)[:keys]
            part = slice(starts[i], starts[i + 1])
            query = torch.cat((q_nope[part], q_pe[part]), -1)
            if keys and len(query):
                out[part], lse[part] = attend(query, rows, 512, scale, keys - len(query))
        return out, lse


def dense_decode(
    query: Tensor, cache: Tensor, width: int, lengths: Tensor, table: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """FlashMLA's dense decode: `[B, S, N, 576]` on pages of 64, LSE `[B, N, S]`."""
    batch, tokens = query.shape[:2]
    assert cache.shape[1:] == (64, 1, 576) and width == 512 and causal and lengths.dtype == table.dtype == torch.int32
    assert table.shape[0] == len(lengths) == batch and int(table.min()) >= 0 and int(table.max()) < len(cache)
    out, lse = query.new_empty(*query.shape[:3], width), torch.empty(batch, query.shape[2], tokens)
    for i, keys in enumerate(lengths.tolist()):
        rows = cache[table[i].long(), :, 0].flatten(0, 1)[:keys]
        out[i], logs = attend(query[i], rows, width, scale, keys - tokens)
        lse[i] = logs.t()
    return out, lse


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put both where imports find them."""
    mla = types.ModuleType("flashinfer.mla")
    mla.BatchMLAPagedAttentionWrapper = MLAWrapper  # type: ignore[attr-defined]
    package = types.ModuleType("flashinfer")
    package.mla = mla  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", mla)
    flash: Any = types.ModuleType("flash_mla")

    def get_mla_metadata(lengths: Tensor, heads: int, kv_heads: int) -> tuple[str, int]:
        assert kv_heads == 1
        return "metadata", len(lengths)

    def with_kvcache(
        query: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, width: int, metadata: str, splits: int, *,
        softmax_scale: float, causal: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert metadata == "metadata" and splits == len(lengths)
        return dense_decode(query, cache, width, lengths, table, softmax_scale, causal)

    flash.get_mla_metadata, flash.flash_mla_with_kvcache = get_mla_metadata, with_kvcache
    monkeypatch.setitem(sys.modules, "flash_mla", flash)
