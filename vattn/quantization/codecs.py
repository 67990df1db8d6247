"""Encode and decode every storage format of `vattn.quantization.formats`, in plain torch ops on any device.

Bit-exact to the stated layout, free of syncs and traceable by `torch.compile`. Callers have checked shapes and scales.
**Dequantised = stored * scale**.

Rules that hold for every format:

- Values are divided by their scale in fp32 and rounded to nearest, ties to even.
- FP8 casts clamp first: above the range an eager CUDA cast gives NaN, CPU and compiled casts saturate.
- NaN stays NaN under a given scale, infinities saturate to the largest finite value.
- A dynamic FP8 or int8 row or group that holds NaN or an infinity has a non-finite scale and dequantises to NaN
  throughout. NaN has no int8 code: it is stored as 0.
- A group of an MX format that holds NaN has the e8m0 scale NaN.
- Dynamic FP8 scales are at least `MIN_ABSMAX / 448`, so rows of zeros are stored as zeros under a finite scale.
- An NVFP4 group stores zeros if its e4m3 block scale rounds to zero. e2m1 has no NaN: a NaN makes the block scale NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.quantization.formats import (
    FP4_E2M1_MAX,
    FP8_E4M3_MAX,
    KV_FORMATS,
    NVFP4_GROUP_SIZE,
    OUTPUT_FORMATS,
    OutputFormat,
)

MIN_ABSMAX = 1e-10
"""Absolute maxima of dynamic FP8 rows and groups are raised to this before they become a scale."""

_ROW_TILE, _COLUMN_TILE = 128, 4


def to_e4m3(x: Tensor) -> Tensor:
    """Return e4m3 values: saturating, nearest even, NaN stays NaN."""
    return x.clamp(-FP8_E4M3_MAX, FP8_E4M3_MAX).to(torch.float8_e4m3fn)


def divide(x: Tensor, divisor: float) -> Tensor:
    """Divide by a number, correctly rounded: eager CUDA would multiply by its rounded reciprocal."""
    return x / x.new_full((), divisor)


def _over_heads(scale: Tensor, num_heads: int) -> Tensor:
    """Reshape one value or one per head to broadcast over `[..., num_heads, width]`."""
    return scale.reshape(()) if scale.numel() == 1 else scale.reshape(num_heads, 1)


def encode_kv(x: Tensor, fmt_name: str, scale: Tensor | None = None) -> Tensor:
    """Encode keys or values `[..., K, D]` as a cache of format `fmt_name` stores them, same shape.

    Args:
        x: any float dtype; values in the format's FP8 dtype are returned as they are.
        fmt_name: canonical name in `KV_FORMATS`.
        scale: fp32, 1 value or `[K]` for quantised formats, `None` for plain ones.

    Returns:
        Tensor of the format's `value_dtype` (view it as `storage_dtype` for the raw storage).

    Example:
        >>> import torch
        >>> stored = encode_kv(torch.tensor([[[1.0, 1000.0]]]), "fp8_e4m3", torch.tensor([0.5]))
        >>> decode_kv(stored, "fp8_e4m3", torch.tensor([0.5]))
        tensor([[[  1., 224.]]])
    """
    fmt = KV_FORMATS[fmt_name]
    if x.dtype == fmt.value_dtype:
        return x
    if scale is None:
        return x.to(fmt.value_dtype)
    quotient = x.float() / _over_heads(scale, x.shape[-2])
    return quotient.clamp(-fmt.max_value, fmt.max_value).to(fmt.value_dtype)


def decode_kv(stored: Tensor, fmt_name: str, scale: Tensor | None = None) -> Tensor:
    """Return the fp32 values of stored keys or values `[..., K, D]`; `stored` may be viewed as `uint8`."""
    fmt = KV_FORMATS[fmt_name]
    values = stored.view(fmt.value_dtype).float() if fmt.quantised else stored.float()
    return values if scale is None else values * _over_heads(scale, stored.shape[-2])


def encode_query(query: Tensor, q_scale: Tensor, num_kv_heads: int, arithmetic: str = "divide") -> Tensor:
    """Quantise a query `[T, H, D]` to e4m3 with one value or one per KV head.

    Args:
        arithmetic: name in `OUTPUT_DIVISIONS`: divided by the scale, or multiplied by its reciprocal.
    """
    scale = _over_query_heads(q_scale, query.shape[1], num_kv_heads)
    wide = query.float()
    return to_e4m3(wide * scale.reciprocal() if _multiplies(arithmetic) else wide / scale)


def load_query(query: Tensor, q_scale: Tensor | None, num_kv_heads: int, query_load: str) -> Tensor:
    """Return the fp32 values of a query `[T, H, D]` as it is passed to the op, rounded by `query_load`.

    Args:
        q_scale: `None` for a query that is not quantised.
        query_load: `query_load` of `vattn.AttentionConfig`.
    """
    if query_load != "plain" and q_scale is not None:
        query = encode_query(query, q_scale, num_kv_heads, query_load)
    return decode_query(query, q_scale, num_kv_heads)


def decode_query(query: Tensor, q_scale: Tensor | None, num_kv_heads: int) -> Tensor:
    """Return the fp32 values of a query `[T, H, D]`; `q_scale=None`: it is not quantised."""
    if q_scale is None:
        return query.float()
    return query.float() * _over_query_heads(q_scale, query.shape[1], num_kv_heads)


def _over_query_heads(q_scale: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    if q_scale.numel() != 1:
        q_scale = q_scale.repeat_interleave(num_heads // num_kv_heads)
    return _over_heads(q_scale, num_heads)


def ceil_power_of_two(scale: Tensor) -> Tensor:
    """Round positive normal fp32 values up to powers of two, exactly; infinity and NaN stay."""
    # Adding the mantissa mask carries into the exponent exactly when some mantissa bit is set.
    rounded = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(scale.isnan(), scale, rounded)


def quant_fp8_static(input: Tensor, scale: Tensor) -> Tensor:
    """Quantise `[T, N]` to e4m3 by one given fp32 scale."""
    return to_e4m3(input.float() / scale.reshape(())).contiguous()


def quant_fp8_per_token(input: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise `[T, N]` to e4m3 with one scale a row; returns codes and fp32 scales `[T, 1]`."""
    return _quant_fp8_groups(input, input.shape[1], power_of_two=False)


def quant_fp8_group(
    input: Tensor, group_size: int, power_of_two: bool = False, column_major: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantise `[T, N]` to e4m3 with one scale per `group_size` columns.

    Args:
        power_of_two: round scales up to powers of two.
        column_major: strides of the scales are `(1, T)` instead of `(N // group_size, 1)`.

    Returns:
        Codes `[T, N]` and fp32 scales `[T, N // group_size]`.
    """
    codes, scales = _quant_fp8_groups(input, group_size, power_of_two)
    return codes, _column_major(scales) if column_major else scales


def _column_major(scales: Tensor) -> Tensor:
    columns = scales.new_empty((scales.shape[1], scales.shape[0]))
    return columns.copy_(scales.t()).t()


def _quant_fp8_groups(input: Tensor, group_size: int, power_of_two: bool) -> tuple[Tensor, Tensor]:
    fmt = OutputFormat("", torch.float8_e4m3fn, group_size=group_size, power_of_two=power_of_two)
    return _quant_groups(input, fmt, "divide", None, "scale")


def _quant_groups(
    input: Tensor, fmt: OutputFormat, arithmetic: str, min_scale: float | None, floor: str
) -> tuple[Tensor, Tensor]:
    groups = _grouped(input, input.shape[1] if fmt.group_size < 0 else fmt.group_size)
    scales, step, multiplies = scales_of(groups.abs().amax(dim=-1), fmt, arithmetic, min_scale, floor)
    scaled = groups * step.unsqueeze(-1) if multiplies else groups / step.unsqueeze(-1)
    codes = to_int8(scaled) if fmt.container is torch.int8 else to_e4m3(scaled)
    return codes.flatten(1).contiguous(), scales.contiguous()


def scales_of(
    largest: Tensor, fmt: OutputFormat, arithmetic: str = "divide", min_scale: float | None = None, floor: str = "scale"
) -> tuple[Tensor, Tensor, bool]:
    """Return the scales that a format stores for groups with some maxima, and what their values are scaled by.

    The latter are multiplied with (`True`) or divided by (`False`). Other arguments: see `quantise_output`.
    """
    if fmt.exponents:
        return _mx_scales(largest, fmt)
    if floor == "maximum":
        return *_factors(largest, fmt.limit, arithmetic, min_scale or 0.0), True
    scales, multiplies = _fp32_scales(largest, fmt, min_scale, floor), _multiplies(arithmetic)
    return scales, scales.reciprocal() if multiplies else scales, multiplies


def _fp32_scales(largest: Tensor, fmt: OutputFormat, min_scale: float | None, floor: str) -> Tensor:
    scales = divide(largest.clamp(min=MIN_ABSMAX) if min_scale is None else largest, fmt.limit)
    if min_scale is not None and floor == "scale":
        scales = scales.clamp(min=min_scale)
    elif min_scale is not None and floor == "zero":
        scales = torch.where(scales == 0, min_scale, scales)
    if fmt.power_of_two:
        scales = ceil_power_of_two(scales)
    return scales.clamp(min=min_scale) if floor == "rounded_scale" else scales


def _factors(largest: Tensor, limit: float, arithmetic: str, min_absmax: float) -> tuple[Tensor, Tensor]:
    """Return stored scales and factors, as `OUTPUT_FACTORS` says."""
    largest, name = largest.clamp(min=min_absmax), arithmetic.removeprefix("approximate_")
    factor = largest.reciprocal() * limit if name.startswith("factor") else torch.full_like(largest, limit) / largest
    return factor.reciprocal() if name.endswith("inverse") else divide(largest, limit), factor


def _mx_scales(largest: Tensor, fmt: OutputFormat) -> tuple[Tensor, Tensor, bool]:
    """Return bytes of e8m0 scales, and what values are multiplied by (`True`), or divided by (`False`).

    fp32 arithmetic need not have subnormal numbers: under a scale of 2**-127, the least, "ceil" stores values as they
    are, which are zeros then, and "floor" divides by 2**-126.
    """
    if fmt.exponents == "floor":
        exponent = ((largest.view(torch.int32) >> 23) - 8).clamp(min=0)
        exponent = torch.where(largest.isnan(), 255, exponent)
        step = (exponent.clamp(min=1) << 23).view(torch.float32)
    else:
        scale = divide(largest, fmt.limit)
        bits = scale.view(torch.int32)
        # Adding the mantissa mask carries into the exponent exactly when some mantissa bit is set.
        exponent = torch.where(bits <= 1 << 22, 0, ((bits + 0x7FFFFF) >> 23).clamp(max=254))
        power = torch.where(exponent == 254, 2.0**-127, ((254 - exponent) << 23).view(torch.float32))
        step = torch.where(scale.isnan(), scale, torch.where(exponent == 0, 1.0, power))
        exponent = torch.where(scale.isnan(), 255, exponent)
    return exponent.to(torch.uint8), step, fmt.exponents == "ceil"


def to_int8(x: Tensor) -> Tensor:
    """Return int8 values: saturating, nearest even; NaN becomes 0."""
    return torch.where(x.isnan(), 0.0, x).round().clamp(-128, 127).to(torch.int8)


def _multiplies(arithmetic: str) -> bool:
    # Divisions that are approximate on CUDA are correctly rounded here.
    return arithmetic.removeprefix("approximate_") == "multiply"


def _grouped(input: Tensor, group_size: int) -> Tensor:
    """View `[T, N]` as fp32 `[T, N // group_size, group_size]`."""
    return input.float().reshape(input.shape[0], input.shape[1] // group_size, group_size)


def encode_e2m1(x: Tensor) -> Tensor:
    """Return the 4-bit codes (sign, 2 exponent bits, 1 mantissa bit) of fp32 values as `uint8`, one code a byte.

    Rounds to nearest, ties to even; saturates at 6; NaN becomes +6, as e2m1 has no NaN; the sign of zero is kept.
    """
    size = x.abs()
    code = (size > 0.25).to(torch.uint8) + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code = code + (size > 2.5) + (size >= 3.5) + (size > 5.0)
    return torch.where(x.isnan(), 7, code + 8 * x.signbit().to(torch.uint8)).to(torch.uint8)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Return the fp32 values of 4-bit codes given one a byte: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    exponent, mantissa = (codes.int() >> 1) & 3, codes.int() & 1
    quarters = torch.where(exponent == 0, 2 * mantissa, (2 + mantissa) << exponent)
    size = quarters.float() * 0.25
    return torch.where((codes & 8) == 0, size, -size)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Pack codes `[..., N]` into bytes `[..., N // 2]`, the even column in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Undo `pack_e2m1`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def quant_nvfp4(input: Tensor, scale: Tensor, swizzled: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise `[T, N]` to NVFP4: e2m1 values, one e4m3 block scale per 16 columns, one given fp32 global scale.

    Dequantised value = e2m1 value * block scale * `scale`.

    Returns:
        Packed codes `[T, N // 2]` uint8, and block scales e4m3 `[T, N // 16]`, or swizzled and padded with zeros.
    """
    scale = scale.reshape(())
    groups = _grouped(input, NVFP4_GROUP_SIZE)
    block_scales = to_e4m3(divide(groups.abs().amax(dim=-1), FP4_E2M1_MAX) / scale)
    step = block_scales.float() * scale
    # A block scale of zero stores zeros: dividing by infinity keeps their signs.
    step = torch.where(step == 0, torch.inf, step).unsqueeze(-1)
    packed = pack_e2m1(encode_e2m1((groups / step).flatten(1)))
    return packed.contiguous(), swizzle_block_scales(block_scales) if swizzled else block_scales.contiguous()


def swizzle_block_scales(scales: Tensor) -> Tensor:
    """Reorder e4m3 scales `[rows, columns]` into 128 x 4 tiles, padded with zeros to whole tiles.

    Tiles are in row-major order. Inside a tile of 512 bytes, row r and column c are at byte
    `(r % 32) * 16 + (r // 32) * 4 + c`. The result is contiguous, of the padded two-dimensional shape.
    """
    rows, columns = scales.shape
    row_tiles, column_tiles = -(-rows // _ROW_TILE), -(-columns // _COLUMN_TILE)
    padding = (0, column_tiles * _COLUMN_TILE - columns, 0, row_tiles * _ROW_TILE - rows)
    padded = torch.nn.functional.pad(scales.view(torch.uint8), padding)
    tiles = padded.reshape(row_tiles, 4, 32, column_tiles, _COLUMN_TILE).permute(0, 3, 2, 1, 4)
    return tiles.reshape(padded.shape).contiguous().view(scales.dtype)


def unswizzle_block_scales(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """Undo `swizzle_block_scales` and drop its padding: returns `[rows, columns]`."""
    row_tiles, column_tiles = swizzled.shape[0] // _ROW_TILE, swizzled.shape[1] // _COLUMN_TILE
    tiles = swizzled.view(torch.uint8).reshape(row_tiles, column_tiles, 32, 4, _COLUMN_TILE).permute(0, 3, 2, 1, 4)
    return tiles.reshape(swizzled.shape)[:rows, :columns].contiguous().view(swizzled.dtype)


def dequant_nvfp4(packed: Tensor, block_scales: Tensor, scale: Tensor, swizzled: bool = False) -> Tensor:
    """Return the fp32 `[T, N]` of packed e2m1 codes `[T, N // 2]`, their block scales and the global scale."""
    values = _grouped(decode_e2m1(unpack_e2m1(packed)), NVFP4_GROUP_SIZE)
    if swizzled:
        block_scales = unswizzle_block_scales(block_scales, values.shape[0], values.shape[1])
    step = block_scales.float() * scale.reshape(())
    return (values * step.unsqueeze(-1)).flatten(1)


def _format(fmt: OutputFormat | str) -> OutputFormat:
    return OUTPUT_FORMATS[fmt] if isinstance(fmt, str) else fmt


def quantise_output(
    x: Tensor,
    fmt: OutputFormat | str,
    output: Tensor,
    output_block_scale: Tensor | None = None,
    output_scale: Tensor | None = None,
    arithmetic: str = "divide",
    min_scale: float | None = None,
    floor: str = "scale",
) -> None:
    """Write attention results in an output format.

    Args:
        x: `[T, H, V]`, rounded to the model dtype already, in any float dtype.
        fmt: an output format or its name; groups run over the flattened row of `H * V` columns.
        output: `[T, H, fmt.output_columns(V)]` of the format's container; written whole.
        output_block_scale: of shape `fmt.block_scale_shape(T, H * V)`; written whole, padding included.
        output_scale: fp32, one value, for formats with a static scale.
        arithmetic, min_scale, floor: `output_arithmetic`, `output_min_scale` and `output_floor` of
            `vattn.AttentionConfig`.
    """
    fmt = _format(fmt)
    if fmt.container is None:
        output.copy_(x)
        return
    codes, scales = quantise_rows(x.flatten(1), fmt, output_scale, arithmetic, min_scale, floor)
    output.copy_(codes.view(output.shape))
    if output_block_scale is not None and scales is not None:
        output_block_scale.copy_(scales)


def quantise_rows(
    rows: Tensor,
    fmt: OutputFormat,
    output_scale: Tensor | None = None,
    arithmetic: str = "divide",
    min_scale: float | None = None,
    floor: str = "scale",
) -> tuple[Tensor, Tensor | None]:
    """Return codes of rows `[T, N]` in a quantised output format, and the scales that it computes, if any.

    Arguments: see `quantise_output`.
    """
    if output_scale is None:
        codes, scales = _quant_groups(rows, fmt, arithmetic, min_scale, floor)
        return codes, _column_major(scales) if fmt.column_major else scales
    if fmt.container is torch.uint8:
        return quant_nvfp4(rows, output_scale, fmt.swizzled)
    if _multiplies(arithmetic):
        return to_e4m3(rows.float() * output_scale.reshape(())).contiguous(), None
    return quant_fp8_static(rows, output_scale), None


def dequantise_output(
    output: Tensor,
    fmt: OutputFormat | str,
    output_block_scale: Tensor | None = None,
    output_scale: Tensor | None = None,
) -> Tensor:
    """Return the fp32 values `[T, H, V]` of an attention output."""
    fmt = _format(fmt)
    if fmt.container is None:
        return output.float()
    num_tokens, num_heads = output.shape[:2]
    if fmt.container is torch.uint8:
        assert output_block_scale is not None and output_scale is not None
        rows = dequant_nvfp4(output.flatten(1), output_block_scale, output_scale, fmt.swizzled)
        return rows.view(num_tokens, num_heads, 2 * output.shape[2])
    scale = output_scale if fmt.static_scale else output_block_scale
    assert scale is not None
    if fmt.static_scale:
        return output.float() * scale.reshape(())
    rows = output.flatten(1).float().unflatten(1, (scale.shape[1], -1))
    scale = scale.view(torch.float8_e8m0fnu).float() if fmt.exponents else scale
    return (rows * scale.unsqueeze(-1)).reshape(output.shape)
