"""Scales of the cache that come with a checkpoint: on the attention modules, or in the files it was loaded from."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from vattn.config.attention import CacheConfig
from vattn.errors import ScaleError
from vattn.integrations.transformers.fp8_checkpoint import SCHEMES, Checkpoint, cache_scales, folder_of
from vattn.layers import QuantConfig
from vattn.quantization.formats import KV_FORMATS, resolve_kv_cache_dtype

KINDS = ("k_scale", "v_scale")

FP8_SCHEMES = ("static", "fp8")
"""Words that describe scales of an FP8 cache: AutoFP8's, and ModelOpt's."""


def find_scales(model: nn.Module, names: list[str]) -> dict[str, dict[str, Any]]:
    """Return the scales that a checkpoint gives attention modules; empty for none.

    Args:
        model: of transformers.
        names: of its attention modules.

    Raises:
        ScaleError: of some layers alone, of unknown ones, promised by the configuration and missing, or made for a
            cache in another format.
    """
    folder = folder_of(model)
    if folder is not None:
        checkpoint = Checkpoint(folder)
        found = cache_scales(checkpoint, names)
        promised = next((name for name in SCHEMES if checkpoint.quantization.get(name)), None)
        scheme = None if promised is None else checkpoint.quantization[promised]
        if found and promised is not None:
            _refuse_others(f"{promised}={scheme!r:.120} in {folder}", scheme)
        if found or promised is None:
            return found or _on_modules(model, names)
        if not isinstance(scheme, dict) or not scheme.get("dynamic"):
            raise ScaleError(
                f"{folder}, whose configuration has {promised} and whose files have no k_scale and v_scale",
                "scales of keys and values in the files",
                "calibrate (vattn.calibrate) and pass calibration=, or pass quant_config=",
            )
    return _on_modules(model, names) if folder is None else {}


def _refuse_others(what: str, scheme: Any) -> None:
    """Refuse scales that were made for another cache than one of FP8: 4-bit codes have much smaller ones."""
    if isinstance(scheme, dict):
        kind = (scheme.get("type", "float"), scheme.get("num_bits", 8), scheme.get("symmetric", True))
        right = kind == ("float", 8, True)
    else:
        right = isinstance(scheme, str) and scheme.lower() in FP8_SCHEMES
    if not right:
        raise ScaleError(
            f"scales of the cache, with {what}",
            "scales of an FP8 cache without zero points",
            "calibrate (vattn.calibrate) and pass calibration=, or pass quant_config=",
        )


def _on_modules(model: nn.Module, names: list[str]) -> dict[str, dict[str, Any]]:
    modules = {name: model.get_submodule(name) for name in names}
    found: dict[str, dict[str, Any]] = {}
    for name, module in modules.items():
        scales = {kind: getattr(module, kind, None) for kind in KINDS}
        found[name] = {kind: x.detach().float().reshape(-1) for kind, x in scales.items() if isinstance(x, Tensor)}
    missing = [f"{name}.{kind}" for name in found for kind in KINDS if kind not in found[name]]
    present = any(found.values())
    if present and missing:
        raise ScaleError(
            f"scales of the cache on some attention modules, but no {', '.join(missing[:4])}",
            "k_scale and v_scale on all of them, or on none",
            "calibrate (vattn.calibrate) and pass calibration=, or pass quant_config=",
        )
    return found if present else {}


def checkpoint_configs(model: nn.Module, names: list[str], cache_config: CacheConfig | None) -> dict[str, QuantConfig]:
    """Return the scales of a checkpoint as configurations of layers, for a cache that has a use for them.

    Warns where there are scales that the cache has no use for.

    Raises:
        ScaleError: see `find_scales`; for caches that need scales alone.
    """
    dtype = "auto" if cache_config is None else cache_config.cache_dtype
    wants = dtype.startswith("fp8") and KV_FORMATS[resolve_kv_cache_dtype(dtype, torch.bfloat16)].quantised
    wants &= cache_config is None or not cache_config.calculate_kv_scales
    try:
        found = find_scales(model, names)
    except ScaleError:
        if wants:
            raise
        return {}
    if found and not wants:
        what, instead = f"a cache in {dtype!r}", "CacheConfig(cache_dtype='fp8')"
        if cache_config is not None and cache_config.calculate_kv_scales:
            what, instead = "a cache that calculates its own", "calculate_kv_scales=False"
        warnings.warn(
            f"the checkpoint has scales of an FP8 cache for {len(found)} layers, which {what} does not use; "
            f"{instead} does",
            stacklevel=4,
        )
        return {}
    return {name: QuantConfig(**scales) for name, scales in found.items()}
