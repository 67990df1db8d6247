"""The end of a planned FlashInfer call against the same in torch operators, in the interpreter."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from vattn.kernels.triton.attention.planned_rows import finish_planned

ROWS, HEADS, GROUP, WIDTH = 7, 6, 2, 24


def expected(
    output: Tensor, found: Tensor | None, kind: Tensor, v_scale: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    logs = torch.zeros(ROWS, HEADS) if found is None else found * math.log(2)
    seen = (kind > 1).unsqueeze(1) & logs.isfinite()
    logs = logs.masked_fill(~seen, -torch.inf)
    result = output.float().masked_fill(~seen.unsqueeze(2), 0)
    if v_scale is not None:
        result = result * v_scale.expand(HEADS // GROUP).repeat_interleave(GROUP).view(1, -1, 1)
    if sinks is not None:
        result = result * torch.sigmoid(logs - sinks.float()).nan_to_num(0).unsqueeze(2)
        logs = torch.logaddexp(logs, sinks.float().expand_as(logs)).masked_fill((kind == 0).unsqueeze(1), -torch.inf)
    return result, logs


@pytest.mark.parametrize(
    ("with_logs", "scale", "sink", "with_lse"),
    [
        case
        for case in itertools.product((True, False), (0, 1, 3), (False, True), (True, False))
        if case[0] or not case[2]
    ],
)
def test_rows(with_logs: bool, scale: int, sink: bool, with_lse: bool) -> None:
    torch.manual_seed(scale)
    kind = torch.tensor([2, 1, 2, 2, 0, 2, 0], dtype=torch.int32)
    wide = torch.randn(ROWS, HEADS + 1, WIDTH).half()
    output = wide[:, 1:]
    output[1], output[4] = torch.nan, torch.inf
    found = torch.randn(ROWS, HEADS) * 4
    found[2, 0], found[3, 1], found[5, 2] = -torch.inf, torch.nan, torch.inf
    if with_logs:
        output[2, 0] = torch.nan
    v_scale = torch.rand(scale) + 0.5 if scale else None
    sinks = torch.tensor([0.5, -torch.inf, 2.0, -30.0, 0.0, 30.0]) if sink else None
    given = found if with_logs else None
    want, want_lse = expected(output, given, kind, v_scale, sinks)
    lse = torch.full((ROWS, HEADS), torch.nan) if with_lse else None
    before = wide[:, 0].clone()
    finish_planned(output, lse, given, kind, v_scale, sinks, GROUP)
    torch.testing.assert_close(output.float(), want, rtol=2e-3, atol=1e-6)
    assert torch.equal(wide[:, 0], before)
    if lse is not None and with_logs:
        torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
