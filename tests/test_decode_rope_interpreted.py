"""The decode kernel that turns and writes for itself, in Triton's interpreter, against the two kernels it replaces.

Bits are compared: both compute the same in the same order, norms aside. As in `test_decode_fast_interpreted`, plain
caches are fp16 and FP8 has its plain lowering.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.decode_support import interpret
from tests.rope_attention_cases import blank, make_step, two_calls
from tests.support import make_config, relative_l2
from vattn.ops.arguments import RopeAttentionArgs
from vattn.rope_config import RopeConfig

pytest.importorskip("triton")

FP8 = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"}
FP8_QUERY = {"query_format": "fp8_e4m3", "query_scale": "head"}
LENGTHS = [1, 16, 17, 130, 47]
NEOX = RopeConfig(64)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    from vattn.ops.triton import decode_fast, decode_fast_kernels, decode_rope_kernels

    interpret(monkeypatch, decode_fast, decode_fast_kernels, decode_rope_kernels)


def config_of(**changes: Any) -> Any:
    values = {"num_heads": 6, "num_kv_heads": 2, "head_size": 64, "dtype": "float16", "lse": True, **changes}
    return make_config(**values)


def check(args: RopeAttentionArgs, config: Any, rope: RopeConfig, heads: int = 2) -> None:
    """Compare cache, output and LSE with those of the two kernels, one after the other."""
    from vattn.ops.triton import decode_fast, decode_rope
    from vattn.ops.triton.rope_cache_update import rope_update

    tuning = decode_fast.Tuning(heads, 3, 2)
    update, call = two_calls(args, config)
    rope_update(update, rope, config)
    decode_fast.decode(call, config, tuning)
    new_update, new_call = args.parts(torch.empty_like(call.query))
    decode_rope.decode(new_update, new_call, rope, config, tuning)
    assert not bool(call.output.float().isnan().any())
    for name in ("kv_cache", "output", "output_block_scale", "lse"):
        got, want = getattr(args, name), getattr(call, name)
        if want is None:
            continue
        if rope.norm == "none":
            assert torch.equal(as_bytes(got), as_bytes(want)), name
        elif name != "kv_cache":
            assert relative_l2(got, want) < 1e-2, name
        else:
            # Sums of squares in another order: at most the next code, here and there.
            apart = (as_bytes(got).int() - as_bytes(want).int()).abs()
            assert float((apart > 0).float().mean()) < 1e-3


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("cache", [{}, FP8, {**FP8, **FP8_QUERY}], ids=["plain", "fp8", "fp8 query"])
def test_ragged_requests(cache: dict[str, Any]) -> None:
    config = config_of(**cache)
    check(make_step(config, NEOX, [1] * 5, LENGTHS), config, NEOX)


@pytest.mark.slow
def test_masks_padding_and_a_head_a_program() -> None:
    config = config_of(sliding_window=33, logits_soft_cap=4.0, sinks=True, block_size=48, kv_cache_layout="HND", **FP8)
    check(make_step(config, NEOX, [1] * 5, LENGTHS, padding=2), config, NEOX, heads=1)


ROPES = {
    "interleaved": (RopeConfig(64, "interleaved"), {}),
    "interleaved full": (RopeConfig(40, "interleaved"), {"full_tables": True, "positions": None}),
    "partial": (RopeConfig(24), {"positions": torch.int32}),
    "partial full": (RopeConfig(34), {"full_tables": True, "table_dtype": torch.float16}),
    "norm": (RopeConfig(64, norm="rms", norm_eps=1e-6), {}),
    "norm one plus": (RopeConfig(16, "interleaved", "rms_one_plus", 1e-5), {"seed": 1}),
    "norm without weights": (RopeConfig(64, norm="rms"), {"weights": False}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ROPES))
def test_rotations(name: str) -> None:
    rope, made = ROPES[name]
    config = config_of(**FP8, **(FP8_QUERY if "norm" in name else {}))
    check(make_step(config, rope, [1, 1, 1], [33, 5, 64], **made), config, rope)


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", ["multiply", "approximate_divide"])
def test_queries_that_generated_code_would_not_round_first(arithmetic: str) -> None:
    rope = RopeConfig(64, round_query=False, query_arithmetic=arithmetic)
    config = config_of(**FP8_QUERY)
    check(make_step(config, rope, [1, 1], [33, 5]), config, rope)


@pytest.mark.slow
def test_wide_groups_and_heads_that_do_not_fill_a_cta() -> None:
    config = config_of(num_heads=33, num_kv_heads=3)
    check(make_step(config, NEOX, [1, 1], [40, 200]), config, NEOX)


@pytest.mark.slow
def test_rows_that_are_not_one_per_request() -> None:
    """The tokens of a request see each other, in the order of their positions, though none is in the cache."""
    for lengths, counts in (([40, 100, 0, 90], [2, 1, 0, 0]), ([40, 2, 30], [0, 2, 1]), ([33, 3], [2, 0])):
        config = config_of(sinks=True, **FP8)
        check(make_step(config, NEOX, counts, lengths), config, NEOX)


@pytest.mark.slow
def test_tokens_without_a_slot_are_read_from_the_cache() -> None:
    config = config_of(**FP8)
    check(make_step(config, NEOX, [1, 1, 1], [33, 5, 64], written=[False, True, False]), config, NEOX)


@pytest.mark.slow
def test_slots_that_are_not_where_a_request_looks() -> None:
    """Another request's blocks, a block of nobody, and one that lies outside of the cache."""
    config = config_of(**FP8)
    args = make_step(config, NEOX, [1, 1, 1, 1], [70, 5, 64, 20], written=[False] * 4)
    first = int(args.block_table[0, 1]) * config.block_size
    args.slot_mapping.copy_(torch.tensor([2**40, first + 3, first + 9, -5]))
    blank(args.kv_cache, config, args.slot_mapping[1:3])
    check(args, config, NEOX)


def test_requests_that_share_blocks_see_what_others_write() -> None:
    """As one request of three rows, written as three requests over one table: a row sees those before it."""
    config = config_of(num_heads=2, num_kv_heads=1, **FP8)
    args = make_step(config, NEOX, [1, 1, 1, 1], [50, 51, 52, 90])
    table, size = args.block_table, config.block_size
    table[1:3] = table[0]
    table[0:3, 3] = table[2, 3]
    for row in range(3):
        position = 49 + row
        args.slot_mapping[row] = int(table[row, position // size]) * size + position % size
    blank(args.kv_cache, config, args.slot_mapping)
    check(args, config, NEOX, heads=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8_static", "fp8_group64", "nvfp4"])
def test_quantised_output(name: str) -> None:
    config = config_of(output_format=name, **FP8)
    check(make_step(config, NEOX, [1] * 3, [90, 5, 33], padding=1), config, NEOX)
