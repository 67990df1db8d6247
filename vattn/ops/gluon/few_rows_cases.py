"""What `compile_all` compiles of products whose weights go ahead of their input."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from vattn.formats import MODEL_DTYPES
from vattn.ops.gluon import few_rows_launch, few_rows_tall_launch
from vattn.ops.gluon.few_rows_launch import RING, streamed_linear
from vattn.ops.linear import E4M3, LinearArgs
from vattn.ops.triton.compile_cases import Launch

SIZES = ((6144, 4096), (4096, 14336), (16, 64 * 3))
"""Features and columns: many, long, and one tile whose only chunk is not whole."""


def launches() -> Iterator[Launch]:
    """Yield each dtype and size, and each kind of scales."""
    for dtype, (features, columns) in itertools.product(("bfloat16", "float16"), SIZES):
        x, weight = (torch.empty(height, columns, dtype=MODEL_DTYPES[dtype]) for height in (2, features))
        yield _recorded(f"{dtype} {features} x {columns}", LinearArgs(x, weight, None, None, dtype))
    for by_row, by_feature in itertools.product((False, True), repeat=2):
        x, weight = (torch.empty(height, 4096, dtype=torch.uint8).view(E4M3) for height in (2, 6144))
        scale, other = torch.empty((2, 1) if by_row else 1), torch.empty(6144 if by_feature else 1)
        yield _recorded(f"e4m3 {by_row} {by_feature}", LinearArgs(x, weight, scale, other, "bfloat16"))


def tall_launches() -> Iterator[Launch]:
    """Yield products of tall tiles in clusters of every size, of values and of codes."""
    sizes = ((6144, 4096), (4096, 14336), (2048, 2048), (28672, 4096), (24, 64))
    for (rows, kind), (features, columns) in itertools.product(
        zip((2, 16, 32, 32), ("", "", "", "row"), strict=True), sizes
    ):
        yield _tall(rows, features, columns, kind)
    yield _tall(32, 28672, 4096, "tensor")
    yield _tall(32, 4096, 4096, "", "float16")


def _tall(rows: int, features: int, columns: int, codes: str, dtype: str = "bfloat16") -> Launch:
    x, weight = (
        torch.empty(height, columns, dtype=torch.uint8).view(E4M3)
        if codes
        else torch.empty(height, columns, dtype=MODEL_DTYPES[dtype])
        for height in (rows, features)
    )
    by_row = codes == "row"
    scale = torch.empty((rows, 1) if by_row else 1) if codes else None
    other = torch.empty(features if by_row else 1) if codes else None
    output = torch.empty(rows, features, dtype=MODEL_DTYPES[dtype])
    args = LinearArgs(x, weight, scale, other, dtype)
    _, arguments = few_rows_tall_launch.kernel_arguments(args, output, 132)
    kernel = few_rows_tall_launch.tall_kernel
    options = {name: arguments[name] for name in ("num_warps", "maxnreg", "launch_pdl")}
    given = {name: arguments[name] for name in kernel.arg_names}
    return Launch(f"tall_kernel {rows} x {features} x {columns} {codes or dtype}", "sm_90", kernel, given, options)


def _recorded(name: str, args: LinearArgs) -> Launch:
    found: dict[str, Any] = {}
    kernel = few_rows_launch.streamed_kernel

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return found.update

    with (
        mock.patch.object(few_rows_launch, "streamed_kernel", Recorder()),
        mock.patch.object(few_rows_launch, "multiprocessors", lambda device: 132),
    ):
        streamed_linear(args)
    arguments = {key: value for key, value in found.items() if key in kernel.arg_names}
    return Launch(f"streamed_kernel {name}", "sm_90", kernel, arguments, RING.options)
