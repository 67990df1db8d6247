"""`calibrate`: see what a model's queries, keys, values and attention outputs reach, and make scales of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vattn.context import forward_context
from vattn.errors import ConfigError, MissingPackageError, ScaleError
from vattn.formats import FP8_E4M3_MAX, KV_FORMATS, resolve_kv_cache_dtype
from vattn.layers.cached_attention import CachedAttention
from vattn.layers.scales import QuantConfig
from vattn.metadata_builder import AttentionMetadataBuilder

FILE_FORMAT = 1
KINDS = ("query", "key", "value", "output")
CHUNK = 512
"""Tokens of one step while observing."""

Batch = Sequence[Sequence[int]] | Tensor


@dataclass(frozen=True)
class Calibration:
    """The largest magnitudes that each layer has shown.

    Attributes:
        layers: by the layer's prefix, lists of floats under "query" and "output" (one per query head) and "key" and
            "value" (one per KV head).
        tokens: how many tokens were seen.

    Example:
        >>> import vattn
        >>> seen = {"query": [2.0, 3.0], "key": [4.48], "value": [8.96], "output": [1.0, 0.5]}
        >>> found = vattn.Calibration({"layers.0": seen}, tokens=100)
        >>> found.quant_config("layers.0", cache_dtype="fp8").v_scale
        tensor([0.0200])
    """

    layers: dict[str, dict[str, list[float]]]
    tokens: int

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
            ScaleError: a layer that was not seen, or that showed nothing but zeros.
        """
        if prefix not in self.layers:
            raise ScaleError(f"no calibration of layer {prefix!r}", ", ".join(self.layers), "calibrate this model")
        fmt = KV_FORMATS[resolve_kv_cache_dtype(cache_dtype, torch.bfloat16)]
        scales: dict[str, Any] = {}
        if fmt.quantised:
            for kind in ("key", "value"):
                scales[f"{kind[0]}_scale"] = self._scale(prefix, kind, fmt.max_value, per_head, margin)
        if query_format != "none":
            scales |= {
                "query_format": query_format,
                "q_scale": self._scale(prefix, "query", FP8_E4M3_MAX, False, margin),
            }
        if output_format == "fp8_static":
            scales["output_scale"] = self._scale(prefix, "output", FP8_E4M3_MAX, False, margin)
        return QuantConfig(**scales, output_format=output_format)

    def _scale(self, prefix: str, kind: str, largest: float, per_head: bool, margin: float) -> Tensor:
        seen = torch.tensor(self.layers[prefix][kind], dtype=torch.float32)
        top = (seen if per_head else seen.max()[None]) * margin
        scale = top / largest
        # Rounded up, so that the largest value itself is not clipped.
        scale = torch.where(scale * largest < top, scale.nextafter(torch.tensor(float("inf"))), scale)
        if not bool((scale > 0).all() and scale.isfinite().all()):
            raise ScaleError(
                f"layer {prefix!r} showed {kind} magnitudes of {seen.tolist()}", "positive and finite ones",
                "calibrate with text that reaches every head, or use one scale for all (per_head=False)",
            )  # fmt: skip
        return scale

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file, such as `vattn_scales.json` beside a checkpoint; an old one is replaced at once."""
        target = Path(path)
        fresh = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        content = {"format": FILE_FORMAT, "tokens": self.tokens, "layers": self.layers}
        fresh.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(fresh, target)

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
            if content["format"] != FILE_FORMAT:
                raise ValueError(f"format {content['format']}")
            return cls(layers, int(content["tokens"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ScaleError(
                f"calibration file {os.fspath(path)}: {type(error).__name__}: {error}",
                f"a file of Calibration.save, format {FILE_FORMAT}",
                "vattn.calibrate(model, batches).save(path)",
            ) from error


class _Seen:
    """Largest magnitudes of one layer, on the device."""

    def __init__(self, layer: CachedAttention) -> None:
        self.layer = layer
        self.largest: dict[str, Tensor] = {}

    def note(self, kind: str, values: Tensor | None) -> None:
        if values is None:
            return
        heads = self.layer.num_kv_heads if kind in ("key", "value") else self.layer.num_heads
        now = values.detach().reshape(values.shape[0], heads, -1).abs().float().amax(dim=(0, 2))
        self.largest[kind] = torch.maximum(self.largest[kind], now) if kind in self.largest else now


def cached_layers(model: nn.Module) -> dict[str, CachedAttention]:
    """Return the attention layers with a cache by prefix."""
    return {layer.prefix or name: layer for name, layer in model.named_modules() if isinstance(layer, CachedAttention)}


@contextmanager
def observing(model: nn.Module) -> Iterator[dict[str, _Seen]]:
    """Note the largest magnitudes of every attention layer with a cache while the block runs; by prefix.

    Hooks do it, so it works in eager steps and without padding rows. Nothing about the layers changes.
    """
    seen = {prefix: _Seen(layer) for prefix, layer in cached_layers(model).items()}
    handles = []

    def before(note: _Seen) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...]) -> None:
            for kind, values in zip(("query", "key", "value"), args, strict=False):
                note.note(kind, values)

        return hook

    def after(note: _Seen) -> Any:
        return lambda layer, args, out: note.note("output", out) if isinstance(out, Tensor) else None

    for note in seen.values():
        handles += [note.layer.register_forward_pre_hook(before(note)), note.layer.register_forward_hook(after(note))]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def calibrate(model: nn.Module, batches: Iterable[Batch], *, progress: bool = False) -> Calibration:
    """Run a model on sample text and return what its attention layers reach. Changes nothing about it but its cache.

    Args:
        model: with a bound cache; takes `(input_ids [T], positions [T])`, such as what
            `vattn.integrations.transformers.enable` returned. Not compiled: the layers are watched by hooks.
        batches: each a list of token lists, or an int tensor `[B, L]`; every text is a request of its own.
        progress: show a bar (needs tqdm).

    Raises:
        ConfigError: no layer with a cache, an empty text, or one that the cache cannot hold.
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
    runner, tokens = StepRunner(model), 0
    with observing(model) as seen:
        if not seen:
            raise ConfigError("a model without attention layers that have a cache", "one with", "see vattn.Attention")
        for batch in _shown(batches, progress):
            for text in batch.tolist() if isinstance(batch, Tensor) else batch:
                for _ in runner.logits(list(text)):
                    pass
                tokens += len(text)
        layers = {
            prefix: {kind: note.largest[kind].tolist() for kind in note.largest}
            for prefix, note in seen.items()
            if set(note.largest) == set(KINDS)
        }
    if not layers:
        raise ScaleError("no layer was called", "batches with at least one token", "pass some text")
    return Calibration(layers, tokens)


class StepRunner:
    """Run one text at a time through a model, in chunks on the first blocks of its cache, eagerly."""

    def __init__(self, model: nn.Module, chunk: int = CHUNK) -> None:
        self.model, self.chunk = model, chunk
        layers = [layer for layer in cached_layers(model).values() if layer.config is not None]
        if not layers:
            raise ConfigError(
                f"{type(model).__name__} without a bound KV cache",
                "attention layers with one",
                "call vattn.allocate_kv_cache(model, ...) first",
            )
        config, cache = layers[0].config, layers[0].kv_cache
        assert config is not None and cache is not None
        probe = AttentionMetadataBuilder(1, 1, 1, config.block_size, cache.device, layers=model)
        assert probe.num_blocks is not None
        self.capacity = (probe.num_blocks - 1) * config.block_size
        self.device = cache.device
        self.builder = AttentionMetadataBuilder(
            2, max(2, chunk), self.capacity, config.block_size, self.device, layers=model
        )
        self.blocks = list(range(1, probe.num_blocks))

    @torch.no_grad()
    def logits(self, text: list[int]) -> Iterator[Tensor]:
        """Yield the logits `[n, vocab_size]` of a text, chunk by chunk.

        Raises:
            ConfigError: an empty text, or one that the cache cannot hold.
        """
        if not 0 < len(text) <= self.capacity:
            raise ConfigError(
                f"a text of {len(text)} tokens", f"1 to {self.capacity}, what the cache holds", "cut the text"
            )
        for start in range(0, len(text), self.chunk):
            ids = text[start : start + self.chunk]
            step = self.builder.build([len(ids)], [start + len(ids)], [self.blocks])
            with forward_context(step):
                yield self.model(torch.tensor(ids, device=self.device), step.positions)


def _shown(batches: Iterable[Batch], progress: bool) -> Iterable[Batch]:
    if not progress:
        return batches
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise MissingPackageError("progress=True without tqdm", "tqdm", "pip install tqdm") from error
    return tqdm(batches, unit="batch")
