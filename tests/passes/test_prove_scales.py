"""Computed scales: which quantisers fuse though they are written in an odd way, and which proof refuses others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_by_hand import judged
from torch import Tensor

from vattn.ops.fusion_notes import FUSED, NEAR_MISS
from vattn.quantization.codecs import encode_e2m1, pack_e2m1

Program = Callable[[Tensor, Tensor], Any]


RARE = 37.25
"""A value in bf16 that no sample holds, so that proofs alone meet it."""


def same(x: Tensor) -> Tensor:
    return x


def rounded(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn)


def alternate(size: int) -> Tensor:
    """Return which columns are in every second group of a size."""
    return torch.arange(256) // size % 2 == 0


def again(x: Tensor) -> Tensor:
    """Return the same values, made by two ops more."""
    return x.neg().neg()


def tokens(
    values: Callable[[Tensor], Tensor] = same,
    scale_of: Callable[[Tensor], Tensor] = same,
    scaled: Callable[[Tensor], Tensor] = same,
    of: Callable[[Tensor], Tensor] = same,
) -> Program:
    def function(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        x = of(o).float()
        scale = scale_of(x.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448)
        return rounded(scaled(values(x) / scale)), scale

    return function


def tokens_of_ends(largest: Callable[[Tensor, Tensor], Tensor]) -> Program:
    def function(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        x = o.float()
        scale = largest(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)).clamp(min=1e-10) / 448
        return rounded(x / scale), scale

    return function


def groups(scale_of: Callable[[Tensor], Tensor], used: Callable[[Tensor], Tensor] = same) -> Program:
    def function(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        x = o.float().view(-1, 4, 64)
        scale = scale_of(x.abs().amax(-1).clamp(min=1e-10) / 448)
        return rounded(x / used(scale).unsqueeze(-1)).view(-1, 256), scale

    return function


def nvfp4(pack: Callable[[Tensor, Tensor], Tensor]) -> Program:
    def function(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        x = o.float().view(-1, 16, 16)
        block = rounded(x.abs().amax(-1) / 6.0 / s)
        step = block.float() * s
        scaled = (x / torch.where(step == 0, torch.inf, step).unsqueeze(-1)).flatten(1)
        return pack(encode_e2m1(scaled), o), block

    return function


def nvfp4_of(block: Callable[[Tensor, Tensor], Tensor], inverse: bool = False) -> Program:
    def function(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        x = o.float().view(-1, 16, 16)
        scales = rounded(block(x.abs().amax(-1), s))
        step = scales.float() * s
        step = torch.where(step == 0, torch.inf, step).unsqueeze(-1)
        return pack_e2m1(encode_e2m1((x * step.reciprocal() if inverse else x / step).flatten(1))), scales

    return function


def doubled_at(number: float, x: Tensor) -> Tensor:
    return torch.where(x > number, x, torch.where(x < number, x, x * 2))


def odd(scale: Tensor) -> Tensor:
    """Return scales of which one that no sample holds is doubled."""
    return doubled_at(float(torch.tensor(1.2421875) / 448), scale)


def packed_by_or(codes: Tensor) -> Tensor:
    return codes[:, ::2] | codes[:, 1::2] << 4


def compared_with_another_group(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    x = o.float().view(-1, 4, 64)
    scale = x.abs().amax(-1).clamp(min=1e-10) / 448
    u = x / scale.unsqueeze(-1)
    return rounded(torch.where(u > scale.flip(1).unsqueeze(-1), u, again(u))).view(-1, 256), scale


def nvfp4_in_fp64(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    x = o.float().view(-1, 16, 16)
    block = rounded(x.abs().amax(-1) / 6.0 / s)
    step = block.float() * s
    step = torch.where(step == 0, torch.inf, step).unsqueeze(-1)
    return pack_e2m1(encode_e2m1((x.double() / step.double()).flatten(1))), block


def rounded_in_a_chain(length: int) -> Program:
    """Return a quantiser of the output times a number that bf16 rounds away, after so many negations of it."""

    def function(o: Tensor, s: Tensor) -> Tensor:
        x = o * (1 + 2**-10)
        for _ in range(length):
            x = -x
        return rounded((-1) ** length * x.float() / s)

    return function


def of_an_op(change: Callable[[Tensor], Tensor]) -> Program:
    def function(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = torch.ops.vattn.quant_fp8_group(o.float(), 64, False, False)
        return codes, change(scales)

    return function


FUSES: dict[str, Program] = {
    "halves of other formulas": tokens(lambda x: torch.cat((x[:, :128], again(x[:, 128:])), 1)),
    "64 parts": tokens(lambda x: torch.where(alternate(4), x, again(x))),
    "compared with each other": tokens(scaled=lambda u: torch.where(u <= u.abs(), u, -u)),
    "compared with a number": tokens(scaled=lambda u: torch.where(u > 3.7, u, again(u))),
    "scales in two parts": groups(lambda scale: torch.cat((scale[:, :1], scale[:, 1:]), 1)),
    "scales in bits": groups(lambda scale: scale.view(torch.int32).view(torch.float32)),
    "scales of a tuple": groups(lambda scale: torch.stack(scale.unbind(1), 1)),
    "bytes of an op's scales": of_an_op(lambda scales: scales.t().contiguous()),
    "scales not below a tensor": tokens(scale_of=lambda scale: torch.maximum(scale, torch.tensor(0.007))),
    "another formula of one value": lambda o, s: rounded(torch.where(o == RARE, again(o.float()), o.float()) / s),
    "groups of flipped heads": lambda o, s: groups(same)(o.view(-1, 4, 64).flip(1).flatten(1), s),
    "scales spread too": lambda o, s: (made := groups(same)(o, s)) + (made[1].unsqueeze(-1).expand(-1, -1, 8),),
    "both ends": tokens_of_ends(lambda low, high: torch.maximum(-low, high)),
    "both ends, the largest first": tokens_of_ends(lambda low, high: torch.maximum(high, -low)),
    "packed by or": nvfp4(lambda codes, o: packed_by_or(codes)),
}


@pytest.mark.parametrize("name", FUSES)
def test_other_ways_to_write_a_quantiser_fuse(name: str) -> None:
    node = judged(FUSES[name])
    assert node.outcome == FUSED, node.reason


REFUSED: dict[str, tuple[Program, str]] = {
    "128 parts": (
        tokens(lambda x: torch.where(alternate(2), x, again(x))),
        "it has too many parts to try every value in each",
    ),
    "one token of another formula": (
        tokens(lambda x: torch.cat((again(x[:1]), x[1:]))),
        "it treats some tokens otherwise than the others",
    ),
    "compared on a few tokens": (
        tokens(scaled=lambda u: torch.where(u <= u.abs(), u, -u), of=lambda o: o[:3]),
        "it compares scaled values, on too few tokens to try all of them",
    ),
    "beside other groups": (
        groups(same, lambda scale: torch.where(scale.flip(1) >= 0, scale, scale)),
        "its scales depend on several groups",
    ),
    "one scale of the last groups doubled": (
        groups(lambda scale: torch.cat((scale[:, :2], odd(scale[:, 2:])), 1)),
        "its scales are those of no supported format for some maxima",
    ),
    "one scale of one group doubled": (
        groups(lambda scale: torch.where(torch.arange(4) == 2, odd(scale), scale)),
        "its scales are those of no supported format for some maxima",
    ),
    "compared with another group": (
        compared_with_another_group,
        "values are divided by the scale of another group than their own",
    ),
    "an op's scales, changed": (of_an_op(again), "the scales that an op computes are changed"),
    "rounded in fp64": (
        tokens(scale_of=lambda scale: scale * 1.0000001),
        "its values are those of no supported format",
    ),
    "packed with more": (
        nvfp4(lambda codes, o: (codes + (o.abs() < 0).to(torch.uint8))[:, ::2] | codes[:, 1::2] << 4),
        "what is packed does not depend on scaled values alone",
    ),
    "packed as a neighbour says": (
        nvfp4(lambda codes, o: packed_by_or(torch.where(codes.roll(2, 1) < 99, codes, 0))),
        "values are packed otherwise than in pairs",
    ),
    "packed in two ways": (
        nvfp4(lambda codes, o: packed_by_or(torch.cat((codes[:, :128], codes[:, 128:] & 15), 1))),
        "values are packed otherwise than in pairs",
    ),
    "packed from fp64": (nvfp4_in_fp64, "no node holds the scaled values before they are rounded"),
    "moved before they are packed": (
        lambda o, s: nvfp4(lambda codes, _: packed_by_or(codes))(o.view(-1, 4, 64).flip(1).flatten(1), s),
        "the packed codes are sliced or transposed before they are packed",
    ),
    "block scales doubled at one number": (
        nvfp4_of(lambda m, s: doubled_at(0.3, m / 6.0 / s)),
        "NVFP4, but block scales are not rounded from maximum / 6 / scale, bit for bit",
    ),
    "values that only roundings to bf16 keep": (
        tokens(of=lambda o: (o.float() * 1.0001).bfloat16()),
        "values are rounded to bf16 or fp16 between its operations",
    ),
    "one value rounded to bf16": (
        lambda o, s: rounded(torch.where(o == RARE, (o.float() * 1.0001).bfloat16(), o).float() / s),
        "values are rounded to bf16 or fp16 between its operations",
    ),
    "rounded for two readers": (
        lambda o, s: rounded(torch.where((x := o * (1 + 2**-10)) > 0, x.float(), again(x.float())) / s),
        "values are rounded to bf16 or fp16 between its operations",
    ),
    "by the number of tokens": (
        lambda o, s: rounded(o.float() / o.shape[0]),
        "it computes with ",
    ),
    "a condition that is never met": (
        lambda o, s: rounded(torch.where(o.float().abs() < 0, o.float() * 2, o.float()) / s),
        "lt is never true for the inputs that are tried",
    ),
    "int8 by a number": (
        lambda o, s: (o.float() / 0.02).round().clamp(-128, 127).to(torch.int8),
        "int8 with a given scale is no supported format",
    ),
    "one column of one token": (
        lambda o, s: rounded(torch.where(torch.arange(256) == 17, again(o[:1] / s), o[:1] / s)),
        "it has too many parts to try every value in each",
    ),
    "20 roundings in one kernel": (rounded_in_a_chain(19), "its values are those of no supported format"),
    "21 roundings": (rounded_in_a_chain(20), "values are rounded to bf16 or fp16 between its operations"),
    "two tensors of codes": (
        lambda o, s: (*tokens()(o, s), tokens(scaled=lambda u: u * 2)(o, s)[0]),
        "the output is quantised in more than one way",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_quantisers_that_are_not_proven_are_refused(name: str) -> None:
    program, says = REFUSED[name]
    node = judged(program)
    assert node.outcome == NEAR_MISS and node.reason.startswith(says), node.reason


OPS: dict[str, Program] = {
    "divided_twice": nvfp4_of(lambda m, s: m / 6.0 / s),
    "divided_once": nvfp4_of(lambda m, s: m / (6.0 * s)),
    "times_a_sixth": nvfp4_of(lambda m, s: m * (1 / 6) / s),
    "times_the_reciprocal_of_the_scale": nvfp4_of(lambda m, s: m / 6.0 * (1 / s)),
    "values_times_a_reciprocal": nvfp4_of(lambda m, s: m / 6.0 / s, inverse=True),
}


@pytest.mark.parametrize("name", OPS)
def test_an_op_of_a_library_that_rounds_otherwise_is_refused(name: str) -> None:
    with torch.library._scoped_library("torchao", "FRAGMENT") as library:
        library.define(f"{name}(Tensor x, Tensor s) -> (Tensor, Tensor)")
        library.impl(name, OPS[name], "CompositeExplicitAutograd")
        node = judged(lambda o, s: getattr(torch.ops.torchao, name)(o, s))
    assert (node.outcome == FUSED) == (name == "divided_twice"), node.reason
