"""The productions of the grammar: single choices that `grammar.py` composes into ways to write quantisation.

Each table has two parts. The matcher was developed with the first part in sight. Of the second part, three quarters
(`held_out`, decided by a hash of the name) were kept out of its development and run once, before anything was mended
for them: docs/fusion-proofs.md has that figure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from harness import COLUMNS, HEADS, WIDTH
from torch import Tensor

E4M3 = torch.float8_e4m3fn
Part = Callable[..., Any]
HALF = COLUMNS // 2


def in_place(function: Callable[[Tensor], Tensor]) -> Part:
    return lambda x, *rest: function(x.clone(), *rest)


def interleave(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def swap(x: Tensor) -> Tensor:
    middle = x.shape[-1] // 2
    return torch.cat((x[:, middle:], x[:, :middle]), -1)


def rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)


WIDEN: dict[str, Part] = {
    "float()": lambda o: o.float(),
    "to(float32)": lambda o: o.to(torch.float32),
    "bf16 math": lambda o: o,
    "double()": lambda o: o.double(),
    "times 1.0": lambda o: o.float() * 1.0,
}
WIDEN_2: dict[str, Part] = {
    "type()": lambda o: o.type(torch.float32),
    "copied": lambda o: o.to(torch.float32, copy=True),
    "minus zero": lambda o: o.float() - 0.0,
    "plus zero": lambda o: o.float() + 0.0,
    "half()": lambda o: o.half().float(),
    "round trip": lambda o: o.float().bfloat16().float(),
    "relu": lambda o: o.float().relu(),
    "negated twice": lambda o: o.float().neg().neg(),
    "where finite": lambda o: torch.where(o.isfinite(), o.float(), o.float()),
    "dropout in eval": lambda o: F.dropout(o.float(), 0.1, training=False),
    "bias": lambda o: o.float() + 0.5,
    "rms_norm": lambda o: rms_norm(o).float(),
    "abs * sign": lambda o: o.float().abs() * o.float().sign(),
    "copysign": lambda o: torch.copysign(o.float().abs(), o.float()),
    "float of heads": lambda o: o.view(-1, HEADS, WIDTH).float().view(-1, o.shape[-1]) if o.dim() == 2 else o.float(),
    "via double": lambda o: o.double().float(),
    "doubled and halved": lambda o: (o * 2).float() * 0.5,
    "softmax": lambda o: o.float().softmax(-1),
    "clone in bf16": lambda o: o.clone().float(),
    "one value away": lambda o: torch.where(o == 0.3125, o.float() * 1.25, o.float()),
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
    "gelu / s": lambda x, s: F.gelu(x) / s,
}
SCALED_2: dict[str, Part] = {
    "true_divide": lambda x, s: torch.true_divide(x, s),
    "div_": in_place(lambda x, s: x.div_(s)),
    "mul_": in_place(lambda x, s: x.mul_(s)),
    "* s ** -1": lambda x, s: x * s.pow(-1.0),
    "/ s.double()": lambda x, s: x / s.double(),
    "/ s in bf16": lambda x, s: x.float() / s.bfloat16(),
    "/ expanded s": lambda x, s: x / s.expand_as(x),
    "/ s for each row": lambda x, s: x / s.expand(x.shape[0], *[1] * (x.dim() - 1)),
    "/ full_like": lambda x, s: x / torch.full_like(x, 0.02, dtype=torch.float32),
    "/ root twice": lambda x, s: x / s.sqrt() / s.sqrt(),
    "/ (s + eps)": lambda x, s: x / (s + 1e-4),
    "/ s.clamp": lambda x, s: x / s.clamp(min=1e-12),
    "/ s[0]": lambda x, s: x / s[0],
    "/ s for each column": lambda x, s: x / (s * torch.linspace(1, 2, x.shape[-1])),
    "/ s.repeat": lambda x, s: x / s.repeat(x.shape[-1]),
    "ldexp": lambda x, s: torch.ldexp(x.float(), torch.tensor(3)),
    "div in bf16": lambda x, s: x.bfloat16() / s.bfloat16(),
    "mul in bf16": lambda x, s: x.bfloat16() * s.bfloat16(),
    "addcdiv": lambda x, s: torch.addcdiv(torch.zeros_like(x.float()), x.float(), s.expand_as(x)),
    "floor": lambda x, s: torch.div(x.float(), s, rounding_mode="floor"),
    "/ s by einsum": lambda x, s: torch.einsum("...,i->...", x.float(), s.reciprocal()),
    "/ (2 * s)": lambda x, s: x / (2.0 * s),
}
CLAMPED: dict[str, Part] = {
    "clamp": lambda x: x.clamp(-448, 448),
    "finfo": lambda x: x.clamp(min=torch.finfo(E4M3).min, max=torch.finfo(E4M3).max),
    "two clamps": lambda x: x.clamp(max=448.0).clamp(min=-448.0),
    "by tensors": lambda x: torch.minimum(torch.maximum(x, torch.tensor(-448.0)), torch.tensor(448.0)),
    "hardtanh": lambda x: F.hardtanh(x, -448.0, 448.0),
    "twice": lambda x: x.clamp(-1000, 1000).clamp(-448, 448),
    "none": lambda x: x,
    "too narrow": lambda x: x.clamp(-240, 240),
    "one side": lambda x: x.clamp(max=448),
    "nan_to_num": lambda x: torch.nan_to_num(x.clamp(-448, 448)),
}
CLAMPED_2: dict[str, Part] = {
    "clip": lambda x: x.clip(-448, 448),
    "clamp_": in_place(lambda x: x.clamp_(-448, 448)),
    "clamp_max, clamp_min": lambda x: x.clamp_max(448).clamp_min(-448),
    "where": lambda x: torch.where(x > 448, 448.0, torch.where(x < -448, -448.0, x)),
    "fmin, fmax": lambda x: torch.fmin(torch.fmax(x, torch.tensor(-448.0)), torch.tensor(448.0)),
    "clamp in bf16": lambda x: x.bfloat16().clamp(-448, 448),
    "clamp in half": lambda x: x.clamp(-448, 448).half(),
    "tensor bounds": lambda x: torch.clamp(x, min=torch.tensor(-448.0), max=torch.tensor(448.0)),
    "to 449": lambda x: x.clamp(-449, 449),
    "to 460": lambda x: x.clamp(-460, 460),
    "to 500": lambda x: x.clamp(-500, 500),
    "tanh": lambda x: 448 * torch.tanh(x / 448),
    "round": lambda x: x.round().clamp(-448, 448),
    "masked_fill": lambda x: x.masked_fill(x > 448, 448.0).masked_fill(x < -448, -448.0),
    "by magnitude": lambda x: torch.copysign(x.abs().clamp(max=448.0), x),
    "sign * min": lambda x: x.sign() * x.abs().clamp(max=448.0),
    "to 447": lambda x: x.clamp(-447, 447),
    "in double": lambda x: x.double().clamp(-448, 448),
}
CAST: dict[str, Part] = {
    "to": lambda x: x.to(E4M3),
}
CAST_2: dict[str, Part] = {
    "type": lambda x: x.type(E4M3),
    "copy_": lambda x: torch.empty_like(x, dtype=E4M3).copy_(x),
    "to, bytes": lambda x: x.to(E4M3).view(torch.uint8),
    "to, clone": lambda x: x.to(E4M3).clone(),
    "to, bytes and back": lambda x: x.to(E4M3).view(torch.uint8).view(E4M3),
    "half first": lambda x: x.half().to(E4M3),
    "bf16 first": lambda x: x.bfloat16().to(E4M3),
    "e5m2": lambda x: x.to(torch.float8_e5m2),
    "e5m2 first": lambda x: x.to(torch.float8_e5m2).to(E4M3),
    "int8": lambda x: x.round().to(torch.int8),
    "e4m3 twice": lambda x: x.to(E4M3).float().to(E4M3),
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
    "half the columns": (lambda o: o[:, :HALF], lambda q: q),
    "whole slice": (lambda o: o[:, :COLUMNS], lambda q: q[:]),
}
SHAPED_2: dict[str, tuple[Part, Part]] = {
    "transposed": (lambda o: o.t(), lambda q: q.t()),
    "transposed for good": (lambda o: o.t(), lambda q: q),
    "heads first": (lambda o: o.view(-1, HEADS, WIDTH).transpose(0, 1), lambda q: q.transpose(0, 1).flatten(1)),
    "heads first for good": (lambda o: o.view(-1, HEADS, WIDTH).transpose(0, 1), lambda q: q),
    "heads first, contiguous": (lambda o: o.view(-1, HEADS, WIDTH).transpose(0, 1).contiguous(), lambda q: q),
    "BHTD and back": (
        lambda o: o.view(1, -1, HEADS, WIDTH).transpose(1, 2).contiguous(),
        lambda q: q.transpose(1, 2).reshape(-1, COLUMNS),
    ),
    "split and cat": (lambda o: torch.cat(o.split(HALF, -1), -1), lambda q: q),
    "stack of heads": (lambda o: torch.stack(o.view(-1, HEADS, WIDTH).unbind(1), 1), lambda q: q.flatten(1)),
    "halves swapped": (swap, lambda q: q),
    "interleaved": (interleave, lambda q: q),
    "flipped": (lambda o: o.flip(-1), lambda q: q),
    "rolled": (lambda o: o.roll(1, -1), lambda q: q),
    "first tokens": (lambda o: o[:3], lambda q: q),
    "without the first": (lambda o: o[1:], lambda q: q),
    "every other token": (lambda o: o[::2], lambda q: q),
    "last token": (lambda o: o[-1:], lambda q: q),
    "half the tokens": (lambda o: o[: o.shape[0] // 2], lambda q: q),
    "one head": (lambda o: o.view(-1, HEADS, WIDTH)[:, 1], lambda q: q),
    "even columns": (lambda o: o[:, ::2], lambda q: q),
    "narrow": (lambda o: o.narrow(1, WIDTH, HALF), lambda q: q),
    "padded": (lambda o: F.pad(o, (0, 0, 0, 1)), lambda q: q),
    "repeated": (lambda o: o.repeat(2, 1), lambda q: q),
    "unflatten": (lambda o: o.unflatten(1, (HEADS, WIDTH)), lambda q: q.flatten(1)),
    "movedim": (lambda o: o.view(-1, HEADS, WIDTH).movedim(1, 0), lambda q: q.movedim(0, 1).reshape(-1, COLUMNS)),
    "index of all": (lambda o: o[:, torch.arange(COLUMNS)], lambda q: q),
    "codes sliced": (lambda o: o, lambda q: q[:2]),
    "as_strided": (lambda o: o.as_strided(o.shape, (COLUMNS, 1)), lambda q: q),
}
LARGEST: dict[str, Part] = {
    "abs().amax()": lambda x: x.abs().amax(-1, keepdim=True),
    "abs().max()": lambda x: x.abs().max(dim=-1, keepdim=True).values,
    "amax and amin": lambda x: torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True)),
    "norm": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=-1, keepdim=True),
    "mean": lambda x: x.abs().mean(-1, keepdim=True) * 4,
}
LARGEST_2: dict[str, Part] = {
    "aminmax": lambda x: torch.maximum(x.aminmax(dim=-1, keepdim=True)[1], -x.aminmax(dim=-1, keepdim=True)[0]),
    "linalg.norm": lambda x: torch.linalg.norm(x, float("inf"), dim=-1, keepdim=True),
    "Tensor.norm": lambda x: x.norm(p=float("inf"), dim=-1, keepdim=True),
    "topk": lambda x: x.abs().topk(1, dim=-1).values,
    "sort": lambda x: x.abs().sort(dim=-1).values[..., -1:],
    "two stages": lambda x: x.abs().unflatten(-1, (2, -1)).amax(-1).amax(-1, keepdim=True),
    "two dims": lambda x: x.abs().unflatten(-1, (2, -1)).amax((-1, -2)).unsqueeze(-1),
    "root of squares": lambda x: (x * x).amax(-1, keepdim=True).sqrt(),
    "of halves": lambda x: torch.maximum(*(h.abs().amax(-1, keepdim=True) for h in x.chunk(2, -1))),
    "without NaN": lambda x: x.abs().nan_to_num(0.0, float("inf")).amax(-1, keepdim=True),
    "of finite": lambda x: torch.where(x.isfinite(), x.abs(), 0.0).amax(-1, keepdim=True),
    "argmax": lambda x: x.abs().gather(-1, x.abs().argmax(-1, keepdim=True)),
    "no abs": lambda x: x.amax(-1, keepdim=True),
    "standard deviation": lambda x: x.std(-1, keepdim=True) * 3,
    "cummax": lambda x: x.abs().cummax(-1).values[..., -1:],
    "of the first half": lambda x: x[..., : x.shape[-1] // 2].abs().amax(-1, keepdim=True),
    "of negative and positive": lambda x: torch.cat((x, -x), -1).amax(-1, keepdim=True),
    "with zero": lambda x: torch.maximum(x.amax(-1, True).clamp(min=0), (-x).amax(-1, True).clamp(min=0)),
    "quantile": lambda x: x.abs().float().nanquantile(0.5, -1, keepdim=True) * 2,
    "max of pairs": lambda x: torch.maximum(x.abs()[..., ::2], x.abs()[..., 1::2]).amax(-1, keepdim=True),
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
SCALE_2: dict[str, Part] = {
    "* (1 / 448)": lambda m: m.clamp(min=1e-10) * (1.0 / 448.0),
    "finfo().max": lambda m: m.clamp(min=1e-10) / torch.finfo(E4M3).max,
    "clamp_min": lambda m: m.clamp_min(1e-5) / 448.0,
    "finfo().eps": lambda m: m.clamp(min=torch.finfo(torch.float32).eps) / 448.0,
    "finfo().tiny": lambda m: m.clamp(min=torch.finfo(torch.float32).tiny) / 448.0,
    "floor of the scale": lambda m: torch.maximum(m / 448.0, torch.tensor(1e-12)),
    "one for zeros": lambda m: torch.where(m == 0, 1.0, m / 448.0),
    "eps for zeros": lambda m: torch.where(m == 0, torch.finfo(torch.float32).eps, m / 448.0),
    "by a tensor": lambda m: m.clamp(1e-10) / torch.full((), 448.0),
    "of 447": lambda m: m.clamp(1e-10) / 447.0,
    "upper bound": lambda m: m.clamp(1e-10, 1200.0) / 448.0,
    "in double": lambda m: (m.double().clamp(min=1e-10) / 448.0).float(),
    "divided twice": lambda m: m.clamp(min=1e-10) / 7.0 / 64.0,
    "in bf16": lambda m: (m.bfloat16().clamp(min=1e-10) / 448.0).float(),
    "plus tiny": lambda m: m / 448.0 + 1e-30,
    "rounded to bf16": lambda m: (m.clamp(min=1e-10) / 448.0).bfloat16().float(),
    "floor of 1": lambda m: m.clamp(min=1.0) / 448.0,
    "half the floor": lambda m: torch.maximum(m / 448.0, torch.tensor(0.5e-7)),
    "reciprocal of factor": lambda m: (448.0 / m.clamp(min=1e-10)).reciprocal(),
}
APPLIED: dict[str, Part] = {
    "/": lambda x, scale: x / scale,
    "* reciprocal()": lambda x, scale: x * scale.reciprocal(),
    "* (1 / scale)": lambda x, scale: x * (1.0 / scale),
}
APPLIED_2: dict[str, Part] = {
    "torch.div": lambda x, scale: torch.div(x, scale),
    "div_": in_place(lambda x, scale: x.div_(scale)),
    "/ expanded": lambda x, scale: x / scale.expand_as(x),
    "/ repeated": lambda x, scale: x / scale.repeat_interleave(x.shape[-1], -1),
    "* 448 / maximum": lambda x, scale: x * (448.0 / (scale * 448.0)),
    "where positive": lambda x, scale: torch.where(scale > 0, x / scale, 0.0),
    "in double": lambda x, scale: (x.double() / scale.double()).float(),
    "* pow(-1)": lambda x, scale: x * scale.pow(-1),
    "by logarithms": lambda x, scale: x * torch.exp2(-torch.log2(scale)),
    "of bf16": lambda x, scale: x / scale.bfloat16().float(),
    "scaled twice": lambda x, scale: x / scale / 1.5,
    "transposed": lambda x, scale: (x.transpose(-1, -2) / scale.transpose(-1, -2)).transpose(-1, -2),
    "rms_norm and /": lambda x, scale: rms_norm(x) / scale,
}
POWER: dict[str, Part] = {
    "any": lambda scale: scale,
    "power of two": lambda scale: torch.exp2(torch.ceil(torch.log2(scale))),
    "nearest power of two": lambda scale: torch.exp2(torch.round(torch.log2(scale))),
}
POWER_2: dict[str, Part] = {
    "pow": lambda scale: torch.pow(2.0, torch.ceil(torch.log2(scale))),
    "bits": lambda scale: ((scale.float().view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32),
    "ldexp": lambda scale: torch.ldexp(torch.ones_like(scale), torch.ceil(torch.log2(scale)).int()),
    "down": lambda scale: torch.exp2(torch.floor(torch.log2(scale))),
    "natural logarithm": lambda scale: torch.exp2(torch.ceil(torch.log(scale) / 0.6931471805599453)),
    "e8m0": lambda scale: scale.to(torch.float8_e8m0fnu).to(torch.float32),
    "next power of two": lambda scale: torch.exp2(torch.floor(torch.log2(scale)) + 1),
    "bits above": lambda scale: ((scale.float().view(torch.int32) + 0x800000) & 0x7F800000).view(torch.float32),
    "with a floor": lambda scale: torch.exp2(torch.ceil(torch.log2(scale.abs().clamp(min=1e-10)))),
}
GROUPS: dict[str, int] = {"token": COLUMNS, "group 64": 64, "group 32": 32, "tensor": 0}
GROUPS_2: dict[str, int] = {"group 128": 128, "group 16": 16, "pair of values": 2}
RETURNED: dict[str, Part] = {
    "[T, G]": lambda scale: scale.flatten(1),
    "[T, G, 1]": lambda scale: scale,
    "column-major": lambda scale: scale.flatten(1).t().contiguous().t(),
    "transposed": lambda scale: scale.flatten(1).t().contiguous(),
    "reciprocal": lambda scale: scale.flatten(1).reciprocal(),
}
RETURNED_2: dict[str, Part] = {
    "flat": lambda scale: scale.flatten(),
    "expanded": lambda scale: scale.flatten(1).unsqueeze(-1).expand(-1, -1, 4),
    "bf16": lambda scale: scale.flatten(1).bfloat16(),
    "transposed view": lambda scale: scale.flatten(1).t(),
    "contiguous": lambda scale: scale.flatten(1).contiguous(),
    "cloned": lambda scale: scale.flatten(1).clone(),
    "exponents": lambda scale: scale.flatten(1).log2(),
    "largest": lambda scale: scale.amax(),
    "padded": lambda scale: F.pad(scale.flatten(1), (0, 0, 0, 2)),
    "as bits": lambda scale: scale.flatten(1).view(torch.int32),
}
PLACED: dict[str, tuple[Part, Part]] = {
    "whole": (lambda o: o, lambda q: q),
}
"""For computed scales: what is done to the output first, and what becomes of codes and scales `[T, G]` of the whole."""
PLACED_2: dict[str, tuple[Part, Part]] = {
    "first tokens": (lambda o: o[:3], lambda q: q[:3]),
    "without the first": (lambda o: o[1:], lambda q: q[1:]),
    "half the tokens": (lambda o: o[: o.shape[0] // 2], lambda q: q[: q.shape[0] // 2]),
    "last token": (lambda o: o[-1:], lambda q: q[-1:]),
    "first half of columns": (lambda o: o[:, :HALF], lambda q: q[:, : q.shape[1] // 2]),
    "second half of columns": (lambda o: o[:, HALF:], lambda q: q[:, q.shape[1] // 2 :]),
    "flipped tokens": (lambda o: o.flip(0), lambda q: q.flip(0)),
    "flipped columns": (lambda o: o.flip(-1), lambda q: q.flip(-1)),
    "batch of one": (lambda o: o.unsqueeze(0), lambda q: q),
    "halves swapped": (swap, swap),
    "every other token": (lambda o: o[::2], lambda q: q[::2]),
    "contiguous heads": (lambda o: o.view(-1, HEADS, WIDTH).contiguous().flatten(1), lambda q: q),
    "part of a group": (lambda o: o[:, 32:], lambda q: q[:, : q.shape[1]]),
}


def held_out(name: str) -> bool:
    """Return whether a production of a second part was kept out of the matcher's development."""
    return hashlib.sha256(name.encode()).digest()[0] % 4 != 0


SECOND: dict[str, dict[str, Any]] = {
    "widen": WIDEN_2,
    "scaled": SCALED_2,
    "clamped": CLAMPED_2,
    "cast": CAST_2,
    "shaped": SHAPED_2,
    "largest": LARGEST_2,
    "scale": SCALE_2,
    "applied": APPLIED_2,
    "power": POWER_2,
    "groups": GROUPS_2,
    "returned": RETURNED_2,
    "placed": PLACED_2,
}
HELD_OUT = frozenset(f"{kind}: {name}" for kind, table in SECOND.items() for name in table if held_out(name))

STATIC_PARTS: dict[str, dict[str, Any]] = {
    "widen": WIDEN | WIDEN_2,
    "scaled": SCALED | SCALED_2,
    "clamped": CLAMPED | CLAMPED_2,
    "cast": CAST | CAST_2,
    "shaped": SHAPED | SHAPED_2,
}
DYNAMIC_PARTS: dict[str, dict[str, Any]] = {
    "widen": WIDEN | WIDEN_2,
    "largest": LARGEST | LARGEST_2,
    "scale": SCALE | SCALE_2,
    "applied": APPLIED | APPLIED_2,
    "power": POWER | POWER_2,
    "groups": GROUPS | GROUPS_2,
    "clamped": CLAMPED | CLAMPED_2,
    "cast": CAST | CAST_2,
    "returned": RETURNED | RETURNED_2,
    "placed": PLACED | PLACED_2,
}
