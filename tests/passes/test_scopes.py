"""Where the passes run: whole models and regions, both inference modes, varying sizes, export, several models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forms import dequantised, static
from harness import COLUMNS, Attend, Capture, Stack, captured, inputs_of, run, step
from torch import Tensor, nn

import vattn


def test_whole_model_and_varying_sizes() -> None:
    """Regions that end in other kernels; fused equals unfused compiled in every bit, with one graph for all sizes."""
    models = [Stack([dequantised] * 3), Stack([dequantised] * 3)]
    fused = vattn.compile(models[0], options=vattn.options(strict=True))
    unfused = vattn.compile(models[1])
    for query_lens in ([3, 4], [5, 1, 2], [2], [9, 9]):
        assert torch.equal(run(fused, models[0], query_lens), run(unfused, models[1], query_lens))
    report = vattn.fusion_report()
    assert [node.outcome for node in report] == ["fused"] * 3
    assert all("forms.py" in node.source and "o.float() / s" in node.source for node in report)


def test_equal_regions_share_one_fused_graph() -> None:
    models = [Stack([dequantised] * 12), Stack([dequantised] * 12)]
    vattn.compile_regions(models[0], options=vattn.options(strict=True))
    graphs = torch._dynamo.utils.counters["stats"]
    got = run(models[0], models[0], [3, 4])
    assert graphs["unique_graphs"] == 1
    vattn.compile_regions(models[1])
    assert torch.equal(got, run(models[1], models[1], [3, 4]))
    assert [(node.outcome, node.count) for node in vattn.fusion_report()] == [("fused", 1)]


def test_a_model_of_equal_layers_probes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from vattn.passes.output_quant import find as output_quant
    from vattn.passes.output_quant import match

    output_quant._known.clear()
    calls: list[str] = []
    classify = match.Classifier.classify
    monkeypatch.setattr(match.Classifier, "classify", lambda self: calls.append("") or classify(self))
    model = Stack([dequantised] * 6)
    capture, _ = captured_stack(model)
    assert [node.outcome for node in capture.report] == ["fused"] * 6
    assert len(calls) == 1


def captured_stack(model: nn.Module) -> Any:
    torch._dynamo.reset()
    capture = Capture()
    target = vattn.compile(model, backend=capture.backend)
    run(target, model, [3, 4])
    return capture, target


def test_layers_that_differ_are_judged_one_by_one() -> None:
    model = Stack([dequantised] * 3)
    model.layers[1].form = lambda o, s: o
    capture, _ = captured_stack(model)
    assert [node.outcome for node in capture.report] == ["fused", "refused", "fused"]
    assert capture.report[1].reason == "the output is not quantised"


def test_the_log_sum_exp_and_other_outputs_stay() -> None:
    """The output's neighbours among what the op writes keep their places."""
    from vattn.layers.functional import new_output

    config = vattn.AttentionConfig(4, 2, 32, 32, 0.2, "bfloat16", "bfloat16", lse=True)
    cache = torch.randn(vattn.kv_cache_shape(config, 8)).bfloat16()

    def both(query: Tensor, starts: Tensor, lens: Tensor, table: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        out = new_output(query, config)
        args = (query, cache, starts, lens, table, out.output, None, out.lse, *[None] * 11, [], None, config.encode())
        torch.ops.vattn.attention(*args)
        return static(out.output.flatten(1), s), out.lse

    ints = [torch.tensor(v, dtype=torch.int32) for v in ([0, 3, 7], [9, 4], [[1, 2], [3, 4]])]
    arguments = (torch.randn(7, 4, 32).bfloat16(), *ints, torch.tensor([0.01]))
    got = torch.compile(both, options=vattn.options(strict=True))(*arguments)
    expected = both(*arguments)
    assert torch.equal(got[0].view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(got[1], expected[1])


def test_a_scale_made_after_the_attention_call() -> None:
    def late(o: Tensor, s: Tensor) -> Tensor:
        x = o.float()
        return (x / (s * 2.0 + 0.001)).clamp(-448, 448).to(torch.float8_e4m3fn)

    model = Attend(late)
    with step(model, [3, 4]):
        expected = model(*inputs_of(7))
        got = vattn.compile(model, options=vattn.options(strict=True))(*inputs_of(7))
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_a_scale_made_of_the_attentions_own_result_is_refused() -> None:
    def own(o: Tensor, s: Tensor) -> Tensor:
        w = torch.ones(COLUMNS, 1, dtype=o.dtype)
        peak = (o @ w).float().abs().amax().reshape(1)
        return (o.float() / peak).clamp(-448, 448).to(torch.float8_e4m3fn)

    capture, _ = captured(Attend(own))
    assert capture.report[0].outcome == "near miss"


def test_a_default_device() -> None:
    """A mode that sees every function of torch: the layer is one graph under it all the same."""
    torch.set_default_device("cpu")
    try:
        capture, _ = captured(Attend(static))
    finally:
        torch.set_default_device(None)
    assert [node.outcome for node in capture.report] == ["fused"]


def test_fp32_and_fp16_models() -> None:
    for dtype in (torch.float32, torch.float16):
        capture, _ = captured(Attend(static, dtype), dtype=dtype)
        assert capture.report[0].output_format == "fp8_static"


@pytest.mark.skipif(torch.__version__ < "2.12", reason="older ones crash when they load the package")
def test_export_and_aot_inductor(tmp_path: Any) -> None:
    """`torch.export` leaves assertions on the metadata of every cast behind; they must not hide the quantiser."""
    model = Stack([dequantised] * 2)
    builder = vattn.AttentionMetadataBuilder(8, 64, 64, 16, layers=model)
    sample = builder.build([2, 1], [2, 1], [[1], [2]])
    with torch.no_grad():
        exported = vattn.export_step(model, (inputs_of(3)[0],), sample)
    assert "_assert_tensor_metadata" in str(exported.program.graph)
    with vattn.enable(strict=True):
        package = exported.compile(str(tmp_path / "model.pt2"))
    assert [node.outcome for node in vattn.fusion_report()] == ["fused"] * 2
    for query_lens in ([2, 1], [3, 4]):
        step_ = builder.build(query_lens, query_lens, [[1], [2]])
        got = package(*exported.inputs((inputs_of(sum(query_lens))[0],), step_))
        # The compiled residual rounds to bf16 at other places than the eager one, which moves single codes by a step.
        want = run(model, model, query_lens).float()
        assert (got.float() - want).norm() < 0.02 * want.norm()


def test_a_scale_that_is_a_number_costs_no_kernel() -> None:
    from torch._inductor.utils import run_and_get_code

    def number(o: Tensor, s: Tensor) -> Tensor:
        return (o.float() / 0.02).clamp(-448, 448).to(torch.float8_e4m3fn)

    model = Attend(number)
    target = vattn.compile(model, options=vattn.options(strict=True))
    with torch.no_grad(), step(model, [3, 4]):
        got, (code,) = run_and_get_code(target, *inputs_of(7))
        assert torch.equal(got.view(torch.uint8), model(*inputs_of(7)).view(torch.uint8))
    assert "cpp_fused" not in code and "full" not in code
