"""What cached keys and values depend on beside their tokens: a model's weights, and the scales of its caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vattn.layers.mla.kv_b_proj import TensorState, tensor_state, weights_version

_OF_LAYERS = ("k_scale", "v_scale", "q_scale", "output_scale", "sinks", "alibi_slopes")
"""Buffers of a layer with a cache that decide what it stores, or what the layers behind it do."""

_OF_LINEARS = ("input_scale",)


class ModelState:
    """Notice that keys and values which a model stored before are not those that it would store now.

    Weights and scales are told by their identities and by how often torch has seen them change, without a look at their
    values. Scales that layers calculate themselves (`CacheConfig.calculate_kv_scales`) are written in every step, so
    that their values are read: this waits for the device, where the model has such layers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._state = (*self._now(), 0)

    @property
    def changes(self) -> int:
        """How many changes were seen."""
        return self._state[2]

    def look(self) -> None:
        """See whether the model has changed since the last look; calculating a scale first is no change."""
        (versions, values), (before, known, changes) = self._now(), self._state
        changed = versions != before
        changed |= any(old is not None and old != new for old, new in zip(known, values, strict=False))
        # At once: an interruption must not lose a change.
        self._state = (versions, values, changes + changed)

    def _now(self) -> tuple[tuple[TensorState, ...], list[tuple[float, ...] | None]]:
        parts: list[Any] = [part for part in self._model.modules() if part._buffers]
        layers = [part for part in parts if "kv_cache" in part._buffers]
        calculated = [layer for layer in layers if getattr(layer, "calculate_kv_scales", False)]
        # Layers that share a cache hold the scales of its owner too.
        written = {id(buffer) for layer in calculated for buffer in _present(layer, _OF_LAYERS[:3])}
        watched = [buffer for layer in layers for buffer in _present(layer, _OF_LAYERS) if id(buffer) not in written]
        watched += [buffer for part in parts for buffer in _present(part, _OF_LINEARS)]
        versions = (*weights_version(self._model), *(tensor_state(buffer) for buffer in watched))
        return versions, _values(calculated)


def _present(module: nn.Module, names: tuple[str, ...]) -> list[Tensor]:
    return [buffer for name in names if (buffer := module._buffers.get(name)) is not None]


def _values(layers: list[Any]) -> list[tuple[float, ...] | None]:
    """Return the scales of each layer, `None` for those that are not calculated yet; one copy from each device."""
    tensors = [[layer.scales_ready, *_present(layer, _OF_LAYERS[:3])] for layer in layers]
    pieces = [tensor.detach().reshape(-1).float() for each in tensors for tensor in each if not tensor.is_meta]
    if not pieces or len(pieces) != sum(map(len, tensors)):
        return [None] * len(layers)
    numbers = torch.cat([piece.to(pieces[0].device) for piece in pieces]).tolist()
    values: list[tuple[float, ...] | None] = []
    for ready, *scales in tensors:
        count = ready.numel() + sum(scale.numel() for scale in scales)
        own, numbers = numbers[:count], numbers[count:]
        values.append(tuple(own[ready.numel() :]) if all(own[: ready.numel()]) else None)
    return values
