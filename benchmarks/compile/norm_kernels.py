"""The residual sum, RMSNorm and static FP8 quantiser between two products: Inductor's kernel beside a written one.

    python -m benchmarks.compile.norm_kernels --json out.json

Each is captured in a CUDA graph and replayed in turn. "No norm" leaves the norm out: what a kernel of this size takes
at least. A pass for norms would gain the difference of the first and the third, twice a layer.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.harness import add_row, machine, parser_of, time_in_turn
from benchmarks.models.decoder import RMSNorm
from benchmarks.models.quantisers import E4M3, static

SETS = 8
"""Sets of inputs, one call each: weights and rows stay in the L2 cache, as behind a product."""


@triton.jit
def norm_kernel(x, residual, weight, scale, total, codes, N: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, N)
    place = row * N + columns
    summed = (tl.load(x + place).to(tl.float32) + tl.load(residual + place).to(tl.float32)).to(tl.bfloat16)
    tl.store(total + place, summed)
    wide = summed.to(tl.float32)
    norm = (wide * tl.rsqrt(tl.sum(wide * wide) / N + 1e-5)).to(tl.bfloat16) * tl.load(weight + columns)
    made = tl.clamp(norm.to(tl.float32) / tl.load(scale), -448.0, 448.0)
    tl.store(codes + place, made.to(tl.float8e4nv))


def written(norm: RMSNorm, x: Tensor, residual: Tensor, scale: Tensor, warps: int) -> tuple[Tensor, Tensor]:
    """Return the sum and the codes by one program a row."""
    total, codes = torch.empty_like(x), torch.empty_like(x, dtype=E4M3)
    norm_kernel[(len(x),)](x, residual, norm.weight, scale, total, codes, x.shape[1], num_warps=warps)
    return total, codes


def by_torch(norm: RMSNorm, x: Tensor, residual: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum and the codes."""
    total = x + residual
    return total, static(norm(total), scale)[0]


def without_norm(norm: RMSNorm, x: Tensor, residual: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum and its codes."""
    total = x + residual
    return total, static(total * norm.weight, scale)[0]


def run(rows: int, columns: int) -> dict[str, Any]:
    """Time all kernels at one size, microseconds a call."""
    norm, scale = RMSNorm(columns).cuda(), torch.tensor(0.02, device="cuda")
    sets = [[torch.randn(rows, columns, device="cuda").bfloat16() for _ in range(2)] for _ in range(SETS)]
    functions = {
        "inductor": torch.compile(by_torch, dynamic=False),
        "inductor, tuned": torch.compile(by_torch, dynamic=False, options={"coordinate_descent_tuning": True}),
        "no norm": torch.compile(without_norm, dynamic=False),
        **{f"written, {n} warps": (lambda *a, n=n: written(*a, warps=n)) for n in (4, 8, 16)},
    }
    with torch.no_grad():
        calls = {
            name: [lambda f=function, x=x, r=residual: f(norm, x, r, scale) for x, residual in sets]
            for name, function in functions.items()
        }
        codes = {name: each[0]()[1].view(torch.uint8) for name, each in calls.items()}
        times, failed = time_in_turn(calls)
    differing = {name: float((made != codes["inductor"]).float().mean()) for name, made in codes.items()}
    return {"rows": rows, "columns": columns, "us": times, "codes_differing": differing, "failed": failed}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 128])
    args = parser.parse_args()
    result = machine()
    for rows in args.rows:
        add_row(result, run(rows, args.columns), args.json)


if __name__ == "__main__":
    main()
