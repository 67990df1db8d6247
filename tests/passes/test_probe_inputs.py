"""What regions are run on: which values, scales and rows, and which quantisers those tell apart."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_by_hand import template
from torch import Tensor
from torch.fx import Node

from vattn.passes import probe_inputs
from vattn.passes.probe_inputs import PROBE_SCALES, every_maximum, every_quotient, every_scaled, every_value
from vattn.passes.region_tokens import TOKEN_COUNTS
from vattn.quantization.codecs import encode_e2m1

E4M3 = torch.float8_e4m3fn
STEPS = 1.0, 7 / 512
CODES = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
MIDDLES = torch.tensor([(a + b) / 2 for a, b in zip(CODES.tolist(), CODES.tolist()[1:], strict=False)])


def rounded(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(E4M3).view(torch.uint8)


def values() -> Tensor:
    return probe_inputs.probe_values(64, *STEPS)


def test_rows_of_a_static_scale_hold_every_midpoint_and_more_than_the_range() -> None:
    rows = values()
    for step in STEPS:
        for held in (MIDDLES * step, -MIDDLES * step, torch.tensor([2.0, -2.0]) * 448 * step):
            assert torch.isin(held, rows).all(), step
    assert torch.equal(rows[0], torch.zeros(64)) and rows[1:].any(1).all()
    # Most are told by a few runs of 31 tokens.
    assert rows.shape == (1 + 12 + 2 * math.ceil(2 * 253 / 64) + 3, 64)


def test_rows_of_computed_scales_tell_orders_of_rounding_apart() -> None:
    rows = values()[1:13]
    largest = rows.abs().amax(1, keepdim=True)
    assert torch.equal(rows.bfloat16().float(), rows)
    assert torch.equal(rows[:, ::16], largest.expand(-1, 4)) and (rows > 0).all()
    wanted = rounded(rows / (largest / 448))
    by_reciprocal = torch.tensor(1 / 448)
    for other in (rows * (448 / largest), rows * 448 / largest, rows / (largest * by_reciprocal)):
        assert not torch.equal(rounded(other), wanted)
    # A scale that is a power of two, and one just above; small maxima show what is added to a scale.
    assert {56, 57} <= set((largest.flatten().frexp()[0] * 64).tolist())
    assert not torch.equal(rounded(rows / (largest / 448 + 1e-11)), wanted)
    assert 1e-9 < float(largest.min()) < 1e-8 and float(largest.max()) == 52
    # The smallest are subnormals of the codes, the largest are not rounded to the maximum.
    quotients = rows[:, 1:16] / largest
    assert float(quotients.min()) == 2.0**-16 and float(quotients.max()) == 0.75
    assert quotients.frexp()[0].unique().tolist() == [0.5, 0.75]


def test_the_last_rows_hold_one_infinity_and_one_nan() -> None:
    rows = values()
    assert rows[:-2].isfinite().all()
    assert rows[-2:].isfinite().logical_not().nonzero().tolist() == [[0, 32], [1, 32]]
    assert rows[-2, 32] == torch.inf and rows[-1, 32].isnan()
    noise = rows[-3:, :32]
    assert (noise > 0).any(1).all() and (noise < 0).any(1).all() and noise.unique().numel() == noise.numel()


def test_values_are_cycled_into_rows() -> None:
    assert probe_inputs._rows(torch.arange(5), 3).tolist() == [[0, 1, 2], [3, 4, 0]]
    assert probe_inputs._rows(torch.arange(6), 3).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert probe_inputs.cycled(torch.arange(5), 3, 4).tolist() == [3, 4, 0, 1]


def test_scales_round_otherwise_as_reciprocals_and_reach_beyond_narrow_dtypes() -> None:
    plain, extreme = PROBE_SCALES[:2], torch.tensor(PROBE_SCALES[2:])
    for scale in plain:
        x = probe_inputs.probe_values(64, scale, 1 / scale)
        scaled = torch.tensor(scale)
        assert float(scaled.bfloat16()) == scale and 2.0**-8 < scale < 4
        assert not torch.equal(rounded(x / scaled), rounded(x * scaled.reciprocal()))
    # All bits that bf16 has tell fp32 math from that of narrower dtypes.
    assert scaled.bfloat16().view(torch.int16) & 1
    for dtype in (torch.float16, torch.bfloat16):
        assert not torch.equal(rounded(x.to(dtype) / scaled.to(dtype)), rounded(x.to(dtype).float() / scaled))
    low, high, least, most = extreme.tolist()  # rounded to fp32
    # Held by fp16, as are no reciprocal of the first and no 448 times the second.
    assert torch.isfinite(extreme[:2].half()).all() and extreme[:2].half().all()
    assert torch.isinf((1 / extreme[:1]).half()) and torch.isinf((448 * extreme[1:2]).half())
    assert least * 448 < 2.0**-24 / 448 and most / 448 > 448 * 65504
    assert math.isclose(low * high, least * most, rel_tol=1e-6) and math.isfinite(448 * 1e11 * torch.tensor(most))


def test_every_value_is_there() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        bits = every_value(dtype).view(torch.int16)
        assert bits.numel() == bits.unique().numel() == 2**16
    bits = every_value(torch.float32).view(torch.int32)
    first, second = bits.view(2, -1)
    assert torch.equal(first >> 16, second >> 16) and (first >> 16).unique().numel() == 2**16
    low = second & 0xFFFF
    assert not (first & 0xFFFF).any() and low.unique().numel() > 2**15 and int(low.max()) >= 2**15
    bits = every_maximum("bfloat16").bfloat16().view(torch.int16)
    assert len(bits) == 0x7F82  # two zeros
    assert torch.equal(bits.unique(), torch.arange(0x7F81).to(torch.int16))  # up to infinity
    assert torch.equal(every_maximum("float32"), every_maximum("bfloat16"))
    assert every_maximum("float16").half().view(torch.int16).unique().numel() == 0x7C01


def test_scaled_values_lie_beside_every_edge_of_e2m1() -> None:
    tried = every_scaled([-0.3, 7])
    for edge in (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 0.3, 7.0):
        x = torch.tensor([edge, -edge])
        for near in (x, x.nextafter(torch.tensor(1e9)), x.nextafter(torch.tensor(-1e9))):
            assert torch.isin(near, tried).all(), edge
    assert len(encode_e2m1(tried).unique()) == 16
    assert torch.isin(every_maximum("bfloat16"), tried).all() and torch.isin(-every_maximum("bfloat16"), tried).all()


def test_scales_are_near_the_numbers_that_scaled_values_are_compared_with() -> None:
    assert probe_inputs.scales_near({8.0, 0.5}) == [0.5, 2.0, 8.0, 0.125, 4.25, 1 / 4.25]
    assert probe_inputs.scales_near([0.0, -1.0, math.inf, 1e-30, 1e30]) == []


def test_quotients_are_those_of_every_value_and_maximum() -> None:
    rows = every_quotient(32)
    largest = rows[:, 0]
    assert rows.dtype == torch.bfloat16 and torch.equal(rows[:, ::16], largest[:, None].expand(-1, 2))
    assert torch.equal(rows.abs().amax(1), largest)
    assert torch.equal(largest.unique(), 1 + torch.arange(128).bfloat16() / 128)
    assert len(rows) == 128 * math.ceil(2 * 128 * 20 / 30)
    for maximum in (1.0, 1.4140625, 1.9921875):
        held = rows[largest == maximum].unique().float()
        sizes = held[held > 0]
        assert torch.equal(sizes, -held[held < 0].flip(0)) and float(sizes.min()) == 2.0**-19
        # Of each power of two all 128 values with eight bits, of the last one those up to the maximum.
        assert len(sizes) == 128 * 19 + round((maximum - 1) * 128) + 1


def test_groups_have_maxima_of_every_mantissa() -> None:
    rows = probe_inputs.every_mantissa(64, 16)
    groups = rows.float().view(-1, 16)
    largest = groups.abs().amax(1)
    assert torch.equal(largest, groups[:, 0]) and len(groups) == len(largest.unique()) == 20 * 128
    assert (largest.min(), largest.max()) == (2.0**-8, 2.0**12 - 2.0**4)
    assert len(groups[:, 1:].abs().frexp()[0].unique()) == 128 and groups.abs().min() > 2.0**-14  # normal in fp16
    # Each way to divide by 6 and a scale rounds some to another block scale.
    for other in (lambda m, s: m / (6 * s), lambda m, s: m * (1 / 6) / s, lambda m, s: m / 6 * (1 / s)):
        scales = torch.tensor(probe_inputs.TIED_SCALES)[:, None]
        assert not torch.equal(rounded(other(largest, scales)), rounded(largest / 6 / scales))


def varying() -> Node:
    """Return the output of the template: a varying number of tokens, four heads of 64."""
    return next(n for n in template().graph.nodes if str(n.target) == "aten.reshape.default" or "view" in n.name).args[
        0
    ]


def fixed(tokens: int) -> Any:
    node = torch.fx.Graph().placeholder("output")
    node.meta["val"] = torch.empty(tokens, 4, 64)
    return node


def together(runs: list[Tensor]) -> Tensor:
    return torch.cat([run.flatten(1) for run in runs]).float()


def test_outputs_hold_every_row_at_the_first_count() -> None:
    rows = probe_inputs.probe_values(256, *STEPS).bfloat16()
    assert len(rows) < TOKEN_COUNTS[0]
    first, few = probe_inputs.probe_outputs(varying(), "bfloat16", STEPS, 3, TOKEN_COUNTS)
    assert first.shape == (31, 4, 64) and few.shape == (5, 4, 64)
    assert torch.equal(first.flatten(1)[3 : 3 + len(rows) - 3].nan_to_num(), rows[:-3].nan_to_num())
    assert torch.equal(few, first[:5]) or few.isnan().any()
    runs = list(probe_inputs.probe_outputs(fixed(4), "bfloat16", STEPS, 0, (4,)))
    assert len(runs) == math.ceil(len(rows) / 4)
    assert torch.equal(together(runs)[: len(rows)].nan_to_num(), rows.float().nan_to_num())
    # A graph that tells tokens beyond the hundredth apart may read the first 31 alone.
    many = probe_inputs.probe_values(256, *STEPS * 9).bfloat16()
    runs = list(probe_inputs.probe_outputs(varying(), "bfloat16", STEPS * 9, 0, (131, 105)))
    assert [len(run) for run in runs] == [131, 131, 105] and len(many) == 52
    assert torch.equal(runs[1][:21].flatten(1).nan_to_num(), many[31:].nan_to_num())


@pytest.mark.parametrize("few", [False, True])
def test_outputs_hold_every_value(few: bool) -> None:
    wanted = every_value(torch.float16).view(torch.int16)
    runs = list(probe_inputs.every_output(varying(), "float16", TOKEN_COUNTS, few))
    assert [len(run) for run in runs] == ([5] * 52 if few else [256])
    assert torch.equal(torch.cat([run.flatten() for run in runs]).view(torch.int16)[: 2**16], wanted)
    runs = list(probe_inputs.every_output(varying(), "float16", (131, 105), few))
    assert [len(run) for run in runs] == ([105] * 52 if few else [356])
    assert torch.equal(runs[-1].view(torch.int16).flatten()[:256], wanted[255 * 256 :] if few else wanted[:256])
    runs = list(probe_inputs.every_output(fixed(7), "float16", (7,), few))
    assert [run.shape for run in runs] == [(7, 4, 64)] * 37
    assert torch.equal(torch.cat([run.flatten() for run in runs]).view(torch.int16)[: 2**16], wanted)
