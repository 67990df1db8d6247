"""Forms compiled for real: what the code computes with the passes equals what it computes without, in every bit."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from grammar import Form
from harness import Bundle
from test_forms import BUNDLES, FORMS, assert_same_bits, expected

import vattn
from vattn.passes.report import clear_fusion_report

A_FEW = (
    "static, shaped: heads first, contiguous",
    "group, power: power of two",
    "group, placed: without the first",
)

NOT_COMPILED = ("torch: quantize_per_tensor.tensor",)
"""Without the passes: Inductor's C++ has no `round` to FP8. `test_forms` runs them op by op."""


def compiled(forms: list[Form], **options: Any) -> tuple[Bundle, Any, list[str]]:
    """Compile forms; returns what runs them and the code of Inductor's kernels."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    bundle = Bundle([form.function for form in forms])
    target: Any = vattn.compile(bundle.__call__, **options)
    with torch._inductor.config.patch(force_disable_caches=True):
        _, code = run_and_get_code(bundle.run, target, [3, 4])
    return bundle, target, code


def differing(forms: list[Form], steps: Any = ([3, 4], [5, 1, 2], [2, 14])) -> tuple[list[str], list[str]]:
    """Return the forms whose results the passes change, and those that fused."""
    bundle, plain, _ = compiled(forms)
    wanted = [bundle.run(plain, query_lens) for query_lens in steps]
    clear_fusion_report()
    bundle, fused, code = compiled(forms, options=vattn.options())
    report = vattn.fusion_report().nodes
    names = [form.name for form, node in zip(forms, report, strict=True) if node.outcome == "fused"]
    if len(names) == len(forms):
        assert not re.search(r"float8_e4m3fn>\(|convert<at::Float8|Float8_e4m3fn tmp\d+ =", "".join(code)), (
            "a quantiser is left"
        )
    wrong = []
    for query_lens, results in zip(steps, wanted, strict=True):
        for form, got, want in zip(forms, bundle.run(fused, query_lens), results, strict=True):
            try:
                assert_same_bits(got, want)
            except AssertionError as error:
                wrong.append(f"{form.name}: {error}")
    return wrong, names


@pytest.mark.slow
def test_a_few_forms() -> None:
    wrong, fused = differing([FORMS[name] for name in A_FEW])
    assert not wrong and tuple(fused) == A_FEW, wrong


@pytest.mark.long
@pytest.mark.parametrize("names", BUNDLES, ids=lambda names: names[0])
def test_every_form(names: tuple[str, ...]) -> None:
    forms = [FORMS[name] for name in names if name not in NOT_COMPILED]
    wrong, fused = differing(forms)
    missed = [form.name for form in forms if expected(form) and form.name not in fused]
    assert not wrong and not missed, "\n".join([*wrong, *missed])
