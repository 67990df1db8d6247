"""What every launch made for Hopper checks first: the GPU, the dtype of the model, and what paged layers share."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any

import torch

from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo, Sizes, not_allowed
from vattn.config.features import requested_features
from vattn.quantization.formats import KV_FORMATS

CAPABILITY = (9, 0)
DTYPES = ("float16", "bfloat16")
HEAD_SIZES = Sizes(step=8, low=32, high=256)
"""Of paged attention, as all of it that follows."""

FEATURES = frozenset({"sliding_window", "logits_soft_cap", "sinks", "kv_scale_per_head", "lse", "hnd_layout"})
"""In every kernel made for Hopper."""


def refusals(device: DeviceInfo, config: Any, dtypes: Collection[str]) -> list[str]:
    """Return why a launch for Hopper and `dtypes` cannot run a layer on a device, empty if it can."""
    found = []
    if device.type != "cuda" or device.capability != CAPABILITY:
        found.append(f"{device} (made for sm_{CAPABILITY[0]}{CAPABILITY[1]})")
    return found + not_allowed(config, {"dtype": dtypes})


def layer_refusals(
    config: AttentionConfig, device: DeviceInfo, head_sizes: Sizes, block_sizes: Sizes, features: Collection[str] = ()
) -> list[str]:
    """Return why paged attention of a layer cannot run; `features`: those that a kernel has besides `FEATURES`."""
    found = refusals(device, config, DTYPES)
    row_bytes = config.head_size * KV_FORMATS[config.kv_cache_dtype].element_size
    if not KV_FORMATS[config.kv_cache_dtype].packed and row_bytes % 16:
        found.append(f"head_size {config.head_size} over {config.kv_cache_dtype} (runs heads of multiples of 16 bytes)")
    found += not_allowed(config, {"head_size": head_sizes, "block_size": block_sizes, "attn_type": ("decoder",)})
    return found + [
        f"{name} is not implemented" for name in sorted(requested_features(config) - FEATURES - {*features})
    ]


def missed_steps(missed: dict[str, list[str]]) -> list[str]:
    """Return a note for each kind of step that misses its kernel made for Hopper, of the reasons that it has."""
    return [
        f"{steps} run on the general kernel, not on Hopper's: {'; '.join(dict.fromkeys(reasons))}"
        for steps, reasons in missed.items()
        if reasons
    ]


def runs_where(refusals: Callable[[Any, DeviceInfo], list[str]]) -> Any:
    """Return a function of a layer's config and a device, cached: whether a kernel's `refusals` has no reason."""

    @lru_cache(maxsize=4096)
    def runs(config: Any, device: torch.device) -> bool:
        return not refusals(config, DeviceInfo.of(device))

    return runs


@lru_cache(maxsize=64)
def is_hopper(device: torch.device) -> bool:
    """Return whether tensors of a device lie on a Hopper GPU of this machine."""
    info = DeviceInfo.of(device)
    return info.type == "cuda" and info.capability == CAPABILITY
