"""`advance_step` on a CUDA GPU: eight decode steps in one CUDA graph on every backend that captures."""

from __future__ import annotations

import pytest
import torch

import vattn
from tests.metadata.flash_steps import (
    BLOCK,
    TABLES,
    Greedy,
    builder_for,
    decode_steps,
    prefill,
    run_in_order,
    single_steps,
)
from tests.metadata.test_flash_attn_metadata import LENGTHS, PROMPTS, STEP
from tests.support import capture, usable
from vattn.backends import selector

pytestmark = pytest.mark.gpu

STEPS, ROWS = 8, 5


@pytest.fixture(params=["FLASH_ATTN", "TRITON_ATTN"])
def backend(request: pytest.FixtureRequest) -> str:
    found = selector.get_backend(usable(request.param))
    if request.param == "FLASH_ATTN" and not (found.library and found.library.paged):
        pytest.skip("needs a library that pages: VATTN_FLASH_ATTN_LIBRARY=path")
    return request.param


@pytest.mark.parametrize("width", [64, 128])
def test_eight_steps_in_one_graph_equal_eight_single_steps(backend: str, width: int) -> None:
    with torch.no_grad():
        model = Greedy(backend, torch.bfloat16, "cuda", width)
        first = prefill(model, PROMPTS)
        expected = single_steps(model, LENGTHS, first, STEPS, batch_size=ROWS)
        caches = [layer.kv_cache.clone() for layer in model.layers]
        builder = builder_for(model)
        inputs, found, graph, key = captured(model, builder)
        for layer in model.layers:
            layer.kv_cache.zero_()
        prefill(model, PROMPTS)
        # Fewer requests than the graph was captured for, then only two of them.
        for real in (3, 2):
            step = builder.build(
                [1] * real,
                [length + 1 for length in LENGTHS[:real]],
                TABLES[:real],
                batch_size=ROWS,
                num_lookahead_slots=STEPS - 1,
                capture_key=key,
            )
            inputs.input_tokens[:real] = torch.tensor(first[:real], device="cuda")
            graph.replay()
            assert found[:, :real].tolist() == [tokens[:real] for tokens in expected]
            assert step.seq_lens_tensor.tolist() == [n + STEPS for n in LENGTHS[:real]] + [0] * (ROWS - real)
            assert step.slot_mapping[real:].tolist() == [-1] * (ROWS - real)
            for layer, cache in zip(model.layers, caches, strict=True):
                for table, length in zip(TABLES, LENGTHS, strict=True):
                    rows = layer.kv_cache[:, table].flatten(1, 2)[:, : length + STEPS]
                    assert torch.equal(rows, cache[:, table].flatten(1, 2)[:, : length + STEPS])


def captured(model: Greedy, builder: vattn.FlashAttentionMetadataBuilder):
    """Capture eight steps of five requests; return the inputs, the tokens, the graph and the step's key."""

    def start() -> vattn.FlashAttentionMetadata:
        tables = [[60 - 4 * row + column for column in range(4)] for row in range(ROWS)]
        return builder.build([1] * ROWS, [9] * ROWS, tables, batch_size=ROWS, num_lookahead_slots=STEPS - 1)

    step = start()
    inputs = vattn.DecodeInput(torch.zeros(ROWS, dtype=torch.int64, device="cuda"), step.common.positions)
    found = torch.zeros(STEPS, ROWS, dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        decode_steps(model, step, inputs, ROWS, ROWS, found)
    torch.cuda.current_stream().wait_stream(stream)
    step = start()
    graph, _ = capture(lambda: decode_steps(model, step, inputs, ROWS, ROWS, found))
    return inputs, found, graph, step.common.capture_key()


def test_both_orders_of_tokens_give_equal_outputs(backend: str) -> None:
    model, tokens = Greedy(backend, torch.bfloat16, "cuda", 64), torch.arange(sum(STEP[0]), device="cuda")
    found = [run_in_order(model, tokens, STEP, first) for first in ("prefill", "decode")]
    # Two layers and products in bf16 on both sides.
    torch.testing.assert_close(*found, rtol=2**-6, atol=2**-5)


def test_turning_prefills_makes_schedules_of_the_new_size(backend: str) -> None:
    """Prompts and a decode, then all of them decode: the same tokens as with the second step built on the host."""
    with torch.no_grad():
        model = Greedy(backend, torch.bfloat16, "cuda", 128)
        lengths = [5, 3, 30]
        tokens, found = torch.arange(9, device="cuda"), []
        for turn in (True, False):
            builder = builder_for(model)
            step = builder.build([5, 3, 1], lengths, TABLES, num_lookahead_slots=1)
            with vattn.forward_context(step.common):
                logits = model(tokens, step.common.positions)
            sampled = logits[[4, 7, 8]].argmax(-1)
            inputs = vattn.DecodeInput(torch.zeros(3, dtype=torch.int64, device="cuda"), torch.zeros(3).long().cuda())
            if turn:
                step.advance_step(inputs, sampled, BLOCK, 3, 3, turn_prefills_into_decodes=True)
            else:
                step = builder.build([1, 1, 1], [length + 1 for length in lengths], TABLES)
                inputs = vattn.DecodeInput(sampled, step.common.positions)
            with vattn.forward_context(step.common):
                found.append(model(inputs.input_tokens, inputs.input_positions).argmax(-1).tolist())
        assert found[0] == found[1]
