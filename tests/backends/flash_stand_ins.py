"""Stand-ins for the FlashAttention packages: the reference behind each one's own words, checking what they get."""

from __future__ import annotations

import inspect
import types

import pytest
import torch


def packed_reference(q, k, v, starts, kv_starts, *, scale, causal, window, cap, sinks=None, slopes=None):
    """Attention in fp32 with windows as (left, right), -1 for all; returns the output and LSE `[H, T]`.

    ALiBi is FlashAttention-2's: minus slope times distance, or for causal rows without a window slope times column.
    """
    group, rows, logs = q.shape[1] // k.shape[1], [], []
    for request in range(len(starts) - 1):
        query = q[starts[request] : starts[request + 1]].float()
        keys, values = (
            t[kv_starts[request] : kv_starts[request + 1]].float().repeat_interleave(group, 1) for t in (k, v)
        )
        scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
        scores = cap * torch.tanh(scores / cap) if cap else scores
        distance = torch.arange(len(query))[:, None] + (len(keys) - len(query)) - torch.arange(len(keys))
        hidden = (distance > window[0]) & (window[0] >= 0) | (-distance > window[1]) & (window[1] >= 0)
        if slopes is not None:
            column = torch.arange(len(keys)).expand(distance.shape)
            bias = column if causal and window == (-1, -1) else -distance.abs()
            scores = scores + slopes[:, None, None] * bias
        scores = scores.masked_fill(hidden | (causal & (distance < 0)), -torch.inf)
        extra = [] if sinks is None else [sinks.float()[:, None, None].expand(-1, len(query), 1)]
        log = torch.cat([scores, *extra], -1).logsumexp(-1)
        weights = torch.exp(scores - log.unsqueeze(-1)).nan_to_num(0)
        rows.append(torch.einsum("hqk,khd->qhd", weights, values))
        logs.append(torch.where(log == -torch.inf, torch.inf, log))
    return torch.cat(rows).to(q.dtype), torch.cat(logs, 1)


def unpaged(cache, table, lengths):
    """Gather the keys of all requests behind each other."""
    parts = [cache[row.long()].flatten(0, 1)[:length] for row, length in zip(table, lengths.tolist(), strict=True)]
    return torch.cat(parts)


def offsets(lengths):
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).tolist()


def padded(result, lse, q):
    """A binary leaves rows behind the last request as they are."""
    output = torch.full_like(q, torch.nan)
    output[: len(result)] = result
    logs = torch.full((q.shape[1], q.shape[0]), torch.nan)
    logs[:, : lse.shape[1]] = lse
    return output, logs


def fake_fa3() -> types.ModuleType:
    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale, causal, q_descale, k_descale,
        v_descale, window_size, softcap, num_splits, return_attn_probs,
    ):  # fmt: skip
        assert return_attn_probs and q_descale is k_descale is v_descale is None
        starts, kv_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        assert max_seqlen_q >= cu_seqlens_q.diff().max() and max_seqlen_k >= cu_seqlens_k.diff().max()
        return padded(
            *packed_reference(
                q, k, v, starts, kv_starts, scale=softmax_scale, causal=causal, window=window_size, cap=softcap
            ),
            q,
        )

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, q_descale,
        k_descale, v_descale, window_size, softcap, num_splits, return_softmax_lse,
    ):  # fmt: skip
        assert return_softmax_lse and max_seqlen_q >= cu_seqlens_q.diff().max()
        k, v = (unpaged(cache, page_table, cache_seqlens) for cache in (k_cache, v_cache))
        starts, kv_starts = cu_seqlens_q.tolist(), offsets(cache_seqlens)
        return padded(
            *packed_reference(
                q, k, v, starts, kv_starts, scale=softmax_scale, causal=causal, window=window_size, cap=softcap
            ),
            q,
        )

    return module(flash_attn_varlen_func=flash_attn_varlen_func, flash_attn_with_kvcache=flash_attn_with_kvcache)


def fake_fa4() -> types.ModuleType:
    def flash_attn_varlen_func(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, page_table, softmax_scale,
        causal, window_size, learnable_sink, softcap, num_splits, return_lse,
    ):  # fmt: skip
        assert return_lse and num_splits == 1 and max_seqlen_q >= cu_seqlens_q.diff().max()
        assert learnable_sink is None or learnable_sink.dtype == torch.bfloat16
        assert all(reach is None or reach >= 0 for reach in window_size)
        if page_table is not None:
            assert cu_seqlens_k is None
            k, v = (unpaged(cache, page_table, seqused_k) for cache in (k, v))
        kv_starts = offsets(seqused_k) if page_table is not None else cu_seqlens_k.tolist()
        window = tuple(-1 if reach is None else reach for reach in window_size)
        found = packed_reference(
            q, k, v, cu_seqlens_q.tolist(), kv_starts, scale=softmax_scale, causal=causal, window=window, cap=softcap,
            sinks=learnable_sink,
        )  # fmt: skip
        return padded(*found, q)

    return module(flash_attn_varlen_func=flash_attn_varlen_func)


def fake_fa2() -> types.ModuleType:
    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale, causal, window_size, softcap,
        alibi_slopes, return_attn_probs, block_table,
    ):  # fmt: skip
        assert return_attn_probs and cu_seqlens_k.dtype == torch.int32
        assert alibi_slopes is None or (alibi_slopes.dtype == torch.float32 and alibi_slopes.shape == q.shape[1:2])
        if block_table is not None:
            k, v = (unpaged(cache, block_table, cu_seqlens_k.diff()) for cache in (k, v))
        found = packed_reference(
            q, k, v, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), scale=softmax_scale, causal=causal,
            window=window_size, cap=softcap, slopes=alibi_slopes,
        )  # fmt: skip
        return *padded(*found, q), None

    return module(flash_attn_varlen_func=flash_attn_varlen_func)


def module(**functions) -> types.ModuleType:
    made = types.ModuleType("stand_in")
    vars(made).update(functions)
    return made


def torch_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the reference under torch's own public functions, which check the arguments."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if torch.__version__ < "2.12":
        pytest.skip("torch 2.12 and later page")

    def varlen_attn(
        q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux, scale, window_size, enable_gqa, seqused_k,
        block_table, num_splits,
    ):  # fmt: skip
        assert cu_seq_k is None and return_aux.lse and enable_gqa and num_splits != 0
        inspect.signature(real).bind(
            q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, return_aux=return_aux, scale=scale, window_size=window_size,
            enable_gqa=enable_gqa, seqused_k=seqused_k, block_table=block_table, num_splits=num_splits,
        )  # fmt: skip
        k, v = (unpaged(cache, block_table, seqused_k) for cache in (k, v))
        found = packed_reference(
            q, k, v, cu_seq_q.tolist(), offsets(seqused_k), scale=scale, causal=False, window=window_size, cap=0.0
        )
        return padded(*found, q)

    real = varlen.varlen_attn
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
