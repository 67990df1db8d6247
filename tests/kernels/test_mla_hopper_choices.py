"""Which latent steps Hopper's kernels take and how what they split is merged: no GPU needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.layers.mla_support import make_mla_config, random_mla_batch
from vattn.config.device import DeviceInfo

pytest.importorskip("triton")

from vattn.kernels.hopper.mla import launch as mla_launch
from vattn.kernels.hopper.mla import prefill_launch as mla_prefill_launch
from vattn.kernels.hopper.mla import reduce as mla_reduce
from vattn.kernels.hopper.mla import sparse_launch as mla_sparse

HOPPER = DeviceInfo("cuda", (9, 0))


def layer(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "num_heads": 16, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512,
        "dtype": "bfloat16", "block_size": 64, "backend": "TRITON_MLA", **changes,
    }  # fmt: skip
    return make_mla_config(**values)


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


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.float().double()


def limited(x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """What `limited_quotients` computes, with a reciprocal that is a unit too large; fp64 emulates FMA."""
    infinite = divisor == torch.inf
    near = torch.nextafter(1 / divisor, torch.full_like(divisor, torch.inf))
    reciprocal = torch.where(infinite, 0.0, near).double()
    by, wide = torch.where(infinite, 0.0, divisor).double(), x.double()
    product = rounded(wide * reciprocal)
    least = torch.where(product.isnan(), 2.0**40, product.abs().clamp(max=2.0**40))
    product = torch.copysign(least, product)
    excess = rounded(product * by - wide)
    return rounded(product - excess * reciprocal).float()


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


def numbers(x: torch.Tensor) -> torch.Tensor:
    """The e2m1 codes of quotients, by the three lines that `numbers_of` takes."""
    magnitude = torch.fmin(x.abs(), torch.tensor(6.0)).double()
    lines = (2 * magnitude + 12582912.0, magnitude + 12582914.0, 0.5 * magnitude + 12582916.0)
    lowest = torch.stack([line.float() for line in lines]).amin(0).view(torch.int32) & 7
    return lowest | ((x.view(torch.int32) >> 28) & 8)


def test_codes_of_half_a_byte_lie_on_the_lowest_of_three_lines() -> None:
    edges = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0])
    up, down = (torch.nextafter(edges, torch.full_like(edges, end)) for end in (torch.inf, -torch.inf))
    x = torch.cat((edges, up, down[1:], torch.linspace(0, 8, 4001), torch.tensor([3e38, torch.inf])))
    x = torch.cat((x, -x))
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    away = (x.abs().clamp(max=6.0).double()[:, None] - values.double()).abs()
    nearest = away.amin(1, keepdim=True) == away
    # Of two that are as near the even code is taken.
    wanted = torch.where(nearest, torch.arange(8) % 2 * 8 + torch.arange(8), 99).amin(1) % 8
    assert torch.equal(numbers(x), wanted.int() | (torch.signbit(x).int() << 3))
    assert numbers(torch.tensor([torch.nan])).item() == 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_corrected_products_are_quotients(dtype: torch.dtype) -> None:
    """Of every value by the scales of its group, which no other test has as small or large, and of maxima by six."""
    every = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    every = every[every.isfinite()]
    six = torch.tensor(6.0)
    sixth = rounded(every.double() * rounded(1 / six.double()))
    better = rounded(rounded(every.double() - sixth * 6) * rounded(1 / six.double()) + sixth).float()
    normal = every / 6 >= 2.0**-100
    assert torch.equal(better[normal], (every / 6)[normal]) and bool((better[~normal] < 2.0**-99).all())
    for largest in every[:: 997 if dtype == torch.bfloat16 else 1511]:
        step = largest.clamp(min=1e-10) / 448.0
        x = torch.cat((every[every <= largest], -every[every <= largest]))
        for divisor in (step, torch.exp2(step.log2().ceil())):
            found = [q.to(torch.float8_e4m3fn).view(torch.uint8) for q in (limited(x, divisor), x / divisor)]
            assert torch.equal(*found)


def codes_of_products(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """What `numbers_of` computes, with a reciprocal that is a unit too large."""
    near = torch.nextafter(1 / step, torch.full_like(step, torch.inf))
    reciprocal, by, wide = torch.where(step == 0, 0.0, near).double(), step.double(), x.double()
    product = rounded(wide * reciprocal)
    size = rounded(product - rounded(product * by - wide) * reciprocal).abs()
    lowest = torch.full_like(x, 12582919.0)
    for line in (2 * size + 12582912.0, size + 12582914.0, 0.5 * size + 12582916.0):
        lowest = torch.fmin(lowest, line.float())
    return (lowest.view(torch.int32) & 7) | ((product.float().view(torch.int32) >> 28) & 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_of_half_a_byte_are_those_of_quotients(dtype: torch.dtype) -> None:
    """Of every value that is at most seven steps; with the largest step of all values."""
    every = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    every = every[every.isfinite()]
    for scale in (0.013, 7.0, 2.0**-49, 3e13):
        for byte in (0, 1, 9, 40, 57, 90, 126):
            step = torch.tensor(byte, dtype=torch.uint8).view(torch.float8_e4m3fn).float() * torch.tensor(scale)
            x = every if byte == 126 else every[every <= 7 * step]
            x = torch.cat((x, -x))
            assert torch.equal(codes_of_products(x, step), numbers(x / torch.where(step == 0, torch.inf, step)))
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0])
    assert codes_of_products(special, torch.tensor(2.0)).tolist() == [7, 15, 7, 1]
    assert codes_of_products(special, torch.tensor(torch.nan)).tolist() == [7, 7, 7, 7]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_groups_are_quotients(dtype: torch.dtype) -> None:
    """What `fp8_scales` computes, of every magnitude and of the least that there is."""
    every = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    every = torch.cat((every[every.isfinite()], torch.tensor([1e-10])))
    by = rounded(1 / torch.tensor(448.0).double())
    product = rounded(every.double() * by)
    assert torch.equal(rounded(rounded(every.double() - product * 448) * by + product).float(), every / 448)


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
