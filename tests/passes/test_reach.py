"""Graphs of a varying number of tokens that treat those from some place on otherwise than the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from forms import E4M3, per_token, static
from harness import Capture, captured, captured_bundle
from queries import Written
from queries import inputs as query_inputs
from rope_forms import LayerWithRope, RopeForm, chunked, inputs
from test_forms import assert_same_bits
from torch import Tensor

from vattn.ops.fusion_notes import FUSED
from vattn.passes import region_tokens as reach
from vattn.passes.query_quant.find import IN_LOAD
from vattn.passes.report import NEAR_MISS

LENGTHS = [30, 25]


def later_ones(o: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.cat((o[:40], change(o[40:])))


NOT_ALIKE: dict[str, tuple[Callable[..., Any], str]] = {
    "zeros from a token on": (lambda o, s: static(later_ones(o, torch.zeros_like), s), ""),
    "another scale from a token on": (lambda o, s: static(later_ones(o, lambda x: x * 2), s), ""),
    "by token, zeros from one on": (lambda o, s: per_token(later_ones(o, torch.zeros_like)), ""),
    "from the end": (lambda o, s: static(torch.cat((o[:-40] * 2, o[-40:])), s), ""),
    "of columns behind each other": (
        lambda o, s: static(torch.cat((o.flatten()[: 40 * 256], o.flatten()[40 * 256 :] * 2)), s),
        "",
    ),
    "counted": (
        lambda o, s: static(torch.where((o[:, :1] == o[:, :1]).cumsum(0) < 40, o, 0.0), s),
        "cumsum runs along the tokens",
    ),
    "how many there are": (
        lambda o, s: static(torch.where((o[:, :1] == o[:, :1]).sum() < 40, o, 0.0), s),
        "sum runs along the tokens",
    ),
}
ALIKE: dict[str, Callable[..., Any]] = {
    "the first of them": lambda o, s: static(o[:40], s),
    "all but the first": lambda o, s: static(o[40:], s),
    "all but the last": lambda o, s: static(o[:-40], s),
    "the first of them, by token": lambda o, s: per_token(o[:40]),
    "taken apart and joined": lambda o, s: torch.cat((static(o[:40], s), static(o[40:], s))),
}


def test_tokens_are_told_apart() -> None:
    forms = {**{name: function for name, (function, _) in NOT_ALIKE.items()}, **ALIKE}
    capture, bundle = captured_bundle(list(forms.values()), LENGTHS)
    results = capture.both(lambda: [bundle.run(capture.target, lengths) for lengths in (LENGTHS, [43])])
    report = dict(zip(forms, capture.report, strict=True))
    for name, (_, why) in NOT_ALIKE.items():
        assert report[name].outcome == NEAR_MISS and why in report[name].reason, (name, report[name])
    assert {name: report[name].outcome for name in ALIKE} == dict.fromkeys(ALIKE, FUSED)
    for fused, plain in zip(*results, strict=True):
        for got, want in zip(fused, plain, strict=True):
            assert_same_bits(got, want)


def test_every_fifth_token_is_told_apart() -> None:
    """The fortieth of them is far beyond the fortieth token."""
    forms = [lambda o, s: static(later_ones(o[::5], lambda x: x * 2), s), lambda o, s: static(o[::5], s)]
    capture, _ = captured_bundle(forms, [150, 100])
    assert [node.outcome for node in capture.report] == [NEAR_MISS, FUSED], capture.report


def test_a_token_too_far_along_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "_LARGEST_RUN", 70 * 256)
    capture, _ = captured_bundle([ALIKE["the first of them"]], LENGTHS)
    assert "there are 40 tokens, too many to try it out" in capture.report[0].reason


def test_short_graphs_are_other_graphs() -> None:
    """A graph of fewer tokens than the bound has no slice in it, and fuses."""
    capture, _ = captured_bundle([NOT_ALIKE["zeros from a token on"][0]])
    assert capture.report[0].outcome == FUSED


def partly_turned(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """RoPE for the first tokens alone."""
    turned = chunked(layer, query, key, positions)
    query, key = (torch.cat((new[:20], old[20:])) for new, old in zip(turned, (query, key), strict=True))
    return query, key


def test_rotations() -> None:
    capture = captured(LayerWithRope(RopeForm(partly_turned, "")), [14, 16], inputs, rope="always")
    assert "whether there are 20 tokens" in capture.report[0].rope


def partly_clamped(query: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 of which the later tokens are clamped to less."""
    scaled = query.float() / s
    return torch.cat((scaled[:400].clamp(-448, 448), scaled[400:].clamp(-9, 9))).to(E4M3), s


def test_queries() -> None:
    capture = Capture(Written(partly_clamped))
    capture.target(query_inputs(410))
    assert not capture.report[0].query.startswith(IN_LOAD)
