"""What turns raw latents and rotated keys into cached rows, for a layer that is to do it in one launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vattn.config.rope import RopeConfig
from vattn.errors import ConfigError, MetadataError, ShapeError
from vattn.metadata.attention_metadata import AttentionMetadata


class LatentRotary(NamedTuple):
    """Norm and rotation of the rows that `MLAAttention.forward(..., rotary=...)` writes to the cache.

    With it the layer takes latents before their norm and keys before their rotation; queries are rotated by the caller.

    Example:
        >>> import torch
        >>> from vattn.config.rope import RopeConfig
        >>> table = torch.arange(32.0).unsqueeze(1) * torch.logspace(0, -2, 4)
        >>> rope = RopeConfig(rotary_dim=8, style="interleaved", norm="rms", norm_eps=1e-6).encode()
        >>> LatentRotary(table.cos(), table.sin(), torch.tensor([0, 1, 2]), torch.ones(32), rope).rope
        'rope1 rotary_dim=8 style=interleaved norm=rms norm_eps=1e-06'
    """

    cos: Tensor
    """`[n, R / 2]` or `[n, R]`; row t is token t's, or with `positions` row `positions[t]`."""
    sin: Tensor
    """As `cos`."""
    positions: Tensor | None
    """int32 or int64 `[T]`, `None`: the tables have a row for every token.

    Eager calls refuse positions on the CPU that have no row. Nothing reads those on another device, or in compiled
    code: -n to -1 count from the table's end, and others without a row give keys of NaN.
    """
    norm_weight: Tensor | None
    """`[L]`, of the latent's RMSNorm, if `rope` names one."""
    rope: str | RopeConfig
    """Columns, style, norm and epsilon: a `vattn.config.rope.RopeConfig`, or what its `encode` wrote."""


def check_table(rotary: LatentRotary, metadata: AttentionMetadata, prefix: str) -> None:
    """Refuse positions without a row in the table, as far as the host knows them: the step's own, and any on the CPU.

    Raises:
        ShapeError: the table is too short.
        MetadataError: a position is negative.
    """
    rows = rotary.cos.shape[0] if rotary.cos.dim() == 2 else 0
    least, most = _known_positions(rotary.positions, metadata) if rows else (0, -1)
    if least < 0:
        raise MetadataError(
            f"LatentRotary with position {least} in layer {prefix!r}",
            f"0 to {rows - 1}, rows of its tables",
            "pass the step's metadata.positions",
        )
    if most >= rows > 0:
        raise ShapeError(
            f"LatentRotary with tables of {rows} rows in layer {prefix!r}, in a step with position {most}",
            "a row for every position up to the builder's max_seq_len",
            "make longer tables",
        )


def _known_positions(positions: Any, metadata: AttentionMetadata) -> tuple[int, int]:
    """Return the least and the largest position that the host knows of; `(0, -1)` for none."""
    # Other types and dtypes are the op's to refuse; subclasses may have no values.
    if type(positions) is not Tensor or positions.device.type != "cpu" or positions.dim() != 1:
        return 0, metadata.max_position if positions is not None and positions is metadata.positions else -1
    real = positions[: metadata.num_actual_tokens]
    if real.dtype not in (torch.int32, torch.int64) or not real.shape[0]:
        return 0, -1
    return int(real.min()), int(real.max())


def rope_string(rotary: object, prefix: str) -> str:
    """Return the canonical string of a layer's rotation; refuse anything that is no `LatentRotary` with one."""
    if not isinstance(rotary, LatentRotary):
        raise ConfigError(
            f"rotary of type {type(rotary).__name__} in layer {prefix!r}",
            "a LatentRotary, or None for latents and keys that are finished",
            "pass LatentRotary(cos, sin, positions, norm_weight, RopeConfig(...))",
        )
    if not isinstance(rotary.rope, (str, RopeConfig)):
        raise ConfigError(
            f"LatentRotary with a rope of type {type(rotary.rope).__name__} in layer {prefix!r}",
            "a RopeConfig, or what its encode() wrote",
            "pass RopeConfig(rotary_dim=qk_rope_head_dim, ...) as its last field",
        )
    for name, given in (("cos", rotary.cos), ("sin", rotary.sin)):
        if not isinstance(given, Tensor):
            raise ConfigError(
                f"LatentRotary with {name} of type {type(given).__name__} in layer {prefix!r}",
                "a tensor with a row per token or position",
                f"pass the table as {name}",
            )
    return rotary.rope.encode() if isinstance(rotary.rope, RopeConfig) else rotary.rope
