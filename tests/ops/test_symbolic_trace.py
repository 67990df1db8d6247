"""Layers are traced with symbolic sizes, which the checks of the ops must take."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import vattn
from tests.support import with_cache


@torch.no_grad()
def test_layers_are_traced_with_symbolic_sizes() -> None:
    layer = with_cache(vattn.Attention(2, 16, scale=0.25, num_kv_heads=1, prefix="layer"), 4)
    builder = vattn.AttentionMetadataBuilder(max_num_reqs=2, max_num_tokens=8, max_seq_len=32, layers=layer)
    step = builder.build([3], [3], [[1]])

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = layer(query, key, value, metadata=step)
        return out

    inputs = torch.randn(3, 32), torch.randn(3, 16), torch.randn(3, 16)
    traced = make_fx(attend, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)
    assert "vattn.attention" in traced.code
