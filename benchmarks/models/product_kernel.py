"""A plain Triton product of quantised rows and an e4m3 weight, for formats that cuBLAS takes on other GPUs only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.models.quantisers import GROUPS


@triton.jit
def _e2m1(code):
    exponent, odd = (code >> 1) & 3, (code & 1).to(tl.float32)
    power = (1 << exponent.to(tl.int32)).to(tl.float32)
    size = tl.where(exponent == 0, 0.5 * odd, (2.0 + odd) * power * 0.25)
    return tl.where(code >= 8, -size, size)


@triton.jit
def product_kernel(
    codes, scales, factor, weight, weight_scale, output, rows, outputs,
    N: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr, EXPONENTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    parts: tl.constexpr = BLOCK_N // GROUP if BLOCK_N > GROUP else 1
    total = tl.zeros([BLOCK_M, BLOCK_O], tl.float32)
    for start in range(0, N, BLOCK_N):
        if PACKED:
            columns = start // 2 + tl.arange(0, BLOCK_N // 2)[None, :]
            pair = tl.load(codes + m * (N // 2) + columns, m < rows, 0)
            x = tl.reshape(tl.join(_e2m1(pair & 15), _e2m1(pair >> 4)), [BLOCK_M, BLOCK_N])
        else:
            columns = start + tl.arange(0, BLOCK_N)[None, :]
            x = tl.load(codes + m * N + columns, m < rows).to(tl.float32)
        groups = start // GROUP + tl.arange(0, parts)[None, :]
        step = tl.load(scales + m * (N // GROUP) + groups, m < rows).to(tl.float32)
        if EXPONENTS:
            step = tl.exp2(step - 127.0)
        x = tl.reshape(x, [BLOCK_M, parts, BLOCK_N // parts]) * step[:, :, None]
        x = tl.reshape(x, [BLOCK_M, BLOCK_N]).to(tl.bfloat16)
        w = tl.load(weight + o[None, :] * N + start + tl.arange(0, BLOCK_N)[:, None])
        total = tl.dot(x, w.to(tl.bfloat16), total)
    total *= tl.load(factor) * tl.load(weight_scale)
    tl.store(output + m * outputs + o[None, :], total.to(tl.bfloat16), m < rows)


def launch(name: str, codes: Tensor, scales: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Run the kernel; arguments as those of `quantisers.product`."""
    rows, (outputs, columns) = codes.shape[0], weight.shape
    output = codes.new_empty((rows, outputs), dtype=torch.bfloat16)
    factor = scale if name == "nvfp4" else torch.ones_like(scale)
    block_m = 16 if rows <= 16 else 32
    product_kernel[(outputs // 32, triton.cdiv(rows, block_m))](
        codes, scales.contiguous(), factor, weight, weight_scale, output, rows, outputs, columns,
        GROUPS.get(name, columns), name == "nvfp4", name == "mx", block_m, 32, 128, num_warps=4, num_stages=4,
    )  # fmt: skip
    return output
