"""Bits per byte of a text through the paged cache, with keys and values stored in one format or another."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from vattn.cache.allocation import KVCacheAllocation
from vattn.metadata.builder import AttentionMetadataBuilder
from vattn.metadata.forward_context import forward_context

CONTEXT, CHUNK, NUM_REQS = 1024, 128, 8
"""Tokens of one block of text, of which one step takes a chunk, for this many blocks at once."""


def blocks_needed(block_size: int) -> int:
    """Return how many cache blocks `bits_per_byte` uses, the null block included."""
    return 1 + NUM_REQS * -(-CONTEXT // block_size)


def num_steps(length: int) -> int:
    """Return how many steps `bits_per_byte` takes for a text of this many bytes."""
    full, rest = divmod(length, NUM_REQS * CONTEXT)
    return full * (CONTEXT // CHUNK) + -(-min(rest, CONTEXT) // CHUNK)


def bits_per_byte(
    model: nn.Module,
    cache: KVCacheAllocation,
    text: bytes,
    *,
    forward: Callable[..., Tensor] | None = None,
    progress: Callable[[], None] = lambda: None,
) -> float:
    """Return the mean bits per byte of `text`, byte 0 before it, in blocks of `CONTEXT` that do not see one another.

    Each block is a request and is fed in chunks, so that most keys and values are read back from the cache, in whatever
    format it has.

    Args:
        cache: what `vattn.allocate_kv_cache(model, ...)` returned, of at least `blocks_needed(...)` blocks.
        forward: the model's compiled form; default the model as it is.
        progress: called after each step.
    """
    forward = model if forward is None else forward
    width = -(-CONTEXT // cache.block_size)
    builder = AttentionMetadataBuilder(
        NUM_REQS, NUM_REQS * CHUNK, CONTEXT, cache.block_size, cache.device, layers=model
    )
    ids = torch.tensor(list(b"\0" + text))
    pieces = [ids[start : start + CONTEXT + 1] for start in range(0, len(text), CONTEXT)]
    nats = 0.0
    for first in range(0, len(pieces), NUM_REQS):
        batch = pieces[first : first + NUM_REQS]
        for start in range(0, CONTEXT, CHUNK):
            now = [(row, piece[start : start + CHUNK + 1]) for row, piece in enumerate(batch) if len(piece) > start + 1]
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
