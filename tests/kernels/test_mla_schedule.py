"""The latent decode path's schedule, plans of uneven drafts and merge in the interpreter: every tile once."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.support import relative_l2

pytest.importorskip("triton")

if torch.cuda.is_available():
    pytest.skip("a GPU runs the compiled kernels in tests/layers/test_mla_gpu.py", allow_module_level=True)

from vattn.config.mla import MLAConfig
from vattn.errors import ShapeError
from vattn.kernels.hopper.mla import launch as mla_launch
from vattn.kernels.hopper.mla.reduce import mla_merge_parts_kernel
from vattn.kernels.hopper.mla.schedule import mla_schedule_kernel
from vattn.kernels.hopper.schedule import FIELDS, WAVES

TILE = 64

CASES: dict[str, tuple[list[int], list[int], int, int]] = {
    "one short": ([1], [5], 12, 1),
    "one long": ([1], [9000], 12, 1),
    "equal, fewer than CTAs": ([1] * 3, [4000] * 3, 12, 1),
    "equal, as many as CTAs": ([1] * 12, [4000] * 12, 12, 1),
    "equal, some more": ([1] * 13, [1000] * 13, 12, 1),
    "skewed": ([1] * 9, [20000, 1, 64, 65, 63, 0, 700, 128, 3], 12, 1),
    "padding and long queries": ([1, 0, 9, 2, 0], [700, 0, 900, 3000, 64], 5, 2),
    "several passes over the requests": ([1] * 70, [100 + 97 * i % 3000 for i in range(70)], 7, 1),
}


def schedule_of(
    queries: list[int],
    lengths: list[int],
    ctas: int,
    split_query: int,
    longest: int = 0,
    shortest: int = 0,
    least: int = 1,
) -> tuple[torch.Tensor, int]:
    reqs = len(queries)
    most = reqs + WAVES.value * ctas
    schedule = torch.full((1 + most + reqs, FIELDS.value), -7, dtype=torch.int32)
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    mla_schedule_kernel[(1,)](
        starts, torch.tensor(lengths).int(), None, schedule, reqs, ctas, most,
        SPLIT_QUERY=split_query, TILE=TILE, REQUESTS=32, PARTS=8, LONGEST=longest, SHORTEST=shortest, LEAST=least,
    )  # fmt: skip
    return schedule, most


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("least", [1, 4])
def test_every_tile_is_attended_once(name: str, least: int) -> None:
    queries, lengths, ctas, split_query = CASES[name]
    schedule, most = schedule_of(queries, lengths, ctas, split_query, least=least)
    check_full_records(schedule, most, queries, lengths, ctas)
    splits, loads = check_items(schedule, most, queries, lengths, ctas, split_query, set())
    if name == "equal, as many as CTAs":
        assert not splits
    if name in ("skewed", "one long"):
        assert max(loads) <= 1.5 * sum(loads) / ctas + 4


def check_full_records(schedule: torch.Tensor, most: int, queries: list[int], lengths: list[int], ctas: int) -> None:
    """Every CTA has an item, and records repeat what is known of their requests."""
    active, num_splits = schedule[0, :2].tolist()
    starts = [0, *itertools.accumulate(queries)]
    assert schedule[1 + active : 1 + ctas].tolist() == [[0, 0, 0, -1, -1, 0, 0, 0]] * (ctas - active)
    for cta in range(active):
        item = cta
        while item >= 0:
            request, _, _, _, item, *found = schedule[1 + item].tolist()
            assert found == [starts[request], queries[request], lengths[request]]
    for request, _, _, *found in schedule[1 + most : 1 + most + num_splits, :5].tolist():
        assert found == [starts[request], queries[request]]


def test_a_step_without_items_has_one_of_no_rows_for_every_cta() -> None:
    schedule, _ = schedule_of([300, 301], [300, 9000], 5, 2, 2)
    assert schedule[0, :2].tolist() == [0, 0]
    assert schedule[1:6].tolist() == [[0, 0, 0, -1, -1, 0, 0, 0]] * 5


def test_parts_are_not_too_small() -> None:
    """Of few tiles for many CTAs parts of 4 tiles are made, not of one."""
    for least in (1, 4):
        schedule, most = schedule_of([1, 1], [2048, 1000], 132, 1, least=least)
        records = schedule[1 + most :][: int(schedule[0, 1])]
        assert records[:, 2].tolist() == ([32, 16] if least == 1 else [8, 4])


FEW = ([1, 900, 1, 2, 0, 7, 1, 60, 2], [5000, 900, 700, 4000, 0, 20000, 1, 64, 129])


@pytest.mark.parametrize(
    ("queries", "lengths", "longest"),
    [
        (*FEW, 1),
        (*FEW, 2),
        ([1] * 30 + [500] * 3 + [1] * 10, [100 + 97 * i % 3000 for i in range(43)], 1),
        ([300, 1, 300], [300, 9000, 301], 2),
        ([300, 9], [300, 9], 1),
    ],
    ids=["one row", "two rows", "several passes", "one between", "none"],
)
def test_requests_of_other_lengths_have_no_items(queries: list[int], lengths: list[int], longest: int) -> None:
    for ctas, shortest in ((3, 0), (12, 0), (12, longest + 1)):
        top = longest if not shortest else 8
        schedule, most = schedule_of(queries, lengths, ctas, top, top, shortest)
        left_out = {request for request, count in enumerate(queries) if not shortest <= count <= top}
        check_items(schedule, most, queries, lengths, ctas, top, left_out)


def check_items(
    schedule: torch.Tensor,
    most: int,
    queries: list[int],
    lengths: list[int],
    ctas: int,
    split_query: int,
    left_out: set[int],
) -> tuple[dict[int, list[int]], list[int]]:
    """Follow every CTA's chain; return the split requests, and the load of CTAs."""
    active, num_splits = schedule[0, :2].tolist()
    assert (0 < active <= ctas) or (active == 0 and len(left_out) == len(queries))
    found: dict[int, list[tuple[int, int, int]]] = {}
    seen, loads = set(), []
    for cta in range(active):
        item, load = cta, 0
        while item >= 0:
            assert item not in seen and item < most
            seen.add(item)
            request, begin, end, slot, item = schedule[1 + item, :5].tolist()
            found.setdefault(request, []).append((begin, end, slot))
            load += end - begin + 1
        loads.append(load)
    assert sorted(found) == [request for request in range(len(queries)) if request not in left_out]
    splits = {row[0]: row[1:3] for row in schedule[1 + most : 1 + most + num_splits].tolist()}
    slots = []
    for request, parts in found.items():
        parts.sort()
        tiles = -(-lengths[request] // TILE) if 0 < queries[request] <= split_query else 0
        # Without tiles, or with more rows than are split, a request is one item that writes its result itself.
        assert parts[0][0] == 0 and parts[-1][1] == max(1, tiles)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(parts))
        own = sorted(slot for _, _, slot in parts)
        if len(parts) == 1:
            assert own == [-1] and request not in splits
        else:
            first, count = splits[request]
            assert own == list(range(first, first + count))
            slots += own
    assert sorted(slots) == list(range(len(slots)))
    return splits, loads


@pytest.mark.parametrize("way", ["records", "records, few programs", "records, bf16", "starts"])
def test_merged_splits(way: str) -> None:
    queries, lengths, ctas, split_query = CASES["padding and long queries"]
    full = "records" in way
    schedule, most = schedule_of(queries, lengths, ctas, split_query)
    heads, rows, latent, tokens = 3, 16, 32, sum(queries)
    scores = torch.randn(most, rows, 5)
    values = torch.randn(most, rows, 5, latent)
    scores[:, 4] = -torch.inf
    maximum = scores.amax(-1).clamp(min=-1e30)
    weights = torch.exp2(scores - maximum[..., None])
    partial = torch.einsum("srk,srkl->srl", weights, values)
    if "bf16" in way:
        partial = partial.bfloat16()
    stats = torch.stack((maximum, weights.sum(-1)), -1).contiguous()
    output, lse = torch.full((tokens * heads, latent), 7.0), torch.full((tokens * heads,), 7.0)
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    given = (schedule, partial, stats, starts, output, lse, most, tokens)
    sizes = {"HEADS": heads, "PARTIAL_ROWS": rows, "LATENT": latent, "COLUMNS": 16}
    programs = 7 if "few" in way else len(queries) * rows * 2
    mla_merge_parts_kernel[(programs,)](*given, **sizes, STEP=2 if "few" in way else 16, FULL=full)
    splits = schedule[1 + most :][: int(schedule[0, 1]), :3].tolist()
    assert splits
    written = torch.zeros(tokens * heads, dtype=torch.bool)
    for request, first, count in splits:
        for row in range(queries[request] * heads):
            place = int(starts[request]) * heads + row
            parts = scores[first : first + count, row].flatten()
            expected = torch.softmax(parts * 0.6931471805599453, 0) @ values[first : first + count, row].flatten(0, 1)
            written[place] = True
            if row == 4:
                assert not output[place].any() and lse[place] == -torch.inf
                continue
            assert relative_l2(output[place], expected) < (8e-3 if "bf16" in way else 1e-5)
            assert abs(float(lse[place]) - float(torch.logsumexp(parts * 0.6931471805599453, 0))) < 1e-5
    assert bool((output[~written] == 7.0).all()) and bool((lse[~written] == 7.0).all())


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


@pytest.fixture
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
STEPS_AND_HEADS = [(name, HEADS[i % 3]) for i, name in enumerate(STEPS)] + [
    ("drafts", 16),
    ("drafts", 128),
    ("mostly decodes", 8),
]


@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize(("name", "heads"), STEPS_AND_HEADS)
def test_every_tile_of_every_part_is_attended_once(name: str, heads: int) -> None:
    queries, lengths = STEPS[name]
    config = layer(heads)
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
        assert items[0][0] == 0 and items[-1][1] == max(1, -(-expected[start][2] // TILE))
        assert all(before[1] == behind[0] for before, behind in itertools.pairwise(items))
    assert sorted(slots) == list(range(len(slots)))
    # The launch has room for as many partial results as parts may have items.
    assert len(slots) <= sum(queries) // few + len(queries) + WAVES.value * ctas
    for _, slot, count, start, rows, *_ in records[1 + most : 1 + most + splits]:
        assert (len(found[start]), expected[start][1]) == (count, rows) and slot + count <= len(slots)


@pytest.mark.usefixtures("processors")
def test_plans_of_a_batch_have_one_size() -> None:
    for heads in (8, 16, 128):
        sizes = [
            torch.Size(mla_launch.plan_shape(layer(heads), tokens, 6, torch.device("cpu"))).numel()
            for tokens in (6, 7, 12, 13, 47, 48, 49, 600)
        ]
        assert len(set(sizes)) == 1
    with pytest.raises(ShapeError, match="elements"):
        mla_launch.plan(torch.zeros(7).int(), torch.zeros(6).int(), torch.zeros(2, 64, 1).int(), layer(16))
