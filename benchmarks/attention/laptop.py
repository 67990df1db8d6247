"""Time an eager decode step of one layer on a CPU beside hand-written writes, gathers and attention, in turn.

    python -m benchmarks.attention.laptop --json out.json

One thread, and its own time, so that other work on the machine counts little. By hand: two `index_put_` at slots, two
gathers by token indices that are made before, `scaled_dot_product_attention`; ragged requests have a mask too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import vattn
from benchmarks.harness import add_row, machine, parser_of

HEADS, SIZE, BLOCK, ROUNDS, CALLS = 8, 64, 16, 15, 200


def by_hand(
    query: Tensor, new: list[Tensor], caches: list[Tensor], slots: Tensor, tokens: Tensor, mask: Tensor | None
) -> Tensor:
    """Write new keys and values, gather those of each request, and attend."""
    flat = [cache.view(-1, HEADS, SIZE) for cache in caches]
    for cache, rows in zip(flat, new, strict=True):
        cache.index_put_((slots,), rows)
    key, value = (cache[tokens].transpose(1, 2) for cache in flat)
    return scaled_dot_product_attention(query[:, :, None], key, value, mask, scale=SIZE**-0.5).flatten(1)


def both(lengths: list[int], dtype: torch.dtype) -> list[Callable[[], Tensor]]:
    """Return a layer's step and the same by hand, over one cache."""
    requests, longest = len(lengths), max(lengths)
    layer = vattn.Attention(HEADS, SIZE, SIZE**-0.5)
    blocks = -(-longest // BLOCK)
    vattn.allocate_kv_cache(layer, num_blocks=1 + requests * blocks, dtype=dtype)
    builder = vattn.AttentionMetadataBuilder(requests, requests, longest, layers=layer)
    table = 1 + torch.randperm(requests * blocks).view(requests, blocks).int()
    step = builder.build([1] * requests, lengths, table)
    assert layer.kv_cache is not None
    layer.kv_cache.normal_()
    query, key, value = (torch.randn(requests, HEADS * SIZE, dtype=dtype) for _ in range(3))
    at, last = torch.arange(longest), torch.tensor(lengths)[:, None] - 1
    place = torch.minimum(at, last)
    tokens = table.long().gather(1, place // BLOCK) * BLOCK + place % BLOCK
    mask = None if len(set(lengths)) == 1 else (at <= last)[:, None, None]
    heads = [rows.view(requests, HEADS, SIZE) for rows in (query, key, value)]
    slots, caches = tokens.gather(1, last).view(-1), list(layer.kv_cache)
    return [
        lambda: layer(query, key, value, metadata=step),
        lambda: by_hand(heads[0], heads[1:], caches, slots, tokens, mask),
    ]


@torch.no_grad()
def times(calls: list[Callable[[], Tensor]]) -> list[float]:
    """Return the median time of each call in us; raise where their results differ."""
    ours, theirs = (call() for call in calls)
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 if ours.dtype == torch.bfloat16 else 1e-5)
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, taken in zip(calls, found, strict=True):
            call()
            start = time.thread_time()
            for _ in range(CALLS):
                call()
            taken.append((time.thread_time() - start) / CALLS * 1e6)
    return [round(statistics.median(taken), 1) for taken in found]


def main() -> None:
    """Print and write the table."""
    args = parser_of(__doc__).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    result: dict[str, Any] = machine("cpu")
    for dtype in (torch.float32, torch.bfloat16):
        for lengths in ([64], [512], [64] * 8, [512] * 8, [64, 40, 55, 23, 64, 17, 60, 33]):
            ours, theirs = times(both(lengths, dtype))
            row = {"dtype": str(dtype)[6:], "lengths": lengths, "vattn": ours, "by hand": theirs}
            add_row(result, {**row, "ratio": round(ours / theirs, 2)}, args.json)


if __name__ == "__main__":
    main()
