"""A stand-in for FlashInfer's wrappers on the CPU, for what surrounds them: it reads only what the real ones read.

As they do, it knows no padding, plans from host tensors, works from its buffers in graph mode, refuses a query of
another number of rows than it planned, and gives a log-sum-exp in base 2, -inf for rows that see nothing.
"""

from __future__ import annotations

import math
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor


class _Wrapper:
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", **options: Any) -> None:
        assert set(options) <= {
            "use_cuda_graph",
            "qo_indptr_buf",
            "paged_kv_indptr_buf",
            "paged_kv_indices_buf",
            "paged_kv_last_page_len_buf",
            "backend",
        }
        self.layout, self.family = kv_layout, options.pop("backend", "auto")
        self.graph = options.pop("use_cuda_graph", False)
        self.buffers = options

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        assert int_workspace_buffer.dtype == torch.uint8
        self.int_workspace = int_workspace_buffer

    def run(self, query: Tensor, cache: Any, out: Tensor, return_lse: bool = False) -> Any:
        assert query.shape[0] == self.rows, "q.shape[0] does not match qo_indptr[-1]"
        starts, parts = self.requests(cache)
        lse = torch.full(query.shape[:2], torch.nan)
        for request, (key, value) in enumerate(parts):
            first, last = int(starts[request]), int(starts[request + 1])
            out[first:last], lse[first:last] = self.one(query[first:last], key, value, request)
        return (out, lse) if return_lse else out

    def one(self, query: Tensor, key: Tensor, value: Tensor, request: int) -> tuple[Tensor, Tensor]:
        rows, keys, told = query.shape[0], key.shape[0], self.told
        group = told["num_qo_heads"] // told["num_kv_heads"]
        scores = torch.einsum("qhd,khd->hqk", query.double(), key.double().repeat_interleave(group, 1))
        assert told["sm_scale"] > 0, "the kernels find the largest score ahead of the scale"
        scores *= told["sm_scale"]
        if told["logits_soft_cap"]:
            scores = told["logits_soft_cap"] * torch.tanh(scores / told["logits_soft_cap"])
        position = torch.arange(keys - rows, keys).unsqueeze(1)
        column = torch.arange(keys).unsqueeze(0)
        seen = self.mask(request, rows, keys)
        if seen is None:
            seen = column <= position if told["causal"] else torch.ones(rows, keys, dtype=torch.bool)
        if told["window_left"] >= 0:
            seen = seen & (column >= position - told["window_left"])
        scores = scores.masked_fill(~seen, -torch.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
        output = torch.einsum("hqk,khd->qhd", weights, value.double().repeat_interleave(group, 1))
        return output.to(query.dtype), (lse / math.log(2)).t().float()

    def mask(self, request: int, rows: int, keys: int) -> Tensor | None:
        return None


class PagedWrapper(_Wrapper):
    """`BatchPrefillWithPagedKVCacheWrapper`."""

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        page_size: int,
        custom_mask: Tensor | None = None,
        **told: Any,
    ) -> None:
        for tensor in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len, paged_kv_indices):
            assert tensor.dtype == torch.int32
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert bool((qo_indptr.diff() >= 0).all()) and bool((paged_kv_indptr.diff() >= 0).all())
        given = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        if self.graph:
            for buffer, tensor in zip(self.buffers.values(), given, strict=True):
                buffer[: len(tensor)].copy_(tensor)
            self.used = tuple(self.buffers.values())
        else:
            self.used = tuple(tensor.clone() for tensor in given)
        self.rows, self.size, self.told, self.custom = int(qo_indptr[-1]), page_size, told, custom_mask
        if custom_mask is not None:
            lengths = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
            areas = qo_indptr.diff() * lengths
            assert int(areas.sum()) == custom_mask.numel() and custom_mask.dtype == torch.bool
            self.mask_start = (areas.cumsum(0) - areas).tolist()
        self._plan_info = [self.rows, len(qo_indptr)]

    def mask(self, request: int, rows: int, keys: int) -> Tensor | None:
        if self.custom is None:
            return None
        return self.custom[self.mask_start[request] :][: rows * keys].view(rows, keys)

    def requests(self, cache: tuple[Tensor, Tensor]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        starts, pages, ids, last = self.used
        key, value = (part.transpose(1, 2) if self.layout == "HND" else part for part in cache)
        parts = []
        for request in range(len(last)):
            used = ids[int(pages[request]) : int(pages[request + 1])].long()
            keys = (len(used) - 1) * self.size + int(last[request]) if len(used) else 0
            parts.append(tuple(part[used].reshape(-1, *part.shape[2:])[:keys] for part in (key, value)))
        return starts, parts


class RaggedWrapper(_Wrapper):
    """`BatchPrefillWithRaggedKVCacheWrapper`."""

    def plan(self, qo_indptr: Tensor, kv_indptr: Tensor, **told: Any) -> None:
        self.starts, self.kv_starts, self.told, self.rows = qo_indptr, kv_indptr, told, int(qo_indptr[-1])

    def run(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
        return super().run(query, (key, value), out, return_lse)

    def requests(self, cache: tuple[Tensor, Tensor]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        ranges = zip(self.kv_starts[:-1].tolist(), self.kv_starts[1:].tolist(), strict=True)
        return self.starts, [tuple(part[a:b] for part in cache) for a, b in ranges]


def xqa(
    query: Tensor, cache: Any, workspace: Tensor, table: Tensor, lengths: Tensor, longest: int, **told: Any
) -> Tensor:
    """`xqa_batch_decode_with_kv_cache` for one row per request: a key and a block for every row, scales as tensors."""
    assert lengths.dtype == torch.uint32 and len(table) == len(lengths) == len(query)
    assert int(lengths.int().min()) >= 1 and int(lengths.int().max()) <= longest
    wrapper = _Wrapper(workspace)
    key, value = (part.transpose(1, 2) if told["kv_layout"] == "HND" else part for part in cache)
    wrapper.told = {
        "num_qo_heads": query.shape[1], "num_kv_heads": key.shape[2], "sm_scale": float(told["bmm1_scale"]),
        "logits_soft_cap": 0.0, "causal": True, "window_left": told["window_left"],
    }  # fmt: skip
    for row in range(len(query)):
        pair = (part[table[row].long()].flatten(0, 1)[: int(lengths[row])] for part in (key, value))
        result = wrapper.one(query[row : row + 1], *pair, row)[0]
        told["out"][row] = (result.float() * told["bmm2_scale"])[0].to(query.dtype)
    return told["out"]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-in in FlashInfer's place, with plans of its own."""
    from vattn.backends.flashinfer import backend as flashinfer
    from vattn.backends.flashinfer import jit as flashinfer_build
    from vattn.backends.flashinfer import plan as flashinfer_plan

    module = types.ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = PagedWrapper
    module.BatchPrefillWithRaggedKVCacheWrapper = RaggedWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    decode = types.ModuleType("flashinfer.decode")
    decode.xqa_batch_decode_with_kv_cache = xqa
    monkeypatch.setitem(sys.modules, "flashinfer.decode", decode)
    monkeypatch.setattr(flashinfer_plan, "xqa_workspace", lambda device: torch.zeros(1, dtype=torch.uint8))
    monkeypatch.setattr(flashinfer_build, "can_compile", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(flashinfer_plan, "_plans", type(flashinfer_plan._plans)())
    monkeypatch.setattr(flashinfer_plan, "_numbers", {})
    monkeypatch.setattr(flashinfer_plan, "workspace", lambda device, size=0: torch.zeros(1, dtype=torch.uint8))
    monkeypatch.setattr(flashinfer, "workspace", lambda device, size=0: torch.zeros(1, dtype=torch.uint8))
    for name in ("_paged_wrapper", "_packed_wrapper"):
        monkeypatch.setattr(flashinfer, name, getattr(flashinfer, name).__wrapped__)
