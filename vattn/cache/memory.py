"""How keys and values, or latents, lie in memory, as far as it decides which kernels can read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

ALIGNED = 16
"""Bytes: the widest load of a thread, and what Hopper's tensor maps want strides to be multiples of."""


@dataclass(frozen=True)
class CacheMemory:
    """What decides which kernels can read the memory of a cache.

    Attributes:
        dense: whether blocks, tokens and heads follow each other without gaps, heads before tokens or after them, of
            keys as of values.
        row_alignment: bytes, up to 16; each row starts at a multiple of it.
        whole_rows: of latents, whether blocks lie a whole number of rows apart.
    """

    dense: bool
    row_alignment: int
    whole_rows: bool = True

    @staticmethod
    def of(key_cache: Tensor, value_cache: Tensor | None = None) -> CacheMemory:
        """Describe keys `[num_blocks, block_size, num_kv_heads, D]` and values, or a latent or packed storage alone.

        Of tensors on meta the first byte of the storage counts as aligned.
        """
        views = [key_cache] if value_cache is None else [key_cache, value_cache]
        starts = 0
        for view in views:
            starts |= int(view.storage_offset()) * view.itemsize if view.is_meta else view.data_ptr()
            for stride, size in zip(view.stride()[:-1], view.shape[:-1], strict=True):
                starts |= stride * view.itemsize if size > 1 else 0
        in_order = [view.is_contiguous() for view in views]
        heads_first = [view.dim() == 4 and view.transpose(1, 2).is_contiguous() for view in views]
        dense = all(in_order) or all(heads_first)
        whole_rows = key_cache.dim() != 3 or key_cache.shape[0] == 1 or key_cache.stride(0) % key_cache.stride(1) == 0
        return CacheMemory(dense, ALIGNED if starts == 0 else min(ALIGNED, starts & -starts), whole_rows)

    def row_refusals(self) -> list[str]:
        """Return why kernels that copy aligned rows in bulk cannot read the cache; empty if they can."""
        found = []
        if self.row_alignment < ALIGNED:
            found.append(f"rows of the cache at multiples of {self.row_alignment} bytes (reads multiples of {ALIGNED})")
        if not self.whole_rows:
            found.append("blocks of the cache that are no whole number of rows apart")
        return found

    def __str__(self) -> str:
        gaps, orders = ("no gaps", "") if self.dense else ("gaps", ", or keys and values in two orders")
        return f"{gaps} between blocks, tokens or heads{orders}, rows at multiples of {self.row_alignment} bytes"
