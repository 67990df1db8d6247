"""Compile the model of a generator: as it is requested, and by default wherever it can be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vattn.compilation.compile import compile
from vattn.compilation.regions import (
    compile_regions,
    compile_where_possible,
    modules_around,
    region_of,
    repeated_layers,
)
from vattn.config.device import DeviceInfo
from vattn.errors import ConfigError

Forward = Callable[..., Tensor]

OVERLAPPING = (9, 0)
"""The first compute capability of GPUs on which a kernel may begin while the one before it ends."""


class CompiledModel:
    """The model of a generator, compiled.

    Args:
        model: what runs the steps.
        how: `"layers"`, `"model"` or `"none"`; `None` for layers on CUDA, wherever they can be compiled.
        device: of the cache.
        options: of `torch.compile`; `None` for the passes and, on GPUs that can, early launches.

    Attributes:
        forward: runs a step.

    Raises:
        ConfigError: another way, options that `torch.compile` does not have, or some without compiling.
    """

    def __init__(self, model: nn.Module, how: str | None, device: torch.device, options: dict[str, Any] | None) -> None:
        if how not in (None, "layers", "model", "none"):
            raise ConfigError(f"compile={how!r}", "'layers', 'model' or 'none'", "choose one of them")
        self.model, self.how, self.off = model, how, ""
        self.forward: Forward = model
        self.notes: list[str] = []
        if how is None:
            self.off = "" if device.type == "cuda" else f"the default on {device.type}"
            if not self.off and not repeated_layers(model):
                self.off = f"{type(model).__name__} has no nn.ModuleList of layers that can be compiled"
        elif how == "none":
            self.off = "as requested"
        if self.off and options:
            raise ConfigError("compile_options without compiling", "compile='layers' or 'model'", "set compile=")
        if not self.off:
            self._compile(device, options)

    def _compile(self, device: torch.device, given: dict[str, Any] | None) -> None:
        options = given
        if options is None:
            options, self.notes = default_options(DeviceInfo.of(device))
        unknown = options.keys() - {"fullgraph", "dynamic", "backend", "mode", "options", "disable"}
        if unknown:
            raise ConfigError(
                f"compile_options with {min(unknown)!r}",
                "arguments of torch.compile",
                'compile_options={"options": vattn.options()} passes options of Inductor',
            )
        if self.how == "model":
            self.forward = compile(self.model, **options)
            return
        if self.how == "layers" or given is not None:
            compile_regions(self.model, **options)
        if given is None:
            compile_where_possible(self.model, layers=self.how is None, **options)

    def explain(self) -> list[str]:
        """Return what is compiled, and a line for each reason why something is not."""
        if self.off:
            compiled = any(region_of(module) is not None for module in self.model.modules())
            return [f"compile: off: {self.off}" + ("; what was compiled before stays compiled" if compiled else "")]
        if self.how == "model":
            return ["compile: the whole model", *self.notes]
        modules = [*repeated_layers(self.model), *modules_around(self.model)]
        names: Counter[str] = Counter()
        refusals: dict[str, str] = {}
        for module in modules:
            region = region_of(module)
            if region is None:
                continue
            name = type(module).__name__
            if region.refusal:
                refusals[name] = region.refusal
            else:
                names[name] += 1
        found = ", ".join(f"{count} {name}" for name, count in names.items())
        refused = [f"compile: {name} runs uncompiled: {why}" for name, why in refusals.items()]
        return [f"compile: {found or 'nothing'}", *refused, *self.notes]


def default_options(device: DeviceInfo) -> tuple[dict[str, Any], list[str]]:
    """Return options of `torch.compile` for a device, and a line for each that it does not get."""
    from vattn.passes import entry

    notes, inductor = [], dict[str, Any]()
    if device.type != "cuda" or torch.version.hip is not None or device.capability < OVERLAPPING:
        needed = ".".join(map(str, OVERLAPPING))
        notes.append(f"early launches: off: for GPUs of compute capability {needed} and newer, not {device}")
    else:
        inductor["triton.enable_pdl"] = True
    if entry.enabled():
        # `vattn.enable()` has chosen.
        return {"options": inductor} if inductor else {}, notes
    try:
        return {"options": entry.options(inductor)}, notes
    except ConfigError as error:
        return {"options": inductor} if inductor else {}, [*notes, f"passes: off: {error}"]
