"""The kernel of streamed products, its own code run in threads on a CPU: indices, barriers, and what it waits for."""

from __future__ import annotations

import pytest
import torch

from tests.gluon_emulation import Boxes, Pointer, Program
from tests.support import relative_l2
from tests.test_linear_op import expected, make_args
from vattn.ops.linear import E4M3

pytest.importorskip("triton.experimental.gluon")

from vattn.ops.gluon import few_rows
from vattn.ops.gluon.few_rows_launch import PANEL_BYTES, Ring, ahead_of

FUNCTIONS = {name: getattr(few_rows, name).fn for name in ("produce", "consume", "ask_for_next", "streamed_kernel")}
CONSTANTS = {"PIECES": few_rows.PIECES.value, "PREFETCH": ""}


@pytest.mark.parametrize("codes", ["", "tensor", "row"])
@pytest.mark.parametrize(
    ("rows", "features", "columns", "programs", "ring"),
    [
        (2, 80, 1024, 2, Ring(4, 3)),  # A ring filled again and again, tiles over its end, programs of 3 and 2 tiles.
        (8, 24, 384, 2, Ring(2, 8)),  # Never full; the last tile is not whole.
        (1, 16, 128, 1, Ring(8, 4)),  # One chunk, most of it behind the last column.
        (19, 100, 512, 3, Ring(2, 2, 32)),  # A second stage at once, many rows.
    ],
)
def test_own_code(rows: int, features: int, columns: int, programs: int, ring: Ring, codes: str) -> None:
    args = make_args(rows, codes, features, columns)
    width = PANEL_BYTES // args.input.itemsize
    height = max(8, 1 << (rows - 1).bit_length())

    def boxes(values: torch.Tensor, size: int, kind: str) -> Boxes:
        return Boxes(values.float().unflatten(1, (-1, width)).transpose(0, 1), [ring.panels, size, width], kind)

    # Results are fp32: roundings would hide small faults.
    output = torch.full((rows, features), torch.nan)
    tiles = -(-features // ring.features)
    for index in range(programs):
        program = Program(FUNCTIONS, index, programs, PANEL_BYTES, CONSTANTS)
        program.names["streamed_kernel"](
            boxes(args.weight, ring.features, "weights"), boxes(args.input, height, "inputs"),
            *(None if scale is None else Pointer(scale) for scale in (args.input_scale, args.weight_scale)),
            None, Pointer(output), rows, features, 0, columns, ring.stages, args.input.dtype is E4M3, codes == "row",
            codes == "row", (0, 0, 0), True, ring.panels,
        )  # fmt: skip
        steps = len(range(index, tiles, programs)) * -(-columns // (ring.panels * width))
        assert program.steps.count("weights") == program.steps.count("inputs") == steps
        copies = [step for step in program.steps if step != "waited"]
        early = min(steps, ring.stages)
        assert copies[: 2 * early] == ["weights"] * early + ["inputs"] * early, "the ring is full before the input"
    assert relative_l2(output.double(), expected(args)) < 1e-6


@pytest.mark.parametrize(
    ("features", "columns", "size"),
    [(100, 4096, 2), (33, 8, 2), (16, 1536, 2), (1000, 3072, 2), (64, 4096, 1), (1, 16, 1)],
)
def test_what_is_asked_for(features: int, columns: int, size: int) -> None:
    """Nothing twice, nothing outside of the weight, the first rows first, and behind all loads of a program's own."""
    args = make_args(2, "", 40, 128)
    weight = torch.zeros(features, columns, dtype=torch.bfloat16 if size == 2 else torch.uint8)
    ahead = ahead_of(weight)
    row_bytes, piece, pieces = ahead
    assert row_bytes == columns * size and piece % 16 == 0 and piece * pieces <= row_bytes and piece <= 3072
    asked = []
    for index in range(3):
        program = Program(FUNCTIONS, index, 3, PANEL_BYTES, CONSTANTS)
        inputs, weights = (x.float().unflatten(1, (-1, 64)).transpose(0, 1) for x in (args.input, args.weight))
        program.names["streamed_kernel"](
            Boxes(weights, [4, 16, 64], "weights"), Boxes(inputs, [4, 8, 64], "inputs"), None, None,
            Pointer(weight), Pointer(torch.zeros(2, 40)), 2, 40, features, 128, 2, False, False, False, ahead, True, 4,
        )  # fmt: skip
        assert program.steps.count("asked") == 1 and "inputs" not in program.steps[program.steps.index("asked") :]
        asked += program.asked
    starts = sorted(place for place, _ in asked)
    assert len(set(starts)) == len(starts) and starts[-1] + piece <= features * row_bytes
    rows = {start // row_bytes for start in starts}
    assert rows == set(range(min(features, 3 * 32 // pieces)))
    assert len(starts) == len(rows) * pieces and all(start % row_bytes in (0, piece) for start in starts)


def test_what_is_not_asked_for() -> None:
    """Rows that are no whole number of 16 bytes, and weights that lie elsewhere than at one."""
    assert ahead_of(None) == ahead_of(torch.zeros(8, 12, dtype=torch.bfloat16)) == (0, 0, 0)
    assert ahead_of(torch.zeros(0, 64)) == ahead_of(torch.zeros(65)[1:].view(1, 64)) == (0, 0, 0)
