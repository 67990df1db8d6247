"""A model of two attention layers, compiled without a graph break: one graph for all lengths and batch sizes."""

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import vattn


class Layer(nn.Module):
    """Attention and a residual: a minimal layer."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, prefix: str) -> None:
        super().__init__()
        size = hidden // heads
        self.widths = [hidden, kv_heads * size, kv_heads * size]
        self.norm = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, sum(self.widths), bias=False)
        self.attn = vattn.Attention(heads, size, size**-0.5, num_kv_heads=kv_heads, prefix=prefix)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).split(self.widths, dim=-1)
        return x + self.out(self.attn(query, key, value))


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(hidden=128, heads=4, kv_heads=2, prefix=f"layers.{i}") for i in range(2)))
    model.requires_grad_(False)
    print(vattn.allocate_kv_cache(model, num_blocks=64))
    print(model[0].attn)
    builder = vattn.AttentionMetadataBuilder(max_num_reqs=8, max_num_tokens=128, max_seq_len=128, layers=model)

    # As torch.compile, with fullgraph=True and with the sizes that vary marked.
    compiled = vattn.compile(model)
    graphs_before = counters["stats"]["unique_graphs"]

    # Prompts alone, prompts and decodes mixed, decodes of any number: (new tokens, all tokens) of each request.
    steps = [[(7, 7)], [(64, 64), (3, 3)], [(1, 65), (5, 8), (20, 20)], [(1, 30), (1, 9), (1, 21), (1, 66), (1, 2)]]
    for step in steps:
        tables = [list(range(1 + 8 * row, 9 + 8 * row)) for row in range(len(step))]
        metadata = builder.build([new for new, _ in step], [total for _, total in step], tables)
        x = torch.randn(metadata.num_actual_tokens, 128)
        with vattn.forward_context(metadata), torch.no_grad():
            expected, got = model(x), compiled(x)
        distance = (got - expected).norm() / expected.norm()
        tokens, requests = metadata.num_actual_tokens, metadata.num_reqs
        print(f"{requests} requests, {tokens:2d} new tokens: eager and compiled differ by {distance:.1e}")
        assert distance < 1e-5
    graphs = counters["stats"]["unique_graphs"] - graphs_before
    print(f"graphs compiled: {graphs}")
    assert graphs == 1


if __name__ == "__main__":
    main()
