"""`StepRunner`: run texts through a model on the first blocks of its cache, to observe or compare it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vattn.cache.bindings import take_cache
from vattn.cache.layout import CACHE_BUFFERS
from vattn.calibration.eval_mode import EvalMode
from vattn.errors import ConfigError
from vattn.layers.base.paged_attention import CachedAttention
from vattn.layers.mla.mla_attention import MLAAttention
from vattn.metadata.builder import AttentionMetadataBuilder
from vattn.metadata.forward_context import forward_context

CHUNK = 512
"""Tokens of one step while observing."""

TEXTS = "[[1, 2, 3], [4, 5]]): a list of texts, each a list of token ids"
NESTING = "calibrate(model, [[[1, 2, 3], [4, 5]]]): a list of batches, each a list of texts, each a list of token ids"


class StepRunner:
    """Run one text at a time through a model, in chunks on the first blocks of its cache, eagerly."""

    def __init__(self, model: nn.Module, chunk: int = CHUNK) -> None:
        self.model, self.chunk = model, chunk
        if not isinstance(model, nn.Module):
            raise ConfigError(f"{type(model).__name__} for a model", "an nn.Module", "pass the model first")
        layers = [layer for layer in cached_layers(model).values() if layer.config is not None]
        if not layers or "_vattn_packed" in model.__dict__:
            raise _no_cache(model)
        EvalMode(model).check("magnitudes of ")
        if any(layer.kv_cache_group is not None for layer in layers):
            raise ConfigError(
                f"{type(model).__name__} with a cache of groups",
                "a cache that all layers read by one block table",
                "allocate it without hybrid=True, and with groups afterwards",
            )
        if any(hasattr(part, "bind_states") for part in model.modules()):
            raise ConfigError(
                f"{type(model).__name__}, which keeps a state for each request",
                "models in which keys and values are all that is kept",
                "give an FP8 cache its scales by QuantConfig(k_scale=..., v_scale=...)",
            )
        if getattr(model, "max_encoder_len", 0):
            raise ConfigError(
                f"{type(model).__name__}, an encoder-decoder model", "decoders", "keep its cache in the model's dtype"
            )
        config, cache = layers[0].config, layers[0].kv_cache
        assert config is not None and cache is not None
        probe = AttentionMetadataBuilder(1, 1, 1, config.block_size, cache.device, layers=model)
        assert probe.num_blocks is not None
        self.capacity = (probe.num_blocks - 1) * config.block_size
        self.device = cache.device
        held = [layer._buffers.get(name) for layer in layers for name in CACHE_BUFFERS]
        self.storages = [cache for cache in held if cache is not None]
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
        size = getattr(self.model, "vocab_size", None)
        if isinstance(size, int) and max(text) >= size:
            raise ConfigError(f"token {max(text)}", f"0 to {size - 1}, the model's vocabulary", "check the tokenizer")
        for storage in self.storages:
            take_cache(storage)
        for start in range(0, len(text), self.chunk):
            ids = text[start : start + self.chunk]
            step = self.builder.build([len(ids)], [start + len(ids)], [self.blocks])
            with forward_context(step):
                yield self.model(torch.tensor(ids, device=self.device), step.positions)


def cached_layers(model: nn.Module) -> dict[str, CachedAttention]:
    """Return the attention layers with a cache by prefix."""
    return {layer.prefix or name: layer for name, layer in model.named_modules() if isinstance(layer, CachedAttention)}


def checked_text(text: Any, where: str, advice: str = NESTING) -> list[int]:
    """Return a text as a list of token ids; `advice` says how texts are passed.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(text, (str, bytes)):
        raise ConfigError(f"{where} is a text of characters", "a list of token ids", "call tokenizer.encode first")
    if isinstance(text, Tensor) and text.dim() == 1:
        text = text.tolist()
    if not isinstance(text, Sequence):
        raise ConfigError(f"{where} is {type(text).__name__} {text!r:.60}", "a list of token ids", advice)
    for token in text:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ConfigError(f"{where} holds {type(token).__name__} {token!r:.60}", "token ids from 0", advice)
    return list(text)


def _no_cache(model: nn.Module) -> ConfigError:
    if "_vattn_packed" in model.__dict__:
        return ConfigError(
            f"the {type(model).__name__} that enable() was called with", "what enable() returned", "pass that instead"
        )
    if callable(getattr(model, "prepare_inputs_for_generation", None)):
        return ConfigError(
            f"a {type(model).__name__} that is not on vattn",
            "a model on vattn, with a cache",
            "pass what vattn.integrations.transformers.enable(model, memory='1GiB') returns",
        )
    if any(isinstance(layer, MLAAttention) for layer in model.modules()):
        return ConfigError(
            f"a {type(model).__name__} with latent attention",
            "layers with keys and values of heads; the scale of a latent cache is given",
            "QuantConfig(k_scale=...), or a cache format with scales in its rows",
        )
    return ConfigError(
        f"{type(model).__name__} without a bound KV cache",
        "attention layers with one",
        "call vattn.allocate_kv_cache(model, ...) first",
    )
