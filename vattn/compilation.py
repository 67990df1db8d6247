"""`compile` and `compile_regions`: `torch.compile` for models that run packed tokens through paged attention.

Both mark the first dimension of every tensor argument, and of the step's metadata, as varying, so that nobody has to
mark anything: one graph serves all token counts and batch sizes from 2 up, and one more serves a single token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vattn import context
from vattn.errors import ConfigError
from vattn.metadata import AttentionMetadata

Target = TypeVar("Target", bound=Callable[..., Any])


def mark_dynamic(*values: Any) -> None:
    """Mark the first dimension of every tensor in nested containers and metadata; parameters are left alone."""
    for value in values:
        if isinstance(value, Tensor):
            if value.dim() and not isinstance(value, nn.Parameter):
                torch._dynamo.maybe_mark_dynamic(value, 0)
        elif isinstance(value, AttentionMetadata):
            value.mark_dynamic()
        elif isinstance(value, (list, tuple)):
            mark_dynamic(*value)
        elif isinstance(value, dict):
            mark_dynamic(*value.values())


def _mark_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    mark_dynamic(*args, *kwargs.values())
    if context.current is not None:
        context.current.mark_dynamic()


def compile(target: Target, *, fullgraph: bool = True, **options: Any) -> Target:
    """Compile a model or function as `torch.compile` does, with varying batch sizes and no graph break allowed.

    Args:
        target: a module, compiled whole, or a function.
        fullgraph: raise on a graph break; the default, unlike `torch.compile`'s.
        **options: of `torch.compile`: `mode`, `backend`, `options`, `dynamic`.

    Returns:
        What `torch.compile` returns. The first dimension of its tensor arguments may vary from call to call.

    Example:
        >>> import torch, vattn
        >>> double = vattn.compile(lambda x: x * 2, backend="eager")
        >>> [double(torch.ones(n)).sum().item() for n in (2, 7, 64)]
        [4.0, 14.0, 128.0]
    """
    compiled: Any = torch.compile(target, fullgraph=fullgraph, **options)
    if isinstance(compiled, nn.Module):
        # A hook of the wrapper, outside of what is compiled.
        compiled.register_forward_pre_hook(lambda _, args, kwargs: _mark_call(args, kwargs), with_kwargs=True)
        return compiled  # type: ignore[return-value]
    return _marking(compiled)


def _marking(compiled: Any) -> Any:
    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        _mark_call(args, kwargs)
        return compiled(*args, **kwargs)

    return call


def compile_regions(model: nn.Module | Iterable[nn.Module], *, fullgraph: bool = True, **options: Any) -> int:
    """Compile the repeated layers of a model, in place, each kind once however many layers there are.

    The rest of the model stays as it is. Compile time no longer grows with depth, and code between the layers may do
    what a full graph cannot.

    Args:
        model: a model, whose `nn.ModuleList` entries that contain attention are compiled; or the layers themselves.
        fullgraph: raise on a graph break inside a layer.
        **options: of `torch.compile`.

    Returns:
        How many layers were compiled.

    Raises:
        ConfigError: no layer with attention was found.
    """
    layers = list(_repeated(model) if isinstance(model, nn.Module) else model)
    if not layers:
        raise ConfigError(
            f"compile_regions found no nn.ModuleList of layers with attention in {type(model).__name__}",
            "a model with such a list, or the layers themselves",
            "pass the layers: vattn.compile_regions([layer0, layer1])",
        )
    # One callable for a class: a layer that is compiled for itself gets a backend object, and so a graph, of its own.
    callables: dict[Callable[..., Any], Any] = {}
    for layer in layers:
        forward = type(layer).forward
        if forward not in callables:
            callables[forward] = _marking(torch.compile(forward, fullgraph=fullgraph, **options))
        layer.forward = functools.partial(callables[forward], layer)
    return len(layers)


def _repeated(model: nn.Module) -> list[nn.Module]:
    return [
        layer
        for entries in model.modules()
        if isinstance(entries, nn.ModuleList)
        for layer in entries
        if any(hasattr(part, "get_kv_cache_spec") for part in layer.modules())
    ]
