"""Where the passes run: layers of one model, scales from several places, other dtypes and a default device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from forms import dequantised, static
from harness import COLUMNS, Attend, Capture, Stack, captured, code_of, inputs_of, step
from torch import Tensor

import vattn
from vattn.passes import verdicts
from vattn.passes.region_run import same_bits


def test_a_model_of_equal_layers_probes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from vattn.passes.output_quant import match

    verdicts.forget()
    calls: list[str] = []
    classify = match.Classifier.classify
    monkeypatch.setattr(match.Classifier, "classify", lambda self: calls.append("") or classify(self))
    capture = captured_stack(Stack([dequantised] * 3))
    assert [node.outcome for node in capture.report] == ["fused"] * 3
    assert all("forms.py" in node.source and "o.float() / s" in node.source for node in capture.report)
    assert len(calls) == 1


captured_stack = partial(captured, inputs=lambda tokens: inputs_of(tokens)[:1])


def test_layers_that_differ_are_judged_one_by_one() -> None:
    model = Stack([dequantised] * 3)
    model.layers[1].form = lambda o, s: o
    capture = captured_stack(model)
    assert [node.outcome for node in capture.report] == ["fused", "refused", "fused"]
    assert capture.report[1].reason == "the output is not quantised"


def with_log_sum_exp(scale_of: Callable[[Tensor, Tensor], Tensor]) -> Capture:
    """Capture a call that also returns its log-sum-exp; `scale_of` makes the scale from a given one and from that."""
    from vattn.layers.functional import new_output

    config = vattn.AttentionConfig(4, 2, 32, 32, 0.2, "bfloat16", "bfloat16", lse=True)
    cache = torch.randn(vattn.kv_cache_shape(config, 8)).bfloat16()

    def both(query: Tensor, starts: Tensor, lens: Tensor, table: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        out = new_output(query, config)
        args = (query, *cache, starts, lens, table, out.output, None, out.lse, *[None] * 11, [], None, config.encode())
        torch.ops.vattn.attention(*args)
        assert out.lse is not None
        return static(out.output.flatten(1), scale_of(s, out.lse)), out.lse

    ints = [torch.tensor(v, dtype=torch.int32) for v in ([0, 3, 7], [9, 4], [[1, 2], [3, 4]])]
    arguments = (torch.randn(7, 4, 32).bfloat16(), *ints, torch.tensor([0.01]))
    capture = Capture(both)
    for got, expected in zip(*capture.both(lambda: capture.target(*arguments)), strict=True):
        assert same_bits(got, expected)
    return capture


def test_the_log_sum_exp_and_other_outputs_stay() -> None:
    """The output's neighbours among what the op writes keep their places."""
    assert with_log_sum_exp(lambda s, lse: s).report[0].outcome == "fused"


def test_a_scale_made_of_the_log_sum_exp_is_refused() -> None:
    """The call would have to read what it has not written yet."""
    report = with_log_sum_exp(lambda s, lse: s + lse.abs().amax()).report[0]
    assert (report.outcome, report.reason) == ("near miss", "the scale is computed from the attention's results")


def test_a_scale_made_after_the_attention_call() -> None:
    def late(o: Tensor, s: Tensor) -> Tensor:
        x = o.float()
        return (x / (s * 2.0 + 0.001)).clamp(-448, 448).to(torch.float8_e4m3fn)

    model = Attend(late)
    capture = Capture(model)
    with step(model, [3, 4]):
        assert same_bits(*capture.both(lambda: capture.target(*inputs_of(7))))
    assert capture.report[0].outcome == "fused"


def test_a_scale_made_of_the_attentions_own_result_is_refused() -> None:
    def own(o: Tensor, s: Tensor) -> Tensor:
        w = torch.ones(COLUMNS, 1, dtype=o.dtype)
        peak = (o @ w).float().abs().amax().reshape(1)
        return (o.float() / peak).clamp(-448, 448).to(torch.float8_e4m3fn)

    capture = captured(Attend(own))
    assert capture.report[0].outcome == "near miss"


def test_a_default_device() -> None:
    """A mode that sees every function of torch: the layer is one graph under it all the same."""
    torch.set_default_device("cpu")
    try:
        capture = captured(Attend(static))
    finally:
        torch.set_default_device(None)
    assert [node.outcome for node in capture.report] == ["fused"]


def test_fp32_and_fp16_models() -> None:
    for dtype in (torch.float32, torch.float16):
        capture = captured(Attend(static, dtype), inputs=partial(inputs_of, dtype=dtype))
        assert capture.report[0].output_format == "fp8_static"


def test_a_scale_that_is_a_number_costs_no_kernel() -> None:
    def number(o: Tensor, s: Tensor) -> Tensor:
        return (o.float() / 0.02).clamp(-448, 448).to(torch.float8_e4m3fn)

    model = Attend(number)
    code = code_of(vattn.compile(model, options=vattn.options(strict=True)), model, [3, 4], *inputs_of(7))
    assert "cpp_fused" not in code and "full" not in code
