"""Ways to quantise a query `q [T, N]` with a scale `s`, written as users write them, and attention to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from forms import E4M3
from harness import COLUMNS, HEADS, WIDTH
from torch import Tensor, nn

import vattn
from vattn.layers.functional import new_output
from vattn.passes.probe import NO_CLAMP
from vattn.passes.region_precision import ROUNDED
from vattn.passes.region_run import SATURATES

KV_HEADS = 2
GROUP = HEADS // KV_HEADS

Way = Callable[[Tensor, Tensor], "tuple[Tensor, Tensor]"]
"""Query `[T, N]` and scale -> codes that can be viewed as `[T, HEADS, WIDTH]`, and the op's q_scale."""


def rounded(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(E4M3)


def heads(q: Tensor) -> Tensor:
    return q.view(-1, HEADS, WIDTH)


def by_group(q: Tensor) -> Tensor:
    return q.view(-1, KV_HEADS, GROUP, WIDTH)


def dynamic(q: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    scale = (q.abs().amax().float() / 448).clamp(min=1e-6)
    return rounded(q.float() / scale), scale.reshape(1)


def in_turn(q: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    codes = torch.empty(q.shape[0], HEADS, WIDTH, dtype=E4M3)
    for head in range(HEADS):
        codes[:, head] = rounded(heads(q)[:, head].float() / s)
    return codes, s


UNCLAMPED: dict[str, Way] = {
    "no clamp": lambda q, s: ((q.float() / s).to(E4M3), s),
    "clamp to 500": lambda q, s: ((q.float() / s).clamp(-500, 500).to(E4M3), s),
}
"""Each leaves it to the cast to saturate."""

PER_TENSOR: dict[str, Way] = {
    **(UNCLAMPED if SATURATES else {}),
    "divide": lambda q, s: (rounded(q.float() / s), s),
    "torch.div": lambda q, s: (rounded(torch.div(q.to(torch.float32), s)), s),
    "reciprocal": lambda q, s: (rounded(q.float() * s.reciprocal()), s),
    "one over": lambda q, s: (rounded(q.float() * (1 / s)), s),
    "as heads": lambda q, s: (rounded(heads(q).float() / s), s),
    "scale as a number": lambda q, s: (rounded(heads(q).float() / s[0]), s),
    "q_scale without dimensions": lambda q, s: (rounded(q.float() / s), s.reshape(())),
    "two clamps": lambda q, s: ((q.float() / s).clamp(min=-448).clamp(max=448).to(E4M3), s),
    "clamp by tensors": lambda q, s: (
        torch.minimum(torch.maximum(q.float() / s, torch.tensor(-448.0)), torch.tensor(448.0)).to(E4M3),
        s,
    ),
    "hardtanh": lambda q, s: (nn.functional.hardtanh(q.float() / s, -448, 448).to(E4M3), s),
    "finfo": lambda q, s: ((q.float() / s).clamp(torch.finfo(E4M3).min, torch.finfo(E4M3).max).to(E4M3), s),
    "by its own size": lambda q, s: (rounded(q.view(q.shape[0], HEADS, WIDTH).float() / s), s),
    "batch of one": lambda q, s: (rounded(q.unsqueeze(0).float() / s)[0], s),
    "flat": lambda q, s: (rounded(q.flatten().float() / s), s),
    "times one": lambda q, s: (rounded((q * 1.0).float() / s), s),
    "our op": lambda q, s: (torch.ops.vattn.quant_fp8_static(q, s), s),
    "computed scale": dynamic,
    "clamp in bf16": lambda q, s: (rounded((q.clamp(-1e30, 1e30)).float() / s), s),
    "heads in turn": in_turn,
    "heads stacked": lambda q, s: (torch.stack([rounded(x.float() / s) for x in heads(q).unbind(1)], 1), s),
}
"""Each means one scale for the whole query."""


def joined_groups(q: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([rounded(by_group(q)[:, group].float() / s[group]) for group in range(KV_HEADS)], 1), s


PER_HEAD: dict[str, Way] = {
    "repeat_interleave": lambda q, s: (rounded(heads(q).float() / s.repeat_interleave(GROUP)[:, None]), s),
    "groups": lambda q, s: (rounded(by_group(q).float() / s[:, None, None]), s),
    "expand": lambda q, s: (rounded(heads(q).float() / s[:, None].expand(-1, GROUP).reshape(-1, 1)), s),
    "reciprocal of groups": lambda q, s: (rounded(by_group(q).float() * s.reciprocal()[:, None, None]), s),
    "columns": lambda q, s: (rounded(q.float() / s.repeat_interleave(GROUP * WIDTH)), s),
    "groups joined": joined_groups,
}
"""Each means one scale per KV head."""

NOT_DIVIDED = "its codes are not those of the query divided by the op's q_scale and clamped to +-448"
PER_TOKEN = "it has a scale for every token; the op takes one, or one per KV head"


def per_token(q: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    scale = (q.float().abs().amax(1, keepdim=True) / 448).clamp(min=1e-10)
    return rounded(q.float() / scale), s


def given_reciprocal(q: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """As a checkpoint that stores the reciprocal: what the op multiplies by is the reciprocal of a reciprocal."""
    return rounded(q.float() * s), s.reciprocal()


def in_columns(third: Callable[[Tensor, Tensor], Tensor]) -> Way:
    """Return a way that joins codes of columns, and scales the third column of each head differently."""

    def way(q: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        first, second, rest = heads(q).float().split((2, 1, WIDTH - 3), -1)
        return torch.cat([rounded(x) for x in (first / s, third(second, s), rest / s)], -1), s

    return way


def exchanged(q: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    first, second, rest = heads(q).float().split((1, 1, WIDTH - 2), -1)
    return torch.cat([rounded(x / s) for x in (second, first, rest)], -1), s


REFUSED: dict[str, tuple[Way, str, str]] = {
    "one column multiplied": (in_columns(lambda x, s: x * s.reciprocal()), NOT_DIVIDED, ""),
    "a value of a column": (in_columns(lambda x, s: torch.where(x == 1.2421875, 1.25, x) / s), NOT_DIVIDED, ""),
    "a quotient of a column": (
        in_columns(lambda x, s: torch.where(x / s == 3.7, 4.0, x / s)),
        "eq is never true for the inputs that are tried",
        "",
    ),
    "a column rounded at one value": (
        in_columns(lambda x, s: torch.where(x == 1.2421875, (x * 1.0001).bfloat16().float(), x) / s),
        ROUNDED,
        "",
    ),
    "columns exchanged": (exchanged, "its codes lie in another order than the query", ""),
    "too narrow": (lambda q, s: ((q.float() / s).clamp(-240, 240).to(E4M3), s), NOT_DIVIDED, "clamp(-240, 240)"),
    "bf16 math": (lambda q, s: (rounded(q / s.bfloat16()), s), NOT_DIVIDED, "clamp(-448, 448)"),
    "another scale": (lambda q, s: (rounded(q.float() / s), s * 2), NOT_DIVIDED, "q.float() / s), s * 2"),
    "multiplied instead": (lambda q, s: (rounded(q.float() * s), s), NOT_DIVIDED, "q.float() * s), s)"),
    "a scale per token": (per_token, PER_TOKEN, "amax(1, keepdim=True)"),
    "no scale": (lambda q, s: (rounded(q.float()), s), NOT_DIVIDED, "clamp(-448, 448)"),
    "a constant": (lambda q, s: (rounded(q.float() / 0.03), s), NOT_DIVIDED, "q.float() / 0.03"),
    "through e5m2": (lambda q, s: (rounded(q.to(torch.float8_e5m2).float() / s), s), NOT_DIVIDED, "float8_e5m2"),
    **({} if SATURATES else {name: (way, NO_CLAMP, "") for name, way in UNCLAMPED.items()}),
    "given reciprocal": (given_reciprocal, NOT_DIVIDED, "q.float() * s), s.reciprocal()"),
}
"""Each is no quantisation that a query load has: the reason, and a part of the first line that differs."""


class Written(nn.Module):
    """Attention by the op itself over a cache of the model's own, to a query from `make` that `way` quantises.

    `scale` gives the values of `s`; `make` gets the module and its input and returns `[T, COLUMNS]`.
    """

    def __init__(
        self,
        way: Callable[..., Any],
        scale: list[float] | None = None,
        make: Callable[[Any, Tensor], Tensor] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        **changes: Any,
    ) -> None:
        super().__init__()
        scale, name = scale or [0.0137], str(dtype).removeprefix("torch.")
        self.config = vattn.AttentionConfig(
            HEADS, KV_HEADS, WIDTH, WIDTH, WIDTH**-0.5, name, name, query_format="fp8_e4m3",
            query_scale="head" if len(scale) > 1 else "tensor", **changes,
        )  # fmt: skip
        torch.manual_seed(0)
        self.way, self.make = way, make or (lambda module, x: module.proj(x))
        self.proj = nn.Linear(COLUMNS, COLUMNS, bias=False, dtype=dtype).requires_grad_(False)
        self.register_buffer("scale", torch.tensor(scale))
        self.register_buffer("cache", torch.randn(vattn.kv_cache_shape(self.config, 8)).to(dtype))
        self.register_buffer("starts", torch.tensor([0, 3, 7], dtype=torch.int32))
        self.register_buffer("lens", torch.tensor([9, 4], dtype=torch.int32))
        self.register_buffer("table", torch.tensor([[1], [2]], dtype=torch.int32))

    def forward(self, x: Tensor) -> Any:
        made = self.way(self.make(self, x), self.scale)
        (codes, q_scale), others = made[:2], made[2:]
        query = codes.reshape(-1, HEADS, WIDTH)
        out = new_output(query, self.config)
        self.attend(query, q_scale, out.output)
        return (out.output, *others)

    def attend(self, query: Tensor, q_scale: Tensor, output: Tensor) -> None:
        given = (query, *self.cache, self.starts, self.lens, self.table, output, None, None, None, q_scale)
        torch.ops.vattn.attention(*given, *[None] * 9, [], None, self.config.encode())


def inputs(tokens: int = 7, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return what a model gets; the values leave the range of the scales here and there."""
    return torch.randn(tokens, COLUMNS, generator=torch.Generator().manual_seed(1)).to(dtype) * 4
