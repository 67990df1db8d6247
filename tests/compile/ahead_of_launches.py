"""Kernels that processes compile, in a process where Triton compiles; a stand-in for its driver replaces a GPU."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from vattn.compilation import compile_ahead
from vattn.compilation.compile_ahead import compiling_ahead, is_busy, is_compiling_ahead, only_compiling
from vattn.kernels.hopper.prefill.schedule import prefill_plan_kernel
from vattn.kernels.triton.common.launching import launch

CUDA: Any = SimpleNamespace(type="cuda")

compiled: list[bool] = []
"""Of each kernel compiled or loaded in this process, whether it was on disk."""


def plan(rows: int) -> bool:
    """Launch the schedule of a step of two requests ahead, and return whether a process was to compile its kernel."""
    starts, lengths = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    arguments = {
        "query_start_loc": starts, "ordered": starts, "seq_lens": lengths,
        "schedule": torch.zeros(100, 8, dtype=torch.int32), "num_reqs": 2, "num_tokens": 12, "max_tiles": 5,
    }  # fmt: skip
    constants = {"WINDOW": 0, "ROWS": rows, "LEAST": 1, "KEYS": 16, "CHUNK": 16, "REQUESTS": 16, "num_warps": 1}
    compiled.clear()
    prefill_plan_kernel.device_caches.clear()
    with compiling_ahead(CUDA):
        with only_compiling():
            launch(prefill_plan_kernel, (1,), arguments, constants)
        return is_busy()


def main() -> None:
    """Print what happened, a line a case."""
    os.environ.pop("TRITON_CACHE_DIR", None)
    os.environ["TRITON_HOME"] = tempfile.mkdtemp()
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: compiled.append(cache_hit)
    driver = {"device": 0, "stream": lambda device: 0, "target": GPUTarget("cuda", 90, 32)}
    calls = {f"get_current_{name}": value if callable(value) else lambda v=value: v for name, value in driver.items()}
    triton.runtime.driver.set_active(SimpleNamespace(**calls))
    os.environ["PYTHONSAFEPATH"] = "1"
    sys.path.append(Path("no_string"))  # type: ignore[arg-type]
    print("empty cache:", plan(16), compiled)
    print("warm cache:", plan(16), compiled)
    compile_ahead.WORKER = Path("no_such_file.py")
    print("no worker:", plan(32), compiled)
    print("one folder:", os.environ["TRITON_CACHE_DIR"].startswith(os.environ["TRITON_HOME"]))
    try:
        with compiling_ahead(CUDA):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        print("interrupted:", is_compiling_ahead())
    sys.frozen = True  # type: ignore[attr-defined]
    with compiling_ahead(CUDA):
        print("frozen:", is_compiling_ahead())
    del sys.frozen  # type: ignore[attr-defined]
    with triton.AsyncCompileMode(None), compiling_ahead(CUDA):
        print("another mode:", is_compiling_ahead())
