"""`TokenTree`: masks, depths, merged branches, accepted paths; and tokens moved between slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vattn
from tests.metadata.tree_cases import SIX, TWENTY, random_trees, rows_to
from tests.support import with_cache
from vattn.errors import ArgumentError, CacheNotBoundError, ConfigError, DeviceError, ShapeError
from vattn.metadata.token_tree import TokenTree, _prepare_tree_attn_bias


def test_the_bias_of_a_known_tree() -> None:
    rows = ["".join(str(int(seen)) for seen in row) for row in SIX.bias() == 0]
    assert rows == "1000000 1100000 1010000 1101000 1100100 1010010 1010001".split()
    assert SIX.depths == (0, 1, 1, 2, 2, 2, 2)


@settings(max_examples=30, deadline=None)
@given(tree=random_trees(20))
def test_a_row_sees_itself_and_those_whose_path_begins_its_own(tree: TokenTree) -> None:
    bias = tree.bias()
    for row in range(tree.size):
        seen = (bias[row] == 0).nonzero().flatten().tolist()
        assert seen == rows_to(tree, row) == tree.branch(row)
    assert set(bias.unique().tolist()) <= {0.0, -torch.inf}
    assert not torch.triu(bias == 0, 1).any(), "parents come before their children"
    assert tree.is_chain == bool((tree.bias() == 0).equal(torch.ones_like(bias).tril() == 1))
    assert TokenTree.of(str([*tree.paths])) == tree


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ([(1,), (0,)], "(1,) without (0,)"),
        ([(0,), (0, 0), (1,)], "(1,) after (0, 0)"),
        ([(0,), (0,)], "(0,) after (0,)"),
        ([(0, 0)], "(0, 0) without (0,)"),
        ([(0,), (0, 0, 0)], "(0, 0, 0) without (0, 0)"),
        ([(0,), (2,)], "(2,) without (1,)"),
        ([(0,), (0, 1)], "(0, 1) without (0, 0)"),
        ([], "tree_choices=()"),
        ([()], "tree_choices"),
        ([(-1,)], "tree_choices"),
        ([("0",)], "tree_choices"),
        ([(True,)], "tree_choices"),
        ([0, 1], "tree_choices"),
        (7, "tree_choices=7"),
        ("(0,", "tree_choices='(0,'"),
        ("open('x')", "tree_choices"),
    ],
)
def test_what_is_no_tree_is_refused(choices: Any, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        TokenTree.of(choices)
    assert text in str(refused.value)


def test_the_known_name_makes_the_same_bias() -> None:
    bias = _prepare_tree_attn_bias(SIX.paths, [2, 4], dtype=torch.float32, device="cpu")
    assert torch.equal(bias, SIX.bias())
    with pytest.raises(ConfigError, match=r"\[2, 4\] for this tree"):
        _prepare_tree_attn_bias(SIX.paths, [2, 3, 1], dtype=torch.float32, device="cpu")


@settings(max_examples=60, deadline=None)
@given(
    branches=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=5),
    most=st.integers(1, 20),
    chosen=st.data(),
)
def test_merged_branches_hold_each_beginning_once(branches: list[list[int]], most: int, chosen: Any) -> None:
    tree, tokens = TokenTree.merge(branches, most)
    spelled = {tuple(tokens[row - 1] for row in tree.branch(node)[1:]) for node in range(1, tree.size)}
    assert len(spelled) == tree.size - 1 <= most
    beginnings = {tuple(branch[:end]) for branch in branches for end in range(1, len(branch) + 1)}
    assert spelled <= beginnings
    assert spelled == beginnings or tree.size - 1 == most
    picks = chosen.draw(st.lists(st.integers(0, 3), min_size=tree.size, max_size=tree.size))
    rows = tree.accepted(tokens, picks)
    path = tree.branch(rows[-1]) if rows else [0]
    assert path[1:] == rows
    assert all(tokens[row - 1] == picks[before] for before, row in zip(path, rows, strict=False))
    last = path[-1]
    assert not any(
        parent == last and tokens[row - 1] == picks[last] for row, parent in enumerate(tree.parents) if row
    ), "no child of the last row would go on"


def test_wrong_counts_are_refused() -> None:
    with pytest.raises(ConfigError, match="5 drafts and 7 choices for a tree of 6 nodes"):
        SIX.accepted([1] * 5, [1] * 7)
    with pytest.raises(ConfigError, match="tree_choices"):
        TokenTree.merge([[], []])


def test_levels() -> None:
    assert [TWENTY.num_nodes(depth) for depth in range(6)] == [0, 4, 11, 15, 19, 20]
    assert (TWENTY.size, TWENTY.depth) == (21, 5)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["auto", "fp8", "int8_per_token_head", "nvfp4"])
@pytest.mark.parametrize("width", [16, 32])
def test_moved_slots(layout: str, dtype: str, width: int) -> None:
    """What is stored for a token is what was written for another one."""
    scaled = dtype in ("fp8", "nvfp4")
    quant = vattn.QuantConfig(k_scale="unit", v_scale="unit") if scaled else None
    cache = vattn.CacheConfig(block_size=8, cache_dtype=dtype, kv_cache_layout=layout)
    layers = [
        vattn.Attention(4, 16, 1.0, 2, head_size_v=width, cache_config=cache, quant_config=quant, prefix=str(index))
        for index in range(2)
    ]
    model = torch.nn.ModuleList(layers)
    storages = vattn.allocate_kv_cache(model, num_blocks=4, dtype=torch.bfloat16).kv_caches
    source, target = torch.tensor([9, 12, 13, -1, 32, 3]), torch.tensor([10, 9, 31, 1, 2, -5])
    order = torch.arange(32)
    order[[10, 9, 31]] = torch.tensor([9, 12, 13])
    for layer, storage in zip(layers, storages, strict=True):
        key, value = torch.randn(32, 2, 16).bfloat16(), torch.randn(32, 2, width).bfloat16()
        scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
        vattn.update_kv_cache(key[order], value[order], storage, torch.arange(32), layer.config, **scales)
        want = storage.clone()
        vattn.update_kv_cache(key, value, storage, torch.arange(32), layer.config, **scales)
        layer.wanted = want
    vattn.move_slots(model, source, target)
    for layer in layers:
        assert torch.equal(layer.kv_cache.view(torch.uint8), layer.wanted.view(torch.uint8))


def test_nothing_valid_moves_nothing() -> None:
    layer = vattn.Attention(2, 16, 1.0, cache_config=vattn.CacheConfig(block_size=8))
    cache = vattn.allocate_kv_cache(layer, num_blocks=2, dtype=torch.float32).kv_caches[0].normal_()
    before = cache.clone()
    vattn.move_slots(layer, torch.tensor([-1, 99]), torch.tensor([3, 4]))
    vattn.move_slots(layer, torch.empty(0).long(), torch.empty(0).long())
    assert torch.equal(cache, before)


@pytest.mark.parametrize(
    ("source", "target", "error"),
    [
        (torch.tensor([1]), torch.tensor([1, 2]), ShapeError),
        (torch.tensor([1]).int(), torch.tensor([1]).int(), ShapeError),
        (torch.tensor([[1]]), torch.tensor([[1]]), ShapeError),
        (torch.tensor([1], device="meta"), torch.tensor([1]), DeviceError),
        ([1], torch.tensor([1]), ArgumentError),
    ],
)
def test_wrong_slots_are_refused(source: torch.Tensor, target: torch.Tensor, error: type[Exception]) -> None:
    layer = with_cache(vattn.Attention(2, 16, 1.0), 2)
    with pytest.raises(error):
        vattn.move_slots(layer, source, target)


def test_layers_without_caches_are_refused() -> None:
    with pytest.raises(CacheNotBoundError):
        vattn.move_slots(vattn.Attention(2, 16, 1.0), torch.tensor([1]), torch.tensor([2]))
    with pytest.raises(ConfigError):
        vattn.move_slots(torch.nn.Linear(2, 2), torch.tensor([1]), torch.tensor([2]))
    with pytest.raises(ConfigError):
        vattn.move_slots(None, torch.tensor([1]), torch.tensor([2]))


def test_layers_with_tables_of_their_own_are_refused() -> None:
    layers = [vattn.Attention(2, 16, 1.0, cache_config=vattn.CacheConfig(block_size=size)) for size in (8, 16)]
    for layer in layers:
        vattn.allocate_kv_cache(layer, num_blocks=2, dtype=torch.float32)
    with pytest.raises(ConfigError, match="once per group"):
        vattn.move_slots(layers, torch.tensor([1]), torch.tensor([2]))


@settings(max_examples=100, deadline=None)
@given(paths=st.lists(st.lists(st.integers(-1, 2), max_size=3), max_size=5))
def test_any_paths_are_refused_or_a_tree(paths: list[list[int]]) -> None:
    nodes = [tuple(path) for path in paths]
    right = (
        bool(nodes)
        and nodes == sorted(set(nodes), key=lambda path: (len(path), path))
        and all(path and min(path) >= 0 for path in nodes)
        and all(path[:-1] in {(), *nodes} for path in nodes)
        and all(path[-1] == 0 or (*path[:-1], path[-1] - 1) in nodes for path in nodes)
    )
    if right:
        tree = TokenTree.of(paths)
        assert [tree.branch(row) for row in range(tree.size)] == [rows_to(tree, row) for row in range(tree.size)]
        return
    with pytest.raises(ConfigError):
        TokenTree.of(paths)
