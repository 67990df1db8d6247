"""`StateCache`: what layers keep of a request besides keys and values, such as those of Mamba and of linear attention.

A state has the same size however long its request is. Each running request has one slot, in every state layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vattn.config.arguments import format_bytes, parse_bytes, read_count
from vattn.errors import CacheError, ConfigError

MAX_NUM_REQS = 64
"""Slots for requests by default, as many as `vattn.Generator` runs at once."""


@dataclass(frozen=True)
class StateSpec:
    """One tensor of the state that a layer keeps for a request: its shape without requests, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes for one request."""
        return math.prod(self.shape) * self.dtype.itemsize


class StateLayer(Protocol):
    """What `allocate_kv_cache` looks for in a model: any module with these methods.

    Attributes:
        num_state_slots: requests that the bound tensors hold.
    """

    num_state_slots: int

    def get_state_specs(self) -> tuple[StateSpec, ...]:
        """Return the tensors that the layer keeps for a request."""

    def bind_states(self, tensors: tuple[Tensor, ...], /) -> None:
        """Take one tensor `[num_slots + 2, *shape]` for each of them."""


@dataclass(frozen=True)
class StateCache:
    """The states of all requests, in every layer that keeps one.

    Attributes:
        num_slots: requests that have a state at once, in slots 1 to `num_slots`. Slot 0 is that of padding, and the
            slot after the last one holds zeros, the state of a request that begins.
        layers: the tensors of each layer, `[num_slots + 2, *shape]`, by the name of the layer.
    """

    num_slots: int
    layers: dict[str, tuple[Tensor, ...]] = field(repr=False)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensors in self.layers.values() for tensor in tensors)

    def __str__(self) -> str:
        rows = self.num_slots + 2
        return (
            f"  states of {self.num_slots} requests in {len(self.layers)} layers: {format_bytes(self.total_bytes)} "
            f"({format_bytes(self.total_bytes // rows)} a request)"
        )


def find_state_layers(model: nn.Module, max_num_reqs: int | None) -> tuple[dict[str, StateLayer], int]:
    """Return the state layers of a model by their path, and how many requests they are to hold.

    Raises:
        ConfigError: `max_num_reqs` is no count, or given for a model without such layers.
    """
    found: dict[str, Any] = {name: part for name, part in model.named_modules() if hasattr(part, "bind_states")}
    if max_num_reqs is None:
        return found, MAX_NUM_REQS if found else 0
    count = read_count("max_num_reqs", max_num_reqs, 1, "pass how many requests run at once")
    if not found:
        raise ConfigError(
            f"max_num_reqs={count} for {type(model).__name__}, which keeps no state for a request",
            "None",
            "leave max_num_reqs out; blocks of the KV cache are not bound to a number of requests",
        )
    return found, count


def memory_for_blocks(memory: int | str | None, layers: dict[str, StateLayer], num_slots: int) -> int | str | None:
    """Return what is left of a budget after the states.

    Raises:
        CacheError: nothing.
    """
    if memory is None or not layers:
        return memory
    budget = parse_bytes(memory)
    one = sum(spec.num_bytes for layer in layers.values() for spec in layer.get_state_specs())
    if budget <= (num_slots + 2) * one:
        raise CacheError(
            f"memory={memory!r} is {budget} bytes, and the states of {num_slots} requests take {(num_slots + 2) * one}",
            f"more than that; {3 * one} bytes for the state of one request",
            f"give more memory, or a smaller max_num_reqs than {num_slots}",
        )
    return budget - (num_slots + 2) * one


def allocate_states(layers: dict[str, StateLayer], num_slots: int, device: torch.device) -> StateCache | None:
    """Allocate and bind the states of layers; `None` without layers.

    Raises:
        CacheError: more than the device has free.
    """
    if not layers:
        return None
    made: dict[str, tuple[Tensor, ...]] = {}
    try:
        # Tensors made in inference mode could not be updated outside of it.
        with torch.inference_mode(False):
            for name, layer in layers.items():
                made[name] = tuple(
                    torch.zeros((num_slots + 2, *spec.shape), dtype=spec.dtype, device=device)
                    for spec in layer.get_state_specs()
                )
    except RuntimeError as error:
        raise CacheError(
            f"the states of {num_slots} requests could not be allocated on {device}: {str(error).splitlines()[0]}",
            "what the device has free",
            "pass a smaller max_num_reqs",
        ) from error
    for name, layer in layers.items():
        layer.bind_states(made[name])
    return StateCache(num_slots, made)
