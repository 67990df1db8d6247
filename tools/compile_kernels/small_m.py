"""What `compile_all` compiles of products whose weights go ahead of their input."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from tools.compile_kernels.attention import Launch
from vattn.kernels.hopper.linear import launch as few_rows_launch
from vattn.kernels.hopper.linear.launch import RING, streamed_linear
from vattn.ops.linear_arguments import E4M3, LinearArgs
from vattn.quantization.formats import MODEL_DTYPES

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
