"""Quantisers as inference engines and their libraries write them, on an attention output `o [T, N]`."""

from __future__ import annotations

import torch
from forms import E4M3, rounded
from grammar import Form
from torch import Tensor


def groups(o: Tensor, size: int = 128) -> Tensor:
    return o.float().view(o.shape[0], -1, size)


def sglang_group(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """The floor is rounded to bf16 before the scale is made."""
    x = o.reshape(o.numel() // 128, 128)
    scale = x.abs().max(dim=-1, keepdim=True)[0].clamp(min=1e-10).to(torch.float32) / 448.0
    return rounded(x / scale).reshape(o.shape), scale.reshape(o.shape[0], -1)


def power_of_two_first_floored(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    x = groups(o)
    scale = x.abs().amax(-1, keepdim=True).clamp(1e-4) / 448.0
    scale = torch.pow(2.0, torch.ceil(torch.log2(scale.abs())))
    return (x * (1.0 / scale)).to(E4M3).view(o.shape), scale.squeeze(-1)


def power_of_two_floored_last(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    x = groups(o)
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(-1, keepdim=True) / 448.0))).clamp(min=1e-10)
    return rounded(x / scale).view(o.shape), scale.squeeze(-1)


def zero_replaced(o: Tensor, s: Tensor, size: int | None = None) -> tuple[Tensor, Tensor]:
    x = groups(o, size or o.shape[1])
    scale = x.abs().amax(-1, keepdim=True) / 448.0
    scale = torch.where(scale == 0, torch.tensor(torch.finfo(torch.float32).eps), scale)
    return rounded(x / scale).view(o.shape), scale.squeeze(-1)


def factor_of_groups(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    x = o.view(o.shape[0], -1, 128)
    largest = x.abs().float().amax(dim=2).clamp(1e-4)
    return (x * (448.0 / largest.unsqueeze(2))).to(E4M3).view(o.shape), largest / 448.0


def factor_of_tokens(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    largest = o.abs().float().amax(dim=1, keepdim=True).clamp(1e-4)
    return (o * (448.0 / largest)).to(E4M3), largest / 448.0


def product_over_the_maximum(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    largest = o.abs().float().amax(dim=1, keepdim=True).clamp(1e-4)
    return (o.float() * 448.0 / largest).to(E4M3), largest / 448.0


SERVED: dict[str, Form] = {
    name: Form(name, function)
    for name, function in {
        "SGLang: groups": sglang_group,
        "SGLang: powers of two, floored first": power_of_two_first_floored,
        "DeepGEMM: powers of two, floored last": power_of_two_floored_last,
        "compressed-tensors: zero replaced, tokens": zero_replaced,
        "compressed-tensors: zero replaced, groups": lambda o, s: zero_replaced(o, s, 64),
        "DeepGEMM: groups times a factor": factor_of_groups,
        "TensorRT-LLM: tokens times a factor": factor_of_tokens,
        "tokens times 448 over the maximum": product_over_the_maximum,
    }.items()
}
