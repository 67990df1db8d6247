"""FP8 linears of a transformers model fuse: the input of every output projection is quantised by attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Capture

import vattn

pytest.importorskip("transformers")

from tests.calibration.test_fp8_linears import calibrated, make_llama
from tests.integrations.test_transformers import PROMPTS, Runner
from vattn.integrations.transformers import disable, enable
from vattn.layers.fp8_linear import FP8Linear

STEPS = ([(PROMPTS[0][:20], 0), (PROMPTS[1][:3], 0)], [(PROMPTS[0][20:25], 20), (PROMPTS[1][3:4], 3)])
FORMATS = ("fp8_static", "fp8_per_token", "fp8_group128")


def make_packed(
    fmt: str, *, merge: bool = False, fp8_cache: bool = False, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> Any:
    model = make_llama(**changes).to(dtype)
    found = calibrated(model)
    vattn.quantise_linears(model, fmt, calibration=found if fmt == "fp8_static" else None)
    cache = {"cache_config": vattn.CacheConfig(cache_dtype="fp8"), "calibration": found} if fp8_cache else {}
    return enable(model, merge_projections=merge, num_blocks=17, **cache)


def run(packed: Any, target: Any) -> list[torch.Tensor]:
    runner = Runner(packed, target)
    return [rows for parts in STEPS for rows in runner.step(parts)]


def captured(packed: Any, **options: Any) -> tuple[Capture, list[torch.Tensor], list[torch.Tensor]]:
    """Return what the passes did, and the logits with and without what they fused."""
    capture = Capture(packed, **options)
    fused, plain = capture.both(lambda: run(packed, capture.target))
    return capture, fused, plain


def check_fused(packed: Any, fmt: str) -> None:
    """Assert that every output projection fuses, bit for bit what the same graph gives without fusing."""
    capture, fused, plain = captured(packed)
    assert [(node.outcome, node.output_format) for node in capture.report] == [("fused", fmt)] * 2, capture.report
    assert all(map(torch.equal, fused, plain))


CASES = [
    pytest.param(fmt, merge, marks=() if (fmt, merge) == ("fp8_static", True) else pytest.mark.long)
    for fmt in FORMATS
    for merge in (False, True)
]


@pytest.mark.parametrize(("fmt", "merge"), CASES)
def test_every_output_projection_fuses(fmt: str, merge: bool) -> None:
    # Two heads of 128, so that a group of 128 columns is not the whole row.
    packed = make_packed(fmt, merge=merge, hidden_size=256, num_attention_heads=2, num_key_value_heads=1)
    check_fused(packed, fmt)
    disable(packed)


@pytest.mark.long
def test_a_scale_over_all_tokens_does_not_fuse() -> None:
    capture, _, _ = captured(make_packed("fp8_dynamic"))
    assert [node.outcome for node in capture.report] == ["near miss"] * 2
    assert "use one per token" in str(capture.report[0])


@pytest.mark.long
def test_rope_and_cache_write_fuse_behind_one_fp8_product() -> None:
    """Merged projections, an FP8 cache: one op turns, rounds and stores what the product made.

    In fp32: run op by op, a bf16 graph rounds where generated code and the op do not.
    """
    packed = make_packed("fp8_static", merge=True, fp8_cache=True, dtype=torch.float32)
    capture, fused, plain = captured(packed, rope="always")
    assert [(node.outcome, node.rope_outcome) for node in capture.report] == [("fused", "fused")] * 2
    assert all("the cache write" in node.rope for node in capture.report)
    difference = [(a.float() - b.float()).norm() / b.float().norm() for a, b in zip(fused, plain, strict=True)]
    # A code at a rounding border moves by a step where a product is fused with a sum.
    assert max(difference) < 0.02


@pytest.mark.long
@pytest.mark.parametrize("fmt", FORMATS)
def test_generated_code_gives_the_same_bits(fmt: str) -> None:
    """The unfused graph, compiled too, is the oracle: every token's logits, prefill and decode."""
    packed = make_packed(fmt, merge=True, hidden_size=256, num_attention_heads=2, num_key_value_heads=1)
    expected = run(packed, vattn.compile(packed))
    assert len(vattn.fusion_report()) == 0
    torch._dynamo.reset()
    got = run(packed, vattn.compile(packed, options=vattn.options(strict=True)))
    assert vattn.fusion_report().count("fused") == 2
    for fused, plain in zip(got, expected, strict=True):
        assert torch.equal(fused, plain)


def scaled_mm(
    codes: torch.Tensor, weight: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Stand in for `torch._scaled_mm` on a GPU: the same operands and layouts."""
    wide, other = codes.float(), weight.float()
    if scale_a.dim() == 2:
        assert scale_a.shape[0] == codes.shape[0]
        wide = wide.unflatten(1, (scale_a.shape[1], -1)) * scale_a.unsqueeze(-1)
        rows = scale_b.repeat_interleave(weight.shape[0] // scale_b.shape[0], 0)
        other = other * rows.repeat_interleave(-(-weight.shape[1] // scale_b.shape[1]), 1)[:, : weight.shape[1]]
        return (wide.flatten(1) @ other).to(options["out_dtype"])
    assert scale_a.numel() == scale_b.numel() == 1
    return (wide @ other * scale_a * scale_b).to(options["out_dtype"])


@pytest.mark.long
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_graph_of_a_gpu_fuses(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model does on a GPU, with its scales spread and its rows padded, around another product."""
    wide = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 1}
    packed = make_packed(fmt, merge=True, **wide)
    expected = run(packed, packed)
    monkeypatch.setattr(FP8Linear, "_product", FP8Linear._scaled_mm)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    for got, want in zip(run(packed, packed), expected, strict=True):
        assert (got.float() - want.float()).norm() < 0.03 * want.float().norm()
    check_fused(packed, fmt)
