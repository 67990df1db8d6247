"""What `compile_all` compiles of products whose weights go ahead of their input."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from vattn.formats import MODEL_DTYPES
from vattn.ops.gluon import few_rows_launch
from vattn.ops.gluon.few_rows_launch import LAUNCH, RINGS, Ring, streamed_linear
from vattn.ops.linear import E4M3, LinearArgs
from vattn.ops.triton.compile_cases import Launch

SIZES = ((6144, 4096), (4096, 14336), (16, 64 * 3))
"""Features and columns: many, long, and one tile whose only chunk is not whole."""


def launches() -> Iterator[Launch]:
    """Yield every ring, dtype and kind of scales."""
    for dtype, (features, columns), ring in itertools.product(("bfloat16", "float16"), SIZES, RINGS):
        values = MODEL_DTYPES[dtype]
        x, weight = torch.empty(2, columns, dtype=values), torch.empty(features, columns, dtype=values)
        yield _recorded(f"{dtype} {features} x {columns} {ring}", LinearArgs(x, weight, None, None, dtype), ring)
    for by_row, by_feature, ring in itertools.product((False, True), (False, True), RINGS):
        x, weight = (torch.empty(rows, 4096, dtype=torch.uint8).view(E4M3) for rows in (2, 6144))
        scale, other = torch.empty((2, 1) if by_row else 1), torch.empty(6144 if by_feature else 1)
        args = LinearArgs(x, weight, scale, other, "bfloat16")
        yield _recorded(f"e4m3 {by_row} {by_feature} {ring}", args, ring)


def _recorded(name: str, args: LinearArgs, ring: Ring) -> Launch:
    found: dict[str, Any] = {}
    kernel = few_rows_launch.streamed_kernel

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return found.update

    with (
        mock.patch.object(few_rows_launch, "streamed_kernel", Recorder()),
        mock.patch.object(few_rows_launch, "_multiprocessors", lambda device: 132),
    ):
        streamed_linear(args, ring)
    arguments = {key: value for key, value in found.items() if key in kernel.arg_names}
    return Launch(f"streamed_kernel {name}", "sm_90", kernel, arguments, {"num_warps": ring.panels, **LAUNCH})
