"""Products of few rows with a large weight: every byte of the weight is read once.

Rows of the weight are the rows of the tensor cores' tile, and rows of the input its columns; one or two rows of 16-bit
values need no tensor cores. A kernel may begin while the one before it ends; scales, and the first weights for two
rows, depend on nothing and are read before it waits for the input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vattn.formats import MODEL_DTYPES
from vattn.ops import hopper, variants
from vattn.ops.linear import E4M3, LinearArgs
from vattn.ops.triton.codec import INTERPRETED, cast


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    input, weight, input_scale, weight_scale, output, num_rows, num_features, input_stride, K: tl.constexpr,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, CODES: tl.constexpr,
    ROW_SCALES: tl.constexpr, FEATURE_SCALES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write `input @ weight.T` `[num_rows, num_features]`. Grid: blocks of FEATURES.

    K is a multiple of COLUMNS. CODES: bytes are e4m3. OVERLAP: the kernel before may still run.
    """
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    exists = feature < num_features
    start = weight + tl.where(exists, feature, 0).to(tl.int64) * K
    if CODES:
        # Scales come from memory: loads at the end of the kernel would make it longer.
        by_feature = tl.load(weight_scale + (feature if FEATURE_SCALES else 0 * feature), mask=exists, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        # Not earlier: what begins now may count on everything that came before this kernel.
        tl.extra.cuda.gdc_launch_dependents()
    if CODES:
        by_row = tl.load(input_scale + (row if ROW_SCALES else 0 * row), mask=row < num_rows, other=0.0)
    weights = start[:, None] + column[None, :]
    inputs = input + row[None, :].to(tl.int64) * input_stride + column[:, None]
    present = row[None, :] < num_rows
    total = tl.zeros([FEATURES, ROWS], tl.float32)
    for _ in tl.range(0, K // COLUMNS, num_stages=STAGES):
        a = tl.load(weights)
        b = tl.load(inputs, mask=present, other=0)
        if CODES:
            a, b = a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True)
        total = tl.dot(a, b, total, input_precision="ieee")
        weights += COLUMNS
        inputs += COLUMNS
    if CODES:
        total = total * by_row[None, :] * by_feature[:, None]
    place = output + row[None, :].to(tl.int64) * num_features + feature[:, None]
    tl.store(place, cast(total, output.dtype.element_ty), mask=present & exists[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def two_rows_kernel(
    input, weight, output, num_rows, num_features, input_stride, K: tl.constexpr, FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Same for one or two rows, without tensor cores. FEATURES divides the features."""
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    column = tl.arange(0, COLUMNS)
    start = weight + tl.program_id(0).to(tl.int64) * FEATURES * K
    weights = start + tl.arange(0, FEATURES)[:, None] * K + column[None, :]
    a = tl.load(weights)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.zeros([FEATURES, COLUMNS], tl.float32)
    second = tl.zeros([FEATURES, COLUMNS], tl.float32)
    # A single row is multiplied twice.
    other = input + (num_rows - 1) * input_stride
    for index in tl.static_range(K // COLUMNS):
        x = tl.load(input + index * COLUMNS + column).to(tl.float32)
        y = tl.load(other + index * COLUMNS + column).to(tl.float32)
        wide = a.to(tl.float32)
        if index + 1 < K // COLUMNS:
            a = tl.load(weights + (index + 1) * COLUMNS)
        first += wide * x[None, :]
        second += wide * y[None, :]
    tl.store(output + (num_rows - 1) * num_features + feature, cast(tl.sum(second, 1), output.dtype.element_ty))
    if num_rows == 2:
        tl.store(output + feature, cast(tl.sum(first, 1), output.dtype.element_ty))


@dataclass(frozen=True)
class Cut:
    """How a product is cut.

    Attributes:
        features: rows of the weight in a program.
        columns: of a row, read at a time.
        warps, stages: of the kernel; `stages` reads are on their way. One stage: the kernel for two rows.
    """

    features: int
    columns: int
    warps: int
    stages: int


MOST_ROWS = 32

TWO_ROWS = Cut(4, 2048, 8, 1)
CODES, VALUES, WIDE = Cut(64, 256, 4, 5), Cut(64, 128, 4, 5), Cut(128, 128, 8, 4)

MANY_FEATURES, MANY_COLUMNS, HEAD = 8192, 8192, 65536
"""Above the first two, cuBLAS reads weights as fast, but for the very many features of a head."""


def takes(args: LinearArgs) -> bool:
    """Return whether a kernel runs a product that has been checked, and is faster than torch's."""
    rows, which = args.input.shape[0], variants.current().few_rows
    if which == "none" or args.input.dtype is torch.float32 or not 0 < rows <= MOST_ROWS:
        return False
    if streams(args):
        return True
    if which in ("values", "streamed") and (rows <= 2 or args.input.dtype is E4M3):
        return False
    if not INTERPRETED.value and not hopper.is_hopper(args.input.device):
        return False
    aligned = all(t.data_ptr() % 16 == 0 for t in args[:2]) and args.input.stride(0) * args.input.itemsize % 16 == 0
    return aligned and choose(args) is not None


def streams(args: LinearArgs) -> bool:
    """Return whether the kernel whose weights go ahead of its input is wanted, and takes a product."""
    if variants.current().few_rows != "streamed" or INTERPRETED.value:
        return False
    from vattn.ops.gluon import few_rows_launch

    return few_rows_launch.accepts(args)


def choose(args: LinearArgs) -> Cut | None:
    """Return the cut of a product, `None` where torch's is as fast."""
    rows, size, (features, columns) = args.input.shape[0], args.input.itemsize, args.weight.shape
    if columns > MANY_COLUMNS or features % 16:
        return None
    if rows <= 2 and size == 2 and columns % TWO_ROWS.columns == 0:
        return TWO_ROWS
    if size == 2 and features >= HEAD:
        cut = WIDE if rows > 16 else VALUES
    elif features > MANY_FEATURES:
        return None
    else:
        cut = CODES if size == 1 else VALUES
    return cut if columns % cut.columns == 0 else None


def few_rows_linear(args: LinearArgs, cut: Cut | None = None) -> Tensor:
    """Run a product that `takes` accepts; `cut` overrides the one that its sizes would choose."""
    if cut is None and streams(args):
        from vattn.ops.gluon.few_rows_launch import streamed_linear

        return streamed_linear(args)
    cut = cut or choose(args)
    assert cut is not None
    x, weight, (rows, columns), features = args.input, args.weight, args.input.shape, args.weight.shape[0]
    codes = x.dtype is E4M3
    output = torch.empty(rows, features, dtype=MODEL_DTYPES[args.dtype], device=x.device)
    overlap = not INTERPRETED.value
    common = {
        "output": output, "num_rows": rows, "num_features": features, "input_stride": x.stride(0), "K": columns,
        "FEATURES": cut.features, "COLUMNS": cut.columns, "OVERLAP": overlap,
        "num_warps": cut.warps, "launch_pdl": overlap, "enable_fp_fusion": True,
    }  # fmt: skip
    grid = (-(-features // cut.features),)
    if cut.stages == 1:
        # With more registers two programs would fit on a multiprocessor instead of three.
        two_rows_kernel[grid](input=x, weight=weight, maxnreg=80, **common)
        return output
    x, weight = (t.view(torch.uint8) if codes else t for t in (x, weight))
    few_rows_kernel[grid](
        input=x, weight=weight, input_scale=args.input_scale, weight_scale=args.weight_scale,
        ROWS=max(16, triton.next_power_of_2(rows)), STAGES=cut.stages, CODES=codes,
        ROW_SCALES=args.input_scale is not None and args.input_scale.dim() == 2,
        FEATURE_SCALES=args.weight_scale is not None and args.weight_scale.numel() > 1, **common,
    )  # fmt: skip
    return output
