"""Keeps what regions were found to compute, by a hash of the region: equal layers of a model are probed once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.fx import Node

from vattn.passes.probe import Inputs
from vattn.passes.region import Refusal, expression, value

T = TypeVar("T")

_known: dict[str, Any] = {}


def judged(key: str, nodes: Sequence[Node], end: Node, judge: Callable[[], T]) -> T:
    """Return what `judge` finds out about a region; it is called once per key.

    Args:
        nodes: the region's nodes.
        end: node to name in a refusal that names none of them.

    Raises:
        Refusal: from `judge`, in this call or an earlier one.
    """
    if key not in _known:
        try:
            _known[key] = judge()
        except Refusal as refusal:
            place = nodes.index(refusal.node) if refusal.node in nodes else None
            _known[key] = refusal.reason, place, refusal.near
    verdict = _known[key]
    if isinstance(verdict, tuple):
        reason, place, near = verdict
        raise Refusal(reason, end if place is None else nodes[place], near=near)
    return verdict


def forget() -> None:
    """Forget all verdicts."""
    _known.clear()


def fingerprint(nodes: Iterable[Node], name: Callable[[Node], str], facts: Iterable[str]) -> str:
    """Return a hash of what nodes compute, and of further facts.

    Args:
        name: what a node is called in the hash: by its place, so that equal layers are equal.
    """
    lines = list(facts)
    for node in nodes:
        arguments = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda source: f"<{name(source)}>")
        lines.append(f"{name(node)} {node.target} {arguments}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def numbered(nodes: Iterable[Node], kind: str = "%") -> dict[Node, str]:
    """Return names of nodes by their order."""
    return {node: f"{kind}{index}" for index, node in enumerate(nodes)}


def region_fingerprint(
    start: Node, ends: Iterable[Node], nodes: Sequence[Node], inputs: Inputs, facts: Iterable[str]
) -> str:
    """Return a hash of what a region computes from `start` and its inputs up to `ends`, and of further facts."""
    names = {
        start: "start",
        **{node: f"size {expression(value(node))}" for node in inputs.sizes},
        **{node: f"constant {tensor.dtype} {tensor.tolist()}" for node, tensor in inputs.constants.items()},
        **{node: f"root {index} {typed(node)}" for index, node in enumerate(inputs.roots)},
        **numbered(inputs.derived, "derived "),
        **numbered(nodes),
    }
    facts = [*facts, typed(start), *(f"{names[end]} {typed(end)}" for end in ends)]
    return fingerprint((*inputs.derived, *nodes), names.__getitem__, facts)


def typed(node: Node) -> str:
    """Return the dtype and the shape of a node's value."""
    return f"{value(node).dtype} {tuple(map(expression, value(node).shape))}"
