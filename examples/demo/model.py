"""A Llama model on paged attention in one file: packed tokens in, logits of the requested rows out.

Shapes: T packed tokens of all requests, B rows with logits, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vattn.config.attention import CacheConfig
from vattn.layers import Attention, QuantConfig


@dataclass(frozen=True)
class LlamaConfig:
    """The numbers that a Llama model is built from, in vattn's words."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    tied: bool


@dataclass(frozen=True)
class AttentionOptions:
    """What every attention layer of the model is built with; `None` is the layer's own default."""

    cache: CacheConfig | None = None
    quant: QuantConfig | None = None
    backend: str | None = None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + D/2) of `x [T, heads, D]` by the angles of `cos`, `sin` (fp32 `[T, 1, D/2]`)."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class SelfAttention(nn.Module):
    """Project, rotate, attend through the paged cache, project back."""

    def __init__(self, config: LlamaConfig, options: AttentionOptions, prefix: str) -> None:
        super().__init__()
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
        self.head_size = size
        self.widths = [heads * size, kv_heads * size, kv_heads * size]
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.widths), bias=False)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=False)
        self.attn = Attention(
            heads,
            size,
            size**-0.5,
            num_kv_heads=kv_heads,
            cache_config=options.cache,
            quant_config=options.quant,
            attn_backend=options.backend,
            prefix=prefix,
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend from `x [T, hidden_size]`; cos and sin as in `rotate`."""
        query, key, value = self.qkv_proj(x).split(self.widths, dim=-1)
        query = rotate(query.unflatten(-1, (-1, self.head_size)), cos, sin)
        key = rotate(key.unflatten(-1, (-1, self.head_size)), cos, sin)
        return self.o_proj(self.attn(query, key, value))


class MLP(nn.Module):
    """The gated feed-forward part: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[T, hidden_size]` to the same shape."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """One layer: attention and feed-forward, each normalised before and added back."""

    def __init__(self, config: LlamaConfig, options: AttentionOptions, prefix: str) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = SelfAttention(config, options, f"{prefix}.self_attn")
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return `x [T, hidden_size]` after this layer."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A Llama decoder over packed tokens; the step's metadata comes from `vattn.forward_context`."""

    rope: Tensor
    """fp32 `[2, max_positions, head_size / 2]`: cosines and sines."""

    def __init__(self, config: LlamaConfig, options: AttentionOptions | None = None) -> None:
        super().__init__()
        self.config = config
        options = options or AttentionOptions()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, options, f"layers.{i}") for i in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.embed_tokens.weight
        pairs = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
        angles = torch.outer(torch.arange(config.max_positions).float(), config.rope_theta**-pairs)
        self.register_buffer("rope", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor | None = None) -> Tensor:
        """Return fp32 logits.

        Args:
            input_ids, positions: int64 `[T]`; padding rows may hold any valid id and position.
            logits_indices: int64 `[B]`, the rows that go through the head; `None`: all of them.

        Returns:
            `[B, vocab_size]`, or `[T, vocab_size]`.
        """
        x = self.embed_tokens(input_ids)
        cos, sin = self.rope[:, positions].unsqueeze(2).unbind()
        for layer in self.layers:
            x = layer(x, cos, sin)
        if logits_indices is not None:
            x = x[logits_indices]
        return self.lm_head(self.norm(x)).float()
