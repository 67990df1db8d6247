"""Where a token's key and value lie inside a layer's raw KV storage. The only place that knows.

A cache is **one raw storage per layer plus a named layout**:

- equal head sizes, `NHD`: `(2, num_blocks, block_size, num_kv_heads, head_size)`;
- equal head sizes, `HND`: `(2, num_blocks, num_kv_heads, block_size, head_size)`;
- unequal head sizes: `(num_blocks, bytes_per_block)` uint8; a block holds all its keys, then all its values, each in
  the layout's order. Rows may be padded at their end, to a multiple of 16 bytes.
- pairs of heads: that of equal head sizes in `NHD` with `2 * num_kv_heads` heads, of which a config with `head_pairs`
  reads the even or the odd keys, and the values of each pair as one row.

The storage is contiguous. Its dtype is the format's `storage_dtype`: the model's own for plain formats, uint8 for
quantised ones (which `model.to(dtype)` leaves alone).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from vattn.formats import KV_FORMATS, KVFormat


class CacheGeometry(Protocol):
    """What decides where things lie in a storage: an `AttentionConfig` or a `vattn.kv_cache.KVCacheSpec`."""

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""

    @property
    def head_size(self) -> int:
        """Key width of one head."""

    @property
    def head_size_v(self) -> int:
        """Value width of one head."""

    @property
    def kv_cache_dtype(self) -> str:
        """Canonical format name."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""

    @property
    def kv_cache_layout(self) -> str:
        """`"NHD"` or `"HND"`."""

    @property
    def head_pairs(self) -> str:
        """`"none"`, or which keys of pairs of heads are read."""


def is_in_bytes(config: CacheGeometry) -> bool:
    """Return whether the raw storage is `(num_blocks, bytes_per_block)` of uint8."""
    return config.head_pairs == "none" and config.head_size != config.head_size_v


def block_bytes(config: CacheGeometry) -> int:
    """Return the bytes of one block, keys and values together."""
    width = config.head_size + config.head_size_v
    return config.block_size * config.num_kv_heads * width * KV_FORMATS[config.kv_cache_dtype].element_size


def kv_cache_shape(config: CacheGeometry, num_blocks: int) -> tuple[int, ...]:
    """Return the shape of a layer's raw storage for `num_blocks` blocks."""
    if is_in_bytes(config):
        return num_blocks, block_bytes(config)
    rows = (config.block_size, config.num_kv_heads * (1 if config.head_pairs == "none" else 2))
    if config.kv_cache_layout == "HND":
        rows = rows[::-1]
    return 2, num_blocks, *rows, config.head_size


def shape_of_storage(storage: Tensor, config: CacheGeometry, num_blocks: int) -> tuple[int, ...]:
    """Return `kv_cache_shape`, with the rows of a storage in bytes as wide as they are, if that is valid padding."""
    shape = kv_cache_shape(config, num_blocks)
    if len(shape) == storage.dim() == 2 and storage.shape[1] > shape[1] and storage.shape[1] % 16 == 0:
        return num_blocks, storage.shape[1]
    return shape


def kv_cache_dtype(config: CacheGeometry) -> torch.dtype:
    """Return the dtype of a layer's raw storage."""
    return torch.uint8 if is_in_bytes(config) else KV_FORMATS[config.kv_cache_dtype].storage_dtype


def key_value_views(kv_cache: Tensor, config: CacheGeometry) -> tuple[Tensor, Tensor]:
    """Return typed views `[num_blocks, block_size, num_kv_heads, head_size]` and `[..., head_size_v]` of a raw storage.

    The views share the storage's bytes; in `HND` order their block and head strides are swapped. Never a copy.
    """
    fmt = KV_FORMATS[config.kv_cache_dtype]
    if config.head_pairs != "none":
        keys, values = kv_cache.view(fmt.value_dtype).unbind(0)
        first = ("even", "odd").index(config.head_pairs)
        return keys[:, :, first::2], values.unflatten(2, (config.num_kv_heads, 2)).flatten(3)
    if config.head_size == config.head_size_v:
        typed = kv_cache.view(fmt.value_dtype)
        return _logical(typed[0], config), _logical(typed[1], config)
    key_bytes = config.block_size * config.num_kv_heads * config.head_size * fmt.element_size
    key = _part(kv_cache[:, :key_bytes], config.head_size, config, fmt)
    value = _part(kv_cache[:, key_bytes : block_bytes(config)], config.head_size_v, config, fmt)
    return key, value


def _part(bytes_of_part: Tensor, width: int, config: CacheGeometry, fmt: KVFormat) -> Tensor:
    rows = (config.block_size, config.num_kv_heads)
    if config.kv_cache_layout == "HND":
        rows = rows[::-1]
    return _logical(bytes_of_part.view(fmt.value_dtype).unflatten(1, (*rows, width)), config)


def _logical(blocks: Tensor, config: CacheGeometry) -> Tensor:
    return blocks.transpose(1, 2) if config.kv_cache_layout == "HND" else blocks
