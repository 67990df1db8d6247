"""A small greedy model, and its decoding step by step, for tests of `advance_step`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import vattn

VOCABULARY, BLOCK = 97, 16
HEADS = 4


class Greedy(nn.Module):
    """Embeddings of tokens and positions, two attention layers, and the next token by argmax."""

    def __init__(
        self,
        backend: str,
        dtype: torch.dtype,
        device: str,
        width: int = 32,
        windows: tuple[int | None, ...] = (None, 21),
    ) -> None:
        super().__init__()
        torch.manual_seed(7)
        size = HEADS * width
        self.tokens, self.positions = nn.Embedding(VOCABULARY, size), nn.Embedding(512, size)
        self.qkv = nn.ModuleList(nn.Linear(size, 2 * size) for _ in windows)
        self.layers = nn.ModuleList(
            vattn.Attention(
                HEADS, width, width**-0.5, num_kv_heads=2, per_layer_sliding_window=window, attn_backend=backend
            )
            for window in windows
        )
        self.head = nn.Linear(size, VOCABULARY)
        self.to(device=device, dtype=dtype)
        vattn.allocate_kv_cache(self, num_blocks=64, dtype=dtype, device=device)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions(positions)
        for qkv, layer in zip(self.qkv, self.layers, strict=True):
            size = hidden.shape[-1]
            query, key, value = qkv(hidden).split([size, size // 2, size // 2], -1)
            hidden = hidden + layer(query, key, value)
        return self.head(hidden)


def builder_for(model: Greedy, **options: object) -> vattn.FlashAttentionMetadataBuilder:
    device = model.head.weight.device
    return vattn.FlashAttentionMetadataBuilder(6, 64, 200, BLOCK, device, layers=model, **options)


TABLES = [[9, 3, 40, 5], [22, 8, 17, 30], [1, 50, 13, 44]]


def prefill(model: Greedy, prompts: list[list[int]]) -> list[int]:
    """Write the prompts into the cache and return the first token of each request."""
    builder, device = builder_for(model), model.head.weight.device
    lengths = [len(prompt) for prompt in prompts]
    step = builder.build(lengths, lengths, TABLES[: len(prompts)])
    with vattn.forward_context(step.common):
        packed = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        logits = model(packed, step.common.positions)
    ends = torch.tensor(lengths, device=device).cumsum(0) - 1
    return logits[ends].argmax(-1).tolist()


def single_steps(
    model: Greedy, lengths: list[int], tokens: list[int], count: int, batch_size: int | None = None
) -> list[list[int]]:
    """Decode so many tokens for each request, each step built on the host."""
    builder, device, found = builder_for(model), model.head.weight.device, []
    real, missing = len(lengths), (batch_size or len(lengths)) - len(lengths)
    for index in range(count):
        grown = [length + 1 + index for length in lengths]
        step = builder.build([1] * real, grown, TABLES[:real], batch_size=batch_size)
        with vattn.forward_context(step.common):
            logits = model(torch.tensor(tokens + [0] * missing, device=device), step.common.positions)
        tokens = logits.argmax(-1).tolist()[:real]
        found.append(tokens)
    return found


def decode_steps(
    model: Greedy, step: vattn.FlashAttentionMetadata, inputs: vattn.DecodeInput, num_seqs: int, num: int, out: Tensor
) -> None:
    """Run the model for every row of `out [steps, num_seqs]`, moving the step on between; device work alone."""
    for index in range(out.shape[0]):
        with vattn.forward_context(step.common):
            sampled = model(inputs.input_tokens, inputs.input_positions).argmax(-1)
        out[index].copy_(sampled)
        if index + 1 < out.shape[0]:
            step.advance_step(inputs, sampled, BLOCK, num_seqs, num)


def run_in_order(
    model: Greedy, tokens: Tensor, step: tuple[list[int], list[int], list[list[int]]], first: str
) -> Tensor:
    """Run requests (query lengths, lengths, blocks) in an order of tokens over random caches, and return their rows as
    they were given."""
    for layer in model.layers:
        layer.kv_cache.copy_(torch.randn(layer.kv_cache.shape, generator=torch.Generator().manual_seed(1)))
    order, device = vattn.token_order(*step[:2], first), tokens.device
    arguments = [[values[i] for i in order.requests] for values in step]
    if first == "prefill":
        built = builder_for(model).build(*arguments).common
    else:
        built = vattn.AttentionMetadataBuilder(6, 64, 200, BLOCK, device, layers=model).build(*arguments)
    places = order.tokens.to(device)
    with torch.no_grad(), vattn.forward_context(built):
        packed = model(tokens[places], built.positions)
    found = torch.empty_like(packed)
    found[places] = packed
    return found
