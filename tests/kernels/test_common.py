"""Device code of all kernels: visibility and its bounds against the reference, the epilogue's lowerings each other."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from tests.support import make_config
from vattn.config.attention import AttentionConfig
from vattn.kernels.triton.common.epilogue import group_codes, nvfp4_codes
from vattn.kernels.triton.common.mask import full_range, key_range, visible
from vattn.ops.reference.mask import visible_mask


@triton.jit
def _mask_kernel(
    out, bounds, ranges, num_ranges, q_first, q_last, seq_len, causal, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CAUSALITY: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, LOOKBACK: tl.constexpr, MM: tl.constexpr,
):  # fmt: skip
    q = q_first + tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, KEYS)[None, :]
    sees = visible(q, k, seq_len, causal, ranges, num_ranges, CAUSALITY, WINDOW, CHUNK, LOOKBACK, MM)
    tl.store(out + tl.arange(0, ROWS)[:, None] * KEYS + k, sees.to(tl.int32))
    low, high = key_range(q_first, q_last, seq_len, causal, CAUSALITY, WINDOW, CHUNK, LOOKBACK, MM)
    full_low, full_high = full_range(q_first, q_last, seq_len, causal, CAUSALITY, WINDOW, CHUNK, LOOKBACK)
    tl.store(bounds, low)
    tl.store(bounds + 1, high)
    tl.store(bounds + 2, full_low)
    tl.store(bounds + 3, full_high)


def configs() -> st.SearchStrategy[AttentionConfig]:
    def build(causality: str, window: int | None, lookback: int | None, mm: str) -> AttentionConfig:
        if window is None or lookback is None or lookback >= window:
            lookback = None
        return make_config(causality=causality, sliding_window=window, chunk_lookback=lookback, mm_prefix=mm)

    return st.builds(
        build,
        st.sampled_from(["causal", "bidirectional", "per_request"]),
        st.none() | st.integers(1, 20),
        st.none() | st.integers(0, 2),
        st.sampled_from(["none", "none", "full", "clamped"]),
    )


@given(
    configs(),
    st.integers(0, 30),
    st.integers(1, 16),
    st.booleans(),
    st.lists(st.integers(0, 33), min_size=4, max_size=4),
)
def test_visibility_and_bounds(
    config: AttentionConfig, seq_len: int, query_len: int, causal: bool, ends: list[int]
) -> None:
    ranges = torch.tensor([ends[:2], ends[2:]], dtype=torch.int32)
    expected = visible_mask(config, query_len, seq_len, causal=causal, mm_ranges=ranges)
    out, bounds = torch.full((16, 32), -1, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    q_first = seq_len - query_len
    _mask_kernel[(1,)](
        out, bounds, ranges, 2, q_first, seq_len - 1, seq_len, int(causal), 16, 32, config.causality,
        config.sliding_window or 0, config.chunk_size or 0, config.chunk_lookback or 0, config.mm_prefix,
    )  # fmt: skip
    got = out[:query_len].bool()
    assert torch.equal(got[:, :seq_len], expected)
    assert not got[:, seq_len:].any()
    low, high, full_low, full_high = bounds.tolist()
    seen = expected.any(dim=0).nonzero().flatten().tolist()
    assert all(low <= key < high for key in seen)
    assert low >= 0 and high <= seq_len
    if config.mm_prefix == "none":
        assert bool(expected[:, full_low : max(full_low, full_high)].all())
        if seen and q_first >= 0:
            # Windows and chunks skip tiles: nothing outside of what is seen is loaded.
            assert (low, high) == (seen[0], seen[-1] + 1)


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
