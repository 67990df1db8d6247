"""Where a token's key and value, or latent row, lies inside a layer's raw KV storage; stated here only.

A cache is **one raw storage per layer plus a named layout**:

- equal head sizes, `NHD`: `(2, num_blocks, block_size, num_kv_heads, head_size)`;
- equal head sizes, `HND`: `(2, num_blocks, num_kv_heads, block_size, head_size)`;
- unequal head sizes: `(num_blocks, bytes_per_block)` uint8; a block holds all its keys, then all its values, each in
  the layout's order. Rows may be padded at their end, to a multiple of 16 bytes.
- packed formats: `(num_blocks, bytes_per_block)` uint8; a block holds the codes of all its keys, the scales of its
  keys, the codes of its values, the scales of its values, each in the layout's order; padded likewise. Codes and scales
  are separate so that kernels load whole vectors of codes.
- pairs of heads: that of equal head sizes in `NHD` with `2 * num_kv_heads` heads, of which a config with `head_pairs`
  reads the even or the odd keys, and the values of each pair as one row.

Latent attention has one row per token: `(num_blocks, block_size, L + R)` for plain and FP8 formats, and `(num_blocks,
bytes_per_block)` uint8 for packed ones, a block's rows one after the other and padded likewise.

The storage is contiguous. Its dtype is the format's `storage_dtype`: the model's own for plain formats, uint8 for
quantised ones (which `model.to(dtype)` leaves alone). The ops take keys and values as two views of it, or of an
engine's memory (`op_views`), and packed formats as the storage.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from vattn.config.arguments import read_count
from vattn.config.mla import MLAConfig
from vattn.config.typed import typed
from vattn.quantization.formats import KV_FORMATS, PackedPart
from vattn.quantization.mla_formats import MLA_FORMATS

CACHE_BUFFERS = ("kv_cache", "key_cache", "value_cache")
"""Buffers of a layer: what was bound, an engine's keys or a raw storage, and the two views of it that ops take."""


class CacheGeometry(Protocol):
    """What decides the layout of a storage: an `AttentionConfig` or a `vattn.cache.specs.KVCacheSpec`."""

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


class PackedRows(NamedTuple):
    """Keys or values of a packed cache, `[num_blocks, block_size, num_kv_heads, ...]`; views of the raw storage."""

    codes: Tensor
    """uint8, `PackedPart.code_bytes` columns."""

    scales: Tensor | None
    """fp32, fp16, or the bytes of FP8 scales, `PackedPart.num_scales` columns; `None`: the format stores none."""


def is_in_bytes(config: CacheGeometry) -> bool:
    """Return whether the raw storage is `(num_blocks, bytes_per_block)` of uint8."""
    if config.head_pairs != "none":
        return False
    return config.head_size != config.head_size_v or KV_FORMATS[config.kv_cache_dtype].packed


def block_bytes(config: CacheGeometry) -> int:
    """Return the bytes of one block, keys and values together."""
    token = KV_FORMATS[config.kv_cache_dtype].token_bytes(config.head_size, config.head_size_v)
    return config.block_size * config.num_kv_heads * token


@typed
def kv_cache_shape(config: CacheGeometry, num_blocks: int) -> tuple[int, ...]:
    """Return the shape of a layer's raw storage for `num_blocks` blocks."""
    num_blocks = read_count("num_blocks", num_blocks, 0, "count the null block too")
    if is_in_bytes(config):
        return num_blocks, block_bytes(config)
    rows = (config.block_size, config.num_kv_heads * (1 if config.head_pairs == "none" else 2))
    if config.kv_cache_layout == "HND":
        rows = rows[::-1]
    return 2, num_blocks, *rows, config.head_size


def shape_of_storage(storage: Tensor, config: CacheGeometry, num_blocks: int) -> tuple[int, ...]:
    """Return `kv_cache_shape`, with the rows of a storage in bytes as wide as they are, if that is valid padding."""
    return _padded(storage, kv_cache_shape(config, num_blocks))


def _padded(storage: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) == storage.dim() == 2 and storage.shape[1] > shape[1] and storage.shape[1] % 16 == 0:
        return shape[0], storage.shape[1]
    return shape


def kv_cache_dtype(config: CacheGeometry) -> torch.dtype:
    """Return the dtype of a layer's raw storage."""
    return torch.uint8 if is_in_bytes(config) else KV_FORMATS[config.kv_cache_dtype].storage_dtype


def storage_alignment(config: CacheGeometry) -> int:
    """Return the alignment in bytes of the first byte of a storage, within the memory that it is a slice of."""
    fmt = KV_FORMATS[config.kv_cache_dtype]
    if not fmt.packed:
        return fmt.element_size
    return max(1 if part.scale_dtype is None else part.scale_dtype.itemsize for part in fmt.parts)


def num_blocks_of(storage: Tensor, config: CacheGeometry) -> int:
    """Return the blocks of a raw storage; 0 if it has another number of dimensions."""
    axis, dimensions = (0, 2) if is_in_bytes(config) else (1, 5)
    return storage.shape[axis] if storage.dim() == dimensions else 0


def op_views(kv_cache: Tensor, config: CacheGeometry) -> tuple[Tensor, Tensor | None]:
    """Return a raw storage as the ops take it: `key_cache` and `value_cache`, never a copy.

    They are typed views `[num_blocks, block_size, num_kv_heads, head_size]` and `[..., head_size_v]`; in `HND` order
    their strides of tokens and heads are swapped. Of pairs of heads they hold all heads; of packed formats they are the
    storage and `None`.
    """
    fmt = KV_FORMATS[config.kv_cache_dtype]
    if fmt.packed:
        return kv_cache, None
    if not is_in_bytes(config):
        typed = kv_cache.view(fmt.value_dtype)
        if config.kv_cache_layout == "HND":
            typed = typed.transpose(2, 3)
        return typed[0], typed[1]
    key_bytes = config.block_size * config.num_kv_heads * config.head_size * fmt.element_size
    key, value = kv_cache[:, :key_bytes], kv_cache[:, key_bytes : block_bytes(config)]
    return (
        _logical(key.view(fmt.value_dtype), config.head_size, config),
        _logical(value.view(fmt.value_dtype), config.head_size_v, config),
    )


def key_value_views(key_cache: Tensor, value_cache: Tensor | None, config: CacheGeometry) -> tuple[Tensor, Tensor]:
    """Return the keys and values that a config reads of `op_views`, in the dtype of its format; never a copy.

    Of pairs of heads these are the even or odd keys, and the values of each pair as one row. Packed formats have none:
    see `packed_views`.
    """
    assert value_cache is not None
    dtype = KV_FORMATS[config.kv_cache_dtype].value_dtype
    keys, values = key_cache.view(dtype), value_cache.view(dtype)
    if config.head_pairs == "none":
        return keys, values
    first = ("even", "odd").index(config.head_pairs)
    return keys[:, :, first::2], values.unflatten(2, (config.num_kv_heads, 2)).flatten(3)


def separate(views: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Return the same memory as tensors that torch takes for storages of their own; the same ones for the same views.

    A graph that writes into two inputs of one storage copies both for every op; keys and values never overlap.
    """
    key, value = views
    return _own_storage(key), None if value is None else _own_storage(value)


def _own_storage(view: Tensor) -> Tensor:
    if type(view) is not Tensor or view.is_meta:
        return view
    key = (view.data_ptr(), view.shape, view.stride(), view.dtype, view.device)
    found = _separate.get(key)
    if found is not None:
        return found
    with torch.inference_mode(False):
        as_bytes = view.view(torch.uint8) if view.itemsize == 1 else view  # DLPack has no FP8 before torch 2.9.
        made = from_dlpack(to_dlpack(as_bytes.detach())).view(view.dtype)
    if view.numel():
        _separate[key] = made
    return made


_separate: WeakValueDictionary[tuple[object, ...], Tensor] = WeakValueDictionary()
"""Made tensors by what they are views of: layers that share memory must share them, so that graphs know."""


def packed_views(kv_cache: Tensor, config: CacheGeometry) -> tuple[PackedRows, PackedRows]:
    """Return the codes and scales of keys and of values of a packed format as views of a raw storage, never a copy."""
    key, value = KV_FORMATS[config.kv_cache_dtype].parts
    rows = config.block_size * config.num_kv_heads
    middle = rows * key.row_bytes(config.head_size)
    return (
        _packed_rows(kv_cache, 0, key, config.head_size, config),
        _packed_rows(kv_cache, middle, value, config.head_size_v, config),
    )


def _packed_rows(kv_cache: Tensor, start: int, part: PackedPart, width: int, config: CacheGeometry) -> PackedRows:
    count = config.block_size * config.num_kv_heads
    middle = start + count * part.code_bytes(width)
    end = middle + count * part.scale_bytes(width)

    def rows(stored: Tensor) -> Tensor:
        return _logical(stored, stored.shape[1] // count, config)

    codes = rows(kv_cache[:, start:middle])
    if part.scale_dtype is None:
        return PackedRows(codes, None)
    scales = kv_cache[:, middle:end]
    # FP8 scales stay bytes: not every device indexes FP8 tensors.
    return PackedRows(codes, rows(scales.view(part.scale_dtype) if part.scale_dtype.itemsize > 1 else scales))


def _logical(blocks: Tensor, width: int, config: CacheGeometry) -> Tensor:
    """Return `[num_blocks, block_size, num_kv_heads, width]` of blocks `[num_blocks, elements]`."""
    if config.kv_cache_layout == "HND":
        return blocks.unflatten(1, (config.num_kv_heads, config.block_size, width)).transpose(1, 2)
    return blocks.unflatten(1, (config.block_size, config.num_kv_heads, width))


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
    return _padded(storage, mla_cache_shape(config, num_blocks))


def row_view(kv_cache: Tensor, config: MLAConfig) -> Tensor:
    """Return `[num_blocks, block_size, columns]` of a raw storage, never a copy; columns are bytes of packed rows."""
    if not config.packed:
        return kv_cache
    content = config.block_size * config.row_bytes
    return kv_cache[:, :content].unflatten(1, (config.block_size, config.row_bytes))
