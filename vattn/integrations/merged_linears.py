"""Run the projections of one input as one product: query, key and value, and gate and up.

Their weights are put behind each other in one storage; the modules keep them as views, so that names, state dicts and
loading stay as they are. The model's own code stays too: it calls one projection after the other with the same input,
the first call computes all of them, and the others take their part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from vattn.errors import ConfigError

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of `nn.Linear`s that a module of transformers calls with one input."""


class MergedLinear:
    """One product for several `nn.Linear`s with the same input.

    Attributes:
        weight, bias: of all parts, behind each other.
    """

    def __init__(self, parts: list[nn.Linear]) -> None:
        self.parts = parts
        self.sizes = [part.out_features for part in parts]
        self.weight = torch.cat([part.weight.detach() for part in parts])
        self.bias: Tensor | None = None
        if parts[0].bias is not None:
            self.bias = torch.cat([part.bias.detach() for part in parts])
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()
        self._adopt()

    def _adopt(self) -> None:
        for part, weight in zip(self.parts, self.weight.split(self.sizes), strict=True):
            part.weight = nn.Parameter(weight, requires_grad=False)
        if self.bias is not None:
            for part, bias in zip(self.parts, self.bias.split(self.sizes), strict=True):
                part.bias = nn.Parameter(bias, requires_grad=False)

    def check(self) -> None:
        """Refuse parts whose weights have left the common storage, as `model.to(...)` makes them.

        Raises:
            ConfigError: so it is.
        """
        for part, weight in zip(self.parts, self.weight.split(self.sizes), strict=True):
            if part.weight.data_ptr() != weight.data_ptr():
                raise ConfigError(
                    "weights of merged projections that were moved or replaced since",
                    "the storage that enable(merge_projections=True) made",
                    "disable(model), and enable it again after moving or replacing weights; load_state_dict is fine",
                )

    def part(self, index: int, x: Tensor) -> Tensor:
        """Return the output of one projection."""
        if x is not self._input:
            self._outputs = linear(x, self.weight, self.bias).split(self.sizes, dim=-1)
            self._input = x
        out = self._outputs[index]
        if index == len(self.sizes) - 1:
            # Nothing is kept from one call of the module to the next.
            self._input, self._outputs = None, ()
        return out


class MergedPart(nn.Linear):
    """One projection of a merged product: what an `nn.Linear` becomes, in place.

    A class, since compiled code that found a forward of its own on each module would be compiled for each layer.
    """

    merged: MergedLinear
    index: int

    def forward(self, x: Tensor) -> Tensor:
        """Return this projection's part of the product."""
        return self.merged.part(self.index, x)


def merge_projections(model: nn.Module) -> int:
    """Merge the projections of a model where they are plain `nn.Linear`s of one dtype; return how many groups."""
    count = 0
    for module in model.modules():
        for names in GROUPS:
            parts = [getattr(module, name, None) for name in names]
            if not _mergeable(parts):
                continue
            merged = MergedLinear(parts)  # type: ignore[arg-type]
            for index, part in enumerate(parts):
                part.__class__ = MergedPart  # type: ignore[union-attr,assignment]
                part.merged, part.index = merged, index  # type: ignore[union-attr,assignment]
            count += 1
    return count


def _mergeable(parts: list[Any]) -> bool:
    first = parts[0]
    return all(
        type(part) is nn.Linear
        and "forward" not in part.__dict__
        and not part._forward_hooks
        and not part._forward_pre_hooks
        and part.in_features == first.in_features
        and (part.bias is None) == (first.bias is None)
        and (part.weight.dtype, part.weight.device) == (first.weight.dtype, first.weight.device)
        for part in parts
    )


def check_merged(model: nn.Module) -> None:
    """Refuse a model whose merged weights were moved or replaced; see `MergedLinear.check`."""
    for merged in {id(part.merged): part.merged for part in _parts(model)}.values():
        merged.check()


def separate_projections(model: nn.Module) -> None:
    """Give every merged projection its own forward back; weights stay views of one storage."""
    for part in _parts(model):
        del part.merged, part.index
        part.__class__ = nn.Linear  # type: ignore[assignment]


def _parts(model: nn.Module) -> list[MergedPart]:
    return [module for module in model.modules() if isinstance(module, MergedPart)]
