"""Settings and fixtures of every test."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import settings

# FlashInfer takes minutes to compile a kernel that it did not ship with: its backend refuses those in tests, and
# `FLASHINFER_DISABLE_JIT= pytest -m gpu ...` lets it compile.
os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")

if not torch.cuda.is_available():
    # Read when Triton is first imported: its kernels then run on CPU tensors, in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def let_loops_end_at_loaded_numbers() -> None:
    """Mend Triton 3.6's interpreter, which has loaded numbers as arrays `[1]`: NumPy 2.4 makes no ints of those."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda number: number.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_mend


def speed_up_interpreter() -> None:
    """Leave out what takes half of the interpreter's time: it searches its modules for builtins in every call of a
    device function, and computes whether sums overflow, which it reports with `debug` alone.
    """
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    found: dict[Any, list[str]] = {}

    def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
        if package not in found:
            found[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
        for name in found[package]:
            member = getattr(package, name)
            if is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtins
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


if importlib.util.find_spec("triton"):
    speed_up_interpreter()
    if importlib.metadata.version("triton").startswith("3.6."):
        let_loops_end_at_loaded_numbers()

# Tests run side by side, and OpenMP threads that share busy cores wait for one another: up to a hundred times slower.
torch.set_num_threads(1)

# Examples are slow here (tensors, interpreters), so a deadline would measure the machine. The examples of a push are
# fixed by the tests themselves; `HYPOTHESIS_PROFILE=random` explores.
settings.register_profile("push", deadline=None, max_examples=40, derandomize=True, print_blob=True)
settings.register_profile("random", deadline=None, max_examples=400, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "push"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    mark = item.get_closest_marker("gpu")
    if mark and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    needed = mark and mark.kwargs.get("capability")
    if needed and torch.cuda.get_device_capability() != needed:
        pytest.skip(f"needs a GPU of compute capability {'.'.join(map(str, needed))}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give `sample(n, "NAME")` its meaning: of the cases with NAME in their ids, all but each n-th are slow."""
    counts: Counter[str] = Counter()
    for item in items:
        for mark in item.iter_markers("sample"):
            every, *names = mark.args
            if all(name in item.name for name in names) and not {"long", "gpu"} & {m.name for m in item.iter_markers()}:
                test = item.nodeid.split("[")[0]
                if counts[test] % every:
                    item.add_marker(pytest.mark.slow)
                counts[test] += 1


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def first_calls() -> None:
    """Have each op take the whole way at a test's first call of a signature: tests watch functions on it."""
    from vattn.ops import checks

    for check in (checks.check_attention, checks.check_kv_cache_update, checks.check_plan):
        check._accepted.clear()


@pytest.fixture(autouse=True)
def calls_run_twice(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU run each op twice from the same tensors, the second time as a replay of the first.

    In tests that replace functions, which a replay would not call, ops run once and nothing replays.
    """
    if not torch.cuda.is_available() or request.node.get_closest_marker("gpu") is None:
        return
    from vattn.backends import dispatch
    from vattn.kernels.replay import replay_or_run

    if "monkeypatch" in inspect.signature(request.function).parameters:
        monkeypatch.setattr(dispatch, "replay_or_run", lambda recordings, args, run: run())
        return

    results, caches = ("output", "output_block_scale", "lse", "schedule"), ("key_cache", "value_cache")

    def run_twice(recordings: Any, args: Any, run: Callable[[], None]) -> None:
        written = results if hasattr(args, "output") else caches + results
        tensors = [tensor for name in written if (tensor := getattr(args, name, None)) is not None]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if size <= 2**26 and not torch.cuda.is_current_stream_capturing():
            before = [tensor.clone() for tensor in tensors]
            replay_or_run(recordings, args, run)
            for tensor, held in zip(tensors, before, strict=True):
                tensor.copy_(held)
        replay_or_run(recordings, args, run)

    monkeypatch.setattr(dispatch, "replay_or_run", run_twice)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where a test runs: on a CPU, and with `-m gpu` on a CUDA GPU."""
    return request.param


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Start with no compiled graphs, and leave none."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def no_grad() -> Iterator[None]:
    """Run a test under `torch.no_grad`."""
    with torch.no_grad():
        yield


@pytest.fixture
def poisoned_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what `torch.empty` and its relatives return with 0xFF bytes, so that memory nobody wrote shows up as NaN."""

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate_and_poison(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            if tensor.numel() and tensor.device.type != "meta":
                tensor.view(torch.uint8).fill_(0xFF)
            return tensor

        return allocate_and_poison

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
