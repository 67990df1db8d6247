"""Decode steps as CUDA graphs, captured once and replayed while lengths, blocks and batch sizes change.

Without a CUDA GPU the runner calls the function directly, on the same padded inputs, and says so.
"""

import torch
from torch import Tensor, nn

import vattn

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 64, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widths = [HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE]
        self.qkv = nn.Linear(256, sum(self.widths), bias=False)
        self.attn = vattn.Attention(HEADS, SIZE, SIZE**-0.5, num_kv_heads=KV_HEADS)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(*self.qkv(x).split(self.widths, dim=-1))


def main() -> None:
    torch.manual_seed(0)
    model = Layer().to(DEVICE, DTYPE).requires_grad_(False)
    vattn.allocate_kv_cache(model, num_blocks=40)
    builder = vattn.AttentionMetadataBuilder(4, 256, max_seq_len=128, block_size=BLOCK, device=DEVICE, layers=model)

    def make_inputs(step: vattn.AttentionMetadata) -> list[Tensor]:
        return [torch.zeros(step.slot_mapping.shape[0], 256, device=DEVICE, dtype=DTYPE)]

    runner = vattn.CUDAGraphRunner(model, [4, 2], builder, make_inputs)
    print(runner.report)

    # Three requests of different lengths: prompts first, without a graph.
    lengths = [70, 3, 30]
    tables = [list(range(1 + 8 * row, 9 + 8 * row)) for row in range(3)]
    prompt = builder.build(lengths, lengths, tables)
    with vattn.forward_context(prompt), torch.no_grad():
        model(torch.randn(sum(lengths), 256, device=DEVICE, dtype=DTYPE))

    # Then decodes. Every step has other lengths; the second request leaves after three steps.
    for number in range(6):
        if number == 3:
            del lengths[1], tables[1]
        lengths = [length + 1 for length in lengths]
        x = torch.randn(len(lengths), 256, device=DEVICE, dtype=DTYPE)
        step = runner.build([1] * len(lengths), lengths, tables)
        replayed = runner(x, metadata=step).clone()
        plain = builder.build([1] * len(lengths), lengths, tables)
        with vattn.forward_context(plain), torch.no_grad():
            expected = model(x)
        distance = ((replayed - expected).float().norm() / expected.float().norm()).item()
        print(f"lengths {lengths}, padded to {step.capture_key().num_reqs} requests: differs by {distance:.1e}")
        assert distance < {torch.bfloat16: 1e-2, torch.float32: 1e-5}[DTYPE]


if __name__ == "__main__":
    main()
