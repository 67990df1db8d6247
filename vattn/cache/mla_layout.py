"""Where a token's row lies inside a latent attention layer's raw storage. The only place that knows.

Plain and FP8 formats: `[num_blocks, block_size, L + R]`. Packed formats: `[num_blocks, bytes]` uint8, a block's rows
one after the other; blocks may be padded at their end, to a multiple of 16 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.config.mla import MLAConfig
from vattn.quantization.mla_formats import MLA_FORMATS


def mla_cache_shape(config: MLAConfig, num_blocks: int) -> tuple[int, ...]:
    """Return the shape of a layer's raw storage for `num_blocks` blocks."""
    if config.packed:
        return num_blocks, config.block_size * config.row_bytes
    return num_blocks, config.block_size, config.head_size


def mla_cache_dtype(config: MLAConfig) -> torch.dtype:
    """Return the dtype of a layer's raw storage."""
    return MLA_FORMATS[config.kv_cache_dtype].storage_dtype


def shape_of_mla_storage(storage: Tensor, config: MLAConfig, num_blocks: int) -> tuple[int, ...]:
    """Return `mla_cache_shape`, with packed blocks as wide as they are, if that is valid padding."""
    shape = mla_cache_shape(config, num_blocks)
    if config.packed and storage.dim() == 2 and storage.shape[1] > shape[1] and storage.shape[1] % 16 == 0:
        return num_blocks, storage.shape[1]
    return shape


def row_view(kv_cache: Tensor, config: MLAConfig) -> Tensor:
    """Return `[num_blocks, block_size, columns]` of a raw storage, never a copy; columns are bytes of packed rows."""
    if not config.packed:
        return kv_cache
    content = config.block_size * config.row_bytes
    return kv_cache[:, :content].unflatten(1, (config.block_size, config.row_bytes))
