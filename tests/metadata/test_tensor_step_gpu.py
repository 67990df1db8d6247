"""Steps from tensors on a CUDA GPU: no wait for the device, and CUDA graphs that make and run steps of other values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vattn
from tests.support import capture, no_sync, relative_l2, usable
from vattn.backends import selector

pytestmark = pytest.mark.gpu

DEVICE, BLOCK, WIDTH = "cuda", 16, 40

DECODES = [([1, 1, 1, 1], [600, 37, 64, 1]), ([1, 1, 1, 0], [3, 517, 90, 0]), ([1, 1, 0, 0], [16, 17, 1, 1])]
MIXED = [([1, 30, 2, 1], [600, 30, 64, 5]), ([30, 1, 1, 0], [640, 517, 90, 0]), ([1, 1, 0, 0], [16, 17, 1, 1])]
PROMPTS = [([300, 100, 60, 20], [300, 600, 60, 21]), ([1, 470, 3, 6], [37, 480, 90, 600]), ([5, 0, 0, 0], [9, 1, 1, 1])]
STEPS = {"decodes": (DECODES, 4), "mixed": (MIXED, 36), "prompts": (PROMPTS, 480)}
"""Query lengths and lengths of steps that share a graph, and their padded tokens."""


def attention(backend: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layer = vattn.Attention(8, 128, 0.09, 2, attn_backend=usable(backend), **options).to(DEVICE)
        vattn.allocate_kv_cache(layer, num_blocks=200, dtype=dtype, device=DEVICE)
        layer.inputs = lambda tokens: [torch.randn(tokens, n, 128, dtype=dtype, device=DEVICE) for n in (8, 2, 2)]
        return layer

    return make


def latent() -> nn.Module:
    torch.manual_seed(1)
    projection = nn.Linear(512, 16 * 256, bias=False, dtype=torch.bfloat16)
    layer = vattn.MLAAttention(16, 192**-0.5, 128, 64, 128, None, 512, projection, attn_backend="TRITON_MLA").to(DEVICE)
    vattn.allocate_kv_cache(layer, num_blocks=200, dtype=torch.bfloat16, device=DEVICE)
    sizes = (16, 192), (512,), (1, 64)
    layer.inputs = lambda tokens: [torch.randn(tokens, *size, dtype=torch.bfloat16, device=DEVICE) for size in sizes]
    return layer


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "triton": attention("TRITON_ATTN"),
    "triton, window": attention("TRITON_ATTN", per_layer_sliding_window=100),
    "triton, float32": attention("TRITON_ATTN", torch.float32),
    "flash": attention("FLASH_ATTN"),
    "latent": latent,
}


def make_layer(name: str) -> nn.Module:
    if name == "flash":
        found = selector.get_backend(usable("FLASH_ATTN"))
        if not (found.library and found.library.paged):
            pytest.skip("needs a library that pages: VATTN_FLASH_ATTN_LIBRARY=path")
    torch.manual_seed(0)
    layer = LAYERS[name]()
    for buffer in (layer._buffers["kv_cache"],):
        buffer.copy_(torch.randn(buffer.shape, device=DEVICE))
    return layer


def builder_of(layer: nn.Module) -> vattn.AttentionMetadataBuilder:
    return vattn.AttentionMetadataBuilder(4, 512, WIDTH * BLOCK, layers=layer)


def engine_tensors(queries: list[int], lengths: list[int], num_tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Return a step's tensors with blocks in an order of their own, and unused entries that no cache has."""
    table = torch.randperm(4 * WIDTH, generator=torch.Generator().manual_seed(sum(lengths))).view(4, WIDTH) + 1
    starts, slots = [0], []
    for row, (count, length) in enumerate(zip(queries, lengths, strict=True)):
        starts.append(starts[-1] + count)
        for place in range(length - count, length):
            slots.append(int(table[row, place // BLOCK]) * BLOCK + place % BLOCK)
        table[row, -(-length // BLOCK) :] = -1
    slots += [-1] * (num_tokens - len(slots))
    found = torch.tensor(starts), torch.tensor(lengths), table, torch.tensor(slots)
    return [tensor.to(DEVICE, dtype) for tensor in found]


def host_step(
    builder: vattn.AttentionMetadataBuilder, queries: list[int], lengths: list[int], given: list[Tensor]
) -> Any:
    """Return the step that `build` makes of the same lengths, table and slots."""
    rows = [row[: -(-length // BLOCK)] for row, length in zip(given[2].tolist(), lengths, strict=True)]
    return builder.build(queries, lengths, rows, num_reqs_padded=4, num_tokens_padded=given[3].shape[0])


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("copy", [True, False], ids=["copied", "as given"])
def test_steps_equal_those_of_build_without_a_wait(name: str, kind: str, copy: bool) -> None:
    layer, (steps, num_tokens) = make_layer(name), STEPS[kind]
    builder, other, inputs = builder_of(layer), builder_of(layer), layer.inputs(num_tokens)
    with torch.no_grad():
        for dtype in (torch.int64, torch.int32):
            for queries, lengths in steps:
                given = engine_tensors(queries, lengths, num_tokens, dtype)
                expected_step = host_step(other, queries, lengths, given)
                expected = layer(*inputs, metadata=expected_step).clone()
                plans = {key: plan.clone() for key, plan in expected_step.plans.items()}
                layer(*inputs, metadata=builder.build_from_tensors(*given, copy=copy))  # kernels compile
                with no_sync():
                    step = builder.build_from_tensors(*given, copy=copy)
                    got = layer(*inputs, metadata=step)
                assert step.plans.keys() == plans.keys() and (plans or name in ("triton, float32", "flash"))
                assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("inside", [True, False], ids=["captured", "outside"])
def test_a_graph_runs_steps_of_other_values(name: str, kind: str, inside: bool) -> None:
    layer, (steps, num_tokens) = make_layer(name), STEPS[kind]
    builder, inputs = builder_of(layer), layer.inputs(num_tokens)
    static = engine_tensors(*steps[0], num_tokens, torch.int64)

    def run() -> Tensor:
        return layer(*inputs, metadata=builder.build_from_tensors(*static))

    with torch.no_grad():
        run()
        step = builder.build_from_tensors(*static)
        graph, captured = capture(run if inside else lambda: layer(*inputs, metadata=step))
        other = builder_of(layer)
        for queries, lengths in [*steps[::-1], steps[1]]:
            given = engine_tensors(queries, lengths, num_tokens, torch.int64)
            expected = layer(*inputs, metadata=host_step(other, queries, lengths, given))
            with no_sync():
                for tensor, values in zip(static, given, strict=True):
                    tensor.copy_(values)
                if not inside:
                    assert builder.build_from_tensors(*static).capture_key() == step.capture_key()
                graph.replay()
            assert relative_l2(captured, expected) < 1e-6


def test_a_runner_replays_steps_from_tensors() -> None:
    layer = make_layer("triton")
    builder, fixed = builder_of(layer), layer.inputs(4)
    inputs = lambda step: [tensor[: step.slot_mapping.shape[0]] for tensor in fixed]  # noqa: E731
    runner = vattn.CUDAGraphRunner(layer, [4], builder, inputs)
    other = builder_of(layer)
    with torch.no_grad():
        for queries, lengths in DECODES:
            given = engine_tensors(queries, lengths, 4, torch.int32)
            expected = layer(*fixed, metadata=host_step(other, queries, lengths, given))
            positions = torch.zeros(4, dtype=torch.int64, device=DEVICE)
            step = builder.build_from_tensors(*given, positions=positions)
            assert relative_l2(runner(*fixed, metadata=step), expected) < 1e-6
