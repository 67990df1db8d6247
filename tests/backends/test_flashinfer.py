"""FLASHINFER as data: what it accepts and refuses, and what it says where it cannot run."""

from __future__ import annotations

import os
from dataclasses import replace

import hypothesis
import pytest
import torch
from hypothesis import strategies

from tests.backends import fake_flashinfer
from tests.conformance.cases import batch_of_row
from tests.conformance.compare import compare
from tests.conformance.rows import BOTH_WAYS, CAP, CROSS, DECODES, ENCODED, LONG, LSE, MIXED, SINKS, TREE, Row
from tests.support import Batch, make_config, unchanged
from vattn.backends import selector
from vattn.backends.flashinfer import backend as flashinfer
from vattn.backends.flashinfer import jit as flashinfer_build
from vattn.backends.flashinfer import plan as flashinfer_plan
from vattn.cache.layout import key_value_views
from vattn.config.device import DeviceInfo
from vattn.errors import GraphContractError, MetadataError, MissingPackageError, UnsupportedRequestError
from vattn.metadata.builder import AttentionMetadataBuilder
from vattn.ops.arguments import HostPlanArgs

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")

HOPPER = DeviceInfo("cuda", (9, 0), "H")
PLAIN = make_config(
    dtype="bfloat16", kv_cache_dtype="bfloat16", head_size=128, head_size_v=128, block_size=16, backend="FLASHINFER"
)
FP8 = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor"}


def reasons(monkeypatch: pytest.MonkeyPatch, **changes: object) -> list[str]:
    backend = selector.get_backend("FLASHINFER")
    monkeypatch.setattr(type(backend), "problem", lambda self: None)
    monkeypatch.setattr(flashinfer, "can_compile", lambda: True)
    return backend.reasons(PLAIN.replace(**changes), HOPPER)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        FP8,
        {**FP8, "kv_scale": "head", "kv_cache_layout": "HND"},
        {"sliding_window": 100, "logits_soft_cap": 30.0, "sinks": True, "lse": True},
        {"causality": "bidirectional", "block_size": 0},
    ],
)
def test_accepts(changes, monkeypatch) -> None:
    assert reasons(monkeypatch, **changes) == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"head_size": 80, "head_size_v": 80}, "head_size 80 (runs 64, 128, 256)"),
        ({"causality": "bidirectional", "sliding_window": 9}, "windows reach only to the left"),
        ({**FP8, "block_size": 0}, "outside a paged cache"),
        ({"alibi": "linear"}, "alibi is not implemented"),
        ({"tree_bias": True, "block_size": 0}, "trees over keys and values outside a paged cache"),
        ({"output_format": "fp8_static"}, "output_format fp8_static"),
        ({"query_format": "fp8_e4m3", "query_scale": "tensor", "query_load": "divide"}, "query_load divide"),
    ],
)
def test_refuses(changes, why, monkeypatch) -> None:
    assert [reason for reason in reasons(monkeypatch, **changes) if why in reason]


def test_a_missing_package_is_named_with_its_extra(monkeypatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", _absent)
    assert "vattn[flashinfer]" in selector.get_backend("FLASHINFER").problem()


def _absent(name: str) -> str:
    import importlib.metadata

    raise importlib.metadata.PackageNotFoundError(name)


def test_without_a_compiler_or_ready_kernels_the_reason_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(flashinfer_build, "USUAL_HOME", "/nowhere")
    for variable in ("CUDA_HOME", "CUDA_PATH", "FLASHINFER_DISABLE_JIT"):
        monkeypatch.delenv(variable, raising=False)
    assert "flashinfer-jit-cache" in flashinfer_build.compiler_problem()


def test_nvcc_under_cuda_home_is_found(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert flashinfer_build.compiler_problem() is None


def test_a_kernel_that_is_neither_built_nor_can_be_is_refused(monkeypatch) -> None:
    backend = selector.get_backend("FLASHINFER")
    monkeypatch.setattr(type(backend), "problem", lambda self: None)
    monkeypatch.setattr(flashinfer, "can_compile", lambda: False)
    monkeypatch.setattr(flashinfer, "is_built", lambda config, family: family == "fa2")
    [reason] = backend.reasons(PLAIN, HOPPER)
    assert "fa3 kernel" in reason and "flashinfer-jit-cache" in reason
    assert backend.reasons(PLAIN.replace(**FP8), HOPPER) == []
    assert backend.reasons(PLAIN, DeviceInfo("cuda", (8, 0), "A")) == []


def test_without_a_compiler_the_capabilities_are_those_of_the_built_kernels(monkeypatch) -> None:
    monkeypatch.setattr(type(flashinfer.FLASHINFER.package), "problem", lambda self: None)
    monkeypatch.setattr(flashinfer, "can_compile", lambda: False)
    monkeypatch.setattr(flashinfer, "compiler_problem", lambda: None)
    monkeypatch.setattr(
        flashinfer,
        "is_built",
        lambda config, family: (
            (config.dtype, config.head_size, config.logits_soft_cap, config.tree_bias) == ("bfloat16", 128, None, False)
        ),
    )
    flashinfer._of_built_kernels.cache_clear()
    can = selector.get_backend("FLASHINFER").capabilities
    wide = PLAIN.replace(head_size=128, head_size_v=128)
    reasons = {
        name: selector.get_backend("FLASHINFER").reasons(config, HOPPER)
        for name, config in {
            "runs": wide,
            "not built": wide.replace(logits_soft_cap=30.0),
            "no kernel at all": wide.replace(logits_soft_cap=30.0, alibi="linear"),
        }.items()
    }
    flashinfer._of_built_kernels.cache_clear()
    assert reasons["runs"] == []
    assert reasons["no kernel at all"] == ["alibi is not implemented"]
    [missing] = reasons["not built"]
    assert "logits_soft_cap" in missing and "not built" in missing and "flashinfer-jit-cache" in missing
    assert (can.dtypes, can.head_sizes.values) == (("bfloat16",), (128,))
    assert can.kv_cache_dtypes == ("bfloat16", "fp8_e4m3")
    assert flashinfer.FLASHINFER.features - can.features == {"logits_soft_cap", "tree_bias"}


def test_a_build_that_fails_says_what_to_install() -> None:
    def fails() -> None:
        raise RuntimeError("Ninja build failed. Ninja output:\nnvcc: not found")

    with pytest.raises(MissingPackageError, match="CUDA toolkit"):
        flashinfer._building(PLAIN, fails)
    with pytest.raises(ValueError, match="q has"):
        flashinfer._building(PLAIN, lambda: (_ for _ in ()).throw(ValueError("q has 3 rows")))


# What surrounds FlashInfer's kernels, over a stand-in for them. `test_flashinfer_gpu` has the kernels.

WIDE = {"dtype": "float16", "kv_cache_dtype": "float16", "head_size": 64, "head_size_v": 64}
STORED = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"}
CALLS: dict[str, Row] = {
    "plain": Row({}, MIXED),
    "decodes": Row({}, DECODES, padding=(0, 2)),
    "no padding": Row({}, LONG, padding=(0, 0)),
    "all padding": Row(LSE, ((0, 0), (0, 5)), padding=(4, 1)),
    "hnd, window, cap": Row({"kv_cache_layout": "HND", "sliding_window": 5, **CAP, **LSE}, MIXED),
    "both ways": Row({**BOTH_WAYS, **LSE}, MIXED),
    "sinks": Row({**SINKS, **LSE}, MIXED),
    "fp8": Row({**STORED, **LSE}, MIXED),
    "cross": Row({**CROSS, **LSE}, ENCODED),
    "scale zero": Row({"scale": 0.0, **LSE}, MIXED),
    "scale negative": Row({"scale": -0.7, **LSE}, MIXED),
}
FP8_QUERY = {"query_format": "fp8_e4m3", "query_scale": "tensor", "kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor"}
CALLS |= {
    "fp8 query": Row({**FP8_QUERY, **LSE}, MIXED),
    "fp8 query, scales of heads": Row({**FP8_QUERY, "query_scale": "head", "kv_scale": "head"}, MIXED),
    "fp8 query, 16-bit cache": Row({"query_format": "fp8_e4m3", "query_scale": "tensor", **SINKS}, MIXED),
}
XQA = {**FP8_QUERY, "dtype": "bfloat16", "block_size": 16}
TREES: dict[str, Row] = {
    "tree": Row({**TREE, **LSE}, MIXED),
    "tree, window": Row({**TREE, "sliding_window": 3}, MIXED),
    "tree, decodes": Row({**TREE, **SINKS, **LSE}, DECODES),
}
PLANNED = {name: row for name, row in CALLS.items() if name != "cross"}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch)


def batch_of(row: Row) -> Batch:
    return batch_of_row(replace(row, changes={**WIDE, **row.changes}), "FLASHINFER", seed=3)


def cache_of(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = key_value_views(batch.args.key_cache, batch.args.value_cache, batch.config)
    hnd = batch.config.kv_cache_layout == "HND"
    return (key.transpose(1, 2), value.transpose(1, 2)) if hnd else (key, value)


@pytest.mark.parametrize("name", [*CALLS, *TREES])
def test_a_call_that_plans_for_itself(name: str, stand_in: None) -> None:
    batch = batch_of({**CALLS, **TREES}[name])
    flashinfer._attend_paged(batch.args, batch.config, cache_of(batch))
    compare(batch, *batch.expected())


def test_a_call_without_a_cache(stand_in: None) -> None:
    batch = batch_of(Row({"block_size": 0, **SINKS, **LSE}, MIXED))
    flashinfer.FlashInferBackend().varlen_attention(batch.args, batch.config)
    compare(batch, *batch.expected())


def test_a_tree_of_other_values_is_refused_before_anything_is_written(stand_in: None) -> None:
    batch = batch_of(TREES["tree"])
    batch.args.bias[0, 0, 0] = 0.5
    with unchanged(batch.args), pytest.raises(UnsupportedRequestError, match="0 and -inf"):
        flashinfer._attend_paged(batch.args, batch.config, cache_of(batch))


def plan_batch(batch: Batch, schedule: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Plan a batch as a builder does; returns the `plan` tensors."""
    args = batch.args
    shape = flashinfer.FlashInferBackend().plan_shape(batch.config, args.query.shape[0], *args.block_table.shape)
    if schedule is None:
        schedule = torch.full(shape, -7, dtype=torch.int32, device=args.query.device)
    schedule = schedule[: shape[0]]
    host_plan = torch.zeros(flashinfer_plan.NUMBERS, dtype=torch.int64)
    step = HostPlanArgs(
        query_lens=torch.tensor(batch.query_lens), kv_lens=torch.tensor(batch.seq_lens),
        query_start_loc=args.query_start_loc, seq_lens=args.seq_lens, block_table=args.block_table,
        num_tokens=args.query.shape[0], num_blocks=args.key_cache.shape[0], schedule=schedule, host_plan=host_plan,
    )  # fmt: skip
    flashinfer_plan.plan(step, batch.config)
    assert host_plan[0] > 0
    return [schedule, host_plan]


def attend_planned(batch: Batch, plan: list[torch.Tensor]) -> None:
    batch.args = batch.args._replace(plan=plan)
    found = flashinfer_plan.find(plan, batch.config, batch.args.query.shape[0], batch.args.block_table)
    assert found is not None
    flashinfer._attend_planned(batch.args, batch.config, found, cache_of(batch))


@pytest.mark.parametrize("name", PLANNED)
def test_a_planned_call(name: str, stand_in: None) -> None:
    batch = batch_of(PLANNED[name])
    attend_planned(batch, plan_batch(batch))
    compare(batch, *batch.expected())


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 9, "kv_cache_layout": "HND"}])
def test_a_planned_step_of_decodes_with_an_fp8_query_runs_on_xqa(changes, stand_in: None) -> None:
    batch = batch_of(Row({**XQA, **changes}, DECODES, padding=(0, 2)))
    plan = plan_batch(batch)
    assert flashinfer_plan._numbers[int(plan[1][0])].family == "xqa"
    attend_planned(batch, plan)
    compare(batch, *batch.expected())


@pytest.mark.parametrize(
    ("changes", "lens", "padding"),
    [
        (LSE, DECODES, (0, 0)),
        (SINKS, DECODES, (0, 0)),
        (CAP, DECODES, (0, 0)),
        ({"kv_scale": "head"}, DECODES, (0, 0)),
        ({"block_size": 24}, DECODES, (0, 0)),
        ({}, ((0, 9), (1, 7), (2, 40)), (0, 0)),
        ({}, DECODES, (3, 2)),
    ],
)
def test_xqa_takes_no_other_step(changes, lens, padding, stand_in: None) -> None:
    batch = batch_of(Row({**XQA, **changes}, lens, padding=padding))
    plan = plan_batch(batch)
    assert flashinfer_plan._numbers[int(plan[1][0])].family == "fa2"
    attend_planned(batch, plan)
    compare(batch, *batch.expected())


def test_captured_decodes_are_not_replayed_as_something_else(stand_in: None) -> None:
    batch = batch_of(Row(XQA, DECODES, padding=(0, 0)))
    plan = plan_batch(batch)
    other = replace(batch, query_lens=[2, 0, 1, 1, 1])
    assert flashinfer_plan._numbers[int(plan_batch(other, plan[0])[1][0])].family == "fa2"
    again = plan_batch(batch, plan[0])
    found = flashinfer_plan._numbers[int(again[1][0])]
    found.captured = found.launch()
    with pytest.raises(GraphContractError, match="fa2 kernels, and xqa was captured"):
        plan_batch(other, plan[0])


def test_a_plan_is_for_one_step_and_one_kind_of_layer(stand_in: None) -> None:
    batch = batch_of(PLANNED["plain"])
    plan = plan_batch(batch)
    tokens, table = batch.args.query.shape[0], batch.args.block_table
    for tensors, config, count in (
        (plan, batch.config.replace(scale=2.0), tokens),
        (plan, batch.config, tokens + 1),
        ([plan[0].clone(), plan[1]], batch.config, tokens),
        (plan[:1], batch.config, tokens),
        ([plan[0], plan[1] + 9], batch.config, tokens),
    ):
        with pytest.raises(MetadataError, match="AttentionMetadataBuilder"):
            flashinfer_plan.find(tensors, config, count, table)
    assert flashinfer_plan.find([], batch.config, tokens, table) is None
    plan[1].zero_()
    assert flashinfer_plan.find(plan, batch.config, tokens, table) is None


def test_a_launch_that_differs_from_the_captured_one_is_refused(stand_in: None) -> None:
    batch = batch_of(PLANNED["plain"])
    plan = plan_batch(batch)
    found = flashinfer_plan.find(plan, batch.config, batch.args.query.shape[0], batch.args.block_table)
    found.captured = found.launch()
    assert plan_batch(batch, plan[0])[1].equal(plan[1])
    found.captured = (0,)
    with pytest.raises(GraphContractError, match="capture again"):
        plan_batch(batch, plan[0])


def test_plans_that_no_graph_needs_are_forgotten(stand_in: None) -> None:
    schedule = torch.zeros(1 << 22, dtype=torch.int32)
    batch = batch_of(PLANNED["plain"])
    kept = plan_batch(batch, schedule)
    first = flashinfer_plan._numbers[int(kept[1][0])]
    first.captured = first.launch()
    for padding in range(flashinfer_plan._KEPT + 5):
        plan_batch(batch_of(Row({}, DECODES, padding=(padding, 2))), schedule)
    assert len(flashinfer_plan._plans) == len(flashinfer_plan._numbers) == flashinfer_plan._KEPT + 1
    assert first.number in flashinfer_plan._numbers


def test_the_schedule_of_a_small_step_fits_into_that_of_the_largest() -> None:
    largest = flashinfer_plan.sections(64, 8, 20)
    for tokens, reqs in ((64, 8), (1, 2), (33, 8), (64, 2)):
        small = flashinfer_plan.sections(tokens, reqs, 20)
        assert small.size <= largest.size
        assert all(start % 4 == 0 for start in small)


def test_the_builder_plans_once_a_step(stand_in: None, monkeypatch) -> None:
    backend = selector.get_backend("FLASHINFER")
    monkeypatch.setattr(type(backend), "reasons", lambda self, config, device: [])
    monkeypatch.setattr(type(backend), "plan_on_host", lambda self, args, config: flashinfer_plan.plan(args, config))
    selector.forget_decisions()
    row = batch_of(PLANNED["plain"])
    builder = AttentionMetadataBuilder(6, 32, 64, 8, layers=[row.config] * 3, num_blocks=row.args.key_cache.shape[0])
    assert builder.host_planned == {"FLASHINFER"}
    for lens in (((1, 26), (5, 5)), ((1, 9), (1, 40), (1, 1)), ((3, 3),)):
        query_lens, seq_lens = zip(*lens, strict=True)
        tables = [list(range(8)) for _ in lens]
        rows = sum(query_lens)  # of requests that read the same blocks, and store nothing
        step = builder.build(query_lens, seq_lens, tables, slot_mapping=[-1] * rows, num_tokens_padded=rows + 2)
        names = [name for name in step.plans if "FLASHINFER" in name]
        plans = [step.plans[name] for name in names]
        assert len(names) == 2 and plans[1].device.type == "cpu"
        query = torch.randn(step.slot_mapping.shape[0], 4, 64).half()
        output = torch.full_like(query, torch.nan)
        args = row.args._replace(
            query=query, output=output, query_start_loc=step.query_start_loc, seq_lens=step.seq_lens,
            block_table=step.block_table, plan=plans,
        )  # fmt: skip
        batch = replace(row, args=args, query_lens=list(query_lens), seq_lens=list(seq_lens))
        attend_planned(batch, plans)
        compare(batch, *batch.expected())
    changed = builder.build([2], [2], [[0]], causal=False)
    assert changed.plans[names[1]].tolist() == [0]
    assert builder.build([2], [2]).plans == {}
    selector.forget_decisions()


@hypothesis.given(
    lens=strategies.lists(
        strategies.tuples(strategies.integers(0, 6), strategies.integers(0, 50)), min_size=1, max_size=6
    ),
    padding=strategies.tuples(strategies.integers(0, 4), strategies.integers(0, 3)),
    changes=strategies.fixed_dictionaries(
        {
            "block_size": strategies.sampled_from((8, 16, 24)),
            "kv_cache_layout": strategies.sampled_from(("NHD", "HND")),
            "sliding_window": strategies.sampled_from((None, 1, 7)),
            "sinks": strategies.booleans(),
            "lse": strategies.booleans(),
            "causality": strategies.sampled_from(("causal", "bidirectional")),
        }
    ),
)
@hypothesis.settings(max_examples=25)
def test_planned_and_unplanned_calls_of_random_steps(lens, padding, changes) -> None:
    if changes["causality"] == "bidirectional":
        changes = {**changes, "sliding_window": None}
    hypothesis.assume(sum(query for query, _ in lens) + padding[0] > 0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        fake_flashinfer.install(monkeypatch)
        batch = batch_of(Row(changes, tuple(lens), padding=padding))
        flashinfer._attend_paged(batch.args, batch.config, cache_of(batch))
        compare(batch, *batch.expected())
        batch.args.output.fill_(torch.nan)
        attend_planned(batch, plan_batch(batch))
        compare(batch, *batch.expected())
