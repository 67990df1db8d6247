"""The decode kernel that turns and writes for itself, on Hopper: against the pair it replaces, captured, in the pass.

Cache bytes are those of the pair. Results are compared with a tolerance: the tile with the newest token is multiplied
by another instance of the same code, for which the compiler may order the columns of a product otherwise.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import vattn
from tests.rope_attention_cases import blank, make_step, moved, two_calls
from tests.support import make_config, relative_l2
from vattn.errors import DeviceError
from vattn.ops.arguments import RopeAttentionArgs
from vattn.rope_config import RopeConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "passes"))

pytestmark = pytest.mark.gpu

FP8 = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"}
FP8_QUERY = {"query_format": "fp8_e4m3", "query_scale": "head"}
LENGTHS = [1, 16, 17, 300, 47, 2049]
NEOX = RopeConfig(128)
GENERATED = RopeConfig(128, round_query=False, query_arithmetic="approximate_divide")


@pytest.fixture(autouse=True)
def hopper() -> Any:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def config_of(**changes: Any) -> Any:
    values = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16", "lse": True, **changes}
    return make_config(backend="TRITON_ATTN", **values)


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def check(args: RopeAttentionArgs, config: Any, rope: RopeConfig) -> None:
    """Compare the op, which must be one kernel here, with its two steps."""
    from vattn.ops.triton import decode_rope

    update, call = two_calls(args, config)
    assert decode_rope.accepts(update, call, rope, config)
    torch.ops.vattn.rope_kv_cache_update(*update)
    torch.ops.vattn.attention(*call)
    torch.ops.vattn.rope_attention(*args)
    compare(args, call, rope)


def compare(args: RopeAttentionArgs, call: Any, rope: RopeConfig) -> None:
    apart = (as_bytes(args.kv_cache).int() - as_bytes(call.kv_cache).int()).abs() > 0
    assert float(apart.float().mean()) <= (0.0 if rope.norm == "none" else 1e-4)
    equal = torch.equal(as_bytes(args.output), as_bytes(call.output))
    error = relative_l2(args.output.float(), call.output.float())
    print(f"ROPE DECODE: output {'equal to the bit' if equal else f'{error:.1e} apart'}")
    # A code of FP8 that comes out as the next one is 6 % away.
    assert error < (3e-3 if args.output.dtype != torch.float8_e4m3fn else 1e-2)
    if call.lse is not None:
        assert relative_l2(args.lse, call.lse) < 1e-4


CASES: dict[str, tuple[dict[str, Any], RopeConfig, dict[str, Any]]] = {
    "plain": ({}, NEOX, {}),
    "fp8": (FP8, NEOX, {}),
    "fp8 query": ({**FP8, **FP8_QUERY}, GENERATED, {"positions": None}),
    "static output": ({**FP8, **FP8_QUERY, "output_format": "fp8_static"}, GENERATED, {}),
    "masks": ({**FP8, "sliding_window": 33, "logits_soft_cap": 4.0, "sinks": True, "block_size": 48}, NEOX, {}),
    "hnd, interleaved": ({**FP8, "kv_cache_layout": "HND"}, RopeConfig(64, "interleaved"), {"full_tables": True}),
    "norm": (FP8_QUERY, RopeConfig(128, norm="rms", norm_eps=1e-6), {}),
    "one head a group": ({**FP8, "num_heads": 3, "num_kv_heads": 3, "head_size": 64}, RopeConfig(34), {}),
    "groups of seven": ({"num_heads": 7, "num_kv_heads": 1, "head_size": 64}, RopeConfig(64), {}),
}


@pytest.mark.parametrize("name", list(CASES))
def test_it_is_the_pair(name: str) -> None:
    changes, rope, made = CASES[name]
    config = config_of(**changes)
    for lengths, padding in ((LENGTHS, 2), ([1300, 5], 0)):
        check(
            make_step(config, rope, [1] * len(lengths), lengths, padding=padding, device="cuda", **made), config, rope
        )


def test_rows_that_are_not_one_per_request() -> None:
    config = config_of(**FP8)
    for lengths, counts in (([40, 100, 0, 90], [2, 1, 0, 0]), ([33, 3], [2, 0])):
        check(make_step(config, NEOX, counts, lengths, device="cuda"), config, NEOX)


def test_a_schedule_of_another_step_is_not_read_and_one_of_the_host_is_refused() -> None:
    from vattn.ops.triton import decode_fast

    config = config_of(**FP8)
    shape = (decode_fast.plan_shape(config, 2, 2, torch.device("cuda", 0))[0], 8)
    for plan in (torch.full((shape[0] + 3, 8), 9, dtype=torch.int32), torch.full((5,), 9, dtype=torch.int32)):
        args = make_step(config, NEOX, [1, 1], [300, 33], device="cuda")
        check(args._replace(plan=[plan.cuda()]), config, NEOX)
    args = make_step(config, NEOX, [1, 1], [300, 33], device="cuda")
    before = args.kv_cache.clone()
    with pytest.raises(DeviceError, match="plan is on cpu"):
        torch.ops.vattn.rope_attention(*args._replace(plan=[torch.zeros(shape, dtype=torch.int32)]))
    assert torch.equal(as_bytes(args.kv_cache), as_bytes(before))


def test_requests_that_share_blocks_and_tokens_without_slots() -> None:
    config = config_of(**FP8)
    args = make_step(config, NEOX, [1, 1, 1, 1], [50, 51, 52, 300], written=[True, True, True, False])
    table, size = args.block_table, config.block_size
    table[1:3] = table[0]
    table[0:3, 3] = table[2, 3]
    for row in range(3):
        args.slot_mapping[row] = int(table[row, (49 + row) // size]) * size + (49 + row) % size
    blank(args.kv_cache, config, args.slot_mapping)
    for _ in range(20):  # Another program's write would be seen now and then.
        check(moved(args, "cuda"), config, NEOX)


def test_capture_with_changing_slots() -> None:
    config = config_of(**FP8, **FP8_QUERY, output_format="fp8_static")
    static = make_step(config, GENERATED, [1, 1], [300, 33], device="cuda")
    torch.ops.vattn.rope_attention(*moved(static, "cuda"))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.vattn.rope_attention(*static)
    for seed in (1, 2):
        step = make_step(config, GENERATED, [1, 1], [290 + seed, 34 + seed], device="cuda", seed=seed)
        for mine, other in zip(static, step, strict=True):
            if isinstance(mine, Tensor) and mine.shape == other.shape:
                mine.copy_(other)
        update, call = two_calls(static, config)
        graph.replay()
        torch.ops.vattn.rope_kv_cache_update(*update)
        torch.ops.vattn.attention(*call)
        compare(static, call, GENERATED)


def test_the_pass() -> None:
    from rope_forms import FORMS, LayerWithRope, inputs

    results = []
    for choice in ("auto", "attend"):
        torch._dynamo.reset()
        model = LayerWithRope(FORMS["FP8 query"], "cuda", "TRITON_ATTN")
        builder = vattn.AttentionMetadataBuilder(8, 512, 64, 16, torch.device("cuda"), layers=model)
        run = vattn.compile(model, options=vattn.options({"shape_padding": False}, rope=choice))
        for lengths, counts in (([31, 40], [31, 40]), ([32, 41], [1, 1])):
            step = builder.build(counts, lengths, [[1 + 4 * i + j for j in range(4)] for i in range(2)])
            with vattn.forward_context(step):
                output = run(*inputs(sum(counts), "cuda"))[0].clone()
        results.append((output, model.attn.kv_cache.clone()))
    (node,) = list(vattn.fusion_report())[-1:]
    assert node.rope_outcome == "fused" and "one op with attention" in node.rope  # Heads of 32 go the other way.
    assert torch.equal(results[0][1], results[1][1])
    assert relative_l2(results[1][0].float(), results[0][0].float()) < 3e-3
