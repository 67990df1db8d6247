"""Random programs around attention compute the same with the passes and without, and what is supported fuses."""

from __future__ import annotations

import os
import random
from typing import Any

import grammar
import pytest
import torch
from grammar import DYNAMIC_PARTS, STATIC_PARTS, Form
from harness import captured_bundle
from hypothesis import given, settings
from hypothesis import strategies as st
from test_forms import assert_same_bits, expected
from test_generated_code import differing
from torch import Tensor

from vattn.ops.fusion_notes import FUSED

PARTS = 10
STEPS = ([3, 4], [1, 1], [5, 1, 2], [16])


def common(parts: dict[str, dict[str, Any]], base: tuple[str, ...], rng: random.Random) -> tuple[str, ...]:
    """Choose productions, most of them those of the base, so that about half of the forms are supported ones."""
    return tuple(
        rng.choice(list(choices)) if rng.random() < 0.25 else usual
        for choices, usual in zip(parts.values(), base, strict=True)
    )


def program(seed: int) -> Form:
    """Return a random form with something before the quantiser, behind it, or both."""
    rng = random.Random(seed)
    if rng.random() < 0.5:
        form = grammar.static_form(*common(STATIC_PARTS, grammar.STATIC_BASE, rng))
    else:
        base = (*grammar.DYNAMIC_BASE[:5], rng.choice(["token", "group 64", "group 128"]), *grammar.DYNAMIC_BASE[6:])
        form = grammar.dynamic_form(*common(DYNAMIC_PARTS, base, rng))
    behind = rng.choice(["nothing", "nothing", "dequantised", "gemm", "bytes", "unrelated", "escaping"])
    plain = form.plain or form.function

    def function(o: Tensor, s: Tensor) -> Any:
        made = form.function(o, s)
        codes, *scales = made if isinstance(made, tuple) else (made,)
        if behind == "dequantised":
            return (codes.float() * 2.0, *scales)
        if behind == "gemm":
            return (codes.float().reshape(-1, codes.shape[-1]) @ torch.ones(codes.shape[-1], 3), *scales)
        if behind == "bytes":
            return (codes.contiguous().view(torch.uint8), *scales)
        if behind == "unrelated":
            return (codes, *scales, s * 3.0)
        if behind == "escaping":
            return (codes, *scales, o.float().sum(-1))
        return made

    return Form(f"{form.name}, {behind}", function, form.saturates, plain, form.moved)


def supported(form: Form) -> bool | None:
    return False if form.name.endswith("escaping") else expected(form)


def judge(forms: list[Form]) -> tuple[list[str], int, int]:
    """Return what is wrong, how many programs have a supported quantiser, and how many of those fused."""
    capture, bundle = captured_bundle([form.function for form in forms])
    wrong, means = [], {form.name: supported(form) for form in forms}
    outcomes = {form.name: node.outcome for form, node in zip(forms, capture.report, strict=True)}
    wrong += [name for name, outcome in outcomes.items() if outcome == FUSED and means[name] is False]
    for query_lens in STEPS:
        results = capture.both(lambda lens=query_lens: bundle.run(capture.target, lens))
        for form, got, want in zip(forms, *results, strict=True):
            if means[form.name] is None:
                continue  # rounded to bf16 on the way: judged in generated code
            try:
                assert_same_bits(got, want)
            except AssertionError as error:
                wrong.append(f"{form.name} at {query_lens}: {error}")
    good = [name for name, meant in means.items() if meant]
    return wrong, len(good), sum(outcomes[name] == FUSED for name in good)


@given(st.integers(0, 2**32))
@settings(max_examples=1)
def test_a_few_programs(seed: int) -> None:
    drawn = filter(grammar.valid, map(program, range(seed, seed + 8)))
    forms = {form.name: form for form in drawn}
    wrong, meant, fused = judge(list(forms.values()))
    assert not wrong and fused >= 0.95 * meant, (wrong, meant, fused)


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_many_programs(part: int) -> None:
    """Fifty programs of five hundred: at least 95 % of those that are supported fuse."""
    start = (int(os.environ.get("VATTN_FUZZ_SEED", "1")) * PARTS + part) << 20
    drawn = filter(grammar.valid, map(program, range(start, start + 100)))
    forms = list({form.name: form for form in drawn}.values())[:50]
    everything_wrong, meant, fused = [], 0, 0
    for first in range(0, len(forms), 17):
        wrong, more, of_them = judge(forms[first : first + 17])
        everything_wrong += wrong
        meant, fused = meant + more, fused + of_them
    print(f"{len(forms)} programs, {meant} supported, {fused} of them fused")
    assert not everything_wrong, "\n".join(everything_wrong)
    assert meant > len(forms) / 5 and fused >= 0.95 * meant - 1


@pytest.mark.long
def test_generated_programs() -> None:
    """Programs compiled for real."""
    forms = list(filter(grammar.valid, map(program, range(7_000_000, 7_000_040))))
    wrong, _ = differing(list({form.name: form for form in forms}.values())[:24])
    assert not wrong, "\n".join(wrong)
