"""Time decode steps on a CPU beside hand-written ones, in turn: one eager layer, and a whole model.

    python -m benchmarks.attention.laptop --json out.json

One thread, and its own time, so that other work on the machine counts little. A layer by hand: two `index_put_` at
slots, two gathers by token indices that are made before, `scaled_dot_product_attention`; ragged requests have a mask
too. A model by hand (15 million parameters, 6 layers, one request of up to 512 tokens): a cache `[1, heads, 512, 48]`
of each layer, `index_copy_`, and `scaled_dot_product_attention` over all of it with a mask. With vattn the model's step
includes what the host does for it (`advance`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
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


WIDTH, MODEL_HEADS, INNER, DEPTH, WORDS, LONGEST = 288, 6, 768, 6, 32000, 512


class ByHand(nn.Module):
    """Attention of one request over a cache of fixed length."""

    def __init__(self) -> None:
        super().__init__()
        shape = (1, MODEL_HEADS, LONGEST, WIDTH // MODEL_HEADS)
        self.register_buffer("keys", torch.zeros(shape))
        self.register_buffer("values", torch.zeros(shape))
        self.register_buffer("causal", torch.ones(LONGEST, LONGEST, dtype=torch.bool).tril())

    def forward(self, query: Tensor, key: Tensor, value: Tensor, position: Tensor) -> Tensor:
        """Write one row and attend to all before it."""
        query, key, value = (rows.view(1, MODEL_HEADS, 1, -1) for rows in (query, key, value))
        self.keys.index_copy_(2, position, key)
        self.values.index_copy_(2, position, value)
        mask = self.causal[position][None, None]
        return scaled_dot_product_attention(query, self.keys, self.values, mask).view(1, -1)


class Paged(vattn.Attention):
    """Attention over a paged cache."""

    def __init__(self) -> None:
        size = WIDTH // MODEL_HEADS
        super().__init__(MODEL_HEADS, size, size**-0.5)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, position: Tensor) -> Tensor:  # type: ignore[override]
        """Write and attend by the step of the forward context."""
        return super().forward(query, key, value)  # type: ignore[return-value]


class Block(nn.Module):
    """Attention with rotated queries and keys, and a gated MLP, each after a norm."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.qkv, self.out = (nn.Linear(WIDTH, n, bias=False) for n in (3 * WIDTH, WIDTH))
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor) -> Tensor:
        """Return the hidden states after the block."""
        query, key, value = self.qkv(F.rms_norm(x, (WIDTH,))).view(3, 1, MODEL_HEADS, -1)
        query, key = (rows * cos + torch.cat((-rows.chunk(2, -1)[1], rows.chunk(2, -1)[0]), -1) * sin
                      for rows in (query, key))  # fmt: skip
        x = x + self.out(self.attention(query.reshape(1, -1), key.reshape(1, -1), value.reshape(1, -1), position))
        gate, up = self.gate_up(F.rms_norm(x, (WIDTH,))).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    """A small language model that decodes one token."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(kind()) for _ in range(DEPTH))
        size = WIDTH // MODEL_HEADS
        angles = torch.arange(LONGEST)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        """Return logits `[1, WORDS]`."""
        x, cos, sin = self.words(token), self.cos[position], self.sin[position]
        for block in self.blocks:
            x = block(x, cos, sin, position)
        return F.linear(F.rms_norm(x, (WIDTH,)), self.words.weight)


@torch.no_grad()
def model_times(compiled: bool) -> list[float]:
    """Return the median time of a step of each model in us; raise where they choose other tokens."""
    models = [Model(kind).eval() for kind in (Paged, ByHand)]
    vattn.allocate_kv_cache(models[0], num_blocks=1 + LONGEST // BLOCK, dtype=torch.float32)
    builder = vattn.AttentionMetadataBuilder(1, 1, LONGEST, layers=models[0])
    runs = [vattn.compile(model) if compiled else model for model in models]
    found: list[list[float]] = [[], []]
    tokens = []
    for index, run in enumerate(runs):
        step, token, chosen = None, torch.tensor([1]), []
        for at in range(LONGEST - 1):
            start = time.thread_time()
            if index == 0:
                fresh = [1 + at // BLOCK] if at % BLOCK == 0 else []
                step = builder.build([1], [1], [[1]]) if step is None else builder.advance(step, fresh)
                with vattn.forward_context(step):
                    logits = run(token, step.positions)
            else:
                logits = run(token, torch.tensor([at]))
            token = logits.argmax(-1)
            found[index].append((time.thread_time() - start) * 1e6)
            chosen.append(int(token))
        tokens.append(chosen)
    if tokens[0] != tokens[1]:
        raise SystemExit("the models choose other tokens")
    return [round(statistics.median(taken[64:]), 1) for taken in found]


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
    for compiled in (False, True):
        ours, theirs = model_times(compiled)
        row = {"model": "compiled" if compiled else "eager", "vattn": ours, "by hand": theirs}
        add_row(result, {**row, "ratio": round(ours / theirs, 2)}, args.json)


if __name__ == "__main__":
    main()
