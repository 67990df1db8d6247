"""Formats of the rows of a latent attention cache, by name; encode and decode them in torch.

A row is a latent of L columns and a rotated key of R columns. Dequantised value = stored value * scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vattn.errors import ConfigError
from vattn.quantization.codecs import decode_e2m1, encode_e2m1, pack_e2m1, to_e4m3, unpack_e2m1
from vattn.quantization.formats import FP4_E2M1_MAX, FP8_E4M3_MAX, KV_ALIASES, MODEL_DTYPES, dtype_name

DS_MLA_GROUP = 128
"""Latent columns that share one fp32 scale in `fp8_ds_mla`."""

NVFP4_GROUP = 16
"""Latent columns that share one e4m3 scale in `nvfp4_ds_mla`."""

_LEAST_SCALE = 2.0**-100
"""Scale of a group of zeros; division by it does not overflow."""


@dataclass(frozen=True)
class MLAFormat:
    """How a row is stored.

    Attributes:
        name: canonical name.
        storage_dtype: dtype of the raw storage.
        value_dtype: dtype that stored elements are viewed as; in packed rows, of the latent.
        scaled: whether the format takes `k_scale`, one value.
        packed: rows of bytes with inline scales; the storage is `[num_blocks, bytes]`.
        latent_multiple: L must be a multiple of this.
        alignment: bytes of the widest element in a packed row; blocks start at multiples of it.
    """

    name: str
    storage_dtype: torch.dtype
    value_dtype: torch.dtype
    scaled: bool = False
    packed: bool = False
    latent_multiple: int = 1
    alignment: int = 1

    def row_bytes(self, latent: int, rope: int) -> int:
        """Return the bytes of a row of that many latent and rope columns."""
        if self.name == "fp8_ds_mla":
            return latent + 4 * (latent // DS_MLA_GROUP) + 2 * rope
        if self.name == "nvfp4_ds_mla":
            return latent // 2 + rope + latent // NVFP4_GROUP
        return (latent + rope) * self.value_dtype.itemsize


MLA_FORMATS: dict[str, MLAFormat] = {
    **{name: MLAFormat(name, dtype, dtype) for name, dtype in MODEL_DTYPES.items()},
    "fp8_e4m3": MLAFormat("fp8_e4m3", torch.uint8, torch.float8_e4m3fn, scaled=True),
    "fp8_ds_mla": MLAFormat(
        "fp8_ds_mla", torch.uint8, torch.float8_e4m3fn, packed=True, latent_multiple=DS_MLA_GROUP, alignment=4
    ),
    "nvfp4_ds_mla": MLAFormat("nvfp4_ds_mla", torch.uint8, torch.uint8, packed=True, latent_multiple=4 * NVFP4_GROUP),
}

MLA_PACKED_DTYPES: tuple[str, ...] = tuple(name for name, fmt in MLA_FORMATS.items() if fmt.packed)
"""Cache dtypes of latent attention alone."""


def resolve_mla_cache_dtype(name: str, model_dtype: torch.dtype) -> str:
    """Return the name of a row format: `"auto"`, an alias or a canonical name.

    Raises:
        ConfigError: latent attention has no such format; the message lists all names.
    """
    name = dtype_name(model_dtype) if name == "auto" else KV_ALIASES.get(name, name)
    if name not in MLA_FORMATS:
        raise ConfigError(
            f"cache_dtype {name!r} of a latent attention layer",
            ", ".join(("auto", *MLA_FORMATS, *KV_ALIASES)),
            "choose one of these names",
        )
    return name


def encode_rows(latent: Tensor, rope: Tensor, fmt_name: str, k_scale: Tensor | None) -> Tensor:
    """Return the stored rows of latents `[T, L]` and rotated keys `[T, R]`.

    Plain formats: `[T, L + R]` of the format's dtype. Others: bytes `[T, row_bytes]`. Values beyond a format's range
    saturate.
    """
    if fmt_name == "fp8_ds_mla":
        return _encode_fp8_ds(latent, rope)
    if fmt_name == "nvfp4_ds_mla":
        return _encode_nvfp4_ds(latent, rope)
    row = torch.cat((latent, rope), dim=-1)
    if k_scale is None:
        return row.to(MLA_FORMATS[fmt_name].value_dtype)
    return to_e4m3(row.float() / k_scale.view(1)).view(torch.uint8)


def decode_rows(stored: Tensor, fmt_name: str, latent: int, rope: int, k_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return fp32 latents `[..., L]` and rotated keys `[..., R]` of stored rows."""
    if fmt_name == "fp8_ds_mla":
        groups = latent // DS_MLA_GROUP
        codes, scales, tail = stored.split((latent, 4 * groups, 2 * rope), dim=-1)
        values = codes.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (groups, DS_MLA_GROUP))
        values = values * scales.contiguous().view(torch.float32).unsqueeze(-1)
        return values.flatten(-2), tail.contiguous().view(torch.bfloat16).float()
    if fmt_name == "nvfp4_ds_mla":
        groups = latent // NVFP4_GROUP
        codes, tail, scales = stored.split((latent // 2, rope, groups), dim=-1)
        values = decode_e2m1(unpack_e2m1(codes.contiguous())).unflatten(-1, (groups, NVFP4_GROUP))
        by_block = scales[..., _places(groups, stored.device)].contiguous().view(torch.float8_e4m3fn).float()
        return (values * by_block.unsqueeze(-1)).flatten(-2), tail.contiguous().view(torch.float8_e4m3fn).float()
    values = stored.view(MLA_FORMATS[fmt_name].value_dtype).float()
    if k_scale is not None:
        values = values * k_scale.view(1)
    return values[..., :latent], values[..., latent:]


def _encode_fp8_ds(latent: Tensor, rope: Tensor) -> Tensor:
    groups = latent.float().unflatten(-1, (-1, DS_MLA_GROUP))
    scale = (groups.abs().amax(-1) / torch.tensor(FP8_E4M3_MAX, device=latent.device)).clamp(min=_LEAST_SCALE)
    codes = to_e4m3(groups / scale.unsqueeze(-1)).view(torch.uint8).flatten(-2)
    tail = rope.to(torch.bfloat16).contiguous().view(torch.uint8)
    return torch.cat((codes, scale.contiguous().view(torch.uint8), tail), dim=-1)


def _encode_nvfp4_ds(latent: Tensor, rope: Tensor) -> Tensor:
    groups = latent.float().unflatten(-1, (-1, NVFP4_GROUP))
    scale = to_e4m3(groups.abs().amax(-1) / torch.tensor(FP4_E2M1_MAX, device=latent.device))
    divisor = scale.float()
    # A scale that rounds to zero stores zeros.
    scaled = torch.where(divisor.unsqueeze(-1) > 0, groups / divisor.unsqueeze(-1), 0.0)
    codes = pack_e2m1(encode_e2m1(scaled).flatten(-2))
    places = _places(groups.shape[-2], latent.device)
    permuted = torch.empty_like(scale.view(torch.uint8))
    permuted[..., places] = scale.view(torch.uint8)
    return torch.cat((codes, to_e4m3(rope.float()).view(torch.uint8), permuted), dim=-1)


def _places(groups: int, device: torch.device) -> Tensor:
    """Return the byte that holds the scale of each group: groups 0, 4, 8, ... first, then 1, 5, 9, ..."""
    group = torch.arange(groups, device=device)
    return groups // 4 * (group % 4) + group // 4
