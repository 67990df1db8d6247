"""How products of 9 to 32 rows are spread over clusters of CTAs, and their launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vattn.formats import MODEL_DTYPES
from vattn.ops.gluon.decode_cluster_launch import launch_in_clusters
from vattn.ops.gluon.few_rows_launch import PANEL_BYTES, multiprocessors
from vattn.ops.gluon.few_rows_tall import tall_kernel
from vattn.ops.linear import E4M3, LinearArgs

FEATURES = 256
"""Rows of the weight in a tile."""

MEMORY, INBOX = 226 * 1024, 36 * 1024
"""Bytes of a CTA's shared memory that may be used, and those of them that hold what other CTAs send."""

WARPS, REGISTERS = 8, 96


def spread(features: int, columns_bytes: int, processors: int) -> tuple[int, int]:
    """Return the clusters of a product, and the CTAs of one: the most that all run at once."""
    tiles = -(-features // FEATURES)
    for size in (8, 4, 2):
        if tiles * size <= processors and columns_bytes // PANEL_BYTES >= size:
            return tiles, size
    # Equally many tiles for each, or one less.
    return -(-tiles // -(-tiles // processors)), 1


def tall_linear(args: LinearArgs) -> Tensor:
    """Run a product that `few_rows_launch.accepts` takes."""
    output = torch.empty(
        args.input.shape[0], args.weight.shape[0], dtype=MODEL_DTYPES[args.dtype], device=args.input.device
    )
    clusters, arguments = kernel_arguments(args, output, multiprocessors(args.input.device))
    launch_in_clusters(tall_kernel, (clusters,), arguments["CLUSTER"], arguments)
    return output


def kernel_arguments(args: LinearArgs, output: Tensor, processors: int) -> tuple[int, dict[str, Any]]:
    """Return the clusters to launch, and with what."""
    x, weight = args.input, args.weight
    height, row_bytes = max(8, triton.next_power_of_2(x.shape[0])), x.shape[1] * x.itemsize
    clusters, size = spread(weight.shape[0], row_bytes, processors)
    room = MEMORY - (INBOX if size > 1 else 0)
    return clusters, {
        "weight_boxes": _boxes(weight, FEATURES), "input_boxes": _boxes(x, height), "input_scale": args.input_scale,
        "weight_scale": args.weight_scale, "output": output, "num_rows": x.shape[0], "num_features": weight.shape[0],
        "CHUNKS": row_bytes // PANEL_BYTES, "STAGES": room // ((FEATURES + height) * PANEL_BYTES),
        "CLUSTER": size, "CODES": x.dtype is E4M3,
        "ROW_SCALES": args.input_scale is not None and args.input_scale.dim() == 2,
        "FEATURE_SCALES": args.weight_scale is not None and args.weight_scale.numel() > 1,
        "num_warps": WARPS, "maxnreg": REGISTERS, "launch_pdl": True,
    }  # fmt: skip


def _boxes(rows: Tensor, height: int) -> Any:
    """Return a tensor map over rows `[rows, K]`, 128 bytes of `height` rows at a time."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=PANEL_BYTES, element_bitwidth=8 * rows.itemsize, rank=2)
    columns = PANEL_BYTES // rows.itemsize
    return TensorDescriptor(rows, list(rows.shape), [rows.stride(0), 1], [height, columns], layout)
