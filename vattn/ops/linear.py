"""`vattn::linear`: the product of a linear layer, plain or of e4m3 codes, which is fast for few rows too.

A step of few tokens reads every weight once for a handful of rows. Its time is that of reading, which general matrix
products do not reach on weights of some tens of megabytes.

Letters: T rows, N output features, K input features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vattn.errors import ConfigError, DeviceError, DtypeError, ScaleError, ShapeError, StrideError
from vattn.formats import MODEL_DTYPES, dtype_name
from vattn.ops.installed import has_triton

E4M3 = torch.float8_e4m3fn


class LinearArgs(NamedTuple):
    """The arguments of `vattn::linear`, which returns `input @ weight.T`, `[T, N]` in the dtype that is named."""

    input: Tensor
    """`[T, K]`, float16, bfloat16 or float32, or e4m3 codes; rows may lie apart."""
    weight: Tensor
    """`[N, K]` in the dtype of the input, contiguous; no kernel just before writes it, for none is waited for."""
    input_scale: Tensor | None
    """fp32 `[1]`, or `[T, 1]`; of codes alone."""
    weight_scale: Tensor | None
    """fp32 `[1]`, or `[N]`; of codes alone."""
    dtype: str
    """Of the result, `"bfloat16"` and so on: the input's, unless that is of codes."""


def check_linear(args: LinearArgs) -> None:
    """Check the arguments of `vattn::linear`.

    Raises:
        DtypeError, ShapeError, StrideError, ScaleError, ConfigError, DeviceError: one is wrong; the text says which.
    """
    x, weight = args.input, args.weight
    if args.dtype not in MODEL_DTYPES:
        raise ConfigError(f"dtype={args.dtype!r} of a product", ", ".join(MODEL_DTYPES), "name the model's dtype")
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or not weight.shape[1]:
        raise ShapeError(
            f"input {tuple(x.shape)} and weight {tuple(weight.shape)}", "[T, K] and [N, K], K not 0", "view the input"
        )
    dtypes = (MODEL_DTYPES[args.dtype], E4M3)
    if x.dtype is not weight.dtype or x.dtype not in dtypes:
        raise DtypeError(
            f"input in {dtype_name(x.dtype)} and weight in {dtype_name(weight.dtype)}, for {args.dtype}",
            f"both in {args.dtype}, or both e4m3 codes",
            "cast the input",
        )
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise StrideError(
            f"strides {x.stride()} and {weight.stride()}", "contiguous rows, and a contiguous weight", "contiguous()"
        )
    shapes = {"input_scale": ((1,), (x.shape[0], 1)), "weight_scale": ((1,), (weight.shape[0],))}
    for name, allowed in shapes.items():
        scale = getattr(args, name)
        if (scale is not None) != (x.dtype is E4M3):
            raise ScaleError(
                f"{name} {'with' if scale is not None else 'missing for'} {dtype_name(x.dtype)}",
                "scales for e4m3 codes, and for them alone",
                f"pass {name} as the input asks for it",
            )
        if scale is not None and (tuple(scale.shape) not in allowed or scale.dtype is not torch.float32):
            raise ShapeError(
                f"{name} {tuple(scale.shape)} in {dtype_name(scale.dtype)}",
                f"fp32, {' or '.join(map(str, allowed))}",
                "reshape it",
            )
    devices = {t.device for t in args[:4] if isinstance(t, Tensor)}
    if len(devices) > 1:
        raise DeviceError(f"tensors on {', '.join(sorted(map(str, devices)))}", "one device", "move them")


def linear(args: LinearArgs) -> Tensor:
    """Return the product, by the kernel for few rows where there is one for these sizes, and by torch otherwise."""
    if args.input.is_cuda and has_triton():
        from vattn.ops.triton.linear import few_rows_linear, takes

        if takes(args):
            return few_rows_linear(args)
    dtype = MODEL_DTYPES[args.dtype]
    if args.input_scale is None or args.weight_scale is None:
        return args.input @ args.weight.t()
    return scaled_product(args.input, args.weight, args.input_scale, args.weight_scale, dtype)


def scaled_product(codes: Tensor, weight: Tensor, scale: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product of codes, with scales as `vattn::linear` has them: in fp32 off a GPU, by torch on one."""
    if not codes.is_cuda:
        return (codes.float() @ weight.float().t() * scale * other).to(dtype)
    if scale.dim() == 2 or other.numel() != 1:
        # Scales for the rows of one operand ask for such scales of the other.
        scale = scale.expand(codes.shape[0], 1).contiguous()
        other = other.expand(weight.shape[0])[None].contiguous()
    return torch._scaled_mm(codes, weight.t(), scale, other, out_dtype=dtype, use_fast_accum=True)
