"""Run the linear layers of a model by `vattn::linear`: its kernels read the weights of small steps faster."""

from __future__ import annotations

from torch import Tensor, nn

from vattn.integrations.transformers.merged_linears import MergedFP8Part, MergedPart, vattn_linear
from vattn.layers.fp8_linear import FP8Linear


class VattnLinear(nn.Linear):
    """What an `nn.Linear` becomes, in place."""

    uses_vattn_linear = True

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, and the bias added to it."""
        return vattn_linear(x, self.weight, self.bias)


def replace_linears(model: nn.Module) -> int:
    """Replace the linear layers of a model, merged ones too; return how many. Those with hooks or own forwards stay."""
    count = 0
    for module in model.modules():
        if isinstance(module, (MergedPart, MergedFP8Part)):
            merged = module.merged
            merged.uses_vattn_linear = True
            if merged.quantised is not None:
                merged.quantised.uses_vattn_linear = True
        elif type(module) is FP8Linear:
            module.uses_vattn_linear = True
        elif type(module) is nn.Linear and not (
            "forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks
        ):
            module.__class__ = VattnLinear  # type: ignore[assignment]
        else:
            continue
        count += 1
    return count


def restore_linears(model: nn.Module) -> None:
    """Undo `replace_linears`; merged layers must have their own forward again."""
    for module in model.modules():
        if isinstance(module, VattnLinear):
            module.__class__ = nn.Linear  # type: ignore[assignment]
        elif isinstance(module, FP8Linear):
            module.__dict__.pop("uses_vattn_linear", None)
