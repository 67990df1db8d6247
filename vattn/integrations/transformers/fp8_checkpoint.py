"""FP8 checkpoints in a folder, read as they were written: codes and scales of linear layers, scales of the cache.

transformers dequantises such checkpoints where it has no kernel for them, and drops tensors that its modules have no
place for. The files hold everything: compressed-tensors' names (`weight_scale`, `input_scale`, `k_scale`) and those
of transformers' own FP8 format (`weight_scale_inv`, `activation_scale`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vattn.calibration.calibrate import linears_of, root_of
from vattn.calibration.fp8_saving import describe_linears
from vattn.calibration.quantise_linears import check_device, check_untouched, has_own_forward, replace
from vattn.errors import ConfigError, MissingPackageError, ScaleError, UnsupportedRequestError
from vattn.integrations.transformers.fp8_checkpoint_config import (
    CACHED,
    input_format,
    not_supported,
    refuse_converted,
    refuse_ignored,
)
from vattn.layers.fp8_linear import LINEAR_FORMATS, FP8Linear, check_scales

SCHEMES = ("kv_cache_scheme", "kv_cache_quant_algo")
"""Entries of a quantisation configuration that promise scales of the cache."""

SCALE_NAMES = ("weight_scale", "weight_scale_inv")
INPUT_NAMES = ("input_scale", "activation_scale")
CACHE_NAMES = {
    "k_scale": ("k_scale",),
    "v_scale": ("v_scale",),
    "kv_scale": ("k_scale", "v_scale"),
    "k_proj.output_scale": ("k_scale",),
    "v_proj.output_scale": ("v_scale",),
}
"""Names of the cache's scales in checkpoints, and which of ours each gives."""

OTHER_SCALES = ("q_scale", "q_proj.output_scale", "prob_scale", "prob_output_scale")
"""Names of scales of queries and of softmax weights."""

ZERO_POINTS = ("k_zero_point", "v_zero_point")

USED = {"weight", "bias", *SCALE_NAMES, *INPUT_NAMES, "k_scale", "v_scale", "kv_scale"}
"""Names of tensors beside an FP8 weight that linear layers or the cache take."""


class Checkpoint:
    """The tensors of a folder of safetensors, by name.

    Args:
        folder: with `config.json` and one or more `.safetensors`.

    Raises:
        ConfigError: no such folder, files that cannot be read. MissingPackageError: safetensors is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise MissingPackageError("a checkpoint without safetensors", "safetensors", "pip install") from error
        files = sorted(folder.glob("*.safetensors"))
        if not files or not (folder / "config.json").is_file():
            raise ConfigError(
                f"{folder}, which holds no checkpoint", "config.json and *.safetensors", "name the checkpoint's folder"
            )
        self.folder, self._open = folder, safe_open
        self._where: dict[str, Path] = {}
        self._twice: dict[str, Path] = {}
        for file in files:
            try:
                with safe_open(file, "pt") as opened:
                    names = list(opened.keys())
            except Exception as error:  # SafetensorError is no public name.
                raise ConfigError(f"{file}: {error}", "a file of safetensors", "fetch the checkpoint again") from error
            self._twice |= {name: file for name in names if name in self._where}
            self._where |= dict.fromkeys(names, file)
        self.config = _json(folder / "config.json")

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, on the CPU.

        Raises:
            ConfigError: two files have one of this name.
        """
        if name in self._twice:
            raise ConfigError(
                f"{name} in two files of {self.folder}, one of them {self._twice[name].name}",
                "every tensor once",
                "remove the files that do not belong to this checkpoint",
            )
        with self._open(self._where[name], "pt") as opened:
            return opened.get_tensor(name)

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor as safetensors writes it, such as `"F8_E4M3"`."""
        with self._open(self._where[name], "pt") as opened:
            return opened.get_slice(name).get_dtype()

    @property
    def quantization(self) -> dict[str, Any]:
        """What the configuration says about quantisation; empty for nothing.

        ModelOpt writes it into a file of its own.

        Raises:
            ConfigError: that is no dictionary, or cannot be read.
        """
        found = self.config.get("quantization_config") or self.config.get("compression_config") or {}
        other = self.folder / "hf_quant_config.json"
        if not found and other.is_file():
            found = _json(other).get("quantization") or {}
        if not isinstance(found, dict):
            raise ConfigError(f"quantization_config={found!r:.80}", "a dictionary", "check config.json")
        return found


def _json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file}: {error}", "an object of JSON", "fetch the checkpoint again") from error


def folder_of(model: nn.Module) -> Path | None:
    """Return the local folder that a model was loaded from, `None` if there is none with safetensors."""
    name = getattr(model, "name_or_path", "") or ""
    folder = Path(name)
    return folder if name and (folder / "config.json").is_file() and any(folder.glob("*.safetensors")) else None


# Scales of the cache


def cache_scales(checkpoint: Checkpoint, modules: list[str]) -> dict[str, dict[str, Tensor]]:
    """Return the scales of keys and values in a checkpoint, by name of the attention module.

    Args:
        checkpoint: where they are.
        modules: names of the attention modules.

    Returns:
        `{module: {"k_scale": fp32 [1 or heads], "v_scale": ...}}`; empty if the checkpoint has none.

    Raises:
        ScaleError: scales of some layers alone, of modules that do not attend, or of queries, which nothing would use;
            zero points.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name in checkpoint:
        suffix = next((s for s in (*CACHE_NAMES, *OTHER_SCALES, *ZERO_POINTS) if name.endswith("." + s)), None)
        if suffix is None or (suffix in ZERO_POINTS and not bool(checkpoint.tensor(name).float().any())):
            continue
        owner = _owner(name.removesuffix("." + suffix), modules)
        if owner is None:
            raise ScaleError(
                f"{name} in {checkpoint.folder}, a scale that no attention layer has",
                f"scales of {', '.join(modules[:3])} ...",
                "check that this checkpoint is the model's",
            )
        if suffix not in CACHE_NAMES:
            raise ScaleError(
                f"{name} in {checkpoint.folder}, which the cache has no use for",
                "scales of keys and values",
                "give quant_config or a calibration, which decide about the query too",
            )
        for ours in CACHE_NAMES[suffix]:
            found.setdefault(owner, {})[ours] = checkpoint.tensor(name).float().reshape(-1)
    missing = [f"{module}.{kind}" for module in modules for kind in ("k_scale", "v_scale")
               if kind not in found.get(module, {})]  # fmt: skip
    if found and missing:
        raise ScaleError(
            f"{checkpoint.folder} has scales of the cache, but no {', '.join(missing[:4])}",
            "scales of keys and values of every layer, or of none",
            "calibrate this model (vattn.calibrate) and pass calibration=",
        )
    return found


def _owner(name: str, modules: list[str]) -> str | None:
    """Return the attention module that a name is, or is in; names may lack or have what the whole model puts first."""
    while name:
        for module in modules:
            if module == name or module.endswith("." + name) or name.endswith("." + module):
                return module
        name = name.rpartition(".")[0]
    return None


def take_cache_hooks(model: nn.Module) -> list[tuple[nn.Module, int, Any]]:
    """Take away the hooks by which compressed-tensors rounds keys and values, and return them for `give_cache_hooks`.

    The paged cache stores keys and values in the format that was asked for; rounding them before would round twice.
    """
    taken = []
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if getattr(hook, "__name__", "") == "_kv_cache_attention_hook":
                taken.append((module, key, module._forward_pre_hooks.pop(key)))
    return taken


def give_cache_hooks(taken: list[tuple[nn.Module, int, Any]]) -> None:
    """Undo `take_cache_hooks`."""
    for module, key, hook in taken:
        module._forward_pre_hooks[key] = hook


# Linear layers


def load_fp8_linears(model: nn.Module, folder: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """Replace the linear layers that a checkpoint holds in FP8 by `vattn.layers.fp8_linear.FP8Linear`s, in place.

    Codes and scales are those of the files, whether transformers has dequantised them meanwhile or not. Needs neither
    the library that wrote the checkpoint nor a GPU.

    Args:
        model: of transformers, loaded from that checkpoint, before `enable`.
        folder: the checkpoint; default where the model was loaded from.

    Returns:
        By name of each linear layer of the model, its format, or "left: not FP8 in the checkpoint".

    Raises:
        ConfigError: no local folder, no FP8 weights in it, files that cannot be read or hold a tensor twice, other
            shapes or biases than the model's, a configuration that cannot be read or leaves out a layer which is in
            FP8, layers with hooks or a forward of their own, merged projections, `own_linears`.
            UnsupportedRequestError: weights, inputs or outputs quantised in another way, rotations, sparse weights,
            FP8 weights that are no linear layer's, such as those of merged experts. ScaleError: scales and other
            tensors that are missing or that nothing would use, scales in other shapes or dtypes, codes of NaN.
            DeviceError: a GPU without FP8.
            The model is as it was then.

    Example: see the guide, "Hugging Face models".
    """
    root = root_of(model)
    if folder is not None and not isinstance(folder, (str, os.PathLike)):
        raise ConfigError(f"folder={folder!r:.80}", "a path", "name the checkpoint's folder")
    path = folder_of(root) if folder is None else Path(folder)
    if path is None:
        name = getattr(root, "name_or_path", "")
        raise ConfigError(
            f"a {type(root).__name__} {f'from {name!r}' if name else 'that was loaded from nowhere'}, and no folder",
            "a model from a local folder of safetensors, or the folder",
            "pass folder=",
        )
    checkpoint, linears = Checkpoint(path), linears_of(root)
    check_untouched(linears)
    weights = [name for name in checkpoint if name.endswith(".weight") and checkpoint.dtype(name).startswith("F8_")]
    if not weights:
        raise ConfigError(f"{path} without FP8 weights", "FP8 weights", "vattn.quantise_linears(model, ...)")
    made: dict[str, FP8Linear] = {}
    for weight in weights:
        name = _owner_exactly(weight.removesuffix(".weight"), linears)
        if name is None:
            raise UnsupportedRequestError(
                f"{weight} in FP8, which is no linear layer of {type(root).__name__}",
                "FP8 weights of linear layers, which embeddings and merged experts are not",
                "let transformers dequantise this checkpoint, and use vattn.quantise_linears",
            )
        if name in made:
            raise UnsupportedRequestError(
                f"{weight} in FP8, one of several weights that {name} could have",
                "one weight for each linear layer",
                "name a checkpoint of this model alone",
            )
        refuse_ignored(checkpoint.quantization, (name, weight.removesuffix(".weight")))
        made[name] = _read(checkpoint, weight.removesuffix("weight"), name, linears[name])
    _check_all_used(checkpoint, set(weights))
    tables = [name for name, module in root.named_modules() if isinstance(module, nn.Embedding)]
    refuse_converted(checkpoint.quantization, tables, [name for name in linears if name not in made])
    for name, linear in made.items():
        replace(root, name, linear)
    describe_linears(root)
    return {name: made[name].format.name if name in made else "left: not FP8 in the checkpoint" for name in linears}


def _owner_exactly(name: str, linears: dict[str, nn.Linear]) -> str | None:
    same = [ours for ours in linears if ours == name or ours.endswith("." + name) or name.endswith("." + ours)]
    return same[0] if len(same) == 1 else None


def _read(checkpoint: Checkpoint, prefix: str, name: str, linear: nn.Linear) -> FP8Linear:
    _check_linear(checkpoint, prefix, name, linear)
    codes = checkpoint.tensor(prefix + "weight")
    scale, given = _scale(checkpoint, prefix, SCALE_NAMES), _scale(checkpoint, prefix, INPUT_NAMES)
    if scale is None:
        raise ScaleError(f"{prefix}weight in FP8 without a scale", " or ".join(SCALE_NAMES), "check the checkpoint")
    fmt = input_format(checkpoint.quantization, name)
    if (given is not None) != LINEAR_FORMATS[fmt].given:
        raise ScaleError(
            f"{prefix[:-1]} {'without' if given is None else 'with'} a scale of its input",
            f"{'one' if LINEAR_FORMATS[fmt].given else 'none'}, as the configuration asks for {fmt}",
            "check config.json",
        )
    device = linear.weight.device
    check_device(device, LINEAR_FORMATS[fmt])
    dtype = linear.bias.dtype if linear.bias is not None else None
    bias = checkpoint.tensor(prefix + "bias").to(device, dtype) if prefix + "bias" in checkpoint else None
    check_scales({prefix + "weight_scale": scale, prefix + "input_scale": given})
    if not LINEAR_FORMATS[fmt].blocks:
        rows = linear.out_features
        if scale.numel() != 1 and tuple(scale.shape) not in ((rows,), (rows, 1)):
            raise ScaleError(
                f"{scale.numel()} scales of {prefix}weight, of shape {tuple(scale.shape)}",
                f"1 or {rows}, of shape [{rows}] or [{rows}, 1]",
                "check the checkpoint",
            )
        scale = scale.reshape(-1)
        if LINEAR_FORMATS[fmt].rows:
            scale = scale.expand(codes.shape[0])
    codes = codes.to(device)
    if not codes.is_meta and bool((codes.view(torch.uint8) & 0x7F == 0x7F).any()):
        raise ScaleError(f"codes of NaN in {prefix}weight", "finite weights", "check the checkpoint")
    return FP8Linear(codes, scale.float().contiguous().to(device), fmt, given, bias)


def _check_linear(checkpoint: Checkpoint, prefix: str, name: str, linear: nn.Linear) -> None:
    """Refuse codes that the linear layer of this name cannot have."""
    codes = checkpoint.tensor(prefix + "weight")
    if codes.dtype is not torch.float8_e4m3fn:
        raise not_supported(f"weights in {codes.dtype}", name)
    if codes.shape != (linear.out_features, linear.in_features):
        raise ConfigError(f"{prefix}weight of {tuple(codes.shape)}", f"that of {name}", "check the checkpoint")
    if (prefix + "bias" in checkpoint) != (linear.bias is not None):
        raise ConfigError(
            f"{prefix}weight {'with' if linear.bias is None else 'without'} a bias",
            f"{'none' if linear.bias is None else 'one'}, as {name} has it",
            "check that this checkpoint is the model's",
        )
    hooks = {**linear._forward_hooks, **linear._forward_pre_hooks}
    if hooks or has_own_forward(linear):
        raise ConfigError(
            f"{name}, which has hooks or a forward of its own", "linear layers without", "remove them first"
        )


def _scale(checkpoint: Checkpoint, prefix: str, names: tuple[str, ...]) -> Tensor | None:
    found = [name for name in names if prefix + name in checkpoint]
    if len(found) > 1:
        raise ScaleError(f"{prefix}{found[0]} and {found[1]}", "one of them", "check the checkpoint")
    return checkpoint.tensor(prefix + found[0]) if found else None


def _check_all_used(checkpoint: Checkpoint, weights: set[str]) -> None:
    """Refuse scales of linear layers that are not in FP8, and what else belongs to one that is: smoothing, an order."""
    for name in checkpoint:
        prefix, _, last = name.rpartition(".")
        quantised = f"{prefix}.weight" in weights
        if last in (*SCALE_NAMES, *INPUT_NAMES) and not quantised:
            raise ScaleError(f"{name}, whose weight is not FP8", "scales of FP8 weights", "check the checkpoint")
        if not quantised or last in USED or (last == "output_scale" and prefix.endswith(CACHED)):
            continue
        if not (last.endswith("zero_point") and not bool(checkpoint.tensor(name).float().any())):
            raise ScaleError(
                f"{name}, which an FP8 linear layer has no use for",
                f"{', '.join(sorted(USED))}",
                "let transformers dequantise this checkpoint, and use vattn.quantise_linears",
            )
