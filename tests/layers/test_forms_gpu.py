"""Ways to write quantisation, compiled on a GPU: with the passes and without, every bit is the same.

A request is one token here, so attention returns the value row: rounding midpoints reach the quantiser unchanged, where
an approximate division gives other codes than an exact one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "passes"))

import grammar
from harness import COLUMNS, WIDTH, Bundle
from test_forms import FORMS, assert_same_bits

import vattn
from vattn.passes.probe_inputs import probe_values
from vattn.passes.report import clear_fusion_report

pytestmark = pytest.mark.gpu

PARTS = ("static, scaled", "token, scale", "token, applied", "static, widen", "torchao", "token, largest",
         "static, cast", "static, clamped", "token, groups")  # fmt: skip
"""What depends on how a device computes, power-of-two scales aside, which `test_fusion_gpu` compares; moves do not."""
LEFT_OUT = (
    "torch: quantize_per_tensor.tensor",
    # Plain Inductor compiles none of these for CUDA: Triton has no fp64 to FP8 and no e5m2 to e4m3, and a CPU tensor
    # is not multiplied by one of CUDA.
    "static, widen: double()", "static, scaled: / s.double()", "static, clamped: in double", "static, cast: e5m2 first",
    "static, scaled: / s for each column", "token, largest: quantile",
)  # fmt: skip
NAMES = [name for part in PARTS for name in FORMS if name.startswith(f"{part}: ") and name not in LEFT_OUT]
BUNDLES = [NAMES[start : start + 14] for start in range(0, len(NAMES), 14)]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    clear_fusion_report()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def inputs() -> list[torch.Tensor]:
    """Return query, key, value and starts of as many requests of one token as there are probe rows."""
    values = torch.cat([probe_values(2 * WIDTH, 0.0137 * scale) for scale in (1.0, 3.1)]).bfloat16()
    values = values[values.isfinite().all(1)]  # the sign of a NaN's code is nobody's business
    query = torch.randn(len(values), COLUMNS).bfloat16()
    starts = torch.arange(len(values) + 1, dtype=torch.int32)
    return [tensor.cuda() for tensor in (query, query[:, : 2 * WIDTH].contiguous(), values, starts)]


def run(names: list[str], options: dict[str, Any]) -> tuple[Any, ...]:
    bundle = Bundle([FORMS[name].function for name in names])
    bundle.scale = bundle.scale.cuda()
    torch._dynamo.reset()
    target = vattn.compile(bundle.__call__, options=options)
    *rows, starts = inputs()
    return target(*rows, starts, bundle.scale)


def compiled_without_passes(names: list[str]) -> tuple[list[str], list[Any]]:
    """Return which forms plain Inductor compiles, and what they compute."""
    try:
        return names, list(run(names, {}))
    except (
        torch._dynamo.exc.TorchRuntimeError,
        torch._dynamo.exc.Unsupported,  # torchao looks for a package of kernels where Dynamo cannot follow
        torch._inductor.exc.InductorError,
    ) as error:
        if len(names) == 1:
            print("not compiled without the passes:", names[0], str(error).splitlines()[0][:200])
            return [], []
    half = len(names) // 2
    first, second = compiled_without_passes(names[:half]), compiled_without_passes(names[half:])
    return first[0] + second[0], first[1] + second[1]


@pytest.mark.parametrize("names", BUNDLES, ids=lambda names: names[0])
def test_forms(names: list[str]) -> None:
    left, plain_results = compiled_without_passes(names)
    assert len(left) > len(names) // 2
    forms = [FORMS[name] for name in left]
    clear_fusion_report()
    results = [plain_results, run(left, vattn.options())]
    report = dict(zip(left, vattn.fusion_report().nodes, strict=True))
    wrong = []
    for form, plain, fused in zip(forms, *results, strict=True):
        if grammar.meaning(form) is not None and report[form.name].outcome != "fused":
            print("missed", report[form.name])
        try:
            assert_same_bits(fused, plain)
        except AssertionError as error:
            wrong.append(f"{form.name}: {report[form.name].outcome}: {error}")
    assert not wrong, "\n".join(wrong)
