"""Every format against codes computed from its definition in Python, by exhaustive search for the nearest value."""

from __future__ import annotations

import math
from functools import lru_cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support import poisoned_outputs, relative_l2
from vattn.quantization import codecs as qz
from vattn.quantization.formats import KV_FORMATS, MODEL_DTYPES, OUTPUT_FORMATS

FP8_NAMES = ("fp8_e4m3", "fp8_e5m2")
BITS = {"fp8_e4m3": (4, 3, 7), "fp8_e5m2": (5, 2, 15), "e2m1": (2, 1, 1)}
"""Exponent bits, mantissa bits, exponent bias."""

SCALES = (1.0, 0.37, 0.0113, 7.3e-5, 123.4)
finite = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)


def value_of(code: int, name: str) -> float:
    """What a code means by the definition of its format; NaN for the codes that hold no finite value."""
    exponent_bits, mantissa_bits, bias = BITS[name]
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    sign = -1.0 if code >> (mantissa_bits + exponent_bits) else 1.0
    if name == "fp8_e4m3" and exponent == 15 and mantissa == 7:
        return math.nan
    if name == "fp8_e5m2" and exponent == 31:
        return sign * math.inf if mantissa == 0 else math.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


@lru_cache
def magnitudes(name: str) -> tuple[float, ...]:
    """The finite magnitudes of a format; the index of each is its code."""
    codes = range(1 << (sum(BITS[name][:2])))
    return tuple(value for value in (value_of(code, name) for code in codes) if math.isfinite(value))


def nearest_code(x: float, name: str) -> int:
    """The code of the finite value nearest to x, ties to the even code: the oracle of every encoder."""
    if math.isnan(x):
        return 0x7 if name == "e2m1" else 0x7F
    table, size = magnitudes(name), abs(x)
    code = len(table) - 1 if size >= table[-1] else min(range(len(table)), key=lambda c: (abs(table[c] - size), c & 1))
    return code | (1 << sum(BITS[name][:2]) if math.copysign(1.0, x) < 0 else 0)


def codes_of(stored: Tensor) -> list[int]:
    return stored.contiguous().view(torch.uint8).flatten().tolist()


def fp8(codes: Tensor, name: str) -> Tensor:
    return codes.to(torch.uint8).view(KV_FORMATS[name].value_dtype)


@pytest.mark.parametrize("name", FP8_NAMES)
def test_every_fp8_code_means_what_its_definition_says(name: str) -> None:
    got = qz.decode_kv(torch.arange(256, dtype=torch.uint8).view(256, 1, 1), name, torch.tensor([1.0])).flatten()
    expected = torch.tensor([value_of(code, name) for code in range(256)])
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", [1.0, 1.5, 0.375])
@pytest.mark.parametrize("name", FP8_NAMES)
def test_fp8_midpoints_round_to_even_and_their_neighbours_to_the_nearer(name: str, scale: float) -> None:
    table = torch.tensor(magnitudes(name), dtype=torch.float64)
    middle = ((table[1:] + table[:-1]) / 2 * scale).float()  # exact: these scales have two significant bits
    low = torch.arange(len(table) - 1)
    below, above = torch.nextafter(middle, torch.zeros(())), torch.nextafter(middle, torch.tensor(torch.inf))
    for x, expected in ((middle, low + (low & 1)), (below, low), (above, low + 1)):
        assert codes_of(qz.encode_kv(x.view(-1, 1, 1), name, torch.tensor([scale]))) == expected.tolist()
        assert codes_of(qz.encode_kv(-x.view(-1, 1, 1), name, torch.tensor([scale]))) == (expected + 128).tolist()


@pytest.mark.parametrize("name", FP8_NAMES)
@given(values=st.lists(finite, min_size=1, max_size=30), scale=st.sampled_from(SCALES))
def test_fp8_takes_the_nearest_value_of_the_fp32_quotient(name: str, values: list[float], scale: float) -> None:
    x, s = torch.tensor(values).view(-1, 1, 1), torch.tensor([scale])
    expected = [nearest_code(quotient, name) for quotient in (x / s).flatten().tolist()]
    assert codes_of(qz.encode_kv(x, name, s)) == expected


@pytest.mark.parametrize("name", FP8_NAMES)
def test_fp8_saturates_and_keeps_nan(name: str) -> None:
    largest = KV_FORMATS[name].max_value
    x = torch.tensor([math.inf, -math.inf, 1e38, -1e38, largest, math.nan, 0.0, -0.0]).view(-1, 1, 1)
    got = qz.decode_kv(qz.encode_kv(x, name, torch.tensor([1.0])), name, torch.tensor([1.0])).flatten()
    assert got[:5].tolist() == [largest, -largest, largest, -largest, largest]
    assert got[5].isnan()
    assert got[6:].signbit().tolist() == [False, True]


def test_values_already_in_the_cache_dtype_are_stored_as_they_are() -> None:
    codes = torch.arange(256).view(64, 2, 2)
    stored = fp8(codes, "fp8_e4m3")
    assert codes_of(qz.encode_kv(stored, "fp8_e4m3", torch.tensor([0.01]))) == codes.flatten().tolist()


@pytest.mark.parametrize("name", FP8_NAMES)
def test_scales_per_head_apply_to_their_head(name: str) -> None:
    x, scale = torch.randn(5, 3, 8), torch.tensor([0.013, 0.37, 1.9])
    stored = qz.encode_kv(x, name, scale)
    for head in range(3):
        one = qz.encode_kv(x[:, head : head + 1], name, scale[head : head + 1])
        assert codes_of(stored[:, head]) == codes_of(one)
    decoded = qz.decode_kv(stored, name, scale)
    torch.testing.assert_close(decoded, stored.float() * scale.view(1, 3, 1), rtol=0, atol=0)
    # Half a step of the mantissa, plus the absolute step of subnormals.
    bound = {"fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3}[name]
    assert ((decoded - x).abs() <= bound * x.abs() + 2.0**-9 * scale.view(1, 3, 1)).all()


@pytest.mark.parametrize("name", list(MODEL_DTYPES))
def test_plain_formats_only_convert(name: str) -> None:
    x = torch.randn(4, 2, 8)
    stored = qz.encode_kv(x, name)
    assert stored.dtype == MODEL_DTYPES[name]
    torch.testing.assert_close(qz.decode_kv(stored, name), x.to(MODEL_DTYPES[name]).float(), rtol=0, atol=0)


def test_query_scales_belong_to_the_heads_of_a_kv_head() -> None:
    query, scale = torch.randn(3, 6, 8), torch.tensor([0.011, 0.3])
    codes = qz.encode_query(query, scale, num_kv_heads=2)
    expected = qz.encode_kv(query, "fp8_e4m3", scale.repeat_interleave(3))
    assert codes_of(codes) == codes_of(expected)
    spread = scale.repeat_interleave(3).view(1, 6, 1)
    torch.testing.assert_close(qz.decode_query(codes, scale, 2), codes.float() * spread, rtol=0, atol=0)
    torch.testing.assert_close(qz.decode_query(query, None, 2), query, rtol=0, atol=0)


def test_powers_of_two_are_exact_at_every_exponent() -> None:
    for exponent in range(-126, 127):
        power = torch.tensor(2.0**exponent)
        below, above = torch.nextafter(power, torch.tensor(0.0)), torch.nextafter(power, torch.tensor(torch.inf))
        for x in (power, above, *([below] if exponent > -126 else [])):
            mantissa, e = math.frexp(x.item())
            expected = 2.0 ** (e - 1 if mantissa == 0.5 else e)
            assert qz.ceil_power_of_two(x).item() == expected, x.item()
    assert qz.ceil_power_of_two(torch.tensor(torch.inf)) == torch.inf
    assert qz.ceil_power_of_two(torch.tensor(torch.nan)).isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_static_fp8_divides_in_fp32(dtype: torch.dtype) -> None:
    x, scale = (torch.randn(7, 24) * 3).to(dtype), torch.tensor([0.0113])
    quotient = x.float() / scale
    assert codes_of(qz.quant_fp8_static(x, scale)) == [nearest_code(q, "fp8_e4m3") for q in quotient.flatten().tolist()]
    assert qz.quant_fp8_static(x.t(), scale).is_contiguous()


@pytest.mark.parametrize("group_size", [32, 64, 128, 192])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_group_fp8_by_a_loop_over_groups(group_size: int, power_of_two: bool) -> None:
    x = torch.randn(5, 384) * torch.logspace(-3, 3, 5).unsqueeze(1)
    codes, scales = qz.quant_fp8_group(x, group_size, power_of_two)
    assert scales.shape == (5, 384 // group_size) and scales.dtype == torch.float32
    for row in range(5):
        for group in range(384 // group_size):
            part = x[row, group * group_size : (group + 1) * group_size]
            scale = part.abs().max() / 448.0
            if power_of_two:
                mantissa, e = math.frexp(scale.item())
                scale = torch.tensor(2.0 ** (e - 1 if mantissa == 0.5 else e))
            assert scales[row, group] == scale
            expected = [nearest_code(q, "fp8_e4m3") for q in (part / scale).tolist()]
            assert codes_of(codes[row, group * group_size : (group + 1) * group_size]) == expected


def test_per_token_is_one_group_of_the_whole_row() -> None:
    x = torch.randn(6, 40)
    codes, scales = qz.quant_fp8_per_token(x)
    expected_codes, expected_scales = qz.quant_fp8_group(x, 40)
    assert scales.shape == (6, 1)
    assert codes_of(codes) == codes_of(expected_codes)
    assert torch.equal(scales, expected_scales)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_column_major_scales_differ_in_strides_alone(rows: int) -> None:
    x = torch.randn(rows, 256)
    codes, scales = qz.quant_fp8_group(x, 64, False, True)
    plain_codes, plain_scales = qz.quant_fp8_group(x, 64, False, False)
    assert scales.stride() == (1, rows)
    assert plain_scales.stride() == (4, 1)
    assert torch.equal(scales, plain_scales)
    assert codes_of(codes) == codes_of(plain_codes)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_rows_of_zeros_and_tiny_rows_have_a_finite_scale(power_of_two: bool) -> None:
    x = torch.zeros(3, 64)
    x[1], x[2] = 1e-12, 1e-38
    codes, scales = qz.quant_fp8_group(x, 64, power_of_two)
    smallest = torch.tensor(qz.MIN_ABSMAX) / 448
    assert torch.equal(scales, (qz.ceil_power_of_two(smallest) if power_of_two else smallest).expand(3, 1))
    assert codes_of(codes[0]) == [0] * 64
    assert (codes.float() * scales - x).abs().max() <= qz.MIN_ABSMAX / 448


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_group_with_nan_or_infinity_dequantises_to_nan_and_no_other(bad: float, power_of_two: bool) -> None:
    x = torch.randn(2, 128)
    x[1, 3] = bad
    codes, scales = qz.quant_fp8_group(x, 64, power_of_two)
    decoded = codes.float().view(2, 2, 64) * scales.unsqueeze(-1)
    assert decoded[1, 0].isnan().all()
    assert decoded[0].isfinite().all() and decoded[1, 1].isfinite().all()


def test_every_e2m1_code_means_what_its_definition_says_and_survives() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = qz.decode_e2m1(codes)
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert values.tolist() == [value_of(code, "e2m1") for code in range(16)]
    assert values[8].signbit()
    assert torch.equal(qz.encode_e2m1(values), codes)


def test_e2m1_midpoints_saturation_and_nan() -> None:
    midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    assert qz.encode_e2m1(torch.tensor(midpoints)).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert qz.encode_e2m1(-torch.tensor(midpoints)).tolist() == [8, 10, 10, 12, 12, 14, 14]
    assert qz.encode_e2m1(torch.tensor([7.0, math.inf, -math.inf, math.nan, -math.nan])).tolist() == [7, 7, 15, 7, 7]


@given(values=st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=40))
def test_e2m1_takes_the_nearest_value(values: list[float]) -> None:
    assert qz.encode_e2m1(torch.tensor(values)).tolist() == [nearest_code(v, "e2m1") for v in values]


def test_the_even_column_is_the_low_nibble() -> None:
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert qz.pack_e2m1(codes).tolist() == [[0x21, 0x0F]]
    assert torch.equal(qz.unpack_e2m1(qz.pack_e2m1(codes)), codes)


@given(rows=st.integers(1, 300), columns=st.integers(1, 11))
def test_swizzle_puts_each_scale_at_its_byte_and_pads_with_zeros(rows: int, columns: int) -> None:
    scales = torch.randint(1, 126, (rows, columns), dtype=torch.uint8)
    swizzled = qz.swizzle_block_scales(scales.view(torch.float8_e4m3fn))
    column_tiles = -(-columns // 4)
    assert swizzled.shape == (-(-rows // 128) * 128, column_tiles * 4) and swizzled.is_contiguous()
    expected = torch.zeros(swizzled.numel(), dtype=torch.uint8)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * column_tiles + c // 4
            expected[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = scales[r, c]
    assert torch.equal(swizzled.view(torch.uint8).flatten(), expected)
    assert torch.equal(qz.unswizzle_block_scales(swizzled, rows, columns).view(torch.uint8), scales)


@pytest.mark.parametrize("scale", [1.0, 0.0037, 0.31])
def test_nvfp4_by_a_loop_over_groups(scale: float) -> None:
    x, s = torch.randn(3, 48) * torch.tensor([[0.1], [1.0], [10.0]]), torch.tensor([scale])
    packed, block_scales = qz.quant_nvfp4(x, s)
    assert packed.shape == (3, 24) and packed.dtype == torch.uint8
    assert block_scales.shape == (3, 3) and block_scales.dtype == torch.float8_e4m3fn
    codes = qz.unpack_e2m1(packed)
    for row in range(3):
        for group in range(3):
            part = x[row, group * 16 : group * 16 + 16]
            code = nearest_code(float(part.abs().max() / 6.0 / s), "fp8_e4m3")
            assert codes_of(block_scales[row, group]) == [code]
            step = torch.tensor(value_of(code, "fp8_e4m3")) * s
            expected = [nearest_code(q, "e2m1") for q in (part / step).tolist()]
            assert codes[row, group * 16 : group * 16 + 16].tolist() == expected
    decoded = qz.dequant_nvfp4(packed, block_scales, s)
    torch.testing.assert_close(
        decoded, qz.decode_e2m1(codes) * (block_scales.float() * s).repeat_interleave(16, 1), rtol=1e-6, atol=0
    )


def test_nvfp4_swizzled_differs_in_the_order_of_scales_alone() -> None:
    x, scale = torch.randn(130, 96), torch.tensor([0.0037])
    packed, scales = qz.quant_nvfp4(x, scale, True)
    plain_packed, plain_scales = qz.quant_nvfp4(x, scale, False)
    assert scales.shape == (256, 8)
    assert torch.equal(packed, plain_packed)
    assert codes_of(qz.unswizzle_block_scales(scales, 130, 6)) == codes_of(plain_scales)
    torch.testing.assert_close(
        qz.dequant_nvfp4(packed, scales, scale, True), qz.dequant_nvfp4(packed, plain_scales, scale), rtol=0, atol=0
    )


def test_nvfp4_groups_of_zeros_underflow_overflow_and_nan() -> None:
    x = torch.zeros(5, 16)
    x[1] = 2.0**-12  # block scale below half the smallest e4m3 subnormal: rounds to zero
    x[2, 0], x[2, 1] = math.inf, 448.0
    x[3] = 1e9
    x[4, 5] = math.nan
    packed, scales = qz.quant_nvfp4(x, torch.tensor([1.0]))
    decoded = qz.dequant_nvfp4(packed, scales, torch.tensor([1.0]))
    assert scales.float().flatten()[:4].tolist() == [0.0, 0.0, 448.0, 448.0]
    assert packed[:2].eq(0).all() and decoded[:2].eq(0).all()
    assert decoded[2, :3].tolist() == [6 * 448.0, 448.0, 0.0]
    assert decoded[3].eq(6 * 448.0).all()
    assert decoded[4].isnan().all()


def new_output(name: str, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    fmt = OUTPUT_FORMATS[name]
    return *poisoned_outputs(fmt, shape, torch.bfloat16), torch.tensor([0.0113]) if fmt.static_scale else None


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("shape", [(0, 4, 96), (1, 2, 64), (7, 4, 96), (130, 8, 16)], ids=str)
@pytest.mark.parametrize("name", list(OUTPUT_FORMATS))
def test_output_formats_write_everything_and_come_back(name: str, shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape).to(torch.bfloat16)
    output, scales, static = new_output(name, shape)
    qz.quantise_output(x, name, output, scales, static)
    decoded = qz.dequantise_output(output, name, scales, static)
    assert decoded.shape == shape and decoded.dtype == torch.float32
    assert scales is None or not scales.float().isnan().any()
    # Half a step of the widest mantissa gap, root mean square over a normal distribution: 3 bits give about 0.026, e2m1
    # with e4m3 block scales about 0.1; a wrong scale or order gives about 1.
    bound = 0.0 if name == "none" else 0.14 if "nvfp4" in name else 0.04
    assert relative_l2(decoded, x.float()) <= bound


WITH_FUNCTIONS = [f.name for f in OUTPUT_FORMATS.values() if f.container not in (None, torch.int8) and not f.exponents]


@pytest.mark.parametrize("name", WITH_FUNCTIONS)
def test_output_formats_agree_with_the_quantising_functions(name: str) -> None:
    shape, fmt = (7, 4, 96), OUTPUT_FORMATS[name]
    x = torch.randn(shape)
    output, scales, static = new_output(name, shape)
    qz.quantise_output(x, fmt, output, scales, static)
    rows = x.flatten(1)
    if static is None:
        group = rows.shape[1] if fmt.group_size < 0 else fmt.group_size
        codes, expected = qz.quant_fp8_group(rows, group, fmt.power_of_two, fmt.column_major)
    elif fmt.container is torch.uint8:
        codes, expected = qz.quant_nvfp4(rows, static, fmt.swizzled)
    else:
        codes, expected = qz.quant_fp8_static(rows, static), None
    assert codes_of(output) == codes_of(codes)
    assert (scales is None) == (expected is None)
    if scales is not None and expected is not None:
        assert codes_of(scales) == codes_of(expected)


@pytest.mark.parametrize(("name", "limit"), [("int8_per_token", 127), ("int8_per_token_full", 127.5)])
def test_int8_rows_are_maxima_over_127(name: str, limit: float) -> None:
    rows = torch.randn(9, 96)
    rows[1], rows[2, 5], rows[3, 4] = 0, torch.nan, torch.inf
    codes, scales = qz.quantise_rows(rows, OUTPUT_FORMATS[name])
    whole = rows.isfinite().all(1)
    wanted = rows[whole].abs().amax(1, keepdim=True).clamp(min=1e-10) / limit
    assert codes.dtype == torch.int8 and torch.equal(scales[whole], wanted)
    assert torch.equal(codes[whole], (rows[whole] / wanted).round().clamp(-128, 127).to(torch.int8))
    assert codes[0].int().abs().max() >= 127 and codes[2].eq(0).all()
    assert scales[2].isnan() and scales[3].isinf()
    assert qz.to_int8(torch.tensor([0.5, 1.5, -2.5, 126.5, 900.0, -900.0, torch.nan])).tolist() == [
        0, 2, -2, 126, 127, -128, 0
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["mxfp8_ceil", "mxfp8_floor"])
def test_mx_scales_are_powers_of_two_around_the_maximum(name: str) -> None:
    """Against powers that `math` finds, at the ends of what e8m0 and fp32 hold too."""
    largest = [448.0, 449.0, 447.0, 256.0, 255.0, 512.0, 1e-3, 3e38, 2.0**-118, 2.0**-119, 2.0**-130, 1e-40, 0.0]
    rows = torch.tensor(largest)[:, None] * torch.tensor([1.0, -0.5, 0.3, 0.0] * 8)
    codes, scales = qz.quantise_rows(rows, OUTPUT_FORMATS[name])
    assert scales.dtype == torch.uint8 and scales.shape == (len(largest), 1)
    for m, row, code, byte in zip(largest, rows, codes, scales.flatten().tolist(), strict=True):
        if name == "mxfp8_ceil":
            exponent = math.ceil(math.log2(m / 448)) if m else -127
        else:
            exponent = math.floor(math.log2(m)) - 8 if m else -127
        assert byte == max(exponent, -127) + 127, m
        if byte:
            step = 2.0 ** (byte - 127)
        else:
            step = 1.0 if name == "mxfp8_ceil" else 2.0**-126
        assert codes_of(code) == codes_of((row.double() / step).clamp(-448, 448).float().to(torch.float8_e4m3fn))
    for value, byte, finite in ((torch.nan, 255, 255), (torch.inf, 254, 247)):
        rows = torch.ones(1, 32)
        rows[0, 7] = value
        _, scales = qz.quantise_rows(rows, OUTPUT_FORMATS[name])
        assert scales.item() == (byte if name == "mxfp8_ceil" else finite)


@pytest.mark.parametrize("arithmetic", ["factor", "factor_inverse", "quotient", "quotient_inverse"])
@pytest.mark.parametrize("name", ["fp8_per_token", "fp8_group64", "int8_per_token"])
def test_factors_are_made_of_maxima(name: str, arithmetic: str) -> None:
    fmt = OUTPUT_FORMATS[name]
    rows = torch.randn(50, 128).bfloat16()
    rows[4] *= 1e-5
    codes, scales = qz.quantise_rows(rows, fmt, None, arithmetic, 1e-3, "maximum")
    groups = rows.float().view(50, -1, 64 if fmt.group_size > 0 else 128)
    largest = groups.abs().amax(-1).clamp(min=1e-3)
    factor = fmt.limit / largest  # Python's division multiplies the reciprocal
    if "quotient" in arithmetic:
        factor = torch.tensor(fmt.limit) / largest
    assert torch.equal(scales, 1 / factor if "inverse" in arithmetic else largest / fmt.limit)
    product = groups * factor.unsqueeze(-1)
    wanted = product.round().to(torch.int8) if name == "int8_per_token" else product.to(torch.float8_e4m3fn)
    assert codes_of(codes) == codes_of(wanted)


def _traced(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    rows = x.flatten(1)
    kv = qz.decode_kv(qz.encode_kv(x, "fp8_e5m2", scale), "fp8_e5m2", scale)
    query = qz.encode_query(x, scale, 2)
    return (
        kv,
        query,
        qz.quant_fp8_static(rows, scale),
        *qz.quant_fp8_per_token(rows),
        *qz.quant_fp8_group(rows, 64, True, True),
        *qz.quant_nvfp4(rows, scale, True),
    )


@pytest.mark.slow
def test_the_formats_compile_in_one_graph_and_give_the_same_bytes() -> None:
    compiled = torch.compile(_traced, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (2, 7):
        x, scale = torch.randn(tokens, 4, 96), torch.tensor([0.0113])
        for got, expected in zip(compiled(x, scale), _traced(x, scale), strict=True):
            assert got.stride() == expected.stride()
            assert codes_of(got) == codes_of(expected)
