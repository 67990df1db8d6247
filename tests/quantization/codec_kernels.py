"""Kernels that run the codec's device functions on plain vectors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vattn.kernels.triton.attention.launch import TRITON_DTYPES
from vattn.kernels.triton.common.codec import decode, encode, encode_e2m1, encode_quotient


@triton.jit
def _decode_kernel(
    codes, out, size, FORMAT: tl.constexpr, TARGET: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(codes + index, mask=index < size, other=0)
    tl.store(out + index, decode(raw, FORMAT, TARGET, NATIVE), mask=index < size)


@triton.jit
def _encode_kernel(values, out, size, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values + index, mask=index < size, other=0.0)
    if FORMAT == "e2m1":
        code = encode_e2m1(x).to(tl.uint8)
    else:
        code = encode(x, FORMAT, tl.uint8)
    tl.store(out + index, code, mask=index < size)


def decode_codes(codes: Tensor, fmt: str, target: torch.dtype, native: bool) -> Tensor:
    """Decode uint8 codes."""
    out = torch.empty(codes.shape, dtype=target, device=codes.device)
    grid = (triton.cdiv(codes.numel(), 256),)
    _decode_kernel[grid](codes, out, codes.numel(), fmt, TRITON_DTYPES[target], native, 256)
    return out


def encode_values(values: Tensor, fmt: str) -> Tensor:
    """Encode fp32 values to uint8 codes; `fmt` is a KV format or `"e2m1"`."""
    out = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    _encode_kernel[(triton.cdiv(values.numel(), 1024),)](values, out, values.numel(), fmt, 1024)
    return out


@triton.jit
def _quotient_kernel(values, scales, out, WIDTH: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, WIDTH)[None, :]
    x = tl.load(values + column)
    scale = tl.load(scales + row + tl.zeros((1, 1), tl.int32))
    tl.store(out + row * WIDTH + column, encode_quotient(x, scale, FORMAT, NATIVE))


def encode_quotients(values: Tensor, scales: Tensor, fmt: str, native: bool) -> Tensor:
    """Encode fp32 values `[n]`, n a power of two, under every scale: uint8 `[scales, n]`."""
    out = torch.empty((scales.numel(), values.numel()), dtype=torch.uint8, device=values.device)
    _quotient_kernel[(scales.numel(),)](values, scales, out, values.numel(), fmt, native)
    return out
