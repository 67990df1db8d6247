"""No quantiser that is changed at a value, a threshold, a row, a column, a token or a rounding fuses wrongly."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import adversary
import pytest
import torch
from adversary import Adversary, rounded
from fx_programs import copied, run
from query_adversary import QueryAdversary
from torch import Tensor
from torch.fx import GraphModule

from vattn.passes.pipeline import fuse_graph

SEED = int(os.environ.get("VATTN_FUZZ_SEED", "1"))
PARTS, PROGRAMS = 20, 1000


@pytest.fixture(scope="module")
def judge() -> Adversary:
    return Adversary()


def judged(judge: Adversary, seeds: Iterable[int]) -> tuple[list[str], int]:
    """Return the programs that fused wrongly, and how many fused though they were changed."""
    verdicts = [verdict for verdict in map(judge.judge, seeds) if verdict is not None]
    return [verdict.name for verdict in verdicts if verdict.wrong], sum(verdict.fused for verdict in verdicts)


@pytest.mark.slow
def test_a_few_changes(judge: Adversary) -> None:
    """Five changes to each of a few quantisers; some change nothing and fuse."""
    seeds = [block * 100 + index for block in range(10 * SEED, 10 * SEED + 10) for index in range(5)]
    wrong, fused = judged(judge, seeds)
    assert not wrong and fused


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_many_changes(judge: Adversary, part: int) -> None:
    """Twenty thousand programs in twenty parts, of all quantisers."""
    start = (SEED * PARTS + part) * PROGRAMS
    wrong, fused = judged(judge, range(start, start + PROGRAMS))
    print(f"{PROGRAMS} programs, {fused} fused, {len(wrong)} wrong")
    assert not wrong and fused


@pytest.mark.long
@pytest.mark.parametrize("part", range(2))
def test_many_changes_to_queries(part: int) -> None:
    """Two thousand programs of queries."""
    start = (SEED * 2 + part) * PROGRAMS
    wrong, fused = judged(QueryAdversary(), range(start, start + PROGRAMS))
    print(f"{PROGRAMS} programs, {fused} fused, {len(wrong)} wrong")
    assert not wrong and fused


UNSEEN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a value that has the same code under most scales": lambda o, s: rounded(
        torch.where(o.float() == 1.2421875, 1.25, o.float()) / s
    ),
    "a quotient": lambda o, s: rounded(torch.where(o.float() / s == 3.7, 4.0, o.float() / s)),
    "an interval of quotients": lambda o, s: rounded(
        torch.where((o.float() / s - 3.7).abs() < 1e-6, 4.0, o.float() / s)
    ),
    "near a quotient": lambda o, s: rounded(o.float() / s + (1e-5 - (o.float() / s - 3.7).abs()).relu() * 1e5),
    "a value in a column": lambda o, s: rounded(
        torch.where((torch.arange(256) == 17) & (o.float() == 1.2421875), 1.25, o.float()) / s
    ),
}


def of_tokens(
    scale_of: Callable[[Tensor], Tensor] = lambda m: m / 448.0,
    scaled: Callable[[Tensor], Tensor] = lambda u: u,
    values: Callable[[Tensor], Tensor] = lambda x: x,
) -> Callable[[Tensor, Tensor], Any]:
    def function(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        x = o.float()
        scale = scale_of(x.abs().amax(-1, keepdim=True))
        return rounded(scaled(values(x) / scale)), scale

    return function


UNSEEN |= {
    "a maximum": of_tokens(scale_of=lambda m: torch.where(m == 1.2421875, 1.25, m) / 448.0),
    "a scaled value": of_tokens(scaled=lambda u: torch.where((u - 311.3).abs() < 2e-3, 312.0, u)),
    "a value in a column of tokens": of_tokens(
        values=lambda x: torch.where((torch.arange(256) == 17) & (x == 1.2421875), 1.25, x)
    ),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_few_inputs_show_is_refused(judge: Adversary, name: str) -> None:
    (report,) = fuse_graph(judge.template.behind(UNSEEN[name]).graph)
    assert report.outcome == "near miss", report


@pytest.mark.slow
def test_quantisers_that_are_not_changed_fuse() -> None:
    output, scale = adversary.outputs(1), torch.tensor([0.0213])
    for name, gm in Adversary().bases.items():
        fused = copied(gm)
        (report,) = fuse_graph(fused.graph)
        assert report.outcome == "fused", (name, report)
        wanted, _ = run(gm, output, scale)
        got, _ = run(GraphModule(fused, fused.graph), output, scale)
        assert all(map(adversary.same_bytes, got, wanted)), name
