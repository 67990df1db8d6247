"""The output pass around latent attention: what a model quantises after the layer, the op writes itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forms import group, per_token, static
from torch import Tensor, nn

import vattn
from vattn.passes.graphviz import drawing_options

N, P, R, V, L = 4, 16, 8, 32, 32


class Quantised(nn.Module):
    def __init__(self, quantise: Any) -> None:
        super().__init__()
        self.proj = nn.Linear(L, N * (P + V), bias=False)
        self.attn = vattn.MLAAttention(N, 0.2, P, R, V, None, L, self.proj, prefix="0.attn")
        self.quantise, self.scale = quantise, torch.tensor([0.02])

    def forward(self, *inputs: Tensor) -> Any:
        return self.quantise(self.attn(*inputs), self.scale)


@pytest.mark.parametrize(
    ("quantise", "name"), [(static, "fp8_static"), (per_token, "fp8_per_token"), (group, "fp8_group64")]
)
def test_what_is_quantised_after_the_layer_is_written_by_the_op(quantise: Any, name: str) -> None:
    model = Quantised(quantise)
    vattn.allocate_kv_cache(model, num_blocks=8, dtype=torch.float32)
    builder = vattn.AttentionMetadataBuilder(max_num_reqs=2, max_num_tokens=16, max_seq_len=64, layers=model)
    pictures: list[str] = []
    options = vattn.options(drawing_options(pictures), strict=True)
    compiled = vattn.compile(model, fullgraph=True, options=options)
    inputs = torch.randn(12, N, P + R), torch.randn(12, L), torch.randn(12, 1, R)
    step = builder.build([11, 1], [11, 5], [[1], [2]])
    with torch.no_grad(), vattn.forward_context(step):
        expected = model(*inputs)
        got = compiled(*inputs)
    assert name in str(vattn.fusion_report())
    before, after = pictures
    assert before.count("#a6cee3") == after.count("#b2df8a") == 1 and f"output_format={name}" in after
    pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
    for mine, theirs in pairs:
        assert torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
