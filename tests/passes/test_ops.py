"""The table of ops: every name is an op of torch, and what is asked of torch agrees with it."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, Node

from vattn.passes import ops

aten = torch.ops.aten
ELSEWHERE = {"convert_element_type", "rev", "view_of"}
"""Ops of `prims`."""


def node_of(op: object) -> Node:
    return Graph().call_function(op)  # type: ignore[arg-type]


@pytest.mark.parametrize("meaning", ops._TABLE)
def test_names_are_ops(meaning: str) -> None:
    for name in ops._TABLE[meaning].split():
        assert hasattr(torch.ops.prims if name in ELSEWHERE else aten, name), name


def test_an_op_is_in_one_row() -> None:
    assert sum(len(names.split()) for names in ops._TABLE.values()) == len(ops._MEANINGS)


@pytest.mark.parametrize(
    ("op", "meaning", "moves", "view", "reduces", "pointwise"),
    [
        (aten.permute.default, "part", True, True, False, False),
        (aten.reshape.default, "reshape", True, True, False, False),
        (aten.split.Tensor, "part", True, True, False, False),
        (aten.clone.default, "same", True, False, False, None),
        (aten.cat.default, "join", True, False, False, False),
        (aten.slice_scatter.default, "scatter", False, False, False, False),
        (aten.amax.default, "extreme", False, False, True, False),
        (aten.max.dim, "extreme", False, False, True, False),
        (aten.mean.dim, "", False, False, True, False),
        (aten.sort.default, "line", False, False, False, False),
        (aten.mul.Tensor, "scaling", False, False, False, True),
        (aten.where.self, "choice", False, False, False, True),
        (aten.mm.default, "gemm", False, False, False, False),
        (torch.ops.prims.convert_element_type.default, "cast", False, False, False, None),
        (len, "", False, False, False, False),
    ],
)
def test_what_ops_do(op: object, meaning: str, moves: bool, view: bool, reduces: bool, pointwise: bool | None) -> None:
    node = node_of(op)
    assert (ops.meaning(node), ops.moves(node), ops.is_view(node), ops.reduces(node)) == (meaning, moves, view, reduces)
    assert pointwise is None or ops.is_pointwise(node) == pointwise
    assert not ops.unwritten(node) and ops.unwritten(node_of(aten.new_empty.default))
    assert ops.unwritten(node_of(aten.empty.memory_format)) and not ops.unwritten(node_of(aten.zeros.default))
