"""Products of few rows with a large weight: every byte of the weight is read once.

Rows of the weight are the rows of the tensor cores' tile, and rows of the input its columns. The kernel may begin while
the one before it ends. It is for 16-bit values; of e4m3 codes, and of one or two rows, torch's products are faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vattn.kernels.hopper import availability as hopper
from vattn.kernels.triton.common.codec import INTERPRETED, cast
from vattn.ops.linear_arguments import E4M3, LinearArgs
from vattn.quantization.formats import MODEL_DTYPES


@triton.jit(do_not_specialize=["num_rows"])
def small_m_kernel(
    input, weight, output, num_rows, num_features, input_stride, K: tl.constexpr, ROWS: tl.constexpr,
    FEATURES: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write `input @ weight.T` `[num_rows, num_features]`. Grid: blocks of FEATURES.

    K is a multiple of COLUMNS. OVERLAP: the kernel before may still run.
    """
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    exists = feature < num_features
    start = weight + tl.where(exists, feature, 0).to(tl.int64) * K
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        # Not earlier: the next kernel may read what any kernel before this one wrote.
        tl.extra.cuda.gdc_launch_dependents()
    weights = start[:, None] + column[None, :]
    inputs = input + row[None, :].to(tl.int64) * input_stride + column[:, None]
    present = row[None, :] < num_rows
    total = tl.zeros([FEATURES, ROWS], tl.float32)
    for _ in tl.range(0, K // COLUMNS, num_stages=STAGES):
        a = tl.load(weights)
        b = tl.load(inputs, mask=present, other=0)
        total = tl.dot(a, b, total, input_precision="ieee")
        weights += COLUMNS
        inputs += COLUMNS
    place = output + row[None, :].to(tl.int64) * num_features + feature[:, None]
    tl.store(place, cast(total, output.dtype.element_ty), mask=present & exists[:, None])


@dataclass(frozen=True)
class TileConfig:
    """The tiles of a product.

    Attributes:
        features: rows of the weight in a program.
        columns: of a row, read at a time.
        warps, stages: of the kernel; `stages` reads are on their way.
    """

    features: int
    columns: int
    warps: int
    stages: int


LEAST_ROWS, MOST_ROWS = 3, 32

VALUES, WIDE = TileConfig(64, 128, 4, 5), TileConfig(128, 128, 8, 4)

MANY_FEATURES, MANY_COLUMNS, HEAD = 8192, 8192, 65536
"""Above the first two, cuBLAS reads weights as fast, but for the very many features of a head."""


def takes(args: LinearArgs) -> bool:
    """Return whether a kernel runs a product that has been checked, and is faster than torch's."""
    rows = args.input.shape[0]
    if args.input.dtype is torch.float32 or not 0 < rows <= MOST_ROWS:
        return False
    if streams(args):
        return True
    if rows < LEAST_ROWS or args.input.dtype is E4M3:
        return False
    if not INTERPRETED.value and not hopper.is_hopper(args.input.device):
        return False
    aligned = all(t.data_ptr() % 16 == 0 for t in args[:2]) and args.input.stride(0) * args.input.itemsize % 16 == 0
    return aligned and choose(args) is not None


def streams(args: LinearArgs) -> bool:
    """Return whether the kernel that loads its weight before its input takes a product."""
    if INTERPRETED.value:
        return False
    from vattn.kernels.hopper.linear import launch as few_rows_launch

    return few_rows_launch.accepts(args)


def choose(args: LinearArgs) -> TileConfig | None:
    """Return the tiles of a product, `None` where torch's is as fast."""
    rows, (features, columns) = args.input.shape[0], args.weight.shape
    if columns > MANY_COLUMNS or features % 16 or MANY_FEATURES < features < HEAD:
        return None
    tiles = WIDE if features >= HEAD and rows > 16 else VALUES
    return tiles if columns % tiles.columns == 0 else None


def small_m_linear(args: LinearArgs, tiles: TileConfig | None = None) -> Tensor:
    """Run a product that `takes` accepts; `tiles` overrides the one that its sizes would choose."""
    if tiles is None and streams(args):
        from vattn.kernels.hopper.linear.launch import streamed_linear

        return streamed_linear(args)
    tiles = tiles or choose(args)
    assert tiles is not None
    x, (rows, columns), features = args.input, args.input.shape, args.weight.shape[0]
    output = torch.empty(rows, features, dtype=MODEL_DTYPES[args.dtype], device=x.device)
    overlap = not INTERPRETED.value
    small_m_kernel[(-(-features // tiles.features),)](
        input=x, weight=args.weight, output=output, num_rows=rows, num_features=features, input_stride=x.stride(0),
        K=columns, ROWS=max(16, triton.next_power_of_2(rows)), FEATURES=tiles.features, COLUMNS=tiles.columns,
        STAGES=tiles.stages, OVERLAP=overlap, num_warps=tiles.warps, launch_pdl=overlap, enable_fp_fusion=True,
    )  # fmt: skip
    return output
