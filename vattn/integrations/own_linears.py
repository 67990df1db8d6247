"""Let the linear layers of a model run by `vattn::linear`, whose kernels read the weights of small steps faster."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from vattn.integrations.merged_linears import MergedFP8Part, MergedPart, own_product
from vattn.layers.fp8_linear import FP8Linear


class OwnLinear(nn.Linear):
    """What an `nn.Linear` becomes, in place."""

    own_product = True
    next_product: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, and the bias added to it."""
        return own_product(x, self.weight, self.bias, self.next_product)


def take_linears(model: nn.Module) -> int:
    """Change the linear layers of a model, merged ones too; return how many. Those with hooks or own forwards stay.

    Every product learns which one follows it, by the order in which the model holds them.
    """
    count, products = 0, dict[str, Any]()
    for name, module in model.named_modules():
        if isinstance(module, (MergedPart, MergedFP8Part)):
            merged = module.merged
            merged.own = True
            if merged.quantised is not None:
                merged.quantised.own_product = True
            if module.index == 0:
                products[name] = merged if merged.quantised is None else merged.quantised
        elif type(module) is FP8Linear:
            module.own_product = True
            products[name] = module
        elif type(module) is nn.Linear and not (
            "forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks
        ):
            module.__class__ = OwnLinear  # type: ignore[assignment]
            products[name] = module
        else:
            continue
        count += 1
    for name, other in _following(list(products)).items():
        if products[name].weight.device == products[other].weight.device:
            # Not an attribute of a module, which would make the one a part of the other.
            products[name].__dict__["next_product"] = products[other]
    return count


def give_linears(model: nn.Module) -> None:
    """Undo `take_linears`; merged layers must have their own forward again."""
    for module in model.modules():
        if isinstance(module, OwnLinear):
            module.__class__ = nn.Linear  # type: ignore[assignment]
        elif isinstance(module, FP8Linear):
            module.__dict__.pop("own_product", None)
        module.__dict__.pop("next_product", None)


def _following(names: list[str]) -> dict[str, str]:
    """Return which product follows each: the next one, and for the last of a list of layers the first of the list.

    Otherwise the last layer would be followed by a weight of another shape, and be compiled once more.
    """
    lists = [re.match(r"(.*?\.)\d+\.", name) for name in names]
    first: dict[str, str] = {}
    for name, found in zip(names, lists, strict=True):
        if found is not None:
            first.setdefault(found[1], name)
    following = {}
    for index, (name, found) in enumerate(zip(names, lists, strict=True)):
        after = (index + 1) % len(names)
        other = lists[after]
        leaves = found is not None and (other is None or other[1] != found[1])
        following[name] = first[found[1]] if found is not None and leaves else names[after]
    return following
