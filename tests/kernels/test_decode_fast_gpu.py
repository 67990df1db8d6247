"""The fast decode path on a Hopper GPU: against the reference on odd, poisoned batches, with and without splits."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance.compare import compare, on_cpu
from tests.support import Batch, capture, make_config, poisoned_empty, random_paged_batch, relative_l2, storage_of
from vattn.backends import hopper_routes
from vattn.config.device import DeviceInfo
from vattn.config.rope import RopeConfig
from vattn.kernels.hopper.decode import launch as decode_fast
from vattn.kernels.hopper.decode.launch import Tuning, choose_tuning, decode
from vattn.kernels.triton.attention.launch import finish
from vattn.kernels.triton.cache.rope_update import rope_update
from vattn.kernels.triton.common.tiles import Limits
from vattn.ops.arguments import RopeUpdateArgs
from vattn.quantization import codecs as quantization

pytestmark = pytest.mark.gpu(capability=(9, 0))

TOLERANCE = {"bfloat16": 4e-3, "float16": 6e-4}
"""Relative L2 error by model dtype. Rounding weights and result to it costs about 0.6 of half a unit in the last place
each, 1.6e-3 in bf16 and 2e-4 in fp16; twice their sum, rounded up."""

LSE_TOLERANCE = 2e-4
"""Absolute; scores and sums are fp32, of a few hundred products of size 1."""

RAGGED = [1, 15, 16, 17, 300, 1000, 33, 64, 129, 2, 511, 47]


def check(batch: Batch, tuning: Any = None, plan: bool = False) -> None:
    """Run the fast path on a batch and compare output and LSE with the reference."""
    device = batch.args.query.device
    assert decode_fast.refusals(batch.config, DeviceInfo.of(device)) == []
    assert decode_fast.accepts(batch.args, batch.config)
    args = batch.args
    if plan:
        shape = decode_fast.plan_shape(batch.config, args.query.shape[0], args.seq_lens.shape[0], device)
        schedule = torch.full(shape, -7, dtype=torch.int32, device=device)
        decode_fast.plan(args.query_start_loc, args.seq_lens, schedule, batch.config, tuning)
        args = args._replace(plan=[schedule])
    decode_fast.decode(args, batch.config, tuning)
    compare_rows(batch)


def compare_rows(batch: Batch) -> None:
    """Compare output and LSE with the reference."""
    torch.cuda.synchronize()
    output, lse = batch.expected()
    assert relative_l2(batch.output(), output) < TOLERANCE[batch.config.dtype]
    if batch.args.lse is not None:
        finite = lse.isfinite()
        assert torch.equal(batch.args.lse[~finite], lse[~finite])
        assert ((batch.args.lse - lse)[finite].abs() < LSE_TOLERANCE).all()


def decode_batch(
    lengths: list[int], *, padding: int = 0, query_lens: list[int] | None = None, tokens: int = 1, **changes: Any
) -> Batch:
    """Return a step of `tokens` rows per request on average, padding included."""
    values = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": "bfloat16", "lse": True, **changes}
    query_lens = query_lens or [tokens] * len(lengths)
    rows = max(0, tokens * (len(lengths) + padding) - sum(query_lens))
    return random_paged_batch(
        make_config(**values), query_lens, lengths, num_padding_reqs=padding, num_padding_tokens=rows, device="cuda"
    )


FP8 = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"}


@pytest.mark.parametrize("cache", [{}, FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize("heads", [(3, 3), (10, 2), (14, 2), (16, 2), (32, 2), (9, 1), (20, 5)], ids=str)
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_groups(heads: tuple[int, int], head_size: int, cache: dict[str, Any]) -> None:
    check(decode_batch(RAGGED, num_heads=heads[0], num_kv_heads=heads[1], head_size=head_size, **cache))


PADDED: list[tuple[int, dict[str, Any]]] = [(size, {}) for size in (32, 40, 80, 96, 112, 120, 160, 192, 224)]
PADDED += [(size, FP8) for size in (48, 80, 96, 112, 160, 192, 224)]


@pytest.mark.parametrize(("size", "cache"), PADDED, ids=str)
def test_heads_that_zeros_are_added_to(size: int, cache: dict[str, Any]) -> None:
    """In either kernel, with and without splits, several rows at a time, and in formats with scales of groups."""
    for heads, requests, changes in (
        ((3, 3), RAGGED, {"sinks": True}),
        ((10, 2), [*RAGGED, 5000], {"sliding_window": 100, "logits_soft_cap": 5.0}),
        ((16, 4), RAGGED * 3, {"kv_cache_layout": "HND"}),
        ((8, 2), [3000], {}),
    ):
        check(decode_batch(requests, num_heads=heads[0], num_kv_heads=heads[1], head_size=size, **changes, **cache))
    batch = decode_batch(RAGGED, tokens=3, head_size=size, padding=2, **cache)
    if decode_fast.attends_drafts(batch.config):
        check(batch)
    for name in ("fp8_static", "nvfp4"):
        batch = decode_batch(RAGGED, head_size=size, output_format=name, **cache)
        decode(batch.args, batch.config)
        output, lse = batch.expected()
        compare(on_cpu(batch), output.cpu(), lse.cpu())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kv_scale", ["none", "tensor", "head"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [16, 48, 128, 528, 2048])
def test_caches(dtype: str, kv_scale: str, layout: str, block_size: int) -> None:
    cache = dtype if kv_scale == "none" else "fp8_e4m3"
    check(
        decode_batch(
            RAGGED, dtype=dtype, kv_cache_dtype=cache, kv_scale=kv_scale, kv_cache_layout=layout, block_size=block_size
        )
    )


FEATURES: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 20},
    "window of one": {"sliding_window": 1},
    "soft cap": {"logits_soft_cap": 3.0},
    "head of 256": {"head_size": 256, "logits_soft_cap": 50.0, "sliding_window": 1024},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 100, "logits_soft_cap": 5.0, "sinks": True},
    "fp8 query": {"query_format": "fp8_e4m3", "query_scale": "head"},
    "no lse": {"lse": False},
}


@pytest.mark.parametrize("cache", [{}, FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature: str, cache: dict[str, Any]) -> None:
    check(decode_batch([*RAGGED, 5000], padding=3, **FEATURES[feature], **cache))


@pytest.mark.parametrize("cache", [{}, FP8], ids=["plain", "fp8"])
def test_split_requests(cache: dict[str, Any]) -> None:
    check(decode_batch([20011], **cache), plan=True)
    check(decode_batch([20011, 3, 700, 64], sinks=True, logits_soft_cap=20.0, **cache), plan=True)
    check(decode_batch([9000, 0, 17], sliding_window=4099, sinks=True, **cache), plan=True)


@pytest.mark.parametrize("cache", [{}, FP8], ids=["plain", "fp8"])
def test_rows_that_are_not_one_per_request(cache: dict[str, Any]) -> None:
    check(decode_batch([40, 700, 0, 90, 2], query_lens=[3, 1, 0, 0, 1], sinks=True, **cache))
    check(decode_batch([40, 1, 300], query_lens=[0, 3, 0], sliding_window=33, padding=2, **cache), plan=True)


def test_more_requests_than_ctas() -> None:
    lengths = [(37 * i) % 211 for i in range(700)]
    check(decode_batch(lengths, num_heads=4, num_kv_heads=2, head_size=64, sinks=True), plan=True)


WHOLE: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 300, "kv_cache_layout": "HND"},
    "groups of 16": {"num_heads": 128, "sinks": True},
    "heads of 64": {"head_size": 64, "block_size": 32},
}


@pytest.mark.parametrize("cache", [{}, FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize("name", WHOLE)
def test_requests_that_stay_whole(name: str, cache: dict[str, Any]) -> None:
    layer = {"num_heads": 32, "num_kv_heads": 8, **WHOLE[name], **cache}
    stages = 5 if cache else 512 // (2 * layer.get("head_size", 128))
    for slots in (4, 2):
        tuning = Tuning(2, stages, 4 // slots, slots=slots, overlap=True, max_registers=128, whole=True)
        check(decode_batch([*RAGGED, 1999, 0], **layer), tuning)
        check(decode_batch([*RAGGED, 900], padding=3, **layer), tuning)
        check(decode_batch([40, 700, 0, 90, 2], query_lens=[3, 1, 0, 0, 1], **layer), tuning)


@pytest.mark.parametrize("cache", [{}, FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize("name", ["fp8_static", "fp8_group128", "nvfp4"])
def test_outputs_of_requests_that_stay_whole(name: str, cache: dict[str, Any]) -> None:
    """Every replay gives the same bytes, about those of splits."""
    batch = decode_batch(
        [400 + 19 * i for i in range(30)], padding=2, num_heads=32, num_kv_heads=8, output_format=name, **cache
    )
    tuning = decode_fast.whole_tuning(batch.args, batch.config)
    assert tuning is not None and tuning.slots == 4
    decode_fast.decode(batch.args, batch.config)
    torch.cuda.synchronize()
    codes = batch.args.output.clone()
    graph, _ = capture(lambda: [decode_fast.decode(batch.args, batch.config) for _ in range(20)])
    for _ in range(20):
        batch.args.output.view(torch.uint8).fill_(0x77)
        graph.replay()
        assert torch.equal(codes.view(torch.uint8), batch.args.output.view(torch.uint8))
    decode_fast.decode(batch.args, batch.config, dataclasses.replace(tuning, whole=False))
    if name == "fp8_static":  # Lengths differ, so the schedule splits some: sums in another order.
        assert (codes.view(torch.uint8) != batch.args.output.view(torch.uint8)).float().mean() < 0.02


GROUPED = ["fp8_group128", "fp8_group64_pow2_col", "nvfp4"]


@pytest.mark.parametrize("lengths", [[3000, 5, 77], [3000, 5, 77, 0, 900, 16]], ids=["few", "many"])
@pytest.mark.parametrize("cache", [{}, FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize("slots", [0, 4])
@pytest.mark.parametrize("name", ["fp8_static", "fp8_per_token", *GROUPED, "nvfp4_swizzled"])
def test_quantised_output(name: str, slots: int, cache: dict[str, Any], lengths: list[int]) -> None:
    """By the Triton and the Gluon kernel, of split requests and of whole ones."""
    tuning = decode_fast.Tuning(2, 2, 1, slots=slots, overlap=True)
    batch = decode_batch(lengths, output_format=name, num_kv_heads=4, **cache)
    decode_fast.decode(batch.args, batch.config, tuning)
    check_codes(batch, tuning)


def check_codes(batch: Batch, tuning: decode_fast.Tuning) -> None:
    """Check a batch's codes and scales against its plain output with a tuning, quantised separately."""
    args, name = batch.args, batch.config.output_format
    plain = batch.config.replace(output_format="none")
    output = torch.empty(args.query.shape, dtype=torch.bfloat16, device="cuda")
    decode_fast.decode(args._replace(output=output, output_block_scale=None, config=plain.encode()), plain, tuning)
    # On the CPU: there torch divides as IEEE does, as the kernels do everywhere.
    expected = poisoned_empty(args.output.shape, args.output.dtype)
    scales = None if args.output_block_scale is None else torch.empty_like(args.output_block_scale).cpu()
    output_scale = None if args.output_scale is None else args.output_scale.cpu()
    quantization.quantise_output(output.cpu(), name, expected, scales, output_scale)
    assert torch.equal(args.output.view(torch.uint8).cpu(), expected.view(torch.uint8))
    if scales is not None:
        assert torch.equal(args.output_block_scale.float().cpu(), scales.float())


@pytest.mark.parametrize("cache", [{}, FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize("slots", [0, 4])
@pytest.mark.parametrize("name", ["nvfp4", "fp8_group128"])
def test_approximate_quotients_are_those_of_plain_triton(name: str, slots: int, cache: dict[str, Any]) -> None:
    """Which divides as code that Inductor generates does, here the kernel's own plain output."""
    tuning = decode_fast.Tuning(2, 2, 1, slots=slots, overlap=True)
    arithmetic = "approximate_divide"
    batch = decode_batch(
        [3000, 5, 77, 0, 900, 16], output_format=name, num_kv_heads=4, output_arithmetic=arithmetic, **cache
    )
    decode_fast.decode(batch.args, batch.config, tuning)
    plain = batch.config.with_plain_output()
    output = torch.empty(batch.args.query.shape, dtype=torch.bfloat16, device="cuda")
    args = batch.args._replace(output=output, output_block_scale=None, config=plain.encode())
    decode_fast.decode(args, plain, tuning)
    expected = batch.args._replace(
        output=torch.empty_like(batch.args.output), output_block_scale=torch.empty_like(batch.args.output_block_scale)
    )
    finish(expected, batch.config, output)
    assert torch.equal(batch.args.output.view(torch.uint8), expected.output.view(torch.uint8))
    assert torch.equal(batch.args.output_block_scale.float(), expected.output_block_scale.float())


@pytest.mark.parametrize("cache", [{}, FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_tunings(heads: int, cache: dict[str, Any]) -> None:
    batch = decode_batch([*RAGGED, 4000], num_heads=32, num_kv_heads=8, **cache)
    check(batch, Tuning(heads, 2 if heads == 8 else 3))


@pytest.mark.parametrize("cache", [{}, FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize(("heads", "slots"), [(4, 2), (2, 4), (4, 1)])
def test_gluon(heads: int, slots: int, cache: dict[str, Any]) -> None:
    tuning = Tuning(heads, 2, 1, slots=slots, overlap=True)
    check(decode_batch([*RAGGED, 4000], num_heads=32, num_kv_heads=8, **cache), tuning)
    check(decode_batch([*RAGGED, 900], num_heads=18, num_kv_heads=3, padding=3, **FEATURES["all"], **cache), tuning)
    check(decode_batch([40, 700, 0, 90, 2], query_lens=[3, 1, 0, 0, 1], num_kv_heads=4, sinks=True, **cache), tuning)


GLUON: dict[str, dict[str, Any]] = {
    "groups of 16": {"num_heads": 32, "sinks": True, "sliding_window": 300},
    "hnd": {"kv_cache_layout": "HND", "block_size": 48},
    "fp16": {"dtype": "float16", "block_size": 128},
    "head size 64": {"head_size": 64, "num_heads": 14},
    "fp8 query": {"query_format": "fp8_e4m3", "query_scale": "head", "lse": False},
    "fp8 output": {"output_format": "fp8_static"},
}


@pytest.mark.parametrize("cache", [{}, FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize("name", GLUON)
def test_gluon_formats(name: str, cache: dict[str, Any]) -> None:
    batch = decode_batch([*RAGGED, 4000], **{**GLUON[name], **cache})
    tuning = Tuning(2, 2, 1, slots=4)
    if batch.config.output_format == "none":
        check(batch, tuning)
        return
    decode(batch.args, batch.config, tuning)
    codes = batch.args.output.clone()
    decode(batch.args, batch.config, Tuning(2, 3, 4))
    # The two kernels add in another order, which moves few results over the middle between two codes.
    assert (codes.view(torch.uint8) != batch.args.output.view(torch.uint8)).float().mean() < 0.02
    assert relative_l2(codes.float(), batch.args.output.float()) < 0.02


def test_large_groups_of_fp8_caches_use_gluon() -> None:
    batch = decode_batch([(211 * i) % 3001 for i in range(40)], num_heads=28, num_kv_heads=4, sinks=True, **FP8)
    assert decode_fast.choose_tuning(batch.config, 40).slots
    check(batch, plan=True)


WIDE: dict[str, dict[str, Any]] = {
    "groups of 2": {"num_heads": 16, "num_kv_heads": 8},
    "groups of 8": {"num_heads": 16, "num_kv_heads": 2, "sinks": True},
    "groups of 16": {"num_heads": 32, "num_kv_heads": 2, "block_size": 64},
    "one KV head": {"num_heads": 4, "num_kv_heads": 1, "kv_cache_layout": "HND"},
    "groups of 12 over one": {"num_heads": 12, "num_kv_heads": 1},
    "odd heads": {"num_heads": 9, "num_kv_heads": 3, "dtype": "float16"},
    "window and cap": {"sliding_window": 300, "logits_soft_cap": 30.0},
    "fp8 query": {"query_format": "fp8_e4m3", "query_scale": "head", "lse": False},
}


@pytest.mark.parametrize("name", WIDE)
def test_wide_heads_of_an_fp8_cache(name: str) -> None:
    for lengths in ([(211 * i) % 3001 for i in range(40)], [20011, 3, 0, 700], [5000]):
        batch = decode_batch(lengths, padding=3, head_size=256, **{**FP8, **WIDE[name]})
        check(batch, plan=len(lengths) > 1)
        if batch.config.num_kv_heads > 1:
            # What groups of up to four heads, and of more, take.
            for tuning in (Tuning(2, 3, 2, slots=2, max_registers=128), Tuning(2, 5, 1, slots=2, overlap=True)):
                if tuning.ctas == 1 or batch.config.group_size <= 8:
                    check(batch, tuning, plan=len(lengths) > 1)


@pytest.mark.parametrize("name", ["fp8_static", "fp8_group64", "fp8_group128", "nvfp4", "fp8_per_token"])
def test_outputs_of_wide_heads_of_an_fp8_cache(name: str) -> None:
    """As the rounded result is quantised by itself."""
    batch = decode_batch([(211 * i) % 3001 for i in range(40)], head_size=256, output_format=name, **FP8)
    decode_fast.decode(batch.args, batch.config)
    check_codes(batch, decode_fast.choose_tuning(batch.config.replace(output_format="none"), 40))


SPECULATIVE = [
    (2, {}),
    (4, {}),
    (3, {"num_heads": 10}),
    (2, {"num_heads": 16}),
    (8, {"num_heads": 2}),
    (5, {"num_heads": 3, "num_kv_heads": 1}),
]
LENGTHS = [8, 15, 16, 17, 300, 1000, 33, 64, 129, 9, 511, 47, 5000]


@pytest.mark.parametrize("cache", [{}, FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize(("tokens", "changes"), SPECULATIVE, ids=str)
def test_speculative_steps(tokens: int, changes: dict[str, Any], cache: dict[str, Any]) -> None:
    check(decode_batch(LENGTHS, tokens=tokens, **changes, **cache))
    check(decode_batch([8, 20011, 700], tokens=tokens, padding=2, sinks=True, **changes, **cache))
    check(decode_batch([9001], tokens=tokens, **changes, **cache))


@pytest.mark.parametrize("cache", [{}, FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize("feature", FEATURES)
def test_speculative_features(feature: str, cache: dict[str, Any]) -> None:
    if FEATURES[feature].get("head_size") != 256:
        check(decode_batch(LENGTHS, tokens=4, padding=1, **FEATURES[feature], **cache))


@pytest.mark.parametrize("cache", [{}, FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize("head_size", [64, 128])
def test_rows_that_are_not_dealt_out_evenly(head_size: int, cache: dict[str, Any]) -> None:
    changes = {"head_size": head_size, "sinks": True, **cache}
    check(decode_batch([40, 700, 90, 3000, 2], query_lens=[4, 1, 0, 9, 2], tokens=4, **changes))
    lengths = [90, 2500, 7, 64]
    check(decode_batch(lengths, query_lens=[0, 40, 0, 1], tokens=4, padding=7, sliding_window=300, **changes))
    check(decode_batch([90, 250], query_lens=[0, 0], tokens=2, **changes))


@pytest.mark.parametrize("output_format", ["fp8_static", "fp8_group128", "nvfp4"])
def test_speculative_outputs(output_format: str) -> None:
    batch = decode_batch([3000, 7, 77], query_lens=[4, 4, 2], tokens=4, padding=1, output_format=output_format, **FP8)
    decode_fast.decode(batch.args, batch.config)
    compare(on_cpu(batch), *(part.cpu() for part in batch.expected()))


def test_large_batches_of_plain_caches_use_gluon() -> None:
    batch = decode_batch([(97 * i) % 1531 for i in range(300)], num_heads=32, num_kv_heads=8)
    assert decode_fast.choose_tuning(batch.config, 300).slots
    check(batch, plan=True)


def test_assembly_decodes_every_code_like_the_plain_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = decode_batch([256], num_heads=2, num_kv_heads=2, **FP8)
    codes = torch.arange(256, device="cuda").to(torch.uint8)
    cache = storage_of(batch.args)
    finite = codes[(codes & 0x7F) != 0x7F]
    cache[:] = finite[torch.arange(cache.numel(), device="cuda") * 7 % finite.numel()].view(cache.shape)
    results = []
    constants = decode_fast.decode_constants
    for assembly in (True, False):
        monkeypatch.setattr(
            decode_fast, "decode_constants", lambda *a, chosen=assembly: {**constants(*a), "ASSEMBLY": chosen}
        )
        decode_fast.decode(batch.args, batch.config)
        results.append(batch.args.output.clone())
    assert relative_l2(results[0], results[1]) < 1e-3
    assert relative_l2(batch.output(), batch.expected()[0]) < TOLERANCE["bfloat16"]


def test_replays_follow_the_lengths() -> None:
    batch = decode_batch([900, 17, 300, 64], **FP8)
    args = batch.args
    shape = decode_fast.plan_shape(batch.config, 4, 4, args.query.device)
    schedule = torch.zeros(shape, dtype=torch.int32, device="cuda")
    args = args._replace(plan=[schedule])

    def step() -> None:
        decode_fast.plan(args.query_start_loc, args.seq_lens, schedule, batch.config)
        decode_fast.decode(args, batch.config)

    step()
    graph, _ = capture(step)
    for lengths in ([33, 17, 299, 1], [900, 16, 0, 63]):
        args.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        args.output.view(torch.uint8).fill_(0xFF)
        graph.replay()
        compare_rows(batch)


def test_refusals_name_what_is_missing() -> None:
    device = DeviceInfo.of("cuda")
    config = make_config(head_size=24, dtype="bfloat16", alibi="linear", block_size=24)
    text = " ".join(decode_fast.refusals(config, device))
    assert "head_size 24" in text and "alibi" in text and "block_size 24" in text
    other = dataclasses.replace(device, capability=(8, 0))
    assert decode_fast.refusals(make_config(head_size=128, dtype="bfloat16"), other)


def test_the_op_takes_the_fast_path_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    decode = decode_fast.decode
    monkeypatch.setattr(decode_fast, "decode", lambda *a: (calls.append(a), decode(*a)))
    for changes, expected in (({}, 1), ({"alibi": "linear"}, 1), ({"kv_cache_dtype": "fp8_e4m3"}, 2)):
        batch = decode_batch([300, 17, 5], **changes).with_backend("TRITON_ATTN")
        output, _ = batch.run()
        assert relative_l2(output, batch.expected()[0]) < TOLERANCE["bfloat16"]
        assert len(calls) == expected
    mixed = decode_batch([300, 17], query_lens=[1, 2], padding=0).with_backend("TRITON_ATTN")
    mixed.run()
    assert len(calls) == 2


@pytest.mark.parametrize("changes", [{}, {"head_size": 64}, {"dtype": "float16"}, {"num_heads": 128}], ids=str)
@pytest.mark.parametrize("feature", ["window", "all", "no lse", "sinks"])
def test_large_batches_in_fewer_registers(feature: str, changes: dict[str, Any]) -> None:
    layer = {"num_heads": 32, "num_kv_heads": 8, **changes}
    batch = decode_batch([*RAGGED, 5000, 0] * 2, padding=3, **layer, **FEATURES[feature])
    assert decode_fast.choose_tuning(batch.config, 31).max_registers
    check(batch)
    check(batch, plan=True)


@pytest.mark.parametrize("name", ["fp8_group64", "fp8_group128", "nvfp4", "fp8_static"])
def test_outputs_of_large_batches_in_fewer_registers(name: str) -> None:
    batch = decode_batch([*RAGGED, 4000] * 2, num_heads=32, num_kv_heads=8, output_format=name)
    tuning = choose_tuning(batch.config, 26)
    decode(batch.args, batch.config)
    codes = batch.args.output.clone()
    decode(batch.args, batch.config, dataclasses.replace(tuning, max_registers=None))
    assert tuning.max_registers
    assert torch.equal(codes.view(torch.uint8), batch.args.output.view(torch.uint8))


@pytest.mark.parametrize("cache", [{}, FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize("lengths", [[1000], [900, 40], [4000, 3], [700, 33] * 8], ids=["1", "2", "long", "many"])
def test_rope_between_the_kernels_around_it(lengths: list[int], cache: dict[str, Any]) -> None:
    """RoPE turns what the product before wrote, and attention reads what RoPE wrote, whatever of them overlaps."""
    from vattn.compilation.graph_edges import start_early

    batch = decode_batch(lengths, num_heads=32, num_kv_heads=8, backend="TRITON_ATTN", **cache)
    args, config, rope, rows = batch.args, batch.config, RopeConfig(128), len(lengths)
    shape = decode_fast.plan_shape(config, rows, rows, args.query.device)
    args = args._replace(plan=[torch.zeros(shape, dtype=torch.int32, device="cuda")])
    decode_fast.plan(args.query_start_loc, args.seq_lens, args.plan[0], config)
    last = args.seq_lens.long() - 1
    slots = args.block_table.gather(1, (last // config.block_size)[:, None])[:, 0] * config.block_size
    slots = slots.long() + last % config.block_size
    weight = torch.randn(2048, 48 * 128, device="cuda", dtype=torch.bfloat16) / 45
    product = torch.empty(rows, 48 * 128, device="cuda", dtype=torch.bfloat16)
    query, key, value = product.view(rows, 48, 128).split((32, 8, 8), dim=1)
    steps = []
    for _ in range(3):
        cos, sin = torch.randn(2, rows, 64, device="cuda")
        update = RopeUpdateArgs(
            query, key, value, cos, sin, None, args.query, args.key_cache, args.value_cache, slots, None, None, None,
            args.k_scale, args.v_scale, rope.encode(), config.encode(),
        )  # fmt: skip
        hidden = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)
        steps.append((hidden, update, args._replace(output=torch.empty_like(args.output))))

    def run(limits: Limits) -> None:
        for hidden, update, call in steps:
            torch.mm(hidden, weight, out=product)
            rope_update(update, rope, config, limits, next_may_start=True)
            hopper_routes.run(call, config)

    results = []
    for overlapped in (False, True):
        # Elsewhere than on Hopper RoPE's kernel starts after the one before.
        limits = replace(Limits.of(torch.device("cuda")), hopper=overlapped)
        run(limits)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            run(limits)
        assert start_early(graph.raw_cuda_graph()) == (len(steps) if overlapped else 0)
        graph.instantiate()
        for _ in range(20):
            product.fill_(torch.nan)
            for _, _, call in steps:
                call.output.view(torch.uint8).fill_(0x7F)
            graph.replay()
            results.append(torch.stack([call.output for _, _, call in steps]))
    assert results[0].isfinite().all() and not torch.equal(results[0][0], results[0][1])
    assert all(torch.equal(found, results[0]) for found in results)
