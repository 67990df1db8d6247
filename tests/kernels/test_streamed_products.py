"""The kernel of streamed products, its own code run in threads on a CPU: indices, barriers, and what it waits for."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.gluon_emulation import Boxes, Pointer, Program
from tests.ops.test_linear_op import expected, make_args
from tests.support import relative_l2
from vattn.ops.linear_arguments import E4M3

pytest.importorskip("triton.experimental.gluon")

from vattn.kernels.hopper import compat
from vattn.kernels.hopper.linear import kernel as few_rows
from vattn.kernels.hopper.linear.launch import PANEL_BYTES, Ring

FUNCTIONS = {name: getattr(few_rows, name).fn for name in ("produce", "consume", "streamed_kernel")}
FUNCTIONS["take_over"] = compat.take_over.fn


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
        program = Program(FUNCTIONS, index, programs, PANEL_BYTES)
        program.names["streamed_kernel"](
            boxes(args.weight, ring.features, "weights"), boxes(args.input, height, "inputs"),
            *(None if scale is None else Pointer(scale) for scale in (args.input_scale, args.weight_scale)),
            Pointer(output), rows, features, columns, ring.stages, args.input.dtype is E4M3, codes == "row",
            codes == "row", ring.panels,
        )  # fmt: skip
        steps = len(range(index, tiles, programs)) * -(-columns // (ring.panels * width))
        assert program.steps.count("weights") == program.steps.count("inputs") == steps
        copies = [step for step in program.steps if step != "waited"]
        early = min(steps, ring.stages)
        assert copies[: 2 * early] == ["weights"] * early + ["inputs"] * early, "the ring is full before the input"
    assert relative_l2(output.double(), expected(args)) < 1e-6
