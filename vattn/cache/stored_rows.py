"""Stored keys and values of every format, plain and packed, in one form: codes, and scales where a format stores them.

What backends in plain torch and the reference read and write; kernels have their own codecs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.cache.layout import PackedRows, key_value_views, packed_views
from vattn.config.attention import AttentionConfig
from vattn.quantization.codecs import decode_kv, encode_kv
from vattn.quantization.formats import KV_FORMATS
from vattn.quantization.packed import decode_rows, encode_rows


def stored_views(
    key_cache: Tensor, value_cache: Tensor | None, config: AttentionConfig
) -> tuple[PackedRows, PackedRows]:
    """Return keys and values `[num_blocks, block_size, K, ...]` as views of what the ops take; FP8 as bytes.

    Not every torch indexes FP8 tensors on every device; bytes always work.
    """
    fmt = KV_FORMATS[config.kv_cache_dtype]
    if fmt.packed:
        return packed_views(key_cache, config)
    key, value = key_value_views(key_cache, value_cache, config)
    if fmt.quantised:
        key, value = key.view(torch.uint8), value.view(torch.uint8)
    return PackedRows(key, None), PackedRows(value, None)


def encode_stored(x: Tensor, config: AttentionConfig, of_values: bool, scale: Tensor | None) -> PackedRows:
    """Return new keys or values `[..., K, width]` as `stored_views` has them; `scale` is the given one."""
    fmt = KV_FORMATS[config.kv_cache_dtype]
    if fmt.packed:
        return PackedRows(*encode_rows(x, fmt.name, of_values, scale))
    stored = encode_kv(x, fmt.name, scale)
    return PackedRows(stored.view(torch.uint8) if fmt.quantised else stored, None)


def decode_stored(
    rows: PackedRows, config: AttentionConfig, of_values: bool, scale: Tensor | None, rotated: bool = False
) -> Tensor:
    """Return the fp32 keys or values `[..., K, width]` of stored rows.

    Args:
        scale: the given one.
        rotated: leave rows of a rotated format in the basis in which they are stored
        (`vattn.quantization.packed.hadamard`).
    """
    fmt = KV_FORMATS[config.kv_cache_dtype]
    if fmt.packed:
        width = config.head_size_v if of_values else config.head_size
        return decode_rows(rows.codes, rows.scales, fmt.name, of_values, width, scale, rotated)
    return decode_kv(rows.codes, fmt.name, scale)


def take(rows: PackedRows, *index: Tensor) -> PackedRows:
    """Return the rows at places of the leading dimensions."""
    return PackedRows(rows.codes[index], None if rows.scales is None else rows.scales[index])
