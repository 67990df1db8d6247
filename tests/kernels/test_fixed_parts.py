"""Parts of the keys with fixed limits: the schedule and the launches are real, in Triton's interpreter.

The kernels that attend and merge are Gluon, which no interpreter knows: stand-ins do what schedules tell them, rounded
by parts. So a step's neighbours change bits if they change parts, or the order in which these are merged.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import prefill_emulation
from tests.kernels.decode_support import interpret
from tests.support import Batch, make_config, random_paged_batch, relative_l2
from vattn.backends import hopper_routes
from vattn.cache.layout import key_value_views
from vattn.config.device import DeviceInfo
from vattn.kernels.hopper.decode import launch as decode_fast
from vattn.kernels.hopper.prefill import fixed_launch
from vattn.kernels.hopper.prefill import launch as prefill_launch

TRIPLE = tuple[Tensor, Tensor, Tensor]
"""Maxima in base 2, sums of weights and sums of values."""


def part_start(tile: int, part: int) -> int:
    length = part
    while length * 32 <= tile:
        length *= 2
    return tile // length * length


def merged(parts: list[TRIPLE]) -> TRIPLE:
    """Merge parts from the last keys backwards."""
    maximum, total, sums = parts[0]
    for other, more, values in parts[1:]:
        new = torch.maximum(maximum, other)
        total = total * torch.exp2(maximum - new) + more * torch.exp2(other - new)
        sums = sums * torch.exp2(maximum - new)[:, None] + values * torch.exp2(other - new)[:, None]
        maximum = new
    return maximum, total, sums


class StandIns:
    """The two kernels of a batch; `limits` are those of the parts of each request's row tiles."""

    def __init__(self, batch: Batch) -> None:
        self.args, self.config = batch.args, batch.config
        self.keys, self.values = key_value_views(batch.args.key_cache, batch.args.value_cache, batch.config)
        self.items: list[list[int]] = []

    def attend(self, **given: Any) -> None:
        shape, schedule, heads = given["SHAPE"], given["schedule"], self.config.num_heads
        most = -(-self.args.block_table.shape[1] * self.config.block_size // shape.KEYS)
        for item in schedule[1 : 1 + int(schedule[0, 0])].tolist():
            request, first, count, position, _, begin, end, place = item
            self.items.append(item)
            begin, end = min(begin, most), min(end, most)
            for token in range(count):
                parts, above = [], end
                while above > begin:
                    start = begin if place >= 0 else max(begin, part_start(above - 1, shape.PART))
                    limits = start * shape.KEYS, above * shape.KEYS
                    parts.append(self.part(request, first + token, position + token, *limits))
                    above = start
                result = merged(parts) if parts else self.part(request, first + token, position + token, 0, 0)
                if place < 0:
                    self.finish(given, first + token, result)
                    continue
                at = slice((place + token) * heads, (place + token + 1) * heads)
                given["partial_output"].view(-1, self.config.head_size)[at] = result[2]
                given["partial_stats"].view(-1, 2)[at] = torch.stack(result[:2], 1)

    def merge(self, **given: Any) -> None:
        schedule, heads = given["schedule"], self.config.num_heads
        sums, stats = given["partial_output"].view(-1, self.config.head_size), given["partial_stats"].view(-1, 2)
        begin = 1 + given["max_items"]
        for first, place, count, rows, *_ in schedule[begin : begin + int(schedule[0, 1])].tolist():
            for token in range(rows):
                at = [slice((place + part * rows + token) * heads, (place + part * rows + token + 1) * heads)
                      for part in reversed(range(count))]  # fmt: skip
                self.finish(given, first + token, merged([(stats[s, 0], stats[s, 1], sums[s]) for s in at]))

    def part(self, request: int, row: int, position: int, begin: int, end: int) -> TRIPLE:
        """Return one row's results over keys from `begin` to `end`."""
        end, config = min(end, position + 1), self.config
        if config.sliding_window:
            begin = max(begin, position + 1 - config.sliding_window)
        if begin >= end:
            nothing = torch.zeros(config.num_heads)
            return nothing - 1e30, nothing, torch.zeros(config.num_heads, config.head_size)
        blocks = self.args.block_table[request, : -(-end // config.block_size)].long()
        key, value = (
            cache[blocks].flatten(0, 1)[begin:end].float().repeat_interleave(config.group_size, 1)
            for cache in (self.keys, self.values)
        )
        scores = (self.args.query[row].float() * key).sum(-1).T * (config.scale / math.log(2))
        maximum = scores.max(1).values
        weights = torch.exp2(scores - maximum[:, None])
        # One key after the other: a product would sum in an order of its own.
        sums = torch.zeros(config.num_heads, config.head_size)
        for token in range(end - begin):
            sums += weights[:, token, None] * value[token]
        return maximum, weights.sum(1), sums

    def finish(self, given: dict[str, Any], row: int, result: TRIPLE) -> None:
        maximum, total, sums = result
        seen = torch.where(total == 0, 1.0, total)
        given["output"].view(-1, self.config.num_heads, self.config.head_size)[row] = sums / seen[:, None]
        given["lse"][row] = math.log(2) * (maximum + total.log2())


class Kernel:
    """What a launcher launches by subscription."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.run


def run(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Run a step by stand-ins and return the items of its schedule."""
    stand_ins = StandIns(batch)
    monkeypatch.setattr(prefill_launch, "prefill_kernel", Kernel(stand_ins.attend))
    monkeypatch.setattr(fixed_launch, "merge_parts_kernel", Kernel(stand_ins.merge))
    fixed_launch.attend(batch.args, batch.config)
    return stand_ins.items


def layer(**changes: Any) -> Any:
    plain = {"num_heads": 2, "num_kv_heads": 1, "head_size": 64, "dtype": "float16", "lse": True, "block_size": 16}
    return make_config(**{**plain, "batch_invariant": True, **changes})


def only(batch: Batch, request: int, rows: slice) -> Batch:
    """Return a step of some rows of one request, which sees the keys up to its last row there."""
    args, starts = batch.args, batch.args.query_start_loc
    first, count = int(starts[request]), int(starts[request + 1] - starts[request])
    begin, end, _ = rows.indices(count)
    length = int(args.seq_lens[request]) - (count - end)
    assert args.lse is not None
    own = args._replace(
        query=args.query[first + begin : first + end], query_start_loc=torch.tensor([0, end - begin]).int(),
        seq_lens=torch.tensor([length]).int(), block_table=args.block_table[request : request + 1],
        output=torch.full_like(args.output[: end - begin], float("nan")),
        lse=torch.full_like(args.lse[: end - begin], float("nan")),
    )  # fmt: skip
    return replace(batch, args=own)


@pytest.mark.parametrize("window", [None, 1300])
def test_neighbours_and_chunks_change_no_bit(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, decode_fast)
    monkeypatch.setattr("vattn.config.device.multiprocessors", lambda device: 16)
    config = layer(sliding_window=window)
    batch = random_paged_batch(config, [3, 1, 0, 66], [2100, 1700, 9, 1090], num_padding_tokens=3, num_padding_reqs=1)
    together = run(batch, monkeypatch)
    assert any(place >= 0 for *_, place in together) and any(place < 0 for *_, place in together)
    expected, lse = batch.expected()
    assert relative_l2(batch.output(), expected) < 1e-3  # fp16 rounds the output
    assert relative_l2(batch.args.lse, lse) < 1e-4
    for request, rows in ((0, slice(0, 3)), (0, slice(1, 2)), (1, slice(0, 1)), (3, slice(60, 66)), (3, slice(7, 8))):
        alone = only(batch, request, rows)
        run(alone, monkeypatch)
        first = int(batch.args.query_start_loc[request])
        own = slice(first + rows.start, first + rows.stop)
        assert torch.equal(alone.args.output, batch.args.output[own]), (request, rows)
        assert torch.equal(alone.args.lse, batch.args.lse[own]), (request, rows)


EMULATED: dict[str, dict[str, Any]] = {
    "two heads": {},
    "window, sinks": {"sliding_window": 330, "sinks": True, "num_heads": 4},
    "soft cap, a tile a head": {"logits_soft_cap": 2.0, "num_kv_heads": 2},
}


@pytest.mark.parametrize("case", EMULATED)
def test_the_kernels_python_keeps_bits(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that one CTA merges and parts of several are rounded alike; nothing waits for ever or reads too early."""
    interpret(monkeypatch, decode_fast)
    monkeypatch.setattr("vattn.config.device.multiprocessors", lambda device: 12)
    monkeypatch.setattr(fixed_launch, "PART_KEYS", 256)
    monkeypatch.setattr(prefill_launch, "prefill_kernel", prefill_emulation.Kernel("prefill_kernel"))
    monkeypatch.setattr(fixed_launch, "merge_parts_kernel", prefill_emulation.Kernel("merge_parts_kernel"))
    config = layer(**EMULATED[case])
    batch = random_paged_batch(config, [3, 1, 0, 70], [1100, 700, 9, 590], num_padding_tokens=3, num_padding_reqs=1)
    fixed_launch.attend(batch.args, config)
    expected, lse = batch.expected()
    assert relative_l2(batch.output(), expected) < 1e-3  # fp16 rounds the output
    assert relative_l2(batch.args.lse, lse) < 1e-5
    steps = ((0, slice(0, 3)), (0, slice(1, 2)), (1, slice(0, 1)), (3, slice(5, 70)), (3, slice(7, 8)))
    for processors, (request, rows) in [*((12, step) for step in steps), (1, steps[3])]:
        # On a small GPU the prompt's row tiles stay whole.
        monkeypatch.setattr("vattn.config.device.multiprocessors", lambda device, count=processors: count)
        alone = only(batch, request, rows)
        fixed_launch.attend(alone.args, config)
        first = int(batch.args.query_start_loc[request])
        own = slice(first + rows.start, first + rows.stop)
        assert torch.equal(alone.args.output, batch.args.output[own]), (processors, request, rows)
        assert torch.equal(alone.args.lse, batch.args.lse[own]), (processors, request, rows)


def test_schedules_hold_fixed_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over far more keys than a stand-in attends: parts get longer, and a full schedule leaves row tiles whole."""
    interpret(monkeypatch, decode_fast)
    config = layer()
    lengths = torch.tensor([400_000, 70_000, 16_384, 5, 511, 513, 0, 30_001]).int()
    starts = torch.arange(9).int()
    places = []
    for processors in (6, 200):
        monkeypatch.setattr("vattn.config.device.multiprocessors", lambda device, n=processors: n)
        if processors == 200:
            monkeypatch.setattr(fixed_launch, "SCRATCH_BYTES", 100 * 4 * 2 * 66)
        schedule = torch.full(decode_fast.plan_shape(config, 8, 8, lengths.device), -7, dtype=torch.int32)
        fixed_launch.plan(starts, lengths, schedule, 8, config)
        items = schedule[1 : 1 + int(schedule[0, 0])].tolist()
        for request, length in enumerate(lengths.tolist()):
            own = sorted(item[5:] for item in items if item[0] == request and item[4] == length)
            end = -(-length // 128)
            assert own[0][0] == 0 and own[-1][1] == end
            assert all(a[1] == b[0] for a, b in itertools.pairwise(own))
            if own[0][2] >= 0:
                starts_of = sorted({part_start(tile, 4) for tile in range(end)})
                assert [begin for begin, *_ in own] == starts_of
                assert [place for *_, place in own] == list(range(own[0][2], own[0][2] + len(own)))
        places.append([item[7] for item in items if item[7] >= 0])
        assert len(set(places[-1])) == len(places[-1])
    assert len(places[0]) > 100 >= len(places[1]) > 0


def test_every_step_of_a_layer_goes_the_same_way() -> None:
    """Shapes choose tiles of the same keys, products and weights: what rounds a row."""
    for changes in ({}, {"head_size": 256}, {"sliding_window": 100, "num_heads": 8}, {"kv_cache_dtype": "fp8_e4m3"}):
        config = layer(**changes)
        tiles = [fixed_launch.choose_tiles(config, *shape, 132) for shape in ((1, 1), (64, 64), (40, 8), (9000, 1))]
        assert len({prefill_launch.key_tile(config, each) for each in tiles}) == 1
        assert not any(each.halves for each in tiles) and max(each.groups for each in tiles) <= 2


def test_layers_that_were_not_compared_stay_on_the_general_kernel() -> None:
    hopper = DeviceInfo("cuda", (9, 0), "sm_90")
    llama = layer(num_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16")
    fp8 = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor"}
    for same in (llama, llama.replace(**fp8), llama.replace(num_heads=8, block_size=64)):
        assert fixed_launch.refusals(same, hopper) == []
        assert hopper_routes.missed(same, hopper) == {"decodes": [], "prompts": []}
    for other, reason in (
        ({"sliding_window": 100}, "batch_invariant with sliding_window (runs none)"),
        ({"head_size": 64, "head_size_v": 64}, "batch_invariant with head_size 64 (runs 128)"),
        ({"num_heads": 24}, "batch_invariant with 3 query heads per KV head (runs divisors of 64)"),
        ({"alibi": "linear"}, "alibi is not implemented"),
    ):
        assert fixed_launch.refusals(llama.replace(**other), hopper) == [reason]
