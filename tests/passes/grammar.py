"""Ways to write quantisation, composed from the productions of `productions.py`.

Every form takes the attention output `o [T, COLUMNS]` and a scale `s [1]`, and returns codes, or codes and scales.
What a form means is found by running it (`meaning`), with inputs and references of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from forms import rounded
from harness import COLUMNS
from productions import DYNAMIC_PARTS, E4M3, STATIC_PARTS
from torch import Tensor

from vattn.passes.region_run import SATURATES

STATIC_BASE = ("float()", "/ s", "clamp", "to", "none")
DYNAMIC_BASE = ("float()", "abs().amax()", "clamp 1e-10", "/", "any", "token", "clamp", "to", "[T, G]", "whole")

SATURATING = () if SATURATES else ("none", "one side", "to 500")
"""Clamps that leave it to the cast to saturate, where it does not everywhere."""


def _same(q: Tensor) -> Tensor:
    return q


@dataclass(frozen=True)
class Form:
    """One way to write it.

    Attributes:
        name: the productions it is made of.
        function: what is compiled.
        saturates: whether no cast of it is left to saturate on its own.
        plain: the same with codes and scales returned as they are, where it returns something made of them.
        moved: what becomes of codes and scales of the whole output `[T, ...]` by the form's slices and transposes.
    """

    name: str
    function: Callable[[Tensor, Tensor], Any]
    saturates: bool = True
    plain: Callable[[Tensor, Tensor], Any] | None = None
    moved: Callable[[Tensor], Tensor] = _same


def static_form(*chosen: str) -> Form:
    widen, scaled, clamped, cast, shaped = (t[c] for t, c in zip(STATIC_PARTS.values(), chosen, strict=True))
    before, after = shaped

    def function(o: Tensor, s: Tensor) -> Tensor:
        return after(cast(clamped(scaled(widen(before(o)), s))))

    def moved(q: Tensor) -> Tensor:
        return after(before(q))

    name = f"static: {', '.join(chosen)}"
    return Form(name, function, chosen[2] not in SATURATING, None, moved)


def dynamic_form(*chosen: str) -> Form:
    parts = (t[c] for t, c in zip(DYNAMIC_PARTS.values(), chosen, strict=True))
    widen, largest, scale, applied, power, size, clamped, cast, returned, (before, moved) = parts

    def function(o: Tensor, s: Tensor, returned: Any = returned) -> tuple[Tensor, Tensor]:
        o = before(o)
        columns = o.shape[-1]
        width = size if size == 0 or columns % size == 0 else columns
        x = widen(o)
        x = x.reshape(-1, columns // width, width) if width else x.reshape(1, 1, -1)
        factor = power(scale(largest(x)))
        codes = cast(clamped(applied(x, factor)))
        return codes.view(-1, columns), returned(factor)

    plain = DYNAMIC_PARTS["returned"]["[T, G]"]
    name = f"dynamic: {', '.join(chosen)}"
    return Form(name, function, plain=lambda o, s: function(o, s, plain), moved=moved)


PAIRS = [
    static_form(*STATIC_BASE[:3], "e4m3 twice", "first tokens"),
    static_form(*STATIC_BASE[:3], "to, bytes", "half the columns"),
    static_form("float()", "/ full_like", "clamp", "to", "first tokens"),
    dynamic_form(*DYNAMIC_BASE[:2], "plus 1e-6", "* (1 / scale)", "power of two", "token", "none", *DYNAMIC_BASE[7:]),
    dynamic_form("float()", "abs().max()", "no floor", "* reciprocal()", "power of two", "group 64", *DYNAMIC_BASE[6:]),
]
"""Combinations that random forms once found to be judged wrongly."""


def around(
    title: str,
    base: tuple[str, ...],
    parts: dict[str, dict[str, Any]],
    make: Callable[..., Form],
    keep: tuple[str, ...] = (),
) -> dict[str, Form]:
    """Return the base form and all that differ from it in one production, which names them.

    Args:
        keep: kinds of productions that do not change.
    """
    forms = [replace(make(*base), name=f"{title}: {', '.join(base)}")]
    for place, (kind, choices) in enumerate(parts.items()):
        for choice in choices if kind not in keep else ():
            if choice != base[place]:
                form = make(*base[:place], choice, *base[place + 1 :])
                forms.append(replace(form, name=f"{title}, {kind}: {choice}"))
    return {form.name: form for form in forms}


def valid(form: Form) -> bool:
    """Return whether a form runs at all: some choices do not go together."""
    try:
        for tokens in (16, 5):
            form.function(torch.randn(tokens, COLUMNS).bfloat16(), torch.ones(1))
    except (RuntimeError, ValueError):
        return False
    return True


def own_inputs(seed: int) -> Tensor:
    """Rows of many magnitudes: ties of FP8 under simple scales, zeros, infinity and NaN, and every bf16 value."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(64, COLUMNS, generator=rng) * torch.exp2(torch.randint(-30, 12, (64, 1), generator=rng).float())
    odd = torch.randint(8, 16, (16, COLUMNS), generator=rng) * 2 + 1
    x[:16] = odd * torch.exp2(torch.randint(-4, 5, (16, COLUMNS), generator=rng).float()) * 7 / 512
    x[:16, ::32] = 448 * 7 / 512
    x[20], x[21, 5], x[22, 7], x[23], x[24] = 0, torch.inf, torch.nan, 1e-30, 1e-39
    x[25, 1:], x[26, : COLUMNS // 2] = 0, 0
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    if seed > 1:
        every = every[torch.randperm(len(every), generator=rng)]
    # Every mantissa under every maximum: a factor that is off in its last place shows at a tie.
    mantissas = 1 + torch.arange(128) / 128
    pairs = torch.cat((mantissas, mantissas / 2)).repeat(128, 1)
    pairs = torch.where(pairs > mantissas[:, None], 0, pairs)
    pairs[:, 0] = mantissas
    rows = torch.cat((x.bfloat16(), every.view(-1, COLUMNS), pairs.bfloat16()))
    return rows if seed == 1 else rows[torch.randperm(len(rows), generator=rng)]


OWN_SCALES = (0.0137, 7 / 512, 3.3333332538604736, 1 / 29, 0.02, 3e3, 1e-7)


def meaning(form: Form, function: Callable[[Tensor, Tensor], Any] | None = None) -> str | None:
    """Return which supported format a form means, from running it; `None`: none.

    Args:
        function: run this in place of the form.
    """
    function = function or form.plain or form.function
    marks = torch.ones(16, COLUMNS, dtype=torch.uint8)
    if not form.saturates or not bool(form.moved(marks).all()):
        return None
    found: set[str] | None = None
    zeros = function(torch.zeros(16, COLUMNS).bfloat16(), torch.ones(1))
    for seed, scale in enumerate(OWN_SCALES, 1):
        rows, s = own_inputs(seed), torch.tensor([scale])
        # A form that reads some tokens alone is shown all rows a few at a time.
        parts = [rows] if form.moved(marks).numel() == marks.numel() else rows.split(16)
        for x in parts:
            made = function(x, s)
            codes, *rest = made if isinstance(made, tuple) else (made,)
            floor = zeros[1].float().min() if rest else None
            if len(rest) > 1:
                return None
            references = _references(x.float(), s, codes, rest, floor)
            found = {
                name
                for name, make in references
                if (found is None or name in found) and _agree(form, codes, rest, make())
            }
            if not found:
                return None
    return min(found) if found else None


def meaning_in_fp32(form: Form) -> str | None:
    """Return what a form means where nothing is rounded to bf16 between its operations, as compiled code has it."""
    function = form.plain or form.function
    x, s = own_inputs(1)[:16], torch.ones(1)
    if _dtypes(function(x, s)) != _dtypes(function(x.float(), s)):
        return None
    return meaning(form, lambda o, s: function(o.float(), s))


def _dtypes(made: Any) -> list[torch.dtype]:
    return [t.dtype for t in (made if isinstance(made, tuple) else (made,))]


Reference = tuple[str, Callable[[], tuple[Tensor, "Tensor | None"]]]


def _references(x: Tensor, s: Tensor, codes: Tensor, rest: list[Tensor], floor: Tensor | None) -> Iterator[Reference]:
    """Yield formats by name, and how to get their codes and scales."""
    if rest and rest[0].dtype == E4M3:
        yield "nvfp4", lambda: _nvfp4(x, s, False)
        yield "nvfp4 swizzled", lambda: _nvfp4(x, s, True)
    elif rest and rest[0].dtype in (torch.uint8, torch.float8_e8m0fnu):
        yield "mx ceil", partial(_mx, x, True)
        yield "mx floor", partial(_mx, x, False)
    elif rest:
        limits = (127, 127.5) if codes.dtype == torch.int8 else (448,)
        for limit, size, by in itertools.product(limits, (COLUMNS, 128, 64), FACTORS):
            for least in (0.0, 1e-12, 1e-10, 1e-4, 1e-3):
                yield f"factor {limit} {size} {by} {least}", partial(_by_factor, x, limit, size, by, least)
        if codes.dtype == torch.int8:
            for limit, sign, rule in itertools.product(limits, "/*", ("least", "zero")):
                name = f"int8 {limit} {sign} {rule}"
                yield name, partial(_dynamic, x, floor, COLUMNS, False, sign, rule, limit)
            return
        for size in dict.fromkeys((COLUMNS, 128, 64)):
            for power in (False,) if size == COLUMNS else (False, True):
                for sign, rule in itertools.product("/*", ("least", "rounded" if power else "zero")):
                    yield f"group {size} {power} {sign} {rule}", partial(_dynamic, x, floor, size, power, sign, rule)
    else:
        divisors = {"s": s, "(s + 1e-4)": s + 1e-4, "2s": 2 * s, "bf16": s.bfloat16().float(), "0.02": 0.02, "1": 1.0}
        factors = {"s": s, "1 / s": s.reciprocal(), "50": 50.0, "8": 8.0}
        for name, divisor in divisors.items():
            yield f"static / {name}", partial(lambda divisor: (rounded(x / divisor), None), divisor)
        for name, factor in factors.items():
            yield f"static * {name}", partial(lambda factor: (rounded(x * factor), None), factor)


FACTORS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "product": lambda m, limit: (1 / m) * limit,
    "quotient": lambda m, limit: torch.tensor(limit) / m,
}


def _codes(x: Tensor, limit: float) -> Tensor:
    if limit == 448:
        return rounded(x)
    return torch.where(x.isnan(), 0, x.round().clamp(-128, 127)).to(torch.int8)


def _by_factor(x: Tensor, limit: float, size: int, by: str, least: float) -> tuple[Tensor, Tensor]:
    """Quantise groups of columns by factors; the scale is a maximum over the limit, or the inverse."""
    groups = x.view(-1, COLUMNS // size, size)
    largest = groups.abs().amax(-1).clamp(min=least)
    factor = FACTORS[by.removeprefix("inverse of ")](largest, limit)
    scales = 1 / factor if by.startswith("inverse") else largest / limit
    return _codes(groups * factor.unsqueeze(-1), limit).view(-1, COLUMNS), scales


FACTORS |= {f"inverse of {name}": factor for name, factor in FACTORS.items()}


def _mx(x: Tensor, ceil: bool) -> tuple[Tensor, Tensor]:
    """Quantise groups of 32 columns; powers of two by `frexp`."""
    groups = x.view(-1, COLUMNS // 32, 32)
    largest = groups.abs().amax(-1)
    mantissa, exponent = (largest / 448 if ceil else largest).double().frexp()
    exponent = exponent - (mantissa == 0.5).int() if ceil else exponent - 9
    exponent = torch.where(largest == 0, -127, exponent).clamp(min=-127)
    power = torch.exp2(exponent.double())
    values = groups.double()
    if ceil:
        exponent = torch.where(largest.isinf(), 127, exponent)
        factor = torch.where(largest.isinf(), 2.0**-127, torch.where(exponent == -127, 1.0, 1 / power))
        scaled = values * torch.where(largest.isnan(), torch.nan, factor).unsqueeze(-1)
    else:
        exponent = torch.where(largest.isinf(), 120, exponent)
        power = torch.where(largest.isinf(), 2.0**120, power.clamp(min=2.0**-126))
        scaled = values / torch.where(largest.isnan(), torch.inf, power).unsqueeze(-1)
    scales = torch.where(largest.isnan(), 255, exponent + 127).to(torch.uint8)
    return rounded(scaled.float()).view(-1, COLUMNS), scales.view(torch.float8_e8m0fnu)


def _dynamic(
    x: Tensor, floor: Tensor, size: int, power: bool, sign: str, rule: str, limit: float = 448
) -> tuple[Tensor, Tensor]:
    """Quantise groups of columns; `floor` is whatever the form itself gives a row of zeros.

    Args:
        rule: whether the floor is the least scale, before or after it is rounded, or replaces zero alone.
    """
    groups = x.view(-1, COLUMNS // size, size)
    scales = groups.abs().amax(-1) / limit
    if bool(floor > 0) and rule == "zero":
        scales = torch.where(scales == 0, floor, scales)
    elif bool(floor > 0) and rule == "least":
        scales = torch.where(scales.isnan(), scales, torch.maximum(scales, floor))
    if power:
        # The formats round up to a normal number, which matters only to rows of subnormals without a floor.
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
        scales = torch.where((scales > 0) & (scales < 2.0**-126), 2.0**-126, scales)
    if rule == "rounded":
        scales = torch.where(scales.isnan(), scales, torch.maximum(scales, floor))
    wide = scales.unsqueeze(-1)
    return _codes(groups / wide if sign == "/" else groups * (1 / wide), limit).view(-1, COLUMNS), scales


def nearest_e2m1(x: Tensor) -> Tensor:
    """Return 4-bit codes by comparing with all values; of two that are as near, the even code."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    size = x.abs().clamp(max=6).unsqueeze(-1)
    distance = (size - values).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    even = nearest & (torch.arange(8) % 2 == 0)
    code = torch.where(even.any(-1), even.int().argmax(-1), nearest.int().argmax(-1))
    return torch.where(x.isnan(), 7, code + 8 * x.signbit().int()).to(torch.uint8)


def _nvfp4(x: Tensor, s: Tensor, is_swizzled: bool) -> tuple[Tensor, Tensor]:
    groups = x.view(-1, COLUMNS // 16, 16)
    block = rounded(groups.abs().amax(-1) / 6 / s)
    step = block.float() * s
    codes = nearest_e2m1(groups / torch.where(step == 0, torch.inf, step).unsqueeze(-1)).view(-1, COLUMNS)
    packed = codes[:, ::2] + 16 * codes[:, 1::2]
    if not is_swizzled:
        return packed, block
    rows, columns = -(-len(x) // 128) * 128, -(-block.shape[1] // 4) * 4
    swizzled = torch.zeros(rows * columns, dtype=torch.uint8)
    r, c = torch.meshgrid(torch.arange(block.shape[0]), torch.arange(block.shape[1]), indexing="ij")
    at = (r // 128 * (columns // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    swizzled[at] = block.view(torch.uint8)
    return packed, swizzled.view(E4M3).view(rows, columns)


def _agree(form: Form, codes: Tensor, rest: list[Tensor], want: tuple[Tensor, Tensor | None]) -> bool:
    wanted = form.moved(want[0].view(torch.uint8)).flatten()
    dtypes = (E4M3, torch.uint8) if want[0].dtype == E4M3 else (want[0].dtype,)
    if codes.numel() != wanted.numel() or codes.dtype not in dtypes or len(rest) != (want[1] is not None):
        return False
    got = codes.flatten().view(torch.uint8)
    same = got == wanted
    if want[0].dtype == E4M3:
        same |= got.view(E4M3).float().isnan() & wanted.view(E4M3).float().isnan()
    if want[1] is None or not bool(same.all()):
        return bool(same.all())
    if want[1].dtype == torch.float8_e8m0fnu:
        return torch.equal(rest[0].view(torch.uint8).flatten(), want[1].view(torch.uint8).flatten())
    scales = form.moved(want[1].float()).flatten()
    made = rest[0].float().flatten()
    return made.shape == scales.shape and torch.equal(made.nan_to_num(-1), scales.nan_to_num(-1))
