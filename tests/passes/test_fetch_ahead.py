"""The weight behind attention is found, given to the op that turns its query, and changes no result."""

from __future__ import annotations

from functools import partial
from typing import Any

import harness
import pytest
import torch
from harness import Capture, step
from rope_forms import HEADS, WIDTH, LayerWithRope, RopeForm, chunked, inputs
from torch import Tensor, nn

import vattn
from tests.rope_cases import make_call
from tests.support import make_config
from vattn.errors import DeviceError, StrideError
from vattn.passes.fetch_ahead import fetch_ahead, weight_behind
from vattn.passes.pipeline import fuse_graph
from vattn.passes.region import attention_calls, value
from vattn.rope_config import RopeConfig

E4M3 = torch.float8_e4m3fn


class Projected(LayerWithRope):
    """A layer with something behind attention."""

    def __init__(self, behind: str) -> None:
        super().__init__(RopeForm(chunked, ""))
        columns = HEADS * WIDTH
        self.behind = behind
        self.out = nn.Linear(columns, 48, bias=behind == "bias", dtype=torch.bfloat16).requires_grad_(False)
        self.register_buffer("codes", torch.randn(48, columns).to(E4M3))
        self.register_buffer("scale", torch.tensor(0.02))

    def forward(self, x: Tensor, positions: Tensor) -> Any:
        attended, _ = super().forward(x, positions)
        if self.behind == "fp8":
            quantised = (attended.float() / self.scale).clamp(-448, 448).to(E4M3)
            return torch._scaled_mm(quantised, self.codes.t(), self.scale, self.scale, out_dtype=torch.bfloat16)
        if self.behind == "kept":
            return attended * 2
        if self.behind == "computed":
            return attended @ (self.out.weight * 2).t()
        return self.out(attended)


def captured(model: nn.Module) -> tuple[Capture, Any]:
    torch._dynamo.reset()
    capture = Capture()
    target = vattn.compile(model, backend=capture.backend)
    with step(model, [3, 4]):
        target(*inputs(7))
    return capture, target


@pytest.mark.parametrize("behind", ["plain", "bias", "fp8", "kept", "computed"])
def test_the_weight_behind(behind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "fuse_graph", partial(fuse_graph, rope="always"))
    model = Projected(behind)
    capture, target = captured(model)
    graph = capture.after[0].graph
    ((call, _),) = attention_calls(graph)
    weight = weight_behind(call)
    if behind in ("kept", "computed"):
        assert weight is None and not fetch_ahead(call, {})
        return
    assert weight is not None and weight.op == "placeholder" and tuple(value(weight).shape) == (48, HEADS * WIDTH)
    results = []
    for fetched in (False, True):
        if fetched:
            assert fetch_ahead(call, {node: place for place, node in enumerate(graph.nodes)})
            graph.lint()
            capture.after[0].recompile()
        model.attn.kv_cache.zero_()
        with step(model, [5, 1]):
            results.append((target(*inputs(6)), model.attn.kv_cache.clone()))
    assert all(map(torch.equal, *results))
    turn: Any = call.kwargs["query"]
    assert turn.args[0].kwargs["next_weight"] is weight


def test_no_rope_op_no_fetching() -> None:
    capture, _ = captured(Projected("plain"))
    ((call, _),) = attention_calls(capture.after[0].graph)
    assert weight_behind(call) is not None and not fetch_ahead(call, {})


def test_weights_that_the_op_takes() -> None:
    args = make_call(make_config(backend="TORCH_SDPA"), RopeConfig(16))
    for weight in (torch.randn(6, 4), torch.randn(6, 4).t(), torch.zeros(0)):
        torch.ops.vattn.rope_kv_cache_update(*args._replace(next_weight=weight))
    with pytest.raises(StrideError, match="next_weight has shape"):
        torch.ops.vattn.rope_kv_cache_update(*args._replace(next_weight=torch.randn(6, 4)[:, ::2]))
    with pytest.raises(DeviceError, match="on cpu and meta"):
        torch.ops.vattn.rope_kv_cache_update(*args._replace(next_weight=torch.empty(6, 4, device="meta")))
