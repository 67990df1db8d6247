"""Lengths, offsets, block tables and slots in int64 or int32 give the same results, without a sync or a new graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import vattn
from tests.conformance.cases import batch_of_row, make_cache_update
from tests.conformance.rows import ROWS
from tests.layers.mla_support import make_mla_config, random_mla_batch
from tests.support import make_config, no_sync, usable
from vattn.ops.index_dtypes import as_int32

INDICES = ("query_start_loc", "kv_start_loc", "seq_lens", "block_table")


def widened(args: Any, beyond: bool = False) -> Any:
    """Return arguments with int64 indices; `beyond`: ids that name no block lie outside of int32."""
    found = {name: getattr(args, name).long() for name in INDICES if hasattr(args, name)}
    if beyond:
        table, blocks = found["block_table"], args.key_cache.shape[0]
        found["block_table"] = torch.where((table < 0) | (table >= blocks), 2**32 + 1, table)
    return args._replace(**found)


@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "TORCH_SDPA"), ("cpu", "TRITON_ATTN"), pytest.param("cuda", "TRITON_ATTN", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("row", ["plain", "broken-table", "packed+window+flags+lse"])
def test_attention_of_int64_indices(row: str, backend: str, device: str) -> None:
    wanted, given = (batch_of_row(ROWS[row], usable(backend), seed=3, device=device) for _ in range(2))
    given.args = widened(given.args, beyond=row == "broken-table")
    for batch in (wanted, given):
        batch.run()
    assert torch.equal(given.output(), wanted.output())


@pytest.mark.parametrize("kv", ["float32", "int8_per_token_head"])
@pytest.mark.parametrize("backend", ["TORCH_SDPA", "TRITON_ATTN"])
def test_cache_updates_of_int32_slots(backend: str, kv: str) -> None:
    config = make_config(kv_cache_dtype=kv, backend=usable(backend))
    wanted, given = make_cache_update(config), make_cache_update(config)
    slots = wanted.slot_mapping.clamp(-1, 2**30)
    torch.ops.vattn.kv_cache_update(*wanted._replace(slot_mapping=slots))
    torch.ops.vattn.kv_cache_update(*given._replace(slot_mapping=slots.int()))
    assert torch.equal(given.key_cache.view(torch.uint8), wanted.key_cache.view(torch.uint8))


@pytest.mark.parametrize("backend", ["TORCH_MLA", "TRITON_MLA"])
def test_latent_attention_of_int64_indices(backend: str) -> None:
    batches = [random_mla_batch(make_mla_config(backend=backend), [1, 4, 0], [9, 21, 3]) for _ in range(2)]
    batches[1] = widened(batches[1])
    for args in batches:
        torch.ops.vattn.mla_attention(*args)
    assert torch.equal(batches[1].output, batches[0].output)


def test_what_int32_cannot_hold_stays_out_of_range() -> None:
    found = as_int32(torch.tensor([2**32 + 5, -(2**40), 7]))
    assert found.tolist() == [2**31 - 1, -(2**31), 7] and found.dtype == torch.int32
    assert as_int32(found) is found


class Model(nn.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            vattn.Attention(num_heads=4, head_size=16, scale=0.25, num_kv_heads=2, prefix=str(index))
            for index in range(3)
        )
        vattn.allocate_kv_cache(self, num_blocks=40, device=device, dtype=torch.float32)

    def forward(self, x: Tensor, step: vattn.AttentionMetadata) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, x[:, :32], x[:, 32:], metadata=step)
        return x


def indices_of(step: vattn.AttentionMetadata) -> list[Tensor]:
    """Return the tensors of a step by hand in the dtypes that builders do not make."""
    return [step.query_start_loc.long(), step.seq_lens.long(), step.block_table.long(), step.slot_mapping.int()]


STEPS = (([5, 3], [5, 9]), ([4, 4], [4, 20]), ([7, 1], [30, 17]))


@pytest.mark.slow
def test_compiled_layers_convert_in_one_kernel_of_one_graph() -> None:
    model = Model()
    builder = vattn.AttentionMetadataBuilder(4, 32, 64, layers=model)
    torch._dynamo.reset()
    compiled, x = torch.compile(model, fullgraph=True), torch.randn(8, 64)
    with torch.no_grad():
        for index, (query_lens, seq_lens) in enumerate(STEPS):
            step = builder.build(query_lens, seq_lens, [[3, 4], [9, 8]])
            expected = model(x, step)
            by_hand = vattn.AttentionMetadata(*indices_of(step))
            by_hand.check(16, 40)
            assert torch.equal(model(x, by_hand), expected)
            if index == 0:
                result, codes = run_and_get_code(compiled, x, by_hand)
                narrowing = [line for line in codes[0].splitlines() if "_pybinding(['const int64_t*" in line]
                assert len(narrowing) == len(codes) == 1
            else:
                with torch.compiler.set_stance("fail_on_recompile"):
                    result = compiled(x, by_hand)
            assert torch.equal(result, expected)


@pytest.mark.gpu
def test_a_graph_reads_int64_indices_at_each_replay_without_a_sync() -> None:
    model = Model("cuda")
    builder = vattn.AttentionMetadataBuilder(4, 32, 64, layers=model)
    held = indices_of(builder.build(*STEPS[0], [[3, 4], [9, 8]]))
    by_hand, x = vattn.AttentionMetadata(*held), torch.randn(8, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        with no_sync():
            model(x, by_hand)
        with torch.cuda.graph(graph):
            result = model(x, by_hand)
        for query_lens, seq_lens in STEPS:
            step = builder.build(query_lens, seq_lens, [[3, 4], [9, 8]])
            for tensor, new in zip(held, indices_of(step), strict=True):
                tensor.copy_(new)
            graph.replay()
            expected = model(x, step)
            assert (result - expected).norm() <= 1e-5 * expected.norm()
