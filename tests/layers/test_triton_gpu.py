"""TRITON_ATTN's kernels on a real GPU: the conformance rows, larger tiles, every FP8 code, huge caches, CUDA graphs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance.cases import batch_of_row, make_batch, make_cache_update
from tests.conformance.compare import compare_cache_update, run_and_compare
from tests.conformance.fuzz import check_request, fuzz_seed
from tests.conformance.requests import PAIRS, Size, draw_request
from tests.conformance.rows import ROWS
from tests.support import Batch, capture, make_config, random_paged_batch, storage_of, with_storage
from vattn.cache.layout import op_views
from vattn.config.attention import AttentionConfig
from vattn.kernels.triton.common.tiles import Limits, choose_tiles
from vattn.ops.arguments import AttentionArgs
from vattn.quantization.codecs import encode_kv
from vattn.quantization.formats import KV_FORMATS, MODEL_DTYPES

pytestmark = pytest.mark.gpu

LLAMA: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": "bfloat16", "block_size": 16}
WHOLE: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8}
"""So many heads that a prefill needs no splits, and runs tiles that need no mask in a loop of their own."""

PREFILLS = ((257, 257), (130, 400), (1, 777), (0, 5), (33, 2000))
DECODES = tuple((1, length) for length in (1, 17, 300, 1000, 5, 64, 2049))
LONG_PREFILLS = ((1000, 1500), (257, 257), (130, 400), (1, 900))
SPECULATIVE = ((4, 700), (4, 31), (3, 3), (1, 1000))

LARGE: dict[str, tuple[dict[str, Any], tuple[tuple[int, int], ...]]] = {
    "prefill": ({"lse": True}, PREFILLS),
    "prefill-fp16": ({"dtype": "float16"}, PREFILLS),
    "prefill-fp32": ({"dtype": "float32"}, PREFILLS),
    "prefill-fp8": ({"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head", "lse": True}, PREFILLS),
    "prefill-e5m2-query": ({"kv_cache_dtype": "fp8_e5m2", "query_format": "fp8_e4m3"}, PREFILLS),
    "prefill-window": ({"sliding_window": 100, "sinks": True, "lse": True}, PREFILLS),
    "prefill-window-bidirectional": ({"sliding_window": 100, "causality": "bidirectional"}, PREFILLS),
    "prefill-chunks": ({"sliding_window": 192, "chunk_lookback": 1, "num_heads": 14}, PREFILLS),
    "prefill-flags-cap-alibi": ({"causality": "per_request", "logits_soft_cap": 5.0, "alibi": "linear"}, PREFILLS),
    "prefill-ranges": ({"mm_prefix": "full", "sliding_window": 50}, PREFILLS),
    "prefill-d64-hnd": ({"head_size": 64, "kv_cache_layout": "HND", "num_heads": 2}, PREFILLS),
    "prefill-d72-block24": ({"head_size": 72, "block_size": 24, "num_heads": 10}, PREFILLS),
    "prefill-d192-128": ({"head_size": 192, "head_size_v": 128, "block_size": 64}, PREFILLS),
    "prefill-d64-16-fp8": ({"head_size": 64, "head_size_v": 16, "kv_cache_dtype": "fp8_e4m3"}, PREFILLS),
    "prefill-d32-128-fp8": ({"head_size": 32, "head_size_v": 128, "kv_cache_dtype": "fp8_e5m2"}, PREFILLS),
    "prefill-d256": ({"head_size": 256, "block_size": 256}, PREFILLS),
    "prefill-d512": ({"head_size": 512, "block_size": 8}, PREFILLS),
    "prefill-d512-fp8": ({"head_size": 512, "kv_cache_dtype": "fp8_e4m3"}, PREFILLS),
    "prefill-packed": ({"block_size": 0, "causality": "bidirectional"}, ((300, 300), (70, 70), (1, 1))),
    "prefill-group64": ({"output_format": "fp8_group64_col"}, PREFILLS),
    "prefill-nvfp4": ({"output_format": "nvfp4_swizzled"}, PREFILLS),
    "long": ({**WHOLE, "lse": True}, LONG_PREFILLS),
    "long-window": ({**WHOLE, "sliding_window": 300, "sinks": True, "kv_cache_layout": "HND"}, LONG_PREFILLS),
    "long-negative": ({**WHOLE, "scale": -0.1, "dtype": "float16", "block_size": 64}, LONG_PREFILLS),
    "long-packed": ({**WHOLE, "block_size": 0}, LONG_PREFILLS[:3]),
    "long-chunks": ({**WHOLE, "sliding_window": 192, "chunk_lookback": 1}, LONG_PREFILLS),
    "decode": ({"lse": True, "sinks": True}, DECODES),
    "decode-mqa71": ({"num_heads": 71, "num_kv_heads": 1, "head_size": 64}, DECODES),
    "decode-mqa150": ({"num_heads": 150, "num_kv_heads": 1, "head_size": 64}, DECODES),
    "decode-fp8": ({"kv_cache_dtype": "fp8_e4m3", "query_format": "fp8_e4m3", "output_format": "fp8_static"}, DECODES),
    "decode-fp8-per-token": ({"kv_cache_dtype": "fp8_e4m3", "output_format": "fp8_per_token", "lse": True}, DECODES),
    "decode-window": ({"sliding_window": 100, "dtype": "float16"}, DECODES),
    "decode-fp32-d256": ({"dtype": "float32", "head_size": 256}, DECODES),
    "decode-d512": ({"head_size": 512}, DECODES),
    "speculative": ({"tree_bias": True, "lse": True}, SPECULATIVE),
    "speculative-mixed-cache": ({"kv_cache_dtype": "float16", "alibi": "sqrt"}, SPECULATIVE),
}


@pytest.fixture(autouse=True)
def the_general_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the fast paths, which have tests of their own, from taking these requests over."""
    from vattn.backends import hopper_routes

    monkeypatch.setattr(hopper_routes, "run", lambda *_: False)


@pytest.mark.parametrize("row", ROWS)
def test_row(row: str) -> None:
    run_and_compare(batch_of_row(ROWS[row], "TRITON_ATTN", device="cuda", seed=len(row)))


@pytest.mark.parametrize("case", LARGE)
def test_large(case: str) -> None:
    changes, lens = LARGE[case]
    config = make_config(**{**LLAMA, **changes, "backend": "TRITON_ATTN"})
    assert run_and_compare(make_batch(config, lens, (7, 2), device="cuda", seed=3))


@pytest.mark.parametrize("scale", [0.01, None, 4.0])
@pytest.mark.parametrize("case", ["long", "long-window", "long-negative"])
def test_long_prefills(case: str, scale: float | None) -> None:
    changes, lens = LARGE[case]
    if scale is not None:
        changes = {**changes, "scale": scale if changes.get("scale", 1.0) > 0 else -scale}
    config = make_config(**{**LLAMA, **changes, "backend": "TRITON_ATTN"})
    chosen = choose_tiles(config, 1388, 4, 1500, Limits.of(torch.device("cuda")))
    assert chosen.hoisted and chosen.positive == (config.scale > 0)
    assert run_and_compare(make_batch(config, lens, (7, 2), device="cuda", seed=3))


PACKED: dict[str, dict[str, Any]] = {
    "causal": {"lse": True},
    "window": {"sliding_window": 300, "sinks": True},
    "bidirectional": {"causality": "bidirectional", "sliding_window": 200},
    "fp16": {"dtype": "float16", "output_format": "fp8_static"},
    "small scores": {"scale": 0.01, "causality": "bidirectional"},
    "large scores": {"scale": 4.0},
}


@pytest.mark.parametrize("case", PACKED)
def test_long_prefills_over_packed_keys(case: str) -> None:
    config = make_config(**{**LLAMA, **WHOLE, "block_size": 0, **PACKED[case], "backend": "TRITON_ATTN"})
    limits = Limits.of(torch.device("cuda"))
    lens = ((1000, 1500), (257, 257), (1, 77), (1300, 1300))
    assert choose_tiles(config, 3000, 4, 3000, limits, True).boxes == limits.hopper
    assert run_and_compare(make_batch(config, lens, (7, 2), device="cuda"))


def test_packed_keys_that_no_tensor_map_reaches() -> None:
    """Rows that begin between 16 bytes, and a negative scale."""
    config = make_config(**{**LLAMA, **WHOLE, "block_size": 0, "lse": True, "backend": "TRITON_ATTN"})
    for scale in (0.1, -0.1):
        batch = make_batch(config.replace(scale=scale), ((1000, 1500), (257, 257)), (7, 2), device="cuda")
        key = torch.empty(batch.args.key.numel() + 1, dtype=batch.args.key.dtype, device="cuda")[1:]
        batch = replace(batch, args=batch.args._replace(key=key.view_as(batch.args.key).copy_(batch.args.key)))
        assert run_and_compare(batch)


@pytest.mark.parametrize("part", range(14))
def test_random_requests(part: int) -> None:
    """Each is refused by name or equals the reference; every part draws its own requests."""
    rng = random.Random(f"{fuzz_seed()} gpu {part}")
    accepted = 0
    for _ in range(12):
        request = draw_request(rng, "TRITON_ATTN", rng.choice(PAIRS), Size(seq_len=300, reqs=8, wide_heads=0.3))
        try:
            accepted += check_request(request, "cuda")
        except Exception as error:
            raise AssertionError(f"{error}\nrepeat with: {request.line('cuda')}") from error
    assert accepted >= 6


@pytest.mark.parametrize("width", [(24, 8), (32, 16)], ids=["odd", "even"])
@pytest.mark.parametrize("kv", KV_FORMATS)
@pytest.mark.parametrize("dtype", MODEL_DTYPES)
def test_cache_update(dtype: str, kv: str, width: tuple[int, int]) -> None:
    kind = "head" if KV_FORMATS[kv].quantised else "none"
    config = make_config(
        num_heads=6, num_kv_heads=3, head_size=width[0], head_size_v=width[1], dtype=dtype, kv_cache_dtype=kv,
        kv_scale=kind, block_size=8, backend="TRITON_ATTN",
    )  # fmt: skip
    accepted = compare_cache_update(make_cache_update(config, device="cuda"), config)
    assert accepted == (not KV_FORMATS[kv].head_size_problems(*width))
    assert accepted or width == (24, 8)


def test_every_fp8_code_through_both_lowerings() -> None:
    from tests.quantization.codec_kernels import decode_codes, encode_values

    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    for fmt in ("fp8_e4m3", "fp8_e5m2"):
        expected = codes.view(KV_FORMATS[fmt].value_dtype).float()
        for native in (False, True):
            if native and torch.cuda.get_device_capability() < (8, 9):
                continue
            for target in (torch.float16, torch.float32):
                got = decode_codes(codes, fmt, target, native).float()
                assert torch.equal(got.nan_to_num(nan=-1e9), expected.nan_to_num(nan=-1e9)), (fmt, native, target)
    bits = torch.randint(-(2**31), 2**31 - 1, (1 << 20,), device="cuda", dtype=torch.int64).int()
    values = torch.cat([bits.view(torch.float32), torch.randn(1 << 16, device="cuda") * 1e-2])
    for fmt in ("fp8_e4m3", "fp8_e5m2"):
        expected = encode_kv(values.view(-1, 1, 1), fmt, torch.ones(1, device="cuda")).view(-1)
        got = encode_values(values, fmt).view(expected.dtype)
        same = (got.view(torch.uint8) == expected.view(torch.uint8)) | (got.float().isnan() & expected.float().isnan())
        assert bool(same.all())


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_a_cache_of_more_than_2_to_the_31_elements(dtype: str) -> None:
    """The last blocks of a huge cache give what the first blocks of a small one give, bit for bit."""
    config = make_config(**{**LLAMA, "num_kv_heads": 8, "kv_cache_dtype": dtype, "backend": "TRITON_ATTN"})
    small = make_batch(config, ((5, 40), (1, 100)), device="cuda", seed=4)
    cache = storage_of(small.args)
    blocks = cache.shape[1]
    huge_blocks = (2**31 // (16 * 8 * 128)) + 512
    huge = torch.zeros((2, huge_blocks, *cache.shape[2:]), dtype=cache.dtype, device="cuda")
    assert huge[0].numel() > 2**31
    huge[:, -blocks:] = cache
    table = small.args.block_table
    inside = (table >= 0) & (table < blocks)
    moved = torch.where(inside, table + (huge_blocks - blocks), -1)
    other = small.with_backend("TRITON_ATTN")
    other.args = with_storage(other.args._replace(block_table=moved), huge)
    slot = torch.tensor([huge_blocks * 16 - 3, -1, huge_blocks * 16], device="cuda")
    rows = torch.randn(3, 8, 128, device="cuda", dtype=torch.bfloat16)
    torch.ops.vattn.kv_cache_update(
        rows, rows, *op_views(huge, config), slot, other.args.k_scale, other.args.v_scale, config.encode()
    )
    written = torch.zeros(2, 16, 8, 128, dtype=huge.dtype, device="cuda")
    written[:, 13] = encode_kv(rows[:1], dtype, other.args.k_scale).view(huge.dtype)[0]
    if dtype == "fp8_e4m3":
        written[1, 13] = encode_kv(rows[:1], dtype, other.args.v_scale).view(huge.dtype)[0]
    assert torch.equal(huge[:, -1, 13], written[:, 13])
    huge[:, -1] = cache[:, -1]
    torch.ops.vattn.attention(*small.args)
    torch.ops.vattn.attention(*other.args)
    assert torch.equal(small.args.output, other.args.output)


def _overwrite(args: AttentionArgs, source: AttentionArgs) -> None:
    """Copy another step's inputs into a captured step's buffers."""
    args.block_table.fill_(-1)
    for target, other in (
        (args.block_table, source.block_table), (storage_of(args), storage_of(source)),
    ):  # fmt: skip
        target[:, : other.shape[1]] = other[:, : target.shape[1]]
    for field in ("query", "query_start_loc", "seq_lens", "k_scale", "v_scale", "output_scale"):
        if getattr(args, field) is not None:
            getattr(args, field).copy_(getattr(source, field))


@pytest.mark.parametrize("output", ["none", "fp8_static", "fp8_group64", "nvfp4_swizzled"])
@pytest.mark.parametrize("tokens", [6, 200])
def test_a_captured_graph_is_right_for_later_lengths_tables_and_scales(tokens: int, output: str) -> None:
    config = make_config(
        **{**LLAMA, "kv_cache_dtype": "fp8_e4m3", "lse": True, "output_format": output, "backend": "TRITON_ATTN"}
    )
    steps: list[tuple[tuple[int, int], ...]] = [
        ((1, 900), (1, 10), (1, 33), (1, 1), (1, 64), (0, 0)),
        ((1, 5), (0, 0), (2, 2), (0, 0), (1, 1000), (1, 300)),
        ((0, 0), (0, 0), (0, 0), (0, 0), (0, 0), (0, 0)),
        ((6, 400), (0, 0), (0, 0), (0, 0), (0, 0), (0, 0)),
    ]
    if tokens == 200:
        steps += [
            ((190, 700), (1, 10), (9, 9), (0, 0), (0, 0), (0, 0)),
            ((50, 50), (50, 51), (0, 0), (1, 1), (80, 990), (3, 9)),
        ]

    def step_of(lens: tuple[tuple[int, int], ...], seed: int) -> Batch:
        return make_batch(config, lens, (tokens - sum(q for q, _ in lens), 0), device="cuda", seed=seed)

    captured = step_of(steps[0], 0)
    blocks = captured.args.key_cache.shape[0] + 80
    cache = torch.full((2, blocks, *storage_of(captured.args).shape[2:]), 0xFF, dtype=torch.uint8, device="cuda")
    cache[:, : captured.args.key_cache.shape[0]] = storage_of(captured.args)
    table = torch.full((6, 64), -1, dtype=torch.int32, device="cuda")
    table[:, : captured.args.block_table.shape[1]] = captured.args.block_table
    captured.args = with_storage(captured.args._replace(block_table=table), cache)
    torch.ops.vattn.attention(*captured.args)
    graph, _ = capture(lambda: torch.ops.vattn.attention(*captured.args))
    names = ("output", "output_block_scale", "lse")
    for seed, lens in enumerate(steps, 1):
        later = step_of(lens, seed)
        _overwrite(captured.args, later.args)
        eager = captured.with_backend("TRITON_ATTN")
        torch.ops.vattn.attention(*eager.args)
        for name in names:
            written = getattr(captured.args, name)
            if written is not None:
                written.view(torch.uint8).fill_(0xFF)
        graph.replay()
        torch.cuda.synchronize()
        for name in names:
            got, want = getattr(captured.args, name), getattr(eager.args, name)
            if got is not None:
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), (name, lens)
        assert run_and_compare(eager.with_backend("TRITON_ATTN"))


def test_a_new_token_count_compiles_nothing() -> None:
    from vattn.kernels.triton.attention.kernel import attention_kernel

    config = make_config(**{**LLAMA, "backend": "TRITON_ATTN"})

    def compiled() -> int:
        return sum(len(entry[0]) for entry in attention_kernel.device_caches.values())

    def run(tokens: int) -> None:
        lens = [tokens, tokens], [tokens + 3, tokens]
        batch = random_paged_batch(config, *lens, table_width=12, num_padding_tokens=1, device="cuda")
        torch.ops.vattn.attention(*batch.args)

    run(64)
    before = compiled()
    for tokens in (65, 70, 80, 97, 112, 127):
        run(tokens)
    assert compiled() == before


@pytest.mark.parametrize("name", MODEL_DTYPES)
def test_merge(name: str) -> None:
    from vattn.ops.arguments import MergeArgs
    from vattn.ops.reference import attention as reference

    parts = [torch.randn(9, 5, 72, device="cuda", dtype=MODEL_DTYPES[name]) for _ in range(2)]
    logs = [torch.randn(9, 5, device="cuda") * 5 for _ in range(2)]
    logs[0][1], logs[1][2], logs[0][3], logs[1][3] = (-torch.inf,) * 4
    parts[0][1], parts[1][2] = torch.nan, torch.nan
    outs = [(torch.empty_like(parts[0]), torch.empty_like(logs[0])) for _ in range(2)]
    torch.ops.vattn.merge_attn_states(*outs[0], parts[0], logs[0], parts[1], logs[1])
    reference.merge_attn_states(MergeArgs(*outs[1], parts[0], logs[0], parts[1], logs[1]))
    for got, want in zip(*outs, strict=True):
        torch.testing.assert_close(got, want)


def test_small_case_for_the_memory_checker() -> None:
    """Run by `compute-sanitizer` as well: odd sizes, broken tables, a split and an unsplit step."""
    broken: AttentionConfig = make_config(
        num_heads=10, num_kv_heads=2, head_size=72, dtype="bfloat16", kv_cache_dtype="fp8_e4m3", block_size=24,
        lse=True, backend="TRITON_ATTN",
    )  # fmt: skip
    for lens in (((1, 100), (1, 7), (0, 0)), ((40, 90), (3, 3), (1, 500))):
        assert run_and_compare(make_batch(broken, lens, (3, 1), "broken", device="cuda", seed=1))
    assert compare_cache_update(make_cache_update(broken, device="cuda"), broken)
