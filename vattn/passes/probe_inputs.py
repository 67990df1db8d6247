"""Inputs of regions: attention outputs and scales that distinguish quantisers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.fx import Node

from vattn.passes.region import value
from vattn.passes.region_tokens import FEW, MANY, possible_count
from vattn.quantization.codecs import decode_e2m1
from vattn.quantization.formats import MODEL_DTYPES

PROBE_SCALES = (7 / 512, 211 / 64, 3e-6, 0.1 / 3e-6, 3e-25, 0.1 / 3e-25)
"""Static scales under which a region is run.

FP8 midpoints times a multiple of 7 are exact in bf16, and a quarter of them rounds otherwise when multiplied by the
reciprocal (3 and 5 show no difference). Scales of more bits tell fp32 math from that of other dtypes. Codes tell apart
what lies between a 512th of a scale and 448 times it, or its reciprocal: under the others, that lies beyond what fp16,
or fp16 and all that is near 1, holds, so whatever overflows or vanishes on the way shows. fp32 holds 1e11 times more
still: there no factor of a supported quantiser makes it overflow, and bounds as wide as 1e30, which some write, bound
nothing.
"""

TIED_SCALES = (1 / 3, 5 / 3, 7 / 3, 1 / 29, 0.3, 5 / 16)
"""Static scales under which maxima of few bits, divided by 6 and by the scale, lie at or just beside ties of e4m3."""


def probe_values(columns: int, *scales: float) -> Tensor:
    """Return fp32 rows `[R, columns]` that distinguish quantisers; the first is all zeros.

    Args:
        scales: static scales under which some of the values are midpoints of codes; one at least.
    """
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    tried = torch.cat(((codes[1:] + codes[:-1]) / 2, codes + codes.amax()))
    static = [_rows(torch.cat((tried, -tried)) * scale, columns) for scale in scales]
    column = torch.arange(columns)
    # Under a maximum m the values 3 / 8 * m and m / 2**16 are ties; for these m, not in every order of roundings.
    maxima = (torch.arange(52, 64) * torch.exp2(-3 * torch.arange(12))).unsqueeze(1)
    dynamic = maxima * (1 + column % 2 * 2) * torch.exp2(-2.0 - column % 15)
    dynamic[:, ::16] = maxima
    noise = torch.randn(3, columns, generator=torch.Generator())
    noise[1:, columns // 2] = torch.tensor([torch.inf, torch.nan])
    return torch.cat((torch.zeros(1, columns), dynamic, *static, noise))


def _rows(values: Tensor, columns: int) -> Tensor:
    return cycled(values, 0, math.ceil(len(values) / columns) * columns).view(-1, columns)


def cycled(rows: Tensor, start: int, count: int) -> Tensor:
    """Return `count` rows from a place on, the first ones again behind the last."""
    return rows[torch.arange(start, start + count) % len(rows)]


@lru_cache(maxsize=4)
def every_value(dtype: torch.dtype) -> Tensor:
    """Return every value of a 16-bit dtype; for fp32, every bf16 value and as many with random mantissas."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    if dtype != torch.float32:
        return bits.view(dtype)
    wide = bits.int() << 16
    low = torch.randint(2**16, wide.shape, generator=torch.Generator(), dtype=torch.int32)
    return torch.cat((wide, wide + low)).view(dtype)


def every_maximum(dtype: str) -> Tensor:
    """Return all magnitudes that a 16-bit dtype has, in fp32; of fp32, those of bf16."""
    values = every_value(torch.float16 if dtype == "float16" else torch.bfloat16).float()
    return values[values >= 0].abs()


def every_scaled(numbers: Sequence[float]) -> Tensor:
    """Return fp32 values that show how scaled values are rounded to e2m1: near some numbers, and elsewhere."""
    codes = decode_e2m1(torch.arange(8))
    near = torch.cat((codes, (codes[1:] + codes[:-1]) / 2, torch.tensor(numbers).abs()))
    beside = [near.nextafter(torch.tensor(end)) for end in (torch.inf, -torch.inf)]
    found = torch.cat((near, *beside, every_value(torch.bfloat16).float()))
    return torch.cat((found, -found))


def scales_near(numbers: Collection[float]) -> list[float]:
    """Return static scales by which some value comes out as each of some numbers, or between two of them."""
    ordered = sorted(number for number in numbers if 1e-30 < number < 1e30)
    found = [*ordered, *((a + b) / 2 for a, b in pairwise(ordered))]
    return [scale for number in found for scale in (number, 1 / number)]


def probe_outputs(
    output: Node, config_dtype: str, scales: Sequence[float], shift: int, counts: Sequence[int]
) -> Iterator[Tensor]:
    """Yield attention outputs `[T, H, V]` in the model dtype.

    Args:
        scales: as in `probe_values`.
        shift: rotates the rows, so that no token gets rows of one kind alone.
        counts: token counts; every row is among those of the first.
    """
    _, heads, width = value(output).shape
    rows = probe_values(int(heads) * int(width), *scales).to(MODEL_DTYPES[config_dtype]).roll(shift, 0)
    for count in counts:
        step = _step(output, count, MANY)
        needed = -(-len(rows) // step) if count == counts[0] else 1
        for part in range(needed):
            yield cycled(rows, part * step, count).view(count, int(heads), int(width))


def every_output(output: Node, config_dtype: str, counts: Sequence[int], few: bool = False) -> Iterator[Tensor]:
    """Yield attention outputs that hold the values of `every_value` in order.

    Args:
        counts: as in `probe_outputs`.
        few: a few tokens at a time, for a region that may read only some of them.
    """
    tokens, heads, width = value(output).shape
    rows = every_row(int(heads) * int(width), config_dtype)
    count = counts[0] - MANY + (FEW if few else len(rows))
    count = possible_count(tokens, count)
    step = _step(output, count, FEW if few else len(rows))
    for start in range(0, len(rows), step):
        yield cycled(rows, start, count).view(count, int(heads), int(width))


def _step(output: Node, count: int, most: int) -> int:
    """Return after how many rows the next run begins: a region may read only the first of its tokens."""
    return count if isinstance(value(output).shape[0], int) else min(count, most)


def every_row(columns: int, config_dtype: str) -> Tensor:
    """Return rows that hold the values of `every_value` in order."""
    return _rows(every_value(MODEL_DTYPES[config_dtype]), columns)


def every_mantissa(columns: int, group: int) -> Tensor:
    """Return bf16 rows: each group has another maximum, of all mantissas in 20 octaves, and smaller values of many."""
    mantissas = 1 + torch.arange(128) / 128
    largest = (mantissas * torch.exp2(torch.arange(-8, 12).unsqueeze(1))).view(-1, 1)
    place, index = torch.arange(group), torch.arange(len(largest)).unsqueeze(1)
    smaller = mantissas[(37 * place + 11 * index) % 128] * torch.exp2(torch.floor(torch.log2(largest)) - 1 - place % 4)
    groups = torch.where(place == 0, largest, smaller) * (1 - place % 2 * 2)
    return _rows(groups.flatten(), columns).bfloat16()


@lru_cache(maxsize=4)
def every_quotient(columns: int) -> Tensor:
    """Return bf16 rows with every quotient of a value and a maximum, but for very small ones."""
    values = every_value(torch.bfloat16).float()
    largest = values[(values >= 1) & (values < 2)]
    free = torch.arange(columns) % 16 != 0
    filled = _rows(values[(values.abs() >= 2.0**-19) & (values.abs() < 2)], int(free.sum()))
    made = largest.repeat_interleave(len(filled)).unsqueeze(1).repeat(1, columns)
    filled = filled.repeat(len(largest), 1)
    made[:, free] = torch.where(filled.abs() > made[:, free], 0.0, filled)
    return made.bfloat16()
