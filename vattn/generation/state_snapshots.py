"""`StateSnapshots`: copies of requests' states at the ends of blocks, found by the tokens before them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import torch

from vattn.cache.state_cache import StateCache
from vattn.errors import CacheError


class StateSnapshots:
    """Keep copies of states, each under a name for all tokens before it; the least recently used is evicted.

    Copies run on the current stream, between the steps that were launched before and after.

    Args:
        states: of the running requests.
        count: how many copies there is room for.

    Raises:
        CacheError: more than the device has free.
    """

    def __init__(self, states: StateCache, count: int) -> None:
        self.num_snapshots = count
        try:
            with torch.inference_mode(False):
                self._tensors = [
                    (tensor, tensor.new_zeros((count, *tensor.shape[1:])))
                    for tensors in states.layers.values()
                    for tensor in tensors
                ]
        except RuntimeError as error:
            raise CacheError(
                f"state_snapshots={count}, which could not be allocated: {str(error).splitlines()[0]}",
                "what the device has free",
                "pass a smaller number, or give the cache less memory",
            ) from error
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self._places: OrderedDict[str, int] = OrderedDict()
        self._free = list(range(self.num_snapshots))

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __len__(self) -> int:
        return len(self._places)

    def save(self, name: str, slot: int) -> None:
        """Copy the state of a slot, unless there is a copy of this name."""
        if name not in self._places:
            self._places[name] = self._free.pop() if self._free else self._places.popitem(last=False)[1]
            for tensor, kept in self._tensors:
                kept[self._places[name]].copy_(tensor[slot])
        self._places.move_to_end(name)

    def load(self, name: str, slot: int) -> None:
        """Copy a state to a slot."""
        self._places.move_to_end(name)
        for tensor, kept in self._tensors:
            tensor[slot].copy_(kept[self._places[name]])

    def forget(self, names: Iterable[str]) -> None:
        """Drop the copies of these names, if there are any."""
        for name in names:
            if name in self._places:
                self._free.append(self._places.pop(name))
