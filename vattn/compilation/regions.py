"""`compile_regions`: compile the repeated layers of a model, and what a generator compiles of a model by default."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from vattn.compilation.compile import check_options, marking, strict_first_call
from vattn.errors import ConfigError, FusionError, VattnError

logger = logging.getLogger("vattn")

_UNCOMPILED = (nn.Embedding, nn.Linear, nn.Dropout, nn.Identity)
"""Modules that run one kernel of a library, or none."""


def compile_regions(model: nn.Module | Iterable[nn.Module], *, fullgraph: bool = True, **options: Any) -> int:
    """Compile the repeated layers of a model, in place, each kind once however many layers there are.

    The rest of the model stays as it is. Compile time no longer grows with depth, and code between the layers may do
    what a full graph cannot. Layers that are compiled with equal options already stay so.

    Args:
        model: a model, of which the `nn.ModuleList` entries with attention are compiled; or the layers themselves.
        fullgraph: raise on a graph break inside a layer.
        **options: of `torch.compile`.

    Returns:
        How many layers were compiled.

    Raises:
        ConfigError: no layer with attention in a model, or `mode` and `options` together.
        UnknownOptionError: as `compile`.
    """
    check_options("vattn.compile_regions", options)
    if not isinstance(model, (nn.Module, Iterable)):
        raise ConfigError(f"compile_regions of {type(model).__name__}", "a model, or layers", "pass the model")
    layers = repeated_layers(model) if isinstance(model, nn.Module) else list(model)
    if not layers:
        raise ConfigError(
            f"compile_regions found no nn.ModuleList of layers with attention in {type(model).__name__}",
            "a model with such a list, or the layers themselves",
            "pass the layers: vattn.compile_regions([layer0, layer1])",
        )
    _compile_each(layers, fullgraph, options)
    return len(layers)


class Region:
    """The compiled forward of a class of modules.

    Args:
        forward: of the class.
        fullgraph, options: of `torch.compile`.
        falls_back: run the forward as it is written where it cannot be compiled.

    Attributes:
        run: the compiled forward, which takes the module first.
        refusal: why it runs as it is written, "" if it does not.
    """

    def __init__(self, forward: Callable[..., Any], fullgraph: bool, options: dict[str, Any], falls_back: bool) -> None:
        self.options, self.refusal = (fullgraph, options, falls_back), ""
        compiled = torch.compile(forward, fullgraph=fullgraph, **options)
        self.run: Any = strict_first_call(marking(compiled), options)
        if falls_back:
            self.run = self._or_as_written(self.run, forward)

    def _or_as_written(self, run: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.refusal:
                return forward(*args, **kwargs)
            try:
                return run(*args, **kwargs)
            except FusionError:  # Strict passes, which were requested.
                raise
            except (torch._dynamo.exc.TorchDynamoException, VattnError) as error:
                # A wrong call raises without the compiler too.
                result = forward(*args, **kwargs)
                self.refusal = f"{type(error).__name__}: {str(error).strip().splitlines()[0]:.200}"
                logger.warning("%s runs uncompiled: %s", forward.__qualname__, self.refusal)
                return result

        return call


def _compile_each(
    modules: Iterable[nn.Module], fullgraph: bool, options: dict[str, Any], falls_back: bool = False
) -> None:
    # One callable for a class: a layer that is compiled for itself gets a backend object, and so a graph, of its own.
    regions: dict[Callable[..., Any], Region] = {}
    modules = list(modules)
    for module in modules:
        region = region_of(module)
        if region is not None and region.options == (fullgraph, options, falls_back):
            regions.setdefault(type(module).forward, region)
    for module in modules:
        forward = type(module).forward
        if forward not in regions:
            regions[forward] = Region(forward, fullgraph, options, falls_back)
        bound: Any = functools.partial(regions[forward].run, module)
        bound.region = regions[forward]
        module.forward = bound


def region_of(module: nn.Module) -> Region | None:
    """Return the compiled forward that a module runs, `None` if it is not compiled."""
    return getattr(module.__dict__.get("forward"), "region", None)


def compile_where_possible(model: nn.Module, *, layers: bool = True, **options: Any) -> None:
    """Compile the small modules around the repeated layers of a model; what cannot be compiled runs as it is.

    Args:
        layers: compile the layers too.
        **options: of `torch.compile`.
    """
    check_options("vattn.Generator", options)
    if layers:
        _compile_each(repeated_layers(model), True, options, falls_back=True)
    # Once a step, the best of many tiles for a kernel saves less than compiling all of them takes.
    once = {**options, "options": {**options.get("options", {}), "triton.autotune_pointwise": False}}
    _compile_each(modules_around(model), True, once, falls_back=True)


def restore_regions(model: nn.Module) -> None:
    """Undo what `compile_regions` did to a model."""
    for module in model.modules():
        if region_of(module) is not None:
            del module.forward


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model that `compile_regions` compiles."""
    return [
        layer
        for entries in model.modules()
        if isinstance(entries, nn.ModuleList)
        for layer in entries
        if any(hasattr(part, "get_kv_cache_spec") for part in layer.modules())
        # Modules with states run Python for each kind of rows.
        and not any(hasattr(part, "bind_states") for part in layer.modules())
    ]


def modules_around(model: nn.Module) -> list[nn.Module]:
    """Return the modules beside the repeated layers that contain no modules and compute no matrix product."""
    layers = {id(layer) for layer in repeated_layers(model)}
    return [
        module
        for parent in model.modules()
        if any(id(layer) in layers for layer in _layers_in(parent))
        for module in parent.children()
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict, *_UNCOMPILED))
        and not any(True for _ in module.children())
        and ("forward" not in module.__dict__ or region_of(module) is not None)
        and not hasattr(module, "get_kv_cache_spec")
    ]


def _layers_in(parent: nn.Module) -> Iterator[nn.Module]:
    for child in parent.children():
        if isinstance(child, nn.ModuleList):
            yield from child
