"""The schedule of the fast decode path, in Triton's interpreter: every visible tile of every row exactly once."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

triton = pytest.importorskip("triton")

TILE = 16


def make_plan(
    query_lens: list[int],
    seq_lens: list[int],
    ctas: int,
    window: int = 0,
    unit: int = 1,
    requests: int = 32,
    tokens: int = 1,
    short_only: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:
    """Run the kernel; return items and split requests."""
    from vattn.ops.triton.decode_fast_plan import WAVE_CHOICES, plan_kernel

    num_reqs = len(seq_lens)
    waves = -(-num_reqs // ctas)
    max_items = (waves + WAVE_CHOICES.value - 1) * ctas if tokens == 1 else 2 * num_reqs + WAVE_CHOICES.value * ctas
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    schedule = torch.full((1 + max_items + 2 * num_reqs, 8), -99, dtype=torch.int32)
    chunks = torch.full((2 * num_reqs, 4), -99, dtype=torch.int32) if tokens > 1 or short_only else None
    plan_kernel[(1,)](
        starts, torch.tensor(seq_lens, dtype=torch.int32), schedule, chunks, num_reqs, ctas, waves, max_items,
        TOKENS=tokens, SHORT_ONLY=short_only, WINDOW=window, UNIT=unit, REQUESTS=requests,
    )  # fmt: skip
    active, num_splits = schedule[0, :2].tolist()
    assert 0 < active <= ctas or not any(n > 0 and (n <= tokens or not short_only) for n in query_lens)
    assert schedule[0, 2] == (2**31 - 1 if short_only else sum(query_lens))
    records = schedule[1 : 1 + max_items].tolist()
    return walk(records, active), schedule[1 + max_items :][:num_splits, :4].tolist()


def walk(records: list[list[int]], active: int) -> list[list[int]]:
    """Return the items with rows, CTA by CTA."""
    items, seen = [], set()
    for cta in range(active):
        item = cta
        while item >= 0:
            assert item not in seen, "an item belongs to one CTA"
            seen.add(item)
            if records[item][2]:
                items.append([*records[item][:7], cta])
            item = records[item][7]
    return items


def check_plan(
    query_lens: list[int], seq_lens: list[int], ctas: int, window: int = 0, unit: int = 1
) -> list[list[int]]:
    items, splits = make_plan(query_lens, seq_lens, ctas, window, unit)
    starts = torch.tensor([0, *query_lens]).cumsum(0).tolist()
    tiles: dict[int, list[tuple[int, int]]] = {}
    slots: dict[int, list[int]] = {}
    for request, first_row, num_rows, seq_len, begin, end, slot, _ in items:
        if request < 0:
            assert (num_rows, seq_len, begin, end, slot) == (1, 0, 0, 0, -1)
            assert first_row >= starts[-1]
        else:
            assert (first_row, num_rows, seq_len) == (starts[request], query_lens[request], seq_lens[request])
        for row in range(first_row, first_row + num_rows):
            tiles.setdefault(row, []).append((begin, end))
            slots.setdefault(row, []).append(slot)
    assert sorted(tiles) == list(range(len(seq_lens))), "every row of the query is written, padding included"
    split_of = {row: list(range(first, first + count)) for row, first, count, _ in splits}
    for row, ranges in tiles.items():
        ranges.sort()
        assert all((b[0] - ranges[0][0]) % unit == 0 for b in ranges), "chunks are whole units"
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges)), "chunks meet"
        if len(ranges) > 1:
            assert sorted(slots[row]) == split_of.pop(row)
        else:
            assert slots[row] == [-1]
        if row >= starts[-1]:
            continue
        request = next(r for r in range(len(seq_lens)) if starts[r] <= row < starts[r + 1])
        if query_lens[request] == 1:
            first = max(seq_lens[request] - window, 0) // TILE if window else 0
            assert (ranges[0][0], ranges[-1][1]) == (first, -(-seq_lens[request] // TILE)) or not seq_lens[request]
        else:
            assert ranges == [(0, -(-seq_lens[request] // TILE))]
    assert not split_of
    used = [slot for slot in (s for row in slots.values() for s in row) if slot >= 0]
    assert len(used) == len(set(used)), "no slot is used twice"
    return items


@pytest.mark.parametrize("window", [0, 1, 40])
@pytest.mark.parametrize("ctas", [1, 5, 132])
def test_every_tile_once(ctas: int, window: int) -> None:
    rng = random.Random(ctas + window)
    for _ in range(6):
        batch = rng.choice([1, 2, 7, 40])
        seq_lens = [rng.choice([0, 1, 16, 17, rng.randrange(3000)]) for _ in range(batch)]
        query_lens = [1] * batch
        for _ in range(rng.randrange(3)):
            giver, taker = rng.randrange(batch), rng.randrange(batch)
            if query_lens[giver]:
                query_lens[giver] -= 1
                query_lens[taker] += rng.randrange(2)
        check_plan(query_lens, seq_lens, ctas, window, rng.choice([1, 2, 4]))


def test_equal_lengths_split_equally() -> None:
    items = check_plan([1] * 32, [8192] * 32, 132)
    assert len(items) == 128
    assert {item[5] - item[4] for item in items} == {128}


def test_a_full_card_is_not_split() -> None:
    assert len(check_plan([1] * 40, [1024] * 40, 40)) == 40


def loads(items: list[list[int]]) -> list[int]:
    """Return the tiles of each CTA with work."""
    found: dict[int, int] = {}
    for item in items:
        found[item[7]] = found.get(item[7], 0) + item[5] - item[4]
    return list(found.values())


@pytest.mark.parametrize(("ctas", "unit"), [(33, 4), (132, 1)])
def test_mixed_lengths_are_balanced(ctas: int, unit: int) -> None:
    rng = random.Random(1)
    skewed = [131072, *[512 + 56 * i for i in range(63)]]
    for lengths in (skewed, [rng.randrange(100, 8000) for _ in range(64)], [rng.randrange(4000) for _ in range(200)]):
        found = loads(check_plan([1] * len(lengths), lengths, ctas, unit=unit))
        assert max(found) <= 1.06 * sum(found) / ctas + unit


def test_one_short_request_uses_a_tile_per_cta() -> None:
    assert len(check_plan([1], [1000], 132)) == 63


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("tokens", [2, 4])
def test_several_rows_at_a_time(tokens: int, window: int) -> None:
    rng = random.Random(tokens + window)
    for trial in range(4):
        count = rng.randrange(1, 40)
        query_lens = [tokens] * count if trial < 1 else rng.choices((0, 1, tokens, 3 * tokens + 1), k=count)
        while sum(query_lens) > tokens * count:
            query_lens[rng.randrange(count)] = 0
        seq_lens = [n + rng.randrange(3000) if n else rng.randrange(50) for n in query_lens]
        items, splits = make_plan(query_lens, seq_lens, rng.choice((3, 33)), window, rng.choice((1, 4)), tokens=tokens)
        starts = torch.tensor([0, *query_lens]).cumsum(0).tolist()
        found: dict[int, list[list[int]]] = {}
        for request, first_row, rows, seq_len, begin, end, slot, _ in items:
            before = first_row - starts[request]
            assert 0 < rows <= tokens and before % tokens == 0 and before + rows <= query_lens[request]
            assert seq_len == seq_lens[request] - query_lens[request] + before + rows
            found.setdefault(first_row, []).append([begin, end, slot, rows, seq_len])
        assert sum(parts[0][3] for parts in found.values()) == sum(query_lens)
        split_of = {row: (list(range(first, first + parts)), rows) for row, first, parts, rows in splits}
        for row, parts in found.items():
            parts.sort()
            rows, seq_len = parts[0][3:]
            assert parts[0][0] == (max(0, seq_len - rows + 1 - window) // TILE if window else 0)
            assert parts[-1][1] == -(-seq_len // TILE)
            assert all(a[1] == b[0] for a, b in itertools.pairwise(parts)), "chunks meet"
            slots = sorted(part[2] for part in parts)
            assert (slots, rows) == split_of.pop(row) if len(parts) > 1 else slots == [-1]
        assert not split_of


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("tokens", [1, 4])
def test_long_requests_are_left_to_another_kernel(tokens: int, window: int) -> None:
    """Requests of up to `tokens` rows are one chunk each, each tile once; the others and padding do not occur."""
    rng = random.Random(tokens + window)
    for _ in range(4):
        count = rng.randrange(1, 40)
        query_lens = rng.choices((0, 1, tokens, tokens + 1, 300), k=count)
        seq_lens = [n + rng.randrange(3000) if n else rng.randrange(50) for n in query_lens]
        items, splits = make_plan(
            query_lens, seq_lens, rng.choice((3, 33)), window, rng.choice((1, 4)), tokens=tokens, short_only=True
        )
        starts = torch.tensor([0, *query_lens]).cumsum(0).tolist()
        tiles: dict[int, list[tuple[int, int, int]]] = {}
        for request, first_row, rows, seq_len, begin, end, slot, _ in items:
            assert (first_row, rows, seq_len) == (starts[request], query_lens[request], seq_lens[request])
            tiles.setdefault(request, []).append((begin, end, slot))
        assert sorted(tiles) == [r for r, n in enumerate(query_lens) if 0 < n <= tokens]
        split_of = {row: list(range(first, first + parts)) for row, first, parts, _ in splits}
        for request, parts in tiles.items():
            parts.sort()
            reach = seq_lens[request] - query_lens[request] + 1 - window
            assert parts[0][0] == (max(0, reach) // TILE if window else 0)
            assert parts[-1][1] == -(-seq_lens[request] // TILE)
            assert all(a[1] == b[0] for a, b in itertools.pairwise(parts)), "chunks meet"
            slots = sorted(part[2] for part in parts)
            assert slots == split_of.pop(starts[request]) if len(parts) > 1 else slots == [-1]
        assert not split_of


def test_no_short_request_makes_an_empty_schedule() -> None:
    assert make_plan([5, 0, 300], [5, 9, 400], 33, tokens=4, short_only=True) == ([], [])
