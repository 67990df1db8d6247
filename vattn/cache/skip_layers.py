"""Which layers `CacheConfig.kv_cache_dtype_skip_layers` means, and what it names that is not there."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from vattn.errors import ConfigError

WINDOW = "sliding_window"
"""The entry for every layer with a window."""


def layer_index(prefix: str) -> int | None:
    """Return the first whole number between the dots of a prefix, `"model.layers.3.self_attn"` -> 3."""
    return next((int(part) for part in prefix.split(".") if part.isdigit()), None)


def skip_names(prefix: str, window: int | None) -> frozenset[str]:
    """Return the entries that mean a layer, `{"3", "sliding_window"}` for number 3 with a window."""
    index = layer_index(prefix)
    names = set() if index is None else {str(index)}
    return frozenset(names if window is None else names | {WINDOW})


def check_skip_layers(layers: Mapping[str, object], *, whole: bool) -> None:
    """Refuse entries that mean none of the layers, or warn of them where other ranks may have the layers.

    Args:
        layers: by name; those without `cache_config` and `skip_names` do not count, nor do unquantised caches.
        whole: these are all layers of the model, not perhaps those of one pipeline rank.

    Raises:
        ConfigError: an entry means no layer of a whole model, or is a number where no layer has one.
    """
    found = [
        (config.kv_cache_dtype_skip_layers, names)
        for layer in layers.values()
        if (config := getattr(layer, "cache_config", None)) is not None
        and (names := getattr(layer, "skip_names", None)) is not None
        and config.cache_dtype != "auto"
    ]
    asked = dict.fromkeys(entry for entries, _ in found for entry in entries)
    unmatched = [entry for entry in asked if not any(entry in entries and entry in names for entries, names in found)]
    if not unmatched:
        return
    there = frozenset[str]().union(*(names for _, names in found))
    numbers = sorted(int(name) for name in there if name != WINDOW)
    got = f"kv_cache_dtype_skip_layers entries {', '.join(map(repr, unmatched))}, which match no layer"
    allowed = f"the layers' numbers {', '.join(map(str, numbers))}" if numbers else "no number: no prefix has one"
    allowed += f", and {WINDOW!r}" if WINDOW in there else f"; no {WINDOW!r}: no layer has a window"
    fix = "leave them out" if numbers else "number the layers in their prefix, such as 'layers.0', or leave them out"
    if whole or (not numbers and any(entry != WINDOW for entry in unmatched)):
        raise ConfigError(got, allowed, fix)
    # Ranks of a pipeline have one config and layers of their own each.
    warnings.warn(f"{got}. Here: {allowed}. Right only if another rank has them.", stacklevel=4)
