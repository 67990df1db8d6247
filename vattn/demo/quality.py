"""Bits per byte of a text through the paged cache, with keys and values stored in one format or another."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from vattn.context import forward_context
from vattn.kv_cache import KVCacheAllocation
from vattn.metadata_builder import AttentionMetadataBuilder


def blocks_needed(block_size: int, context: int, num_reqs: int) -> int:
    """Return how many cache blocks `bits_per_byte` uses, the null block included."""
    return 1 + num_reqs * -(-context // block_size)


def bits_per_byte(
    model: nn.Module,
    cache: KVCacheAllocation,
    text: bytes,
    *,
    forward: Callable[..., Tensor] | None = None,
    context: int = 1024,
    chunk: int = 128,
    num_reqs: int = 8,
    progress: Callable[[], None] = lambda: None,
) -> float:
    """Return the mean bits per byte of `text`, byte 0 before it, in blocks of `context` that do not see one another.

    Each block is a request and is fed in chunks, so that most keys and values are read back from the cache, in whatever
    format it has.

    Args:
        cache: what `vattn.allocate_kv_cache(model, ...)` returned, of at least `blocks_needed(...)` blocks.
        chunk: tokens of one request per step.
        num_reqs: blocks of text in one batch.
        progress: called after each step.
    """
    forward = model if forward is None else forward
    width = -(-context // cache.block_size)
    builder = AttentionMetadataBuilder(
        num_reqs, num_reqs * chunk, context, cache.block_size, cache.device, layers=model
    )
    ids = torch.tensor(list(b"\0" + text))
    pieces = [ids[start : start + context + 1] for start in range(0, len(text), context)]
    nats = 0.0
    for first in range(0, len(pieces), num_reqs):
        batch = pieces[first : first + num_reqs]
        for start in range(0, context, chunk):
            now = [(row, piece[start : start + chunk + 1]) for row, piece in enumerate(batch) if len(piece) > start + 1]
            if not now:
                break
            metadata = builder.build(
                query_lens=[len(piece) - 1 for _, piece in now],
                seq_lens=[start + len(piece) - 1 for _, piece in now],
                block_tables=[list(range(1 + row * width, 1 + (row + 1) * width)) for row, _ in now],
            )
            inputs = torch.cat([piece[:-1] for _, piece in now]).to(cache.device)
            targets = torch.cat([piece[1:] for _, piece in now]).to(cache.device)
            with forward_context(metadata), torch.inference_mode():
                logits = forward(inputs, metadata.positions)
            nats += cross_entropy(logits, targets, reduction="sum").item()
            progress()
    return nats / math.log(2) / len(text)
