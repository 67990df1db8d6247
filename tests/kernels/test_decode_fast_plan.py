"""The schedule of the fast decode path, in Triton's interpreter: every visible tile of every row exactly once."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import make_config
from vattn.kernels.hopper.columns import padded_columns, part_start, parts_between
from vattn.kernels.hopper.decode import launch as decode_fast
from vattn.kernels.hopper.decode.schedule import plan_kernel
from vattn.kernels.hopper.schedule import WAVES

TILE = 16
FP8 = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor"}


def make_plan(
    query_lens: list[int],
    seq_lens: list[int],
    ctas: int,
    window: int = 0,
    unit: int = 1,
    requests: int = 32,
    tokens: int = 1,
    longest: int = 0,
) -> tuple[list[list[int]], list[list[int]]]:
    """Run the kernel; return items and split requests."""
    num_reqs = len(seq_lens)
    waves = -(-num_reqs // ctas)
    whole = tokens == 1 and not longest
    max_items = (waves + WAVES.value - 1) * ctas if whole else 3 * num_reqs + WAVES.value * ctas
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    schedule = torch.full((1 + max_items + 3 * num_reqs, 8), -99, dtype=torch.int32)
    chunks = torch.full((3 * num_reqs, 4), -99, dtype=torch.int32) if tokens > 1 or longest else None
    plan_kernel[(1,)](
        starts, torch.empty_like(starts), torch.tensor(seq_lens, dtype=torch.int32), schedule, chunks,
        max(num_reqs, sum(query_lens)), num_reqs, ctas, waves, max_items,
        TOKENS=tokens, LONGEST=longest, WINDOW=window, UNIT=unit, REQUESTS=requests,
    )  # fmt: skip
    active, num_splits = schedule[0, :2].tolist()
    assert 0 < active <= ctas or not any(n > 0 and (n <= longest or not longest) for n in query_lens)
    assert schedule[0, 2] == (2**31 - 1 if longest else sum(query_lens))
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
    query_lens: list[int], seq_lens: list[int], ctas: int, window: int = 0, unit: int = 1, requests: int = 32
) -> list[list[int]]:
    items, splits = make_plan(query_lens, seq_lens, ctas, window, unit, requests)
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
    for batch in (rng.choice([1, 2, 7]), 40):
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
        found = loads(check_plan([1] * len(lengths), lengths, ctas, unit=unit, requests=256))
        assert max(found) <= 1.06 * sum(found) / ctas + unit


def test_one_short_request_uses_a_tile_per_cta() -> None:
    assert len(check_plan([1], [1000], 132)) == 63


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize(("tokens", "longest"), [(2, 0), (4, 0), (1, 1), (4, 4), (2, 4), (1, 3)])
def test_several_rows_at_a_time(tokens: int, longest: int, window: int) -> None:
    """Chunks of requests have each tile once; requests of more than `longest` rows, if it is given, and padding do not
    occur."""
    rng = random.Random(tokens + window)
    for trial in range(2):
        count = rng.randrange(1, 40)
        kinds = (0, 1, tokens, longest, longest + 1, 300) if longest else (0, 1, tokens, 3 * tokens + 1)
        query_lens = rng.choices(kinds, k=count) if longest or trial else [tokens] * count
        while not longest and sum(query_lens) > tokens * count:
            query_lens[rng.randrange(count)] = 0
        seq_lens = [n + rng.randrange(3000) if n else rng.randrange(50) for n in query_lens]
        items, splits = make_plan(
            query_lens, seq_lens, rng.choice((3, 33)), window, rng.choice((1, 4)), tokens=tokens, longest=longest
        )
        starts = torch.tensor([0, *query_lens]).cumsum(0).tolist()
        chunks = {
            (request, before): min(tokens, n - before)
            for request, n in enumerate(query_lens)
            if n <= longest or not longest
            for before in range(0, n, tokens)
        }
        tiles: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for request, first_row, rows, seq_len, begin, end, slot, _ in items:
            before = first_row - starts[request]
            assert rows == chunks[request, before]
            assert seq_len == seq_lens[request] - query_lens[request] + before + rows
            tiles.setdefault((request, before), []).append((begin, end, slot))
        assert sorted(tiles) == sorted(chunks)
        split_of = {row: (list(range(first, first + parts)), rows) for row, first, parts, rows in splits}
        for (request, before), parts in tiles.items():
            parts.sort()
            rows = chunks[request, before]
            first_sees = seq_lens[request] - query_lens[request] + before + 1
            assert parts[0][0] == (max(0, first_sees - window) // TILE if window else 0)
            assert parts[-1][1] == -(-(first_sees + rows - 1) // TILE)
            assert all(a[1] == b[0] for a, b in itertools.pairwise(parts)), "chunks meet"
            slots = sorted(part[2] for part in parts)
            assert (slots, rows) == split_of.pop(starts[request] + before) if len(parts) > 1 else slots == [-1]
        assert not split_of


def test_no_short_request_makes_an_empty_schedule() -> None:
    assert make_plan([5, 0, 300], [5, 9, 400], 33, tokens=4, longest=4) == ([], [])


@pytest.mark.parametrize(
    ("reqs", "tokens", "changes", "whole"),
    [
        (32, 1024, {}, True),
        (29, 1024, FP8, True),
        (33, 16, {"head_size": 64}, True),
        (32, 1040, FP8, False),
        (128, 1024, {}, False),
        (28, 1024, {}, True),
        (25, 960, {}, True),
        (25, 976, {}, False),
        (16, 512, FP8, True),
        (16, 1024, {}, False),
        (8, 304, {}, True),
        (8, 320, {}, False),
        (34, 1024, {}, False),
        (40, 768, FP8, True),
        (40, 784, FP8, False),
        (66, 1024, FP8, True),
        (66, 1024, FP8 | {"num_heads": 64}, False),
        (66, 1024, FP8 | {"head_size": 64}, False),
        (98, 1024, FP8, False),
        (99, 1024, FP8, True),
        (99, 240, FP8, False),
        (99, 1040, FP8, False),
        (32, 1040, {}, False),
        (32, 1024, {"head_size": 256}, False),
        (32, 1024, {"num_heads": 15, "num_kv_heads": 5}, False),
    ],
    ids=str,
)
def test_one_wave_of_short_requests_stays_whole(
    reqs: int, tokens: int, changes: dict[str, Any], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vattn.config.device.multiprocessors", lambda device: 132)
    config = make_config(**{"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16", **changes})
    args: Any = SimpleNamespace(
        query=torch.empty(reqs, 1), seq_lens=torch.empty(reqs), block_table=torch.empty(reqs, tokens // 16)
    )
    found = decode_fast.whole_tuning(args, config)
    assert (found is not None and found.whole) is whole
    if found is not None:
        assert found.ctas * found.slots == 4 and (found.ctas == 2) is (reqs > 33)
    args.query = torch.empty(2 * reqs, 1)
    assert decode_fast.whole_tuning(args, config) is None


@pytest.mark.parametrize(
    ("reqs", "changes", "taken"),
    [
        (58, {}, True),
        (66, {}, True),
        (231, {}, True),
        (57, {}, False),
        (67, {}, False),
        (230, {}, False),
        (64, {"head_size": 64}, False),
        (64, {"num_heads": 40}, False),
        (64, {"kv_cache_dtype": "bfloat16", "kv_scale": "none"}, False),
        (103, {"num_heads": 15, "num_kv_heads": 5}, False),
    ],
    ids=str,
)
def test_fp8_requests_that_fill_waves_are_two_ctas_a_multiprocessor(
    reqs: int, changes: dict[str, Any], taken: bool
) -> None:
    """A wave of 264 CTAs of two heads to seven eighths and more, or three and a half; of one row a request alone."""
    layer = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
    config = make_config(**{**layer, "kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor", **changes})
    cut = decode_fast.Tuning(2, 4, ctas=2, slots=2, max_registers=128)
    assert (decode_fast.choose_tuning(config, reqs) == cut) is taken
    assert decode_fast.choose_tuning(config, reqs, 2) != cut


def test_drafts_of_up_to_sixteen_rows_of_a_group() -> None:
    layer = {"num_heads": 8, "num_kv_heads": 1, "head_size": 128, "dtype": "bfloat16"}

    def rows(reqs: int, tokens: int, **changes: Any) -> int:
        return decode_fast.rows_at_a_time(make_config(**{**layer, **changes}), reqs * tokens, reqs)

    assert [rows(64, tokens) for tokens in (1, 2, 3, 4, 8, 9)] == [1, 2, 0, 0, 0, 0]
    assert rows(64, 4, num_heads=4) == 4 and rows(64, 4, num_heads=5) == 0 and rows(64, 2, head_size=256) == 0
    assert decode_fast.rows_at_a_time(make_config(**layer), 257, 64) == 0


@pytest.mark.parametrize("head_size", [64, 128, 256, 48, 80, 192])
@pytest.mark.parametrize("cache", ["bfloat16", "fp8_e4m3"])
def test_tunings_fit_shared_memory(cache: str, head_size: int) -> None:
    """Of the Gluon kernel: a ring of tiles of keys and values, and sums of every slot to be merged."""
    stored, seen = (1 if cache == "fp8_e4m3" else 2), 0
    for kv_heads, group in itertools.product((1, 2, 3, 4, 8), (1, 2, 4, 5, 8, 16)):
        config = make_config(
            num_heads=kv_heads * group, num_kv_heads=kv_heads, head_size=head_size, dtype="bfloat16",
            kv_cache_dtype=cache, kv_scale="none" if stored == 2 else "tensor",
        )  # fmt: skip
        most = decode_fast.MAX_GROUP_SIZE // group if decode_fast.attends_drafts(config) else 1
        for num_reqs, tokens in itertools.product((1, 8, 16, 64, 256), {1, most}):
            cut = decode_fast.choose_tuning(config, num_reqs, tokens)
            if not cut.slots:
                continue
            columns = cut.slots * cut.heads * padded_columns(head_size) * stored
            rows = 8 if tokens * group <= decode_fast.QUERY_ROWS.value else 16
            need = cut.stages * 2 * decode_fast.TILE_TOKENS.value * columns + columns // 2 * rows * 4 + 1024
            assert need <= 227 << 10, (config, num_reqs, tokens, cut)
            assert cut.ctas * (need + 1024) <= 228 << 10, (config, num_reqs, tokens, cut)
            seen += 1
    assert seen or padded_columns(head_size) == 256


def test_heads_are_multiplied_as_64_128_or_256_columns() -> None:
    assert [padded_columns(size) for size in (32, 64, 72, 128, 136, 256)] == [64, 64, 128, 128, 256, 256]
    # What a product of 112 columns, or of 240 of which 128 are in registers, is made of.
    for first, end, starts in ((0, 112, [0, 64, 96, 112]), (128, 240, [128, 192, 224, 240]), (0, 64, [0, 64])):
        assert [part_start(first, end, part) for part in range(parts_between(first, end) + 1)] == starts


def test_tensor_maps_that_are_kept_have_a_bound() -> None:
    """An engine that resizes its caches would keep a map for each size."""
    tuning, most = decode_fast.Tuning(heads=1, stages=2), decode_fast.MOST_MAPS
    memory = torch.empty(2 * most, 16, 1, 64, dtype=torch.bfloat16)
    for blocks in range(1, 2 * most):
        boxes = decode_fast._boxes(memory[:blocks], tuning, 64)
        assert boxes.shape[0] == blocks and boxes.base.shape[0] == blocks
        assert 0 < len(decode_fast._maps) <= most
