"""Row tiles whose keys are attended in parts: schedule, launches and reduction are real, in Triton's interpreter.

The prefill kernel is Gluon, which no interpreter knows: a stand-in computes the items of its schedule.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.kernels.decode_support import interpret
from tests.support import Batch, make_config, random_paged_batch, relative_l2
from vattn.cache.layout import key_value_views
from vattn.kernels.hopper import mixed_launch
from vattn.kernels.hopper.decode import launch as decode_fast
from vattn.kernels.hopper.decode import triton_kernel
from vattn.kernels.hopper.prefill import launch as prefill_launch

LONG = [(3, 1100), (0, 9), (2, 700), (5, 5)]
SHORT = [(3, 300), (1, 40), (0, 9), (2, 257), (5, 5)]
FP8 = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor"}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp8, sinks, window": {**FP8, "sinks": True, "sliding_window": 600},
    "static output": {"output_format": "fp8_static", "sinks": True},
    "three heads of 80": {"num_heads": 3, "head_size": 80},
    "seventeen heads, three tokens of 64 rows": {"num_heads": 17},
}


def stand_in(batch: Batch, found: list[tuple[int, ...]]) -> Any:
    """Return a prefill kernel that computes the items of its schedule, whole row tiles from the reference."""
    args, config = batch.args, batch.config
    rows, lse = batch.expected()
    keys, values = key_value_views(args.key_cache, args.value_cache, config)

    def part(request: int, row: int, position: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        end = min(end, position + 1)
        if config.sliding_window:
            begin = max(begin, position + 1 - config.sliding_window)
        if begin >= end:
            return torch.zeros(config.num_heads, config.head_size), torch.tensor([[-1e30, 0.0]] * config.num_heads)
        blocks = args.block_table[request, : -(-end // config.block_size)].long()
        key, value = (
            cache[blocks].flatten(0, 1)[begin:end].float().repeat_interleave(config.group_size, 1)
            for cache in (keys, values)
        )
        scores = torch.einsum("hd,thd->ht", args.query[row].float(), key) * config.scale / math.log(2)
        if args.k_scale is not None:
            scores = scores * args.k_scale
        maximum = scores.max(1).values
        weights = torch.exp2(scores - maximum[:, None])
        return torch.einsum("ht,thd->hd", weights, value), torch.stack([maximum, weights.sum(1)], 1)

    def launched(**given: Any) -> None:
        shape, schedule = given["SHAPE"], given["schedule"]
        tokens = shape.GROUPS * (64 // shape.PACK)
        slots = given["partial_output"].numel() // (config.num_heads * config.head_size * tokens)
        sums = given["partial_output"].view(slots, tokens, config.num_heads, -1) if slots else None
        stats = given["partial_stats"].view(slots, tokens, config.num_heads, 2) if slots else None
        assert shape.SPLIT and given["counter"] is None
        for item in schedule[1 : 1 + int(schedule[0, 0])].tolist():
            request, first, count, position, _, begin, end, slot = item
            found.append((first, count, begin, end, slot))
            if slot < 0:
                written = rows[first : first + count]
                if config.output_format == "fp8_static":
                    written = (written / args.output_scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
                target = given["output"].view(rows.shape)
                target[first : first + count] = written.to(target.dtype)
                args.lse[first : first + count] = lse[first : first + count]
                continue
            assert sums is not None and stats is not None
            for token in range(count):
                sums[slot, token], stats[slot, token] = part(
                    request, first + token, position + token, begin * shape.KEYS, end * shape.KEYS
                )

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return launched

    return Kernel()


@pytest.mark.parametrize("case", CASES)
def test_parts_are_merged(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, decode_fast, triton_kernel)
    monkeypatch.setattr("vattn.config.device.multiprocessors", lambda device: 8)
    layer = {"num_heads": 4, "num_kv_heads": 1, "head_size": 64, "dtype": "float16", "lse": True, "block_size": 16}
    config = make_config(**{**layer, **CASES[case]})
    query_lens, seq_lens = (list(lengths) for lengths in zip(*LONG, strict=True))
    batch = random_paged_batch(config, query_lens, seq_lens, num_padding_tokens=3, num_padding_reqs=1)
    found: list[tuple[int, ...]] = []
    monkeypatch.setattr(prefill_launch, "prefill_kernel", stand_in(batch, found))
    mixed_launch.attend(batch.args, config, "split_keys")
    assert any(slot >= 0 for *_, slot in found) and any(slot < 0 for *_, slot in found)
    expected, lse = batch.expected()
    tolerance = 2.0**-4 if config.output_format != "none" else 2e-3
    assert relative_l2(batch.output(), expected) < tolerance
    assert relative_l2(batch.args.lse, lse) < 1e-3


def test_no_kernel_follows_where_block_tables_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, decode_fast, triton_kernel)
    config = make_config(num_heads=4, num_kv_heads=1, head_size=64, dtype="float16", lse=True, block_size=16)
    query_lens, seq_lens = (list(lengths) for lengths in zip(*SHORT, strict=True))
    batch = random_paged_batch(config, query_lens, seq_lens, num_padding_tokens=3)
    found: list[tuple[int, ...]] = []
    monkeypatch.setattr(prefill_launch, "prefill_kernel", stand_in(batch, found))
    monkeypatch.setattr(decode_fast, "launch_reduction", None)
    mixed_launch.attend(batch.args, config, "split_keys")
    assert all(slot < 0 for *_, slot in found)
    assert sum(count for _, count, *_ in found) == sum(query_lens) + 3
