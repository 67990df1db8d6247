"""FLASHINFER on a CUDA GPU against the reference.

What FlashInfer must compile first is marked long as well: `FLASHINFER_DISABLE_JIT= pytest -m gpu` lets it.
"""

from __future__ import annotations

import os

import pytest
import torch

import vattn
from tests.backends.test_flashinfer import plan_batch
from tests.conformance.cases import batch_of_row
from tests.conformance.compare import call, compare, on_cpu, run_and_compare
from tests.conformance.rows import BOTH_WAYS, CAP, DECODES, LONG, LSE, MIXED, SINKS, TREE, Row
from tests.support import Batch, capture, make_config, no_sync, usable
from vattn.backends import selector
from vattn.backends.flashinfer import plan as flashinfer_plan
from vattn.config.device import DeviceInfo
from vattn.errors import GraphContractError, UnsupportedRequestError

pytestmark = pytest.mark.gpu

BASE = {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "head_size": 128, "head_size_v": 128, "block_size": 16}
FP8 = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor"}
FP8_QUERY = {**FP8, "query_format": "fp8_e4m3", "query_scale": "tensor"}
XQA = {**FP8_QUERY, "block_size": 64, "num_heads": 8, "num_kv_heads": 2}
XQA_TOLERANCE = 2.0**-4
"""XQA rounds softmax weights to e4m3, each by half a step: at most 2^-4 of itself."""

# Planned; `tests/conformance` has calls without a plan.
ROWS: dict[str, Row] = {
    "plain": Row({}, MIXED),
    "decodes": Row({}, DECODES, padding=(0, 2)),
    "long": Row({}, LONG),
    "group": Row({"num_heads": 8, "num_kv_heads": 1}, MIXED),
    "block-8": Row({"block_size": 8}, MIXED),
    "block-48": Row({"block_size": 48}, LONG),
    "block-1": Row({"block_size": 1}, LONG),
    "block-528": Row({"block_size": 528}, ((1, 1100), (130, 700), (3, 3))),
    "block-2048": Row({"block_size": 2048}, ((1, 4100), (130, 2200), (3, 3))),
    "hnd": Row({"kv_cache_layout": "HND"}, MIXED),
    "both-ways": Row(BOTH_WAYS, MIXED),
    "sinks-lse": Row({**SINKS, **LSE}, MIXED),
    "lse": Row(LSE, MIXED),
    "fp8": Row(FP8, MIXED),
    "fp8-heads": Row({**FP8, "kv_scale": "head", **LSE}, LONG),
    "fp8-query": Row({**FP8_QUERY, **LSE}, MIXED),
    "fp8-query-heads": Row({**FP8_QUERY, "query_scale": "head", "kv_scale": "head"}, DECODES),
}
COMPILED: dict[str, Row] = {
    "window-cap": Row({"sliding_window": 37, **CAP}, LONG),
    "head-size-64": Row({"head_size": 64, "head_size_v": 64}, MIXED),
    "tree": Row({**TREE, **LSE}, MIXED),
    "tree, window": Row({**TREE, "sliding_window": 7}, LONG),
    "half": Row({"dtype": "float16", "kv_cache_dtype": "float16"}, MIXED),
}


@pytest.fixture(autouse=True)
def installed() -> None:
    usable("FLASHINFER")


def check(row: Row) -> None:
    changes = {**BASE, **row.changes}
    config = make_config(**{**changes, "backend": "FLASHINFER"})
    assert selector.get_backend("FLASHINFER").reasons(config, DeviceInfo.of("cuda")) == []
    batch = batch_of_row(Row(changes, row.lens, row.padding, row.table), "FLASHINFER", device="cuda", seed=3)
    assert run_and_compare(batch)


@pytest.mark.long
@pytest.mark.parametrize("name", COMPILED)
def test_rows_that_flashinfer_compiles_first(name: str) -> None:
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        pytest.skip("compiles a kernel: run with FLASHINFER_DISABLE_JIT=")
    check(COMPILED[name])


def test_a_kernel_that_is_not_built_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    config = make_config(**{**BASE, "logits_soft_cap": 11.0, "backend": "FLASHINFER"})
    reasons = selector.get_backend("FLASHINFER").reasons(config, DeviceInfo.of("cuda"))
    if reasons:
        assert "not built" in reasons[0]
        assert "flashinfer-jit-cache" in reasons[0]


def test_a_capture_without_a_plan_is_refused() -> None:
    batch = batch_of_row(Row(BASE, DECODES), "FLASHINFER", device="cuda", seed=5)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(GraphContractError, match="TRITON_ATTN"), torch.cuda.graph(graph):
        call(batch.args)


def test_the_device_does_not_plan() -> None:
    batch = batch_of_row(Row(BASE, DECODES), "FLASHINFER", device="cuda", seed=5)
    schedule = torch.zeros(8, dtype=torch.int32, device="cuda")
    with pytest.raises(UnsupportedRequestError, match="AttentionMetadataBuilder"):
        torch.ops.vattn.plan(batch.args.query_start_loc, batch.args.seq_lens, schedule, batch.args.config)


WIDE_PREFILL = Row(LSE, ((300, 300), (150, 420), (1, 77)), padding=(70, 1))
"""Wide enough for FlashInfer's kernels for Hopper."""


def plan(batch: Batch, schedule: torch.Tensor | None = None) -> Batch:
    """Plan a batch as a builder does; returns it with its plan."""
    batch.args = batch.args._replace(plan=plan_batch(batch, schedule))
    return batch


@pytest.mark.parametrize("name", [*ROWS, "wide prefill"])
def test_a_planned_call(name: str) -> None:
    row = ROWS.get(name, WIDE_PREFILL)
    changes = {**BASE, **row.changes}
    batch = plan(batch_of_row(Row(changes, row.lens, row.padding), "FLASHINFER", device="cuda", seed=3))
    assert run_and_compare(batch)


def test_xqa_runs_planned_decodes() -> None:
    for changes in (XQA, {**XQA, "kv_cache_layout": "HND"}):
        row = Row({**BASE, **changes}, ((1, 9), (1, 400), (1, 64), (1, 333), (1, 0)), padding=(0, 2))
        batch = plan(batch_of_row(row, "FLASHINFER", device="cuda", seed=4))
        assert flashinfer_plan._numbers[int(batch.args.plan[1][0])].family == "xqa"
        call(batch.args)
        result = on_cpu(batch)
        compare(result, *result.expected(), tolerance=XQA_TOLERANCE)


@pytest.mark.parametrize(
    "changes", [{}, {**FP8, "kv_scale": "head"}, {**SINKS, **LSE}, XQA], ids=["plain", "fp8", "sinks", "fp8 query"]
)
@pytest.mark.parametrize("lens", [DECODES, ((4, 150), (4, 19), (4, 4)), ((300, 310), (200, 200))])
def test_a_captured_call_is_replayed_with_other_lengths(lens, changes) -> None:
    padding = (0, 2) if changes is XQA else (3, 2)
    row = Row({**BASE, **changes}, lens, padding=padding)
    block, tolerance = row.changes["block_size"], XQA_TOLERANCE if changes is XQA else None
    batch = plan(batch_of_row(row, "FLASHINFER", device="cuda", seed=5))
    call(batch.args)
    graph, _ = capture(lambda: call(batch.args))
    for shift in (0, -3, 1):
        # The table has room up to the next block.
        seq_lens = [max(query, seq + min(shift, -seq % block)) if seq else 0 for query, seq in lens]
        batch.seq_lens = seq_lens
        batch.args.seq_lens[: len(lens)] = torch.tensor(seq_lens, dtype=torch.int32).cuda()
        if shift == 1:
            # Other blocks too: those that hold keys change places.
            for row, length in enumerate(seq_lens):
                used = -(-length // block)
                batch.args.block_table[row, :used] = batch.args.block_table[row, :used].flip(0)
        plan(batch, batch.args.plan[0])
        batch.args.output.fill_(float("nan"))
        with no_sync():
            graph.replay()
        torch.cuda.synchronize()
        result = on_cpu(batch)
        compare(result, *result.expected(), tolerance=tolerance)


@pytest.mark.parametrize("how", ["plain", "compiled"])
def test_a_model_in_graphs(how: str) -> None:
    """Two layers of one kind share a plan; batch sizes 1, 4 and 8 are captured and replayed beside eager calls."""
    torch._dynamo.reset()
    layers = torch.nn.ModuleList(
        vattn.Attention(8, 128, 128**-0.5, 2, attn_backend="FLASHINFER", prefix=f"layers.{i}") for i in range(2)
    )
    vattn.allocate_kv_cache(layers, num_blocks=64, dtype=torch.bfloat16, device="cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    for layer in layers:
        layer.kv_cache.copy_(torch.randn(layer.kv_cache.shape, device="cuda", generator=generator))

    def function(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            query = query + layer(query, key, value)
        return query

    def inputs(step: vattn.AttentionMetadata) -> list[torch.Tensor]:
        tokens = step.slot_mapping.shape[0]
        return [torch.zeros(tokens, heads * 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)]

    builder = vattn.AttentionMetadataBuilder(8, 16, 256, device="cuda", layers=layers)
    assert builder.host_planned == {"FLASHINFER"}
    run = vattn.compile(function) if how == "compiled" else function
    with torch.no_grad():
        runner = vattn.CUDAGraphRunner(run, [1, 4, 8], builder, inputs)
        eager = vattn.AttentionMetadataBuilder(8, 16, 256, device="cuda", num_blocks=64)
        for seq_lens in ([1, 9], [200, 17, 30], [40], [1, 2, 3, 4, 5, 6, 7, 250]):
            count = len(seq_lens)
            tables = torch.randperm(64)[: count * 16].view(-1, 16) if count <= 4 else torch.arange(128).view(8, 16) % 64
            slots = [-1] * count
            given = [torch.randn(count, heads * 128, device="cuda").bfloat16() for heads in (8, 2, 2)]
            with vattn.forward_context(eager.build([1] * count, seq_lens, tables, slot_mapping=slots)):
                want = function(*given)
            step = runner.build([1] * count, seq_lens, tables, slot_mapping=slots)
            got = runner(*given, metadata=step)
            assert (got.float() - want.float()).norm() <= 1e-2 * want.float().norm()
