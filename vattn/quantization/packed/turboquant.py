"""TurboQuant rows: keys as a length and codebook entries or as e4m3, values on a uniform grid."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from vattn.quantization.codecs import divide, to_e4m3
from vattn.quantization.formats import PackedPart
from vattn.quantization.packed.bit_packing import FP16_MAX, halves_up, pack_codes, to_fp16, unpack_codes, zero_unless
from vattn.quantization.packed.hadamard import rotate, row_shift

_HALVES = {
    3: (0.24509418, 0.75600528, 1.34390928, 2.1519457),
    4: (0.12839503, 0.3880483, 0.65675912, 0.94234046, 1.2562312, 1.61804639, 2.06901723, 2.73258957),
}

CENTROIDS: dict[int, tuple[float, ...]] = {
    bits: (*(-value for value in reversed(half)), *half) for bits, half in _HALVES.items()
}
"""The levels with the least squared error for normal numbers of variance 1 (Lloyd and Max), by bits."""

BOUNDARIES: dict[int, tuple[float, ...]] = {
    bits: tuple((low + high) / 2 for low, high in itertools.pairwise(levels)) for bits, levels in CENTROIDS.items()
}
"""Midpoints between neighbouring levels; a value on one belongs to the level above."""

MIN_LENGTH = 1e-8
"""Added to a row's length before it is divided by."""


def pairwise_sum(x: Tensor) -> Tensor:
    """Return the sum of each row `[..., 1]`: columns 1 apart first, then 2, 4 and so on. Widths are powers of two."""
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x


class RawE4m3:
    """`x = code` in e4m3, without any scale: magnitudes from 448 on saturate."""

    def encode(self, x: Tensor, part: PackedPart, scale: Tensor | None) -> tuple[Tensor, None]:
        return to_e4m3(x).view(torch.uint8), None

    def decode(self, codes: Tensor, scales: Tensor | None, part: PackedPart, width: int) -> Tensor:
        return codes.view(torch.float8_e4m3fn).float()


class Codebook:
    """`y = centroid[code] * length` of rotated rows y.

    Codes encode `y / |x|`, as if its columns were normal with variance 1. Without signs, an offset that all rows share
    may fall into one column of `y`, which the last level then cuts: see `docs/kv-formats.md`. The stored length is
    `|x| * sqrt(width) / |centroids of the row|`: the decoded row has the length of the row.
    """

    def encode(self, x: Tensor, part: PackedPart, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        length = pairwise_sum(x * x).sqrt()
        y = rotate(x, part.rotation)
        finite = length.isfinite() & y.isfinite().all(dim=-1, keepdim=True)
        unit = length + MIN_LENGTH
        codes = torch.zeros_like(y, dtype=torch.int32)
        for boundary in BOUNDARIES[part.bits]:
            codes = codes + (y >= unit * boundary)
        codes = zero_unless(finite, codes)
        levels = self._levels(codes, part)
        stored = length * math.sqrt(x.shape[-1]) / pairwise_sum(levels * levels).sqrt()
        # NaN after rounding: casts of NaN differ between devices.
        return pack_codes(codes, part.bits), torch.where(finite, to_fp16(stored), torch.nan)

    def decode(self, codes: Tensor, scales: Tensor | None, part: PackedPart, width: int) -> Tensor:
        assert scales is not None
        length = scales.float() * 2.0 ** -row_shift(width, part.rotation)
        return self._levels(unpack_codes(codes, part.bits), part) * length

    @staticmethod
    def _levels(codes: Tensor, part: PackedPart) -> Tensor:
        return torch.tensor(CENTROIDS[part.bits], device=codes.device)[codes]


class Uniform:
    """`x = code * step + least`, both fp16: the step and the least value of the row. Halves are rounded up.

    Codes are computed with the stored step and least value. A step that is zero in fp16 has codes of zero.
    """

    def encode(self, x: Tensor, part: PackedPart, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        steps = (1 << part.bits) - 1
        finite = x.isfinite().all(dim=-1, keepdim=True)
        x = zero_unless(finite, x)
        # Adding 0.0 drops the sign of a zero, which would depend on the order of columns.
        least = (x.amin(dim=-1, keepdim=True) + 0.0).clamp(-FP16_MAX, FP16_MAX).to(torch.float16)
        reach = x.amax(dim=-1, keepdim=True) - least.float()
        step = divide(reach.clamp(min=0.0) + 0.0, steps).clamp(max=FP16_MAX).to(torch.float16)
        divisor = torch.where(step == 0, torch.inf, step.float())
        codes = halves_up((x - least.float()) / divisor).clamp(0, steps)
        scales = torch.where(finite, torch.cat((step, least), dim=-1), torch.nan)
        return pack_codes(zero_unless(finite, codes).int(), part.bits), scales

    def decode(self, codes: Tensor, scales: Tensor | None, part: PackedPart, width: int) -> Tensor:
        assert scales is not None
        step, least = scales.float().split(1, dim=-1)
        return unpack_codes(codes, part.bits).float() * step + least
