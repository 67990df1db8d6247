"""A tiny decoder and steps for it, shared by the compile tests and the processes that they start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import vattn

VOCAB, BLOCK, NUM_BLOCKS = 64, 16, 96


class Block(nn.Module):
    def __init__(self, index: int, width: int, **attention: Any) -> None:
        super().__init__()
        size = width // 4
        self.widths = [width, 2 * size, 2 * size]
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, sum(self.widths), bias=False)
        self.attn = vattn.Attention(4, size, size**-0.5, 2, prefix=f"layers.{index}.attn", **attention)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, metadata: vattn.AttentionMetadata | None = None) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).split(self.widths, dim=-1)
        return x + self.out(self.attn(query, key, value, metadata=metadata))


class Model(nn.Module):
    def __init__(self, num_layers: int, width: int = 32, **attention: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Block(i, width, **attention) for i in range(num_layers))

    def forward(self, ids: Tensor, metadata: vattn.AttentionMetadata | None = None) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, metadata)
        return x @ self.embed.weight.t()


def make_model(
    num_layers: int = 2, *, device: str = "cpu", dtype: torch.dtype = torch.float32, width: int = 32, **attention: Any
) -> Model:
    torch.manual_seed(0)
    model = Model(num_layers, width, **attention).eval().requires_grad_(False).to(device, dtype)
    vattn.allocate_kv_cache(model, num_blocks=NUM_BLOCKS)
    return model


def make_builder(model: nn.Module, **options: Any) -> vattn.AttentionMetadataBuilder:
    device = next(model.parameters()).device
    return vattn.AttentionMetadataBuilder(16, 512, 512, BLOCK, device, layers=model, **options)


def make_step(
    builder: vattn.AttentionMetadataBuilder, query_lens: Sequence[int], cached: int = 5, **options: Any
) -> tuple[Tensor, vattn.AttentionMetadata]:
    """Token ids and metadata of requests, every second of which has `cached` tokens in the cache already."""
    seq_lens = [query + cached * (i % 2) for i, query in enumerate(query_lens)]
    tables, next_block = [], 1
    for length in seq_lens:
        needed = -(-length // BLOCK)
        tables.append(list(range(next_block, next_block + needed)))
        next_block += needed
    ids = torch.arange(sum(query_lens), device=builder.device) * 7 % VOCAB
    return ids, builder.build(list(query_lens), seq_lens, tables, **options)


def fill_caches(model: Model) -> None:
    """Give every cache the same made-up content, whatever was written to it before."""
    for layer in model.layers:
        cache = layer.attn.kv_cache
        values = torch.randn(cache.shape, generator=torch.Generator().manual_seed(1))
        cache.copy_(values if cache.is_floating_point() else (values.abs() * 16).to(cache.dtype))  # FP8 codes


def caches(model: Model) -> list[Tensor]:
    return [layer.attn.kv_cache.clone() for layer in model.layers]
