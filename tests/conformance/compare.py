"""Run one attention request on one backend and compare every byte it wrote with the reference.

How near is near: errors are taken per row and head, relative to the row, so that one wrong row cannot hide in a batch.

- fp32 differs by the order of sums: 2e-5 leaves a factor of ten over what 500 keys give.
- fp16 and bf16 round the weights before the second product and the result after it, half a unit in the last place each
  (2^-12 and 2^-9 of the row): four times their sum.
- A quantised output may miss the reference by half a step of its format on top.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import vattn.ops.schemas  # noqa: F401  registers the ops
from tests.support import Batch, unchanged
from vattn.backends import selector
from vattn.cache.stored_rows import stored_views
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo
from vattn.errors import UnsupportedRequestError
from vattn.ops.arguments import AttentionArgs, CacheUpdateArgs
from vattn.ops.reference import attention as reference
from vattn.quantization.codecs import dequantise_output, quantise_output, unswizzle_block_scales
from vattn.quantization.formats import (
    FP4_E2M1_MAX,
    KV_FORMATS,
    MODEL_DTYPES,
    NVFP4_GROUP_SIZE,
    OUTPUT_FORMATS,
    OutputFormat,
)

TOLERANCE = {"float32": 2e-5, "float16": 2.0**-9, "bfloat16": 2.0**-6}
"""Relative L2 error of one row of one head, by model dtype."""

LSE_TOLERANCE = {"float32": 2e-5, "float16": 5e-4, "bfloat16": 5e-4}
"""Absolute error of a log-sum-exp per unit of its size, at least 1; scores are fp32 sums in every dtype."""

PEAK = 6.0
"""How far one element's error may lie above the root mean square of its row's."""

OUTPUTS = ("output", "output_block_scale", "lse")


class Mismatch(AssertionError):
    """A backend's result differs from the reference's."""


def call(args: tuple) -> None:
    """Call the op that takes these arguments."""
    if isinstance(args, CacheUpdateArgs):
        torch.ops.vattn.kv_cache_update(*args)
    elif isinstance(args, AttentionArgs):
        torch.ops.vattn.attention(*args)
    else:
        torch.ops.vattn.varlen_attention(*args)


def refusal(config: AttentionConfig, device: torch.device | str) -> list[str]:
    """Return the reasons of the backend that the config names."""
    return selector.get_backend(config.backend).reasons(config, DeviceInfo.of(device))


def check_refused(args: tuple, reasons: list[str]) -> None:
    """Require the error of our own class that gives every reason, and nothing written."""
    with unchanged(args), pytest.raises(UnsupportedRequestError) as caught:
        call(args)
    missing = [reason for reason in reasons if reason not in str(caught.value)]
    if missing:
        raise Mismatch(f"the error does not name {missing}: {caught.value}")


def on_cpu(batch: Batch) -> Batch:
    """Copy a batch to the CPU, outputs included."""

    def moved(tensor: Tensor) -> Tensor:
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return copy.copy_(tensor)

    fields = {name: moved(t) for name, t in batch.args._asdict().items() if isinstance(t, Tensor)}
    return replace(batch, args=batch.args._replace(**fields))


def run_and_compare(batch: Batch, expected: tuple[Tensor, Tensor] | None = None) -> bool:
    """Run a batch on the backend that its config names.

    Returns:
        Whether the backend accepted it; a refusal is checked to be one.

    Raises:
        AssertionError: the result differs from the reference (`Mismatch`), or an input was written to.
    """
    result = run_on_backend(batch)
    if result is None:
        return False
    compare(result, *(result.expected() if expected is None else expected))
    return True


def run_on_backend(batch: Batch) -> Batch | None:
    """Run a batch and return it on the CPU, `None` if the backend refuses it as it should.

    Raises:
        AssertionError: an input was written to.
    """
    reasons = refusal(batch.config, batch.args.query.device)
    if reasons:
        check_refused(batch.args, reasons)
        return None
    with unchanged(batch.args._replace(**dict.fromkeys(OUTPUTS))):
        call(batch.args)
    return on_cpu(batch)


def largest_error(result: Batch, out: Tensor) -> float:
    """Return the largest relative L2 error of one row of one head, what a quantised output stands for included.

    Rows that cancel out count as large as `_compare_rows` takes them, so that errors compare with its tolerance.
    """
    config, args = result.config, result.args
    fmt = OUTPUT_FORMATS[config.output_format]
    got = args.output.float()
    if fmt.container is not None:
        scale = args.output_scale
        if fmt.name == "fp8_static" and config.output_arithmetic == "multiply":
            scale = scale.reciprocal()
        got = dequantise_output(args.output, fmt, args.output_block_scale, scale)
    size = out.norm(dim=-1) + _floor(1.0, out.shape[-1] ** 0.5)
    error = (got - out).norm(dim=-1) / size
    return float(error.max()) if error.numel() else 0.0


def compare(
    result: Batch, out: Tensor, lse: Tensor, tolerance: float | None = None, lse_tolerance: float | None = None
) -> None:
    """Raise Mismatch if the outputs of a batch are not near the reference's fp32 `out [T, H, V]` and `lse [T, H]`.

    Args:
        tolerance, lse_tolerance: instead of `TOLERANCE` and `LSE_TOLERANCE` of the model dtype.
    """
    config, args = result.config, result.args
    tolerance = tolerance or _row_tolerance(config)
    _compare_lse(args.lse, lse, lse_tolerance or _lse_tolerance(config))
    padding = args.output[int(args.query_start_loc[-1]) :]
    if bool(padding.view(torch.uint8).any()):
        raise Mismatch("output: a padding row is not zero")
    fmt = OUTPUT_FORMATS[config.output_format]
    if fmt.container is None:
        _compare_rows(args.output.float(), out, tolerance)
        return
    ideal = replace(result, args=args._replace(output=torch.empty_like(args.output), **_empty_scales(args)))
    rounded = out.to(MODEL_DTYPES[config.dtype])
    variant = (config.output_arithmetic, config.output_min_scale, config.output_floor)
    quantise_output(rounded, fmt, ideal.args.output, ideal.args.output_block_scale, args.output_scale, *variant)
    _compare_scales(args.output_block_scale, ideal.args.output_block_scale, fmt, config, out.shape[0], tolerance)
    _compare_codes(result, out, fmt, tolerance)


FP8_WEIGHTS = 2.0**-4
"""Relative L2 error of one row of one head where softmax weights are rounded to e4m3, each by half a step at most."""

FP8_SCORES = 2.0**-9
"""Absolute error of a log-sum-exp whose scores Hopper's FP8 products summed, which keep 14 bits."""


def _in_fp8(config: AttentionConfig) -> bool:
    """Return whether the named backend may compute a request in FP8."""
    if config.backend == "auto" or config.kv_cache_dtype != "fp8_e4m3":
        return False
    return selector.get_backend(config.backend).capabilities.fp8_weights


def _row_tolerance(config: AttentionConfig) -> float:
    return max(TOLERANCE[config.dtype], FP8_WEIGHTS if _in_fp8(config) else 0.0)


def _lse_tolerance(config: AttentionConfig) -> float:
    """Return the tolerance of a log-sum-exp.

    Rotated queries and centroids are no longer 16-bit numbers; rounding them to fp16 moves scores by 2^-11. Weights
    that are rounded before they are summed cost half a step each.
    """
    key = KV_FORMATS[config.kv_cache_dtype].key
    rotated = key is not None and key.rotation != "none" and config.dtype != "float32"
    rounded = config.backend != "auto" and selector.get_backend(config.backend).capabilities.rounded_lse
    # Queries are rounded once more where scales are multiplied into them.
    steps = 2 if config.query_scale != "none" or config.kv_scale != "none" else 1
    half_a_step = steps * torch.finfo(MODEL_DTYPES[config.dtype]).eps / 2
    usual = max(LSE_TOLERANCE[config.dtype], FP8_SCORES if _in_fp8(config) else 0.0)
    return max(usual + (1e-3 if rotated else 0.0), half_a_step if rounded else 0.0)


def _empty_scales(args: tuple) -> dict[str, Tensor]:
    scales = args.output_block_scale
    return {} if scales is None else {"output_block_scale": torch.empty_like(scales)}


def _compare_lse(got: Tensor | None, expected: Tensor, tolerance: float) -> None:
    if got is None:
        return
    allowed = tolerance * expected.abs().clamp(min=1)
    wrong = ~((got == expected) | ((got - expected).abs() <= allowed))
    _require(wrong, "lse", got, expected)


def _compare_rows(got: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (got - expected).norm(dim=-1)
    wrong = ~(error <= tolerance * expected.norm(dim=-1) + _floor(tolerance, expected.shape[-1] ** 0.5))
    _require(wrong, "output", got, expected)
    empty = (expected == 0).all(dim=-1)
    _require(empty & (got != 0).any(dim=-1), "output of a row that sees nothing", got, expected)


def _floor(tolerance: float, size: float) -> float:
    """Return the absolute error that rounding at the size of single weights may leave in a row that cancels out."""
    return 1e-2 * tolerance * size


def _compare_scales(
    got: Tensor | None,
    expected: Tensor | None,
    fmt: OutputFormat,
    config: AttentionConfig,
    rows: int,
    row_tolerance: float,
) -> None:
    if got is None or expected is None:
        return
    if fmt.swizzled:
        groups = config.num_heads * config.head_size_v // NVFP4_GROUP_SIZE
        got, expected = _unswizzled(got, rows, groups), _unswizzled(expected, rows, groups)
    if fmt.exponents:
        got, expected = got.view(torch.float8_e8m0fnu), expected.view(torch.float8_e8m0fnu)
    got, expected = got.float(), expected.float()
    tolerance = PEAK * row_tolerance
    if fmt.container is torch.uint8:
        tolerance += 0.125  # neighbouring e4m3 values
    wrong = ~((got - expected).abs() <= tolerance * expected + (2.0**-9 if fmt.container is torch.uint8 else 0))
    if fmt.power_of_two or fmt.exponents:
        ratio = got / expected
        wrong = ~((ratio == 1) | (ratio == 2) | (ratio == 0.5))
        if float((ratio != 1).float().mean()) > 0.25:
            raise Mismatch(f"output_block_scale: {int((ratio != 1).sum())} of {ratio.numel()} off by a factor of two")
    _require(wrong, "output_block_scale", got, expected)


def _unswizzled(scales: Tensor, rows: int, groups: int) -> Tensor:
    padded = unswizzle_block_scales(scales, scales.shape[0], scales.shape[1]).view(torch.uint8)
    padding = padded.clone()
    padding[:rows, :groups] = 0
    if bool(padding.any()):
        raise Mismatch("output_block_scale: its padding is not zero")
    return unswizzle_block_scales(scales, rows, groups)


def _compare_codes(result: Batch, out: Tensor, fmt: OutputFormat, tolerance: float) -> None:
    """Compare what the codes stand for under the scales that were written; those are compared by themselves."""
    config, args = result.config, result.args
    if fmt.name == "fp8_static" and config.output_arithmetic == "multiply":
        args = args._replace(output_scale=args.output_scale.reciprocal())
        result = replace(result, args=args)
    got = dequantise_output(args.output, fmt, args.output_block_scale, args.output_scale)
    step, largest = _step_and_limit(result, out, fmt)
    expected = torch.minimum(torch.maximum(out, -largest), largest)
    size = out.square().mean(dim=-1, keepdim=True).sqrt()
    noise = PEAK * (tolerance * size + torch.where(size > 0, _floor(tolerance, 1.0), 0.0))
    _require(~((got - expected).abs() <= 0.5 * step + noise), f"output ({fmt.name})", got, expected)


def _step_and_limit(result: Batch, out: Tensor, fmt: OutputFormat) -> tuple[Tensor, Tensor]:
    """Return, for each element, the distance of the format's values around it and the largest value it can take."""
    args = result.args
    if fmt.container is torch.uint8:
        scales = args.output_block_scale
        if fmt.swizzled:
            scales = unswizzle_block_scales(scales, out.shape[0], out.flatten(1).shape[1] // NVFP4_GROUP_SIZE)
        scale = scales.float() * args.output_scale
    else:
        scale = args.output_scale.view(1, 1) if fmt.static_scale else args.output_block_scale
        scale = scale.view(torch.float8_e8m0fnu).float() if fmt.exponents else scale
        scale = scale.expand(out.shape[0], -1)
    per_column = scale.repeat_interleave(out.flatten(1).shape[1] // scale.shape[1], dim=1).view(out.shape)
    units = (out / per_column.clamp(min=1e-30)).abs()
    if fmt.container is torch.uint8:
        # Values of e2m1: 0 to 2 by halves, to 4 by ones, then 6.
        step = torch.where(units < 2, 0.5, torch.where(units < 4, 1.0, 2.0))
        return step * per_column, FP4_E2M1_MAX * per_column
    if fmt.container is torch.int8:
        return per_column, fmt.limit * per_column
    exponent = torch.log2(units.clamp(2.0**-6, 448.0)).floor()
    return torch.exp2(exponent - 3) * per_column, 448.0 * per_column


def _require(wrong: Tensor, name: str, got: Tensor, expected: Tensor) -> None:
    if bool(wrong.any()):
        index = tuple(wrong.nonzero()[0].tolist())
        raise Mismatch(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} wrong, first at {list(index)}: "
            f"got {_short(got[index])}, expected {_short(expected[index])}"
        )


def _short(tensor: Tensor) -> str:
    return ", ".join(f"{x:.6g}" for x in tensor.flatten()[:4].tolist()) + (", ..." if tensor.numel() > 4 else "")


def compare_cache_update(args: CacheUpdateArgs, config: AttentionConfig) -> bool:
    """Run `vattn::kv_cache_update` on the config's backend and compare the whole cache bitwise with the reference.

    Which NaN is stored for a NaN is up to the hardware.

    Returns:
        Whether the backend accepted it; a refusal is checked to be one.

    Raises:
        AssertionError: a byte differs (`Mismatch`), or an input was written to.
    """
    reasons = refusal(config, args.key.device)
    if reasons:
        check_refused(args, reasons)
        return False
    expected = CacheUpdateArgs(
        *(t.detach().cpu().clone() if isinstance(t, Tensor) and not t.is_meta else t for t in args)
    )
    with unchanged(args._replace(key_cache=None, value_cache=None)):
        call(args)
    reference.kv_cache_update(expected, config)
    caches = zip(*(stored_views(each.key_cache, each.value_cache, config) for each in (args, expected)), strict=True)
    for name, rows in zip(("keys", "values"), caches, strict=True):
        for got, want in zip(*rows, strict=True):
            if got is not None:
                got = got.cpu()
                _require(~_same_stored(got, want, config), f"stored {name}", got.float(), want.float())
    return True


def _same_stored(got: Tensor, want: Tensor, config: AttentionConfig) -> Tensor:
    """Compare bits, but for NaN."""
    fmt = KV_FORMATS[config.kv_cache_dtype]
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.itemsize]
    same = got.view(bits) == want.view(bits)
    typed = fmt.value_dtype if fmt.quantised and not fmt.packed else got.dtype
    if typed.is_floating_point:
        same |= got.view(typed).float().isnan() & want.view(typed).float().isnan()
    return same
