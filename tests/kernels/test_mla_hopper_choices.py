"""Which latent steps Hopper's kernels take and how what they split is merged: no GPU needed."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.ptx_emulation import run_ptx
from tests.layers.mla_support import deepseek, random_mla_batch
from vattn.config.device import DeviceInfo
from vattn.quantization.codecs import encode_e2m1

pytest.importorskip("triton")

from vattn.kernels.hopper.mla import launch as mla_launch
from vattn.kernels.hopper.mla import prefill_launch as mla_prefill_launch
from vattn.kernels.hopper.mla import reduce as mla_reduce
from vattn.kernels.hopper.mla import sparse_launch as mla_sparse
from vattn.kernels.hopper.mla.prefill_store import LIMITED_QUOTIENT, NUMBER

HOPPER = DeviceInfo("cuda", (9, 0))


layer = partial(deepseek, backend="TRITON_MLA")


@pytest.mark.parametrize(
    ("changes", "chunks", "runs"),
    [
        ({}, 1, True),
        ({}, 2, False),
        ({"qk_nope_head_dim": 64, "v_head_dim": 64}, 1, True),
        ({"qk_nope_head_dim": 64}, 1, False),
        ({"output_format": "nvfp4"}, 1, True),
    ],
)
def test_prompts(changes: dict[str, Any], chunks: int, runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = layer(**changes)
    monkeypatch.setattr(mla_prefill_launch, "_can_run", lambda c, device: not mla_prefill_launch.refusals(c, HOPPER))
    args = random_mla_batch(config, [70], [90])
    assert mla_prefill_launch.accepts(args, config, 128, chunks) == runs
    assert not mla_prefill_launch.accepts(args, config, 64, chunks)


@pytest.mark.parametrize(
    ("changes", "runs"),
    [
        ({"num_heads": 128}, True),
        ({"num_heads": 16}, False),
        ({"num_heads": 128, "kv_cache_dtype": "fp8_e4m3"}, True),
        ({"num_heads": 8, "kv_cache_dtype": "fp8_e4m3"}, True),
        ({"num_heads": 128, "kv_cache_dtype": "fp8_ds_mla"}, False),
    ],
)
def test_sparse_steps(changes: dict[str, Any], runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = layer(sparse=True, qk_nope_head_dim=16, v_head_dim=16, **changes)
    monkeypatch.setattr(mla_sparse, "_can_run", lambda c, device: not mla_sparse.refusals(c, HOPPER))
    args = random_mla_batch(config, [1, 1], [90, 7], topk=20)
    absorbed = torch.empty(2, config.num_heads, config.head_size)
    assert mla_sparse.accepts(absorbed, args, config) == runs


@pytest.mark.parametrize("splits", [1, 2, 3, 8, 16, 64, 200])
@pytest.mark.parametrize("rows", [16, 1024, 16384])
def test_merges_fit_registers_and_the_device(splits: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[int, dict[str, Any]]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda **given: launched.append((torch.Size(grid).numel(), given))

    monkeypatch.setattr(mla_reduce, "mla_merge_parts_kernel", Kernel())
    mla_reduce.merge_parts(rows, splits, 16, 16, 132, True, output=torch.empty(1, 16, 512))
    ((programs, given),) = launched
    assert given["STEP"] >= min(splits, 64) and given["STEP"] * given["COLUMNS"] <= 2048
    assert 512 % given["COLUMNS"] == 0 and 0 < programs <= min(rows * 512 // given["COLUMNS"], 132 * 16)


def test_results_of_64_rows_leave_by_bulk_copies() -> None:
    cpu = torch.device("cpu")
    assert mla_launch.partial_results(3, 16, 2, cpu)[0].dtype == torch.float32
    partial, stats = mla_launch.partial_results(3, 64, 2, cpu)
    assert partial.shape == (3, 128, 512) and stats.shape == (3, 128, 2) and stats.dtype == torch.float32
    found = mla_launch.result_boxes(torch.empty(5, 128, 512, dtype=torch.bfloat16), partial)
    assert found["output_boxes"].shape == [5 * 128, 512] and found["partial_boxes"].shape == [3 * 128, 512]


@pytest.mark.parametrize(("heads", "together"), [(16, 16), (128, 16), (8, 8), (12, 4), (6, 2), (3, 1)])
def test_heads_of_prompts_side_by_side(heads: int, together: int) -> None:
    assert mla_prefill_launch.heads_together(heads) == together


@pytest.mark.parametrize(
    ("output", "groups", "corrects"),
    [
        ("none", (0, False, False, -1.0, "divide"), False),
        ("fp8_divide", (0, False, False, -1.0, "divide"), True),
        ("fp8_multiply", (0, False, False, -1.0, "divide"), False),
        ("fp8_approximate_divide", (0, False, False, -1.0, "divide"), False),
        ("none", (128, False, True, -1.0, "divide"), True),
        ("none", (16, True, False, -1.0, "divide"), True),
        ("none", (128, False, False, -1.0, "multiply"), False),
        ("none", (128, False, False, 0.5, "divide"), True),
        ("none", (128, False, False, 0.0, "divide"), False),
        ("none", (128, False, False, 1e30, "divide"), False),
    ],
)
def test_which_outputs_of_prompts_are_corrected_products(output: str, groups: Any, corrects: bool) -> None:
    assert mla_prefill_launch.corrects(output, groups) == corrects


def run_own(ptx: str, x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """Run a kernel's own assembly on values and divisors, with reciprocals that are a unit too large; return bits."""
    infinite = divisor == torch.inf
    near = torch.where(divisor == 0, 0.0, torch.nextafter(1 / divisor, torch.full_like(divisor, torch.inf)))
    operands = x, torch.where(infinite, 0.0, divisor), torch.where(infinite, 0.0, near)
    given = {f"${1 + i}": t.expand(x.shape).contiguous().numpy().view(np.uint32) for i, t in enumerate(operands)}
    with np.errstate(all="ignore"):
        return torch.from_numpy(run_ptx(ptx, given)["$0"].view(np.int32))


def limited(x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    return run_own(LIMITED_QUOTIENT.value, x, divisor).view(torch.float32)


@pytest.mark.parametrize("scale", [2.0**-49, 0.013, 1.0, 3.7e9, torch.inf])
def test_limited_products_saturate_and_keep_signs(scale: float) -> None:
    """Infinities, zeros of either sign, NaN, and quotients far beyond what fp32 holds."""
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1e-38, -1e-38, 1e-45, -1e-45, 5.0])
    divisor = torch.tensor(scale)
    codes, wanted = (q.to(torch.float8_e4m3fn) for q in (limited(x, divisor), (x / divisor).clamp(-448, 448)))
    nan = wanted.float().isnan()
    saturated = codes.float().isnan() & ~nan  # torch's conversion does not saturate infinities, the hardware's does
    assert not saturated.any() or bool((limited(x, divisor)[saturated].abs() == torch.inf).all())
    kept = ~nan & ~saturated
    assert torch.equal(codes.view(torch.uint8)[kept], wanted.view(torch.uint8)[kept])
    assert torch.equal(limited(x, divisor).isnan(), (x / divisor).isnan())


def every_number(dtype: torch.dtype) -> torch.Tensor:
    every = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    return every[every.isfinite()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_corrected_products_are_quotients(dtype: torch.dtype) -> None:
    """Of every value by the scales of its group, which no other test has as small or large."""
    every = every_number(dtype)
    for largest in every[:: 997 if dtype == torch.bfloat16 else 1511]:
        step = largest.clamp(min=1e-10) / 448.0
        x = torch.cat((every[every <= largest], -every[every <= largest]))
        for divisor in (step, torch.exp2(step.log2().ceil())):
            found = [q.to(torch.float8_e4m3fn).view(torch.uint8) for q in (limited(x, divisor), x / divisor)]
            assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_of_half_a_byte_are_those_of_quotients(dtype: torch.dtype) -> None:
    """Of every value that is at most seven steps; with the largest step of all values."""
    every = every_number(dtype)
    for scale in (0.013, 7.0, 2.0**-49, 3e13):
        for byte in (0, 1, 9, 40, 57, 90, 126):
            step = torch.tensor(byte, dtype=torch.uint8).view(torch.float8_e4m3fn).float() * torch.tensor(scale)
            x = every if byte == 126 else every[every <= 7 * step]
            x = torch.cat((x, -x))
            wanted = encode_e2m1(x / torch.where(step == 0, torch.inf, step))
            assert torch.equal(run_own(NUMBER.value, x, step), wanted.int())
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0])
    assert run_own(NUMBER.value, special, torch.tensor(2.0)).tolist() == [7, 15, 7, 1]
    assert run_own(NUMBER.value, special.abs(), torch.tensor(torch.nan)).tolist() == [7, 7, 7, 7]


@pytest.mark.parametrize("scale", [0.07, 1e-12, 1e-30, 0.0, -0.07])
def test_hidden_keys_need_a_scale(scale: float) -> None:
    """64 rows at a time hide keys behind a number in units of the scale; other kernels take what has no such number."""
    config = layer(num_heads=128, scale=scale)
    large = scale >= 1e-12
    assert mla_launch.rows_per_program(config, 1) == (64 if large else 32)
    assert mla_launch.groups_of_rows(config, 2) == (4 if large else 8)
    refused = mla_sparse.refusals(config.replace(sparse=True), HOPPER)
    assert [text.split()[0] for text in refused] == ([] if large else ["scale"])
    assert not mla_sparse.refusals(layer(kv_cache_dtype="fp8_e4m3", scale=scale, sparse=True), HOPPER)


def test_caches_are_maps_over_rows_where_blocks_are_whole_rows_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_launch, "_can_run", lambda config, device: True)
    config, pool = layer(), torch.arange(4 * 3 * 64 * 576).short()
    args = random_mla_batch(config, [1, 1], [65, 3])
    absorbed = args.query.new_empty((2, 16, 576))
    assert pool.data_ptr() % 16 == 0
    for rows, gap, start in ((64, 0, 0), (192, 0, 64 * 576), (65, 0, 8), (0, 16, 0), (0, 0, 4)):
        cache = pool.as_strided((3, 64, 576), ((rows or 64) * 576 + gap, 576, 1), start)
        assert mla_launch.rows_apart(cache) == rows
        assert mla_launch.accepts(absorbed, args._replace(kv_cache=cache), config) == bool(rows)
        if rows:
            whole = mla_launch.cached_rows(cache)
            assert whole.shape == (2 * rows + 64, 576) and torch.equal(whole[2 * rows + 5], cache[2, 5])
    huge = torch.empty((), device="meta").as_strided((4, 64, 576), (2**31 // 4 * 576, 576, 1))
    assert mla_launch.rows_apart(huge) == 0, "int32 does not count the rows"
    assert mla_launch.rows_apart(pool.as_strided((1, 64, 576), (7, 576, 1))) == 64
