"""Layers in a row, with a cache and a connector."""

from __future__ import annotations

import torch
from torch import nn

import vattn
from vattn.cache.block_pool import BlockPool
from vattn.kv_transfer import KVTransfer

BLOCK = 8


def make_layer(index=0, cache_dtype="auto", kv_cache_layout="NHD", head_size_v=None, **changes):
    quantised = cache_dtype.startswith("fp8")
    return vattn.Attention(
        4,
        16,
        0.25,
        num_kv_heads=2,
        head_size_v=head_size_v,
        cache_config=vattn.CacheConfig(BLOCK, cache_dtype, kv_cache_layout=kv_cache_layout),
        quant_config=vattn.QuantConfig(k_scale="unit", v_scale="unit") if quantised else None,
        prefix=f"layers.{index}",
        **changes,
    )


class Stack(nn.Module):
    """Layers in a row: each attends with what the one before it returned as query, key and value."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers or (make_layer(0), make_layer(1), make_layer(2)))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x, x[:, :32], x[:, 32:])
        return x


ATTACHED = []
"""Setups that the fixture `detached` detaches."""


class Setup:
    """A stack of three layers with a cache of 12 blocks, and a connector."""

    def __init__(self, connector, model=None, **options):
        self.model = model or Stack()
        self.cache = vattn.allocate_kv_cache(self.model, num_blocks=12, dtype=torch.float32)
        self.builder = vattn.AttentionMetadataBuilder(4, 64, 64, BLOCK, layers=self.model)
        self.connector = connector
        self.transfer = KVTransfer(self.model, self.cache, connector, **options)
        self.pool = BlockPool(self.cache.num_blocks)
        ATTACHED.append(self)

    @torch.no_grad()
    def run(self, x, query_lens, seq_lens, tables, forward=None, loads=(), saves=()):
        metadata = self.builder.build(query_lens, seq_lens, tables)
        with self.transfer.step(loads, saves) as step, vattn.forward_context(metadata):
            out = (self.model if forward is None else forward)(x)
        return out, step

    def run_hooks(self, loads=(), saves=()):
        """Run the hooks of a step without its model."""
        with self.transfer.step(loads, saves) as step:
            for point in self.transfer.points:
                self.transfer.before_layer(point)
                self.transfer.after_layer(point)
        return step

    def run_other_hooks(self, done):
        """Run the hooks of all layers but one within a step."""
        for point in self.transfer.points:
            if point.layer_name != done:
                self.transfer.before_layer(point)
                self.transfer.after_layer(point)

    def fill(self):
        for storage in self.cache.kv_caches:
            storage.normal_()

    def holds(self, blocks, others):
        """Whether blocks have the content of others in every layer."""
        return all(torch.equal(storage[:, blocks], storage[:, others]) for storage in self.cache.kv_caches)

    def poison(self):
        for storage in self.cache.kv_caches:
            storage.view(torch.uint8).fill_(0xFF)
