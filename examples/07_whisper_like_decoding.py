"""Whisper-like decoding: the encoder of a recording runs once, its states lie in a paged cache, the decoder reads them.

Recordings of any length join the batch while others decode, so first and later steps mix. The tokens are compared with
those of plain dense attention that computes everything anew for every token. The weights are random.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vattn

WIDTH, HEADS, SIZE, LAYERS, VOCABULARY, BLOCK = 64, 4, 16, 2, 96, 16
PROMPT, NEW_TOKENS, MAX_STATES, MAX_TOKENS = [1, 7, 3], 8, 48, 32


class AttentionBlock(nn.Module):
    """Norm, projections and one attention layer; keys and values come from `states`, or from the rows themselves."""

    def __init__(self, layer: nn.Module, causal: bool = False) -> None:
        super().__init__()
        self.layer, self.causal, self.norm = layer, causal, nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = projections = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        for projection in projections:
            nn.init.normal_(projection.weight, std=0.3)

    def forward(self, x: Tensor, source: Tensor | None, dense: bool) -> Tensor:
        normed = self.norm(x)
        query, source = self.q(normed), normed if source is x else source
        key, value = (None, None) if source is None else (self.k(source), self.v(source))
        if dense:
            parts = (t.unflatten(1, (HEADS, -1)).transpose(0, 1) for t in (query, key, value))
            out = F.scaled_dot_product_attention(*parts, is_causal=self.causal).transpose(0, 1).flatten(1)
        else:
            out = self.layer(query, key, value)
        return x + self.o(out)


class Encoder(nn.Module):
    """Recordings of n frames, `[n, 80]` each, become n / 2 states each, packed; each attends to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(80, WIDTH, 3, stride=2, padding=1)
        self.block = AttentionBlock(vattn.EncoderOnlyAttention(HEADS, SIZE, SIZE**-0.5))

    def forward(self, recordings: list[Tensor], dense: bool = False) -> Tensor:
        rows = torch.cat([self.conv(frames.T[None])[0].T for frames in recordings])
        return self.block(rows, rows, dense)


class Decoder(nn.Module):
    """Self-attention over the tokens, then cross attention over the recording's states; twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.positions = nn.Embedding(MAX_TOKENS, WIDTH)
        self.blocks = nn.ModuleList()
        for i in range(LAYERS):
            own = vattn.Attention(HEADS, SIZE, SIZE**-0.5, prefix=f"{i}.self")
            cross = vattn.CrossAttention(HEADS, SIZE, SIZE**-0.5, prefix=f"{i}.cross")
            self.blocks.append(nn.ModuleList([AttentionBlock(own, causal=True), AttentionBlock(cross)]))

    def forward(self, tokens: Tensor, positions: Tensor, states: Tensor | None, dense: bool = False) -> Tensor:
        x = self.embed(tokens) + self.positions(positions)
        for own, cross in self.blocks:
            x = cross(own(x, x, dense), states, dense)
        return self.head(x)


@dataclass(eq=False)
class Request:
    """A recording, where its states and tokens lie in the cache, and the tokens so far."""

    frames: Tensor
    state_blocks: list[int]
    token_blocks: list[int]
    tokens: list[int] = field(default_factory=lambda: list(PROMPT))


def main() -> None:
    torch.manual_seed(0)
    encoder, decoder, wrong = Encoder().eval(), Decoder().eval(), 0
    pool = vattn.BlockPool(vattn.allocate_kv_cache(decoder, num_blocks=32).num_blocks)
    # No cache in the encoder: its steps have no block tables.
    encoder_builder = vattn.AttentionMetadataBuilder(4, 4 * MAX_STATES, MAX_STATES, BLOCK)
    builder = vattn.AttentionMetadataBuilder(4, 16, MAX_TOKENS, BLOCK, layers=decoder, max_encoder_len=MAX_STATES)
    run = vattn.compile(decoder, backend="aot_eager")
    requests = [Request(torch.randn(n, 80), pool.allocate(n // 32 + 1), pool.allocate(1)) for n in (60, 26, 90)]
    for now in range(3 + NEW_TOKENS):
        new, states = {0: requests[:2], 3: requests[2:]}.get(now, []), None
        active = [r for r in requests if r in new or len(PROMPT) < len(r.tokens) < len(PROMPT) + NEW_TOKENS]
        if new:
            with vattn.forward_context(encoder_builder.build([len(r.frames) // 2 for r in new])):
                states = encoder([r.frames for r in new])
        fed = [r.tokens if r in new else r.tokens[-1:] for r in active]
        step = builder.build(
            [len(part) for part in fed], [len(r.tokens) for r in active], [r.token_blocks for r in active],
            encoder_lens=[len(r.frames) // 2 for r in active], new_encoder=[r in new for r in active],
            cross_block_tables=[r.state_blocks for r in active],
        )  # fmt: skip
        with vattn.forward_context(step):
            logits = run(torch.tensor([token for part in fed for token in part]), step.positions, states)
        print(f"step {now:2}: {len(new)} encoders run, {len(active)} requests, {len(logits)} rows")
        for request, row in zip(active, (step.query_start_loc[1:] - 1).tolist(), strict=False):
            tokens = torch.tensor(request.tokens)
            dense = decoder(tokens, torch.arange(len(tokens)), encoder([request.frames], dense=True), dense=True)
            request.tokens.append(int(logits[row].argmax()))
            wrong += request.tokens[-1] != int(dense[-1].argmax())
    print("\n".join(f"{len(r.frames) // 2} states: {r.tokens[len(PROMPT) :]}" for r in requests))
    print(f"{wrong} of {len(requests) * NEW_TOKENS} tokens differ from dense attention")
    print(f"graphs compiled: {torch._dynamo.utils.counters['stats']['unique_graphs']}")


if __name__ == "__main__":
    with torch.no_grad():
        main()
