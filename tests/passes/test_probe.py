"""Regions that differ from a quantiser at one kind of input alone are told from it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from forms import E4M3, rounded
from harness import COLUMNS, WIDTH, Bundle, Capture, captured_bundle
from torch import Tensor

from vattn.ops.fusion_notes import FUSED
from vattn.passes.report import NEAR_MISS


def static(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """Return static quantisation of something that differs from the output in places."""
    return lambda o, s: rounded(change(o.float(), s) / s)


def token(change: Callable[[Tensor], Tensor], floor: float = 1e-10) -> Callable[..., Any]:
    """Return quantisation by tokens whose scales differ in places."""

    def function(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        x = o.float()
        scale = change(x.abs().amax(-1, keepdim=True).clamp(min=floor) / 448)
        return rounded(x / scale), scale

    return function


OTHER = torch.tensor([0.07])
"""Another scale that is known only when the graph runs."""

ODD: dict[str, Callable[..., Any]] = {
    "one value": static(lambda x, s: torch.where(x == 1.0078125, x * 1.5, x)),
    "one small value": static(lambda x, s: torch.where(x == 2.0**-100, 500.0, x)),
    "minus zero": static(lambda x, s: torch.where(x == 0, 0.0, x)),
    "NaN": static(lambda x, s: torch.where(x.isnan(), 0.0, x)),
    "infinity": static(lambda x, s: torch.where(x == torch.inf, 0.0, x)),
    "outliers": static(lambda x, s: torch.where(x.abs() > 2.0**15, 0.0, x)),
    "subnormals": static(lambda x, s: torch.where((x.abs() < 2.0**-126) & (x != 0), 1.0, x)),
    "under a large scale": static(lambda x, s: torch.where(s > 1000, x * 2, x)),
    "under a small scale": static(lambda x, s: torch.where(s < 1e-6, x * 2, x)),
    "rounding midpoints": lambda o, s: rounded((o.float() / s) * 1.0000001),
    "the first token": lambda o, s: rounded(torch.cat((o[:1] * 2, o[1:])).float() / s),
    "the last column": lambda o, s: rounded(torch.cat((o[:, :-1], o[:, -1:] * 2), -1).float() / s),
    "rows of zeros": token(lambda scale: torch.where(scale == scale.clamp(max=2.3e-13), 1.0, scale)),
    "maxima at powers of two": token(lambda scale: torch.where(scale == 1.0, 1.0009765625, scale)),
    "great maxima": token(lambda scale: scale.clamp(max=60.0)),
    "one scale for a step of few tokens": lambda o, s: per_tensor_if_few(o),
    "fp16, times its reciprocal": lambda o, s: rounded(o.half() * (1 / s)),
    "a scale that is never rounded": lambda o, s: unrounded(o),
    "beyond fp16": static(lambda x, s: x.clamp(-65504, 65504)),
    "below fp16": static(lambda x, s: torch.where(x.abs() < 2.0**-24, 0.0, x)),
    "beyond fp16, times the scale": lambda o, s: rounded(o.float().clamp(-65504, 65504) * s),
    "below fp16, times the scale": lambda o, s: rounded(torch.where(o.abs() < 2.0**-24, 0.0, o.float()) * s),
    "the smaller of two quotients": lambda o, s: rounded(torch.minimum(o.float() / s, o.float() / OTHER)),
    "by a scale and a ratio": lambda o, s: rounded(o.float() / s * OTHER / s),
    "clamped under another scale": static(lambda x, s: x.clamp(-448 * OTHER, 448 * OTHER)),
}


def unrounded(o: Tensor) -> tuple[Tensor, Tensor]:
    x = o.double()
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return rounded(x / scale), scale.float()


def in_two_layouts(o: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    groups = o.float().unflatten(-1, (-1, 64))
    scales = groups.abs().amax(-1).clamp(min=1e-10) / 448
    return rounded(groups / scales.unsqueeze(-1)).flatten(-2), scales, scales.t().contiguous()


PLAIN: dict[str, Callable[..., Any]] = {
    "scales in two layouts": in_two_layouts,
    "static": static(lambda x, s: x),
    "token": token(lambda scale: scale),
    "floor": token(lambda scale: scale, 3e-5),
    "scale in fp16": lambda o, s: rounded(o.float() / s.half()),
    "clamped first": static(lambda x, s: x.clamp(-448 * s, 448 * s)),
    "clamped first, times the scale": lambda o, s: rounded(o.float().clamp(-448 / s, 448 / s) * s),
}


def per_tensor_if_few(o: Tensor) -> tuple[Tensor, Tensor]:
    x = o.float()
    rows = x.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    whole = rows.amax().expand(o.shape[0], 1)
    counted = torch.ones(o.shape[0], 1).sum()
    scale = torch.where(counted < 8, whole, rows)
    return rounded(x / scale), scale


def test_regions_that_differ_in_places() -> None:
    forms = {**ODD, **PLAIN}
    capture, _ = captured_bundle(list(forms.values()))
    outcomes = {name: node.outcome for name, node in zip(forms, capture.report, strict=True)}
    assert {name for name in ODD if outcomes[name] != NEAR_MISS} == set()
    assert {name for name in PLAIN if outcomes[name] != FUSED} == set()


def with_a_number(change: Callable[[Tensor, int], Any]) -> tuple[Capture, Callable[..., Any]]:
    """Compile something that is done to the output with an argument that varies; returns what to call with it."""
    bundle = Bundle([])
    config = Bundle([change]).configs[0]

    def target(n: int, *inputs: Tensor) -> Any:
        query, key, value, starts, _ = inputs
        query, key, value = (x.view(x.shape[0], -1, WIDTH) for x in (query, key, value))
        out = torch.empty_like(query)
        args = (query, key, value, starts, starts, out, None, None, *[None] * 10, [], None, config)
        torch.ops.vattn.varlen_attention(*args)
        return change(out.flatten(1), n)

    capture = Capture(target)
    return capture, lambda n, query_lens: bundle.run(functools.partial(capture.target, n), query_lens)


def test_as_many_tokens_as_a_number_says() -> None:
    """`output[:n]`, where n is an argument that varies."""
    form = token(lambda scale: scale)
    capture, run = with_a_number(lambda o, n: form(o[:n], None))
    for n in (3, 5, 7):
        results = capture.both(lambda n=n: run(n, [4, 4]))
        assert all(torch.equal(a.float(), b.float()) and len(a) == n for a, b in zip(*results, strict=True))
    assert {node.outcome for node in capture.report} == {FUSED}


def test_divided_by_a_number_that_varies() -> None:
    """A step of one token says nothing about it."""
    capture, run = with_a_number(lambda o, n: rounded(o.float() / n))
    for n in (3, 5):
        run(n, [1])
    assert "size or a number that varies" in capture.report[-1].reason


def test_a_near_miss_names_the_first_node_that_differs() -> None:
    def gated(o: Tensor, s: Tensor) -> Tensor:
        widened = o.float()
        gate = torch.sigmoid(widened)
        return rounded(widened * gate / s)

    def narrow(o: Tensor, s: Tensor) -> Tensor:
        scaled = o.float() / s
        limited = scaled.clamp(-240, 240)
        return limited.to(E4M3)

    def small_groups(o: Tensor, s: Tensor) -> Tensor:
        groups = o.float().view(-1, COLUMNS // 8, 8)
        largest = groups.abs().amax(-1, keepdim=True)
        return rounded(groups / (largest / 448))

    capture, _ = captured_bundle([gated, narrow, small_groups])
    lines = [node.source.rpartition(": ")[2] for node in capture.report]
    assert lines == [
        "gate = torch.sigmoid(widened)",
        "limited = scaled.clamp(-240, 240)",
        "largest = groups.abs().amax(-1, keepdim=True)",
    ]
