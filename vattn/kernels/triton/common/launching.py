"""Launch a kernel again without what Triton looks up at each launch, which takes longer than the launch itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from vattn.kernels.replay import active, unrecorded

_compiled: dict[tuple[Any, ...], tuple[Any, Any, list[Any], list[int]]] = {}
"""By all that a kernel was compiled for: the kernel, its compiled form, its constants and the other arguments' places.
An entry keeps its kernel alive, so the `id` in its key stays its own."""


def launch(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], constants: Mapping[str, Any]) -> None:
    """Launch a kernel on the current device and stream.

    Args:
        arguments: tensors, tensor maps, numbers and None.
        constants: constexpr arguments and options of the compiler, all hashable.
    """
    if not isinstance(kernel, JITFunction):
        # Triton's interpreter.
        kernel[grid](**arguments, **constants)
        return
    if active.compile_only:
        kernel.warmup(**arguments, **constants, grid=grid)
        return
    marks = [_mark(value) for value in arguments.values()]
    key = (id(kernel), torch.cuda.current_device(), *arguments, *marks, *constants.values())
    known = _compiled.get(key)
    first = known is None
    if known is None:
        compiled = finished(kernel[grid](**arguments, **constants))
        if compiled is None:  # A hook of Triton's refused it.
            unrecorded(kernel)
            return
        names = kernel.arg_names
        defaults = {name: parameter.default for name, parameter in kernel.signature.parameters.items()}
        values = [constants.get(name, defaults[name]) for name in names]
        known = _compiled[key] = kernel, compiled, values, [names.index(name) for name in arguments]
    _, compiled, values, places = known
    values = values.copy()
    for place, value in zip(places, arguments.values(), strict=True):
        values[place] = value
    again = compiled[(*grid, 1, 1)[:3]]
    if not first:
        again(*values)
    if active.recorder is not None:
        active.recorder.launches.append((again, values))


def finished(compiled: Any) -> Any:
    """Return a kernel that Triton may still compile in the background once it is compiled."""
    return compiled.result() if hasattr(compiled, "result") else compiled


def _mark(value: Any) -> Any:
    """Return what Triton compiles a kernel for of an argument, or more."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if type(value) is int:
        return value if value == 1 else (value % 16 == 0, -(1 << 31) <= value < 1 << 31)
    if value is None or isinstance(value, (bool, float)):
        return type(value)
    return type(value), value.base.dtype, tuple(value.block_shape), getattr(value, "layout", None)
