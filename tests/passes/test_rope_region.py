"""What belongs to the region of a query or key, and how it runs in fp64: small graphs written by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_graphs import Shape, T, Written
from torch import Tensor
from torch.fx import Node

from vattn.passes.region import LARGEST_REGION, Refusal
from vattn.passes.rope_kv_cache import region as rope_region
from vattn.passes.rope_kv_cache.region import Run, before_copies, history, region_between, same_computation

HEADS, WIDTH = 4, 8
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HEAD: Shape = (T, HEADS, WIDTH, BF16)


def region_of(written: Written) -> rope_region.RotationRegion:
    return region_between(written.inputs[0], written.end, history(written.end))


def run_of(program: Callable[..., Tensor], *shapes: Shape) -> Run:
    return Run(region_of(Written(program, *shapes)))


def test_a_run_is_in_fp64_whatever_the_region_rounds_to() -> None:
    def program(x: Tensor) -> Tensor:
        narrow = x.to(torch.float16).float() + torch.zeros(3, dtype=BF16)
        return torch.where(narrow.isnan(), torch.full((3,), 1 / 3, dtype=BF16), narrow)

    run = run_of(program, (T, 3))
    x = torch.tensor([[1 / 3, 7e-9, 1e9]], dtype=torch.float64).repeat(5, 1)
    made = run({run.region.source: x})
    assert made.dtype == torch.float64 and torch.equal(made, x)
    assert run.shape(run.region.end) == [5, 3]


def test_sizes_of_another_input_are_unknown() -> None:
    run = run_of(lambda x, y: x.roll(y.shape[0], 0), (8, 3), (T,))
    with pytest.raises(Refusal, match="the region depends on the size s"):
        run({run.region.source: torch.ones(8, 3, dtype=torch.float64)})


def test_memory_that_a_region_does_not_write_is_nan() -> None:
    run = run_of(lambda x: torch.cat((x, torch.empty_like(x[:, :1])), 1), (T, 3))
    assert (
        run({run.region.source: torch.ones(5, 3, dtype=torch.float64)}).isnan().tolist() == [[False] * 3 + [True]] * 5
    )


def test_a_cast_to_fp8_notes_values_beyond_its_range() -> None:
    run = run_of(lambda x: x.to(E4M3), (T, 1))
    source = run.region.source
    for limit, clamped in ((448.0, True), (-448.0, True), (449.0, False), (1.0, False)):
        x = torch.full((5, 1), limit, dtype=torch.float64)
        assert torch.equal(run({source: x}), x) and run.clamped == clamped
    run = run_of(lambda x: x.to(torch.int32).float(), (T, 1))
    assert torch.equal(run({run.region.source: x * 1000.7}), x * 1000) and run.clamped


def test_our_own_quantiser_is_run_too() -> None:
    run = run_of(lambda x, s: torch.ops.vattn.quant_fp8_static(x, s), (T, 3), (1,))
    x = torch.tensor([[0.3, -900.0, 900.0]], dtype=torch.float64).repeat(5, 1)
    made = run({run.region.source: x, run.region.leaves[0]: torch.tensor([0.7], dtype=torch.float64)})
    assert torch.equal(made[2], torch.tensor([0.3 / 0.7, -448.0, 448.0], dtype=torch.float64))


def test_fixed_token_counts_are_run_up_to_a_limit() -> None:
    tokens = (1 << 23) // (HEADS * WIDTH)
    assert run_of(torch.neg, (tokens, HEADS, WIDTH)).shape(Written(torch.neg, (tokens, 1)).end) == [tokens, 1]
    with pytest.raises(Refusal, match=f"its token count is fixed at {tokens + 1}, too many to try it out"):
        run_of(torch.neg, (tokens + 1, HEADS, WIDTH))


def test_regions_read_floats_and_complex_numbers_alone() -> None:
    written = Written(lambda x, ids: x * ids.view(-1, 1, 1), HEAD, (T, torch.int64))
    with pytest.raises(Refusal, match="the region reads ids_1, which holds no floats"):
        region_of(written)
    written = Written(lambda x, y: y * 2, HEAD, HEAD)
    with pytest.raises(Refusal, match="x_1 has no part in"):
        region_between(written.inputs[0], written.end, history(written.end))


COPIED: dict[str, tuple[Callable[[Tensor], Tensor], Shape, bool]] = {
    "reshaped": (lambda w: w.view(4, 2), (8,), True),
    "expanded": (lambda w: w.expand(3, 8), (8,), True),
    "repeated": (lambda w: w.repeat(2), (8,), True),
    "twice": (lambda w: torch.cat((w, w)), (8,), True),
    "beside another": (lambda w: torch.cat((w, w.new_zeros(8))), (8,), False),
    "wider": (lambda w: w.float(), (8, BF16), True),
    "narrower": (lambda w: w.bfloat16(), (8,), True),
    "to FP8": (lambda w: w.to(E4M3), (8,), False),
    "from FP8": (lambda w: w.float(), (8, E4M3), False),
    "from integers": (lambda w: w.float(), (8, torch.int32), False),
    "plus one": (lambda w: w + 1, (8,), True),
    "plus two": (lambda w: w + 2, (8,), False),
    "plus itself": (lambda w: w + w, (8,), False),
    "times one": (lambda w: w * 1, (8,), False),
    "one plus a matrix": (lambda w: w + 1, (8, 1), False),
    "one for each token": (lambda w: w + 1, (T,), False),
    "one by a factor": (lambda w: torch.add(w, 1, alpha=3), (8,), False),
    "negated": (torch.neg, (8,), False),
}


@pytest.mark.parametrize("name", COPIED)
def test_copies_are_looked_through(name: str) -> None:
    program, shape, wanted = COPIED[name]
    written = Written(program, shape)
    assert before_copies(written.end) is (written.inputs[0] if wanted else None)
    assert before_copies(written.inputs[0]) is None


def test_histories_are_short_and_in_order() -> None:
    def longer(count: int) -> Node:
        def program(x: Tensor) -> Tensor:
            for _ in range(count):
                x = x.neg()
            return x

        return Written(program, (3,)).end

    nodes = history(longer(LARGEST_REGION - 1))
    assert len(nodes) == LARGEST_REGION and nodes == sorted(nodes)
    with pytest.raises(Refusal, match=f"more than {LARGEST_REGION} nodes make neg_{LARGEST_REGION - 1}"):
        history(longer(LARGEST_REGION))
    written = Written(lambda x, y: (y @ y) + x * y, (3, 3), (3, 3))
    assert [node.name for node in history(written.end)] == ["mm", "x_1", "y_1", "mul", "add"]


def test_constants_depend_on_no_tensor() -> None:
    written = Written(lambda x: x * torch.ones(x.shape[0], 1).neg() + x.new_zeros(3).neg(), (T, 3))
    found = {node.name for node in rope_region.constants_of(history(written.end))}
    assert found == {"ones", "neg"}
    reached = rope_region.computed_from(written.inputs[0], history(written.end))
    assert {node.name for node in reached} == {"mul", "new_zeros", "neg_1", "add"}


def test_computations_are_the_same_by_ops_arguments_and_order() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        pairs = (
            (x - y, x - y),
            (x - y, y - x),
            (x + 1, x + 2),
            (x.exp(), x.neg()),
            (x.sum(0), x.sum(1)),
            (x - x, x - y),
        )
        return torch.cat([part.reshape(-1) for made in pairs for part in made])

    parts = [part.args[0] for part in Written(program, (3, 3), (3, 3)).end.args[0]]  # type: ignore[union-attr]
    found = [same_computation(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    assert found == [True, False, False, False, False, False]
    a, b = parts[:2]
    assert not same_computation(*a.args) and same_computation(a, b, 1) and not same_computation(a, b, 0)


def test_fingerprints_tell_computations_apart() -> None:
    def mark(program: Callable[..., Tensor], *shapes: Shape, extra: str = "") -> str:
        end = Written(program, *shapes).end
        return rope_region.fingerprint(end, history(end), extra)

    same = mark(lambda x, y: x.neg() * y, (T, 3), (3,))
    assert same == mark(lambda x, y: x.neg() * y, (T, 3), (3,))
    others = {
        mark(lambda x, y: x.neg() * y, (T, 3), (3,), extra="rope 4"),
        mark(lambda x, y: x.exp() * y, (T, 3), (3,)),
        mark(lambda x, y: y * x.neg(), (T, 3), (3,)),
        mark(lambda x, y: x.neg() * y, (T, 3), (3, BF16)),
        mark(lambda x, y: x.neg() * y, (T, 3), (1,)),
        mark(lambda x, y: x.neg() * y, (4, 3), (3,)),
    }
    assert len(others) == 6 and same not in others
