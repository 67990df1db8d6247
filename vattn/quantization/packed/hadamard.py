"""Hadamard rotations of rows, queries and outputs.

`"hadamard"`: `y = H x` with the Sylvester matrix `H` of the row's width, a power of two, unnormalised (entries 1 and
-1). `"signed_hadamard"`: `y = H S x`, where `S` multiplies by fixed signs, so that an offset that rows share is spread
over all columns. `"block_hadamard"`: the same with other signs, on each block of columns, as wide as the largest power
of two that divides the row.

`H` is summed as butterflies: columns 1 apart first, then 2, 4 and so on, `(a, b) -> (a + b, a - b)`, each in fp32.

Rotations are orthogonal up to the block's width n: `q . k = (H S q) . (H S k) / n`. So attention rotates
queries instead of keys, and outputs instead of values; the results are equal but for the order of fp32 sums. Rotated
keys and values are decoded as `2^-c y` with `c = ceil(log2(n) / 2)`, near the magnitude of the row, so that 16-bit
floats hold them; queries and outputs carry the rest of `1 / n`. All these factors are powers of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.quantization.formats import KV_FORMATS


def block_width(width: int, rotation: str) -> int:
    """Return the columns of one transform; 1 without rotation."""
    if rotation == "none":
        return 1
    return width & -width if rotation == "block_hadamard" else width


def row_shift(width: int, rotation: str) -> int:
    """Return c: decoded rows in the rotated basis are `2^-c` of the transform."""
    return block_width(width, rotation).bit_length() // 2


def query_factor(width: int, rotation: str) -> float:
    """Return the power of two that scales rotated queries, and outputs when they are rotated back."""
    block = block_width(width, rotation)
    return 2.0 ** row_shift(width, rotation) / block


def flips(width: int, rotation: str, device: torch.device | str = "cpu") -> Tensor:
    """Return the signs of a rotation, fp32 `[width]` of 1 and -1.

    `"block_hadamard"`: -1 where bit 31 of `(column + 1) * 0x9E3779B9` is set. `"signed_hadamard"`: the Rudin-Shapiro
    sequence, -1 where an odd number of neighbouring bits of the column are both set. No column of its transform is
    larger than `sqrt(2 * width)`, so that neither a constant nor any row of `H` collects in one column.
    """
    column = torch.arange(width, dtype=torch.int64, device=device)
    if rotation == "block_hadamard":
        return 1.0 - 2.0 * (((column + 1) * 0x9E3779B9 >> 31) & 1).float()
    pairs = column & (column >> 1)
    for shift in (8, 4, 2, 1):
        pairs = pairs ^ (pairs >> shift)
    return 1.0 - 2.0 * (pairs & 1).float()


SIGNS = {"signed_hadamard": 1, "block_hadamard": 2}
"""By rotation, which signs kernels flip; 0 is none."""


def butterflies(x: Tensor, block: int) -> Tensor:
    """Return the unnormalised Hadamard transform of every block of `block` columns, in the stated order."""
    step = 1
    while step < block:
        a, b = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        step *= 2
    return x


def rotate(x: Tensor, rotation: str) -> Tensor:
    """Return rotated fp32 rows `[..., width]`, not scaled."""
    if rotation in SIGNS:
        x = x * flips(x.shape[-1], rotation, x.device)
    return butterflies(x, block_width(x.shape[-1], rotation))


def unrotate(x: Tensor, rotation: str) -> Tensor:
    """Undo `rotate` on fp32 rows `[..., width]` that are scaled by `2^-c`."""
    if rotation == "none":
        return x
    x = butterflies(x, block_width(x.shape[-1], rotation)) * query_factor(x.shape[-1], rotation)
    return x * flips(x.shape[-1], rotation, x.device) if rotation in SIGNS else x


def rotate_query(query: Tensor, fmt_name: str) -> Tensor:
    """Return fp32 queries `[..., D]` rotated for products with stored keys."""
    fmt = KV_FORMATS[fmt_name]
    if fmt.key is None or fmt.key.rotation == "none":
        return query
    return rotate(query, fmt.key.rotation) * query_factor(query.shape[-1], fmt.key.rotation)


def rotate_back(out: Tensor, fmt_name: str) -> Tensor:
    """Rotate fp32 outputs `[..., V]`, sums of stored values, back."""
    fmt = KV_FORMATS[fmt_name]
    return out if fmt.value is None else unrotate(out, fmt.value.rotation)
