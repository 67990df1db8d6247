"""The quantisers of the attention op, as functions of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from vattn.passes.region import value
from vattn.quantization import codecs as quantization
from vattn.quantization.formats import FP4_E2M1_MAX, OUTPUT_FORMATS, OutputFormat


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
        step = self.step(scales, scale).repeat_interleave(rows.shape[1] // scales.shape[1], 1)
        return rows * step.reciprocal() if multiplies else rows / step

    def step(self, scales: Tensor, scale: float) -> Tensor:
        """Return what values are divided by in groups of some computed scales."""
        step = scales.float() * scale if self.fmt.container is torch.uint8 else scales
        # A block scale of zero stores zeros: dividing by infinity keeps their signs.
        return torch.where(step == 0, torch.inf, step) if self.fmt.container is torch.uint8 else step

    def factors(self, maxima: Tensor, scale: float) -> dict[str, Tensor]:
        """Return what groups with some maxima `[M]` may be scaled by, and what is rounded to a block scale, fp32."""
        if self.fmt.container is torch.uint8:
            unrounded = maxima / FP4_E2M1_MAX / scale
            scales = quantization.to_e4m3(unrounded).float()
            step = self.step(scales, scale)
            made = {"unrounded": unrounded, "scale": scales, "step": scales * scale, "divisor": step}
            return {**made, "reciprocal": step.reciprocal()}
        single = replace(self, fmt=replace(self.fmt, group_size=1))
        scales = single(maxima[:, None], scale)[1].flatten()  # type: ignore[union-attr]
        return {"scale": scales, "reciprocal": scales.reciprocal()}


def quantisers(
    columns: int, quantised: Node, floors: Sequence[float | None], chooses: bool = False
) -> Iterator[Quantiser]:
    """Yield the quantisers that can write the dtype of the quantised tensor, the op's defaults first.

    Args:
        floors: possible least computed scales.
        chooses: whether scales of zero alone may be replaced by one.
    """
    container = value(quantised).dtype
    for arithmetic in ("divide", "multiply") if container == torch.float8_e4m3fn else ("divide",):
        for fmt in OUTPUT_FORMATS.values():
            fits = fmt.group_size <= 0 or columns % fmt.group_size == 0
            if fmt.container == container and fits and not fmt.column_major and not fmt.swizzled:
                for floor in [None] if fmt.static_scale else floors:
                    yield Quantiser(fmt, arithmetic, floor)
                    if floor and not fmt.static_scale and (chooses or fmt.power_of_two):
                        yield Quantiser(fmt, arithmetic, floor, "rounded_scale" if fmt.power_of_two else "zero")
