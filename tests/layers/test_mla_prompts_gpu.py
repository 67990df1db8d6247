"""Latent attention on a GPU: steps with prompts, packed rows, outputs quantised inside, indexer, other libraries."""

from __future__ import annotations

import os
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import vattn
from tests.layers import mla_support
from tests.layers.mla_support import check_layer, error_of, exact, quantised, random_mla_batch, rounded_formula, run_mla
from tests.layers.test_mla_gpu import hopper
from tests.ops.test_mla_indexer import rope_args, update_config
from tests.support import capture, moved, no_sync, relative_l2
from vattn.backends.mla.registry import mla_backends
from vattn.config.device import DeviceInfo
from vattn.kernels import mla_route
from vattn.kernels.triton.common.tiles import Limits
from vattn.ops.arguments_mla import MLAAttentionArgs
from vattn.ops.reference import mla_indexer
from vattn.ops.reference.mla_absorb import elements_per_token
from vattn.ops.reference.mla_indexer import IndexerUpdateArgs
from vattn.quantization.formats import OUTPUT_FORMATS
from vattn.quantization.mla_formats import MLA_FORMATS

pytestmark = pytest.mark.gpu

MIX = ([1, 200, 0, 60, 9, 2], [900, 330, 0, 60, 700, 2])
"""Query and sequence lengths: short requests and prompts with and without context."""


deepseek = partial(mla_support.deepseek, num_heads=4, lse=True, backend="TRITON_MLA")


CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "blocks of 384": {"block_size": 384},
    "fp16": {"dtype": "float16"},
    "fp32": {"dtype": "float32", "num_heads": 2},
    "96+64/64, 256": {"qk_nope_head_dim": 96, "v_head_dim": 64, "kv_lora_rank": 256, "block_size": 16},
    "64+32/64, 256": {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "kv_lora_rank": 256},
    "odd": {
        "qk_nope_head_dim": 13, "qk_rope_head_dim": 6, "v_head_dim": 9, "kv_lora_rank": 40, "num_heads": 5,
        "block_size": 24, "dtype": "float16",
    },
    "fp8 cache": {"kv_cache_dtype": "fp8_e4m3"},
    "fp8_ds_mla": {"kv_cache_dtype": "fp8_ds_mla"},
    "nvfp4_ds_mla": {"kv_cache_dtype": "nvfp4_ds_mla"},
    "fp8 weights": {"weight_format": "fp8_block128"},
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("room", [None, 200])
def test_steps_with_prompts(name: str, room: int | None) -> None:
    config = deepseek(**CASES[name])
    args = random_mla_batch(config, *MIX, padding_tokens=3, padding_reqs=1, device="cuda")
    if room is not None:
        args = args._replace(workspace=args.query.new_empty(room * elements_per_token(config)))
    error_of(args, config, sum(MIX[0]))


HOPPER: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16, 3 heads": {"dtype": "float16", "num_heads": 3, "block_size": 16},
    "fp8 cache": {"kv_cache_dtype": "fp8_e4m3", "block_size": 128},
    "narrow": {"qk_nope_head_dim": 64, "v_head_dim": 64},
    "narrow, 3 heads": {"qk_nope_head_dim": 64, "v_head_dim": 64, "num_heads": 3, "block_size": 16},
}

LONG = ([1, 300, 0, 60, 129, 1000, 44], [900, 330, 0, 60, 700, 1000, 30])
"""A row tile and more of a request, with and without context, and more rows than keys."""


@pytest.mark.parametrize("name", list(HOPPER))
@pytest.mark.parametrize("lens", [LONG, ([64, 129], [64, 5000]), ([2000], [2000])], ids=["mix", "context", "prompt"])
def test_prompts_on_hopper(name: str, lens: tuple[list[int], list[int]]) -> None:
    hopper()
    from vattn.kernels.hopper.mla import prefill_launch as mla_prefill_launch

    config = deepseek(**HOPPER[name])
    args = random_mla_batch(config, *lens, padding_tokens=3, padding_reqs=1, device="cuda")
    assert mla_prefill_launch.accepts(args, config, 128, 1)
    error_of(args, config, sum(lens[0]))


@pytest.mark.parametrize("name", ["bf16", "narrow, 3 heads"])
def test_programs_that_take_one_row_tile_and_many(name: str) -> None:
    hopper()
    config = deepseek(**HOPPER[name])
    for programs, lens in ((132, LONG), (5, LONG), (3, ([64, 129], [64, 5000]))):
        args = random_mla_batch(config, *lens, padding_tokens=3, padding_reqs=1, device="cuda")
        with mock.patch("vattn.config.device.multiprocessors", return_value=programs):
            error_of(args, config, sum(lens[0]))


def test_blocks_that_are_none_are_not_seen_by_prompts_on_hopper() -> None:
    hopper()
    config = deepseek(block_size=16)
    args = random_mla_batch(config, [200, 100], [700, 130], device="cuda")
    args.block_table[0, 1], args.block_table[0, 20], args.block_table[1, 7] = -5, 10**9, 2**31 - 1
    error_of(args, config, 300)


@pytest.mark.parametrize("output_format", ["fp8_static", "fp8_per_token"])
def test_prompts_on_hopper_are_quantised(output_format: str) -> None:
    hopper()
    config = deepseek(output_format=output_format, lse=False)
    args = random_mla_batch(config, *LONG, padding_tokens=3, device="cuda")
    mla_route.attend(args, config, Limits.of(args.query.device))
    plain = args.output.float()
    torch.ops.vattn.mla_attention(*args)
    # Sums in another order: one of 16 values rounds to the other neighbour in bf16, and few of those in FP8, by 1/8.
    assert (args.output.float() != plain).float().mean() < 8e-2
    assert relative_l2(args.output.float(), plain) < 1.5e-2


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_ds_mla", "nvfp4_ds_mla"])
@pytest.mark.parametrize("sparse", [False, True])
def test_decodes_of_packed_rows(kv_cache_dtype: str, sparse: bool) -> None:
    config = deepseek(kv_cache_dtype=kv_cache_dtype, sparse=sparse, num_heads=16)
    args = random_mla_batch(config, [1, 2, 0, 1], [900, 65, 0, 300], padding_tokens=2, topk=90, device="cuda")
    error_of(args, config, 4)


@pytest.mark.parametrize("output_format", [name for name in OUTPUT_FORMATS if name != "none"])
@pytest.mark.parametrize(
    ("heads", "lens"),
    [
        (4, MIX),
        (4, ([1, 1, 2], [300, 70, 9])),
        (16, ([1], [3])),
        (16, ([1] * 128, [*range(3, 899, 7)])),
        (128, ([1] * 33, [*range(3, 234, 7)])),
    ],
    ids=["prompts", "decode", "one", "many", "wide"],
)
@pytest.mark.parametrize("on_any_gpu", [False, True])
def test_outputs_are_quantised_inside(
    on_any_gpu: bool, output_format: str, heads: int, lens: tuple[list[int], list[int]]
) -> None:
    config = deepseek(num_heads=heads, output_format=output_format, lse=False)
    args = random_mla_batch(config, *lens, padding_tokens=3, device="cuda")
    plain, values = config.replace(output_format="none"), torch.empty_like(args.query[..., :128])
    bare = args._replace(output=values, output_block_scale=None, output_scale=None, config=plain.encode())
    limits = Limits.of(args.query.device) if on_any_gpu else None
    mla_route.attend(bare, plain, limits)
    mla_route.attend(args, config, limits)
    known = quantised(values, args, config)
    # Decodes without quantisation multiply by another kernel, so that values may round to the other neighbour.
    off = args.output.view(torch.uint8) != known.output.view(torch.uint8)
    assert off.float().mean() < (2e-3 if lens is MIX else 2e-2)
    if args.output_block_scale is not None and known.output_block_scale is not None:
        assert relative_l2(args.output_block_scale.float(), known.output_block_scale.float()) < 2e-2


def written(args: MLAAttentionArgs) -> list[Tensor]:
    assert args.output_block_scale is not None
    return [t.view(torch.uint8).clone() for t in (args.output, args.output_block_scale)]


@pytest.mark.gpu(capability=(9, 0))
def test_overlapping_launches_wait_for_what_they_read() -> None:
    """Each of three calls in a graph writes what a call alone does: no launch reads maxima that are not there yet."""
    config = deepseek(num_heads=16, output_format="fp8_per_token", lse=False)
    args = random_mla_batch(config, [1] * 64, [*range(40, 40 + 64 * 9, 9)], device="cuda")
    torch.ops.vattn.mla_attention(*args)
    graph, _ = capture(lambda: [torch.ops.vattn.mla_attention(*args) for _ in range(3)])
    for factor in range(1, 13):
        args.query.normal_().mul_(0.1 * factor)
        graph.replay()
        got = written(args)
        torch.cuda.synchronize()
        torch.ops.vattn.mla_attention(*args)
        torch.cuda.synchronize()
        for mine, wanted in zip(got, written(args), strict=True):
            assert torch.equal(mine, wanted)


SMALL = {"qk_nope_head_dim": 64, "v_head_dim": 64}
QUOTIENTS = [
    *((name, {}, 7.0) for name in OUTPUT_FORMATS if name != "none"),
    *((name, {}, scale) for name in ("fp8_static", "nvfp4") for scale in (0.013, 1e-14, 1e14, 1e-41, 1e25)),
    ("fp8_group64", SMALL, 7.0),
    ("nvfp4", {**SMALL, "dtype": "float16"}, 0.013),
    ("fp8_static", {**SMALL, "dtype": "float16"}, 0.013),
    ("fp8_group128", {"dtype": "float16", "num_heads": 3, "block_size": 16}, 7.0),
    ("fp8_group128", {"output_min_scale": 0.25}, 7.0),
]
"""Formats, layers and given scales: by 1e-41 and 1e25 the kernel must divide."""


@pytest.mark.parametrize(("output_format", "changes", "scale"), QUOTIENTS)
def test_corrected_products_are_the_same_bytes(output_format: str, changes: dict[str, Any], scale: float) -> None:
    hopper()
    config = deepseek(output_format=output_format, output_arithmetic="divide", **changes)
    # Without the short request, whose values another kernel makes when they are not quantised.
    args = random_mla_batch(config, LONG[0][1:], LONG[1][1:], padding_tokens=3, device="cuda")
    if args.output_scale is not None:
        args.output_scale.fill_(scale)
    plain = config.replace(output_format="none", output_min_scale=None)
    values = torch.empty_like(args.query[..., : config.v_head_dim])
    bare = args._replace(output=values, output_block_scale=None, output_scale=None, config=plain.encode())
    torch.ops.vattn.mla_attention(*bare)
    wanted = quantised(values, args, config)
    torch.ops.vattn.mla_attention(*args)
    for made, known in ((args.output, wanted.output), (args.output_block_scale, wanted.output_block_scale)):
        if made is not None and known is not None:
            off = made.contiguous().view(torch.uint8) != known.contiguous().view(torch.uint8)
            wrong = off.flatten(1).any(1).nonzero().flatten().tolist()
            assert not wrong, f"{off.float().mean():.2e} of the bytes of a {made.dtype} tensor, in rows {wrong[:20]}"


def test_a_step_with_prompts_has_no_sync_and_replays_other_lengths() -> None:
    config = deepseek()
    args = random_mla_batch(config, *MIX, padding_tokens=3, device="cuda")
    run_mla(args, config)
    with no_sync():
        torch.ops.vattn.mla_attention(*args)
    graph, _ = capture(lambda: torch.ops.vattn.mla_attention(*args))
    queries = [150, 1, 40, 0, 75, 6]
    args.query.nan_to_num_()
    args.query_start_loc.copy_(torch.tensor([0, *queries]).cumsum(0).int())
    args.seq_lens.copy_(torch.tensor([800, 330, 0, 60, 700, 2]).int())
    graph.replay()
    torch.cuda.synchronize()
    expected, _ = exact(args, config)
    allowed = 2 * relative_l2(rounded_formula(args, config), expected)
    assert relative_l2(args.output, expected) <= allowed


@pytest.mark.parametrize("kv_cache_dtype", list(MLA_FORMATS))
@pytest.mark.parametrize("style", ["neox", "interleaved"])
def test_the_fused_store_equals_its_steps(kv_cache_dtype: str, style: str) -> None:
    config = update_config(kv_cache_dtype, "TRITON_MLA")
    args, _ = rope_args(config, style, False)
    on_gpu = moved(args, "cuda")
    torch.ops.vattn.mla_rope_kv_cache_update(*on_gpu)
    torch.ops.vattn.mla_rope_kv_cache_update(*args._replace(config=config.replace(backend="TORCH_MLA").encode()))
    off = on_gpu.kv_cache.cpu().view(torch.uint8) != args.kv_cache.view(torch.uint8)
    assert off.float().mean() < 2e-2


def test_the_indexer_among_many_keys() -> None:
    """Scores of random numbers: those that are listed are the highest ones, but for rounding."""
    torch.manual_seed(0)
    length, listed = 20000, 2048
    cache = torch.zeros(320, 64, 132, dtype=torch.uint8, device="cuda")
    key = torch.randn(length, 128, device="cuda").bfloat16()
    torch.ops.vattn.mla_indexer_update(key, cache, torch.arange(length, device="cuda"))
    same = torch.zeros_like(cache)
    mla_indexer.mla_indexer_update(IndexerUpdateArgs(key, same, torch.arange(length, device="cuda")))
    assert torch.equal(cache, same)
    query, scale = mla_indexer.quantise_rows(torch.randn(2, 64, 128, device="cuda"))
    weights = torch.randn(2, 64, device="cuda") * scale
    starts, lengths = torch.tensor([0, 2]).int().cuda(), torch.tensor([length]).int().cuda()
    table = torch.arange(320).int().view(1, -1).cuda()
    found = torch.empty(2, listed, dtype=torch.int32, device="cuda")
    torch.ops.vattn.mla_indexer_select(query, weights, cache, starts, lengths, table, found)
    scores = mla_indexer.index_scores(query, weights, cache.flatten(0, 1)[:length])
    for row in range(2):
        seen = scores[row, : length - 1 + row]
        least = seen.topk(listed).values[-1]
        chosen = found[row].long()
        assert len(chosen.unique()) == listed and (seen[chosen] >= least - 1e-3 * seen.abs().max()).all()


@pytest.mark.parametrize("name", ["FLASHINFER_MLA", "FLASHMLA"])
def test_other_libraries(name: str) -> None:
    """FlashMLA's library is named by VATTN_FLASH_MLA, where it is no package."""
    from vattn.backends.mla import flash_mla as mla_flash_mla

    if name == "FLASHMLA" and "VATTN_FLASH_MLA" in os.environ and mla_flash_mla._operator() is None:
        for path in os.environ["VATTN_FLASH_MLA"].split(os.pathsep):
            torch.ops.load_library(path)
    backend, config = mla_backends()[name], deepseek(num_heads=16, backend=name)
    reasons = backend.reasons(config, DeviceInfo.of(torch.device("cuda")))
    if reasons:
        pytest.skip("; ".join(reasons))
    for lens in (([1] * 4, [900, 65, 64, 1]), ([1, 3, 0, 5], [70, 65, 9, 130])):
        args = random_mla_batch(config, *lens, padding_tokens=2, device="cuda")
        args.kv_cache.nan_to_num_(0.5)
        error_of(args, config, sum(lens[0]))


def test_a_sparse_layer_compiled_with_its_indexer_in_a_graph() -> None:
    from vattn.layers.mla.lightning_indexer import LightningIndexer

    torch.manual_seed(0)
    indexer = LightningIndexer(8, 32, topk=16, max_tokens=4, block_size=64).cuda()
    indexer.allocate(num_blocks=32)
    projection, cache = nn.Linear(512, 16 * 64, bias=False).cuda().bfloat16(), vattn.CacheConfig(block_size=64)
    layer = vattn.MLAAttention(16, 0.1, 32, 64, 32, None, 512, projection, cache, use_sparse=True, indexer=indexer)
    vattn.allocate_kv_cache(layer, num_blocks=32, dtype=torch.bfloat16, device="cuda")
    layer.kv_cache.normal_()
    indexer.index_cache.random_(0, 120)
    builder = vattn.AttentionMetadataBuilder(2, 4, 512, 64, "cuda", layers=layer)
    tables = [[1 + i * 8 + j for j in range(8)] for i in range(2)]
    q, kv_c, k_pe = (torch.randn(s, device="cuda").bfloat16() for s in ((2, 16, 96), (2, 512), (2, 1, 64)))
    index = torch.randn(2, 8, 32, device="cuda"), torch.rand(2, 8, device="cuda"), torch.randn(2, 32, device="cuda")

    def step_of(metadata: Any) -> Tensor:
        indexer(*index, metadata=metadata)
        out: Tensor = layer(q, kv_c, k_pe, metadata=metadata)
        return out

    run = vattn.compile(step_of, fullgraph=True)
    step = builder.build([1, 1], [9, 300], tables)
    with torch.no_grad():
        run(step)
        graph, out = capture(lambda: run(step))
        step = builder.build([1, 1], [200, 17], tables)
        graph.replay()
        torch.cuda.synchronize()
        check_layer(layer, out, q, step, indexer.topk_indices[:2])
