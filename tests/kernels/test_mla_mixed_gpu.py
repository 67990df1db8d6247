"""Latent steps of requests of different lengths on Hopper: each by the kernel for its length, from one plan a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import vattn
from tests.layers.mla_support import error_of, random_mla_batch
from tests.layers.test_mla_gpu import deepseek
from tests.support import capture, no_sync
from vattn.backends.mla.registry import mla_backends
from vattn.config.mla import MLAConfig
from vattn.ops.arguments import PlanArgs
from vattn.ops.arguments_mla import MLAAttentionArgs

pytestmark = pytest.mark.gpu(capability=(9, 0))

STEPS: dict[str, tuple[list[int], list[int]]] = {
    "decodes and a prompt": ([1] * 19 + [300], [*range(1, 1901, 100), 450]),
    "every length": ([1, 2, 3, 4, 5, 8, 9, 20, 21, 0, 150, 1], [700, 64, 63, 900, 65, 300, 9, 1000, 21, 50, 600, 2000]),
    "no decode": ([90, 0, 300], [90, 70, 1000]),
    "more rows than keys": ([1, 200, 5, 60], [0, 150, 3, 64]),
    "few rows, ragged": ([1] * 14 + [30, 5], [*range(64, 1408, 96), 700, 5]),
    "few rows, one long": ([1] * 30 + [120], [700] * 30 + [2000]),
}


def planned(args: MLAAttentionArgs, config: MLAConfig) -> MLAAttentionArgs:
    """Return the arguments with the plan that a builder would have made."""
    backend = mla_backends()["TRITON_MLA"]
    shape = backend.plan_shape(config, args.query.shape[0], args.seq_lens.shape[0], args.block_table.shape[1])  # type: ignore[arg-type]
    plan = torch.full(shape, -7, dtype=torch.int32, device="cuda")
    backend.plan(PlanArgs(args.query_start_loc, args.seq_lens, plan, config.encode()), config)  # type: ignore[arg-type]
    return args._replace(plan=[plan])


@pytest.mark.parametrize("way", ["bare", "planned"])
@pytest.mark.parametrize("heads", [8, 16, 128])
@pytest.mark.parametrize("name", list(STEPS))
def test_every_request_by_the_kernel_for_its_length(name: str, heads: int, way: str) -> None:
    queries, lengths = STEPS[name]
    config = deepseek(num_heads=heads, decode_threshold=20, block_size=32 if heads == 8 else 64)
    few = name.startswith("few")
    args = random_mla_batch(config, queries, lengths, padding_tokens=3, padding_reqs=int(not few), device="cuda")
    from vattn.kernels.hopper.mla import launch as mla_launch

    assert mla_launch.mixes(args, config) != few
    error_of(args if way == "bare" else planned(args, config), config, sum(queries))


@pytest.mark.parametrize("way", ["bare", "planned"])
@pytest.mark.parametrize("name", list(STEPS))
def test_steps_of_heads_that_hopper_expands(name: str, way: str) -> None:
    """Rows of padding and of prompts come from the plan's row tiles, also where a request has few rows on average."""
    queries, lengths = STEPS[name]
    config = deepseek(num_heads=16, qk_nope_head_dim=128, v_head_dim=128, block_size=64)
    args = random_mla_batch(config, queries, lengths, padding_tokens=3, padding_reqs=1, device="cuda")
    args.output.fill_(torch.nan)
    error_of(args if way == "bare" else planned(args, config), config, sum(queries))


@pytest.mark.parametrize("cache", ["bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_drafts_of_uneven_lengths_are_cut(heads: int, cache: str) -> None:
    config = deepseek(num_heads=heads, kv_cache_dtype=cache)
    queries, lengths = [1] * 11 + [2, 3, 4, 5, 8, 12], [*range(1, 1650, 110), 5, 900]
    args = random_mla_batch(config, queries, lengths[: len(queries)], padding_tokens=2, device="cuda")
    from vattn.kernels.hopper.mla import launch as mla_launch

    shapes = args.query.shape[0], args.seq_lens.shape[0]
    assert mla_launch.rows_of_parts(*shapes, config) == mla_launch.fewest(config)
    error_of(planned(args, config), config, sum(queries))


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(
    "queries", [[1, 3, 2, 2], [1, 7, 4, 0, 8], [3] * 5, [1, 1, 2, 1, 1]], ids=["two", "four", "even", "decodes"]
)
def test_steps_of_a_multiple_of_rows_need_not_be_even(queries: list[int], heads: int) -> None:
    config = deepseek(num_heads=heads)
    lengths = [1500, 700, 2000, 64, 8][: len(queries)]
    error_of(planned(random_mla_batch(config, queries, lengths, device="cuda"), config), config, sum(queries))


def test_an_fp8_cache_and_output() -> None:
    changes = {"kv_cache_dtype": "fp8_e4m3", "lse": False, "decode_threshold": 20}
    config = deepseek(output_format="fp8_static", **changes)
    queries, lengths = STEPS["every length"]
    args = random_mla_batch(config, queries, lengths, padding_tokens=2, device="cuda")
    # Half a step of e4m3 on top of what rows in bf16 may miss.
    assert error_of(planned(args, config), config, sum(queries)) < 0.05


REPLAYS = {
    "prompts": [
        ([1, 1, 190, 8], [900, 70, 700, 64]),
        ([1, 1, 190, 8], [1000, 3, 190, 200]),
        ([150, 1, 1, 48], [1024, 900, 64, 48]),
        ([2, 66, 66, 66], [1000, 70, 66, 900]),
    ],
    "drafts": [
        ([1, 3, 5, 1], [900, 70, 700, 64]),
        ([5, 1, 1, 3], [1000, 3, 190, 200]),
        ([8, 1, 0, 1], [1024, 900, 0, 48]),
        ([2, 2, 2, 4], [64, 65, 1000, 4]),
    ],
}
"""Steps of one shape: query and sequence lengths."""


@pytest.mark.parametrize("wide", [32, 128])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("kind", list(REPLAYS))
def test_a_graph_replays_steps_of_other_lengths_without_a_sync(
    kind: str, heads: int, wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With heads of 128 columns Hopper's kernel attends prompts, whose row tiles the plan lists."""
    from vattn.kernels.hopper.mla import prefill_launch as mla_prefill_launch

    monkeypatch.setattr(mla_prefill_launch, "plan_tiles", None)
    torch.manual_seed(0)
    proj = nn.Linear(512, heads * 2 * wide, bias=False).cuda().bfloat16()
    cache: dict[str, Any] = {"cache_config": vattn.CacheConfig(block_size=64), "attn_backend": "TRITON_MLA"}
    layer = vattn.MLAAttention(heads, (wide + 64) ** -0.5, wide, 64, wide, None, 512, proj, **cache)
    vattn.allocate_kv_cache(layer, num_blocks=80, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        layer.kv_cache.normal_()
    steps, rows = REPLAYS[kind], sum(REPLAYS[kind][0][0])
    given = [
        torch.randn(*shape, device="cuda").bfloat16()
        for shape in ((rows, heads, wide + 64), (rows, 512), (rows, 1, 64))
    ]
    tables = [list(range(1 + 16 * i, 17 + 16 * i)) for i in range(4)]
    with torch.no_grad():
        builder = vattn.AttentionMetadataBuilder(4, 256, 1024, 64, "cuda", layers=layer)
        step = builder.build(*steps[0], tables)
        (plan,) = step.plans.values()
        assert plan.shape[0] == 16 if kind == "prompts" else plan.ndim == 3
        layer(*given, metadata=step)
        with no_sync():
            layer(*given, metadata=step)
        graph, out = capture(lambda: layer(*given, metadata=step))
        for queries, lengths in steps[1:]:
            step = builder.build(queries, lengths, tables)
            graph.replay()
            replayed = out.clone()
            expected = layer(*given, metadata=step)
            torch.cuda.synchronize()
            assert torch.equal(replayed, expected)
