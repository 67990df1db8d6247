"""Every way to write quantisation: fused if running it shows a supported format, refused with a reason otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grammar
import library_forms
import pytest
import served_forms
import torch
from grammar import Form
from harness import after_attention, captured_bundle
from torch import Tensor

from vattn.ops.fusion_notes import NodeReport
from vattn.passes.probe import NO_CLAMP

BASE_64 = (*grammar.DYNAMIC_BASE[:5], "group 64", *grammar.DYNAMIC_BASE[6:])
ONLY_64 = ("power", "returned", "placed")
SHARED = ("widen", "clamped", "cast")
OTHERS = tuple(kind for kind in grammar.DYNAMIC_PARTS if kind not in ONLY_64)
TITLE = "| form | fused to | or why not |"
FORMS: dict[str, Form] = {
    **grammar.around("static", grammar.STATIC_BASE, grammar.STATIC_PARTS, grammar.static_form),
    **grammar.around("token", grammar.DYNAMIC_BASE, grammar.DYNAMIC_PARTS, grammar.dynamic_form, (*ONLY_64, *SHARED)),
    **grammar.around("group", BASE_64, grammar.DYNAMIC_PARTS, grammar.dynamic_form, OTHERS),
    **{form.name: form for form in grammar.PAIRS},
    **library_forms.PROGRAMS,
    **library_forms.OURS,
    **served_forms.SERVED,
    **library_forms.external(),
}
NEWER = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"
if not NEWER:
    del FORMS["token, largest: quantile"]  # Dynamo cannot trace it
    del FORMS["program: into torch._scaled_mm, row by row"]  # runs only on a GPU
BUNDLE = 12
BUNDLES = [tuple(FORMS)[start : start + BUNDLE] for start in range(0, len(FORMS), BUNDLE)]
CHANGED = (
    "static, widen: half()", "static, scaled: addcdiv", "static, clamped: one side", "token, scale: rounded to bf16",
    "token, applied: of bf16", "torchao: to_mx, FLOOR", "torchao: to_mx, CEIL", "torchao: to_mx, EVEN",
    "torchao: Int8Tensor.from_hp, PerRow",
)  # fmt: skip
VARYING = () if NEWER else CHANGED
"""Forms of which Inductor before torch 2.13 drops casts, without the passes too, or has other ops or casts."""
TABLE = Path(__file__).with_name("verdicts.md").read_text().splitlines()

QUANTISER = re.compile(r"clamp|float8|quant_|quantize")
"""What no graph holds behind an attention node that quantises itself, views apart."""


def expected(form: Form) -> bool | None:
    """Return whether running a form, apart from any pass, shows a supported format.

    `None`: it shows one only if nothing is rounded to bf16 on the way, which depends on the code that is generated.
    """
    if grammar.meaning(form) is not None:
        return True
    return None if grammar.meaning_in_fp32(form) is not None else False


def tensors(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def assert_same_bits(got: Any, wanted: Any) -> None:
    for a, b in zip(tensors(got), tensors(wanted), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
        same = a.contiguous().flatten().view(torch.uint8) == b.contiguous().flatten().view(torch.uint8)
        assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} bytes differ"


NODE_NAMES = re.compile(
    r"\b(view|getitem|mul|div|convert_element_type|reduce|unsqueeze|add|addcdiv|full|sum|copy_?)(_\d+)?\b"
)


def row(form: Form, node: NodeReport) -> str:
    """Return a form's line of the table in verdicts.md."""
    fused = node.outcome == "fused"
    reason = NODE_NAMES.sub("an op", re.sub(r"\(s\d+,", "(tokens,", node.reason))
    name = form.name.replace("|", "\\|")
    return f"| {name} | {node.output_format if fused else ''} | {'' if fused else reason} |"


def check(forms: list[Form], steps: Any = ([3, 4], [5, 1, 2])) -> tuple[dict[str, NodeReport], list[str]]:
    """Judge forms in one compile; returns the report by name, and what is wrong with it.

    The graph with the passes must compute what the one without does, in every bit, without a quantiser where it fused.
    """
    capture, bundle = captured_bundle([form.function for form in forms])
    report = dict(zip([form.name for form in forms], capture.report, strict=True))
    wrong, rounded = [], set()
    (before,), (after,) = capture.before, capture.after
    assert len(after_attention(before)) == len(after_attention(after)) == len(forms)
    for form, nodes in zip(forms, after_attention(after), strict=True):
        node, means = report[form.name], expected(form)
        if means is None:
            rounded.add(form.name)  # `test_generated_code` judges them
        elif form.name not in VARYING and (node.outcome == "fused") != means:
            wrong.append(f"{form.name}: should {'' if means else 'not '}fuse: {node}")
        left = [n.name for n in nodes if QUANTISER.search(f"{n.target} {n.args[1:]}") and "view" not in str(n.target)]
        if node.outcome == "fused" and left:
            wrong.append(f"{form.name}: {left} are left")
        if node.outcome != "fused" and not node.reason:
            wrong.append(f"{form.name}: no reason")
    for query_lens in steps:
        results = capture.both(lambda lens=query_lens: bundle.run(capture.target, lens))
        for form, got, wanted in zip(forms, *results, strict=True):
            if form.name in rounded:
                continue
            try:
                assert_same_bits(got, wanted)
            except AssertionError as error:
                wrong.append(f"{form.name}: with the passes and without differ: {error}")
    return report, wrong


def lines(forms: Iterable[Form], report: dict[str, NodeReport]) -> list[str]:
    return [row(form, report[form.name]) for form in forms]


@pytest.mark.sample(10)
@pytest.mark.parametrize("names", BUNDLES, ids=lambda names: names[0])
def test_forms(names: tuple[str, ...]) -> None:
    forms = [FORMS[name] for name in names]
    report, wrong = check(forms)
    judged = [form for form in forms if form.name not in VARYING and NO_CLAMP not in report[form.name].reason]
    wrong += [f"verdicts.md lacks: {line}" for line in lines(judged, report) if line not in TABLE]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_scales_follow_codes_that_move() -> None:
    """A few of the forms that move, slice or spread scales as the codes; `test_forms` has all of them."""
    placed = ("second half of columns", "flipped columns", "halves swapped", "every other token", "batch of one")
    returned = ("expanded", "padded", "transposed view", "column-major")
    names = [f"group, placed: {name}" for name in placed] + [f"group, returned: {name}" for name in returned]
    report, wrong = check([FORMS[name] for name in names])
    assert not wrong, "\n".join(wrong)
    assert {node.outcome for node in report.values()} == {"fused"}


@pytest.mark.parametrize("library", library_forms.LIBRARIES)
def test_library(library: str) -> None:
    """The forms of other libraries are among those that were judged."""
    why = library_forms.missing(library)
    if why:
        pytest.skip(why)
    assert any(name.startswith(f"{library}: ") for name in FORMS)
