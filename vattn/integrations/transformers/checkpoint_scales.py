"""Scales of the cache that come with a checkpoint: in the files it was loaded from, or on the attention modules."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from vattn.config.attention import CacheConfig
from vattn.errors import ScaleError
from vattn.integrations.transformers.checkpoint import Checkpoint, folder_of
from vattn.layers import QuantConfig
from vattn.quantization.formats import KV_FORMATS, resolve_kv_cache_dtype

Scales = dict[str, dict[str, Any]]
"""`{attention module: {"k_scale": fp32 [1 or heads], "v_scale": ...}}`; empty if there are none."""

NAMES = {
    "k_scale": ("k_scale",),
    "v_scale": ("v_scale",),
    "kv_scale": ("k_scale", "v_scale"),
    "k_proj.output_scale": ("k_scale",),
    "v_proj.output_scale": ("v_scale",),
}
"""Names of the cache's scales in checkpoints, and the scales that each gives."""

UNUSED = ("q_scale", "q_proj.output_scale", "prob_scale", "prob_output_scale", "k_zero_point", "v_zero_point")
"""Names of scales of queries and of softmax weights, and zero points: zero points of zero are fine."""

FIX = "calibrate (vattn.calibrate) and pass calibration=, or pass quant_config="


def checkpoint_configs(model: nn.Module, names: list[str], cache_config: CacheConfig | None) -> dict[str, QuantConfig]:
    """Return the scales of a checkpoint as configurations of layers, if the cache uses them; else warn.

    Args:
        model: of transformers.
        names: of its attention modules.
        cache_config: of the layers.

    Raises:
        ScaleError: see `find_scales`; only for a cache that uses scales.
    """
    dtype = "auto" if cache_config is None else cache_config.cache_dtype
    calculates = cache_config is not None and cache_config.calculate_kv_scales
    wants = dtype.startswith("fp8") and KV_FORMATS[resolve_kv_cache_dtype(dtype, torch.bfloat16)].quantised
    try:
        found = find_scales(model, names)
    except ScaleError:
        if wants and not calculates:
            raise
        return {}
    if wants and not calculates:
        return {name: QuantConfig(**scales) for name, scales in found.items()}
    if found:
        what, instead = f"a cache in {dtype!r}", "CacheConfig(cache_dtype='fp8')"
        if calculates:
            what, instead = "a cache that calculates its own", "calculate_kv_scales=False"
        warnings.warn(
            f"the checkpoint has scales of an FP8 cache for {len(found)} layers, which {what} does not use; "
            f"{instead} does",
            stacklevel=3,
        )
    return {}


def find_scales(model: nn.Module, names: list[str]) -> Scales:
    """Return the scales that a checkpoint gives attention modules.

    Raises:
        ScaleError: scales of some layers only, of unknown layers, missing although the configuration promises them, or
            made for a cache in another format.
    """
    folder = folder_of(model)
    if folder is None:
        return _on_modules(model, names)
    checkpoint = Checkpoint(folder)
    found, quantization = _in_files(checkpoint, names), checkpoint.quantization
    key = next((key for key in ("kv_cache_scheme", "kv_cache_quant_algo") if quantization.get(key)), None)
    if key is None:
        return found or _on_modules(model, names)
    scheme = quantization[key]
    if found and not _is_fp8(scheme):
        raise ScaleError(
            f"scales of the cache, with {key}={scheme!r:.120} in {folder}",
            "scales of an FP8 cache without zero points",
            FIX,
        )
    if not found and not (isinstance(scheme, dict) and scheme.get("dynamic")):
        raise ScaleError(
            f"{folder} with {key} in its configuration, and no k_scale and v_scale in its files",
            "scales of keys and values in the files",
            FIX,
        )
    return found


def _is_fp8(scheme: Any) -> bool:
    """Return whether a cache scheme is FP8: scales of 4-bit codes are much smaller."""
    if isinstance(scheme, dict):
        kind = (scheme.get("type", "float"), scheme.get("num_bits", 8), scheme.get("symmetric", True))
        return kind == ("float", 8, True)
    # AutoFP8 writes "static", ModelOpt "FP8".
    return isinstance(scheme, str) and scheme.lower() in ("static", "fp8")


def _on_modules(model: nn.Module, names: list[str]) -> Scales:
    found: Scales = {}
    for name in names:
        module = model.get_submodule(name)
        for kind in ("k_scale", "v_scale"):
            scale = getattr(module, kind, None)
            if isinstance(scale, Tensor):
                found.setdefault(name, {})[kind] = scale.detach().float().reshape(-1)
    return _complete(found, names, type(model).__name__)


def _in_files(checkpoint: Checkpoint, modules: list[str]) -> Scales:
    found: Scales = {}
    for name in checkpoint:
        suffix = next((s for s in (*NAMES, *UNUSED) if name.endswith("." + s)), None)
        if suffix is None or (suffix.endswith("zero_point") and not bool(checkpoint.tensor(name).float().any())):
            continue
        owner = _owner(name.removesuffix("." + suffix), modules)
        if owner is None:
            raise ScaleError(
                f"{name} in {checkpoint.folder}, a scale that no attention layer has",
                f"scales of {', '.join(modules[:3])} ...",
                "check that this checkpoint is the model's",
            )
        if suffix in UNUSED:
            raise ScaleError(
                f"{name} in {checkpoint.folder}, which the cache does not use",
                "scales of keys and values",
                "give quant_config or a calibration, which decide about the query too",
            )
        for kind in NAMES[suffix]:
            found.setdefault(owner, {})[kind] = checkpoint.tensor(name).float().reshape(-1)
    return _complete(found, modules, str(checkpoint.folder))


def _complete(found: Scales, modules: list[str], where: str) -> Scales:
    """Return scales of both kinds for every module, or none at all."""
    kinds = ("k_scale", "v_scale")
    missing = [f"{name}.{kind}" for name in modules for kind in kinds if kind not in found.get(name, {})]
    if found and missing:
        raise ScaleError(
            f"{where} has scales of the cache, but no {', '.join(missing[:4])}",
            "scales of keys and values of every layer, or of none",
            FIX,
        )
    return found


def _owner(name: str, modules: list[str]) -> str | None:
    """Return the attention module that a name is or lies in; either name may have a prefix that the other lacks."""
    while name:
        for module in modules:
            if module == name or module.endswith("." + name) or name.endswith("." + module):
                return module
        name = name.rpartition(".")[0]
    return None


def remove_cache_hooks(model: nn.Module) -> list[tuple[nn.Module, int, Any]]:
    """Remove the hooks by which compressed-tensors rounds keys and values; return them for `restore_cache_hooks`.

    The paged cache stores keys and values in its own format; rounding them before would round twice.
    """
    removed = []
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if getattr(hook, "__name__", "") == "_kv_cache_attention_hook":
                removed.append((module, key, module._forward_pre_hooks.pop(key)))
    return removed


def restore_cache_hooks(removed: list[tuple[nn.Module, int, Any]]) -> None:
    """Undo `remove_cache_hooks`."""
    for module, key, hook in removed:
        module._forward_pre_hooks[key] = hook
