"""What the GPU of a run can do at most: reading memory, and multiplying."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vattn.cli.bench.timing import Timer, interleave

GEMM = 8192
"""Side of the matrices."""

READ_BYTES = 2 << 30


def _read() -> Callable[[], Tensor]:
    from vattn.cli.bench.stream import read_all

    values = torch.zeros(READ_BYTES // 4, dtype=torch.int32, device="cuda")
    return lambda: read_all(values)


def _gemm(fp8: bool) -> Callable[[], Tensor]:
    a, b = (torch.randn(GEMM, GEMM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    if not fp8:
        return lambda: a @ b
    one = torch.ones((), device="cuda")
    codes, other = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    return lambda: torch._scaled_mm(codes, other, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def measure() -> dict[str, float | str]:
    """Return `hbm_tb_s`, `bf16_tflops` and `fp8_tflops`, each a number or, where it failed, the error."""
    found: dict[str, float | str] = {}
    kinds = {
        "hbm_tb_s": (_read, READ_BYTES / 1e6),
        "bf16_tflops": (lambda: _gemm(False), 2 * GEMM**3 / 1e6),
        "fp8_tflops": (lambda: _gemm(True), 2 * GEMM**3 / 1e6),
    }
    for name, (make, work) in kinds.items():
        try:
            microseconds = interleave({name: Timer([make()])})[name]
            found[name] = round(work / microseconds, 3)
        except Exception as error:  # without FP8 matrices, for example; the run continues
            found[name] = f"failed: {error!r}"[:200]
        torch.cuda.empty_cache()
    return found
