"""Scales of one layer: where they come from, how they are calculated on the device, how often values clip.

A scale is an explicit decision: given, `"unit"`, or calculated once from the first real tokens. It lives on
the device once, as fp32 of 1 value or one per KV head, and has no Python twin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from vattn.config.typed import is_plain, typed
from vattn.errors import ConfigError, ScaleError
from vattn.quantization.formats import OUTPUT_FORMATS, QUERY_FORMATS

ScaleSource: TypeAlias = Tensor | float | Sequence[float] | str | None
"""A tensor or numbers (1 value or one per KV head), `"unit"`, or `None` for not given; `v_scale` also `"k_scale"`."""

HEADROOM = 2.0
"""A calculated scale leaves this factor between the largest value seen and the largest that can be stored: later tokens
exceed the first ones, and in a floating-point format a factor of two costs no precision until values go subnormal."""


@typed
@dataclass(frozen=True, eq=False)
class QuantConfig:
    """Say what one attention layer quantises and with which scales.

    Attributes:
        k_scale, v_scale: scales of a quantised KV cache; dequantised = stored * scale. A number, a tensor of 1 value or
            one per KV head, or `"unit"` for 1.0 on purpose, which every format takes: engines set it for all. A
            `v_scale` of `"k_scale"` is the key's, where there is one for both. `None` with a quantised cache needs
            `CacheConfig.calculate_kv_scales`.
        query_format: `"none"`, or `"fp8_e4m3"` to quantise the query before the op.
        q_scale: as `k_scale`, for the query.
        output_format: name in `vattn.quantization.formats.OUTPUT_FORMATS`; the layer then returns the quantised output,
            and its scales too if the format computes any.
        output_scale: the static FP8 scale or NVFP4 global scale, for formats that take one.
    """

    k_scale: ScaleSource = None
    v_scale: ScaleSource = None
    query_format: str = "none"
    q_scale: ScaleSource = None
    output_format: str = "none"
    output_scale: ScaleSource = None

    def __post_init__(self) -> None:
        for name, formats in (("query_format", QUERY_FORMATS), ("output_format", OUTPUT_FORMATS)):
            if getattr(self, name) not in formats:
                raise ConfigError(f"{name}={getattr(self, name)!r}", ", ".join(formats), "choose one of these names")
        static = OUTPUT_FORMATS[self.output_format].static_scale
        if (self.output_scale is not None) != static:
            raise ScaleError(
                f"output_scale {'given' if self.output_scale is not None else 'missing'} "
                f"with output_format={self.output_format!r}",
                "output_scale with fp8_static and nvfp4 formats, and only with them",
                "give a number, a tensor of one value, or 'unit'",
            )
        if isinstance(self.v_scale, str) and self.v_scale == "k_scale":
            object.__setattr__(self, "v_scale", self.k_scale)
        if self.q_scale is not None and self.query_format == "none":
            raise ScaleError("q_scale without query_format", "q_scale with an FP8 query", "set query_format='fp8_e4m3'")


def make_scale(name: str, source: ScaleSource, sizes: Sequence[int]) -> Tensor:
    """Return an fp32 1-D tensor from what a user gave.

    Raises:
        ScaleError: a word other than `"unit"`, a size not in `sizes`, or a value that is not positive and finite.
    """
    allowed = f"'unit' or {' or '.join(map(str, sizes))} positive value(s)"
    if isinstance(source, str):
        if source != "unit":
            raise ScaleError(f"{name}={source!r}", allowed, "write 'unit' if 1.0 is meant")
        return torch.ones(1, device="cpu")
    scale = as_numbers(source)
    if scale is None:
        raise ScaleError(f"{name}={source!r:.60}", allowed, "give numbers")
    scale = scale.reshape(-1)
    if scale.numel() not in sizes:
        fix = "give one value" if set(sizes) == {1} else "give one value, or one per KV head"
        raise ScaleError(f"{name} has {scale.numel()} values", allowed, fix)
    if scale.device.type != "meta" and not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise ScaleError(f"{name}={scale.tolist()}", allowed, "check the checkpoint's scales")
    return scale


def as_numbers(source: object) -> Tensor | None:
    """Return an fp32 copy of a plain tensor, a number or a list of numbers; `None` of anything else, bools among it.

    Numbers keep their values where modules are made on meta.
    """
    if isinstance(source, Tensor) and not is_plain(source):
        return None
    device = source.device if isinstance(source, Tensor) else "cpu"
    try:
        kind = torch.as_tensor(source, device=device).dtype
        if kind == torch.bool or kind.is_complex:
            return None
        return torch.as_tensor(source, dtype=torch.float32, device=device).detach().clone()
    except (TypeError, ValueError, RuntimeError):
        return None


def first_scale(values: Tensor, real: Tensor, old: Tensor, ready: Tensor, max_value: float) -> tuple[Tensor, Tensor]:
    """Return the scale from the real rows of `values` if none is ready, else `old`. On the device, without a sync.

    Rows of zeros decide nothing: they are stored as zeros under any scale, so the next step may still decide.

    Args:
        values: `[T, heads, width]`; rows of padding may hold anything. Infinities and NaN do not count.
        real: bool `[T]`, rows that count.
        old: fp32 `[1]`.
        ready: int32 `[1]`, 0 while no scale was calculated.
        max_value: largest stored magnitude.

    Returns:
        The scale, and int32 `[1]`: whether one is calculated now.
    """
    if values.shape[0] == 0:
        return old, ready
    sizes = values.detach().abs().float()
    largest = torch.where(real[:, None, None] & torch.isfinite(sizes), sizes, 0.0).amax()
    scale = largest * (HEADROOM / max_value)
    usable = (ready == 0) & (scale > 0)
    return torch.where(usable, scale, old), torch.where(usable, torch.ones_like(ready), ready)


def count_clipped(values: Tensor, real: Tensor, scale: Tensor, max_value: float) -> Tensor:
    """Return int64 `[2]`: how many real values exceed what the scale can store, and how many there are."""
    per_head = scale if scale.shape[0] == 1 else scale[:, None]
    clipped = (values.detach().abs().float() > per_head * max_value) & real[:, None, None]
    total = real.sum() * (values.shape[1] * values.shape[2])
    return torch.stack((clipped.sum(), total))


@typed
@contextmanager
def observe_clipping(model: nn.Module) -> Iterator[None]:
    """Count, while the block runs, how many keys and values exceed the range of their layer's scales.

    Counting adds two reductions per layer and compiles one graph more. Read the result with `clip_rates`.

    Raises:
        ConfigError: no module.
    """
    layers = [m for m in model.modules() if getattr(m, "clip_counts", None) is not None]
    for layer in layers:
        layer.clip_counts.zero_()  # type: ignore[operator,union-attr]
        layer.observing = True  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer.observing = False  # type: ignore[assignment]


@typed
def clip_rates(model: nn.Module) -> dict[str, dict[str, float]]:
    """Return the share of clipped keys and values per quantised layer since `observe_clipping` began. Synchronises.

    Returns:
        `{prefix: {"key": rate, "value": rate}}`; NaN for a layer that saw no real token.

    Raises:
        ConfigError: no module.
    """
    rates = {}
    for name, module in model.named_modules():
        counts = getattr(module, "clip_counts", None)
        if counts is None:
            continue
        (key_clipped, key_total), (value_clipped, value_total) = counts.tolist()
        rates[getattr(module, "prefix", "") or name] = {
            "key": key_clipped / key_total if key_total else float("nan"),
            "value": value_clipped / value_total if value_total else float("nan"),
        }
    return rates
