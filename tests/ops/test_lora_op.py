"""`vattn::add_lora`: the reference and the kernels against fp64, padding and corrupt lists, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import relative_l2
from vattn import errors
from vattn.layers.lora import AdapterRows
from vattn.ops.lora_arguments import LoRAArgs
from vattn.ops.reference.lora import add_lora

SLOTS, COUNTS = [2, -1, 0, 2, 4, 0], [3, 4, 1, 40, 1, 9]
"""Two requests of one adapter with another between them, more rows than a tile has, and rows without an adapter."""


def make_args(
    dtype: torch.dtype = torch.float32, columns: int = 200, rank: int = 5, sizes: Any = (40, 24, 70)
) -> LoRAArgs:
    """Random arguments for `SLOTS`, with two rows of padding, rows that lie apart, and NaN between them."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    total, adapters = sum(COUNTS) + 2, 5
    room = torch.full((total, columns + 8), torch.nan, dtype=dtype)
    room[:, :columns] = randn(total, columns)
    rows = AdapterRows(adapters, 96, torch.device("cpu"))
    rows.write(SLOTS, COUNTS)
    a, b = randn(adapters, len(sizes) * rank, columns) / columns**0.5, randn(adapters, sum(sizes), rank)
    # No row uses these: nothing may read them.
    a[[1, 3]], b[[1, 3]] = torch.nan, torch.nan
    scales = torch.rand(adapters, len(sizes), generator=generator) + 0.5
    return LoRAArgs(room[:, :columns], randn(total, sum(sizes)), a, b, scales, rows.rows, rows.tiles, list(sizes))


def expected(args: LoRAArgs) -> torch.Tensor:
    """Return the output in fp64, row by row."""
    output, rank, row = args.output.double(), args.lora_b.shape[2], 0
    for slot, count in zip(SLOTS, COUNTS, strict=True):
        for _ in range(count):
            begin = 0
            for part, size in enumerate(args.sizes if slot >= 0 else ()):
                a = args.lora_a[slot, part * rank : (part + 1) * rank].double()
                b = args.lora_b[slot, begin : begin + size].double()
                output[row, begin : begin + size] += b @ (a @ args.input[row].double()) * args.scales[slot, part]
                begin += size
            row += 1
    return output


def test_the_op() -> None:
    args = make_args()
    want, padding = expected(args), args.output[-2:].clone()
    torch.ops.vattn.add_lora(*args)
    assert relative_l2(args.output.double(), want) < 1e-6 and torch.equal(args.output[-2:], padding)
    torch.library.opcheck(torch.ops.vattn.add_lora.default, tuple(make_args()))


@pytest.mark.parametrize(
    ("dtype", "columns", "rank", "sizes"),
    [
        (torch.float32, 200, 5, (40, 24, 70)),  # Tiles of features over three parts, a rank that is no power of two.
        (torch.float16, 1100, 16, (130,)),  # Several splits of K, the last one not whole.
        (torch.float32, 96, 40, (64, 64)),  # Two blocks of ranks.
    ],
)
def test_the_kernels(dtype: torch.dtype, columns: int, rank: int, sizes: tuple[int, ...]) -> None:
    """In the interpreter."""
    kernels = pytest.importorskip("vattn.kernels.triton.lora")
    args = make_args(dtype, columns, rank, sizes)
    want, padding = expected(args), args.output[-2:].clone()
    kernels.launch_lora(args, kernels.LoRATiles(columns=64, features=32, programs=16))
    # fp16 rounds the hidden values and the result, to 2**-12 each at most.
    assert relative_l2(args.output.double(), want) < (5e-4 if dtype is torch.float16 else 1e-6)
    assert torch.equal(args.output[-2:], padding)


def test_corrupt_lists_write_nowhere_else() -> None:
    kernels = pytest.importorskip("vattn.kernels.triton.lora")
    args = make_args()
    before = args.output.clone()
    args.rows.copy_(torch.tensor([-7, 60, 1 << 30, -(1 << 31)] * 24))
    for tile in ([0, 0, 32], [9, 0, 32], [-1, 0, 4], [2, 95, 32], [2, -3, 5], [4, 1 << 30, 7]):
        args.tiles.zero_()
        args.tiles[0] = torch.tensor(tile)
        kernels.launch_lora(args)
        add_lora(args)
    assert torch.equal(args.output, before)


def test_refused() -> None:
    args = make_args()
    wrong: list[tuple[type[Exception], dict[str, Any]]] = [
        (errors.ShapeError, {"output": args.output[:, 1:]}),
        (errors.ShapeError, {"rows": args.rows[:5]}),
        (errors.ShapeError, {"sizes": [40, 24, 71]}),
        (errors.DtypeError, {"lora_b": args.lora_b.half()}),
        (errors.DtypeError, {"tiles": args.tiles.long()}),
        (errors.StrideError, {"lora_a": args.lora_a.mT.contiguous().mT}),
        (errors.GradientError, {"lora_a": args.lora_a.clone().requires_grad_()}),
    ]
    for kind, changes in wrong:
        with pytest.raises(kind):
            torch.ops.vattn.add_lora(*args._replace(**changes))
