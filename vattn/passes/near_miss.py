"""Says why a region is no quantiser that an attention call can be: which well-known one it is, and where it differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import Node

from vattn.passes.ops import MOVES, meaning
from vattn.passes.probe import NO_CLAMP, Sample
from vattn.passes.region import FP8_DTYPES, value
from vattn.passes.region_run import SATURATES, same_bits, unsaturated_cast
from vattn.quantization import codecs as quantization
from vattn.quantization.formats import FP4_E2M1_MAX, FP8_E4M3_MAX, INT8_MAX, INT8_RANGE, MX_GROUP_SIZE, NVFP4_GROUP_SIZE

Way = Callable[[Tensor, float, "float | None"], Tensor]
"""Codes of rows `[T, N]` under a static scale, or with a least value of computed scales."""

_E4M3 = torch.float8_e4m3fn


def _clamped(x: Tensor) -> Tensor:
    return x.clamp(-FP8_E4M3_MAX, FP8_E4M3_MAX).to(_E4M3)


def static_ways(dtype: torch.dtype | None) -> dict[str, Way]:
    """Return unsupported quantisers with a given scale, by the reason for the report.

    Args:
        dtype: that of the codes; `uint8`: two e2m1 values a byte.
    """
    if dtype == torch.uint8:
        return _nvfp4_ways()
    if dtype == torch.int8:
        given = "int8 with a given scale is no supported format; use one scale per token, or FP8"
        return {given: lambda rows, scale, _: quantization.to_int8(rows.float() / torch.tensor(scale))}

    def of_scale(quantise: Callable[[Tensor, Tensor], Tensor]) -> Way:
        return lambda rows, scale, _: quantise(rows.float(), torch.tensor(scale))

    limit = torch.tensor(FP8_E4M3_MAX)
    nan = "it makes numbers of NaN; output formats keep NaN, so that it is seen"
    unclamped = {
        NO_CLAMP: of_scale(lambda x, s: unsaturated_cast(x / s, _E4M3)),
        f"{NO_CLAMP} (with multiplication)": of_scale(lambda x, s: unsaturated_cast(x * s, _E4M3)),
    }
    return {
        **({} if SATURATES else unclamped),
        nan: of_scale(lambda x, s: _clamped((x / s).nan_to_num(0.0, FP8_E4M3_MAX, -FP8_E4M3_MAX))),
        f"{nan} ": of_scale(lambda x, s: torch.fmin(torch.fmax(x / s, -limit), limit).to(_E4M3)),
    }


_NVFP4_ROUNDS = "NVFP4, but {}, which rounds otherwise than the op does; write {}"
_NVFP4_ZEROS = (
    "NVFP4, but values under a block scale of zero are divided by {}; write torch.where(step == 0, inf, step)"
)


def _nvfp4_ways() -> dict[str, Way]:
    """Return ways to write NVFP4 that the op does not have, by the reason for the report."""

    def of(
        block: Callable[[Tensor, Tensor], Tensor] = lambda largest, s: largest / FP4_E2M1_MAX / s,
        scaled: Callable[[Tensor, Tensor, Tensor], Tensor] = _by_step,
        encode: Callable[[Tensor], Tensor] = quantization.encode_e2m1,
        pack: Callable[[Tensor], Tensor] = quantization.pack_e2m1,
    ) -> Way:
        def quantise(rows: Tensor, scale: float, _: float | None) -> Tensor:
            groups, given = rows.float().unflatten(-1, (-1, NVFP4_GROUP_SIZE)), torch.tensor(scale)
            blocks = _clamped(block(groups.abs().amax(-1, keepdim=True), given)).float()
            return pack(encode(scaled(groups, blocks, given)).flatten(1))

        return quantise

    least = torch.finfo(_E4M3).tiny
    library = "let torch.ops.vattn.quant_nvfp4 quantise"
    return {
        _NVFP4_ROUNDS.format("block scales are maximum / (6 * scale)", "maximum / 6 / scale"): of(
            lambda largest, s: largest / (FP4_E2M1_MAX * s)
        ),
        _NVFP4_ZEROS.format("zero"): of(scaled=lambda x, b, s: x / (b * s)),
        _NVFP4_ZEROS.format("a small number"): of(scaled=lambda x, b, s: x / (b * s).clamp(min=1e-30)),
        f"NVFP4 as torchao writes it, with a factor for each group and block scales of 2**-6 at least; {library}": of(
            lambda largest, s: (largest / FP4_E2M1_MAX / s).clamp(min=least),
            lambda x, b, s: x * ((1 / s) / b),
            lambda x: torch.where(x.isnan(), 4, quantization.encode_e2m1(x)).to(torch.uint8),
        ),
        f"NVFP4 as compressed-tensors writes it, maxima / 6 rounded to bf16 and zeros without signs; {library}": of(
            lambda largest, s: (largest.bfloat16() / 6).float() * s,
            lambda x, b, s: x / (torch.where(b == 0, torch.finfo(_E4M3).eps, b) / s) + 0.0,
            lambda x: torch.where(x.isnan(), 8 * x.signbit(), quantization.encode_e2m1(x)).to(torch.uint8),
        ),
        "NVFP4, but ties round away from zero; round them to even codes": of(encode=_ties_away),
        "NVFP4, but the odd column is in the low four bits; the op has the even one there": of(
            pack=lambda codes: codes[..., 1::2] | (codes[..., 0::2] << 4)
        ),
    }


def _by_step(x: Tensor, block: Tensor, scale: Tensor) -> Tensor:
    step = block * scale
    return x / torch.where(step == 0, torch.inf, step)


def _ties_away(x: Tensor) -> Tensor:
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    return (torch.bucketize(x.abs(), bounds, right=True) + 8 * x.signbit()).to(torch.uint8)


def _floored_maximum(x: Tensor, scale: Tensor) -> Tensor:
    largest = x.abs().amax(-1, keepdim=True)
    return torch.where(scale == largest / FP8_E4M3_MAX, largest, scale * FP8_E4M3_MAX)


def _by_inverse(x: Tensor, scale: Tensor) -> Tensor:
    return x / (FP8_E4M3_MAX / _floored_maximum(x, scale)).reciprocal()


def _by_product(x: Tensor, scale: Tensor) -> Tensor:
    return x * FP8_E4M3_MAX / _floored_maximum(x, scale)


def _by_rounded_reciprocal(x: Tensor, scale: Tensor) -> Tensor:
    largest = x.abs().amax(-1, keepdim=True).clamp(min=quantization.MIN_ABSMAX)
    return x / (largest * (1 / FP8_E4M3_MAX))


def _by_power_of_two(x: Tensor, scale: Tensor) -> Tensor:
    return x / quantization.ceil_power_of_two(scale)


def _grouped(size: int | None, by: Callable[[Tensor, Tensor], Tensor] = torch.div) -> Way:
    """Return the quantiser of groups of `size` values, by default of all, that scales a group with `by`."""

    def quantise(rows: Tensor, _: float, floor: float | None) -> Tensor:
        groups = rows.float().view(-1, size or rows.numel())
        least = quantization.MIN_ABSMAX / FP8_E4M3_MAX if floor is None else floor
        scale = (groups.abs().amax(-1, keepdim=True) / FP8_E4M3_MAX).clamp(min=least)
        return _clamped(by(groups, scale)).view(rows.shape)

    return quantise


def _added(size: int) -> Way:
    """Return the quantiser that adds a number to the scale: a floor, or a 448th of one."""

    def quantise(rows: Tensor, _: float, number: float | None) -> Tensor:
        groups = rows.float().view(-1, size)
        scale = groups.abs().amax(-1, keepdim=True) / FP8_E4M3_MAX + (number or 0.0)
        return _clamped(groups / scale).view(rows.shape)

    return quantise


def _integers(
    size: int | None, to_int8: Callable[[Tensor], Tensor] = quantization.to_int8, limit: float = INT8_MAX
) -> Way:
    """Return the int8 quantiser of groups of `size` values, of all if `None`."""

    def quantise(rows: Tensor, _: float, floor: float | None) -> Tensor:
        groups = rows.float().view(-1, size or rows.numel())
        scale = groups.abs().amax(-1, keepdim=True) / limit
        return to_int8(groups / scale.clamp(min=floor or 0.0)).view(rows.shape)

    return quantise


def _truncated(x: Tensor) -> Tensor:
    return x.nan_to_num(0.0).clamp(-128, 127).to(torch.int8)


def _int8_ways(columns: int) -> dict[str, Way]:
    """Return unsupported quantisers to int8 that compute their scales."""
    ways = {
        "int8, but values are truncated; round them with torch.round before the cast": _integers(columns, _truncated),
        "int8, but ties round away from zero; round them with torch.round": _integers(
            columns, lambda x: _truncated(x + torch.copysign(torch.tensor(0.5), x))
        ),
        "one dynamic scale for the whole tensor in int8 is no supported format; use one per token": _integers(None),
    }
    for size in (16, 32, 64, 128, 256, 512):
        if size != columns and columns % size == 0:
            for limit, of in ((INT8_MAX, ""), (INT8_RANGE / 2, " by maximum / 127.5")):
                why = f"groups of {size} columns in int8{of} are no supported format; use one scale per token"
                ways[why] = _integers(size, limit=limit)
    return ways


def _mx(power: Callable[[Tensor], Tensor]) -> Way:
    """Return the quantiser of groups of 32 columns that divides by the power of two made of their maxima."""

    def quantise(rows: Tensor, _scale: float, _floor: float | None) -> Tensor:
        groups = rows.float().view(-1, MX_GROUP_SIZE)
        largest = groups.abs().amax(-1, keepdim=True)
        exponent = ((power(largest).view(torch.int32) >> 23) - 8).clamp(min=1)
        step = (exponent << 23).view(torch.float32)
        return _clamped(groups / torch.where(largest.isnan(), torch.inf, step)).view(rows.shape)

    return quantise


_MX_ROUNDS = "MX, but scales are {}; round them down (FLOOR) or maximum / 448 up (RCEIL)"


def dynamic_ways(columns: int, dtype: torch.dtype | None) -> dict[str, Way]:
    """Return unsupported quantisers that compute their scales, for rows of so many columns and a dtype of codes."""
    if dtype == torch.int8:
        return _int8_ways(columns)
    ways = {
        "one dynamic scale for the whole tensor is no supported format; use one per token": _grouped(None),
        "powers of two as scales are supported for groups of 64 and 128 columns, not for whole tokens": _grouped(
            columns, _by_power_of_two
        ),
    }
    for size in (16, 32, 256, 512):
        if size != columns and columns % size == 0:
            ways[f"groups of {size} columns are no supported format; use 64 or 128"] = _grouped(size)
    if columns % MX_GROUP_SIZE == 0:
        # Half a unit of three mantissa bits is added.
        ways[_MX_ROUNDS.format("the power of two nearest to the maximum / 256 (EVEN)")] = _mx(
            lambda m: (m.view(torch.int32) + (1 << 19)).view(torch.float32)
        )
        ways[_MX_ROUNDS.format("maximum / 256 rounded up (CEIL)")] = _mx(quantization.ceil_power_of_two)
    for size in (columns, 128, 64):
        if columns % size == 0:
            one = f"one scale per {'token' if size == columns else f'group of {size}'}, but"
            ways[
                f"{one} divided by the reciprocal of 448 / maximum; multiply by 448 / maximum, or divide by maximum / "
                "448"
            ] = _grouped(size, _by_inverse)
            ways[
                f"{one} multiplied by 448 and then divided by the maximum, which rounds otherwise than the op does; "
                "divide by maximum / 448"
            ] = _grouped(size, _by_product)
            ways[f"{one} a number is added to the scale or the maximum; raise it by .clamp(min=...)"] = _added(size)
            ways[
                f"{one} the maximum is multiplied by 1 / 448, which rounds otherwise than the op does; divide it by 448"
            ] = _grouped(size, _by_rounded_reciprocal)
    return ways


_MAXIMA = frozenset({"extreme", "line", "norm"})
_SCALE_ARITHMETIC = frozenset("scaling inverse power limit choice sign fill".split()) | _MAXIMA


def first_difference(nodes: Sequence[Node], output: Node, seen: Sequence[Sample]) -> Node | None:
    """Return the first node that no quantiser has, or else the one that scales, `None` if there is neither.

    Values are followed from the output on: unchanged, then scaled once, then clamped, then cast; scales from a maximum
    on.

    Args:
        nodes: what makes the quantised tensor, in graph order, itself included.
        seen: some runs of them.
    """
    scaled: dict[Node, bool] = {output: False}
    scaling = None
    for node in nodes:
        made = seen[0].values[node]
        if not isinstance(made, Tensor):
            continue
        data = [source for source in node.all_input_nodes if source in scaled]
        if made.numel() < seen[0].rows.numel() / 8 or made.dtype == torch.bool or not data:
            if _is_odd_scale(node, made, bool(data), seen[0].rows):
                return node
            continue
        first, *others = data
        if meaning(node) == "scaling" and not scaled[first] and not others:
            scaled[node] = not same_bits(_values(seen[0], node), _values(seen[0], first))
            scaling = node if scaled[node] else scaling
        elif _is_step(node, first, seen):
            scaled[node] = scaled[first]
        else:
            return node
    return scaling


def _is_odd_scale(node: Node, made: Tensor, reduces: bool, rows: Tensor) -> bool:
    """Return whether a value smaller than the output is neither a maximum of rows or groups nor scale arithmetic."""
    does = meaning(node)
    if made.dtype == torch.bool or does in MOVES | {"cast"}:
        return False
    if not reduces:
        return does not in _SCALE_ARITHMETIC
    sizes = (rows.shape[1], 128, 64, MX_GROUP_SIZE, NVFP4_GROUP_SIZE)
    return does not in _MAXIMA or not any(made.numel() * size == rows.numel() for size in sizes)


def _values(sample: Sample, node: Node) -> Tensor:
    return sample.values[node].float().flatten()


def _is_step(node: Node, source: Node, seen: Sequence[Sample]) -> bool:
    """Return whether a node only moves, clamps, casts to FP8, or changes nothing about the values it reads."""
    val = value(node)
    if meaning(node) in MOVES | {"sign"}:
        return True
    if val.dtype in FP8_DTYPES:
        return val.dtype == torch.float8_e4m3fn
    if not val.is_floating_point():
        return True  # of packed values, which are judged as a whole

    def clamps(sample: Sample) -> bool:
        before, after = _values(sample, source), _values(sample, node)
        kept = (before.abs() <= FP8_E4M3_MAX) | before.isnan()
        return before.shape == after.shape and same_bits(after[kept], before[kept])

    return all(map(clamps, seen))
