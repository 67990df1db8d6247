"""What sentence-transformers keeps beside a checkpoint: pooling, linear layers after it, prompts, the longest text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from vattn.config.pooling import PoolingConfig
from vattn.errors import UnsupportedRequestError
from vattn.integrations.transformers.checkpoint import Checkpoint, read_json

_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_LAST = ("Pooling", "Dense", "Normalize")
_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid")


def read_pooling(folder: Path) -> tuple[PoolingConfig | None, nn.Sequential, int | None]:
    """Return how a folder says that embeddings are made.

    Returns:
        The pooling, `None` if the folder holds none; the linear layers after it, in fp32; and the longest text.

    Raises:
        ConfigError: files that cannot be read.
        UnsupportedRequestError: modules besides Transformer, Pooling, Dense and Normalize, or prompts left out of the
            mean.
    """
    linears = nn.Sequential()
    if (folder / "modules.json").is_file():
        listed = sorted(read_json(folder / "modules.json", list), key=lambda module: module.get("idx", 0))
        modules = [(str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))) for module in listed]
    else:
        modules = [("Pooling", "1_Pooling")] if (folder / "1_Pooling" / "config.json").is_file() else []
    modes: tuple[str, ...] = ()
    kinds = [kind for kind, _ in modules if kind != "Transformer"]
    if kinds and (kinds[0] != "Pooling" or set(kinds[1:-1]) - {"Dense"} or kinds[-1] not in _LAST):
        raise _unsupported(", ".join(kinds))
    for kind, path in modules:
        if kind == "Pooling":
            modes = _modes(read_json(folder / path / "config.json"))
        elif kind == "Dense":
            linears.append(_dense(folder / path))
    own, text = folder / "config_sentence_transformers.json", folder / "sentence_bert_config.json"
    prompts = read_json(own) if own.is_file() else {}
    settings = read_json(text) if text.is_file() else {}
    if not modes:
        return None, linears, None
    config = PoolingConfig(
        modes,
        kinds[-1] == "Normalize",
        dict(prompts.get("prompts") or {}),
        prompts.get("default_prompt_name"),
        bool(settings.get("do_lower_case")),
    )
    return config, linears, settings.get("max_seq_length")


def _modes(found: dict[str, Any]) -> tuple[str, ...]:
    if not found.get("include_prompt", True):
        raise _unsupported("Pooling with include_prompt=false")
    named = found.get("pooling_mode")
    if named is not None:
        return (named,) if isinstance(named, str) else tuple(named)
    unknown = [key for key, value in found.items() if key.startswith("pooling_mode_") and value and key not in _KEYS]
    if unknown:
        raise _unsupported(f"Pooling with {unknown[0]}")
    return tuple(mode for key, mode in _KEYS.items() if found.get(key))


def _dense(folder: Path) -> nn.Sequential:
    checkpoint = Checkpoint(folder)
    name = str(checkpoint.config.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise _unsupported(f"Dense with {name}")
    weight = checkpoint.tensor("linear.weight").float()
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias="linear.bias" in checkpoint)
    with torch.no_grad():
        linear.weight.copy_(weight)
        if linear.bias is not None:
            linear.bias.copy_(checkpoint.tensor("linear.bias"))
    return nn.Sequential(linear, getattr(nn, name)()).requires_grad_(False).eval()


def _unsupported(got: str) -> UnsupportedRequestError:
    return UnsupportedRequestError(
        f"a model of sentence-transformers with {got}",
        "Transformer, Pooling, any number of Dense, and Normalize",
        "load the folder's transformers model alone, and pool its hidden states yourself",
    )
