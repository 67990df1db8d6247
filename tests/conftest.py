"""Settings and fixtures of every test."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
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


if importlib.util.find_spec("triton") and importlib.metadata.version("triton").startswith("3.6."):
    let_loops_end_at_loaded_numbers()

# Tests run side by side, and OpenMP threads that share busy cores wait for one another: up to a hundred times slower.
torch.set_num_threads(1)

# Examples are slow here (tensors, interpreters), so a deadline would measure the machine. The examples of a push are
# fixed by the tests themselves; `HYPOTHESIS_PROFILE=random` explores.
settings.register_profile("push", deadline=None, max_examples=40, derandomize=True, print_blob=True)
settings.register_profile("random", deadline=None, max_examples=400, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "push"))


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


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
