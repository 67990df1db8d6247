"""Turn a row into the arguments of an op."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.conformance.rows import Row
from tests.support import Batch, make_config, poisoned_empty, random_packed_batch, random_paged_batch, random_scale
from vattn.config import AttentionConfig
from vattn.formats import MODEL_DTYPES
from vattn.ops.arguments import CacheUpdateArgs
from vattn.ops.cache_layout import kv_cache_dtype, kv_cache_shape


def make_batch(row: Row, backend: str, *, device: str = "cpu", seed: int = 0) -> Batch:
    """Return a random batch for a row on a backend, full of garbage wherever garbage is allowed."""
    config = make_config(**{"block_size": 8, **row.changes, "backend": backend})
    query_lens, seq_lens = [q for q, _ in row.lens], [s for _, s in row.lens]
    tokens, reqs = row.padding
    if config.block_size == 0:
        return random_packed_batch(
            config, query_lens, seq_lens, seed=seed, device=device, num_padding_tokens=tokens, num_padding_reqs=reqs
        )
    width = None
    if row.table == "narrow":
        width = max(1, max(seq_lens) // config.block_size - 1)
    batch = random_paged_batch(
        config,
        query_lens,
        seq_lens,
        seed=seed,
        device=device,
        table_width=width,
        num_padding_tokens=tokens,
        num_padding_reqs=reqs,
    )
    if row.table == "broken":
        break_table(batch, seed)
    return batch


def break_table(batch: Batch, seed: int) -> None:
    """Put ids outside the cache into a third of the table's entries, used ones included: their keys do not exist."""
    rng = torch.Generator().manual_seed(seed)
    table = batch.args.block_table
    num_blocks = batch.args.kv_cache.shape[0 if batch.args.kv_cache.ndim == 2 else 1]
    ids = torch.tensor([-1, num_blocks, 2**31 - 1, -(2**31)])
    broken = torch.rand(table.shape, generator=rng) < 0.34
    garbage = ids[torch.randint(len(ids), table.shape, generator=rng)].int()
    table.copy_(torch.where(broken, garbage, table.cpu()))


def make_cache_update(config: AttentionConfig, *, device: str = "cpu", seed: int = 0) -> CacheUpdateArgs:
    """Return an update with slots in and out of range over a cache of garbage, and values that saturate FP8."""
    rng = torch.Generator().manual_seed(seed)
    num_blocks, num_tokens, heads, dtype = 4, 19, config.num_kv_heads, MODEL_DTYPES[config.dtype]
    slots = torch.randperm(num_blocks * config.block_size, generator=rng)[:num_tokens]
    outside = torch.tensor([-1, -7, num_blocks * config.block_size, 2**62, -(2**62)])
    slots[torch.randperm(num_tokens, generator=rng)[: len(outside)]] = outside
    scales = [random_scale(config.kv_scale, heads, 4.0, rng) for _ in range(2)]

    def rows(width: int) -> Tensor:
        values = torch.randn(num_tokens, heads, width, generator=rng) * 3
        values[0, 0, 0], values[1, 0, 1], values[2, 0, 2] = 6e4, -torch.inf, torch.nan
        # Strides as of a slice of one projection's result.
        return torch.cat([values, values], dim=1).to(dtype).to(device)[:, :heads]

    return CacheUpdateArgs(
        key=rows(config.head_size),
        value=rows(config.head_size_v),
        kv_cache=poisoned_empty(kv_cache_shape(config, num_blocks), kv_cache_dtype(config), device),
        slot_mapping=slots.to(device),
        k_scale=None if scales[0] is None else scales[0].to(device),
        v_scale=None if scales[1] is None else scales[1].to(device),
        config=config.encode(),
    )
