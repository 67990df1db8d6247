"""Finds on how many tokens a region has to be run to see all that it does.

A graph of a varying number of tokens may treat tokens from the three hundredth on differently, which a run of thirty
tokens would not show. Such numbers appear in the graph, as bounds of slices for example; they are collected here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from vattn.passes.ops import meaning, op_name, reduces
from vattn.passes.region import Refusal, expression, value
from vattn.passes.region_moves import reduced_dims
from vattn.passes.region_run import constant

TOKEN_COUNTS = MANY, FEW = 31, 5
_LARGEST_RUN = 1 << 21
_UNBOUNDED = 1 << 62


def token_counts(nodes: Sequence[Node], output: Node) -> tuple[int, ...]:
    """Return the token counts to run a region on: its own if that is fixed, or several.

    Raises:
        Refusal: they are too large to run.
    """
    tokens = value(output).shape[0]
    if isinstance(tokens, int):
        return (tokens,)
    furthest = reach(nodes, output)
    few = possible_count(tokens, FEW)
    if furthest < FEW:
        return possible_count(tokens, MANY), few
    of_a_token = math.prod(int(size) for size in value(output).shape[1:])
    if (furthest + MANY) * of_a_token > _LARGEST_RUN:
        raise beyond(furthest, output)
    counts = tuple(possible_count(tokens, furthest + count) for count in TOKEN_COUNTS)
    return counts if _fewest(tokens) > few else (*counts, few)


def possible_count(tokens: int | torch.SymInt, least: int) -> int:
    """Return a number of tokens that a graph can run on, `least` or little more; the number itself if it is fixed."""
    return tokens if isinstance(tokens, int) else int(expression(tokens).subs(symbols_at(expression(tokens), least)))


@lru_cache(maxsize=1024)
def symbols_at(tokens: Any, least: int) -> dict[Any, int]:
    """Return values of the symbols in an expression, all different, for which it is `least` or little more."""

    def at(size: int) -> dict[Any, int]:
        return {symbol: size + index for index, symbol in enumerate(tokens.free_symbols)}

    return at(_first(lambda size: tokens.subs(at(size)) >= least) or least)


def _first(holds: Callable[[int], Any]) -> int:
    """Return the first number from 1 on for which something holds that then holds for all larger ones, 0 for none."""
    low, high = 0, 1
    while not holds(high):
        low, high = high, 2 * high
        if high > _UNBOUNDED:
            return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def beyond(place: int, node: Node) -> Refusal:
    """Return the refusal of a region that would have to be run on too many tokens."""
    return Refusal(f"what it does depends on whether there are {place} tokens, too many to try it out", node, near=True)


def reach(nodes: Sequence[Node], like: Node) -> int:
    """Return the number of tokens up to which a graph may treat tokens differently, 0 if it treats all alike.

    Args:
        like: a node with the number of tokens as its first size.
    """
    tokens, found = expression(value(like).shape[0]), [0]
    for node in nodes:
        for along, numbers in _bounds(node):
            found += [_symbols_beyond(expression(along), abs(number)) for number in numbers]
        val = value(node)
        sizes = val.shape if isinstance(val, Tensor) else [val] if isinstance(val, torch.SymInt) else []
        found += [_symbols_in_formula(expression(size)) for size in sizes if isinstance(size, torch.SymInt)]
    least, symbols = max(found), tokens.free_symbols
    # Several symbols get different values; the smallest of them must be large enough.
    return int(tokens.subs(dict.fromkeys(symbols, least + (len(symbols) > 1)))) if least else 0


@lru_cache(maxsize=1024)
def _symbols_beyond(size: Any, number: int) -> int:
    """Return the value of all symbols from which on a size is at least `number`, 0 if it never is."""
    if size.is_Symbol or number >= _UNBOUNDED:
        return number if number < _UNBOUNDED else 0
    return _first(lambda at: abs(size.subs(dict.fromkeys(size.free_symbols, at))) >= number)


@lru_cache(maxsize=1024)
def _symbols_in_formula(size: Any) -> int:
    """Return the value of all symbols beyond every number that a formula adds to another part or compares with it."""
    import sympy  # type: ignore[import-untyped]

    found = [0]
    for part in sympy.preorder_traversal(size):
        if not part.is_Symbol and not part.is_Mul and not part.is_Pow:
            numbers = [abs(int(argument)) for argument in part.args if argument.is_Integer]
            others = [argument for argument in part.args if argument.free_symbols]
            found += [_symbols_beyond(other, number) for other in others for number in numbers]
    return max(found)


def check_order(nodes: Sequence[Node]) -> None:
    """Refuse nodes that count along the tokens: a quantiser treats all tokens alike.

    Raises:
        Refusal: there is such a node.
    """
    for node in nodes:
        counts = meaning(node) in ("line", "count") or (reduces(node) and meaning(node) != "extreme")
        if counts and node.args and isinstance(node.args[0], Node):
            val = value(node.args[0])
            if isinstance(val, Tensor) and any(isinstance(val.shape[dim], torch.SymInt) for dim in _dims(node, val)):
                raise Refusal(f"{op_name(node.target)} runs along the tokens", node, near=True)


def _dims(node: Node, val: Tensor) -> list[int]:
    last = {"sort": 2, "topk": 3}.get(op_name(node.target), 0)
    given = len(node.args) >= last or "dim" in node.kwargs
    dims = reduced_dims(node, val.dim())[0] if given else [-1]
    return [dim for dim in dims if -val.dim() <= dim < val.dim()]


def _bounds(node: Node) -> Iterator[tuple[Any, list[int]]]:
    """Yield varying sizes that a node indexes by numbers of the graph, and those numbers."""
    name, given = op_name(node.target), list(node.args)
    val = value(given[0]) if given and isinstance(given[0], Node) else None
    if not isinstance(val, Tensor):
        return
    rest: list[Any] = given[1:]
    if name in ("index", "_unsafe_index"):
        for place, index in enumerate(rest[0]):
            if isinstance(index, Node) and isinstance(val.shape[place], torch.SymInt):
                yield val.shape[place], _elements(index)
        return
    dim: Any = node.kwargs.get("dim", 0)
    if name in ("slice", "select", "index_select", "gather", "unfold") and rest:
        dim, *rest = rest
    elif name in ("split", "split_with_sizes") and len(rest) > 1:
        rest, dim = rest[:1], rest[1]
    elif name == "constant_pad_nd":
        for position in range(0, len(rest[0]), 2):
            size = val.shape[val.dim() - 1 - position // 2]
            if isinstance(size, torch.SymInt):
                yield size, [n for n in rest[0][position : position + 2] if isinstance(n, int)]
        return
    elif name == "as_strided":
        rest = rest[2:]
        dim = next((d for d, size in enumerate(val.shape) if isinstance(size, torch.SymInt)), 0)
    elif name not in ("slice", "select", "split", "split_with_sizes", "unfold"):
        return
    if isinstance(dim, int) and val.dim() and isinstance(val.shape[dim], torch.SymInt):
        yield val.shape[dim], [number for part in (*rest, *node.kwargs.values()) for number in _integers(part)]


def _integers(argument: Any) -> list[int]:
    if isinstance(argument, (list, tuple)):
        return [sum(number for part in argument for number in _integers(part))]
    if isinstance(argument, Node):
        return _elements(argument)
    return [argument] if isinstance(argument, int) and not isinstance(argument, bool) else []


def _elements(node: Node) -> list[int]:
    known = constant(node)
    if known is None or known.is_floating_point() or known.dtype == torch.bool or not known.numel():
        return []
    return [int(known.abs().max())]


def _fewest(tokens: torch.SymInt) -> int:
    """Return the least token count that a graph is compiled for, 0 if unknown."""
    bounds = tokens.node.shape_env.bound_sympy(tokens.node.expr)
    return int(bounds.lower) if bounds.lower.is_Integer else 0
