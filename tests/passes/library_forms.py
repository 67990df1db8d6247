"""Ways to write quantisation that no grammar composes: NVFP4, library calls, and programs with more than a quantiser.

Forms of other libraries exist where the library is installed (`EXTERNAL`); all others are plain torch.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from forms import E4M3, dequantised, per_token, rounded, static
from grammar import Form
from harness import COLUMNS, HEADS, WIDTH
from torch import Tensor, nn

from vattn.quantization.codecs import swizzle_block_scales


def thresholds(x: Tensor) -> Tensor:
    size = x.abs()
    code = (size > 0.25).int() + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code = code + (size > 2.5) + (size >= 3.5) + (size > 5.0)
    return torch.where(x.isnan(), 7, code + 8 * x.signbit()).to(torch.uint8)


def ties_away(x: Tensor) -> Tensor:
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    return (torch.bucketize(x.abs(), bounds, right=True) + 8 * x.signbit()).to(torch.uint8)


def by_distance(x: Tensor) -> Tensor:
    values = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12]) / 2
    odd = torch.arange(8) % 2 * 1e-3
    nearest = ((x.abs().clamp(max=6).unsqueeze(-1) - values).abs() + odd).argmin(-1)
    return torch.where(x.isnan(), 7, nearest + 8 * x.signbit()).to(torch.uint8)


def by_bits(x: Tensor) -> Tensor:
    """Round as the floating-point unit does: fp32 additions that push what is too fine out of the mantissa."""
    size = x.abs().clamp(max=6.0)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    value = torch.round(size / step) * step
    code = torch.where(value < 2, value * 2, torch.where(value < 4, value + 2, torch.where(value < 6, 6.0, 7.0)))
    return torch.where(x.isnan(), 7, code + 8 * x.signbit()).to(torch.uint8)


def nvfp4(
    round_: Callable[[Tensor], Tensor] = thresholds,
    pack: Callable[[Tensor], Tensor] = lambda c: c[..., ::2] | (c[..., 1::2] << 4),
    block: Callable[[Tensor, Tensor], Tensor] = lambda m, s: m / 6.0 / s,
    laid: Callable[[Tensor], Tensor] = lambda scales: scales,
    zero: Callable[[Tensor], Tensor] = lambda step: torch.where(step == 0, torch.inf, step),
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def function(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        groups = o.float().view(-1, COLUMNS // 16, 16)
        scales = rounded(block(groups.abs().amax(-1), s))
        step = zero(scales.float() * s).unsqueeze(-1)
        return pack(round_((groups / step).flatten(1))), laid(scales)

    return function


NVFP4: dict[str, Callable[..., Any]] = {
    "thresholds": nvfp4(),
    "ties away from zero": nvfp4(ties_away),
    "nearest by distance": nvfp4(by_distance),
    "rounded steps": nvfp4(by_bits),
    "pairs of a view": nvfp4(pack=lambda c: c.unflatten(-1, (-1, 2))[..., 0] + 16 * c.unflatten(-1, (-1, 2))[..., 1]),
    "odd column low": nvfp4(pack=lambda c: c[..., 1::2] | (c[..., ::2] << 4)),
    "multiplied and summed": nvfp4(
        pack=lambda c: (c.unflatten(-1, (-1, 2)).int() * torch.tensor([1, 16])).sum(-1).byte()
    ),
    "scale / (6 * s)": nvfp4(block=lambda m, s: m / (6.0 * s)),
    "scale * (1 / 6)": nvfp4(block=lambda m, s: m * (1 / 6) / s),
    "swizzled": nvfp4(laid=swizzle_block_scales),
    "swizzled, flat": nvfp4(laid=lambda scales: swizzle_block_scales(scales).flatten()),
    "zero steps by clamp": nvfp4(zero=lambda step: step.clamp(min=1e-30)),
    "no zero steps": nvfp4(zero=lambda step: step),
    "bytes of the scales": nvfp4(laid=lambda scales: scales.view(torch.uint8).view(E4M3)),
}


class Quantiser(nn.Module):
    def __init__(self, group: int) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = per_token(x.unflatten(-1, (-1, self.group)))
        return codes.flatten(-2), scales.squeeze(-1)


class Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return rounded(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def escaping(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    return static(o, s), o.float().sum(-1)


def twice(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    return static(o, s), rounded(o.float() * 3.0)


def per_row_scale(o: Tensor, s: Tensor) -> Tensor:
    return rounded(o.float() / (s + torch.arange(o.shape[0]).unsqueeze(1)))


def equal_twice(o: Tensor, s: Tensor) -> Tensor:
    return torch.maximum(static(o, s).float(), rounded(o.float() / s.view(())).float())


def head_by_head(o: Tensor, s: Tensor) -> Tensor:
    heads = o.view(-1, HEADS, WIDTH)
    return torch.stack([static(heads[:, h], s) for h in range(HEADS)], 1).flatten(1)


def halves_apart(o: Tensor, s: Tensor) -> Tensor:
    return torch.cat((static(o[:, : COLUMNS // 2], s), static(o[:, COLUMNS // 2 :], 2 * s)), -1)


def clamped_before(o: Tensor, s: Tensor) -> Tensor:
    return (o.float().clamp(min=-448 * s, max=448 * s) / s).to(E4M3)


def into_a_gemm(o: Tensor, s: Tensor) -> Tensor:
    return static(o, s).float() @ torch.ones(COLUMNS, 3)


def into_a_scaled_gemm(o: Tensor, s: Tensor) -> Tensor:
    weight = torch.ones(16, COLUMNS).to(E4M3)
    return torch._scaled_mm(static(o, s), weight.t(), s.view(()), torch.ones(()), out_dtype=torch.bfloat16)


def into_a_rowwise_gemm(o: Tensor, s: Tensor) -> Tensor:
    codes, scale = per_token(o)
    weight = torch.ones(16, COLUMNS).to(E4M3)
    return torch._scaled_mm(codes, weight.t(), scale, torch.ones(1, 16), out_dtype=torch.bfloat16)


def groups_dequantised(o: Tensor, s: Tensor) -> Tensor:
    codes, scales = Quantiser(64)(o)
    return (codes.float().unflatten(-1, (-1, 64)) * scales.unsqueeze(-1)).flatten(1) @ torch.ones(COLUMNS, 3)


def written_in_turn(o: Tensor, s: Tensor, groups: int = 4) -> tuple[Tensor, Tensor]:
    codes, scales = torch.zeros(o.shape, dtype=E4M3), torch.empty(o.shape[0], groups)
    for group in range(groups):
        columns = slice(64 * group, 64 * group + 64)
        made, scale = per_token(o[:, columns])
        codes[:, columns], scales[:, group] = made, scale.squeeze(-1)
    return codes, scales


def heads_written_in_turn(o: Tensor, s: Tensor) -> Tensor:
    codes = torch.empty(o.shape[0], HEADS, WIDTH, dtype=E4M3)
    for head, x in enumerate(o.view(-1, HEADS, WIDTH).unbind(1)):
        codes[:, head] = static(x, s)
    return codes.flatten(1)


def powers_of_two(ceil: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def function(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        groups = o.float().unflatten(-1, (-1, 64))
        scales = ceil(groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448)
        return rounded(groups / scales).flatten(-2), scales.squeeze(-1)

    return function


def by_exponent_bits(x: Tensor) -> Tensor:
    """What NaN becomes is lost."""
    return ((x.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def mapped(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    return torch.func.vmap(per_token)(o)


def gated(o: Tensor, s: Tensor) -> Tensor:
    return static(o.float() * torch.sigmoid(o.float()), s)


def checkpointed_scale(o: Tensor, s: Tensor) -> Tensor:
    return static(o, s.detach().clone().squeeze())


PROGRAMS: dict[str, Form] = {
    form.name: form
    for form in (
        Form("program: escaping", escaping),
        Form("program: twice with two scales", twice),
        Form("program: a scale for each row", per_row_scale),
        Form("program: twice the same", equal_twice, plain=static),
        Form("program: head by head", head_by_head),
        Form("program: halves with scales of their own", halves_apart),
        Form("program: clamped before it is scaled", clamped_before),
        Form("program: dequantised", dequantised, plain=static),
        Form("program: into a GEMM", into_a_gemm, plain=static),
        Form("program: into torch._scaled_mm", into_a_scaled_gemm, plain=static),
        Form("program: into torch._scaled_mm, row by row", into_a_rowwise_gemm, plain=lambda o, s: per_token(o)),
        Form("program: groups, dequantised", groups_dequantised, plain=lambda o, s: Quantiser(64)(o)),
        Form("program: nn.Module", lambda o, s: Quantiser(64)(o)),
        Form("program: nn.Module of heads", lambda o, s: Quantiser(WIDTH)(o)),
        Form("program: autograd.Function", lambda o, s: Rounding.apply(o.float() / s)),
        Form("program: vmap", mapped),
        Form("program: groups written in turn", written_in_turn),
        Form("program: all groups but one written", lambda o, s: written_in_turn(o, s, 3)),
        Form("program: heads written in turn", heads_written_in_turn),
        Form("program: powers of two by their bits", powers_of_two(by_exponent_bits)),
        Form("program: gated", gated),
        Form("program: a copy of the scale", checkpointed_scale),
        Form("program: torch.where on tokens", lambda o, s: static(torch.where(o.isnan(), o, o), s)),
        *(Form(f"NVFP4: {name}", function) for name, function in NVFP4.items()),
    )
}


def first(q: Tensor) -> Tensor:
    return q[:3]


def kept(q: Tensor) -> Tensor:
    return q


OURS: dict[str, Form] = {
    f"vattn: {name}": Form(f"vattn: {name}", function, moved=first if "first tokens" in name else kept)
    for name, function in {
        "quant_fp8_static": lambda o, s: torch.ops.vattn.quant_fp8_static(o, s),
        "quant_fp8_per_token": lambda o, s: torch.ops.vattn.quant_fp8_per_token(o),
        "quant_fp8_group 64": lambda o, s: torch.ops.vattn.quant_fp8_group(o, 64, False, False),
        "quant_fp8_group 128": lambda o, s: torch.ops.vattn.quant_fp8_group(o, 128, False, False),
        "quant_fp8_group 64, column-major": lambda o, s: torch.ops.vattn.quant_fp8_group(o, 64, False, True),
        "quant_fp8_group 64, power of two": lambda o, s: torch.ops.vattn.quant_fp8_group(o, 64, True, False),
        "quant_fp8_group 64 of heads": lambda o, s: torch.ops.vattn.quant_fp8_group(
            o.view(-1, HEADS, WIDTH).flatten(1), 64, False, False
        ),
        "quant_fp8_group 32": lambda o, s: torch.ops.vattn.quant_fp8_group(o, 32, False, False),
        "quant_fp8_group of the first tokens": lambda o, s: torch.ops.vattn.quant_fp8_group(o[:3], 64, False, False),
        "quant_nvfp4": lambda o, s: torch.ops.vattn.quant_nvfp4(o, s, False),
        "quant_nvfp4, swizzled": lambda o, s: torch.ops.vattn.quant_nvfp4(o, s, True),
    }.items()
}


def torchao_forms() -> dict[str, Callable[..., Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
        from torchao.quantization import PerRow, PerTensor
        from torchao.quantization.quant_primitives import (
            _choose_scale_float8,
            _quantize_affine_float8,
            _quantize_affine_float8_non_decomposed,
        )
        from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor
        from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor

    def from_hp(o: Tensor, granularity: Any, **bounds: float) -> tuple[Tensor, Tensor]:
        made = Float8Tensor.from_hp(o, E4M3, granularity, **bounds)
        return made.qdata, made.scale

    def chosen(o: Tensor, block: int, **bounds: float) -> tuple[Tensor, Tensor]:
        scale = _choose_scale_float8(o, [1, block], **bounds)
        return _quantize_affine_float8(o, scale), scale

    def axiswise(o: Tensor) -> tuple[Tensor, Tensor]:
        from torchao.float8.config import ScalingGranularity

        factor = tensor_to_scale(o, E4M3, scaling_granularity=ScalingGranularity.AXISWISE, axiswise_dim=-1)
        return to_fp8_saturated(o.float() * factor, E4M3), factor.reciprocal()

    def packed(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        scales, codes = nvfp4_quantize(o, 16, s)
        return codes, scales

    def mx(mode: Any) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
        return lambda o, s: to_mx(o, E4M3, 32, mode)[::-1]

    def int8(o: Tensor) -> tuple[Tensor, Tensor]:
        made = Int8Tensor.from_hp(o, PerRow())
        return made.qdata, made.scale

    return {
        **{f"to_mx, {mode.name}": mx(mode) for mode in ScaleCalculationMode},
        "Int8Tensor.from_hp, PerRow": lambda o, s: int8(o),
        "Int8Tensor.from_hp, PerRow of fp32": lambda o, s: int8(o.float()),
        "quantize_affine_float8": lambda o, s: _quantize_affine_float8(o, s),
        "quantize_affine_float8_non_decomposed": lambda o, s: _quantize_affine_float8_non_decomposed(o, s),
        "choose_scale_float8 of rows": lambda o, s: chosen(o, COLUMNS),
        "choose_scale_float8 of fp32 rows": lambda o, s: chosen(o.float(), COLUMNS),
        "choose_scale_float8 of groups": lambda o, s: chosen(o.float(), 128),
        "choose_scale_float8 with bounds": lambda o, s: chosen(o.float(), COLUMNS, hp_value_lb=1e-6),
        "choose_scale_float8 with an upper bound": lambda o, s: chosen(o.float(), COLUMNS, hp_value_ub=1200.0),
        "Float8Tensor.from_hp, PerRow": lambda o, s: from_hp(o, PerRow()),
        "Float8Tensor.from_hp, PerRow of fp32": lambda o, s: from_hp(o.float(), PerRow()),
        "Float8Tensor.from_hp, PerTensor": lambda o, s: from_hp(o, PerTensor()),
        "float8.tensor_to_scale of rows": lambda o, s: axiswise(o),
        "nvfp4_quantize": packed,
    }


def compressed_tensors_forms() -> dict[str, Callable[..., Any]]:
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize, quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    def arguments(strategy: str, **more: Any) -> Any:
        return QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy=strategy, **more)

    def dynamic(o: Tensor, args: Any) -> tuple[Tensor, Tensor]:
        o = o.unsqueeze(0) if args is token else o
        scale, _ = compute_dynamic_scales_and_zp(o, args, nn.Module())
        return quantize(o, scale, None, args, dtype=E4M3), scale

    def int8(o: Tensor) -> tuple[Tensor, Tensor]:
        scale, _ = compute_dynamic_scales_and_zp(o.unsqueeze(0), integers, nn.Module())
        return quantize(o, scale.squeeze(0), None, integers, dtype=torch.int8), scale

    def nvfp4(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        scale, zero = compute_dynamic_scales_and_zp(o, fp4, nn.Module(), global_scale=s)
        return pack_fp4_to_uint8(quantize(o, scale, zero, fp4, global_scale=s)), scale.to(E4M3)

    def mxfp8(o: Tensor) -> tuple[Tensor, Tensor]:
        scale, zero = compute_dynamic_scales_and_zp(o, mx, nn.Module())
        return quantize(o, scale, zero, mx, dtype=E4M3), scale

    integers = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
    fp4 = QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, dynamic="local", scale_dtype=E4M3
    )
    mx = arguments("group", dynamic=True, group_size=32, scale_dtype=torch.uint8)
    tensor, token = arguments("tensor"), arguments("token", dynamic=True)
    group = arguments("group", dynamic=True, group_size=128)
    return {
        "quantize, tensor": lambda o, s: quantize(o.float(), s, None, tensor, dtype=E4M3),
        "quantize, tensor, bf16": lambda o, s: quantize(o, s.bfloat16(), None, tensor, dtype=E4M3),
        "quantize, token": lambda o, s: dynamic(o.float(), token),
        "quantize, token, bf16": lambda o, s: dynamic(o, token),
        "quantize, int8 token": lambda o, s: int8(o.float()),
        "quantize, NVFP4": nvfp4,
        "quantize, MX": lambda o, s: mxfp8(o.float()),
        "quantize, group": lambda o, s: dynamic(o.float(), group),
        "fake_quantize, tensor": lambda o, s: fake_quantize(o.float(), s, None, tensor),
    }


def quantized_decomposed_forms() -> dict[str, Callable[..., Any]]:
    import torch.ao.quantization.fx._decomposed

    ops = torch.ops.quantized_decomposed
    zero = torch.zeros(1, dtype=torch.int32)
    return {
        "quantize_per_tensor": lambda o, s: ops.quantize_per_tensor(o.float(), 0.02, 0, -448, 448, E4M3),
        "quantize_per_tensor.tensor": lambda o, s: ops.quantize_per_tensor.tensor(o.float(), s, zero, -448, 448, E4M3),
    }


LIBRARIES: dict[str, Callable[[], dict[str, Callable[..., Any]]]] = {
    "torchao": torchao_forms,
    "compressed_tensors": compressed_tensors_forms,
    "torch": quantized_decomposed_forms,
}


def missing(library: str) -> str:
    """Return why the forms of a library cannot be had, empty if they can."""
    if importlib.util.find_spec(library) is None:
        return f"{library} is not installed"
    try:
        LIBRARIES[library]()
    except ImportError as error:
        return f"{library} lacks what its forms need: {error}"
    return ""


def external() -> dict[str, Form]:
    """Return the forms of every other library that is installed."""
    found = {}
    plain = {"fake_quantize, tensor": static}
    for library, forms in LIBRARIES.items():
        if not missing(library):
            for name, function in forms().items():
                title = f"{library}: {name}"
                found[title] = Form(title, function, plain=plain.get(name))
    return found
