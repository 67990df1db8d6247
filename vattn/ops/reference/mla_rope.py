"""Norm, rotation and store of latent rows in one op: its arguments, their checks, and what it means in torch.

The latent goes through an RMSNorm over its columns, the key is rotated in pairs, both in fp32 without a rounding
between; the results are rounded to the model dtype and then stored as `vattn::mla_kv_cache_update` stores them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vattn.config.mla import MLAConfig
from vattn.config.rope import RopeConfig
from vattn.errors import ConfigError
from vattn.ops.arguments_mla import MLACacheUpdateArgs
from vattn.ops.checks import check_tables
from vattn.ops.checks_mla import check_mla_kv_cache_update
from vattn.ops.reference.rope import normalise, rotate, rows_of
from vattn.ops.tensor_checks import check_optional
from vattn.quantization.formats import MODEL_DTYPES

TABLE_DTYPES = (*MODEL_DTYPES.values(), torch.float64)


class MLARopeUpdateArgs(NamedTuple):
    """`vattn::mla_rope_kv_cache_update`: norm latents, rotate keys, write both into their slots."""

    kv_c: Tensor
    """`[T, L]`, model dtype, before the norm; may be a slice of one projection's result, as `k_pe`."""
    k_pe: Tensor
    """`[T, R]`, model dtype, before the rotation."""
    cos: Tensor
    """`[n, R / 2]`: one angle per pair of columns, or `[n, R]`: one factor per column; float, any strides. Row t is
    token t's (n = T), or with `positions` row `positions[t]`."""
    sin: Tensor
    """As `cos`, same shape and dtype."""
    positions: Tensor | None
    """int32 or int64 `[T]`: rows of a table. Negative ones count from its end; one outside of it gives NaN."""
    kv_cache: Tensor
    """This layer's storage; mutated."""
    slot_mapping: Tensor
    """int64 or int32 `[T]`; as for `mla_kv_cache_update`."""
    norm_weight: Tensor | None
    """fp32 or model dtype `[L]`, if the rope config has a norm."""
    k_scale: Tensor | None
    """fp32, 1 value: that of an `fp8_e4m3` cache."""
    rope: str
    """`RopeConfig.encode()`; its norm is that of the latent."""
    config: str
    """`MLAConfig.encode()`."""


def check_mla_rope_update(args: MLARopeUpdateArgs, rope: RopeConfig, config: MLAConfig) -> None:
    """Check the arguments of `vattn::mla_rope_kv_cache_update`.

    Raises:
        ShapeError, DtypeError, DeviceError, StrideError, ScaleError, ConfigError: by kind of mistake.
    """
    columns = config.qk_rope_head_dim
    if rope.rotary_dim != columns or not rope.round_query or rope.query_arithmetic != "divide":
        raise ConfigError(
            f"rope {rope.encode()!r} for rotated keys of {columns} columns",
            f"rotary_dim={columns}, and nothing about queries",
            "make the RopeConfig for the rotated part of a latent row",
        )
    plain = MLACacheUpdateArgs(args.kv_c, args.k_pe, args.kv_cache, args.slot_mapping, args.k_scale, args.config)
    check_mla_kv_cache_update(plain)
    device = args.kv_c.device
    check_tables(args, rope, args.kv_c.shape[0], device, TABLE_DTYPES)
    if args.norm_weight is not None:
        dtypes = (torch.float32, MODEL_DTYPES[config.dtype])
        check_optional("norm_weight", args.norm_weight, rope.norm != "none", (config.kv_lora_rank,), dtypes, device)


def rotated_rows(args: MLARopeUpdateArgs, rope: RopeConfig, config: MLAConfig) -> MLACacheUpdateArgs:
    """Return the cache update of normed latents and rotated keys in the model dtype. No sync."""
    dtype = MODEL_DTYPES[config.dtype]
    cos, sin = (rows_of(table, args.positions) for table in (args.cos, args.sin))
    latent = normalise(args.kv_c.unsqueeze(1), args.norm_weight, rope).squeeze(1)
    rotated = rotate(args.k_pe.float().unsqueeze(1), cos, sin, rope).squeeze(1)
    return MLACacheUpdateArgs(
        latent.to(dtype), rotated.to(dtype), args.kv_cache, args.slot_mapping, args.k_scale, args.config
    )
