"""Norm, rotation and store of latent rows in one op: its arguments, their checks, and what it means in torch.

The latent goes through an RMSNorm over its columns, the rotated key turns in pairs, both in fp32 without a rounding in
between; the results are rounded to the model dtype and then stored as `vattn::mla_kv_cache_update` stores them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vattn.config.mla import MLAConfig
from vattn.config.rope import RopeConfig
from vattn.errors import ConfigError, DeviceError, DtypeError, ShapeError
from vattn.ops.arguments_mla import MLACacheUpdateArgs
from vattn.ops.checks_mla import check_mla_kv_cache_update
from vattn.ops.reference.rope import normalise, rotate, rows_of
from vattn.quantization.formats import MODEL_DTYPES, dtype_name


class MLARopeUpdateArgs(NamedTuple):
    """`vattn::mla_rope_kv_cache_update`: norm latents, turn keys, write both into their slots."""

    kv_c: Tensor
    """`[T, L]`, model dtype, ahead of the norm; may be a slice of one projection's result, as `k_pe`."""
    k_pe: Tensor
    """`[T, R]`, model dtype, ahead of the rotation."""
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
    """int64 `[T]`; as for `mla_kv_cache_update`."""
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
    tokens = args.kv_c.shape[0] if args.kv_c.ndim else 0
    columns, model = config.qk_rope_head_dim, MODEL_DTYPES[config.dtype]
    if rope.rotary_dim != columns or not rope.round_query or rope.query_arithmetic != "divide":
        raise ConfigError(
            f"rope {rope.encode()!r} for rotated keys of {columns} columns",
            f"rotary_dim={columns}, and nothing about queries",
            "make the RopeConfig for the rotated part of a latent row",
        )
    plain = MLACacheUpdateArgs(args.kv_c, args.k_pe, args.kv_cache, args.slot_mapping, args.k_scale, args.config)
    check_mla_kv_cache_update(plain, config)
    rows = args.cos.shape[0] if args.cos.ndim == 2 else 0
    widths = (columns // 2, columns)
    for name, table in (("cos", args.cos), ("sin", args.sin)):
        if table.ndim != 2 or table.shape[1] not in widths or table.shape != args.cos.shape:
            raise ShapeError(
                f"{name} has shape {tuple(table.shape)}",
                f"[n, {widths[0]}] or [n, {columns}], the same for both tables",
                f"make cos and sin of {widths[0]} angles, one per pair of the {columns} rotated columns",
            )
        if table.dtype != args.cos.dtype or not table.is_floating_point() or table.itemsize < 2:
            raise DtypeError(f"{name} is {dtype_name(table.dtype)}", "one float dtype for both tables", "convert it")
    if args.positions is None and rows != tokens:
        raise ShapeError(f"cos has {rows} rows", f"{tokens}, one per token, or positions", "pass positions")
    if args.positions is not None:
        if args.positions.shape != (tokens,) or rows < 1:
            raise ShapeError(
                f"positions have shape {tuple(args.positions.shape)} with tables of {rows} rows",
                f"({tokens},), one per token, padding included, and a table of at least one row",
                "pass the step's metadata.positions",
            )
        if args.positions.dtype not in (torch.int32, torch.int64):
            raise DtypeError(f"positions are {dtype_name(args.positions.dtype)}", "int32 or int64", "convert them")
    weight = args.norm_weight
    if weight is not None:
        if rope.norm == "none" or weight.shape != (config.kv_lora_rank,):
            raise ShapeError(
                f"norm_weight {tuple(weight.shape)} with norm={rope.norm!r}",
                f"({config.kv_lora_rank},) with a norm, None without",
                "match the rope config",
            )
        if weight.dtype not in (torch.float32, model):
            raise DtypeError(f"norm_weight is {dtype_name(weight.dtype)}", f"float32 or {config.dtype}", "convert it")
    for name, tensor in (("cos", args.cos), ("sin", args.sin), ("positions", args.positions), ("norm_weight", weight)):
        if tensor is not None and tensor.device != args.kv_c.device:
            raise DeviceError(f"{name} is on {tensor.device}", f"{args.kv_c.device}", f"move {name} there once")


def turned_rows(args: MLARopeUpdateArgs, rope: RopeConfig, config: MLAConfig) -> MLACacheUpdateArgs:
    """Return the update that is left: normed latents and turned keys in the model dtype. No sync."""
    dtype = MODEL_DTYPES[config.dtype]
    cos, sin = (rows_of(table, args.positions) for table in (args.cos, args.sin))
    latent = normalise(args.kv_c.unsqueeze(1), args.norm_weight, rope).squeeze(1)
    turned = rotate(args.k_pe.float().unsqueeze(1), cos, sin, rope).squeeze(1)
    return MLACacheUpdateArgs(
        latent.to(dtype), turned.to(dtype), args.kv_cache, args.slot_mapping, args.k_scale, args.config
    )
