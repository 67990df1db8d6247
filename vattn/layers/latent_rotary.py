"""What turns raw latents and rotated keys into cached rows, for a layer that is to do it in one launch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LatentRotary(NamedTuple):
    """Norm and rotation of the rows that `MLAAttention.forward(..., rotary=...)` writes to the cache.

    With it the layer takes latents ahead of their norm and rotated keys ahead of their rotation; queries come finished.

    Example:
        >>> import torch
        >>> from vattn.rope_config import RopeConfig
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
    """int32 or int64 `[T]`, `None`: the tables have a row for every token."""
    norm_weight: Tensor | None
    """`[L]`, of the latent's RMSNorm, if `rope` names one."""
    rope: str
    """`vattn.rope_config.RopeConfig.encode()`: columns, style, norm and epsilon."""
