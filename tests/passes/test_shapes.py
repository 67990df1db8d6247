"""Token counts that are expressions: whatever fuses for packed tokens fuses for batches, padded, flattened or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from forms import group, per_token, rounded, static
from harness import HEADS, WIDTH, Bundle, Capture, inputs_of, step
from library_forms import nvfp4
from queries import PER_HEAD, PER_TENSOR, Written
from rope_forms import halves_turned
from test_forms import assert_same_bits
from torch import Tensor, nn
from torch.nn.functional import pad

import vattn
from vattn.ops.fusion_notes import FUSED
from vattn.passes.query_quant.find import IN_LOAD

compiler = partial(torch.compile, dynamic=False, fullgraph=True)
"""No size varies but those that are marked."""


def groups(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    x = o.float().unflatten(-1, (-1, 64))
    scales = x.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return rounded(x / scales).flatten(-2), scales.squeeze(-1)


def pairs_of_nvfp4(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = nvfp4()(o, s)
    return codes.view(*o.shape[:-1], -1), scales.view(*o.shape[:-1], -1)


FORMS: dict[str, Callable[..., Any]] = {
    "static": static,
    "per token": per_token,
    "groups": groups,
}
FLAT_FORMS = {"our op": partial(group, size=128)}
"""Forms of two dimensions alone."""
SLOW_FORMS = {"nvfp4": pairs_of_nvfp4}
SLOW_SHAPES = ("[B, S]", "unbacked")
"""Shapes in which `SLOW_FORMS` are tried."""


@dataclass(frozen=True)
class Shape:
    """How a model's tensors `[..., columns]` become tokens for attention, and its output what is quantised.

    Attributes:
        sizes: of the first dimensions in two steps; one that differs varies.
        enter: makes tokens `[T, columns]` of a tensor; it gets a mask of the first dimensions too.
        leave: makes what is quantised of an output `[T, columns]`; it gets the model's tensor and the mask too.
    """

    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    enter: Callable[[Tensor, Tensor], Tensor] = lambda x, mask: x.flatten(0, -2)
    leave: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda out, x, mask: out

    @property
    def varying(self) -> list[int]:
        return [dim for dim, (a, b) in enumerate(zip(*self.sizes, strict=True)) if a != b]


def as_given(out: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    return out.view(*x.shape[:-1], -1)


def padded(x: Tensor, mask: Tensor) -> Tensor:
    return pad(x, (0, 0, 0, -x.shape[0] % 8))


def with_a_prefix(x: Tensor, mask: Tensor) -> Tensor:
    return torch.cat((x.new_ones(x.shape[0], 1, x.shape[2]), x), 1).flatten(0, 1)


def behind_a_prefix(out: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    return out.view(x.shape[0], x.shape[1] + 1, -1)


SHAPES: dict[str, Shape] = {
    "T": Shape(((7,), (9,))),
    "B*S": Shape(((3, 5), (2, 7))),
    "[B, S]": Shape(((3, 5), (2, 7)), leave=as_given),
    "B*5": Shape(((3, 5), (4, 5))),
    "[B, 5]": Shape(((3, 5), (4, 5)), leave=as_given),
    "[3, S]": Shape(((3, 5), (3, 7)), leave=as_given),
    "[A, B, S]": Shape(((2, 3, 5), (3, 2, 4)), leave=as_given),
    "padded to 8": Shape(((13,), (6,)), padded),
    "padded and cut": Shape(((13,), (6,)), padded, lambda out, x, mask: out[: x.shape[0]]),
    "a prefix": Shape(((3, 5), (2, 7)), with_a_prefix),
    "a prefix, [B, S + 1]": Shape(((3, 5), (2, 7)), with_a_prefix, behind_a_prefix),
    "unbacked": Shape(((3, 5), (2, 7)), lambda x, mask: x[mask]),
}


class Model:
    """Attention over all tokens of tensors of a shape, for each form, and the form."""

    def __init__(self, shape: Shape, forms: list[Callable[..., Any]]) -> None:
        self.shape, self.bundle = shape, Bundle(forms)

    def __call__(self, *given: Tensor) -> tuple[Any, ...]:
        *parts, mask, starts, scale = given
        query, key, value = (self.shape.enter(x, mask).unflatten(1, (-1, WIDTH)) for x in parts)
        results = []
        for form, config in zip(self.bundle.forms, self.bundle.configs, strict=True):
            out = torch.empty_like(query)
            args = (query, key, value, starts, starts, out, None, None, *[None] * 10, [], None, config)
            torch.ops.vattn.varlen_attention(*args)
            results.append(form(self.shape.leave(out.flatten(1), parts[0], mask), scale))
        return tuple(results)

    def inputs(self, sizes: tuple[int, ...]) -> list[Tensor]:
        mask = torch.arange(torch.Size(sizes).numel()).view(sizes) % 4 != 1
        parts = [x.view(*sizes, -1) for x in inputs_of(mask.numel())]
        tokens = self.shape.enter(parts[0], mask).shape[0]
        return [*parts, mask, torch.tensor([0, 2, tokens], dtype=torch.int32), torch.tensor([0.0137])]


def mark(given: list[Tensor], dims: list[int]) -> None:
    for x in given:
        for dim in dims:
            torch._dynamo.mark_dynamic(x, dim)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SHAPES)
def test_an_output_fuses(name: str) -> None:
    shape = SHAPES[name]
    forms = FORMS | (FLAT_FORMS if shape.leave is Shape.leave else {}) | (SLOW_FORMS if name in SLOW_SHAPES else {})
    model = Model(shape, list(forms.values()))
    capture = Capture(model.__call__, compiler=compiler)
    first = model.inputs(shape.sizes[0])
    mark(first[:4], shape.varying)
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        capture.target(*first)
        missed = {form: str(node) for form, node in zip(forms, capture.report, strict=True) if node.outcome != FUSED}
        assert not missed, missed
        for sizes in shape.sizes:
            results = capture.both(lambda sizes=sizes: capture.target(*model.inputs(sizes)))
            for got, wanted in zip(*results, strict=True):
                assert_same_bits(got, wanted)
    assert len(capture.report) == len(forms)


@pytest.mark.sample(4)
@pytest.mark.parametrize("way", ["divide", "groups"])
@pytest.mark.parametrize("name", ["[B, S]", "[3, S]", "padded to 8", "unbacked"])
def test_a_query_is_quantised_as_it_is_loaded(name: str, way: str) -> None:
    shape, per_head = SHAPES[name], way in PER_HEAD

    def make(model: Written, x: Tensor) -> Tensor:
        return model.proj(x if shape.leave is as_given else shape.enter(x, x[..., 0] > 0))

    model = Written((PER_HEAD if per_head else PER_TENSOR)[way], [0.0137, 0.031] if per_head else None, make)
    capture = Capture(model, compiler=compiler)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for sizes in shape.sizes:
            x = torch.randn(*sizes, HEADS * WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
            mark([x], shape.varying)
            for got, wanted in zip(*capture.both(lambda x=x: capture.target(x)), strict=True):
                assert_same_bits(got, wanted)
    (node,) = capture.report
    assert (node.query, node.query_outcome) == (f"{IN_LOAD}, after mm", FUSED), node


class BatchWithRope(nn.Module):
    """Projections of `[B, S, columns]`, RoPE and attention, as a model without packing writes it.

    Args:
        heads_first: rotate `[B, heads, S, D]`, as transformers does.
        shared: all sequences have the same positions `[S]`.
    """

    def __init__(self, heads_first: bool, shared: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads_first, self.shared = heads_first, shared
        self.qkv = nn.Linear(32, (HEADS + 4) * WIDTH, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.attn = vattn.Attention(HEADS, WIDTH, WIDTH**-0.5, 2, prefix="layers.0.attn")
        self.register_buffer("angles", torch.rand(64, WIDTH // 2) * 7)
        vattn.allocate_kv_cache(self, num_blocks=16, dtype=torch.bfloat16)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        query, key, value = self.qkv(x).split((HEADS * WIDTH, 2 * WIDTH, 2 * WIDTH), dim=-1)
        angles = self.angles[positions[0] if self.shared else positions].unsqueeze(-3 if self.heads_first else -2)
        rows = [self.rotated(heads.unflatten(-1, (-1, WIDTH)), angles) for heads in (query, key)]
        return self.attn(*rows, value.flatten(0, 1)).view(*x.shape[:2], -1)

    def rotated(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x.transpose(1, 2) if self.heads_first else x
        x = halves_turned(x.float(), angles.cos(), angles.sin()).to(x.dtype)
        return (x.transpose(1, 2) if self.heads_first else x).flatten(0, 1)


@pytest.mark.parametrize("shared", [False, True], ids=["positions [B, S]", "positions [S]"])
@pytest.mark.parametrize("heads_first", [False, True], ids=["[B, S, heads]", "[B, heads, S]"])
def test_rope_and_the_cache_update_fuse(heads_first: bool, shared: bool) -> None:
    model = BatchWithRope(heads_first, shared)
    capture = Capture(model, rope="always", compiler=compiler)
    for sizes in ((3, 5), (2, 7)):
        rng = torch.Generator().manual_seed(1)
        x = torch.randn(*sizes, 32, generator=rng).bfloat16()
        positions = torch.arange(sizes[1]).expand(sizes).contiguous()
        mark([x, positions], [0, 1])

        def run(x: Tensor = x, positions: Tensor = positions) -> list[Tensor]:
            model.attn.kv_cache.zero_()
            with step(model, [x.shape[1]] * x.shape[0]):
                return [capture.target(x, positions), model.attn.kv_cache.clone()]

        for got, wanted in zip(*capture.both(run), strict=True):
            assert torch.equal(got, wanted)
    (node,) = capture.report
    assert node.rope_outcome == FUSED, node
