"""Every way to write quantisation: fused if running it shows a supported format, refused with a reason otherwise."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import grammar
import pytest
import torch
from harness import Attend, captured, inputs_of, step
from torch import Tensor

from vattn.passes.report import NodeReport

FORMS = {
    **grammar.around(grammar.STATIC_BASE, grammar.STATIC_PARTS, grammar.static_form),
    **grammar.around(grammar.DYNAMIC_BASE, grammar.DYNAMIC_PARTS, grammar.dynamic_form),
    **{form.name: form for form in grammar.PAIRS},
    **{form.name: form for form in (*grammar.OURS.values(), *grammar.WRONG.values())},
}


TABLE = (Path(__file__).parents[2] / "docs" / "fusion.md").read_text().splitlines()


def count_ops(graph: torch.fx.GraphModule, name: str) -> int:
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    return sum(name in str(node.target) or name in str(node.args[:1]) for node in calls)


def tensors(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def assert_same_bits(got: Any, expected: Any) -> None:
    for a, b in zip(tensors(got), tensors(expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        same = a.contiguous().flatten().view(torch.uint8) == b.contiguous().flatten().view(torch.uint8)
        assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} bytes differ"


NODE_NAMES = re.compile(r"\b(view|mul|div|convert_element_type|reduce|unsqueeze|add|full|copy_?)(_\d+)?\b")


def row(form: grammar.Form, node: NodeReport) -> str:
    """Return a form's line of the table in docs/fusion.md."""
    fused = node.outcome == "fused"
    reason = NODE_NAMES.sub("an op", re.sub(r"\(s\d+,", "(tokens,", node.reason))
    return f"| {form.name} | {node.output_format if fused else ''} | {'' if fused else reason} |"


def check(form: grammar.Form, expected: bool, steps: Any = ([3, 4], [5, 1, 2])) -> NodeReport:
    """Check one form's verdict, and that the graph with the passes computes what the one without does."""
    model = Attend(form.function)
    capture, target = captured(model)
    (node,) = capture.report
    assert (node.outcome == "fused") == expected, str(node)
    for before, after in zip(capture.before, capture.after, strict=True):
        assert count_ops(before, "vattn.attention") == count_ops(after, "vattn.attention") == 1
        if expected:
            assert count_ops(after, "clamp") == count_ops(after, "vattn.quant_") == count_ops(after, "float8") == 0
        else:
            assert node.reason
            return node
    for query_lens in steps:
        results = []
        for fused in (True, False):
            capture.fused = fused
            with step(model, query_lens):
                results.append(target(*inputs_of(sum(query_lens), seed=len(query_lens))))
        assert_same_bits(*results)
    return node


@pytest.mark.parametrize("name", FORMS)
def test_form(name: str) -> None:
    form = FORMS[name]
    expected = not name.startswith("other") and (name.startswith("library") or grammar.meaning(form) is not None)
    line = row(form, check(form, expected))
    assert line in TABLE, f"docs/fusion.md lacks: {line}"


@pytest.mark.slow
def test_random_forms() -> None:
    seed, outcomes = int(os.environ.get("VATTN_FUZZ_SEED", "1")), {}
    forms = {
        **grammar.sampled(grammar.STATIC_PARTS, grammar.static_form, 150, seed),
        **grammar.sampled(grammar.DYNAMIC_PARTS, grammar.dynamic_form, 150, seed),
    }
    for name, form in forms.items():
        outcomes[name] = check(form, grammar.meaning(form) is not None, ([3, 4], [1], [5, 1, 2], [16])).outcome
    assert 10 < sum(outcome == "fused" for outcome in outcomes.values()) < len(outcomes)
