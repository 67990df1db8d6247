"""Arguments of the linear op, and their check."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vattn.errors import ConfigError, DeviceError, DtypeError, ScaleError, ShapeError, StrideError
from vattn.quantization.formats import MODEL_DTYPES, dtype_name

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
                f"pass {name} with e4m3 codes, and leave it out otherwise",
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
