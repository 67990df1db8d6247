"""Arguments of `vattn::add_lora`, and their check.

Letters: T rows, K input features, N output features of all parts together, P parts, R ranks, A adapters.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vattn.errors import DeviceError, DtypeError, ShapeError, StrideError
from vattn.quantization.formats import MODEL_DTYPES, dtype_name

TILE_ROWS = 32
"""Most rows of a tile."""


class LoRAArgs(NamedTuple):
    """The arguments of `vattn::add_lora`, which adds to each listed row the product of its adapter.

    `output[t, n] += scales[a, p] * lora_b[a, n] . (lora_a[a, p * R : (p + 1) * R] @ input[t])`, for the adapter a of
    row t and the part p of feature n.
    """

    input: Tensor
    """`[T, K]`, float16, bfloat16 or float32; rows may lie apart."""
    output: Tensor
    """`[T, N]` in the dtype of the input, contiguous: the output of the linear layers."""
    lora_a: Tensor
    """`[A, P * R, K]` in the dtype of the input, contiguous."""
    lora_b: Tensor
    """`[A, N, R]` likewise."""
    scales: Tensor
    """fp32 `[A, P]`."""
    rows: Tensor
    """int32 `[M]`, M >= T: rows in the order of their adapters; those without one are not listed."""
    tiles: Tensor
    """int32 `[L, 3]`: an adapter, and where its rows begin in `rows` and how many there are, up to `TILE_ROWS`; 0 for
    none. A launch looks at no more tiles than T rows of A adapters can have."""
    sizes: list[int]
    """Features of each part; their sum is N."""


def check_lora(args: LoRAArgs) -> None:
    """Check the arguments of `vattn::add_lora`.

    Raises:
        ShapeError, DtypeError, StrideError, DeviceError: one is wrong; the text says which.
    """
    x, output, a, b = args.input, args.output, args.lora_a, args.lora_b
    floats = {"input": x, "output": output, "lora_a": a, "lora_b": b}
    adapters, parts, ranks = a.shape[0], len(args.sizes), b.shape[-1]
    shapes = {
        "output": (output, (x.shape[0], sum(args.sizes))),
        "lora_a": (a, (adapters, parts * ranks, x.shape[-1])),
        "lora_b": (b, (adapters, sum(args.sizes), ranks)),
        "scales": (args.scales, (adapters, parts)),
        "tiles": (args.tiles, (args.tiles.shape[0], 3)),
        "rows": (args.rows, (max(args.rows.shape[0], x.shape[0]),)),
    }
    if x.dim() != 2:
        raise ShapeError(f"input {tuple(x.shape)}", "[T, K]", "view the input")
    for name, (tensor, shape) in shapes.items():
        if tuple(tensor.shape) != shape:
            raise ShapeError(f"{name} {tuple(tensor.shape)} for input {tuple(x.shape)}", str(shape), "check the sizes")
    for name, tensor in floats.items():
        if tensor.dtype is not x.dtype or tensor.dtype not in MODEL_DTYPES.values():
            raise DtypeError(
                f"{name} in {dtype_name(tensor.dtype)} with an input in {dtype_name(x.dtype)}",
                ", ".join(MODEL_DTYPES),
                "cast the adapter to the model's dtype",
            )
    if args.scales.dtype is not torch.float32 or {args.rows.dtype, args.tiles.dtype} != {torch.int32}:
        raise DtypeError(
            f"scales, rows and tiles in {', '.join(dtype_name(t.dtype) for t in (args.scales, args.rows, args.tiles))}",
            "float32, int32 and int32",
            "cast them",
        )
    if x.stride(1) != 1 or not all(tensor.is_contiguous() for tensor in args[1:7]):
        raise StrideError("an operand of add_lora that is not contiguous", "contiguous tensors", "contiguous()")
    devices = {tensor.device for tensor in args[:7]}
    if len(devices) > 1:
        raise DeviceError(f"tensors on {', '.join(sorted(map(str, devices)))}", "one device", "move them")


def most_tiles(num_rows: int, num_adapters: int) -> int:
    """Return how many tiles rows of some adapters can have at most."""
    return min(num_rows, -(-num_rows // TILE_ROWS) + num_adapters)
