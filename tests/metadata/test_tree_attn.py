"""Steps with trees of drafts: every branch equals attention on the branch alone, beside prefills and decodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vattn
from tests.metadata.tree_cases import BLOCK, HEADS, SIX, SIZE, TREES, TWENTY, TreeBatch, random_trees
from tests.support import make_config, unchanged, usable
from vattn.backends import selector
from vattn.errors import MetadataError, UnsupportedRequestError
from vattn.metadata.token_tree import TokenTree
from vattn.quantization.codecs import dequantise_output

BACKENDS = ["TORCH_SDPA", "TREE_ATTN"]
CLOSE = 2e-6
"""Relative L2 in fp32: other orders of sums over up to 2000 keys."""

SMALL = [(20, SIX), (0, 18), (9, 1), (17, 3), (2, TokenTree.chain(2))]
"""The same kinds, for kernels that may be interpreted."""

MIXED = [(30, SIX), (0, 37), (41, 1), (17, 3), (16, TWENTY), (48, 7), (5, TokenTree.chain(2)), (19, 21)]
"""Trees, a prefill, a decode, a short extend, and extends of exactly as many tokens as the trees have rows."""


@pytest.mark.parametrize(("name", "backend"), [("six", "TORCH_SDPA"), ("six", "TREE_ATTN"), ("twenty", "TREE_ATTN")])
@pytest.mark.parametrize(("batch", "context"), [(1, 16), pytest.param(3, 47, marks=pytest.mark.long)])
def test_every_branch_equals_attention_on_the_branch(name: str, batch: int, context: int, backend: str) -> None:
    requests = [(context + 7 * row, TREES[name]) for row in range(batch)]
    case = TreeBatch(requests, usable(backend), seed=context)
    case.check(case.run(), CLOSE)


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize(("batch", "context"), [(1, 2048), (16, 16)])
def test_large_batches_and_contexts(name: str, batch: int, context: int) -> None:
    case = TreeBatch([(context + row, TREES[name]) for row in range(batch)], "TORCH_SDPA", seed=batch)
    case.check(case.run(), CLOSE)


@pytest.mark.parametrize(("backend", "requests"), [("TORCH_SDPA", MIXED[::-1]), ("TREE_ATTN", SMALL)])
def test_trees_prefills_decodes_and_extends_in_one_batch(backend: str, requests: list[tuple[int, Any]]) -> None:
    """In any order."""
    case = TreeBatch(requests, usable(backend))
    case.check(case.run(), CLOSE)


@settings(max_examples=20, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 40), st.one_of(random_trees(), st.integers(1, 9))), min_size=1, max_size=4
    )
)
def test_random_trees(requests: list[tuple[int, Any]]) -> None:
    case = TreeBatch(requests, "TORCH_SDPA")
    case.check(case.run(), CLOSE)


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(tree=random_trees(), context=st.integers(0, 40), extend=st.integers(1, 9))
def test_random_trees_in_the_kernels(tree: TokenTree, context: int, extend: int) -> None:
    case = TreeBatch([(context, tree), (context, extend)], usable("TREE_ATTN"))
    case.check(case.run(), CLOSE)


def test_padding_comes_out_zero_and_writes_nothing() -> None:
    case = TreeBatch([(20, SIX), (33, 1)], "TORCH_SDPA")
    step = case.step(num_reqs_padded=2, num_tokens_padded=sum(case.counts) + 3)
    inputs = [torch.cat([part, part.new_full((3, part.shape[1]), torch.nan)]) for part in case.inputs()]
    with torch.no_grad():
        out = case.layer(*inputs, metadata=step)
    assert not out[-3:].any()
    case.check(list(out[:-3].unflatten(1, (HEADS, SIZE)).split(case.counts)), CLOSE)


WINDOW, SLOPES, SINKS = (
    {"per_layer_sliding_window": 9}, {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]}, {"sinks": [0.1, 2.0, -1.0, 0.4]}
)  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "options"),
    [*(("TORCH_SDPA", options) for options in (WINDOW, SLOPES, SINKS)), ("TREE_ATTN", WINDOW | SLOPES | SINKS)],
)
def test_windows_and_alibi_count_places_in_the_cache(backend: str, options: dict[str, Any]) -> None:
    """What the reference says, whose rule is the place; for a chain, place and depth are one."""
    from tests.layers.layer_support import expected

    case = TreeBatch([(12, SIX), (10, 2)], usable(backend), **options)
    step = case.step()
    got = torch.cat(case.run(step))
    want = expected(case.layer, case.inputs()[0], step, tree_bias=True)
    assert (got - want).norm() <= CLOSE * want.norm()


def test_explain_says_what_windows_and_alibi_count() -> None:
    backend = selector.get_backend("TREE_ATTN")
    config = make_config(tree_bias=True, sliding_window=9, alibi="linear", backend="TREE_ATTN")
    assert any("window and ALiBi by place in the cache" in note for note in backend.notes(config))
    assert not any("by place" in note for note in backend.notes(config.replace(tree_bias=False)))


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only", "encoder_decoder"])
def test_other_attention_types_are_refused(attn_type: str) -> None:
    config = make_config(attn_type=attn_type, causality="bidirectional", backend="TREE_ATTN")
    with pytest.raises(UnsupportedRequestError, match=f"attn_type {attn_type} \\(runs decoder\\)"):
        selector.choose(config, "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
def test_quantised_output(backend: str) -> None:
    requests = [(20, SIX), (0, 5), (17, 1)]
    quant = vattn.QuantConfig(output_format="fp8_static", output_scale=0.01)
    case = TreeBatch(requests, usable(backend), quant_config=quant)
    with torch.no_grad():
        codes = case.layer(*case.inputs(), metadata=case.step())
    want = torch.cat(TreeBatch(requests, "TORCH_SDPA").run())
    got = dequantise_output(codes.unflatten(1, (HEADS, SIZE)), "fp8_static", None, case.layer.output_scale)
    # Half of a step of e4m3, or of its smallest one.
    assert ((got - want).abs() <= want.abs() * 2**-4 + 0.01 * 2**-10 + 1e-5).all()


def test_fp8_cache() -> None:
    quant = vattn.QuantConfig(k_scale=0.02, v_scale=0.02)
    case = TreeBatch(MIXED, "TORCH_SDPA", cache_config=vattn.CacheConfig(cache_dtype="fp8"), quant_config=quant)
    case.check(case.run(), 5e-2)


@pytest.mark.slow
def test_the_fusion_pass_fuses_behind_a_tree(fresh_dynamo: None) -> None:
    case = TreeBatch([(20, SIX), (9, 1)], "TORCH_SDPA")
    scale = torch.tensor([0.02])

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = case.layer(query, key, value)
        return (out / scale).clamp(-448, 448).to(torch.float8_e4m3fn)

    step = case.step()
    with torch.no_grad(), vattn.forward_context(step):
        want = attend(*case.inputs())
        got = vattn.compile(attend, options=vattn.options(strict=True))(*case.inputs())
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert "fp8_static" in str(vattn.fusion_report())


def test_steps_with_other_trees_and_lengths_share_one_compiled_graph(fresh_dynamo: None) -> None:
    from torch._dynamo.utils import counters

    case = TreeBatch([(20, SIX), (9, 1)], "TORCH_SDPA")
    builder = case.builder(max_tree_nodes=20)
    attend = torch.compile(case.layer, backend="eager", fullgraph=True)
    steps = [([7, 1], [SIX, None]), ([7, 1], [TokenTree.merge([[1, 2], [3, 4], [5, 6]])[0], None])]
    for counts, trees in [*steps, ([7, 1], [SIX, None])]:
        step = builder.build(counts, [27, 10], case.tables, trees=trees)
        with torch.no_grad(), vattn.forward_context(step):
            attend(*case.inputs())
    assert counters["stats"]["unique_graphs"] == 1


def make_builder(**options: Any) -> vattn.TreeAttentionMetadataBuilder:
    return vattn.TreeAttentionMetadataBuilder(4, 40, 64, BLOCK, **{"tree_choices": SIX, **options})


TABLES = [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_positions_count_by_depth_and_slots_by_place() -> None:
    step = make_builder().build([7, 3], [17, 9], TABLES, trees=[SIX, None])
    assert step.positions.tolist() == [10, 11, 11, 12, 12, 12, 12, 6, 7, 8]
    assert step.slot_mapping.tolist() == [26, 27, 28, 29, 30, 31, 32, 86, 87, 88]
    assert step.tree_id.tolist() == [0, -1]
    assert step.tree_bias.shape == (4, 7, 7)
    step = make_builder().build([7], [17], TABLES[:1], trees=[SIX], positions=list(range(100, 107)))
    assert step.positions[:7].tolist() == list(range(100, 107)), "given positions replace those by depth"


def test_equal_trees_are_stored_once_and_chains_not_at_all() -> None:
    default = vattn.TreeAttentionMetadataBuilder(4, 40, 64)
    assert default.tree.paths == ((0,),)
    assert default.tree_attn_bias.tolist() == [[0.0, -torch.inf], [0.0, 0.0]]
    builder = make_builder(max_trees=1)
    step = builder.build([7, 7], [17, 20], TABLES, trees=[SIX, TokenTree(SIX.paths)])
    assert step.tree_id.tolist() == [0, 0]
    step = builder.build([7, 3], [17, 20], TABLES, trees=[SIX, TokenTree.chain(2)])
    assert step.tree_id.tolist() == [0, -1]
    assert builder.build([3, 1], [17, 20], TABLES, trees=[TokenTree.chain(2), None]).tree_bias is None


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too few tokens": ({"trees": [SIX, None], "query_lens": [6, 1]}, "request 0: 6 new tokens and a tree of 6 nodes"),
    "too many tokens": ({"trees": [SIX, None], "query_lens": [8, 1]}, "7 new tokens for this tree"),
    "too few trees": ({"trees": [SIX]}, "trees describes 1 requests, query_lens 2"),
    "one for all": ({"trees": SIX}, "one tree or None per request"),
    "a number for all": ({"trees": 5}, "one tree or None per request"),
    "a string for all": ({"trees": "[(0,)]"}, "one tree or None per request"),
    "too large": ({"trees": [TokenTree.chain(3), TWENTY], "query_lens": [4, 21]}, "a tree of 20 nodes"),
    "too many": (
        {"trees": [SIX, TokenTree.merge([[1, 2], [3, 4], [5, 6]])[0]], "query_lens": [7, 7]},
        "2 different trees",
    ),
    "left open": ({"trees": None}, "as many as the builder's tree"),
    "unsorted": ({"trees": [[(1,), (0,)], None], "query_lens": [3, 1]}, "without (0,)"),
    "gapped": ({"trees": [[(0,), (0, 0, 0)], None], "query_lens": [3, 1]}, "without (0, 0)"),
    "both forms": (
        {"trees": [SIX, None], "tree_bias": torch.zeros(1, 7, 7), "tree_id": [0, -1]},
        "trees and ['tree_bias', 'tree_id']",
    ),
    "positions too few": ({"trees": [SIX, None], "positions": [1, 2]}, "positions has 2 entries"),
    "negative position": ({"trees": [SIX, None], "positions": [-1] * 8}, "positions[0]=-1"),
    "beyond the tokens": ({"trees": [SIX, None], "query_lens": [7, 40], "seq_lens": [17, 45]}, "a step of 47 tokens"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_steps_are_refused_and_change_nothing(name: str) -> None:
    changes, text = WRONG[name]
    builder = make_builder(max_trees=1)
    before = builder.build([7, 1], [17, 9], TABLES, trees=[SIX, None])
    arguments = {"query_lens": [7, 1], "seq_lens": [30, 30], "block_tables": TABLES, **changes}
    with unchanged(before), pytest.raises((MetadataError, vattn.errors.ConfigError)) as refused:
        builder.build(**arguments)
    assert text in str(refused.value)


def test_extends_and_prompts_as_long_as_the_tree_are_causal() -> None:
    step = make_builder().build([7, 1], [17, 9], TABLES, trees=[None, None])
    assert step.tree_bias is None
    assert step.positions.tolist() == [*range(10, 17), 8]
    assert make_builder().build([7, 1], [7, 9], TABLES).tree_bias is None


@pytest.mark.parametrize(
    "options", [{"tree_choices": TWENTY, "max_tree_nodes": 6}, {"max_trees": 0}, {"tree_choices": TokenTree.chain(40)}]
)
def test_builders_without_room_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(vattn.errors.ConfigError):
        make_builder(**options)


def test_a_captured_step_keeps_its_bias_without_trees() -> None:
    builder = make_builder()
    key = builder.build([7, 7], [17, 20], TABLES, trees=[SIX, SIX]).capture_key()
    step = builder.build([7, 1], [17, 20], TABLES, trees=[None, None], capture_key=key)
    assert step.tree_id.tolist() == [-1, -1]
    assert step.capture_key() == key


def draft_step(builder: vattn.TreeAttentionMetadataBuilder, nodes: int) -> vattn.AttentionMetadata:
    return builder.build([nodes, nodes], [20 + nodes, 30 + nodes], TABLES, trees=[None, None])


def test_drafting_masks_the_nodes_without_the_root() -> None:
    builder = make_builder()
    assert builder.build_for_drafting(draft_step(builder, 4), 0).tree_bias is None
    for level, nodes in ((1, 2), (2, 6)):
        step = builder.build_for_drafting(draft_step(builder, nodes), level)
        want = SIX.bias()[1 : 1 + nodes, 1 : 1 + nodes]
        assert torch.equal(step.tree_bias[0, :nodes, :nodes], want)
        assert step.tree_id.tolist() == [0, 0]


def test_drafting_nests_and_survives_errors() -> None:
    builder = make_builder()
    bias, common = builder.tree_attn_bias.clone(), draft_step(builder, 2)
    outer = builder.build_for_drafting(common, 1)
    with pytest.raises(MetadataError, match="at most 2"):
        builder.build_for_drafting(draft_step(make_builder(), 6), 1)
    inner = builder.build_for_drafting(outer, 2)
    assert builder.build_for_drafting(inner, 0).tree_bias is None
    assert outer.tree_bias is not None and common.tree_bias is None
    assert torch.equal(builder.tree_attn_bias, bias)


@pytest.mark.parametrize(("index", "nodes"), [(-1, 2), (3, 2), (1, 3), (True, 2), (2, 7), (1.0, 2)])
def test_wrong_draft_steps_are_refused(index: Any, nodes: int) -> None:
    builder = make_builder()
    with pytest.raises(MetadataError):
        builder.build_for_drafting(draft_step(builder, nodes), index)


def test_draft_steps_attend_as_the_branches_say() -> None:
    """The drafts' keys lie behind the root, which is cached."""
    for backend in BACKENDS:
        case = TreeBatch([(5, 6), (12, 6)], usable(backend))
        builder = case.builder(tree_choices=SIX, max_tree_nodes=6)
        common = builder.build(case.counts, case.lengths, case.tables, trees=[None, None])
        outputs = case.run(builder.build_for_drafting(common, 2))
        for row in range(2):
            for rows in ([0, 2], [0, 3], [1, 4], [1, 5]):
                want = case.expected(row, rows)
                assert (outputs[row][rows] - want).norm() <= CLOSE * want.norm()


class Batch:
    """A batch as engines keep it."""

    def __init__(self, requests: dict[str, tuple[int, int]]) -> None:
        self.req_ids = list(requests)
        self.num_computed_tokens_cpu = [cached for _, cached in requests.values()]
        self.num_scheduled_tokens = {name: new for name, (new, _) in requests.items()}
        self.swaps = 0

    def swap_states(self, i1: int, i2: int) -> None:
        for part in (self.req_ids, self.num_computed_tokens_cpu):
            part[i1], part[i2] = part[i2], part[i1]
        self.swaps += 1


ORDERS: dict[str, tuple[list[tuple[int, int]], int, list[int], int]] = {
    "three kinds": (
        [(1, 20), (1, 50), (374, 0), (300, 20), (1, 20), (256, 0), (1, 5), (27, 0), (1, 4)],
        1,
        [0, 1, 6, 8, 4, 3, 2, 7, 5],
        3,
    ),
    "decodes": ([(1, 9), (1, 19)], 1, [0, 1], 0),
    "prompts": ([(9, 0), (1, 0)], 1, [0, 1], 0),
    "interleaved": ([(9, 0), (1, 9), (8, 0), (1, 19)], 1, [3, 1, 2, 0], 1),
    "extends before prompts": ([(100, 0), (10, 40), (200, 0), (20, 55)], 1, [3, 1, 2, 0], 1),
    "all backwards": ([(100, 0), (10, 40), (1, 9)], 1, [2, 1, 0], 1),
    "longer decodes": ([(2, 8), (3, 17), (5, 25), (6, 34)], 4, [0, 1, 2, 3], 0),
    "nothing": ([], 1, [], 0),
}
"""New and cached tokens of a batch, the longest decode, the order that engines expect, and exchanges."""


@pytest.mark.parametrize("kind", ORDERS)
def test_reorder_batch_by_three_kinds(kind: str) -> None:
    requests, threshold, order, swaps = ORDERS[kind]
    batch = Batch({str(row): request for row, request in enumerate(requests)})
    builder = make_builder(decode_threshold=threshold)
    assert builder.reorder_batch(batch, batch) == (swaps > 0)
    assert ([int(name) for name in batch.req_ids], batch.swaps) == (order, swaps)
    assert not builder.reorder_batch(batch, batch)


def test_reorder_batch_counts_trees_as_decodes() -> None:
    batch = Batch({"prompt": (7, 0), "tree": (7, 40), "chunk": (9, 12), "decode": (1, 5), "extend": (3, 8)})
    assert make_builder().reorder_batch(batch, batch)
    assert batch.req_ids == ["decode", "tree", "extend", "chunk", "prompt"]
