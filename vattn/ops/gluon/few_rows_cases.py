"""What `compile_all` compiles of products whose weights go ahead of their input."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from vattn.formats import MODEL_DTYPES
from vattn.ops.gluon import few_rows_launch
from vattn.ops.gluon.few_rows_launch import MANY_ROWS, RINGS, WIDE_RINGS, Ring, streamed_linear
from vattn.ops.linear import E4M3, LinearArgs
from vattn.ops.triton.compile_cases import Launch

SIZES = ((6144, 4096), (4096, 14336), (16, 64 * 3))
"""Features and columns: many, long, and one tile whose only chunk is not whole."""


def launches() -> Iterator[Launch]:
    """Yield every ring with its rows, of values and of codes; each dtype and kind of scales with the first ring."""
    rings = [*itertools.product((2,), RINGS), *itertools.product((16, MANY_ROWS), WIDE_RINGS)]
    values = [("bfloat16", SIZES[0], ring) for ring in rings]
    values += [(dtype, size, rings[0]) for dtype, size in itertools.product(("bfloat16", "float16"), SIZES[1:])]
    for dtype, (features, columns), (rows, ring) in values:
        x, weight = (torch.empty(height, columns, dtype=MODEL_DTYPES[dtype]) for height in (rows, features))
        yield _recorded(f"{dtype} {features} x {columns}", LinearArgs(x, weight, None, None, dtype), ring)
    codes = [(True, False, ring) for ring in rings]
    codes += [(by_row, not by_row, rings[0]) for by_row in (False, True)]
    for by_row, by_feature, (rows, ring) in codes:
        x, weight = (torch.empty(height, 4096, dtype=torch.uint8).view(E4M3) for height in (rows, 6144))
        scale, other = torch.empty((rows, 1) if by_row else 1), torch.empty(6144 if by_feature else 1)
        yield _recorded(f"e4m3 {by_row} {by_feature}", LinearArgs(x, weight, scale, other, "bfloat16"), ring)
    for columns in (64, 2048, 4096):  # Pieces of the next weight: less than one, one and two of each row.
        x, weight, following = (torch.empty(height, columns, dtype=torch.bfloat16) for height in (2, 6144, 100))
        yield _recorded(f"ahead {columns}", LinearArgs(x, weight, None, None, "bfloat16", following), rings[0][1])


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
    name = f"streamed_kernel {name} {args.input.shape[0]} rows {ring}"
    return Launch(name, "sm_90", kernel, arguments, ring.options)
