"""Which products the kernel that loads its weight before its input takes, and its launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vattn.config import device as devices
from vattn.kernels.hopper import availability as hopper
from vattn.kernels.hopper.linear.kernel import streamed_kernel
from vattn.ops.linear_arguments import E4M3, LinearArgs
from vattn.quantization.formats import MODEL_DTYPES

PANEL_BYTES = 128
"""Of a row, read by one warp at a time: the widest swizzle of shared memory."""


@dataclass(frozen=True)
class Ring:
    """How much is on its way.

    Attributes:
        panels: of a row in a stage; also warps.
        stages: of the ring.
        features: rows of the weight in a tile.
        registers: of a thread; few, so that small kernels fit beside it.
    """

    panels: int = 8
    stages: int = 8
    features: int = 16
    registers: int = 80

    @property
    def options(self) -> dict[str, Any]:
        """How the kernel is compiled and launched."""
        return {"num_warps": self.panels, "maxnreg": self.registers, "launch_pdl": True}


RING = Ring()
"""What runs: 192 KiB, so that no second program fits beside one on a multiprocessor."""

MOST_ROWS = 8
"""Rows of the input: every tile reads the whole input."""


def accepts(args: LinearArgs) -> bool:
    """Return whether the kernel runs a product that has been checked."""
    x, weight = args.input, args.weight
    if x.dtype is torch.float32 or not 0 < x.shape[0] <= MOST_ROWS or not hopper.is_hopper(x.device):
        return False
    row_bytes = (x.shape[1] * x.itemsize, x.stride(0) * x.itemsize)
    # Rows of a tensor map must not overlap; the rows of an expanded input do.
    aligned = row_bytes[0] % PANEL_BYTES == 0 and row_bytes[1] % 16 == 0 and row_bytes[1] >= row_bytes[0]
    return aligned and all(t.data_ptr() % 16 == 0 for t in (x, weight)) and weight.shape[0] > 0


def streamed_linear(args: LinearArgs, ring: Ring = RING) -> Tensor:
    """Run a product that `accepts` takes."""
    x, weight, features = args.input, args.weight, args.weight.shape[0]
    output = torch.empty(x.shape[0], features, dtype=MODEL_DTYPES[args.dtype], device=x.device)
    tiles, rows = -(-features // ring.features), max(8, triton.next_power_of_2(x.shape[0]))
    streamed_kernel[(min(tiles, devices.multiprocessors(x.device)),)](
        weight_boxes=_boxes(weight, ring.features, ring), input_boxes=_boxes(x, rows, ring),
        input_scale=args.input_scale, weight_scale=args.weight_scale, output=output, num_rows=x.shape[0],
        num_features=features, K=x.shape[1], STAGES=ring.stages, CODES=x.dtype is E4M3,
        ROW_SCALES=args.input_scale is not None and args.input_scale.dim() == 2,
        FEATURE_SCALES=args.weight_scale is not None and args.weight_scale.numel() > 1,
        **ring.options,
    )  # fmt: skip
    return output


def _boxes(rows: Tensor, height: int, ring: Ring) -> Any:
    """Return a tensor map over rows `[rows, K]` as panels `[K / columns, rows, columns]`."""
    columns = PANEL_BYTES // rows.itemsize
    layout = gl.NVMMASharedLayout(swizzle_byte_width=PANEL_BYTES, element_bitwidth=8 * rows.itemsize, rank=3)
    shape, strides = [rows.shape[1] // columns, rows.shape[0], columns], [columns, rows.stride(0), 1]
    return TensorDescriptor(rows, shape, strides, [ring.panels, height, columns], layout)
