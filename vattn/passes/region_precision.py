"""Finds which roundings to bf16 and fp16 inside a region Inductor's generated code keeps, and which it drops.

Generated code computes in fp32 and rounds where a value is stored. A chain of arithmetic that ends in a cast to fp32 is
never stored, so never rounded; other roundings may be kept or dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Node

from vattn.passes.inductor import EMULATES_EVERYWHERE, rounds_every_operation
from vattn.passes.ops import MOVES, is_pointwise, meaning
from vattn.passes.region import dtype_of, is_check, value

ROUNDED = (
    "values are rounded to bf16 or fp16 between its operations, which generated code does in one place and leaves out "
    "in another: convert to float32 first"
)
LOW = (torch.bfloat16, torch.float16)
_EXACT = MOVES | {"sign", "choice", "extreme", "line", "fill"}
"""Meanings of ops whose results need no rounding."""


def is_low(node: Node) -> bool:
    """Return whether a node holds bf16 or fp16."""
    return dtype_of(node) in LOW


def roundings(nodes: Sequence[Node]) -> tuple[frozenset[Node], frozenset[Node]]:
    """Return nodes that generated code does not round for certain, and nodes that it may not round."""
    emulated = rounds_every_operation()
    if emulated and EMULATES_EVERYWHERE:
        return frozenset(), frozenset()
    rounding = [n for n in nodes if is_low(n) and meaning(n) not in _EXACT]
    certain = {n for n in rounding if meaning(n) != "cast" and _ends_in_fp32(n)}
    doubtful = set(rounding) - certain
    for node in nodes:
        if is_low(node) and node not in certain | doubtful:
            for unrounded in (certain, doubtful):
                if not unrounded.isdisjoint(node.all_input_nodes):
                    unrounded.add(node)
    return (frozenset(), frozenset(certain | doubtful)) if emulated else (frozenset(certain), frozenset(doubtful))


def _ends_in_fp32(node: Node) -> bool:
    """Return whether the only reader of a node, through moves and arithmetic, is a cast to fp32."""
    for _ in range(20):  # Inductor stores values in the middle of long chains.
        users = [user for user in node.users if not is_check(user)]
        if len(users) != 1 or not isinstance(users[0].target, torch._ops.OpOverload):
            return False
        user = users[0]
        if meaning(user) == "cast" and value(user).dtype == torch.float32:
            return True
        moves = meaning(user) in MOVES - {"join", "same"}
        if not moves and not (is_pointwise(user) and is_low(user)):
            return False
        node = user
    return False


def in_fp32(node: Node, env: dict[Node, object], wide: frozenset[Node]) -> dict[Node, object]:
    """Return the values that a node reads, in the dtype in which generated code has them.

    Args:
        wide: nodes that are not rounded; `env` holds their values in fp32.
    """
    exact = node in wide or meaning(node) == "cast"

    def seen(source: Node) -> object:
        val = env[source]
        if not isinstance(val, Tensor) or not is_low(source):
            return val
        if exact:
            return val.float()
        return val if val.dtype == value(source).dtype else val.to(value(source).dtype)

    return {source: seen(source) for source in node.all_input_nodes}
