"""The kernel of products in tall tiles, its own code run in threads on a CPU, and how its tiles are spread."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gluon_emulation import PATIENCE, Boxes, Memory, Pointer, Program
from tests.support import relative_l2
from tests.test_linear_op import expected, make_args

pytest.importorskip("triton.experimental.gluon")

from vattn.ops.gluon import compat, few_rows_tall
from vattn.ops.gluon.few_rows_launch import PANEL_BYTES
from vattn.ops.gluon.few_rows_tall_launch import FEATURES, kernel_arguments, spread

FUNCTIONS = {
    name: getattr(few_rows_tall, name).fn for name in ("load_weights", "load_inputs", "exchange", "tall_kernel")
}
FUNCTIONS["take_over"] = compat.take_over.fn


class Sum:
    """Sums to which products are added when they are waited for, as late as they may be."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.missing = values, list[tuple[Memory, Memory]]()

    def wait(self, num_outstanding: int) -> Any:
        while len(self.missing) > num_outstanding:
            a, b = self.missing.pop(0)
            self.values = a.load(None) @ b.load(None) + self.values
        return self if num_outstanding else self.values


def multiply(a: Memory, b: Memory, total: Any, is_async: bool) -> Sum:
    found = total if isinstance(total, Sum) else Sum(total)
    found.missing.append((a, b))
    return found


class Cluster:
    """The inboxes of the CTAs of a cluster, their barrier, and what the kernel calls for them."""

    def __init__(self, size: int) -> None:
        self.inboxes = [torch.full((36864 // 4,), torch.nan) for _ in range(size)]
        self.barrier, self.arrived = threading.Barrier(size), threading.local()

    def names(self, rank: int) -> dict[str, Any]:
        def send(value: Tensor, place: Tensor, cta: Tensor) -> None:
            # Two neighbours at once: they lie behind each other, in one CTA's inbox, and the first at a whole 8 bytes.
            assert value.shape == place.shape == cta.shape and torch.equal(cta[:, ::2], cta[:, 1::2])
            assert not (place[:, ::2] % 8).any() and torch.equal(place[:, ::2] + 4, place[:, 1::2])
            for other, inbox in enumerate(self.inboxes):
                places = place[cta == other] // 4
                assert places.numel() * len(self.inboxes) == value.numel() and inbox[places].isnan().all()
                inbox[places] = value[cta == other]

        def receive(place: Tensor) -> Tensor:
            assert not (place[:, ::4] % 16).any()
            return self.inboxes[rank][place // 4]

        return {
            "open_sums": lambda: 0, "send_two": send, "receive_four": receive,
            "arrive_at_cluster_barrier": lambda: None, "wait_at_cluster_barrier": lambda: self.barrier.wait(PATIENCE),
            "block_barrier": lambda: None, "PAD": 4,
            "warpgroup_mma": multiply,
            "warpgroup_mma_wait": lambda num_outstanding, deps: deps[0].wait(num_outstanding),
        }  # fmt: skip


def run(args: Any, processors: int, output: Tensor) -> list[Program]:
    """Run every cluster, the CTAs of one at the same time."""
    clusters, given = kernel_arguments(args, torch.empty(output.shape, dtype=torch.bfloat16), processors)
    size = given["CLUSTER"]
    given = {name: x for name, x in given.items() if name not in ("maxnreg", "launch_pdl")}
    for name, x, height in (("weight_boxes", args.weight, FEATURES), ("input_boxes", args.input, 0)):
        height = height or given[name].block_shape[0]
        given[name] = Boxes(x.float(), [height, given[name].block_shape[1]], name.split("_")[0] + "s")
    given |= {name: None if x is None else Pointer(x) for name, x in given.items() if name.endswith("_scale")}
    given["output"] = Pointer(output)
    programs, faults = [], list[BaseException]()
    for cluster in range(clusters):
        shared, threads = Cluster(size), []
        for rank in range(size):
            program = Program(FUNCTIONS, cluster * size + rank, clusters * size, PANEL_BYTES)
            program.names.update(shared.names(rank))
            programs.append(program)

            def guarded(program: Program = program) -> None:
                try:
                    program.names["tall_kernel"](**given)
                except BaseException as error:
                    faults.append(error)

            threads.append(threading.Thread(target=guarded, daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE)
        if faults:
            raise faults[0]
    return programs


@pytest.mark.parametrize("codes", ["", "tensor", "row"])
@pytest.mark.parametrize(
    ("rows", "features", "columns", "processors", "size"),
    [
        (32, 264, 2048, 8, 4),  # A tile over the end; every CTA refills its ring where a value has two bytes.
        (9, 256, 1152, 16, 8),  # Parts of different lengths.
        (2, 100, 4096, 2, 2),
        (8, 300, 2048, 1, 1),
        (17, 700, 1024, 2, 1),  # Two tiles in turn, over the ends of which the ring goes on.
        (3, 40, 128, 1, 1),
    ],
)
def test_own_code(rows: int, features: int, columns: int, processors: int, size: int, codes: str) -> None:
    args = make_args(rows, codes, features, columns)
    assert spread(features, columns * args.input.itemsize, processors)[1] == size
    # Results are fp32: roundings would hide small faults.
    output = torch.full((rows, features), torch.nan)
    programs = run(args, processors, output)
    assert relative_l2(output.double(), expected(args)) < 1e-6
    for program in programs:
        weights, inputs = (program.steps.count(kind) for kind in ("weights", "inputs"))
        early = program.steps.index("waited")
        assert weights == inputs and program.steps[:early] == ["weights"] * early


def test_spread() -> None:
    """The shapes that were thought of, on 132 multiprocessors; no grid has more CTAs than these."""
    found = {features: spread(features, 8192, 132) for features in (6144, 4096, 28672, 128256, 2048, 100)}
    assert found == {6144: (24, 4), 4096: (16, 8), 28672: (112, 1), 128256: (126, 1), 2048: (8, 8), 100: (1, 8)}
    assert spread(100, 128, 132) == (1, 1) and spread(100, 3 * 128, 132) == (1, 2)
    for features in range(1, 40000, 97):
        clusters, size = spread(features, 8192, 132)
        assert clusters * size <= 132 and (size == 1 or clusters * FEATURES >= features)
