"""Devices, sizes that a kernel takes, and installed packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from vattn.errors import ConfigError, DeviceError


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


_ARCHITECTURES = tuple(
    f"sm_{number}"
    for number in (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121)
)
"""NVIDIA's architectures, those that are too old included: a request can be explained for any of them."""


@dataclass(frozen=True)
class DeviceInfo:
    """The device of a request.

    Attributes:
        type: `"cpu"` or `"cuda"`.
        capability: compute capability of a CUDA device, `(0, 0)` otherwise.
        name: for messages.
        triton_interpreter: whether Triton kernels run on CPU tensors in this process (`TRITON_INTERPRET=1`).
    """

    type: str
    capability: tuple[int, int] = (0, 0)
    name: str = "CPU"
    triton_interpreter: bool = False

    @staticmethod
    def of(device: torch.device | str) -> DeviceInfo:
        """Describe a torch device.

        Raises:
            DeviceError: torch does not know the device, or this machine does not have it.
        """
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise DeviceError(f"device {device!r}", "a torch device such as 'cpu' or 'cuda:0'", "correct it") from error
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise DeviceError(
                f"device {str(device)!r} on a machine with {torch.cuda.device_count()} usable GPUs",
                "a device of this machine",
                "run `python -m vattn doctor`; for another GPU, vattn.explain(request, 'sm_90')",
            )
        interpreter = os.environ.get("TRITON_INTERPRET", "0") == "1"
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            return DeviceInfo("cuda", capability, torch.cuda.get_device_name(device), interpreter)
        return DeviceInfo(device.type, name=device.type.upper(), triton_interpreter=interpreter)

    @staticmethod
    def anywhere(device: torch.device | str) -> DeviceInfo:
        """Describe a torch device, or a GPU of another machine by its architecture, such as `"sm_90"`.

        Raises:
            DeviceError: neither; see `of`.
        """
        if not isinstance(device, str) or not device.startswith("sm"):
            return DeviceInfo.of(device)
        if device not in _ARCHITECTURES:
            raise DeviceError(f"device {device!r}", f"NVIDIA's architectures: {', '.join(_ARCHITECTURES)}", "sm_90")
        return DeviceInfo("cuda", (int(device[3:-1]), int(device[-1])), "GPU")

    def __str__(self) -> str:
        if self.type != "cuda":
            return self.name
        return f"{self.name} (sm_{self.capability[0]}{self.capability[1]})"


@dataclass(frozen=True)
class Sizes:
    """A set of allowed sizes: multiples of `step` from `low` to `high` and those `besides`; or the listed `values`."""

    step: int = 8
    low: int = 8
    high: int = 512
    values: tuple[int, ...] = ()
    besides: tuple[int, ...] = ()

    def __contains__(self, size: int) -> bool:
        if self.values:
            return size in self.values
        return size in self.besides or (self.low <= size <= self.high and size % self.step == 0)

    def __iter__(self) -> Iterator[int]:
        first = -(-self.low // self.step) * self.step
        return iter(self.values or (*self.besides, *range(first, self.high + 1, self.step)))

    def __str__(self) -> str:
        if self.values:
            return ", ".join(map(str, self.values))
        steps = "" if self.step == 1 else f"multiples of {self.step} "
        found = f"{steps}from {self.low} to {self.high}"
        return f"{', '.join(map(str, self.besides))} and {found}" if self.besides else found


BLOCK_SIZES = Sizes(8, 8, 2048, besides=(1, 2, 4))
"""Tokens that a block of a cache may hold; a backend takes all of them or fewer."""


def not_allowed(config: Any, allowed: Mapping[str, Collection[Any] | Sizes]) -> list[str]:
    """Return a reason for every field of a request with a value that is not allowed."""

    def text(of: Collection[Any] | Sizes) -> str:
        return str(of) if isinstance(of, Sizes) else ", ".join(of)

    values = {name: getattr(config, name) for name in allowed}
    return [f"{name} {values[name]} (runs {text(of)})" for name, of in allowed.items() if values[name] not in of]


def parse_version(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, `"2.11.0+cu130"` -> `(2, 11, 0)`."""
    numbers = re.match(r"(\d+(\.\d+)*)?", text)
    return tuple(map(int, numbers[0].split("."))) if numbers and numbers[0] else ()


def check_default_device() -> None:
    """Refuse a default device besides the CPU: what a step says to the host is made without naming a device.

    Raises:
        ConfigError: `torch.set_default_device`, or a `with torch.device(...)` around the call, names another.
    """
    device = torch.get_default_device()
    if device.type != "cpu":
        raise ConfigError(
            f"torch's default device {str(device)!r}",
            "'cpu', once the model is loaded",
            "torch.set_default_device('cpu'); models and caches stay where they are",
        )
