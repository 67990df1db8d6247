"""Plans of latent steps of uneven drafts in the interpreter: tiles of every part once, under its request's table."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")

if torch.cuda.is_available():
    pytest.skip("a GPU runs the compiled kernels in tests/kernels/test_mla_mixed_gpu.py", allow_module_level=True)

from vattn.config.mla import MLAConfig
from vattn.errors import ShapeError
from vattn.kernels.hopper.mla import launch as mla_launch
from vattn.kernels.hopper.mla.work_items import TILE
from vattn.kernels.hopper.schedule import WAVES

PROCESSORS = 6

STEPS = {
    "drafts": ([1, 3, 5, 1, 0, 2, 8], [900, 70, 700, 64, 50, 2, 4096]),
    "more rows than keys": ([3, 1, 4], [1, 0, 9000]),
    "mostly decodes": ([1, 1, 1, 2, 1], [900, 70, 700, 4096, 64]),
    "more requests than rows": ([1, 0, 2, 0, 0], [900, 0, 700, 0, 0]),
    "a long one": ([1] * 11 + [60], [*range(64, 1164, 100), 1000]),
    "many": ([1 + i % 4 for i in range(13)], [137 * i + 5 for i in range(13)]),
    "padding": ([2, 1, 0, 0], [800, 3, 0, 0]),
    "two each": ([2, 2, 2], [800, 3, 1000]),
    "two each on average": ([1, 3, 4, 0], [5000, 60, 700, 0]),
    "one long, eight on average": ([1, 1, 22], [5000, 60, 700]),
}


@pytest.fixture(autouse=True)
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vattn.config.device.multiprocessors", lambda device: PROCESSORS)


def layer(heads: int) -> MLAConfig:
    return MLAConfig(heads, 128, 64, 128, 512, 0.07, "bfloat16", "bfloat16", 64)


def planned(queries: list[int], lengths: list[int], config: MLAConfig) -> torch.Tensor:
    starts, seq_lens = torch.tensor([0, *queries]).cumsum(0).int(), torch.tensor(lengths).int()
    shape = mla_launch.plan_shape(config, sum(queries), len(queries), starts.device)
    assert len(shape) == 3
    plan = torch.full(shape, -7, dtype=torch.int32)
    mla_launch.plan(starts, seq_lens, plan, config)
    return plan


HEADS = [8, 16, 128]
CASES = [(name, HEADS[i % 3]) for i, name in enumerate(STEPS)] + [
    ("drafts", 16),
    ("drafts", 128),
    ("mostly decodes", 8),
]


@pytest.mark.parametrize(("name", "heads"), CASES)
def test_every_tile_of_every_part_is_attended_once(name: str, heads: int) -> None:
    queries, lengths = STEPS[name]
    config, tile = layer(heads), TILE.value
    plan = planned(queries, lengths, config)
    few = mla_launch.rows_of_parts(sum(queries), len(queries), config)
    if sum(queries) % len(queries) == 0:
        assert few == sum(queries) // len(queries)
    else:
        assert few == (1 if sum(queries) < 1.5 * len(queries) else mla_launch.fewest(config))
    ctas = max(1, PROCESSORS // mla_launch.groups_of_rows(config, few))
    most = mla_launch.most_parts(len(queries), few) + WAVES.value * ctas
    records = plan.flatten()[: plan.numel() // 8 * 8].view(-1, 8).tolist()
    expected: dict[int, tuple[int, int, int]] = {}
    first = 0
    for request, (rows, length) in enumerate(zip(queries, lengths, strict=True)):
        for place in range(0, rows, few):
            own = min(few, rows - place)
            expected[first + place] = (request, own, max(0, length - (rows - place - own)))
        first += rows
    found: dict[int, list[tuple[int, int]]] = {}
    slots = []
    busy, splits = records[0][:2]
    for cta in range(ctas):
        item = cta
        while item >= 0:
            request, begin, end, slot, item, start, rows, length = records[1 + item]
            if rows == 0:
                assert cta >= busy and (begin, end, slot, item) == (0, 0, -1, -1)
                continue
            assert expected[start] == (request, rows, length)
            found.setdefault(start, []).append((begin, end))
            slots += [slot] * (slot >= 0)
    assert sorted(found) == sorted(expected)
    for start, items in found.items():
        items.sort()
        assert items[0][0] == 0 and items[-1][1] == max(1, -(-expected[start][2] // tile))
        assert all(before[1] == behind[0] for before, behind in itertools.pairwise(items))
    assert sorted(slots) == list(range(len(slots)))
    # The launch has room for as many partial results as parts may have items.
    assert len(slots) <= sum(queries) // few + len(queries) + WAVES.value * ctas
    for _, slot, count, start, rows, *_ in records[1 + most : 1 + most + splits]:
        assert (len(found[start]), expected[start][1]) == (count, rows) and slot + count <= len(slots)


def test_plans_of_a_batch_have_one_size() -> None:
    for heads in (8, 16, 128):
        sizes = [
            torch.Size(mla_launch.plan_shape(layer(heads), tokens, 6, torch.device("cpu"))).numel()
            for tokens in (6, 7, 12, 13, 47, 48, 49, 600)
        ]
        assert len(set(sizes)) == 1
    with pytest.raises(ShapeError, match="elements"):
        mla_launch.plan(torch.zeros(7).int(), torch.zeros(6).int(), torch.zeros(2, 64, 1).int(), layer(16))
