"""Reference codecs of the packed KV formats: rows of keys or values to codes and scales and back, in plain torch.

A row is one token's key or value in one head. `vattn.quantization.formats` gives its size and
`vattn.cache.layout` its place. Every step is an exactly rounded fp32 operation in a stated
order, so that other implementations can be equal bit for bit. Rules of all packed formats:

- A row that holds NaN or an infinity, or with scales out of fp32's range, is read as NaN throughout: its scales are NaN
  and its codes zero. NVFP4 and keys without scales keep the rules of `vattn.quantization.codecs`: infinities
  saturate.
- A row of zeros is read as zeros.
- Scales in fp16 saturate at 65504 instead of becoming infinite.
- Each codec documents how it rounds halves.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from vattn.quantization.formats import KV_FORMATS, PackedPart
from vattn.quantization.packed import nvfp4, per_token_head, turboquant
from vattn.quantization.packed.hadamard import query_factor, rotate_back, rotate_query, unrotate

__all__ = ["CODECS", "Codec", "decode_rows", "encode_rows", "query_factor", "rotate_back", "rotate_query"]


class Codec(Protocol):
    """Encode and decode fp32 rows `[..., width]`."""

    def encode(self, x: Tensor, part: PackedPart, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return codes uint8 `[..., code_bytes]` and scales `[..., num_scales]`.

        Args:
            x: rows, not rotated.
            part: bits, groups and rotation.
            scale: the given scale, broadcast over `[..., 1]`; `None` if the format takes none.
        """

    def decode(self, codes: Tensor, scales: Tensor | None, part: PackedPart, width: int) -> Tensor:
        """Return fp32 `[..., width]` in the rotated basis, without the given scale."""


CODECS: dict[str, Codec] = {
    "int8": per_token_head.Int8(),
    "fp8": per_token_head.Fp8(),
    "int4": per_token_head.Int4(),
    "nvfp4": nvfp4.Nvfp4(),
    "e4m3": turboquant.RawE4m3(),
    "codebook": turboquant.Codebook(),
    "uniform": turboquant.Uniform(),
}
"""Codecs by `PackedPart.codec`."""


def encode_rows(x: Tensor, fmt_name: str, of_values: bool, scale: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Encode keys or values `[..., K, width]` of any float dtype as codes and scales of a packed format.

    Args:
        of_values: whether they are values; formats may store keys and values differently.
        scale: the given scale, fp32, 1 value or `[K]`; `None` for formats that take none.

    Returns:
        Codes uint8 `[..., K, code_bytes]`, and scales `[..., K, num_scales]` (FP8 ones as bytes) or `None`.

    Example:
        >>> import torch
        >>> codes, scales = encode_rows(torch.tensor([[[0.0, 1.0, -127.0, 63.5]]]), "int8_per_token_head", False)
        >>> codes.view(torch.int8).tolist(), scales.tolist()
        ([[[0, 1, -127, 64]]], [[[1.0]]])
    """
    part = KV_FORMATS[fmt_name].parts[of_values]
    given = None if scale is None else scale.reshape(-1, 1)
    return CODECS[part.codec].encode(x.float(), part, given)


def decode_rows(
    codes: Tensor,
    scales: Tensor | None,
    fmt_name: str,
    of_values: bool,
    width: int,
    scale: Tensor | None = None,
    rotated: bool = False,
) -> Tensor:
    """Return the fp32 keys or values `[..., K, width]` of codes and scales; arguments as for `encode_rows`.

    Args:
        rotated: do not rotate rows back: multiply them by queries from `rotate_query` and rotate their sums by
            `rotate_back`. Same results but for rounding, with fewer rotations.
    """
    part = KV_FORMATS[fmt_name].parts[of_values]
    x = CODECS[part.codec].decode(codes, scales, part, width)
    if not rotated:
        x = unrotate(x, part.rotation)
    return x if scale is None else x * scale.reshape(-1, 1)
