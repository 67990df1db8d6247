"""Eight decode steps in one CUDA graph: the next step's tokens, lengths and slots are made on the device.

`advance_step` moves a batch one token on by one kernel, so nothing comes back to the host between the steps. Without a
CUDA GPU the same steps run one after the other. Either way they are compared with steps that the host builds.
"""

import torch
from torch import Tensor, nn

import vattn

HEADS, KV_HEADS, SIZE, BLOCK = 8, 2, 64, 16
VOCABULARY, STEPS, ROWS = 1000, 8, 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


class Model(nn.Module):
    """One attention layer between an embedding and the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HEADS * SIZE), nn.Embedding(256, HEADS * SIZE)
        self.widths = [HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE]
        self.qkv = nn.Linear(HEADS * SIZE, sum(self.widths), bias=False)
        self.attn = vattn.Attention(HEADS, SIZE, SIZE**-0.5, num_kv_heads=KV_HEADS)
        self.head = nn.Linear(HEADS * SIZE, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions(positions)
        hidden = hidden + self.attn(*self.qkv(hidden).split(self.widths, dim=-1))
        return self.head(hidden).argmax(-1)


def decode(model: Model, step: vattn.FlashAttentionMetadata, inputs: vattn.DecodeInput, found: Tensor) -> None:
    """Fill `found [STEPS, ROWS]` with tokens; device work alone, so a CUDA graph takes all of it."""
    for index in range(STEPS):
        with vattn.forward_context(step.common):
            sampled = model(inputs.input_tokens, inputs.input_positions)
        found[index].copy_(sampled)
        if index + 1 < STEPS:
            step.advance_step(inputs, sampled, BLOCK, num_seqs=ROWS, num_queries=ROWS)


def main() -> None:
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    model = Model().to(DEVICE, DTYPE)
    vattn.allocate_kv_cache(model, num_blocks=40)
    builder = vattn.FlashAttentionMetadataBuilder(ROWS, 128, max_seq_len=128, device=DEVICE, layers=model)

    # Three prompts; every request has blocks for all the steps to come.
    prompts = [torch.randint(VOCABULARY, (length,)) for length in (40, 7, 22)]
    tables = [[1, 2, 3, 4], [5, 6, 7], [8, 9, 10]]
    lengths = [len(prompt) for prompt in prompts]
    prompt = builder.build(lengths, lengths, tables)
    with vattn.forward_context(prompt.common):
        sampled = model(torch.cat(prompts).to(DEVICE), prompt.common.positions)
    first = sampled[torch.tensor(lengths, device=DEVICE).cumsum(0) - 1].tolist()

    def start() -> vattn.FlashAttentionMetadata:
        """Build the first of the eight steps, padded to the rows of the graph."""
        grown = [length + 1 for length in lengths]
        return builder.build([1, 1, 1], grown, tables, batch_size=ROWS, num_lookahead_slots=STEPS - 1)

    # What the host would do: one step after the other, each built from its lengths.
    tokens, expected = first, []
    for index in range(STEPS):
        step = builder.build([1, 1, 1], [length + 1 + index for length in lengths], tables, batch_size=ROWS)
        with vattn.forward_context(step.common):
            tokens = model(torch.tensor([*tokens, 0], device=DEVICE), step.common.positions).tolist()[:3]
        expected.append(tokens)

    step = start()
    inputs = vattn.DecodeInput(torch.zeros(ROWS, dtype=torch.int64, device=DEVICE), step.common.positions)
    found = torch.zeros(STEPS, ROWS, dtype=torch.int64, device=DEVICE)
    graph = None
    if DEVICE == "cuda":
        decode(model, step, inputs, found)  # kernels are compiled before the capture
        step, graph = start(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decode(model, step, inputs, found)
        step = start()  # the capture has moved the numbers on the host, and the lengths are those of the warm-up
    inputs.input_tokens[:3] = torch.tensor(first)
    if graph is None:
        decode(model, step, inputs, found)
    else:
        graph.replay()
    print(f"{STEPS} steps {'in one CUDA graph' if graph else 'on the CPU'}, {ROWS} rows for 3 requests")
    print(f"lengths on the device: {step.seq_lens_tensor.tolist()}")
    assert found[:, :3].tolist() == expected
    print(f"tokens equal those of {STEPS} steps built on the host:")
    for row in range(3):
        print(f"  request {row}: {found[:, row].tolist()}")


if __name__ == "__main__":
    main()
