"""The quantisers of the attention op, as functions of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from vattn.passes.region import value
from vattn.quantization import codecs as quantization
from vattn.quantization.formats import FP4_E2M1_MAX, OUTPUT_FACTORS, OUTPUT_FORMATS, OutputFormat


@dataclass(frozen=True)
class Quantiser:
    """A quantiser of the attention op: a format in its plain layout, its arithmetic and the least computed scale."""

    fmt: OutputFormat
    arithmetic: str = "divide"
    min_scale: float | None = None
    floor: str = "scale"

    def same_but_floor(self) -> tuple[Any, ...]:
        """Return what this is, with seven bits of its least scale."""
        mantissa, exponent = math.frexp(self.min_scale or 0.0)
        return self.fmt.name, self.arithmetic, self.floor, round(mantissa * 2**7), exponent

    def __call__(self, rows: Tensor, scale: float) -> tuple[Tensor, Tensor | None]:
        """Return codes of rows `[T, N]` and the computed scales, if any."""
        static = torch.tensor([scale], dtype=torch.float32) if self.fmt.static_scale else None
        return quantization.quantise_rows(rows, self.fmt, static, self.arithmetic, self.min_scale, self.floor)

    def scaled(self, rows: Tensor, scale: float, scales: Tensor | None) -> Tensor:
        """Return what is rounded to codes, fp32 `[T, N]`."""
        rows, multiplies = rows.float(), self.arithmetic == "multiply"
        if scales is None:
            return rows * torch.tensor(scale) if multiplies else rows / torch.tensor(scale)
        groups = rows.unflatten(1, (scales.shape[1], -1))
        if self.fmt.container is torch.uint8:
            return (groups / self.step(scales, scale).unsqueeze(-1)).flatten(1)
        _, step, multiplies = self._scales_of(groups.abs().amax(-1))
        return (groups * step.unsqueeze(-1) if multiplies else groups / step.unsqueeze(-1)).flatten(1)

    def _scales_of(self, maxima: Tensor) -> tuple[Tensor, Tensor, bool]:
        return quantization.scales_of(maxima, self.fmt, self.arithmetic, self.min_scale, self.floor)

    def step(self, scales: Tensor, scale: float) -> Tensor:
        """Return what values are divided by in NVFP4 groups of some block scales."""
        step = scales.float() * scale
        # A block scale of zero stores zeros: dividing by infinity keeps their signs.
        return torch.where(step == 0, torch.inf, step)

    def factors(self, maxima: Tensor, scale: float) -> dict[str, Tensor]:
        """Return what groups with some maxima `[M]` may be scaled by, what is rounded to a block scale, and bytes."""
        if self.fmt.container is torch.uint8:
            unrounded = maxima / FP4_E2M1_MAX / scale
            scales = quantization.to_e4m3(unrounded).float()
            step = self.step(scales, scale)
            made = {"unrounded": unrounded, "scale": scales, "step": scales * scale, "divisor": step}
            return {**made, "reciprocal": step.reciprocal()}
        scales, step, multiplies = self._scales_of(maxima)
        if self.fmt.exponents:
            found = {"scale": scales.view(torch.float8_e8m0fnu).float(), "bytes": scales}
            return {**found, "step": step, "inverse": step.reciprocal()}
        return {"scale": scales, "step": step} if multiplies else {"scale": scales, "inverse": scales.reciprocal()}


def quantisers(
    columns: int, quantised: Node, floors: Sequence[float | None], chooses: bool = False, inverts: bool = True
) -> Iterator[Quantiser]:
    """Yield the quantisers that can write the dtype of the quantised tensor, the op's defaults first.

    Args:
        floors: possible least computed scales, or maxima.
        chooses: whether scales of zero alone may be replaced by one.
        inverts: whether factors may be made of maxima.
    """
    container = value(quantised).dtype
    for arithmetic in ("divide", "multiply", *(OUTPUT_FACTORS if inverts else ())):
        for fmt in OUTPUT_FORMATS.values():
            fits = fmt.group_size <= 0 or columns % fmt.group_size == 0
            if fmt.container != container or not fits or fmt.column_major or fmt.swizzled:
                continue
            if arithmetic not in fmt.arithmetics:
                continue
            if arithmetic in OUTPUT_FACTORS:
                yield from (Quantiser(fmt, arithmetic, floor, "maximum") for floor in floors if floor is not None)
                continue
            for floor in floors if fmt.has_fp32_scales else [None]:
                yield Quantiser(fmt, arithmetic, floor)
                if floor and (chooses or fmt.power_of_two):
                    yield Quantiser(fmt, arithmetic, floor, "rounded_scale" if fmt.power_of_two else "zero")
