"""One product for several linear layers with one input: query, key and value; gate and up.

Their weights are concatenated in one storage; the modules keep them as views, so that names, state dicts and loading
stay as they are. The model's own code stays too: it calls one projection after the other with the same input, the first
call computes all of them, and the others take their part.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from vattn.layers.fp8_linear import FP8Linear
from vattn.layers.lora import LoRAProduct
from vattn.quantization.formats import dtype_name


class MergedLinear:
    """One product for several linear layers with the same input.

    Attributes:
        parts: the layers; their weights and biases are views of `weight` and `bias`.
        weight, bias: of all parts, concatenated.
        quantised: one FP8 layer with the weights of all parts, `None` for plain parts.
        uses_vattn_linear: whether a plain product is `vattn::linear`.
        lora: the adapters of the product; `None` without them.
    """

    def __init__(self, parts: list[nn.Linear]) -> None:
        self.parts = parts
        self.uses_vattn_linear = False
        self.lora: LoRAProduct | None = None
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()
        self.take_in()

    @torch.inference_mode(False)
    def take_in(self) -> None:
        """Put the weights and biases of the parts, which may be new, into one storage."""
        parts = self.parts
        self.sizes = [part.weight.shape[0] for part in parts]
        self.weight = _in_one_storage(parts, "weight", self.sizes)
        self.bias = None if parts[0].bias is None else _in_one_storage(parts, "bias", self.sizes)
        self.quantised: FP8Linear | None = None
        if isinstance(parts[0], FP8Linear):
            self.quantised = _together(cast(list[FP8Linear], parts), self.weight, self.bias)
            if self.uses_vattn_linear:
                self.quantised.uses_vattn_linear = True
            for part in parts:
                # Where a captured graph reads it; a `ModelIdentity` sees another one, also if no scale has moved.
                vars(part)["product_scale"] = self.quantised.weight_scale
        self._addresses = self._now()

    def _now(self) -> list[int | None]:
        tensors = [tensor for part in self.parts for tensor in (*part._parameters.values(), *part._buffers.values())]
        places = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        # All else is read where it is; one scale for a whole weight is that of the first part.
        single = [tensor for part in self.parts for tensor in part._buffers.values() if tensor is not None]
        return places + [tensor._version for tensor in single if tensor.numel() == 1 and not tensor.is_inference()]

    @property
    def moved(self) -> bool:
        """Whether tensors were moved or replaced, as by `model.to(...)`, or scales of whole weights were written."""
        return self._now() != self._addresses

    def __deepcopy__(self, memo: dict[int, Any]) -> MergedLinear:
        """Return a product of the copied parts, which takes in their weights later: they may not be copied yet."""
        copied = memo[id(self)] = object.__new__(MergedLinear)
        copied.__dict__.update(self.__dict__, parts=[], quantised=None, _input=None, _outputs=(), _addresses=[])
        copied.lora = copy.deepcopy(self.lora, memo)
        copied.parts = [copy.deepcopy(part, memo) for part in self.parts]
        return copied

    def run(self, x: Tensor) -> Tensor:
        """Return the outputs of all parts."""
        if self.quantised is not None:
            out: Tensor = self.quantised(x)
        else:
            out = (vattn_linear if self.uses_vattn_linear else linear)(x, self.weight, self.bias)
        return out if self.lora is None else self.lora.add(x, out)

    def part(self, index: int, x: Tensor) -> Tensor:
        """Return the output of one projection."""
        if index == 0 or x is not self._input:
            self._outputs = self.run(x).split(self.sizes, dim=-1)
            self._input = x
        out = self._outputs[index]
        if index == len(self.sizes) - 1:
            # Nothing is kept from one call of the module to the next.
            self._input, self._outputs = None, ()
        return out


def _in_one_storage(parts: list[nn.Linear], name: str, sizes: list[int]) -> Tensor:
    """Return the parts' weights, biases or scales in one storage, of which they become views."""
    own: list[Tensor] = [getattr(part, name) for part in parts]
    first = own[0].detach()
    ends = [first.data_ptr() + first[:1].numel() * first.itemsize * sum(sizes[:index]) for index in range(len(sizes))]
    storages = {tensor.untyped_storage().data_ptr() for tensor in own}
    if len(storages) == 1 and [tensor.data_ptr() for tensor in own] == ends and all(t.is_contiguous() for t in own):
        # As the last `enable` left them.
        return first.as_strided((sum(sizes), *first.shape[1:]), first.stride())
    together = torch.cat([tensor.detach() for tensor in own])
    for part, tensor, view in zip(parts, own, together.split(sizes), strict=True):
        parameter = isinstance(tensor, nn.Parameter)
        setattr(part, name, nn.Parameter(view, requires_grad=tensor.requires_grad) if parameter else view)
    return together


def vattn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias` of x `[..., K]` by `vattn::linear`."""
    out = torch.ops.vattn.linear(x.reshape(-1, x.shape[-1]), weight, None, None, dtype_name(x.dtype))
    if bias is not None:
        out = out + bias
    return out.view(*x.shape[:-1], weight.shape[0])


def _together(parts: list[FP8Linear], weight: Tensor, bias: Tensor | None) -> FP8Linear:
    scales = [part.weight_scale for part in parts]
    if all(part.scales_rows for part in parts) or parts[0].format.blocks:
        scale = _in_one_storage(list(parts), "weight_scale", [scale.shape[0] for scale in scales])
    elif all(torch.equal(scale, scales[0]) for scale in scales):
        scale = scales[0]
    else:
        scale = torch.cat([scale.expand(part.out_features) for scale, part in zip(scales, parts, strict=True)])
    made = FP8Linear(weight, scale, parts[0].format.name, parts[0].input_scale, bias)
    # Not copies: what is written to the scales of the parts counts.
    made.weight_scale, made.input_scale = scale, parts[0].input_scale
    return made
