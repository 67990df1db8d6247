"""Inputs of regions: attention outputs and scales that distinguish quantisers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.fx import Node

from vattn.passes.region import value
from vattn.passes.region_tokens import TOKEN_COUNTS, possible_count
from vattn.quantization.formats import MODEL_DTYPES

PROBE_SCALES = (7 / 512, 0.0137, 233 / 16384, 5 / 16, 157 / 64, 1 / 17, 1 / 29)
"""Static scales under which a region is run. FP8 midpoints times a multiple of 7 are exact in bf16, and a quarter of
them rounds otherwise when multiplied by the reciprocal (3 and 5 show no difference). Scales of eight bits, all that
bf16 has, tell fp32 math from bf16 math; reciprocals of odd numbers tell it from fp64."""

_EDGE = 157 / 128
_EXTREME_SCALES = {
    torch.float32: (_EDGE * 2.0**80, _EDGE * 2.0**-80),
    torch.bfloat16: (_EDGE * 2.0**80, _EDGE * 2.0**-80),
    torch.float16: (_EDGE * 2.0**14, _EDGE * 2.0**-20),
}
"""By dtype, scales that are great and small for it. Codes tell apart what lies between a 512th of a scale and 448 times
it, or its reciprocal: under these, that lies beyond everything that a narrower dtype holds, so whatever overflows or
vanishes in one on the way shows. fp32 holds 1e11 times more still: there no factor of a supported quantiser makes it
overflow, and bounds as wide as 1e30, which some write, bound nothing."""


def probe_scales(dtypes: Collection[torch.dtype]) -> tuple[float, ...]:
    """Return static scales under which a region that computes in some dtypes is run."""
    extreme = (scale for dtype, pair in _EXTREME_SCALES.items() if dtype in dtypes for scale in pair)
    return tuple(dict.fromkeys((*PROBE_SCALES, *extreme)))


_SMALL_STEPS = (2.0**-6, 2.0**-12, 2.0**-18, 2.0**-24)
_E2M1_EDGES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0)
_POWERS = range(-30, 11)


def probe_values(columns: int, *scales: float) -> Tensor:
    """Return fp32 rows `[R, columns]` that distinguish quantisers; the first is all zeros.

    Args:
        scales: static scales under which some of the values are midpoints of codes; one at least.
    """
    rng = torch.Generator().manual_seed(1)
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = torch.cat(((codes[1:] + codes[:-1]) / 2, codes))
    ties = torch.cat((ties, -ties, torch.tensor([449.0, 463.0, 465.0, 480.0, 1000.0, -460.0, -1e4])))
    static = [_rows(ties * scale, columns) for scale in scales]
    ramp = torch.exp2(torch.arange(columns).div(16, rounding_mode="floor") % 17 - 8.0)
    noise = torch.randn(6, columns, generator=rng)
    dynamic = []
    for step in (7 / 512, 1.0, 7 / 16, 1.7e-3, *_SMALL_STEPS):
        # A maximum of 448 steps in every group makes each of these ties a tie under the group's own scale.
        rows = _rows(ties[ties.abs() <= 448][torch.randperm(501, generator=rng)] * step, columns)
        rows[:, ::16] = 448 * step
        # Small maxima, exactly at a power of two, show what is added to them.
        dynamic.append(rows[:1] if step in _SMALL_STEPS else rows[:2])
    # Of all values with eight bits, 93 alone is a tie under a maximum of 248 and none under that scale once rounded.
    rounded = (93.0 * torch.exp2(-(torch.arange(columns) % 11).float())).unsqueeze(0)
    rounded[:, ::16] = 248.0
    dynamic.append(rounded)
    tiny = torch.stack([torch.full((columns,), size) for size in (0.0, 1e-39, 1e-12, 3e-8, 2e-5)])
    tiny[1:, ::3] = 0
    outlier, infinite, nan = noise[5].clone(), noise[5].clone(), noise[5].clone()
    outlier[columns // 3], infinite[columns // 2], nan[columns // 5] = 3e4, torch.inf, torch.nan
    special = torch.stack((outlier, -outlier, infinite, nan))
    scaled = torch.stack(
        (noise[0], noise[1] * 200 * scales[0], noise[2] * ramp, noise[3] * ramp.flip(0), noise[4] * 1e-3)
    )
    return torch.cat((tiny[:1], scaled, *dynamic, special, tiny[1:], *static))


def _rows(values: Tensor, columns: int) -> Tensor:
    rows = -(-values.numel() // columns)
    return values.repeat(-(-rows * columns // values.numel()))[: rows * columns].view(rows, columns)


def cycled(rows: Tensor, start: int, count: int) -> Tensor:
    """Return `count` rows from a place on, the first ones again behind the last."""
    return rows[torch.arange(start, start + count) % len(rows)]


@lru_cache(maxsize=4)
def every_value(dtype: torch.dtype) -> Tensor:
    """Return every value of a 16-bit dtype; for fp32, every bf16 value and as many with random mantissas."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    if dtype != torch.float32:
        return bits.view(dtype)
    rng = torch.Generator().manual_seed(4)
    wide = bits.int() << 16
    return torch.cat((wide, wide + torch.randint(1, 2**16, wide.shape, generator=rng, dtype=torch.int32))).view(dtype)


def every_maximum(dtype: str) -> Tensor:
    """Return all magnitudes that a 16-bit dtype has, in fp32; of fp32, those of bf16."""
    values = every_value(torch.float16 if dtype == "float16" else torch.bfloat16).float()
    return values[(values >= 0) & ~values.signbit()]


def every_scaled(numbers: Sequence[float]) -> Tensor:
    """Return fp32 values that show how scaled values are rounded to few digits: near some numbers, and elsewhere."""
    rng = torch.Generator().manual_seed(5)
    near = torch.tensor(sorted({abs(number) for number in (*numbers, *_E2M1_EDGES)}))
    between = (near[1:] + near[:-1]) / 2
    bits = (near.view(torch.int32)[:, None] + torch.arange(-3, 4, dtype=torch.int32)).clamp(min=0).flatten()
    anywhere = (torch.rand(1 << 14, generator=rng) * 8).exp2() / 32
    found = torch.cat((bits.view(torch.float32), between, anywhere, every_value(torch.bfloat16).float()))
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
    rows = probe_values(int(heads) * int(width), *scales).to(MODEL_DTYPES[config_dtype]).roll(-7 * shift, 0)
    for count in counts:
        step = _step(output, count, TOKEN_COUNTS[0])
        needed = -(-len(rows) // step) if count == counts[0] else 1
        for part in range(needed):
            yield cycled(rows, part * step, count).view(count, int(heads), int(width))


def every_output(output: Node, config_dtype: str, counts: Sequence[int], few: bool = False) -> Iterator[Tensor]:
    """Yield attention outputs that hold every value of a 16-bit model dtype, in order and not, and all powers of two.

    For fp32 they hold every bf16 value and as many random bit patterns.

    Args:
        counts: as in `probe_outputs`.
        few: a few tokens at a time, for a region that may read only some of them.
    """
    tokens, heads, width = value(output).shape
    rows = every_row(int(heads) * int(width), MODEL_DTYPES[config_dtype])
    count = counts[0] - TOKEN_COUNTS[0] + (TOKEN_COUNTS[1] if few else len(rows))
    count = possible_count(tokens, count)
    step = _step(output, count, TOKEN_COUNTS[1] if few else len(rows))
    for start in range(0, len(rows), step):
        yield cycled(rows, start, count).view(count, int(heads), int(width))


def _step(output: Node, count: int, most: int) -> int:
    """Return after how many rows the next run begins: a region may read only the first of its tokens."""
    return count if isinstance(value(output).shape[0], int) else min(count, most)


@lru_cache(maxsize=4)
def every_row(columns: int, dtype: torch.dtype) -> Tensor:
    """Return rows that hold powers of two as maxima, then every value of a 16-bit dtype, in order and mixed.

    For fp32 they hold every bf16 value and as many random bit patterns.
    """
    rng = torch.Generator().manual_seed(2)
    values = every_value(dtype)[: 2**16]
    mixed = values[torch.randperm(len(values), generator=rng)]
    if dtype == torch.float32:
        mixed = torch.randint(-(2**31), 2**31, (len(values),), generator=rng).to(torch.int32).view(torch.float32)
    powers = torch.exp2(torch.tensor(_POWERS).float()).repeat_interleave(2)
    powers[1::2] *= 1 + 2.0**-7
    # Maxima at a power of two and just above: there the scale does or does not round up to the next power.
    largest = torch.randn(len(powers), columns, generator=rng).clamp(-0.9, 0.9)
    largest[:, ::16] = 1
    largest *= 448 * powers.unsqueeze(1)
    # And at sixes for every sixteen columns: under a scale of 1 / 29 some of them are ties of an NVFP4 block scale.
    sixes = torch.randn(4, columns, generator=rng).clamp(-0.9, 0.9)
    sixes[:, ::16] = 1
    sixes *= (6 * torch.exp2(torch.arange(columns).div(16, rounding_mode="floor") % 13 - 6.0)).roll(5)
    return torch.cat((largest.to(dtype), sixes.to(dtype), _rows(values, columns), _rows(mixed, columns)))


@lru_cache(maxsize=4)
def every_quotient(columns: int) -> Tensor:
    """Return bf16 rows with every quotient of a value and a maximum, but for its sign and very small ones."""
    largest = 1 + torch.arange(128).float() / 128
    powers = torch.exp2(-torch.arange(20).float())
    values = (largest * powers[:, None]).flatten().repeat(2)
    values[: len(values) // 2] *= -1
    free = torch.arange(columns) % 16 != 0
    rows = -(-len(values) // int(free.sum()))
    filled = values.repeat(2)[: rows * int(free.sum())].view(rows, -1)
    made = largest.repeat_interleave(rows)[:, None].expand(-1, columns).clone()
    made[:, free] = torch.where(filled.abs().repeat(128, 1) > made[:, free], 0.0, filled.repeat(128, 1))
    return made.bfloat16()
