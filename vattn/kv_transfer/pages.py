"""Copy blocks of a raw storage from and to pages of bytes: all keys of a block, then all values."""

from __future__ import annotations

import torch
from torch import Tensor


def block_axis(storage: Tensor) -> int:
    """Return the block dimension: typed storages are `[2, blocks, ...]`, packed and latent ones `[blocks, ...]`."""
    return 1 if storage.dim() == 5 else 0


def page_bytes(storage: Tensor) -> int:
    """Return the bytes of one block."""
    return storage.numel() * storage.element_size() // storage.shape[block_axis(storage)]


def _words(storage: Tensor) -> Tensor:
    """View a contiguous storage as `[blocks, parts, words]`; words of 8 bytes if blocks consist of them."""
    parts = 2 if storage.dim() == 5 else 1
    flat = storage.view(-1).view(torch.uint8)
    word = torch.int64 if page_bytes(storage) % (8 * parts) == 0 and flat.data_ptr() % 8 == 0 else torch.uint8
    return flat.view(word).view(parts, storage.shape[block_axis(storage)], -1).transpose(0, 1)


def gather_pages(storage: Tensor, block_ids: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the pages of blocks, uint8 `[n, page_bytes]`, on the storage's device.

    Args:
        storage: a contiguous raw storage.
        block_ids: int64 `[n]` on its device.
        out: where to write them; default a new tensor.
    """
    words = _words(storage)
    if out is None:
        out = torch.empty((block_ids.shape[0], page_bytes(storage)), dtype=torch.uint8, device=storage.device)
    torch.index_select(words, 0, block_ids, out=out.view(words.dtype).view(-1, *words.shape[1:]))
    return out


def scatter_pages(storage: Tensor, block_ids: Tensor, pages: Tensor) -> None:
    """Write pages, uint8 `[n, page_bytes]` on the storage's device, into blocks; the inverse of `gather_pages`."""
    words = _words(storage)
    if pages.data_ptr() % words.element_size() or not pages.is_contiguous():
        pages = pages.clone(memory_format=torch.contiguous_format)
    words.index_copy_(0, block_ids, pages.view(words.dtype).view(-1, *words.shape[1:]))
