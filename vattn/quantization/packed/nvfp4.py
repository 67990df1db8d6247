"""NVFP4 rows: e2m1 codes, an e4m3 scale per 16 columns and a given fp32 scale."""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.quantization.codecs import decode_e2m1, divide, encode_e2m1, to_e4m3
from vattn.quantization.formats import FP4_E2M1_MAX, PackedPart
from vattn.quantization.packed.bit_packing import pack_codes, unpack_codes


class Nvfp4:
    """`x = code * block scale * given scale`, as in `vattn.quantization.codecs.quant_nvfp4`; ties to even."""

    def encode(self, x: Tensor, part: PackedPart, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        assert scale is not None
        groups = x.unflatten(-1, (-1, part.group_size))
        stored = to_e4m3(divide(groups.abs().amax(dim=-1), FP4_E2M1_MAX) / scale)
        step = stored.float() * scale
        # A block scale of zero stores zeros: dividing by infinity keeps their signs.
        step = torch.where(step == 0, torch.inf, step).unsqueeze(-1)
        codes = encode_e2m1((groups / step).flatten(-2))
        return pack_codes(codes, part.bits), stored.view(torch.uint8)

    def decode(self, codes: Tensor, scales: Tensor | None, part: PackedPart, width: int) -> Tensor:
        assert scales is not None
        values = decode_e2m1(unpack_codes(codes, part.bits)).unflatten(-1, (-1, part.group_size))
        return (values * scales.view(torch.float8_e4m3fn).float().unsqueeze(-1)).flatten(-2)
