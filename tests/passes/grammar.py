"""Ways to write quantisation, composed from parts: what is done to the output, in which order, dtype and shape.

Every form takes the attention output `o [T, COLUMNS]` and a scale `s [1]`, and returns codes, or codes and scales.
What a form means is found by running it (`meaning`), with inputs and references of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from harness import COLUMNS, HEADS, WIDTH
from torch import Tensor

E4M3 = torch.float8_e4m3fn
Part = Callable[..., Any]

WIDEN: dict[str, Part] = {
    "float()": lambda o: o.float(),
    "to(float32)": lambda o: o.to(torch.float32),
    "bf16 math": lambda o: o,
    "double()": lambda o: o.double(),
    "times 1.0": lambda o: o.float() * 1.0,
}
SCALED: dict[str, Part] = {
    "/ s": lambda x, s: x / s,
    "torch.div": lambda x, s: torch.div(x, s.view(())),
    "* s": lambda x, s: x * s,
    "* s.reciprocal()": lambda x, s: x * s.reciprocal(),
    "* (1 / s)": lambda x, s: (1.0 / s) * x,
    "/ 0.02": lambda x, s: x / 0.02,
    "* 50": lambda x, s: x * 50.0,
    "no scale": lambda x, s: x,
    "/ s / 2": lambda x, s: x / s / 2.0,
    "/ s + 1": lambda x, s: x / s + 1.0,
    "gelu / s": lambda x, s: torch.nn.functional.gelu(x) / s,
}
CLAMPED: dict[str, Part] = {
    "clamp": lambda x: x.clamp(-448, 448),
    "finfo": lambda x: x.clamp(min=torch.finfo(E4M3).min, max=torch.finfo(E4M3).max),
    "two clamps": lambda x: x.clamp(max=448.0).clamp(min=-448.0),
    "by tensors": lambda x: torch.minimum(torch.maximum(x, torch.tensor(-448.0)), torch.tensor(448.0)),
    "hardtanh": lambda x: torch.nn.functional.hardtanh(x, -448.0, 448.0),
    "twice": lambda x: x.clamp(-1000, 1000).clamp(-448, 448),
    "none": lambda x: x,
    "too narrow": lambda x: x.clamp(-240, 240),
    "one side": lambda x: x.clamp(max=448),
    "nan_to_num": lambda x: torch.nan_to_num(x.clamp(-448, 448)),
}
SHAPED: dict[str, tuple[Part, Part]] = {
    "none": (lambda o: o, lambda q: q),
    "heads and back": (lambda o: o.view(-1, HEADS, WIDTH), lambda q: q.flatten(1)),
    "heads": (lambda o: o.reshape(-1, HEADS, WIDTH), lambda q: q),
    "batch of one": (lambda o: o.unsqueeze(0), lambda q: q.squeeze(0)),
    "flat": (lambda o: o.flatten(), lambda q: q.view(-1, COLUMNS)),
    "transpose of one": (lambda o: o.unsqueeze(1).transpose(0, 1), lambda q: q),
    "contiguous": (lambda o: o.contiguous(), lambda q: q.contiguous()),
    "codes as heads": (lambda o: o, lambda q: q.view(-1, HEADS, WIDTH).view(-1, COLUMNS)),
    "half the columns": (lambda o: o[:, : COLUMNS // 2], lambda q: q),
    "whole slice": (lambda o: o[:, :COLUMNS], lambda q: q[:]),
}
LARGEST: dict[str, Part] = {
    "abs().amax()": lambda x: x.abs().amax(-1, keepdim=True),
    "abs().max()": lambda x: x.abs().max(dim=-1, keepdim=True).values,
    "amax and amin": lambda x: torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True)),
    "norm": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=-1, keepdim=True),
    "mean": lambda x: x.abs().mean(-1, keepdim=True) * 4,
}
SCALE: dict[str, Part] = {
    "clamp 1e-10": lambda m: m.clamp(min=1e-10) / 448.0,
    "clamp 1e-12": lambda m: m.clamp(min=1e-12) / 448.0,
    "clamp 1e-4": lambda m: m.clamp(1e-4) / 448.0,
    "clamp of the scale": lambda m: (m / 448.0).clamp(min=1.0 / (448.0 * 512.0)),
    "maximum": lambda m: torch.maximum(m, torch.tensor(1e-8)) / 448.0,
    "no floor": lambda m: m / 448.0,
    "plus 1e-6": lambda m: (m + 1e-6) / 448.0,
    "of 240": lambda m: m.clamp(min=1e-10) / 240.0,
}
APPLIED: dict[str, Part] = {
    "/": lambda x, scale: x / scale,
    "* reciprocal()": lambda x, scale: x * scale.reciprocal(),
    "* (1 / scale)": lambda x, scale: x * (1.0 / scale),
}
POWER: dict[str, Part] = {
    "any": lambda scale: scale,
    "power of two": lambda scale: torch.exp2(torch.ceil(torch.log2(scale))),
    "nearest power of two": lambda scale: torch.exp2(torch.round(torch.log2(scale))),
}
GROUPS: dict[str, int] = {"token": COLUMNS, "group 64": 64, "group 32": 32, "tensor": 0}
RETURNED: dict[str, Part] = {
    "[T, G]": lambda scale: scale.flatten(1),
    "[T, G, 1]": lambda scale: scale,
    "column-major": lambda scale: scale.flatten(1).t().contiguous().t(),
    "transposed": lambda scale: scale.flatten(1).t().contiguous(),
    "reciprocal": lambda scale: scale.flatten(1).reciprocal(),
}


@dataclass(frozen=True)
class Form:
    """One way to write it.

    Attributes:
        name: the productions it is made of.
        function: what is compiled.
        saturates: whether no cast of it is left to saturate on its own.
        plain: the same with its scales returned as they are, where it returns something made of them.
    """

    name: str
    function: Callable[[Tensor, Tensor], Any]
    saturates: bool = True
    plain: Callable[[Tensor, Tensor], Any] | None = None


def static_form(widen: str, scaled: str, clamped: str, shaped: str) -> Form:
    before, after = SHAPED[shaped]

    def function(o: Tensor, s: Tensor) -> Tensor:
        return after(CLAMPED[clamped](SCALED[scaled](WIDEN[widen](before(o)), s)).to(E4M3))

    return Form(f"static: {widen}, {scaled}, {clamped}, {shaped}", function, clamped not in ("none", "one side"))


def dynamic_form(
    widen: str, largest: str, scale: str, applied: str, power: str, groups: str, clamped: str, returned: str
) -> Form:
    def function(o: Tensor, s: Tensor, made: str = returned) -> tuple[Tensor, Tensor]:
        x = WIDEN[widen](o)
        size = GROUPS[groups]
        x = x.view(-1, COLUMNS // size, size) if size else x.reshape(1, 1, -1)
        factor = POWER[power](SCALE[scale](LARGEST[largest](x)))
        codes = CLAMPED[clamped](APPLIED[applied](x, factor)).to(E4M3)
        return codes.view(-1, COLUMNS), RETURNED[made](factor)

    parts = (widen, largest, scale, applied, power, groups, clamped, returned)
    name = f"dynamic: {', '.join(parts)}"
    return Form(name, lambda o, s: function(o, s), plain=lambda o, s: function(o, s, "[T, G]"))


def escaping(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    return (o.float() / s).clamp(-448, 448).to(E4M3), o.float().sum(-1)


def twice(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    return (o.float() / s).clamp(-448, 448).to(E4M3), (o.float() * 3.0).clamp(-448, 448).to(E4M3)


def per_row_scale(o: Tensor, s: Tensor) -> Tensor:
    rows = torch.ones(o.shape[0], 1) * s + torch.arange(o.shape[0]).unsqueeze(1)
    return (o.float() / rows).clamp(-448, 448).to(E4M3)


OURS: dict[str, Form] = {
    name: Form(f"library: {name}", function)
    for name, function in {
        "quant_fp8_static": lambda o, s: torch.ops.vattn.quant_fp8_static(o, s),
        "quant_fp8_per_token": lambda o, s: torch.ops.vattn.quant_fp8_per_token(o),
        "quant_fp8_group 64": lambda o, s: torch.ops.vattn.quant_fp8_group(o, 64, False, False),
        "quant_fp8_group 64 column-major": lambda o, s: torch.ops.vattn.quant_fp8_group(o, 64, False, True),
        "quant_fp8_group 64 power of two": lambda o, s: torch.ops.vattn.quant_fp8_group(o, 64, True, False),
        "quant_fp8_group 128 of heads": lambda o, s: torch.ops.vattn.quant_fp8_group(
            o.view(-1, HEADS, WIDTH).flatten(1), 128, False, False
        ),
        "quant_nvfp4": lambda o, s: torch.ops.vattn.quant_nvfp4(o, s, False),
        "quant_nvfp4 swizzled": lambda o, s: torch.ops.vattn.quant_nvfp4(o, s, True),
    }.items()
}
WRONG: dict[str, Form] = {f.__name__: Form(f"other: {f.__name__}", f) for f in (escaping, twice, per_row_scale)}

STATIC_BASE = ("float()", "/ s", "clamp", "none")
STATIC_PARTS = (WIDEN, SCALED, CLAMPED, SHAPED)
DYNAMIC_BASE = ("float()", "abs().amax()", "clamp 1e-10", "/", "any", "token", "clamp", "[T, G]")
DYNAMIC_PARTS = (WIDEN, LARGEST, SCALE, APPLIED, POWER, GROUPS, CLAMPED, RETURNED)

PAIRS = [
    dynamic_form("float()", "abs().amax()", "plus 1e-6", "* (1 / scale)", "power of two", "token", "none", "[T, G]"),
    dynamic_form("float()", "abs().max()", "no floor", "* reciprocal()", "power of two", "group 64", "clamp", "[T, G]"),
]
"""Combinations that random forms once found to be judged wrongly."""


def around(base: tuple[str, ...], parts: tuple[dict[str, Any], ...], make: Callable[..., Form]) -> dict[str, Form]:
    """Return the base form and all that differ from it in one production."""
    forms = [make(*base)]
    for place, choices in enumerate(parts):
        forms += [make(*base[:place], name, *base[place + 1 :]) for name in choices if name != base[place]]
    return {form.name: form for form in forms}


def sampled(parts: tuple[dict[str, Any], ...], make: Callable[..., Form], count: int, seed: int) -> dict[str, Form]:
    """Return random forms."""
    rng = random.Random(seed)
    forms = [make(*(rng.choice(list(choices)) for choices in parts)) for _ in range(count)]
    return {form.name: form for form in forms}


def own_inputs(seed: int) -> Tensor:
    """Rows over many magnitudes, with ties of FP8 under simple scales, zeros, infinity and NaN."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(64, COLUMNS, generator=rng) * torch.exp2(torch.randint(-30, 12, (64, 1), generator=rng).float())
    odd = torch.randint(8, 16, (16, COLUMNS), generator=rng) * 2 + 1
    x[:16] = odd * torch.exp2(torch.randint(-4, 5, (16, COLUMNS), generator=rng).float()) * 7 / 512
    x[:16, ::32] = 448 * 7 / 512
    x[20], x[21, 5], x[22, 7], x[23], x[24] = 0, torch.inf, torch.nan, 1e-30, 1e-39
    return x.bfloat16()


def meaning(form: Form) -> str | None:
    """Return which supported format a form means, from running it; `None`: none."""
    found: set[str] | None = None
    for seed, scale in ((1, 0.0137), (2, 7 / 512), (3, 2.3), (4, 1 / 29), (5, 0.02)):
        x, s = own_inputs(seed), torch.tensor([scale])
        made = (form.plain or form.function)(x, s)
        codes, *rest = made if isinstance(made, tuple) else (made,)
        means = {name for name, want in _references(x.float(), s, rest).items() if _agree(codes, rest, want)}
        found = means if found is None else found & means
    return min(found) if found and form.saturates else None


def _references(x: Tensor, s: Tensor, rest: list[Tensor]) -> dict[str, tuple[Tensor, Tensor | None]]:
    def cast(values: Tensor) -> Tensor:
        return values.clamp(-448, 448).to(E4M3)

    wanted: dict[str, tuple[Tensor, Tensor | None]] = {
        "static /": (cast(x / s), None),
        "static *": (cast(x * s), None),
        "static * 1/s": (cast(x * s.reciprocal()), None),
        **{f"static {c}": (cast(x / c), None) for c in (0.02, 1.0)},
        "static * 50": (cast(x * 50.0), None),
    }
    # The floor is whatever the form itself gives a row of zeros.
    floor = rest[0][20, 0] if rest and rest[0].shape[0] == x.shape[0] else None
    for size in (COLUMNS, 64):
        groups = x.view(-1, COLUMNS // size, size)
        for power in (False, True):
            scales = groups.abs().amax(-1) / 448
            if floor is not None and bool(floor > 0):
                scales = torch.where(scales.isnan(), scales, torch.maximum(scales, floor))
            if power:
                # The formats round up to a normal number, which matters only to rows of subnormals without a floor.
                scales = torch.exp2(torch.ceil(torch.log2(scales)))
                scales = torch.where((scales > 0) & (scales < 2.0**-126), 2.0**-126, scales)
            wide = scales.unsqueeze(-1)
            for sign, codes in (("/", groups / wide), ("*", groups * (1 / wide))):
                wanted[f"group {size} {power} {sign}"] = (cast(codes).view(-1, COLUMNS), scales)
    return wanted


def _agree(codes: Tensor, rest: list[Tensor], want: tuple[Tensor, Tensor | None]) -> bool:
    if codes.numel() != want[0].numel() or codes.dtype != E4M3 or len(rest) != (want[1] is not None):
        return False
    a, b = codes.flatten(), want[0].flatten()
    same = (a.view(torch.uint8) == b.view(torch.uint8)) | (a.float().isnan() & b.float().isnan())
    if not bool(same.all()):
        return False
    if want[1] is None:
        return True
    return rest[0].shape == want[1].shape and torch.equal(rest[0].nan_to_num(-1), want[1].nan_to_num(-1))
