"""Query quantisation written ahead of the op: Inductor folds it into what makes the query, and the report says so."""

from __future__ import annotations

import re
from typing import Any

import torch
from forms import static
from harness import HEADS, WIDTH, captured, inputs_of, step
from torch import Tensor, nn

import vattn


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x.view(-1, HEADS, WIDTH).float()
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).bfloat16().flatten(1)


class Quantised(nn.Module):
    """A layer that quantises its query, behind RoPE or behind a GEMM alone."""

    def __init__(self, rotate: bool) -> None:
        super().__init__()
        scales = vattn.QuantConfig(query_format="fp8_e4m3", q_scale=0.03)
        self.attn = vattn.Attention(HEADS, WIDTH, WIDTH**-0.5, 2, prefix="layers.0.attn", quant_config=scales)
        self.proj = nn.Linear(HEADS * WIDTH, HEADS * WIDTH, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.rotate = rotate
        self.register_buffer("scale", torch.tensor([0.0137]))
        self.register_buffer("angles", torch.randn(1, 1, WIDTH // 2))
        vattn.allocate_kv_cache(self, num_blocks=16, dtype=torch.bfloat16)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query = self.proj(query)
        if self.rotate:
            query = rope(query, self.angles.cos(), self.angles.sin())
        return static(self.attn(query, key, value), self.scale)


def test_rope_and_query_quantisation_are_one_kernel() -> None:
    from torch._inductor.utils import run_and_get_code

    model = Quantised(rotate=True)
    target: Any = vattn.compile(model, options=vattn.options(strict=True))
    with step(model, [3, 4]):
        _, (code,) = run_and_get_code(target, *inputs_of(7))
    kernels = re.findall(r"^\s+(cpp_fused\w*)\(", code, re.MULTILINE)
    # RoPE, its angles and the quantisation: nothing else is left to a kernel of its own.
    assert len(kernels) == 1 and "cos" in kernels[0], kernels
    assert "float8_e4m3fn" in code
    (node,) = vattn.fusion_report()
    assert node.query == "FP8, quantised in the kernel of its pointwise producer"


def test_a_query_behind_a_gemm_is_reported() -> None:
    capture, _ = captured(Quantised(rotate=False))
    assert capture.report[0].query == "FP8, quantised in a kernel of its own behind mm"


def test_a_query_in_the_models_dtype_is_not_mentioned() -> None:
    from harness import Attend

    capture, _ = captured(Attend(static))
    assert capture.report[0].query == ""
