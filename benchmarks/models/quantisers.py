"""Quantisers in plain torch, and a product that reads their codes.

Each quantiser takes rows `[..., N]` and a given scale, which some do not use; it returns codes and scales, whose last
dimension is 1 for a row, else one value a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
GROUPS = {"group": 64, "mx": 32, "nvfp4": 16}


def static(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 by a given scale."""
    return (x.float() / scale).clamp(-448.0, 448.0).to(E4M3), scale


def token(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 with one scale a row."""
    wide = x.float()
    scale = wide.abs().amax(dim=-1, keepdim=True).clamp(min=1e-10) / 448.0
    return (wide / scale).clamp(-448.0, 448.0).to(E4M3), scale


def group(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 with one scale for 64 columns."""
    groups = x.float().unflatten(-1, (-1, GROUPS["group"]))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return (groups / scale).clamp(-448, 448).to(E4M3).flatten(-2), scale.squeeze(-1)


def int8(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """int8 with one scale a row."""
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-7)
    return torch.round(wide / scale).clamp(-128, 127).to(torch.int8), scale


def mx(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 in groups of 32 under powers of two, by the bits of their maxima; scales are biased exponents, uint8."""
    groups = x.float().unflatten(-1, (-1, GROUPS["mx"]))
    maximum = groups.abs().amax(-1, keepdim=True)
    exponent = torch.where(maximum.isnan(), 255, ((maximum.view(torch.int32) >> 23) - 8).clamp(min=0))
    step = (exponent << 23).view(torch.float32).clamp(min=2.0**-126)
    return (groups / step).clamp(-448, 448).to(E4M3).flatten(-2), exponent.to(torch.uint8).squeeze(-1)


def nvfp4(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """e2m1 in groups of 16 under a given scale; block scales are e4m3, two codes a byte."""
    groups = x.float().unflatten(-1, (-1, GROUPS["nvfp4"]))
    block_scales = (groups.abs().amax(-1, keepdim=True) / 6 / scale).clamp(-448, 448).to(E4M3)
    step = block_scales.float() * scale
    wide = (groups / torch.where(step == 0, torch.inf, step)).flatten(-2)
    size = wide.abs()
    code = (size > 0.25).to(torch.uint8) + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code = code + (size > 2.5) + (size >= 3.5) + (size > 5.0)
    code = torch.where(wide.isnan(), 7, code + 8 * wide.signbit().to(torch.uint8)).to(torch.uint8)
    return code[..., ::2] | (code[..., 1::2] << 4), block_scales.squeeze(-1)


QUANTISERS = {"static": static, "token": token, "group": group, "int8": int8, "mx": mx, "nvfp4": nvfp4}


def decoded(name: str, codes: Tensor, scales: Tensor, scale: Tensor) -> Tensor:
    """Return what codes stand for, fp32 `[..., N]`."""
    if name == "nvfp4":
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=codes.device)
        unpacked = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).int()
        wide = torch.where(unpacked >= 8, -1.0, 1.0) * values[unpacked & 7]
        scales = scales.float() * scale
    else:
        wide = codes.float()
        scales = torch.exp2(scales.float() - 127) if name == "mx" else scales
    if name in GROUPS:
        return (wide.unflatten(-1, (-1, GROUPS[name])) * scales.unsqueeze(-1)).flatten(-2)
    return wide * scales


@torch.library.custom_op("vattn_benchmarks::product", mutates_args=())
def product(name: str, codes: Tensor, scales: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Return bf16 `decoded(codes) @ weight.T` for a weight `[outputs, N]` in e4m3; cuBLAS has no such product there."""
    if codes.is_cuda:
        from benchmarks.models.product_kernel import launch

        return launch(name, codes, scales, scale, weight, weight_scale)
    return (decoded(name, codes, scales, scale) @ (weight.float() * weight_scale).T).bfloat16()


@product.register_fake
def _(name: str, codes: Tensor, scales: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    return codes.new_empty((codes.shape[0], weight.shape[0]), dtype=torch.bfloat16)
