"""Sentence embeddings with an encoder-only model: sentences of any lengths in one call, without padding and a cache.

The weights are random, so the embeddings mean nothing yet; what counts is that a sentence gets the same one whatever it
is packed with.
"""

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import vattn

HIDDEN, HEADS, LAYERS, LONGEST = 128, 4, 4, 64

SENTENCES = [
    "The cat sat on the mat.",
    "Attention without a cache.",
    "A much longer sentence, which would decide how far every other one has to be padded.",
    "Short.",
]


class Layer(nn.Module):
    """One layer as BERT has it; every second one sees 8 tokens to each side alone, as in ModernBERT."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.attn = vattn.EncoderOnlyAttention(
            HEADS,
            HIDDEN // HEADS,
            (HIDDEN // HEADS) ** -0.5,
            per_layer_sliding_window=9 if index % 2 else None,
            prefix=f"layers.{index}.attn",
        )
        self.out, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))
        self.mlp_norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.out(self.attn(*self.qkv(x).chunk(3, dim=-1))))
        return self.mlp_norm(x + self.mlp(x))


class Encoder(nn.Module):
    """Bytes in, one vector of length 1 per sentence out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, HIDDEN), nn.Embedding(LONGEST * 2, HIDDEN)
        self.layers = nn.ModuleList(Layer(index) for index in range(LAYERS))

    def forward(self, ids: Tensor, positions: Tensor, starts: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(positions)
        for layer in self.layers:
            x = layer(x)
        # The mean over each sentence, from running sums: no loop over sentences.
        sums = nn.functional.pad(x.cumsum(0), (0, 0, 1, 0))[starts]
        return nn.functional.normalize(sums.diff(dim=0), dim=-1)


def main() -> None:
    torch.manual_seed(0)
    model = Encoder().eval().requires_grad_(False)
    print(model.layers[1].attn)
    builder = vattn.AttentionMetadataBuilder(max_num_reqs=8, max_num_tokens=512, max_seq_len=2 * LONGEST)
    compiled = vattn.compile(model)

    def embed(sentences: list[str]) -> Tensor:
        texts = [torch.tensor(list(sentence.encode())) for sentence in sentences]
        step = builder.build([len(text) for text in texts])
        with vattn.forward_context(step):
            return compiled(torch.cat(texts), step.positions, step.query_start_loc)[: len(sentences)]

    together = embed(SENTENCES)
    lengths = [len(sentence.encode()) for sentence in SENTENCES]
    padded = len(lengths) * max(lengths)
    print(f"{len(lengths)} sentences in one call: {sum(lengths)} rows, where padding would make {padded}")

    for sentence, vector in zip(SENTENCES, together, strict=True):
        alone = embed([sentence])[0]
        distance = (alone - vector).norm().item()
        print(f"{len(sentence):2d} bytes: alone and packed differ by {distance:.1e}")
        assert distance < 1e-5
    again = embed([SENTENCES[0], "The cat sat on the mat!", SENTENCES[3]])
    print(f"one character changed: cosine {(again[0] @ again[1]).item():.3f}")
    print(f"another sentence: cosine {(again[0] @ again[2]).item():.3f}")
    print(f"graphs compiled: {counters['stats']['unique_graphs']}")
    assert counters["stats"]["unique_graphs"] == 1


if __name__ == "__main__":
    main()
