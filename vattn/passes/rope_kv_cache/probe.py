"""Finds out whether a query or key is rotated by RoPE: runs its region and the reference on random inputs.

Both run in fp64, on random factors instead of cosines: results that agree to twelve digits have the same formula. How a
compiled graph rounds inside does not matter here; the op rounds as `vattn.ops.reference.rope` says.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.fx import Node

from vattn.config.attention import AttentionConfig
from vattn.config.rope import ROPE_STYLES, RopeConfig
from vattn.ops.reference.rope import normalise, rotate, scale_query
from vattn.passes.ops import meaning, reduces
from vattn.passes.probe import isolated
from vattn.passes.region import FP8_DTYPES, Refusal, expression, value
from vattn.passes.region_tokens import beyond, reach
from vattn.passes.rope_kv_cache.region import (
    RotationRegion,
    Run,
    constants_of,
    fingerprint,
    history,
    region_between,
)
from vattn.passes.verdicts import judged
from vattn.quantization.formats import MODEL_DTYPES

_MAGNITUDES = (1.0, 1e-3, 40.0, 1e7, 1e-9)
_TOLERANCE = 1e-11


N = TypeVar("N")
M = TypeVar("M")


@dataclass(frozen=True)
class Rotation(Generic[N]):
    """How a query or key is rotated, in the op's terms; nodes, or their positions in the history of the end.

    Attributes:
        rope: style, columns and norm; the query's arithmetic.
        source: the unrotated heads, `[T, heads, D]` in any shape of that order.
        first_head: the first of the source's `heads_of_source` heads that is used.
        cos, sin: the tables, and which part of a complex one: `""`, `"real"` or `"imag"`.
        weight: of the norm, or `None`.
        scale: of the query's quantisation, or `None`.
    """

    rope: RopeConfig
    source: N
    first_head: int
    heads_of_source: int
    cos: tuple[N, str]
    sin: tuple[N, str]
    weight: N | None
    scale: N | None

    def named(self, name: Callable[[N], M]) -> Rotation[M]:
        """Return the rotation with other names of its nodes."""
        weight, scale = (None if at is None else name(at) for at in (self.weight, self.scale))
        cos, sin = ((name(at), part) for at, part in (self.cos, self.sin))
        return Rotation(self.rope, name(self.source), self.first_head, self.heads_of_source, cos, sin, weight, scale)


def classify_rotation(end: Node, num_heads: int, config: AttentionConfig) -> tuple[Rotation[Node], list[Node]]:
    """Return how a query or key `[T, heads, D]` is rotated, and the history of its end.

    Raises:
        Refusal: it is no rotation that the op has; `near` if it looks like one.
    """
    past = history(end)
    key = fingerprint(end, past, f"rope {num_heads} {config.num_kv_heads} {config.head_size} {config.dtype}")
    with isolated():
        found = judged(key, past, end, lambda: _classify(end, past, num_heads, config).named(past.index))
    return found.named(past.__getitem__), past


def _classify(end: Node, past: Sequence[Node], num_heads: int, config: AttentionConfig) -> Rotation[Node]:
    first: Refusal | None = None
    for source, heads in _sources(end, past, num_heads, config):
        region = None
        try:
            region = region_between(source, end, past)
            return _Trial(region, num_heads, heads, config).match()
        except Refusal as refusal:
            rotates = region is not None and (_reads_angles(past) or mixes_columns(region, config.head_size))
            if first is None or (refusal.near and rotates and not first.near):
                first = Refusal(refusal.reason, refusal.node, near=refusal.near and rotates)
    raise first or Refusal(f"nothing in {config.dtype} is rotated into it", end)


def _reads_angles(past: Sequence[Node]) -> bool:
    return "angle" in map(meaning, past)


def mixes_columns(region: RotationRegion, head_size: int) -> bool:
    """Return whether the first or last column of a head takes part in some others, not in all, as in a rotation.

    With a norm ahead it takes part in all: false.
    """
    run = Run(region)
    ones = {leaf: torch.ones(run.shape(leaf), dtype=torch.float64) for leaf in region.leaves}
    shape = run.shape(region.source)
    for column in (0, -1):
        x = torch.ones(shape, dtype=torch.float64).view(-1, head_size)
        x[:, column] = torch.nan
        made = run({**ones, region.source: x.view(shape)}).reshape(-1, head_size).isnan().any(0)
        if not made.all() and made.sum() > made[column]:
            return True
    return False


def _sources(end: Node, past: Sequence[Node], num_heads: int, config: AttentionConfig) -> Iterator[tuple[Node, int]]:
    """Yield nodes that may hold the unrotated heads, the farthest first, and how many heads they hold."""
    tokens, dtype = value(end).shape[0], MODEL_DTYPES[config.dtype]
    wider: list[tuple[Node, int]] = []
    constants = constants_of(past)
    for node in past[:-1]:
        val = value(node)
        if not isinstance(val, Tensor) or val.dtype != dtype or not val.dim() or node in constants:
            continue
        heads = expression(val.numel()) / (expression(tokens) * config.head_size)
        if not heads.is_Integer or int(heads) < num_heads:
            continue
        if int(heads) == num_heads:
            yield node, num_heads
        else:
            wider.append((node, int(heads)))
    yield from reversed(wider)


class _Trial:
    """Compares one region with the reference on random inputs."""

    def __init__(self, region: RotationRegion, num_heads: int, heads: int, config: AttentionConfig) -> None:
        self.region, self.num_heads, self.heads, self.config = region, num_heads, heads, config
        self.run = Run(region)
        tokens = value(region.end).shape[0]
        self.tokens = self.run.size(tokens)
        furthest = 0 if isinstance(tokens, int) else reach(region.nodes, region.end)
        if furthest >= self.tokens:
            raise beyond(furthest, region.end)
        self.is_fp8 = value(region.end).dtype in FP8_DTYPES
        kinds = {leaf: self._kind(leaf) for leaf in region.leaves}
        self.tables, self.weights, self.scales = (
            [leaf for leaf, found in kinds.items() if found == kind] for kind in ("table", "weight", "scale")
        )

    def _kind(self, leaf: Node) -> str:
        count, size = self._count(leaf), self.config.head_size
        varies = any(expression(n).free_symbols for n in value(leaf).shape)
        whole = not varies and not _is_per_token(leaf, self.region.end)
        if whole and count == size:
            return "weight"
        if whole and count in (1, self.config.num_kv_heads):
            return "scale"
        if self.tokens % self._rows(leaf) == 0 and self._columns(leaf) <= size:
            return "table"  # of the tokens, or of a sequence for all sequences of a batch
        shape = tuple(map(str, value(leaf).shape))
        raise Refusal(f"it also depends on {leaf.name} of shape {shape}", self.region.end, near=True)

    def _rows(self, table: Node) -> int:
        return int(self.run.size(table_rows(table, value(self.region.end).shape[0])))

    def _count(self, leaf: Node) -> int:
        return math.prod(self.run.shape(leaf))

    def _columns(self, table: Node) -> int:
        return self._count(table) // self._rows(table)

    def match(self) -> Rotation[Node]:
        """Return the rotation that the region computes.

        Raises:
            Refusal: none that the op has.
        """
        self._check_leaves()
        samples = [self._sample(seed) for seed in range(2)]
        if self.is_fp8 and not self.run.clamped:
            raise Refusal("its quantisation does not clamp before the cast", self.region.end, near=True)
        for rotation in self._candidates():
            first_head = self._agrees(rotation, samples)
            if first_head is not None:
                return replace(rotation, first_head=first_head)
        raise Refusal(
            "it is computed from cos and sin, but not as a rotation that the op has", self.region.end, near=True
        )

    def _check_leaves(self) -> None:
        end = self.region.end
        if not self.tables:
            raise Refusal("no rotation makes it", end)
        if len(self.tables) > 2 or (len(self.tables) == 2 and any(value(t).is_complex() for t in self.tables)):
            listed = ", ".join(node.name for node in self.tables)
            raise Refusal(f"it depends on more than two tables ({listed})", end, near=True)
        if len(self.tables) == 1 and not value(self.tables[0]).is_complex():
            raise Refusal(f"it depends on one table alone ({self.tables[0].name})", end, near=True)
        columns = [self._columns(table) for table in self.tables]
        if len(set(columns)) > 1:
            raise Refusal(f"its tables have {columns[0]} and {columns[1]} columns", end, near=True)
        if len(self.weights) > 1:
            raise Refusal("it depends on more than one weight", end, near=True)
        if len(self.scales) != int(self.is_fp8):
            why = "its FP8 scale is a constant of the graph" if self.is_fp8 else "it is scaled"
            raise Refusal(why, end, near=True)

    def _sample(self, seed: int) -> tuple[dict[Node, Tensor], Tensor]:
        rng = torch.Generator().manual_seed(seed)
        inputs: dict[Node, Tensor] = {}
        for node in (self.region.source, *self.region.leaves):
            shape = self.run.shape(node)
            x = torch.randn(shape, generator=rng, dtype=torch.float64)
            if value(node).is_complex():
                x = torch.complex(x, torch.randn(shape, generator=rng, dtype=torch.float64))
            inputs[node] = x
        for scale in self.scales:
            inputs[scale] = inputs[scale].abs() * 0.02 + 0.001
        x = inputs[self.region.source].view(self.tokens, -1)
        magnitudes = torch.tensor(_MAGNITUDES, dtype=torch.float64).roll(seed)
        x *= magnitudes[torch.arange(self.tokens) % len(magnitudes), None]
        if seed == 1:
            x[0, 3::7] = torch.nan
        return inputs, self.run(dict(inputs)).reshape(self.tokens, self.num_heads, self.config.head_size)

    def _candidates(self) -> Iterator[Rotation[Node]]:
        if len(self.tables) == 1:
            pairs = [((self.tables[0], "real"), (self.tables[0], "imag"))]
        else:
            one, other = ((table, "") for table in self.tables)
            pairs = [(one, other), (other, one)]
        weight, scale = (nodes[0] if nodes else None for nodes in (self.weights, self.scales))
        for (cos, sin), style, rotary, (norm, eps), arithmetic in itertools.product(
            pairs,
            ROPE_STYLES,
            self._rotary_dims(),
            self._norms(),
            ("divide", "multiply") if self.is_fp8 else ("divide",),
        ):
            rope = RopeConfig(rotary, style, norm, eps, round_query=False, query_arithmetic=arithmetic)
            yield Rotation(rope, self.region.source, 0, self.heads, cos, sin, weight, scale)

    def _rotary_dims(self) -> list[int]:
        columns = self._columns(self.tables[0])
        return [size for size in (2 * columns, columns) if size <= self.config.head_size and size % 2 == 0]

    def _norms(self) -> list[tuple[str, float]]:
        sums = [node for node in self.region.nodes if reduces(node) and meaning(node) != "extreme"]
        if not sums and "norm" not in map(meaning, self.region.nodes):
            return [("none", 0.0)]
        numbers = {0.0: None}
        for node in self.region.nodes:
            for argument in (*node.args, *node.kwargs.values()):
                if isinstance(argument, float) and 0 < argument < 1:
                    numbers[argument] = None
        kinds = ("rms", "rms_one_plus") if self.weights else ("rms",)
        return [*itertools.product(kinds, numbers)]

    def _agrees(self, rotation: Rotation[Node], samples: Sequence[tuple[dict[Node, Tensor], Tensor]]) -> int | None:
        """Return the first head of the source that the end is computed from, `None` if they disagree."""
        found: int | None = None
        for inputs, got in samples:
            want = self._reference(rotation, inputs)
            starts = range(self.heads - self.num_heads + 1) if found is None else (found,)
            found = next((at for at in starts if _close(got, want[:, at : at + self.num_heads])), None)
            if found is None:
                return None
        return found

    def _reference(self, rotation: Rotation[Node], inputs: dict[Node, Tensor]) -> Tensor:
        def table(place: tuple[Node, str]) -> Tensor:
            count = self._rows(place[0])
            rows = inputs[place[0]].reshape(count, -1).repeat(self.tokens // count, 1)
            return getattr(rows, place[1]) if place[1] else rows

        x = inputs[rotation.source].reshape(self.tokens, self.heads, self.config.head_size)
        weight = None if rotation.weight is None else inputs[rotation.weight].reshape(-1)
        x = rotate(normalise(x, weight, rotation.rope), table(rotation.cos), table(rotation.sin), rotation.rope)
        if rotation.scale is None:
            return x
        scale, group = inputs[rotation.scale].reshape(-1), self.config.group_size
        if self.heads != self.num_heads and scale.numel() > 1:
            raise Refusal("heads with scales of their own are cut from more heads", self.region.end, near=True)
        return scale_query(x, scale, self.heads // group if scale.numel() > 1 else 1, rotation.rope.query_arithmetic)


def _is_per_token(leaf: Node, end: Node) -> bool:
    """Return whether the first sizes of a tensor of at least two dimensions multiply to the token count."""
    tokens = value(end).shape[0]
    return value(leaf).dim() > 1 and table_rows(leaf, tokens) == expression(tokens)


def table_rows(table: Node, tokens: int | torch.SymInt) -> Any:
    """Return how many rows a table has: one for each token, or else one for each row of its last dimension."""
    product = expression(1)
    for size in value(table).shape[:-1]:
        product = expression(product * expression(size))
        if product == expression(tokens):
            break
    return product


def _close(got: Tensor, want: Tensor) -> bool:
    size = want.nan_to_num().abs().amax(dim=-1, keepdim=True)
    same = (got - want).abs() <= _TOLERANCE * size
    return bool((same | (got.isnan() & want.isnan())).all())
