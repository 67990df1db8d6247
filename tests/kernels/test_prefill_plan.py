"""The prefill schedule: every row in one tile, the key tiles that it needs, longest first; in Triton's interpreter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from vattn.kernels.hopper.prefill.schedule import max_row_tiles, prefill_plan_kernel
from vattn.kernels.hopper.prefill.split_schedule import split_plan_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


KEY_TILE, ROW_TILE = 128, 128


def tiles_of(
    query_lens: list[int], seq_lens: list[int], padding: int, window: int, row_tile: int = ROW_TILE, least: int = 1
) -> list[list[int]]:
    """Return the records that are expected, sorted; equal lengths stay in the order of the query."""
    records, first = [], 0
    for request, (rows, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for start in range(0, rows if rows >= least else 0, row_tile):
            count = min(row_tile, rows - start)
            position = seq_len - rows + start
            end = -(-max(0, min(position + count, seq_len)) // KEY_TILE)
            begin = min(max(position - window + 1, 0) // KEY_TILE, end) if window else 0
            records.append([request, first + start, count, position, seq_len, begin, end])
        first += rows
    for start in range(0, padding, row_tile):
        records.append([0, first + start, min(row_tile, padding - start), start - padding, -1, 0, 0])
    return sorted(records, key=lambda r: r[5] - r[6])


def schedule_of(
    query_lens: list[int],
    seq_lens: list[int],
    padding: int,
    window: int,
    chunk: int,
    reqs: int,
    row_tile: int = ROW_TILE,
    least: int = 1,
) -> list[list[int]]:
    starts = torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int()
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    num_tokens = sum(query_lens) + padding
    tiles = max_row_tiles(num_tokens, len(query_lens), row_tile)
    schedule = torch.full((1 + 2 * tiles, 8), -99, dtype=torch.int32, device=DEVICE)
    prefill_plan_kernel[(1,)](
        starts, torch.empty_like(starts), lengths, schedule, len(query_lens), num_tokens, tiles, WINDOW=window,
        ROWS=row_tile, LEAST=least,
        KEYS=KEY_TILE, CHUNK=chunk, REQUESTS=reqs,
    )  # fmt: skip
    count = int(schedule[0, 0])
    found: list[list[int]] = schedule[1 : 1 + count, :7].tolist()
    return found


CASES = {
    "one": ([1], [1], 0),
    "empty request": ([0, 300, 0], [7, 300, 0], 5),
    "chunks of odd offset": ([130, 1, 257], [1003, 77, 4001], 200),
    "query longer than its sequence": ([300, 200], [100, 0], 0),
    "exact tiles": ([128, 256], [128, 512], 128),
    "only padding": ([0], [0], 300),
}


def half_of(others: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return every second pair of a case and one of the others: each case and each other occur."""
    return [(case, other) for i, case in enumerate(CASES) for j, other in enumerate(others) if (i + j) % 2]


@pytest.mark.parametrize(("case", "window"), half_of([0, 1, 100, 1000]))
def test_records(case: str, window: int) -> None:
    assert schedule_of(*CASES[case], window, 16, 16) == tiles_of(*CASES[case], window)


@pytest.mark.parametrize(("case", "tile"), half_of([(32, 5), (8, 2), (16, 1), (64, 9)]))
def test_packed_heads_and_requests_of_another_kernel(case: str, tile: tuple[int, int]) -> None:
    """Tiles of fewer tokens, and requests of few rows left out; padding is never left out."""
    asked = CASES[case]
    assert schedule_of(*asked, 100, 16, 16, *tile) == tiles_of(*asked, 100, *tile)


def test_more_requests_and_tiles_than_a_chunk() -> None:
    rng = random.Random(3)
    query_lens = [rng.choice((0, 1, 130, 700)) for _ in range(40)]
    seq_lens = [rng.randrange(3000) for _ in query_lens]
    assert schedule_of(query_lens, seq_lens, 77, 500, 32, 16) == tiles_of(query_lens, seq_lens, 77, 500)


def parts_of(
    query_lens: list[int], seq_lens: list[int], padding: int, window: int, ctas: int, row_tile: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the items and the split row tiles of a schedule that splits keys."""
    starts = torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int()
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    num_tokens = sum(query_lens) + padding
    tiles = max_row_tiles(num_tokens, len(query_lens), row_tile)
    most = tiles + 4 * ctas
    schedule = torch.full((2 + most + 3 * tiles, 8), -99, dtype=torch.int32, device=DEVICE)
    split_plan_kernel[(1,)](
        starts, torch.empty_like(starts), lengths, schedule, len(query_lens), num_tokens, tiles, most, ctas,
        WINDOW=window, ROWS=row_tile, KEYS=KEY_TILE, CHUNK=16, REQUESTS=16, LEAST=2, MERGING=1,
    )  # fmt: skip
    items, splits, *padded = schedule[0, :4].tolist()
    assert padded == [2**31 - 1, 0]
    count = int(schedule[1 + most + tiles, 0])
    whole = schedule[2 + most + tiles :][:count].tolist()
    assert whole == [[*tile, -1] for tile in tiles_of(query_lens, seq_lens, padding, window, row_tile)]
    return schedule[1 : 1 + items].tolist(), schedule[1 + most : 1 + most + splits, :4].tolist()


@pytest.mark.parametrize("ctas", [1, 16, 132])
@pytest.mark.parametrize(("case", "window"), half_of([0, 1, 100, 1000]))
def test_parts_of_row_tiles_cover_their_keys_once(case: str, window: int, ctas: int) -> None:
    items, splits = parts_of(*CASES[case], window, ctas, 32)
    found: dict[tuple[int, ...], list[list[int]]] = {}
    for item in items:
        found.setdefault(tuple(item[:5]), []).append(item[5:])
    expected = {tuple(tile[:5]): tile[5:] for tile in tiles_of(*CASES[case], window, 32)}
    assert found.keys() == expected.keys()
    slots, merged = [], {}
    for tile, parts in found.items():
        begin, end = expected[tile]
        assert [parts[0][0], *(part[1] for part in parts)] == [*(part[0] for part in parts), end]
        assert parts[0][0] == begin
        if len(parts) == 1:
            assert parts[0][2] == -1
            continue
        assert all(part[1] > part[0] for part in parts)
        slots += [part[2] for part in parts]
        merged[tile[1]] = [tile[1], parts[0][2], len(parts), tile[2]]
    assert sorted(slots) == list(range(len(slots)))
    assert sorted(splits) == sorted(merged.values())
    # Short row tiles stay whole, long ones fill the card.
    assert all(len(parts) == 1 for tile, parts in found.items() if expected[tile][1] - expected[tile][0] <= 2)
    if case == "chunks of odd offset" and window in (0, 1000) and ctas == 132:
        assert len(items) > 2 * len(found)
