"""CUDA graphs on the GPU: capture, change lengths, block tables and scales, replay, and compare with eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import vattn
from tests.compile.toy_models import Model, caches, fill_caches, make_builder, make_model, make_step
from vattn.errors import GraphContractError, MetadataError, UnsupportedRequestError

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo", "no_grad")]

TOLERANCE = 4e-3
"""Relative L2 in fp16: graph and eager see other batch shapes, so GEMMs and split keys may sum in another order, and
the compiled model rounds its norms once less; each costs up to 5e-4 a layer, in two layers and their residuals."""

FP8_TOLERANCE = 2e-2
"""The same differences, where some move a key or value to the next FP8 code, 6 % away."""


FP8 = {
    "cache_config": vattn.CacheConfig(cache_dtype="fp8"),
    "quant_config": vattn.QuantConfig(k_scale="unit", v_scale="unit"),
}
FLAVOURS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp8": FP8,
    "window": {"per_layer_sliding_window": 20},
    "soft cap": {"logits_soft_cap": 8.0},
}


def gpu_model(**attention: Any) -> Model:
    return make_model(2, device="cuda", dtype=torch.float16, width=256, **attention)


def close(got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float = TOLERANCE) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.double() - theirs.double()).norm() <= tolerance * theirs.double().norm()


def eager(model: Model, query_lens: list[int], seq_lens: list[int], tables: list[list[int]], ids: Tensor) -> Tensor:
    """Run a step with a builder of its own, unpadded, over caches as they were."""
    fill_caches(model)
    step = make_builder(model).build(query_lens, seq_lens, tables)
    with vattn.forward_context(step):
        return model(ids)


def make_inputs(step: vattn.AttentionMetadata) -> list[Tensor]:
    return [torch.zeros_like(step.slot_mapping)]


def runner_of(model: Model, how: str, sizes: Sequence[int] = (1, 4, 8)) -> vattn.CUDAGraphRunner:
    function: Callable[..., Any] = model if how == "plain" else vattn.compile(model)
    return vattn.CUDAGraphRunner(function, sizes, make_builder(model), make_inputs)


STEPS = [
    ([1, 9], [[1], [2]]),
    ([2, 10], [[1], [2]]),
    ([300, 17, 1], [list(range(20, 40)), [41, 3], [5]]),
    ([40], [[90, 80, 70]]),
    ([1, 2, 3, 4, 5, 6, 7, 8], [[i] for i in (9, 8, 7, 6, 5, 4, 3, 2)]),
    ([500, 1], [list(range(50, 82)), [95]]),
]


@pytest.mark.parametrize("how", ["plain", "compiled"])
@pytest.mark.parametrize("name", FLAVOURS)
def test_replay_equals_eager_when_lengths_and_tables_change(name: str, how: str) -> None:
    model = gpu_model(**FLAVOURS[name])
    runner = runner_of(model, how)
    assert runner.report.reason is None and len(runner.report.costs) == 3
    for seq_lens, tables in STEPS:
        ids = torch.arange(len(seq_lens), device="cuda") * 5 % 64
        fill_caches(model)
        step = runner.build([1] * len(seq_lens), seq_lens, tables)
        got = [runner(ids, metadata=step).clone(), *written(model, seq_lens, tables)]
        want = [eager(model, [1] * len(seq_lens), seq_lens, tables, ids), *written(model, seq_lens, tables)]
        if name == "fp8":
            close(got[:1], want[:1], FP8_TOLERANCE)  # the cache holds codes, whose distance says nothing
        else:
            close(got, want)


def written(model: Model, seq_lens: list[int], tables: list[list[int]]) -> list[Tensor]:
    """The cache rows of the new tokens."""
    slots = [(table[(n - 1) // 16], (n - 1) % 16) for n, table in zip(seq_lens, tables, strict=True)]
    blocks, offsets = (torch.tensor(part, device="cuda") for part in zip(*slots, strict=True))
    return [cache[:, blocks, offsets] for cache in caches(model)]


@pytest.mark.parametrize("how", ["plain", "compiled"])
def test_scales_change_between_replays(how: str) -> None:
    model = gpu_model(**FP8)
    runner = runner_of(model, how, [4])
    ids, (seq_lens, tables) = torch.tensor([3, 9, 11], device="cuda"), STEPS[2]
    outputs = []
    for k_scale, v_scale in ((1.0, 1.0), (0.25, 3.0), (0.03, 0.5)):
        for layer in model.layers:
            layer.attn.k_scale.fill_(k_scale)
            layer.attn.v_scale.fill_(v_scale)
        fill_caches(model)
        outputs.append(runner(ids, metadata=runner.build([1] * 3, seq_lens, tables)).clone())
        close(outputs[-1:], [eager(model, [1] * 3, seq_lens, tables, ids)], FP8_TOLERANCE)
    assert not torch.equal(outputs[0], outputs[1])


def test_scales_are_taken_from_the_first_real_replay() -> None:
    model = gpu_model(cache_config=vattn.CacheConfig(cache_dtype="fp8", calculate_kv_scales=True))
    runner = runner_of(model, "plain", [2])
    assert [int(layer.attn.scales_ready.min()) for layer in model.layers] == [0, 0]
    ids = torch.tensor([3, 9], device="cuda")
    runner(ids, metadata=runner.build([1, 1], [1, 1], [[1], [2]]))
    first = [layer.attn.k_scale.clone() for layer in model.layers]
    assert [int(layer.attn.scales_ready.min()) for layer in model.layers] == [1, 1]
    runner(ids + 30, metadata=runner.build([1, 1], [2, 2], [[1], [2]]))
    assert all(torch.equal(a, layer.attn.k_scale) for a, layer in zip(first, model.layers, strict=True))


def test_capture_writes_nothing() -> None:
    model = gpu_model()
    fill_caches(model)
    before = caches(model)
    runner_of(model, "plain")
    assert all(map(torch.equal, before, caches(model)))


def test_padding_never_shows() -> None:
    """A full step of NaN leaves nothing behind for the padded rows of the next."""
    model = gpu_model()
    runner = runner_of(model, "plain", [8])
    fill_caches(model)
    with torch.no_grad():
        model.embed.weight[63] = float("nan")
    ids = torch.full((8,), 63, device="cuda")
    assert bool(runner(ids, metadata=runner.build([1] * 8, [1] * 8, [[i] for i in range(80, 88)])).isnan().any())
    model.embed.weight[63] = 0.0
    fill_caches(model)
    output = runner(torch.zeros(1, dtype=torch.int64, device="cuda"), metadata=runner.build([1], [20], [[1, 2]]))
    assert output.shape == (1, 64) and bool(output.isfinite().all())


def test_reduce_overhead_captures() -> None:
    model = gpu_model()
    target = vattn.compile(model, mode="reduce-overhead")
    builder = make_builder(model)
    for query_lens in ([1] * 4, [1] * 4, [1] * 4, [1] * 8, [1] * 8, [1] * 4, [3, 4], [3, 4]):
        for cached in (5, 90):
            ids, step = make_step(builder, query_lens, cached)
            fill_caches(model)
            torch.compiler.cudagraph_mark_step_begin()
            with vattn.forward_context(step):
                got = target(ids).clone()
            fill_caches(model)
            with vattn.forward_context(step):
                close([got], [model(ids)])
    counters = torch._dynamo.utils.counters
    assert counters["inductor"]["cudagraph_skips"] == 0
    manager = torch._inductor.cudagraph_trees.get_manager(0, create_if_none_exists=False)
    assert manager is not None and any(manager.roots.values())
    assert counters["stats"]["unique_graphs"] == 1


def test_costs_are_reported() -> None:
    model = gpu_model()
    runner = runner_of(model, "plain", [1, 4, 8])
    assert [cost.batch_size for cost in runner.report.costs] == [8, 4, 1]
    assert runner.report.seconds > 0 and runner.report.bytes > 0
    assert "3 CUDA graphs in one memory pool, batch sizes 8, 4, 1" in str(runner.report)


def test_contradictions_raise_before_anything_runs() -> None:
    model = gpu_model()
    runner = runner_of(model, "plain", [4])
    before = caches(model)
    ids = torch.zeros(4, dtype=torch.int64, device="cuda")
    step = make_builder(model).build([1] * 4, [1] * 4, [[1], [2], [3], [4]])
    with pytest.raises(GraphContractError, match="buffers moved"):
        runner(ids, metadata=step)
    step = runner.builder.build([1] * 4, [1] * 4, [[1], [2], [3], [4]], causal=False)
    with pytest.raises(GraphContractError, match="bidirectional"):
        runner(ids, metadata=step)
    assert all(map(torch.equal, before, caches(model)))


@pytest.mark.parametrize("how", ["plain", "compiled"])
def test_replays_take_the_newest_step_and_refuse_older_ones(how: str) -> None:
    model = gpu_model()
    runner = runner_of(model, how, [4])
    assert vattn.AttentionMetadataBuilder(4, 4, 64, layers=model).device.type == "cuda"
    ids, tables = torch.arange(2, device="cuda"), [[1], [2]]
    step = runner.build([1, 1], [1, 1], tables)
    runner(ids, metadata=step)
    for length in (2, 3):
        fill_caches(model)
        older, step = step, runner.build([1, 1], [length, length + 4], tables)
        with pytest.raises(MetadataError, match="over which its step"):
            runner(ids, metadata=older)
        got = runner(ids, metadata=step).clone()
        close([got], [eager(model, [1, 1], [length, length + 4], tables, ids)])
    fill_caches(model)
    later = runner.builder.advance(step, [])
    with pytest.raises(MetadataError, match="over which its step"):
        runner(ids, metadata=step)
    got = runner(ids, metadata=later).clone()
    close([got], [eager(model, [1, 1], [4, 8], tables, ids)])


def test_a_backend_that_reads_lengths_on_the_host_is_refused() -> None:
    model = gpu_model(attn_backend="TORCH_SDPA")
    with pytest.raises(UnsupportedRequestError, match="TORCH_SDPA cannot be captured"):
        runner_of(model, "plain")


def test_staging_is_not_overwritten_before_it_is_copied() -> None:
    """Steps built faster than the device copies them: every one must arrive as it was."""
    model = gpu_model()
    builder = make_builder(model)
    seen, expected = [], []
    torch.cuda._sleep(200_000_000)  # about 0.1 s of device time, in which the host runs ahead
    for i in range(20):
        seq_lens, tables = [1 + 7 * i % 50, 16 + i], [[i, i + 1, i + 2, i + 3], [40 + i, 60 + i, 61 + i]]
        step = builder.build([1, 3], seq_lens, tables)
        seen.append([step.seq_lens.clone(), step.slot_mapping.clone(), step.block_table[:, :3].clone()])
        slots = [
            table[p // 16] * 16 + p % 16
            for n, q, table in zip(seq_lens, (1, 3), tables, strict=True)
            for p in range(n - q, n)
        ]
        expected.append((seq_lens, slots, [table[:3] for table in tables]))
    for tensors, values in zip(seen, expected, strict=True):
        for tensor, value in zip(tensors, values, strict=True):
            assert tensor.tolist() == list(value)
