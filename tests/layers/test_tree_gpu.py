"""Trees of drafts on a CUDA GPU: branches against attention on the branch alone, and steps in CUDA graphs."""

from __future__ import annotations

import pytest
import torch

import vattn
from tests.compile.toy_models import BLOCK, Model, fill_caches, make_model
from tests.metadata.tree_cases import SIX, TREES, TWENTY, TreeBatch
from tests.support import capture, no_sync
from vattn.metadata.token_tree import TokenTree

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo", "no_grad")]

CLOSE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 2e-6}
"""Relative L2 of a branch: half an eighth bit of weights and of the result; other orders of sums in fp32."""

OTHER_SIX = TokenTree.merge([[1, 2, 3], [4, 5], [6]])[0]


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("context", [16, 300, 2048])
@pytest.mark.parametrize("batch", [1, 5, 32])
def test_every_branch_equals_attention_on_the_branch(batch: int, context: int, name: str) -> None:
    case = TreeBatch([(context + row, TREES[name]) for row in range(batch)], "TREE_ATTN", "cuda", torch.bfloat16)
    case.check(case.run(), CLOSE[torch.bfloat16])


@pytest.mark.parametrize("dtype", CLOSE)
def test_trees_prefills_decodes_and_extends_in_one_batch(dtype: torch.dtype) -> None:
    requests = [(300, SIX), (0, 370), (41, 1), (170, 3), (16, TWENTY), (48, 7), (5, TokenTree.chain(2)), (1900, 21)]
    case = TreeBatch(requests, "TREE_ATTN", "cuda", dtype)
    case.check(case.run(), CLOSE[dtype])


def test_fp8_cache_and_quantised_output() -> None:
    quant = vattn.QuantConfig(k_scale=0.02, v_scale=0.02)
    options = {"cache_config": vattn.CacheConfig(cache_dtype="fp8"), "quant_config": quant}
    requests = [(300, SIX), (41, 1), (170, 3), (16, TWENTY)]
    case = TreeBatch(requests, "TREE_ATTN", "cuda", torch.bfloat16, **options)
    other = TreeBatch(requests, "TORCH_SDPA", "cuda", torch.bfloat16, **options)
    for got, want in zip(case.run(), other.run(), strict=True):
        assert (got.float() - want.float()).norm() <= 2e-2 * want.float().norm()


def tree_builder(model: Model) -> vattn.TreeAttentionMetadataBuilder:
    return vattn.TreeAttentionMetadataBuilder(8, 64, 512, BLOCK, "cuda", layers=model, tree_choices=SIX)


STEPS = [
    ([57, 300], [[1, 2, 3, 4], list(range(20, 40))], [SIX, OTHER_SIX]),
    ([400, 8, 7], [list(range(40, 65)), [9], [3]], [None, OTHER_SIX, SIX]),
    ([17], [[30, 31]], [SIX]),
    ([33, 34, 35, 36], [[n, n + 20, n + 40] for n in range(1, 5)], [OTHER_SIX] * 4),
]
"""Lengths, blocks and trees of steps with 7 new tokens per request."""


@pytest.mark.parametrize("how", ["plain", "compiled"])
def test_captured_tree_steps_follow_lengths_tables_and_trees(how: str) -> None:
    model = make_model(2, device="cuda", dtype=torch.float16, width=256, attn_backend="TREE_ATTN")
    runner = vattn.CUDAGraphRunner(
        model if how == "plain" else vattn.compile(model),
        [1, 4],
        tree_builder(model),
        lambda step: [torch.zeros_like(step.slot_mapping)],
        tokens_per_request=7,
        step_options=lambda size: {"trees": [SIX] * size},
    )
    assert runner.report.reason is None and len(runner.report.costs) == 2
    for lengths, tables, trees in STEPS:
        counts = [7] * len(lengths)
        ids = torch.arange(sum(counts), device="cuda") * 5 % 64
        fill_caches(model)
        step = tree_builder(model).build(counts, lengths, tables, trees=trees)
        with vattn.forward_context(step):
            want = model(ids)
        fill_caches(model)
        got = runner(ids, metadata=runner.build(counts, lengths, tables, trees=trees))
        assert (got.double() - want.double()).norm() <= 4e-3 * want.double().norm()


def test_a_step_and_moving_its_slots_wait_for_nothing() -> None:
    case = TreeBatch([(300, SIX), (41, 1)], "TREE_ATTN", "cuda", torch.bfloat16)
    step = case.step()
    inputs = case.inputs()
    source, target = step.slot_mapping[3:5].clone(), step.slot_mapping[1:3].clone()
    case.layer(*inputs, metadata=step)
    vattn.move_slots(case.layer, source, target)
    with no_sync():
        case.layer(*inputs, metadata=step)
        vattn.move_slots(case.layer, source, target)


def test_drafting_captures() -> None:
    case = TreeBatch([(21, 6), (34, 6)], "TREE_ATTN", "cuda", torch.bfloat16)
    builder = case.builder(tree_choices=SIX, max_tree_nodes=6)
    common = builder.build(case.counts, case.lengths, case.tables, trees=[None, None])
    step, inputs = builder.build_for_drafting(common, 2), case.inputs()
    case.layer(*inputs, metadata=step)
    graph, out = capture(lambda: case.layer(*inputs, metadata=builder.build_for_drafting(common, 2)))
    out.fill_(float("nan"))
    graph.replay()
    outputs = list(out.unflatten(1, (4, 32)).split(case.counts))
    for row in range(2):
        for rows in ([0, 2], [0, 3], [1, 4], [1, 5]):
            want = case.expected(row, rows)
            assert (outputs[row][rows].float() - want).norm() <= CLOSE[torch.bfloat16] * want.norm()
