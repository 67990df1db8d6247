"""Other ways to run the linear layers of a model: several projections by one product, and all by `vattn::linear`.

The weights of merged projections (query, key and value; gate and up) are concatenated in one storage; the modules keep
them as views, so that names, state dicts and loading stay as they are. The model's own code stays too: it calls one
projection after the other with the same input, the first call computes all of them, and the others take their part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from vattn.calibration.quantise_linears import SHARED_INPUT
from vattn.errors import ConfigError
from vattn.layers.fp8_linear import BLOCK, FP8Linear
from vattn.layers.lora import LoRAProduct
from vattn.layers.weight_parts import PartLinear
from vattn.quantization.formats import dtype_name


class MergedLinear:
    """One product for several linear layers with the same input.

    Attributes:
        weight, bias: of all parts, concatenated.
        quantised: the layer that all FP8 parts make together, `None` for plain ones.
        uses_vattn_linear: whether a plain product is `vattn::linear`.
        lora: adds what adapters give; `None` without them.
    """

    def __init__(self, parts: list[nn.Linear]) -> None:
        self.parts = parts
        self.sizes = [part.out_features for part in parts]
        self.weight = torch.cat([part.weight.detach() for part in parts])
        self.bias: Tensor | None = None
        if parts[0].bias is not None:
            self.bias = torch.cat([part.bias.detach() for part in parts])
        self.quantised: FP8Linear | None = None
        if isinstance(parts[0], FP8Linear):
            self.quantised = _together(parts, self.weight, self.bias)  # type: ignore[arg-type]
        self.uses_vattn_linear = False
        self.lora: LoRAProduct | None = None
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
        """Refuse parts with weights or biases outside the common storage, as after `model.to(...)`.

        Raises:
            ConfigError: weights were moved or replaced.
        """
        pairs = [(part.weight, own) for part, own in zip(self.parts, self.weight.split(self.sizes), strict=True)]
        if self.bias is not None:
            pairs += [(part.bias, own) for part, own in zip(self.parts, self.bias.split(self.sizes), strict=True)]
        if any(now.data_ptr() != own.data_ptr() for now, own in pairs):
            raise ConfigError(
                "weights of merged projections that were moved or replaced since",
                "the storage that enable(merge_projections=True) made",
                "disable(model), and enable it again after moving or replacing weights; load_state_dict is fine",
            )

    def part(self, index: int, x: Tensor) -> Tensor:
        """Return the output of one projection."""
        if x is not self._input:
            if self.quantised is not None:
                out = self.quantised(x)
            else:
                out = (vattn_linear if self.uses_vattn_linear else linear)(x, self.weight, self.bias)
            if self.lora is not None:
                out = self.lora.add(x, out)
            self._outputs = out.split(self.sizes, dim=-1)
            self._input = x
        out = self._outputs[index]
        if index == len(self.sizes) - 1:
            # Nothing is kept from one call of the module to the next.
            self._input, self._outputs = None, ()
        return out


def vattn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias` of x `[..., K]` by `vattn::linear`."""
    out = torch.ops.vattn.linear(x.reshape(-1, x.shape[-1]), weight, None, None, dtype_name(x.dtype))
    if bias is not None:
        out = out + bias
    return out.view(*x.shape[:-1], weight.shape[0])


def _together(parts: list[FP8Linear], weight: Tensor, bias: Tensor | None) -> FP8Linear:
    scales = [part.weight_scale for part in parts]
    if scales[0].dim() == 2:
        scale = torch.cat(scales)
    elif all(torch.equal(scale, scales[0]) for scale in scales) and scales[0].numel() == 1:
        scale = scales[0]
    else:
        scale = torch.cat([scale.expand(part.out_features) for scale, part in zip(scales, parts, strict=True)])
    return FP8Linear(weight, scale, parts[0].format.name, parts[0].input_scale, bias)


class MergedPart(nn.Linear):
    """One projection of a merged product: what an `nn.Linear` becomes, in place.

    A class, since compiled code that found a forward of its own on each module would be compiled for each layer.
    """

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
        raise ConfigError(
            "a state dict for merged FP8 projections, which keep scales of their product",
            "one for projections that are not merged",
            "disable(model), load it, and enable the model again",
        )


MERGED = {nn.Linear: MergedPart, FP8Linear: MergedFP8Part}
"""What linear layers become."""


def merge_projections(model: nn.Module) -> int:
    """Merge the projections of a model where they are plain or FP8 linears of one kind; return how many groups."""
    count = 0
    for module in model.modules():
        for names in SHARED_INPUT:
            parts = [getattr(module, name, None) for name in names]
            if not _mergeable(parts):
                continue
            merged = MergedLinear(parts)  # type: ignore[arg-type]
            for index, part in enumerate(parts):
                part.__class__ = MERGED[type(part)]  # type: ignore[union-attr,assignment,index]
                part.merged, part.index = merged, index  # type: ignore[union-attr,assignment]
            count += 1
    return count


def _mergeable(parts: list[Any]) -> bool:
    first = parts[0]
    return all(
        type(part) in MERGED
        and type(part) is type(first)
        and _plain_weight(part)
        and "forward" not in part.__dict__
        and not part._forward_hooks
        and not part._forward_pre_hooks
        and part.in_features == first.in_features
        and (part.bias is None) == (first.bias is None)
        and (part.weight.dtype, part.weight.device) == (first.weight.dtype, first.weight.device)
        for part in parts
    ) and (not isinstance(first, FP8Linear) or _one_input(parts))


def _plain_weight(linear: nn.Linear) -> bool:
    """Return whether a weight is a tensor of torch itself: torchao's bring products of their own."""
    return type(linear.weight) in (nn.Parameter, Tensor)


def _one_input(parts: list[FP8Linear]) -> bool:
    """Return whether FP8 parts quantise their input alike, have whole blocks, and outputs without other ranks'."""
    scales = [part.input_scale for part in parts]
    return (
        all(part.format == parts[0].format and not part.needs_ranks for part in parts)
        and (scales[0] is None or all(torch.equal(scale, scales[0]) for scale in scales))  # type: ignore[arg-type]
        and (not parts[0].format.blocks or all(part.out_features % BLOCK == 0 for part in parts[:-1]))
    )


def check_merged(model: nn.Module) -> None:
    """Refuse a model with merged weights that were moved or replaced; see `MergedLinear.check`."""
    for merged in {id(part.merged): part.merged for part in _parts(model)}.values():
        merged.check()


def separate_projections(model: nn.Module) -> None:
    """Give every merged projection its own forward back; weights stay views of one storage."""
    for part in _parts(model):
        del part.merged, part.index
        part.__class__ = FP8Linear if isinstance(part, MergedFP8Part) else nn.Linear  # type: ignore[assignment]


def _parts(model: nn.Module) -> list[MergedPart | MergedFP8Part]:
    return [module for module in model.modules() if isinstance(module, (MergedPart, MergedFP8Part))]


class VattnLinear(nn.Linear):
    """What an `nn.Linear` becomes, in place."""

    uses_vattn_linear = True

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, and the bias added to it."""
        return vattn_linear(x, self.weight, self.bias)


class VattnPartLinear(PartLinear):
    """What a `PartLinear` becomes, in place."""

    uses_vattn_linear = True
    multiply = staticmethod(vattn_linear)


REPLACED = {nn.Linear: VattnLinear, PartLinear: VattnPartLinear}
"""What linear layers become, by `vattn::linear`."""


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
        elif (
            type(module) in REPLACED
            and _plain_weight(module)  # type: ignore[arg-type]
            and not ("forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks)
        ):
            module.__class__ = REPLACED[type(module)]  # type: ignore[assignment,index]
        else:
            continue
        count += 1
    return count


def restore_linears(model: nn.Module) -> None:
    """Undo `replace_linears`; merged layers must have their own forward again."""
    for module in model.modules():
        if isinstance(module, (VattnLinear, VattnPartLinear)):
            module.__class__ = type(module).__base__  # type: ignore[assignment]
        elif isinstance(module, FP8Linear):
            module.__dict__.pop("uses_vattn_linear", None)
