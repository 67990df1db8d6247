"""A block that a step writes is one entry of one request; requests may share blocks that they only read."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import vattn
from tests.support import unchanged
from vattn.distributed import ContextParallel
from vattn.errors import MetadataError
from vattn.metadata.block_conflicts import BlockConflicts

SIZE = 4


def make(block_size: int = SIZE, **options: Any) -> vattn.AttentionMetadataBuilder:
    return vattn.AttentionMetadataBuilder(4, 64, 64, block_size, **{"num_blocks": 40, **options})


def config(window: int | None, **options: Any) -> vattn.AttentionConfig:
    """Return what a layer with the smallest blocks asks for."""
    return vattn.AttentionConfig(2, 2, 16, 16, 0.25, "float32", "float32", 8, sliding_window=window, **options)


REFUSED: dict[str, tuple[Any, tuple[int, int, int | None, int, int | None]]] = {
    "a block behind itself": (([1], [9], [[5, 6, 5]]), (5, 0, 2, 0, 0)),
    "a block of the prompt twice": (([3], [7], [[5, 5]]), (5, 0, 1, 0, 0)),
    "a fork that was not copied": (([1, 1], [6, 7], [[1, 2], [1, 2]]), (2, 1, 1, 0, 1)),
    "a fork behind its other half": (([1, 1], [6, 10], [[1, 2], [1, 2, 3]]), (2, 0, 1, 1, 1)),
    "a fork that ends a block": (([1, 1], [8, 10], [[1, 2], [1, 2, 3]]), (2, 0, 1, 1, 1)),
    "another place of another request": (([1, 1], [6, 10], [[1, 2], [2, 4, 3]]), (2, 0, 1, 1, 0)),
    "a new prompt over a cached one": (([8, 1], [8, 10], [[2, 1], [1, 2, 3]]), (1, 0, 1, 1, 0)),
    "a prompt behind another prefix": (([4, 1], [8, 10], [[9, 2], [1, 2, 3]]), (2, 0, 1, 1, 1)),
    "the null block": (([1, 1], [6, 10], [[1, 0], [2, 0, 3]]), (0, 0, 1, 1, 1)),
    "slots of another request": (
        ([1, 1], [6, 10], [[1, 2], [3, 4, 5]], {"slot_mapping": [18, 21]}), (4, 0, None, 1, 1)
    ),
    "slots in the last request's block": (
        ([1, 1], [3, 2], [[1], [2]], {"slot_mapping": [10, 9]}), (2, 1, 0, 0, None)
    ),
    "slots in the first request's block": (
        ([1, 1], [2, 3], [[2], [1]], {"slot_mapping": [9, 10]}), (2, 1, None, 0, 0)
    ),
    "a block that ends while its reader is in the middle of another": (
        ([2, 1], [8, 10], [[1, 2], [1, 2, 3]]), (2, 0, 1, 1, 1)
    ),
}  # fmt: skip
"""Arguments of `build`, and the block, request and entry that write it, and request and entry that use it."""


def conflict(block: int, writer: int, entry: int | None, user: int, used: int | None) -> str:
    """Return the pattern of an error; an entry of `None` is a slot that was given."""
    first, second = (r"\(by slot" if at is None else rf"\(entry {at} of" for at in (entry, used))
    return rf"block {block} is written by request {writer} {first}.* and used by request {user} {second}"


@pytest.mark.parametrize("known", [40, None])
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_written_blocks_that_are_used_elsewhere_are_refused(name: str, as_tensor: bool, known: int | None) -> None:
    (queries, lengths, tables, *more), found = REFUSED[name]
    builder = make(num_blocks=known)
    step = builder.build([1], [5], [[30, 31]])
    if as_tensor:  # with garbage behind the last blocks
        tables = torch.tensor([[*row, *[-1, 1 << 30, 5][: 8 - len(row)]][:4] + [2] * 4 for row in tables])
    with unchanged(step), pytest.raises(MetadataError, match=conflict(*found)):
        builder.build(queries, lengths, tables, **(more[0] if more else {}))
    assert builder.build([1], [6], [[30, 31]]).slot_mapping.tolist() == [31 * SIZE + 1]


TAKEN: dict[str, tuple[Any, list[int]]] = {
    "a shared prefix": (([1, 1], [10, 9], [[1, 2, 3], [1, 2, 4]]), [13, 16]),
    "a prefix that this step stores": (([8, 2], [8, 10], [[1, 2], [1, 2, 3]]), [*range(4, 12), 12, 13]),
    "a prefix that this step ends": (([2, 2], [8, 10], [[1, 2], [1, 2, 3]]), [10, 11, 12, 13]),
    "a prefix whose last token this step stores": (([1, 2], [8, 10], [[1, 2], [1, 2, 3]]), [11, 12, 13]),
    "nothing stored": (([1, 1], [6, 6], [[1, 2], [1, 2]], {"slot_mapping": [-1, -1]}), [-1, -1]),
    "one row stored": (([1, 1], [6, 6], [[1, 2], [1, 3]], {"slot_mapping": [-1, 13]}), [-1, 13]),
    "another place of its own request": (([1], [6], [[1, 2]], {"slot_mapping": [5]}), [5]),
    "no place of any request": (([1], [6], [[1, 2]], {"slot_mapping": [150]}), [150]),
    "a scratch block of all": (([1, 1], [6, 7], [[1, 2], [3, 4]], {"slot_mapping": [150, 151]}), [150, 151]),
    "spare entries": (([1, 1], [6, 3], torch.tensor([[1, 2, 3, 2], [3, -1, 2, 1]])), [9, 14]),
    "empty requests": (([0, 1], [0, 3], [[3, 3], [3]]), [14]),
    "no tokens": (([], [], []), []),
}


@pytest.mark.parametrize("known", [40, None])
@pytest.mark.parametrize("name", TAKEN)
def test_blocks_that_nobody_else_uses_are_taken(name: str, known: int | None) -> None:
    (queries, lengths, tables, *more), slots = TAKEN[name]
    builder = make(num_blocks=known)
    assert builder.build(queries, lengths, tables, **(more[0] if more else {})).slot_mapping.tolist() == slots


def wrongly_shared(queries: list[int], lengths: list[int], tables: list[list[int]], window: int | None) -> bool:
    """Say in plain Python whether some entry that is read, or written through, names a block written elsewhere."""
    written: dict[int, list[tuple[int, int, int]]] = {}
    used = []
    for row, (query, length) in enumerate(zip(queries, lengths, strict=True)):
        first = 0 if window is None else max(0, length - query - window + 1) // 8
        used += [(row, column) for column in range(first, -(-length // 8))]
        for position in range(length - query, length):
            place = (row, position // 8)
            block = tables[row][place[1]]
            old = {(r, c): count for r, c, count in written.get(block, [])}
            old[place] = old.get(place, 0) + 1
            written[block] = [(*key, count) for key, count in old.items()]
    for row, column in used:
        for r, c, count in written.get(tables[row][column], []):
            if (r, c) == (row, column):
                continue
            prefix = [place for place in used if place[0] == row and place[1] < column]
            same = c == column and all(tables[row][place] == tables[r][place] for _, place in prefix)
            reads_only = (row, column) not in {entry[:2] for entry in written[tables[row][column]]}
            filled = count == 8 or (
                lengths[r] // 8 > c
                and (lengths[row] - queries[row]) % 8 == 0
                and lengths[row] - queries[row] >= 8 * c + 8
            )
            if row == r or not filled or not same or not reads_only:
                return True
    return False


@pytest.mark.parametrize("window", [None, 12])
def test_what_is_refused_is_what_plain_python_refuses(window: int | None) -> None:
    rng = random.Random(1)
    builder = make(8, layers=[config(window)])
    seen = {True: 0, False: 0}
    for _ in range(500):
        count = rng.randint(1, 4)
        lengths = [rng.randint(1, 48) for _ in range(count)]
        queries = [rng.choice([1, rng.randint(1, length)]) for length in lengths]
        if sum(queries) > 64:
            continue
        blocks = rng.sample(range(1, 40), 39)
        tables = [[blocks.pop() for _ in range(-(-length // 8))] for length in lengths]
        for _ in range(rng.choice([0, 1, 1, 2])):
            one, other = rng.choice(tables), rng.choice(tables)
            shared = rng.randint(1, min(len(one), len(other)))
            if rng.random() < 0.7:
                other[:shared] = one[:shared]
            else:
                other[rng.randrange(len(other))] = rng.choice(one)
        wrong = wrongly_shared(queries, lengths, tables, window)
        seen[wrong] += 1
        try:
            builder.build(queries, lengths, tables)
        except MetadataError:
            assert wrong, (queries, lengths, tables)
        else:
            assert not wrong, (queries, lengths, tables)
    assert min(seen.values()) > 100, seen


def test_blocks_behind_windows_are_nobodys() -> None:
    """Where the builder knows its layers; without them, blocks that were freed are 0 in the table."""
    builder = make(8, layers=[config(12), config(6)])
    ring = [1, 9, 3, 1, 2]
    step = builder.build([1, 1], [33, 12], [ring, [8, 9]])  # request 1 writes into a block that request 0 left behind
    for _ in range(4):
        step = builder.advance(step, [])
    with pytest.raises(MetadataError, match="new block 2, which is entry 4 of the block table of request 0"):
        builder.advance(step, [2])
    builder.advance(step, [3])
    step = builder.build([1], [32], [ring[:4]])
    assert builder.advance(step, [9]).slot_mapping.tolist() == [72]
    ring = [1, 2, 3, 1, 2]
    with pytest.raises(MetadataError, match="block 2 is written"):
        make(8).build([1], [33], [ring])
    with pytest.raises(MetadataError, match="block 2 is written"):
        make(8, layers=[config(12), config(None)]).build([1], [33], [ring])
    assert make(8).build([1], [33], [[0, 0, 3, 1, 2]]).slot_mapping.tolist() == [16]
    chunks = make(8, layers=[config(16, chunk_lookback=0)])
    assert chunks.build([1], [33], [[5, 5, 7, 7, 5]]).slot_mapping.tolist() == [40]
    with pytest.raises(MetadataError, match="block 7 is written"):
        chunks.build([1], [32], [[1, 1, 7, 7]])


def test_new_blocks_of_advance() -> None:
    builder = make()
    tables = torch.tensor([[1, 2, 9, 9], [3, 9, 9, 9]])
    step = builder.build([1, 1], [8, 4], tables)
    for blocks, text in (
        ([9, 2], "new block 2, which is entry 1 of the block table of request 0"),
        ([3, 9], "entry 0 of the block table of request 1"),
    ):
        with pytest.raises(MetadataError, match=text):
            builder.advance(step, blocks)
    step = builder.advance(step, [9, 10])  # 9 stood behind the last blocks
    tables.fill_(7)  # the caller's own from here on
    for _ in range(SIZE - 1):
        step = builder.advance(step, [])
    for wrong in (9, 10, 1):
        with pytest.raises(MetadataError, match=f"new block {wrong}, which is entry"):
            builder.advance(step, [11, wrong])
    step = builder.advance(step, [11, 7])
    assert step.slot_mapping.tolist() == [11 * SIZE, 7 * SIZE]
    builder.check(step)


@pytest.mark.parametrize("far", [1 << 25, (1 << 31) - 1])
def test_ids_beyond_any_table_of_counts(far: int) -> None:
    builder = make(num_blocks=None)
    step = builder.build([1, 1], [4, 8], [[far], [1, far - 1]])
    for wrong in (far, far - 1, 1):
        with pytest.raises(MetadataError, match=f"new block {wrong}, which"):
            builder.advance(step, [wrong, 2])
    step = builder.advance(step, [far - 2, 2])
    with pytest.raises(MetadataError, match=f"block {far} is written"):
        builder.build([1], [9], [[far, 1, far]])


def test_copies_of_a_builder_count_for_themselves() -> None:
    builder = make()
    step = builder.build([1], [4], [[1]])
    other = copy.deepcopy(builder)
    builder.advance(step, [2])
    with pytest.raises(MetadataError, match="block 5 is written"):
        other.build([1], [9], [[5, 6, 5]])
    assert other.build([1], [9], [[2, 6, 5]]).slot_mapping.tolist() == [20]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_share_a_cache(rank: int) -> None:
    builder = make(context_parallel=ContextParallel(rank=rank, world_size=2, interleave=SIZE))
    builder.build([1, 1], [12, 12], [[1, 2], [1, 3]])
    # The new token lies on this rank, in the second block.
    with pytest.raises(MetadataError, match="block 5 is written"):
        builder.build([1], [9 + rank * SIZE], [[5, 5]])


def test_a_plain_step_is_judged_by_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockConflicts, "refuse", None)
    make().build([2, 1], [8, 10], [[1, 2], [4, 5, 6]])


def test_groups_that_share_storages() -> None:
    model = torch.nn.ModuleList(vattn.Attention(2, 16, 0.25, per_layer_sliding_window=w) for w in (None, 24))
    vattn.allocate_kv_cache(model, num_blocks=16, dtype=torch.float32, hybrid=True)
    builder = vattn.GroupedMetadataBuilder(2, 8, max_seq_len=96, layers=model)
    builder.build([1], [49], [[[1, 2, 3, 4]], [[0, 5, 6, 7]]])
    builder.build([1], [49], [[[1, 2, 3, 4]], [[4, 5, 6, 7]]])  # what stands behind the window nobody reads
    builder.build([1], [49], [[[1, 2, 3, 4, 7, 4]], [[4, 5, 6, 7]]])  # and so it is behind the last token
    for tables, text in (
        ([[[1, 2, 3, 4, 9, 9]], [[9, 5, 4, 7]]], r"block 4 is .* used by request 0 of CacheGroup.1 of 2, window"),
        (
            [[[1, 2, 3, 7]], [[0, 5, 6, 7]]],
            r"block 7 is written .*\(entry 3 .* and used by request 0 of CacheGroup.*\(entry 3",
        ),
        ([[[1, 2, 3, 4]], [[0, 5, 4, 7]]], r"block 4 is .* used by request 0 of CacheGroup.1 of 2, window. \(entry 2"),
        ([[[1, 4, 3, 4]], [[0, 5, 6, 7]]], r"block 4 is .* used by request 0 of CacheGroup.0 of 2, full. \(entry 1"),
    ):
        with pytest.raises(MetadataError, match=text):
            builder.build([1], [49], tables)
    two = vattn.GroupedMetadataBuilder(2, 32, max_seq_len=96, layers=model)
    two.build([16, 4], [16, 20], [[[1], [1, 4]], [[5], [5, 6]]])  # request 1 finds both groups' prefix
    with pytest.raises(MetadataError, match=r"block 1 is .* used by request 1 of CacheGroup.1 of 2, window. \(entry 0"):
        two.build([16, 4], [16, 20], [[[1], [3, 4]], [[5], [1, 6]]])
    builder.build([1], [49], [[1, 2, 3, 4]], slot_mapping=[-1])


def test_encoder_states() -> None:
    builder = make(max_encoder_len=16)

    def build(lens: list[int], new: list[int], cross: list[list[int]]) -> vattn.AttentionMetadata:
        tables = [[20, 21], [22, 23]]
        return builder.build([1, 1], [5, 5], tables, encoder_lens=lens, new_encoder=new, cross_block_tables=cross)

    build([6, 6], [1, 0], [[1, 2], [1, 2]])  # request 1 reads request 0's states
    build([6, 3], [1, 0], [[1, 2], [1, 9]])
    build([6, 6], [0, 0], [[1, 2], [2, 1]])
    for lens, cross, text in (
        ([6, 6], [[1, 2], [2, 3]], "request 0 writes encoder states in this step into block 2, which holds those of"),
        ([6, 7], [[1, 2], [1, 2]], "block 1, which holds those of request 1"),
        ([6, 6], [[1, 2], [3, 2]], "block 2, which holds those of request 1"),
    ):
        with pytest.raises(MetadataError, match=text):
            build(lens, [1, 0], cross)
    with pytest.raises(MetadataError, match=r"request 1 writes encoder states .* block 3, .* of request 2"):
        builder.build(
            [1] * 3, [4] * 3, [[20], [22], [24]], encoder_lens=[3, 6, 6], new_encoder=[1, 1, 0],
            cross_block_tables=[[1, 3], [2, 3], [3, 4]],
        )  # fmt: skip


def test_blocks_of_tokens_that_the_device_adds() -> None:
    builder = vattn.FlashAttentionMetadataBuilder(max_num_reqs=4, max_num_tokens=8, max_seq_len=64)
    builder.build([1, 1], [16, 20], [[1, 2, 9], [3, 4, 9]], num_lookahead_slots=4)
    for tables, text in (
        ([[1, 3], [3, 4]], r"block 3 is written by request 0 \(entry 1 .*used by request 1 \(entry 0"),
        ([[1, 1], [3, 4]], "block 1 is written"),
        ([[1, 2], [2, 4]], "block 2 is written"),
    ):
        with pytest.raises(MetadataError, match=text):
            builder.build([1, 1], [16, 20], tables, num_lookahead_slots=4)
        builder.build([1, 1], [16, 20], tables)  # without tokens to come, nobody uses that entry
    narrow = vattn.FlashAttentionMetadataBuilder(4, 8, 96, layers=[replace(config(16), block_size=16)])
    narrow.build([1, 1], [64, 16], [[1, 2, 3, 4, 5], [7, 1]], num_lookahead_slots=4)  # block 1 lies behind the window
    with pytest.raises(MetadataError, match="block 3 is written"):  # position 47 is the last that the window reaches
        narrow.build([1, 1], [63, 16], [[1, 2, 3, 4, 5], [7, 3]], num_lookahead_slots=4)
    with pytest.raises(MetadataError, match="block 4 is written"):
        narrow.build([1, 1], [64, 16], [[1, 2, 3, 4, 5], [7, 4]], num_lookahead_slots=4)


def test_a_prefix_of_many_readers_is_checked_at_once() -> None:
    """Not one pair of entries after the other: 255 readers of 128 blocks took 126 ms."""
    size, prefix = 16, list(range(1, 129))
    builder = vattn.AttentionMetadataBuilder(256, 4096, 4096, size, num_blocks=1000)
    tables = [prefix, *([*prefix, 200 + row] for row in range(255))]
    queries = [128 * size, *[1] * 255]
    lengths = [128 * size, *[128 * size + 1] * 255]
    assert builder.build(queries, lengths, tables).slot_mapping.shape[0] == sum(queries)
    tables[200][7] = 999
    with pytest.raises(MetadataError, match=r"used by request 200 \(entry 127"):
        builder.build(queries, lengths, tables)


@pytest.mark.parametrize("known", [40, None])
def test_inference_mode_may_change_between_steps(known: int | None) -> None:
    builder = make(num_blocks=known)
    for mode in (True, False, True, False):
        with torch.inference_mode(mode):
            step = builder.build([1, 1], [8, 3], [[1, 2], [7 + mode]])
            with pytest.raises(MetadataError, match="block 5 is written"):
                builder.build([1], [9], [[5, 6, 5]])
        for other in (not mode, mode, not mode):
            with torch.inference_mode(other):
                step = builder.advance(step, {8: [3], 9: [9]}.get(int(step.seq_lens[0]), []))
        with torch.inference_mode(mode), pytest.raises(MetadataError, match="1 new blocks, and 0 requests"):
            builder.advance(step, [3])
        with torch.inference_mode(not mode):
            builder.build([1], [30], [[*range(10, 17), 38]])
