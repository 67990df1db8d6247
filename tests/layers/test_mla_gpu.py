"""Latent attention on a GPU: the decode path of Hopper and the plain kernels, on odd, poisoned batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import vattn
from tests.layers import mla_support
from tests.layers.mla_support import check_layer, error_of, exact, random_mla_batch, run_mla
from tests.support import capture, relative_l2
from vattn.config.mla import MLAConfig
from vattn.kernels import mla_route
from vattn.kernels.triton.common.tiles import Limits
from vattn.ops.arguments_mla import MLAAttentionArgs

pytestmark = pytest.mark.gpu

RAGGED = [1, 63, 64, 65, 300, 1000, 16, 2, 129, 511, 17, 700]
"""Lengths around the edges of tiles and blocks, and some that are split."""


def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this path needs an sm_90 GPU")


deepseek = partial(mla_support.deepseek, qk_nope_head_dim=32, v_head_dim=32, lse=True, backend="TRITON_MLA")
codes = partial(deepseek, kv_cache_dtype="fp8_e4m3")


_attend = mla_route.attend


def attend_on_any_gpu(args: MLAAttentionArgs, config: MLAConfig) -> None:
    """Run the op by the kernels of any GPU."""
    _attend(args, config, Limits.of(args.query.device))


def run_on_any_gpu(args: MLAAttentionArgs, config: MLAConfig) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what `run_mla` does, by the kernels of any GPU."""
    with mock.patch.object(mla_route, "attend", attend_on_any_gpu):
        return run_mla(args, config)


def check(config: MLAConfig, query_lens: list[int], seq_lens: list[int], decode: bool | None = None, **kw: Any) -> None:
    args = random_mla_batch(config, query_lens, seq_lens, device="cuda", **kw)
    if decode is not None:
        from vattn.kernels.hopper.mla import launch as mla_launch

        if decode:
            hopper()
        absorbed = args.query.new_empty((args.query.shape[0], config.num_heads, config.head_size))
        assert mla_launch.accepts(absorbed, args, config) == decode
    error_of(args, config, sum(query_lens))


SHAPES = [*product((8, 16, 32, 64, 128), (64,)), *product((8, 16, 128), (16, 32, 128)), (16, 192), (128, 640)]
STEPS: dict[str, tuple[list[int], list[int], int, int]] = {
    "ragged": ([1] * len(RAGGED), RAGGED, 2, 0),
    "one": ([1], [1], 0, 2),
    "long": ([1], [9000], 0, 0),
    "skewed": ([1] * 4, [3000, 7, 0, 64], 0, 2),
    "idle": ([1, 1, 0, 1], [3000, 7, 0, 64], 0, 2),
    "many": ([1] * 300, [40 + 13 * (i % 17) for i in range(300)], 0, 0),
    "several tokens": ([4] * 3, [5000, 70, 4], 0, 0),
    "uneven": ([1, 5, 0, 2, 12, 1, 3], [900, 300, 77, 1, 12, 1500, 0], 1, 2),
}
"""Query and sequence lengths, tokens and requests of padding: items of an odd and an even number of tiles, and none."""


@pytest.mark.parametrize(("heads", "block_size"), SHAPES)
@pytest.mark.parametrize("name", list(STEPS))
def test_decode(name: str, heads: int, block_size: int) -> None:
    queries, lengths, tokens, reqs = STEPS[name]
    for make in (deepseek, codes) if heads <= 16 else (deepseek,):
        config = make(num_heads=heads, block_size=block_size)
        check(config, queries, lengths, True, padding_tokens=tokens, padding_reqs=reqs)


@pytest.mark.parametrize("heads", [8, 16, 128])
@pytest.mark.parametrize("tokens", [2, 3, 8])
def test_decode_of_several_tokens(heads: int, tokens: int) -> None:
    seq_lens = [n + tokens for n in RAGGED[:8]]
    # With padding, steps of 8 tokens a request would be taken for prompts.
    check(deepseek(num_heads=heads), [tokens] * 8, seq_lens, True, padding_tokens=int(tokens < 8))


@pytest.mark.parametrize("scale", [-0.1, 0.0, 1e-30, 1e-6, 3e4])
def test_scales_of_any_size(scale: float) -> None:
    """What is hidden stays hidden where scores are small beside the scale, and where the least one counts most."""
    config = deepseek(num_heads=128, scale=scale)
    args = random_mla_batch(config, [1, 1, 2], [700, 300, 65], device="cuda")
    if scale > 0:
        args.query.mul_(0.1 / scale)
    error_of(args, config, 4)


@pytest.mark.parametrize("on_any_gpu", [False, True])
@pytest.mark.parametrize("heads", [8, 16, 64])
@pytest.mark.parametrize("block_size", [16, 64])
def test_queries_are_codes_too(on_any_gpu: bool, heads: int, block_size: int) -> None:
    """Either kernels against the formula on the same codes; a rounding of absorbed queries may change one by one."""
    config = codes(num_heads=heads, block_size=block_size, query_format="fp8_e4m3", decode_threshold=8)
    args = random_mla_batch(config, [1] * len(RAGGED), RAGGED, padding_tokens=2, device="cuda")
    got, lse = run_on_any_gpu(args, config) if on_any_gpu else run_mla(args, config)
    expected, expected_lse = exact(args, config)
    assert relative_l2(got, expected) < 1.5e-2
    assert not got[len(RAGGED) :].any() and lse is not None
    assert (lse.cpu().double() - expected_lse)[: len(RAGGED)].abs().max() < 5e-2


@pytest.mark.parametrize("factor", [1e-30, 1e-4, 1e4, 1e25])
def test_queries_of_any_size_meet_codes(factor: float) -> None:
    """The kernel multiplies in fp16, which holds none of these queries as they are."""
    hopper()
    config = codes(scale=0.1 / factor)
    args = random_mla_batch(config, [1, 1, 2], [700, 300, 65], device="cuda")
    args.query.mul_(factor)
    error_of(args, config, 4)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("make", [deepseek, codes], ids=["bf16", "fp8"])
def test_blocks_that_are_none_are_not_seen(make: Callable[..., MLAConfig], heads: int, block_size: int) -> None:
    hopper()
    config = make(num_heads=heads, block_size=block_size)
    args = random_mla_batch(config, [1, 1, 1], [700, 300, 64], device="cuda")
    args.block_table[0, 1], args.block_table[0, 4], args.block_table[1, 0] = -5, 10**9, 2**31 - 1
    args.block_table[2] = -1
    error_of(args, config, 3)


@pytest.mark.parametrize("heads", [16, 128])
def test_scores_that_grow_along_the_sequence(heads: int) -> None:
    config = deepseek(num_heads=heads)
    args = random_mla_batch(config, [1, 1], [2000, 900], device="cuda")
    for request, length in enumerate((2000, 900)):
        for i in range(-(-length // 64)):
            block = int(args.block_table[request, i])
            args.kv_cache[block] = args.kv_cache[block] * (0.1 + 0.2 * i)
    error_of(args, config, 2)


@pytest.mark.parametrize(
    ("make", "heads"), [*((deepseek, heads) for heads in (64, 128)), *((codes, heads) for heads in (8, 16, 32, 128))]
)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("topk", [5, 64, 700])
def test_sparse_decode(make: Callable[..., MLAConfig], heads: int, block_size: int, topk: int) -> None:
    """Lists with gaps, positions out of range and blocks that are none."""
    hopper()
    from vattn.kernels.hopper.mla import sparse_launch as mla_sparse

    config = make(num_heads=heads, block_size=block_size, sparse=True)
    args = random_mla_batch(config, [1, 3, 0, 2, 1], [1000, 640, 0, 2, 65], padding_tokens=2, topk=topk, device="cuda")
    assert args.topk_indices is not None
    args.topk_indices[0, 1] = -1
    args.topk_indices[1, :2] = torch.tensor([10**9, -7])
    args.block_table[1, 0] = 10**9
    absorbed = args.query.new_empty((args.query.shape[0], heads, config.head_size))
    assert mla_sparse.accepts(absorbed, args, config)
    error_of(args, config, 7)


@pytest.mark.parametrize("heads", [16, 64])
def test_sparse_queries_are_codes_too(heads: int) -> None:
    hopper()
    config = codes(num_heads=heads, sparse=True, query_format="fp8_e4m3", decode_threshold=8)
    args = random_mla_batch(config, [1] * 4, [900, 65, 64, 300], topk=200, device="cuda")
    results = [run(args, config)[0].float() for run in (run_on_any_gpu, run_mla)]
    expected, _ = exact(args, config)
    # A rounding of the absorbed queries may change a code by one.
    assert all(relative_l2(result, expected) < 1.5e-2 for result in results)


def test_sparse_decode_in_parts_and_of_many_tokens() -> None:
    hopper()
    check(deepseek(num_heads=64, sparse=True), [1, 2], [5000, 640], padding_tokens=1, topk=2048)
    check(deepseek(num_heads=128, sparse=True), [1] * 150, [100 + i for i in range(150)], topk=90)


def test_fp16() -> None:
    check(deepseek(dtype="float16"), [1] * 6, RAGGED[:6], False)


PLAIN: dict[str, dict[str, Any]] = {
    "prefill": {},
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "sparse": {"sparse": True},
    "256+32": {"kv_lora_rank": 256, "qk_rope_head_dim": 32, "block_size": 16},
    "odd": {"kv_lora_rank": 40, "qk_rope_head_dim": 12, "num_heads": 5, "qk_nope_head_dim": 13, "v_head_dim": 9},
    "fp32": {"dtype": "float32", "kv_lora_rank": 64, "num_heads": 4},
    "fp16": {"dtype": "float16", "kv_lora_rank": 256},
}


@pytest.mark.parametrize("name", list(PLAIN))
def test_plain_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = deepseek(**PLAIN[name])
    monkeypatch.setattr(mla_route, "attend", attend_on_any_gpu)
    check(config, [1, 40, 0, 2, 9], [400, 121, 0, 300, 9], None, padding_tokens=3, padding_reqs=1, topk=50)
    if name != "prefill":
        check(config, [1] * 5, RAGGED[:5], None, topk=50)


@pytest.mark.parametrize("heads", [16, 128])
def test_a_captured_layer_replays_other_lengths(heads: int) -> None:
    """Plans are made by the builder; the layer is compiled and captured once."""
    hopper()
    torch.manual_seed(0)
    projection = nn.Linear(512, heads * 64, bias=False).cuda().bfloat16()
    cache = vattn.CacheConfig(block_size=64)
    layer = vattn.MLAAttention(heads, 0.1, 32, 64, 32, None, 512, projection, cache)
    vattn.allocate_kv_cache(layer, num_blocks=64, dtype=torch.bfloat16, device="cuda")
    layer.kv_cache.normal_()
    builder = vattn.AttentionMetadataBuilder(4, 4, 1024, 64, "cuda", layers=layer)
    tables = [[1 + i * 15 + j for j in range(15)] for i in range(4)]
    q, kv_c, k_pe = (torch.randn(shape, device="cuda").bfloat16() for shape in ((4, heads, 96), (4, 512), (4, 1, 64)))
    step = builder.build([1] * 4, [9, 300, 64, 700], tables)
    assert step.plans
    run = vattn.compile(layer, fullgraph=True)
    with torch.no_grad():
        run(q, kv_c, k_pe, metadata=step)
        graph, out = capture(lambda: run(q, kv_c, k_pe, metadata=step))
        for lengths in ([9, 300, 64, 700], [800, 1, 65, 128], [2, 2, 2, 2]):
            step = builder.build([1] * 4, lengths, tables)
            graph.replay()
            torch.cuda.synchronize()
            check_layer(layer, out, q, step)
