"""The fast decode path's kernels compile for Hopper. In a process of its own, as it turns the interpreter off."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_quarter_of_the_kernels() -> None:
    command = [sys.executable, "-m", "tools.compile_kernels.decode"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env={**os.environ, "VATTN_FUZZ_SEED": "3"}
    )
    assert done.returncode == 0 and ", 0 problems" in done.stdout, done.stdout + done.stderr
