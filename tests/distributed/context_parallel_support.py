"""One rank's share of a batch, and the combine of all shares, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support import moved, poisoned_empty, relative_l2, storage_of, with_storage
from vattn.cache.layout import op_views, row_view
from vattn.cache.stored_rows import stored_views
from vattn.config.attention import AttentionConfig
from vattn.config.dcp import DCPShard
from vattn.config.mla import MLAConfig
from vattn.distributed.combine import combine_parts
from vattn.ops.arguments import AttentionArgs


def sharded(config: Any, shard: DCPShard, **changes: Any) -> Any:
    """Return a config over one rank's share, which writes its log-sum-exp and leaves the sinks to the combine."""
    if isinstance(config, AttentionConfig):
        changes.setdefault("sinks", False)
    return config.replace(
        context_parallel=True,
        context_rank=shard.rank,
        context_world=shard.world_size,
        context_interleave=shard.interleave,
        **{"lse": True, "output_format": "none", **changes},
    )


def share(args: Any, config: Any, shard: DCPShard, seed: int = 0, **changes: Any) -> Any:
    """Return the arguments of one rank: its tokens, byte for byte, in a cache of its own full of NaN elsewhere.

    Blocks lie in another order than in the whole cache, and unused entries of the table hold garbage.
    """
    size, rng = config.block_size, torch.Generator().manual_seed(seed + 7 * shard.rank)
    lengths = [max(0, length) for length in args.seq_lens.tolist()]
    held = [shard.count(length) for length in lengths]
    needed = [-(-count // size) for count in held]
    blocks = sum(needed) + 2
    free = torch.randperm(blocks, generator=rng).tolist()
    table = torch.randint(-9, 3 * blocks, (len(lengths), max([1, *needed]) + 1), generator=rng, dtype=torch.int32)
    whole = storage_of(args) if isinstance(args, AttentionArgs) else args.kv_cache
    shape = list(whole.shape)
    shape[1 if whole.dim() == 5 else 0] = blocks
    cache = poisoned_empty(shape, whole.dtype)
    own = sharded(config, shard, **changes)
    for request, count in enumerate(held):
        taken, free = free[: needed[request]], free[needed[request] :]
        table[request, : needed[request]] = torch.tensor(taken, dtype=torch.int32)
        local = torch.arange(count)
        position = shard.position(local)
        source = args.block_table[request].long()[position // size], position % size
        target = table[request].long()[local // size], local % size
        for old, new in zip(_rows(whole, config), _rows(cache, own), strict=True):
            new[target] = old[source]
    tokens, heads = args.query.shape[:2]
    width = own.v_head_dim if isinstance(own, MLAConfig) else own.head_size_v
    taken_out = {"sinks": None} if isinstance(args, AttentionArgs) else {}
    model = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[own.dtype]
    given = with_storage(args, cache) if isinstance(args, AttentionArgs) else args._replace(kv_cache=cache)
    return given._replace(
        block_table=table,
        local_seq_lens=torch.tensor(held, dtype=torch.int32),
        output=poisoned_empty((tokens, heads, width), model),
        output_block_scale=None,
        output_scale=None,
        lse=poisoned_empty((tokens, heads), torch.float32),
        config=own.encode(),
        **taken_out,
    )


def combined_parts(
    full: Any,
    config: Any,
    shards: Sequence[DCPShard],
    exact: Callable[..., tuple[Tensor, Tensor]],
    backend: str,
    most: tuple[float, float],
    device: str = "cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Compare every rank's part of a batch with `exact`, and return what all of them are together.

    Args:
        most: relative errors of outputs and of log-sum-exps.
    """
    name = "mla_attention" if isinstance(config, MLAConfig) else "attention"
    outputs, logs = [], []
    for shard in shards:
        own, args = sharded(config, shard), share(full, config, shard, seed)
        part, lse = exact(args, own)
        args = moved(args._replace(config=own.replace(backend=backend).encode()), device)
        getattr(torch.ops.vattn, name)(*args)
        empty = args.lse == -torch.inf
        assert torch.equal(empty.cpu(), lse == -torch.inf)
        assert not args.output[empty].any(), "rows without a key of this rank are zero"
        assert relative_l2(args.output, part) < most[0]
        assert relative_l2(args.lse[~empty], lse.to(device, torch.float32)[~empty]) < most[1]
        outputs.append(args.output)
        logs.append(args.lse)
    return combine_parts(outputs, torch.stack(logs), getattr(full, "sinks", None))


def _rows(cache: Tensor, config: Any) -> Sequence[Tensor]:
    """Return views `[blocks, block_size, ...]` of everything that is stored of a token, as bytes."""
    if isinstance(config, MLAConfig):
        return [row_view(cache, config)]
    parts = (part for rows in stored_views(*op_views(cache, config), config) for part in rows if part is not None)
    return [part.view(torch.uint8) if part.dtype.itemsize == 1 else part for part in parts]


def ranks(world_size: int, interleave: int) -> list[DCPShard]:
    """Return the shares of all ranks."""
    return [DCPShard(rank, world_size, interleave) for rank in range(world_size)]
