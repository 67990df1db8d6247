"""Pack codes of a few bits into bytes; round scales the same way in all codecs."""

from __future__ import annotations

import torch
from torch import Tensor

FP16_MAX = 65504.0


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes `[..., width]`, below `2^bits`, into bytes: the first in the lowest bits of the first byte.

    4 bits: an even column is in the low nibble. 3 bits: eight columns make 24 bits, little endian.
    """
    if bits == 8:
        return codes.to(torch.uint8)
    if bits == 4:
        return (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
    groups = codes.int().unflatten(-1, (-1, 8))
    word = (groups << (bits * torch.arange(8, dtype=torch.int32, device=codes.device))).sum(-1, dtype=torch.int32)
    return torch.stack([(word >> (8 * byte)) & 255 for byte in range(bits)], dim=-1).flatten(-2).to(torch.uint8)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Undo `pack_codes`: int32 `[..., width]`."""
    if bits == 8:
        return packed.int()
    if bits == 4:
        return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).int()
    word = packed.int().unflatten(-1, (-1, bits))
    word = (word << (8 * torch.arange(bits, dtype=torch.int32, device=packed.device))).sum(-1, dtype=torch.int32)
    shifts = bits * torch.arange(8, dtype=torch.int32, device=packed.device)
    return ((word.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def halves_up(x: Tensor) -> Tensor:
    """Round to the nearest integer, halves up: `floor(x + 0.5)`."""
    return torch.floor(x + 0.5)


def known(scale: Tensor) -> Tensor:
    """Replace infinite and NaN scales by one quiet NaN."""
    return torch.where(scale.isfinite(), scale, torch.nan)


def to_fp16(x: Tensor) -> Tensor:
    """Round fp32 to fp16, saturating; infinities and NaN become NaN."""
    return known(x).clamp(-FP16_MAX, FP16_MAX).to(torch.float16)


def zero_unless(finite: Tensor, codes: Tensor) -> Tensor:
    """Return codes, zero in rows that are not `finite`."""
    return torch.where(finite, codes, 0)
