"""Token counts that are expressions: outputs of `[B, S, hidden]` models fuse, flattened or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from forms import per_token, rounded, static
from harness import HEADS, WIDTH, Bundle, Capture, inputs_of
from test_forms import assert_same_bits
from torch import Tensor

from vattn.ops.fusion_notes import FUSED


def groups(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    x = o.float().unflatten(-1, (-1, 64))
    scales = x.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return rounded(x / scales).flatten(-2), scales.squeeze(-1)


FORMS: list[Callable[..., Any]] = [static, per_token, groups]


def batched(bundle: Bundle, flat: bool) -> Callable[..., Any]:
    """Return a function of `[B, S, columns]` tensors that attends all tokens and quantises the outputs."""

    def target(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scale: Tensor) -> tuple[Any, ...]:
        sizes = query.shape[:2]
        query, key, value = (x.reshape(sizes[0] * sizes[1], -1, WIDTH) for x in (query, key, value))
        results = []
        for form, config in zip(bundle.forms, bundle.configs, strict=True):
            out = torch.empty_like(query)
            args = (query, key, value, starts, starts, out, None, None, *[None] * 10, [], None, config)
            torch.ops.vattn.varlen_attention(*args)
            results.append(form(out.flatten(1) if flat else out.view(*sizes, HEADS * WIDTH), scale))
        return tuple(results)

    return target


def inputs(batch: int, length: int) -> list[Tensor]:
    rows = [x.view(batch, length, -1) for x in inputs_of(batch * length)]
    return [*rows, torch.arange(0, batch * length + 1, length, dtype=torch.int32), torch.tensor([0.0137])]


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "[B, S]"])
@pytest.mark.parametrize("varying", [(0, 1), (0,), (1,)], ids=str)
def test_a_batch_of_sequences_fuses(flat: bool, varying: tuple[int, ...]) -> None:
    capture = Capture(batched(Bundle(FORMS), flat))
    first = inputs(3, 5)
    for x in first[:3]:
        for dim in varying:
            torch._dynamo.mark_dynamic(x, dim)
    if 0 in varying:
        torch._dynamo.mark_dynamic(first[3], 0)
    capture.target(*first)
    assert [node.outcome for node in capture.report] == [FUSED] * len(FORMS), capture.report
    for sizes in ((3, 5), (2 if 0 in varying else 3, 7 if 1 in varying else 5)):
        for got, wanted in zip(*capture.both(lambda sizes=sizes: capture.target(*inputs(*sizes))), strict=True):
            assert_same_bits(got, wanted)
    assert len(capture.report) == len(FORMS)
