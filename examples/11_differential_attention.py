"""Differential attention: train a small model for a minute, then generate with it through the paged cache.

Attention is the difference of two softmax maps (arXiv 2410.05258). Training has the formula written out in plain torch;
then `vattn.DifferentialAttention`, which holds the same weights, generates from a paged cache. The tokens are compared
with the formula's, which computes everything anew for each. A number of seconds as the argument trains shorter.
"""

import argparse
import inspect
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vattn

WIDTH, HEADS, KV_HEADS, SIZE, LAYERS, CONTEXT, BLOCK = 96, 6, 2, 16, 2, 96, 16
TEXT = torch.tensor(list(inspect.getsource(argparse).encode()))  # a token is a byte


class Block(nn.Module):
    """Differential attention and an MLP."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        lambdas = {f"lambda_{name}": nn.Parameter(torch.randn(SIZE) * 0.1) for name in ("q1", "k1", "q2", "k2")}
        self.attn = vattn.DifferentialAttention(
            HEADS, SIZE, SIZE**-0.5, KV_HEADS, lambda_init=vattn.differential_lambda_init(depth), **lambdas
        )
        self.widths = [HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE]
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, sum(self.widths), bias=False), nn.Linear(HEADS * SIZE, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))

    def forward(self, x: Tensor, dense: bool) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).split(self.widths, dim=-1)
        x = x + self.out(written_out(self.attn, *qkv) if dense else self.attn(*qkv))
        return x + self.mlp(self.norms[1](x))


def written_out(attn: vattn.DifferentialAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The formula for texts `[batch, tokens, heads * SIZE]`: pairs of heads share values of twice the width."""
    query, key, value = (x.unflatten(-1, (-1, 2, SIZE)).movedim(1, 3) for x in (query, key, value))
    both = value.movedim(2, 3).flatten(3)
    first, second = (
        F.scaled_dot_product_attention(query[:, :, half], key[:, :, half], both, is_causal=True, enable_gqa=True)
        for half in (0, 1)
    )
    one, two = (attn.lambda_q1 * attn.lambda_k1).sum().exp(), (attn.lambda_q2 * attn.lambda_k2).sum().exp()
    mixed = attn.subln(first - (one - two + attn.lambda_init) * second) * (1 - attn.lambda_init)
    return mixed.transpose(1, 2).flatten(2)


class Model(nn.Module):
    """A decoder over bytes: whole texts `[batch, tokens]` with `dense`, otherwise the packed rows of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(depth) for depth in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, dense: bool = False) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, dense)
        return self.head(self.norm(x))


def train(model: Model, seconds: float) -> None:
    optimizer, start, steps = torch.optim.AdamW(model.parameters(), lr=2e-3), time.monotonic(), 0
    while steps < 2 or time.monotonic() - start < seconds:
        rows = torch.randint(len(TEXT) - CONTEXT, (12, 1)) + torch.arange(CONTEXT)
        logits = model(TEXT[rows[:, :-1]], torch.arange(CONTEXT - 1), dense=True)
        loss = F.cross_entropy(logits.flatten(0, 1), TEXT[rows[:, 1:]].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    print(
        f"{steps} steps, loss {loss.item():.3f}, lambda {[round(float(b.attn.lambda_full()), 3) for b in model.blocks]}"
    )


def generate(model: Model, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens of all prompts at once: a prefill, then decodes, from the paged cache."""
    vattn.allocate_kv_cache(model, num_blocks=1 + len(prompts) * CONTEXT // BLOCK, dtype=torch.float32)
    builder = vattn.AttentionMetadataBuilder(len(prompts), 256, max_seq_len=CONTEXT, layers=model)
    tables = torch.arange(1, 1 + len(prompts) * CONTEXT // BLOCK).view(len(prompts), -1).tolist()
    texts, new = [list(prompt) for prompt in prompts], prompts
    for _ in range(count):
        step = builder.build([len(n) for n in new], [len(t) for t in texts], tables)
        with vattn.forward_context(step):
            logits = model(torch.tensor([token for tokens in new for token in tokens]), step.positions)
        last = torch.tensor([len(n) for n in new]).cumsum(0) - 1
        new = [[token] for token in logits[last].argmax(-1).tolist()]
        texts = [text + token for text, token in zip(texts, new, strict=True)]
    return texts


def main() -> None:
    torch.manual_seed(0)
    model = Model()
    train(model, float(sys.argv[1]) if len(sys.argv) > 1 else 60)
    torch.set_grad_enabled(False)
    prompts = [list(b"def add_argument(self, "), list(b"    if not "), list(b"class ")]
    count, wrong = 48, 0
    for prompt, text in zip(prompts, generate(model, prompts, count), strict=True):
        dense = list(prompt)
        for _ in range(count):
            dense.append(int(model(torch.tensor([dense]), torch.arange(len(dense)), dense=True)[0, -1].argmax()))
        wrong += sum(a != b for a, b in zip(text, dense, strict=True))
        print(repr(bytes(text).decode(errors="replace")))
    print(f"{wrong} of {count * len(prompts)} tokens differ from the written-out formula")


if __name__ == "__main__":
    main()
