"""Quantisers that are changed in one place: at a value, a threshold, a row, a column, a token, or in a rounding.

A program is the graph of a plain quantiser with a few nodes put behind one of its nodes. The places, values and tokens
are drawn from what that node holds when the program is judged, so a change that matters is met there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
from fx_programs import COLUMNS, HEADS, WIDTH, Template, copied, run
from torch import Tensor
from torch.fx import GraphModule, Node

from vattn.ops.fusion_notes import NodeReport
from vattn.passes.output_quant.match import Classifier
from vattn.passes.pipeline import fuse_graph

aten, cast = torch.ops.aten, torch.ops.prims.convert_element_type.default
E4M3 = torch.float8_e4m3fn


def rounded(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(E4M3)


def largest(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True)


def dynamic(width: int, scale_of: Callable[[Tensor], Tensor], multiply: bool = False) -> Callable[..., Any]:
    def function(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        x = o.float().view(-1, COLUMNS // width, width)
        scale = scale_of(largest(x))
        codes = rounded(x * scale.reciprocal() if multiply else x / scale)
        return codes.view(-1, COLUMNS), scale.flatten(1)

    return function


def factor(width: int, factor_of: Callable[[Tensor], Tensor], inverse: bool = False) -> Callable[..., Any]:
    def function(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        x = o.float().view(-1, COLUMNS // width, width)
        most = largest(x).clamp(min=1e-4)
        by = factor_of(most)
        return rounded(x * by).view(-1, COLUMNS), (by.reciprocal() if inverse else most / 448.0).flatten(1)

    return function


def int8(limit: float, multiply: bool = False) -> Callable[..., Any]:
    def function(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        x = o.float()
        scale = (largest(x) / limit).clamp(min=1e-7)
        codes = torch.round(x * (1.0 / scale) if multiply else x / scale)
        return codes.clamp(-128, 127).to(torch.int8), scale

    return function


def mx_ceil(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    x = o.float().view(-1, COLUMNS // 32, 32)
    descale = largest(x) / 448.0
    exponent = (torch.ceil(torch.log2(descale)).clamp(-127, 127) + 127).to(torch.uint8)
    exponent = torch.where(descale.isnan(), 255, torch.where(descale.isinf(), 254, exponent))
    power = torch.where(exponent == 0, 1.0, torch.exp2(127 - exponent.float()))
    by = torch.where(exponent == 255, descale, torch.where(exponent == 254, 2.0**-127, power))
    return rounded(x * by).view(-1, COLUMNS), exponent.view(torch.float8_e8m0fnu).flatten(1)


def mx_floor(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    x = o.float().view(-1, COLUMNS // 32, 32)
    most = largest(x)
    exponent = (((most.view(torch.int32) >> 23) & 255) - 8).clamp(min=0)
    exponent = torch.where(most.isnan(), 255, exponent)
    scale = (exponent << 23).view(torch.float32).clamp(min=2.0**-126)
    return rounded(x / scale).view(-1, COLUMNS), exponent.to(torch.uint8).view(torch.float8_e8m0fnu).flatten(1)


def nvfp4(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    groups = o.float().view(-1, COLUMNS // 16, 16)
    block = rounded(groups.abs().amax(-1) / 6.0 / s)
    step = block.float() * s
    x = (groups / torch.where(step == 0, torch.inf, step).unsqueeze(-1)).flatten(1)
    size = x.abs()
    code = (size > 0.25).to(torch.uint8) + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code = code + (size > 2.5) + (size >= 3.5) + (size > 5.0)
    code = torch.where(x.isnan(), 7, code + 8 * x.signbit().to(torch.uint8)).to(torch.uint8)
    return code[..., ::2] | (code[..., 1::2] << 4), block


def floor(m: Tensor) -> Tensor:
    return m.clamp(min=1e-10) / 448.0


BASES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "static": lambda o, s: rounded(o.float() / s),
    "static of heads": lambda o, s: rounded(o.view(-1, HEADS, WIDTH).float() / s).view(-1, COLUMNS),
    "static, multiplied": lambda o, s: rounded(o.float() * s),
    "static, by the reciprocal": lambda o, s: rounded(o.float() * s.reciprocal()),
    "static, by a number": lambda o, s: rounded(o.float() / 0.02),
    "static in fp64": lambda o, s: rounded(o.double() / s.double()),
    "static of a slice": lambda o, s: rounded(o[:, :128].float() / s),
    "static of the last tokens": lambda o, s: rounded(o[3:].float() / s),
    "static, clamped first": lambda o, s: rounded(o.float().clamp(-448 * s, 448 * s) / s),
    "static, dequantised": lambda o, s: rounded(o.float() / s).float() * s,
    "static by an op": lambda o, s: torch.ops.vattn.quant_fp8_static(o.float(), s),
    "token": dynamic(COLUMNS, floor),
    "token, multiplied": dynamic(COLUMNS, floor, True),
    "token, no floor": dynamic(COLUMNS, lambda m: m / 448.0),
    "groups": dynamic(64, floor),
    "groups of 128, floor of the scale": dynamic(128, lambda m: (m / 448.0).clamp(min=3e-7)),
    "groups, powers of two": dynamic(64, lambda m: torch.exp2(torch.ceil(torch.log2(floor(m))))),
    "groups by an op": lambda o, s: torch.ops.vattn.quant_fp8_group(o.float(), 64, False, False),
    "nvfp4": nvfp4,
    "groups times a factor": factor(128, lambda m: 448.0 / m),
    "token times a factor, its inverse kept": factor(COLUMNS, lambda m: 448.0 / m, True),
    "groups times a quotient": factor(64, lambda m: torch.full_like(m, 448.0) / m),
    "int8": int8(127.0),
    "int8, multiplied": int8(127.0, True),
    "int8, full range": int8(127.5),
    "mx, ceil": mx_ceil,
    "mx, floor": mx_floor,
}


@cache
def outputs(seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return outputs `[T, COLUMNS]` to judge by: every 16-bit value in order and in another, and normal numbers."""
    rng = torch.Generator().manual_seed(seed)
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16 if dtype == torch.float32 else dtype)
    finite = every[every.isfinite()]
    mixed = finite[torch.randperm(len(finite), generator=rng)][: len(finite) // COLUMNS * COLUMNS]
    near = torch.randn(128, COLUMNS, generator=rng) * torch.exp2(torch.randint(-9, 9, (128, 1), generator=rng).float())
    if dtype == torch.float32:
        near = torch.cat((near, near.bfloat16().float()))
    return torch.cat((near.to(dtype), every.view(-1, COLUMNS).to(dtype), mixed.view(-1, COLUMNS).to(dtype)))


CONDITIONS = (
    aten.eq.Scalar,
    aten.gt.Scalar,
    aten.lt.Scalar,
    aten.ge.Scalar,
    aten.le.Scalar,
    aten.isfinite.default,
    aten.bitwise_and.Tensor,
)
"""What the changes compare with; `bitwise_and` joins two."""

_fakes: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}


def fake_like(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a fake tensor of the same shape, the same one each time."""
    if (id(like), dtype) not in _fakes:
        with like.fake_mode:  # type: ignore[attr-defined]
            _fakes[id(like), dtype] = like, torch.empty_like(like, dtype=dtype)
    return _fakes[id(like), dtype][1]


@dataclass
class Site:
    """A node of a program that is changed.

    Attributes:
        node: what is changed.
        held: what it holds when the program is judged.
        rng: draws the change.
    """

    node: Node
    held: Tensor
    rng: random.Random

    def call(self, target: Any, *args: Any) -> Node:
        """Add a node before all nodes that read the site."""
        made = self.node.graph.call_function(target, args)
        like = self.node.meta["val"]
        shapes = [arg.meta["val"].shape for arg in args if isinstance(arg, Node)]
        if torch.Tag.pointwise in target.tags and like.shape in shapes:
            # Asking a fake tensor each time would take longer than the passes do.
            dtype = torch.bool if target in CONDITIONS else args[1] if target is cast else like.dtype
            made.meta = {"val": fake_like(like, dtype)}
        else:
            with like.fake_mode:
                made.meta = {"val": target(*torch.fx.map_arg(args, lambda node: node.meta["val"]))}
        return made

    def place(self) -> tuple[int, ...]:
        """Draw the place of a finite element, away from the rows that a slice leaves out."""
        for _ in range(50):
            at = tuple(self.rng.randrange(size) for size in self.held.shape)
            if bool(self.held[at].isfinite()):
                break
        return at

    def number(self) -> float:
        """Draw a number: one that the node holds, or one near it."""
        held = float(self.held[self.place()])
        return held if self.rng.random() < 0.7 else held * (1 + self.rng.uniform(-1, 1) * 2.0**-6)

    def factor(self) -> float:
        return 1 + self.rng.choice((1, -1)) * 2.0 ** -self.rng.randint(1, 20)

    def full(self, number: float) -> Node:
        return self.call(aten.full.default, [], number)

    def changed(self) -> Node:
        """Return the node changed everywhere."""
        return self.call(aten.mul.Tensor, self.node, self.factor())

    def where(self, condition: Node, there: Node | None = None) -> Node:
        return self.call(aten.where.self, condition, there or self.changed(), self.node)

    def index(self, dim: int) -> Node:
        """Return the indices along a dimension, in a shape that broadcasts."""
        val = self.node.meta["val"]
        like = self.node
        for other in range(val.dim()):
            if other != dim % val.dim():
                like = self.call(aten.slice.Tensor, like, other, 0, 1)
        ones = self.call(aten.ones_like.default, like)
        return self.call(aten.sub.Tensor, self.call(aten.cumsum.default, ones, dim % val.dim()), 1)


def value(site: Site) -> Node:
    at = site.number()
    return site.where(site.call(aten.eq.Scalar, site.node, at), site.full(at * site.factor()))


def threshold(site: Site) -> Node:
    compare = site.rng.choice((aten.gt.Scalar, aten.lt.Scalar, aten.ge.Scalar, aten.le.Scalar))
    node = site.call(aten.abs.default, site.node) if site.rng.random() < 0.5 else site.node
    return site.where(site.call(compare, node, site.number()))


def interval(site: Site) -> Node:
    at = site.number()
    low, high = sorted((at, at * (1 + 2.0 ** -site.rng.randint(3, 20))))
    inner = site.where(site.call(aten.lt.Scalar, site.node, high))
    return site.where(site.call(aten.ge.Scalar, site.node, low), inner)


def limit(site: Site) -> Node:
    at = abs(site.number())
    return site.call(
        *site.rng.choice(((aten.clamp_max.default, site.node, at), (aten.clamp.default, site.node, -at, at)))
    )


def bump(site: Site) -> Node:
    """Add something near a value, without a comparison."""
    at = site.number()
    off = site.call(aten.abs.default, site.call(aten.sub.Tensor, site.node, at))
    near = site.call(aten.relu.default, site.call(aten.rsub.Scalar, off, abs(at) * 2.0 ** -site.rng.randint(5, 14)))
    return site.call(aten.add.Tensor, site.node, site.call(aten.mul.Tensor, near, 2.0 ** site.rng.randint(-3, 1)))


def row(site: Site) -> Node:
    return site.where(site.call(aten.eq.Scalar, site.index(0), float(site.place()[0])))


def first_rows(site: Site) -> Node:
    at = site.rng.randint(1, 40)
    head = site.call(aten.slice.Tensor, site.node, 0, 0, at)
    tail = site.call(aten.slice.Tensor, site.changed(), 0, at, 2**63 - 1)
    return site.call(aten.cat.default, [head, tail])


def column(site: Site) -> Node:
    return site.where(site.call(aten.eq.Scalar, site.index(-1), float(site.place()[-1])))


def constant_column(site: Site) -> Node:
    """Multiply by a constant that is one but in one column."""
    columns = int(site.node.meta["val"].shape[-1])
    table = torch.ones(columns, dtype=site.node.meta["val"].dtype)
    table[site.rng.randrange(columns)] *= site.factor()
    site.node.graph.owning_module.register_buffer("_table", table)
    read = site.node.graph.get_attr("_table")
    read.meta["val"] = site.node.meta["val"].fake_mode.from_tensor(table)
    return site.call(aten.mul.Tensor, site.node, read)


def value_in_a_column(site: Site) -> Node:
    at = site.place()
    there = site.call(aten.eq.Scalar, site.index(-1), float(at[-1]))
    return site.where(
        site.call(aten.bitwise_and.Tensor, there, site.call(aten.eq.Scalar, site.node, float(site.held[at])))
    )


def value_in_a_row(site: Site) -> Node:
    at = site.place()
    there = site.call(aten.eq.Scalar, site.index(0), float(at[0]))
    return site.where(
        site.call(aten.bitwise_and.Tensor, there, site.call(aten.eq.Scalar, site.node, float(site.held[at])))
    )


def neighbour(site: Site) -> Node:
    moved = site.call(aten.roll.default, site.node, [1], [site.rng.choice((0, -1))])
    if site.rng.random() < 0.5:
        return site.call(aten.add.Tensor, site.node, site.call(aten.mul.Tensor, moved, 2.0 ** -site.rng.randint(4, 40)))
    return site.where(site.call(aten.eq.Scalar, moved, site.number()))


def whole(site: Site) -> Node:
    """Depend on the whole tensor."""
    most = site.call(aten.amax.default, site.node)
    if site.rng.random() < 0.5:
        return site.where(site.call(aten.gt.Scalar, most, abs(site.number())))
    return site.call(aten.add.Tensor, site.node, site.call(aten.mul.Tensor, most, 2.0 ** -site.rng.randint(8, 40)))


def largest_of_row(site: Site) -> Node:
    dim = [site.node.meta["val"].dim() - 1]
    most = site.call(aten.amax.default, site.call(aten.abs.default, site.node), dim, True)
    at = float(site.held.abs().amax(-1).flatten()[site.rng.randrange(site.held[..., 0].numel())])
    return site.where(site.call(aten.eq.Scalar, most, at))


def rounding(site: Site) -> Node:
    dtype = site.rng.choice((torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2, E4M3))
    return site.call(cast, site.call(cast, site.node, dtype), site.node.meta["val"].dtype)


def scaled(site: Site) -> Node:
    return site.changed()


def scaled_and_back(site: Site) -> Node:
    factor = site.rng.uniform(0.3, 3)
    return site.call(aten.div.Tensor, site.call(aten.mul.Tensor, site.node, factor), factor)


def shifted(site: Site) -> Node:
    return site.call(aten.add.Tensor, site.node, abs(site.number()) * 2.0 ** -site.rng.randint(6, 40))


def reciprocal(site: Site) -> Node:
    return site.call(aten.reciprocal.default, site.call(aten.reciprocal.default, site.node))


def stepped(site: Site) -> Node:
    """Drop bits of large numbers."""
    step = 2.0 ** site.rng.randint(-20, 0)
    return site.call(aten.mul.Tensor, site.call(aten.floor.default, site.call(aten.div.Tensor, site.node, step)), step)


def nothing(site: Site) -> Node:
    same: list[Callable[[], Node]] = [
        lambda: site.where(site.call(aten.eq.Scalar, site.node, site.number()), site.node),
        lambda: site.call(aten.mul.Tensor, site.node, 1.0),
        lambda: site.call(aten.neg.default, site.call(aten.neg.default, site.node)),
        lambda: site.call(cast, site.call(cast, site.node, torch.float64), site.node.meta["val"].dtype),
        lambda: site.where(site.call(aten.isfinite.default, site.node), site.node),
        lambda: site.call(aten.clone.default, site.node),
    ]
    return site.rng.choice(same)()


CHANGES: dict[str, Callable[[Site], Node]] = {
    change.__name__: change
    for change in (
        value,
        threshold,
        interval,
        limit,
        bump,
        row,
        first_rows,
        column,
        constant_column,
        value_in_a_column,
        value_in_a_row,
        neighbour,
        whole,
        largest_of_row,
        rounding,
        scaled,
        scaled_and_back,
        shifted,
        reciprocal,
        stepped,
        nothing,
    )
}


def same_bytes(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    nan = a.float().isnan() & b.float().isnan() if a.is_floating_point() else torch.zeros_like(a, dtype=torch.bool)
    bits = [
        x.contiguous().view(torch.uint8).view(*a.shape, -1) if x.dim() else x.reshape(1).view(torch.uint8)
        for x in (a, b)
    ]
    return bool(((bits[0] == bits[1]).all(-1) | nan).all())


@dataclass
class Verdict:
    """What became of one program.

    Attributes:
        name: its quantiser, its change and the node that was changed.
        fused, wrong: whether it fused, and whether that changed a byte.
        idle: whether the change changes nothing where it is judged.
    """

    name: str
    fused: bool
    wrong: bool
    idle: bool


class Adversary:
    """Draws and judges programs.

    Args:
        bases: the quantisers that are changed.
    """

    changes = CHANGES

    def __init__(
        self, bases: dict[str, Callable[[Tensor, Tensor], Any]] = BASES, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.dtype, self.template = dtype, Template(dtype)
        self.bases = {name: self.template.behind(program) for name, program in bases.items()}
        self._block: tuple[int, Any] = -1, None

    def run(self, gm: GraphModule, output: Tensor, scale: Tensor, keep: bool = False) -> tuple[Any, dict[Node, Any]]:
        return run(gm, output, scale, keep)

    def fuses(self, report: NodeReport) -> bool:
        return report.outcome == "fused"

    def _base(self, block: int) -> Any:
        """Return a quantiser's name, the output and scale to judge by, and what its nodes hold then."""
        if self._block[0] != block:
            rng = random.Random(-1 - block)
            base, output = rng.choice(list(self.bases)), outputs(block % 3, self.dtype)
            scale = torch.tensor([2.0 ** rng.uniform(-9, 3)])
            plain, held = self.run(self.bases[base], output, scale, keep=True)
            self._block = block, (base, output, scale, plain, {node.name: made for node, made in held.items()})
        return self._block[1]

    def judge(self, seed: int) -> Verdict | None:
        """Judge the program of a seed; `None`: the change cannot be made there. A hundred share their quantiser."""
        base, output, scale, plain, held = self._base(seed // 100)
        rng = random.Random(seed)
        change = rng.choice(list(self.changes))
        gm = copied(self.bases[base])
        sites = [node for node in gm.graph.nodes if can_change(node, held.get(node.name))]
        node = rng.choice(sites)
        readers = list(node.users)
        with gm.graph.inserting_before(node.next):
            try:
                changed = self.changes[change](Site(node, held[node.name], rng))
            except (RuntimeError, TypeError, IndexError, ValueError, ZeroDivisionError):
                return None
        if changed.meta["val"].shape != node.meta["val"].shape or changed.meta["val"].dtype != node.meta["val"].dtype:
            return None
        for reader in readers:
            reader.replace_input_with(node, changed)
        name = f"{base}, {change} of {node.name}, seed {seed}"
        fused = copied(gm)
        with mock.patch.object(Classifier, "_why", return_value="not computed"):  # it takes as long as the rest
            (report,) = fuse_graph(fused.graph)
        if not self.fuses(report):
            return Verdict(name, False, False, False)
        wanted, _ = self.run(gm, output, scale)
        got, _ = self.run(GraphModule(fused, fused.graph), output, scale)
        return Verdict(name, True, not all(map(same_bytes, got, wanted)), all(map(same_bytes, plain, wanted)))


def can_change(node: Node, made: Any) -> bool:
    """Return whether a change can follow a node: generated code rounds it as running it does."""
    wide = isinstance(made, Tensor) and made.dtype in (torch.float32, torch.float64)
    return wide and made.numel() > 0 and bool(made.isfinite().any()) and "site" in node.meta
