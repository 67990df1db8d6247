"""Read a Hugging Face Llama folder, plant outliers in its weights, and build the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from vattn.errors import ConfigError, MissingPackageError

from .model import AttentionOptions, Llama, LlamaConfig


def read_checkpoint(folder: Path) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """Read `config.json` and every `*.safetensors` of a Hugging Face Llama folder; tensors keep HF's names.

    Raises:
        ConfigError: a file is missing or damaged, or describes another architecture.
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
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} cannot be read ({error})", "a safetensors file", "fetch it again") from error
    return config, tensors


def read_config(file: Path) -> LlamaConfig:
    """Read a Llama `config.json`; raises ConfigError for what is missing or not plain Llama."""
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
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{file} cannot be read ({error!r})", "config.json of a Hugging Face Llama folder", "check --model"
        ) from error
    for name, (got, wanted) in fixed.items():
        if got != wanted:
            raise ConfigError(f"{file} has {name} {got!r}", f"{wanted!r}", "use a plain Llama checkpoint")
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
        ConfigError: a weight is missing, left over or of the wrong shape.
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
        # Scales of the cache are no weights.
        scales = {k: v for k, v in model.state_dict().items() if k.endswith(("_scale", "scales_ready"))}
        model.load_state_dict(scales | state)
    except (KeyError, RuntimeError) as error:
        raise ConfigError(
            f"the weights do not fit config.json ({error})", "a Llama checkpoint", "restore it"
        ) from error
    # The table of angles stays fp32: positions up to 2048 need more digits than bf16 has.
    rope = model.rope
    model = model.to(dtype=dtype)
    model.rope = rope
    return model.to(device=device).eval().requires_grad_(False)
