"""Which rotation a query or key is found to be, and what is none: small graphs written by hand, without a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_graphs import Shape, T, Written
from torch import Tensor
from torch.fx import Node

import vattn
from vattn.passes.region import Refusal
from vattn.passes.rope_kv_cache import probe
from vattn.passes.rope_kv_cache.probe import Rotation, classify_rotation, mixes_columns
from vattn.passes.rope_kv_cache.region import history, region_between

HEADS, KV_HEADS, WIDTH = 4, 2, 8
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
CONFIG = vattn.AttentionConfig(HEADS, KV_HEADS, WIDTH, WIDTH, 0.3, "bfloat16", "bfloat16", block_size=16)
HEAD: Shape = (T, HEADS, WIDTH, BF16)
HALF: Shape = (T, 1, WIDTH // 2)
SCALE: Shape = (1,)


def rotation_of(written: Written) -> Rotation[Node]:
    return classify_rotation(written.end, HEADS, CONFIG)[0]


def refusal_of(written: Written) -> Refusal:
    with pytest.raises(Refusal) as caught:
        rotation_of(written)
    return caught.value


def neox(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).bfloat16()


def by_sin_first(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    return neox(x, cos, sin)


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float()[..., ::2], x.float()[..., 1::2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2).bfloat16()


def whole_tables(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x.float()
    turned = torch.cat((-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]), -1)
    return (x * cos + turned * sin).bfloat16()


def partly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat((neox(x[..., :4], cos, sin), x[..., 4:]), -1)


def normed(weighs: Callable[[Tensor], Tensor] = lambda weight: weight, eps: float = 0.003) -> Callable[..., Tensor]:
    def program(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return neox(wide * weighs(weight.float()), cos, sin)

    return program


def in_fp8(divided: Callable[[Tensor, Tensor], Tensor], limit: float = 448.0) -> Callable[..., Tensor]:
    def program(x: Tensor, cos: Tensor, sin: Tensor, scale: Tensor) -> Tensor:
        return divided(neox(x, cos, sin).float(), scale).clamp(-limit, limit).to(E4M3)

    return program


def of_a_batch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Two sequences of three tokens share their tables."""
    cos, sin = (table.expand(2, 3, WIDTH // 2).reshape(6, 1, WIDTH // 2) for table in (cos, sin))
    return neox(x, cos, sin)


def by_complex_numbers(x: Tensor, factors: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * factors).flatten(-2).bfloat16()


EIGHTH = (WIDTH, BF16)
ROTATED: dict[str, tuple[Callable[..., Tensor], list[Shape], dict[str, Any]]] = {
    "neox": (neox, [HEAD, HALF, HALF], {"tables": (1, 2)}),
    "sines come first": (by_sin_first, [HEAD, HALF, HALF], {"tables": (2, 1)}),
    "one token": (neox, [(1, HEADS, WIDTH, BF16), (1, 1, 4), (1, 1, 4)], {"tables": (1, 2)}),
    "as many tokens as columns": (
        neox, [(WIDTH, HEADS, WIDTH, BF16), (WIDTH, 1, 4), (WIDTH, 1, 4)], {"tables": (1, 2)},
    ),
    "interleaved": (interleaved, [HEAD, HALF, HALF], {"style": "interleaved", "tables": (1, 2)}),
    "tables of all columns": (whole_tables, [HEAD, (T, 1, WIDTH), (T, 1, WIDTH)], {"tables": (1, 2)}),
    "tables of two by two": (
        lambda x, cos, sin: neox(x, cos.view(-1, 1, 4), sin.view(-1, 1, 4)),
        [HEAD, (T, 2, 2), (T, 2, 2)], {"tables": (1, 2)},
    ),
    "half of the columns": (partly, [HEAD, (T, 1, 2), (T, 1, 2)], {"rotary_dim": 4, "tables": (1, 2)}),
    "tables of two sequences": (
        of_a_batch, [(6, HEADS, WIDTH, BF16), (3, WIDTH // 2), (3, WIDTH // 2)], {"tables": (1, 2)},
    ),
    "complex numbers": (
        by_complex_numbers, [HEAD, (T, 1, 4, torch.complex64)], {"style": "interleaved", "tables": (1, 1)},
    ),
    "a norm": (
        normed(), [HEAD, EIGHTH, HALF, HALF], {"norm": "rms", "norm_eps": 0.003, "tables": (2, 3), "weight": 1},
    ),
    "a norm of one token": (
        normed(), [(1, HEADS, WIDTH, BF16), EIGHTH, (1, 1, 4), (1, 1, 4)],
        {"norm": "rms", "norm_eps": 0.003, "tables": (2, 3), "weight": 1},
    ),
    "a norm by one plus": (
        normed(lambda weight: weight + 1, 0.02), [HEAD, EIGHTH, HALF, HALF],
        {"norm": "rms_one_plus", "norm_eps": 0.02, "tables": (2, 3), "weight": 1},
    ),
    "a norm without a weight": (
        lambda x, cos, sin: normed(lambda weight: 1.0, 0.0)(x, x, cos, sin), [HEAD, HALF, HALF],  # type: ignore[arg-type,return-value]
        {"norm": "rms", "norm_eps": 0.0, "tables": (1, 2)},
    ),
    "divided": (in_fp8(torch.div), [HEAD, HALF, HALF, SCALE], {"tables": (1, 2), "scale": 3}),
    "multiplied": (
        in_fp8(torch.mul), [HEAD, HALF, HALF, SCALE], {"query_arithmetic": "multiply", "tables": (1, 2), "scale": 3},
    ),
    "scales of KV heads": (
        in_fp8(lambda x, scale: x / scale.repeat_interleave(2)[:, None]), [HEAD, HALF, HALF, (KV_HEADS,)],
        {"tables": (1, 2), "scale": 3},
    ),
    "later heads of seven": (
        lambda x, cos, sin: neox(x.float()[:, 2:6], cos, sin), [(T, 7, WIDTH, BF16), HALF, HALF],
        {"first_head": 2, "heads_of_source": 7, "tables": (1, 2)},
    ),
    "last heads of five": (
        lambda x, cos, sin: neox(x, cos, sin)[:, 1:], [(T, 5, WIDTH, BF16), HALF, HALF],
        {"first_head": 1, "heads_of_source": 5, "tables": (1, 2)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROTATED)
def test_rotations_are_described_in_full(name: str) -> None:
    program, shapes, wanted = ROTATED[name]
    written = Written(program, *shapes)
    found = rotation_of(written)
    at = [written.inputs.index(table) for table, _ in (found.cos, found.sin)]
    assert (found.source, *at) == (written.inputs[0], *wanted["tables"])
    assert (found.cos[1], found.sin[1]) == (("real", "imag") if at[0] == at[1] else ("", ""))
    for role in ("weight", "scale"):
        node = getattr(found, role)
        assert (None if node is None else written.inputs.index(node)) == wanted.get(role)
    assert (found.first_head, found.heads_of_source) == (wanted.get("first_head", 0), wanted.get("heads_of_source", 4))
    rope = found.rope
    assert (rope.rotary_dim, rope.style) == (wanted.get("rotary_dim", WIDTH), wanted.get("style", "neox"))
    assert (rope.norm, rope.norm_eps) == (wanted.get("norm", "none"), wanted.get("norm_eps", 0.0))
    assert (rope.round_query, rope.query_arithmetic) == (False, wanted.get("query_arithmetic", "divide"))


def test_of_more_heads_the_nearest_are_the_source() -> None:
    def program(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return neox(x[:, 1:6].clone().float()[:, :4], cos, sin)

    written = Written(program, (T, 7, WIDTH, BF16), HALF, HALF)
    found = rotation_of(written)
    assert (found.first_head, found.heads_of_source) == (0, 5) and "clone" in found.source.name


def also(change: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor] = lambda x: x) -> Callable[..., Tensor]:
    """Return a rotation of heads that are changed in fp32, and changed after it too."""
    return lambda x, cos, sin: after(neox(change(x.float()), cos, sin))


def first_tokens(count: int) -> Callable[..., Tensor]:
    return lambda x, cos, sin: torch.cat((neox(x, cos, sin)[:count], x[count:]))


ODD = "it is computed from cos and sin, but not as a rotation that the op has"
COLUMNS_TURN = [HEAD, HALF, HALF]
REFUSED: dict[str, tuple[Callable[..., Tensor], list[Shape], str]] = {
    "large values limited": (also(lambda x: x.clamp(-1e6, 1e6)), COLUMNS_TURN, ODD),
    "small values moved": (also(lambda x: x, lambda x: x + 1e-12), COLUMNS_TURN, ODD),
    "NaN of the last column replaced": (
        also(lambda x: torch.where(x.isnan() & (torch.arange(WIDTH) == WIDTH - 1), 0.5, x)), COLUMNS_TURN, ODD,
    ),
    "one head left out": (also(lambda x: x * (torch.arange(HEADS) != 3)[:, None]), COLUMNS_TURN, ODD),
    "a column left out": (also(lambda x: x * (torch.arange(WIDTH) != 5)), COLUMNS_TURN, ODD),
    "turned back": (lambda x, cos, sin: neox(x.flip(-1), cos, sin).flip(-1), COLUMNS_TURN, ODD),
    "the first four tokens": (first_tokens(4), COLUMNS_TURN, ODD),
    "the first five tokens": (
        first_tokens(5), COLUMNS_TURN, "what it does depends on whether there are 5 tokens, too many to try it out",
    ),
    "sines of other columns": (
        lambda x, cos, sin: neox(x, cos, sin.repeat(1, 1, 2)), [HEAD, HALF, (T, 1, 2)],
        "its tables have 4 and 2 columns",
    ),
    "one table": (lambda x, cos: neox(x, cos, cos), [HEAD, HALF], "it depends on one table alone (cos_1)"),
    "three tables": (
        lambda x, cos, sin, third: (neox(x, cos, sin) * third.repeat(1, 1, 2)).bfloat16(), [HEAD, HALF, HALF, HALF],
        "it depends on more than two tables (cos_1, sin_1, third_1)",
    ),
    "complex numbers and a table": (
        lambda x, factors, other: (by_complex_numbers(x, factors) * other.repeat(1, 1, 2)).bfloat16(),
        [HEAD, (T, 1, 4, torch.complex64), HALF], "it depends on more than two tables (factors_1, other_1)",
    ),
    "two weights": (
        lambda x, a, b, cos, sin: neox(x.float() * a * b, cos, sin), [HEAD, EIGHTH, EIGHTH, HALF, HALF],
        "it depends on more than one weight",
    ),
    "scaled": (lambda x, cos, sin, by: neox(x.float() * by, cos, sin), [HEAD, HALF, HALF, SCALE], "it is scaled"),
    "a weight for each head": (
        lambda x, cos, sin, by: neox(x.float() * by, cos, sin), [HEAD, HALF, HALF, (HEADS, WIDTH)],
        "it also depends on by_1 of shape ('4', '8')",
    ),
    "a constant scale": (
        lambda x, cos, sin: in_fp8(torch.div)(x, cos, sin, 0.03), COLUMNS_TURN,
        "its FP8 scale is a constant of the graph",
    ),
    "no clamp": (
        in_fp8(torch.div, 449.0), [HEAD, HALF, HALF, SCALE], "its quantisation does not clamp before the cast",
    ),
    "scales of heads cut from more": (
        lambda x, cos, sin, s: in_fp8(lambda x, s: x / s.repeat_interleave(2)[:, None])(x.float()[:, :4], cos, sin, s),
        [(T, 6, WIDTH, BF16), HALF, HALF, (KV_HEADS,)], "heads with scales of their own are cut from more heads",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_looks_like_a_rotation_is_a_near_miss(name: str) -> None:
    program, shapes, says = REFUSED[name]
    refusal = refusal_of(Written(program, *shapes))
    assert (refusal.reason, refusal.near) == (says, True)


NOTHING: dict[str, tuple[Callable[..., Tensor], list[Shape], str]] = {
    "copied": (lambda x: x.clone(), [HEAD], "no rotation makes it"),
    "another dtype": (lambda x: x.bfloat16(), [(T, HEADS, WIDTH)], "nothing in bfloat16 is rotated into it"),
    "fewer heads": (
        lambda x: x.repeat(1, 2, 1).float() * 2, [(T, 2, WIDTH, BF16)], "no rotation makes it",
    ),
    "by a table, each column for itself": (
        lambda x, table: (x * table).bfloat16(), [HEAD, (T, 1, WIDTH)], "it depends on one table alone (table_1)",
    ),
    "three columns": (
        lambda x, cos, sin: torch.cat((x[..., :3] * cos + x[..., 3:6] * sin, x[..., 3:]), -1).bfloat16(),
        [HEAD, (T, 1, 3), (T, 1, 3)], ODD,
    ),
    "NaN replaced": (also(lambda x: torch.where(x.isnan(), 0.5, x)), COLUMNS_TURN, ODD),
    "NaN spread over the head": (
        also(lambda x: torch.where(x.isnan().any(-1, keepdim=True), torch.nan, x)), COLUMNS_TURN, ODD,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTHING)
def test_what_looks_like_none_is_not(name: str) -> None:
    program, shapes, says = NOTHING[name]
    refusal = refusal_of(Written(program, *shapes))
    assert (refusal.reason, refusal.near) == (says, False)


def pair(first: int, second: int) -> Callable[[Tensor], Tensor]:
    """Return a program that adds one column to another."""
    return lambda x: x + torch.where(torch.arange(WIDTH) == second, x[..., first : first + 1], 0)


MIXED: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "itself": (lambda x: x * 2, False),
    "all": (lambda x: x * x.sum(-1, keepdim=True), False),
    "the first": (pair(0, 1), True),
    "the last": (pair(WIDTH - 1, 2), True),
    "another place": (lambda x: x.roll(1, -1), True),
}


@pytest.mark.parametrize("name", MIXED)
def test_columns_mix_where_one_takes_part_in_others(name: str) -> None:
    program, wanted = MIXED[name]
    written = Written(program, HEAD)
    assert mixes_columns(region_between(written.inputs[0], written.end, history(written.end)), WIDTH) == wanted


def test_results_are_close_within_the_size_of_their_own_head() -> None:
    want = torch.tensor([[[1.0, 0.0], [1e7, 1.0]], [[1e-9, torch.nan], [0.0, 0.0]]], dtype=torch.float64)
    step = torch.tensor([[1e-11, 1e-4], [1e-20, 0.0]], dtype=torch.float64)[..., None]
    assert probe._close(want, want) and probe._close(want + step * 0.9, want)
    for token, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
        got = want.clone()
        got[token, head, 0] += 1.2 * step[token, head, 0] + (1e-30 if token == head == 1 else 0.0)
        assert not probe._close(got, want)
    assert not probe._close(want.nan_to_num(), want) and not probe._close(want * torch.nan, want)
