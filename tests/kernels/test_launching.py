"""Launches that find their compiled kernel without Triton's own search."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from tests.repo.test_packaging import run_python
from vattn.kernels.triton.common import launching


class Kernel:
    """A kernel that counts compilations, and records what its compiled forms are launched with."""

    def __init__(self) -> None:
        self.compilations, self.launched = 0, []
        self.signature = inspect.signature(lambda query, SIZE, count, scale=2.0: None)
        self.arg_names = list(self.signature.parameters)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._compile

    def _compile(self, **given: Any) -> Any:
        self.compilations += 1
        return Compiled(self)


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *values: self._kernel.launched.append((grid, values))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(launching, "JITFunction", Kernel)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Kernel()


def test_a_second_launch_passes_its_own_arguments_in_the_order_of_the_signature(kernel: Kernel) -> None:
    first, second = torch.zeros(4), torch.ones(4)
    launching.launch(kernel, (3,), {"count": 5, "query": first}, {"SIZE": 8, "num_warps": 4})
    launching.launch(kernel, (7, 2), {"count": 9, "query": second}, {"SIZE": 8, "num_warps": 4})
    assert kernel.compilations == 1
    assert kernel.launched == [((7, 2, 1), (second, 8, 9, 2.0))]


@pytest.mark.parametrize(
    ("arguments", "constants"),
    [
        ({"query": torch.zeros(4, dtype=torch.bfloat16), "count": 5}, {"SIZE": 8}),
        ({"query": torch.zeros(5)[1:], "count": 5}, {"SIZE": 8}),
        ({"query": torch.zeros(4), "count": 1}, {"SIZE": 8}),
        ({"query": torch.zeros(4), "count": 16}, {"SIZE": 8}),
        ({"query": torch.zeros(4), "count": 1 << 40}, {"SIZE": 8}),
        ({"query": None, "count": 5}, {"SIZE": 8}),
        ({"query": torch.zeros(4), "count": 5}, {"SIZE": 9}),
        ({"query": torch.zeros(4), "count": 5}, {"SIZE": 8, "num_warps": 8}),
    ],
)
def test_what_a_kernel_is_compiled_for_compiles_it_again(
    arguments: dict[str, Any], constants: dict[str, Any], kernel: Kernel
) -> None:
    launching.launch(kernel, (1,), {"query": torch.zeros(4), "count": 5}, {"SIZE": 8})
    launching.launch(kernel, (1,), arguments, constants)
    assert kernel.compilations == 2 and not kernel.launched


RECORDED = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

launches = []

class Driver:
    class launcher_cls:
        def __init__(self, *source):
            pass
        def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *values):
            launches.append(((x, y, z), values))
    class utils:
        load_binary = staticmethod(lambda *kernel: (1, 2, 0, 0, 1024))
        get_device_properties = staticmethod(lambda device: {"max_shared_mem": 232448})
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_active_torch_device = lambda self: torch.device("cpu")

driver.set_active(Driver())
torch.cuda.current_device = lambda: 0
from vattn.config import device as devices
devices.multiprocessors = lambda device: 132
import vattn
from vattn.kernels.hopper.decode import launch as decode
from vattn.kernels.triton.attention import launch as general
from vattn.kernels.triton.common import launching
from vattn.ops.arguments import AttentionArgs, CacheUpdateArgs

config = vattn.AttentionConfig(32, 8, 128, 128, 0.1, "bfloat16", "bfloat16", kv_cache_layout="HND")
rows = 20

def step():
    key, value = torch.zeros(6, 8, 16, 256, dtype=torch.bfloat16).transpose(1, 2).split(128, -1)
    starts, lengths = torch.arange(rows + 1, dtype=torch.int32), torch.full((rows,), 30, dtype=torch.int32)
    table, query = torch.zeros(rows, 128, dtype=torch.int32), torch.zeros(rows, 32, 128, dtype=torch.bfloat16)
    scratch = torch.zeros(1 << 26, dtype=torch.uint8)
    shape = decode.plan_shape(config, rows, rows, query.device)
    none = [None] * 13
    plan = [torch.zeros(shape, dtype=torch.int32)]
    args = AttentionArgs(query, key, value, starts, lengths, table, query.clone(), *none, plan, scratch, "")
    slots = torch.zeros(rows, dtype=torch.int64)
    return args, CacheUpdateArgs(query[:, :8], query[:, 8:16], key, value, slots, None, None, "")

def run(args, update):
    launches.clear()
    decode.decode(args, config)
    general.update_kv_cache(update, config)
    return list(launches)

def same(one, two):
    if isinstance(one, torch.Tensor):
        return one.data_ptr() == two.data_ptr() and one.dtype == two.dtype
    if hasattr(one, "block_shape"):
        names = set(vars(one)) - {"base"}
        return same(one.base, two.base) and all(getattr(one, name) == getattr(two, name) for name in names)
    return type(one) is type(two) and one == two

run(*step())
known = len(launching._compiled)
calls = step()
again = run(*calls)
assert len(launching._compiled) == known == 3
first = run(*calls) if launching._compiled.clear() is None else []
assert len(again) == len(first) == 3
for (grid, values), (other_grid, others) in zip(again, first):
    assert grid == other_grid and len(values) == len(others) and all(map(same, values, others))
print("equal")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's driver for the GPU launches")
def test_kernels_get_what_triton_would_pass_them() -> None:
    assert run_python(RECORDED, TRITON_INTERPRET="0").split()[-1] == "equal"
