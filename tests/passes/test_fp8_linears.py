"""FP8 linears of a transformers model fuse: the input of every output projection is quantised by attention."""

from __future__ import annotations

import functools
from typing import Any

import harness
import pytest
import torch
from harness import Capture

import vattn
from vattn.passes.pipeline import fuse_graph

pytest.importorskip("transformers")

from tests.test_fp8_linears import calibrated, make_llama
from tests.test_transformers import PROMPTS, Runner
from vattn.integrations.transformers import disable, enable

STEPS = ([(PROMPTS[0][:20], 0), (PROMPTS[1][:3], 0)], [(PROMPTS[0][20:25], 20), (PROMPTS[1][3:4], 3)])
EXPECTED = {"fp8_static": "fp8_static", "fp8_per_token": "fp8_per_token", "fp8_group128": "fp8_group128"}


def make_packed(fmt: str, *, merge: bool = False, fp8_cache: bool = False, **changes: Any) -> Any:
    model = make_llama(**changes).bfloat16()
    found = calibrated(model)
    vattn.quantise_linears(model, fmt, calibration=found if fmt == "fp8_static" else None)
    cache = {"cache_config": vattn.CacheConfig(cache_dtype="fp8"), "calibration": found} if fp8_cache else {}
    return enable(model, merge_projections=merge, num_blocks=17, **cache)


def run(packed: Any, target: Any) -> list[torch.Tensor]:
    runner = Runner(packed, target)
    return [rows for parts in STEPS for rows in runner.step(parts)]


def captured(packed: Any) -> tuple[Capture, list[torch.Tensor], list[torch.Tensor]]:
    """Return what the passes did, and the logits with and without what they fused."""
    torch._dynamo.reset()
    capture = Capture()
    target = vattn.compile(packed, backend=capture.backend)
    fused = run(packed, target)
    capture.fused = False
    return capture, fused, run(packed, target)


CASES = [
    ("fp8_per_token", False),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("fp8_static", False), ("fp8_static", True), ("fp8_per_token", True), ("fp8_group128", False),
        ("fp8_group128", True),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("fmt", "merge"), CASES)
def test_every_output_projection_fuses(fmt: str, merge: bool) -> None:
    """Bit for bit what the same graph gives without fusing."""
    # Two heads of 128, so that a group of 128 columns is not the whole row.
    packed = make_packed(fmt, merge=merge, hidden_size=256, num_attention_heads=2, num_key_value_heads=1)
    capture, fused, plain = captured(packed)
    assert [(node.outcome, node.output_format) for node in capture.report] == [("fused", EXPECTED[fmt])] * 2, [
        str(node) for node in capture.report
    ]
    for got, expected in zip(fused, plain, strict=True):
        assert torch.equal(got, expected)
    disable(packed)


@pytest.mark.slow
def test_a_scale_over_all_tokens_does_not_fuse() -> None:
    capture, _, _ = captured(make_packed("fp8_dynamic"))
    assert [node.outcome for node in capture.report] == ["near miss"] * 2
    assert "use one per token" in str(capture.report[0])


def test_rope_and_cache_write_fuse_behind_one_fp8_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged projections, an FP8 cache: one op turns, rounds and stores what the product made."""
    packed = make_packed("fp8_static", merge=True, fp8_cache=True)
    monkeypatch.setattr(harness, "fuse_graph", functools.partial(fuse_graph, rope="always"))
    capture, fused, plain = captured(packed)
    assert [(node.outcome, node.rope_outcome) for node in capture.report] == [("fused", "fused")] * 2
    assert all("the cache write" in node.rope for node in capture.report)
    difference = [(a.float() - b.float()).norm() / b.float().norm() for a, b in zip(fused, plain, strict=True)]
    # The op rotates in fp32, the model in bf16.
    assert max(difference) < 0.05
