"""Scales of FP8 multimodal encoders: from a file, or from the largest values of the last steps; and that file.

The file is JSON, one entry per layer: `{"layer": {"q": 0.01, "k": 0.02, "v": 0.01}}`. `q_scale` is another spelling of
`q`, and the entries may lie under a key `"layers"` next to other keys.
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vattn.config.files import write_whole
from vattn.config.typed import typed
from vattn.errors import ConfigError, ScaleError, VattnError
from vattn.quantization.codecs import MIN_ABSMAX
from vattn.quantization.formats import FP8_E4M3_MAX

HISTORY_STEPS = 16
"""A dynamic scale is decided by the largest values of this many steps, the current one included."""

_TENSORS = ("q", "k", "v")
_FORMAT = '{"layer": {"q": 0.01, "k": 0.02, "v": 0.01}, ...}'
_SMALLEST = 2.0**-126
"""The smallest normal fp32 number: below it, quotients by a scale lose digits or overflow."""


@dataclass(frozen=True)
class EncoderFP8Config:
    """Run a multimodal encoder's attention on FP8 queries, keys and values; say where their scales come from.

    Attributes:
        scale_path: a JSON file of scales by layer, read when the layer is made. A scale of exactly 1 is a plain cast.
        dynamic: scales from the largest values of the last 16 steps, kept on the device. Exactly one of the two.

    Raises:
        ConfigError: both or neither.

    Example:
        >>> import vattn
        >>> vattn.EncoderFP8Config(dynamic=True)
        EncoderFP8Config(scale_path=None, dynamic=True)
    """

    scale_path: str | os.PathLike[str] | None = None
    dynamic: bool = False

    def __post_init__(self) -> None:
        path, dynamic = self.scale_path, self.dynamic
        if dynamic is not (path is None) or not isinstance(path, (str, os.PathLike, type(None))):
            raise ConfigError(
                f"EncoderFP8Config with scale_path={path!r} and dynamic={dynamic!r}",
                "a path, or dynamic=True",
                "EncoderFP8Config(dynamic=True) first, and the file that save_encoder_scales makes later",
            )


def read_encoder_scales(path: str | os.PathLike[str]) -> dict[str, dict[str, float]]:
    """Read a file of encoder scales, all of it checked.

    Returns:
        `{layer: {"q": scale, "k": scale, "v": scale}}`.

    Raises:
        ScaleError: the file is missing or torn, holds something else, or a scale that is not positive and finite.
    """
    where = f"scale file {path!r:.80}"
    if not isinstance(path, (str, os.PathLike)):
        raise ScaleError(where, "a path", "name the file that save_encoder_scales wrote")
    where = f"scale file {os.fspath(path)!r}"
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ScaleError(f"{where} cannot be read: {error.strerror}", "a JSON file", "check scale_path") from error
    except (ValueError, RecursionError) as error:
        raise ScaleError(f"{where} is no whole JSON file: {error}", _FORMAT, "save the scales again") from error
    layers = data.get("layers") if isinstance(data, dict) else None
    nested = isinstance(layers, dict) and all(isinstance(entry, dict) for entry in layers.values())
    entries = layers if nested else data
    if not isinstance(entries, dict) or not entries:
        raise ScaleError(f"{where} holds no scales by layer", _FORMAT, "check that it is a file of encoder scales")
    return {name: _read_entry(f"{where}, layer {name!r}", entry) for name, entry in entries.items()}


def _read_entry(where: str, entry: Any) -> dict[str, float]:
    """Return one layer's scales by the short names."""
    names = [name.removesuffix("_scale") for name in entry] if isinstance(entry, dict) else []
    if sorted(names) != sorted(_TENSORS):
        got = ", ".join(map(repr, entry)) if isinstance(entry, dict) else repr(entry)
        raise ScaleError(f"{where} has {got or 'nothing'}", "'q', 'k' and 'v'", "check that it is a file of scales")
    for name, scale in entry.items():
        number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
        if not number or not _SMALLEST <= scale <= torch.finfo(torch.float32).max:
            raise ScaleError(f"{where}: {name}={scale!r}", "a positive finite fp32 number", "save the scales again")
    return dict(zip(names, map(float, entry.values()), strict=True))


def scales_of_layer(path: str | os.PathLike[str], prefix: str) -> dict[str, float]:
    """Return one layer's scales from a file.

    Raises:
        ScaleError: as `read_encoder_scales`, and if the layer is not in the file.
    """
    entries = read_encoder_scales(path)
    if prefix not in entries:
        names = ", ".join(map(repr, list(entries)[:20])) + (", ..." if len(entries) > 20 else "")
        raise ScaleError(
            f"scale file {os.fspath(path)!r} has no layer {prefix!r}", f"one of {names}", "give the layer that prefix"
        )
    return entries[prefix]


def largest_value(tensor: Tensor, num_rows: Tensor | None) -> Tensor:
    """Return the largest magnitude in `[T, heads, width]`, fp32 `[]`. Infinities and NaN do not count.

    Args:
        num_rows: an integer `[]`: later rows do not count; `None`: all do.
    """
    if tensor.shape[0] == 0:
        return torch.zeros((), device=tensor.device)
    sizes = tensor.detach().abs()
    # Rows first: each is read in one piece, and padding is a mask of rows.
    rows = torch.where(sizes < torch.inf, sizes, 0.0).amax(dim=(1, 2))
    if num_rows is not None:
        rows = torch.where(torch.arange(tensor.shape[0], device=tensor.device) < num_rows, rows, 0.0)
    return rows.amax().float()


def record_amax(history: Tensor, steps: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Write a step's largest values into the history and return the scales of q, k and v, fp32 `[1]` each.

    A step in which one of the three tensors is all zeros decides nothing and is not counted: it is a dry run, as a
    rule. On the device and without a sync, so that a CUDA graph records the position as well.

    Args:
        history: fp32 `[16, 3]`; mutated.
        steps: int64 `[1]`, steps counted so far; mutated.
        amax: fp32 `[3]`, of this step.
    """
    counted = (amax > 0).all()
    row = torch.arange(HISTORY_STEPS, device=history.device) == steps % HISTORY_STEPS
    updated = torch.where((row & counted)[:, None], amax, history)
    largest = torch.maximum(updated.amax(dim=0), amax)
    history.copy_(updated)
    steps.add_(counted)
    query, key, value = (largest.clamp(min=MIN_ABSMAX) / FP8_E4M3_MAX).split(1)
    return query, key, value


@typed
def save_encoder_scales(model: nn.Module, path: str | os.PathLike[str], *, margin: float = 1.0) -> None:
    """Save the scales of every FP8 encoder layer of a model as a file for `EncoderFP8Config(scale_path=...)`.

    The file appears whole or not at all. Reads the histories on the host, so it synchronises. Layers with static scales
    keep theirs, without the margin.

    Args:
        model: holds `MMEncoderAttention` layers with `quant_config`, each with a `prefix` of its own.
        path: the file; an older one is replaced.
        margin: what dynamic scales are multiplied by, 1 or more: room for values larger than those of the last 16
            steps.

    Raises:
        ConfigError: no such layer, a layer without a prefix or with another's, a margin below 1, or a file that cannot
            be written; an older one is as it was.
        ScaleError: the history of some layer has not filled yet, or a scale times the margin leaves fp32; nothing is
            written.
    """
    layers = _layers_to_save(model, margin)
    short = {name: count for name, count in _steps_of(layers).items() if count < HISTORY_STEPS}
    if short:
        listed = ", ".join(f"{name!r} ({count})" for name, count in list(short.items())[:20])
        raise ScaleError(
            f"{len(short)} of {len(layers)} layers have seen fewer than {HISTORY_STEPS} steps: {listed}",
            f"{HISTORY_STEPS} steps with values in every layer",
            "run more inputs through the model, then save",
        )
    entries = {name: dict(zip(_TENSORS, _saved_scales(layer, margin), strict=True)) for name, layer in layers.items()}
    for name, entry in entries.items():
        if not all(_SMALLEST <= scale <= torch.finfo(torch.float32).max for scale in entry.values()):
            raise ScaleError(
                f"layer {name!r} has scales {entry} with margin={margin}",
                "positive finite fp32 numbers",
                "choose a smaller margin, or call reset_amax_history() and run more inputs",
            )
    content = {"format": "vattn encoder scales", "margin": margin, "layers": entries}
    write_whole(path, json.dumps(content, indent=1))


@typed
def save_encoder_scales_when_full(
    model: nn.Module, path: str | os.PathLike[str], *, margin: float = 1.0
) -> RemovableHandle:
    """Save a model's encoder scales once, after the call that fills the last layer's history.

    The 16th call of the model reads the layers' counters on the host, which synchronises. Where some layer has not run
    16 times by then, later calls read them again, at most every 16 calls. Replays of a CUDA graph do not call the
    model: use `save_encoder_scales` after them.

    Args:
        model, path, margin: as for `save_encoder_scales`. If the model is part of a compiled one, pass what
            `torch.compile` returned.

    Returns:
        A handle; `handle.remove()` cancels the saving.

    Raises:
        ConfigError: as `save_encoder_scales`; no layer with dynamic scales, or a folder that does not exist. Errors
            during later calls of the model are warnings, and saving is tried again 16 calls later.

    Example:
        >>> import os, tempfile, torch, vattn
        >>> fp8 = vattn.EncoderFP8Config(dynamic=True)
        >>> layer = vattn.MMEncoderAttention(num_heads=2, head_size=16, prefix="visual.0", quant_config=fp8)
        >>> path = os.path.join(tempfile.mkdtemp(), "scales.json")
        >>> _ = vattn.save_encoder_scales_when_full(layer, path, margin=1.25)
        >>> for _ in range(16):
        ...     _ = layer(*torch.randn(1, 9, 96).chunk(3, dim=-1))
        >>> list(vattn.read_encoder_scales(path))
        ['visual.0']
    """
    left = _missing_steps(_layers_to_save(model, margin))
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"{os.fspath(path)!r} in a folder that does not exist", "a folder", "make it first")

    @torch.compiler.disable(reason="pass save_encoder_scales_when_full what torch.compile returned")
    def after_call(*_: object) -> None:
        nonlocal left
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        left -= 1
        if left > 0:
            return
        try:
            left = _missing_steps(_layers_to_save(model, margin))
            if left == 0:
                left = HISTORY_STEPS
                save_encoder_scales(model, path, margin=margin)
                handle.remove()
        except VattnError as error:
            left = HISTORY_STEPS
            warnings.warn(f"encoder scales are not saved yet: {error}", stacklevel=2)

    handle = model.register_forward_hook(after_call)
    return handle


def _layers_to_save(model: nn.Module, margin: float) -> dict[str, Any]:
    """Return the FP8 encoder layers of a model by prefix; refuse a margin below 1, and what is no model."""
    if not isinstance(margin, (int, float)) or isinstance(margin, bool) or not 1 <= margin < float("inf"):
        raise ConfigError(f"margin={margin!r}", "a number from 1 up", "margin=1.0 for none")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"a model of type {type(model).__name__}", "an nn.Module", "pass the model itself")
    return _fp8_layers(model)


def _steps_of(layers: dict[str, Any]) -> dict[str, int]:
    """Return how many steps each layer with dynamic scales has counted; synchronises."""
    return {name: int(layer.amax_steps) for name, layer in layers.items() if layer.amax_steps is not None}


def _missing_steps(layers: dict[str, Any]) -> int:
    """Return how many more steps fill the history of every layer, if each counts; synchronises."""
    steps = _steps_of(layers)
    if not steps:
        raise ConfigError(
            f"{len(layers)} encoder layers with static scales alone",
            "a layer with EncoderFP8Config(dynamic=True)",
            "save_encoder_scales writes static ones",
        )
    return max(0, HISTORY_STEPS - min(steps.values()))


def _fp8_layers(model: nn.Module) -> dict[str, Any]:
    """Return the FP8 encoder layers of a model by prefix."""
    found: dict[str, Any] = {}
    for path, layer in model.named_modules():
        if not isinstance(getattr(layer, "quant_config", None), EncoderFP8Config):
            continue
        name = str(getattr(layer, "prefix", ""))
        if not name or name in found:
            raise ConfigError(
                f"encoder layer at {path!r} has prefix {name!r}",
                "a prefix that no other layer has",
                "pass prefix= when the layer is made; the file is read by it",
            )
        found[name] = layer
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no encoder layer in FP8",
            "MMEncoderAttention layers with quant_config=EncoderFP8Config(...)",
            "pass the model that holds them",
        )
    return found


def _saved_scales(layer: Any, margin: float) -> list[float]:
    if layer.amax_history is None:
        return [float(getattr(layer, f"{name}_scale")) for name in _TENSORS]
    largest = layer.amax_history.amax(dim=0).double().clamp(min=MIN_ABSMAX) * margin / FP8_E4M3_MAX
    return [float(scale) for scale in largest.cpu()]
