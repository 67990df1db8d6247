"""One fp32 scale per row: int8, e4m3, and rotated asymmetric int4."""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.quantization.codecs import MIN_ABSMAX, divide, to_e4m3
from vattn.quantization.formats import FP8_E4M3_MAX, PackedPart
from vattn.quantization.packed.bit_packing import halves_up, known, pack_codes, unpack_codes, zero_unless
from vattn.quantization.packed.hadamard import rotate, row_shift

INT8_MAX = 127.0
INT4_STEPS = 15
ZERO_POINT_BITS = 15
"""The four lowest bits of an int4 scale, which hold its zero point."""


def _row_scale(x: Tensor, largest: float) -> Tensor:
    """Return the scale of each row, `[..., 1]`: its largest magnitude, at least `MIN_ABSMAX`, over `largest`."""
    return known(divide(x.abs().amax(dim=-1, keepdim=True).clamp(min=MIN_ABSMAX), largest))


class Int8:
    """`x = code * scale`, codes -127 to 127 in two's complement; halves are rounded away from zero."""

    def encode(self, x: Tensor, part: PackedPart, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        scales = _row_scale(x, INT8_MAX)
        ratio = x / scales
        rounded = torch.where(ratio < 0, torch.ceil(ratio - 0.5), torch.floor(ratio + 0.5))
        codes = zero_unless(scales.isfinite(), rounded.clamp(-INT8_MAX, INT8_MAX))
        return codes.to(torch.int8).view(torch.uint8), scales

    def decode(self, codes: Tensor, scales: Tensor | None, part: PackedPart, width: int) -> Tensor:
        assert scales is not None
        return codes.view(torch.int8).float() * scales


class Fp8:
    """`x = code * scale` with e4m3 codes; ties to even."""

    def encode(self, x: Tensor, part: PackedPart, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        scales = _row_scale(x, FP8_E4M3_MAX)
        return to_e4m3(zero_unless(scales.isfinite(), x / scales)).view(torch.uint8), scales

    def decode(self, codes: Tensor, scales: Tensor | None, part: PackedPart, width: int) -> Tensor:
        assert scales is not None
        return codes.view(torch.float8_e4m3fn).float() * scales


class Int4:
    """`y = (code - zero point) * scale` of rotated rows y, codes and zero points 0 to 15; halves are rounded up.

    The range holds zero. The scale is the range over 15 without its four lowest bits, which store the zero point.
    """

    def encode(self, x: Tensor, part: PackedPart, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        y = rotate(x, part.rotation)
        finite = y.isfinite().all(dim=-1, keepdim=True)
        y = zero_unless(finite, y)
        low = y.amin(dim=-1, keepdim=True).clamp(max=0.0)
        high = y.amax(dim=-1, keepdim=True).clamp(min=0.0)
        bits = divide((high - low).clamp(min=MIN_ABSMAX), INT4_STEPS).view(torch.int32) & ~ZERO_POINT_BITS
        step = bits.view(torch.float32)
        finite = finite & step.isfinite()
        zero_point = halves_up(-low / step).clamp(0, INT4_STEPS)
        codes = (halves_up(y / step) + zero_point).clamp(0, INT4_STEPS)
        scales = (bits | zero_unless(finite, zero_point).int()).view(torch.float32)
        return pack_codes(zero_unless(finite, codes).int(), part.bits), torch.where(finite, scales, torch.nan)

    def decode(self, codes: Tensor, scales: Tensor | None, part: PackedPart, width: int) -> Tensor:
        assert scales is not None
        bits = scales.contiguous().view(torch.int32)
        step = (bits & ~ZERO_POINT_BITS).view(torch.float32) * 2.0 ** -row_shift(width, part.rotation)
        return (unpack_codes(codes, part.bits) - (bits & ZERO_POINT_BITS)).float() * step
