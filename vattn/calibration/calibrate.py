"""`calibrate`: observe the largest magnitudes in a model's attention and linear layers, and make scales of them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vattn.calibration.result_files import check_output
from vattn.calibration.step_runner import NESTING, StepRunner, cached_layers, checked_text
from vattn.config.arguments import check_switches
from vattn.config.files import write_whole
from vattn.config.keywords import known_keywords
from vattn.config.typed import typed, typed_on_error
from vattn.errors import ConfigError, MissingPackageError, ScaleError
from vattn.layers.base.paged_attention import CachedAttention
from vattn.layers.base.scales import QuantConfig
from vattn.layers.weight_parts import gather_heads, largest_of_ranks, ranks_of
from vattn.quantization.formats import FP8_E4M3_MAX, KV_FORMATS, resolve_kv_cache_dtype

FILE_FORMAT = 2
"""Of files; those of format 1 have no inputs of linear layers."""
KINDS = ("query", "key", "value", "output")

Batch = Sequence[Sequence[int]] | Tensor
_INTS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


@dataclass(frozen=True)
class Calibration:
    """The largest magnitudes that each layer has shown.

    Attributes:
        layers: by the layer's prefix, lists of floats under "query" and "output" (one per query head) and "key" and
            "value" (one per KV head).
        tokens: how many tokens were seen.
        inputs: by name of each linear layer, the largest magnitude of its input; empty without `linears=True`.

    Example:
        >>> import vattn
        >>> seen = {"query": [2.0, 3.0], "key": [4.48], "value": [8.96], "output": [1.0, 0.5]}
        >>> found = vattn.Calibration({"layers.0": seen}, tokens=100)
        >>> found.quant_config("layers.0", cache_dtype="fp8").v_scale
        tensor([0.0200])
    """

    layers: dict[str, dict[str, list[float]]]
    tokens: int
    inputs: dict[str, float] = field(default_factory=dict)

    @typed_on_error
    def input_scale(self, name: str, *, margin: float = 1.0) -> Tensor:
        """Return the fp32 scale `[1]` that an FP8 linear layer quantises its input with.

        Args:
            name: of the layer, as in the model's checkpoint.
            margin: above 1 leaves room for values beyond those seen.

        Raises:
            ScaleError: a layer that was not seen, or that showed nothing but zeros; a margin that is not above 0.
        """
        if name not in self.inputs:
            raise ScaleError(
                f"no calibration of the input of {name!r}",
                "layers that were seen: " + (", ".join([*self.inputs][:8]) or "none"),
                "vattn.calibrate(model, batches, linears=True)",
            )
        return _scale(f"the input of {name!r}", [self.inputs[name]], FP8_E4M3_MAX, False, margin)

    @typed_on_error
    def quant_config(
        self,
        prefix: str,
        *,
        cache_dtype: str = "fp8",
        per_head: bool = False,
        margin: float = 1.0,
        query_format: str = "none",
        output_format: str = "none",
    ) -> QuantConfig:
        """Return a layer's scales: largest magnitude, times `margin`, over the largest value of the format.

        Args:
            prefix: the layer's.
            cache_dtype: of `CacheConfig`; formats that keep scales beside the codes get none.
            per_head: one scale per KV head instead of one.
            margin: above 1 leaves room for values beyond those seen.
            query_format, output_format: as in `QuantConfig`, to get their static scales too.

        Raises:
            ConfigError: an unknown format.
            ScaleError: a layer that was not seen, or that showed nothing but zeros; a margin that is not above 0.
        """
        check_switches(per_head=per_head)
        if prefix not in self.layers:
            raise ScaleError(f"no calibration of layer {prefix!r}", ", ".join(self.layers), "calibrate this model")
        fmt = KV_FORMATS[resolve_kv_cache_dtype(cache_dtype, torch.bfloat16)]

        def scale(kind: str, largest: float = FP8_E4M3_MAX, per_head: bool = False) -> Tensor:
            return _scale(f"{kind} of layer {prefix!r}", self.layers[prefix][kind], largest, per_head, margin)

        return QuantConfig(
            k_scale=scale("key", fmt.max_value, per_head) if fmt.quantised else None,
            v_scale=scale("value", fmt.max_value, per_head) if fmt.quantised else None,
            query_format=query_format,
            q_scale=scale("query") if query_format != "none" else None,
            output_format=output_format,
            output_scale=scale("output") if output_format == "fp8_static" else None,
        )

    @typed
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file, such as `vattn_scales.json` beside a checkpoint; an old one is replaced at once.

        Raises:
            ConfigError: a file that cannot be written; nothing has changed.
        """
        target = Path(path)
        check_output("save to", target, replaced=True)
        content = {"format": FILE_FORMAT, "tokens": self.tokens, "layers": self.layers, "inputs": self.inputs}
        write_whole(target, json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read what `save` wrote.

        Raises:
            ScaleError: no such file, or not what `save` writes.
        """
        try:
            content = json.loads(Path(path).read_text())
            layers = {
                str(prefix): {kind: [float(x) for x in seen[kind]] for kind in KINDS}
                for prefix, seen in content["layers"].items()
            }
            if content["format"] not in range(1, FILE_FORMAT + 1):
                raise ValueError(f"format {content['format']}")
            inputs = {str(name): float(top) for name, top in content.get("inputs", {}).items()}
            return cls(layers, int(content["tokens"]), inputs)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ScaleError(
                f"calibration file {path}: {getattr(error, 'strerror', None) or f'{type(error).__name__}: {error}'}",
                f"a file of Calibration.save, format 1 to {FILE_FORMAT}",
                "vattn.calibrate(model, batches).save(path)",
            ) from error


def _scale(what: str, seen: list[float], largest: float, per_head: bool, margin: float) -> Tensor:
    if not isinstance(margin, Real) or isinstance(margin, bool) or not (0 < margin < math.inf):
        raise ScaleError(f"margin={margin!r:.60}", "a positive number, 1.0 for none", "margin=1.5 leaves room")
    tops = torch.tensor(seen, dtype=torch.float32)
    top = (tops if per_head else tops.max()[None]) * float(margin)
    scale = top / largest
    # Rounded up, so that the largest value itself is not clipped.
    scale = torch.where(scale * largest < top, scale.nextafter(torch.tensor(float("inf"))), scale)
    if not bool((scale > 0).all() and scale.isfinite().all()):
        fix = "calibrate with text that reaches it"
        if not all(math.isfinite(value) and value >= 0 for value in seen):
            fix = "calibrate again, with weights and texts whose values are finite"
        elif per_head and max(seen) > 0:
            fix = "calibrate with text that reaches every head, or use one scale for all: per_head=False here, "
            fix += "scales_per_head=False of enable()"
        raise ScaleError(f"{what} showed magnitudes of {seen}", "positive and finite ones", fix)
    return scale


def as_calibration(source: Any) -> Calibration:
    """Return a calibration, read from its file if a path is given.

    Raises:
        ConfigError: neither. ScaleError: see `Calibration.load`.
    """
    if isinstance(source, Calibration):
        return source
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(
            f"calibration={source!r}", "what vattn.calibrate returned, or the path of its file", "vattn.calibrate(...)"
        )
    return Calibration.load(source)


def _note(seen: dict[str, Tensor], kind: str, values: Tensor, heads: int) -> None:
    """Keep the largest magnitudes of each head, on the device."""
    now = values.detach().reshape(values.shape[0], heads, -1).abs().amax(dim=(0, 2)).float()
    seen[kind] = torch.maximum(seen[kind], now) if kind in seen else now


@contextmanager
def _observing(
    model: nn.Module, linears: dict[str, nn.Linear]
) -> Iterator[tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]]:
    """Note the largest magnitudes while the block runs.

    Hooks do it, so it works in eager steps and without padding rows. Nothing about the layers changes.

    Returns:
        Of every attention layer with a cache, by prefix and kind; of each linear layer's input, by name.
    """
    layers, inputs = cached_layers(model), dict[str, Tensor]()
    seen: dict[str, dict[str, Tensor]] = {prefix: {} for prefix in layers}

    def before(prefix: str) -> Any:
        def hook(layer: CachedAttention, args: tuple[Any, ...]) -> None:
            heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
            for kind, values, count in zip(KINDS, args, heads, strict=False):
                if values is not None:
                    _note(seen[prefix], kind, values, count)

        return hook

    def after(prefix: str) -> Any:
        return lambda layer, args, out: (
            _note(seen[prefix], "output", out, layer.num_heads) if isinstance(out, Tensor) else None
        )

    def into(name: str) -> Any:
        return lambda layer, args: _note(inputs, name, args[0], 1) if args[0].numel() else None

    with ExitStack() as hooks:
        for prefix, layer in layers.items():
            hooks.enter_context(layer.register_forward_pre_hook(before(prefix)))
            hooks.enter_context(layer.register_forward_hook(after(prefix)))
        for name, linear in linears.items():
            hooks.enter_context(linear.register_forward_pre_hook(into(name)))
        yield seen, inputs


def root_of(model: nn.Module) -> nn.Module:
    """Return the model that names of checkpoints and calibrations refer to: the one inside a `PackedModel`.

    Raises:
        ConfigError: no model.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"a model of type {type(model).__name__}",
            "a torch.nn.Module",
            "load it first, such as by transformers.AutoModelForCausalLM.from_pretrained(folder)",
        )
    inner = getattr(model, "wrapped", None)
    return inner if isinstance(inner, nn.Module) else model


def linears_of(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of a model by name."""
    return {name: module for name, module in root_of(model).named_modules() if isinstance(module, nn.Linear)}


@known_keywords({})
def calibrate(
    model: nn.Module, batches: Iterable[Batch], *, linears: bool = False, progress: bool = False
) -> Calibration:
    """Run a model on sample text and return what its attention layers reach. Changes nothing about it but its cache.

    Every rank of a sharded model calls it with the same text, and gets the calibration of the whole model.

    Args:
        model: with a bound cache; takes `(input_ids [T], positions [T])`, such as what
            `vattn.integrations.transformers.enable` returned. Not compiled: the layers are watched by hooks. Generators
            that were made on this cache refuse further steps: make a new one.
        batches: each a list of token lists, or an int tensor `[B, L]`; every text is a request of its own.
        linears: note the inputs of linear layers too, for `vattn.quantise_linears(model, "fp8_static", ...)`.
        progress: show a bar (needs tqdm).

    Raises:
        ConfigError: no layer with a cache, a cache of groups, latent attention, batches that are nested otherwise, an
            empty text, one that the cache cannot hold, or a model in training mode.
        ScaleError: nothing was seen.

    Example:
        >>> import torch, transformers, vattn
        >>> from vattn.integrations.transformers import enable
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
        >>> model = enable(transformers.LlamaForCausalLM(config).eval(), num_blocks=8)
        >>> found = vattn.calibrate(model, [[[1, 2, 3, 4], [5, 6]]])
        >>> found.tokens, len(found.layers)
        (6, 2)
    """
    check_switches(linears=linears, progress=progress)
    if isinstance(batches, (str, bytes)) or not isinstance(batches, Iterable):
        raise ConfigError(f"batches={batches!r:.60}", "a list of batches", NESTING)
    runner, tokens = StepRunner(model), 0
    with _observing(model, linears_of(model) if linears else {}) as (seen, inputs):
        for number, batch in enumerate(_shown(batches, progress)):
            for text in _texts(batch, f"batches[{number}]"):
                for _ in runner.logits(text):
                    pass
                tokens += len(text)
        _share(model, seen, inputs)
        layers = {
            prefix: {kind: largest.tolist() for kind, largest in kinds.items()}
            for prefix, kinds in seen.items()
            if set(kinds) == set(KINDS)
        }
    if not layers:
        raise ScaleError("no layer was called", "batches with at least one token", "pass some text")
    return Calibration(layers, tokens, {name: float(top) for name, top in inputs.items()})


def _share(model: nn.Module, seen: dict[str, dict[str, Tensor]], inputs: dict[str, Tensor]) -> None:
    """Give every rank the magnitudes of all ranks, for all heads."""
    group, stage = ranks_of(model), getattr(model, "stage", None)
    if stage is not None:
        from torch import distributed

        found: list[Any] = [None] * stage.size
        distributed.all_gather_object(found, (seen, inputs), group=stage.group)
        for layers, tops in found:
            seen.update(layers)
            inputs.update(tops)
    if group is None:
        return
    inputs.update({name: largest_of_ranks(top, group) for name, top in inputs.items()})
    config: Any = getattr(root_of(model), "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    wholes = dict.fromkeys(KINDS, getattr(text, "num_attention_heads", None))
    wholes |= dict.fromkeys(("key", "value"), getattr(text, "num_key_value_heads", None))
    for kinds in seen.values():
        for kind, top in kinds.items():
            whole = wholes[kind]
            kinds[kind] = gather_heads(top, whole if isinstance(whole, int) else len(top) * group.size(), group)


def _texts(batch: Any, where: str) -> list[list[int]]:
    """Return the texts of a batch.

    Raises:
        ConfigError: it holds something else than texts.
    """
    if isinstance(batch, Tensor) and (batch.dim() != 2 or batch.dtype not in _INTS):
        raise ConfigError(f"{where}: a tensor {tuple(batch.shape)} in {batch.dtype}", "ints [B, L]", NESTING)
    if isinstance(batch, (str, bytes)) or not isinstance(batch, Iterable):
        raise ConfigError(f"{where}={batch!r}", "a list of texts, each a list of token ids", NESTING)
    return [checked_text(text, f"{where}[{number}]") for number, text in enumerate(batch)]


def _shown(batches: Iterable[Batch], progress: bool) -> Iterable[Batch]:
    if not progress:
        return batches
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise MissingPackageError("progress=True without tqdm", "tqdm", "pip install tqdm") from error
    return tqdm(batches, unit="batch")
