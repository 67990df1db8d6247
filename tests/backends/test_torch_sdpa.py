"""TORCH_SDPA: chunks, outputs and autocast; `tests/conformance` compares its features with the reference."""

import pytest
import torch

import vattn.ops.schemas  # noqa: F401  registers the ops
from tests.support import make_config, random_paged_batch, relative_l2
from vattn.backends.torch_sdpa import backend as torch_sdpa
from vattn.backends.torch_sdpa import chunked as written_out
from vattn.backends.torch_sdpa.decode import attend_decodes
from vattn.errors import GraphContractError
from vattn.quantization.codecs import quantise_output
from vattn.quantization.formats import OUTPUT_FORMATS

BACKEND = torch_sdpa.TorchSDPABackend()

# Both sides accumulate in fp32 in different orders: a few units of 2^-24 over sums of up to 100 terms. Narrower outputs
# add one rounding, of relative size up to 2^-9 (bf16) or 2^-12 (fp16; more where it is subnormal).
TOLERANCE = {"float32": 2e-6, "bfloat16": 3e-3, "float16": 5e-4}

MIXED = ([1, 3, 0, 17, 1, 5, 1], [20, 3, 0, 30, 1, 2, 41])
DECODES = ([1, 1, 1, 1, 1], [20, 1, 33, 7, 64])
LONG = ([70, 37], [70, 130])

FEATURES = {
    "plain": {},
    "bidirectional": {"causality": "bidirectional"},
    "per_request": {"causality": "per_request"},
    "window": {"sliding_window": 5},
    "window_1": {"sliding_window": 1},
    "window_wide": {"sliding_window": 1000},
    "window_bidirectional": {"sliding_window": 6, "causality": "bidirectional"},
    "window_per_request": {"sliding_window": 11, "causality": "per_request"},
    "chunk_local": {"sliding_window": 7, "chunk_lookback": 0},
    "chunk_lookback": {"sliding_window": 18, "chunk_lookback": 2},
    "chunk_bidirectional": {"sliding_window": 10, "chunk_lookback": 1, "causality": "bidirectional"},
    "soft_cap": {"logits_soft_cap": 1.5},
    "alibi": {"alibi": "linear"},
    "alibi_bidirectional": {"alibi": "linear", "causality": "bidirectional"},
    "alibi_sqrt": {"alibi": "sqrt"},
    "sinks": {"sinks": True},
    "sinks_lse_window": {"sinks": True, "lse": True, "sliding_window": 9},
    "lse": {"lse": True},
    "tree": {"tree_bias": True},
    "tree_lse": {"tree_bias": True, "lse": True, "sliding_window": 8},
    "mm_full": {"mm_prefix": "full", "sliding_window": 5},
    "mm_clamped": {"mm_prefix": "clamped", "sliding_window": 5},
    "mm_clamped_chunk": {"mm_prefix": "clamped", "sliding_window": 8, "chunk_lookback": 1},
    "mm_alibi": {"mm_prefix": "full", "alibi": "linear", "sliding_window": 4},
    "context": {"context_only": True},
    "context_window": {"context_only": True, "sliding_window": 6, "causality": "bidirectional", "sinks": True},
    "everything": {
        "causality": "per_request",
        "sliding_window": 9,
        "logits_soft_cap": 2.0,
        "alibi": "linear",
        "sinks": True,
        "mm_prefix": "full",
        "lse": True,
        "head_size_v": 24,
        "kv_cache_layout": "HND",
        "kv_cache_dtype": "fp8_e4m3",
        "kv_scale": "head",
    },
}


def check(batch):
    """Run a batch on TORCH_SDPA and compare everything it writes with the reference."""
    batch = batch.with_backend("TORCH_SDPA")
    expected, expected_lse = batch.expected()
    output, lse = batch.run()
    assert bool(output.isfinite().all())
    assert relative_l2(output, expected) < TOLERANCE[batch.config.dtype]
    assert not bool(output[batch.num_tokens :].any())
    if lse is not None:
        assert torch.equal(lse.isinf(), expected_lse.isinf())
        assert relative_l2(lse, expected_lse) < TOLERANCE["float32"]
        assert bool((lse[batch.num_tokens :] == -torch.inf).all())


@pytest.mark.parametrize("feature", FEATURES)
def test_small_chunks_change_nothing(feature, monkeypatch):
    monkeypatch.setattr(written_out, "_MASK_PER_CHUNK", 100)
    monkeypatch.setattr(written_out, "_SCORES_PER_CHUNK", 1000)
    config = make_config(num_heads=6, num_kv_heads=2, block_size=8, **FEATURES[feature])
    check(random_paged_batch(config, *LONG, seed=1))


def test_chunks_stay_within_their_budget():
    config = make_config(num_heads=8, num_kv_heads=8, lse=True)
    request = written_out.Request(0, 0, 3000, 9000, 6000, 9000, causal=True)
    chunks = list(written_out.chunks(request, config, plain=False))
    assert [c.first_row for c in chunks] == [0, *(c.end_row for c in chunks[:-1])] and chunks[-1].end_row == 3000
    assert max((c.end_row - c.first_row) * (c.end_key - c.first_key) * 8 for c in chunks) <= 1 << 22


@pytest.mark.parametrize("output_format", OUTPUT_FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_output_formats_quantise_the_rounded_result(output_format, dtype):
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "dtype": dtype}
    plain = random_paged_batch(make_config(**shape), *MIXED, num_padding_tokens=3).with_backend("TORCH_SDPA")
    batch = random_paged_batch(make_config(output_format=output_format, **shape), *MIXED, num_padding_tokens=3)
    batch = batch.with_backend("TORCH_SDPA")
    plain.run()
    output, _ = batch.run()
    wanted = batch.with_backend("TORCH_SDPA").args
    quantise_output(plain.args.output, output_format, wanted.output, wanted.output_block_scale, wanted.output_scale)
    assert torch.equal(batch.args.output.view(torch.uint8), wanted.output.view(torch.uint8))
    if wanted.output_block_scale is not None:
        assert torch.equal(batch.args.output_block_scale.float(), wanted.output_block_scale.float())
    assert not bool(output[batch.num_tokens :].any())
    # e2m1 has 1 mantissa bit: up to a quarter off. e4m3 has 3: at most 1/16 off.
    assert relative_l2(output, batch.expected()[0]) < (0.2 if "nvfp4" in output_format else 0.04)


@pytest.mark.parametrize("shape", [{}, {"output_format": "fp8_per_token"}, {"lse": True, "sinks": True}])
@pytest.mark.parametrize("lens", [([0], [0]), ([0, 0], [5, 0]), ([2], [0]), ([3, 1], [1, 0])])
def test_empty_requests(shape, lens):
    config = make_config(**shape)
    batch = random_paged_batch(config, *lens, num_padding_tokens=2).with_backend("TORCH_SDPA")
    expected, expected_lse = batch.expected()
    output, lse = batch.run()
    assert output.shape == expected.shape and relative_l2(output, expected) < 0.04
    if lse is not None:
        assert relative_l2(lse, expected_lse) < 2e-6


@pytest.mark.parametrize(
    "lens",
    [([1], [20]), ([1, 1, 1], [32, 32, 32]), ([1, 1, 1], [37, 1, 16]), ([1, 1, 0], [20, 9, 0])],
    ids=["one", "equal", "ragged", "an empty request"],
)
@pytest.mark.parametrize("window", [None, 1, 19])
@pytest.mark.parametrize(
    "cache",
    [{}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"}, {"head_size_v": 24}],
    ids=["fp32", "bf16", "fp8", "unequal heads"],
)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_decodes_are_one_call(lens, window, cache, layout, monkeypatch):
    """Garbage in blocks is NaN, and rows of padding come as NaN."""
    config = make_config(num_heads=6, num_kv_heads=2, sliding_window=window, kv_cache_layout=layout, **cache)
    done = []
    monkeypatch.setattr(torch_sdpa, "attend_decodes", lambda *args: done.append(attend_decodes(*args)) or done[-1])
    check(random_paged_batch(config, *lens, num_padding_tokens=2, seed=3))
    assert done == [True]


@pytest.mark.parametrize("block", [-1, 10**6, -(2**31), 2**27], ids=str)
@pytest.mark.parametrize("lengths", [[20, 20], [33, 5]])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_decodes_over_blocks_that_do_not_exist(block, lengths, layout):
    batch = random_paged_batch(make_config(kv_cache_layout=layout), [1, 1], lengths, seed=2)
    batch.args.block_table[0, 0] = block
    check(batch)


@pytest.mark.parametrize("feature", ["plain", "lse"])
@pytest.mark.parametrize("lens", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_autocast_does_not_narrow_the_math(feature, lens):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        batch = random_paged_batch(make_config(**FEATURES[feature]), *lens).with_backend("TORCH_SDPA")
        batch.run()
    expected, _ = batch.expected()
    assert relative_l2(batch.args.output, expected) < TOLERANCE["float32"]


@pytest.mark.gpu
def test_capture_is_refused_with_a_reason():
    batch = random_paged_batch(make_config(), *DECODES, device="cuda").with_backend("TORCH_SDPA")
    batch.run()
    with pytest.raises(GraphContractError, match="TORCH_SDPA was called while a CUDA graph is captured"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            batch.run()
