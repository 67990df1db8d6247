"""Builder and layer over vLLM's own cache views and steps, against dense attention in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.vllm.engine_parts import (
    LAYOUTS,
    NUM_BLOCKS,
    FullAttentionSpec,
    Layer,
    cache_views,
    dense_attention,
    engine_config,
    step_of,
)
from vattn.errors import UnsupportedRequestError
from vattn.integrations.vllm.builder import VattnMetadataBuilder
from vattn.integrations.vllm.impl import VattnImpl

BLOCK_SIZE, HEADS, KV_HEADS, HEAD_SIZE = 16, 4, 2, 32

REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 9},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "soft cap": {"logits_soft_cap": 2.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "alibi sqrt": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625], "use_alibi_sqrt": True},
}


class Engine:
    """Two layers, one of which runs, and the prompts and answers that a test steps through."""

    def __init__(
        self,
        layout: str = LAYOUTS[0],
        kv_cache_dtype: str = "auto",
        scales: tuple[Any, Any] = (1.0, 1.0),
        **request: Any,
    ) -> None:
        torch.manual_seed(0)
        self.request = {"scale": 0.2, **request}
        self.impl = VattnImpl(
            HEADS, HEAD_SIZE, self.request["scale"], KV_HEADS, kv_cache_dtype=kv_cache_dtype, **request
        )
        self.layer = Layer(self.impl, torch.float32, HEAD_SIZE, *map(torch.tensor, scales))
        self.fp8 = kv_cache_dtype != "auto"
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE,
            num_kv_heads=KV_HEADS,
            head_size=HEAD_SIZE,
            dtype=torch.uint8 if self.fp8 else torch.float32,
        )
        self.caches = cache_views(spec, layout)
        config = engine_config({"layer.1": self.layer})
        self.builder = VattnMetadataBuilder(spec, ["layer.1"], config, torch.device("cpu"))
        self.tables = torch.full((3, 4), -1, dtype=torch.int32)
        self.tables[:, :3] = (torch.randperm(NUM_BLOCKS - 1)[:9] + 1).view(3, 3)
        self.keys: list[Tensor] = [torch.empty(0, KV_HEADS, HEAD_SIZE) for _ in range(3)]
        self.values = list(self.keys)

    def stored(self, rows: Tensor, scale: Tensor) -> Tensor:
        """Return what a cache keeps of rows."""
        if not self.fp8:
            return rows
        by_head = scale.view(-1, 1) if scale.dim() else scale
        return (rows / by_head).to(torch.float8_e4m3fn).float() * by_head

    def run(self, query_lens: list[int], padding: int = 0, output_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run a step over new tokens; return its rows and what dense attention gives for them."""
        rows = sum(query_lens) + padding
        query = torch.randn(rows, HEADS, HEAD_SIZE)
        key, value = (3 * torch.randn(rows, KV_HEADS, HEAD_SIZE) for _ in range(2))
        expected, begin = [], 0
        for index, count in enumerate(query_lens):
            new = slice(begin, begin + count)
            self.keys[index] = torch.cat([self.keys[index], self.stored(key[new], self.layer._k_scale)])
            self.values[index] = torch.cat([self.values[index], self.stored(value[new], self.layer._v_scale)])
            expected.append(dense_attention(query[new], self.keys[index], self.values[index], self.request))
            begin += count
        seq_lens = [len(keys) for keys in self.keys]
        step = step_of(query_lens, seq_lens, self.tables, BLOCK_SIZE, padding)
        metadata = self.builder.build(0, step)
        output = torch.full((rows, HEADS, HEAD_SIZE), float("nan"))
        if output_scale is not None:
            output = output.to(torch.float8_e4m3fn)
        cache = self.caches[1]
        self.impl.do_kv_cache_update(self.layer, key, value, cache, metadata.slot_mapping)
        result = self.impl.forward(self.layer, query, key, value, cache, metadata, output, output_scale)
        assert result is output
        return output[:begin], torch.cat(expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prompts_chunks_and_decodes_are_right_in_every_order_of_memory(layout: str) -> None:
    engine = Engine(layout)
    for query_lens in ([20, 7, 1], [1, 9, 1], [1, 1, 1]):
        rows, expected = engine.run(query_lens)
        torch.testing.assert_close(rows.double(), expected, rtol=0, atol=1e-5)
    assert not engine.caches[0].count_nonzero(), "the other layer's memory"
    used = {int(block) for block in engine.tables.unique()}
    rest = [block for block in range(NUM_BLOCKS) if block not in used]
    assert not engine.caches[1][rest].count_nonzero(), "blocks of no request"


@pytest.mark.parametrize("name", REQUESTS)
def test_masks_and_scores_are_right(name: str) -> None:
    engine = Engine(**REQUESTS[name])
    for query_lens in ([20, 7, 1], [1, 9, 1], [1, 1, 1]):
        rows, expected = engine.run(query_lens)
        torch.testing.assert_close(rows.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scales", [(0.05, 0.02), ([0.05, 0.1], [0.02, 0.04])], ids=["one", "per head"])
def test_an_fp8_cache_takes_the_engines_scales(scales: Any) -> None:
    engine = Engine(kv_cache_dtype="fp8", scales=scales)
    for query_lens in ([20, 7, 1], [1, 1, 1]):
        rows, expected = engine.run(query_lens)
        torch.testing.assert_close(rows.double(), expected, rtol=0, atol=1e-5)


def test_rows_of_padding_are_left_out_of_cache_and_requests() -> None:
    engine = Engine()
    engine.run([20, 7, 1])
    before = engine.caches[1].clone()
    rows, expected = engine.run([1, 1, 1], padding=5)
    torch.testing.assert_close(rows.double(), expected, rtol=0, atol=1e-5)
    changed = (engine.caches[1] != before).flatten(1).any(1).sum()
    assert changed <= 3


def test_an_output_in_fp8_is_the_plain_one_divided_by_its_scale() -> None:
    scale = torch.tensor(0.01)
    plain, _ = Engine().run([20, 7, 1])
    codes, _ = Engine().run([20, 7, 1], output_scale=scale)
    expected = (plain / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))


def test_another_block_table_for_the_same_step() -> None:
    engine = Engine()
    engine.run([20, 7, 1])
    step = step_of([1, 1, 1], [21, 8, 2], engine.tables, BLOCK_SIZE)
    metadata = engine.builder.build(0, step)
    table, slots = engine.tables.flip(0), torch.tensor([1, 2, 3, -1])
    other = engine.builder.update_block_table(metadata, table, slots)
    assert other.block_table is table and other.plans is metadata.plans
    assert other.slot_mapping.data_ptr() == slots.data_ptr() and other.slot_mapping.shape == (3,)
    assert metadata.block_table is step.block_table_tensor


def test_slots_of_padding_that_the_step_does_not_count_are_left_out() -> None:
    engine = Engine()
    step = step_of([1, 1, 1], [21, 8, 2], engine.tables, BLOCK_SIZE, padding=5)
    metadata = engine.builder.build(0, step.replace(num_actual_tokens=3))
    assert metadata.slot_mapping.tolist() == step.slot_mapping[:3].tolist() and metadata.num_actual_tokens == 3


def test_the_run_that_measures_memory_gives_zeros() -> None:
    impl, output = VattnImpl(HEADS, HEAD_SIZE, 0.2, KV_HEADS), torch.ones(3, HEADS, HEAD_SIZE)
    assert not impl.forward(None, output, output, output, torch.tensor([]), None, output).count_nonzero()


@pytest.mark.parametrize(
    "changed", [{"causal": False}, {"causal": torch.ones(1)}, {"mm_req_doc_ranges": {0: [(0, 1)]}}]
)
def test_steps_with_other_masks_are_refused(changed: dict[str, Any]) -> None:
    engine = Engine()
    step = step_of([1], [1], engine.tables[:1], BLOCK_SIZE).replace(**changed)
    with pytest.raises(UnsupportedRequestError, match=next(iter(changed))):
        engine.builder.build(0, step)


def test_block_scales_are_refused() -> None:
    engine = Engine()
    metadata = engine.builder.build(0, step_of([1], [1], engine.tables[:1], BLOCK_SIZE))
    rows = torch.zeros(1, HEADS, HEAD_SIZE)
    with pytest.raises(UnsupportedRequestError, match="block scales"):
        engine.impl.forward(
            engine.layer, rows, rows, rows, engine.caches[1], metadata, rows, torch.ones(()), torch.ones(1)
        )
