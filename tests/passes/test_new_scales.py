"""int8, MX and factors made of maxima: what is one of them, and what is almost one; graphs put together by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adversary import BASES, factor, largest, rounded
from fx_programs import COLUMNS, Template, copied, run
from served_forms import int8_static, int8_tokens
from test_by_hand import judged, template
from torch import Tensor
from torch.fx import GraphModule

from vattn.passes import proof, verdicts
from vattn.passes.near_miss import dynamic_ways, static_ways
from vattn.passes.pipeline import fuse_graph
from vattn.quantization.codecs import to_int8

INT8 = torch.int8


def tokens(
    scale_of: Callable[[Tensor], Tensor] = lambda m: m / 127.0,
    scaled: Callable[[Tensor], Tensor] = lambda u: u,
    after: Callable[[Tensor], Tensor] = lambda r: r.clamp(-128, 127),
) -> Callable[..., Any]:
    """Return an int8 quantiser of tokens, changed before or after values are rounded."""

    def function(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        x = o.float()
        scale = scale_of(largest(x)).clamp(min=1e-8)
        return after(torch.round(scaled(x / scale))).to(INT8), scale

    return function


def packed_through_int8(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """NVFP4 whose codes are int8 before they are packed."""
    groups = o.float().view(-1, COLUMNS // 16, 16)
    block = rounded(groups.abs().amax(-1) / 6.0 / s)
    step = block.float() * s
    x = (groups / torch.where(step == 0, torch.inf, step).unsqueeze(-1)).flatten(1)
    size = x.abs()
    code = (size > 0.25).to(INT8) + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code = code + (size > 2.5) + (size >= 3.5) + (size > 5.0)
    code = torch.where(x.isnan(), 7, code + 8 * x.signbit().to(INT8)).to(INT8)
    return (code[..., ::2] | (code[..., 1::2] << 4)).to(torch.uint8), block


def mx(
    exponent_of: Callable[[Tensor], Tensor] = lambda m: (m.view(torch.int32) >> 23) - 8,
    stored: Callable[[Tensor], Tensor] = lambda e: e,
    least: float = 2.0**-126,
    nan: int = 255,
) -> Callable[..., Any]:
    def function(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        x = o.float().view(-1, COLUMNS // 32, 32)
        most = largest(x)
        exponent = torch.where(most.isnan(), nan, exponent_of(most).clamp(min=0))
        scale = (exponent << 23).view(torch.float32).clamp(min=least)
        return rounded(x / scale).view(o.shape), stored(exponent).to(torch.uint8).squeeze(-1)

    return function


FUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "no limits": (tokens(after=lambda r: r), "int8_per_token"),
    "limits by tensors": (
        tokens(after=lambda r: torch.maximum(torch.minimum(r, torch.tensor(127.0)), torch.tensor(-128.0))),
        "int8_per_token",
    ),
    "symmetric limits": (tokens(after=lambda r: r.clamp(-127, 127)), "int8_per_token"),
    "limited first": (tokens(scaled=lambda u: u.clamp(-128, 127), after=lambda r: r), "int8_per_token"),
    "full range": (tokens(lambda m: m / 127.5), "int8_per_token_full"),
    "an int8 view of heads": (
        lambda o, s: tuple(t.view(-1, 4, 64) if t.dtype == INT8 else t for t in tokens()(o, s)),
        "int8_per_token",
    ),
    "numbers by ops": (tokens(lambda m: m / 127.0 * torch.ones(m.shape[0], 1).clamp(max=1.0)), "int8_per_token"),
    "NVFP4 through int8": (packed_through_int8, "nvfp4"),
    "MX": (mx(), "mxfp8_floor"),
    "MX, e8m0": (lambda o, s: tuple(t.view(torch.float8_e8m0fnu) if t.dtype == torch.uint8 else t
                                    for t in mx()(o, s)), "mxfp8_floor"),
    "a factor of tokens": (factor(COLUMNS, lambda m: 448.0 / m), "fp8_per_token"),
    "a quotient of groups": (factor(128, lambda m: torch.full_like(m, 448.0) / m, True), "fp8_group128"),
}  # fmt: skip


@pytest.mark.parametrize("name", FUSED)
def test_these_are_formats(name: str) -> None:
    """`judged` compares the bytes."""
    program, wanted = FUSED[name]
    node = judged(program)
    assert (node.outcome, node.output_format) == ("fused", wanted), node.reason


def truncated(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    return int8_tokens(o, s, rounding=torch.trunc)


ROUNDED_ALREADY = "changes values that are rounded to integers already"
ODD_SCALES = "its scales are those of no supported format for some maxima"
MISSED: dict[str, tuple[Callable[..., Any], str]] = {
    "an integer changed": (tokens(after=lambda r: torch.where(r == 200, 3.0, r).clamp(-128, 127)), ROUNDED_ALREADY),
    "an integer wrapped": (tokens(after=lambda r: torch.remainder(r + 128, 256.0) - 128), ROUNDED_ALREADY),
    "a narrow limit": (tokens(after=lambda r: r.clamp(-126, 126)), "no supported format"),
    "a quotient changed": (
        tokens(scaled=lambda u: torch.where((u - 62.5).abs() < 1e-6, 63.4, u)), "sub changes scaled values"
    ),
    "a maximum changed": (tokens(lambda m: torch.where(m == 1.2421875, 1.25, m) / 127.0), ODD_SCALES),
    "truncated": (truncated, "int8, but values are truncated"),
    "ties away": (
        tokens(scaled=lambda u: torch.trunc(u + torch.copysign(torch.tensor(0.5), u))), "ties round away"
    ),
    "groups": (lambda o, s: int8_tokens(o, s, size=64), "groups of 64 columns in int8"),
    "groups of the full range": (lambda o, s: int8_tokens(o, s, 127.5, size=64), "int8 by maximum / 127.5"),
    "a given scale": (int8_static, "int8 with a given scale"),
    "an exponent changed": (
        mx(lambda m: (torch.where(m == 1.2421875, 2.0, m).view(torch.int32) >> 23) - 8), "first differs at __rshift__"
    ),
    "a byte changed": (mx(stored=lambda e: torch.where(e == 90, 91, e)), "no layout|unquantised|maxima"),
    "NaN as 254": (mx(nan=254), "of those beside NaN or infinities something else"),
    "a larger least scale": (mx(least=2.0**-120), "no supported format"),
    "nearest": (mx(lambda m: ((m.view(torch.int32) + (1 << 19)) >> 23) - 8), "(EVEN)"),
    "up to the maximum": (mx(lambda m: ((m.view(torch.int32) + 0x7FFFFF) >> 23) - 8), "(CEIL)"),
    "a factor with a value changed": (
        factor(COLUMNS, lambda m: 448.0 / torch.where(m == 1.2421875, 1.25, m)), ODD_SCALES
    ),
    "divided by the inverse": (
        factor(COLUMNS, lambda m: 1.0 / (448.0 / m).reciprocal()), "."
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISSED)
def test_these_are_almost_formats(name: str) -> None:
    program, why = MISSED[name]
    gm = template().behind(program)
    (node,) = fuse_graph(gm.graph)
    assert node.outcome == "near miss" and re.search(why.replace("(", r"\(").replace(")", r"\)"), node.reason), node


@pytest.mark.parametrize("name", ["int8", "mx, ceil", "mx, floor", "groups times a factor"])
def test_other_model_dtypes(name: str) -> None:
    (node,) = fuse_graph(Template(torch.float32).behind(BASES[name]).graph)
    assert node.outcome == "fused", node.reason
    gm = Template(torch.float16).behind(BASES[name])
    fused = copied(gm)
    (node,) = fuse_graph(fused.graph)
    assert node.outcome == "fused", node.reason
    x = (torch.randn(9, COLUMNS, generator=torch.Generator().manual_seed(3)) * 5).half()
    wanted, got = (run(g, x, torch.ones(1))[0] for g in (gm, GraphModule(fused, fused.graph)))
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(wanted, got, strict=True))


def test_rounded_values_are_equal_beyond_the_limit_alone() -> None:
    x = torch.tensor([126.9, 127.0, 300.0, -300.0, torch.nan, -127.0, -127.5])
    assert proof.same_rounded(x, torch.tensor([126.9, 128.0, 127.0, -127.5, torch.nan, -127.4, -128.0]))
    for place, other in ((0, 127.0), (2, 126.9), (3, 300.0), (4, 0.0), (5, -127.5), (6, -127.4), (5, -126.9)):
        changed = x.clone()
        changed[place] = other
        assert not proof.same_rounded(changed, x)


def test_well_known_quantisers_to_int8_have_names() -> None:
    """Each makes other codes than the op, of some rows."""
    rows = torch.randn(33, 64) * 3
    rows[0, 0], rows[0, 1] = 127.0, 2.5
    ways = {**dynamic_ways(64, INT8), **static_ways(INT8)}
    own = to_int8(rows / (rows.abs().amax(-1, keepdim=True) / 127))
    made = {reason: way(rows, 0.01, None) for reason, way in ways.items()}
    assert len(ways) == 8 and not any(torch.equal(codes, own) for codes in made.values())
    assert made["int8 with a given scale is no supported format; use one scale per token, or FP8"].dtype == INT8
    assert torch.equal(made["int8, but values are truncated; round them with torch.round before the cast"][0, :2],
                       torch.tensor([127, 2], dtype=INT8))  # fmt: skip
    assert made["int8, but ties round away from zero; round them with torch.round"][0, 1] == 3


def test_an_op_of_torch_that_rounds_to_int8_by_a_scale_of_the_users_own() -> None:
    """It multiplies by the reciprocal, which few values show."""
    import torch.ao.quantization.fx._decomposed

    def function(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        scale = (largest(o.float()) / 127).clamp(min=1e-7)
        zero = torch.zeros_like(scale, dtype=torch.int64)
        return torch.ops.quantized_decomposed.quantize_per_token(o.float(), scale, zero, -128, 127, INT8), scale

    gm = template().behind(function)
    (node,) = fuse_graph(gm.graph)
    assert (node.outcome, node.output_format) == ("fused", "int8_per_token"), node.reason
    assert any("output_arithmetic=multiply" in str(n.kwargs.get("config")) for n in gm.graph.nodes)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    verdicts.forget()
