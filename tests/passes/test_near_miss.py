"""The quantisers that the report knows by name, against their formulas; and which ones are looked for."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vattn.passes import near_miss
from vattn.passes.near_miss import dynamic_ways, static_ways
from vattn.passes.probe_inputs import probe_values
from vattn.passes.region_run import same_bits
from vattn.quantization.codecs import MIN_ABSMAX, decode_e2m1, encode_e2m1, unpack_e2m1

E4M3 = torch.float8_e4m3fn


def bits(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(E4M3).view(torch.uint8)


def rows(columns: int = 256) -> Tensor:
    """Return zeros, and ties under maxima that tell orders of rounding apart."""
    return probe_values(columns, 1.0)[:13]


def the_way(columns: int, *words: str) -> Callable[..., Tensor]:
    (way,) = (way for reason, way in dynamic_ways(columns, E4M3).items() if all(word in reason for word in words))
    return way


def test_which_sizes_of_groups_are_looked_for() -> None:
    for columns, sizes in ((1024, [16, 32, 256, 512]), (512, [16, 32, 256]), (256, [16, 32]), (96, [16, 32]), (33, [])):
        found = [reason for reason in dynamic_ways(columns, E4M3) if "no supported format; use 64 or 128" in reason]
        assert found == [f"groups of {n} columns are no supported format; use 64 or 128" for n in sizes]
    for columns, names in ((256, ["token", "group of 128", "group of 64"]), (64, ["token"]), (96, ["token"])):
        found = list(
            dict.fromkeys(r.split(",")[0] for r in dynamic_ways(columns, E4M3) if r.startswith("one scale per"))
        )
        assert found == [f"one scale per {name}" for name in names]


ORDERS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "divided by the reciprocal of": lambda x, m, least: (
        x / (448 / torch.where(m / 448 < least, torch.tensor(least) * 448, m)).reciprocal()
    ),
    "by 448 and then": lambda x, m, least: x * 448 / torch.where(m / 448 < least, torch.tensor(least) * 448, m),
    "by 1 / 448": lambda x, m, _: x / (m.clamp(min=MIN_ABSMAX) * (1 / 448)),
}


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_rounding(size: int, order: str) -> None:
    x = rows()
    groups = x.view(-1, size)
    largest = groups.abs().amax(-1, keepdim=True)
    name = {64: "per group of 64", 128: "per group of 128", 256: "per token"}[size]
    way = the_way(256, name, order)
    for floor, least in ((None, MIN_ABSMAX / 448), (1e-4, 1e-4)):
        wanted = ORDERS[order](groups, largest, least).view(x.shape)
        assert torch.equal(way(x, 0.0, floor).view(torch.uint8), bits(wanted))
        plain = bits((groups / (largest / 448).clamp(min=least)).view(x.shape))
        assert floor or not torch.equal(bits(wanted), plain)


@pytest.mark.parametrize("size", [64, 128, 256])
def test_numbers_that_are_added_to_a_scale(size: int) -> None:
    groups = rows()[1:].view(-1, size)
    scale = groups.abs().amax(-1, keepdim=True) / 448
    way = the_way(256, {64: "group of 64", 128: "group of 128", 256: "per token"}[size], "a number is added")
    for number in (None, 1e-3):
        wanted = bits(groups / (scale + (number or 0.0))).view(-1, 256)
        assert torch.equal(way(rows()[1:], 0.0, number).view(torch.uint8), wanted)


def test_groups_of_other_sizes() -> None:
    x = rows(1024)
    for size in (16, 32, 256, 512):
        groups = x.view(-1, size)
        scale = groups.abs().amax(-1, keepdim=True) / 448
        for floor in (None, 1e-4):
            wanted = bits(groups / scale.clamp(min=MIN_ABSMAX / 448 if floor is None else floor)).view(x.shape)
            assert torch.equal(the_way(1024, f"groups of {size} columns")(x, 0.0, floor).view(torch.uint8), wanted)
    whole = bits(x / (x.abs().max() / 448))
    assert torch.equal(the_way(1024, "for the whole tensor")(x, 0.0, None).view(torch.uint8), whole)
    step = torch.exp2((x.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-4).log2().ceil())
    powers = the_way(1024, "powers of two as scales")
    assert torch.equal(powers(x, 0.0, 1e-4).view(torch.uint8), bits(x / step))


def test_numbers_made_of_nan() -> None:
    x = torch.tensor([[math.nan, math.inf, -math.inf, 3.0, -1e6]])
    zero, least = (way(x, 0.5, None).float().tolist() for way in [*static_ways(E4M3).values()][-2:])
    assert zero == [[0.0, 448.0, -448.0, 6.0, -448.0]] and least == [[-448.0, 448.0, -448.0, 6.0, -448.0]]


@pytest.mark.parametrize("saturates", [True, False])
def test_ways_with_a_given_scale(saturates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_miss, "SATURATES", saturates)
    x = torch.cat((rows(), torch.tensor([math.nan, math.inf, -math.inf, 200.0]).repeat(1, 64)))
    limit, scale = torch.tensor(448.0), torch.tensor(0.37)
    cut = torch.where(x.abs() > 464 * scale, torch.nan, x)
    wanted = [cut / scale, torch.where(x.abs() * scale > 464, torch.nan, x) * scale][: 0 if saturates else 2]
    wanted += [(x / scale).nan_to_num(0.0), torch.where(x.isnan(), -limit, x / scale)]
    for way, values in zip(static_ways(E4M3).values(), wanted, strict=True):
        assert same_bits(way(x, 0.37, None), values.clamp(-448, 448).to(E4M3))
    (way,) = static_ways(torch.int8).values()
    assert torch.equal(way(rows(), 0.37, None), (rows() / 0.37).round().clamp(-128, 127).to(torch.int8))


PACKED = {
    "block scales are maximum / (6 * scale)": lambda m, s: m / (6 * s),
    "divided by zero": lambda m, s: m / 6 / s,
    "a small number": lambda m, s: m / 6 / s,
    "as torchao": lambda m, s: (m / 6 / s).clamp(min=2.0**-6),
    "as compressed-tensors": lambda m, s: (m.bfloat16() / 6).float() * s,
    "ties round away": lambda m, s: m / 6 / s,
    "odd column": lambda m, s: m / 6 / s,
}


@pytest.mark.parametrize("words", PACKED)
def test_packed_values(words: str) -> None:
    x, s = rows(), torch.tensor(0.37)
    (way,) = (way for reason, way in static_ways(torch.uint8).items() if words in reason)
    groups = x.view(13, 16, 16)
    block = PACKED[words](groups.abs().amax(-1, keepdim=True), s).clamp(-448, 448).to(E4M3).float()
    step = block * s
    scaled = groups / torch.where(step == 0, torch.inf, step)
    if words == "divided by zero":
        scaled = groups / step
    elif words == "a small number":
        scaled = groups / step.clamp(min=1e-30)
    elif words == "as torchao":
        scaled = groups * ((1 / s) / block)
    elif words == "as compressed-tensors":
        scaled = groups / (torch.where(block == 0, 0.125, block) / s) + 0.0
    codes = encode_e2m1(scaled)
    if words == "as torchao":
        codes = torch.where(scaled.isnan(), 4, codes)
    if words == "ties round away":
        size, values = scaled.abs(), decode_e2m1(torch.arange(8))
        middles = (values[1:] + values[:-1]) / 2
        codes = (size.unsqueeze(-1) >= middles).sum(-1) + 8 * scaled.signbit()
    made = unpack_e2m1(way(x, float(s), None))
    if words == "odd column":
        made = made.view(13, 128, 2).flip(-1).flatten(1)
    assert torch.equal(made.int(), codes.flatten(1).int())
