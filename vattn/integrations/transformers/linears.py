"""Let the linear layers of a model run by `vattn::linear`, whose kernels read the weights of small steps faster."""

from __future__ import annotations

from torch import Tensor, nn

from vattn.integrations.transformers.merged_linears import MergedFP8Part, MergedPart, own_product
from vattn.layers.fp8_linear import FP8Linear


class OwnLinear(nn.Linear):
    """What an `nn.Linear` becomes, in place."""

    own_product = True

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, and the bias added to it."""
        return own_product(x, self.weight, self.bias)


def take_linears(model: nn.Module) -> int:
    """Change the linear layers of a model, merged ones too; return how many. Those with hooks or own forwards stay."""
    count = 0
    for module in model.modules():
        if isinstance(module, (MergedPart, MergedFP8Part)):
            merged = module.merged
            merged.own = True
            if merged.quantised is not None:
                merged.quantised.own_product = True
        elif type(module) is FP8Linear:
            module.own_product = True
        elif type(module) is nn.Linear and not (
            "forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks
        ):
            module.__class__ = OwnLinear  # type: ignore[assignment]
        else:
            continue
        count += 1
    return count


def give_linears(model: nn.Module) -> None:
    """Undo `take_linears`; merged layers must have their own forward again."""
    for module in model.modules():
        if isinstance(module, OwnLinear):
            module.__class__ = nn.Linear  # type: ignore[assignment]
        elif isinstance(module, FP8Linear):
            module.__dict__.pop("own_product", None)
