"""Differential attention on the GPU: on TRITON_ATTN, compiled, captured in CUDA graphs, lambda reloaded in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vattn
from tests.backends.test_differential_attention import HEADS, KV_HEADS, LOOSE, Text, error, lambdas, make_layer, paper

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo")]


def on_gpu(**changes: Any) -> vattn.DifferentialAttention:
    return make_layer(**changes).cuda()


def expected(text: Text, first: int = 0) -> torch.Tensor:
    query, key, value = (x.cpu()[: text.seen] for x in text.qkv)
    return paper(text.layer.cpu(), query[first:], key, value)


@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_equals_the_formula_of_the_paper(dtype: torch.dtype, size: int) -> None:
    layer = on_gpu(head_size=size, scale=size**-0.5, **lambdas(width=size))
    text = Text(layer, dtype=dtype, device="cuda")
    assert layer.config is not None
    assert layer.config.backend == "TRITON_ATTN"
    got = torch.cat([text.run(count) for count in (21, 9, 1, 1)]).cpu()
    assert error(got, expected(text)) < max(3e-5, LOOSE[dtype])


def test_an_fp8_cache_with_scales_per_head() -> None:
    scales = [0.01, 0.02, 0.03, 0.04], [0.03, 0.02, 0.05, 0.01]
    outputs = []
    for device in ("cpu", "cuda"):
        layer = make_layer(
            cache_config=vattn.CacheConfig(block_size=8, cache_dtype="fp8"),
            quant_config=vattn.QuantConfig(k_scale=scales[0], v_scale=scales[1], query_format="fp8_e4m3", q_scale=0.02),
        ).to(device)
        text = Text(layer, dtype=torch.bfloat16, device=device)
        outputs.append(torch.cat([text.run(count) for count in (21, 1)]).cpu())
    assert error(outputs[1], outputs[0].double()) < LOOSE[torch.bfloat16]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_captured_decodes_follow_lengths_and_lambda(compiled: bool) -> None:
    """Every replay has other lengths, and after half of them other lambdas: the graph reads both from memory."""
    layer = on_gpu()
    text = Text(layer, dtype=torch.float32, device="cuda")
    text.run(18)

    def inputs(step: Any) -> list[torch.Tensor]:
        rows = step.slot_mapping.shape[0]
        return [torch.zeros(rows, heads, layer.head_size, device="cuda") for heads in (HEADS, KV_HEADS, KV_HEADS)]

    run = vattn.compile(layer, fullgraph=True) if compiled else layer
    with torch.no_grad():
        runner = vattn.CUDAGraphRunner(run, [2], text.builder, inputs)
        assert runner.report.reason is None
        other = {name: vector * -0.4 for name, vector in lambdas(seed=77).items()}
        for place in range(18, 24):
            if place == 21:
                layer.load_state_dict({**layer.state_dict(), **other})
            step = runner.build([1], [place + 1], [text.table])
            rows = [x[place : place + 1] for x in text.qkv]
            got = runner(*rows, metadata=step)[:1].cpu()
            key, value = (x.cpu()[: place + 1] for x in text.qkv[1:])
            twin = make_layer(**(other if place >= 21 else lambdas()))
            assert error(got, paper(twin, rows[0].cpu(), key, value)) < 3e-5
