"""Latent decode in which both warpgroups score keys: the kernel's own code in threads, against sums in fp64."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from tests.kernels.gluon_emulation import Pointer
from tests.kernels.latent_emulation import LatentProgram


@dataclass(frozen=True)
class Step:
    """A step of requests whose items are cut and dealt to CTAs at random."""

    heads: int
    block_size: int
    queries: list[int]
    lengths: list[int]
    ctas: int = 1
    split: int = 1
    scale: float = 0.07
    lost: bool = False


STEPS = {
    "edges of tiles": Step(64, 64, [1] * 6, [1, 64, 65, 128, 130, 193], ctas=2),
    "two programs a request, small blocks": Step(128, 16, [1] * 3, [200, 129, 64]),
    "several tokens, one request empty": Step(128, 32, [2, 2, 0, 1], [300, 64, 9, 0], split=2),
    "more tokens than are split": Step(64, 128, [3, 1, 5], [400, 2, 5], split=4),
    "rows that fill no box": Step(16, 64, [3, 4, 1, 9], [130, 200, 65, 300], ctas=2, split=4),
    "lost blocks": Step(64, 64, [1] * 3, [500, 200, 330], lost=True),
    "small scale": Step(64, 64, [1] * 3, [300, 200, 65], scale=1e-7),
}


def items_of(step: Step, rng: random.Random) -> list[list[int]]:
    """Return request, first and end tile and slot of every item, in an order that no schedule promises."""
    items, slots = [], 0
    for request, (rows, length) in enumerate(zip(step.queries, step.lengths, strict=True)):
        tiles = -(-length // 64) if rows else 0
        parts = [0, tiles]
        if rows <= step.split and tiles > 1:
            parts = sorted({*parts, *rng.sample(range(1, tiles), rng.randint(0, min(2, tiles - 1)))})
        for first, end in itertools.pairwise(parts):
            items.append([request, first, end, slots if len(parts) > 2 else -1])
            slots += len(parts) > 2
    rng.shuffle(items)
    return items


def schedule_of(step: Step, items: list[list[int]], starts: Tensor) -> Tensor:
    """Return a FULL schedule in which CTAs take turns."""
    records = torch.tensor([[0, 0, 0, -1, -1, 0, 0, 0]]).repeat(1 + len(items) + step.ctas, 1).int()
    for index, item in enumerate(items):
        following = index + step.ctas if index + step.ctas < len(items) else -1
        request = item[0]
        values = [*item, following, int(starts[request]), step.queries[request], step.lengths[request]]
        records[1 + index] = torch.tensor(values)
    return records


@pytest.mark.parametrize("name", STEPS)
def test_own_code(name: str) -> None:
    step, rng, seeded = STEPS[name], random.Random(1), torch.Generator().manual_seed(1)
    size, heads = step.block_size, step.heads
    needed = [-(-length // size) for length in step.lengths]
    blocks = sum(needed) + 2
    cache = torch.full((blocks, size, 576), torch.nan)
    table = torch.randint(-9, 3 * blocks, (len(needed), max(needed) + 1), generator=seeded, dtype=torch.int32)
    free = torch.randperm(blocks, generator=seeded).int()
    for request, count in enumerate(needed):
        table[request, :count], free = free[:count], free[count:]
        for block in range(count):
            filled = min(size, step.lengths[request] - block * size)
            cache[table[request, block], :filled] = torch.randn(filled, 576, generator=seeded)
    if step.lost:
        table[0, 1], table[1] = -5, 10**9
    starts = torch.tensor([0, *step.queries]).cumsum(0).int()
    tokens, groups = int(starts[-1]), -(-heads * step.split // 64)
    queries = torch.randn(tokens * heads, 576, generator=seeded)
    items = items_of(step, rng)
    schedule, rows = schedule_of(step, items, starts), 64 * groups
    slots = 1 + max(item[3] for item in items)
    output, lse = torch.full((tokens * heads, 512), torch.nan), torch.full((tokens * heads,), torch.nan)
    partial, stats = torch.full((slots * rows + 1, 512), torch.nan), torch.full((slots * rows + 1, 2), torch.nan)
    for index in range(step.ctas * groups):
        program = LatentProgram(index, step.ctas * groups, cache, queries, output, partial, index)
        lengths = torch.tensor(step.lengths).int()
        program.kernel(
            torch.zeros(()), None, None, None, output, partial, Pointer(starts), Pointer(lengths), Pointer(table),
            Pointer(schedule), Pointer(output), Pointer(lse), Pointer(partial), Pointer(stats), tokens,
            blocks, table.shape[1], table.shape[1], step.scale / math.log(2), heads, groups, size, size, step.split,
            rows, 4,
        )  # fmt: skip
    for request, first, end, slot in items:
        count, length = step.queries[request], step.lengths[request]
        if count == 0:
            continue
        if count > step.split:
            first, end = 0, -(-length // 64)
        position = torch.arange(first * 64, min(end * 64, length))
        ids = table[request, position // size]
        known = (ids >= 0) & (ids < blocks)
        keys = torch.where(known[:, None], cache[ids.clamp(0, blocks - 1), position % size], 0.0).double()
        at = slice(int(starts[request]) * heads, int(starts[request + 1]) * heads)
        scores = queries[at].double() @ keys.T * step.scale
        last = (length - count + torch.arange(count)).repeat_interleave(heads)
        scores[(position > last[:, None]) | ~known] = -math.inf
        expected_lse = scores.logsumexp(1)
        expected = torch.softmax(scores, 1).nan_to_num(0.0) @ keys[:, :512]
        if slot < 0:
            got, got_lse = output[at].double(), lse[at].double()
        else:
            place = slice(slot * rows, slot * rows + count * heads)
            maximum, total = stats[place].double().unbind(1)
            got_lse = maximum * math.log(2) + total.log()
            got = torch.where(total > 0, 1 / total, 0.0)[:, None] * partial[place].double()
        assert torch.equal(got_lse.isinf(), expected_lse.isinf())
        assert torch.allclose(got_lse, expected_lse, rtol=0, atol=1e-4)
        assert (got - expected).norm() <= 1e-5 * expected.norm()
