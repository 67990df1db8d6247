"""Kernels that processes compile while this one goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import vattn
from tests.repo.test_packaging import run_python
from vattn.compilation.compile_ahead import compiling_ahead, is_compiling_ahead
from vattn.generation.capture import GraphSizes, steps_ahead

KERNELS = """
    hopper.prefill.kernel hopper.prefill.schedule hopper.prefill.split_schedule hopper.decode.gluon_kernel
    hopper.decode.triton_kernel hopper.decode.cluster_kernel hopper.decode.schedule hopper.linear.kernel
    triton.attention.kernel triton.attention.reduce triton.cache.update
""".split()
"""Files of kernels that take long to compile."""


def test_processes_compile_and_what_they_do_not_is_compiled_here() -> None:
    pytest.importorskip("triton")
    code = "from tests.compile.ahead_of_launches import main; main()"
    assert run_python(code, TRITON_INTERPRET="0").splitlines() == [
        "empty cache: True [True]",
        "warm cache: False [True]",
        "no worker: True [False]",
        "one folder: True",
        "interrupted: False",
        "frozen: False",
        "another mode: False",
    ]


def test_without_a_gpu_nothing_is_compiled_ahead() -> None:
    with compiling_ahead(torch.device("cpu")):
        assert not is_compiling_ahead()


def test_processes_import_kernels_without_torch() -> None:
    pytest.importorskip("triton")
    run_python(f"""
import importlib, sys, types
package = types.ModuleType("vattn")
package.__path__ = [{str(Path(vattn.__file__).parent)!r}]
sys.modules.update({{"vattn": package, "torch": None}})
for name in {KERNELS!r}:
    importlib.import_module(f"vattn.kernels.{{name}}")
""")


def test_steps_to_come_are_the_captured_ones_and_longer_prompts_that_requests_can_have() -> None:
    sizes = GraphSizes([1, 3], 2, [7, 20], 3)
    assert sorted(steps_ahead(sizes, 40, 16)) == [
        (1, 1), (1, 3), (2, 21), (3, 3), (3, 7), (3, 9), (3, 20), (3, 21), (3, 40)
    ]  # fmt: skip
