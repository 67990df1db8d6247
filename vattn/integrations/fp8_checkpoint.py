"""FP8 checkpoints in a folder, read as they were written: codes and scales of linear layers, scales of the cache.

transformers dequantises such checkpoints where it has no kernel for them, and drops tensors that its modules have no
place for. The files hold everything: compressed-tensors' names (`weight_scale`, `input_scale`, `k_scale`) and those
of transformers' own FP8 format (`weight_scale_inv`, `activation_scale`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vattn.calibration import linears_of, root_of
from vattn.errors import ConfigError, MissingPackageError, ScaleError, UnsupportedRequestError
from vattn.fp8_linears import check_device, replace
from vattn.integrations.fp8_saving import describe_linears
from vattn.keywords import known_keywords
from vattn.layers.fp8_linear import BLOCK, LINEAR_FORMATS, FP8Linear

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


class Checkpoint:
    """The tensors of a folder of safetensors, by name.

    Args:
        folder: with `config.json` and one or more `.safetensors`.

    Raises:
        ConfigError: no such folder. MissingPackageError: safetensors is not installed.
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
        for file in files:
            with safe_open(file, "pt") as opened:
                self._where |= dict.fromkeys(opened.keys(), file)
        self.config = json.loads((folder / "config.json").read_text())

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, on the CPU."""
        with self._open(self._where[name], "pt") as opened:
            return opened.get_tensor(name)

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor as safetensors writes it, such as `"F8_E4M3"`."""
        with self._open(self._where[name], "pt") as opened:
            return opened.get_slice(name).get_dtype()

    @property
    def quantization(self) -> dict[str, Any]:
        """What the configuration says about quantisation; empty for nothing."""
        return self.config.get("quantization_config") or self.config.get("compression_config") or {}


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
        ScaleError: scales of some layers alone, of modules that do not attend, or of queries, which nothing would use.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name in checkpoint:
        suffix = next((s for s in (*CACHE_NAMES, "q_scale") if name.endswith("." + s)), None)
        if suffix is None:
            continue
        owner = _owner(name.removesuffix("." + suffix), modules)
        if owner is None:
            raise ScaleError(
                f"{name} in {checkpoint.folder}, a scale that no attention layer has",
                f"scales of {', '.join(modules[:3])} ...",
                "check that this checkpoint is the model's",
            )
        if suffix == "q_scale":
            raise ScaleError(
                f"{name} in {checkpoint.folder}, a scale of queries",
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


@known_keywords
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
        ConfigError: no local folder, no FP8 weights in it. UnsupportedRequestError: weights or inputs quantised in
            another way, FP8 weights that are no linear layer's, such as those of merged experts. ScaleError: scales
            that are missing or that nothing would use. DeviceError: a GPU without FP8. The model is as it was then.

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
    weights = [name for name in checkpoint if name.endswith(".weight") and checkpoint.dtype(name).startswith("F8_")]
    if not weights:
        raise ConfigError(f"{path} without FP8 weights", "FP8 weights", "vattn.quantise_linears(model, ...)")
    made: dict[str, FP8Linear] = {}
    for weight in weights:
        name = _owner_exactly(weight.removesuffix(".weight"), linears)
        if name is None:
            raise UnsupportedRequestError(
                f"{weight} in FP8, which is no linear layer of {type(root).__name__}",
                "FP8 weights of linear layers (transformers merges experts)",
                "let transformers dequantise this checkpoint, and use vattn.quantise_linears",
            )
        made[name] = _read(checkpoint, weight.removesuffix("weight"), name, linears[name])
    _check_all_used(checkpoint, weights)
    for name, linear in made.items():
        replace(root, name, linear)
    describe_linears(root)
    return {name: made[name].format.name if name in made else "left: not FP8 in the checkpoint" for name in linears}


def _owner_exactly(name: str, linears: dict[str, nn.Linear]) -> str | None:
    same = [ours for ours in linears if ours == name or ours.endswith("." + name) or name.endswith("." + ours)]
    return same[0] if len(same) == 1 else None


def _read(checkpoint: Checkpoint, prefix: str, name: str, linear: nn.Linear) -> FP8Linear:
    codes = checkpoint.tensor(prefix + "weight")
    parts = [part for part in (*SCALE_NAMES, *INPUT_NAMES) if prefix + part in checkpoint]
    found = {part: checkpoint.tensor(prefix + part) for part in parts}
    scale = next((found[part] for part in SCALE_NAMES if part in found), None)
    if scale is None:
        raise ScaleError(f"{prefix}weight in FP8 without a scale", " or ".join(SCALE_NAMES), "check the checkpoint")
    given = next((found[part] for part in INPUT_NAMES if part in found), None)
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
    if not LINEAR_FORMATS[fmt].blocks:
        scale = scale.reshape(-1)
        if LINEAR_FORMATS[fmt].rows:
            scale = scale.expand(codes.shape[0])
    if codes.shape != (linear.out_features, linear.in_features):
        raise ConfigError(f"{prefix}weight of {tuple(codes.shape)}", f"that of {name}", "check the checkpoint")
    return FP8Linear(codes.to(device), scale.float().contiguous().to(device), fmt, given, bias)


def input_format(quantization: dict[str, Any], name: str) -> str:
    """Return how a checkpoint's configuration wants the input of a linear layer quantised, as a name of ours.

    Raises:
        UnsupportedRequestError: in a way that FP8Linear does not.
    """
    method = quantization.get("quant_method")
    if method == "fp8":
        blocks, static = quantization.get("weight_block_size"), quantization.get("activation_scheme") == "static"
        if blocks is None:
            return "fp8_static" if static else "fp8_per_token"
        if list(blocks) == [BLOCK, BLOCK] and not static and quantization.get("scale_fmt", "float") == "float":
            return "fp8_group128"
        raise _other(f"blocks of {blocks}, {quantization.get('activation_scheme')} inputs", name)
    if method == "compressed-tensors":
        group = _group(quantization, name)
        weights, inputs = group.get("weights") or {}, group.get("input_activations")
        if inputs is None or (inputs.get("type"), inputs.get("num_bits")) != ("float", 8):
            raise _other("inputs that are not FP8", name)
        kind = (weights.get("strategy"), inputs.get("strategy"), bool(inputs.get("dynamic")))
        known = {
            ("tensor", "tensor", False): "fp8_static", ("channel", "tensor", False): "fp8_static",
            ("tensor", "tensor", True): "fp8_dynamic", ("channel", "tensor", True): "fp8_dynamic",
            ("tensor", "token", True): "fp8_per_token", ("channel", "token", True): "fp8_per_token",
            ("block", "group", True): "fp8_group128",
        }  # fmt: skip
        sizes = (weights.get("block_structure"), inputs.get("group_size"))
        if kind not in known or (kind[0] == "block" and sizes != ([BLOCK, BLOCK], BLOCK)):
            raise _other(f"weights by {kind[0]}, inputs by {kind[1]}, {'dynamic' if kind[2] else 'static'}", name)
        return known[kind]
    raise _other(f"quant_method={method!r}", name)


def _group(quantization: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the group of a compressed-tensors configuration that a linear layer belongs to."""
    for group in quantization.get("config_groups", {}).values():
        for target in group.get("targets", ()):
            pattern = target.removeprefix("re:")
            if target in ("Linear", name) or (target != pattern and re.match(pattern, name)):
                return group
    raise _other("no group of the configuration", name)


def _other(what: str, name: str) -> UnsupportedRequestError:
    return UnsupportedRequestError(
        f"{name}: {what}",
        "FP8 of weights and inputs: transformers' fp8, compressed-tensors' float-quantized",
        "let transformers dequantise this checkpoint, and use vattn.quantise_linears",
    )


def _check_all_used(checkpoint: Checkpoint, weights: list[str]) -> None:
    """Refuse scales of linear layers that are not in FP8: something else was quantised."""
    for name in checkpoint:
        prefix, _, last = name.rpartition(".")
        if last in (*SCALE_NAMES, *INPUT_NAMES) and f"{prefix}.weight" not in weights:
            raise ScaleError(f"{name}, whose weight is not FP8", "scales of FP8 weights", "check the checkpoint")
