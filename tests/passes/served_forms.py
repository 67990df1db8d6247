"""Quantisers as inference engines and their libraries write them, on an attention output `o [T, N]`."""

from __future__ import annotations

from collections.abc import Callable

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


def factor_kept(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """The scale is stored as the reciprocal of the factor."""
    factor = 448.0 / o.abs().amax(dim=1, keepdim=True).float().clamp(1e-4)
    return rounded(o.float() * factor), factor.reciprocal()


def quotient_kept(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    largest = groups(o).abs().amax(-1, keepdim=True).clamp(min=1e-10)
    factor = torch.full_like(largest, 448.0) / largest
    return rounded(groups(o) * factor).view(o.shape), factor.reciprocal().squeeze(-1)


def int8_tokens(
    o: Tensor,
    s: Tensor,
    limit: float = 127.0,
    rounding: Callable[[Tensor], Tensor] = torch.round,
    size: int | None = None,
) -> tuple[Tensor, Tensor]:
    x = groups(o, size or o.shape[1])
    scale = (x.abs().amax(-1, keepdim=True) / limit).clamp(min=1e-5)
    return rounding(x / scale).clamp(-128, 127).to(torch.int8).view(o.shape), scale.squeeze(-1)


def int8_by_reciprocal(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Limited before it is rounded."""
    scale = (o.float().abs().amax(-1, keepdim=True) / 127).clamp(min=1e-7)
    return torch.round((o.float() * (1.0 / scale)).clamp(-127, 127)).to(torch.int8), scale


def int8_by_factor(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    largest = o.float().abs().amax(-1, keepdim=True).clamp(min=1e-10)
    return torch.round(o.float() * (127.0 / largest)).to(torch.int8), largest / 127


def int8_static(o: Tensor, s: Tensor) -> Tensor:
    return torch.round(o.float() / s).clamp(-128, 127).to(torch.int8)


def mx(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Powers of two by their bits, as the OCP's document on MX has them."""
    x = groups(o, 32)
    largest = x.abs().amax(-1, keepdim=True)
    exponent = ((largest.view(torch.int32) >> 23) - 8).clamp(min=0)
    exponent = torch.where(largest.isnan(), 255, exponent)
    scale = (exponent << 23).view(torch.float32).clamp(min=2.0**-126)
    return rounded(x / scale).view(o.shape), exponent.to(torch.uint8).squeeze(-1)


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
        "tokens times a factor, its reciprocal kept": factor_kept,
        "groups times a quotient, its reciprocal kept": quotient_kept,
        "int8 tokens": int8_tokens,
        "int8 tokens, 127.5": lambda o, s: int8_tokens(o, s, 127.5),
        "int8 tokens, limited, times the reciprocal": int8_by_reciprocal,
        "int8 tokens times a factor": int8_by_factor,
        "int8 tokens, truncated": lambda o, s: int8_tokens(o, s, rounding=torch.trunc),
        "int8 groups": lambda o, s: int8_tokens(o, s, size=64),
        "int8, a scale given": int8_static,
        "MX by the exponents' bits": mx,
    }.items()
}
