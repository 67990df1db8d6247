"""How many tokens of expanded keys and values a workspace holds."""

from __future__ import annotations

from torch import Tensor

from vattn.config.mla import MLAConfig
from vattn.errors import ShapeError

DEFAULT_WORKSPACE_TOKENS = 4096
"""Tokens that `TORCH_MLA` expands at a time where no workspace is given."""

DEFAULT_WORKSPACE_BYTES = 256 << 20
"""Expanded keys and values that `TRITON_MLA` holds at a time where no workspace is given; one block at least."""


def elements_per_token(config: MLAConfig) -> int:
    """Return how many elements of the model dtype one expanded token takes.

    Its row of the cache, and for every head a key of P + R columns and a value of V columns.
    """
    return config.head_size + config.num_heads * (config.qk_head_dim + config.v_head_dim)


def workspace_tokens(workspace: Tensor | None, config: MLAConfig, default: int) -> int:
    """Return how many tokens fit into a workspace at a time, whole blocks of them.

    Raises:
        ShapeError: it is too small for one block.
    """
    if workspace is None:
        tokens = max(default, config.block_size)
    else:
        tokens = workspace.numel() // elements_per_token(config)
    if tokens < config.block_size:
        least = config.block_size * elements_per_token(config)
        raise ShapeError(
            f"workspace of {0 if workspace is None else workspace.numel()} elements",
            f"at least {least}, for one block of {config.block_size} tokens",
            "give a larger workspace, or None",
        )
    return tokens // config.block_size * config.block_size
