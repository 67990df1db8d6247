"""The lowerings of the output epilogue that are made for many values against those made for few."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from vattn.kernels.triton.common.epilogue import group_codes, nvfp4_codes


@triton.jit
def codes_kernel(values, steps, codes, COUNT: tl.constexpr, MANY: tl.constexpr):
    """Quantise rows of COUNT values under a step of their own. Grid: eight rows each."""
    row = tl.program_id(0) * 8 + tl.arange(0, 8)
    places = row[:, None] * COUNT + tl.arange(0, COUNT)[None, :]
    tl.store(codes + places, nvfp4_codes(tl.load(values + places), tl.load(steps + row)[:, None], False, MANY))


@triton.jit
def group_codes_kernel(values, steps, codes, COUNT: tl.constexpr, FP4: tl.constexpr, ARITHMETIC: tl.constexpr):
    """Quantise rows of COUNT values, a group each. Grid: eight rows each."""
    row = tl.program_id(0) * 8 + tl.arange(0, 8)
    places = row[:, None] * COUNT + tl.arange(0, COUNT)[None, :]
    GROUPS: tl.constexpr = (16, FP4, False, -1.0, ARITHMETIC)
    tl.store(codes + places, group_codes(tl.load(values + places), tl.load(steps + row)[:, None], GROUPS).to(tl.int32))


def rows_and_steps() -> tuple[torch.Tensor, torch.Tensor]:
    """Ties, both zeros, infinities, NaN and steps that reciprocals cannot serve included."""
    generator = torch.Generator().manual_seed(3)
    ties = torch.tensor(
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.0, 6.0, 7.0, torch.inf, torch.nan, 1e-30, 1e30, 0.5, 4.0]
    )
    special = torch.cat(
        [ties, -ties, torch.nextafter(ties, torch.tensor(9.0)), torch.nextafter(ties, torch.tensor(-9.0))]
    )
    values = torch.cat([special[None], torch.randn(6, 64, generator=generator) * 3])
    steps = torch.tensor([1.0, 0.37, 3e-5, 1.7e4, 1e-20, torch.inf, 1e30, 2.0**-126, 0.4375])
    rows = values[None] * torch.where(steps.isinf(), 1.0, steps)[:, None, None]
    rows = torch.cat([rows, torch.zeros(len(steps), 1, 64)], 1).reshape(-1, 64).contiguous()
    return rows, steps.repeat_interleave(len(values) + 1)


def test_nvfp4_codes_of_many_values_are_those_of_few() -> None:
    rows, each = rows_and_steps()
    found = []
    for many in (False, True):
        codes = torch.full(rows.shape, -1, dtype=torch.int32, device="cpu")
        codes_kernel[(len(rows) // 8,)](rows, each, codes, COUNT=64, MANY=many)
        found.append(codes.cpu())
    assert torch.equal(*found)
    assert set(found[0].unique().tolist()) == set(range(16))


@pytest.mark.parametrize("fp4", [True, False], ids=["nvfp4", "fp8"])
def test_corrected_products_are_the_same_codes(fp4: bool) -> None:
    rows, each = rows_and_steps()
    found = []
    for arithmetic in ("divide", "corrected"):
        codes = torch.full(rows.shape, -1, dtype=torch.int32)
        group_codes_kernel[(len(rows) // 8,)](rows, each, codes, COUNT=64, FP4=fp4, ARITHMETIC=arithmetic)
        found.append(codes if fp4 else torch.where(codes & 0x7F == 0x7F, 0x7F, codes))
    assert torch.equal(*found)
