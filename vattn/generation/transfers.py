"""Copies of lists to the device and of results to the host, without waiting for the device."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from vattn.config.device import has_triton


def on_host(values: Sequence[int]) -> Tensor:
    """Return a list that is not empty as int64 on the host; several times faster than `torch.tensor`."""
    return torch.frombuffer(array("q", values), dtype=torch.int64)


def on_device(values: Sequence[int], device: torch.device) -> Tensor:
    """Return a list that is not empty as int64 on a device."""
    return to_device(on_host(values), device)


def floats_on_device(values: Sequence[float], device: torch.device) -> Tensor:
    """Return a list that is not empty as fp64 on a device."""
    return to_device(torch.frombuffer(array("d", values), dtype=torch.float64), device)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """Return a tensor on the host, which holds the values once the device has done what was launched before."""
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    return host


def has_kernels(logits: Tensor) -> bool:
    """Return whether kernels read these logits where they are."""
    known = logits.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return known and logits.is_cuda and logits.stride(1) == 1 and has_triton()
