"""`audit`: what rounding keys, values and outputs costs, layer by layer: clipped values and drift of the logits."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vattn.calibration.calibrate import Calibration, as_calibration
from vattn.calibration.result_files import check_output, check_picture, figures, write_picture
from vattn.calibration.step_runner import TEXTS, StepRunner, cached_layers, checked_text
from vattn.config.keywords import known_keywords
from vattn.errors import ConfigError
from vattn.layers.base.paged_attention import CachedAttention
from vattn.layers.base.scales import QuantConfig, make_scale
from vattn.quantization.codecs import decode_kv, encode_kv, quant_fp8_static
from vattn.quantization.formats import FP8_E4M3_MAX, KV_FORMATS, resolve_kv_cache_dtype
from vattn.quantization.packed import decode_rows, encode_rows

ALL = "all layers"


@dataclass(frozen=True)
class AuditRow:
    """What it costs if one layer rounds its keys and values, and its output if requested.

    Attributes:
        layer: its prefix, or "all layers" where every layer does.
        keys_clipped, values_clipped: share of values beyond what their scale can store; NaN for formats with scales
            that follow the values.
        outputs_clipped: same of the output's values; NaN where outputs are not rounded.
        drift: relative L2 difference of the logits.
        worst: largest difference of a logit.
        top1: share of tokens with the same likeliest next token.
    """

    layer: str
    keys_clipped: float
    values_clipped: float
    outputs_clipped: float
    drift: float
    worst: float
    top1: float


@dataclass(frozen=True)
class Audit:
    """One row per layer and one for all of them together; prints as a table.

    Attributes:
        kv_cache_dtype: canonical name of the format.
        tokens: how many tokens were compared.
        rows: `AuditRow`s, the last for all layers.
        output_format: how outputs were rounded, `"none"` or `"fp8_static"`.
    """

    kv_cache_dtype: str
    tokens: int
    rows: tuple[AuditRow, ...]
    output_format: str = "none"

    @property
    def title(self) -> str:
        """What was rounded, in words."""
        return self.kv_cache_dtype + ("" if self.output_format == "none" else f", outputs {self.output_format}")

    def __str__(self) -> str:
        width = max(len(row.layer) for row in self.rows)
        lines = [f"{self.title}, {self.tokens} tokens"]
        lines.append(
            f"{'':{width}}  keys clipped  values clipped  outputs clipped  logit drift  worst logit  same top-1"
        )
        for row in self.rows:
            clipped = ["-" if math.isnan(x) else f"{x:.2%}" for x in _clip_rates(row)]
            lines.append(
                f"{row.layer:{width}}  {clipped[0]:>12}  {clipped[1]:>14}  {clipped[2]:>15}  {row.drift:>11.2e}  "
                f"{row.worst:>11.3f}  {row.top1:>10.2%}"
            )
        return "\n".join(lines)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw drift and clip rates by layer and write it to a file, of the kind that its suffix names (matplotlib).

        Raises:
            ConfigError: no path, a kind of file that matplotlib does not write, or a file that cannot be written.
        """
        check_picture(path, f"plot({path!r:.80})", "drift.png")
        check_output("plot to", Path(path))
        layers, places = self.rows[:-1], range(len(self.rows) - 1)
        figure = figures()(figsize=(max(5.0, 0.35 * len(layers) + 2), 5.0), layout="constrained")
        drift, clipped = figure.subplots(2, sharex=True)
        drift.bar(places, [row.drift for row in layers], color="tab:blue")
        drift.axhline(self.rows[-1].drift, color="tab:red", linestyle="--", label=ALL)
        drift.set(ylabel="relative change of the logits", title=self.title, yscale="log")
        drift.legend()
        rates = zip(*(_clip_rates(row) for row in layers), strict=True)
        for kind, marker, shares in zip(("keys", "values", "outputs"), "ov^", rates, strict=True):
            if not all(math.isnan(share) for share in shares):
                clipped.plot(places, [100 * share for share in shares], marker=marker, linestyle="", label=kind)
        if clipped.get_legend_handles_labels()[1]:
            clipped.legend()
        clipped.set(xlabel="layer", ylabel="clipped values, %")
        write_picture(figure, Path(path))


def _clip_rates(row: AuditRow) -> tuple[float, float, float]:
    return row.keys_clipped, row.values_clipped, row.outputs_clipped


@known_keywords({})
def audit(
    model: nn.Module,
    texts: Iterable[Sequence[int]],
    kv_cache_dtype: str = "fp8",
    calibration: Calibration | str | os.PathLike[str] = "unit",
    *,
    per_head: bool = False,
    output_format: str = "none",
) -> Audit:
    """Measure what a cache format would cost a model, by rounding keys and values as it would.

    Args:
        model: as for `vattn.calibrate`, with a cache that is not quantised.
        texts: token lists, each a request.
        kv_cache_dtype: the format to try.
        calibration: where scales come from, or its file; `"unit"`: scales of 1. Formats with scales beside the
            codes use it for outputs only.
        per_head: with a calibration, one scale per KV head.
        output_format: `"fp8_static"` rounds attention outputs too, by the calibration's scales, as a quantised output
            or an FP8 output projection would.

    Raises:
        ConfigError: a quantised cache, which would round twice; a format or text that cannot be used; a calibration
            that nothing is made of; a model that has no cache, is not on vattn or in training mode.

    It writes to the model's cache, so that a generator made on it refuses further steps.

    Example:
        >>> import torch, transformers, vattn
        >>> from vattn.integrations.transformers import enable
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
        >>> model = enable(transformers.LlamaForCausalLM(config).eval(), num_blocks=8)
        >>> found = vattn.audit(model, [[1, 2, 3, 4]], "fp8", vattn.calibrate(model, [[[1, 2, 3, 4]]]))
        >>> [row.layer for row in found.rows]
        ['model.layers.0.self_attn', 'model.layers.1.self_attn', 'all layers']
    """
    runner = StepRunner(model)
    layers = cached_layers(model)
    if not isinstance(texts, Iterable):
        raise ConfigError(f"texts={texts!r:.60}", "a list of texts", f"audit(model, {TEXTS}")
    checked = [checked_text(text, f"texts[{number}]", f"audit(model, {TEXTS}") for number, text in enumerate(texts)]
    if not checked:
        raise ConfigError("an audit of no text", "at least one text, a list of token ids", "pass some text")
    found = None if isinstance(calibration, str) and calibration == "unit" else as_calibration(calibration)
    if output_format not in ("none", "fp8_static"):
        raise ConfigError(f"output_format={output_format!r} of an audit", "none, fp8_static", "choose one of these")
    if output_format != "none" and found is None:
        raise ConfigError(f"an audit of {output_format} outputs without calibration", "both", "vattn.calibrate(...)")
    for prefix, layer in layers.items():
        stored = layer.config.kv_cache_dtype if layer.config is not None else ""
        if stored and stored != layer.config.dtype:  # type: ignore[union-attr]
            raise ConfigError(
                f"an audit of layer {prefix!r}, with a cache in {stored}",
                "a cache in the model's dtype",
                "build the model with CacheConfig(cache_dtype='auto')",
            )
    fmt = resolve_kv_cache_dtype(kv_cache_dtype, next(model.parameters()).dtype)
    scaled = KV_FORMATS[fmt].quantised
    if per_head and (found is None or not scaled):
        raise ConfigError(
            f"an audit of {fmt} with per_head"
            + (" and scales of 1" if scaled else ", which keeps its scales beside the codes"),
            "a calibration, and a format with given scales",
            "drop per_head",
        )
    if found is not None and not scaled and output_format == "none":
        raise ConfigError(
            f"an audit of {fmt} with a calibration", "formats with given scales, such as fp8, or outputs", "drop it"
        )
    roundings = {}
    for prefix, layer in layers.items():
        if found is not None:
            config = found.quant_config(prefix, cache_dtype=fmt, per_head=per_head, output_format=output_format)
        else:
            config = QuantConfig("unit", "unit") if scaled else QuantConfig()
        roundings[prefix] = _Rounding(layer, fmt, config)
    differences = {name: _Difference() for name in (*layers, ALL)}
    for text in checked:
        expected = [logits.float().clone() for logits in runner.logits(text)]
        for name, difference in differences.items():
            chosen = roundings.values() if name == ALL else [roundings[name]]
            with _rounded(chosen, count=name != ALL):
                for want, got in zip(expected, runner.logits(text), strict=True):
                    difference.add(want, got.float())
    rows = [difference.row(name, roundings.get(name)) for name, difference in differences.items()]
    return Audit(fmt, sum(map(len, checked)), tuple(rows), output_format)


class _Rounding:
    """Rounds the keys and values that a layer is called with, and its output where there is a scale for it."""

    def __init__(self, layer: CachedAttention, fmt: str, config: QuantConfig) -> None:
        self.layer, self.fmt = layer, fmt
        sources = {"k": config.k_scale, "v": config.v_scale, "output": config.output_scale}
        sizes = (1, layer.num_kv_heads)
        device = None if layer.kv_cache is None else layer.kv_cache.device
        *self.scales, self.output_scale = (
            None if source is None else make_scale(name, source, sizes).to(device) for name, source in sources.items()
        )
        self.counting = False
        self.clipped, self.total = [0, 0, 0], [0, 0, 0]

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        query, *pair = args
        return (query, *(self._round(which, values) for which, values in enumerate(pair[:2])), *pair[2:])

    def output(self, layer: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        """Round a layer's output; a forward hook."""
        assert self.output_scale is not None
        if self.counting:
            self._count(2, out, FP8_E4M3_MAX * self.output_scale)
        codes = quant_fp8_static(out.reshape(out.shape[0], -1), self.output_scale)
        return (codes.float() * self.output_scale).to(out.dtype).view(out.shape)

    def _count(self, which: int, values: Tensor, limit: Tensor) -> None:
        self.clipped[which] += int((values.abs().float() > limit).sum())
        self.total[which] += values.numel()

    def _round(self, which: int, values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        scale = self.scales[which]
        heads = values.reshape(values.shape[0], self.layer.num_kv_heads, -1)
        if self.counting and scale is not None:
            limit = KV_FORMATS[self.fmt].max_value * (scale if scale.numel() == 1 else scale[:, None])
            self._count(which, heads, limit)
        if KV_FORMATS[self.fmt].packed:
            codes, stored = encode_rows(heads, self.fmt, bool(which), scale)
            back = decode_rows(codes, stored, self.fmt, bool(which), heads.shape[-1], scale)
        else:
            back = decode_kv(encode_kv(heads, self.fmt, scale), self.fmt, scale)
        return back.to(values.dtype).view(values.shape)


@contextmanager
def _rounded(roundings: Any, count: bool) -> Iterator[None]:
    with ExitStack() as hooks:
        for rounding in roundings:
            rounding.counting = count
            hooks.enter_context(rounding.layer.register_forward_pre_hook(rounding))
            if rounding.output_scale is not None:
                hooks.enter_context(rounding.layer.register_forward_hook(rounding.output))
        yield


class _Difference:
    """How far logits are from those expected."""

    def __init__(self) -> None:
        self.squares = self.norm = self.worst = 0.0
        self.same = self.tokens = 0

    def add(self, want: Tensor, got: Tensor) -> None:
        change = got - want
        self.squares += float(change.double().square().sum())
        self.norm += float(want.double().square().sum())
        self.worst = max(self.worst, float(change.abs().max()))
        self.same += int((want.argmax(-1) == got.argmax(-1)).sum())
        self.tokens += want.shape[0]

    def row(self, name: str, rounding: _Rounding | None) -> AuditRow:
        counts = zip(rounding.clipped, rounding.total, strict=True) if rounding is not None else [(0, 0)] * 3
        keys, values, outputs = (clipped / total if total else math.nan for clipped, total in counts)
        drift = math.sqrt(self.squares / self.norm) if self.norm else 0.0
        return AuditRow(name, keys, values, outputs, drift, self.worst, self.same / max(1, self.tokens))
