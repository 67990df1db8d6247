"""One benchmark cell: its inputs, what it reads and computes, and the fp32 result that kernels are checked against."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vattn.cli.bench.shapes import LayerShape, Work
from vattn.config.attention import AttentionConfig

WIDEST = 128
"""Tokens that lie together in a cell's cache, if its blocks are no larger."""


class Cell:
    """One step of one layer on random values, its blocks scattered over the cache.

    Args:
        layer, work: what runs.
        cache: `"bf16"` or `"fp8"`; an FP8 cache has scales of one.
        block_size: tokens per block of the cache, which is NHD.
        seed: of values and tables.
        filled: whether keys and values are written; not for a cell that kernels are only compiled for.

    Attributes:
        query: bf16 `[T, H, D]`.
        kv_cache: bf16 or e4m3 `[2, blocks, block_size, K, D]`.
        table: int32 `[B, W]`.
        starts, seq_lens: int32 `[B + 1]` and `[B]`.
        sinks: fp32 `[H]`, or `None`.
        fp8: whether the cache is FP8.
        one: fp32, the scale of everything FP8; `None` without.
        scale: factor of the scores.
    """

    def __init__(
        self,
        layer: LayerShape,
        work: Work,
        cache: str,
        block_size: int,
        seed: int,
        device: str = "cuda",
        filled: bool = True,
    ) -> None:
        self.layer, self.work, self.cache, self.block_size, self.device = layer, work, cache, block_size, device
        self.fp8, self.scale = cache == "fp8", float(layer.head_size**-0.5)
        rng = torch.Generator(device).manual_seed(seed)
        # So many tokens lie together, for kernels that read no smaller blocks or are faster with wide ones.
        grain = max(1, WIDEST // block_size)
        counts = [-(-keys // (block_size * grain)) for _, keys in work.requests]
        order = torch.randperm(sum(counts), device=device, generator=rng).to(torch.int32).split(counts)
        self._widest = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True).contiguous()
        self.table = self._split(grain)
        shape = (2, sum(counts) * grain, block_size, layer.kv_heads, layer.head_size)
        self.kv_cache = torch.empty(shape, device=device, dtype=torch.float8_e4m3fn if self.fp8 else torch.bfloat16)
        for part in self.kv_cache.view(2, -1, layer.kv_heads * layer.head_size)[: 2 if filled else 0]:
            for rows in part.split(1 << 18):
                rows.copy_(torch.randn(rows.shape, device=device, dtype=torch.bfloat16, generator=rng))
        size = (work.rows, layer.heads, layer.head_size)
        self.query = torch.randn(size, device=device, generator=rng).to(torch.bfloat16)
        lens = torch.tensor(work.requests)
        self.starts = torch.cat([torch.zeros(1, dtype=torch.int64), lens[:, 0].cumsum(0)]).to(torch.int32).to(device)
        self.seq_lens = lens[:, 1].to(torch.int32).to(device)
        self.sinks = torch.randn(layer.heads, device=device, generator=rng) if layer.sinks else None
        self.one = torch.ones(1, device=device) if self.fp8 else None

    def _split(self, parts: int) -> Tensor:
        """Return the table of blocks that are so many parts of the widest ones."""
        inner = torch.arange(parts, dtype=torch.int32, device=self.device)
        return (self._widest.unsqueeze(2) * parts + inner).flatten(1).contiguous()

    def wide(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values of the same memory as blocks of so many tokens, up to `WIDEST`, and their table."""
        size = max(tokens, self.block_size)
        key, value = self.kv_cache.view(2, -1, size, *self.kv_cache.shape[3:])
        return key, value, self._split(max(WIDEST, self.block_size) // size)

    @cached_property
    def contiguous(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value `[B, heads, tokens, D]` of a cell of equal lengths, without a cache."""
        requests, (rows, keys) = len(self.work.requests), self.work.requests[0]
        query = self.query.view(requests, rows, *self.query.shape[1:]).transpose(1, 2).contiguous()
        key, value = (
            part[self.table.long()].flatten(1, 2)[:, :keys].transpose(1, 2).contiguous() for part in self.kv_cache
        )
        return query, key, value

    def config(self, backend: str = "auto", **changes: Any) -> AttentionConfig:
        """Return the request that vattn gets."""
        layer = self.layer
        return AttentionConfig(
            num_heads=layer.heads,
            num_kv_heads=layer.kv_heads,
            head_size=layer.head_size,
            head_size_v=layer.head_size,
            scale=self.scale,
            dtype="bfloat16",
            kv_cache_dtype="fp8_e4m3" if self.fp8 else "bfloat16",
            kv_scale="tensor" if self.fp8 else "none",
            block_size=self.block_size,
            sliding_window=layer.window,
            logits_soft_cap=layer.soft_cap,
            sinks=layer.sinks,
            backend=backend,
        ).replace(**changes)

    @property
    def bytes(self) -> int:
        """Bytes of queries, outputs and visible keys and values, each moved once."""
        window, layer = self.layer.window, self.layer
        keys = sum(min(keys, window + query - 1 if window else keys) for query, keys in self.work.requests)
        stored = 2 * keys * layer.kv_heads * layer.head_size * self.kv_cache.itemsize
        return stored + 2 * self.query.numel() * self.query.itemsize

    @property
    def flops(self) -> int:
        """Operations of both products over visible pairs."""
        pairs = 0
        for query, keys in self.work.requests:
            reach = torch.arange(keys - query + 1, keys + 1)
            pairs += int(reach.clamp(max=self.layer.window or keys).sum())
        return 4 * pairs * self.layer.heads * self.layer.head_size

    def error(self, output: Tensor) -> float:
        """Return the largest relative L2 error of checked rows against fp32 on what is stored; output `[T, H, D]`."""
        last = len(self.work.requests) - 1
        worst = 0.0
        for request in sorted({0, last // 2, last}):
            query, _ = self.work.requests[request]
            for row in sorted({0, query // 2, query - 1}):
                expected = self._expected(request, row)
                got = output[int(self.starts[request]) + row].float()
                worst = max(worst, float((got - expected).norm() / expected.norm()))
        return worst

    def _expected(self, request: int, row: int) -> Tensor:
        layer, (query, keys) = self.layer, self.work.requests[request]
        length = keys - query + 1 + row
        first = max(0, length - layer.window) if layer.window else 0
        blocks = self.table[request, : -(-length // self.block_size)].long()
        key, value = (
            part[blocks].flatten(0, 1)[first:length].float().repeat_interleave(layer.heads // layer.kv_heads, 1)
            for part in self.kv_cache
        )
        at = int(self.starts[request]) + row
        scores = torch.einsum("hd,thd->ht", self.query[at].float(), key) * self.scale
        if layer.soft_cap is not None:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.float().unsqueeze(1)], dim=1)
        weights = scores.softmax(-1)[:, : length - first]
        return torch.einsum("ht,thd->hd", weights, value)
