"""Well-known quantisers that no output format is, by the reason that the report gives for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vattn.passes.probe import NO_CLAMP, unsaturated_cast
from vattn.quantization import codecs as quantization
from vattn.quantization.formats import FP8_E4M3_MAX

Way = Callable[[Tensor, float, "float | None"], Tensor]
"""Codes of rows `[T, N]` under a static scale or with a floor under computed scales."""


def _clamped(x: Tensor) -> Tensor:
    return x.clamp(-FP8_E4M3_MAX, FP8_E4M3_MAX).to(torch.float8_e4m3fn)


def static_ways() -> dict[str, Way]:
    """Return those with a given scale."""

    def quotient(rows: Tensor, scale: float, floor: float | None) -> Tensor:
        return unsaturated_cast(rows.float() / torch.tensor(scale), torch.float8_e4m3fn)

    def product(rows: Tensor, scale: float, floor: float | None) -> Tensor:
        return unsaturated_cast(rows.float() * torch.tensor(scale), torch.float8_e4m3fn)

    def no_nan(rows: Tensor, scale: float, floor: float | None) -> Tensor:
        return _clamped((rows.float() / torch.tensor(scale)).nan_to_num(0.0, FP8_E4M3_MAX, -FP8_E4M3_MAX))

    def to_limit(rows: Tensor, scale: float, floor: float | None) -> Tensor:
        x = rows.float() / torch.tensor(scale)
        return torch.fmin(torch.fmax(x, torch.tensor(-FP8_E4M3_MAX)), torch.tensor(FP8_E4M3_MAX)).to(
            torch.float8_e4m3fn
        )

    nan = "it makes numbers of NaN; output formats keep NaN, so that it is seen"
    return {NO_CLAMP: quotient, f"{NO_CLAMP} (with multiplication)": product, nan: no_nan, f"{nan} ": to_limit}


def dynamic_ways(columns: int) -> dict[str, Way]:
    """Return those that compute their scales, for rows of so many columns."""

    def scaled(rows: Tensor, size: int, floor: float | None, by: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        groups = rows.float().view(rows.shape[0], -1, size)
        least = quantization.MIN_ABSMAX / FP8_E4M3_MAX if floor is None else floor
        largest = groups.abs().amax(-1, keepdim=True)
        scale = torch.where(largest.isnan(), largest, (largest / FP8_E4M3_MAX).clamp(min=least))
        return _clamped(by(groups, scale)).view(rows.shape)

    def sized(size: int) -> Way:
        return lambda rows, _, floor: scaled(rows, size, floor, torch.div)

    def by_factor(size: int) -> Way:
        def factor(x: Tensor, scale: Tensor) -> Tensor:
            return x * (FP8_E4M3_MAX / (scale * FP8_E4M3_MAX))

        return lambda rows, _, floor: scaled(rows, size, floor, factor)

    def by_rounded_reciprocal(size: int) -> Way:
        def divide(x: Tensor, scale: Tensor) -> Tensor:
            largest = x.abs().amax(-1, keepdim=True).clamp(min=quantization.MIN_ABSMAX)
            return x / (largest * (1 / FP8_E4M3_MAX))

        return lambda rows, _, floor: scaled(rows, size, floor, divide)

    def powers_of_rows(rows: Tensor, _: float, floor: float | None) -> Tensor:
        return scaled(rows, columns, floor, lambda x, s: x / quantization.ceil_power_of_two(s))

    def whole(rows: Tensor, _: float, floor: float | None) -> Tensor:
        least = quantization.MIN_ABSMAX / FP8_E4M3_MAX if floor is None else floor
        return _clamped(rows.float() / (rows.float().abs().amax() / FP8_E4M3_MAX).clamp(min=least))

    ways: dict[str, Way] = {
        "one dynamic scale for the whole tensor is no supported format; use one per token": whole,
        "powers of two as scales are supported for groups of 64 and 128 columns, not for whole tokens": powers_of_rows,
    }
    for size in (16, 32, 256, 512):
        if size != columns and columns % size == 0:
            ways[f"groups of {size} columns are no supported format; use 64 or 128"] = sized(size)
    for size in (columns, 128, 64):
        if columns % size == 0:
            what = "token" if size == columns else f"group of {size}"
            ways[
                f"one scale per {what}, but multiplied by 448 / maximum, which rounds ties otherwise than the op does; "
                "divide by maximum / 448"
            ] = by_factor(size)
            ways[
                f"one scale per {what}, but the maximum is multiplied by 1 / 448, which rounds otherwise than the op "
                "does; divide it by 448"
            ] = by_rounded_reciprocal(size)
    return ways
