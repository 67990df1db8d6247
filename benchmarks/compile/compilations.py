"""Count what is compiled, or loaded into the process, while something else is timed."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo


@contextlib.contextmanager
def watch_compilations() -> Iterator[list[str]]:
    """Yield a list that has, at the end, a line for each graph of Dynamo and each kernel of Triton that was compiled.

    Kernels that Triton finds in its cache on disk count too: they are loaded, which takes time as well.
    """
    found: list[str] = []
    before = _graphs()
    with _hooked(found):
        yield found
    found += [f"{name} of Dynamo: {count}" for name, count in (_graphs() - before).items()]


def _graphs() -> Counter[str]:
    counters = torch._dynamo.utils.counters
    return Counter(graph=counters["stats"]["unique_graphs"], frame=counters["frames"]["total"])


@contextlib.contextmanager
def _hooked(found: list[str]) -> Iterator[None]:
    """Append the name of each kernel that Triton compiles or loads."""
    try:
        from triton import knobs
    except ImportError:
        yield
        return
    before = knobs.runtime.jit_post_compile_hook

    def note(*args: Any, **what: Any) -> Any:
        found.append(f"kernel {what.get('repr', '?')!s:.120}")
        return before(*args, **what) if before is not None else None

    knobs.runtime.jit_post_compile_hook = note
    try:
        yield
    finally:
        knobs.runtime.jit_post_compile_hook = before
