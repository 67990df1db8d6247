"""What kernels are compiled for to write an output format: constants of the device functions in `epilogue`."""

from __future__ import annotations

from typing import Any

import torch

from vattn.config.attention import AttentionConfig
from vattn.quantization.formats import OUTPUT_FACTORS, OUTPUT_FORMATS


def needs_finishing(config: Any) -> bool:
    """Return whether only the finishing kernel makes the codes and scales of an output: int8, MX and factors."""
    fmt = OUTPUT_FORMATS[config.output_format]
    return bool(fmt.exponents) or fmt.container is torch.int8 or scale_kind(config) in OUTPUT_FACTORS


def groups_fit_heads(config: AttentionConfig) -> bool:
    """Return whether a kernel with whole heads per program can compute the scales of the output format."""
    fmt = OUTPUT_FORMATS[config.output_format]
    fits = fmt.group_size > 0 and not fmt.swizzled and config.head_size_v % fmt.group_size == 0
    return fits and not needs_finishing(config)


def scale_kind(config: Any) -> str:
    """Return SCALES of `computed_scales` for a config of attention."""
    exponents, factor = OUTPUT_FORMATS[config.output_format].exponents, config.output_arithmetic
    if exponents:
        return f"mx_{exponents}"
    if factor.removeprefix("approximate_") in OUTPUT_FACTORS:
        return str(factor.removeprefix("approximate_"))
    if OUTPUT_FORMATS[config.output_format].power_of_two:
        return "floored_power_of_two" if config.output_floor == "rounded_scale" else "power_of_two"
    return "zero_replaced" if config.output_floor == "zero" else "plain"


def group_constants(config: AttentionConfig) -> tuple[Any, ...]:
    """Return GROUPS of `group_scales` and `group_codes`.

    Columns of a group (0: none), NVFP4 or not, SCALES of `dynamic_scale`, least scale (negative: the default),
    arithmetic; "corrected" is "divide" by corrected products.
    """
    fmt = OUTPUT_FORMATS[config.output_format]
    least = -1.0 if config.output_min_scale is None else config.output_min_scale
    size = fmt.group_size if groups_fit_heads(config) else 0
    arithmetic = config.output_arithmetic
    return size, fmt.static_scale, scale_kind(config), least, "corrected" if arithmetic == "divide" else arithmetic


def row_output(config: AttentionConfig) -> str:
    """Return `OUTPUT` of `store_rows` for a config.

    Formats with computed scales are stored in the model dtype, for the finishing kernel.
    """
    if config.output_format != "fp8_static":
        return "none"
    arithmetic = config.output_arithmetic
    return "fp8_" + ("multiply" if arithmetic.endswith("multiply") else arithmetic)
