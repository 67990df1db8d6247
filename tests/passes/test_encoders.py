"""Output quantisation after the layers without a cache fuses as it does after `Attention`, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from forms import group, per_token, static
from harness import Capture
from torch import Tensor, nn

import vattn

HEADS, SIZE = 4, 64

FORMS = {"fp8_static": static, "fp8_per_token": per_token, "fp8_group128": partial(group, size=128)}


class EncoderOnly(nn.Module):
    """Text encoder attention, packed by the metadata."""

    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__()
        self.attn = vattn.EncoderOnlyAttention(HEADS, SIZE, 0.1, per_layer_sliding_window=3)
        self.form, self.scale = form, torch.tensor([0.0137])

    def forward(self, query: Tensor, key: Tensor, value: Tensor, offsets: Tensor) -> Any:
        return self.form(self.attn(query, key, value), self.scale)


class Vision(nn.Module):
    """Multimodal encoder attention, packed by offsets, on FP8 or not."""

    def __init__(self, form: Callable[..., Any], quant: vattn.EncoderFP8Config | None = None) -> None:
        super().__init__()
        self.attn = vattn.MMEncoderAttention(HEADS, SIZE, quant_config=quant)
        self.form, self.scale = form, torch.tensor([0.0137])

    def forward(self, query: Tensor, key: Tensor, value: Tensor, offsets: Tensor) -> Any:
        rows = (part[None] for part in (query, key, value))
        return self.form(self.attn(*rows, offsets, torch.tensor(99)).squeeze(0), self.scale)


MODELS: dict[str, Callable[[Callable[..., Any]], nn.Module]] = {
    "encoder-only": EncoderOnly,
    "vision": Vision,
    "vision-fp8": lambda form: Vision(form, vattn.EncoderFP8Config(dynamic=True)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_quantisation_fuses(name: str, form: str) -> None:
    model = MODELS[name](FORMS[form])
    capture = Capture(model)
    builder = vattn.AttentionMetadataBuilder(8, 64, 64, 16)
    for lens in ([3, 4], [5, 1, 2]):
        step, rows = builder.build(lens), [torch.randn(sum(lens), HEADS * SIZE).bfloat16() for _ in range(3)]

        def run(step: Any = step, rows: Any = rows, count: int = len(lens)) -> Any:
            for buffer in model.buffers():
                buffer.zero_()
            with vattn.forward_context(step):
                got = capture.target(*rows, step.query_start_loc[: count + 1].clone())
            return got if isinstance(got, tuple) else (got,)

        for a, b in zip(*capture.both(run), strict=True):
            assert a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    (node,) = capture.report
    assert (node.op, node.outcome, node.output_format) == ("varlen_attention", "fused", form), str(node)
    assert ("FP8" in node.query) == (name == "vision-fp8")
