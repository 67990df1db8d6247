"""Decoder layers of the shape of Llama 3 8B with FP8 weights, activations, queries and cache, and random values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import vattn
from benchmarks.models.quantisers import E4M3, QUANTISERS, product

BLOCK = 16


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a decoder stack; the default is Llama 3 8B."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    ffn: int = 14336


class Linear(nn.Module):
    """`x @ weight.T` of FP8 weights, after quantising x; `activations` names how."""

    def __init__(self, inputs: int, outputs: int, activations: str) -> None:
        super().__init__()
        self.activations = activations
        weight = torch.empty(outputs, inputs, dtype=E4M3)
        for rows, codes in zip(torch.arange(outputs).split(4096), weight.split(4096), strict=True):
            codes.copy_(torch.randn(len(rows), inputs) * 16)
        self.register_buffer("weight", weight)
        scale = torch.full((outputs,) if activations == "token" else (), inputs**-0.5 / 16)
        self.register_buffer("weight_scale", scale.reshape(1, -1) if activations == "token" else scale)
        self.register_buffer("input_scale", torch.tensor(0.02))

    def forward(self, x: Tensor) -> Tensor:
        codes, scale = QUANTISERS[self.activations](x, self.input_scale)
        rows = codes.flatten(0, -2)
        if self.activations in ("static", "token"):
            scale = scale.flatten(0, -2) if scale.dim() else scale
            made = torch._scaled_mm(
                rows, self.weight.t(), scale, self.weight_scale, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        else:
            given = self.input_scale, self.weight, self.weight_scale
            made = product(self.activations, rows, scale.flatten(0, -2), *given)
        return made.unflatten(0, x.shape[:-1])


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE (NeoX order) to `[..., heads, D]`; `cos` and `sin` are `[..., 1, D / 2]`."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Layer(nn.Module):
    """A decoder layer on hidden states `[T, hidden]` or `[B, S, hidden]`.

    Args:
        output: how the attention output is quantised.
    """

    def __init__(self, index: int, sizes: Sizes, activations: str, output: str) -> None:
        super().__init__()
        self.widths = [sizes.heads * sizes.head_size, *[sizes.kv_heads * sizes.head_size] * 2]
        self.head_size = sizes.head_size
        self.norm, self.ffn_norm = RMSNorm(sizes.hidden), RMSNorm(sizes.hidden)
        self.qkv = Linear(sizes.hidden, sum(self.widths), activations)
        self.attn = vattn.Attention(
            sizes.heads, sizes.head_size, sizes.head_size**-0.5, sizes.kv_heads, prefix=f"layers.{index}.attn",
            cache_config=vattn.CacheConfig(block_size=BLOCK, cache_dtype="fp8"),
            quant_config=vattn.QuantConfig(k_scale=0.02, v_scale=0.02, query_format="fp8_e4m3", q_scale=0.02),
        )  # fmt: skip
        self.out = Linear(self.widths[0], sizes.hidden, output)
        self.gate_up = Linear(sizes.hidden, 2 * sizes.ffn, activations)
        self.down = Linear(sizes.ffn, sizes.hidden, activations)

    def forward(self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + x
        query, key, value = self.qkv(self.norm(residual)).split(self.widths, dim=-1)
        query, key = (rotate(part.unflatten(-1, (-1, self.head_size)), cos, sin) for part in (query, key))
        query, key = query.flatten(0, -3), key.flatten(0, -3)
        attended = self.attn(query, key, value.flatten(0, -2)).unflatten(0, x.shape[:-1])
        residual = residual + self.out(attended)
        gate, up = self.gate_up(self.ffn_norm(residual)).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up), residual


class Stack(nn.Module):
    """Decoder layers and a last norm; takes hidden states `[T, hidden]` or `[B, S, hidden]`, and their positions."""

    def __init__(self, sizes: Sizes, activations: str, output: str, max_positions: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(i, sizes, activations, output) for i in range(sizes.layers))
        self.norm = RMSNorm(sizes.hidden)
        half = sizes.head_size // 2
        frequencies = 500000.0 ** (-torch.arange(half).float() / half)
        angles = torch.arange(max_positions).float()[:, None] * frequencies
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor, positions: Tensor, run_layer: Callable[..., Any] = Layer.forward) -> Tensor:
        cos, sin = self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)
        residual = torch.zeros_like(x)
        for layer in self.layers:
            x, residual = run_layer(layer, x, residual, cos, sin)
        return self.norm(residual + x)
