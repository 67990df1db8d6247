"""A Llama model on paged attention in one file: packed tokens in, logits of the rows asked for out.

Shapes: T packed tokens of all requests, B rows whose logits are wanted, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vattn.config import CacheConfig
from vattn.errors import DemoError, MissingPackageError
from vattn.layers import Attention, QuantConfig


@dataclass(frozen=True)
class LlamaConfig:
    """The numbers of a Hugging Face `config.json` that the model needs, in vattn's words."""

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
    """What every attention layer of the model is built with."""

    cache: CacheConfig = CacheConfig()
    quant: QuantConfig = QuantConfig()
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
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A Llama decoder over packed tokens; the step's metadata comes from `vattn.forward_context`."""

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


def read_checkpoint(folder: Path) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """Read `config.json` and every `*.safetensors` of a Hugging Face Llama folder; tensors keep HF's names.

    Raises:
        DemoError: a file is missing, damaged, or asks for what this model has not.
        MissingPackageError: safetensors is not installed.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise MissingPackageError(
            "safetensors is not installed", "safetensors >= 0.5", "pip install 'vattn[demo]'"
        ) from error
    config = read_config(folder / "config.json")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DemoError(f"no weights in {folder}", "one or more *.safetensors files", "restore model.safetensors")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise DemoError(f"{file} cannot be read ({error})", "a whole safetensors file", "fetch it again") from error
    return config, tensors


def read_config(file: Path) -> LlamaConfig:
    """Read a Llama `config.json`; raises DemoError for what is missing or not plain Llama."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        heads = raw["num_attention_heads"]
        fixed = {
            "model_type": (raw["model_type"], "llama"),
            "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
            "attention_bias": (raw.get("attention_bias", False), False),
            "mlp_bias": (raw.get("mlp_bias", False), False),
            "rope_type": (rope.get("rope_type", "default"), "default"),
        }
        config = LlamaConfig(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads", heads),
            head_size=raw.get("head_dim") or raw["hidden_size"] // heads,
            max_positions=raw["max_position_embeddings"],
            norm_eps=raw["rms_norm_eps"],
            rope_theta=rope.get("rope_theta") or raw.get("rope_theta", 10000.0),
            tied=raw.get("tie_word_embeddings", False),
        )
    except (OSError, UnicodeDecodeError) as error:
        raise DemoError(f"{file} cannot be read ({error})", "a Hugging Face Llama folder", "check --model") from error
    except (json.JSONDecodeError, AttributeError, TypeError) as error:
        raise DemoError(f"{file} is no JSON object ({error})", "a Hugging Face config.json", "restore it") from error
    except KeyError as error:
        raise DemoError(f"{file} has no {error}", "the keys of a LlamaConfig", "restore it") from error
    for name, (got, wanted) in fixed.items():
        if got != wanted:
            raise DemoError(f"{file} has {name} {got!r}", f"{wanted!r}", "use a plain Llama checkpoint")
    return config


def build_llama(
    config: LlamaConfig,
    tensors: Mapping[str, Tensor],
    options: AttentionOptions | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Llama:
    """Return a model with these weights (HF's names), ready for `vattn.allocate_kv_cache`.

    Raises:
        DemoError: a weight is missing, left over or of the wrong shape.
    """
    model = Llama(config, options)
    state = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    try:
        for i in range(config.num_layers):
            parts = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
            state[parts[0] + "qkv_proj.weight"] = torch.cat([state.pop(f"{parts[0]}{n}_proj.weight") for n in "qkv"])
            state[parts[1] + "gate_up_proj.weight"] = torch.cat(
                [state.pop(f"{parts[1]}{n}_proj.weight") for n in ("gate", "up")]
            )
        if config.tied:
            state.setdefault("lm_head.weight", state["embed_tokens.weight"])
        missing, unexpected = model.load_state_dict(state, strict=False)
    except (KeyError, RuntimeError) as error:
        raise DemoError(f"the weights do not fit config.json ({error})", "a Llama checkpoint", "restore it") from error
    missing = [name for name in missing if not name.endswith("_scale") and not name.endswith("scales_ready")]
    if missing or unexpected:
        raise DemoError(
            f"the weights lack {missing} and have {unexpected} left over", "a Llama checkpoint", "restore both files"
        )
    # The table of angles stays fp32: positions up to 2048 need more digits than bf16 has.
    rope = model.rope
    model = model.to(dtype=dtype)
    model.rope = rope
    return model.to(device=device).eval().requires_grad_(False)
