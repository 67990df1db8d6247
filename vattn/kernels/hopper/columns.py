"""How many columns the kernels made for Hopper multiply for a head, on the host and in device code."""

from __future__ import annotations

import functools

import triton


@triton.constexpr_function
def padded_columns(head_size: int) -> int:
    """Return a head's columns and those of zeros behind them, which tensor maps fill in: 64, 128 or 256 together."""
    return max(64, 1 << (head_size - 1).bit_length())


columns_of = functools.lru_cache(None)(padded_columns)
"""`padded_columns` for launchers, which ask for it several times a call."""


@triton.constexpr_function
def parts_between(first: int, end: int) -> int:
    """Return into how many parts of powers of two columns are split, the largest first."""
    return (end - first).bit_count()


@triton.constexpr_function
def part_start(first: int, end: int, part: int) -> int:
    """Return the first column of such a part, or `end` behind the last."""
    for _ in range(part):
        first += 1 << ((end - first).bit_length() - 1)
    return first
