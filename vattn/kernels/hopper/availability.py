"""What every launch made for Hopper checks first: the GPU, and the dtype of the model."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

import torch

from vattn.config.device import DeviceInfo

CAPABILITY = (9, 0)


def refusals(device: DeviceInfo, dtype: str, dtypes: Collection[str]) -> list[str]:
    """Return why a launch for Hopper and `dtypes` cannot run on a device in a dtype, empty if it can."""
    found = []
    if device.type != "cuda" or device.capability != CAPABILITY:
        found.append(f"{device} (made for sm_{CAPABILITY[0]}{CAPABILITY[1]})")
    if dtype not in dtypes:
        found.append(f"dtype {dtype} (runs {', '.join(dtypes)})")
    return found


@lru_cache(maxsize=64)
def is_hopper(device: torch.device) -> bool:
    """Return whether tensors of a device lie on a Hopper GPU of this machine."""
    info = DeviceInfo.of(device)
    return info.type == "cuda" and info.capability == CAPABILITY
