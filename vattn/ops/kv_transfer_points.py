"""Which layer a cache belongs to: what the transfer ops look up when they are called.

An op knows tensors only. The layer is found by the address of its storage, which `KVTransfer` registers and keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vattn.errors import ConfigError, GraphContractError


class Listener(Protocol):
    """Who does the work of the ops."""

    def before_layer(self, point: TransferPoint) -> None:
        """Load the requested pages before the layer reads its cache."""

    def after_layer(self, point: TransferPoint) -> None:
        """Save the requested pages after the layer wrote its cache."""


@dataclass(eq=False)
class TransferPoint:
    """One layer's cache under a connector.

    Attributes:
        layer_name: its name in the allocation.
        kv_cache: the raw storage.
        key_cache, value_cache: its parts as the layer passes them to ops; the storage and `None` for packed formats.
        token: int64 `[1]` that saving marks as written, so that no compiler drops it.
        listener: called before and after the layer.
    """

    layer_name: str
    kv_cache: Tensor
    key_cache: Tensor
    value_cache: Tensor | None
    token: Tensor
    listener: Listener


_by_address: dict[int, TransferPoint] = {}
by_name: dict[str, TransferPoint | None] = {}
"""Points by layer name; `None` where two models have a layer of that name."""


def register(points: list[TransferPoint]) -> None:
    """Make the ops find these points.

    Raises:
        ConfigError: a cache has a connector already.
    """
    taken = [p.layer_name for p in points if p.kv_cache.data_ptr() in _by_address]
    if taken:
        raise ConfigError(
            f"the KV cache of layer {taken[0]!r} has a connector already",
            "one connector for a cache",
            "detach() the other KVTransfer first",
        )
    for point in points:
        _by_address[point.kv_cache.data_ptr()] = point
    _name_points()


def unregister(points: list[TransferPoint]) -> None:
    """Forget these points, and leave alone what another transfer has registered for the same caches since."""
    for point in points:
        address = point.kv_cache.data_ptr()
        if _by_address.get(address) is point:
            del _by_address[address]
    _name_points()


def _name_points() -> None:
    by_name.clear()
    for point in _by_address.values():
        by_name[point.layer_name] = None if point.layer_name in by_name else point


def find(key_cache: Tensor, op: str) -> TransferPoint:
    """Return the point of a cache.

    Raises:
        GraphContractError: the call is being captured in a CUDA graph, or the tensor is no registered cache.
    """
    if key_cache.is_cuda and torch.cuda.is_current_stream_capturing():
        raise GraphContractError(
            f"vattn::{op} inside the capture of a full CUDA graph: a replay would neither wait for nor save anything",
            "KV transfer in eager or compiled code, and between the graphs that torch.compile(mode='reduce-overhead') "
            "makes of the parts before and after it",
            "detach() the KVTransfer before capturing, or run the steps that transfer without the captured graph",
        )
    point = _by_address.get(key_cache.data_ptr())
    if point is None:
        raise GraphContractError(
            f"vattn::{op} got a tensor that is no KV cache with a connector: the cache was bound again, or the "
            "compiler copied it",
            "the storage that KVTransfer was made with",
            "make a new KVTransfer after allocating caches; compile with Inductor, which updates caches in place",
        )
    return point


def kv_transfer_wait(key_cache: Tensor) -> None:
    """What `vattn::kv_transfer_wait` does."""
    point = find(key_cache, "kv_transfer_wait")
    point.listener.before_layer(point)


def kv_transfer_save(key_cache: Tensor, token: Tensor) -> None:
    """What `vattn::kv_transfer_save` does."""
    point = find(key_cache, "kv_transfer_save")
    point.listener.after_layer(point)
