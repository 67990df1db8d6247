"""Classes that linear layers of a model get in place, and their own class back.

With a forward on each layer instead, torch would compile each of them anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from vattn.errors import ConfigError
from vattn.integrations.transformers.merged_linear import MergedLinear, vattn_linear
from vattn.layers.fp8_linear import FP8Linear
from vattn.layers.lora import LoRAProduct
from vattn.layers.weight_parts import PartLinear


class MergedPart(nn.Linear):
    """One projection of a merged product."""

    merged: MergedLinear
    index: int

    def forward(self, x: Tensor) -> Tensor:
        """Return this projection's part of the product."""
        return self.merged.part(self.index, x)


class MergedFP8Part(FP8Linear):
    """Same, of an `FP8Linear`."""

    merged: MergedLinear
    index: int

    def forward(self, x: Tensor) -> Tensor:
        """Return this projection's part of the product."""
        return self.merged.part(self.index, x)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # Scales of rows and blocks are read where they are loaded.
        if self.weight_scale.numel() == 1:
            raise ConfigError(
                "a state dict for merged FP8 projections with one scale for each weight",
                "one for projections that are not merged",
                "disable(model), load it, and enable the model again; or enable(model, merge_projections=False)",
            )
        super()._load_from_state_dict(*args, **kwargs)


class VattnLinear(nn.Linear):
    """An `nn.Linear` by `vattn::linear`."""

    uses_vattn_linear = True

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, and the bias added to it."""
        return vattn_linear(x, self.weight, self.bias)


class VattnPartLinear(PartLinear):
    """A `PartLinear` by `vattn::linear`."""

    uses_vattn_linear = True
    multiply = staticmethod(vattn_linear)


class LoRALinear(nn.Linear):
    """An `nn.Linear` with adapters."""

    lora: LoRAProduct

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer and of its adapters."""
        return self.lora.add(x, nn.Linear.forward(self, x))


class LoRAVattnLinear(VattnLinear):
    """A `VattnLinear` with adapters."""

    lora: LoRAProduct

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer and of its adapters."""
        return self.lora.add(x, VattnLinear.forward(self, x))


class LoRAFP8Linear(FP8Linear):
    """An `FP8Linear` with adapters, which take its input before it is quantised."""

    lora: LoRAProduct

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer and of its adapters."""
        return self.lora.add(x, FP8Linear.forward(self, x))


SWAPPED: dict[str, dict[type, type]] = {
    "merged": {nn.Linear: MergedPart, FP8Linear: MergedFP8Part},
    "own": {nn.Linear: VattnLinear, PartLinear: VattnPartLinear},
    "adapters": {nn.Linear: LoRALinear, VattnLinear: LoRAVattnLinear, FP8Linear: LoRAFP8Linear},
}
"""By purpose, the class that a layer gets in place of its base. A merged product has the adapters of its parts."""

_STATE = ("merged", "index", "lora", "product_scale")
"""Attributes that only layers of such a class have."""


def swap(linear: nn.Module, what: str, **state: Any) -> None:
    """Give a layer another class, and what that class needs."""
    linear.__class__ = SWAPPED[what][type(linear)]  # type: ignore[assignment]
    vars(linear).update(state)


def restore(linears: Iterable[nn.Module], *what: str) -> None:
    """Give layers with a class for one of these purposes its base back; other modules stay as they are."""
    bases = {swapped: base for each in what for base, swapped in SWAPPED[each].items()}
    for linear in linears:
        own = type(linear)
        swapped = type_before_parametrizations(linear)
        if swapped not in bases:
            continue
        for name in _STATE:
            vars(linear).pop(name, None)
        base = bases[swapped]
        if own is not swapped:
            # A parametrisation derives a class for one layer, and computes its weight by properties of that class.
            base = type(f"Parametrized{base.__name__}", (base,), dict(vars(own)))
        linear.__class__ = base  # type: ignore[assignment]


def merged_product(linear: nn.Module) -> MergedLinear | None:
    """Return the product that a layer is a part of, `None` for other modules."""
    return cast("MergedLinear | None", vars(linear).get("merged"))


def merge(parts: list[nn.Linear]) -> None:
    """Make the layers of a group parts of one product."""
    merged = MergedLinear(parts)
    for index, part in enumerate(parts):
        swap(part, "merged", merged=merged, index=index)


def merged_linears(model: nn.Module) -> list[MergedLinear]:
    """Return the merged products of a model."""
    products = map(merged_product, model.modules())
    return list({id(merged): merged for merged in products if merged is not None}.values())
