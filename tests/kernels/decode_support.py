"""What the tests of the fast decode paths' Triton kernels share."""

from __future__ import annotations

from types import ModuleType

import pytest
import triton.language as tl
from triton import knobs

PACKED = [
    "int8_per_token_head",
    "fp8_per_token_head",
    "int4_per_token_head",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_4bit_nc_signed",
    "nvfp4",
]
"""KV formats that the fast decode path for packed formats runs."""

SHORT = ["turboquant_k3v4_nc", "turboquant_3bit_nc"]
"""Those of three bits, which it runs with heads of 128 alone."""


def interpret(monkeypatch: pytest.MonkeyPatch, launcher: ModuleType, *device_code: ModuleType) -> None:
    """Make a decode path run in Triton's interpreter, or skip the test.

    The interpreter knows no inline assembly, so that the plain lowering is taken; programmatic launches are nothing
    there. It has three multiprocessors.

    Args:
        launcher: the module whose `decode_constants` the launches take.
        device_code: modules whose module-level constants kernels read.
    """
    if not knobs.runtime.interpret:
        pytest.skip("needs Triton's interpreter")
    for module in device_code:
        for name, value in list(vars(module).items()):
            if isinstance(value, tl.constexpr):
                monkeypatch.setattr(module, name, value.value)
    for name in ("gdc_wait", "gdc_launch_dependents"):
        monkeypatch.setattr(tl.extra.cuda, name, lambda: None)
    constants = launcher.decode_constants
    monkeypatch.setattr(launcher, "decode_constants", lambda *a: {**constants(*a), "ASSEMBLY": False})
    monkeypatch.setattr("vattn.config.device.multiprocessors", lambda device: 3)
