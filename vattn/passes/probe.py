"""Runs a region on chosen inputs, which show what it computes.

The inputs hold FP8 rounding midpoints (there multiplying by a reciprocal and dividing differ), values beyond the range,
rows of zeros, subnormals, outliers, infinities and NaN, at several token counts, under scales that are no power of two,
and every value that the model dtype has. FP8 casts saturate where eager CUDA casts do, from torch 2.12 on: before
that, a region that needs a cast to saturate needs a clamp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from vattn.passes.ops import MOVES, is_pointwise, meaning, op_name
from vattn.passes.probe_inputs import PROBE_SCALES, every_output, probe_outputs
from vattn.passes.region import Refusal, Region, can_run, expression, is_size, same_size, value
from vattn.passes.region_precision import LOW, in_fp32, is_low
from vattn.passes.region_run import constant, run_node
from vattn.passes.region_tokens import check_order, symbols_at, token_counts

NO_CLAMP = (
    "no clamp before the cast: before torch 2.12, values out of range saturate on one device and give NaN on another; "
    "write .clamp(-448, 448)"
)
_MOST_ROOTS = 4
_LEAST_ROUNDS = 4
"""How often the rows are run at least, each time as other tokens."""

_SPREADS = MOVES | {"cast", "fill"}
"""Meanings of ops that may make a tensor of many equal elements from one value."""
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Inputs:
    """What a region reads besides the attention output.

    Attributes:
        sizes: nodes that hold a size.
        constants: tensors known at compile time.
        roots: float tensors of one value that is known only when the graph runs.
        derived: nodes computed from the others, not from the attention output, in graph order.
        scales: those of `roots` and `derived` that may be a static scale.
    """

    sizes: tuple[Node, ...]
    constants: dict[Node, Tensor]
    roots: tuple[Node, ...]
    derived: tuple[Node, ...]
    scales: tuple[Node, ...]


@contextmanager
def isolated() -> Iterator[None]:
    """Compute on real CPU tensors, without modes, devices or autocast of the compiler or the user."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False), ExitStack() as stack:
        if torch.get_default_device().type != "cpu":  # a device mode costs as much as a small operation
            stack.enter_context(torch.device("cpu"))
        yield


def find_inputs(nodes: Sequence[Node], output: Node) -> Inputs:
    """Sort what the nodes read from outside.

    Raises:
        Refusal: they read a tensor that is not a scale.
    """
    finder = _InputFinder()
    inside = {output, *nodes}
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in inside and not finder.take(source):
                val = value(source)
                shape = tuple(val.shape) if isinstance(val, Tensor) else type(val).__name__
                raise Refusal(
                    f"it also reads a tensor of shape {shape}: a quantiser reads one value, its scale", node, near=True
                )
    found = finder.inputs()
    if len(found.roots) > _MOST_ROOTS:
        raise Refusal(f"the region reads {len(found.roots)} unknown values; a quantiser has one scale", node, near=True)
    check_sizes((*found.derived, *nodes), found.sizes)
    check_order(nodes)
    return found


def check_sizes(nodes: Sequence[Node], sizes: Sequence[Node]) -> None:
    """Refuse nodes that compute values from sizes: symbolic sizes are tried with a few numbers only.

    Raises:
        Refusal: there is such a node.
    """
    for node in nodes:
        fills = node.args[1:2] if op_name(node.target) in ("full", "full_like") else ()
        pointwise = is_pointwise(node)
        for source in node.all_input_nodes:
            if source in sizes and (pointwise or source in fills):
                raise Refusal(f"it computes with {source.name}, a size or a number that varies", node, near=True)


class _InputFinder:
    """Collects what a region reads from outside, and what that is computed from."""

    def __init__(self) -> None:
        self.sizes: dict[Node, None] = {}
        self.constants: dict[Node, Tensor] = {}
        self.roots: dict[Node, None] = {}
        self.derived: dict[Node, None] = {}

    def take(self, node: Node, depth: int = 8) -> bool:
        """Keep what a node is computed from; false unless it is a size, a constant or one value, spread or not."""
        if node in self.sizes or node in self.constants or node in self.roots or node in self.derived:
            return True
        val = value(node)
        if is_size(node):
            self.sizes[node] = None
            return True
        known = constant(node)
        if known is not None:
            self.constants[node] = known
        elif isinstance(val, Tensor) and val.is_floating_point() and same_size(val.numel(), 1):
            self.roots[node] = None
        else:
            spreads = can_run(node) and meaning(node) in _SPREADS and depth > 0
            spreads = spreads and all(self.take(source, depth - 1) for source in node.all_input_nodes)
            if not spreads and not self._is_filled(node, depth):
                return False
            self.derived[node] = None
        return True

    def _is_filled(self, node: Node, depth: int) -> bool:
        """Keep a tensor that is made of numbers by elementwise ops, such as zero points; false if it is not."""
        pointwise = can_run(node) and is_pointwise(node)
        sources = node.all_input_nodes
        return pointwise and depth > 0 and all(self.take(s, depth - 1) and s not in self.roots for s in sources)

    def inputs(self) -> Inputs:
        """Return everything, with as few unknown values as possible."""
        direct = list(self.roots)
        self._follow_back(lambda node: meaning(node) in _SPREADS and not _loses_digits(node))
        if len(self.roots) > 1:
            self._follow_back(lambda node: True)
        scales = [node for node in dict.fromkeys([*direct, *self.roots]) if value(node).dtype in _SCALE_DTYPES]
        return Inputs(tuple(self.sizes), self.constants, tuple(self.roots), tuple(sorted(self.derived)), tuple(scales))

    def _follow_back(self, allowed: Any) -> None:
        for _ in range(8):
            for node in list(self.roots):
                if not (can_run(node) and allowed(node)):
                    continue
                kept = [dict(part) for part in (self.sizes, self.constants, self.roots, self.derived)]
                if all(self.take(source) for source in node.all_input_nodes):
                    del self.roots[node]
                    self.derived[node] = None
                else:
                    self.sizes, self.constants, self.roots, self.derived = kept  # type: ignore[assignment]


def _loses_digits(node: Node) -> bool:
    if meaning(node) != "cast":
        return False
    before, after = (value(n).dtype for n in (node.all_input_nodes[0], node))
    return before.is_floating_point and torch.finfo(before).eps < torch.finfo(after).eps


def set_sizes(sizes: Sequence[Node], output: Node, tokens: int) -> dict[Node, Any]:
    """Return the value of every size when the graph runs on `tokens` tokens."""
    symbols = {symbol for node in sizes for symbol in expression(value(node)).free_symbols}
    others = symbols - expression(value(output).shape[0]).free_symbols
    return {node: size_at(value(node), output, tokens, others) for node in sizes}


@lru_cache(maxsize=4096)
def _at(size: Any, tokens: Any, count: int) -> Any:
    return size.subs(symbols_at(tokens, count))


def size_at(size: Any, output: Node, tokens: int, others: Iterable[Any] = ()) -> int:
    """Return a size when the graph runs on `tokens` tokens, the first size of `output`.

    Args:
        tokens: a result of `possible_count`.
        others: further symbols; each gets another number.

    Raises:
        Refusal: it depends on something else.
    """
    if isinstance(size, int):
        return size
    found = _at(expression(size), expression(value(output).shape[0]), tokens)
    # Any number will do for another symbol if it is the same everywhere.
    numbers = {other: tokens // 2 + 1 + index for index, other in enumerate(others)}
    found = found.subs({other: numbers.get(other, tokens // 2 + 1) for other in found.free_symbols})
    if not found.is_Integer:
        raise Refusal(f"the region depends on the size {size}, which varies with no token count", output, near=True)
    return int(found)


def run(
    nodes: Sequence[Node],
    output: Node,
    inputs: Inputs,
    x: Tensor,
    scales: Sequence[Any],
    wide: frozenset[Node] = frozenset(),
    given: dict[Node, Any] | None = None,
) -> dict[Node, Any]:
    """Run a region on one attention output `[T, H, V]`; returns the value of every node.

    Args:
        scales: the values of `inputs.roots`, a number or a tensor of its shape for each.
        wide: nodes in bf16 or fp16 that stay in fp32.
        given: values of nodes that are not run.
    """
    env: dict[Node, Any] = {output: x, **inputs.constants, **set_sizes(inputs.sizes, output, x.shape[0])}
    for node, scale in zip(inputs.roots, scales, strict=False):
        env[node] = torch.as_tensor(scale, dtype=value(node).dtype).expand(tuple(value(node).shape)).contiguous()
    env.update(given or {})
    for node in (*inputs.derived, *nodes):
        if node not in env:
            env[node] = run_one(node, env, wide)
    return env


def run_one(node: Node, env: dict[Node, Any], wide: frozenset[Node]) -> Any:
    """Return the value of a node from those of what it reads; arguments as in `run`."""
    seen: dict[Node, Any] = in_fp32(node, env, wide) if wide else env
    if node in wide and meaning(node) == "cast":
        return seen[node.all_input_nodes[0]].float()
    made = run_node(node, seen)
    lost = is_low(node) and node not in wide and made.dtype not in LOW
    return made.to(value(node).dtype) if lost else made


@dataclass(frozen=True)
class Sample:
    """One run of a region: its rows `[T, N]`, and the values of all nodes and their inputs."""

    rows: Tensor
    values: dict[Node, Any]


def samples(
    region: Region,
    nodes: list[Node],
    inputs: Inputs,
    dtype: str,
    wide: frozenset[Node],
    every: Callable[[], bool],
    thorough: bool = False,
    few: Callable[[], bool] = lambda: False,
) -> Iterator[Sample]:
    """Run a region on all probe inputs.

    Args:
        wide: nodes in bf16 or fp16 that stay in fp32.
        every: says, after the other inputs, whether to run every value of the model dtype too.
        thorough: run those under every scale.
        few: says, after the other inputs too, whether to run those a few tokens at a time.
    """
    exact, roots = exact_scales(nodes, inputs), max(1, len(inputs.roots))
    counts = token_counts((*inputs.derived, *inputs.sizes, *nodes), region.output)

    def sample(x: Tensor, scales: Sequence[float]) -> Sample:
        return Sample(x.reshape(x.shape[0], -1), run(nodes, region.output, inputs, x, scales, wide))

    def scales_of(round_: int) -> list[float]:
        """Return a value for each root, all different: equal ones would hide which root is used."""
        return [exact[(round_ + index) % len(exact)] for index in range(roots)]

    for round_ in range(max(_LEAST_ROUNDS, len(exact) * roots)):
        scales = scales_of(round_)
        # A graph may divide by a value or multiply by it.
        tried = scales[round_ // len(exact) % roots]
        steps = (tried, 1 / tried) if inputs.roots else (tried,)
        yield from (sample(x, scales) for x in probe_outputs(region.output, dtype, steps, round_, counts))
    if not every():
        return
    at_a_time = few()
    for round_ in range(len(exact)) if thorough else [1]:
        yield from (sample(x, scales_of(round_)) for x in every_output(region.output, dtype, counts, at_a_time))


def exact_scales(nodes: Sequence[Node], inputs: Inputs) -> list[float]:
    """Return the static scales to run a region under: values that all its roots can hold."""
    if not inputs.roots:
        return [PROBE_SCALES[0], *constant_scales(nodes, inputs)[:3]]
    scales: Iterable[float] = PROBE_SCALES
    for root in inputs.roots:
        scales = [float(torch.tensor(scale, dtype=value(root).dtype)) for scale in scales]
    return [scale for scale in scales if 0 < scale < math.inf]


def constant_scales(nodes: Sequence[Node], inputs: Inputs) -> list[float]:
    """Return the static scales that may be written in a region as constants."""
    found: dict[float, None] = {1.0: None}
    for tensor in inputs.constants.values():
        if tensor.numel() and tensor.is_floating_point() and bool((tensor == tensor.flatten()[0]).all()):
            found[float(tensor.flatten()[0])] = None
        elif tensor.numel() == 1 and not tensor.is_floating_point() and abs(int(tensor)) < 64:
            found[2.0 ** int(tensor)] = None  # of ldexp
    for node in (*inputs.derived, *nodes):
        scales = op_name(node.target) in ("mul", "div", "true_divide", "full")
        for argument in node.args:
            number = isinstance(argument, float) or (scales and isinstance(argument, int))
            if number and 0 < argument < float("inf"):  # type: ignore[operator]
                found[float(torch.tensor(float(argument)))] = None  # type: ignore[arg-type]
    return list(found)
